"""The parallel encoder-decoder: a causal language model with an encoder and a decoder stream.

    e_0 = tok + pos                       d_0 = Linear(e_0)
    encoder block:  e <- e + SA(LN e)     e <- e + MLP(LN e)
    decoder block:  d <- d + SA(LN d)     d <- d + CA(q = LN d, kv = LN e*)     d <- d + MLP(LN d)
    logits = tok^T (LN(d_L) - pos of the next position)

Cross-attention is causal: query t sees encoder states <= t. With E encoder blocks and L decoder
blocks, e* of decoder block j = 1..L is the encoder state after r(j) encoder blocks:
    same_layer      r(j) = ceil(j E / L)
    previous_layer  r(j) = floor((j - 1) E / (L - 1)), 0 for L = 1
    final           r(j) = E: the serial encoder-decoder
Layer j holds decoder block j and encoder blocks r(j - 1) + 1 .. r(j) (`same_layer`) or
r(j) + 1 .. r(j + 1) (`previous_layer`). The two streams of a layer of `previous_layer` do not
depend on each other: with E = L - 1 the longest chain of dependent blocks has L blocks.
"""

import dataclasses
import itertools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.config.schema import ModulesOrZero, Natural, block
from efx.layers import batch_means, config, flops, norms, selection
from efx.layers import block as blocks
from efx.layers.learned_dropout import make_dropout
from efx.layers.linear import Linear
from efx.layers.report import sow_increment
from efx.models.config import ModelConfig, check_stack
from efx.models.language_model import LanguageModel
from efx.models.stack import Layer, LayerSpec, Stack, stream_specs
from efx.parallel.sharding import constrain

# ---- settings ----------------------------------------------------------------------------------


