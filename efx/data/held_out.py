"""Which text is held out: a function of the content of the text, decided once for a run.

A changed text would be split elsewhere and held-out text would be trained on, so a run records the
decision as plain data:

    {"bytes": [from, to], "sum": hash of these bytes}    split="tail" (of tokens alone: their ids)
    {"documents": [hash of each document]}               split="documents"
    {"shards": hash}                                     shards for evaluation

It holds for every text that still has these bytes in this place, or these documents. Documents that
are exactly equal to a held-out one, or to one of which a part is held out, are not trained on.

Functions take the ROWs of a text (`shards.ROW`), and `content`: a function of a row, a first and a
last-plus-one byte that returns these bytes (or their ids).
"""

import dataclasses
import itertools
import json

import numpy as np

from efx import io
from efx.data.disk_cache import content_key
from efx.data.shards import ENDS, LOST, NO_TEXT
from efx.data.sources import document_digest
from efx.errors import UsageError

VERSION = 3  # raise it when the same text is split elsewhere
# Bytes of a held-out document that is also cut out of longer ones: shorter texts are in other
# documents by chance, and longer ones would not fit into memory.
CUT_OUT_BYTES = range(64, 1 << 26)


class Documents:
    """The documents of a text.

    Attributes:
      row: int64[rows], the document that each row is in.
      digests: V16[n]. sizes: int64[n], their bytes.
    """

    def __init__(self, rows):
        is_first = np.append(True, rows["flags"][:-1] & ENDS > 0)[: len(rows)]
        first = np.flatnonzero(is_first)
        self.row = np.cumsum(is_first) - 1
        self.sizes = np.add.reduceat(rows["bytes"], first) if len(first) else first
        self.digests = rows["digest"][first]
        stops = np.append(first[1:], len(rows))
        for number in np.flatnonzero(stops - first > 1):  # pieces of a long one
            pieces = rows["digest"][first[number] : stops[number]]
            self.digests[number] = np.void(document_digest(pieces.tobytes()))


def choose_held_out(name, rows, content, is_evaluation, method, eval_fraction):
    """Decide the held-out part of a text.

    Args:
      name: of the text, for messages.
      is_evaluation: bool[n], rows that shards for evaluation hold; then nothing else is held out.
      method: "tail": the first int((1 - eval_fraction) * n) of all n characters are for training;
        "documents": whole documents are held out, in the order of their hashes, until their bytes
        come nearest to eval_fraction of all. Documents with the same text are on the same side.

    Returns:
      The decision, see above.
    """
    if is_evaluation.any():
        return {"shards": document_digest(rows["digest"][is_evaluation].tobytes()).hex()}
    if method == "tail":
        start, stop = _tail(name, rows, content, eval_fraction), int(rows["bytes"].sum())
        return {"bytes": [start, stop], "sum": _digest_between(rows, content, start, stop)}
    documents = Documents(rows)
    digests, number = np.unique(documents.digests, return_inverse=True)
    if np.any(rows["flags"] & NO_TEXT) or len(digests) < 2:
        raise UsageError(
            f"config.data.split='documents': {name} has {len(digests)} different documents, and at "
            "least 2 with text are needed; use config.data.split=tail, or cut documents with "
            "config.data.document_bytes"
        )
    sizes = np.bincount(number, documents.sizes).astype(np.int64)
    picked = _pick(sizes, eval_fraction)
    return {"documents": [digests[i].tobytes().hex() for i in picked]}


def _pick(sizes, eval_fraction):
    """Indices of the documents to hold out: at least one, and never all.

    Args:
      sizes: bytes of different documents, in the order of their hashes.
    """
    target, picked_bytes, picked = eval_fraction * int(sizes.sum()), 0, []
    for index in np.flatnonzero(sizes <= target).tolist():
        if len(picked) == len(sizes) - 1:
            break
        size = int(sizes[index])
        if picked_bytes + size - target > target - picked_bytes:
            break  # stopping short is nearer
        picked.append(index)
        picked_bytes += size
    return picked or [int(np.argmin(sizes))]


