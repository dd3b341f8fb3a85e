"""Layers of two streams, the second of which reads the first; see `EncoderDecoder`."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import means
from efx.layers.block import (
    after_attention,
    apply_dropout,
    make_attention,
    masked_mlp,
    sublayer_norms,
)
from efx.layers.config import AttentionConfig
from efx.layers.norms import LayerNorm, unit
from efx.layers.soft_experts import SoftBlock
from efx.layers.stack import Layer, LayerSpec

# The attentions of a decoder block, in order.
ATTENTIONS = {
    "self_first": ("self", "cross"),
    "cross_first": ("cross", "self"),
    "cross_only": ("cross",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec(LayerSpec):
    """One layer of the stream that reads the other.

    Attributes:
      cross: its cross-attention. order: a key of `ATTENTIONS`.
    """

    cross: AttentionConfig
    order: str

    @property
    def make_block(self):
        return partial(DecoderBlock, self)

    @property
    def kinds(self):
        """{kind of attention: the block that has it}, in order. With soft experts each channel has
        the last attention and the MLP for itself; an attention before that is one for all."""
        # A block without rotary positions has none in either.
        rope_theta = self.block.attention.rope_theta
        cross = dataclasses.replace(self.cross, rope_theta=rope_theta)
        crossing = dataclasses.replace(self.block, attention=cross)
        *first, last = ATTENTIONS[self.order]
        blocks = {"self": self.block, "cross": crossing}
        kinds = {kind: dataclasses.replace(blocks[kind], soft=None) for kind in first}
        return {**kinds, last: blocks[last]}

    @property
    def attentions(self):
        skipped = self.routing is not None and self.routing.kv_for_skipped
        return tuple((block, kind == "cross" or skipped) for kind, block in self.kinds.items())


@dataclasses.dataclass(frozen=True)
class PairSpec:
    """One layer of the two streams.

    Attributes:
      specs: its encoder blocks, then its decoder block, or either alone.
      parallel: the decoder block reads the encoder state that enters the layer, not the one that
        leaves it.
    """

    specs: tuple[LayerSpec, ...]
    parallel: bool = False

    @property
    def module(self):
        return Pair

    @property
    def parts(self):
        encoder = (f"encoder_{i}" for i in itertools.count())
        return {
            "decoder" if isinstance(spec, DecoderSpec) else next(encoder): spec
            for spec in self.specs
        }

    @property
    def stream(self):
        """Which of the two streams it computes, if it is one block."""
        return int(isinstance(self.specs[0], DecoderSpec))


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention and MLP, see `BlockKind`; returns the increment of d.

    In `self_first`, pre-norm: a = SA(LN d); c = CA(q = LN(d + a), kv = LN e);
    a + c + MLP(LN(d + a + c)).
    With soft experts the last attention and the MLP are those of a `SoftBlock`: here a is one for
    all channels, and each of them reads e with queries, keys and values of its own.
    """

    spec: DecoderSpec

    @property
    def config(self):
        return self.spec.block

    @property
    def kv_depends_on_block_output(self):
        """See `MoDBlock`. Self-attention that comes second reads another state than d."""
        return "self" in ATTENTIONS[self.spec.order][1:]

    @nn.compact
    def __call__(self, d_BTD, call, context=None):
        """`context` = (tokens [B, S, D], their call, the plan by which d was taken from them): what
        self-attention attends over instead."""
        calls, contexts = {"self": call, "cross": call}, {"self": context, "cross": call.encoder}
        if call.decode:
            # Cross-attention keeps keys and values of all tokens. Self-attention, unless it does so
            # too, keeps those of the computed tokens, as they are computed.
            encoder_call = call.encoder[1] or call
            calls["cross"] = call.with_cache(kv_size=encoder_call.cache.size)
            if call.access == "write":
                calls["cross"] = calls["cross"].replace(positions_BT=encoder_call.positions_BT)
            if not call.cache.kv_size or (
                self.kv_depends_on_block_output and call.access == "read"
            ):
                calls["self"] = call.with_cache(access="both")
        delta_BTD = jnp.zeros_like(d_BTD)

        for kind, block in self.spec.kinds.items():
            if call.access != "write":
                read_BTD = after_attention(self.config, d_BTD, delta_BTD)
                if context is not None and self.kv_depends_on_block_output:
                    # Computed tokens have read the encoder by then, the others are what they were.
                    contexts["self"] = context[2].put(context[0], read_BTD), context[1]
                y_BTD = self._attend(kind, block, read_BTD, calls[kind], contexts[kind])
                delta_BTD = delta_BTD + y_BTD
            elif calls[kind].access == "write":
                self._attend(kind, block, d_BTD, calls[kind], contexts[kind])
        if call.access == "write":
            return None
        if self.config.soft is not None:
            return delta_BTD
        read_BTD = after_attention(self.config, d_BTD, delta_BTD)
        return delta_BTD + masked_mlp(self, self.config, read_BTD, call)

    def _attend(self, kind, block, x_BTD, call, context):
        """The increment of an attention, or of the channels that have it for themselves."""
        cross = kind == "cross"
        if block.soft is not None:
            norm_context = "norm_encoder" if cross else "norm_attention"
            return SoftBlock(block, norm_context, name="soft")(x_BTD, call, context)
        before, after = sublayer_norms(block, "norm_cross" if cross else "norm_attention")
        if context is not None:
            norm_context = sublayer_norms(block, "norm_encoder")[0] if cross else before
            context = norm_context(context[0]), context[1]
        attention = make_attention(block, "cross_attention" if cross else "attention")
        y_BTD = attention(before(x_BTD), call, context)
        if call.access == "write":
            return None
        y_BTD = after(y_BTD)
        name = "dropout_cross_output" if cross else "dropout_attention_output"
        return apply_dropout(block, "attention_output", y_BTD, call, name=name)


