"""From documents to token arrays on disk: tokenise the pieces of a text, cache them."""

import json
import logging
import threading
import time

import numpy as np

from efx import io
from efx.data import bpe, tokenizers
from efx.data.disk_cache import cached_folder, content_key
from efx.data.shards import token_dtype
from efx.data.stream import Stream, TokenSplit
from efx.errors import UsageError

log = logging.getLogger(__name__)

# To be raised whenever the same input gives other tokens than before.
_VERSION = 1
_TOKENIZER_VERSION = 2  # to be raised whenever the same text gives another tokenizer
_REPORT_SECONDS = 5
SPLIT_NAMES = {"train": "training split", "eval": "held-out split"}
SPLITS = tuple(SPLIT_NAMES)


def make_tokenizer(spec, name, key, pieces, root):
    """The tokenizer that `config.data.tokenizer` (`spec`) names, trained on a text if need be.

    Args:
      name, key, pieces: of that text, as for `load_corpus`. BPE is trained on its training split;
        `chars` takes the characters of all of it.
    """
    if tokenizer := tokenizers.ready(spec):
        return tokenizer
    kind, argument = tokenizers.parse(spec)

    def build(folder):
        log.info("training the tokenizer %s on %s", spec, name)
        splits = SPLITS if kind == "chars" else ("train",)
        texts = _texts(
            ((document_name, data) for split, document_name, data in pieces() if split in splits),
            kind,
        )
        if kind == "chars":
            tokenizer = tokenizers.CharTokenizer(tokenizers.characters_of(texts))
        else:
            tokenizer = bpe.train_bpe(texts, argument, _Report("read for the tokenizer").add)
        tokenizer.save(folder / "tokenizer.json")

    key = content_key(kind, _TOKENIZER_VERSION, key, argument)
    return tokenizers.load_tokenizer(
        cached_folder(root, "tokenizers", key, build) / "tokenizer.json"
    )


class _Report:
    """Logs every few seconds how much text is processed; `add` may be called by several threads."""

    def __init__(self, verb):
        self._verb, self._lock, self._count = verb, threading.Lock(), 0
        self._start = self._logged = time.monotonic()

    def add(self, characters):
        with self._lock:
            self._count += characters
            now, millions = time.monotonic(), self._count / 1e6
            if now - self._logged >= _REPORT_SECONDS:
                self._logged = now
                rate = millions / (now - self._start)
                log.info("%s: %.0fM characters, %.2gM a second", self._verb, millions, rate)


def _texts(documents, kind):
    for name, data in documents:
        try:
            yield tokenizers.text_of(data, kind)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error


def load_corpus(name, key, pieces, tokenizer, root, splits=SPLITS):
    """{"train" or "eval": TokenSplit} of a text, made on the first call and read back after that.

    Args:
      name: of the text, for messages.
      key: hash of everything that `pieces` depends on.
      pieces: function without arguments: ("train" or "eval", name, bytes) of each document or piece
        of one; called if the text is not in the cache.
      splits: which of the two to tokenise; other pieces are skipped.
    """
    key = content_key("tokens", _VERSION, key, tokenizer.fingerprint)

    def build(folder):
        log.info("tokenising %s", name)
        _tokenise(folder, name, pieces(), tokenizer, splits)

    folder = cached_folder(root, "tokens", key, build)
    try:
        info = io.read_json(folder / "info.json")
        return {split: _stored(folder, name, split, info) for split in splits}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the cache entry {folder} cannot be read: {error}; delete it") from error


def _stored(folder, name, split, info):
    return TokenSplit(
        name,
        Stream([np.memmap(folder / f"{split}.bin", info["dtype"], "r")]),
        # Mapped, its size is compared with that of the file before there is room for it.
        np.array(np.load(folder / f"{split}_spans.npy", mmap_mode="r", allow_pickle=False)),
        info["text_bytes"][split],
    )


def _tokenise(folder, source_name, pieces, tokenizer, splits):
    dtype = token_dtype(tokenizer.vocab_size)
    text_bytes, spans = dict.fromkeys(splits, 0), {split: [] for split in splits}
    tokens_written, split_of_document = dict.fromkeys(splits, 0), []

    def documents():
        for split, name, data in pieces:
            if split in splits:
                split_of_document.append(split)
                text_bytes[split] += len(data)
                yield name, data

    files = {split: open(folder / f"{split}.bin", "wb") for split in splits}
    try:
        report = _Report("tokenised").add
        for number, ids in enumerate(tokenizer.encode_documents(documents(), report)):
            split = split_of_document[number]
            if not len(ids):
                continue
            if spans[split] and tokenizer.eot is not None:
                files[split].write(np.array(tokenizer.eot, dtype).tobytes())
                tokens_written[split] += 1
            files[split].write(ids.astype(dtype))
            spans[split].append((tokens_written[split], tokens_written[split] + len(ids)))
            tokens_written[split] += len(ids)
    finally:
        for file in files.values():
            file.close()
    for split in splits:
        if not tokens_written[split]:
            raise UsageError(f"{source_name}: the {SPLIT_NAMES[split]} has no tokens")
        np.save(folder / f"{split}_spans.npy", np.array(spans[split], np.int64))
    info = {"dtype": dtype.str, "text_bytes": text_bytes}
    (folder / "info.json").write_text(json.dumps(info))


def check_length(seq_len, split, name, tokens):
    """UsageError unless a split has the tokens of one row and the target of its last one."""
    if tokens < seq_len + 1:
        raise UsageError(
            f"config.data.seq_len={seq_len}: the {SPLIT_NAMES[split]} of {name} has {tokens} "
            f"tokens, and one row needs {seq_len + 1} (seq_len + 1); lower config.data.seq_len, or "
            "use a longer text"
        )
