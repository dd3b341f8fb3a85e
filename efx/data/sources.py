"""Where text comes from: every source is a list of documents (bytes) and a hash of their content.

    text:PATH          a file, a folder (every file below it) or a glob; each file is a document
    stdlib             the source code of the running Python's standard library
    pydoc              the language reference that comes with Python; each topic is a document
    arrayrecord:GLOB   ArrayRecord files; each record is a document
    jsonl:PATH         a JSON object a line (.jsonl, .jsonl.gz, .jsonl.zst); each is a document
    parquet:PATH       parquet files; each row is a document
    hf:NAME[:CONFIG]   the train split of a Hugging Face dataset; each row is a document
    mix:A,B,...        the documents of several of these, one after another (`mixture.py`)

(`tokens:PATH`, text that is already tokenised, is in `shards.py`.)
"""

import functools
import glob
import hashlib
import itertools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from efx import io, run_dir
from efx.data.disk_cache import MANIFEST, content_key, fetched, file_digests
from efx.errors import UsageError, nearest

KINDS = ("stdlib", "text", "tokens", "arrayrecord", "jsonl", "parquet", "hf", "pydoc", "mix")
_WITHOUT_ARGUMENT = ("stdlib", "pydoc")

# Left out of the standard library: what is installed into it, its tests (a third of it and more,
# absent on some systems) and files that the build of this Python generated.
_STDLIB_SKIP_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_STDLIB_SKIP_FOLDERS |= {"idle_test", "lib-dynload"}
_STDLIB_SKIP_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
_RECORDS_AT_ONCE = 256
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gzip, zstd, zip: how they begin


@dataclass(frozen=True)
class Document:
    """One text: `name` for messages, `data` its bytes, `component` of a mixture that it is from."""

    name: str
    data: bytes
    component: str = ""

    @property
    def text(self):
        return self.data.decode("utf-8", "replace")


def parse(source, key="config.data.source"):
    """Splits `config.data.source`, or another setting `key` like it, into (kind, argument).

    Raises:
      UsageError: unknown kind (names the nearest), or no argument where one is needed.
    """
    kind, colon, argument = str(source).partition(":")
    if kind not in KINDS:
        hint = nearest(kind, KINDS)
        if os.path.exists(str(source)):
            hint = f" (for a file or folder use 'text:{source}')"
        raise UsageError(
            f"{key}={source!r}: unknown kind{hint}; use stdlib, pydoc, text:PATH, tokens:PATH, "
            "arrayrecord:GLOB, jsonl:PATH, parquet:PATH, hf:NAME or mix:A,B"
        )
    bare = kind in _WITHOUT_ARGUMENT
    if bare == bool(argument) or (bare and colon):
        form = {"arrayrecord": "arrayrecord:GLOB", "mix": "mix:A,B"}
        form |= {name: name for name in _WITHOUT_ARGUMENT}
        expected = form[kind] if kind in form else f"{kind}:{'NAME' if kind == 'hf' else 'PATH'}"
        raise UsageError(f"{key}={source!r}: expected {expected}")
    return kind, argument


def open_source(config_data, root, key="source"):
    """The source of documents that `config_data` names; `root` is the cache folder.

    Documents are cut into pieces of `config_data.document_bytes`, if that is not 0. With the key
    "eval_source" that source is opened, and read whole whatever `config_data.max_bytes` is.
    """
    from efx.data.mixture import Pieces

    limit = config_data.max_bytes if key == "source" else 0
    source = _open(config_data, getattr(config_data, key), root, f"config.data.{key}", limit)
    size = config_data.document_bytes
    return Pieces(source, size) if size else source


def _open(config_data, spec, root, key, limit, skip=()):
    from efx.data import mixture, rows

    kind, argument = parse(spec, key)
    name = f"{key}={spec!r}"
    if kind == "mix":
        components = mixture.parse(name, argument)
        # The standard library's source has the language reference in it: once is enough.
        skip = {"pydoc_data"} if "pydoc" in components else set()
        opened = [
            (component, _open(config_data, component, root, key, limit, skip))
            for component in components
        ]
        return mixture.Mixture(name, opened)
    if kind == "pydoc":
        return mixture.Topics(name, limit)
    if kind == "stdlib":
        return TextFiles(name, _stdlib_files(name, skip), limit, root, skip_binary=True)
    if kind == "text":
        return TextFiles(name, _text_files(name, argument, root), limit, root)
    if kind == "arrayrecord":
        return ArrayRecords(name, matching(name, argument, root), config_data.text_key, limit, root)
    if kind in ("jsonl", "parquet"):
        files = rows.JsonLines if kind == "jsonl" else rows.Parquet
        paths = _text_files(name, argument, root)
        return files(name, paths, config_data.text_key, limit, root)
    if kind == "hf":
        return rows.HuggingFace(name, argument, config_data.text_key, limit, root)
    raise ValueError(f"{kind} has no documents")