def _tail(name, rows, content, eval_fraction):
    """The first held-out byte."""
    counts = np.cumsum(rows["characters"])
    total = int(rows["characters"].sum())
    remaining = int((1 - eval_fraction) * total)
    if not 0 < remaining < total:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction}: a split of {name} ({total} characters) "
            "is empty; use another fraction or a longer text"
        )
    row = int(np.searchsorted(counts, remaining))
    offset = int(rows["bytes"][:row].sum())
    remaining -= int(counts[row] - rows["characters"][row])
    if remaining == rows["characters"][row]:
        return offset + int(rows["bytes"][row])
    size = int(rows["bytes"][row])
    if rows["flags"][row] & (LOST | NO_TEXT):
        return offset + size * remaining // int(rows["characters"][row])
    begins = (np.frombuffer(content(row, 0, size), np.uint8) & 0xC0) != 0x80
    return offset + int(np.flatnonzero(begins)[remaining])


def _rows_between(rows, start, stop):
    """The rows of the bytes start..stop-1 of a text: (slice of those that lie in them as a whole,
    list of (row, first and last-plus-one byte) of the others)."""
    ends = np.cumsum(rows["bytes"])
    begins = ends - rows["bytes"]
    whole = slice(int(np.searchsorted(begins, start)), int(np.searchsorted(ends, stop, "right")))
    parts = []
    for row in sorted({whole.start - 1, whole.stop}):
        if 0 <= row < len(rows):
            edges = [
                int(np.clip(edge, begins[row], ends[row]) - begins[row]) for edge in (start, stop)
            ]
            if edges[0] < edges[1]:
                parts.append((row, *edges))
    return whole, parts


def _digest_between(rows, content, start, stop):
    """Hash of the bytes start..stop-1 of a text."""
    whole, parts = _rows_between(rows, start, stop)
    before, after = b"", b""
    for row, begin, end in parts:
        digest = document_digest(content(row, begin, end))
        before, after = (digest, after) if row < whole.start else (before, digest)
    return document_digest(before + rows["digest"][whole].tobytes() + after).hex()


@dataclasses.dataclass
class Sides:
    """The two sides of a text: whole rows and parts of rows.

    Attributes:
      train, heldout: bool[n], whole rows.
      train_parts, heldout_parts: lists of (row, first and last-plus-one byte).
      dropped: number of documents and parts of them on neither side.
    """

    train: np.ndarray
    heldout: np.ndarray
    train_parts: list
    heldout_parts: list
    dropped: int


def split(name, rows, content, is_evaluation, decision, withheld=(), cut_out=()):
    """The `Sides` of a text.

    Args:
      is_evaluation: bool[n], rows that shards for evaluation hold.
      decision: see above; None: everything else is for training.
      withheld: V16 array, digests of documents that are not trained on either.
      cut_out: list of (first and last-plus-one byte) that are not trained on either.

    Raises:
      UsageError: the text that was held out is no longer there unchanged.
    """
    documents, heldout, heldout_parts = Documents(rows), is_evaluation.copy(), []
    if decision and "bytes" in decision:
        start, stop = decision["bytes"]
        if _digest_between(rows, content, start, stop) != decision["sum"]:
            _refuse_changed(name, f"its held-out bytes {start} to {stop} have changed")
        whole, heldout_parts = _rows_between(rows, start, stop)
        heldout[whole] = True
        cut_out = [*cut_out, (start, stop)]
    elif decision and "documents" in decision:
        digests = np.frombuffer(bytes.fromhex("".join(decision["documents"])), "V16")
        if missing := len(digests) - int(np.isin(digests, documents.digests).sum()):
            problem = f"{missing} of its {len(digests)} held-out documents were removed or changed"
            _refuse_changed(name, f"{problem} in length")
        heldout = np.isin(documents.digests, digests)[documents.row]
    elif decision and choose_held_out(name, rows, content, is_evaluation, "tail", 0.5) != decision:
        _refuse_changed(name, "the evaluation shards have changed")
    touched = np.append(documents.row[heldout], [documents.row[row] for row, *_ in heldout_parts])
    touched = np.unique(touched.astype(int))
    is_copy = np.isin(documents.digests, documents.digests[touched])
    is_copy[touched] = False
    is_copy |= np.isin(documents.digests, np.array(withheld, "V16"))
    train = ~(heldout | is_copy[documents.row])
    cuts, dropped = {}, int(is_copy.sum()) + len(cut_out) - bool(decision and "bytes" in decision)
    for start, stop in cut_out:
        whole, parts = _rows_between(rows, start, stop)
        train[whole] = False
        for row, begin, end in parts:
            cuts.setdefault(row, []).append((begin, end))
    train_parts = []
    for row in cuts:
        if train[row]:
            edges = [0, *itertools.chain.from_iterable(sorted(cuts[row])), int(rows["bytes"][row])]
            parts = zip(edges[::2], edges[1::2], strict=True)
            train_parts += [(row, begin, end) for begin, end in parts if begin < end]
            train[row] = False
    return Sides(train, heldout, train_parts, heldout_parts, dropped)


