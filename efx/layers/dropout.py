"""Dropout at the four places where a transformer has it."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class ProbsFn:
    """What changes attention probabilities, for the functions of `attend.py`.

    These call it for one block of queries at a time, and again in the backward pass, so that a call
    may have no side effects: what a layer reports of a call it returns beside the probabilities.

    Attributes:
      seen: for the layer, what calls have returned beside the probabilities, each array with an
        axis in front of it for the blocks that one entry is of.
    """

    def __init__(self):
        self.seen = []

    def __call__(self, probs_BKGTS, q_start, k_start, allowed_BTS):
        """(probabilities, pytree of arrays or None).

        Args:
          q_start, k_start: the first query and the first key of the block; may be traced.
          allowed_BTS: bool [B or 1, T, S], the pairs that attention allows.
        """
        raise NotImplementedError


class StandardDropout(nn.Module):
    """Zeroes elements with probability `rate` and scales the rest, in training only."""

    rate: float

    @nn.compact
    def __call__(self, x, call):
        return nn.Dropout(self.rate)(x, deterministic=not call.train)

    def probs_fn(self, call, k_positions_BS):
        """A `ProbsFn` for the functions of `attend.py`; `report` it when all blocks are done."""
        key = self.make_rng("dropout") if call.train and self.rate else None
        return _ProbsDropout(self.rate, key)

    def report(self, probs_fn):
        pass


class _ProbsDropout(ProbsFn):
    """Each block of queries draws from a key of its own. key: None for no dropout."""

    def __init__(self, rate, key):
        super().__init__()
        self._rate, self._key = rate, key

    def __call__(self, probs_BKGTS, q_start, k_start, allowed_BTS):
        if self._key is None:
            return probs_BKGTS, None
        if self._rate == 1.0:
            return jnp.zeros_like(probs_BKGTS), None
        key, kept = jax.random.fold_in(self._key, q_start), 1.0 - self._rate
        keep_BKGTS = jax.random.bernoulli(key, kept, probs_BKGTS.shape)
        return jnp.where(keep_BKGTS, probs_BKGTS / kept, 0.0), None
