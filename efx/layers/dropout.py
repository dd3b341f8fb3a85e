"""Dropout at the four places where a transformer has it."""

import dataclasses

from flax import linen as nn

SITES = ("embedding", "attention_probs", "attention_output", "mlp_output")


@dataclasses.dataclass(frozen=True)
class DropoutConfig:
    """`config.model.dropout`.

    Attributes:
      kind: "none" or "standard".
      rate: probability of zeroing an element.
      sites: which of `SITES` have it.
    """

    kind: str
    rate: float
    sites: tuple[str, ...]

    def active(self, site):
        return self.kind != "none" and site in self.sites and self.rate > 0


class StandardDropout(nn.Module):
    """Zeroes elements with probability `rate` and scales the rest, in training only."""

    rate: float

    @nn.compact
    def __call__(self, x, info):
        return nn.Dropout(self.rate)(x, deterministic=not info.train)
