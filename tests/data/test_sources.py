"""Sources: documents of each kind of text, token shards, mixtures, subsets, refused files."""

import gzip
import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    make_config,
    open_data,
    read_documents,
    read_texts,
    refuse_data,
    split_documents,
    split_sizes,
    text_of,
    token_ids,
    write_folder,
    write_records,
)
from refusals import refused

import efx.data
from efx.data import bpe, tokenizers
from efx.data.held_out import Subset
from efx.data.sources import document_digest


def test_texts_of_a_file_a_folder_and_a_glob(tmp_path):
    folder = write_folder(tmp_path)
    assert read_texts(f"text:{folder / '00.txt'}", tmp_path) == ["a" * 7]
    every = read_texts(f"text:{folder}", tmp_path)
    # copy.txt has the text of sub/08.txt, which then counts once.
    names = ["00", "03", "06", "09", "copy"] + [f"sub/{i:02d}" for i in (1, 2, 4, 5, 7, 10, 11)]
    assert every == [(folder / f"{n}.txt").read_text() for n in names]
    assert read_texts(f"text:{folder}/*.txt", tmp_path) == every[:5]
    assert read_texts(f"text:{folder}/**/*.txt", tmp_path) == every
    (folder / ".hidden").write_bytes(b"\0")
    assert read_texts(f"text:{folder}", tmp_path) == every
    (folder / "[a].txt").write_text("brackets")
    assert read_texts(f"text:{folder}/[a].txt", tmp_path) == ["brackets"]


def test_a_file_counts_once(tmp_path):
    """Whatever links lead to it, and however many copies there are."""
    folder, expected = tmp_path / "plain", [f"text {i}" for i in range(3)]
    linked = tmp_path / "linked"
    for root in (folder, linked):
        (root / "v1").mkdir(parents=True)
        for i, name in enumerate(("a.txt", "v1/m.txt", "v1/z.txt")):
            (root / name).write_text(expected[i])
    plain = open_data(make_config(f"text:{folder}", tmp_path, seq_len=1))
    (linked / "latest").symlink_to(".")
    assert read_texts(f"text:{linked}/**/*.txt", tmp_path) == expected
    (linked / "v1/up").symlink_to("..")
    (linked / "v2").symlink_to("v1")
    (linked / "v1/n.txt").symlink_to("m.txt")
    (linked / "v1/zz.txt").write_text(expected[1])
    (linked / "broken.txt").symlink_to("absent")
    assert read_texts(f"text:{linked}", tmp_path) == expected
    assert open_data(make_config(f"text:{linked}", tmp_path, seq_len=1)).fingerprint == (
        plain.fingerprint
    )
    (tmp_path / "outside").symlink_to(linked)
    assert read_texts(f"text:{tmp_path / 'outside'}", tmp_path) == expected


def test_a_byte_order_mark_is_not_text(tmp_path):
    mark, text = b"\xef\xbb\xbf", "é text\n" * 30
    (tmp_path / "a.txt").write_bytes(mark + text.encode())
    (tmp_path / "b.jsonl").write_bytes(mark + json.dumps({"text": "\ufeff" + text}).encode())
    for source in ("text:{}/a.txt", "jsonl:{}/b.jsonl"):
        for limit in (0, 1, 50):
            settings = {"max_bytes": limit, "text_key": "text"}
            texts = read_texts(source.format(tmp_path), tmp_path, **settings)
            assert "".join(texts) == text.encode()[: limit or None].decode(errors="ignore")
    (cut,) = read_documents(f"text:{tmp_path}/a.txt", tmp_path, max_bytes=50)
    assert cut.is_cut


def test_the_standard_library(tmp_path):
    names = [d.name for d in read_documents("stdlib", tmp_path)]
    assert any(n.endswith("json/decoder.py") for n in names)
    skipped = {"site-packages", "test", "tests"}
    assert not any(set(n.split("/")) & skipped for n in names)
    # The language reference is read once, or held out.
    assert any("pydoc_data" in n for n in names)
    for name, options in (("mix:stdlib,pydoc", {}), ("stdlib", {"eval_source": "pydoc"})):
        documents = read_documents(name, tmp_path, split="documents", **options)
        assert not any("pydoc_data" in document.name for document in documents)
    data = open_data(make_config("stdlib", tmp_path, split="documents", seq_len=64))
    assert 5e6 < data.train_tokens < 5e7
    assert 0.2 < data.eval_tokens / (data.eval_tokens + data.train_tokens) < 0.3


