"""Byte-level BPE, and any other tokenizer of the `tokenizers` library."""

import collections
import concurrent.futures
import itertools
import json
import logging
import os
import re
import threading

import numpy as np

from efx.data.disk_cache import content_key
from efx.data.tokenizers import StreamDecoder, Tokenizer, checked_ids, text_of
from efx.errors import UsageError

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
# The first of these special tokens that another tokenizer has ends a document there.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_MOST_IDS = 1 << 24  # the largest vocabularies have a million
_CHUNK = 1 << 18
_CHUNKS_AT_ONCE = 16  # a second or two between two reports of progress
# Of text, that a thread encodes at a time: a token of it takes some hundred bytes meanwhile.
_BATCH = 1 << 19
_MOST_THREADS = 32
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # of the library, which reads it at each call
# Where a text may be cut: no token has white space after another character.
_BEFORE_SPACE = re.compile(r"\S(?=[ \t\r\n])")
# BPE of a pre-token takes time quadratic in its length, so text without spaces is cut after this
# many bytes. The brackets hold the byte-level forms of 0x80 to 0xBF: no character is cut.
_PRE_TOKEN_BOUND = ".{256}[\u00a1-\u00bf\u0122-\u0143]*"
# Bytes that text in UTF-8 never has.
_NOT_OF_TEXT = {0xC0, 0xC1, *range(0xF5, 0x100)}
# Models that look pieces of text up in their vocabulary. BPE reaches a token by its merges alone.
_OF_WHOLE_PIECES = ("Unigram", "WordLevel", "WordPiece")


class _LibraryError(ValueError):
    """Whatever the `tokenizers` library raises: it has no type of its own, and when it panics, as
    it does over some files, not even an Exception."""


