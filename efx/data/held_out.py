"""Which text is held out: a function of the content of the text, decided once for a run.

A changed text would be split elsewhere and held-out text would be trained on, so a run records the
decision as plain data:

    {"tail": [from, to], "sum": hash of this text,    split="tail": bytes, of shards their ids
     "first": hash of the document it begins in}
    {"documents": [hash of each document]}            split="documents"
    {"shards": hash}                                  shards for evaluation

It holds for every text that still has this text in this place, or these documents. Documents that
are exactly equal to a held-out one, or to one of which a part is held out, are not trained on.

All functions take the ROWs of a text, see `shards`.
"""

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


def choose_tail(name, read_rows, content, eval_fraction):
    """Train on the first int((1 - eval_fraction) * n) of n characters, hold out the others.

    Args:
      name: of the text, for messages.
      read_rows: function that returns the ROWs of the text.
      content: function from the number of a row to its bytes, or to its ids.

    Returns:
      The decision, see above.
    """
    rows = read_rows()
    counts, ends = np.cumsum(rows["characters"]), np.cumsum(rows["bytes"])
    total = int(rows["characters"].sum())
    remaining = int((1 - eval_fraction) * total)
    if not 0 < remaining < total:
        raise UsageError(
            f"config.data.eval_fraction={eval_fraction}: a split of {name} ({total} characters) "
            "is empty; use another fraction or a longer text"
        )
    row, digest = int(np.searchsorted(counts, remaining)), b""
    start, remaining = int(ends[row]), remaining - int(counts[row])  # characters before the end
    if remaining:
        data = content(row)
        offset = len(data) + remaining
        if isinstance(data, bytes):
            begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
            offset = int(np.flatnonzero(begins)[remaining])
        start += offset - len(data)
        digest = document_digest(data[offset:])
    digests = digest + rows["digest"][row + 1 :].tobytes()
    documents = Documents(rows)
    return {
        "tail": [start, int(ends[-1])],
        "sum": document_digest(digests).hex(),
        "first": documents.digests[documents.row[row]].tobytes().hex() if digest else "",
    }


def choose_documents(name, rows, eval_fraction):
    """Hold out whole documents, in the order of their hashes, until their bytes come nearest to
    eval_fraction of all. Documents with the same text are on the same side."""
    documents = Documents(rows)
    digests, number = np.unique(documents.digests, return_inverse=True)
    if np.any(rows["flags"] & NO_TEXT) or len(digests) < 2:
        raise UsageError(
            f"config.data.split='documents': {name} has {len(digests)} different documents, and at "
            "least 2 with text are needed; use config.data.split=tail, or cut documents with "
            "config.data.document_bytes"
        )
    picked = _pick(np.bincount(number, documents.sizes).astype(np.int64), eval_fraction)
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


def choose_shards(rows, is_evaluation):
    """Hold out the shards for evaluation; is_evaluation: bool[n]."""
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
    decision = decision or {}
    if "tail" in decision:
        is_held_out = is_between(rows, *decision["tail"])
        if document_digest(rows["digest"][is_held_out].tobytes()).hex() != decision["sum"]:
            start, stop = decision["tail"]
            _refuse_changed(name, f"its held-out text from {start} to {stop} has changed")
        return is_held_out | is_evaluation
    if "documents" in decision:
        documents = Documents(rows)
        digests = np.frombuffer(bytes.fromhex("".join(decision["documents"])), "V16")
        if missing := len(digests) - int(np.isin(digests, documents.digests).sum()):
            problem = f"{missing} of its {len(digests)} held-out documents were removed or changed"
            _refuse_changed(name, f"{problem} in length")
        return np.isin(documents.digests, digests)[documents.row]
    if decision and choose_shards(rows, is_evaluation) != decision:
        _refuse_changed(name, "the evaluation shards have changed")
    return is_evaluation


def held_out_digests(rows, decision, is_held_out):
    """V16 array: digests of the documents of which at least a part is held out."""
    documents, first = Documents(rows), _first(decision)
    numbers = np.unique(documents.row[is_held_out])
    # The second half of the first document does not count by itself.
    return np.concatenate([documents.digests[numbers[len(first) :]], first])


def _first(decision):
    """V16[1]: digest of the document in which the tail begins; V16[0] if there is none."""
    return np.frombuffer(bytes.fromhex((decision or {}).get("first", "")), "V16")


def copies(rows, digests, decision=None):
    """bool[n]: the rows of documents with one of the V16 `digests`; before the tail also those of
    the document in which it begins."""
    documents = Documents(rows)
    is_copy = np.isin(documents.digests, digests)
    if np.isin(_first(decision), digests).any():
        ends = np.cumsum(rows["bytes"])
        is_copy[documents.row[np.searchsorted(ends, decision["tail"][0])]] = True
    return is_copy[documents.row]


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
    ranges, stop, overlap, begin = [], 0, b"", 0
    longest = max(map(len, texts))
    for document in documents:
        data = overlap + document.data
        for text in texts:
            index = data.find(text)
            while index >= 0:
                ranges.append([begin + index, begin + index + len(text)])
                index = data.find(text, index + len(text))
        stop += len(document.data)
        # A text may begin in this piece and end in the next one, but not in another document.
        overlap = b"" if document.ends else data[-(longest - 1) :]
        begin = stop - len(overlap)
    return ranges


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

    def select(self, rows, is_trained):
        """bool[n]: the rows of listed documents.

        Args:
          is_trained: bool[n], rows that may be trained on.

        Raises:
          UsageError: a listed document is not there.
        """
        documents = Documents(rows)
        listed = np.frombuffer(bytes.fromhex("".join(sorted(self.digests))), "V16")
        trained = np.unique(documents.digests[documents.row[is_trained]])
        if missing := len(listed) - int(np.isin(listed, trained).sum()):
            raise UsageError(
                f"config.data.subset: {missing} of its {len(self.digests)} documents are "
                "not training documents here; use the config.data settings of its clustering, "
                "or run --mode=cluster again"
            )
        return is_trained & copies(rows, listed)
