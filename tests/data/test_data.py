"""Data: nothing held out is trained on; order depends on (seed, step) alone."""

import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from data_helpers import (
    make_config,
    open_data,
    same,
    take,
    usage_error,
    write_folder,
    write_letters,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from efx.data import pipeline, tokenizers, write_token_shards
from efx.data.stream import Stream

# A stream in which every token says where it stands.
COUNTING = Stream([np.arange(1000, dtype=np.uint16)])


@pytest.fixture
def letters(tmp_path):
    return write_letters(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


@given(st.integers(1, 40), st.integers(0, 80), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_windows_lie_in_the_text_and_do_not_overlap(seq_len, extra, seed):
    length = seq_len + 1 + extra
    stream = Stream([np.arange(length, dtype=np.uint16)])
    windows = pipeline._ShuffledWindows(stream, seq_len, seed)
    count = windows.count
    for epoch in range(2):
        starts = np.sort(windows.starts(range(epoch * count, (epoch + 1) * count)))
        assert starts[0] >= 0 and starts[-1] + seq_len + 1 <= length
        assert (np.diff(starts) == seq_len).all()
        # All but the rest of less than two windows is trained on in every epoch.
        assert count * seq_len > length - 1 - 2 * seq_len


def test_epochs_differ_in_order_and_offset():
    windows = pipeline._ShuffledWindows(COUNTING, 10, seed=1)
    count = windows.count
    epochs = [windows.starts(range(e * count, (e + 1) * count)) for e in range(20)]
    assert len({int(e.min()) for e in epochs}) > 5
    assert len({tuple((e - e.min()).tolist()) for e in epochs}) == 20


def test_random_windows_reach_every_start():
    windows = pipeline._RandomWindows(Stream([np.arange(20, dtype=np.uint16)]), 8, seed=0)
    batches = [windows(step, 16, np.arange(16)) for step in range(20)]
    starts = {int(s) for b in batches for s in b["inputs"][:, 0]}
    assert starts == set(range(12))  # 0..11: 11 + 8 + 1 = 20
    assert max(int(b["targets"].max()) for b in batches) == 19


@pytest.mark.parametrize("shuffle", ["windows", "random"])
def test_targets_are_the_inputs_one_later(shuffle, letters, tmp_path):
    data = open_data(make_config(f"text:{letters}", tmp_path, shuffle=shuffle))
    text = letters.read_text()
    for batch in take(data.train_iterator(), 20):
        assert {k: (v.dtype.name, v.shape) for k, v in batch.items()} == {
            "inputs": ("int32", (4, 8)),
            "targets": ("int32", (4, 8)),
            "weights": ("float32", (4, 8)),
        }
        assert (batch["weights"] == 1).all()
        for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
            row = data.tokenizer.decode([*inputs, targets[-1]])
            assert row[1:] == data.tokenizer.decode(targets)
            # Windows of the held-out text do not occur in what is trained on.
            assert row in text[:300] and row not in text[300 - 8 :]


@pytest.mark.parametrize("shuffle", ["windows", "random"])
def test_seeds_have_nothing_in_common(shuffle, letters, tmp_path):
    config = make_config(f"text:{letters}", tmp_path, shuffle=shuffle)
    first = {}
    for seed in (0, 1, 2, -1, 2**40):
        data = open_data(config, seed=seed)
        for i, batch in enumerate(take(data.train_iterator(), 30)):
            key = batch["inputs"].tobytes()
            assert first.setdefault(key, (seed, i)) == (seed, i)


ORDERS = [dict(), dict(shuffle="random"), dict(packing=True, seq_len=20)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [[0, 1], [3], [1, 3], [0, 1, 2, 3]])
def test_rows_that_are_asked_for_are_those_of_the_whole_batch(order, rows, folder, tmp_path):
    """Which rows a process reads is told by its devices; what they hold depends on no process."""
    config = make_config(f"text:{folder}", tmp_path, split="documents", **order)
    whole = take(open_data(config).train_iterator(), 25)
    some = take(open_data(config).train_iterator(rows=rows), 25)
    for batch, expected in zip(some, whole, strict=True):
        same(batch, {k: v[rows] for k, v in expected.items()})


@pytest.mark.parametrize("order", ORDERS)
def test_resuming_is_exact_also_with_other_rows(order, folder, tmp_path):
    config = make_config(f"text:{folder}", tmp_path, split="documents", **order)
    straight = take(open_data(config).train_iterator(), 30)
    iterator = open_data(config).train_iterator()
    assert iterator.get_state() == {"step": 0}
    for step in (1, 7, 13):
        while iterator.get_state()["step"] < step:
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        assert state == {"step": step}
        resumed = open_data(config).train_iterator()
        resumed.set_state(state)
        for batch, expected in zip(take(resumed, 5), straight[step:], strict=False):
            same(batch, expected)
        other = open_data(config).train_iterator(step, rows=[2, 3])
        assert other.get_state() == state
        same(next(other), {k: v[2:] for k, v in straight[step].items()})
    iterator.set_state({"step": 0})
    same(next(iterator), straight[0])


_IN_A_NEW_PROCESS = """
import sys, json, efx.data
from ml_collections import ConfigDict
data = efx.data.load(ConfigDict(json.loads(sys.argv[1])), seed=3)
it = data.train_iterator(5)
print(json.dumps([next(it)["inputs"].tolist() for _ in range(2)]))
"""


def test_order_is_the_same_in_every_process_and_version(letters, tmp_path):
    """The numbers are fixed: a run that goes on after an upgrade sees the text it would have."""
    config = make_config(f"text:{letters}", tmp_path, batch_size=2)
    here = [b["inputs"].tolist() for b in take(open_data(config).train_iterator(5), 2)]
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run(
        [sys.executable, "-c", _IN_A_NEW_PROCESS, json.dumps(config.to_dict())],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(there.stdout) == here
    config.shuffle = "random"
    drawn = next(open_data(config).train_iterator(5))["inputs"]
    rows, text = np.uint8([*here[0], *drawn]), letters.read_bytes()
    starts = [text.index(bytes(row)) for row in rows]
    assert starts == GOLDEN_STARTS


GOLDEN_STARTS = [136, 88, 26, 208]


@given(st.integers(2, 70), st.integers(1, 12), st.sampled_from([1, 2, 3, 6]), st.integers(0, 4))
@settings(max_examples=60)
def test_evaluation_scores_every_target_once(length, seq_len, hosts, max_batches):
    hosts_batches = []
    data = _data_of(np.arange(length), seq_len)
    for rows in np.split(np.arange(6), hosts):
        batches = data.eval_batches(6, max_batches, rows)
        listed = list(batches)
        assert len(listed) == len(batches)
        assert all(b["inputs"].shape == (6 // hosts, seq_len) for b in listed)
        hosts_batches.append(listed)
    total = -(-(length - 1) // (6 * seq_len))
    count = min(total, max_batches) if max_batches else total
    assert {len(b) for b in hosts_batches} == {count}
    scored, inputs, again = [], [], []
    for step in range(count):
        for listed in hosts_batches:
            batch = listed[step]
            keep = batch["weights"] > 0
            assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
            scored += batch["targets"][keep].tolist()
            inputs += batch["inputs"][keep].tolist()
            again += batch["inputs"][~keep].tolist()
    assert inputs == [t - 1 for t in scored] and scored == sorted(set(scored))
    # What fills up the last batch is of the text of that batch.
    assert {*again} <= {*inputs[(count - 1) * 6 * seq_len :], scored[-1]}
    if count == total:
        assert scored == list(range(1, length))
    else:  # spread over the split, not its beginning
        rows = -(-(length - 1) // seq_len)
        assert len(scored) > (6 * count - 1) * seq_len
        assert scored[-1] > (rows - math.ceil(rows / (6 * count)) - 1) * seq_len


def _data_of(tokens, seq_len):
    """Data of a held-out split of these tokens."""
    config = ConfigDict(dict(seq_len=seq_len, packing=False, batch_size=1, shuffle="windows"))
    streams = dict.fromkeys(("train", "eval"), Stream([tokens.astype(np.uint16)]))
    tokenizer = tokenizers.ByteTokenizer()
    return pipeline.Data(config, 0, tokenizer, streams, None, None, "key")


def test_evaluation_with_packing_scores_every_target_once(folder, tmp_path):
    config = make_config(f"text:{folder}", tmp_path, split="documents", packing=True, seq_len=20)
    data = open_data(config)
    batches = list(data.eval_batches(4))
    assert len(batches) == len(data.eval_batches(4))
    weights = sum(b["weights"].sum() for b in batches)
    assert weights == data.scored_tokens("eval")
    heldout = [t for p in folder.rglob("*.txt") if (t := p.read_text()) and _held(data, t)]
    targets = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    assert sorted(targets) == sorted([*"".join(heldout).encode(), *[256] * len(heldout)])
    same(batches[0], next(iter(data.eval_batches(4))))
    for whole, part in zip(batches, data.eval_batches(4, rows=[0, 3]), strict=True):
        same(part, {k: v[[0, 3]] for k, v in whole.items()})


@pytest.mark.parametrize("seq_len, packing", [(4, False), (9, True), (16, False)])
def test_rows_that_repeat_themselves(seq_len, packing):
    data, half = _data_of(np.arange(1000), seq_len), seq_len // 2
    data._config.packing = packing
    batches = list(data.repeated_batches(7, 4))
    assert len(batches) == 2  # the last of eight rows is not wanted
    drawn = []
    for number, of_half in enumerate(batches):
        for name, begin in (("first", 0), ("second", half)):
            batch = of_half[name]
            tokens = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
            np.testing.assert_array_equal(batch["targets"], tokens[:, 1:])
            np.testing.assert_array_equal(tokens[:, half:], tokens[:, :-half])
            wanted = np.zeros((4, seq_len))
            wanted[: 4 - number, begin : begin + half - 1] = 1
            np.testing.assert_array_equal(batch["weights"], wanted)
            if packing:
                np.testing.assert_array_equal(batch["positions"][1], np.arange(seq_len))
                assert (batch["segment_ids"] == 1).all()
        same(batch | {"weights": 0}, of_half["first"] | {"weights": 0})
        drawn += tokens[:, :half].tolist()
    assert np.ptp(drawn) > 500 and len({tuple(row) for row in drawn}) == 8
    # Hosts draw the same rows, and so does the next evaluation.
    for whole, part in zip(batches, data.repeated_batches(7, 4, rows=[1, 3]), strict=True):
        for name, batch in whole.items():
            same(part[name], {key: value[[1, 3]] for key, value in batch.items()})


def _held(data, text):
    return text.encode()[0] in data._streams["eval"].arrays()[0]


def test_bytes_per_token(folder, tmp_path):
    """Bits per byte do not depend on the tokenizer: bytes of what is scored over its tokens."""
    for tokenizer, packing in itertools.product(["bytes", "chars", "bpe:260"], [False, True]):
        config = make_config(
            f"text:{folder}", tmp_path, split="documents", tokenizer=tokenizer, packing=packing
        )
        data = open_data(config)
        lengths = data.tokenizer.byte_lengths()
        for split in ("train", "eval"):
            stream = data._streams[split].arrays()[0]
            if not packing:
                scored = stream[1:]
            elif tokenizer == "chars":
                scored = np.concatenate([stream[a + 1 : b] for a, b in data.documents(split)])
            else:
                ends = np.zeros(len(data.documents(split)), int) + data.tokenizer.eot
                scored = np.concatenate([stream[stream != data.tokenizer.eot], ends])
            assert data.scored_tokens(split) == len(scored)
            expected = lengths[scored].sum() / len(scored)
            assert data.bytes_per_token(split) == pytest.approx(expected)


def test_bytes_are_counted_once(letters, tmp_path, monkeypatch):
    """Every evaluation asks for them, and a long split takes seconds."""
    count, counted = pipeline.count_bytes, []

    def spy(*arguments, **options):
        counted.append(count(*arguments, **options))
        return counted[-1]

    monkeypatch.setattr(pipeline, "count_bytes", spy)
    data = open_data(make_config(f"text:{letters}", tmp_path))
    found = [data.bytes_per_token(split) for split in ("eval", "eval", "train", "eval")]
    assert len(counted) == 2 and found[0] == found[1] == found[3]


def test_bytes_per_token_where_ids_do_not_tell(tmp_path):
    library = pytest.importorskip("tokenizers")
    inner = library.Tokenizer(library.models.WordLevel({"é": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("é b " * 60, encoding="utf-8")
    config = make_config(f"text:{tmp_path / 'text.txt'}", tmp_path, tokenizer=str(tmp_path))
    data = open_data(config)  # 4 characters and 5 bytes for 2 tokens
    assert (data.train_tokens, data.eval_tokens) == (90, 30)
    assert data.bytes_per_token("eval") == 5 * 15 / 29
    shards = tmp_path / "shards"
    write_token_shards(shards, data.tokenizer, ["é b " * 45], ["é b " * 15])
    config.source = f"tokens:{shards}"
    assert open_data(config).bytes_per_token("eval") == (5 * 15 - 1) / 29  # no space at the end


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(source="txt:x"), ["config.data.source='txt:x'", "did you mean 'text'"]),
        (dict(source="stdlb"), ["did you mean 'stdlib'"]),
        (dict(source="text:"), ["expected text:PATH"]),
        (dict(source="stdlib:3.11"), ["expected stdlib"]),
        (dict(source="tokens"), ["expected tokens:PATH"]),
        (dict(source="text:/no/such/file"), ["/no/such/file", "no such file"]),
        (dict(source="text:/no/such/*.txt"), ["no file matches"]),
        (dict(source="arrayrecord:/no/such*"), ["no file matches"]),
        (dict(tokenizer="byte"), ["config.data.tokenizer='byte'", "did you mean 'bytes'"]),
        (dict(tokenizer="bpe:12"), ["config.data.tokenizer='bpe:12'", "from 257 to"]),
        (dict(split="tails"), ["config.data.split='tails'", "did you mean 'tail'"]),
        (dict(split="documents"), ["config.data.split='documents'", "at least 2 are"]),
        (dict(shuffle="window"), ["config.data.shuffle='window'", "did you mean 'windows'"]),
        (dict(packing=True, shuffle="random"), ["config.data.packing=True", "'windows'"]),
        (dict(eval_fraction=0.0), ["config.data.eval_fraction=0.0"]),
        (dict(eval_fraction=1.0), ["config.data.eval_fraction=1.0"]),
        (dict(eval_fraction=0.0001), ["held-out split", "has 1 tokens"]),
        (dict(eval_fraction=float("nan")), ["config.data.eval_fraction=nan"]),
        (dict(seq_len=0), ["config.data.seq_len=0"]),
        (dict(seq_len=299), []),
        (dict(seq_len=300), ["config.data.seq_len=300", "training split", "has 300 tokens"]),
        (dict(seq_len=100), ["config.data.seq_len=100", "held-out split", "has 100 tokens"]),
        (dict(batch_size=0), ["config.data.batch_size=0"]),
        (dict(max_bytes=-1), ["config.data.max_bytes=-1"]),
    ],
)
def test_bad_settings_are_one_clear_line(changes, words, letters, tmp_path):
    config = make_config(f"text:{letters}", tmp_path)
    config.update(changes)
    usage_error(*words, config_data=config)


def test_a_path_alone_is_told_how_to_be_a_source(letters, tmp_path):
    config = make_config(str(letters), tmp_path)
    usage_error(f"'text:{letters}'", config_data=config)


def test_a_tokenizer_that_cannot_write_the_text(letters, tmp_path):
    tokenizers.CharTokenizer("abc").save(tmp_path / "tokenizer.json")
    for tokenizer, path in (("bytes", tmp_path / "tokenizer.json"), (str(tmp_path), None)):
        config = make_config(f"text:{letters}", tmp_path, tokenizer=tokenizer)
        usage_error(str(letters), "'d'", "3 characters", config_data=config, tokenizer_path=path)
    usage_error("no.json", config_data=config, tokenizer_path=tmp_path / "no.json")