def test_array_records(tmp_path):
    texts = [f"text {i} é" for i in range(7)]
    write_records(tmp_path / "a-0.array_record", [t.encode() for t in texts[:4]])
    write_records(tmp_path / "a-1.array_record", [t.encode() for t in texts[4:]])
    source = f"arrayrecord:{tmp_path}/a-*.array_record"
    assert read_texts(source, tmp_path) == texts
    assert read_texts(source, tmp_path, max_bytes=12) == [texts[0], "tex"]
    records = [json.dumps({"body": text, "n": 3}).encode() for text in texts[:2]]
    path = tmp_path / "b.array_record"
    write_records(path, records)
    assert read_texts(f"arrayrecord:{path}", tmp_path, text_key="body") == texts[:2]
    config = make_config(f"arrayrecord:{path}", tmp_path, text_key="text")
    refuse_data(config, str(path), "text_key='text'")
    config.text_key = ""
    write_records(path, [b"text", b"bin\0ary"])
    refuse_data(config, f"{path} record 1")
    path.write_text("no records")
    refuse_data(config, str(path))


def test_empty_binary_and_compressed_files_are_refused(tmp_path):
    path = tmp_path / "file.txt"
    config = make_config(f"text:{path}", tmp_path)
    for data in (b"", b"text\0text" * 50, gzip.compress(b"text " * 100), b"x"):
        path.write_bytes(data)
        refuse_data(config, str(path))
    path.write_bytes("é".encode() * 100 + b"\xff" + "é".encode() * 100)
    assert open_data(config).train_tokens == 299
    for tokenizer in ("chars", "bpe:270"):
        config.tokenizer = tokenizer
        refuse_data(config, str(path), "0xff at 200")
    path.unlink()
    path.mkdir()
    refuse_data(config, str(path))
    (path / "a").write_bytes(b"")
    refuse_data(config, str(path))


def test_token_shards_are_read_as_they_were_written(tmp_path):
    tokenizer = tokenizers.ByteTokenizer()
    train, heldout = ["first text", b"second", "third " * 20], ["held out text"]
    efx.data.write_token_shards(tmp_path / "t", tokenizer, train, heldout, shard_tokens=16)
    assert len(list((tmp_path / "t").glob("train-*.bin"))) == 2
    config = make_config(f"tokens:{tmp_path / 't'}", tmp_path)
    data = open_data(config)
    assert text_of(data, "train") == "first textsecond" + "third " * 20
    assert data.train_tokens == sum(map(len, train)) + 2  # ends of documents between them
    assert data.scored_bytes(4) == 12  # the first is not scored
    batch = next(iter(data.eval_batches(4)))
    assert tokenizer.decode(batch["targets"][batch["weights"] > 0]) == "eld out text"
    config.packing = True
    data = open_data(config)
    assert data.scored_tokens("train") == sum(len(t) + 1 for t in train)
    assert data.scored_bytes(4) == 13
    refused(lambda: efx.data.write_token_shards(tmp_path / "t", tokenizer, train), "/t")
    refused(lambda: efx.data.write_token_shards(tmp_path / "u", tokenizer, [[1, 257]]), "/u")