class Pair(nn.Module):
    """A layer of both streams: (e [B, T, D], d [B, T, D]) -> (e, d). Where the decoder's has not
    begun, of the encoder's alone: (e,) -> (e,)."""

    spec: PairSpec

    @nn.compact
    def __call__(self, streams, call):
        e_BTD, *d = streams
        entering_BTD = e_BTD
        for name, spec in self.spec.parts.items():
            layer = Layer(spec, name=name)
            if name == "decoder":
                read_BTD = entering_BTD if self.spec.parallel else e_BTD
                # A routed block reads the states of all tokens, which are not only its own.
                encoder = read_BTD, None if spec.routing is None else call
                d = [layer(d[0], call.replace(encoder=encoder))]
            else:
                e_BTD = layer(e_BTD, call)
        return (e_BTD, *d)


class EmbeddingLoss(nn.Module):
    """Sows the loss `embedding`: how far the running mean of what went into the encoder is from
    what comes out of it, averaged over tokens that are no padding.

    c_t = mean of LN_a(e_0) over the tokens <= t of the document, s_t = LN_b(sg(e_E)). With `gains`
    (and biases: the published form) these two alone can make both sides 0, and only this loss
    trains them; without, s_t has the length sqrt(D) whatever the parameters are.
    """

    kind: str
    gains: bool
    eps: float

    @nn.compact
    def __call__(self, embedded_BTD, e_BTD, segment_ids_BT):
        options = dict(eps=self.eps, use_bias=self.gains, use_scale=self.gains)
        a_BTD = LayerNorm(**options, name="norm_embedding")(embedded_BTD)
        s_BTD = LayerNorm(**options, name="norm_encoder")(jax.lax.stop_gradient(e_BTD))
        loss_BT = distance(self.kind, running_mean(a_BTD, segment_ids_BT), s_BTD)
        real_BT = None if segment_ids_BT is None else segment_ids_BT > 0
        means.sow(self, "losses", "embedding", means.over(loss_BT, real_BT))


def running_mean(x_BTD, segment_ids_BT=None):
    """Mean over the tokens <= t of t's document, in float32."""
    x_BTD = x_BTD.astype(jnp.float32)
    place_T = jnp.arange(x_BTD.shape[1])
    sum_BTD = jnp.cumsum(x_BTD, axis=1)
    if segment_ids_BT is None:
        return sum_BTD / (place_T + 1.0)[None, :, None]
    new_BT = jnp.diff(segment_ids_BT, axis=1, prepend=-1) != 0
    start_BT = jax.lax.cummax(jnp.where(new_BT, place_T[None], 0), axis=1)
    before_BTD = jnp.take_along_axis(sum_BTD - x_BTD, start_BT[..., None], axis=1)
    return (sum_BTD - before_BTD) / (place_T[None] - start_BT + 1.0)[..., None]


def distance(kind, c_BTD, s_BTD):
    """[B, T] of `mse`, `cosine`: 1 - (cos(c, s) + 1) / 2, or `log_cosine`: -log of (cos + 1) / 2,
    which is bounded at 1e-6 so that opposite vectors have a finite loss."""
    if kind == "mse":
        return jnp.mean(jnp.square(c_BTD - s_BTD), axis=-1)
    near_BT = (jnp.sum(unit(c_BTD) * unit(s_BTD), axis=-1) + 1.0) / 2.0
    return 1.0 - near_BT if kind == "cosine" else -jnp.log(jnp.maximum(near_BT, 1e-6))
