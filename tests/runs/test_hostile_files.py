"""Files from strangers: none is read before its size and kind are known, no name in one leads out
of its folder, and nothing in one is executed."""

import ast
import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from efx import reading, runfolder
from efx.checkpoint import files
from efx.data import disk_cache, load, shards
from efx.data.tokenizers import ByteTokenizer, load_tokenizer
from efx.errors import UsageError
from efx.interop.weights import INDEX, Weights
from efx.metrics import read_metrics, writer
from efx.run_settings import Config
from efx.settings import replaced

CONFIG = {"seed": 0, "steps": 1, "model": {}}
DEEP = "[" * 100_000


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.fixture
def run(tmp_path):
    """A run folder with a checkpoint of no use."""
    path = tmp_path / "run"
    runfolder.open_run(path, CONFIG, command_line=[]).commit({})
    (path / "checkpoints/1/state").mkdir(parents=True)
    (path / "samples").mkdir()
    return path


# ---- where names lead ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../secret", "/dev/zero", "state/../../../secret", "a\0b"])
def test_a_manifest_names_what_is_in_its_checkpoint(tmp_path, name):
    folder = tmp_path / "checkpoints/1"
    folder.mkdir(parents=True)
    manifest = {"files": {"a": [1, "x"], name: [0, "x"]}, "metrics": {}}
    (folder / files.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(files.Damage) as error:
        files.verify(files.as_root(folder))
    one_line(error, f"names {name!r}, a file that is missing in the checkpoint")


BAD_NAMES = ("../a.bin", "/etc/passwd", "..", ".", "", "a/b.bin", "a\0b", "a" * 3000, 5, None)


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
def test_an_index_names_what_is_beside_it(tmp_path, name):
    shards.write_token_shards(tmp_path, ByteTokenizer(), ["a text"])
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["shards"][0]["file"] = name
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UsageError) as error:
        shards.TokenShards("tokens", str(tmp_path), 0, tmp_path)
    one_line(error, "meta.json", f"{name!r} is not the name of a file in this folder")
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "a.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UsageError) as error:
        Weights(tmp_path)
    one_line(error, f"weight_map lists x in {name!r}, not a file name")


# ---- sizes and kinds -------------------------------------------------------------------------


@pytest.mark.parametrize("content, words", [
    ("1" * 11, "it has more than"),
    (DEEP, "it is nested too deeply"),
    ("\ud800", "utf-8"),
    ("{", "Expecting property name"),
    (None, "it is not a file"),
])  # fmt: skip
def test_json_of_a_stranger(tmp_path, content, words):
    path = tmp_path / "x.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content, errors="surrogatepass")
    with pytest.raises(ValueError, match=words):
        reading.read_json(path, most=10 if content != DEEP else reading.MOST_JSON)


def test_every_reader_of_json_takes_it_for_what_it_is(tmp_path, run):
    """Too deep, too large, a pipe: one line each, wherever such a file is read."""
    (tmp_path / "shards").mkdir()
    readers = {
        run / "config.json": lambda path: runfolder.recorded_config(run),
        run / "run.json": lambda path: runfolder.run_record(run),
        tmp_path / "tokenizer.json": load_tokenizer,
        tmp_path / INDEX: lambda path: Weights(tmp_path),
        tmp_path / "shards/meta.json": lambda path: shards.TokenShards(
            "x", str(path.parent), 0, run
        ),
    }
    for path, read in readers.items():
        for kind in ("deep", "large", "pipe"):
            path.unlink(missing_ok=True)
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "deep":
                path.write_text(DEEP)
            else:
                with open(path, "wb") as file:
                    file.truncate(reading.MOST_JSON + 1)
            if kind == "pipe" and path.parent == run:
                continue  # taken for absent
            with pytest.raises(UsageError) as error:
                read(path)
            one_line(error, str(path))


@pytest.mark.parametrize("tokens", [True, 1.0, float("inf"), "7", None, -1, 10**30])
def test_a_number_of_tokens_is_that_of_the_file(tmp_path, tokens):
    shards.write_token_shards(tmp_path, ByteTokenizer(), ["a text"])
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["shards"][0]["tokens"] == 7
    meta["shards"][0]["tokens"] = tokens
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UsageError) as error:
        shards.TokenShards("tokens", str(tmp_path), 0, tmp_path)
    one_line(error)


