"""Text sources. A source is a sequence of documents (bytes) with a hash of their content.

    text:PATH          a file, a folder (every file below it) or a glob; each file is a document
    stdlib             the source code of the running Python's standard library
    pydoc              the language reference that comes with Python; each topic is a document
    arrayrecord:GLOB   ArrayRecord files; each record is a document
    jsonl:PATH         a JSON object a line (.jsonl, .jsonl.gz, .jsonl.zst); each is a document
    parquet:PATH       parquet files; each row is a document
    hf:NAME[:CONFIG]   the train split of a Hugging Face dataset; each row is a document
    mix:A,B,...        the documents of several of these, one after another

(`tokens:PATH`, text that is already tokenised, is in `shards.py`.)

Of files with the same content only the first is read. A byte-order mark is not part of a text.
"""

import codecs
import contextlib
import errno
import glob
import hashlib
import logging
import os
import re
import sysconfig
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, replace

from efx import io
from efx.data import rows
from efx.data.disk_cache import cached_folder, content_key, file_digests
from efx.errors import UsageError, extra, nearest

log = logging.getLogger(__name__)

# How a source of each kind is written.
_FORMS = {
    "stdlib": "stdlib",
    "pydoc": "pydoc",
    "text": "text:PATH",
    "tokens": "tokens:PATH",
    "arrayrecord": "arrayrecord:GLOB",
    "jsonl": "jsonl:PATH",
    "parquet": "parquet:PATH",
    "hf": "hf:NAME",
    "mix": "mix:A,B",
}
# Commas between the parts of a mixture; a path may contain others.
_BETWEEN_PARTS = re.compile(r",(?=[a-z]+:|(?:stdlib|pydoc)(?:,|$))")
# Left out of the standard library: installed packages, tests (more than a third of it, absent on
# some systems) and files that the build generated.
_STDLIB_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload",
}  # fmt: skip
_STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
_CUT_VERSION = 2  # raise it when documents are cut elsewhere
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # first bytes of gzip, zstd, zip


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
      name: file and line or the like, for messages.
      data: bytes of the text.
      is_cut: whether config.data.max_bytes removed its end.
      component: the part of a mixture that the document is from; only reports read it.
    """

    name: str
    data: bytes
    component: str = ""
    is_cut: bool = False

    @property
    def text(self):
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class Source:
    """A sequence of documents.

    Attributes:
      name: the setting and its value, for messages.
      identity: function that returns a hash of the documents and their order.
      documents: function that returns an iterator over the Documents.
    """

    name: str
    identity: Callable
    documents: Callable


def parse(spec, key="config.data.source"):
    """Split a source's setting into (kind, argument).

    Raises:
      UsageError: unknown kind (names the nearest), or no argument where one is needed.
    """
    kind, _, argument = str(spec).partition(":")
    if kind not in _FORMS:
        hint = nearest(kind, _FORMS)
        if os.path.exists(str(spec)):
            hint = f" (for a file or folder use 'text:{spec}')"
        raise UsageError(f"{key}={spec!r}: unknown kind{hint}; use {', '.join(_FORMS.values())}")
    if bool(argument) != (":" in _FORMS[kind]):
        raise UsageError(f"{key}={spec!r}: expected {_FORMS[kind]}")
    return kind, argument


def _parts(spec, key):
    """The sources that a setting names: the parts of a mixture, or else [spec]."""
    kind, argument = parse(spec, key)
    if kind != "mix":
        return [spec]
    parts = _BETWEEN_PARTS.split(argument)
    for part in parts:
        if parse(part, key)[0] in ("mix", "tokens"):
            raise UsageError(
                f"{key}={spec!r}: {part!r} cannot be part of a mixture; use text sources"
            )
    if len(set(parts)) < len(parts) or len(parts) < 2:
        raise UsageError(
            f"{key}={spec!r}: a mixture needs two or more different parts, separated by commas"
        )
    return parts


def open_source(config_data, root, key="source"):
    """The source that `config_data` names.

    Args:
      root: the cache folder.
      key: "source" or "eval_source"; config.data.max_bytes limits only the former.

    Returns:
      Source, its documents cut into pieces of config.data.document_bytes if that is not 0.
    """
    c, spec, setting = config_data, getattr(config_data, key), f"config.data.{key}"
    name, max_bytes = f"{setting}={spec!r}", c.max_bytes if key == "source" else 0
    parts = _parts(spec, setting)
    # The standard library contains the language reference; it is read once, or only held out.
    settings = filter(None, (c.source, c.eval_source))
    named = {part for value in settings for part in _parts(value, setting)}
    skipped = {"pydoc_data"} if "pydoc" in named else set()
    opened = {part: _open_part(name, part, c.text_key, max_bytes, root, skipped) for part in parts}
    source = opened[spec] if spec in opened else _mixture(name, opened)
    return _cut_documents(source, c.document_bytes) if c.document_bytes else source


def _open_part(name, part, text_key, max_bytes, root, skipped=frozenset()):
    kind, argument = parse(part)
    if kind == "pydoc":
        return _language_reference(name, max_bytes)
    if kind in ("jsonl", "parquet", "hf") and not text_key:
        raise UsageError(
            f"{name}: config.data.text_key is empty; set it to the key of the text in each "
            "row, e.g. config.data.text_key=text"
        )
    if kind == "hf":
        identity, read = rows.open_hugging_face(name, argument, text_key, root)
        return _source_of(name, identity, read, max_bytes)
    if kind == "stdlib":
        paths = _stdlib_files(name, skipped)
    else:
        paths = _distinct_files(name, find_files(name, argument, root), root)
    read_file = {
        "text": lambda path: _read_text(name, path, max_bytes),
        "stdlib": _read_python,
        "arrayrecord": lambda path: rows.read_array_records(name, path, text_key),
        "jsonl": lambda path: rows.read_json_lines(name, path, text_key),
        "parquet": lambda path: rows.read_parquet(name, path, text_key),
    }[kind]

    def identity():
        return content_key(kind, text_key, file_digests(root, paths))

    def read():
        for path in paths:
            yield from read_file(path)

    return _source_of(name, identity, read, max_bytes)


def _source_of(name, identity, read, max_bytes):
    """The Source of (name, bytes) pairs, cut after `max_bytes` bytes in all (0: no limit).

    Empty documents are dropped.
    """

    def documents():
        remaining = max_bytes or float("inf")
        with readable(name):
            for document_name, data in read():
                data = data.removeprefix(codecs.BOM_UTF8)
                is_cut = len(data) > remaining
                if is_cut:
                    data = whole_characters(data[:remaining])
                    remaining = 0
                remaining -= len(data)
                if data:
                    yield Document(document_name, data, is_cut=is_cut)
                if remaining <= 0:
                    return

    def limited_identity():
        with readable(name):
            return content_key(identity(), max_bytes)

    return Source(name, limited_identity, documents)


def _mixture(name, sources):
    """The documents of several sources, one source after another.

    Args:
      sources: {component: Source}.
    """

    def documents():
        for component, source in sources.items():
            for document in source.documents():
                yield replace(document, component=component)

    def identity():
        return content_key("mix", [source.identity() for source in sources.values()])

    return Source(name, identity, documents)


def _cut_documents(source, size):
    """The documents of a source in pieces of at most `size` bytes, 16 or more.

    A piece ends after a line if one ends in its second half, and never inside a character. That
    holds for the last piece of a document that config.data.max_bytes cut, too, so that it is a
    piece of the whole document, or the beginning of one; the bytes after it are dropped.
    """

    def documents():
        for document in source.documents():
            start, data = 0, document.data
            while start < len(data):
                piece = data[start : start + size]
                is_last = start + size >= len(data)
                if document.is_cut or not is_last:
                    newline = piece.rfind(b"\n", size // 2)
                    piece = piece[: newline + 1] if newline >= 0 else whole_characters(piece)
                name = f"{document.name} from byte {start}" if start else document.name
                yield replace(document, name=name, data=piece, is_cut=document.is_cut and is_last)
                if is_last:
                    break
                start += len(piece)

    return Source(
        source.name, lambda: content_key("pieces", _CUT_VERSION, size, source.identity()), documents
    )


def _language_reference(name, max_bytes):
    """Python's language reference, as `help()` shows it: prose with a little code in it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            f"{name}: this Python does not include its language reference; use text:PATH"
        ) from error
    texts = sorted(topics.items())

    def read():
        return ((f"topic {topic}", text.encode()) for topic, text in texts)

    return _source_of(name, lambda: content_key("pydoc", texts), read, max_bytes)


