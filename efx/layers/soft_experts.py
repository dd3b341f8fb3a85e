"""Soft experts: a block of several channels, each an attention and an MLP of its own.

For channels c = 1..s over the same tokens x [B, T, D]:
    h_c = x + Attention_c(norm x)              own queries, keys, values, output matrix
    y_c = h_c + P(MLP_c(norm h_c))             MLP_c: D -> F -> m D / s, one P: m D / s -> D
    out = sum over c of softmax_c(y)_c * y_c   elementwise over features, softmax over channels
The merge mixes the channels of one token, never tokens (unlike Soft MoE, arXiv 2308.00951), so the
block is causal. In place of K latents, K/m latents in s channels have s (K/m)^2 scores, not K^2.

Channels are one batched computation: their heads are the heads of one attention, their MLPs one
batched product. In arrays they are the axis X, in logical axes "expert".
"""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers.attention import Attention
from efx.layers.block import after_attention, apply_dropout, make_attention, sublayer_norms
from efx.layers.config import BlockConfig
from efx.layers.linear import broadcast, mark_projection
from efx.layers.mlp import activate
from efx.layers.moe import ExpertLinear, Experts
from efx.parameter import parameter
from efx.sharding import constrain, exchange


def merge(kind, delta_XBTD):
    """The increment [B, T, D] of a block whose channels have these increments y_c - x.

    x is the same in every channel, so softmax_c(x + d)_c = softmax_c(d)_c, and since these weights
    sum to one, merged(y) - x is merged(d); so it is for the mean and the maximum. In float32.
    """
    wide_XBTD = delta_XBTD.astype(jnp.float32)
    if kind == "softmax":
        merged_BTD = jnp.sum(jax.nn.softmax(wide_XBTD, axis=0) * wide_XBTD, axis=0)
    elif kind == "mean":
        merged_BTD = jnp.mean(wide_XBTD, axis=0)
    else:
        merged_BTD = jnp.max(wide_XBTD, axis=0)
    return merged_BTD.astype(delta_XBTD.dtype)


# How [X, B, T, D] lies: attention computes all channels of a device's own rows, experts those of
# their channel.
BY_ROW = (None, "batch", "length", "act_embed")
BY_CHANNEL = ("act_expert", "expert_batch", "length", "act_embed")


class ChannelAttention(Attention):
    """`Attention` of s channels at once: x [B, T, D] -> [X, B, T, D].

    `num_heads` and `num_kv_heads` count the heads of all channels. Heads lie channel by channel;
    with `shared_kv`, where all channels use the same keys and values, those that share a key lie
    together: kv head, channel, query head. The scales of a norm of queries or keys are common to
    all channels, its statistics are each channel's.
    """

    channels: int
    shared_kv: bool

    def _norm_width(self, norm, y, heads):
        return self._together(norm(self._by_channel(y, heads)), heads)

    def _order(self, heads):
        """(how the axis of all heads splits, where among these axes the channels are)."""
        if not self.shared_kv:
            return (self.channels, heads // self.channels), 0
        if heads == self.config.num_kv_heads:
            return (1, heads), 0
        groups = heads // (self.config.num_kv_heads * self.channels)
        return (self.config.num_kv_heads, self.channels, groups), 1

    def _by_channel(self, y, heads):
        """[B, T, all heads * H] -> [B, T, X, the heads of a channel * H]."""
        split, place = self._order(heads)
        y = y.reshape(*y.shape[:2], *split, self.config.head_dim)
        y = jnp.moveaxis(y, 2 + place, 2)
        return y.reshape(*y.shape[:3], -1)

    def _together(self, y, heads):
        """The inverse of `_by_channel`."""
        split, place = self._order(heads)
        rest = split[:place] + split[place + 1 :]
        y = y.reshape(*y.shape[:3], *rest, self.config.head_dim)
        return jnp.moveaxis(y, 2, 2 + place).reshape(*y.shape[:2], heads * self.config.head_dim)

    def _out(self, out_BTNH):
        batch, length = out_BTNH.shape[:2]
        y = self._by_channel(out_BTNH.reshape(batch, length, -1), self.config.num_heads)
        y = exchange(jnp.moveaxis(y, 2, 0), BY_ROW, BY_CHANNEL)
        y = y.reshape(self.channels, batch * length, -1)
        axes = ("heads", "embed")
        linear = ExpertLinear(
            self.channels, self.width, axes, self.std_out, self.bias_out, self.dtype, name="out"
        )
        return linear(y).reshape(self.channels, batch, length, self.width)


class CommonLinear(nn.Module):
    """One linear layer for all channels: [X, C, D] -> [X, C, F]. Fields as in `Linear`."""

    features: int
    axes: tuple
    std: float
    use_bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_XCD):
        def param(name, init, axes, *shape):
            return parameter(self, name, init, shape, axes).astype(self.dtype)

        channels, _, width = x_XCD.shape
        init = nn.initializers.normal(self.std)
        kernel = param("kernel", init, self.axes, width, self.features)
        # A product a channel: were the rows of all channels one axis, devices that split the batch
        # would have to gather it.
        kernel_XDF = broadcast(kernel, (channels, width, self.features))
        y_XCF = mark_projection(jnp.einsum("XCD,XDF->XCF", x_XCD.astype(self.dtype), kernel_XDF))
        if self.use_bias:
            bias = param("bias", nn.initializers.zeros, self.axes[1:], self.features)
            y_XCF = y_XCF + broadcast(bias, y_XCF.shape)
        return y_XCF


