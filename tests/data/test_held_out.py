"""Splits and the cache: no text on both sides, no text twice, no damaged tokens."""

import itertools
import os

import numpy as np
import pytest
from data_helpers import (
    cache_entries,
    few_examples,
    make_config,
    open_data,
    same,
    split_documents,
    text_of,
    write_folder,
    write_letters,
)
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict
from refusals import refused
from run_files import watched_flushes

from efx.data import disk_cache, write_token_shards
from efx.data.sources import document_digest
from efx.data.tokenizers import ByteTokenizer
from efx.errors import UsageError

TEXT = st.binary(max_size=20).map(lambda data: data.decode("latin-1").encode())


@pytest.fixture
def letters(tmp_path):
    return write_letters(tmp_path)


def test_tinyshakespeare_is_split_as_in_nanogpt(shakespeare_path, tmp_path):
    config = make_config(
        f"text:{shakespeare_path}", tmp_path, tokenizer="chars", eval_fraction=0.1, seq_len=64
    )
    data = open_data(config)
    assert (data.vocab_size, data.train_tokens, data.eval_tokens) == (65, 1_003_854, 111_540)
    text = shakespeare_path.read_text()
    assert data.tokenizer.characters == "".join(sorted(set(text)))
    heldout = np.concatenate([b["inputs"][b["weights"] > 0] for b in data.eval_batches(4)])
    assert data.tokenizer.decode(heldout) == text[1_003_854:-1]


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe:300"])
def test_the_tail_is_the_same_characters_for_all_tokenizers(tokenizer, tmp_path):
    text = "".join(chr(0xE0 + i % 90) + chr(97 + i % 26) + " " for i in range(200))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    config = make_config(f"text:{tmp_path / 'text.txt'}", tmp_path, tokenizer=tokenizer)
    data = open_data(config)
    assert (text_of(data, "train"), text_of(data, "eval")) == (text[:450], text[450:])


