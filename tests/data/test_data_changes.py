"""A text that changes between launches, and held-out text of its own."""

import gzip
import json
import logging
import sys
import sysconfig
import types

import numpy as np
import pytest
from data_helpers import make_config, open_data, usage_error, write_folder, write_letters
from hypothesis import given
from hypothesis import strategies as st
from test_data_sources import write_records

import efx.data
from efx.data import disk_cache, held_out, sources, tokenizers
from efx.errors import UsageError


def words(name, count=40):
    """Some text that says where it is from, in lines: no line is that of another text."""
    return "".join(f"{name} line {i}\n" for i in range(count))


class TextFile:
    source, settings = "text:{0}/a.txt", {}

    def begin(self, folder):
        (folder / "a.txt").write_text(words("old"))

    def grow(self, folder):
        with open(folder / "a.txt", "a") as file:
            file.write(words("new"))


class Folder(TextFile):
    source = "text:{0}"

    def begin(self, folder):
        (folder / "a.txt").write_text(words("old"))
        (folder / "b.txt").write_text(words("older", 20))

    def grow(self, folder):
        (folder / "c.txt").write_text(words("new"))  # sorts last


class Documents(Folder):
    settings = {"split": "documents"}

    def begin(self, folder):
        for i in range(12):
            (folder / f"{i:02d}.txt").write_text(words(f"old {i}", 5))

    def grow(self, folder):
        for i in range(12):  # between the old ones
            (folder / f"{i:02d}5.txt").write_text(words(f"new {i}", 5))


class Glob(Documents):
    source = "text:{0}/*.txt"


class Mixture(Documents):
    source = "mix:text:{0}/*.txt,text:{0}/*.md"

    def begin(self, folder):
        super().begin(folder)
        (folder / "x.md").write_text(words("also old", 5))


class Records(TextFile):
    source = "arrayrecord:{0}/*.array_record"

    def begin(self, folder):
        write_records(folder / "a.array_record", [words("older").encode(), words("old").encode()])

    def grow(self, folder):
        write_records(folder / "b.array_record", [words("new", 20).encode()])


class StandardLibrary(Folder):
    source = "stdlib"

    def begin(self, folder):
        (folder / "a.py").write_text(words("old"))

    def grow(self, folder):
        (folder / "b.py").write_text(words("new"))


class Reference(TextFile):
    source = "pydoc"

    def begin(self, folder):
        sys.modules["pydoc_data.topics"].topics = {"a": words("old")}

    def grow(self, folder):
        sys.modules["pydoc_data.topics"].topics["b"] = words("new")


class JsonLines(TextFile):
    source, settings = "jsonl:{0}/*.gz", {"text_key": "text"}

    def begin(self, folder):
        self.write(folder / "a.jsonl.gz", [words("older"), words("old")])

    def grow(self, folder):
        self.write(folder / "b.jsonl.gz", [words("new", 20)])

    def write(self, path, texts):
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


class HuggingFace(TextFile):
    """Files on the hub, of which nothing is known but address and revision."""

    source, settings = "hf:some/set", {"text_key": "text"}

    def rows(self, revision, texts):
        files = type("Files", (list,), {"origin_metadata": [("some/set", revision)]})
        builder = types.SimpleNamespace(
            config=types.SimpleNamespace(data_files={"train": files(["hf://some/set/a.parquet"])}),
            as_streaming_dataset=lambda split: [{"text": text} for text in texts],
        )
        sys.modules["datasets"].load_dataset_builder = lambda *_: builder

    def begin(self, folder):
        self.rows("1", [words("old")])

    def grow(self, folder):
        self.rows("2", [words("old"), words("new")])


class Tokens(TextFile):
    """nanoGPT's folder without its val.bin: the tail of the tokens is held out."""

    source = "tokens:{0}"

    def begin(self, folder):
        self.write(folder, words("old"))

    def grow(self, folder):
        self.write(folder, words("old") + words("new"))

    def write(self, folder, text):
        np.frombuffer(text.encode(), np.uint8).astype(np.uint16).tofile(folder / "train.bin")


class Shards(Tokens):
    """With it."""

    def begin(self, folder):
        self.write(folder, words("old"))
        np.frombuffer(words("val").encode(), np.uint8).astype(np.uint16).tofile(folder / "val.bin")


KINDS = [TextFile, Folder, Documents, Glob, Mixture, Records, StandardLibrary, Reference,
         JsonLines, HuggingFace, Tokens, Shards]  # fmt: skip


