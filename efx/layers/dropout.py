"""Standard dropout, of activations and of attention probabilities."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn


@dataclasses.dataclass
class ProbsDropout:
    """Dropout of attention probabilities, one block of queries at a time.

    `attend.py` calls `function` inside `jax.checkpoint` and `scan`, where modules cannot sow. It
    therefore returns the arrays to sow, and `attend.py` appends them to `block_outputs`, with a
    leading axis for the blocks of one loop.

    Attributes:
      function: (probs_BKGTS, q_start, k_start, allowed_BTS) -> (probs_BKGTS, arrays to sow).
        q_start and k_start are the indices of the first query and the first key and may be traced;
        allowed_BTS is bool [B or 1, T, S], the pairs that attention allows.
    """

    function: Callable
    block_outputs: list = dataclasses.field(default_factory=list)


class StandardDropout(nn.Module):
    """In training, zero each element with probability `rate` and rescale the others."""

    rate: float

    @nn.compact
    def __call__(self, x, call):
        return nn.Dropout(self.rate)(x, deterministic=not call.train)

    def probs_dropout(self, call, key_positions_BS):
        """Return the `ProbsDropout` for one call of attention."""
        random_key = self.make_rng("dropout") if call.train and self.rate else None

        def drop(probs_BKGTS, q_start, k_start, allowed_BTS):
            if random_key is None:
                return probs_BKGTS, None
            keep_rate = 1.0 - self.rate
            if keep_rate == 0.0:
                return jnp.zeros_like(probs_BKGTS), None
            block_key = jax.random.fold_in(random_key, q_start)
            keep_BKGTS = jax.random.bernoulli(block_key, keep_rate, probs_BKGTS.shape)
            return jnp.where(keep_BKGTS, probs_BKGTS / keep_rate, 0.0), None

        return ProbsDropout(drop)

    def sow_block_outputs(self, probs_dropout, call):
        """Sow the `block_outputs` after attention; standard dropout has none."""
