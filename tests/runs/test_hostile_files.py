"""Files of strangers: names in them do not lead out of their directory, damage is one line, and
nothing in them is executed."""

import json
import re

import numpy as np
import pytest
from data_helpers import make_config, write_records
from refusals import refused
from safetensors.numpy import save_file

from efx import io, run_dir
from efx.data import load, shards
from efx.data.tokenizers import ByteTokenizer, load_tokenizer
from efx.interop.import_run import INDEX, Tensors

# Imports and calls that execute what they read; files of configs and studies are code.
EXECUTING = re.compile(
    r"^ *(import|from) (pickle|cPickle|dill|cloudpickle|shelve|marshal|joblib|yaml)\b"
    r"|(?<![\w.])(eval|exec|__import__)\(|\btorch\.load\(|\bos\.system\(|\bexec_module\("
    r"|\b(?:np|numpy)\.load\((?!.*allow_pickle=False)|allow_pickle=(?!False)",
    re.MULTILINE,
)


def test_no_reader_executes_what_it_reads(root):
    for path in sorted((root / "efx").rglob("*.py")):
        found = [match[0] for match in EXECUTING.finditer(path.read_text())]
        assert not found or (path.parent.name, found) == ("config", ["exec_module("]), (path, found)


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", 5])
def test_an_index_names_files_beside_it(tmp_path, name):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "a.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    refused(lambda: Tensors(tmp_path), INDEX)
    shards.write_token_shards(tmp_path, ByteTokenizer(), ["a text"])
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["shards"][0]["file"] = name
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    refused(lambda: shards.TokenShards("tokens", str(tmp_path), tmp_path), str(tmp_path))


def test_every_reader_of_json_refuses_damaged_files(tmp_path):
    run = tmp_path / "run"
    config = {"seed": 0, "steps": 1, "model": {}}
    run_dir.open_run(run, config, command_line=[]).commit({})
    (tmp_path / "shards").mkdir()
    readers = {
        run / "config.json": lambda path: run_dir.RunDir(run).config,
        run / "run.json": lambda path: run_dir.RunDir(run).record,
        tmp_path / "tokenizer.json": load_tokenizer,
        tmp_path / INDEX: lambda path: Tensors(tmp_path),
        tmp_path / "shards/meta.json": lambda path: shards.TokenShards("x", str(path.parent), run),
    }
    for path, read in readers.items():
        for content in (b"\xed\xa0\x80", b"{"):
            path.write_bytes(content)
            refused(lambda: read(path), str(path))  # noqa: B023


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "a").write_text("123")
    assert io.read_text(tmp_path / "a", most=3) == "123"
    with pytest.raises(ValueError):
        io.read_text(tmp_path / "a", most=2)


def test_a_tokenizer_with_an_id_of_millions_is_refused(tmp_path):
    """Tables by id are as long as the largest id."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1 << 28}, "unk_token": "a"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model}))
    refused(lambda: load_tokenizer(path), str(path), str(1 << 28))


def test_a_record_file_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "a.array_record"
    records = [np.random.default_rng(i).bytes(2000).hex().encode() for i in range(50)]
    write_records(path, records)
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
    path.write_bytes(data)
    config = make_config(f"arrayrecord:{path}", tmp_path)
    refused(lambda: load(config, seed=0), str(path))
