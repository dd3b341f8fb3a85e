"""Which text is held out: decided once for a run, written down, and looked up after that.

The split is of the text, before any tokenizer sees it, so that it is the same for every tokenizer
and a trained tokenizer never sees held-out text. It is decided from the whole text, so a text that
has changed since would be split elsewhere, and what was held out would be trained on. Therefore a
decision is plain data that a run keeps:

    {"bytes": [from, to], "sum": hash of these bytes}    split="tail"
    {"documents": [hash of each document]}               split="documents"

and `pieces` splits any text by it that still holds those bytes in that place, or those documents.
"""

import hashlib
import logging

import numpy as np

from efx.data.sources import document_digest
from efx.errors import UsageError

log = logging.getLogger(__name__)

_STRIDE = 1 << 24  # bytes counted at a time
# Of a text that is trained on before all of it is read, documents are held out that begin here.
HEAD_BYTES = 1 << 26


class Head:
    """The documents of a source that begin in its first HEAD_BYTES."""

    def __init__(self, source):
        self.name, self._source = source.name, source

    def documents(self):
        """Yields the Documents; reads no further."""
        offset = 0
        for document in self._source.documents():
            yield document
            offset += len(document.data)
            if offset >= HEAD_BYTES:
                return


def held_out_in_head(pieces):
    """The `pieces` of a whole source without held-out ones that begin behind its head: the same
    text is there before, where it is scored."""
    offset = 0
    for split, name, data in pieces:
        if split == "train" or offset < HEAD_BYTES:
            yield split, name, data
        offset += len(data)


def decide(source, method, eval_fraction):
    """What is held out of `source`, as above.

    `tail`: the first int((1 - eval_fraction) * n) of all n characters are for training.
    `documents`: whole documents, picked by their hash until their bytes come nearest to
    eval_fraction of all; documents with the same text are always on the same side.
    """
    if method == "tail":
        return _decide_tail(source, eval_fraction)
    sizes = {}
    for document in source.documents():
        digest = document_digest(document.data)
        sizes[digest] = sizes.get(digest, 0) + len(document.data)
    if len(sizes) < 2:
        raise UsageError(
            f"config.data.split='documents': {source.name} has {len(sizes)} different "
            "documents, and at least 2 are needed; use config.data.split=tail, or cut "
            "documents with config.data.document_bytes"
        )
    return {"documents": sorted(digest.hex() for digest in _pick(sizes, eval_fraction))}


def pieces(source, decision):
    """Yields ("train" or "eval", name, bytes) for each document, or piece of one, in order.

    Raises UsageError, after the last piece, if the text that was held out is no longer in `source`
    unchanged: a caller that stores the pieces then has to discard them.
    """
    if "bytes" in decision:
        yield from _pieces_tail(source, decision)
        return
    heldout = {bytes.fromhex(digest) for digest in decision["documents"]}
    present = set()
    for document in source.documents():
        digest = document_digest(document.data)
        split = "eval" if digest in heldout else "train"
        present.update({digest} & heldout)
        yield split, document.name, document.data
    if len(present) < len(heldout):
        _refuse_changed(
            source,
            f"{len(heldout) - len(present)} of its {len(heldout)} held-out documents were "
            "removed or changed in length",
        )


def all_pieces(source, split):
    """Yields (part, name, bytes) for every document."""
    for document in source.documents():
        yield split, document.name, document.data


def without_documents_of(heldout, pieces, name):
    """The `pieces` of the source `name` without the documents of the source `heldout`."""
    digests, dropped = {document_digest(document.data) for document in heldout.documents()}, 0
    for split, document_name, data in pieces:
        if document_digest(data) in digests:
            dropped += 1
        else:
            yield split, document_name, data
    if dropped:
        log.info("%s: %d documents of %s are excluded from training", name, dropped, heldout.name)


def _refuse_changed(source, problem):
    raise UsageError(
        f"{source.name}: the earlier split cannot be kept: {problem}. Only append text to the "
        "old one (new files of a folder sort last) or add documents; restore the old text, or "
        "use another --workdir"
    )


def _pick(sizes, eval_fraction):
    """Digests of the documents to hold out, at least one and never all of `sizes` (digest ->
    bytes)."""
    target, picked_bytes, picked = eval_fraction * sum(sizes.values()), 0, set()
    for digest in sorted(sizes):
        size = sizes[digest]
        if size > target or len(picked) == len(sizes) - 1:
            continue
        if picked_bytes + size - target > target - picked_bytes:
            break  # stopping short is nearer
        picked.add(digest)
        picked_bytes += size
    return picked or {min(sizes, key=lambda digest: (sizes[digest], digest))}


def _decide_tail(source, eval_fraction):
    # Characters are counted as bytes that do not continue one, so that text which is not UTF-8
    # can be split as well.
    counts = [(_characters(document.data), len(document.data)) for document in source.documents()]
    total = sum(count for count, _ in counts)
    remaining = int((1 - eval_fraction) * total)
    if not 0 < remaining < total:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction}: one split of {source.name} ({total} "
            "characters) would be empty; use another fraction or a longer text"
        )
    offset, start, digest = 0, 0, _digest()
    for document, (count, size) in zip(source.documents(), counts, strict=True):
        if remaining > 0:  # the held-out tail begins in this document, at its end, or later
            start = offset + (size if count <= remaining else _offset_of(document.data, remaining))
            remaining -= count
        digest.update(memoryview(document.data)[max(start - offset, 0) :])
        offset += size
    return {"bytes": [start, offset], "sum": digest.hexdigest()}


def _pieces_tail(source, decision):
    start, stop = decision["bytes"]
    offset, digest = 0, _digest()
    for document in source.documents():
        data, name = document.data, document.name
        edges = [min(max(edge - offset, 0), len(data)) for edge in (start, stop)]
        before, heldout, after = data[: edges[0]], data[edges[0] : edges[1]], data[edges[1] :]
        offset += len(data)
        digest.update(heldout)
        for split, piece in (("train", before), ("eval", heldout), ("train", after)):
            if piece:
                yield split, name, piece
    if offset < stop or digest.hexdigest() != decision["sum"]:
        _refuse_changed(source, f"its held-out bytes {start} to {stop} have changed")


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
