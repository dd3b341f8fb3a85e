"""Where text comes from: each source gives its documents, bad ones give one line."""

import gzip
import json
import logging
import os
import shutil
import sys

import numpy as np
import pytest
from data_helpers import make_config, open_data, usage_error, write_folder, write_letters

import efx.data
from efx.data import bpe, shards, sources, tokenizers
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
    # A run that is kept within its own text goes on with the text that it began with.
    for run in (folder / "runs/a", folder):
        (run / "samples").mkdir(parents=True)
        for name in ("config.json", "run.json", "samples/step_1.txt"):
            (run / name).write_text("{}")
        assert read(f"text:{folder}", tmp_path) == every
        assert read(f"text:{folder}/**/*.txt", tmp_path) == every
        assert read(f"text:{folder}/*", tmp_path) == every[:5]
        assert read(f"text:{run}/samples", tmp_path) == ["{}"]  # unless it is what is asked for
        assert read(f"text:{run}/samples/*.txt", tmp_path) == ["{}"]
    for name in ("runs", "samples", "config.json", "run.json"):
        remove = shutil.rmtree if (folder / name).is_dir() else os.remove
        remove(folder / name)
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
    path.write_bytes(gzip.compress(b"text " * 100))
    usage_error(str(path), "is compressed: decompress it (only jsonl:", config_data=config)
    path.write_bytes("é".encode() * 100 + b"\xff" + "é".encode() * 100)
    if tokenizer == "bytes":
        assert open_data(config).train_tokens == 299
    else:
        usage_error(str(path), "0xff at 200", "tokenizer=bytes", config_data=config)
    path.write_bytes(b"x")
    usage_error(str(path), "would be empty", config_data=config)
    path.unlink()
    path.mkdir()
    usage_error(str(path), "has no files", config_data=config)
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
    with pytest.raises(UsageError, match="already has token shards"):
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
    usage_error(where, "no such file or folder", config_data=config)
    (tmp_path / "t").mkdir()
    usage_error(where, "neither meta.json nor a shard", "train.bin", config_data=config)
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "t" / "train.bin")
    usage_error("train.bin", "id 299", "'bytes' has only 257 ids", config_data=config)
    config.tokenizer = "bpe:512"
    usage_error("without text", "tokenizer.json", config_data=config)
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
    usage_error("train-00000.bin has 18 bytes, expected 396", config_data=config)
    (tmp_path / "t" / "train-00000.bin").unlink()
    usage_error("cannot read", "train-00000.bin", config_data=config)
    (tmp_path / "t" / "meta.json").write_text('{"format": "other", "version": 1}')
    usage_error("meta.json", "'other'", config_data=config)


