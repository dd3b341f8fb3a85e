"""Settings of layers, the same in every family, and `BlockConfig`, the settings of one block."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

from efx.config.schema import (
    AtLeastOne,
    Count,
    Fraction,
    ModulesOrZero,
    Natural,
    NonNegative,
    Number,
    Positions,
    Positive,
    Probability,
    block,
)
from efx.errors import UsageError
from efx.layers import selection
from efx.layers.norms import NORMS

Activation = Literal["gelu", "gelu_tanh", "swiglu"]  # "gelu" is the exact one
Norm = Literal[tuple(NORMS)]
Remat = Literal["none", "full", "dots"]  # recomputed in the backward pass; "dots": all but matmuls
Initialisation = Literal["gpt2", "spike_no_more"]
Site = Literal["embedding", "attention_probs", "attention_output", "mlp_output"]
# The increment of a block with attention A and MLP M to the residual x:
#   "pre_norm"   a + M(norm(x + a)),  a = A(norm x)   (Radford et al. 2019, GPT-2)
#   "post_norm"  a + norm(M(x + a)),  a = norm(A(x))  (OLMo 2, arXiv 2501.00656, section 2)
#   "parallel"   A(norm x) + M(norm x)                (GPT-NeoX-20B, arXiv 2204.06745, section 2)
# Each norm has its own parameters.
BlockKind = Literal["pre_norm", "post_norm", "parallel"]


@block("config.model.attention.rope_scaling")
class RopeScalingConfig:
    """Lower frequencies of rotary positions, for contexts longer than in training."""

    # "linear": all are divided by the factor (arXiv 2306.15595). "llama3": unchanged for more than
    # high_frequency_factor turns in the original context, divided for fewer than
    # low_frequency_factor turns, interpolated between them (arXiv 2407.21783, section 3.4.2).
    kind: Literal["none", "linear", "llama3"] = "none"
    factor: AtLeastOne = 8.0
    original_context: Count = 8192  # llama3: context of the original training
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0

    def check(self):
        if self.high_frequency_factor <= self.low_frequency_factor:
            self.refuse(
                "high_frequency_factor",
                f"must be more than low_frequency_factor={self.low_frequency_factor}",
            )


@block("config.model.attention")
class AttentionConfig:
    """Causal self-attention."""

    num_heads: Count = 4  # heads of queries
    num_kv_heads: Natural = 0  # heads of keys and values; 0: num_heads
    head_dim: Natural = 0  # 0: width / num_heads
    # Projections with a bias: queries, keys and values, or "all", with the output. None: "all" or
    # "none" by the model's use_bias.
    bias: Literal["none", "qkv", "all"] | None = None
    rope_theta: NonNegative = 10000.0  # base of rotary positions
    # Fraction of a head's features that rotate, the first ones (arXiv 2204.06745, section 2)
    rope_fraction: Fraction = 1.0
    # Blocks n-1, 2n-1, ... of a stack have no rotary positions (arXiv 2501.18795); 0: all have.
    no_rope_every: Natural = 0
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    # RMS norm of queries and keys over each head or over all features
    qk_norm: Literal["none", "head", "width"] = "none"
    score_factor: Positive = 1.0  # scores are q k / sqrt(head_dim) times this
    window: Natural = 0  # positions a query looks back, its own included; 0: all
    softcap: NonNegative = 0.0  # scores <- softcap tanh(scores / softcap); 0: off
    chunk: Natural = 0  # queries in a chunk of the kernel "xla"; 0: chosen by length
    # "auto": the best kernel that the devices have and that supports the case, else "xla".
    kernel: Literal["auto", "xla", "splash", "cudnn"] = "auto"

    def resolved(self, width, rope, mup, use_bias):
        """With every field filled in.

        Args:
          width, mup, use_bias: of the model. rope: whether positions are rotary.
        """
        kv_heads = self.num_kv_heads or self.num_heads
        if not self.head_dim and width % self.num_heads:
            self.refuse("num_heads", f"must divide config.model.width={width}")
        if self.num_heads % kv_heads:
            self.refuse("num_heads", f"not divisible by {self.where}.num_kv_heads={kv_heads}")
        head_dim = self.head_dim or width // self.num_heads
        if rope:
            self.check_rotary(head_dim, f"{self.where}.head_dim={head_dim}")
            if not self.rope_theta:
                self.refuse("rope_theta", "must be more than 0 with rotary positions")
        # The model of the base width has the same `head_dim`, if it is set.
        ratio = 1.0 if self.head_dim else mup.width_ratio(width)
        return dataclasses.replace(
            self,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=self.rope_theta if rope else 0.0,
            score_factor=self.score_factor * ratio**0.5,
            bias=self.bias or ("all" if use_bias else "none"),
        )

    def check_rotary(self, head_dim, where):
        """Raise UsageError unless heads of this width can rotate.

        Args:
          where: the setting, with its value, that decides the width.
        """
        size = self.rotary_size(head_dim)
        if self.rope_fraction == 1.0 and size % 2:
            raise UsageError(f"{where}: rotary positions need an even head width, not {head_dim}")
        if size % 2 or not size:
            self.refuse("rope_fraction", f"must rotate an even number of features, not {size}")

    def rotary_size(self, head_dim):
        """Number of features of a head that rotate."""
        return int(self.rope_fraction * head_dim)

    def of_block(self, index):
        """Settings of the block with this index in its stack."""
        if self.no_rope_every and index % self.no_rope_every == self.no_rope_every - 1:
            return dataclasses.replace(self, rope_theta=0.0)
        return self

    @property
    def factor(self):
        """Factor on q k."""
        return self.score_factor * self.head_dim**-0.5


@block("config.model.mlp.moe")
class MoEConfig:
    """A Mixture of Experts in place of the MLP, where `config.model.mlp.kind` is "moe"."""

    every: Count = 1  # blocks every-1, 2*every-1, ... have experts, the others a dense MLP
    num_experts: Count = 8  # E
    expert_hidden: Natural = 0  # width of one expert; 0: that of the dense MLP
    # Tokens choose their top_k experts, or experts choose tokens, which looks ahead in training.
    router: Literal["token_choice", "expert_choice"] = "token_choice"
    top_k: Count = 2  # token_choice: experts per token
    # token_choice: the weights of the selected experts sum to 1. With top_k=1 every weight is 1 and
    # the router learns from its own losses only; False keeps the probabilities, as Switch does.
    renormalise: bool = True
    # token_choice: an expert computes at most the fraction top_k * capacity_factor /
    # (num_experts + num_noop) of a sequence, see `selection.admit`.
    capacity_factor: Positive = 1.25
    capacity: Fraction = 0.25  # expert_choice: fraction of a sequence that an expert computes
    slack: AtLeastOne = 2.0  # expert_choice: the causal rate is capacity * slack
    num_shared: Natural = 0  # experts for every token, as one MLP of num_shared times the width
    num_noop: Positions = 0  # token_choice: experts that compute nothing
    # token_choice: fraction of the choices that the FLOP ledger counts as computed; measured:
    # `eval/moe/computed_fraction`. None: balanced choices and no drops.
    computed_fraction: Fraction | None = None

    def check(self):
        if self.router == "expert_choice" and self.computed_fraction is not None:
            self.refuse(
                "computed_fraction", "expert_choice always fills its slots; leave the setting out"
            )
        if self.router == "expert_choice" and self.num_noop:
            self.refuse("num_noop", "expert_choice has no no-op experts; set it to 0")
        if self.router == "token_choice" and self.top_k > self.num_choices:
            self.refuse("top_k", f"must be at most {self.num_choices}, experts and no-op experts")

    @property
    def num_choices(self):
        """Number of experts and no-op experts."""
        return self.num_experts + self.num_noop

    @property
    def counted_fraction(self):
        """`computed_fraction`, or its value for balanced choices."""
        if self.computed_fraction is None:
            return self.num_experts / self.num_choices
        return self.computed_fraction

    @property
    def looks_ahead(self):
        """Whether the selection in training depends on later tokens."""
        return self.router == "expert_choice"

    def rate(self):
        """Fraction of a sequence that one expert computes at most under a causal selection."""
        if self.router == "token_choice":
            return self.top_k * self.capacity_factor / self.num_choices
        return self.capacity * self.slack

    def slots(self, length, mode):
        """C: the slots of one expert for a sequence of `length`; mode: "train" or "causal"."""
        if self.looks_ahead and mode == "train":
            return selection.num_slots(self.capacity, length)
        return selection.num_causal_slots(self.rate(), length)

    def in_block(self, index):
        return index % self.every == self.every - 1


@block("config.model.mlp")
class MLPConfig:
    """The feed-forward layer of a block."""

    kind: Literal["dense", "moe"] = "dense"  # one MLP, or experts
    activation: Activation | None = None  # None: the preset's, or "gelu"
    hidden: Natural = 0  # 0: 4 width; swiglu: 8/3 width, rounded up to multiple_of
    multiple_of: Count = 32  # see hidden
    moe: MoEConfig = MoEConfig()

    def resolved(self, depth, activation):
        """With this activation if none is set. depth: blocks of the longest stack."""
        if self.kind == "moe" and self.moe.every > depth:
            self.moe.refuse(
                "every",
                f"the stack has {depth} blocks, so none would have experts; use a smaller number, "
                f"or {self.where}.kind='dense'",
            )
        return dataclasses.replace(self, activation=self.activation or activation)

    def hidden_size(self, width):
        if self.hidden:
            return self.hidden
        if self.activation != "swiglu":
            return 4 * width
        return self.multiple_of * -(-8 * width // (3 * self.multiple_of))

    @property
    def matrices(self):
        """Number of matrices."""
        return 3 if self.activation == "swiglu" else 2


@block("config.model.soft_experts")
class SoftExpertsConfig:
    """Blocks of several channels, see `soft_experts.SoftBlock`."""

    num: ModulesOrZero = 0  # channels of a block, each with its own attention and MLP; 0: none
    every: Count = 1  # blocks every-1, 2*every-1, ... have them
    shared: Natural = 0  # MLPs added to every channel's, as one of `shared` times the width
    multiple: Count = 1  # output width of a channel's MLP: multiple * width / num, rounded up
    hidden_multiple: Positive = 4.0  # its inner width over the model's
    shared_kv: bool = False  # all channels read the same keys and values
    # All channels share the first matrix of the MLP, the output matrix of attention and the gain of
    # the query and key norms, as published.
    tied: bool = True
    merge: Literal["softmax", "mean", "max"] = "softmax"  # of the channels' outputs

    def check_depth(self, depth, mlp):
        """Raise UsageError unless a stack of this depth with this `MLPConfig` can have them."""
        if self.num and self.every > depth:
            self.refuse(
                "every",
                f"the stack has {depth} blocks, so none would have soft experts; use a smaller "
                f"number, or {self.where}.num=0",
            )
        both = [i for i in range(depth) if self.in_block(i) and mlp.moe.in_block(i)]
        if mlp.kind == "moe" and both:
            self.refuse(
                "every",
                f"with {mlp.moe.where}.every={mlp.moe.every} block {both[0]} would have both soft "
                "experts and a Mixture of Experts; change one of the two",
            )

    def in_block(self, index):
        return self.num > 0 and index % self.every == self.every - 1

    def hidden(self, width):
        """Inner width of one expert's MLP."""
        return max(1, round(self.hidden_multiple * width))

    def features(self, width):
        """Output width of a channel's MLP: ceil(m * D / s)."""
        return -(-self.multiple * width // self.num)


@block("config.model.dense_former")
class DenseFormerConfig:
    """Averages of earlier states, see `stack.StateAverage`."""

    on: bool = False  # blocks read learned averages of all earlier states


@block("config.model.mup")
class MuPConfig:
    """Maximal update parametrisation, see `efx.layers.mup`.

    muP compares the model with a model of the base width, whose matrices are all base_width / width
    times as wide: the MLPs (also a stated `mlp.hidden` or `expert_hidden`) and, in the latent
    family, every level (`level_widths`). So state these sizes in proportion to the width. Attention
    heads are wider in wider models where `attention.head_dim` is 0, and have the same width,
    in larger numbers, where it is stated. Ranks of adapters and numbers of experts are fixed.
    """

    base_width: Natural = 0  # `config.model.width` at which the learning rate was tuned; 0: off
    zero_head: bool = False  # an untied output layer starts at 0; at the base width, too

    def width_ratio(self, width):
        """base_width / width; 1 without muP."""
        return self.base_width / width if self.base_width else 1.0


@block("config.model.dropout.elementwise")
class ElementwiseConfig:
    """Masks m = 0.5 cos(a x + b) + 0.5."""

    detach: bool = True  # the mask passes no gradient on to x
    a_mean: Number = 0.0  # a and b start from normal distributions
    a_std: NonNegative = 0.02
    b_mean: Number = 0.0
    b_std: NonNegative = 0.02
    sharpen: bool = False  # apply sigmoid(60 (m - 1/2))


@block("config.model.dropout.attention")
class MaskAttentionConfig:
    """Masks m = 0.5 cos(u + b) + 0.5, u a causal self-attention."""

    # Input of u: "hidden", the activations that are masked; "embedding", a linear layer of one
    # attention over the model's input embedding, shared by all masks. "embedding_linear" is
    # cheaper: u is a linear layer of that shared attention.
    input: Literal["hidden", "embedding", "embedding_linear"] = "hidden"
    detach: bool = False  # no gradient from the masks to their input
    shift_init: NonNegative = 0.0  # initial b, in [0, pi]; 0: masks start near 1
    # "stochastic": 1 with probability m in training, m >= 0.5 at inference; "sigmoid":
    # sigmoid(60 (m - 1/2)); "sigmoid_straight_through": the same with the gradient of m.
    rounding: Literal["none", "stochastic", "sigmoid", "sigmoid_straight_through"] = "stochastic"

    def check(self):
        if self.shift_init > 3.1416:
            self.refuse("shift_init", "must be in [0, pi]")


@block("config.model.dropout")
class DropoutConfig:
    """Dropout, standard or learned."""

    kind: Literal["none", "standard", "elementwise", "attention"] = "none"  # the last two: learned
    rate: Probability = 0.1  # standard: fraction of the elements that are zeroed
    # kind="attention" has no masks for attention_probs.
    sites: tuple[Site, ...] = ("embedding", "attention_probs", "attention_output", "mlp_output")
    elementwise: ElementwiseConfig = ElementwiseConfig()
    attention: MaskAttentionConfig = MaskAttentionConfig()

    def check(self):
        if self.kind == "attention" and "attention_probs" in self.sites:
            self.refuse(
                "sites",
                "kind='attention' has no masks for attention_probs; leave that site out, or use "
                "kind='elementwise'",
            )
        if self.kind != "none" and not self.sites:
            self.refuse(
                "sites",
                f"kind={self.kind!r} needs sites; use some of {', '.join(get_args(Site))}, or "
                "kind='none'",
            )

    def active(self, site):
        """Whether there is dropout or a mask at this site."""
        return site in self.sites and (self.learned or (self.kind == "standard" and self.rate > 0))

    @property
    def learned(self):
        return self.kind in ("elementwise", "attention")

    @property
    def by_position(self):
        """Whether masks have parameters for each position of the context."""
        return self.kind == "elementwise" and self.active("attention_probs")

    @property
    def has_mask_input(self):
        """Whether all masks read one attention over the input embedding, `MaskInput`."""
        return self.kind == "attention" and self.attention.input != "hidden" and bool(self.sites)

    @property
    def own_attention(self):
        """Whether each mask computes an attention."""
        return self.kind == "attention" and self.attention.input != "embedding_linear"


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Settings of one block, all filled in.

    Attributes:
      kind: a `BlockKind`.
      width: D. hidden: F; of one expert with `moe`, of one channel with `soft`.
      attention, mlp, dropout: resolved; with `soft` the heads are those of one channel.
      std, std_out: initial standard deviation of matrices, and of those that add to the residual.
      context: the longest sequence.
      router_scale: factor on the initial values of routers.
      moe: a Mixture of Experts in place of the MLP, or None.
      soft: the block is a `soft_experts.SoftBlock`, or None.
      order: the attentions, "self" and "cross". cross: settings of the latter, or None.
    """

    kind: str
    width: int
    attention: AttentionConfig
    mlp: MLPConfig
    hidden: int
    norm: str
    norm_eps: float
    use_bias: bool
    dropout: DropoutConfig
    std: float
    std_out: float
    dtype: jnp.dtype
    context: int = 0
    router_scale: float = 1.0
    moe: MoEConfig | None = None
    soft: SoftExpertsConfig | None = None
    order: tuple[str, ...] = ("self",)
    cross: AttentionConfig | None = None


def block_in_stack(b, c, index):
    """The `BlockConfig` of the block with this index in its stack.

    Args:
      b: of a block without experts. c: resolved config of the family.
    """
    moe, soft = c.mlp.moe, c.soft_experts
    changes = dict(attention=b.attention.of_block(index), cross=b.cross and b.cross.of_block(index))
    if c.mlp.kind == "moe" and moe.in_block(index):
        changes |= dict(moe=moe, hidden=moe.expert_hidden or b.hidden)
    if soft.in_block(index):
        changes |= dict(soft=soft, hidden=soft.hidden(b.width))
    return dataclasses.replace(b, **changes)
