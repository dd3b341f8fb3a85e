"""Standard dropout, of activations and of attention probabilities."""

from flax import linen as nn


class StandardDropout(nn.Module):
    """In training, zero each element with probability `rate` and rescale the others."""

    rate: float

    @nn.compact
    def __call__(self, x, call):
        return nn.Dropout(self.rate)(x, deterministic=not call.train)

    def drop_probs(self, probs_BKGTS, allowed_BTS, call, key_positions_BS):
        """Attention probabilities after dropout; see `attend.attend`."""
        return self(probs_BKGTS, call)