def lines(data, part):
    """The whole lines of a split."""
    stream = data._streams[part]
    text = data.tokenizer.decode(stream.windows([0], len(stream))[0])
    return set(text.split("\n")[1:-1])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_text_held_out_before_the_source_grew_is_trained_on(kind, tmp_path, monkeypatch):
    """Property: a run's text may not change unnoticed, and with keep_split what was held out is
    held out still, all of it and nothing else."""
    text, kind = tmp_path / "text", kind()
    text.mkdir()
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    if kind.source == "pydoc":
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.ModuleType("topics"))
    if kind.source == "stdlib":
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(text)})
    kind.begin(text)
    if kind.source.startswith("mix"):
        kind.source = kind.source.format(text)
    config = make_config(kind.source.format(text), tmp_path, **kind.settings)
    old = open_data(config)
    heldout = lines(old, "eval")
    assert open_data(config, run_origin=old.origin).fingerprint == old.fingerprint
    kind.grow(text)
    told = usage_error("has changed since the run started", "on_change=keep_split",
                       config_data=config, run_origin=old.origin)  # fmt: skip
    assert f"config.data.source={config.source!r}" in told
    if config.split == "tail" and not isinstance(kind, Shards):  # a new run trains on it
        assert lines(open_data(config), "train") & heldout
    config.on_change = "keep_split"
    kept = open_data(config, run_origin=old.origin)
    assert lines(kept, "eval") == heldout
    trained = lines(kept, "train")
    assert not trained & heldout and any(line.startswith("new") for line in trained)
    assert lines(old, "train") <= trained | heldout
    # Accepted once, it is the run's text: no flag is needed, and another change is told again.
    config.on_change = "error"
    assert open_data(config, run_origin=kept.origin).fingerprint == kept.fingerprint
    if kind.source.startswith("text") and not kind.settings:
        (text / "d.txt").write_text("more")
        with open(text / "a.txt", "a") as file:
            file.write("more")
        usage_error("has changed since", config_data=config, run_origin=kept.origin)


def test_a_text_whose_held_out_part_has_changed_cannot_be_kept(tmp_path):
    folder = write_folder(tmp_path)
    for how in ("tail", "documents"):
        config = make_config(f"text:{folder}", tmp_path, split=how, on_change="keep_split")
        old = open_data(config)
        (folder / f"0 {how}.txt").write_text("sorts first")
        if how == "tail":
            usage_error("split cannot be kept", "sort last", config_data=config,
                        run_origin=old.origin)  # fmt: skip
            continue
        assert open_data(config, run_origin=old.origin).eval_tokens == old.eval_tokens
        for path in folder.rglob("*.txt"):
            path.write_text(path.read_text() + "longer")
        usage_error("held-out documents were removed", config_data=config,
                    run_origin=old.origin)  # fmt: skip
    assert not list((tmp_path / "cache").glob("*/*.tmp-*"))


class _Documents:
    name = "documents"

    def __init__(self, texts):
        self._texts = texts

    def documents(self):
        return (sources.Document(str(i), text) for i, text in enumerate(self._texts) if text)


TEXTS = st.lists(st.binary(max_size=20), min_size=1, max_size=6)


@given(TEXTS, TEXTS, st.sampled_from(["tail", "documents"]), st.floats(0.05, 0.95))
def test_a_split_kept_over_any_growth(old, new, how, fraction):
    """By a decision on the old documents the old and new ones fall apart as the old ones did, and
    nothing of the new is held out that was not."""
    try:
        decision = held_out.decide(_Documents(old), how, fraction)
    except UsageError:
        return

    def sides(texts):
        found = {"train": [], "eval": []}
        for part, _, data in held_out.pieces(_Documents(texts), decision):
            found[part].append(data)
        return found

    before, after = sides(old), sides(old + new)
    if how == "tail":
        assert b"".join(after["eval"]) == b"".join(before["eval"])
        assert b"".join(after["train"]) == b"".join(before["train"] + new)
    else:
        assert set(after["eval"]) == set(before["eval"])
        assert not set(after["train"]) & set(before["eval"])


def test_a_text_that_changes_while_it_is_read(tmp_path, monkeypatch):
    """What is kept under a hash is what was hashed."""
    letters = write_letters(tmp_path)
    config = make_config(f"text:{letters}", tmp_path)
    real = sources.TextFiles.documents

    def replaced(self):
        yield from real(self)
        letters.write_text(letters.read_text().upper())

    with monkeypatch.context() as patch:
        patch.setattr(sources.TextFiles, "documents", replaced)
        usage_error("changed while it was read", config_data=config)
    letters.write_text(letters.read_text().lower())
    assert open_data(config).train_tokens == 300


