"""A text that changes between launches of a run, and held-out text of its own."""

import gzip
import itertools
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import (
    few_examples,
    make_config,
    open_data,
    refuse_data,
    split_documents,
    text_of,
    write_folder,
    write_letters,
)
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import efx.data
from efx.data import tokenizers
from efx.errors import UsageError
from efx.train import named_runs


def words(name, count=40):
    """Some text in lines that occur in no other text."""
    return "".join(f"{name} line {i}\n" for i in range(count))


def write(path, texts):
    """Writes a file of the format that its name ends in."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(rows.encode()))
    elif path.suffix == ".bin":
        np.frombuffer("".join(texts).encode(), np.uint8).astype(np.uint16).tofile(path)
    else:
        path.write_text("".join(texts))


OLD, OLDER, NEW = words("old"), words("older", 20), words("new")
MANY_OLD = {f"{i:02d}.txt": [words(f"old {i}", 5)] for i in range(12)}
MANY_NEW = {f"{i:02d}5.txt": [words(f"new {i}", 5)] for i in range(12)}  # between the old ones
ROWS = {"text_key": "text"}
MIXTURE = "mix:text:{0}/*.txt,text:{0}/*.md"
VALIDATION = {"val.bin": [words("val")]}
# Source, settings, files at first, files that are added or replaced.
GROWTHS = {
    "file": ("text:{0}/a.txt", {}, {"a.txt": [OLD]}, {"a.txt": [OLD, NEW]}),
    "folder": ("text:{0}", {}, {"a.txt": [OLD], "b.txt": [OLDER]}, {"c.txt": [NEW]}),
    "mixture": (MIXTURE, {"split": "documents"}, MANY_OLD | {"x.md": [OLDER]}, MANY_NEW),
    "json_lines": ("jsonl:{0}/*.gz", ROWS, {"a.jsonl.gz": [OLD]}, {"b.jsonl.gz": [NEW]}),
    "tokens": ("tokens:{0}", {}, {"train.bin": [OLD]}, {"train.bin": [OLD, NEW]}),
    "shards": ("tokens:{0}", {}, {"train.bin": [OLD]} | VALIDATION, {"train.bin": [OLD, NEW]}),
}


def lines(data, split):
    """The whole lines of a split."""
    return set(text_of(data, split).split("\n")[1:-1])


@pytest.mark.parametrize("kind", GROWTHS)
def test_text_held_out_before_the_source_grew_stays_held_out(kind, tmp_path):
    """A run's text does not change unnoticed, and keep_split holds out the same text as before."""
    source, settings, begin, grow = GROWTHS[kind]
    folder = tmp_path / "text"
    folder.mkdir()
    for name, texts in begin.items():
        write(folder / name, texts)
    config = make_config(source.format(folder), tmp_path, **settings)
    old = open_data(config)
    heldout = lines(old, "eval")
    assert open_data(config, text_record=old.text_record).fingerprint == old.fingerprint
    for name, texts in grow.items():
        write(folder / name, texts)
    refuse_data(config, f"config.data.source={config.source!r}", text_record=old.text_record)
    if config.split == "tail" and kind != "shards":  # a new run trains on it
        assert lines(open_data(config), "train") & heldout
    config.on_change = "keep_split"
    kept = open_data(config, text_record=old.text_record)
    assert lines(kept, "eval") == heldout
    trained = lines(kept, "train")
    assert not trained & heldout and any(line.startswith("new") for line in trained)
    assert lines(old, "train") <= trained | heldout
    # Accepted once, it is the run's text: it needs no setting, and another change is refused.
    config.on_change = "error"
    assert open_data(config, text_record=kept.text_record).fingerprint == kept.fingerprint
    if kind == "folder":
        (folder / "d.txt").write_text("more")
        refuse_data(config, config.source, text_record=kept.text_record)


def test_a_split_whose_held_out_text_has_changed_cannot_be_kept(tmp_path):
    folder = write_folder(tmp_path)
    for split in ("tail", "documents"):
        config = make_config(f"text:{folder}", tmp_path, split=split, on_change="keep_split")
        old = open_data(config)
        (folder / f"0 {split}.txt").write_text("sorts first")
        if split == "tail":
            refuse_data(config, config.source, text_record=old.text_record)
            continue
        assert open_data(config, text_record=old.text_record).eval_tokens == old.eval_tokens
        letters = {*text_of(old, "eval")}
        path = next(p for p in folder.rglob("??.txt") if p.read_text()[0] in letters)
        path.write_text(path.read_text() + "longer")  # one of several
        refuse_data(config, config.source, text_record=old.text_record)
    assert not list((tmp_path / "cache").glob("*/*.tmp-*"))