def llm_c_shard(path, ids, magic=20240520, version=1, count=None):
    """Write a shard in the format of llm.c and modded-nanogpt."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    dtype = np.uint32 if magic == 20240801 else np.uint16
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())


@pytest.fixture
def llm_c(tmp_path):
    """A folder of three training shards and one for evaluation; all tokens differ."""
    folder = tmp_path / "fineweb10B"
    folder.mkdir()
    for i, (split, first) in enumerate([("val", 200)] + [("train", 50 * i) for i in range(3)]):
        llm_c_shard(folder / f"fineweb_{split}_{i:06d}.bin", np.arange(first, first + 50))
    return folder


def test_token_shards_of_each_format_are_split(llm_c, tmp_path):
    """By the names of the files; the tail is held out where no file is for evaluation."""
    large = tokenizers.CharTokenizer(map(chr, range(0x10000, 0x10000 + 70_000)))
    efx.data.write_token_shards(tmp_path / "large", large, [np.arange(70_000)])
    (tmp_path / "large_llm_c").mkdir()
    large.save(tmp_path / "large_llm_c/tokenizer.json")
    llm_c_shard(tmp_path / "large_llm_c/a_train.bin", np.arange(70_000), 20240801, 7)
    (tmp_path / "nanogpt").mkdir()
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "nanogpt/train.bin")
    (tmp_path / "both").mkdir()
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "both/train.bin")
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "both/val.bin")
    chars = {"tokenizer": "chars"}
    for path, changes, sizes in (
        ("large", chars, (52_500, 17_500)),
        ("large_llm_c", chars, (52_500, 17_500)),
        ("nanogpt", {}, (150, 50)),
        ("both", {}, (200, 50)),
        ("fineweb10B", {}, (150, 50)),
        ("fineweb10B/fineweb_train_*.bin", {}, (112, 38)),
        ("fineweb10B/*_00000[02].bin", {}, (50, 50)),
    ):
        config = make_config(f"tokens:{tmp_path / path}", tmp_path, **changes)
        assert split_sizes(config) == sizes, path
        if changes is chars:
            assert next(iter(open_data(config).eval_batches(1)))["inputs"][0, 0] == 52_500
    data = open_data(make_config(f"tokens:{llm_c}", tmp_path))
    assert token_ids(data, "train") == [*range(150)]
    assert token_ids(data, "eval") == [*range(200, 250)]


def test_changed_held_out_tokens_are_refused(llm_c, tmp_path):
    tokens = np.arange(200, dtype=np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    config = make_config(f"tokens:{tmp_path}", tmp_path, on_change="keep_split")
    origin = open_data(config).text_record
    tokens[::-1].tofile(tmp_path / "train.bin")
    refuse_data(config, config.source, text_record=origin)
    config.source = f"tokens:{llm_c}"
    origin = open_data(config).text_record
    llm_c_shard(llm_c / "fineweb_val_000000.bin", np.arange(100, 150))
    refuse_data(config, config.source, text_record=origin)


def test_a_held_out_shard_is_not_trained_on(llm_c, tmp_path):
    shard = llm_c / "fineweb_train_000002.bin"
    (llm_c / "copy_val.bin").write_bytes(shard.read_bytes())  # under another name
    config = make_config(f"tokens:{llm_c}/fineweb_*", tmp_path)
    for name in (shard.name, "copy_val.bin"):
        config.eval_source = f"tokens:{llm_c}/{name}"
        data = open_data(config)
        assert token_ids(data, "eval") == [*range(50, 100)]
        assert token_ids(data, "train") == [*range(50), *range(100, 150)]
    # Shards for evaluation are not trained on.
    config.eval_source = f"tokens:{llm_c}/fineweb_val_000000.bin"
    assert split_sizes(config) == (150, 50)


def test_a_training_shard_counts_once_and_is_no_evaluation_shard(llm_c, tmp_path):
    train = llm_c / "fineweb_train_000001.bin"
    (llm_c / "fineweb_train_latest.bin").symlink_to(train.name)
    config = make_config(f"tokens:{llm_c}", tmp_path)
    assert token_ids(open_data(config), "train") == [*range(150)]
    (llm_c / "fineweb_val_000009.bin").write_bytes(train.read_bytes())
    data = open_data(config)
    assert token_ids(data, "train") == [*range(50, 150)]
    assert token_ids(data, "eval") == [*range(200, 250), *range(50)]


def test_token_shards_that_do_not_fit_are_refused(llm_c, tmp_path):
    folder = tmp_path / "t"
    config = make_config(f"tokens:{folder}", tmp_path)
    refuse_data(config, config.source)
    folder.mkdir()
    refuse_data(config, config.source)
    np.arange(300, dtype=np.uint16).tofile(folder / "train.bin")
    refuse_data(config, "train.bin", "299", "'bytes'")
    config.tokenizer = "bpe:512"
    refuse_data(config, "config.data.tokenizer='bpe:512'")
    (folder / "train.bin").unlink()
    efx.data.write_token_shards(folder, tokenizers.CharTokenizer("ab"), ["ab" * 99])
    config.tokenizer = "bytes"  # every id would fit
    refuse_data(config, "config.data.tokenizer='bytes'", "t/tokenizer.json")
    config.tokenizer = "chars"
    config.split = "documents"
    refuse_data(config, "config.data.split='documents'")
    (folder / "train-00000.bin").write_bytes(b"ab" * 9)
    refuse_data(config, "train-00000.bin")
    meta = json.loads((folder / "meta.json").read_text())
    for change in ({"format": "other"}, {"shards": [meta["shards"][0] | {"split": "val"}]}):
        (folder / "meta.json").write_text(json.dumps(meta | change))
        refuse_data(config, "meta.json")
    config = make_config(f"tokens:{llm_c}", tmp_path)
    first, last = llm_c / "fineweb_train_000001.bin", llm_c / "fineweb_train_000003.bin"
    llm_c_shard(last, [50256])
    refuse_data(config, "000003.bin", "50256", "hf:gpt2")
    first.write_bytes(first.read_bytes()[:-2])
    refuse_data(config, str(first))
    for header in (dict(magic=20240521), dict(version=2), dict(count=-50)):
        llm_c_shard(first, range(50), **header)
        refuse_data(config, str(first))
    first.rename(llm_c / "fineweb_000002.bin")
    refuse_data(config, "fineweb_000002.bin")
    for pattern in ("*_train_9*.bin", "*_val_*.bin"):
        config.source = f"tokens:{llm_c}/{pattern}"
        refuse_data(config, config.source)


def test_the_tokenizer_of_token_shards_replaces_one_that_would_be_trained(tmp_path, caplog):
    tokenizer = bpe.train_bpe(["abc abd abc " * 9], 300)
    efx.data.write_token_shards(tmp_path / "t", tokenizer, ["abc abd " * 40])
    config = make_config(f"tokens:{tmp_path / 't'}", tmp_path, tokenizer="bpe:512", seq_len=4)
    with caplog.at_level(logging.INFO, logger="efx"):
        assert open_data(config).vocab_size == tokenizer.vocab_size
    assert "t/tokenizer.json" in caplog.text


def test_a_tokenizer_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(
        lambda: tokenizers.pretrained_tokenizer("hf:some/gpt2"),
        "config.data.tokenizer='hf:some/gpt2'",
    )
    snapshot = tmp_path / "models--some--gpt2/snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--gpt2/refs").mkdir()
    (tmp_path / "models--some--gpt2/refs/main").write_text("a" * 40)
    tokenizers.ByteTokenizer().save(snapshot / "tokenizer.json")
    assert tokenizers.pretrained_tokenizer("hf:some/gpt2").kind == "bytes"


def test_a_hub_that_cannot_be_reached_is_reported_at_once(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # refuses connections
    started = time.monotonic()
    refused(lambda: tokenizers.pretrained_tokenizer("hf:some/gpt2"), "'hf:some/gpt2'")
    assert time.monotonic() - started < 5


# ---- mixtures, pieces of documents, subsets ------------------------------------------------------


@pytest.fixture
def two_folders(tmp_path):
    """A mixture of a folder of letters and a folder of digits."""
    write_folder(tmp_path)
    digits = tmp_path / "digits"
    digits.mkdir()
    for i in range(10):
        (digits / f"{i}.txt").write_text(f"{i} " * (8 + i))
    return f"mix:text:{tmp_path}/texts,text:{digits}"


def test_a_mixture_is_the_documents_of_its_parts(two_folders, tmp_path):
    """`max_bytes` limits each part."""
    parts = two_folders.removeprefix("mix:").split(",")
    for limit in (0, 50):
        mixed = read_documents(two_folders, tmp_path, max_bytes=limit)
        for part in parts:
            found = [(d.name, d.data) for d in mixed if d.component == part]
            alone = read_documents(part, tmp_path, max_bytes=limit)
            assert found == [(d.name, d.data) for d in alone]
            assert not limit or sum(len(data) for _, data in found) == limit
        assert {d.component for d in mixed} == set(parts) and mixed[0].component == parts[0]


def test_a_part_of_a_mixture_may_hold_a_comma(tmp_path):
    names = ["a,b.txt", "c,stdlib.txt", "d.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    mixture = "mix:" + ",".join(f"text:{tmp_path}/{name}" for name in names)
    assert read_texts(mixture, tmp_path) == names
    documents = read_documents(f"mix:pydoc,text:{tmp_path}/a,b.txt", tmp_path)
    assert documents[-1].data == b"a,b.txt" and len(documents) > 50
    refuse_data(make_config("mix:stdlib,txt:a", tmp_path, split="documents"), "'txt:a'")


def test_pieces_are_the_document(tmp_path):
    texts = ["line of text\n" * 40, "é" * 70, "x" * 16, "y" * 17]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    found = read_documents(f"text:{tmp_path}/*.txt", tmp_path, document_bytes=64)
    assert max(len(d.data) for d in found) <= 64
    assert "".join(d.data.decode() for d in found) == "".join(texts)  # no character is cut
    lines = [d for d in found if "/0.txt" in d.name]
    assert len(lines) > 1 and all(d.data.endswith(b"\n") for d in lines)
    (whole,) = read_documents(f"text:{tmp_path}/2.txt", tmp_path, document_bytes=16)
    assert whole.data == b"x" * 16


SETTINGS = dict(split="documents", seq_len=4, batch_size=2)


def by_first_byte(two_folders, tmp_path):
    """[file that lists the training documents of letters, of digits]."""
    config = make_config(two_folders, tmp_path, **SETTINGS)
    texts = [text.encode() for text in read_texts(two_folders, tmp_path)]
    digests = [[], []]
    for text in split_documents(texts, "documents", config.eval_fraction)[1]["train"]:
        digests[text[:1].isdigit()].append(document_digest(text).hex())
    for i in range(2):
        (tmp_path / f"{i}.json").write_text(Subset(digests[i]).to_json())
    return [str(tmp_path / f"{i}.json") for i in range(2)]


def test_a_subset_is_trained_on_alone_and_held_out_text_is_the_same(two_folders, tmp_path):
    whole, letters, digits = (
        open_data(make_config(two_folders, tmp_path, **SETTINGS, subset=path))
        for path in ("", *by_first_byte(two_folders, tmp_path))
    )
    assert letters.train_tokens + digits.train_tokens + 1 == whole.train_tokens  # one divider
    assert not any(c.isdigit() for c in text_of(letters, "train"))
    assert not any(c.isalpha() for c in text_of(digits, "train"))
    assert text_of(letters, "eval") == text_of(digits, "eval") == text_of(whole, "eval")
    assert len({data.fingerprint for data in (whole, letters, digits)}) == 3
    assert letters.subset == Subset.load(tmp_path / "0.json").key != digits.subset
    assert whole.subset is None


def test_a_subset_of_other_documents_or_a_damaged_one_is_refused(two_folders, tmp_path):
    path, _ = by_first_byte(two_folders, tmp_path)
    config = make_config(two_folders, tmp_path, **SETTINGS | dict(subset=path, document_bytes=32))
    refuse_data(config, "config.data.subset")
    config.document_bytes = 0
    stored = json.loads(Path(path).read_text())
    for damaged in (json.dumps(stored | {"documents": stored["documents"][1:]}), "{", "[]"):
        Path(path).write_text(damaged)
        refuse_data(config, f"config.data.subset='{path}'")
    Path(path).unlink()
    refuse_data(config, f"config.data.subset='{path}'")
