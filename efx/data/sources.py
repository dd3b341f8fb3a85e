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

import bisect
import codecs
import contextlib
import errno
import functools
import glob
import hashlib
import itertools
import logging
import os
import re
import sys
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
# Commas between the sources of `mix:`; a path may contain others.
_BETWEEN_COMPONENTS = re.compile(r",(?=[a-z]+:|(?:stdlib|pydoc)(?:,|$))")
# Left out of the standard library: installed packages, tests (more than a third of it, absent on
# some systems) and files that the build generated.
_STDLIB_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload",
}  # fmt: skip
_STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")

PIECE_BYTES = 1 << 20  # longer documents are read and encoded in pieces
_PART_BYTES = 1 << 28  # files are read, and tokenised, in parts of this size
_FORMAT = 1  # raise it when documents are cut elsewhere


@dataclass(frozen=True)
class Document:
    """A text, or a piece of a long one."""

    name: str  # file and line or the like, for messages
    data: bytes  # at least one
    ends: bool = True  # whether the document ends here; the next piece continues it otherwise
    is_cut: bool = False  # whether config.data.max_bytes removed its end
    component: str = ""  # the source of `mix:` that it is from; only reports read it

    @property
    def text(self):
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class Part:
    """Documents that are read one after another."""

    documents: Callable  # returns an iterator over the Documents
    size: int  # their bytes, roughly


@dataclass(frozen=True)
class Source:
    """A sequence of documents."""

    name: str  # the setting and its value, for messages
    identity: str  # hash of the documents and their order when the source was opened
    current_identity: Callable  # returns it anew
    parts: list  # of Part; each can be read without those before it

    def documents(self):
        """Iterator over all Documents."""
        return itertools.chain.from_iterable(part.documents() for part in self.parts)

    def check_unchanged(self):
        """UsageError if the text is no longer the one that was opened."""
        if self.current_identity() != self.identity:
            raise UsageError(
                f"{self.name} changed while it was read; rerun the command when it no longer "
                "changes"
            )

    def cut_at(self, offsets):
        """The source as one part, whose documents end at some bytes of the text, too."""
        edges = sorted(offsets)

        def documents():
            begin = 0
            for document in self.documents():
                data, end = document.data, begin + len(document.data)
                for edge in edges[bisect.bisect(edges, begin) : bisect.bisect_left(edges, end)]:
                    yield replace(document, data=data[: edge - begin], ends=True, is_cut=False)
                    data, begin = data[edge - begin :], edge
                yield replace(document, data=data, ends=document.ends or end in offsets)
                begin = end

        part = Part(documents, sum(part.size for part in self.parts))
        return Source(
            self.name,
            content_key(self.identity, edges),
            lambda: content_key(self.current_identity(), edges),
            [part],
        )


def parse(spec, key="config.data.source"):
    """Split a source's setting into (kind, argument); UsageError if it has no such form."""
    kind, _, argument = str(spec).partition(":")
    if kind not in _FORMS:
        hint = nearest(kind, _FORMS)
        if os.path.exists(str(spec)):
            hint = f" (for a file or folder use 'text:{spec}')"
        raise UsageError(f"{key}={spec!r}: unknown kind{hint}; use {', '.join(_FORMS.values())}")
    if bool(argument) != (":" in _FORMS[kind]):
        raise UsageError(f"{key}={spec!r}: expected {_FORMS[kind]}")
    return kind, argument


def _components(spec, key):
    """The sources that a setting names: those of `mix:`, or else [spec]."""
    kind, argument = parse(spec, key)
    if kind != "mix":
        return [spec]
    components = _BETWEEN_COMPONENTS.split(argument)
    for component in components:
        if parse(component, key)[0] in ("mix", "tokens"):
            raise UsageError(f"{key}={spec!r}: {component!r} cannot be part of mix:; use text")
    if len(set(components)) < len(components) or len(components) < 2:
        raise UsageError(
            f"{key}={spec!r}: mix: needs two or more different sources, separated by commas"
        )
    return components


def open_source(spec, setting, c, root, max_bytes=0):
    """The source that a setting, "config.data.source" for example, names.

    Args:
      c: DataConfig. root: the cache folder.
      max_bytes: limit of the source, of each one with `mix:`; 0: none.
    """
    name = f"{setting}={spec!r}"
    components = _components(spec, setting)
    # The standard library contains the language reference; it is read once, or only held out.
    named = {part for key, value in c.specs().items() for part in _components(value, key)}
    skipped = {"pydoc_data"} if "pydoc" in named else set()
    identities, parts = [], []
    for component in components:
        identity, files = _files(name, component, c.text_key, max_bytes, root, skipped)
        identities.append(identity)
        label = component if len(components) > 1 else ""
        for group in [files] if max_bytes else grouped(files, lambda file: file[0], _PART_BYTES):
            arguments = name, group, max_bytes, c.document_bytes, label
            size = sum(size for size, _ in group)
            parts.append(
                Part(functools.partial(_documents, *arguments), min(size, max_bytes or size))
            )

    def identity():
        with readable(name):
            hashes = [each() for each in identities]
        return content_key(_FORMAT, hashes, max_bytes, c.document_bytes)

    return Source(name, identity(), identity, parts)