def test_a_tokenizer_with_an_id_of_millions_makes_no_table_of_them(tmp_path):
    """What is made by the ids is as long as the largest of them, not as their number."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1 << 28}, "unk_token": "a"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(UsageError) as error:
        load_tokenizer(path)
    one_line(error, str(path), f"its largest id is {1 << 28}")
    path.write_text(json.dumps({"kind": "chars", "characters": "ab\ud800"}))
    with pytest.raises(UsageError) as error:
        load_tokenizer(path)
    one_line(error, str(path), "is not a tokenizer", "surrogates not allowed")


@pytest.mark.parametrize("value", [10**9, None, True, 0.5, [1, 2], {"a": 1}])
def test_a_record_whose_text_is_none(tmp_path, value):
    """`bytes` of a number would be as many zeros."""
    from array_record.python.array_record_module import ArrayRecordWriter

    path = tmp_path / "a.array_record"
    records = ArrayRecordWriter(str(path), "group_size:1")
    records.write(json.dumps({"text": value}).encode())
    records.close()
    with pytest.raises(UsageError) as error:
        load(data_of(tmp_path, source=f"arrayrecord:{path}", text_key="text"), seed=0)
    one_line(error, "record 0", f"a value of type {type(value).__name__}")


def data_of(tmp_path, **changes):
    changes = {"tokenizer": "bytes", "seq_len": 4, "cache_dir": str(tmp_path / "cache"), **changes}
    return replaced(Config().data, changes)


def test_a_library_that_panics_is_one_line(tmp_path):
    """What it raises then is no Exception."""
    import tokenizers as library

    inner = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.post_processor = library.processors.TemplateProcessing(
        single="b $A", special_tokens=[("b", 1)]
    )
    contents = json.loads(inner.to_str())
    contents["post_processor"]["special_tokens"]["b"]["id"] = "c"  # what its tokens are kept by
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    load_tokenizer(path)
    contents["post_processor"]["special_tokens"]["c"] = contents["post_processor"][
        "special_tokens"
    ].pop("b")
    path.write_text(json.dumps(contents))
    with pytest.raises(UsageError) as error:
        load_tokenizer(path)
    one_line(error, str(path), "its template cannot be used")


def test_names_and_errors_of_others_are_one_line_that_a_terminal_can_show(tmp_path):
    path = tmp_path / "a\nefx: error: b\x1b[2J\ud800"
    with pytest.raises(UsageError) as error:
        Weights(path)
    one_line(error, "a efx: error: b\\x1b[2J\\ud800/model.safetensors does not exist")


def test_a_record_file_that_is_cut_in_its_records(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    path = tmp_path / "a.array_record"
    records = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for i in range(50):
        records.write(f"record {i} ".encode() * 500)
    records.close()
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
    path.write_bytes(data)
    with pytest.raises(UsageError) as error:
        load(data_of(tmp_path, source=f"arrayrecord:{path}"), seed=0)
    one_line(error, f"cannot read {path}")


def test_a_line_of_the_metrics_without_an_end(run, monkeypatch):
    """Not held in memory to see how long it is; nor taken for the last one, which may be torn."""
    path = run / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"step": 1}\n{"step": ')
        file.truncate(10 * writer._LONGEST_ROW)
    with pytest.raises(UsageError) as error:
        read_metrics(run)
    one_line(error, "metrics.jsonl line 2 is not a metrics row")
    monkeypatch.setattr(writer, "_LONGEST_ROW", 100)
    for long in ('{"step": 2}' + 100 * " ", json.dumps({"step": 2, "x": [0] * 100})):
        path.write_text(f'{{"step": 1}}\n{long}\n{{"step": 3}}\n')
        with pytest.raises(UsageError) as error:
            read_metrics(run)
        one_line(error, "metrics.jsonl line 2 is not a metrics row")
    path.write_text('{"step": 1}\n' + json.dumps({"step": 2, "name": "x" * 70}) + "\n")
    assert len(read_metrics(run)) == 2


def test_arrays_of_the_cache_are_no_larger_than_their_files_and_hold_no_objects(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a text of some length " * 20)
    config = data_of(tmp_path, source=f"text:{text}")
    load(config, seed=0)
    (path,) = tmp_path.glob("cache/tokens/*/train_spans.npy")
    header = "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776, 2), }"
    header = header.ljust(117) + "\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    np.save(path.with_name("objects.npy"), np.array([Loud()]), allow_pickle=True)
    objects = path.with_name("objects.npy").read_bytes()
    path.with_name("objects.npy").unlink()
    for content in (huge, objects, b"\x93NUMPY", b""):
        path.write_bytes(content)
        (path.parent / disk_cache.MANIFEST).unlink()
        disk_cache._seal(path.parent)  # or the entry would be found damaged and made again
        with pytest.raises(UsageError) as error:
            load(config, seed=0)
        one_line(error, str(path.parent), "delete it")


class Loud:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


# ---- nothing is executed ---------------------------------------------------------------------

# Modules that read what they then execute.
EXECUTING = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml"}
# What runs a config file or a study file, which are code.
RUNS_FILES = {"config.py"}


def test_no_reader_executes_what_it_reads(root):
    for path in sorted((root / "efx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & EXECUTING, path
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            assert call not in ("eval", "exec", "__import__", "torch.load", "os.system"), path
            if call.endswith("exec_module"):
                assert path.name in RUNS_FILES, path
            if call in ("np.load", "numpy.load"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given["allow_pickle"] == "False", path


def test_the_check_finds_what_it_looks_for(tmp_path):
    (tmp_path / "efx").mkdir()
    for text in (
        "import pickle",
        "eval('1')",
        "np.load('x', allow_pickle=True)",
        "from dill import x",
    ):
        (tmp_path / "efx/a.py").write_text(text)
        with pytest.raises(AssertionError):
            test_no_reader_executes_what_it_reads(tmp_path)