# ---- a held-out text of its own ------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe:300"])
def test_another_text_is_held_out_as_a_whole(tokenizer, tmp_path):
    """Official files: all of the test file is scored, all of the training file is trained on, and
    a trained tokenizer has not seen the test file."""
    train, test = words("train", 60), "zq" * 200
    (tmp_path / "train.txt").write_text(train)
    (tmp_path / "test.txt").write_text(test)
    config = make_config(f"text:{tmp_path}/train.txt", tmp_path, tokenizer=tokenizer,
                         eval_source=f"text:{tmp_path}/test.txt", max_bytes=500)  # fmt: skip
    data = open_data(config)
    streams = {part: data.tokenizer.decode(stream.windows([0], len(stream))[0])
               for part, stream in data._streams.items()}  # fmt: skip
    assert streams == {"train": train[:500], "eval": test}  # max_bytes is of what is trained on
    assert data.held_out_of() == f"all of config.data.eval_source={config.eval_source!r}"
    if tokenizer.startswith("bpe"):
        assert not any(b"zq" in token for token in data.tokenizer.token_bytes())
    config.withhold = True
    less = open_data(config)
    assert less.eval_tokens == data.eval_tokens
    assert less.tokenizer.decode(less._streams["train"].arrays()[0]) == train[:375]
    config.eval_source = ""
    usage_error("config.data.withhold=True: needs config.data.eval_source", config_data=config)


def test_documents_of_the_held_out_text_are_not_trained_on(tmp_path, caplog):
    folder = write_folder(tmp_path)
    config = make_config(f"text:{folder}", tmp_path, eval_source=f"text:{folder}/sub/08.txt")
    with caplog.at_level(logging.INFO, logger="efx"):
        data = open_data(config)
    assert data.eval_tokens == 47 and "2 documents of" in caplog.text  # and its copy
    assert ord("i") not in data._streams["train"].arrays()[0]
    config.source = config.eval_source
    usage_error("no text remains for training", config_data=config)


def test_held_out_text_beside_tokens_and_tokens_beside_text(tmp_path):
    letters = write_letters(tmp_path)
    efx.data.write_token_shards(tmp_path / "t", tokenizers.ByteTokenizer(), ["abc " * 30], ["de"])
    tokens = f"tokens:{tmp_path / 't'}"
    data = open_data(make_config(tokens, tmp_path, eval_source=f"text:{letters}"))
    assert (data.train_tokens, data.eval_tokens) == (121, 400)  # its own held-out shards stay out
    data = open_data(make_config(f"text:{letters}", tmp_path, eval_source=tokens))
    assert (data.train_tokens, data.eval_tokens) == (400, 124)  # all of it
    assert data.bytes_per_token("eval") == pytest.approx(121 / 123)
    config = make_config(f"text:{letters}", tmp_path, eval_source=tokens, tokenizer="chars")
    usage_error("without text", config_data=config)


def test_a_short_text_is_evaluated_without_the_one_trained_on(tmp_path):
    """What evaluation does not need is not opened: the source may be gone."""
    (tmp_path / "short.txt").write_text("abc")
    tokenizers.ByteTokenizer().save(tmp_path / "tokenizer.json")
    config = make_config("text:/gone", tmp_path, eval_source=f"text:{tmp_path}/short.txt")
    known = dict(tokenizer_path=tmp_path / "tokenizer.json")
    data = open_data(config, splits=("eval",), **known)
    batches = list(data.eval_batches(4))
    assert sum(batch["weights"].sum() for batch in batches) == 2
    assert open_data(config, splits=(), **known).vocab_size == 257
    usage_error("/gone", config_data=config, **known)
    # Of a run whose held-out text is a file: that file may not change under it either.
    origin = data.origin
    (tmp_path / "short.txt").write_text("abcd")
    usage_error("config.data.eval_source=", "has changed since", config_data=config,
                run_origin=origin, splits=("eval",), **known)  # fmt: skip


def test_many_small_files_are_not_read_at_every_start(tmp_path, monkeypatch):
    folder = write_folder(tmp_path)
    files = [(str(path), 5) for path in sorted(folder.rglob("*.txt")) if path.stat().st_size]
    monkeypatch.setattr(disk_cache, "_REMEMBER_FROM", 200)  # more than one of them has
    first = disk_cache.file_digests(tmp_path / "cache", files)
    monkeypatch.setattr(disk_cache, "file_digest", None)
    assert disk_cache.file_digests(tmp_path / "cache", files) == first
    (folder / "00.txt").write_text("changed")
    with pytest.raises(TypeError):
        disk_cache.file_digests(tmp_path / "cache", files)
