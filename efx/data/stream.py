"""Token ids that stay on disk, and the documents in them."""

import bisect
import dataclasses

import numpy as np


class Stream:
    """Token ids in one or more arrays (memory-mapped, as a rule), read as if they were one."""

    def __init__(self, arrays):
        # As plain arrays: slicing a np.memmap makes another np.memmap, which is much slower.
        self._arrays = [np.asarray(array) for array in arrays if len(array)]
        lengths = [len(array) for array in self._arrays]
        self._ends = np.cumsum(lengths, dtype=np.int64).tolist()

    def __len__(self):
        return self._ends[-1] if self._ends else 0

    def arrays(self):
        """The arrays, in order."""
        return list(self._arrays)

    def cut(self, start, stop):
        """The stream of tokens start..stop-1; shares the memory."""
        arrays, begin = [], 0
        for array, end in zip(self._arrays, self._ends, strict=True):
            arrays.append(array[max(start - begin, 0) : max(stop - begin, 0)])
            begin = end
        return Stream(arrays)

    def _copy(self, start, target):
        """Copy the tokens from `start` on into the 1-D array `target`."""
        index, copied = bisect.bisect_right(self._ends, start), 0
        while copied < len(target):
            array = self._arrays[index]
            offset = start + copied - (self._ends[index] - len(array))
            piece = array[offset : offset + len(target) - copied]
            target[copied : copied + len(piece)] = piece
            copied += len(piece)
            index += 1

    def windows(self, starts, length):
        """int32[len(starts), length]: the tokens from each start on, all inside the stream."""
        rows = np.empty((len(starts), length), np.int32)
        for row, start in zip(rows, starts, strict=True):
            self._copy(int(start), row)
        return rows

    def framed(self, start, stop, fill):
        """int32[stop - start]: tokens start..stop-1, `fill` before the first and after the last."""
        row = np.full(stop - start, fill, np.int32)
        first, last = max(start, 0), min(stop, len(self))
        self._copy(first, row[first - start : last - start])
        return row


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """A split of a text as tokens.

    Attributes:
      name: of its source, for messages.
      stream: Stream, or `growing.GrowingTokens`.
      spans: int64[n, 2], first and last-plus-one token of each document; None if unknown.
      loss: "" if decoding the tokens gives the text back; otherwise a description of the first
        lost text, see `corpus.load_corpus`; None if there is no text to compare.
    """

    name: str
    stream: object
    spans: object = None
    loss: str | None = None

    def documents(self, eot):
        """`spans`; if they are unknown, documents end at the token `eot`, or without one (None)
        where an array of the stream ends."""
        if self.spans is not None:
            return self.spans
        arrays = self.stream.arrays()
        begins = np.cumsum([0, *map(len, arrays)])
        if eot is None:
            return np.stack([begins[:-1], begins[1:]], 1)
        ends = [np.flatnonzero(a == eot) + begin for a, begin in zip(arrays, begins, strict=False)]
        edges = np.concatenate([[-1], *ends, [len(self.stream)]])
        spans = np.stack([edges[:-1] + 1, edges[1:]], 1)
        return spans[spans[:, 0] < spans[:, 1]]