TEXT = st.binary(max_size=20).map(lambda data: data.decode("latin-1").encode())
TEXTS = st.lists(TEXT, min_size=1, max_size=6)


@few_examples
@given(TEXTS, TEXTS, st.sampled_from(["tail", "documents"]), st.floats(0.05, 0.95))
def test_a_split_is_kept_over_any_growth(old, new, how, fraction):
    """Old documents stay on their side, and no new one is held out."""
    try:
        decision, before = split_documents(old, how, fraction)
    except UsageError:
        return
    _, after = split_documents(old + new, how, fraction, decision)
    if how == "tail":
        assert b"".join(after["eval"]) == b"".join(before["eval"])
        start = len(b"".join(old)) - len(b"".join(before["eval"]))
        ends = itertools.accumulate(map(len, old))
        heldout = {text for text, end in zip(old, ends, strict=True) if end > start}
        added = [text for text in new if text not in heldout]
        assert b"".join(after["train"]) == b"".join(before["train"] + added)
    else:
        assert set(after["eval"]) == set(before["eval"])
        assert not set(after["train"]) & set(before["eval"])


# ---- a held-out text of its own ------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["chars", "bpe:300"])
def test_another_text_is_held_out_as_a_whole(tokenizer, tmp_path):
    train, test = words("train", 60), "zq" * 200
    (tmp_path / "train.txt").write_text(train)
    (tmp_path / "test.txt").write_text(test)
    test_file = f"text:{tmp_path}/test.txt"
    changes = dict(tokenizer=tokenizer, eval_source=test_file, max_bytes=500)
    config = make_config(f"text:{tmp_path}/train.txt", tmp_path, **changes)
    data = open_data(config)
    assert text_of(data, "train") == train[:500]  # max_bytes limits the training text alone
    assert text_of(data, "eval") == test
    assert test_file in data.describe_held_out()
    if tokenizer.startswith("bpe"):
        assert not any(b"zq" in token for token in data.tokenizer.token_bytes())
    # An evaluation without eval_source would hold out text that was trained on.
    config.eval_source = ""
    recorded = dict(text_record=data.text_record, is_recorded_text=False)
    refuse_data(config, "config.data.eval_source=''", **recorded)


def test_documents_of_the_held_out_text_are_not_trained_on(tmp_path, caplog):
    folder = write_folder(tmp_path)
    config = make_config(f"text:{folder}", tmp_path, eval_source=f"text:{folder}/sub/08.txt")
    with caplog.at_level(logging.INFO, logger="efx"):
        data = open_data(config)
    assert data.eval_tokens == 47 and config.eval_source in caplog.text
    assert "i" not in text_of(data, "train")  # it has a copy, too
    config.source = config.eval_source
    refuse_data(config, "training split", "0 tokens")


@pytest.mark.parametrize("split", ["tail", "documents"])
def test_copies_of_held_out_documents_are_not_trained_on(split, tmp_path):
    """With split=tail also those of the document in which the tail begins."""
    documents = [words(f"{i:02d}", 5) for i in range(12)]
    for copies in ([8, 11], [0, 5]):
        write(tmp_path / "a.jsonl.gz", [documents[i] for i in copies] + documents)
        config = make_config(f"jsonl:{tmp_path}/a.jsonl.gz", tmp_path, split=split, **ROWS)
        data = open_data(config)
        trained, heldout = lines(data, "train"), lines(data, "eval")
        assert heldout and not trained & heldout
        # Nothing else is left out, but for the lines that a split cuts.
        assert len(trained | heldout) >= 5 * len(documents) - 3
    write(tmp_path / "a.jsonl.gz", [words("old", 5)] * 8)
    if split == "tail":
        refuse_data(config, "training split", "0 tokens")


def test_a_document_of_a_set_in_which_the_tail_begins_is_not_trained_on(tmp_path):
    documents = [words(name, 10) for name in ("a", "b", "c")]
    for path, texts in (("all", documents), ("set", [documents[1], words("d", 9)])):
        write(tmp_path / f"{path}.jsonl.gz", texts)
    config = make_config(f"jsonl:{tmp_path}/all.jsonl.gz", tmp_path, eval_fraction=0.5, **ROWS)
    assert lines(open_data(config), "train") & set(documents[1].split("\n"))
    config.eval_sets = {"set": f"jsonl:{tmp_path}/set.jsonl.gz"}
    data = open_data(config)
    assert text_of(data, "train") == documents[0]
    assert text_of(data, "eval").endswith(documents[2])


