"""A long run of tokens that stays on disk, and its documents."""

import bisect
import dataclasses

import numpy as np


class Stream:
    """Token ids in one or more arrays (memory-mapped, as a rule), read as if they were one."""

    def __init__(self, parts):
        # As plain arrays: slicing a np.memmap makes another np.memmap, which is much slower.
        self._parts = [np.asarray(p) for p in parts if len(p)]
        self._ends = np.cumsum([len(p) for p in self._parts], dtype=np.int64).tolist()

    def __len__(self):
        return self._ends[-1] if self._ends else 0

    def parts(self):
        """The arrays, in order."""
        return list(self._parts)

    def cut(self, start, stop):
        """The stream of tokens start..stop-1; shares the memory."""
        parts, begin = [], 0
        for part, end in zip(self._parts, self._ends, strict=True):
            parts.append(part[max(start - begin, 0) : max(stop - begin, 0)])
            begin = end
        return Stream(parts)

    def _copy(self, start, out):
        """Copies the tokens from `start` on into the 1-D array `out`."""
        if len(self._parts) == 1:
            out[:] = self._parts[0][start : start + len(out)]
            return
        which, done = bisect.bisect_right(self._ends, start), 0
        while done < len(out):
            part = self._parts[which]
            offset = start + done - (self._ends[which] - len(part))
            piece = part[offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            which += 1

    def windows(self, starts, length):
        """int32[len(starts), length]: the tokens from each start on, all inside the stream."""
        rows = np.empty((len(starts), length), np.int32)
        for row, start in zip(rows, starts, strict=True):
            self._copy(int(start), row)
        return rows

    def framed(self, start, stop, fill):
        """int32[stop - start]; `fill` stands for what lies before the first or after the last."""
        row = np.full(stop - start, fill, np.int32)
        first, last = max(start, 0), min(stop, len(self))
        self._copy(first, row[first - start : last - start])
        return row


@dataclasses.dataclass(frozen=True)
class Part:
    """A split of a text as tokens.

    Attributes:
      name: of the source that it is from, for messages.
      stream: Stream.
      spans: int64[n, 2], first and last-plus-one token of each document; None if unknown.
      text_bytes: bytes of text in it; None if unknown.
    """

    name: str
    stream: object
    spans: object = None
    text_bytes: object = None


def documents_between(stream, eot):
    """int64[n, 2]: first and last-plus-one token of each document, none empty.

    Documents end at the token `eot`; without one (None), where a part of the stream ends.
    """
    ends, begin = [np.array([-1])], 0
    for part in stream.parts():
        found = [len(part)] if eot is None else np.flatnonzero(part == eot)
        ends.append(np.asarray(found, np.int64) + begin)
        begin += len(part)
    if eot is None:
        edges = np.concatenate([[0], *ends[1:]])
        return np.stack([edges[:-1], edges[1:]], 1)
    edges = np.concatenate([*ends, [len(stream)]])
    spans = np.stack([edges[:-1] + 1, edges[1:]], 1)
    return spans[spans[:, 0] < spans[:, 1]]


def count_bytes(stream, lengths, start=0):
    """Bytes of text that the tokens from `start` on stand for; `lengths[id]` bytes each."""
    total = 0
    for part in stream.cut(start, len(stream)).parts():
        for i in range(0, len(part), 1 << 22):
            counts = np.bincount(part[i : i + (1 << 22)], minlength=len(lengths))
            total += int(counts @ lengths)
    return total