@block("config.model")
class EncoderDecoderConfig(ModelConfig):
    """`depth` counts decoder blocks. `every` of routing and experts counts in each stream."""

    family: Literal["encoder_decoder"] = "encoder_decoder"
    # Encoder blocks; 0: `depth`, or depth - 1 with cross_source="previous_layer", where no decoder
    # block would read the output of one more.
    encoder_depth: ModulesOrZero = 0
    cross_heads: Natural = 0  # heads of cross-attention, width / cross_heads wide; 0: num_heads
    # "rope": no position embeddings; rotary self-attention and cross-attention.
    positions: Literal["learned", "rope"] = "learned"
    # Attentions of a decoder block: first self-attention, first cross-attention, or only this.
    order: Literal["self_first", "cross_first", "cross_only"] = "self_first"
    # The encoder state that a decoder block reads: "same_layer", the output of this layer;
    # "previous_layer", the input of this layer; "final", the output of the encoder.
    cross_source: Literal["same_layer", "previous_layer", "final"] = "previous_layer"
    # With "final": d_0 is Linear(encoder output), as published, or Linear(e_0).
    serial_start: Literal["encoder", "embedding"] = "encoder"
    decoder_input_norm: bool = False  # d_0 = Linear(LN(...))
    decoder_input_positions: bool = False  # d_0 + the embedding of the next position
    # "subtract": LN(d_L) - the embedding of the next position; "subtract_norm": then a norm.
    # None: "subtract" with learned positions, "none" with "rope".
    output_positions: Literal["none", "subtract", "subtract_norm"] | None = None
    embedding_loss: Literal["none", "mse", "cosine", "log_cosine"] = "mse"  # see `EmbeddingLoss`
    embedding_loss_gains: bool = False  # norms with gains, as published: the loss collapses to 0
    norm: config.Norm = "layernorm"
    use_bias: bool = False

    tied: ClassVar[bool] = True  # the output layer is the token embedding

    def resolved(self):
        """With every field filled in; UsageError for settings that do not fit together."""
        rope, heads = self.positions == "rope", self.cross_heads or self.attention.num_heads
        if self.cross_source == "previous_layer" and self.depth == 1 and self.encoder_depth:
            self.refuse(
                "encoder_depth",
                "with cross_source='previous_layer' the only decoder block reads e_0; set it to 0",
            )
        if self.depth_routing.kind == "recursion":
            self.depth_routing.refuse("kind", "not with family='encoder_decoder'; use 'mod'")
        check_stack(self, self.num_encoder_blocks, self.depth)
        if self.width % heads:
            self.refuse("cross_heads", f"{heads} does not divide config.model.width={self.width}")
        if rope:
            self.attention.check_rotary(self.width // heads, f"config.model.cross_heads={heads}")
            for name, off in (("decoder_input_positions", False), ("output_positions", "none")):
                if getattr(self, name) not in (None, off):
                    self.refuse(name, f"positions='rope' has no position embeddings; use {off!r}")
        return dataclasses.replace(
            self,
            cross_heads=heads,
            output_positions=self.output_positions or ("none" if rope else "subtract"),
            attention=self.attention.resolved(self.width, rope, self.mup, self.use_bias),
            mlp=self.mlp.resolved(max(self.depth, self.num_encoder_blocks), "gelu"),
        )

    @property
    def cross_attention(self):
        """`AttentionConfig` of cross-attention in a resolved config: that of self-attention, with
        other heads."""
        heads = self.cross_heads
        return dataclasses.replace(
            self.attention, num_heads=heads, num_kv_heads=heads, head_dim=self.width // heads
        )

    @property
    def num_encoder_blocks(self):
        """E."""
        return self.encoder_depth or self.depth - (self.cross_source == "previous_layer")


# ---- layers of both streams --------------------------------------------------------------------

ATTENTIONS = {
    "self_first": ("self", "cross"),
    "cross_first": ("cross", "self"),
    "cross_only": ("cross",),
}


class DecoderBlock(blocks.Block):
    """d [B, T, D] -> the increment of self-attention, cross-attention to `call.encoder` and MLP.

    `BlockConfig.order` and `cross` have its attentions.
    """

    @property
    def kv_depends_on_block_output(self):
        """Self-attention after cross-attention reads its output."""
        return self.config.order == ATTENTIONS["cross_first"]

    def setup_attention(self):
        c = self.config
        if "self" in c.order:
            super().setup_attention()
        self.cross_attention = blocks.make_attention(c, config=c.cross)
        self.norm_cross, self.norm_encoder = blocks.make_norm(c), blocks.make_norm(c)
        self.dropout_cross_output = make_dropout(c, "attention_output")

    def attention_increment(self, d_BTD, call, context=None):
        """Increment of both attentions; None if the call only writes keys and values.

        Args:
          context: with `kv_for_skipped`, what the self-attention of a routed block attends to:
            (states of all tokens [B, S, D], their call, indices [B, C] of d among them).
        """
        x_BTD, increment_BTD = d_BTD, None
        for name in self.config.order:
            if increment_BTD is not None:
                x_BTD = blocks.mlp_input(self.config, d_BTD, increment_BTD)
            if name == "self":
                y_BTD = self._self_attention(x_BTD, call, context)
            else:
                y_BTD = self._cross_attention(x_BTD, call)
            increment_BTD = y_BTD if increment_BTD is None else increment_BTD + y_BTD
        return increment_BTD

    def _self_attention(self, x_BTD, call, context):
        # Cross-attention caches all tokens, self-attention only with `kv_for_skipped`.
        caches_all = call.decode and call.cache.kv_size > 0
        if call.access == "write" and not caches_all:
            return None
        if call.access == "read" and (self.kv_depends_on_block_output or not caches_all):
            call = call.with_cache(access="both")
        if context is not None and self.kv_depends_on_block_output:
            all_BSD, all_call, index_BC = context
            context = selection.scatter_set(all_BSD, index_BC, x_BTD), all_call
        return super().attention_increment(x_BTD, call, context)

    def _cross_attention(self, x_BTD, call):
        c, (encoder_BSD, key_call), stream_BTD = self.config, call.encoder, x_BTD
        if call.decode:
            # The cache has the keys and values of all encoder states, also of tokens that d skips.
            all_call = key_call or call
            call = call.with_cache(kv_size=all_call.cache.size)
            if call.access == "write":
                call = call.replace(positions_BT=all_call.positions_BT)
        context = blocks.norm_input(c, self.norm_encoder, encoder_BSD), key_call
        x_BTD = blocks.norm_input(c, self.norm_cross, x_BTD)
        y_BTD = self.cross_attention(x_BTD, call, context)
        y_BTD = blocks.increment(c, self.norm_cross, self.dropout_cross_output, y_BTD, call)
        if y_BTD is not None:
            sow_increment(self, "cross", y_BTD, stream_BTD, call.valid_mask(len(y_BTD)), call)
        return y_BTD


@dataclasses.dataclass(frozen=True)
class TwoStreamSpec:
    """One layer: encoder blocks, a decoder block, or both."""

    encoder: tuple[LayerSpec, ...] = ()
    decoder: LayerSpec | None = None
    parallel: bool = False  # the decoder block reads the input of the encoder blocks of its layer


class TwoStreamLayer(nn.Module):
    """(e [B, T, D], d [B, T, D]) -> (e, d). d may be None without a decoder block."""

    spec: TwoStreamSpec

    @nn.compact
    def __call__(self, streams, call):
        (e_BTD, d_BTD), decoder = streams, self.spec.decoder
        source_BTD = e_BTD
        for i, spec in enumerate(self.spec.encoder):
            e_BTD = Layer(spec, name=f"encoder_{i}")(e_BTD, call)
        if decoder is not None:
            if not self.spec.parallel:
                source_BTD = e_BTD
            # Routed attention reads the encoder states of all tokens, not only of routed ones.
            routed = decoder.routing is not None and decoder.routing.routes_attention
            call = call.replace(encoder=(source_BTD, call if routed else None))
            d_BTD = Layer(decoder, name="decoder")(d_BTD, call)
        return e_BTD, d_BTD


# ---- the loss ----------------------------------------------------------------------------------


class EmbeddingLoss(nn.Module):
    """Sow the loss `embedding`: the mean over tokens t of the distance between c_t, the mean of
    LN_a(e_0) over the tokens <= t, and s_t = LN_b(sg(e_E)).

    Attributes:
      kind: see `distance`.
      gains: the norms have gains and biases, as published; gains of 0 then minimise the loss.
    """

    kind: str
    gains: bool
    eps: float

    @nn.compact
    def __call__(self, embedded_BTD, e_BTD, segment_ids_BT):
        options = dict(eps=self.eps, use_bias=self.gains, use_scale=self.gains)
        a_BTD = norms.LayerNorm(**options, name="norm_embedding")(embedded_BTD)
        s_BTD = norms.LayerNorm(**options, name="norm_encoder")(jax.lax.stop_gradient(e_BTD))
        loss_BT = distance(self.kind, running_mean(a_BTD, segment_ids_BT), s_BTD)
        valid_BT = None if segment_ids_BT is None else segment_ids_BT > 0
        batch_means.sow(self, "losses", "embedding", batch_means.over(loss_BT, valid_BT))


def running_mean(x_BTD, segment_ids_BT=None):
    """float32 [B, T, D]: the mean over the tokens <= t of the document of t."""
    x_BTD = x_BTD.astype(jnp.float32)
    sum_BTD = jnp.cumsum(x_BTD, axis=1)
    count_BT = selection.running_count(jnp.ones(x_BTD.shape[:2], bool), segment_ids_BT)
    if segment_ids_BT is not None:
        start_BT = jnp.arange(x_BTD.shape[1])[None] + 1 - count_BT
        before_BTD = jnp.take_along_axis(sum_BTD - x_BTD, start_BT[..., None], axis=1)
        sum_BTD = sum_BTD - before_BTD
    return sum_BTD / count_BT[..., None]


def distance(kind, c_BTD, s_BTD):
    """[B, T]: `mse`, `cosine` 1 - p or `log_cosine` -log p, with p = (cos(c, s) + 1) / 2.

    p is at least 1e-6, so that the loss of opposite vectors is finite.
    """
    if kind == "mse":
        return jnp.mean(jnp.square(c_BTD - s_BTD), axis=-1)
    p_BT = (jnp.sum(norms.l2_normalize(c_BTD) * norms.l2_normalize(s_BTD), axis=-1) + 1.0) / 2.0
    return 1.0 - p_BT if kind == "cosine" else -jnp.log(jnp.maximum(p_BT, 1e-6))


# ---- the model ---------------------------------------------------------------------------------


class EncoderDecoder(LanguageModel):
    """Tokens to logits; see `LanguageModel` for the interface."""

    def setup(self):
        c, block = self.config, self.block_config()
        # The last token also has a next position.
        adds_next = c.decoder_input_positions or c.output_positions != "none"
        self.setup_embedding(c.context + adds_next if c.positions == "learned" else 0)
        self.norm_input = blocks.make_norm(block)
        self.decoder_input = Linear(c.width, ("embed", "table"), block.std, c.use_bias, self.dtype)
        specs, last = self.layer_specs()
        self.layers = Stack(specs, c.scan_layers, c.remat, layer=TwoStreamLayer)
        self.last = Stack(last, False, c.remat, layer=TwoStreamLayer)
        self.norm_final = blocks.make_norm(block)
        self.norm_output = blocks.make_norm(block)
        self.loss = EmbeddingLoss(c.embedding_loss, c.embedding_loss_gains, c.norm_eps)

    def trunk(self, embedded_BTD, call):
        c = self.config
        x_BTD = self.drop_embedding(embedded_BTD, call)
        if c.cross_source == "final":
            e_BTD, _ = self.layers((x_BTD, None), call)
            start_BTD = e_BTD if c.serial_start == "encoder" else x_BTD
            streams = e_BTD, self._start_decoder(start_BTD, call)
        else:
            streams = self.layers((x_BTD, self._start_decoder(x_BTD, call)), call)
        e_BTD, d_BTD = self.last(streams, call)
        has_loss = c.embedding_loss != "none" and not call.decode
        if has_loss and (batch_means.is_collecting(self) or self.is_initializing()):
            self.loss(embedded_BTD, e_BTD, call.segment_ids_BT)
        x_BTD = self.norm_final(d_BTD)
        if c.output_positions != "none":
            x_BTD = x_BTD - self._next_positions(x_BTD, call)
        return self.norm_output(x_BTD) if c.output_positions == "subtract_norm" else x_BTD

    def _start_decoder(self, x_BTD, call):
        """d_0."""
        if self.config.decoder_input_norm:
            x_BTD = self.norm_input(x_BTD)
        d_BTD = self.decoder_input(x_BTD)
        if self.config.decoder_input_positions:
            d_BTD = d_BTD + self._next_positions(d_BTD, call)
        return constrain(d_BTD, "batch", "length", "act_embed")

    def _next_positions(self, x_BTD, call):
        """The embedding of the position after each token, in the shape of x."""
        return self.position_embedding(call.positions_BT + 1, x_BTD.shape)

    @nn.nowrap
    def layer_specs(self):
        """(specs of the stack `layers`, specs of the stack `last`).

        `last` is the decoder of `final`, and the last layer of `previous_layer`, which has no
        encoder block. Without these the layers of the stack are alike, so they can be scanned.
        """
        c, count = self.config, self.config.num_encoder_blocks
        order = ATTENTIONS[c.order]
        # Encoder blocks are numbered before decoder blocks.
        capacities = c.depth_routing.routed_blocks(count, c.depth)
        encoder = tuple(stream_specs(self.block_config(2 * count), c, count, capacities))
        capacities = {i - count: capacity for i, capacity in capacities.items()}
        block = dataclasses.replace(
            self.block_config(c.depth * (len(order) + 1)), order=order, cross=c.cross_attention
        )
        decoder = tuple(stream_specs(block, c, c.depth, capacities, DecoderBlock))
        if c.cross_source == "final":
            layers = tuple(TwoStreamSpec(encoder=(spec,)) for spec in encoder)
            return layers, tuple(TwoStreamSpec(decoder=spec) for spec in decoder)
        parallel = c.cross_source == "previous_layer"
        # Layer j has the encoder blocks from bounds[j] on, below bounds[j + 1].
        if parallel:
            bounds = [min(j * count // max(1, c.depth - 1), count) for j in range(c.depth + 1)]
        else:
            bounds = [-(-j * count // c.depth) for j in range(c.depth + 1)]
        layers = tuple(
            TwoStreamSpec(encoder[start:stop], spec, parallel)
            for (start, stop), spec in zip(itertools.pairwise(bounds), decoder, strict=True)
        )
        return (layers[:-1], layers[-1:]) if parallel else (layers, ())

    def specs(self):
        return self.layer_specs()[0]

    @nn.nowrap
    def blocks(self):
        found = {}
        for stack, specs in zip(("layers", "last"), self.layer_specs(), strict=True):
            for i, spec in enumerate(specs):
                path = f"{stack}/block_{i}"
                found |= {f"{path}/encoder_{j}": part for j, part in enumerate(spec.encoder)}
                if spec.decoder is not None:
                    found[f"{path}/decoder"] = spec.decoder
        return found

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        nominal = super().ledger(length, selection, shares).nominal
        decoder_input = flops.matmul(length, self.config.width, self.config.width)
        return flops.Ledger(length, {"decoder_input": decoder_input} | nominal)
