"""Layers of two streams, the second of which reads the first; see `EncoderDecoder`."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import means
from efx.layers.blocks import (
    Block,
    apply_dropout,
    make_attention,
    make_norm,
    masked_mlp,
)
from efx.layers.config import BlockConfig
from efx.layers.norms import LayerNorm
from efx.sharding import constrain


@dataclasses.dataclass(frozen=True)
class PairSpec:
    """One layer of the two streams.

    Attributes:
      encoder: its encoder blocks. decoder: its decoder block, or None.
      cross: the cross-attention of that, as a block whose MLP is not used.
      parallel: the decoder block reads the encoder state that enters the layer, not the one that
        leaves it.
    """

    encoder: tuple[BlockConfig, ...]
    decoder: BlockConfig | None
    cross: BlockConfig
    order: str
    parallel: bool
    routing: ClassVar[None] = None

    @property
    def blocks(self):
        return (*self.encoder, *([self.decoder] if self.decoder else []))

    new_blocks = blocks

    @property
    def module(self):
        return Pair


class DecoderBlock(nn.Module):
    """Pre-norm self-attention, cross-attention and MLP; returns the increment of d.

    In `self_first`: a = SA(LN d); c = CA(q = LN(d + a), kv = LN e); a + c + MLP(LN(d + a + c)).
    """

    spec: PairSpec

    @nn.compact
    def __call__(self, d_BTD, e_BTD, info):
        c = self.spec.decoder

        def attention(x_BTD):
            y_BTD = make_attention(c, "attention")(make_norm(c, "norm_attention")(x_BTD), info)
            return apply_dropout(c, "attention_output", y_BTD, info)

        def cross(x_BTD):
            context = make_norm(c, "norm_encoder")(e_BTD), info
            y_BTD = make_attention(self.spec.cross, "cross_attention")(
                make_norm(c, "norm_cross")(x_BTD), info, context
            )
            return apply_dropout(c, "attention_output", y_BTD, info, name="dropout_cross_output")

        def mlp(x_BTD):
            return masked_mlp(self, c, x_BTD, info)

        sublayers = {
            "self_first": (attention, cross, mlp),
            "cross_first": (cross, attention, mlp),
            "cross_only": (cross, mlp),
        }
        delta_BTD = jnp.zeros_like(d_BTD)
        for sublayer in sublayers[self.spec.order]:
            delta_BTD = delta_BTD + sublayer(d_BTD + delta_BTD)
        return delta_BTD


class Pair(nn.Module):
    """A layer of both streams: (e [B, T, D], d [B, T, D]) -> (e, d). Where the decoder's has not
    begun, of the encoder's alone: (e,) -> (e,)."""

    spec: PairSpec

    @nn.compact
    def __call__(self, streams, info):
        e_BTD, *d = streams
        read_BTD = e_BTD
        for i, config in enumerate(self.spec.encoder):
            e_BTD = e_BTD + Block(config, name=f"encoder_{i}")(e_BTD, info)
        if not self.spec.parallel:
            read_BTD = e_BTD
        if self.spec.decoder is not None:
            d = [d[0] + DecoderBlock(self.spec, name="decoder")(d[0], read_BTD, info)]
        return tuple(constrain(x, "batch", "length", "act_embed") for x in (e_BTD, *d))


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

    def unit(x_BTD):
        square_BT = jnp.sum(jnp.square(x_BTD), axis=-1, keepdims=True)
        return x_BTD * jax.lax.rsqrt(jnp.maximum(square_BT, 1e-12))

    near_BT = (jnp.sum(unit(c_BTD) * unit(s_BTD), axis=-1) + 1.0) / 2.0
    return 1.0 - near_BT if kind == "cosine" else -jnp.log(jnp.maximum(near_BT, 1e-6))
