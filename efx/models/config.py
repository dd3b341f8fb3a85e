"""Settings that model families share; `efx.models` has the table of families."""

from typing import ClassVar

from efx.config.schema import Count, Modules, Natural, NonNegative, Positions, Positive, block
from efx.layers.config import (
    AttentionConfig,
    BlockConfig,
    BlockKind,
    DenseFormerConfig,
    DropoutConfig,
    Initialisation,
    MLPConfig,
    MuPConfig,
    Remat,
    SoftExpertsConfig,
)
from efx.routing.config import DepthRoutingConfig

# Regex of the settings that do not change the result of a model.
SAME_MODEL = r"remat|scan_layers|vocab_multiple|attention\.(chunk|kernel)"
MOST_BLOCKS = 1000  # without `scan_layers`: each is compiled separately


@block("config.model")
class ModelConfig:
    """Settings of `config.model` of all families but bridged ones.

    Families add fields, among them `norm` and `use_bias`, and `resolved()`, which returns the
    config of the model: every field filled in.
    """

    # Values in families without these settings.
    soft_experts: ClassVar[SoftExpertsConfig] = SoftExpertsConfig()
    dense_former: ClassVar[DenseFormerConfig] = DenseFormerConfig()
    member_runs: ClassVar[tuple] = ()

    context: Positions = 0  # longest sequence; 0: data.seq_len
    width: Count = 128  # D, features of the residual stream
    depth: Modules = 4  # number of blocks
    attention: AttentionConfig = AttentionConfig()
    mlp: MLPConfig = MLPConfig()
    block_kind: BlockKind = "pre_norm"  # how attention, MLP and norms make a block
    dropout: DropoutConfig = DropoutConfig()
    norm_eps: Positive = 1e-5  # added to the variance in norms
    init_std: NonNegative = 0.02  # of initial weights; residual outputs: / sqrt(2 depth)
    logit_softcap: NonNegative = 0.0  # logits <- softcap tanh(logits / softcap); 0: off
    # The vocabulary is padded to a multiple of this; 0: of the number of devices that split it.
    # Padding has no probability. A checkpoint can be read with any value.
    vocab_multiple: Natural = 0
    scan_layers: bool = False  # scan over layers: compiles faster, runs a little slower
    remat: Remat = "none"  # recompute activations in the backward pass
    # Weights: "gpt2": N(0, init_std^2); "spike_no_more": N(0, 2 / (5 width)).
    initialisation: Initialisation = "gpt2"
    mup: MuPConfig = MuPConfig()
    depth_routing: DepthRoutingConfig = DepthRoutingConfig()

    @property
    def mup_ratio(self):
        """Base width over width, see `MuPConfig`; 1 without muP."""
        return self.mup.width_ratio(self.width)

    def block(self, **fields):
        """`BlockConfig` of a resolved config, without experts, with these fields set."""
        settings = dict(
            kind=self.block_kind,
            width=self.width,
            attention=self.attention,
            mlp=self.mlp,
            hidden=self.mlp.hidden_size(fields.get("width", self.width)),
            norm=self.norm,
            norm_eps=self.norm_eps,
            use_bias=self.use_bias,
            dropout=self.dropout,
            context=self.context,
            router_scale=self.mup_ratio,
        )
        return BlockConfig(**settings | fields)


def check_stack(c, *depths):
    """Raise UsageError unless stacks of these depths fit the settings of the family `c`."""
    if sum(depths) > MOST_BLOCKS and not c.scan_layers:
        c.refuse(
            "depth" if c.depth == max(depths) else "encoder_depth",
            f"each of {sum(depths)} blocks would be compiled separately; use at most "
            f"{MOST_BLOCKS}, or config.model.scan_layers=True",
        )
    if c.dropout.kind == "attention" and c.width % c.attention.num_heads:
        c.attention.refuse(
            "num_heads",
            f"must divide config.model.width={c.width}, because masks ({c.dropout.where}.kind="
            "'attention') have as many heads",
        )
    c.depth_routing.check_depth(*depths)
    if c.soft_experts.num and c.depth_routing.target != "block":
        c.depth_routing.refuse(
            "target",
            f"not with soft experts ({c.soft_experts.where}.num), whose channels merge after the "
            "MLP; use 'block'",
        )
    c.soft_experts.check_depth(max(depths), c.mlp)
    if c.scan_layers and c.dense_former.on:
        c.refuse(
            "scan_layers",
            f"not with {c.dense_former.where}.on=True, whose blocks read all earlier states",
        )
    if c.scan_layers and c.depth_routing.kind == "recursion":
        c.refuse(
            "scan_layers",
            f"not with {c.depth_routing.where}.kind='recursion', whose layers do not repeat a "
            "pattern",
        )