def _files(name, spec, text_key, max_bytes, root, skipped):
    """(function that returns a hash, [(size, read)]) of a source: for each file the bytes of its
    text, roughly, and a function that yields (name, blocks of bytes) of each document in it."""
    kind, argument = parse(spec)
    if kind == "pydoc":
        topics = _language_reference(name)
        texts = [(f"topic {topic}", [text.encode()]) for topic, text in topics]
        size = sum(len(text) for _, text in topics)
        return lambda: content_key("pydoc", topics), [(size, lambda: texts)]
    if kind in ("jsonl", "parquet", "hf") and not text_key:
        raise UsageError(
            f"{name}: config.data.text_key is empty; set it to the key of the text in each "
            "row, e.g. config.data.text_key=text"
        )
    if kind == "hf":
        paths = [rows.fetch(name, argument, text_key, max_bytes, root)]
        kind, text_key = "jsonl", "text"
    elif kind == "stdlib":
        paths = _stdlib_files(name, skipped)
    else:
        paths = _distinct_files(name, find_files(name, argument, root), root)
    read = {
        "text": lambda path: _read_text(name, path),
        "stdlib": _read_python,
        "arrayrecord": lambda path: rows.read_array_records(name, path, text_key),
        "jsonl": lambda path: rows.read_json_lines(name, path, text_key),
        "parquet": lambda path: rows.read_parquet(name, path, text_key),
    }[kind]
    with readable(name):
        files = [(rows.size_of_text(path), functools.partial(read, path)) for path in paths]
    return lambda: content_key(kind, text_key, file_digests(root, paths)), files


def grouped(items, size_of, limit):
    """Yield lists of consecutive items that have some `limit` bytes together."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def _documents(name, files, max_bytes, document_bytes, component):
    """Yield the Documents of `_files`, up to `max_bytes` bytes of all together (0: no limit).

    A document is cut into documents of at most `document_bytes` bytes (0: never), after a line if
    one ends in the second half, and never inside a character. If max_bytes cuts it, that holds for
    its last piece, too, and the bytes after that are dropped: each piece is one of the whole
    document, or the beginning of one.
    """
    remaining, size = max_bytes or sys.maxsize, document_bytes or PIECE_BYTES

    def length(data, start):
        piece = data[start : start + size]
        newline = piece.rfind(b"\n", size // 2) if document_bytes else -1
        return newline + 1 or len(trim_partial_utf8(piece))

    with readable(name):
        for document_name, blocks in itertools.chain.from_iterable(read() for _, read in files):
            buffer, piece_name, offset, is_cut = b"", document_name, 0, False
            for block in _without_mark(blocks):
                is_cut = len(block) > remaining
                buffer, start = buffer + block[:remaining], 0
                remaining -= min(len(block), remaining)
                if is_cut:
                    buffer = trim_partial_utf8(buffer)
                while len(buffer) - start > size:
                    stop = start + length(buffer, start)
                    ends = document_bytes > 0
                    yield Document(piece_name, buffer[start:stop], ends, component=component)
                    start, offset = stop, offset + stop - start
                    piece_name = f"{document_name} from byte {offset}"
                buffer = buffer[start:]
                if is_cut:
                    break
            if is_cut and document_bytes:
                buffer = buffer[: length(buffer, 0)]
            if buffer:
                yield Document(piece_name, buffer, True, is_cut, component)
            if remaining <= 0:
                return


def _without_mark(blocks):
    """The blocks of a text without a byte-order mark, each at most `PIECE_BYTES` long."""
    mark = codecs.BOM_UTF8
    for block in blocks:
        block = block.removeprefix(mark)
        mark = b""
        for start in range(0, len(block), PIECE_BYTES):
            yield block[start : start + PIECE_BYTES]


def _language_reference(name):
    """(topic, text) of Python's language reference: prose with a little code in it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            f"{name}: this Python does not include its language reference; use text:PATH"
        ) from error
    return sorted(topics.items())


def _read_text(name, path):
    """Yield (path, blocks of bytes); UsageError for a binary file."""

    def blocks():
        offset = 0
        with open(path, "rb") as file:
            while block := file.read(PIECE_BYTES):
                if b"\0" in block:
                    raise UsageError(
                        f"{name}: {path} is binary or compressed (a NUL at byte "
                        f"{offset + block.index(0)}), not text; decompress it (only jsonl: reads "
                        "compressed files), or select the text files with a glob"
                    )
                yield block
                offset += len(block)

    yield path, blocks()


def _read_python(path):
    """Yield (path, [bytes]) unless the file is not UTF-8."""
    with open(path, "rb") as file:
        data = file.read()
    with contextlib.suppress(UnicodeDecodeError):
        data.decode()
        yield path, [data]


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
    for component in _components(spec, key):
        kind, argument = parse(component, key)
        name, path = f"{key}={spec!r}", os.path.expanduser(argument)
        if kind in ("stdlib", "pydoc", "hf") or io.is_remote(argument):
            continue
        if not (kind == "tokens" and os.path.isdir(path)):  # its files have their own checks
            find_files(name, argument, None)


def find_files(name, argument, root):
    """The files, at least one, that a path, folder or glob names, sorted, without hidden ones.

    Args:
      argument: if it is the name of an existing file, it names this file alone.
      root: cache folder, for copies of the files of an object store.
    """
    if io.is_remote(argument):
        return fetch_files(name, argument, root)
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        paths = _files_below(path)
    else:
        paths = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    files = [file for file in paths if os.path.isfile(file)]
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

    The address may be a folder or a pattern. Returns the paths of the copies, in the order of the
    files. A copy is named by its quoted relative path.
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


def trim_partial_utf8(data):
    """`data` without the incomplete UTF-8 character that a cut may have left at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])
    incomplete, _ = decoder.getstate()
    return data[: len(data) - len(incomplete)]


def document_digest(data):
    """16 bytes that depend on nothing but the text (of a long one: on its pieces)."""
    return hashlib.blake2b(data, digest_size=16).digest()
