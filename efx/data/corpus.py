"""From documents to token arrays on disk: tokenise the pieces of a text, cache them."""

import itertools
import json
import logging
import time

import numpy as np

from efx import io
from efx.data import bpe, tokenizers
from efx.data.disk_cache import cached_folder, content_key
from efx.data.shards import token_dtype
from efx.data.sources import whole_characters
from efx.data.stream import Stream, TokenSplit
from efx.errors import UsageError

log = logging.getLogger(__name__)

# Raise these when the same text gives other tokens, or another tokenizer, than before.
_VERSION = 4
_TOKENIZER_VERSION = 5
_LOG_SECONDS = 5
_COMPARED_BYTES = 1 << 20  # of held-out text
SPLIT_NAMES = {"train": "training split", "eval": "held-out split"}
SPLITS = tuple(SPLIT_NAMES)


def make_tokenizer(spec, name, key, pieces, root):
    """The tokenizer that `config.data.tokenizer` (`spec`) names, trained if it is not pretrained.

    Args:
      name, key, pieces: of a text, as for `load_corpus`. BPE is trained on its training split;
        `chars` takes the characters of all of it.
    """
    if tokenizer := tokenizers.pretrained_tokenizer(spec):
        return tokenizer
    kind, size = tokenizers.parse(spec)

    def texts():
        for split, document_name, data in _log_progress("reading for the tokenizer", pieces()):
            if kind == "chars" or split == "train":
                with tokenizers.prefix_errors(document_name):
                    text = tokenizers.decode_utf8(data, kind)
                yield text

    def build(folder):
        log.info("training the tokenizer %s on %s", spec, name)
        if kind == "chars":
            tokenizer = tokenizers.CharTokenizer(itertools.chain.from_iterable(texts()))
        else:
            tokenizer = bpe.train_bpe(texts(), size)
        tokenizer.save(folder / "tokenizer.json")

    key = content_key(kind, _TOKENIZER_VERSION, key, size)
    folder = cached_folder(root, "tokenizers", key, build)
    return tokenizers.load_tokenizer(folder / "tokenizer.json")


def _log_progress(verb, pieces):
    """Yield the pieces (split, name, bytes); log every few seconds how many bytes they had."""
    start = logged = time.monotonic()
    size = 0
    for piece in pieces:
        yield piece
        size += len(piece[2])
        now = time.monotonic()
        if now - logged >= _LOG_SECONDS:
            logged = now
            log.info("%s: %.0f MB, %.2g MB/s", verb, size / 1e6, size / 1e6 / (now - start))


def load_corpus(name, key, pieces, tokenizer, root, splits=SPLITS):
    """{"train" or "eval": TokenSplit} of a text, tokenised unless it is in the cache.

    The first megabyte of the held-out text is encoded and decoded to find text that the tokenizer
    loses.

    Args:
      name: of the text, for messages.
      key: hash of everything that `pieces` depends on.
      pieces: function without arguments that returns an iterator over ("train" or "eval", name,
        bytes) of each document or piece of one; called if the text is not in the cache.
      splits: which of the two to tokenise; other pieces are skipped.
    """
    key = content_key("tokens", _VERSION, key, splits, tokenizer.fingerprint)

    def build(folder):
        log.info("tokenising %s", name)
        _tokenise(folder, name, _log_progress("tokenising", pieces()), tokenizer, splits)

    folder = cached_folder(root, "tokens", key, build)
    info = io.read_json(folder / "info.json")
    token_splits = {}
    for split in splits:
        stream = Stream([np.memmap(folder / f"{split}.bin", info["dtype"], "r")])
        spans = np.load(folder / f"{split}_spans.npy", allow_pickle=False)
        token_splits[split] = TokenSplit(name, stream, spans, info["loss"][split])
    return token_splits


def _tokenise(folder, source_name, pieces, tokenizer, splits):
    dtype = token_dtype(tokenizer.vocab_size)
    end = [] if tokenizer.eot is None else [tokenizer.eot]
    spans, loss = {split: [] for split in splits}, dict.fromkeys(splits, "")
    split_of_document = []

    def documents():
        remaining = _COMPARED_BYTES
        for split, name, data in pieces:
            if split not in splits:
                continue
            split_of_document.append(split)
            if split == "eval" and remaining and not loss["eval"]:
                loss["eval"] = tokenizers.find_loss(
                    tokenizer, name, whole_characters(data[:remaining])
                )
                remaining = max(0, remaining - len(data))
            yield name, data

    files = {split: open(folder / f"{split}.bin", "wb") for split in splits}
    try:
        for number, ids in enumerate(tokenizer.encode_documents(documents())):
            split = split_of_document[number]
            if not len(ids):
                continue
            start = 0
            if spans[split]:
                files[split].write(np.array(end, dtype))
                start = spans[split][-1][1] + len(end)
            files[split].write(ids.astype(dtype))
            spans[split].append((start, start + len(ids)))
    finally:
        for file in files.values():
            file.close()
    for split in splits:
        if not spans[split]:
            raise UsageError(
                f"{source_name}: the {SPLIT_NAMES[split]} has no tokens; use more text, or another "
                "config.data.eval_source"
            )
        np.save(folder / f"{split}_spans.npy", np.array(spans[split], np.int64))
    info = {"dtype": dtype.str, "loss": loss}
    (folder / "info.json").write_text(json.dumps(info))


def check_length(seq_len, split, name, tokens):
    """UsageError unless a split has the tokens of one row and the target of its last one."""
    if tokens < seq_len + 1:
        raise UsageError(
            f"config.data.seq_len={seq_len}: the {SPLIT_NAMES[split]} of {name} has {tokens} "
            f"tokens, and one row needs {seq_len + 1} (seq_len + 1); lower config.data.seq_len, or "
            "use a longer text"
        )
