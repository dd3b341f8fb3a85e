"""Rows as documents, read as streams: JSON lines, parquet files, data sets of Hugging Face.

However long a file is, no more than some of its rows are in memory, and nothing is unpacked or
downloaded before it is read.
"""

import functools
import gzip
import json
import os
import time
import zlib
from io import BufferedReader, RawIOBase

from efx import io
from efx.data.disk_cache import content_key, file_digests
from efx.data.sources import Document, limited, readable, size_of
from efx.errors import PassingError, UsageError, extra

_BLOCK = 1 << 20
_PACKED_BLOCK = 1 << 14  # decompressed at once, to a thousand times as much at worst
_LONGEST_LINE = 1 << 28
_ROWS_AT_ONCE = 256
_TRIES = 5  # of one row
_RETRY_SECONDS = 1  # before the second try; each later pause is twice as long


class RowFiles:
    """Files of rows, in the order given; `text_key` is the column, or the field, of the text."""

    kind: str

    def __init__(self, name, paths, text_key, max_bytes, root):
        if not text_key:
            raise UsageError(
                f"{name}: config.data.text_key is empty; set it to the key of the text in each "
                "row, e.g. config.data.text_key=text"
            )
        self.name, self._paths, self._key = name, paths, text_key
        self._max_bytes, self._root = max_bytes, root

    def identity(self):
        """Hash of the files' content, as it is on the disk, and of what is read of it."""
        with readable(self.name):
            files = [(path, size_of(self.name, path)) for path in self._paths]
            digests = file_digests(self._root, files)
        return content_key(self.kind, digests, self._key, self._max_bytes)

    def documents(self):
        """Yields a Document a row; rows without text, or with null, are left out."""
        return limited(self._all_documents(), self._max_bytes)

    def _all_documents(self):
        for path in self._paths:
            with readable(self.name):
                for row_name, text in self._texts(path):
                    if isinstance(text, str):
                        yield Document(row_name, text.encode("utf-8", "surrogatepass"))
                    elif text is not None:
                        raise UsageError(
                            f"{self.name}: {row_name}: config.data.text_key={self._key!r} has "
                            f"a value of type {type(text).__name__}, not text"
                        )

    def _texts(self, path):
        """Yields (name of the row, what it has under the key) of a file."""
        raise NotImplementedError