def llm_c_shard(path, ids, magic=20240520, version=1, count=None):
    """A shard as llm.c and modded-nanogpt write them."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    dtype = np.uint32 if magic == 20240801 else np.uint16
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())


@pytest.fixture
def llm_c(tmp_path):
    """A folder of three training shards and one for evaluation, of tokens that all differ."""
    folder = tmp_path / "fineweb10B"
    folder.mkdir()
    for i, (split, first) in enumerate([("val", 200)] + [("train", 50 * i) for i in range(3)]):
        llm_c_shard(folder / f"fineweb_{split}_{i:06d}.bin", np.arange(first, first + 50))
    return folder


def test_shards_of_llm_c(llm_c, tmp_path):
    config = make_config(f"tokens:{llm_c}", tmp_path)
    data = open_data(config)
    whole = {part: s.windows([0], len(s))[0].tolist() for part, s in data._streams.items()}
    assert whole == {"train": list(range(150)), "eval": list(range(200, 250))}
    again = open_data(config, run_origin=data.origin)
    assert again.fingerprint == data.fingerprint and "shards" in data.origin["held_out"]
    config.max_bytes = 120
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (60, 50)
    # By patterns; without shards for evaluation the tail is held out.
    config = make_config(f"tokens:{llm_c}/fineweb_train_*.bin", tmp_path)
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (112, 38)
    config.eval_source = f"tokens:{llm_c}/fineweb_val_000000.bin"
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (150, 50)
    config = make_config(f"tokens:{llm_c}/*_00000[02].bin", tmp_path)  # some are left out
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (50, 50)
    llm_c_shard(llm_c / "fineweb_val_000000.bin", np.arange(100, 150))
    usage_error("has changed since the run started", run_origin=data.origin,
                config_data=make_config(f"tokens:{llm_c}", tmp_path))  # fmt: skip


def test_a_training_shard_is_not_held_out_too(llm_c, tmp_path):
    """It was trained on and scored."""
    shard = llm_c / "fineweb_train_000002.bin"
    config = make_config(f"tokens:{llm_c}", tmp_path, eval_source=f"tokens:{shard}")
    words = (
        "config.data.eval_source=",
        f"{shard.name} is also a training shard of",
        "pattern",
    )
    usage_error(*words, config_data=config)
    config.max_bytes = 120  # also if a part of it is trained on, or it is called otherwise
    config.eval_source = f"tokens:{llm_c}/fineweb_train_000001.bin"
    usage_error("fineweb_train_000001.bin is also", config_data=config)
    (llm_c / "copy_val.bin").write_bytes(shard.read_bytes())
    config = make_config(f"tokens:{llm_c}/fineweb_*", tmp_path)
    config.eval_source = f"tokens:{llm_c}/copy_val.bin"
    usage_error("copy_val.bin is also", config_data=config)
    # Its own shards for evaluation are not trained on.
    config.eval_source = f"tokens:{llm_c}/fineweb_val_000000.bin"
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (150, 50)
    config = make_config(f"tokens:{llm_c}/*train_00000[13].bin", tmp_path)
    config.eval_source = f"tokens:{shard}"
    assert (open_data(config).train_tokens, open_data(config).eval_tokens) == (100, 50)


def test_the_tokenizer_of_token_shards_in_place_of_one_that_would_be_trained(tmp_path, caplog):
    tokenizer = bpe.train_bpe(["abc abd abc " * 9], 300)
    efx.data.write_token_shards(tmp_path / "t", tokenizer, ["abc abd " * 40])
    config = make_config(f"tokens:{tmp_path / 't'}", tmp_path, tokenizer="bpe:512", seq_len=4)
    with caplog.at_level(logging.INFO, logger="efx"):
        assert open_data(config).vocab_size == tokenizer.vocab_size
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "config.data.tokenizer='bpe:512'" in line]
    assert f"t/tokenizer.json ({tokenizer.vocab_size} ids)" in line
    config.tokenizer = "bpe:258"  # more ids than asked for are never trained
    usage_error("config.data.tokenizer='bpe:258'", f"has {tokenizer.vocab_size} ids", "use",
                config_data=config)  # fmt: skip


def test_shards_of_llm_c_with_a_large_vocabulary(tmp_path):
    tokenizer = tokenizers.CharTokenizer(map(chr, range(0x10000, 0x10000 + 70_000)))
    tokenizer.save(tmp_path / "tokenizer.json")
    llm_c_shard(tmp_path / "a_train.bin", np.arange(70_000), magic=20240801, version=7)
    config = make_config(f"tokens:{tmp_path}", tmp_path, tokenizer="chars")
    assert next(iter(open_data(config).eval_batches(1)))["inputs"][0, 0] == 52_500


def test_wrong_shards_of_llm_c_are_one_clear_line(llm_c, tmp_path):
    config = make_config(f"tokens:{llm_c}", tmp_path)
    first, last = llm_c / "fineweb_train_000001.bin", llm_c / "fineweb_train_000003.bin"
    llm_c_shard(last, [50256])
    usage_error("000003.bin has token id 50256", "config.data.tokenizer=hf:gpt2",
                config_data=config)  # fmt: skip
    whole = first.read_bytes()
    first.write_bytes(whole[:-2])
    usage_error(str(first), "1122 bytes, expected 1124 bytes by its header", config_data=config)
    first.write_bytes(whole[:100])
    usage_error(str(first), "100 bytes, expected 1124 bytes by its header", config_data=config)
    llm_c_shard(first, range(50), magic=20240521)
    usage_error(str(first), "starts with 20240521", "20240520", config_data=config)
    llm_c_shard(first, range(50), version=2)
    usage_error(str(first), "version 2", "efx reads version 1", config_data=config)
    llm_c_shard(first, range(50), count=-50)
    usage_error(str(first), "-50 tokens", config_data=config)
    llm_c_shard(first, range(50), count=2**31 - 1)  # nothing of that size is reserved
    usage_error(str(first), "expected 4294968318 bytes by its header", config_data=config)
    first.write_bytes(b"")
    usage_error(str(first), "starts with 0", config_data=config)
    first.write_bytes(whole)
    (llm_c / "fineweb_train_000002.bin").unlink()
    usage_error("fineweb_train_000002.bin is missing", "pattern", config_data=config)
    last.rename(llm_c / "fineweb_000002.bin")
    usage_error("fineweb_000002.bin", "must contain either train or val", config_data=config)
    config.source = f"tokens:{llm_c}/*_train_9*.bin"
    usage_error(config.source, "no file matches", config_data=config)
    config.source = f"tokens:{llm_c}/*_val_*.bin"
    usage_error(config.source, "no shard has training tokens", config_data=config)


def test_a_tokenizer_of_the_hub_is_in_its_cache(tmp_path, monkeypatch):
    """config.data.tokenizer=hf:gpt2 is how the tokens of llm.c are named."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = make_config("stdlib", tmp_path, tokenizer="hf:some/gpt2", max_bytes=9000)
    usage_error("config.data.tokenizer='hf:some/gpt2'", "check the name and the network",
                config_data=config)  # fmt: skip
    model = tmp_path / "models--some--gpt2"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("a" * 40)
    (model / "snapshots" / ("a" * 40)).mkdir(parents=True)
    made = bpe.train_bpe(["some text of some words"], 270)
    made.save(model / "snapshots" / ("a" * 40) / "tokenizer.json")
    assert open_data(config).tokenizer.fingerprint == made.fingerprint


def test_the_vocabulary_on_disk():
    assert shards.token_dtype(65_536) == np.dtype("<u2")
    assert shards.token_dtype(65_537) == np.dtype("<u4")
