"""Tokenizers: bytes, characters, byte-level BPE, and any file of the `tokenizers` library.

All of them turn text into int32 ids and back, know the bytes of each id where an id alone decides
them, and are saved in one file, tokenizer.json. `bytes` and `chars` files hold their "kind";
a BPE file is in the format of the `tokenizers` library, so that other programs can read it too.
"""

import codecs
import json
import logging
import os
from pathlib import Path

import numpy as np

from efx import atomic, reading, storage
from efx.data.disk_cache import content_key
from efx.errors import UsageError, nearest

log = logging.getLogger(__name__)

KINDS = ("bytes", "chars", "bpe", "hf")
_SMALLEST_BPE = 257  # 256 bytes and the end of text
# The largest vocabularies in use have a quarter of it. The library makes room for all ids before it
# trains, and a process that asks for more memory than there is is ended by it, without an error.
_LARGEST_BPE = 1_000_000
_STRIDE = 1 << 22  # characters encoded at a time


class Tokenizer:
    """What every tokenizer offers.

    Attributes:
      kind: bytes, chars, or bpe (everything in the format of the `tokenizers` library).
      vocab_size: ids are 0..vocab_size-1.
      eot: the id between documents, or None. No text encodes to it, even if it spells it out, and
        it decodes to nothing.
      start: ids that every document and every prompt begins with, such as `<s>`; `encode` does not
        give them.
    """

    kind: str
    vocab_size: int
    eot: int | None
    start: tuple = ()

    def encode(self, text):
        """int32[n]: the ids of `text` (str, or bytes in UTF-8). Raises UsageError if it cannot."""
        raise NotImplementedError

    def encode_documents(self, documents, report=None):
        """Yields the ids of each of `documents`, (name, bytes) pairs, which begin with `start`
        where there are any; errors give the name.

        report: called with the number of characters (or bytes) that are encoded, now and then.
        """
        for name, data in documents:
            try:
                ids = self.encode(data)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from error
            if report:
                report(len(data))
            yield ids

    def token_bytes(self):
        """List of the bytes of each id, or None where an id alone does not determine them."""
        raise NotImplementedError

    def decode_bytes(self, ids):
        """The bytes that `ids` stand for."""
        table, ids = self.token_bytes(), checked_ids(ids, self.vocab_size)
        return b"".join(table[i] for i in ids)

    def decode(self, ids):
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def byte_lengths(self):
        """int64[vocab_size]: len of `token_bytes`, or None."""
        table = self.token_bytes()
        return None if table is None else np.array([len(t) for t in table], np.int64)

    def stream_decoder(self):
        """A new decoder for ids that come one by one: `feed(id) -> str`, `finish() -> str`."""
        return StreamDecoder(self)

    def to_json(self):
        """The contents of tokenizer.json."""
        raise NotImplementedError

    def save(self, path):
        """Writes tokenizer.json in one rename, so that the file is never there incomplete."""
        atomic.write_text(Path(path), self.to_json())

    @property
    def fingerprint(self):
        """Hash of everything that determines the ids."""
        return content_key(self.kind, self.to_json(), *self.start)


