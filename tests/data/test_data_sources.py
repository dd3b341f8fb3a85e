"""Where text comes from: each source gives its documents, bad ones give one line."""

import json
import os
import sys

import numpy as np
import pytest
from data_helpers import make_config, open_data, usage_error, write_folder, write_letters

import efx.data
from efx.data import shards, sources, tokenizers
from efx.errors import UsageError


@pytest.fixture
def letters(tmp_path):
    return write_letters(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


def read(source, tmp_path, **changes):
    config = make_config(source, tmp_path, **changes)
    return [d.data.decode() for d in sources.open_source(config, tmp_path / "cache").documents()]


def test_text_of_a_file_a_folder_and_a_glob(folder, tmp_path):
    assert read(f"text:{folder / '00.txt'}", tmp_path) == ["a" * 7]
    every = read(f"text:{folder}", tmp_path)
    names = ["00", "03", "06", "09", "copy"] + [f"sub/{i:02d}" for i in range(12) if i % 3]
    assert every == [(folder / f"{n}.txt").read_text() for n in names]
    assert read(f"text:{folder}/*.txt", tmp_path) == every[:5]
    assert read(f"text:{folder}/**/*.txt", tmp_path) == every
    (folder / ".hidden").write_bytes(b"\0")
    assert read(f"text:{folder}", tmp_path) == every
    (folder / "[a].txt").write_text("brackets")
    assert read(f"text:{folder}/[a].txt", tmp_path) == ["brackets"]


def test_documents_are_separated_where_there_is_a_separator(folder, tmp_path):
    config = make_config(f"text:{folder}", tmp_path, eval_fraction=0.01, seq_len=2)
    every = read(f"text:{folder}", tmp_path)
    ids = open_data(config)._streams["train"].arrays()[0]
    text = "".join("|" if i == 256 else chr(i) for i in ids)
    assert "|".join(every).startswith(text) and len(text) > 400
    config.tokenizer = "chars"
    data = open_data(config)
    assert "".join(every).startswith(data.tokenizer.decode(data._streams["train"].arrays()[0]))


@pytest.mark.parametrize("limit", range(1, 13))
def test_max_bytes_cuts_between_characters(limit, tmp_path):
    for name, text in (("a", "xé"), ("b", ""), ("c", "漢😀zz")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    whole = b"x\xc3\xa9" + "漢😀zz".encode()
    texts = read(f"text:{tmp_path}/*.txt", tmp_path, max_bytes=limit)
    assert all(texts)
    found = "".join(texts).encode()
    assert whole.startswith(found) and limit - 4 < len(found) <= limit
    assert whole[:limit].decode(errors="ignore") == found.decode()


def test_the_standard_library(tmp_path):
    config = make_config("stdlib", tmp_path, split="documents", seq_len=64)
    source = sources.open_source(config, tmp_path)
    names = [d.name for d in source.documents()]
    assert any(n.endswith("json/decoder.py") for n in names)
    assert not any(set(n.split(os.sep)) & {"site-packages", "test", "tests"} for n in names)
    data = open_data(config)
    assert 5e6 < data.train_tokens < 5e7
    assert 0.08 < data.eval_tokens / (data.eval_tokens + data.train_tokens) < 0.35
    again = open_data(config)
    assert again.fingerprint == data.fingerprint


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def test_array_records(tmp_path, monkeypatch):
    import msgpack

    texts = [f"text {i} é" for i in range(7)]
    write_records(tmp_path / "a-0.array_record", [t.encode() for t in texts[:4]])
    write_records(tmp_path / "a-1.array_record", [t.encode() for t in texts[4:]])
    assert read(f"arrayrecord:{tmp_path}/a-*.array_record", tmp_path) == texts
    monkeypatch.setattr(sources, "_RECORDS_AT_ONCE", 2)
    assert read(f"arrayrecord:{tmp_path}/a-*.array_record", tmp_path) == texts
    assert read(f"arrayrecord:{tmp_path}/a-*.array_record", tmp_path, max_bytes=12) == [
        texts[0], "tex",
    ]  # fmt: skip
    packed = [json.dumps({"body": texts[0]}).encode(), msgpack.packb({"body": texts[1], "n": 3})]
    write_records(tmp_path / "b.array_record", packed)
    source = f"arrayrecord:{tmp_path}/b.array_record"
    assert read(source, tmp_path, text_key="body") == texts[:2]
    config = make_config(source, tmp_path, text_key="text")
    usage_error("record 0", "config.data.text_key='text'", config_data=config)


def test_array_records_make_batches(tmp_path):
    write_records(tmp_path / "a.array_record", [b"abcdefghij" * i for i in range(1, 9)])
    config = make_config(f"arrayrecord:{tmp_path}/a.array_record", tmp_path, split="documents",
                         packing=True)  # fmt: skip
    batch = next(open_data(config).train_iterator())
    assert batch["inputs"].shape == (4, 8) and batch["weights"].any()


def test_a_hugging_face_dataset_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed
    config = make_config("hf:some/thing", tmp_path)
    usage_error("config.data.source='hf:some/thing'", ".[hf]", config_data=config)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe:270"])
def test_empty_and_binary_files(tokenizer, tmp_path):
    path = tmp_path / "file.txt"
    config = make_config(f"text:{path}", tmp_path, tokenizer=tokenizer)
    path.write_bytes(b"")
    usage_error(str(path), "is empty", config_data=config)
    path.write_bytes(b"text\0text" * 50)
    usage_error(str(path), "binary", "byte 4", config_data=config)
    path.write_bytes("é".encode() * 100 + b"\xff" + "é".encode() * 100)
    if tokenizer == "bytes":
        assert open_data(config).train_tokens == 299
    else:
        usage_error(str(path), "0xff at 200", "tokenizer=bytes", config_data=config)
    path.write_bytes(b"x")
    usage_error(str(path), "leaves nothing on one side", config_data=config)
    path.unlink()
    path.mkdir()
    usage_error(str(path), "holds no files", config_data=config)
    (path / "a").write_bytes(b"")
    (path / "b").write_bytes(b"")
    usage_error(str(path), "every file is empty", config_data=config)


def test_a_file_that_is_no_array_record(letters, tmp_path):
    config = make_config(f"arrayrecord:{letters}", tmp_path)
    usage_error(str(letters), "not an ArrayRecord file", config_data=config)
    write_records(tmp_path / "bin.array_record", [b"text", b"bin\0ary"])
    config.source = f"arrayrecord:{tmp_path}/bin.array_record"
    usage_error("record 1", "binary", config_data=config)


def test_token_shards_written_and_read(tmp_path):
    tokenizer = tokenizers.ByteTokenizer()
    train, heldout = ["first text", b"second", "third " * 20], ["held out text"]
    meta = efx.data.write_token_shards(tmp_path / "t", tokenizer, train, heldout, shard_tokens=16)
    assert [s["file"] for s in meta["shards"]] == [
        "train-00000.bin", "train-00001.bin", "eval-00000.bin",
    ]  # fmt: skip
    config = make_config(f"tokens:{tmp_path / 't'}", tmp_path)
    data = open_data(config)
    assert data.eval_tokens == 14 and data.train_tokens == sum(map(len, train)) + 3
    assert data.bytes_per_token("eval") == pytest.approx(12 / 13)  # the first is not scored
    batch = next(iter(data.eval_batches(4)))
    assert tokenizer.decode(batch["targets"][batch["weights"] > 0]) == "eld out text"
    assert (next(data.train_iterator())["weights"] == 1).all()
    meta["shards"].reverse()  # the order of the list does not matter to what max_bytes limits
    (tmp_path / "t" / "meta.json").write_text(json.dumps(meta))
    config.max_bytes = 40
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (20, 14)
    config.max_bytes = 0
    config.packing = True
    data = open_data(config)
    rows = data._packing("train")
    assert rows.pairs == sum(len(t) + 1 for t in train)
    assert data.bytes_per_token("eval") == pytest.approx(13 / 14)
    with pytest.raises(UsageError, match="already holds token shards"):
        efx.data.write_token_shards(tmp_path / "t", tokenizer, train)
    with pytest.raises(UsageError, match="outside 0..256"):
        efx.data.write_token_shards(tmp_path / "u", tokenizer, [[1, 257]])


def test_token_shards_of_a_large_vocabulary(tmp_path):
    tokenizer = tokenizers.CharTokenizer(map(chr, range(0x10000, 0x10000 + 70_000)))
    meta = efx.data.write_token_shards(tmp_path / "t", tokenizer, [np.arange(70_000)])
    assert meta["dtype"] == "uint32"
    config = make_config(f"tokens:{tmp_path / 't'}", tmp_path, tokenizer="chars")
    data = open_data(config)
    assert (data.train_tokens, data.eval_tokens, data.vocab_size) == (52_500, 17_500, 70_000)
    assert next(iter(data.eval_batches(1)))["inputs"][0, 0] == 52_500


def test_nanogpt_folders(tmp_path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "train.bin")
    config = make_config(f"tokens:{tmp_path}", tmp_path)
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (150, 50)
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "val.bin")
    data = open_data(config)
    assert (data.train_tokens, data.eval_tokens) == (200, 50)
    config.max_bytes = 100
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (50, 50)


def test_wrong_token_shards_are_one_clear_line(tmp_path):
    where = f"tokens:{tmp_path / 't'}"
    config = make_config(where, tmp_path)
    usage_error(where, "no such folder", config_data=config)
    (tmp_path / "t").mkdir()
    usage_error(where, "neither meta.json nor train.bin", config_data=config)
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "t" / "train.bin")
    usage_error("train.bin", "id 299", "'bytes' has only 257 ids", config_data=config)
    config.tokenizer = "bpe:512"
    usage_error("cannot be made", "tokenizer.json", config_data=config)
    (tmp_path / "t" / "train.bin").write_bytes(b"abc")
    usage_error("train.bin has 3 bytes", config_data=config)
    (tmp_path / "t" / "train.bin").unlink()
    efx.data.write_token_shards(tmp_path / "t", tokenizers.CharTokenizer("ab"), ["ab" * 99])
    config.tokenizer = "bytes"  # every id would fit
    usage_error("'bytes' is not the tokenizer", "t/tokenizer.json", config_data=config)
    config.tokenizer = "chars"
    assert open_data(config).vocab_size == 2
    config.split = "documents"
    usage_error("config.data.split='documents'", "tail", config_data=config)
    config.split = "tail"
    (tmp_path / "t" / "train-00000.bin").write_bytes(b"ab" * 9)
    usage_error("train-00000.bin has 18 bytes, not 396", config_data=config)
    (tmp_path / "t" / "train-00000.bin").unlink()
    usage_error("cannot read", "train-00000.bin", config_data=config)
    (tmp_path / "t" / "meta.json").write_text('{"format": "other", "version": 1}')
    usage_error("meta.json", "'other'", config_data=config)


def test_the_vocabulary_on_disk():
    assert shards.token_dtype(65_536) == np.dtype("<u2")
    assert shards.token_dtype(65_537) == np.dtype("<u4")
