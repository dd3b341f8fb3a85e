"""Dropout at the four places where a transformer has it."""

import dataclasses

from flax import linen as nn

KINDS = ("none", "standard", "elementwise", "attention")
SITES = ("embedding", "attention_probs", "attention_output", "mlp_output")


@dataclasses.dataclass(frozen=True)
class ElementwiseConfig:
    """`config.model.dropout.elementwise`: m = 0.5 cos(a x + b) + 0.5.

    Attributes:
      detach: the mask passes no gradient on to the x that it is computed from.
      a_mean, a_std, b_mean, b_std: of the normal distributions that a and b start from.
      sharpen: what is applied is sigmoid(s (m - 1/2)), s = `sharpen_scale`.
    """

    detach: bool
    a_mean: float
    a_std: float
    b_mean: float
    b_std: float
    sharpen: bool
    sharpen_scale: float


@dataclasses.dataclass(frozen=True)
class MaskAttentionConfig:
    """`config.model.dropout.attention`: m = 0.5 cos(u + b) + 0.5, u an attention over the input.

    Attributes:
      input: what a mask attends over. "hidden": the activations that it masks. "embedding": a
        linear layer of one attention over the model's input embedding, which all masks share.
        "embedding_linear", cheaper: that attention itself, of which each mask takes a linear layer
        and has no attention of its own.
      detach: masks pass no gradient on to what is read: the activations, or the input embedding.
      num_heads: of these attentions; 0: as the model.
      shift_init: where b starts, in [0, pi]. 0: everything is kept at first.
      rounding: one of `masks.ROUNDINGS`.
      sigmoid_scale: s of the rounding sigmoid(s (m - 1/2)).
      granularity: "feature": a mask value for every feature of a token; "token": one for all.
      skip_tile: at inference an MLP computes only the tokens that the mask of its output leaves
        open, so many at a time; 0: all. Needs masks that are known before and are exactly 0:
        an input of the embedding and rounding "stochastic".
    """

    input: str
    detach: bool
    num_heads: int
    shift_init: float
    rounding: str
    sigmoid_scale: float
    granularity: str
    skip_tile: int


@dataclasses.dataclass(frozen=True)
class DropoutConfig:
    """`config.model.dropout`.

    Attributes:
      kind: "none", "standard", or learned: "elementwise" or "attention".
      rate: standard: probability of zeroing an element.
      sites: which of `SITES` have it.
      elementwise, attention: settings of the learned kinds.
    """

    kind: str
    rate: float
    sites: tuple[str, ...]
    elementwise: ElementwiseConfig
    attention: MaskAttentionConfig

    def active(self, site):
        return site in self.sites and (self.learned or (self.kind == "standard" and self.rate > 0))

    @property
    def learned(self):
        return self.kind in ("elementwise", "attention")

    @property
    def skips(self):
        """Whether MLPs leave out closed tokens at inference."""
        return (
            self.kind == "attention" and self.attention.skip_tile > 0 and self.active("mlp_output")
        )

    @property
    def by_position(self):
        """Whether masks have an entry for each position of the context."""
        return self.kind == "elementwise" and self.active("attention_probs")

    @property
    def shared(self):
        """Whether the masks read what one pass over the input embedding gives."""
        return self.kind == "attention" and self.attention.input != "hidden" and bool(self.sites)

    @property
    def own_attention(self):
        """Whether every mask has an attention of its own."""
        return self.kind == "attention" and self.attention.input != "embedding_linear"


class StandardDropout(nn.Module):
    """Zeroes elements with probability `rate` and scales the rest, in training only."""

    rate: float

    @nn.compact
    def __call__(self, x, info):
        return nn.Dropout(self.rate)(x, deterministic=not info.train)

    def probs_fn(self, info, k_positions_BS):
        """A `probs_fn` for the functions of `attend.py`; `report` it when all chunks are done."""
        return lambda probs_BKGTS, q_start, k_start, allowed_BTS: self(probs_BKGTS, info)

    def report(self, probs_fn):
        pass
