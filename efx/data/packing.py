"""Documents packed into rows: no row's target ever lies in another document."""

import numpy as np

from efx.data.mixture import permuted


class Packing:
    """Rows of up to seq_len (input, target) pairs, each of one or more pieces of documents.

    A document is read as end-of-document, its tokens, end-of-document (only its tokens where the
    tokenizer has no such id), which makes its first token a target too. It is cut into pieces of at
    most seq_len pairs; each pair is in exactly one piece, and each piece in exactly one row. Within
    a piece positions count from 0; pieces of a row are numbered from 1 (segment_ids).

    Rows are filled by best fit: a piece goes where the least capacity remains. In
    `order="length"` the long pieces go first, equal ones in an order drawn from `seed`; in
    `order="document"` they go in the order of the text.

    Args:
      stream: Stream of tokens.
      spans: int64[n, 2], first and last-plus-one token of each document.
      eot: the end-of-document id or None.
    """

    def __init__(self, stream, spans, eot, seq_len, order, seed=0):
        self._stream, self._seq_len = stream, seq_len
        has_eot = eot is not None
        self._fill = eot if has_eot else 0
        first = spans[:, 0] - has_eot
        pairs = spans[:, 1] - spans[:, 0] - 1 + 2 * has_eot
        starts, self._lengths = _cut(first, pairs, seq_len)
        self._starts = starts
        if order == "length":
            mixed = permuted(np.arange(len(starts)), len(starts), seed)
            sequence = mixed[np.argsort(-self._lengths[mixed], kind="stable")]
        else:
            sequence = np.arange(len(starts))
        row_of = _best_fit(self._lengths[sequence], seq_len)
        by_row = np.argsort(row_of, kind="stable")
        self._pieces = sequence[by_row]
        # Row r is made of pieces[edges[r]:edges[r + 1]].
        count = int(row_of.max()) + 1 if len(row_of) else 0
        self._edges = np.searchsorted(row_of[by_row], np.arange(count + 1))
        self.pairs = int(self._lengths.sum())

    def __len__(self):
        return len(self._edges) - 1

    def rows(self, row_numbers):
        """The batch of the rows `row_numbers`; indices past the end give rows of weight 0."""
        shape = (len(row_numbers), self._seq_len)
        inputs_BT, targets_BT, positions_BT, segment_ids_BT = (
            np.zeros(shape, np.int32) for _ in range(4)
        )
        for b, begin, end, segment, start in self._layout(row_numbers):
            tokens = self._stream.framed(start, start + end - begin + 1, self._fill)
            inputs_BT[b, begin:end] = tokens[:-1]
            targets_BT[b, begin:end] = tokens[1:]
            positions_BT[b, begin:end] = np.arange(end - begin)
            segment_ids_BT[b, begin:end] = segment
        return {
            "inputs": inputs_BT,
            "targets": targets_BT,
            "weights": (segment_ids_BT > 0).astype(np.float32),
            "positions": positions_BT,
            "segment_ids": segment_ids_BT,
        }

    def target_positions(self, row_numbers):
        """int64[len(row_numbers), seq_len]: positions of the targets in the stream; -1: padding."""
        target_positions_BT = np.full((len(row_numbers), self._seq_len), -1, np.int64)
        for b, begin, end, _, start in self._layout(row_numbers):
            target_positions_BT[b, begin:end] = start + 1 + np.arange(end - begin)
        return target_positions_BT

    def _layout(self, row_numbers):
        """Yields (row of the batch, first and last-plus-one position in it, number in the row,
        first token in the stream) of every piece in the rows `row_numbers`."""
        for b, row in enumerate(row_numbers):
            begin = 0
            pieces = self._pieces[slice(*self._edges[row : row + 2])] if row < len(self) else ()
            for segment, piece in enumerate(pieces, 1):
                end = begin + int(self._lengths[piece])
                yield b, begin, end, segment, int(self._starts[piece])
                begin = end


def _cut(first, pairs, seq_len):
    """Starts and lengths of the pieces of documents that have `pairs` pairs from `first` on."""
    first, pairs = first[pairs > 0], pairs[pairs > 0]
    counts = -(-pairs // seq_len)
    document = np.repeat(np.arange(len(pairs)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return (
        first[document] + number * seq_len,
        np.minimum(pairs[document] - number * seq_len, seq_len),
    )


def _best_fit(lengths, seq_len):
    """The row of each piece, placed in the order given."""
    row_of = np.empty(len(lengths), np.int64)
    rows_by_capacity = [[] for _ in range(seq_len + 1)]  # rows by the capacity left in them
    mask = 0  # bit r is set if some row has capacity r
    rows = 0
    for i, length in enumerate(lengths.tolist()):
        fitting = mask >> length
        if fitting:
            capacity = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_capacity[capacity].pop()
            if not rows_by_capacity[capacity]:
                mask ^= 1 << capacity
        else:
            capacity, row, rows = seq_len, rows, rows + 1
        row_of[i] = row
        if capacity > length:
            rows_by_capacity[capacity - length].append(row)
            mask |= 1 << (capacity - length)
    return row_of