def _called(function, *arguments, **options):
    """The result of a function of the library."""
    try:
        return function(*arguments, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _LibraryError(str(error)) from error


def _decoded(function, *arguments, **options):
    try:
        return _called(function, *arguments, **options)
    except _LibraryError as error:
        raise UsageError(f"the tokenizer cannot decode its ids ({error})") from error


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: our byte-level BPE, or a file of the user's.

    Text never encodes to a special token, even if it spells one out, but for the one that stands
    for what the vocabulary lacks. Of the special tokens that a template of the file puts around a
    text those before it are `start`; what ends a document is `eot`, with or without a template.

    Raises UsageError for a file that the library cannot read, or by which text would be lost.
    """

    kind = "bpe"

    def __init__(self, text):
        library = _library()
        try:
            self._inner = _called(library.Tokenizer.from_str, text)
        except _LibraryError as error:
            raise UsageError(f"not a file of the tokenizers library ({error})") from error
        vocabulary = _called(self._inner.get_vocab, with_added_tokens=True)
        if not vocabulary:
            raise UsageError("its vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > _MOST_IDS:
            raise UsageError(
                f"its largest id is {self.vocab_size - 1}, and efx supports at most {_MOST_IDS} ids"
            )
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()
        if getattr(self._inner.model, "dropout", None):
            self._inner.model.dropout = None  # one text would have other ids each time
        self._json = _called(self._inner.to_str)  # which counts up to the largest id
        added = self._inner.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.eot = next((special[name] for name in _END_NAMES if name in special), None)
        settings = json.loads(self._json)
        _check_alphabet(settings)
        self._never, self._cut_apart = self._keep_special_from_text(settings, special)
        self._table = _byte_level_table(settings, vocabulary, added, self.vocab_size)
        self._chunks = _cuts_at_spaces(settings)
        words = (word for word in sorted(vocabulary) if word not in special)
        self.start = self._template_start(itertools.chain("a", words))

    def _keep_special_from_text(self, settings, special):
        """Sees to it that the model finds no special token in text.

        `encode_special_tokens` keeps the library from looking for them before the model does, which
        finds those of its own vocabulary all the same. Text that spells one out is therefore cut
        after its first character.

        Returns: (ids of the special tokens of one character, which cannot be cut; the regular
          expression by which text is cut, or "").
        """
        library, model = _library(), settings["model"]
        # Of Unigram these are pairs of a piece and its score.
        pieces = [p[0] for p in model["vocab"]] if model["type"] == "Unigram" else model["vocab"]
        within = set(pieces) & special.keys()
        if model["type"] == "Unigram" and model["unk_id"] is not None:
            within.discard(pieces[model["unk_id"]])
        within.discard(model.get("unk_token"))
        never = frozenset(special[piece] for piece in within if len(piece) == 1)
        spelled = sorted(piece for piece in within if len(piece) > 1)
        if model["type"] not in _OF_WHOLE_PIECES or not spelled:
            return never, ""
        cut = "|".join(f"{re.escape(piece[0])}(?={re.escape(piece[1:])})" for piece in spelled)
        splits = [library.pre_tokenizers.Split(_called(library.Regex, cut), "isolated")]
        if settings["pre_tokenizer"] is not None:
            splits.insert(0, self._inner.pre_tokenizer)
        self._inner.pre_tokenizer = library.pre_tokenizers.Sequence(splits)
        return never, cut

    def _template_start(self, texts):
        """The ids that the file's template puts before a text, by the first of these that the
        tokenizer can encode: a vocabulary may lack letters, and a token for what it lacks."""
        for text in texts:
            try:
                bare = _called(self._inner.encode, text, add_special_tokens=False).ids
            except _LibraryError:
                continue
            if bare:
                break
        else:
            return ()
        try:
            framed = _called(self._inner.encode, text, add_special_tokens=True).ids
        except _LibraryError as error:
            raise UsageError(f"its template cannot be used ({error})") from error
        places = (i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        return tuple(framed[: next(places, 0)])

    def encode(self, text):
        """int32[n]."""
        return _joined(self._encoded(list(self._cut(text_of(text, "bpe")))))

    def encode_documents(self, documents, report=None):
        """Yields the ids of each document, several at a time on all cores.

        Each thread of ours has the library encode a part of the text, turns what comes into ids and
        drops it. Left to its own threads the library allocates in these what it frees in another,
        which takes 16 cores longer than two.
        """
        with (
            _OneThreadACall() as call,
            concurrent.futures.ThreadPoolExecutor(call.threads) as pool,
        ):
            coming = collections.deque()
            try:
                for names, texts in _batches(documents):
                    coming.append(pool.submit(self._encode_all, names, texts, report))
                    if len(coming) > 2 * call.threads:
                        yield from coming.popleft().result()
                while coming:
                    yield from coming.popleft().result()
            finally:
                for future in coming:
                    future.cancel()

    def _encode_all(self, names, texts, report):
        """The ids of each text."""
        chunks = [list(self._cut(text)) for text in texts]
        flat = [chunk for chunks_of_text in chunks for chunk in chunks_of_text]
        try:
            pieces, start = self._encoded(flat, report), 0
        except UsageError:
            for name, text in zip(names, texts, strict=True):  # which of them it is
                try:
                    self.encode(text)
                except UsageError as error:
                    raise UsageError(
                        f"config.data.tokenizer, for the text {name}: {error}"
                    ) from error
            raise
        encoded = []
        for chunks_of_text in chunks:
            ids = _joined(pieces[start : start + len(chunks_of_text)])
            encoded += [np.concatenate([np.array(self.start, np.int32), ids]) if len(ids) else ids]
            start += len(chunks_of_text)
        return encoded

    def _encoded(self, texts, report=None):
        """List of int32[n]: the ids of each text."""
        ids = []
        for i in range(0, len(texts), _CHUNKS_AT_ONCE):
            some = texts[i : i + _CHUNKS_AT_ONCE]
            ids += self._encoded_at_once(some)
            if report:
                report(sum(map(len, some)))
        return ids

    def _encoded_at_once(self, texts):
        try:
            encodings = _called(self._inner.encode_batch_fast, texts, add_special_tokens=False)
        except _LibraryError as error:
            raise UsageError(
                f"the tokenizer cannot encode this text ({error}); it needs a token for "
                "unknown words, or the words of this text"
            ) from error
        if self._never:
            for encoding in encodings:
                if found := self._never.intersection(encoding.ids):
                    raise UsageError(
                        f"the text has the character {self._inner.id_to_token(min(found))!r}, "
                        "a special token of the tokenizer; remove it from the text"
                    )
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def _cut(self, text):
        """`text` in pieces that encode to the same ids as the whole."""
        return _cut_before_spaces(text) if self._chunks else [text] * bool(text)

    def token_bytes(self):
        """The bytes of each id if the tokenizer is byte-level, else None."""
        return self._table

    def decode(self, ids):
        """The text of `ids` without special tokens."""
        if self._table is not None:
            return super().decode(ids)
        ids = checked_ids(ids, self.vocab_size)
        return _decoded(self._inner.decode, ids, skip_special_tokens=True)

    def decode_bytes(self, ids):
        """The bytes of `ids`; those of `decode` if the tokenizer is not byte-level."""
        if self._table is not None:
            return super().decode_bytes(ids)
        return self.decode(ids).encode("utf-8", "replace")

    def stream_decoder(self):
        """A new decoder for ids that come one by one."""
        if self._table is not None:
            return StreamDecoder(self)
        return _LibraryStreamDecoder(self._inner)

    def to_json(self):
        """The file as the library writes it."""
        return self._json

    @property
    def fingerprint(self):
        """Hash of everything that determines the ids, where text is cut included."""
        of_file = super().fingerprint
        return content_key(of_file, self._cut_apart) if self._cut_apart else of_file


class _LibraryStreamDecoder:
    """For tokenizers whose decoder joins tokens by its own rules (spaces before words, ...)."""

    def __init__(self, inner):
        from tokenizers.decoders import DecodeStream

        self._inner, self._stream = inner, DecodeStream(skip_special_tokens=True)

    def feed(self, token_id):
        """The text that the next id completes, perhaps empty."""
        return _decoded(self._stream.step, self._inner, int(token_id)) or ""

    def finish(self):
        """Nothing: an incomplete character is left out."""
        return ""


def train_bpe(texts, vocab_size, report=None):
    """Byte-level BPE with at most `vocab_size` ids, of which 0 ends a document.

    No token spans two pre-tokens: GPT-2's, cut into pieces of at most 256 bytes and the end of a
    character.

    The same texts give the same tokenizer, however many threads there are. A short text may have
    fewer pairs worth merging than asked for.

    Args:
      texts: iterable of str.
      vocab_size: at least 257.
      report: called with the number of characters of each piece of text that is read.

    Source: Sennrich et al. 2016, arXiv 1508.07909; on bytes: Radford et al. 2019 (GPT-2).
    """
    library = _library()
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

    def pieces():
        for piece in itertools.chain.from_iterable(map(_cut_before_spaces, texts)):
            yield piece
            if report:
                report(len(piece))
        log.info("merging tokens of the tokenizer, up to %d ids", vocab_size)

    inner.train_from_iterator(pieces(), trainer)
    return LibraryTokenizer(inner.to_str())


def _cut_before_spaces(text):
    """Yields `text` in pieces that begin with white space: no GPT-2 pre-token spans two of them."""
    start = 0
    while match := _BEFORE_SPACE.search(text, start + _CHUNK):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def _batches(documents):
    """Yields ([name], [text]) of documents that have `_BATCH` bytes or more together."""
    names, texts, size = [], [], 0
    for name, data in documents:
        names.append(name)
        try:
            texts.append(text_of(data, "bpe"))
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
        size += len(data)
        if size >= _BATCH:
            yield names, texts
            names, texts, size = [], [], 0
    yield names, texts


class _OneThreadACall:
    """While there is one of these, a call of the library uses the thread that it is made in.

    Attributes:
      threads: how many the library would take.
    """

    _lock, _count, _before = threading.Lock(), 0, None

    def __enter__(self):
        cls = type(self)
        with cls._lock:
            if not cls._count:
                cls._before = os.environ.get(_PARALLELISM)
            cls._count += 1
            self.threads = _threads(cls._before)
            os.environ[_PARALLELISM] = "false"
        return self

    def __exit__(self, *_):
        cls = type(self)
        with cls._lock:
            cls._count -= 1
            if not cls._count and cls._before is None:
                os.environ.pop(_PARALLELISM, None)
            elif not cls._count:
                os.environ[_PARALLELISM] = cls._before


def _threads(parallelism):
    """How many threads the library takes; parallelism: what the environment says of it, or None."""
    if (parallelism or "").lower() in ("0", "off", "false", "f", "no", "n"):
        return 1
    has = getattr(os, "sched_getaffinity", None)
    cores = len(has(0)) if has else os.cpu_count() or 1
    wanted = os.environ.get("RAYON_NUM_THREADS", "")
    return min(int(wanted) if wanted.isdecimal() and int(wanted) else cores, _MOST_THREADS)


def _library():
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "a BPE tokenizer needs the `tokenizers` library: pip install tokenizers"
        ) from None
    return tokenizers


def _joined(ids):
    return np.concatenate([np.empty(0, np.int32), *ids])


def byte_of_character():
    """{character that byte-level tokenizers write: the byte it stands for}.

    Printable bytes of Latin-1 stand for themselves; the others, in order, are U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    return table | {chr(256 + i): b for i, b in enumerate(unprintable)}


def _pre_tokenizers(settings):
    """The pre-tokenizers of a file, one after another."""
    outer = settings["pre_tokenizer"]
    if outer is None:
        return []
    return outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]


