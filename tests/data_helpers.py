"""Shared helpers of the tests of efx.data: small texts, token shards that count.

Only those that read a source, split it, or return all tokens of a split look inside efx.data.
"""

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from refusals import refused

import efx.data
from efx.config.run import DataConfig
from efx.config.schema import defaults, make
from efx.data import sources, tokenizers
from efx.data.texts import Texts

# A slow example on a busy machine is not an error.
few_examples = settings(max_examples=15, deadline=None)


def make_config(source, tmp_path, **changes):
    config = defaults(DataConfig())
    small = dict(seq_len=8, batch_size=4, eval_fraction=0.25, text_key="")
    small |= dict(source=source, cache_dir=str(tmp_path / "cache"))
    config.update(small | changes)
    return config


def open_data(config, **changes):
    return efx.data.load(config, **(dict(seed=3) | changes))


def refuse_data(config, *names, **load):
    """Loading `config` raises a UsageError of one line in which each of `names` occurs."""
    refused(lambda: open_data(config, **load), *names)


def counting_data(folder, length, eval_length=None, *, seed=3, files=1, **changes):
    """Data in which each token id is its position: `length` to train on, `eval_length` held out."""
    eval_length = eval_length or length // 2
    characters = map(chr, range(0x10000, 0x10000 + max(length, eval_length)))
    tokenizer = tokenizers.CharTokenizer(characters)
    for name, count in (("train", length), ("eval", eval_length)):
        parts = np.array_split(np.arange(count), files)
        efx.data.write_token_shards(folder / name, tokenizer, parts, shard_tokens=1)
    changes = dict(tokenizer="chars", eval_source=f"tokens:{folder}/eval") | changes
    return open_data(make_config(f"tokens:{folder}/train", folder, **changes), seed=seed)


def write_letters(tmp_path):
    """Write a text of 400 characters in which no 4 consecutive ones occur twice."""
    pairs = itertools.product("abcdefghijklmnopqrst", repeat=2)
    path = tmp_path / "letters.txt"
    path.write_text("".join(a + b for a, b in pairs if a != b)[:400])
    return path


def write_folder(tmp_path):
    """12 documents of different lengths, each of its own letter; one occurs twice."""
    path = tmp_path / "texts"
    (path / "sub").mkdir(parents=True)
    for i in range(12):
        where = path / ("sub" if i % 3 else ".") / f"{i:02d}.txt"
        where.write_text(chr(ord("a") + i) * (7 + 5 * i))
    (path / "copy.txt").write_text((path / "sub" / "08.txt").read_text())
    (path / "empty.txt").write_text("")
    return path


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def read_documents(source, tmp_path, **changes):
    """The documents of a source."""
    c = make(DataConfig, make_config(source, tmp_path, **{"split": "documents", **changes}))
    setting, root = "config.data.source", tmp_path / "cache"
    return list(sources.open_source(source, setting, c, root, c.max_bytes).documents())


def read_texts(source, tmp_path, **changes):
    return [document.data.decode() for document in read_documents(source, tmp_path, **changes)]


def split_documents(texts, method, eval_fraction, record=None):
    """(record, {"train" or "eval": bytes of documents and parts of them, in order})."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        path.write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in texts))
        changes = dict(split=method, eval_fraction=eval_fraction, text_key="text")
        changes["on_change"] = "keep_split"
        config = make_config(f"jsonl:{path}", Path(folder), **changes)
        found = Texts(make(DataConfig, config), text_record=record)
        return found.record, found.documents()


def token_ids(data, split):
    """All token ids of a split."""
    return np.concatenate(data._streams[split].arrays).tolist()


def text_of(data, split):
    return data.tokenizer.decode(token_ids(data, split))


def cache_entries(tmp_path):
    return sorted(path for path in (tmp_path / "cache").glob("*/*") if path.is_dir())


def split_sizes(config):
    """(training tokens, held-out tokens)"""
    data = open_data(config)
    return data.train_tokens, data.eval_tokens


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)
