"""Text that is tokenised while it is trained on: batches do not depend on how far that is."""

import json
import os
import signal
import time
import tracemalloc

import numpy as np
import pytest
from data_helpers import make_config, open_data, refuse_data, same, take, token_ids
from refusals import refused

from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import growing, held_out, sources, tokenizers
from efx.data.opened import OpenedTexts
from efx.errors import TransientError, UsageError
from efx.parallel.signals import STOPPING

TEXTS = [f"document {i}: " + " ".join(f"w{i}x{j}" for j in range(i % 17)) for i in range(120)]
HEAD_BYTES = 2000  # of the some 7000 bytes of TEXTS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small files, a small head, and no tokens ahead of those that training waits for."""
    monkeypatch.setattr(growing, "_FILE_TOKENS", 100)
    monkeypatch.setattr(growing, "_TOKENS_AHEAD", 0)
    monkeypatch.setattr(growing, "_POLL_SECONDS", 0.002)
    monkeypatch.setattr(held_out, "HEAD_BYTES", HEAD_BYTES)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def growing_config(tmp_path, texts=TEXTS, **changes):
    path = tmp_path / "text.jsonl"
    if not path.exists():
        write(path, texts)
    settings = {"text_key": "text", "split": "documents", "shuffle": "buffer", "seq_len": 16}
    return make_config(f"jsonl:{path}", tmp_path, **{**settings, **changes})


def documents(data, split):
    ids, eot = token_ids(data, split), data.tokenizer.eot
    ends = [i for i, one in enumerate(ids) if one == eot]
    edges = [-1, *ends, len(ids)]
    return [data.tokenizer.decode(ids[a + 1 : b]) for a, b in zip(edges, edges[1:], strict=False)]


def writer_of(data):
    """The process that tokenises."""
    return data._streams["train"]._writer


def place(ids, row):
    """Where a row occurs in a list of ids: once."""
    (found,) = [i for i in range(len(ids)) if ids[i : i + len(row)] == row]
    return found


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_training_begins_before_the_text_is_tokenised(tmp_path):
    """All of the text is trained on in its order, without the held-out documents of its head."""
    data = open_data(growing_config(tmp_path))
    first = next(data.train_iterator())
    assert data.grows and data.train_tokens < 1000
    trained = documents(data, "train")
    assert not data.grows and data.train_tokens > 6000
    heldout = documents(data, "eval")
    assert set(heldout) | set(trained) == set(TEXTS) and not set(heldout) & set(trained)
    assert trained == [text for text in TEXTS if text not in heldout]
    # They are of the head, a fourth of it.
    assert max(map(TEXTS.index, heldout)) < 45 and 300 < len("".join(heldout)) < 700
    ids = token_ids(data, "train")
    assert sorted(place(ids, row) for row in first["inputs"].tolist()) == [0, 16, 32, 48]