class SharedMLP(nn.Module):
    """One MLP for all channels, [X, C, D] -> [X, C, features]. Fields as in `Experts`."""

    hidden: int
    activation: str
    use_bias: bool
    std: float
    std_out: float
    dtype: jnp.dtype
    features: int

    @nn.compact
    def __call__(self, x_XCD):
        def linear(name, features, axes, std):
            return CommonLinear(features, axes, std, self.use_bias, self.dtype, name=name)

        def inward(name):
            return linear(name, self.hidden, ("embed", "mlp"), self.std)(x_XCD)

        h_XCF = constrain(
            activate(self.activation, inward), "act_expert", "expert_batch", "act_mlp"
        )
        return linear("down", self.features, ("mlp", "norm"), self.std_out)(h_XCF)


class SoftMLP(nn.Module):
    """P(MLP_c(h_c) + shared(h_c)) for every channel: [X, B, T, D] -> [X, B, T, D]."""

    config: BlockConfig

    @nn.compact
    def __call__(self, h_XBTD):
        c, soft = self.config, self.config.soft
        channels, batch, length, width = h_XBTD.shape
        features = soft.features(width)
        # The experts' last matrix is not the residual's: P is.
        options = (c.mlp.activation, c.use_bias, c.std, c.std, c.dtype, features)
        h_XCD = h_XBTD.reshape(channels, batch * length, width)
        y_XCD = Experts(channels, c.hidden, *options, name="experts")(h_XCD)
        if soft.shared:
            y_XCD = y_XCD + SharedMLP(soft.shared * c.hidden, *options, name="shared")(h_XCD)
        y_XCD = constrain(y_XCD, "act_expert", "expert_batch", None)
        # So few features that the axis is not split over devices.
        axes = ("norm", "embed")
        out = CommonLinear(width, axes, c.std_out, c.use_bias, c.dtype, name="out")
        return out(y_XCD).reshape(h_XBTD.shape)


class SoftBlock(nn.Module):
    """A block with soft experts; like `Block`, it returns the increment out - x.

    Attributes:
      norm_context: name of the norm of a context; one of its own where that is another stream.
    """

    config: BlockConfig
    norm_context: str = "norm_attention"

    kv_depends_on_block_output: ClassVar[bool] = False

    @nn.compact
    def __call__(self, x_BTD, call, context=None):
        """`context` = (tokens [B, S, D], their call, ...): attend over these instead of over x."""
        c = self.config
        before, after = sublayer_norms(c, "norm_attention")
        if context is not None:
            shared = self.norm_context == "norm_attention"
            norm_context = before if shared else sublayer_norms(c, self.norm_context)[0]
            context = norm_context(context[0]), context[1]
        a_XBTD = _attention(c)(before(x_BTD), call, context)
        if call.access == "write":
            return None
        a_XBTD = _dropout(c, "attention_output", after(a_XBTD), call)
        h_XBTD = after_attention(c, broadcast(x_BTD, a_XBTD.shape), a_XBTD)
        before, after = sublayer_norms(c, "norm_mlp")
        m_XBTD = after(SoftMLP(c, name="mlp")(before(constrain(h_XBTD, *BY_CHANNEL))))
        m_XBTD = _dropout(c, "mlp_output", m_XBTD, call)
        return merge(c.soft.merge, exchange(a_XBTD + m_XBTD, BY_CHANNEL, BY_ROW))


def _attention(c):
    channels, shared_kv = c.soft.num, c.soft.shared_kv
    kind = partial(ChannelAttention, channels=channels, shared_kv=shared_kv)
    return make_attention(
        c,
        "attention",
        kind,
        config=dataclasses.replace(
            c.attention,
            num_heads=c.attention.num_heads * channels,
            num_kv_heads=c.attention.num_kv_heads * (1 if shared_kv else channels),
        ),
    )


def _dropout(c, site, x_XBTD, call):
    """Each channel has a learned mask of its own."""
    if not c.dropout.learned or not c.dropout.active(site):
        return apply_dropout(c, site, x_XBTD, call)
    return jnp.stack(
        [
            apply_dropout(c, site, x_BTD, call, name=f"dropout_{site}_{i}")
            for i, x_BTD in enumerate(x_XBTD)
        ]
    )
