"""`config.model` of the encoder-decoder."""

import dataclasses
from typing import ClassVar, Literal

from efx.errors import UsageError
from efx.layers.config import (
    DenseFormerConfig,
    Initialisation,
    MuPConfig,
    Norm,
    SoftExpertsConfig,
)
from efx.models.config import ModelConfig, check_stack
from efx.routing.config import DepthRoutingConfig
from efx.settings import Natural, PiecesOrNone, block


@block("config.model")
class EncoderDecoderConfig(ModelConfig):
    """A causal language model of two streams; `depth` is the number of decoder blocks. What has
    settings by block (`every`, `period`) counts the blocks of each stream by themselves."""

    family: Literal["encoder_decoder"] = "encoder_decoder"
    # Encoder blocks; 0: as many as decoder blocks, with cross_source="previous_layer" one less
    # (what the last would give is read by nothing).
    encoder_depth: PiecesOrNone = 0
    cross_heads: Natural = 0  # of cross-attention, each width / cross_heads wide; 0: as num_heads
    cross_kv_heads: Natural = 0  # of its keys and values; 0: as many as cross_heads
    # "rope": no table; self-attention and cross-attention turn queries and keys by their positions.
    positions: Literal["learned", "rope"] = "learned"
    # "cross_only": a decoder without self-attention
    order: Literal["self_first", "cross_first", "cross_only"] = "self_first"
    # The encoder state that a decoder block reads: "same_layer", this layer's output;
    # "previous_layer", what enters the layer, so that both streams of a layer run at once;
    # "final", the serial encoder-decoder. For unequal depths see models/encoder_decoder/model.py.
    cross_source: Literal["same_layer", "previous_layer", "final"] = "previous_layer"
    # "final" only: d_0 = Linear(the encoder's output); "embedding": Linear(e_0), as elsewhere.
    serial_start: Literal["encoder", "embedding"] = "encoder"
    decoder_input_norm: bool = False  # d_0 is linear in the norm of that state, not in the state
    decoder_input_positions: bool = False  # d_0 + the position embedding of the next position
    # LN(d_L) minus the position embedding of the next position: "subtract", "subtract_norm" (a
    # norm after it), "none". None: "subtract" where positions have a table.
    output_positions: Literal["none", "subtract", "subtract_norm"] | None = None
    # Its weight: config.losses.embedding.
    embedding_loss: Literal["none", "mse", "cosine", "log_cosine"] = "mse"
    # Norms of that loss with gain and bias: the published form, which 0 gains minimise.
    embedding_loss_gains: bool = False
    norm: Norm = "layernorm"
    use_bias: bool = False
    # "gpt2": all weights N(0, init_std^2); "spike_no_more": N(0, 2 / (5 width)).
    initialisation: Initialisation = "gpt2"
    mup: MuPConfig = MuPConfig()
    depth_routing: DepthRoutingConfig = DepthRoutingConfig()
    soft_experts: SoftExpertsConfig = SoftExpertsConfig()
    dense_former: DenseFormerConfig = DenseFormerConfig()

    tied: ClassVar[bool] = True  # the output layer is the token embedding
    causal_in_training: ClassVar[str] = (
        "unless depth_routing selects by top-k or mlp.moe by expert_choice"
    )

    def resolved(self):
        """With everything made out; UsageError for settings that do not go together."""
        rope = self.positions == "rope"
        if self.cross_source == "previous_layer" and self.depth == 1 and self.encoder_depth:
            raise UsageError(
                f"config.model.encoder_depth={self.encoder_depth}: "
                "cross_source='previous_layer' with one decoder block reads only e_0; set it "
                "to 0"
            )
        if self.depth_routing.kind == "recursion":
            raise UsageError(
                "config.model.depth_routing.kind='recursion': not in the encoder-decoder, "
                "because each decoder block reads another encoder block and so cannot be "
                "repeated; use 'mod'"
            )
        check_stack(self, self.encoder_blocks, self.depth)
        filled = dict(
            cross_heads=self.cross_heads or self.attention.num_heads,
            output_positions=self.output_positions or ("none" if rope else "subtract"),
        )
        filled["cross_kv_heads"] = self.cross_kv_heads or filled["cross_heads"]
        _check_cross(self, rope, filled["cross_heads"], filled["cross_kv_heads"])
        off = dict(decoder_input_positions=False, output_positions="none")
        for name, value in off.items() if rope else ():
            chosen = filled.get(name, getattr(self, name))
            if chosen != value:
                raise UsageError(
                    f"config.model.{name}={chosen!r}: positions='rope' has no position "
                    f"embeddings; set it to {value!r}, or set positions='learned'"
                )
        return dataclasses.replace(
            self,
            **filled,
            attention=self.attention.resolved(
                self.width, rope, self.mup.scales_attention, self.use_bias
            ),
            mlp=self.mlp.resolved(max(self.depth, self.encoder_blocks), "gelu"),
            dropout=self.dropout.resolved(self.width, self.attention.num_heads),
        )

    @property
    def cross_attention(self):
        """The `AttentionConfig` of cross-attention, of a resolved config."""
        return dataclasses.replace(
            self.attention,
            num_heads=self.cross_heads,
            num_kv_heads=self.cross_kv_heads,
            head_dim=self.width // self.cross_heads,
        )

    @property
    def starts_from_encoder(self):
        """Whether the decoder's first state is made of the encoder's output."""
        return self.cross_source == "final" and self.serial_start == "encoder"

    @property
    def num_positions(self):
        """Rows of the table of positions: the last token, too, has a next position."""
        return self.context + (self.decoder_input_positions or self.output_positions != "none")

    @property
    def encoder_blocks(self):
        """E."""
        return self.encoder_depth or self.depth - (self.cross_source == "previous_layer")

    @property
    def reads(self):
        """After how many encoder blocks is the state that each decoder block reads: r(1)..r(L)."""
        blocks, depth = self.encoder_blocks, self.depth
        if self.cross_source == "final":
            return (blocks,) * depth
        if self.cross_source == "same_layer":
            return tuple(-(-j * blocks // depth) for j in range(1, depth + 1))
        return tuple(j * blocks // max(1, depth - 1) for j in range(depth))


def _check_cross(c, rope, heads, kv_heads):
    """UsageError unless cross-attention can have so many heads."""
    width = c.width
    if width % heads:
        raise UsageError(
            f"config.model.width={width} is not divisible by config.model.cross_heads={heads}"
        )
    if heads % kv_heads:
        raise UsageError(
            f"config.model.cross_heads={heads} is not divisible by "
            f"config.model.cross_kv_heads={kv_heads}"
        )
    if rope:
        shown = f"{width} / {heads} = {width // heads}"
        c.attention.check_rotary(width // heads, f"config.model.cross_heads={heads}", shown)
