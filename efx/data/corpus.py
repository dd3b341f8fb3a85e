"""From documents to token arrays on disk: split into training and held-out text, tokenise, keep.

The split is of the text, before any tokenizer sees it, so that it is the same for every tokenizer
and a trained tokenizer never sees held-out text.
"""

import json
import logging

import numpy as np

from efx.data import bpe, tokenizers
from efx.data.cache import content_key, entry
from efx.data.shards import token_dtype
from efx.data.sources import document_digest
from efx.data.stream import Stream
from efx.errors import UsageError, nearest

log = logging.getLogger(__name__)

SPLITS = ("tail", "documents")
# Raised whenever the same input would come to other tokens than before.
_VERSION = 1
_STRIDE = 1 << 24  # bytes looked at together
PART_NAMES = {"train": "training split", "eval": "held-out split"}
_PARTS = tuple(PART_NAMES)


class Corpus:
    """The two token streams of a source, memory-mapped.

    Attributes:
      train, eval: Stream.
      spans: {"train" or "eval": int64[n, 2]}, first and last-plus-one token of each document.
      text_bytes: {"train" or "eval": bytes of text in it}.
    """

    def __init__(self, folder):
        info = json.loads((folder / "info.json").read_text())
        self.text_bytes = info["text_bytes"]
        self.spans, streams = {}, {}
        for part in _PARTS:
            self.spans[part] = np.load(folder / f"{part}_spans.npy")
            streams[part] = Stream([np.memmap(folder / f"{part}.bin", info["dtype"], "r")])
        self.train, self.eval = streams["train"], streams["eval"]


def check_split(split, eval_fraction):
    """Raises UsageError unless the two values make sense."""
    if split not in SPLITS:
        hint = nearest(split, SPLITS)
        raise UsageError(f"config.data.split={split!r} is not one of tail, documents{hint}")
    if not 0 < eval_fraction < 1:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction} should lie between 0 and 1, excluding both"
        )


def make_tokenizer(spec, source, identity, split, eval_fraction, root):
    """The tokenizer that `config.data.tokenizer` (`spec`) names, trained on `source` if need be."""
    kind, argument = tokenizers.parse(spec)
    if kind == "bytes":
        return tokenizers.ByteTokenizer()
    if kind == "file":
        return tokenizers.load_tokenizer(argument)
    if kind == "chars":
        key = content_key("chars", _VERSION, identity)
    else:
        key = content_key("bpe", _VERSION, identity, split, eval_fraction, argument)

    def build(folder):
        log.info("making the tokenizer %s of %s", spec, source.name)
        if kind == "chars":
            every = ((document.name, document.data) for document in source.documents())
            tokenizer = tokenizers.CharTokenizer(tokenizers.characters_of(_texts(every, kind)))
        else:
            pieces = split_documents(source, split, eval_fraction)
            train = ((name, data) for part, name, data in pieces if part == "train")
            tokenizer = bpe.train_bpe(_texts(train, kind), argument)
        tokenizer.save(folder / "tokenizer.json")

    return tokenizers.load_tokenizer(entry(root, "tokenizers", key, build) / "tokenizer.json")


def _texts(documents, kind):
    for name, data in documents:
        try:
            yield tokenizers.text_of(data, kind)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error


def load_corpus(source, identity, tokenizer, split, eval_fraction, root, members=None):
    """(Corpus, key): the tokens of `source`, made on the first call and read back after that.

    members: `clusters.Members`, the training documents to take; None: all.
    """
    parts = ["tokens", _VERSION, identity, split, eval_fraction, tokenizer.fingerprint]
    key = content_key(*parts, *([members.key] if members else []))

    def build(folder):
        log.info("tokenising %s", source.name)
        pieces = split_documents(source, split, eval_fraction)
        pieces = members.pick(pieces) if members else pieces
        _tokenise(folder, source.name, pieces, tokenizer)

    return Corpus(entry(root, "tokens", key, build)), key


