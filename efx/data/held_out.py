"""The split into training and held-out text: decided once for a run and recorded with it.

Text is split before it is tokenised, so the split is the same for every tokenizer, and BPE is never
trained on held-out text (`chars` has the characters of all of the text). A changed text would be
split elsewhere and held-out text would be trained on, so a run records its decision as plain data:

    {"bytes": [from, to], "sum": hash of these bytes}    split="tail"
    {"documents": [hash of each document]}               split="documents"

`pieces` splits by it every text that still has these bytes in this place, or these documents.
Documents that are exactly equal to a held-out one, or to one of which a part is held out, are not
trained on.
"""

import dataclasses
import hashlib
import logging

import numpy as np

from efx.data.sources import document_digest
from efx.errors import UsageError

log = logging.getLogger(__name__)

VERSION = 2  # raise it when the same text is split elsewhere
_STRIDE = 1 << 24  # bytes counted at a time
_LEAST_PART = 64  # bytes; shorter texts are in other documents by chance
# With config.data.shuffle=buffer only documents that begin in these first bytes are held out:
# training begins before the whole text is read.
HEAD_BYTES = 1 << 26


def head_of(source):
    """The Source of the documents that begin in the first HEAD_BYTES of a source."""

    def documents():
        offset = 0
        for document in source.documents():
            yield document
            offset += len(document.data)
            if offset >= HEAD_BYTES:
                return

    return dataclasses.replace(source, documents=documents)


def drop_held_out_behind_head(pieces):
    """The `pieces` of a whole source without held-out ones that begin behind its head.

    The same text is in the head, where it is scored.
    """
    offset = 0
    for split, name, data in pieces:
        if split == "train" or offset < HEAD_BYTES:
            yield split, name, data
        offset += len(data)


def drop_documents_of(heldout, source):
    """A Source without the documents of the Source `heldout`, and without the beginning of one
    that config.data.max_bytes cut.

    If `heldout` is a single document of `_LEAST_PART` bytes, it is also cut out of longer ones.
    """

    def documents():
        digests = {document_digest(document.data) for document in heldout.documents()}
        part = next(iter(heldout.documents())).data if len(digests) == 1 else b""
        changed = 0
        for document in source.documents():
            pieces = [document.data]
            if len(part) >= _LEAST_PART:
                pieces = document.data.split(part)
            if document_digest(document.data) in digests:
                pieces = []
            elif document.is_cut:
                others = heldout.documents()
                if any(other.data.startswith(document.data) for other in others):
                    pieces = []
            changed += pieces != [document.data]
            for piece in filter(None, pieces):
                yield dataclasses.replace(document, data=piece)
        if changed:
            log.info(
                "%s: held-out text of %s is excluded from training (in %d documents)",
                source.name, heldout.name, changed,
            )  # fmt: skip

    return dataclasses.replace(source, documents=documents)


def decide(source, method, eval_fraction):
    """Decide the held-out part of a source.

    Args:
      method: "tail": the first int((1 - eval_fraction) * n) of all n characters are for training;
        "documents": whole documents are held out, in the order of their hashes, until their bytes
        come nearest to eval_fraction of all. Documents with the same text are on the same side.

    Returns:
      The decision, see above.
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
    """Yield ("train" or "eval", name, bytes) for each document, or piece of one, in order.

    Args:
      decision: see above; None: everything is for training.

    Raises:
      UsageError: after the last piece, if the text that was held out is no longer in `source`
        unchanged: a caller that stores the pieces then has to discard them.
    """
    if decision and "bytes" in decision:
        yield from _tail_pieces(source, decision)
        return
    heldout = {bytes.fromhex(digest) for digest in decision["documents"]} if decision else set()
    present = set()
    for document in source.documents():
        digest = document_digest(document.data)
        if digest in heldout:
            present.add(digest)
        yield "eval" if digest in heldout else "train", document.name, document.data
    if len(present) < len(heldout):
        _refuse_changed(
            source,
            f"{len(heldout) - len(present)} of its {len(heldout)} held-out documents were "
            "removed or changed in length",
        )


def _refuse_changed(source, problem):
    raise UsageError(
        f"{source.name}: the earlier split cannot be kept: {problem}. Only append text to the "
        "old one (new files of a folder sort last) or add documents; restore the old text, or "
        "use another --workdir"
    )


def _pick(sizes, eval_fraction):
    """Digests of the documents to hold out: at least one, and never all.

    Args:
      sizes: {digest: bytes}.
    """
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
    counts = [(_count_characters(d.data), len(d.data)) for d in source.documents()]
    total = sum(count for count, _ in counts)
    remaining = int((1 - eval_fraction) * total)
    if not 0 < remaining < total:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction}: a split of {source.name} ({total} "
            "characters) is empty; use another fraction or a longer text"
        )
    offset, start, digest = 0, 0, hashlib.blake2b(digest_size=16)
    # Not strict: if the text has changed since it was counted, `decide`'s caller refuses it.
    for document, (count, size) in zip(source.documents(), counts, strict=False):
        if remaining > 0:  # the held-out tail begins in this document, at its end, or later
            start = offset + (size if count <= remaining else _offset_of(document.data, remaining))
            remaining -= count
        digest.update(memoryview(document.data)[max(start - offset, 0) :])
        offset += size
    return {"bytes": [start, offset], "sum": digest.hexdigest()}


def _tail_pieces(source, decision):
    start, stop = decision["bytes"]

    def documents():
        """Yield (document, begin and end of its held-out bytes)."""
        offset = 0
        for document in source.documents():
            size = len(document.data)
            yield document, *(min(max(edge - offset, 0), size) for edge in (start, stop))
            offset += size

    copies = {document_digest(d.data) for d, begin, end in documents() if begin < end}
    dropped, digest = 0, hashlib.blake2b(digest_size=16)
    for document, begin, end in documents():
        data = document.data
        if begin == end and document_digest(data) in copies:
            dropped += 1
            continue
        before, heldout, after = data[:begin], data[begin:end], data[end:]
        digest.update(heldout)
        for split, piece in (("train", before), ("eval", heldout), ("train", after)):
            if piece:
                yield split, document.name, piece
    if dropped:
        log.info("%s: %d copies of held-out documents are not trained on", source.name, dropped)
    if digest.hexdigest() != decision["sum"]:
        _refuse_changed(source, f"its held-out bytes {start} to {stop} have changed")


# Characters are counted as bytes that do not continue one, so that text which is not UTF-8 can be
# split as well.


def _begins_character(data):
    return (np.frombuffer(data, np.uint8) & 0xC0) != 0x80


def _count_characters(data):
    strides = (data[i : i + _STRIDE] for i in range(0, len(data), _STRIDE))
    return sum(int(np.count_nonzero(_begins_character(stride))) for stride in strides)


def _offset_of(data, character):
    """Offset of the first byte of the character of this number (counted from 0)."""
    for i in range(0, len(data), _STRIDE):
        begins = np.flatnonzero(_begins_character(data[i : i + _STRIDE]))
        if character < len(begins):
            return i + int(begins[character])
        character -= len(begins)
    return len(data)
