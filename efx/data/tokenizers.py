"""Tokenizers: bytes, characters, byte-level BPE, and every file of the `tokenizers` library.

A tokenizer turns text into int32 ids and back, and is saved as tokenizer.json. The files of `bytes`
and `chars` hold their "kind"; all others have the format of the `tokenizers` library.
"""

import codecs
import contextlib
import json
import logging
import os
from pathlib import Path

import numpy as np

from efx import io
from efx.data.disk_cache import content_key
from efx.errors import UsageError, nearest

log = logging.getLogger(__name__)

KINDS = ("bytes", "chars", "bpe", "hf")
_MIN_BPE = 257  # 256 bytes and the end of a document
# Four times the largest vocabulary in use. The library allocates all ids before it trains, and the
# system kills a process that has no memory for them.
_MAX_BPE = 1_000_000
_CODE_POINTS = 0x110000


class Tokenizer:
    """Base class of the tokenizers.

    Attributes:
      kind: bytes, chars, or bpe (every file of the `tokenizers` library).
      vocab_size: ids are 0..vocab_size-1.
      eot: the id between documents, or None. It decodes to nothing, and text never encodes to it.
      start: ids before every document and every prompt, such as `<s>`; not part of `encode`.
    """

    kind: str
    vocab_size: int
    eot: int | None
    start: tuple = ()

    def encode(self, text):
        """int32[n]: the ids of `text`, str or UTF-8 bytes; UsageError for text outside of the
        vocabulary."""
        raise NotImplementedError

    def encode_documents(self, documents):
        """Yield the ids of each document.

        A tokenizer with `start` puts it before every document that is not empty.

        Args:
          documents: iterable of (name, bytes); errors contain the name.
        """
        for name, data in documents:
            with prefix_errors(name):
                ids = self.encode(data)
            yield ids

    def token_bytes(self):
        """List of the bytes of each id, or None if they depend on the ids around it."""
        raise NotImplementedError

    def decode_bytes(self, ids):
        """The bytes of `ids`."""
        table = self.token_bytes()
        return b"".join(table[i] for i in np.ravel(ids))

    def decode(self, ids):
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def byte_lengths(self):
        """int64[vocab_size]: lengths of `token_bytes`, or None."""
        table = self.token_bytes()
        return None if table is None else np.array([len(t) for t in table], np.int64)

    def stream_decoder(self):
        """A new decoder for ids that come one by one: `feed(id) -> str`, `finish() -> str`."""
        return StreamDecoder(self)

    def to_json(self):
        """The contents of tokenizer.json."""
        raise NotImplementedError

    def save(self, path):
        """Write tokenizer.json atomically."""
        io.write_text(Path(path), self.to_json())

    @property
    def fingerprint(self):
        """Hash of everything that determines the ids."""
        return content_key(self.kind, self.to_json(), *self.start)


class StreamDecoder:
    """Returns each character as soon as its last byte is decoded."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id):
        """The text that the next id completes, perhaps empty."""
        return self._utf8.decode(self._tokenizer.decode_bytes([token_id]))

    def finish(self):
        """U+FFFD for an incomplete last character, else nothing."""
        return self._utf8.decode(b"", final=True)


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
        """Yield the ids of each document; warn about the first one that is not UTF-8."""
        warned = False
        for name, data in documents:
            if not (warned or data.isascii()) and data.decode("utf-8", "ignore").encode() != data:
                warned = True
                log.warning(
                    "%s is not UTF-8 text: config.data.tokenizer=bytes encodes its bytes "
                    "unchanged; convert the files if they should be text",
                    name,
                )
            yield from super().encode_documents([(name, data)])

    def token_bytes(self):
        return [bytes([i]) for i in range(256)] + [b""]

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
    """Split `config.data.tokenizer` into (kind, argument).

    Returns: ("bytes", None), ("chars", None), ("bpe", size), ("hf", name) or ("file", path).

    Raises:
      UsageError: an unknown kind, no such file, or no valid size for bpe.
    """
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
    """The tokenizer that `config.data.tokenizer` names, or None if it must be made from text.

    Raises:
      UsageError: see `parse` and `load_tokenizer`, or the Hugging Face hub has no such tokenizer;
        TransientError for a network error.
    """
    kind, argument = parse(spec)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "file":
        return load_tokenizer(argument)
    if kind != "hf":
        return None
    import huggingface_hub

    try:
        path = huggingface_hub.hf_hub_download(argument, "tokenizer.json")
    except Exception as error:  # the hub's libraries raise many unrelated types
        raise io.unreachable(f"config.data.tokenizer={spec!r}", error) from error
    return load_tokenizer(path)


def load_tokenizer(path):
    """The tokenizer in a file of ours or of the `tokenizers` library.

    Raises:
      UsageError: no such file, or not a tokenizer; TransientError for a network error.
    """
    path = io.folder(path, "the tokenizer")
    try:
        text = io.read_text(path)
        fields = io.parse_json(text)
        if fields.get("kind") == "bytes":
            return ByteTokenizer()
        if fields.get("kind") == "chars":
            return CharTokenizer(fields["characters"])
        from efx.data.bpe import LibraryTokenizer

        return LibraryTokenizer(text)
    except OSError as error:
        raise UsageError(f"cannot read the tokenizer {path} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a tokenizer.json: {error}; use another file") from error


def find_loss(tokenizer, document, data):
    """A description of the first text that encoding and decoding changes, or "".

    Args:
      document: name of the text. data: bytes.
    """
    with prefix_errors(document):
        decoded = tokenizer.decode_bytes(tokenizer.encode(data))
    if decoded == data:
        return ""
    texts = [text.decode("utf-8", "surrogateescape") for text in (data, decoded)]
    start = len(os.path.commonprefix(texts))
    before, after = (text[start : start + 20] for text in texts)
    return f"{before!r} at {start} of {document} is decoded as {after!r}"


@contextlib.contextmanager
def prefix_errors(document):
    """Prefix the message of a UsageError with the name of a document."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{document}: {error}") from error


def decode_utf8(text, kind):
    """`text` (str or bytes) as a str without surrogates, for a tokenizer of this kind."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start}): "
            f"config.data.tokenizer={kind} needs UTF-8; config.data.tokenizer=bytes accepts "
            "any bytes"
        ) from error


def _code_points(text):
    """uint32[n]: the code points of `text`."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
