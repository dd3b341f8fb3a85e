"""Which text is held out: a function of the content of the text, decided once for a run.

A changed text would be split elsewhere and held-out text would be trained on, so a run records the
decision as plain data:

    {"tail": [from, to], "sum": hash of this text,    split="tail": bytes, of shards their ids
     "first": hash of the document it begins in}
    {"documents": [hash of each document]}            split="documents"
    {"shards": hash}                                  shards for evaluation

It holds for every text that still has this text in this place, or these documents.

Two things are not trained on: documents with the hash of one that is held out, here or in another
text; and ranges of bytes that are copies of held-out text but no whole documents (`find_copies`).

All functions but this one take the ROWs of a text, see `shards`.
"""

import itertools
import json

import numpy as np

from efx import io
from efx.data.disk_cache import content_key
from efx.data.shards import ENDS, NO_TEXT
from efx.data.sources import document_digest
from efx.errors import UsageError

VERSION = 3  # raise it when the same text is split elsewhere
# Bytes of a held-out document that is also cut out of longer ones: shorter texts are in other
# documents by chance, and longer ones would not fit into memory.
CUT_OUT_BYTES = range(64, 1 << 26)


class Documents:
    """The documents of a text that is cut where its tail begins, if that is held out.

    Attributes:
      row: int64[rows], the document that each row is in.
      digests: V16[n]; both halves of the document in which the tail begins have that of the whole.
      is_half: bool[n], whether a document is one of these halves.
      sizes: int64[n], their bytes.
    """

    def __init__(self, rows, decision=None):
        is_first = np.append(True, rows["flags"][:-1] & ENDS > 0)[: len(rows)]
        first = np.flatnonzero(is_first)
        self.row = np.cumsum(is_first) - 1
        self.sizes = np.add.reduceat(rows["bytes"], first) if len(first) else first
        self.digests = rows["digest"][first]
        stops = np.append(first[1:], len(rows))
        for number in np.flatnonzero(stops - first > 1):  # pieces of a long one
            pieces = rows["digest"][first[number] : stops[number]]
            self.digests[number] = np.void(document_digest(pieces.tobytes()))
        self.is_half = np.zeros(len(first), bool)
        if decision and decision.get("first"):
            last = np.searchsorted(np.cumsum(rows["bytes"]), decision["tail"][0])
            self.is_half[self.row[last : last + 2]] = True
            self.digests[self.is_half] = np.void(bytes.fromhex(decision["first"]))


def choose_tail(name, rows, content, eval_fraction):
    """Decision to train on the first int((1 - eval_fraction) * n) of n characters.

    Args:
      name: of the text, for messages.
      content: function from the number of a row to its bytes, or to its ids.
    """
    counts, ends = np.cumsum(rows["characters"]), np.cumsum(rows["bytes"])
    total = int(rows["characters"].sum())
    remaining = int((1 - eval_fraction) * total)
    if not 0 < remaining < total:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction}: a split of {name} ({total} characters) "
            "is empty; use another fraction or a longer text"
        )
    row, digest, first = int(np.searchsorted(counts, remaining)), b"", ""
    start, remaining = int(ends[row]), remaining - int(counts[row])  # characters before the end
    if remaining:
        data = content(row)
        offset = len(data) + remaining
        if isinstance(data, bytes):
            begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
            offset = int(np.flatnonzero(begins)[remaining])
        start += offset - len(data)
        digest, documents = document_digest(data[offset:]), Documents(rows)
        first = documents.digests[documents.row[row]].tobytes().hex()
    digests = digest + rows["digest"][row + 1 :].tobytes()
    tail = [start, int(ends[-1])]
    return {"tail": tail, "sum": document_digest(digests).hex(), "first": first}


def choose_documents(name, rows, eval_fraction):
    """Decision to hold out whole documents, in the order of their hashes, until their bytes come
    nearest to eval_fraction of all; at least one, and never all. Equal documents count as one."""
    documents = Documents(rows)
    digests, number = np.unique(documents.digests, return_inverse=True)
    if np.any(rows["flags"] & NO_TEXT) or len(digests) < 2:
        raise UsageError(
            f"config.data.split='documents': {name} has {len(digests)} different documents, and at "
            "least 2 with text are needed; use config.data.split=tail, or cut documents with "
            "config.data.document_bytes"
        )
    sizes = np.bincount(number, documents.sizes).astype(np.int64)
    target, picked_bytes, picked = eval_fraction * int(sizes.sum()), 0, []
    for index in np.flatnonzero(sizes <= target).tolist():
        size = int(sizes[index])
        stopping_is_nearer = picked_bytes + size - target > target - picked_bytes
        if stopping_is_nearer or len(picked) == len(sizes) - 1:
            break
        picked.append(index)
        picked_bytes += size
    picked = picked or [int(np.argmin(sizes))]
    return {"documents": [digests[i].tobytes().hex() for i in picked]}