@few_examples
@given(st.lists(TEXT, min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_the_tail_drops_no_text_and_cuts_no_character(texts, fraction):
    whole = b"".join(texts)
    try:
        _, sides = split_documents(texts, "tail", fraction)
    except UsageError:
        assert int((1 - fraction) * len(whole.decode())) in (0, len(whole.decode()))
        return
    train, heldout = (b"".join(sides[side]) for side in ("train", "eval"))
    count = int((1 - fraction) * len(whole.decode()))
    assert heldout == whole.decode()[count:].encode()
    if len(set(texts)) == len(texts):
        assert train + heldout == whole


def test_both_halves_of_a_document_may_be_equal(tmp_path):
    (tmp_path / "text.txt").write_text("one line\n" * 20)
    config = make_config(f"text:{tmp_path}/text.txt", tmp_path, eval_fraction=0.5)
    data = open_data(config)
    assert text_of(data, "train") == text_of(data, "eval") == "one line\n" * 10


@few_examples
@given(st.lists(TEXT.filter(bool), min_size=1, max_size=20), st.floats(0.01, 0.99))
def test_documents_are_whole_and_on_one_side(texts, fraction):
    def split():
        return split_documents(texts, "documents", fraction)[1]

    if len(set(texts)) < 2:
        refused(split, "config.data.split='documents'")
        return
    assert sorted(itertools.chain(*split().values())) == sorted(texts)
    sides = {side: set(found) for side, found in split().items()}
    assert sides["train"] and sides["eval"] and not sides["train"] & sides["eval"]
    # One document more or less changes no other's side unless the boundary moves past that one.
    order = sorted(set(texts), key=document_digest)
    small = [t for t in order if texts.count(t) * len(t) <= fraction * len(b"".join(texts))]
    if sides["eval"] <= set(small):
        assert sides["eval"] == set(small[: len(sides["eval"])]) or len(sides["eval"]) == 1


def test_the_held_out_documents_are_the_same_in_every_version(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "copy.txt").unlink()
    config = make_config(f"text:{folder}", tmp_path, split="documents")
    assert {*text_of(open_data(config), "eval")} == {*"bfk"}


def test_held_out_documents_come_near_the_fraction_and_neither_side_is_empty():
    def heldout(texts, fraction):
        return split_documents(texts, "documents", fraction)[1]["eval"]

    rng = np.random.default_rng(0)
    texts = [rng.bytes(int(n)).hex().encode() for n in rng.integers(1, 200, 300)]
    for fraction in (0.05, 0.1, 0.5):
        found = len(b"".join(heldout(texts, fraction)))
        assert found / len(b"".join(texts)) == pytest.approx(fraction, abs=0.005)
    equal = [bytes([i]) * 10 for i in range(1, 11)]
    assert len(heldout(equal, 0.99)) == 9 and len(heldout(equal, 0.01)) == 1
    for large in (bytes([i]) * 500 for i in range(65, 91)):  # wherever its hash sorts
        found = heldout([*equal, large], 0.05)
        assert large not in found and len(found) == 3


def test_a_trained_tokenizer_does_not_see_held_out_text(tmp_path):
    (tmp_path / "text.txt").write_text("abcab " * 100 + "xyzxy " * 50)
    config = make_config(
        f"text:{tmp_path / 'text.txt'}", tmp_path, tokenizer="bpe:262", eval_fraction=0.34
    )
    tokenizer = open_data(config).tokenizer
    merged = b"".join(t for t in tokenizer.token_bytes() if len(t) > 1)
    assert b"abc" in merged and not set(merged) & set(b"xyz")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:270"])
def test_text_is_tokenised_once(tokenizer, letters, tmp_path):
    def entries():
        return {path: path.stat().st_ino for path in cache_entries(tmp_path)}

    config = make_config(f"text:{letters}", tmp_path, tokenizer=tokenizer)
    first, before = open_data(config), entries()
    assert len(before) == (1 if tokenizer == "bytes" else 2)
    second = open_data(config)
    same(next(first.train_iterator()), next(second.train_iterator()))
    assert second.fingerprint == first.fingerprint
    # The tokenizer of a run selects the same entry.
    second.tokenizer.save(tmp_path / "tokenizer.json")
    config.tokenizer = "bytes"
    third = open_data(config, tokenizer_path=tmp_path / "tokenizer.json")
    assert third.fingerprint == first.fingerprint and third.vocab_size == first.vocab_size
    assert entries() == before


def test_the_fingerprint_depends_on_all_that_determines_the_tokens(letters, tmp_path):
    base = make_config(f"text:{letters}", tmp_path)
    prints = [open_data(base).fingerprint]
    for key, value in (("eval_fraction", 0.3), ("tokenizer", "chars"), ("max_bytes", 300)):
        changed = ConfigDict(base.to_dict() | {key: value})
        prints.append(open_data(changed).fingerprint)
    moved = tmp_path / "moved.txt"
    moved.write_bytes(letters.read_bytes())
    assert open_data(make_config(f"text:{moved}", tmp_path)).fingerprint == prints[0]
    stat = moved.stat()
    moved.write_bytes(letters.read_bytes().replace(b"a", b"z", 1))
    os.utime(moved, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the content counts, not the time
    data = open_data(make_config(f"text:{moved}", tmp_path))
    prints.append(data.fingerprint)
    assert text_of(data, "train").startswith("z")
    assert len(set(prints)) == len(prints)


def test_cached_files_and_token_shards_are_flushed_before_they_can_be_read(tmp_path):
    with watched_flushes() as flushes:
        disk_cache.cached_folder(
            tmp_path / "cache", "kind", "key", lambda f: (f / "file").write_text("x")
        )
        write_token_shards(tmp_path / "shards", ByteTokenizer(), ["ab" * 9, "cd"], ["e"])
        assert flushes.early == flushes.missing(tmp_path / "shards") == []
        assert flushes.missing(tmp_path / "cache/kind/key") == []


def test_an_interrupted_build_leaves_no_cache_entry(tmp_path):
    def broken(folder):
        (folder / "half").write_text("half")
        raise KeyError("half way")

    with pytest.raises(KeyError):
        disk_cache.cached_folder(tmp_path / "cache", "kind", "key", broken)
    assert cache_entries(tmp_path) == []
    (tmp_path / "cache/kind/.key.a.tmp").mkdir()  # of a process that was killed
    write = lambda f: (f / "file").write_text("x")  # noqa: E731
    folder = disk_cache.cached_folder(tmp_path / "cache", "kind", "key", write)
    assert cache_entries(tmp_path) == [folder] and folder.name == "key"