def held_out_digests(rows, sides):
    """V16 array: digests of the documents of which at least a part is held out."""
    documents, parts = Documents(rows), [row for row, *_ in sides.heldout_parts]
    return documents.digests[
        documents.row[np.append(np.flatnonzero(sides.heldout), parts).astype(int)]
    ]


def _refuse_changed(name, problem):
    raise UsageError(
        f"{name}: the earlier split cannot be kept: {problem}. Only append text to the "
        "old one (new files of a folder sort last) or add documents; restore the old text, or "
        "use another --workdir"
    )


def single_document(source):
    """The bytes of the only document of a source; None if there are more, or of another length
    than CUT_OUT_BYTES."""
    pieces, size = [], 0
    for document in source.documents():
        size += len(document.data)
        if (pieces and pieces[-1].ends) or size >= CUT_OUT_BYTES.stop:
            return None
        pieces.append(document)
    return b"".join(piece.data for piece in pieces) if size in CUT_OUT_BYTES else None


def find_copies(documents, texts):
    """Where `texts` occur in documents.

    Args:
      documents: iterable of `sources.Document`.
      texts: bytes, of a length in CUT_OUT_BYTES.

    Returns:
      List of [first and last-plus-one byte], counted from the first byte of the first document.
    """
    found, stop, rest, begin = [], 0, b"", 0
    longest = max(map(len, texts))
    for document in documents:
        data = rest + document.data
        for text in texts:
            place = data.find(text)
            while place >= 0:
                found.append([begin + place, begin + place + len(text)])
                place = data.find(text, place + len(text))
        stop += len(document.data)
        # A text may begin in this piece and end in the next one, but not in another document.
        rest = b"" if document.ends else data[-(longest - 1) :]
        begin = stop - len(rest)
    return _merged(found)


def _merged(ranges):
    """Ranges in order, those that overlap as one."""
    merged = []
    for start, stop in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(stop, merged[-1][1])
        else:
            merged.append([start, stop])
    return merged


# ---- a list of training documents ----------------------------------------------------------------


class Subset:
    """Training documents, listed in a file by the hash of their text: config.data.subset.

    The held-out text stays the same. A run needs only this file and the corpus, so it can be on any
    machine that has both (an expert of cBTM is such a run).

    Attributes:
      digests: their `document_digest`s, in hexadecimal.
      key: hash of the list.
    """

    def __init__(self, digests):
        self.digests = frozenset(digests)
        self.key = content_key(sorted(self.digests))

    def to_json(self):
        """The contents of the file."""
        return json.dumps({"sum": self.key, "documents": sorted(self.digests)}, indent=0) + "\n"

    @classmethod
    def load(cls, path):
        """Read a file. Raises UsageError if it is missing or damaged."""
        setting = f"config.data.subset={str(path)!r}"
        path = io.local_path(path, "config.data.subset")
        try:
            # Not limited in size: the list of a large corpus is long.
            stored = io.parse_json(path.read_text())
            subset = cls(stored["documents"])
            if subset.key != stored["sum"]:
                raise ValueError("it does not match its checksum")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{setting} is missing or damaged ({error}); --mode=cluster writes such a file for "
                "each cluster"
            ) from error
        return subset

    def select(self, rows, content, sides):
        """Leave only listed documents, and listed parts of documents, on the training side.

        Raises:
          UsageError: a listed document is not there.
        """
        documents = Documents(rows)
        listed = np.frombuffer(bytes.fromhex("".join(sorted(self.digests))), "V16")
        is_listed = np.isin(documents.digests, listed)[documents.row]
        sides.train &= is_listed
        found = {digest.tobytes().hex() for digest in documents.digests[documents.row[sides.train]]}
        parts = {part: document_digest(content(*part)).hex() for part in sides.train_parts}
        sides.train_parts = [part for part in parts if parts[part] in self.digests]
        if missing := len(self.digests - found - set(parts.values())):
            raise UsageError(
                f"config.data.subset: {missing} of its {len(self.digests)} documents are "
                "not training documents here; use the config.data settings of its clustering, "
                "or run --mode=cluster again"
            )