def _read_text(name, path, max_bytes):
    """Yield (path, bytes); UsageError for a binary file."""
    most = len(codecs.BOM_UTF8) + max_bytes + 1  # one more shows that the text is longer
    with open(path, "rb") as file:
        data = file.read(min(most, os.path.getsize(path)) if max_bytes else -1)
    if b"\0" in data:
        if data.startswith(_COMPRESSED):
            raise UsageError(
                f"{name}: {path} is compressed; decompress it (only jsonl: reads compressed files)"
            )
        raise UsageError(
            f"{name}: {path} is binary (a NUL at byte {data.index(0)}), not text; select the text "
            "files, for example with a glob"
        )
    yield path, data


def _read_python(path):
    """Yield (path, bytes) unless the file is not UTF-8."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    yield path, data


def _stdlib_files(name, skipped):
    root, paths = sysconfig.get_paths()["stdlib"], []
    for folder, folders, files in os.walk(root):
        kept = set(folders) - _STDLIB_SKIPPED_FOLDERS - skipped
        folders[:] = [child for child in kept if not child.startswith("config-")]
        paths += [
            os.path.join(folder, file)
            for file in files
            if file.endswith(".py") and not file.startswith(_STDLIB_SKIPPED_FILES)
        ]
    if not paths:
        raise UsageError(f"{name}: no Python source code in {root}; use text:PATH")
    return sorted(paths)


# ---- files ---------------------------------------------------------------------------------------


def check_present(spec, key):
    """UsageError unless a source's setting is valid and its files, if they are local, exist."""
    for part in _parts(spec, key):
        kind, argument = parse(part, key)
        name, path = f"{key}={spec!r}", os.path.expanduser(argument)
        if kind in ("stdlib", "pydoc", "hf") or io.is_remote(argument):
            continue
        if not (kind == "tokens" and os.path.isdir(path)):  # its files have their own checks
            find_files(name, argument, None)


