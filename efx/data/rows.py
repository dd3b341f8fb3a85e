"""Rows as texts: JSON lines, parquet files, ArrayRecord files, data sets of Hugging Face.

Files are read as streams: some hundred rows are in memory. Each function yields (name of the row,
[bytes of its text]).
"""

import importlib
import itertools
import json
import logging
import os
import zlib
from io import BufferedReader

from efx import io
from efx.data.disk_cache import cached_folder, content_key, file_digests
from efx.errors import TransientError, UsageError, extra

log = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
_ROWS_AT_ONCE = 128


def _text_of_row(name, row_name, row, text_key):
    """The bytes of the text that a row has under config.data.text_key; b"" for null."""
    if not isinstance(row, dict) or text_key not in row:
        found = f"its keys are {', '.join(row)}" if isinstance(row, dict) else "it has no keys"
        raise UsageError(f"{name}: config.data.text_key={text_key!r} is not in {row_name}: {found}")
    text = row[text_key]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise UsageError(
            f"{name}: config.data.text_key={text_key!r} is of type {type(text).__name__} in "
            f"{row_name}; use the key of a text"
        )
    return text.encode("utf-8", "surrogatepass")


def read_json_lines(name, path, text_key):
    """Yield the lines of a file, which may be compressed (.gz, .zst)."""
    try:
        with _open_decompressed(name, path) as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    row_name = f"{path} line {number}"
                    row = _parse(name, row_name, line)
                    yield row_name, [_text_of_row(name, row_name, row, text_key)]
    except (EOFError, OSError, zlib.error) as error:
        raise UsageError(f"{name}: {path} cannot be read, or is damaged: {error}") from error


def _parse(name, row_name, text):
    try:
        return io.parse_json(text)
    except ValueError as error:
        raise UsageError(f"{name}: {row_name} is not JSON") from error


def _open_decompressed(name, path):
    if str(path).endswith(".zst"):
        # The zstd readers of fsspec and zstandard take a truncated file for a whole one.
        return BufferedReader(_import(name, "pyarrow").input_stream(str(path)))
    import fsspec

    return fsspec.open(path, "rb", compression="infer").open()


def read_parquet(name, path, text_key):
    """Yield the rows of a parquet file."""
    pyarrow, parquet = _import(name, "pyarrow"), _import(name, "pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES) as file:
            # Without a column of this name, the first row is refused and its columns are listed.
            columns = [text_key] if text_key in file.schema_arrow.names else None
            for group in range(file.num_row_groups):  # asked for all, the library reads far ahead
                for batch in file.iter_batches(_ROWS_AT_ONCE, [group], columns):
                    for row in batch.to_pylist():
                        row_name = f"{path} row {number}"
                        yield row_name, [_text_of_row(name, row_name, row, text_key)]
                        number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{name}: {path} is not a parquet file, or is damaged ({error})"
        ) from error


def read_array_records(name, path, text_key):
    """Yield the records: UTF-8 text, or with a `text_key` a JSON object."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(path)
        count = reader.num_records()
        if not count:  # of a file in another format the reader only reports that it has 0
            raise RuntimeError("no records")
        for start in range(0, count, _ROWS_AT_ONCE):
            numbers = range(start, min(start + _ROWS_AT_ONCE, count))
            for number, record in zip(numbers, reader.read(list(numbers)), strict=True):
                row_name = f"{path} record {number}"
                if text_key:
                    row = _parse(name, row_name, record)
                    yield row_name, [_text_of_row(name, row_name, row, text_key)]
                elif b"\0" in record:
                    raise UsageError(
                        f"{name}: {row_name} is binary, not text; set config.data.text_key if it "
                        "is JSON"
                    )
                else:
                    yield row_name, [record]
        reader.close()
    except RuntimeError as error:
        raise UsageError(
            f"{name}: {path} is not an ArrayRecord file, or is damaged ({error})"
        ) from error


def size_of_text(path):
    """The bytes of text in a file, roughly."""
    is_packed = str(path).endswith((".gz", ".zst", ".parquet"))
    return os.path.getsize(path) * (3 if is_packed else 1)


def fetch(name, argument, text_key, max_bytes, root):
    """The path of a JSON lines file with the texts of a data set that the `datasets` library finds.

    The train split of NAME or NAME:CONFIG is streamed into the cache once, up to `max_bytes` bytes
    (0: all of it). It is streamed again if its files change; those of the hub have the revision in
    their address. TransientError if the network failed; the library has retried.
    """
    datasets = _import(name, "datasets", "hf")
    dataset, _, variant = argument.partition(":")
    try:
        builder = datasets.load_dataset_builder(dataset, variant or None)
        stream = builder.as_streaming_dataset(split="train")
    except Exception as error:  # the library raises many unrelated types
        raise _unreadable(name, "the data set", error) from error
    if not builder.config.data_files:
        raise UsageError(
            f"{name}: this data set lists no files, so changes to it cannot be detected; "
            "download its text and use parquet:PATH or jsonl:PATH"
        )
    files = builder.config.data_files["train"]
    local = [path for path in files if os.path.isfile(path)]
    remote = [] if local else [list(files), files.origin_metadata]

    def build(folder):
        log.info("copying %s to %s", name, folder.parent)
        rows, size = iter(stream), 0
        with open(folder / "rows.jsonl", "w") as file:
            for number in itertools.count():
                try:
                    row = next(rows, None)
                except Exception as error:
                    # The library reports a file of the hub that it cannot reach as missing.
                    is_missing = bool(remote) and isinstance(error, FileNotFoundError)
                    raise _unreadable(name, f"row {number}", error, is_missing) from error
                if row is None or (max_bytes and size > max_bytes):
                    return
                text = _text_of_row(name, f"row {number}", row, text_key)
                size += len(text)
                json.dump({"text": text.decode("utf-8", "surrogatepass")}, file)
                file.write("\n")

    key = content_key("hf", file_digests(root, local), remote, text_key, max_bytes)
    return str(cached_folder(root, "fetched", key, build) / "rows.jsonl")


def _unreadable(name, subject, error, is_passing=False):
    refusal = io.unreachable(f"{name}: {subject}", error)
    return TransientError(refusal) if is_passing else refusal


def _import(name, module, needs="data"):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{name} needs {extra(needs)}: {module} is not installed") from error
