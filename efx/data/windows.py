"""The order of training: which window of the text, or packed row, each row of each step is.

Each order is a function of row indices since the start of training (step * batch size + row), so
that any number of hosts reads the same batches and a resumed run continues them.
"""

import functools

import grain
import numpy as np

from efx.data.corpus import check_length


def shuffled_order(count, seed):
    """Numbers 0..count-1 in a new random order every epoch, with random access.

    Returns:
      Function of a list of indices: int64[len(indices)].
    """
    order = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
    return lambda indices: np.array([order[i] for i in indices], np.int64)


def random_starts(length, seq_len, seed, batch_size):
    """First tokens of windows that start anywhere, drawn anew for every step (as nanoGPT does)."""

    def starts(indices):
        # The starts of all rows are drawn, so that a row does not depend on the rows of this host.
        step = indices[0] // batch_size
        drawn = np.random.default_rng([seed, step]).integers(length - seq_len, size=batch_size)
        return drawn[[i % batch_size for i in indices]]

    return starts


class ShuffledStarts:
    """First tokens of adjacent windows, each once an epoch, from another offset every epoch.

    Attributes:
      count: windows of an epoch.
    """

    def __init__(self, length, seq_len, seed):
        # One window fewer than would fit, so that every offset up to seq_len is possible.
        self.count = max(1, length // seq_len - 1)
        self._seq_len, self._seed = seq_len, seed
        self._offsets = min(seq_len, length - self.count * seq_len)
        self._order = shuffled_order(self.count, seed)

    def __call__(self, indices):
        epochs = [i // self.count for i in indices]
        offset_of_epoch = {
            epoch: np.random.default_rng([self._seed, epoch]).integers(self._offsets)
            for epoch in set(epochs)
        }
        offsets = np.array([offset_of_epoch[epoch] for epoch in epochs], np.int64)
        return offsets + self._order(indices) * self._seq_len


class BufferedStarts:
    """First tokens of windows of a text that is still being tokenised.

    In the first epoch the windows come in the order of the text, shuffled within blocks of
    `buffer_tokens`, so that their order does not depend on later text. After that they come as in
    `ShuffledStarts`.

    Args:
      tokens: growing.GrowingTokens.
      name: of the text, for messages.
    """

    def __init__(self, tokens, seq_len, seed, buffer_tokens, name):
        self._tokens, self._seq_len, self._seed, self._name = tokens, seq_len, seed, name
        self._windows_in_block = max(1, buffer_tokens // seq_len)
        self._shuffled = None  # ShuffledStarts of the whole text, once it is tokenised
        tokens.wait(0)  # starts the writer, while the caller prepares training

    def __call__(self, indices):
        return [self._start(i) for i in indices]

    def _start(self, index):
        block, position = divmod(index, self._windows_in_block)
        first, count = block * self._windows_in_block, self._windows_in_block
        if self._shuffled is None:
            # One more window than the block has: the last one of a text is left out, as in
            # ShuffledStarts, and this one may be the last.
            needed = (first + count + 1) * self._seq_len
            length = self._tokens.wait(needed)
            if length < needed:
                check_length(self._seq_len, "train", self._name, length)
                self._shuffled = ShuffledStarts(length, self._seq_len, self._seed)
        if self._shuffled is not None:
            if index >= self._shuffled.count:
                return self._shuffled([index])[0]
            count = min(count, self._shuffled.count - first)
        return (first + _permutation(self._seed, block, count)[position]) * self._seq_len


@functools.lru_cache(maxsize=4)
def _permutation(seed, block, count):
    return np.random.default_rng([seed, block]).permutation(count)