def find_files(name, argument, root):
    """The files that a path, folder or glob names, sorted; hidden ones are left out.

    Args:
      name: the setting and its value, for messages.
      argument: if it is the name of an existing file, it names this file alone.
      root: cache folder, for copies of the files of an object store.

    Returns:
      Their paths, at least one.
    """
    if io.is_remote(argument):
        return fetch_files(name, argument, root)
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        found = _files_below(path)
    else:
        found = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    files = [file for file in found if os.path.isfile(file)]
    if not files:
        raise UsageError(f"{name}: no such file, or no file in this folder or of this pattern")
    return files


def _files_below(path):
    """The files below a folder, sorted. Links are followed, but no folder is entered twice."""
    entered, files = set(), []
    for folder, children, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in entered:
            children.clear()
            continue
        entered.add(real)
        children[:] = sorted(child for child in children if not child.startswith("."))
        files += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _distinct_files(name, paths, root):
    """The files without those that have the content of an earlier one."""
    distinct = {}
    with readable(name):
        for path, digest in zip(paths, file_digests(root, paths), strict=True):
            distinct.setdefault(digest, path)
    return list(distinct.values())


def fetch_files(name, address, root):
    """Copy the files at an address of an object store into the cache, unless it has them.

    Args:
      address: of a file, of a folder, or a pattern.

    Returns:
      Paths of the copies, in the order of the files. A copy is named by its quoted relative path.
    """
    import fsspec

    try:
        store, pattern = fsspec.core.url_to_fs(address, use_listings_cache=False)
        # A search finds nothing where this raises the reason.
        store.info(re.split(r"/[^/]*[*?[]", pattern)[0])
        files = {}
        for path in store.glob(pattern.rstrip("/")):
            files |= store.find(path, detail=True)
    except ImportError as error:
        scheme = address.partition("://")[0]
        raise UsageError(f"{name} needs {extra({'gs': 'gcs'}.get(scheme, scheme))}") from error
    except Exception as error:  # the clients of stores raise many unrelated types
        raise io.unreachable(name, error) from error
    if not files:
        raise UsageError(f"{name}: no file matches")
    top = os.path.commonpath([os.path.dirname(path) for path in files])
    visible = [path for path in sorted(files) if "/." not in path.removeprefix(top)]
    names = [urllib.parse.quote(os.path.relpath(path, top), safe="") for path in visible]
    details = [files[path] for path in visible]
    # Of gcsfs, of s3fs.
    keys = ("etag", "mtime", "ETag", "LastModified")
    versions = [[d["size"], str(next(filter(None, map(d.get, keys)), None))] for d in details]

    def build(folder):
        log.info("copying %s to %s", name, folder.parent)
        try:
            store.get(visible, [str(folder / file) for file in names])
        except Exception as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            raise io.unreachable(name, error) from error

    folder = cached_folder(root, "fetched", content_key(address, names, versions), build)
    return [str(folder / file) for file in names]


@contextlib.contextmanager
def readable(name):
    """Raise an OSError of the body as a UsageError that names the source and the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{name}: cannot read {error.filename} ({error.strerror})") from error


# ---- bytes of text -------------------------------------------------------------------------------


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
