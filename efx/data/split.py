"""Which text is held out: decided once for a run, written down, and then only looked up.

The split is of the text, before any tokenizer sees it, so that it is the same for every tokenizer
and a trained tokenizer never sees held-out text. It is decided from the whole text, so a text that
has changed since would be split elsewhere, and what was held out would be trained on. Therefore a
decision is plain data that a run keeps:

    {"bytes": [from, to], "sum": hash of these bytes}    split="tail"
    {"documents": [hash of each document]}               split="documents"

and `pieces` splits by it any text that still holds those bytes there, or those documents.
"""

import hashlib
import logging

import numpy as np

from efx.data.sources import document_digest
from efx.errors import UsageError

log = logging.getLogger(__name__)

SPLITS = ("tail", "documents")
_STRIDE = 1 << 24  # bytes looked at together


def split_documents(source, split, eval_fraction):
    """Yields ("train" or "eval", name, bytes) for each document, or piece of one, in order."""
    yield from pieces(source, decide(source, split, eval_fraction))


def decide(source, split, eval_fraction):
    """What is held out of `source`, as above.

    `tail`: the first int((1 - eval_fraction) * n) of all n characters are for training.
    `documents`: whole documents, picked by their hash until their bytes come nearest to
    eval_fraction of all; documents with the same text are always on the same side.
    """
    if split == "tail":
        return _decide_tail(source, eval_fraction)
    sizes = {}
    for document in source.documents():
        digest = document_digest(document.data)
        sizes[digest] = sizes.get(digest, 0) + len(document.data)
    if len(sizes) < 2:
        raise UsageError(
            f"config.data.split='documents' needs at least 2 different documents, and {source.name}"
            f" has {len(sizes)}; use config.data.split=tail"
        )
    return {"documents": sorted(digest.hex() for digest in _pick(sizes, eval_fraction))}


def pieces(source, decision):
    """Like `split_documents`, by a decision made before.

    Raises UsageError, after the last piece, if the text that was held out is not in `source` as it
    was: whoever keeps what is yielded has to keep nothing of it then.
    """
    if "bytes" in decision:
        yield from _pieces_tail(source, decision)
        return
    heldout = {bytes.fromhex(digest) for digest in decision["documents"]}
    found = set()
    for document in source.documents():
        digest = document_digest(document.data)
        part = "eval" if digest in heldout else "train"
        found.update({digest} & heldout)
        yield part, document.name, document.data
    if len(found) < len(heldout):
        _not_there(
            source,
            f"{len(heldout) - len(found)} of the {len(heldout)} documents that were held out are"
            " no longer in it, or are longer or shorter now",
        )


def whole(source, part):
    """Yields (part, name, bytes) for every document."""
    for document in source.documents():
        yield part, document.name, document.data


def without(pieces, name, heldout):
    """Those of the `pieces` of the source `name` that are no document of the source `heldout`."""
    digests, left_out = {document_digest(document.data) for document in heldout.documents()}, 0
    for part, where, data in pieces:
        if document_digest(data) in digests:
            left_out += 1
        else:
            yield part, where, data
    if left_out:
        log.info("%s: not trained on are %d documents of %s", name, left_out, heldout.name)


def _not_there(source, what):
    raise UsageError(
        f"{source.name}: the split of before cannot be kept: {what}. Text may be added behind the"
        " old one (new files of a folder sort last) or as further documents; put the old text"
        " back, or use another --workdir"
    )


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


def _decide_tail(source, eval_fraction):
    # Characters are counted as bytes that do not continue one, so that text which is not UTF-8
    # can be split as well.
    counts = [(_characters(document.data), len(document.data)) for document in source.documents()]
    total = sum(count for count, _ in counts)
    left = int((1 - eval_fraction) * total)
    if not 0 < left < total:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction} of {source.name} ({total} characters)"
            " leaves nothing on one side"
        )
    at, start, digest = 0, 0, _digest()
    for document, (count, size) in zip(source.documents(), counts, strict=True):
        if left > 0:  # it begins in this document, or at its end, or later
            start = at + (size if count <= left else _offset_of(document.data, left))
            left -= count
        digest.update(memoryview(document.data)[max(start - at, 0) :])
        at += size
    return {"bytes": [start, at], "sum": digest.hexdigest()}


def _pieces_tail(source, decision):
    start, stop = decision["bytes"]
    at, digest = 0, _digest()
    for document in source.documents():
        data, name = document.data, document.name
        edges = [min(max(edge - at, 0), len(data)) for edge in (start, stop)]
        before, heldout, after = data[: edges[0]], data[edges[0] : edges[1]], data[edges[1] :]
        at += len(data)
        digest.update(heldout)
        for part, piece in (("train", before), ("eval", heldout), ("train", after)):
            if piece:
                yield part, name, piece
    if at < stop or digest.hexdigest() != decision["sum"]:
        _not_there(source, f"its bytes {start} to {stop}, which were held out, are others now")


def _digest():
    return hashlib.blake2b(digest_size=16)


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
