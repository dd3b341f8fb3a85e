"""Byte-level BPE, and every other tokenizer of the `tokenizers` library."""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import re

import numpy as np
import tokenizers as library

from efx.data.sources import grouped
from efx.data.tokenizer import StreamDecoder, Tokenizer, decode_utf8
from efx.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
# The first of these special tokens in a vocabulary is its end-of-document token.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_MAX_IDS = 1 << 24  # the largest vocabularies have a million
_CHUNK = 1 << 16  # characters in a call of the library, which uses hundreds of bytes a token
_LONGEST = 1 << 18
_BATCH = 1 << 19  # bytes of the documents that a thread encodes at a time
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # the library reads it at each call
# Text may be cut here: no GPT-2 pre-token has white space after another character.
_BEFORE_SPACE = re.compile(r"\S(?=[ \t\r\n])")
# BPE takes time quadratic in the length of a pre-token, so pre-tokens are cut after this many
# bytes. The brackets hold the byte-level forms of 0x80 to 0xBF: no character is cut.
_PRE_TOKEN_BOUND = ".{256}[\u00a1-\u00bf\u0122-\u0143]*"
_NOT_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_KEEP_TEXT = {"ByteLevel", "Split", "Digits", "Punctuation"}  # pre-tokenizers, unless "Removed"


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: our byte-level BPE, or a user's file.

    Text that spells a special token does not encode to it, unless the token is in the vocabulary of
    a model of whole words (byte-level BPE has no such tokens). `start` has the special tokens that
    the file's template puts before a text.

    Args:
      text: the contents of a tokenizer.json.

    Raises:
      UsageError: the library cannot read the text, or the tokenizer would drop bytes.
    """

    kind = "bpe"

    def __init__(self, text):
        try:
            self._inner = library.Tokenizer.from_str(text)
        except Exception as error:  # the library defines no error types
            raise UsageError(f"not a file of the tokenizers library ({error})") from error
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MAX_IDS:
            raise UsageError(
                f"its largest id is {self.vocab_size - 1}; efx needs 1 to {_MAX_IDS} ids"
            )
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()
        if getattr(self._inner.model, "dropout", None):
            self._inner.model.dropout = None  # makes the ids of a text random
        self._json = self._inner.to_str()
        added = self._inner.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.eot = next((special[name] for name in _END_NAMES if name in special), None)
        settings = json.loads(self._json)
        _check_alphabet(settings)
        # Bytes of each id; None if the tokenizer is not byte-level.
        self._table = _byte_level_table(settings, vocabulary, added, self.vocab_size)
        # NFC changes text that is not composed.
        self.is_lossless = self._table is not None and settings["normalizer"] is None
        self._can_cut = _can_cut_before_spaces(settings)
        self.start = self._template_start()

    def _template_start(self):
        """Ids that the file's template puts before a text."""
        try:
            encoding = self._inner.encode("a")
        except Exception:  # no token for an unknown word
            return ()
        mask = encoding.special_tokens_mask
        return tuple(encoding.ids[: mask.index(0)]) if 0 in mask else ()

    def encode(self, text):
        text, ids = decode_utf8(text, "bpe"), [np.empty(0, np.int32)]
        for chunk in _chunks(text) if self._can_cut else [text] * bool(text):
            try:
                (encoding,) = self._inner.encode_batch_fast([chunk], add_special_tokens=False)
            except Exception as error:
                raise UsageError(
                    f"config.data.tokenizer cannot encode this text ({error}): it needs a token "
                    "for unknown words"
                ) from error
            ids.append(np.asarray(encoding.ids, np.int32))
        return np.concatenate(ids)

    def encode_documents(self, documents):
        """Yield (document, its ids), encoded on all cores."""
        # The library's own threads free each other's memory: ten times slower on 16 cores.
        can_count = hasattr(os, "sched_getaffinity")  # not on macOS
        threads = min(len(os.sched_getaffinity(0)) if can_count else os.cpu_count() or 1, 32)
        futures = collections.deque()
        with _serial_library(), concurrent.futures.ThreadPoolExecutor(threads) as pool:
            try:
                for batch in grouped(documents, lambda document: len(document.data), _BATCH):
                    futures.append(pool.submit(self._encode_batch, batch))
                    if len(futures) > threads + 1:
                        yield from futures.popleft().result()
                while futures:
                    yield from futures.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _encode_batch(self, batch):
        return list(super().encode_documents(batch))

    def token_bytes(self):
        return self._table

    def decode(self, ids):
        """The text of `ids` without special tokens."""
        if self._table is not None:
            return super().decode(ids)
        return self._inner.decode(np.ravel(ids).tolist(), skip_special_tokens=True)

    def decode_bytes(self, ids):
        if self._table is not None:
            return super().decode_bytes(ids)
        return self.decode(ids).encode("utf-8", "replace")

    def added_bytes(self, ids):
        """List: bytes that each id of a document adds to the text; a character's at its last id."""
        decoder = self.stream_decoder()
        sizes = [len(decoder.feed(i).encode("utf-8", "replace")) for i in ids]
        sizes[-1] += len(self.decode_bytes(ids)) - sum(sizes)  # a held-back U+FFFD
        return sizes

    def stream_decoder(self):
        return StreamDecoder(self) if self._table is not None else _LibraryDecoder(self._inner)

    def to_json(self):
        return self._json


