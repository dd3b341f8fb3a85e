"""The order of training: which row of which part of the text each row of each step is.

Each order is a function of row indices since the start of training (step * batch size + row), so
that any number of hosts reads the same batches and a resumed run continues them. All randomness is
`mixed`, a hash of our own: no version of a library changes the order.
"""

import functools
import math

import numpy as np

_ROUNDS = 6  # of the Feistel network
_BLOCK = 1000  # rows in which a mixture has the numbers of rows of its weights


def mixed(*values):
    """uint64 array: a hash of natural numbers and arrays of them (splitmix64, a round for each)."""
    state = np.zeros(1, np.uint64)
    for value in values:
        state = state ^ np.asarray(value).astype(np.uint64)
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permuted(positions, count, *key):
    """int64 array: the numbers at some positions of a random order of 0..count-1.

    A Feistel network permutes the pairs of digits of a number in a mixed base; a number of `count`
    or more is permuted again (cycle walking). Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains".

    Args:
      key: integers, or arrays of the shape of `positions`; each has an order of its own.
    """
    high = np.uint64(math.isqrt(count - 1) + 1)
    low = np.uint64(-(-count // int(high)))
    numbers = np.array(positions, np.uint64)
    key = np.broadcast_to(mixed(*key), numbers.shape)
    walking = np.ones(numbers.shape, bool)
    while walking.any():
        x, y = np.divmod(numbers[walking], low)
        for turn in range(0, _ROUNDS, 2):
            x = (x + mixed(key[walking] + np.uint64(turn), y) % high) % high
            y = (y + mixed(key[walking] + np.uint64(turn + 1), x) % low) % low
        numbers[walking] = x * low + y
        walking = numbers >= np.uint64(count)
    return numbers.astype(np.int64)


def random_starts(length, seq_len, seed):
    """Function of row indices: first tokens of windows that start anywhere (as in nanoGPT)."""
    return lambda indices: (mixed(*seed, indices) % np.uint64(length - seq_len)).astype(np.int64)


def shuffled_rows(count, seed):
    """Function of row indices: numbers 0..count-1, in a new random order every epoch."""
    return lambda indices: permuted(indices % count, count, *seed, indices // count)


def shuffled_starts(length, seq_len, seed):
    """Function of row indices: first tokens of adjacent windows, each once an epoch, from another
    offset every epoch."""
    # One window fewer than would fit, so that every offset up to seq_len is possible.
    count = max(1, length // seq_len - 1)
    offsets = np.uint64(min(seq_len, length - count * seq_len))
    order = shuffled_rows(count, seed)

    def starts(indices):
        offset = mixed(*seed, indices // count, 1) % offsets
        return offset.astype(np.int64) + order(indices) * seq_len

    return starts


class Mixture:
    """Which part each row is from, and the number of the row in that part.

    In each block of `_BLOCK` rows, counted from the last change of weights, part p has `_BLOCK`
    times its weight rows (rounded, but at least one for a positive weight), in a random order.

    Args:
      schedules: for each part ((step, weight), ...): from this step on; weights need not sum to 1.
    """

    def __init__(self, schedules, batch_size, seed):
        steps = sorted({step for schedule in schedules for step, _ in schedule})
        self._seed = seed
        self._starts = np.array(steps) * batch_size  # first rows of the stages
        self._counts = np.array([_counts(schedules, step) for step in steps])
        self._before = np.zeros_like(self._counts)  # rows of each part before each stage
        for stage in range(1, len(steps)):
            length = self._starts[stage] - self._starts[stage - 1]
            self._before[stage] = self._before[stage - 1] + self._rows(stage - 1, length)

    def _parts_of_block(self, stage, block):
        """int64[_BLOCK]: the part of each row of a block."""
        return _parts_of_block(self._seed, stage, block, tuple(self._counts[stage].tolist()))

    def _rows(self, stage, count):
        """int64[parts]: rows of each part in the first `count` rows of a stage."""
        blocks, rest = divmod(int(count), _BLOCK)
        parts = self._parts_of_block(stage, blocks)[:rest]
        return blocks * self._counts[stage] + np.bincount(parts, minlength=self._counts.shape[1])

    def rows(self, count):
        """int64[parts]: rows of each part in the first `count` rows of training."""
        stage = int(np.searchsorted(self._starts, count, "right")) - 1
        return self._before[stage] + self._rows(stage, count - self._starts[stage])

    def __call__(self, indices):
        """(part, number of the row in it), two int64 arrays."""
        part, number = np.empty((2, len(indices)), np.int64)
        stages = np.searchsorted(self._starts, indices, "right") - 1
        blocks = (indices - self._starts[stages]) // _BLOCK
        for stage, block in set(zip(stages.tolist(), blocks.tolist(), strict=True)):
            at = (stages == stage) & (blocks == block)
            positions = indices[at] - self._starts[stage] - block * _BLOCK
            parts = self._parts_of_block(stage, block)
            earlier = np.empty(_BLOCK, np.int64)  # rows of the same part before each row
            for each, size in enumerate(self._counts[stage]):
                earlier[parts == each] = np.arange(size)
            part[at] = parts[positions]
            number[at] = (self._before[stage] + block * self._counts[stage])[part[at]]
            number[at] += earlier[positions]
        return part, number


def _counts(schedules, step):
    """Rows of each part in a block, from a step on: the largest remainders are rounded up."""
    weights = [[w for start, w in schedule if start <= step][-1] for schedule in schedules]
    exact = np.array(weights) / sum(weights) * _BLOCK
    counts = np.maximum(np.floor(exact), exact > 0).astype(np.int64)
    while counts.sum() != _BLOCK:
        sign = 1 if counts.sum() < _BLOCK else -1
        error = np.where(counts + sign > 0, sign * (exact - counts), -np.inf)
        counts[np.argmax(np.where(exact > 0, error, -np.inf))] += sign
    return counts


@functools.lru_cache(maxsize=16)
def _parts_of_block(seed, stage, block, counts):
    order = permuted(np.arange(_BLOCK), _BLOCK, seed, 2, stage, block)
    return np.repeat(np.arange(len(counts)), counts)[order]