def check_present(spec, key):
    """UsageError unless a setting's source can be one and its files, if on a disk, are there.

    Nothing is read: a study looks for the text of all its runs before the first of them trains.
    """
    from efx.data import mixture

    kind, argument = parse(spec, key)
    name = f"{key}={spec!r}"
    if kind == "mix":
        for component in mixture.parse(name, argument):
            check_present(component, key)
    elif io.is_remote(argument):
        return
    elif kind == "tokens":
        if not os.path.isdir(os.path.expanduser(argument)):
            _some(name, argument, _matching(argument))
    elif kind in ("text", "jsonl", "parquet"):
        _some(name, argument, _found(argument))
    elif kind == "arrayrecord":
        _some(name, argument, _matching(argument))


def matching(name, pattern, root=None):
    """Files that match `pattern`, sorted; the name of an existing file matches itself alone.

    Those in an object store are copied into the cache folder `root`.
    """
    if io.is_remote(pattern):
        return _fetched(name, pattern, root)
    return sorted(_some(name, pattern, _matching(pattern)))


def _matching(pattern):
    """Iterator over the files that match a pattern, or of the one that it names; but for those of
    runs, see `_without_runs`."""
    path = os.path.expanduser(pattern)
    if os.path.isfile(path):
        return iter([path])
    first = next(i for i, part in enumerate([*Path(path).parts, "*"]) if glob.has_magic(part))
    top = os.path.join(*Path(path).parts[:first]) if first else "."
    return _without_runs(top, filter(os.path.isfile, glob.iglob(path, recursive=True)))


def _found(argument):
    """Iterator over the files in a folder, or that match a pattern."""
    path = os.path.expanduser(argument)
    return _below(path) if os.path.isdir(path) else _matching(argument)


def _below(top):
    """Iterator over the files in a folder, but for hidden ones and those of runs."""

    def files():
        for folder, folders, names in os.walk(top):
            here = [f for f in folders if not f.startswith(".")]
            folders[:] = [f for f in here if not run_dir.is_run(os.path.join(folder, f))]
            yield from (os.path.join(folder, f) for f in names if not f.startswith("."))

    return _without_runs(top, files())


def _without_runs(top, paths):
    """Iterator over the paths below a folder that are in no run's folder, nor, where it is one
    itself, what a run writes into it: a run that keeps its folder within its text would find
    another text when it goes on."""
    is_run = functools.cache(run_dir.is_run)
    for path in paths:
        parts = Path(os.path.relpath(path, top)).parts
        if parts[0] in run_dir.WRITTEN and is_run(top):
            continue
        if not any(is_run(os.path.join(top, *parts[:i])) for i in range(1, len(parts))):
            yield path


def _some(name, argument, paths):
    """Iterator over the same files, of which one is looked for; UsageError if there is none."""
    first = next(paths, None)
    if first is not None:
        return itertools.chain([first], paths)
    path = os.path.expanduser(argument)
    if not os.path.isdir(path):
        problem = "no file matches" if glob.has_magic(path) else "no such file or folder"
    elif next(_below(path), None) is None:
        problem = "the folder has no files"
    else:
        problem = f"this is a folder; use its files, as in {argument}/*"
    raise UsageError(f"{name}: {problem}")


def _fetched(name, address, root):
    paths = [path for path in fetched(name, address, root).iterdir() if path.name != MANIFEST]
    return [str(path) for path in sorted(paths, key=lambda path: unquote(path.name))]


def _text_files(name, argument, root):
    if io.is_remote(argument):
        return _fetched(name, argument, root)
    path = os.path.expanduser(argument)
    if not os.path.isdir(path):
        return matching(name, argument, root)
    paths = _some(name, argument, _below(path))
    return sorted(paths, key=lambda p: Path(os.path.relpath(p, path)).as_posix())


def _stdlib_files(name, skip=()):
    root, skip = sysconfig.get_paths()["stdlib"], _STDLIB_SKIP_FOLDERS | set(skip)
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and not f.startswith("config-")]
        paths += [
            os.path.join(folder, f)
            for f in files
            if f.endswith(".py") and not f.startswith(_STDLIB_SKIP_FILES)
        ]
    if not paths:
        raise UsageError(f"{name}: no Python source code in {root}; use text:PATH")
    return sorted(paths, key=lambda p: Path(os.path.relpath(p, root)).as_posix())