class _LibraryDecoder:
    """A `StreamDecoder` for decoders that join tokens by rules, such as spaces between words."""

    def __init__(self, inner):
        self._inner = inner
        self._stream = library.decoders.DecodeStream(skip_special_tokens=True)

    def feed(self, token_id):
        return self._stream.step(self._inner, int(token_id)) or ""

    def finish(self):
        return ""  # an incomplete character is dropped


def train_bpe(texts, vocab_size):
    """Train byte-level BPE; id 0 ends a document.

    Pre-tokens are GPT-2's, cut after 256 bytes at the end of a character. The result does not
    depend on the number of threads; a short text may yield fewer than `vocab_size` ids.

    Args:
      texts: iterable of str.
      vocab_size: at least 257.

    Source: Sennrich et al. 2016, arXiv 1508.07909; on bytes: Radford et al. 2019 (GPT-2).
    """
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bound = library.pre_tokenizers.Split(library.Regex(_PRE_TOKEN_BOUND), "isolated")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.Sequence([byte_level, bound])
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )

    def chunks():
        has_long = False
        for chunk in itertools.chain.from_iterable(map(_chunks, texts)):
            # The library needs hundreds of bytes for each one of a word of such a length.
            if len(chunk) < _LONGEST or not has_long:
                yield chunk
            has_long |= len(chunk) == _LONGEST

    inner.train_from_iterator(chunks(), trainer)
    return LibraryTokenizer(inner.to_str())


def _chunks(text):
    """Yield `text` in chunks that begin with white space: no GPT-2 pre-token spans two of them,
    unless a text has none for some `_LONGEST` characters."""
    start = 0
    while len(text) - start > _CHUNK:
        match = _BEFORE_SPACE.search(text, start + _CHUNK, start + _LONGEST)
        stop = match.end() if match else start + _LONGEST
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


@contextlib.contextmanager
def _serial_library():
    """Make calls of the library use the calling thread alone."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        os.environ.pop(_PARALLELISM, None)
        if before is not None:
            os.environ[_PARALLELISM] = before


def byte_of_character():
    """{character in a byte-level token: byte}: printable ones of Latin-1 stand for themselves, the
    others, in order, are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    return table | {chr(256 + i): b for i, b in enumerate(unprintable)}


def _pre_tokenizers(settings):
    """List of the pre-tokenizers of a file."""
    outer = settings["pre_tokenizer"]
    if outer is None:
        return []
    return outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]


def _check_alphabet(settings):
    """UsageError for a byte-level BPE file that lacks bytes, which the library would drop."""
    model = settings["model"]
    byte_level = any(each["type"] == "ByteLevel" for each in _pre_tokenizers(settings))
    if model["type"] != "BPE" or not byte_level or model["unk_token"] or model["byte_fallback"]:
        return
    if missing := _missing_bytes(model):
        raise UsageError(
            f"it has no token for {missing} of the {256 - len(_NOT_IN_UTF8)} bytes of UTF-8 text, "
            "and would drop them; train it with the whole byte alphabet"
        )


def _missing_bytes(model):
    """Number of bytes of UTF-8 text that are not in the vocabulary of a byte-level model."""
    return sum(
        byte not in _NOT_IN_UTF8 and character not in model["vocab"]
        for character, byte in byte_of_character().items()
    )


def _byte_level_table(settings, vocabulary, added, size):
    """The bytes of every id; None if ids do not stand for exactly the bytes of the text, as with
    another decoder, a prefix space, dropped spaces, or an added token that strips spaces."""
    # NFC composes characters of the text; the bytes are those of the composed ones.
    normalizer, decoder = settings["normalizer"] or {"type": "NFC"}, settings["decoder"]
    pre_tokenizers = _pre_tokenizers(settings)
    types = [each["type"] for each in pre_tokenizers]
    if (
        normalizer["type"] != "NFC"
        or not decoder
        or decoder["type"] != "ByteLevel"
        or settings["model"]["type"] != "BPE"
        or _missing_bytes(settings["model"])
        or types.count("ByteLevel") != 1
        or not _KEEP_TEXT.issuperset(types)
        or any(each.get("behavior") == "Removed" for each in pre_tokenizers)
        or any(each.get("add_prefix_space") for each in pre_tokenizers)
        or any((token.lstrip or token.rstrip) and not token.special for token in added.values())
    ):
        return None
    byte_of = byte_of_character()
    table = [b""] * size
    for token, i in vocabulary.items():
        if i in added:
            table[i] = b"" if added[i].special else token.encode()
        elif any(c not in byte_of for c in token):
            return None
        else:
            table[i] = bytes(byte_of[c] for c in token)
    return table


def _can_cut_before_spaces(settings):
    """Whether cutting text before white space leaves its ids unchanged: the file splits as GPT-2
    does, and perhaps further."""
    first, *others = _pre_tokenizers(settings) or [{"type": None}]
    return (
        settings["normalizer"] is None
        and first["type"] == "ByteLevel"
        and first["use_regex"]
        and not first["add_prefix_space"]
        and all(other["type"] == "Split" for other in others)
        and all(token["special"] for token in settings["added_tokens"])
    )
