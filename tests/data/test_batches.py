"""Batches depend on (seed, step, row) alone; evaluation scores every target once; packing."""

import itertools
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    counting_data,
    few_examples,
    make_config,
    open_data,
    refuse_data,
    same,
    take,
    token_ids,
    write_folder,
    write_letters,
)
from hypothesis import given
from hypothesis import strategies as st

from efx.data import tokenizers, write_token_shards
from efx.data.batches import state_at


@pytest.fixture
def letters(tmp_path):
    return write_letters(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


@few_examples
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_windows_of_an_epoch_cover_the_text_without_overlap(seq_len, extra, seed):
    length = seq_len + 1 + extra
    count = max(1, length // seq_len - 1)
    with tempfile.TemporaryDirectory() as name:
        changes = dict(seq_len=seq_len, batch_size=count, seed=seed)
        data = counting_data(Path(name), length, length + 1, **changes)
        for batch in take(data.train_iterator(), 2):  # a batch is an epoch
            starts = np.sort(batch["inputs"][:, 0])
            assert (np.diff(starts) == seq_len).all() and starts[-1] + seq_len < length
            assert (batch["targets"][:, -1] == batch["inputs"][:, 0] + seq_len).all()
    # All tokens but those of fewer than two windows.
    assert count * seq_len > length - 1 - 2 * seq_len


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
            # No window of the held-out text is trained on.
            assert row in text[:300] and row not in text[300 - 8 :]


@pytest.mark.parametrize("shuffle", ["windows", "random"])
def test_seeds_have_no_batch_in_common(shuffle, letters, tmp_path):
    config = make_config(f"text:{letters}", tmp_path, shuffle=shuffle)
    first = {}
    for seed in (0, 1, 2, -1, 2**40):
        data = open_data(config, seed=seed)
        for i, batch in enumerate(take(data.train_iterator(), 30)):
            key = batch["inputs"].tobytes()
            assert first.setdefault(key, (seed, i)) == (seed, i)


ORDERS = [dict(), dict(shuffle="random"), dict(packing=True, seq_len=20)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_depends_neither_on_the_hosts_nor_on_when_the_run_resumed(order, folder, tmp_path):
    config = make_config(f"text:{folder}", tmp_path, split="documents", **order)
    whole = take(open_data(config).train_iterator(), 30)
    for rows in ([0], [1, 3], [2]):  # three hosts
        for batch, expected in zip(
            take(open_data(config).train_iterator(rows=rows), 25), whole[:25], strict=True
        ):
            same(batch, {k: v[rows] for k, v in expected.items()})
    iterator = open_data(config).train_iterator()
    assert iterator.get_state() == state_at(0)
    for before, step in ((0, 1), (1, 13)):
        take(iterator, step - before)
        state = json.loads(json.dumps(iterator.get_state()))
        assert state == state_at(step)
        resumed = open_data(config).train_iterator()
        resumed.set_state(state)
        for batch, expected in zip(take(resumed, 5), whole[step : step + 5], strict=True):
            same(batch, expected)
        other = open_data(config).train_iterator(step, rows=[2, 3])
        assert other.get_state() == state
        same(next(other), {k: v[2:] for k, v in whole[step].items()})
    iterator.set_state(state_at(0))
    same(next(iterator), whole[0])


GOLDEN_STARTS = {
    "windows": [193, 369, 33, 169, 201, 1, 73, 305, 137, 47, 15, 151, 295, 367, 159, 127],
    "random": [241, 103, 75, 218, 370, 302, 118, 68, 78, 321, 198, 256, 258, 197, 256, 187],
    "packing": [98, 0, 280, 45, 292, 148, 352, 156, 8, 192, 61, 90, 288, 236, 380, 396],
}


@pytest.mark.parametrize("order", GOLDEN_STARTS)
def test_the_order_is_the_same_in_every_version(order, tmp_path):
    """A run that is resumed after an upgrade reads the rows that it would have read."""
    how = dict(packing=True) if order == "packing" else dict(shuffle=order)
    data = counting_data(tmp_path, 400, files=11, batch_size=8, **how)
    batches = take(data.train_iterator(5), 2)
    starts = np.concatenate([batch["inputs"][:, 0] for batch in batches])
    assert starts.tolist() == GOLDEN_STARTS[order]


@few_examples
@given(st.integers(2, 70), st.integers(1, 12), st.sampled_from([1, 2, 3, 6]), st.integers(0, 4))
def test_evaluation_scores_every_target_once(length, seq_len, hosts, max_batches):
    hosts_batches = []
    with tempfile.TemporaryDirectory() as name:
        data = counting_data(Path(name), 100, length, seq_len=seq_len)
        for rows in np.split(np.arange(6), hosts):
            batches = data.eval_batches(6, max_batches, rows)
            hosts_batches.append(list(batches))
            assert len(hosts_batches[-1]) == len(batches)
            assert all(b["inputs"].shape == (6 // hosts, seq_len) for b in batches)
    total = -(-(length - 1) // (6 * seq_len))
    count = min(total, max_batches) if max_batches else total
    assert {len(b) for b in hosts_batches} == {count}
    scored, inputs, again = [], [], []
    for step in range(count):
        for batches in hosts_batches:
            batch = batches[step]
            keep = batch["weights"] > 0
            assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
            scored += batch["targets"][keep].tolist()
            inputs += batch["inputs"][keep].tolist()
            again += batch["inputs"][~keep].tolist()
    assert inputs == [t - 1 for t in scored] and scored == sorted(set(scored))
    # The last batch is filled up with text of that batch.
    assert {*again} <= {*inputs[(count - 1) * 6 * seq_len :], scored[-1]}
    if count == total:
        assert scored == list(range(1, length))
    else:  # spread over the split, not its beginning
        rows = -(-(length - 1) // seq_len)
        assert len(scored) > (6 * count - 1) * seq_len
        assert scored[-1] > (rows - math.ceil(rows / (6 * count)) - 1) * seq_len


@pytest.mark.parametrize("seq_len, packing", [(4, False), (9, True)])
def test_repeated_rows_repeat_random_held_out_tokens(seq_len, packing, tmp_path):
    data, half = counting_data(tmp_path, 1200, 1000, seq_len=seq_len, packing=packing), seq_len // 2
    batches = list(data.repeated_batches(7, 4))
    assert len(batches) == 2
    drawn = []
    for number, halves in enumerate(batches):
        for name, begin in (("first", 0), ("second", half)):
            batch = halves[name]
            tokens = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
            np.testing.assert_array_equal(batch["targets"], tokens[:, 1:])
            np.testing.assert_array_equal(tokens[:, half:], tokens[:, :-half])
            weights = np.zeros((4, seq_len))
            weights[: 4 - number, begin : begin + half - 1] = 1  # the last row of eight has none
            np.testing.assert_array_equal(batch["weights"], weights)
            if packing:
                np.testing.assert_array_equal(batch["positions"][1], np.arange(seq_len))
                assert (batch["segment_ids"] == 1).all()
        same(batch | {"weights": 0}, halves["first"] | {"weights": 0})
        drawn += tokens[:, :half].tolist()
    assert np.ptp(drawn) > 500 and len({tuple(row) for row in drawn}) == 8
    # Hosts draw the same rows, and so does the next evaluation.
    for whole, part in zip(batches, data.repeated_batches(7, 4, rows=[1, 3]), strict=True):
        for name, batch in whole.items():
            same(part[name], {key: value[[1, 3]] for key, value in batch.items()})


def test_one_line_for_each_limit_of_the_text(tmp_path):
    text = "".join(f"line {i}\n" for i in range(12_000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("abc abd\n" * 20_000)
    write_token_shards(tmp_path / "t", tokenizers.ByteTokenizer(), [text])
    for source, changes, names in (
        ("text:{}/a.txt", {}, []),
        ("text:{}/a.txt", {"max_bytes": len(text)}, []),
        ("text:{}/a.txt", {"max_bytes": 90_000}, [["max_bytes=90000", "90,000"]]),
        ("mix:stdlib,text:{}/a.txt", {"max_bytes": 90_000}, [["max_bytes=90000", "90,000"]]),
        ("mix:text:{0}/a.txt,text:{0}/b.txt", {"max_bytes": 165_000}, []),
        ("text:{}/a.txt", {"eval_fraction": 0.01}, [["1,209", "eval_fraction"]]),
        ("text:{}/a.txt", {"tokenizer": "bpe:300"}, []),
        ("text:{}/b.txt", {"tokenizer": "bpe:400"}, [["'bpe:400'", "ids"]]),
    ):
        split = "documents" if source.startswith("mix") else "tail"
        config = make_config(source.format(tmp_path), tmp_path, split=split, **changes)
        remarks = open_data(config).remarks()
        assert len(remarks) == len(names), remarks
        for remark, parts in zip(remarks, names, strict=True):
            assert "\n" not in remark and all(part in remark for part in parts), remark


@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_reads_the_text_once(order, folder, tmp_path):
    config = make_config(f"text:{folder}", tmp_path, split="documents", **order)
    data = open_data(config)
    tokens = sum(batch["weights"].sum() for batch in take(data.train_iterator(), 100))
    scored = data.scored_tokens("train") if config.packing else data.train_tokens
    assert data.epochs(100) == {"train": pytest.approx(tokens / scored, rel=0.05)}
    assert data.epochs(50)["train"] == data.epochs(100)["train"] / 2


def test_a_row_has_to_fit_into_each_split(letters, tmp_path):
    config = make_config(f"text:{letters}", tmp_path, seq_len=99)
    assert next(open_data(config).train_iterator())["inputs"].shape == (4, 99)
    config.seq_len = 100
    refuse_data(config, "config.data.seq_len=100", "held-out")
    config.seq_len = 300
    refuse_data(config, "config.data.seq_len=300", "training")


# ---- packing -------------------------------------------------------------------------------------


def epoch(data):
    """The batches of the first epoch; the last one may go beyond it."""
    batches, scored = [], 0
    for batch in data.train_iterator():
        batches.append(batch)
        scored += int(batch["weights"].sum())
        if scored >= data.scored_tokens("train"):
            return batches


@few_examples
@given(
    st.lists(st.integers(2, 30), min_size=4, max_size=12),
    st.integers(1, 16),
    st.sampled_from(["bytes", "chars"]),
)
def test_packed_rows_hold_each_pair_of_each_document_once(lengths, seq_len, tokenizer):
    texts = [chr(ord("a") + i) * n for i, n in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        for i, text in enumerate(texts):
            (folder / "texts" / f"{i:02d}").write_text(text)
        settings = dict(split="documents", packing=True, batch_size=1, seq_len=1)
        config = make_config(f"text:{folder}/texts", folder, tokenizer=tokenizer, **settings)
        probe = open_data(config)
        config.seq_len = min(seq_len, probe.train_tokens - 1, probe.eval_tokens - 1)
        data = open_data(config)
    eot, found = data.tokenizer.eot, []
    for split, batches in (("train", epoch(data)), ("eval", list(data.eval_batches(1)))):
        pairs = []
        for batch in batches:
            row = {key: value[0] for key, value in batch.items()}
            weights, segments = row["weights"], row["segment_ids"]
            np.testing.assert_array_equal(weights > 0, segments > 0)
            assert (np.diff(weights) <= 0).all()  # padding comes last
            assert set(np.diff(segments[weights > 0])) <= {0, 1} and segments[0] == 1
            for segment in range(1, segments.max() + 1):
                inside = segments == segment
                inputs, targets = row["inputs"][inside], row["targets"][inside]
                np.testing.assert_array_equal(row["positions"][inside], np.arange(inside.sum()))
                np.testing.assert_array_equal(inputs[1:], targets[:-1])
                assert len({t for t in [*inputs, *targets] if t != eot}) == 1
                pairs += zip(inputs.tolist(), targets.tolist(), strict=True)
        expected, joined, ids = [], [], token_ids(data, split)
        for start, stop in data.documents(split):
            document = ids[start:stop]
            joined += [eot] * (joined != [] and eot is not None) + document
            found.append(data.tokenizer.decode(document))
            expected += itertools.pairwise(document if eot is None else [eot, *document, eot])
        assert sorted(pairs) == sorted(expected) and len(pairs) == data.scored_tokens(split)
        assert ids == joined  # ends of documents between them
    assert sorted(found) == sorted(texts)


def test_rows_are_well_filled_and_their_order_depends_on_the_seed(tmp_path):
    rng = np.random.default_rng(0)
    documents = [np.full(length, 7) for length in rng.integers(2, 300, 2000)]
    tokenizer = tokenizers.ByteTokenizer()
    write_token_shards(tmp_path / "t", tokenizer, documents, [d + 1 for d in documents])
    changes = dict(packing=True, seq_len=128, batch_size=40)
    config = make_config(f"tokens:{tmp_path}/t", tmp_path, **changes)
    data, other = open_data(config, seed=0), open_data(config, seed=1)
    for split, batches, least in (
        ("train", epoch(data), 0.98),
        ("eval", list(data.eval_batches(40)), 0.93),
    ):
        assert data.scored_tokens(split) / (128 * 40 * len(batches)) > least
    first, second = (next(each.train_iterator())["segment_ids"] for each in (data, other))
    assert (first != second).any()
    same(next(iter(data.eval_batches(40))), next(iter(other.eval_batches(40))))