class TextFiles:
    """Files as documents, in the order given; empty files are skipped."""

    def __init__(self, name, paths, max_bytes, root, skip_binary=False):
        self.name, self._root, self._skip_binary = name, root, skip_binary
        self._files = []
        remaining = max_bytes or float("inf")
        for path in paths:
            take = min(size_of(name, path), remaining)
            remaining -= take
            if take:
                self._files.append((path, int(take)))
        if not self._files:
            problem = f"{paths[0]} is empty" if len(paths) == 1 else "every file is empty"
            raise UsageError(f"{name}: {problem}")

    def identity(self):
        """Hash of the content and its order; names and folders of the files do not matter."""
        with readable(self.name):
            return content_key("text", file_digests(self._root, self._files))

    def documents(self):
        """Yields a Document a file. Raises UsageError on a binary file."""
        for path, size in self._files:
            with readable(self.name), open(path, "rb") as file:
                data = file.read(size)
                cut = bool(file.read(1))
            if cut:
                data = whole_characters(data)
            if b"\0" in data or (self._skip_binary and not _is_utf8(data)):
                if self._skip_binary:
                    continue
                what = (
                    f"is binary (a NUL at byte {data.index(0)}), not text; select the text files,"
                )
                hint = "for example with a glob"
                if data.startswith(_PACKED):
                    what = "is compressed:"
                    hint = "decompress it (only jsonl: reads compressed files)"
                raise UsageError(f"{self.name}: {path} {what} {hint}")
            if data:
                yield Document(path, data)


class ArrayRecords:
    """Records of ArrayRecord files as documents.

    With an empty `text_key` a record is the text itself in UTF-8; otherwise it is a JSON object or
    a msgpack map that holds the text under `text_key`.
    """

    def __init__(self, name, paths, text_key, max_bytes, root):
        self.name, self._paths, self._key = name, paths, text_key
        self._max_bytes, self._root = max_bytes, root

    def identity(self):
        """Hash of the files' content and of the settings that the text is read by."""
        with readable(self.name):
            digests = file_digests(
                self._root, [(path, size_of(self.name, path)) for path in self._paths]
            )
        return content_key("arrayrecord", digests, self._key, self._max_bytes)

    def documents(self):
        """Yields a Document a record. Raises UsageError on a file or record of another kind."""
        return limited(self._all_documents(), self._max_bytes)

    def _all_documents(self):
        from array_record.python.array_record_module import ArrayRecordReader

        for path in self._paths:
            try:
                reader = ArrayRecordReader(path)
                count = reader.num_records()
            except RuntimeError as error:
                raise self._unreadable(path, error) from error
            if not count:  # of a file in another format the reader only says that it has 0
                raise UsageError(
                    f"{self.name}: {path} has no records: it is truncated, or not an "
                    "ArrayRecord file"
                )
            for start in range(0, count, _RECORDS_AT_ONCE):
                stop = min(start + _RECORDS_AT_ONCE, count)
                try:
                    records = reader.read(list(range(start, stop)))
                except RuntimeError as error:
                    raise self._unreadable(path, error) from error
                for i, record in enumerate(records, start):
                    yield self._document(f"{path} record {i}", record)
            reader.close()

    def _unreadable(self, path, error):
        return UsageError(f"{self.name}: cannot read {path} ({' '.join(str(error).split())})")

    def _document(self, record_name, record):
        if not self._key:
            _refuse_nul(f"{self.name}: {record_name}", record)
            return Document(record_name, record)
        fields = _fields(record)
        if not isinstance(fields, dict) or self._key not in fields:
            raise UsageError(
                f"{self.name}: {record_name} is not JSON or msgpack with the key "
                f"config.data.text_key={self._key!r} (for plain text records leave it empty)"
            )
        text = fields[self._key]
        if not isinstance(text, str | bytes):  # bytes(10**10) would be as many zeros
            raise UsageError(
                f"{self.name}: {record_name}: config.data.text_key={self._key!r} has a value "
                f"of type {type(text).__name__}, not text"
            )
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        _refuse_nul(f"{self.name}: {record_name}", data)
        return Document(record_name, data)


def _fields(record):
    """`record` as JSON or else msgpack, or None."""
    try:
        return io.parse_json(record)
    except ValueError:
        import msgpack

        try:
            return msgpack.unpackb(record)
        except Exception:  # msgpack raises a dozen unrelated types
            return None


def limited(documents, max_bytes):
    """The documents up to `max_bytes` in all (0: no limit): the last is cut, empty ones dropped."""
    remaining = max_bytes or float("inf")
    for document in documents:
        data = document.data
        if len(data) > remaining:
            data = whole_characters(data[: int(remaining)])
        if data:
            yield Document(document.name, data)
        remaining -= len(document.data)
        if remaining <= 0:
            return


def whole_characters(data):
    """`data` without the incomplete UTF-8 character that a cut may have left at its end."""
    for trailing in range(1, min(4, len(data)) + 1):
        byte = data[-trailing]
        if byte & 0xC0 == 0x80:
            continue
        needed = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return data[:-trailing] if needed > trailing else data
    return data


def document_digest(data):
    """16 bytes that depend on nothing but the text."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _is_utf8(data):
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _refuse_nul(document_name, data):
    if b"\0" in data:
        raise UsageError(f"{document_name} is binary (a NUL at byte {data.index(0)}), not text")


def size_of(name, path):
    with readable(name):
        return os.path.getsize(path)


class readable:
    """Turns an OSError into one line that names the source and the file."""

    def __init__(self, name):
        self._name = name

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, OSError):
            raise UsageError(
                f"{self._name}: cannot read {error.filename} ({error.strerror})"
            ) from error
