"""Dropout at the four places where a transformer has it."""

from flax import linen as nn


class StandardDropout(nn.Module):
    """Zeroes elements with probability `rate` and scales the rest, in training only."""

    rate: float

    @nn.compact
    def __call__(self, x, info):
        return nn.Dropout(self.rate)(x, deterministic=not info.mode.train)

    def probs_fn(self, info, k_positions_BS):
        """A `probs_fn` for the functions of `attend.py`; `report` it when all chunks are done."""
        return lambda probs_BKGTS, q_start, k_start, allowed_BTS: self(probs_BKGTS, info)

    def report(self, probs_fn):
        pass
