"""Splitting and caching: nothing on both sides, nothing twice, nothing damaged."""

import json
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
from data_helpers import (
    make_config,
    open_data,
    same,
    split_documents,
    usage_error,
    write_folder,
    write_letters,
)
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

import efx.data
from efx.data import bpe, corpus, disk_cache, held_out, sources
from efx.errors import UsageError


@pytest.fixture
def letters(tmp_path):
    return write_letters(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


def test_tinyshakespeare_is_split_as_nanogpt_splits_it(shakespeare_path, tmp_path):
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
@pytest.mark.parametrize("eval_fraction", [0.1, 0.25, 0.5])
def test_tail_splits_by_characters_alike_for_all_tokenizers(tokenizer, eval_fraction, tmp_path):
    text = "".join(chr(0xE0 + i % 90) + chr(97 + i % 26) + " " for i in range(200))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    config = make_config(
        f"text:{tmp_path / 'text.txt'}", tmp_path, tokenizer=tokenizer, eval_fraction=eval_fraction
    )
    data = open_data(config)
    cut = int((1 - eval_fraction) * len(text))
    streams = {part: data.tokenizer.decode(s.arrays()[0]) for part, s in data._streams.items()}
    assert streams == {"train": text[:cut], "eval": text[cut:]}


class _Documents:
    """A source in memory."""

    name = "documents"

    def __init__(self, texts):
        self._texts = texts

    def documents(self):
        for i, text in enumerate(self._texts):
            if text:
                yield sources.Document(str(i), text)


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_tail_loses_nothing_and_cuts_no_character(texts, fraction):
    texts = [t.decode("latin-1").encode() for t in texts]
    whole = b"".join(texts)
    try:
        pieces = list(split_documents(_Documents(texts), "tail", fraction))
    except UsageError:
        assert int((1 - fraction) * len(whole.decode())) in (0, len(whole.decode()))
        return
    assert b"".join(data for _, _, data in pieces) == whole
    parts = [part for part, _, _ in pieces]
    assert parts == sorted(parts, key=["train", "eval"].index) and set(parts) == {"train", "eval"}
    train = b"".join(data for part, _, data in pieces if part == "train").decode()
    assert len(train) == int((1 - fraction) * len(whole.decode()))


def test_long_texts_are_cut_in_strides(monkeypatch):
    text = "aé漢😀" * 50
    monkeypatch.setattr(held_out, "_STRIDE", 7)
    pieces = list(split_documents(_Documents([text.encode()]), "tail", 0.3))
    assert [data.decode() for _, _, data in pieces] == [text[:140], text[140:]]


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=20), st.floats(0.01, 0.99))
def test_documents_are_whole_and_on_one_side(texts, fraction):
    if len(set(texts)) < 2:
        with pytest.raises(UsageError, match="at least 2 are needed"):
            list(split_documents(_Documents(texts), "documents", fraction))
        return
    pieces = list(split_documents(_Documents(texts), "documents", fraction))
    assert [data for _, _, data in pieces] == texts
    sides = {side: {t for part, _, t in pieces if part == side} for side in ("train", "eval")}
    assert sides["train"] and sides["eval"] and not sides["train"] & sides["eval"]
    # One document more or less stays where it is unless the boundary moves past it.
    order = sorted(set(texts), key=sources.document_digest)
    small = [t for t in order if texts.count(t) * len(t) <= fraction * len(b"".join(texts))]
    if sides["eval"] <= set(small):
        assert sides["eval"] == set(small[: len(sides["eval"])]) or len(sides["eval"]) == 1


def test_neither_side_is_left_empty_nor_filled_by_one_document():
    def heldout(texts, fraction):
        pieces = split_documents(_Documents(texts), "documents", fraction)
        return [data for part, _, data in pieces if part == "eval"]

    equal = [bytes([i]) * 10 for i in range(1, 11)]
    assert len(heldout(equal, 0.99)) == 9 and len(heldout(equal, 0.01)) == 1
    for large in (bytes([i]) * 500 for i in range(65, 91)):  # wherever its hash comes
        found = heldout([*equal, large], 0.05)
        assert large not in found and len(found) == 3


def test_documents_come_near_the_fraction_asked_for():
    rng = np.random.default_rng(0)
    texts = [rng.bytes(int(n)).replace(b"\0", b"x") for n in rng.integers(1, 200, 300)]
    for fraction in (0.05, 0.1, 0.5):
        pieces = split_documents(_Documents(texts), "documents", fraction)
        heldout = sum(len(data) for part, _, data in pieces if part == "eval")
        assert heldout / len(b"".join(texts)) == pytest.approx(fraction, abs=0.005)


