"""Learned dropout: a mask that the model computes from its input, on at inference too.

A mask m in [0, 1] multiplies x where dropout stood. Two forms:
    elementwise   m = 0.5 cos(a * sg(x) + b) + 0.5, with learned a and b for each feature
    attention     m = 0.5 cos(u + b) + 0.5, u a causal self-attention of its own; m may be rounded
The attention reads the activations that are masked, or E', made once from the model's input
embedding for all masks (`MaskInput`). E' has a row for every token; a routed block's masks attend
over the rows of the tokens that the block routes, as over the activations of these.
No b need be kept inside [0, pi]: cos is even and periodic, so any b is one in there with u or -u,
which the value matrix learns.

Every mask sows means over its elements, of the mask before rounding and of valid tokens only:
losses `dropout_entropy`, `dropout_alternate_entropy`, `dropout_l1`, `dropout_squared_l1`, and the
stats `dropout/near_one`, `dropout/near_zero`, `dropout/kept`, `dropout/entropy`. Where the
collection `masks` is asked for, it also sows the rounded mask itself (see efx/changes.py).

All parameters are leaves called `mask_...`: the pattern ".*/mask_[a-z]+" is all of them, and weight
decay, by its default pattern, none. All arithmetic of masks is float32.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import means
from efx.layers.attend import attend
from efx.layers.config import ElementwiseConfig, MaskAttentionConfig
from efx.layers.dropout import ProbsFn, StandardDropout
from efx.layers.kv_cache import attend_cached
from efx.layers.mask_dropout.functions import (
    cosine_mask,
    penalties,
    rounded,
    sharpened,
    statistics,
)
from efx.layers.report import choices_requested, sow_choice
from efx.parameter import parameter
from efx.sharding import constrain

# ---- what is reported of a mask ------------------------------------------------------------------


def _sums(m, applied, weight):
    """(sums of penalties, sums of statistics, number of elements); `weight` broadcasts to m."""
    weight = jnp.broadcast_to(weight.astype(jnp.float32), m.shape)

    def total(values):
        return {name: jnp.sum(value * weight) for name, value in values.items()}

    return total(penalties(m)), total(statistics(m, applied)), jnp.sum(weight)


def _sow(module, sums):
    """Means of `_sums` into the collections `losses` and `stats`."""
    losses, stats, count = sums
    for collection, values in (("losses", losses), ("stats", stats)):
        for name, value in values.items():
            means.sow(module, collection, name, means.Mean(value, count))


def _report(module, m_BTD, applied_BTD, call):
    if not call.decode:
        valid_BT1 = call.real(m_BTD.shape[0])[..., None]
        if means.wanted(module):
            _sow(module, _sums(m_BTD, applied_BTD, valid_BT1))
        _sow_mask(module, [(applied_BTD, valid_BT1)])
        if choices_requested(module):
            kept_BTD = (applied_BTD >= 0.5).astype(jnp.float32)
            sow_choice(module, "kept", jnp.mean(kept_BTD, axis=-1), call)
            sow_choice(module, "mask", jnp.mean(applied_BTD, axis=-1), call)


def _masks_wanted(module):
    return module.is_mutable_collection("masks") and not module.is_initializing()


def _sow_mask(module, parts):
    """The rounded mask into the collection `masks`: int8 0 or 1, -1 for what does not count.

    Args:
      parts: [(the applied mask, which of it counts)] of the arrays that the mask comes in, which
        are sown as one value: however a kernel cuts its rows, it is one mask.
    """
    if _masks_wanted(module):
        rounded = [jnp.where(counted, applied >= 0.5, -1) for applied, counted in parts]
        module.sow("masks", "dropout/changed", tuple(part.astype(jnp.int8) for part in rounded))


def _param(module, name, init, axes, *shape):
    return parameter(module, name, init, shape, axes)


# ---- elementwise -------------------------------------------------------------------------------


def _frequency_and_phase(module, c, axes, size):
    """a and b, each [size]."""

    def normal(mean, std):
        return lambda key, shape, dtype: mean + std * jax.random.normal(key, shape, dtype)

    return (
        _param(module, "mask_frequency", normal(c.a_mean, c.a_std), axes, size),
        _param(module, "mask_phase", normal(c.b_mean, c.b_std), axes, size),
    )


def _elementwise(c, x, a, b):
    """(m, the mask that is applied) for x, a and b that broadcast."""
    x = x.astype(jnp.float32)
    m = cosine_mask(a * (jax.lax.stop_gradient(x) if c.detach else x) + b)
    return m, sharpened(m, c.sharpen_scale) if c.sharpen else m


class ElementwiseMask(nn.Module):
    """x [B, T, D] -> x * m, m = 0.5 cos(a * sg(x) + b) + 0.5 with a, b [D]."""

    config: ElementwiseConfig

    @nn.compact
    def __call__(self, x_BTD, call):
        width = x_BTD.shape[-1]
        a_D, b_D = _frequency_and_phase(self, self.config, ("norm",), width)
        m_BTD, applied_BTD = _elementwise(self.config, x_BTD, a_D[None, None], b_D[None, None])
        _report(self, m_BTD, applied_BTD, call)
        return (x_BTD.astype(jnp.float32) * applied_BTD).astype(x_BTD.dtype)


class ElementwiseProbsMask(nn.Module):
    """The same for attention probabilities, with a and b for each position of a key: [context].

    By position, not by place, so that a routed or packed subsequence and a cache, whose slots lie
    in order of arrival, meet the same a and b. Probabilities are not normalised again. Pairs that
    attention does not allow count in no penalty and no statistic.
    """

    config: ElementwiseConfig
    context: int

    @nn.compact
    def probs_fn(self, call, k_positions_BS):
        a_S, b_S = _frequency_and_phase(self, self.config, ("position",), self.context)
        wanted, masks = means.wanted(self), choices_requested(self) or _masks_wanted(self)
        return _ProbsFn(self.config, a_S, b_S, call, k_positions_BS, wanted, masks)

    @nn.nowrap
    def report(self, probs_fn):
        sums = [sums for sums, _ in probs_fn.seen if sums]
        if sums:
            sums = [jax.tree.map(lambda y: jnp.sum(y, axis=0), some) for some in sums]
            _sow(self, jax.tree.map(lambda *parts: sum(parts), *sums))
        masks = [
            jax.tree.map(lambda y, i=i: y[i], some)
            for _, some in probs_fn.seen
            if some
            for i in range(len(some[0]))
        ]
        if masks:
            _sow_mask(self, masks)
        if choices_requested(self) and masks:
            for name, of in (("kept", lambda applied: applied >= 0.5), ("mask", lambda m: m)):
                shares = [_share(of(applied), counted) for applied, counted in masks]
                sow_choice(self, name, jnp.concatenate(shares, axis=1), probs_fn.call)


def _share(values_BKGTS, counted_BKGTS):
    """[B, T]: the mean over the keys and heads of each query that count."""
    counted_BKGTS = jnp.broadcast_to(counted_BKGTS, values_BKGTS.shape)
    total_BT = jnp.sum(jnp.where(counted_BKGTS, values_BKGTS, 0), (1, 2, 4), jnp.float32)
    return total_BT / jnp.maximum(jnp.sum(counted_BKGTS, (1, 2, 4)), 1)


class _ProbsFn(ProbsFn):
    """Masks probabilities. What it returns beside them is a pair: the sums of what is to be
    reported, if `wanted`, and the masks themselves with what counts of them, if `masks`."""

    def __init__(self, config, a_S, b_S, call, k_positions_BS, wanted, masks):
        super().__init__()
        place_BS = jnp.clip(k_positions_BS, 0, a_S.shape[0] - 1)
        self.a_BS, self.b_BS, self.config, self.call = a_S[place_BS], b_S[place_BS], config, call
        self.wanted, self.masks = wanted and not call.decode, masks and not call.decode

    def __call__(self, probs_BKGTS, q_start, k_start, allowed_BTS):
        batch, *_, queries, keys = probs_BKGTS.shape
        a, b = (
            jax.lax.dynamic_slice_in_dim(y_BS, k_start, keys, axis=1)[:, None, None, None]
            for y_BS in (self.a_BS, self.b_BS)
        )
        m_BKGTS, applied_BKGTS = _elementwise(self.config, probs_BKGTS, a, b)
        sums = masks = ()
        if self.wanted or self.masks:
            valid_BT = self.call.real(batch)
            valid_BT = jax.lax.dynamic_slice_in_dim(valid_BT, q_start, queries, axis=1)
            counted_BKGTS = (allowed_BTS & valid_BT[..., None])[:, None, None]
            if self.wanted:
                sums = _sums(m_BKGTS, applied_BKGTS, counted_BKGTS)
            if self.masks:
                masks = (applied_BKGTS, counted_BKGTS)
        return probs_BKGTS * applied_BKGTS, (sums, masks)


# ---- attention ---------------------------------------------------------------------------------


class MaskAttention(nn.Module):
    """u [B, T, D]: causal multi-head self-attention without output projection, uncapped, without
    rotary positions; it sees as far back as the model's own attention."""

    num_heads: int
    mup: bool
    window: int
    chunk: int
    kernel: str
    std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD, call):
        batch, length, width = x_BTD.shape
        head_dim = width // self.num_heads
        x_ND = x_BTD.astype(self.dtype).reshape(batch * length, width)

        def heads(name):
            init = nn.initializers.normal(self.std)
            kernel = _param(self, f"mask_{name}", init, ("embed", "heads"), width, width)
            y_BTNH = jnp.dot(x_ND, kernel.astype(self.dtype)).reshape(
                batch, length, self.num_heads, head_dim
            )
            return constrain(y_BTNH, "batch", "length", "act_heads", None)

        q_BTNH, k_BTNH, v_BTNH = heads("query"), heads("key"), heads("value")
        options = dict(scale=1.0 / head_dim if self.mup else head_dim**-0.5, window=self.window)
        if call.decode:
            # "read" is said to a block whose keys all tokens have written; these masks see only
            # the tokens that are routed, and write theirs here.
            call = call.with_cache(access="both", kv_size=0)
            u_BTNH = attend_cached(self, q_BTNH, k_BTNH, v_BTNH, call, call, None, options)
        else:
            u_BTNH = attend(
                q_BTNH,
                k_BTNH,
                v_BTNH,
                chunk=self.chunk,
                positions_BT=call.positions_BT,
                segment_ids_BT=call.segment_ids_BT,
                gaps=call.has_gaps,
                kernel=self.kernel,
                **options,
            )
        return u_BTNH.reshape(batch, length, width)


