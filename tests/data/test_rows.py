"""JSON lines, parquet and Hugging Face data sets: read as streams, bad rows refused by file."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest
from data_helpers import make_config, open_data, read_texts, refuse_data

from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import sources
from efx.errors import TransientError

TEXTS = [f"text {i} é 漢" * (i % 5) for i in range(40)]


def read(source, tmp_path, **changes):
    return read_texts(source, tmp_path, **dict(text_key="text") | changes)


def lines(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_gzip(path, data):
    path.write_bytes(gzip.compress(data))


def write_zstd(path, data):
    """Two frames, as concatenated files have."""
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
    beginning = "".join(texts).encode()[:30].decode(errors="ignore")
    found = read(f"jsonl:{tmp_path}/a.jsonl{packing}", tmp_path, max_bytes=30)
    assert "".join(found) == beginning


def test_bad_json_lines_are_refused_by_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    config = make_config(f"jsonl:{path}", tmp_path, text_key="text")
    for data, line in (
        (lines(["a"]) + b"{\n", "line 2"),
        (lines(["a"]) + b"\xff\xfe\xff\n", "line 2"),
        (b'{"texts": "a"}', "text_key='text'"),
        (b'{"text": ["a"]}', "line 1"),
        (b"[1]", "line 1"),
    ):
        path.write_bytes(data)
        refuse_data(config, str(path), line)
    config.text_key = ""
    refuse_data(config, "config.data.text_key")


@pytest.mark.parametrize("write", [write_gzip, write_zstd])
def test_truncated_and_damaged_compressed_files_are_refused(write, tmp_path):
    path = tmp_path / f"a.jsonl.{'gz' if write is write_gzip else 'zst'}"
    config = make_config(f"jsonl:{path}", tmp_path, text_key="text")
    write(path, lines(TEXTS * 50))
    whole = path.read_bytes()
    half = len(whole) // 2
    for damaged in (whole[:-9], whole[:half] + b"other" + whole[half:], b"no such thing"):
        path.write_bytes(damaged)
        refuse_data(config, str(path))


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_memory_does_not_grow_with_the_file(kind, tmp_path):
    path, rng = tmp_path / f"a.{kind}", np.random.default_rng(0)
    texts = [rng.bytes(2500).hex() for _ in range(2000)]
    write_parquet(path, texts) if kind == "parquet" else write_gzip(path, lines(texts))
    c = make(DataConfig, make_config("stdlib", tmp_path, text_key="text"))
    source = f"{kind.partition('.')[0]}:{path}"
    documents = sources.open_source(source, "", c, tmp_path / "cache").documents()
    del texts
    size = sum(len(next(documents).data) for _ in range(100))  # also imports the libraries
    arrow = pytest.importorskip("pyarrow").total_allocated_bytes  # Python does not count these
    tracemalloc.start()
    before, peak = arrow(), 0
    for document in documents:
        size += len(document.data)
        peak = max(peak, arrow() - before)
    peak += tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 10_000_000 and peak < 3 << 20


def test_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", [*TEXTS[:30], None])
    write_parquet(tmp_path / "b.parquet", TEXTS[30:])
    source = f"parquet:{tmp_path}/*.parquet"
    assert read(source, tmp_path) == [text for text in TEXTS if text]
    config = make_config(source, tmp_path, text_key="body")
    refuse_data(config, "text_key='body'", "id, text")
    config.text_key = "id"
    refuse_data(config, "a.parquet row 0")
    config.text_key = "text"
    whole = (tmp_path / "b.parquet").read_bytes()
    for damaged in (whole[:-9], b"PAR1", whole.replace(b"text", b"tex\0")):
        (tmp_path / "b.parquet").write_bytes(damaged)
        refuse_data(config, str(tmp_path / "b.parquet"))


def test_a_hugging_face_data_set_is_read_as_a_stream(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `hf` is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "train-0.parquet", [*TEXTS[:30], None])
    write_parquet(folder / "train-1.parquet", TEXTS[30:])
    source = f"hf:{folder}"
    config = make_config(source, tmp_path, text_key="text")
    with pytest.MonkeyPatch.context() as patch:  # it would download all files first
        patch.setattr(datasets.DatasetBuilder, "download_and_prepare", None)
        assert read(source, tmp_path) == [text for text in TEXTS if text]
        first = open_data(config)
    assert open_data(config, text_record=first.text_record).fingerprint == first.fingerprint
    write_parquet(folder / "train-1.parquet", TEXTS[31:])
    refuse_data(config, source, "on_change", text_record=first.text_record)
    config.text_key = "body"
    refuse_data(config, "text_key='body'", "id, text")
    (folder / "train-1.parquet").write_bytes(b"PAR1")
    config.text_key = "text"
    refuse_data(config, source, "row 31")
    refuse_data(make_config(f"hf:{tmp_path}/none", tmp_path), f"hf:{tmp_path}/none")


def test_a_network_that_fails_is_a_passing_error(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `hf` is not installed")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.jsonl").write_bytes(lines(TEXTS))

    def rows(self):
        yield {"text": "a"}
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", rows)
    with pytest.raises(TransientError, match="row 1"):
        read(f"hf:{tmp_path}/set", tmp_path)
