"""Soft experts: a block of several channels, each with its own attention and MLP.

For channels c = 1..s over the same tokens x [B, T, D]:
    h_c = x + Attention_c(norm x)              own queries, keys and values
    y_c = h_c + P(MLP_c(norm h_c))             MLP_c: D -> F -> m D / s; one P: m D / s -> D
    out = sum over c of softmax_c(y)_c * y_c   elementwise over features, softmax over channels
The merge mixes the channels of one token, never tokens (unlike Soft MoE, arXiv 2308.00951), so the
block is causal. s channels on K / m latents have s (K / m)^2 attention scores in place of K^2.

In the published form (`tied`) all channels share the first matrix of the MLP, the output matrix of
attention and the gain of the query and key norms. All channels are one batched computation: axis X
of arrays, logical axis "expert".
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers.attention import Attention
from efx.layers.block import Block, make_attention, make_norm, mlp_input
from efx.layers.config import BlockConfig
from efx.layers.learned_dropout import make_dropout
from efx.layers.linear import broadcast
from efx.layers.mlp import activate
from efx.layers.moe import ExpertLinear
from efx.parallel.collectives import exchange
from efx.parallel.sharding import constrain

# Layouts of [X, B, T, D]: attention computes all channels of a device's rows, MLPs all rows of its
# channels.
BY_ROW = (None, "batch", "length", "act_embed")
BY_CHANNEL = ("act_expert", "expert_batch", "length", "act_embed")


def merge(kind, delta_XBTD):
    """The increment [B, T, D] of a block whose channels have the increments y_c - x.

    softmax_c(x + d)_c = softmax_c(d)_c, as x is the same in all channels, and the weights sum to 1:
    merged(y) - x = merged(d). So it is for the mean and the maximum. In float32.
    """
    wide_XBTD = delta_XBTD.astype(jnp.float32)
    if kind == "softmax":
        merged_BTD = jnp.sum(jax.nn.softmax(wide_XBTD, axis=0) * wide_XBTD, axis=0)
    else:
        merged_BTD = {"mean": jnp.mean, "max": jnp.max}[kind](wide_XBTD, axis=0)
    return merged_BTD.astype(delta_XBTD.dtype)


class ChannelAttention(Attention):
    """`Attention` of s channels at once: x [B, T, D] -> [X, B, T, D].

    `num_heads` and `num_kv_heads` count the heads of all channels, in the order kv head of a
    channel, channel, query head. With `shared_kv` all channels use the same keys and values. A norm
    of queries or keys is over one channel.
    """

    channels: int
    shared_kv: bool
    tied: bool

    def _by_channel(self, y, heads):
        """[B, T, all heads * H] -> [B, T, X, K, G * H]."""
        channels = 1 if self.shared_kv and heads == self.config.num_kv_heads else self.channels
        kv_heads = self.config.num_kv_heads // (1 if self.shared_kv else self.channels)
        return jnp.moveaxis(y.reshape(*y.shape[:2], kv_heads, channels, -1), 3, 2)

    def _norm_width(self, norm, y, heads):
        y_BTXKH = self._by_channel(y, heads)
        y_BTXH = y_BTXKH.reshape(*y_BTXKH.shape[:3], -1)
        if self.tied:
            y_BTXH = norm(y_BTXH)
        else:
            y_BTXH = nn.vmap(
                lambda norm, y: norm(y),
                in_axes=2,
                out_axes=2,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: "expert"},
            )(norm, y_BTXH)
        return jnp.moveaxis(y_BTXH.reshape(y_BTXKH.shape), 2, 3).reshape(y.shape)

    def _out(self, out_BTNH):
        batch, length = out_BTNH.shape[:2]
        use_bias = self.config.bias == "all"
        y_XBTKH = jnp.moveaxis(self._by_channel(out_BTNH, self.config.num_heads), 2, 0)
        y_XBTH = exchange(y_XBTKH.reshape(*y_XBTKH.shape[:3], -1), BY_ROW, BY_CHANNEL)
        options = self.width, ("heads", "embed"), self.std_out, use_bias, self.dtype
        out = ExpertLinear(self.channels, *options, is_shared=self.tied, name="out")
        y_XCD = out(y_XBTH.reshape(self.channels, batch * length, -1))
        return y_XCD.reshape(self.channels, batch, length, self.width)


class ChannelMLP(nn.Module):
    """An MLP for each channel, or one that all share: [X, C, D] -> [X, C, m D / s]."""

    config: BlockConfig
    is_shared: bool

    @nn.compact
    def __call__(self, x_XCD):
        c, soft, channels = self.config, self.config.soft, len(x_XCD)
        hidden = soft.shared * c.hidden if self.is_shared else c.hidden
        # The last matrix does not end in the residual: P does.
        options = c.std, c.use_bias, c.dtype

        def inward(name):
            fields, is_shared = (hidden, ("embed", "mlp"), *options), self.is_shared or soft.tied
            return ExpertLinear(channels, *fields, is_shared, name=name)(x_XCD)

        h_XCF = activate(c.mlp.activation, inward)
        h_XCF = constrain(h_XCF, "act_expert", "expert_batch", "act_mlp")
        fields = soft.features(x_XCD.shape[-1]), ("mlp", "norm"), *options
        return ExpertLinear(channels, *fields, self.is_shared, name="down")(h_XCF)


class SoftMLP(nn.Module):
    """P(MLP_c(h_c) + shared MLP(h_c)) for every channel: [X, B, T, D] -> [X, B, T, D]."""

    config: BlockConfig

    @nn.compact
    def __call__(self, h_XBTD):
        c, width = self.config, h_XBTD.shape[-1]
        h_XCD = h_XBTD.reshape(len(h_XBTD), -1, width)
        y_XCD = ChannelMLP(c, is_shared=False, name="experts")(h_XCD)
        if c.soft.shared:
            y_XCD = y_XCD + ChannelMLP(c, is_shared=True, name="shared")(h_XCD)
        y_XCD = constrain(y_XCD, "act_expert", "expert_batch", None)
        # The m D / s features are too few to split over devices.
        fields = width, ("norm", "embed"), c.std_out, c.use_bias, c.dtype
        out = ExpertLinear(c.soft.num, *fields, is_shared=True, name="out")
        return out(y_XCD).reshape(h_XBTD.shape)


class SoftBlock(Block):
    """A block with soft experts."""

    def setup(self):
        c, soft = self.config, self.config.soft
        heads, kv_heads = c.attention.num_heads * soft.num, c.attention.num_kv_heads
        kv_heads = kv_heads if soft.shared_kv else kv_heads * soft.num
        attention = dataclasses.replace(c.attention, num_heads=heads, num_kv_heads=kv_heads)
        fields = dict(channels=soft.num, shared_kv=soft.shared_kv, tied=soft.tied)
        self.attention = make_attention(c, kind=ChannelAttention, config=attention, **fields)
        self.norm_attention = make_norm(c)
        self.dropout_attention_output = _make_dropout(c, "attention_output")
        self.mlp, self.norm_mlp = SoftMLP(c), make_norm(c)
        self.dropout_mlp_output = _make_dropout(c, "mlp_output")

    def __call__(self, x_BTD, call, context=None):
        """`context` = (states [B, S, D], their call, ...): attend to these instead of to x."""
        c, a_XBTD = self.config, self.attention_increment(x_BTD, call, context)
        if a_XBTD is None:  # the call only writes keys and values
            return None
        h_XBTD = mlp_input(c, broadcast(x_BTD, a_XBTD.shape), a_XBTD)
        m_XBTD = self.mlp_increment(constrain(h_XBTD, *BY_CHANNEL), call)
        return merge(c.soft.merge, exchange(a_XBTD + m_XBTD, BY_CHANNEL, BY_ROW))


def _make_dropout(c, site):
    """One dropout for all channels, or a list of learned masks, one for each."""
    if c.dropout.learned and c.dropout.active(site):
        return [make_dropout(c, site) for _ in range(c.soft.num)]
    return make_dropout(c, site)