def _mask_linear(module, x_BTD, features, attention):
    """x W [B, T, features], started and computed as the matrices of this `MaskAttention` are."""
    width, dtype = x_BTD.shape[-1], attention.dtype
    axes = ("heads", "embed" if features == width else None)
    init = nn.initializers.normal(attention.std)
    kernel = _param(module, "mask_linear", init, axes, width, features)
    x_ND = x_BTD.astype(dtype).reshape(-1, width)
    return jnp.dot(x_ND, kernel.astype(dtype)).reshape(*x_BTD.shape[:-1], features)


class MaskInput(nn.Module):
    """What all masks of a model read, made of its input embedding: E' = Linear(Attn(emb)), or
    Attn(emb) with input "embedding_linear". [B, T, D] -> [B, T, D].

    Detached is the embedding, not E': this module learns by the masks alone.
    """

    config: MaskAttentionConfig
    attention: MaskAttention

    @nn.compact
    def __call__(self, embedded_BTD, call):
        if self.config.detach:
            embedded_BTD = jax.lax.stop_gradient(embedded_BTD)
        x_BTD = self.attention(embedded_BTD, call)
        if self.config.input == "embedding":
            x_BTD = _mask_linear(self, x_BTD, x_BTD.shape[-1], self.attention)
        return constrain(x_BTD, "batch", "length", "act_embed")