class JsonLines(RowFiles):
    """Files with a JSON object a line, as they are or packed by gzip (.gz) or zstd (.zst)."""

    kind = "jsonl"

    def _texts(self, path):
        for number, line in enumerate(self._lines(path), 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{self.name}: {path} line {number} is not JSON") from error
            if not isinstance(row, dict) or self._key not in row:
                values = row.items() if isinstance(row, dict) else ()
                texts = [key for key, value in values if isinstance(value, str)]
                hint = f"; keys with text: {', '.join(map(repr, texts))}" if texts else ""
                raise UsageError(
                    f"{self.name}: {path} line {number} is not a JSON object with the key"
                    f" config.data.text_key={self._key!r}{hint}"
                )
            yield f"{path} line {number}", row[self._key]

    def _lines(self, path):
        with self._unpacked(path) as file:
            while line := self._read_line(path, file):
                if len(line) > _LONGEST_LINE:
                    raise UsageError(
                        f"{self.name}: {path} has a line of more than {_LONGEST_LINE >> 20} "
                        "MiB; expected JSON lines"
                    )
                yield line

    def _read_line(self, path, file):
        try:
            return file.readline(_LONGEST_LINE + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"{self.name}: cannot decompress {path} ({error})") from error

    def _unpacked(self, path):
        if str(path).endswith(".gz"):
            return gzip.open(path)
        if str(path).endswith(".zst"):
            return BufferedReader(_Zstandard(path, self.name), _BLOCK)
        return open(path, "rb")


class _Zstandard(RawIOBase):
    """The bytes of a zstd file of one or more frames; EOFError where one is cut short."""

    def __init__(self, path, name):
        try:
            import zstandard
        except ImportError:
            raise UsageError(f"{name}: {path} needs {extra('data')}") from None
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._file, self._frame = open(path, "rb"), None
        self._packed = self._ready = b""

    def readable(self):
        """Asked by BufferedReader."""
        return True

    def readinto(self, buffer):
        """Fills `buffer` as far as it goes; 0 at the end of the file."""
        while not self._ready and self._refill():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _refill(self):
        """Unpacks some more; False at the end of the file."""
        self._packed = self._packed or self._file.read(_PACKED_BLOCK)
        if not self._packed:
            if self._frame:
                raise EOFError("the file ends in the middle of a frame")
            return False
        self._frame = self._frame or self._new_frame()
        try:
            self._ready = memoryview(self._frame.decompress(self._packed))
        except self._error as error:
            raise EOFError(str(error)) from error
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True

    def close(self):
        """Closes the file, too."""
        self._file.close()
        super().close()


class Parquet(RowFiles):
    """Parquet files; only the column of the text is read."""

    kind = "parquet"

    def __init__(self, name, paths, text_key, max_bytes, root):
        super().__init__(name, paths, text_key, max_bytes, root)
        try:
            import pyarrow.parquet
        except ImportError:
            raise UsageError(f"{name} needs {extra('data')}: pyarrow is not installed") from None
        self._library = pyarrow

    def _texts(self, path):
        try:
            with self._library.parquet.ParquetFile(path, buffer_size=_BLOCK) as file:
                columns = file.schema_arrow.names
                if self._key not in columns:
                    raise UsageError(
                        f"{self.name}: config.data.text_key={self._key!r} is not a column of "
                        f"{path}; columns: {', '.join(columns)}"
                    )
                # One row group at a time: asked for all, the library reads far ahead.
                groups = range(file.num_row_groups)
                batches = (
                    batch
                    for group in groups
                    for batch in file.iter_batches(
                        _ROWS_AT_ONCE, row_groups=[group], columns=[self._key]
                    )
                )
                rows = (text for batch in batches for text in batch.column(0).to_pylist())
                for number, text in enumerate(rows):
                    yield f"{path} row {number}", text
        except (self._library.ArrowException, OSError) as error:
            raise UsageError(
                f"{self.name}: {path} is not a parquet file, or is damaged ({_first_line(error)})"
            ) from error


class HuggingFace:
    """Rows of the train split of a data set that the `datasets` library finds, as they come.

    Nothing is downloaded first: each pass over the documents reads them where they are.
    """

    def __init__(self, name, argument, text_key, max_bytes, root):
        try:
            import datasets
        except ImportError:
            raise UsageError(f"{name} needs {extra('hf')}: datasets is not installed") from None
        dataset, _, variant = argument.partition(":")
        self.name, self._key, self._max_bytes, self._root = name, text_key, max_bytes, root
        try:
            builder = datasets.load_dataset_builder(dataset, variant or None)
            self._open_stream = functools.partial(builder.as_streaming_dataset, split="train")
            self._open_stream()
        except Exception as error:  # the library raises many unrelated types
            if io.is_network_error(error):  # the library has retried
                raise PassingError(
                    f"{name}: the data set cannot be reached: {_first_line(error)}; check the name"
                    " and the network, then run the same command again"
                ) from error
            raise UsageError(
                f"{name}: the data set cannot be opened: {_first_line(error)}; check the name"
            ) from error
        files_of_split = builder.config.data_files
        if not files_of_split:
            raise UsageError(
                f"{name}: this data set lists no files, so changes to it cannot be detected; "
                "download its text and use parquet:PATH or jsonl:PATH"
            )
        files = files_of_split["train"]
        self._local = [path for path in files if os.path.isfile(path)]
        # The address of a file on the hub has the commit in it; what else a server tells of a file
        # is beside it. What this says of a file on a disk is when it was written.
        self._remote = [] if self._local else [list(files), files.origin_metadata]

    def identity(self):
        """Hash of the content of files on a disk; elsewhere of their addresses, which have the
        revision of the data set in them."""
        with readable(self.name):
            files = [(path, size_of(self.name, path)) for path in self._local]
            digests = file_digests(self._root, files)
        return content_key("hf", digests, self._remote, self._key, self._max_bytes)

    def documents(self):
        """Yields a Document a row; rows without text are left out."""
        return limited(self._all_documents(), self._max_bytes)

    def _all_documents(self):
        for number, row in enumerate(self._rows()):
            if self._key not in row:
                raise UsageError(
                    f"{self.name}: config.data.text_key={self._key!r} is not a column; "
                    f"columns: {', '.join(row)}"
                )
            text = row[self._key]
            if isinstance(text, str):
                yield Document(f"row {number}", text.encode("utf-8", "surrogatepass"))
            elif text is not None:
                raise UsageError(
                    f"{self.name}: row {number}: config.data.text_key={self._key!r} has a "
                    f"value of type {type(text).__name__}, not text"
                )

    def _rows(self):
        """Yields all rows; where the network fails, reopens the stream at the next row."""
        rows, position, number, failures = None, None, 0, 0
        while True:
            try:
                if rows is None:
                    stream = self._open_stream()
                    if position is not None:
                        stream.load_state_dict(position)
                    rows = iter(stream)
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # see above
                problem = f"{self.name}: row {number} cannot be read: {_first_line(error)}"
                # The library reports a file of the hub that it cannot reach as missing.
                is_missing = isinstance(error, FileNotFoundError) and self._remote
                if not (is_missing or io.is_network_error(error)):
                    raise UsageError(f"{problem}; check the data set's files") from error
                failures += 1
                if failures == _TRIES:
                    raise PassingError(
                        f"{problem}; rerun the command when the network works"
                    ) from error
                if rows is not None:
                    position, rows = stream.state_dict(), None
                time.sleep(_RETRY_SECONDS * 2 ** (failures - 1))
            else:
                yield row
                number, failures = number + 1, 0


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