@pytest.mark.parametrize(
    "part", [slice(0, 300), slice(150, 400), slice(300, 550), slice(500, 570), slice(400, None)]
)
def test_a_held_out_file_is_cut_out_of_a_longer_training_file(part, tmp_path):
    text = words("a", 60)
    (tmp_path / "all.txt").write_text(text)
    (tmp_path / "part.txt").write_text(text[part])
    config = make_config(f"text:{tmp_path}/all.txt", tmp_path)
    config.eval_source = f"text:{tmp_path}/part.txt"
    data = open_data(config)
    assert text_of(data, "eval") == text[part]
    assert text_of(data, "train") == text.replace(text[part], "")
    # With a tail, which may begin in the file, or contain it.
    config.eval_sets, config.eval_source = {"part": config.eval_source}, ""
    data = open_data(config)
    remaining = text.removesuffix(text_of(data, "eval"))
    assert len(remaining) == int(0.75 * len(text))
    cut = slice(*part.indices(len(remaining)))
    assert text_of(data, "train") == remaining[: cut.start] + remaining[cut.stop :]
    config.eval_source, config.eval_sets = config.eval_sets["part"], ()
    (tmp_path / "part.txt").write_text("line 7\n")  # by chance
    assert text_of(open_data(config), "train") == text


def test_a_run_with_an_eval_source_is_not_split_for_evaluation(tmp_path):
    """Not a part of its source either."""
    trained = make_config("text:a", tmp_path, eval_source="text:b")
    recorded = json.loads(json.dumps(trained.to_dict()))
    run = SimpleNamespace(
        has_result=True, text_record={}, setting=lambda key: recorded[key.removeprefix("data.")]
    )
    changed = make_config("text:a", tmp_path, eval_source="text:c", max_bytes=50)
    assert named_runs.recorded_text(changed, run) == ({}, False)
    changed.eval_source = ""
    refused(lambda: named_runs.recorded_text(changed, run), "config.data.max_bytes")


@pytest.mark.parametrize("document_bytes", [0, 64])
def test_the_beginning_of_a_held_out_document_is_not_trained_on(document_bytes, tmp_path):
    """Whatever max_bytes leaves of it."""
    for name, text in (("a", words("train", 4)), ("b", words("held"))):
        (tmp_path / f"{name}.txt").write_text(text)
    eval_source = f"text:{tmp_path}/b.txt"
    changes = dict(eval_source=eval_source, document_bytes=document_bytes, seq_len=1)
    for limit in range(60, 200, 7):
        config = make_config(f"text:{tmp_path}/*.txt", tmp_path, max_bytes=limit, **changes)
        assert text_of(open_data(config), "train") == words("train", 4)


def test_tokens_and_text_cannot_be_compared(tmp_path):
    """So neither is the held-out text of a run on the other; an evaluation may score it."""
    letters, known = write_letters(tmp_path), tmp_path / "t/tokenizer.json"
    ids = [np.arange(97, 217), np.arange(100, 102)]
    efx.data.write_token_shards(tmp_path / "t", tokenizers.ByteTokenizer(), ids[:1], ids[1:])
    names, tokens = (f"text:{letters}", f"tokens:{tmp_path / 't'}"), {}
    for source, eval_source in (names, names[::-1]):
        config = make_config(source, tmp_path, eval_source=eval_source)
        refuse_data(config, f"eval_source={eval_source!r}", f"source={source!r}", "compared")
        data = open_data(config, splits=("eval",), tokenizer_path=known)
        tokens[eval_source] = (data.eval_tokens, data.scored_bytes(4))
    assert tokens == {names[0]: (400, 399), names[1]: (123, 121)}


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    for name in ("ab", "xyz"):
        characters = tokenizers.CharTokenizer(words(name))
        efx.data.write_token_shards(tmp_path / name, characters, [words(name)])
    names = {"tokenizer": "chars", "eval_source": f"tokens:{tmp_path}/xyz"}
    config = make_config(f"tokens:{tmp_path}/ab", tmp_path, **names)
    refuse_data(config, "/ab", "/xyz", "tokenizer")
    config.source = config.eval_source.replace("xyz", "ab")
    config.eval_source, config.tokenizer = "", str(tmp_path / "xyz")
    refuse_data(config, "/xyz", "/ab", "tokenizer")


def test_evaluation_needs_no_training_text(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    tokenizers.ByteTokenizer().save(tmp_path / "tokenizer.json")
    config = make_config("text:/gone", tmp_path, eval_source=f"text:{tmp_path}/short.txt")
    known = dict(tokenizer_path=tmp_path / "tokenizer.json")
    data = open_data(config, splits=("eval",), **known)
    assert sum(batch["weights"].sum() for batch in data.eval_batches(4)) == 2
    assert open_data(config, splits=(), **known).vocab_size == 257
    refuse_data(config, "/gone", **known)
    # The run's held-out text may not change either.
    origin = data.text_record
    (tmp_path / "short.txt").write_text("abcd")
    refuse_data(config, config.eval_source, text_record=origin, splits=("eval",), **known)