class AttentionMask(nn.Module):
    """x [B, T, D] -> x * m, m = 0.5 cos(u + b) + 0.5 rounded as configured, b [D].

    u is `attention` of x or, with input "embedding", of E' (`call.mask_input_BTD`); with
    "embedding_linear" a linear layer of the latter. With granularity "token" a linear layer makes
    one u of every token, and there is one b.

    Attributes:
      attention: a `MaskAttention` not yet bound to a scope.
    """

    config: MaskAttentionConfig
    attention: MaskAttention

    def __call__(self, x_BTD, call):
        applied_BTD = self.mask(x_BTD, call)
        return (x_BTD.astype(jnp.float32) * applied_BTD).astype(x_BTD.dtype)

    @nn.compact
    def mask(self, x_BTD, call):
        """What multiplies x: float32 [B, T, D] or [B, T, 1]. With an input of the embedding it does
        not depend on x."""
        c = self.config
        u_BTD = self.angle(x_BTD, call)
        out = u_BTD.shape[-1]
        shift = nn.initializers.constant(c.shift_init)
        b_D = _param(self, "mask_shift", shift, ("norm",), out)
        m_BTD = cosine_mask(u_BTD.astype(jnp.float32) + b_D[None, None])
        uniform = None
        if c.rounding == "stochastic" and call.train:
            uniform = jax.random.uniform(self.make_rng("dropout"), m_BTD.shape, jnp.float32)
        applied_BTD = rounded(m_BTD, c.rounding, uniform, c.sigmoid_scale)
        _report(self, m_BTD, applied_BTD, call)
        return applied_BTD

    def angle(self, x_BTD, call):
        """u: float32 or the model's type, [B, T, D] or [B, T, 1]."""
        c = self.config
        if c.input == "hidden":
            u_BTD = self.attention(jax.lax.stop_gradient(x_BTD) if c.detach else x_BTD, call)
        elif c.input == "embedding":
            u_BTD = self.attention(call.mask_input_BTD, call)
        else:
            u_BTD = call.mask_input_BTD
        features = 1 if c.granularity == "token" else x_BTD.shape[-1]
        if c.input == "embedding_linear" or features == 1:
            u_BTD = _mask_linear(self, u_BTD, features, self.attention)
        return u_BTD


# ---- from the config ---------------------------------------------------------------------------


def _mask_attention(b):
    """The attention of one mask of a block `b` (`BlockConfig`), not yet bound."""
    heads = b.dropout.attention.num_heads
    a = b.attention
    return MaskAttention(
        heads, a.scale == "mup", a.window, a.chunk, a.kernel, b.std, b.dtype, parent=None
    )


def make_mask_input(b, name=None):
    """What makes `Tokens.mask_input_BTD` for blocks like `b`, or None."""
    if not b.dropout.shared:
        return None
    return MaskInput(b.dropout.attention, _mask_attention(b), name=name)


def make_dropout(b, site, name=None):
    """The module at `site` of a model whose blocks are like `b`, or None where there is none."""
    c = b.dropout
    if not c.active(site):
        return None
    if c.kind == "standard":
        return StandardDropout(c.rate, name=name)
    if c.kind == "attention":
        return AttentionMask(c.attention, _mask_attention(b), name=name)
    if site == "attention_probs":
        return ElementwiseProbsMask(c.elementwise, b.context, name=name)
    return ElementwiseMask(c.elementwise, name=name)
