"""Tokenizers: bytes, characters, byte-level BPE, and every file of the `tokenizers` library.

A tokenizer turns text into int32 ids and back, and is saved as tokenizer.json. The files of `bytes`
and `chars` hold their "kind"; all others have the format of the `tokenizers` library.
"""

import json
import logging
import os

import numpy as np

from efx import io
from efx.data.bpe import LibraryTokenizer
from efx.data.tokenizer import Tokenizer, decode_utf8, prefix_errors
from efx.errors import UsageError, nearest

log = logging.getLogger(__name__)

KINDS = ("bytes", "chars", "bpe", "hf")
_MIN_BPE = 257  # 256 bytes and the end of a document
# Four times the largest vocabulary in use. The library allocates all ids before it trains, and the
# system kills a process that has no memory for them.
_MAX_BPE = 1_000_000
_CODE_POINTS = 0x110000


class ByteTokenizer(Tokenizer):
    """Each byte of the UTF-8 text is its own id; 256 ends a document."""

    kind, vocab_size, eot = "bytes", 257, 256

    def encode(self, text):
        """int32[n]; bytes need not be UTF-8."""
        if isinstance(text, str):
            try:
                text = text.encode("utf-8", "surrogateescape")  # as in sys.argv
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"not Unicode text (lone surrogate at {error.start}): remove this character"
                ) from error
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_documents(self, documents):
        """Yield (document, its ids); warn about the first one that is not UTF-8."""
        warned = False
        for document, ids in super().encode_documents(documents):
            data = document.data
            if not (warned or data.isascii()) and data.decode("utf-8", "ignore").encode() != data:
                warned = True
                log.warning(
                    "%s is not UTF-8 text: config.data.tokenizer=bytes encodes its bytes "
                    "unchanged; convert the files if they should be text",
                    document.name,
                )
            yield document, ids

    def token_bytes(self):
        return [bytes([i]) for i in range(256)] + [b""]

    def decode_bytes(self, ids):
        ids = np.ravel(ids)
        return ids[ids < 256].astype(np.uint8).tobytes()

    def to_json(self):
        return json.dumps({"kind": self.kind}) + "\n"


class CharTokenizer(Tokenizer):
    """Each character is an id, in the order of code points; no end-of-document id."""

    kind, eot = "chars", None

    def __init__(self, characters):
        """characters: iterable; repeated ones count once."""
        self.characters = "".join(sorted(set(characters)))
        if not self.characters:
            raise UsageError("a character tokenizer needs at least one character")
        self.vocab_size = len(self.characters)
        self._id_of = np.full(_CODE_POINTS, -1, np.int32)
        self._id_of[_code_points(self.characters)] = np.arange(self.vocab_size)
        self._table = [c.encode() for c in self.characters]

    def encode(self, text):
        """int32[n]. Raises UsageError for a character outside of the vocabulary."""
        text = decode_utf8(text, self.kind)
        ids = self._id_of[_code_points(text)]
        if len(ids) and ids.min() < 0:
            position = int(np.argmax(ids < 0))
            raise UsageError(
                f"the character {text[position]!r} at {position} is not one of the "
                f"{self.vocab_size} characters of the tokenizer; remove it, or use another one"
            )
        return ids

    def token_bytes(self):
        return self._table

    def to_json(self):
        return json.dumps({"kind": self.kind, "characters": self.characters}) + "\n"


def parse(spec):
    """Split `config.data.tokenizer` into ("bytes", None), ("chars", None), ("bpe", size), ("hf",
    name) or ("file", path); UsageError if it is none of these, or there is no such file."""
    spec = str(spec)
    if spec in ("bytes", "chars"):
        return spec, None
    kind, _, argument = spec.partition(":")
    if kind == "bpe":
        size = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
        if not _MIN_BPE <= size <= _MAX_BPE:
            raise UsageError(
                f"config.data.tokenizer={spec!r}: expected the number of ids, from {_MIN_BPE} to "
                f"{_MAX_BPE}, as in bpe:8192"
            )
        return "bpe", size
    if kind == "hf" and argument:
        return "hf", argument
    path = io.local_path(spec, "config.data.tokenizer")
    file = path / "tokenizer.json" if spec and path.is_dir() else path
    if file.is_file():
        return "file", file
    raise UsageError(
        f"config.data.tokenizer={spec!r}: no such file or kind{nearest(kind, KINDS)}; use bytes, "
        "chars, bpe:SIZE, hf:NAME or the path of a tokenizer.json"
    )


def pretrained_tokenizer(spec):
    """The tokenizer that `config.data.tokenizer` names, or None if it must be made from text."""
    kind, argument = parse(spec)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "file":
        return load_tokenizer(argument)
    if kind != "hf":
        return None
    try:
        path = _download_tokenizer(argument)
    except Exception as error:  # the hub's libraries raise many unrelated types
        raise io.unreachable(f"config.data.tokenizer={spec!r}", error) from error
    return load_tokenizer(path)


def _download_tokenizer(name):
    """Path of the tokenizer.json of a repository on the Hub, or of its copy in the cache."""
    import huggingface_hub as hub

    try:
        # Fails at once, where the download would try for 20 seconds.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "tokenizer.json"))
    except Exception:
        if isinstance(cached := hub.try_to_load_from_cache(name, "tokenizer.json"), str):
            return cached
        raise
    return hub.hf_hub_download(name, "tokenizer.json")


def load_tokenizer(path):
    """The tokenizer in a file of ours or of the `tokenizers` library."""
    path = io.folder(path, "the tokenizer")
    try:
        text = io.read_text(path)
        fields = io.parse_json(text)
        if fields.get("kind") == "bytes":
            return ByteTokenizer()
        if fields.get("kind") == "chars":
            return CharTokenizer(fields["characters"])
        return LibraryTokenizer(text)
    except OSError as error:
        raise UsageError(f"cannot read the tokenizer {path} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a tokenizer.json: {error}; use another file") from error


def find_loss(tokenizer, document, data, ids=None):
    """A description of the first text of a named document, its bytes and perhaps its ids, that
    encoding and decoding changes; or ""."""
    if tokenizer.is_lossless:
        return ""
    with prefix_errors(document):
        decoded = tokenizer.decode_bytes(tokenizer.encode(data) if ids is None else ids)
    if decoded == data:
        return ""
    texts = [text.decode("utf-8", "surrogateescape") for text in (data, decoded)]
    start = len(os.path.commonprefix(texts))
    before, after = (text[start : start + 20] for text in texts)
    return f"{before!r} at {start} of {document} is decoded as {after!r}"


def _code_points(text):
    """uint32[n]: the code points of `text`."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
