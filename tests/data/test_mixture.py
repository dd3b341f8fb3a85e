"""Mixtures with weights, held-out sets, and the order of rows: functions of (seed, step, row)."""

import numpy as np
import pytest
from data_helpers import (
    few_examples,
    make_config,
    open_data,
    refuse_data,
    same,
    take,
    text_of,
    token_ids,
)
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import mixture

PARTS = {"letters": "abcdefgh", "digits": "01234567", "signs": "+-*/=<>!"}


@pytest.fixture
def texts(tmp_path):
    """{name: source} of texts of different characters."""
    rng = np.random.default_rng(0)
    for name, characters in PARTS.items():
        (tmp_path / f"{name}.txt").write_text("".join(rng.choice(list(characters), 3000)))
    return {name: f"text:{tmp_path}/{name}.txt" for name in PARTS}


def mixed_config(texts, tmp_path, weights, **changes):
    config = make_config("stdlib", tmp_path, seq_len=4, **changes)
    config.mixture = {name: (texts[name], weight) for name, weight in weights.items()}
    return config


def parts_of(batch):
    """The part that each row of a batch is from."""
    names = {ord(c): name for name, characters in PARTS.items() for c in characters}
    firsts = np.where(batch["inputs"][:, 0] == 256, batch["inputs"][:, 1], batch["inputs"][:, 0])
    return [names[token] for token in firsts.tolist()]


# ---- the order ---------------------------------------------------------------------------------


def test_the_permutation_is_the_same_in_every_version():
    assert mixture.permuted(np.arange(10), 10, 1, 2).tolist() == [0, 5, 7, 1, 6, 8, 4, 9, 3, 2]
    assert mixture.permuted([0, 10**12], 10**12 + 1, 7).tolist() == [338886143737, 565813321104]
    assert mixture.mixed(1, 2).tolist() == [13608149317741381227]


@few_examples
@given(st.integers(1, 300), st.integers(0, 2**60), st.integers(0, 5))
def test_a_permutation_has_each_number_once(count, seed, epoch):
    order = mixture.permuted(np.arange(count), count, seed, epoch)
    assert sorted(order) == list(range(count))
    # Whichever numbers are asked for together.
    assert mixture.permuted([count - 1], count, seed, epoch)[0] == order[-1]
    keys = np.full(count, epoch)
    np.testing.assert_array_equal(mixture.permuted(np.arange(count), count, seed, keys), order)


# ---- weights -----------------------------------------------------------------------------------