def _check_alphabet(settings):
    """UsageError for a byte-level BPE file that knows neither all bytes nor a token for what it
    does not know: the library leaves out what such a file has no token for."""
    model = settings["model"]
    byte_level = any(each["type"] == "ByteLevel" for each in _pre_tokenizers(settings))
    if model["type"] != "BPE" or not byte_level or model["unk_token"] or model["byte_fallback"]:
        return
    of_text = {c for c, byte in byte_of_character().items() if byte not in _NOT_OF_TEXT}
    if missing := of_text - model["vocab"].keys():
        raise UsageError(
            f"it has no token for {len(missing)} of the {len(of_text)} bytes of UTF-8 text, "
            "and would drop them; train it with the whole byte alphabet"
        )


def _byte_level_table(settings, vocabulary, added, size):
    """The bytes of every id, or None if the tokenizer is not byte-level throughout, or its ids
    have more or fewer bytes than the text: a space before it, or those around an added token."""
    decoder = settings["decoder"]
    if settings["normalizer"] is not None or not decoder or decoder["type"] != "ByteLevel":
        return None
    if any(each.get("add_prefix_space") for each in _pre_tokenizers(settings)):
        return None
    if any((token.lstrip or token.rstrip) and not token.special for token in added.values()):
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


def _cuts_at_spaces(settings):
    """Whether text may be cut before white space without changing its ids: GPT-2's splitting, of
    which the pieces may be split further."""
    first, *others = _pre_tokenizers(settings) or [{"type": None}]
    return (
        settings["normalizer"] is None
        and first["type"] == "ByteLevel"
        and first["use_regex"]
        and not first["add_prefix_space"]
        and all(other["type"] == "Split" for other in others)
        and all(token["special"] for token in settings["added_tokens"])
    )
