"""Files from strangers: none is read before its size and kind are known, no name in one leads out
of its folder, and nothing in one is executed."""

import json
import re

import numpy as np
import pytest
from data_helpers import make_config, write_records
from refusals import refused
from safetensors.numpy import save_file

from efx import io, run_dir
from efx.checkpoint import manifest
from efx.data import load, shards
from efx.data.tokenizers import ByteTokenizer, load_tokenizer
from efx.interop.weights import INDEX, Weights
from efx.logging import read_metrics

CONFIG = {"seed": 0, "steps": 1, "model": {}}
DEEP = "[" * 100_000


@pytest.fixture
def run(tmp_path):
    """A run directory with an empty checkpoint."""
    path = tmp_path / "run"
    run_dir.open_run(path, CONFIG, command_line=[]).commit({})
    (path / "checkpoints/1/state").mkdir(parents=True)
    return path


# ---- where names lead ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/dev/zero", "state/../../../secret", "a\0b"])
def test_a_manifest_names_files_of_its_checkpoint(tmp_path, name):
    folder = tmp_path / "checkpoints/1"
    folder.mkdir(parents=True)
    contents = {"files": {"a": [1, "x"], name: [0, "x"]}, "metrics": {}}
    (folder / manifest.MANIFEST).write_text(json.dumps(contents))
    with pytest.raises(manifest.Damage) as error:
        manifest.verify(manifest.as_root(folder))
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "", "a\0b", 5])
def test_an_index_of_weights_names_files_beside_it(tmp_path, name):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "a.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    refused(lambda: Weights(tmp_path), INDEX)


@pytest.mark.parametrize(
    "key, value",
    [
        *(("file", name) for name in ("../a.bin", "/etc/passwd", "", "a\0b", 5)),
        *(("tokens", number) for number in (-1, 10**30)),
    ],
)
def test_an_index_of_shards_names_files_beside_it_and_their_tokens(tmp_path, key, value):
    shards.write_token_shards(tmp_path, ByteTokenizer(), ["a text"])
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["shards"][0][key] = value
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    refused(lambda: shards.TokenShards("tokens", str(tmp_path), 0, tmp_path), str(tmp_path))


# ---- sizes and kinds -------------------------------------------------------------------------


def test_every_reader_of_json_refuses_deep_and_large_files(tmp_path, run):
    (tmp_path / "shards").mkdir()
    readers = {
        run / "config.json": lambda path: run_dir.recorded_config(run),
        run / "run.json": lambda path: run_dir.run_record(run),
        tmp_path / "tokenizer.json": load_tokenizer,
        tmp_path / INDEX: lambda path: Weights(tmp_path),
        tmp_path / "shards/meta.json": lambda path: shards.TokenShards(
            "x", str(path.parent), 0, run
        ),
    }
    for path, read in readers.items():
        for content in (DEEP, b"\xed\xa0\x80", "{", io.MOST_JSON + 1):
            path.unlink(missing_ok=True)
            if isinstance(content, int):
                with open(path, "wb") as file:
                    file.truncate(content)
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
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


def test_a_line_of_the_metrics_without_an_end_is_refused(run):
    """It is neither read into memory nor taken for a torn last line."""
    with open(run / "metrics.jsonl", "wb") as file:
        file.write(b'{"step": 1}\n{"step": ')
        file.truncate(200 << 20)
    refused(lambda: read_metrics(run), "metrics.jsonl", "line 2")


# ---- nothing is executed ---------------------------------------------------------------------

# Imports and calls that execute what they read; files of configs and studies are code.
EXECUTING = re.compile(
    r"^ *(import|from) (pickle|cPickle|dill|cloudpickle|shelve|marshal|joblib|yaml)\b"
    r"|(?<![\w.])(eval|exec|__import__)\(|\btorch\.load\(|\bos\.system\(|\bexec_module\("
    r"|allow_pickle=(?!False)",
    re.MULTILINE,
)


def test_no_reader_executes_what_it_reads(root):
    for path in sorted((root / "efx").rglob("*.py")):
        code = path.read_text()
        found = [match[0] for match in EXECUTING.finditer(code)]
        assert not found or (path.name, found) == ("load.py", ["exec_module("]), (path, found)
        for call in re.finditer(r"\b(?:np|numpy)\.load\(.*?\n", code):
            assert "allow_pickle=False" in call[0], (path, call[0])