SCHEDULES = {
    "constant": (((0, 0.7),), ((0, 0.3),)),
    "changing": (((0, 1.0), (30, 0.25)), ((0, 0.0), (30, 0.5)), ((0, 0.5),)),
    "rare": (((0, 5.0),), ((0, 0.001),)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_of_each_part_come_one_after_another_in_the_numbers_of_the_weights(name):
    schedules, batch_size = SCHEDULES[name], 100
    mix = mixture.Mixture(schedules, batch_size, seed=3)
    indices = np.arange(7000)
    part, number = mix(indices)
    for each in range(len(schedules)):
        np.testing.assert_array_equal(number[part == each], np.arange((part == each).sum()))
    for count in (0, 1, 999, 1000, 2999, 3000, 3001, 6500):
        expected = np.bincount(part[:count], minlength=len(schedules))
        np.testing.assert_array_equal(mix.rows(count), expected)
    for first in (0, 1000, 3000, 4000):
        found = np.bincount(part[first : first + 1000], minlength=len(schedules))
        weights = [[w for step, w in s if step * batch_size <= first][-1] for s in schedules]
        exact = 1000 * np.array(weights) / sum(weights)
        assert (abs(found - exact) <= 1).all() and (found[exact > 0] > 0).all()
        assert (found[exact == 0] == 0).all()
    # Parts alternate, also in the first rows.
    if name == "constant":
        assert 0.5 < np.mean(part[:100] == 0) < 0.9
        other = mixture.Mixture(schedules, batch_size, seed=4)
        assert (other(indices)[0] != part).any()


@pytest.mark.parametrize("packing", [False, True])
def test_batches_of_a_mixture_depend_on_seed_step_and_row_alone(packing, texts, tmp_path):
    weights = {"letters": 0.5, "digits": ((0, 0.5), (20, 0.0)), "signs": ((0, 0.0), (20, 2.0))}
    config = mixed_config(texts, tmp_path, weights, packing=packing, document_bytes=50)
    whole = take(open_data(config).train_iterator(), 30)
    for step, rows in ((0, [1, 3]), (17, [0]), (25, [2, 3])):
        part = take(open_data(config).train_iterator(step, rows), 5)
        for batch, expected in zip(part, whole[step : step + 5], strict=True):
            same(batch, {key: value[rows] for key, value in expected.items()})
    assert any((a["inputs"] != b["inputs"]).any() for a, b in zip(
        whole, take(open_data(config, seed=4).train_iterator(), 30), strict=True))  # fmt: skip
    found = [set().union(*map(parts_of, batches)) for batches in (whole[:20], whole[20:])]
    if not packing:
        assert found == [{"letters", "digits"}, {"letters", "signs"}]


def test_tokens_and_epochs_of_each_part_are_those_of_its_rows(texts, tmp_path):
    config = mixed_config(texts, tmp_path, {"letters": 3, "digits": 1}, batch_size=10)
    config.seq_len = 9
    data = open_data(config)
    batches = take(data.train_iterator(), 110)
    names = [name for batch in batches for name in parts_of(batch)]
    rows = {f"train/{name}": names.count(name) for name in ("letters", "digits")}
    assert data.rows_read(110) == rows
    assert data.epochs(110) == {
        name: count * 9 / (data.train_tokens / 2) for name, count in rows.items()
    }
    # An epoch of a part has each of its windows once.
    text = text_of(data, "train/digits")
    windows = [row for batch in batches for row in batch["inputs"] if row[0] < 58]
    starts = [text.index(data.tokenizer.decode(row)) for row in windows]
    epoch = len(token_ids(data, "train/digits")) // 9 - 1
    assert len(starts) > epoch and (np.diff(sorted(starts[:epoch])) == 9).all()


def test_each_part_is_split_and_no_held_out_text_is_trained_on(texts, tmp_path):
    """A document that is held out in one part is not trained on in another."""
    config = mixed_config(texts, tmp_path, {"letters": 1, "digits": 1}, split="documents")
    config.document_bytes, config.eval_fraction = 50, 0.3
    config.mixture = {**config.mixture, "both": (f"text:{tmp_path}/*.txt", 1)}
    data = open_data(config)
    documents = {
        split: {data.tokenizer.decode(data.tokens(split, *span)) for span in data.documents(split)}
        for split in data._splits
    }
    heldout = documents["eval/letters"] | documents["eval/digits"] | documents["eval/both"]
    trained = set.union(*(documents[f"train/{name}"] for name in ("letters", "digits", "both")))
    assert documents["eval"] == heldout and heldout and not heldout & trained
    every = "".join((tmp_path / f"{name}.txt").read_text() for name in ("letters", "digits"))
    assert all(text in every for text in documents["eval/letters"] | documents["eval/digits"])
    assert data.eval_sets == ["letters", "digits", "both"]
    record = data.text_record
    assert open_data(config, text_record=record).fingerprint == data.fingerprint
    (tmp_path / "digits.txt").write_text("changed " * 500)
    refuse_data(config, "config.data.mixture.digits", text_record=record)


# ---- held-out sets -----------------------------------------------------------------------------


def test_sets_are_held_out_as_a_whole_and_counted_by_themselves(texts, tmp_path):
    (tmp_path / "all.txt").write_text("train " * 200 + (tmp_path / "digits.txt").read_text())
    sets = {"one": texts["digits"], "two": texts["signs"]}
    config = make_config(f"text:{tmp_path}/all.txt", tmp_path, eval_fraction=0.1)
    config.eval_sets = sets
    data = open_data(config)
    assert data.eval_sets == ["one", "two"]
    for name, source in sets.items():
        assert text_of(data, f"eval/{name}") == open(source.removeprefix("text:")).read()
        assert data.scored_tokens(f"eval/{name}") == 2999
        assert data.scored_bytes(4, split=f"eval/{name}") == 2999
    assert text_of(data, "train") in "train " * 200  # `one` is cut out of the text
    assert data.scored_bytes(4) < 500
    batches = data.eval_batches(4, split="eval/two")
    assert sum(batch["weights"].sum() for batch in batches) == 2999


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change, names", [
    ({"mixture": {"a": ("text:a", -0.5)}}, ["config.data.mixture.a", "-0.5", "at least 0"]),
    ({"mixture": {"a": ("text:a", 0), "b": ("text:b", 0.0)}}, ["data.mixture", "all weights"]),
    ({"mixture": {"a": ("text:a", ((0, 1), (9, 0)))}}, ["step 9", "all weights"]),
    ({"mixture": {"a": ("text:a", ((5, 1),))}}, ["config.data.mixture.a", "(0, weight)"]),
    ({"mixture": {"a": ("text:a", ((0, 1), (0, 2)))}}, ["config.data.mixture.a", "order"]),
    ({"mixture": {"a": "text:a"}}, ["config.data.mixture.a='text:a'", "(source, weight)"]),
    ({"mixture": {"a": ("text:a", "much")}}, ["config.data.mixture.a"]),
    ({"mixture": {"a/b": ("text:a", 1)}}, ["config.data.mixture", "'a/b'"]),
    ({"mixture": {}}, ["config.data.mixture={}"]),
    ({"mixture": "text:a"}, ["config.data.mixture='text:a'"]),
    ({"eval_sets": {"wiki": 5}}, ["config.data.eval_sets.wiki=5", "source"]),
    ({"eval_sets": {"a": "text:b"}, "mixture": {"a": ("text:a", 1)}}, ["'a'", "rename"]),
    ({"mixture": {"a": ("text:a", 1)}, "subset": "x"}, ["config.data.subset"]),
])  # fmt: skip
def test_mixtures_and_sets_that_mean_nothing_are_refused(change, names):
    refused(lambda: DataConfig(**{"split": "documents", **change}), *names)


def test_a_mixture_of_one_constant_part_is_recorded_as_json_has_it(texts):
    c = make(DataConfig, DataConfig(mixture={"a": (texts["digits"], 1)}))
    again = DataConfig(mixture={"a": [texts["digits"], [[0, 1.0]]]})
    assert c == again and c.mixture == {"a": (texts["digits"], ((0, 1.0),))}
