"""Packing and streams: every pair of every document once, none across documents."""

import itertools

import numpy as np
import pytest
from data_helpers import (
    make_config,
    open_data,
    take,
    write_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from efx.data.packing import Packing, _best_fit
from efx.data.stream import Stream, documents_between
from efx.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


@st.composite
def documents(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=9))
    return [list(range(100 * i + 1, 100 * i + 1 + n)) for i, n in enumerate(lengths)]


@settings(max_examples=60)
@given(documents(), st.integers(1, 16), st.booleans(), st.sampled_from(["length", "document"]))
def test_packed_rows_hold_each_pair_of_each_document_once(texts, seq_len, with_eot, order):
    eot = 9999 if with_eot else None
    stream, spans = _joined(texts, eot)
    packing = Packing(stream, spans, eot, seq_len, order, seed=4)
    batch = packing.rows(range(len(packing) + 1))
    weights, segments = batch["weights"], batch["segment_ids"]
    assert not weights[-1].any()  # a row past the end
    np.testing.assert_array_equal(weights > 0, segments > 0)
    pairs = []
    for row in range(len(packing)):
        assert (np.diff(weights[row]) <= 0).all()  # padding comes last
        assert set(np.diff(segments[row][weights[row] > 0])) <= {0, 1} and segments[row][0] == 1
        for segment in range(1, segments[row].max() + 1):
            inside = segments[row] == segment
            inputs, targets = batch["inputs"][row][inside], batch["targets"][row][inside]
            np.testing.assert_array_equal(batch["positions"][row][inside], np.arange(inside.sum()))
            np.testing.assert_array_equal(inputs[1:], targets[:-1])
            assert len({t // 100 for t in [*inputs, *targets] if t != 9999}) == 1
            pairs += zip(inputs.tolist(), targets.tolist(), strict=True)
    expected = []
    for text in texts:
        framed = [eot, *text, eot] if with_eot else text
        expected += itertools.pairwise(framed)
    assert sorted(pairs) == sorted(expected)
    assert packing.pairs == len(pairs)


def _joined(texts, eot):
    tokens, spans = [], []
    for text in texts:
        tokens += [eot] if tokens and eot is not None else []
        spans.append((len(tokens), len(tokens) + len(text)))
        tokens += text
    return Stream([np.array(tokens, np.uint16)]), np.array(spans, np.int64)


def test_rows_are_well_filled_and_differ_by_seed():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 300, 2000)
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], 1)
    stream = Stream([np.zeros(ends[-1], np.uint16)])
    for order, least in (("length", 0.99), ("document", 0.93)):
        packing = Packing(stream, spans, None, 128, order, seed=0)
        assert packing.pairs / (128 * len(packing)) > least
        other = Packing(stream, spans, None, 128, order, seed=1)
        assert (other._pieces[:50] == packing._pieces[:50]).all() == (order == "document")


def test_a_piece_goes_where_it_leaves_the_least_room():
    lengths = np.array([5, 6, 2, 8, 3, 1, 8, 4, 4])
    #        row 0: 5 + 3, row 1: 6 + 2, then a full one, a new one for 1 and 4, ...
    assert _best_fit(lengths, 8).tolist() == [0, 1, 1, 2, 0, 3, 4, 3, 5]


def test_every_row_is_trained_on_once_an_epoch(folder, tmp_path):
    config = make_config(
        f"text:{folder}", tmp_path, split="documents", packing=True, seq_len=20, batch_size=1
    )
    data = open_data(config)
    count = len(data._packing("train"))
    iterator = data.train_iterator()
    epochs = [[b["inputs"].tobytes() + b["segment_ids"].tobytes() for b in take(iterator, count)]
              for _ in range(2)]  # fmt: skip
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    rows = data._packing("train").rows(range(count))
    every = [i.tobytes() + s.tobytes()
             for i, s in zip(rows["inputs"], rows["segment_ids"], strict=True)]  # fmt: skip
    assert sorted(every) == sorted(epochs[0])


def test_documents_of_one_token_are_nothing_to_pack(tmp_path):
    """Without an end of documents there is nothing to predict in them."""
    (tmp_path / "text").mkdir()
    for letter in "abcdefgh":
        (tmp_path / "text" / letter).write_text(letter)
    config = make_config(
        f"text:{tmp_path / 'text'}",
        tmp_path,
        split="documents",
        packing=True,
        seq_len=1,
        tokenizer="chars",
    )
    data = open_data(config)
    for call in (data.check_packing, data.train_iterator):
        with pytest.raises(UsageError, match="packing=True: no document of the training split has"):
            call()
    with pytest.raises(UsageError, match="no document of the held-out split has two tokens"):
        data.scored_tokens("eval")
    config.tokenizer = "bytes"  # which ends documents
    assert open_data(config).scored_tokens("eval")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.data())
def test_a_stream_of_parts_reads_like_one(sizes, data):
    whole = np.arange(sum(sizes))
    edges = np.cumsum([0, *sizes])
    stream = Stream([whole[a:b] for a, b in itertools.pairwise(edges)])
    assert len(stream) == len(whole)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    np.testing.assert_array_equal(stream.windows([start], stop - start)[0], whole[start:stop])
    cut = stream.cut(start, stop)
    assert len(cut) == stop - start
    assert [t for part in cut.arrays() for t in part] == whole[start:stop].tolist()
    if len(cut):
        framed = cut.framed(-1, len(cut) + 1, 77)
        assert framed.tolist() == [77, *whole[start:stop], 77]


@given(st.lists(st.lists(st.sampled_from([0, 1, 2]), max_size=6), max_size=4))
def test_documents_are_found_between_separators(parts):
    stream = Stream([np.array(p, np.uint16) for p in parts])
    tokens = [t for p in parts for t in p]
    found = [tokens[a:b] for a, b in documents_between(stream, 0)]
    text = "".join(map(str, tokens))
    assert ["".join(map(str, f)) for f in found] == [t for t in text.split("0") if t]
    assert [b - a for a, b in documents_between(stream, None)] == [len(p) for p in parts if p]