def _tokenise(folder, source_name, pieces, tokenizer):
    dtype = token_dtype(tokenizer.vocab_size)
    text_bytes, spans = dict.fromkeys(_PARTS, 0), {part: [] for part in _PARTS}
    written, parts = dict.fromkeys(_PARTS, 0), []

    def documents():
        for part, name, data in pieces:
            parts.append(part)
            text_bytes[part] += len(data)
            yield name, data

    files = {part: open(folder / f"{part}.bin", "wb") for part in _PARTS}
    try:
        for i, ids in enumerate(tokenizer.encode_documents(documents())):
            part = parts[i]
            if not len(ids):
                continue
            if spans[part] and tokenizer.eot is not None:
                files[part].write(np.array(tokenizer.eot, dtype).tobytes())
                written[part] += 1
            files[part].write(ids.astype(dtype))
            spans[part].append((written[part], written[part] + len(ids)))
            written[part] += len(ids)
    finally:
        for file in files.values():
            file.close()
    for part in _PARTS:
        if not written[part]:
            raise UsageError(f"{source_name}: the {PART_NAMES[part]} comes to no tokens")
        np.save(folder / f"{part}_spans.npy", np.array(spans[part], np.int64))
    info = {"dtype": dtype.str, "text_bytes": text_bytes}
    (folder / "info.json").write_text(json.dumps(info))


def split_documents(source, split, eval_fraction):
    """Yields ("train" or "eval", name, bytes) for each document, or piece of one, in order.

    `tail`: the first int((1 - eval_fraction) * n) of all n characters are for training.
    `documents`: whole documents, picked by their hash until their bytes come nearest to
    eval_fraction of all; documents with the same text are always on the same side.
    """
    if split == "tail":
        yield from _split_tail(source, eval_fraction)
        return
    sizes = {}
    for document in source.documents():
        digest = document_digest(document.data)
        sizes[digest] = sizes.get(digest, 0) + len(document.data)
    if len(sizes) < 2:
        raise UsageError(
            f"config.data.split='documents' needs at least 2 different documents, and {source.name}"
            f" has {len(sizes)}; use config.data.split=tail"
        )
    heldout = _pick(sizes, eval_fraction)
    for document in source.documents():
        part = "eval" if document_digest(document.data) in heldout else "train"
        yield part, document.name, document.data


def _pick(sizes, eval_fraction):
    """Digests of the documents to hold out: some, and never all, of `sizes` (digest -> bytes)."""
    target, taken, picked = eval_fraction * sum(sizes.values()), 0, set()
    for digest in sorted(sizes):
        size = sizes[digest]
        if size > target or len(picked) == len(sizes) - 1:
            continue
        if taken + size - target > target - taken:
            break  # stopping short is nearer
        picked.add(digest)
        taken += size
    return picked or {min(sizes, key=lambda digest: (sizes[digest], digest))}


def _split_tail(source, eval_fraction):
    # Characters are counted as bytes that do not continue one, so that text which is not UTF-8
    # can be split as well.
    total = sum(_characters(document.data) for document in source.documents())
    left = int((1 - eval_fraction) * total)
    if not 0 < left < total:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction} of {source.name} ({total} characters)"
            " leaves nothing on one side"
        )
    for document in source.documents():
        count = _characters(document.data)
        if left <= 0:
            yield "eval", document.name, document.data
        elif count <= left:
            yield "train", document.name, document.data
        else:
            cut = _offset_of(document.data, left)
            yield "train", document.name, document.data[:cut]
            yield "eval", document.name, document.data[cut:]
        left -= count


def _begins(data):
    """Whether each byte begins a character."""
    return (np.frombuffer(data, np.uint8) & 0xC0) != 0x80


def _characters(data):
    return sum(
        int(np.count_nonzero(_begins(data[i : i + _STRIDE]))) for i in range(0, len(data), _STRIDE)
    )


def _offset_of(data, character):
    """Offset of the byte that begins the character of this number (counted from 0)."""
    for i in range(0, len(data), _STRIDE):
        begins = _begins(data[i : i + _STRIDE])
        count = int(np.count_nonzero(begins))
        if character < count:
            return i + int(np.flatnonzero(begins)[character])
        character -= count
    return len(data)
