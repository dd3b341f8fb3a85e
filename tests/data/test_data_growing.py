"""Text that is tokenised while it is trained on: batches do not depend on how far that is."""

import json
import os
import signal
import time
import tracemalloc

import numpy as np
import pytest
from data_helpers import make_config, open_data, same, take, usage_error

from efx.data import disk_cache, growing, held_out, sources, tokenizers
from efx.data.opened import OpenedTexts
from efx.errors import PassingError, UsageError
from efx.run_blocks import DataConfig
from efx.settings import make
from efx.signals import STOPPING

TEXTS = [f"document {i}: " + " ".join(f"w{i}x{j}" for j in range(i % 17)) for i in range(120)]
HEAD_BYTES = 2000  # of TEXTS, which come to some 7000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small files, a small head, and no more tokens ahead than are asked for."""
    monkeypatch.setattr(growing, "_SHARD_TOKENS", 100)
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


def ids_of(data, split):
    stream = data._streams[split]
    return np.concatenate(stream.arrays()).tolist()


def documents(data, split):
    ids, eot = ids_of(data, split), data.tokenizer.eot
    ends = [i for i, one in enumerate(ids) if one == eot]
    edges = [-1, *ends, len(ids)]
    return [data.tokenizer.decode(ids[a + 1 : b]) for a, b in zip(edges, edges[1:], strict=False)]


def folder_of(config):
    (folder,) = [path for path in (disk_cache.cache_root(config.cache_dir) / "growing").iterdir()]
    return folder


def test_training_begins_before_the_text_is_tokenised(tmp_path):
    """And what is then trained on is all of the text, in its order, without what is held out."""
    config = growing_config(tmp_path)
    data = open_data(config)
    first = next(data.train_iterator())
    assert data.grows and data.train_tokens < 1000
    trained = documents(data, "train")
    assert not data.grows and data.train_tokens > 6000
    heldout = documents(data, "eval")
    assert set(heldout) | set(trained) == set(TEXTS) and not set(heldout) & set(trained)
    assert trained == [text for text in TEXTS if text not in heldout]
    # They are of the head, a fourth of it.
    assert max(map(TEXTS.index, heldout)) < 45 and 300 < len("".join(heldout)) < 700
    assert {_place(ids_of(data, "train"), row) for row in first["inputs"].tolist()} <= {
        0,
        16,
        32,
        48,
    }
    assert "start in the first 2,000 bytes" in data.held_out_of()


def _place(ids, row):
    (place,) = [i for i in range(len(ids)) if ids[i : i + len(row)] == row]
    return place