def choose_shards(rows, is_evaluation):
    """Decision to hold out the shards for evaluation; is_evaluation: bool[n]."""
    return {"shards": document_digest(rows["digest"][is_evaluation].tobytes()).hex()}


def is_between(rows, start, stop):
    """bool[n]: the rows that lie in the bytes start..stop-1 of a text."""
    ends = np.cumsum(rows["bytes"])
    return (ends - rows["bytes"] >= start) & (ends <= stop)


def held_out_rows(name, rows, decision, is_evaluation):
    """bool[n]: the rows that are held out.

    Args:
      rows: cut at both ends of the tail, if there is one.
      decision: see above; None: everything but shards for evaluation is for training.

    Raises:
      UsageError: the text that was held out is no longer there unchanged.
    """
    decision, problem = decision or {}, ""
    is_held_out = is_evaluation
    if "tail" in decision:
        start, stop = decision["tail"]
        is_tail = is_between(rows, start, stop)
        if document_digest(rows["digest"][is_tail].tobytes()).hex() != decision["sum"]:
            problem = f"its held-out text from {start} to {stop} has changed"
        is_held_out = is_tail | is_evaluation
    elif "documents" in decision:
        documents, digests = Documents(rows), from_hex(decision["documents"])
        if missing := int((~np.isin(digests, documents.digests)).sum()):
            problem = (
                f"{missing} of its {len(digests)} held-out documents were removed or changed in "
                "length"
            )
        is_held_out = np.isin(documents.digests, digests)[documents.row]
    elif decision and choose_shards(rows, is_evaluation) != decision:
        problem = "the evaluation shards have changed"
    if problem:
        raise UsageError(
            f"{name}: the earlier split cannot be kept: {problem}. Only append text to the "
            "old one (new files of a folder sort last) or add documents; restore the old text, or "
            "use another --workdir"
        )
    return is_held_out


def from_hex(digests):
    """V16[n] of digests in hexadecimal."""
    return np.frombuffer(bytes.fromhex("".join(digests)), "V16")


# ---- copies --------------------------------------------------------------------------------------


def find_copies(text, sets, max_bytes):
    """Ranges of a text that are copies of text in `sets`, but no whole documents of them.

    A set of a single document of CUT_OUT_BYTES is searched for in all documents. A document that
    `max_bytes` cut is a copy if a document of a set begins with it.

    Args:
      text: Source. sets: list of Source.

    Returns:
      List of [first, last-plus-one byte of the text].
    """
    single = list(filter(None, map(_single_document, sets)))
    if not (single or max_bytes):
        return []
    longest = max(map(len, single), default=1)
    ranges, cut, overlap, begin, stop = [], [], b"", 0, 0
    for document in text.documents():
        data, start = overlap + document.data, stop - len(overlap)
        stop += len(document.data)
        for other in single:
            index = data.find(other)
            while index >= 0:
                ranges.append([start + index, start + index + len(other)])
                index = data.find(other, index + len(other))
        if document.is_cut:
            cut.append((document.data, [begin, stop]))
        # Held-out text may begin in this piece and end in the next one of the same document.
        overlap = b"" if document.ends else data[max(0, len(data) - longest + 1) :]
        begin = stop if document.ends else begin
    for other in itertools.chain.from_iterable(each.documents() for each in sets) if cut else ():
        ranges += [found for data, found in cut if other.data.startswith(data)]
    return ranges


def _single_document(source):
    """The bytes of the only document of a Source; None if there are more, or of another length
    than CUT_OUT_BYTES."""
    pieces, size = [], 0
    for document in source.documents():
        size += len(document.data)
        if (pieces and pieces[-1].ends) or size >= CUT_OUT_BYTES.stop:
            return None
        pieces.append(document)
    return b"".join(piece.data for piece in pieces) if size in CUT_OUT_BYTES else None


# ---- a list of training documents ----------------------------------------------------------------


class Subset:
    """Training documents, listed in a file by the hash of their text: config.data.subset.

    The held-out text stays the same. A run needs only this file and the corpus, so it can be on any
    machine that has both (an expert of cBTM is such a run).
    """

    def __init__(self, digests):
        self.digests = frozenset(digests)  # in hexadecimal
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

    def select(self, rows, is_trained):
        """bool[n]: those of the rows `is_trained` that are of listed documents.

        Raises:
          UsageError: a listed document is not there.
        """
        documents, listed = Documents(rows), from_hex(self.digests)
        trained = documents.digests[documents.row[is_trained]]
        if missing := int((~np.isin(listed, trained)).sum()):
            raise UsageError(
                f"config.data.subset: {missing} of its {len(self.digests)} documents are "
                "not training documents here; use the config.data settings of its clustering, "
                "or run --mode=cluster again"
            )
        return is_trained & np.isin(documents.digests, listed)[documents.row]
