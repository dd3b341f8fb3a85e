"""What all tokenizers have: text to int32 ids and back."""

import codecs
import contextlib
from pathlib import Path

import numpy as np

from efx import io
from efx.data.disk_cache import content_key
from efx.errors import UsageError


class Tokenizer:
    """Base class of the tokenizers.

    Attributes:
      kind: bytes, chars, or bpe (every file of the `tokenizers` library).
      vocab_size: ids are 0..vocab_size-1.
      eot: the id between documents, or None. It decodes to nothing, and text never encodes to it.
      start: ids before every document and every prompt, such as `<s>`; not part of `encode`.
      is_lossless: whether decoding gives every text back, not only some texts.
    """

    kind: str
    vocab_size: int
    eot: int | None
    start: tuple = ()
    is_lossless: bool = True

    def encode(self, text):
        """int32[n]: the ids of `text`, str or UTF-8 bytes; UsageError for text outside of the
        vocabulary."""
        raise NotImplementedError

    def encode_documents(self, documents):
        """Yield (`sources.Document`, its ids) for each document; errors contain its name."""
        for document in documents:
            with prefix_errors(document.name):
                ids = self.encode(document.data)
            yield document, ids

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