def test_windows_come_once_an_epoch_in_the_order_of_the_text(tmp_path):
    data = open_data(growing_config(tmp_path))
    ids, rows = ids_of(data, "train"), 4
    count = len(ids) // 16 - 1
    batches = take(data.train_iterator(), 2 * count // rows + 2)
    windows = np.concatenate([batch["inputs"] for batch in batches])
    first, second = windows[:count], windows[count : 2 * count]
    expected = np.array(ids[: count * 16]).reshape(count, 16)
    assert sorted(map(tuple, first)) == sorted(map(tuple, expected))
    blocks = [sorted(map(tuple, w)) for w in (first[:4], expected[:4])]  # of 64 tokens
    assert blocks[0] == blocks[1] and not np.array_equal(first, expected)
    # The second epoch is mixed throughout, and laid out anew.
    places = [_place(ids, window.tolist()) for window in second]
    assert len({place % 16 for place in places}) == 1
    assert np.abs(np.diff(places)).mean() > 500


def test_every_block_and_every_seed_is_mixed_otherwise(tmp_path):
    config, orders = growing_config(tmp_path, buffer_tokens=256), []  # blocks of 16 windows
    for seed in (3, 4):
        data = open_data(config, seed=seed)
        ids, batches = ids_of(data, "train"), take(data.train_iterator(), 20)
        windows = np.concatenate([batch["inputs"] for batch in batches])
        numbers = [_place(ids, window.tolist()) // 16 for window in windows]
        orders += [tuple(number % 16 for number in numbers[i : i + 16]) for i in range(0, 80, 16)]
    assert all(sorted(order) == [*range(16)] for order in orders)
    assert len(set(orders)) == len(orders) == 10


@pytest.mark.parametrize("kill", [False, True])
def test_batches_depend_on_seed_and_step_alone(kill, tmp_path):
    """Property: not on how far the text was tokenised, by whom, or how often it was interrupted."""
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
        if kill and data.grows:
            os.kill(data._streams["train"]._writer.pid, signal.SIGKILL)
        del data, iterator
    assert unfinished == 2
    for batch, other in zip(found, expected, strict=True):
        same(batch, other)
    two = open_data(config).train_iterator(start_step=7, rows=[1, 3])
    same(next(two), {k: v[[1, 3]] for k, v in expected[7].items()})


def test_two_that_share_a_cache_write_it_together(tmp_path):
    """The one that is ahead does not wait for the other."""
    config = growing_config(tmp_path)
    one, two = (open_data(config).train_iterator() for _ in range(2))
    batches = [next(one)]
    batches_of_two = take(two, 60)
    batches += take(one, 79)
    batches_of_two += take(two, 20)
    for batch, other in zip(batches, batches_of_two, strict=True):
        same(batch, other)


PIECES = [b"", b"a long piece", b"", b"b", b"", b"c", b"another long piece", b"d", b"", b""]


@pytest.mark.parametrize("shard_tokens", [1, 2, 3, 7, 100])
def test_files_written_one_by_one_hold_the_whole_text(shard_tokens, tmp_path, monkeypatch):
    """Property: wherever a writer is interrupted, and whoever goes on, no more is written than was
    asked for, nothing twice, and all of it."""
    written, sums = [], growing.checksums
    monkeypatch.setattr(growing, "checksums", lambda path: written.append(path) or sums(path))
    expected = [*b"|".join(filter(None, PIECES))]
    expected = [256 if byte == ord("|") else byte for byte in expected]

    def writer():
        return growing.Writer(
            tmp_path, "text", lambda: (("", piece) for piece in PIECES),
            tokenizers.ByteTokenizer(), shard_tokens,
        )  # fmt: skip

    one, two, tokens, finished = writer(), writer(), 0, False
    while not finished:
        for each in (one, two, one, one, writer()):
            finished = each.grow(lambda: tokens + 1)  # noqa: B023
            progress = growing.Progress.read(tmp_path)
            assert progress.tokens == min(tokens + shard_tokens, len(expected))
            tokens = progress.tokens
    count = -(-len(expected) // shard_tokens)
    assert written == [tmp_path / f"{i:05d}.bin" for i in range(count)]
    ids = np.concatenate([np.fromfile(path, np.uint16) for path in written])
    assert ids.tolist() == expected


def test_text_that_is_there_twice_is_not_trained_on_where_it_is_held_out(tmp_path):
    config = growing_config(tmp_path, TEXTS + TEXTS[:60])
    data = open_data(config)
    trained, heldout = documents(data, "train"), documents(data, "eval")
    assert len(heldout) == len(set(heldout)) and not set(heldout) & set(trained)
    assert len(trained) == len(TEXTS) + 60 - 2 * len(heldout)
    # Who asks for the pieces, such as a clustering, gets the same.
    opened = OpenedTexts(make(DataConfig, config), run_origin=data.origin)
    pieces = [(split, text.decode()) for split, _, text in opened.pieces()]
    assert [text for split, text in pieces if split == "eval"] == heldout
    assert [text for split, text in pieces if split == "train"] == trained


def test_a_separate_held_out_text(tmp_path):
    write(tmp_path / "val.jsonl", ["something else", TEXTS[100]])
    config = growing_config(tmp_path, split="tail", eval_source=f"jsonl:{tmp_path}/val.jsonl")
    data = open_data(config)
    assert documents(data, "train") == [*TEXTS[:100], *TEXTS[101:]]
    assert documents(data, "eval") == ["something else", TEXTS[100]]


def test_a_tokenizer_is_made_of_the_head_without_what_is_held_out(tmp_path):
    heldout = set(documents(open_data(growing_config(tmp_path)), "eval"))
    written = [t.replace("document", "quaggas.") if t in heldout else t for t in TEXTS]
    write(tmp_path / "text.jsonl", [*written, "zebra " * 500])
    config = growing_config(tmp_path, tokenizer="bpe:300")
    # The same ones are held out, which have a word of their own now.
    digests = sorted(sources.document_digest(t.encode()).hex() for t in written if "quagga" in t)
    origin = open_data(config).origin | {"held_out": {"documents": digests}}
    data = open_data(config, run_origin=origin)
    tokens = b" ".join(data.tokenizer.token_bytes())
    assert b"document" in tokens and b"ebr" not in tokens and b"uag" not in tokens
    assert documents(data, "train")[-1] == "zebra " * 500


def test_a_run_keeps_what_it_held_out(tmp_path):
    config = growing_config(tmp_path)
    first = open_data(config)
    trained = documents(first, "train")
    assert open_data(config, run_origin=first.origin).fingerprint == first.fingerprint
    write(tmp_path / "text.jsonl", [*TEXTS, "more"])
    usage_error("has changed since the run started", run_origin=first.origin,
                config_data=config)  # fmt: skip
    config.on_change = "keep_split"
    kept = open_data(config, run_origin=first.origin)
    assert documents(kept, "eval") == documents(first, "eval")
    assert documents(kept, "train") == [*trained, "more"]


def test_damaged_files_are_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "_CHECKED_SHARDS", 1000)
    config = growing_config(tmp_path)
    expected = ids_of(open_data(config), "train")
    folder = folder_of(config)
    for damage in (
        lambda: (folder / "00003.bin").write_bytes(bytes(200)),
        lambda: (folder / "00000.bin").unlink(),
        lambda: (folder / "00040.bin").write_bytes(b"short"),
        lambda: (folder / "progress.json").write_text("{"),
        lambda: (folder / "tokenizer.json").unlink(),
    ):
        damage()
        assert ids_of(open_data(config), "train") == expected


def test_what_cannot_be_read_is_told_when_it_is_needed(tmp_path, monkeypatch):
    config = growing_config(tmp_path)
    with open(tmp_path / "text.jsonl", "a") as file:
        file.write("no JSON\n")
    data = open_data(config)
    take(data.train_iterator(), 20)
    with pytest.raises(UsageError, match="text.jsonl line 121 is not JSON") as error:
        take(data.train_iterator(), 200)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(growing.sys, "path", [])  # without efx in it the process cannot begin
    config.cache_dir = str(tmp_path / "third")
    with pytest.raises(UsageError, match="ended with status 1; rerun the command"):
        next(open_data(config).train_iterator())


def test_a_network_failure_of_the_writer_is_passing(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the extra `hf` is not installed")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set/train.jsonl", TEXTS)
    config = growing_config(tmp_path)
    config.source = f"hf:{tmp_path}/set"
    data = open_data(config)
    # The writer alone does not reach the hub.
    (tmp_path / "datasets.py").write_text("def load_dataset_builder(*_): raise ConnectionError")
    with monkeypatch.context() as patch, pytest.raises(PassingError, match="cannot be reached"):
        patch.syspath_prepend(tmp_path)
        next(data.train_iterator())
    next(open_data(config).train_iterator())


def test_settings_that_need_the_whole_text(tmp_path):
    for changes, words in (
        (dict(split="tail"), "config.data.split='tail'"),
        (dict(tokenizer="chars"), "config.data.tokenizer='chars'"),
        (dict(packing=True), "config.data.packing=True needs"),
        (dict(subset="some.json"), "config.data.subset"),
    ):
        usage_error(words, config_data=growing_config(tmp_path, **changes))
    for source in ("mix:stdlib,pydoc", "tokens:folder"):
        config = make_config(source, tmp_path, split="documents", shuffle="buffer")
        usage_error("config.data.shuffle='buffer'", source, config_data=config)
    config = growing_config(tmp_path, seq_len=9000)
    with pytest.raises(UsageError, match="seq_len=9000: "):
        next(open_data(config).train_iterator())


def test_the_process_ends_with_the_data(tmp_path):
    config = growing_config(tmp_path)
    data = open_data(config)
    next(data.train_iterator())
    writer = data._streams["train"]._writer
    assert writer.poll() is None
    del data
    deadline = time.monotonic() + 20
    while writer.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert writer.poll() is not None


def test_what_stops_a_whole_job_leaves_the_training_its_tokens(tmp_path):
    """Slurm's signal before the end comes to every process of a job. The last steps need tokens;
    where the process is killed all the same, launchers start again."""
    config = growing_config(tmp_path)
    data = open_data(config)
    tokens = data._streams["train"]
    tokens.begin()
    deadline = time.monotonic() + 20
    while not tokens.wait(1) and time.monotonic() < deadline:  # it has begun
        time.sleep(0.02)
    for number in STOPPING:
        os.kill(tokens._writer.pid, number)
    further = len(tokens) + 300
    assert tokens.wait(further) >= further and tokens._writer.poll() is None
    os.kill(tokens._writer.pid, signal.SIGKILL)
    with pytest.raises(PassingError, match="ended with status -9; rerun the command"):
        tokens.wait(len(tokens) + 1_000)


def test_memory_does_not_grow_with_the_text(tmp_path):
    """Property: a text of twenty times the buffer takes a few lengths of the buffer, which has four
    bytes a token, and a block that is read for the checksums."""
    buffer, rng = 500_000, np.random.default_rng(0)
    texts = (rng.bytes(2500).hex() for _ in range(20 * buffer // 5000))
    (tmp_path / "folder").mkdir()
    writer = growing.Writer(
        tmp_path / "folder",
        "text",
        lambda: (("", text.encode()) for text in texts),
        tokenizers.ByteTokenizer(),
        buffer,
    )
    tracemalloc.start()
    assert writer.grow(lambda: 1 << 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert growing.Progress.read(tmp_path / "folder").tokens > 20 * buffer
    assert peak < 4 * 4 * buffer + disk_cache._BLOCK
