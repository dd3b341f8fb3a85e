"""Rows of files and data sets as documents: read as a stream, and bad ones are one line."""

import gzip
import json
import sys
import tracemalloc

import numpy as np
import pytest
from data_helpers import make_config, open_data, served_data_set, usage_error

from efx.data import rows, sources
from efx.errors import PassingError

TEXTS = [f"text {i} é 漢" * (i % 5) for i in range(40)]


def read(source, tmp_path, **changes):
    config = make_config(source, tmp_path, **{"text_key": "text"} | changes)
    return [d.data.decode() for d in sources.open_source(config, tmp_path / "cache").documents()]


def lines(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_gzip(path, data):
    path.write_bytes(gzip.compress(data))


def write_zstd(path, data):
    """Two frames, as files that were put together have."""
    zstandard = pytest.importorskip("zstandard", reason="the extra `data` is not installed")
    half = len(data) // 2
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(data[:half]) + compress(data[half:]))


def write_parquet(path, texts):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, path, row_group_size=max(7, len(texts) // 50))


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_json_lines(packing, tmp_path):
    write = {"": lambda path, data: path.write_bytes(data), ".gz": write_gzip, ".zst": write_zstd}
    data = lines(TEXTS[:30]) + b"\n" + lines([None])
    write[packing](tmp_path / f"a.jsonl{packing}", data)
    write[packing](tmp_path / f"b.jsonl{packing}", lines(TEXTS[30:]).removesuffix(b"\n"))
    texts = [text for text in TEXTS if text]
    assert read(f"jsonl:{tmp_path}/*.jsonl{packing}", tmp_path) == texts
    (tmp_path / "only").mkdir()
    write[packing](tmp_path / "only" / f"a.jsonl{packing}", data)
    source = f"jsonl:{tmp_path / 'only'}"
    assert read(source, tmp_path) == [text for text in TEXTS[:30] if text]
    beginning = "".join(texts).encode()[:30].decode(errors="ignore")
    assert "".join(read(source, tmp_path, max_bytes=30)) == beginning
    first = open_data(make_config(source, tmp_path, text_key="text"))
    write[packing](tmp_path / "only" / f"a.jsonl{packing}", lines(TEXTS[:29]))
    usage_error("has changed since the run started", run_origin=first.origin,
                config_data=make_config(source, tmp_path, text_key="text"))  # fmt: skip


def test_wrong_json_lines_are_one_clear_line(tmp_path):
    path = tmp_path / "a.jsonl"
    config = make_config(f"jsonl:{path}", tmp_path, text_key="text")
    usage_error(config.source, "no such file or folder", config_data=config)
    path.write_bytes(lines(["a"]) + b"{\n")
    usage_error(f"{path} line 2 is not JSON", config_data=config)
    path.write_bytes(lines(["a"]) + b"[" * 100_000)
    usage_error(f"{path} line 2 is not JSON", config_data=config)
    path.write_bytes(lines(["a"]) + b"\xff\xfe\xff\n")
    usage_error(f"{path} line 2 is not JSON", config_data=config)
    path.write_bytes(b'{"texts": "a"}')
    usage_error(f"{path} line 1", "text_key='text'; keys with text: 'texts'", config_data=config)
    path.write_bytes(b'{"text": ["a"]}')
    usage_error(f"{path} line 1", "of type list", config_data=config)
    path.write_bytes(b"[1]")
    usage_error(f"{path} line 1 is not a JSON object", config_data=config)
    config.text_key = ""
    usage_error("config.data.text_key is empty", "config.data.text_key=text", config_data=config)


@pytest.mark.parametrize("write", [write_gzip, write_zstd])
def test_packed_files_that_are_cut_short_or_damaged(write, tmp_path):
    path = tmp_path / f"a.jsonl.{'gz' if write is write_gzip else 'zst'}"
    config = make_config(f"jsonl:{path}", tmp_path, text_key="text")
    write(path, lines(TEXTS * 50))
    packed = path.read_bytes()
    path.write_bytes(packed[:-9])
    usage_error(f"cannot decompress {path}", config_data=config)
    path.write_bytes(packed[: len(packed) // 2] + b"other" + packed[len(packed) // 2 :])
    usage_error(f"{path}", config_data=config)
    path.write_bytes(b"no such thing")
    usage_error(f"cannot decompress {path}", config_data=config)


def test_long_lines_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.jsonl.gz"
    write_gzip(path, b"x" * (40 << 20))
    tracemalloc.start()
    usage_error(f"{path} has a line of more than 1 MiB",
                config_data=make_config(f"jsonl:{path}", tmp_path, text_key="text"))  # fmt: skip
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_rows_are_read_as_a_stream(kind, tmp_path):
    """Property: memory does not grow with the file."""
    path, rng = tmp_path / f"a.{kind}", np.random.default_rng(0)
    texts = [rng.bytes(500).hex() for _ in range(10_000)]
    if kind == "parquet":
        write_parquet(path, texts)
    else:
        write = write_gzip if kind.endswith("gz") else write_zstd
        write(path, lines(texts))
    config = make_config(f"{kind.partition('.')[0]}:{path}", tmp_path, text_key="text")
    documents = sources.open_source(config, tmp_path / "cache").documents()
    del texts
    size = sum(len(next(documents).data) for _ in range(500))  # imports what it needs, too
    tracemalloc.start()
    peak = 0
    for document in documents:
        size += len(document.data)
        if kind == "parquet":  # memory that Python does not know of
            peak = max(peak, sys.modules["pyarrow"].total_allocated_bytes())
    peak += tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 10_000_000 and peak < 3 << 20


def test_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", [*TEXTS[:30], None])
    write_parquet(tmp_path / "b.parquet", TEXTS[30:])
    source = f"parquet:{tmp_path}/*.parquet"
    assert read(source, tmp_path) == [text for text in TEXTS if text]
    config = make_config(source, tmp_path, text_key="body")
    usage_error("text_key='body' is not a column", "id, text", config_data=config)
    config.text_key = "id"
    usage_error("a.parquet row 0", "of type int", config_data=config)
    config.text_key = "text"
    whole = (tmp_path / "b.parquet").read_bytes()
    for damaged in (whole[:-9], b"PAR1", whole.replace(b"text", b"tex\0"), whole[:60] + whole[70:]):
        (tmp_path / "b.parquet").write_bytes(damaged)
        usage_error(str(tmp_path / "b.parquet"), config_data=config)


def test_a_data_set_of_hugging_face_is_a_stream(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `hf` is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "train-0.parquet", [*TEXTS[:30], None])
    write_parquet(folder / "train-1.parquet", TEXTS[30:])
    source = f"hf:{folder}"
    with pytest.MonkeyPatch.context() as patch:  # what would download the whole of it first
        patch.setattr(datasets.DatasetBuilder, "download_and_prepare", None)
        assert read(source, tmp_path) == [text for text in TEXTS if text]
        config = make_config(source, tmp_path, text_key="text")
        first = open_data(config)
    assert open_data(config, run_origin=first.origin).fingerprint == first.fingerprint
    write_parquet(folder / "train-1.parquet", TEXTS[31:])
    usage_error("has changed since the run started", config_data=config,
                run_origin=first.origin)  # fmt: skip
    config.text_key = "body"
    usage_error("text_key='body' is not a column; columns: id, text", config_data=config)
    (folder / "train-1.parquet").write_bytes(b"PAR1")
    config.text_key = "text"
    usage_error(config.source, "row 31 cannot be read", config_data=config)
    usage_error("the data set cannot be opened",
                config_data=make_config(f"hf:{tmp_path}/none", tmp_path))  # fmt: skip


def test_a_stream_resumes_where_the_network_failed(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `hf` is not installed")
    for setting in ("STREAMING_OPEN_MAX_RETRIES", "STREAMING_READ_MAX_RETRIES"):  # the library's
        monkeypatch.setattr(datasets.config, setting, 1)
        monkeypatch.setattr(datasets.config, setting.replace("MAX_RETRIES", "RETRY_INTERVAL"), 0)
    monkeypatch.setattr(rows, "_RETRY_SECONDS", 0.001)
    texts = [f"text {i}" for i in range(40)]
    (tmp_path / "a.jsonl").write_bytes(lines(texts[:30]))
    (tmp_path / "b.jsonl").write_bytes(lines(texts[30:]))
    with served_data_set(tmp_path) as (source, server):
        config = make_config(source, tmp_path, text_key="text")
        opened = sources.open_source(config, tmp_path / "cache")
        for failures in (4, 0):
            server.failures = failures
            assert [document.data.decode() for document in opened.documents()] == texts
        server.failures = 1000
        with pytest.raises(PassingError, match="row 30 cannot be read"):
            list(opened.documents())