class StreamDecoder:
    """Returns each character of the text as soon as its last byte has come."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id):
        """The text that the next id completes, perhaps empty."""
        return self._utf8.decode(self._tokenizer.decode_bytes([token_id]))

    def finish(self):
        """Text for an incomplete character at the end: nothing, or U+FFFD."""
        return self._utf8.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """Each byte of the UTF-8 text is its own id; 256 ends a document."""

    kind, vocab_size, eot = "bytes", 257, 256

    def encode(self, text):
        """int32[n]; also takes bytes that are not UTF-8."""
        if isinstance(text, str):
            text = _utf8(text, "surrogateescape")  # as Python decodes file names and command lines
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_documents(self, documents, report=None):
        """Yields the ids of each document, whatever its bytes are; of those that are no text in
        UTF-8, which another tokenizer would refuse, it says so once, at the end."""
        first, count = None, 0
        for name, data in documents:
            if wrong := _not_utf8(data):
                first, count = first or name, count + wrong
            yield from super().encode_documents([(name, data)], report)
        if count:
            log.warning(
                "%d bytes are not UTF-8 text, the first in %s: config.data.tokenizer=bytes "
                "encodes them unchanged; convert the files if they should be text",
                count,
                first,
            )

    def token_bytes(self):
        """256 single bytes and nothing for the end of a document."""
        return [bytes([i]) for i in range(256)] + [b""]

    def decode_bytes(self, ids):
        """The bytes themselves, without ends of documents."""
        ids = np.asarray(checked_ids(ids, self.vocab_size), np.int64)
        return ids[ids < 256].astype(np.uint8).tobytes()

    def to_json(self):
        """Only the kind."""
        return json.dumps({"kind": self.kind}) + "\n"


class CharTokenizer(Tokenizer):
    """Each character is an id, in the order of the characters; no end-of-document id."""

    kind, eot = "chars", None

    def __init__(self, characters):
        codes = np.unique(np.array([ord(c) for c in characters], np.uint32))
        if not len(codes):
            raise UsageError("a character tokenizer needs at least one character")
        self.characters = "".join(map(chr, codes))
        self.vocab_size = len(codes)
        self._id_of = np.full(int(codes[-1]) + 1, -1, np.int32)
        self._id_of[codes] = np.arange(len(codes))
        self._table = [c.encode() for c in self.characters]

    def encode(self, text):
        """int32[n]. Raises UsageError naming a character that is not in the vocabulary."""
        text = text_of(text, self.kind)
        chunks = [self._ids(text, i) for i in range(0, len(text), _STRIDE)]
        return np.concatenate(chunks) if chunks else np.empty(0, np.int32)

    def _ids(self, text, start):
        codes = _codes(text[start : start + _STRIDE])
        # Codes past the table's end are looked up as code 0 and set to -1 below.
        beyond = codes >= len(self._id_of)
        ids = self._id_of[np.where(beyond, 0, codes)]
        ids[beyond] = -1
        if len(ids) and ids.min() < 0:
            position = start + int(np.argmax(ids < 0))
            raise UsageError(
                f"the character {text[position]!r} at {position} is not one of the "
                f"{self.vocab_size} characters of the tokenizer"
            )
        return ids

    def token_bytes(self):
        """Each character in UTF-8."""
        return self._table

    def to_json(self):
        """The characters, in order."""
        return json.dumps({"kind": self.kind, "characters": self.characters}) + "\n"


def parse(spec):
    """`config.data.tokenizer` as (kind, argument): bytes, chars, (bpe, size), (hf, name) or (file,
    path).

    Raises:
      UsageError: no such kind and no such file; no size for bpe, or one out of range.
    """
    spec = str(spec)
    if spec in ("bytes", "chars"):
        return spec, None
    kind, colon, size = spec.partition(":")
    if kind == "bpe":
        number = int(size) if size.isdecimal() and len(size) < 10 else 0  # int() has a limit
        if not _SMALLEST_BPE <= number <= _LARGEST_BPE:
            raise UsageError(
                f"config.data.tokenizer={spec!r}: expected the number of ids, from "
                f"{_SMALLEST_BPE} to {_LARGEST_BPE}, as in bpe:8192"
            )
        return "bpe", number
    if kind == "hf" and size:
        return "hf", size
    path = storage.local_path(spec, "config.data.tokenizer")
    file = path / "tokenizer.json" if spec and path.is_dir() else path
    if file.is_file():
        return "file", file
    if spec and path.exists():
        problem = "the folder has no tokenizer.json" if path.is_dir() else "it is not a file"
        raise UsageError(f"config.data.tokenizer={spec!r}: {problem}")
    if path.suffix == ".json" or os.sep in spec:
        raise UsageError(f"config.data.tokenizer={spec!r}: no such file")
    raise UsageError(
        f"config.data.tokenizer={spec!r}: unknown kind{nearest(kind, KINDS)}; use bytes, "
        "chars, bpe:SIZE, hf:NAME or the path of a tokenizer.json"
    )


def ready(spec):
    """The tokenizer that `config.data.tokenizer` names, or None if it has to be made of a text.

    Raises:
      UsageError: see `parse` and `load_tokenizer`; the Hugging Face hub has none of this name.
    """
    kind, argument = parse(spec)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "file":
        return load_tokenizer(argument)
    if kind == "hf":
        return load_tokenizer(_downloaded(spec, argument))
    return None


def _downloaded(spec, name):
    """Path of the tokenizer.json of a model of the Hugging Face hub, in the hub's own cache."""
    import huggingface_hub

    try:
        return huggingface_hub.hf_hub_download(name, "tokenizer.json")
    except Exception as error:  # the library and what is below it raise many unrelated types
        first_line = (str(error).splitlines() or [""])[0][:200]
        raise UsageError(
            f"config.data.tokenizer={spec!r} cannot be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {first_line}); check the name and the network, or use "
            "the path of its tokenizer.json"
        ) from error


def load_tokenizer(path):
    """The tokenizer in the file `path` (ours, or of the `tokenizers` library).

    Raises:
      UsageError: no such file, or not a tokenizer.
    """
    try:
        text = reading.read_text(storage.folder(path, "the tokenizer"))
        fields = reading.parse_json(text)
    except OSError as error:
        raise UsageError(f"cannot read the tokenizer {path} ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"the tokenizer {path} is not valid JSON ({error})") from error
    try:
        if isinstance(fields, dict) and "kind" in fields:
            if fields["kind"] == "bytes":
                return ByteTokenizer()
            if fields["kind"] == "chars":
                return CharTokenizer(fields["characters"])
            raise UsageError(f"unknown kind {fields['kind']!r}{nearest(fields['kind'], KINDS)}")
        if not isinstance(fields, dict) or "model" not in fields:
            raise UsageError("it has neither 'kind' nor 'model'")
        from efx.data.bpe import LibraryTokenizer

        return LibraryTokenizer(text)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a tokenizer: {_line(error)}") from error


def _line(error):
    return " ".join(str(error).split())


def _not_utf8(data):
    """How many of these bytes belong to no character."""
    if data.isascii():
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    strides = (data[i : i + _STRIDE] for i in range(0, len(data), _STRIDE))
    kept = sum(len(decoder.decode(stride).encode()) for stride in strides)
    return len(data) - kept


def _utf8(text, errors="strict"):
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text has half of a surrogate pair, {text[error.start]!r}, at {error.start}"
        ) from error


def text_of(text, kind):
    """`text` as a str that has a UTF-8 form."""
    if isinstance(text, str):
        _utf8(text)
        return text
    try:
        return bytes(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"not UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start}): "
            f"config.data.tokenizer={kind} needs UTF-8; config.data.tokenizer=bytes accepts "
            "any bytes"
        ) from error


def _codes(text):
    """uint32[n]: the code points of `text`."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def characters_of(texts):
    """The characters that occur in `texts`, ascending."""
    occurs = np.zeros(0x110000, bool)
    for text in texts:
        for i in range(0, len(text), _STRIDE):
            occurs[_codes(text[i : i + _STRIDE])] = True
    return "".join(map(chr, np.flatnonzero(occurs)))


def checked_ids(ids, vocab_size):
    """`ids` as a flat list of int. Raises ValueError if one is outside the vocabulary."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
    return ids.tolist()