def test_every_block_and_every_seed_has_its_own_order(tmp_path):
    config, orders = growing_config(tmp_path, buffer_tokens=256), []  # blocks of 16 windows
    for seed in (3, 4):
        data = open_data(config, seed=seed)
        ids, batches = token_ids(data, "train"), take(data.train_iterator(), 20)
        windows = np.concatenate([batch["inputs"] for batch in batches])
        numbers = [place(ids, window.tolist()) // 16 for window in windows]
        orders += [tuple(number % 16 for number in numbers[i : i + 16]) for i in range(0, 80, 16)]
    assert all(sorted(order) == [*range(16)] for order in orders)
    assert len(set(orders)) == len(orders) == 10
    # The same in every version.
    assert orders[1] == (2, 14, 7, 12, 1, 15, 9, 11, 13, 4, 8, 6, 10, 0, 5, 3)


def test_batches_do_not_depend_on_interruptions_of_the_writer(tmp_path):
    (tmp_path / "other").mkdir()
    config = growing_config(tmp_path, buffer_tokens=700)  # some of seven files
    expected = take(open_data(config).train_iterator(), 240)  # two epochs and more
    config.cache_dir = str(tmp_path / "other")
    found, unfinished = [], 0
    for steps in (20, 30, 190):
        data = open_data(config)
        iterator = data.train_iterator(start_step=len(found))
        found += take(iterator, steps)
        unfinished += data.grows
        if steps == 20:
            os.kill(writer_of(data).pid, signal.SIGKILL)
        del data, iterator
    assert unfinished == 2
    for batch, other in zip(found, expected, strict=True):
        same(batch, other)
    two = open_data(config).train_iterator(start_step=7, rows=[1, 3])
    same(next(two), {k: v[[1, 3]] for k, v in expected[7].items()})


def test_two_runs_that_share_a_cache_do_not_wait_for_each_other(tmp_path):
    config = growing_config(tmp_path)
    one, two = (open_data(config).train_iterator() for _ in range(2))
    batches = [next(one)]
    batches_of_two = take(two, 60)
    batches += take(one, 79)
    batches_of_two += take(two, 20)
    for batch, other in zip(batches, batches_of_two, strict=True):
        same(batch, other)


def test_text_that_repeats_a_held_out_document_is_not_trained_on(tmp_path):
    config = growing_config(tmp_path, TEXTS + TEXTS[:60])
    data = open_data(config)
    trained, heldout = documents(data, "train"), documents(data, "eval")
    assert len(heldout) == len(set(heldout)) and not set(heldout) & set(trained)
    assert len(trained) == len(TEXTS) + 60 - 2 * len(heldout)
    # A clustering reads the same documents.
    opened = OpenedTexts(make(DataConfig, config), recorded_origin=data.origin)
    pieces = [(split, text.decode()) for split, _, text in opened.pieces()]
    assert [text for split, text in pieces if split == "eval"] == heldout
    assert [text for split, text in pieces if split == "train"] == trained


def test_a_tokenizer_is_trained_on_the_head_without_the_held_out_documents(tmp_path):
    heldout = set(documents(open_data(growing_config(tmp_path)), "eval"))
    written = [t.replace("document", "quaggas.") if t in heldout else t for t in TEXTS]
    write(tmp_path / "text.jsonl", [*written, "zebra " * 500])
    config = growing_config(tmp_path, tokenizer="bpe:300")
    # The same ones are held out, which now contain a word of their own.
    digests = sorted(sources.document_digest(t.encode()).hex() for t in written if "quagga" in t)
    origin = open_data(config).origin | {"held_out": {"documents": digests}}
    tokens = b" ".join(open_data(config, recorded_origin=origin).tokenizer.token_bytes())
    assert b"document" in tokens and b"ebr" not in tokens and b"uag" not in tokens


def test_a_run_keeps_its_held_out_documents_when_the_text_grows(tmp_path):
    config = growing_config(tmp_path)
    first = open_data(config)
    trained = documents(first, "train")
    assert open_data(config, recorded_origin=first.origin).fingerprint == first.fingerprint
    write(tmp_path / "text.jsonl", [*TEXTS, "more"])
    refuse_data(config, config.source, recorded_origin=first.origin)
    config.on_change = "keep_split"
    kept = open_data(config, recorded_origin=first.origin)
    assert documents(kept, "eval") == documents(first, "eval")
    assert documents(kept, "train") == [*trained, "more"]


def test_damaged_files_are_written_again(tmp_path):
    config = growing_config(tmp_path)
    expected = token_ids(open_data(config), "train")
    (folder,) = (tmp_path / "cache/growing").iterdir()
    last = max(folder.glob("*.bin"))
    (folder / "00000.bin").write_bytes(bytes(200))
    last.write_bytes(b"short")
    (folder / "tokenizer.json").unlink()
    assert token_ids(open_data(config), "train") == expected
    last.unlink()
    (folder / "progress.json").write_text("{")
    assert token_ids(open_data(config), "train") == expected


def test_files_of_a_text_that_is_refused_at_its_end_are_not_used_again(tmp_path):
    """A held-out document that was edited while the text was read may be in them."""

    def pieces():
        yield "", b"text " * 100
        raise UsageError("a held-out document has changed")

    writer = growing.Writer(tmp_path, "text", pieces, tokenizers.ByteTokenizer(), 100)
    writer.grow(300)
    assert growing.Progress.read(tmp_path).tokens == 300
    refused(lambda: writer.grow(1000), "has changed")
    assert growing.Progress.read(tmp_path).tokens == 0


def test_a_bad_line_is_refused_when_training_reaches_it(tmp_path):
    config = growing_config(tmp_path)
    with open(tmp_path / "text.jsonl", "a") as file:
        file.write("no JSON\n")
    data = open_data(config)
    take(data.train_iterator(), 20)
    refused(lambda: take(data.train_iterator(), 200), "text.jsonl line 121")
    config = growing_config(tmp_path, seq_len=9000)
    write(tmp_path / "text.jsonl", TEXTS)
    refused(lambda: next(open_data(config).train_iterator()), "config.data.seq_len=9000")


def test_the_writer_ends_with_the_data(tmp_path):
    data = open_data(growing_config(tmp_path))
    next(data.train_iterator())
    writer = writer_of(data)
    assert writer.poll() is None
    del data
    wait_until(lambda: writer.poll() is not None)


def test_the_writer_survives_the_signals_that_stop_a_job(tmp_path):
    """Slurm signals every process of a job, and the last steps of a run need tokens. A killed
    writer is a passing error: launchers start the run again."""
    data = open_data(growing_config(tmp_path))
    tokens = data._streams["train"]
    tokens.wait(1)
    for number in STOPPING:
        os.kill(writer_of(data).pid, number)
    further = len(tokens) + 300
    assert tokens.wait(further) >= further and writer_of(data).poll() is None
    os.kill(writer_of(data).pid, signal.SIGKILL)
    with pytest.raises(TransientError):
        tokens.wait(len(tokens) + 1_000)


def test_memory_does_not_grow_with_the_text(tmp_path):
    """A text of twenty times the buffer (four bytes a token) takes a few buffers, and a block that
    is read for the checksums."""
    buffer, rng = 500_000, np.random.default_rng(0)
    texts = (rng.bytes(2500).hex() for _ in range(20 * buffer // 5000))
    pieces = (("", text.encode()) for text in texts)
    writer = growing.Writer(tmp_path, "text", lambda: pieces, tokenizers.ByteTokenizer(), buffer)
    tracemalloc.start()
    assert writer.grow(1 << 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert growing.Progress.read(tmp_path).tokens > 20 * buffer
    assert peak < 4 * 4 * buffer + 2**20