def test_bpe_does_not_see_held_out_text(tmp_path):
    text = "abcab " * 100 + "xyzxy " * 50
    (tmp_path / "text.txt").write_text(text)
    config = make_config(
        f"text:{tmp_path / 'text.txt'}", tmp_path, tokenizer="bpe:262", eval_fraction=0.34
    )
    tokenizer = open_data(config).tokenizer
    merged = b"".join(t for t in tokenizer.token_bytes() if len(t) > 1)
    assert b"abc" in merged and not set(merged) & set(b"xyz")


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe:270"])
def test_progress_within_a_long_text_is_logged(tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(corpus, "_REPORT_SECONDS", 0)
    monkeypatch.setattr(bpe, "_CHUNK", 2000)
    (tmp_path / "text.txt").write_text("ab cd " * 20_000)
    caplog.set_level("INFO", "efx")
    open_data(make_config(f"text:{tmp_path / 'text.txt'}", tmp_path, tokenizer=tokenizer))
    reports = [r.getMessage() for r in caplog.records if "characters" in r.getMessage()]
    assert len(reports) >= (2 if tokenizer != "bpe:270" else 6)  # a split is a text of its own


def entries(tmp_path):
    found = (tmp_path / "cache").glob("*/*")
    return sorted(p for p in found if p.is_dir())


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe:270"])
def test_text_is_tokenised_once(tokenizer, letters, tmp_path, monkeypatch):
    config = make_config(f"text:{letters}", tmp_path, tokenizer=tokenizer)
    first = open_data(config)
    count = 1 if tokenizer == "bytes" else 2
    assert len(entries(tmp_path)) == count
    monkeypatch.setattr(held_out, "pieces", None)  # neither tokenised nor trained again
    second = open_data(config)
    same(next(first.train_iterator()), next(second.train_iterator()))
    assert second.fingerprint == first.fingerprint
    # A run's own tokenizer finds the same entry.
    second.tokenizer.save(tmp_path / "tokenizer.json")
    config.tokenizer = "bytes"
    third = open_data(config, tokenizer_path=tmp_path / "tokenizer.json")
    assert third.fingerprint == first.fingerprint and third.vocab_size == first.vocab_size
    assert len(entries(tmp_path)) == count


def test_what_determines_the_tokens_is_in_the_key(letters, tmp_path):
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
    os.utime(moved, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # content counts, not the clock
    data = open_data(make_config(f"text:{moved}", tmp_path))
    prints.append(data.fingerprint)
    assert data._streams["train"].arrays()[0][0] == ord("z")
    assert len(set(prints)) == len(prints)


DAMAGE = {
    "flipped": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "emptied": lambda p: p.write_bytes(b""),
    "removed": lambda p: p.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["train.bin", "eval_spans.npy", "info.json", "manifest.json"])
def test_a_damaged_entry_is_built_again(damage, file, letters, tmp_path, caplog):
    config = make_config(f"text:{letters}", tmp_path)
    before = next(open_data(config).train_iterator())
    (entry,) = entries(tmp_path)
    DAMAGE[damage](entry / file)
    same(next(open_data(config).train_iterator()), before)
    assert "damaged" in caplog.text
    assert entries(tmp_path) == [entry] and disk_cache._intact(entry)
    assert sorted(p.name for p in entry.iterdir()) == [
        "eval.bin", "eval_spans.npy", "info.json", "manifest.json", "train.bin", "train_spans.npy",
    ]  # fmt: skip


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def broken(folder):
        (folder / "half").write_text("half")
        raise KeyError("half way")

    with pytest.raises(KeyError):
        disk_cache.cached_folder(tmp_path / "cache", "kind", "key", broken)
    assert entries(tmp_path) == []
    (tmp_path / "cache" / "kind" / "key.tmp-dead").mkdir()  # of a process that was killed
    disk_cache.cached_folder(
        tmp_path / "cache", "kind", "key", lambda f: (f / "file").write_text("x")
    )
    assert [p.name for p in entries(tmp_path)] == ["key"]


def test_of_two_without_locks_the_first_wins(tmp_path):
    """As on a file system that has no locks: another process finishes while this one builds."""

    def build(folder):
        (folder / "file").write_text("mine")
        other = tmp_path / "kind" / "key"
        other.mkdir()
        (other / "file").write_text("theirs")
        disk_cache._seal(other)

    found = disk_cache.cached_folder(tmp_path, "kind", "key", build)
    assert (found / "file").read_text() == "theirs"
    assert [p.name for p in (tmp_path / "kind").iterdir() if p.is_dir()] == ["key"]


def test_large_files_are_checked_in_places(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_BLOCK", 4)
    monkeypatch.setattr(disk_cache, "_CHECKED_BLOCKS", 3)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(42)))
    whole = disk_cache.checksums(path)
    assert len(whole) == 4 and whole[0] == 42
    for byte, seen in ((0, True), (41, True), (20, True), (5, False)):
        data = bytearray(range(42))
        data[byte] ^= 1
        path.write_bytes(data)
        assert (disk_cache.checksums(path) != whole) == seen


def test_of_an_entry_with_many_files_some_blocks_are_read(tmp_path, monkeypatch):
    """However many they are; the sizes of all are looked at."""
    monkeypatch.setattr(disk_cache, "_BLOCK", 4)
    monkeypatch.setattr(disk_cache, "_CHECKED_AGAIN", 5)

    def build(folder):
        for i in range(9):
            (folder / f"{i}.bin").write_bytes(bytes(range(8)))

    folder = disk_cache.cached_folder(tmp_path, "kind", "key", build)
    read, checksum = [], disk_cache._checksum
    monkeypatch.setattr(
        disk_cache,
        "_checksum",
        lambda path, start: read.append((path.name, start)) or checksum(path, start),
    )
    assert disk_cache._intact(folder)
    assert read == [("0.bin", 0), ("2.bin", 0), ("4.bin", 0), ("6.bin", 0), ("8.bin", 4)]
    for name, byte, seen in (("0.bin", 0, True), ("8.bin", 7, True), ("3.bin", 1, False)):
        data = bytearray(range(8))
        data[byte] ^= 1
        (folder / name).write_bytes(data)
        assert disk_cache._intact(folder) != seen
        (folder / name).write_bytes(bytes(range(8)))
    assert disk_cache._intact(folder)
    (folder / "3.bin").write_bytes(bytes(range(7)))
    assert not disk_cache._intact(folder)


def _load_in_a_process(values, queue):
    data = efx.data.load(ConfigDict(values), seed=0)
    queue.put((data.fingerprint, data.train_tokens, data.tokenizer.fingerprint))


def test_two_processes_at_once(letters, tmp_path):
    config = make_config(f"text:{letters}", tmp_path, tokenizer="bpe:270")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_load_in_a_process, args=(config.to_dict(), queue)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert found[0] == found[1] and len(entries(tmp_path)) == 2


def test_what_is_known_of_large_files_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_REMEMBER_FROM", 4)
    path, root, calls = tmp_path / "file", tmp_path / "cache", []
    path.write_text("large")

    def compute():
        calls.append(1)
        return len(calls)

    assert [disk_cache.remember_for_file(root, path, "x", compute) for _ in range(3)] == [1, 1, 1]
    assert disk_cache.remember_for_file(root, path, "y", compute) == 2
    path.write_text("larger")
    assert disk_cache.remember_for_file(root, path, "x", compute) == 3
    for memo in (root / "memo").iterdir():
        memo.write_text(memo.read_text().replace('"value": 3', '"value": 9'))
    assert disk_cache.remember_for_file(root, path, "x", compute) == 4


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EFX_CACHE", str(tmp_path))
    assert disk_cache.cache_root("") == tmp_path and str(disk_cache.cache_root("x")) == "x"
    monkeypatch.delenv("EFX_CACHE")
    assert str(disk_cache.cache_root("")) == os.path.expanduser("~/.cache/efx")


def test_a_warm_cache_needs_neither_jax_nor_a_second(tmp_path):
    config = make_config("stdlib", tmp_path, split="documents", seq_len=64)
    open_data(config)
    program = (
        "import sys, json, time, efx.data\n"
        "from ml_collections import ConfigDict\n"
        "begin = time.perf_counter()\n"
        "data = efx.data.load(ConfigDict(json.loads(sys.argv[1])), seed=3)\n"
        "next(iter(data.eval_batches(2)))\n"
        "print(time.perf_counter() - begin)\n"
        "assert 'jax' not in sys.modules and 'tokenizers' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(config.to_dict())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert float(result.stdout) < 1


def test_an_unwritable_cache(letters, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    config = make_config(f"text:{letters}", tmp_path)
    where = f"config.data.cache_dir='{tmp_path}/cache'"
    usage_error(where, "cannot be written", config_data=config)
