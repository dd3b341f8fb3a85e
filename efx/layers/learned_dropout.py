"""Learned dropout: multiply x by a mask m in [0, 1] that the model computes, at inference too.

    y = x * round(m)                                    see `round_mask`
    elementwise   m = 0.5 cos(a * sg(x) + b) + 0.5      a, b [D] learned
    attention     m = 0.5 cos(u + b) + 0.5              b [D] learned, u by the input:
        hidden              u = Attn(x)
        embedding           u = Attn(E'),  E' = Linear(Attn(emb))
        embedding_linear    u = Linear(E'),  E' = Attn(emb)

Attn is causal multi-head self-attention without output projection, emb the model's input embedding.
E' is computed once for all masks (`MaskInput`). b is not clipped to [0, pi]: cos is even and
periodic, so every b is equivalent to one in that interval. Masks are float32.

Each mask sows means over the elements of its valid tokens: `penalties` into `losses`, `statistics`
into `stats`. The pattern ".*/mask_[a-z]+" matches the parameters of all masks.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers import batch_means
from efx.layers.attend import attend
from efx.layers.config import BlockConfig, ElementwiseConfig
from efx.layers.dropout import StandardDropout
from efx.layers.kv_cache import attend_cached
from efx.layers.linear import matmul
from efx.layers.report import choices_requested, sow_choice
from efx.parallel.sharding import constrain, parameter

# ---- functions of a mask -------------------------------------------------------------------------

# Taylor series of cos(sqrt(h)), highest power first: exact in float32 up to h = (pi / 2)^2.
_COSINE = [(-1) ** n / math.factorial(2 * n) for n in range(6, -1, -1)]
_TWO_PI_HIGH = 6.28125  # 2 pi to eight bits: its products with small integers are exact


def cosine_mask(angle):
    """0.5 cos(angle) + 0.5 in float32, as cos(angle / 2)^2, which stays inside [0, 1].

    A polynomial: XLA's cosine on CPUs is scalar code, repeated in every reduction into which XLA
    fuses the mask. With it a mask, its penalties and statistics would take six times as long.
    """
    u = angle.astype(jnp.float32)
    turns = jnp.round(u / (2 * math.pi))
    u = (u - turns * _TWO_PI_HIGH) - turns * (2 * math.pi - _TWO_PI_HIGH)
    return jnp.square(jnp.polyval(jnp.array(_COSINE, jnp.float32), 0.25 * jnp.square(u), unroll=16))


def round_mask(m, rounding, uniform=None, scale=60.0):
    """The mask to multiply by, in float32.

    "stochastic" and "sigmoid_straight_through" pass the gradient to m unchanged (Bengio et al.
    2013, arXiv 1308.3432, section 4).

    Args:
      rounding: "none"; "stochastic": 1 with probability m, else 0; "sigmoid" and
        "sigmoid_straight_through": sigmoid(scale (m - 1/2)).
      uniform: random numbers in [0, 1) of m's shape for "stochastic"; None: 1 where m >= 0.5.
    """
    if rounding == "none":
        return m
    if rounding == "stochastic":
        hard = (m >= 0.5 if uniform is None else uniform < m).astype(m.dtype)
    else:
        hard = jax.nn.sigmoid(scale * m - scale / 2)
    if rounding == "sigmoid":
        return hard
    return jax.lax.stop_gradient(hard) + (m - jax.lax.stop_gradient(m))


def entropy(m):
    """-m log2 m elementwise; 0 with gradient 0 at m = 0."""
    positive = m >= jnp.finfo(jnp.float32).tiny
    safe = jnp.where(positive, m, 1.0)
    return jnp.where(positive, -safe * jnp.log2(safe), 0.0)


def penalties(m):
    """{loss: value of each element} of the mask before rounding."""
    return {
        "dropout_entropy": entropy(m),
        "dropout_alternate_entropy": entropy(1.0 - m),
        "dropout_l1": m,
        "dropout_squared_l1": 0.5 * jnp.square(m),
    }


def statistics(m, rounded):
    """{statistic: value of each element} of a mask before and after rounding."""
    m, rounded = jax.lax.stop_gradient((m, rounded))
    values = {
        "dropout/near_one": m > 0.9,
        "dropout/near_zero": m < 0.1,
        "dropout/kept": rounded >= 0.5,
        "dropout/entropy": entropy(m),
    }
    return {name: value.astype(jnp.float32) for name, value in values.items()}


# ---- losses, statistics and masks of a module ----------------------------------------------------


def _sow_mask(module, m, rounded, counted, call):
    """Sow means of the penalties and statistics of a mask, and its decisions, where requested.

    Args:
      m, rounded: the mask before and after rounding, [B, T, D], or [B, K, G, T, S] of attention.
      counted: bool, the elements to average over; broadcasts to m.
    """
    if batch_means.is_collecting(module):
        weight = jnp.broadcast_to(counted.astype(jnp.float32), m.shape)
        count = jnp.sum(weight)
        for collection, values in (("losses", penalties(m)), ("stats", statistics(m, rounded))):
            for name, value in values.items():
                mean = batch_means.Mean(jnp.sum(value * weight), count)
                batch_means.sow(module, collection, name, mean)
    if choices_requested(module):
        sow_choice(module, "kept", _mean_of_tokens(rounded >= 0.5, counted), call)
        sow_choice(module, "mask", _mean_of_tokens(rounded, counted), call)


def _mean_of_tokens(values, counted):
    """Mean [B, T] over the counted elements of each token."""
    axes = (*range(1, values.ndim - 2), -1)  # T is the last axis but one
    counted = jnp.broadcast_to(counted, values.shape)
    total_BT = jnp.sum(jnp.where(counted, values, 0), axes, jnp.float32)
    return total_BT / jnp.maximum(jnp.sum(counted, axes), 1)


def _apply_mask(module, x_BTD, m_BTD, rounded_BTD, call):
    """x * rounded mask, computed in float32, in the dtype of x; sows what `_sow_mask` sows."""
    if not call.decode:
        _sow_mask(module, m_BTD, rounded_BTD, call.valid_mask(len(x_BTD))[..., None], call)
    return (x_BTD.astype(jnp.float32) * rounded_BTD).astype(x_BTD.dtype)


# ---- elementwise ---------------------------------------------------------------------------------


def _frequency_and_phase(module, config, axis, size):
    """The parameters a and b, each [size]."""

    def normal(mean, std):
        return lambda key, shape, dtype: mean + std * jax.random.normal(key, shape, dtype)

    a_init, b_init = normal(config.a_mean, config.a_std), normal(config.b_mean, config.b_std)
    a = parameter(module, "mask_frequency", a_init, (size,), (axis,))
    return a, parameter(module, "mask_phase", b_init, (size,), (axis,))


def _elementwise_mask(config, x, a, b):
    """(m, rounded) of x; a and b broadcast to it."""
    x = x.astype(jnp.float32)
    m = cosine_mask(a * (jax.lax.stop_gradient(x) if config.detach else x) + b)
    return m, round_mask(m, "sigmoid" if config.sharpen else "none")


class ElementwiseMask(nn.Module):
    """x [B, T, D] -> x * m, m = 0.5 cos(a * sg(x) + b) + 0.5, or the sigmoid of `sharpen`."""

    config: ElementwiseConfig

    @nn.compact
    def __call__(self, x_BTD, call):
        a_D, b_D = _frequency_and_phase(self, self.config, "norm", x_BTD.shape[-1])
        masks = _elementwise_mask(self.config, x_BTD, a_D[None, None], b_D[None, None])
        return _apply_mask(self, x_BTD, *masks, call)


class ElementwiseProbsMask(nn.Module):
    """The elementwise mask of attention probabilities, with a and b [context] by key position.

    Routed tokens and cache entries keep their positions, so also their a and b. The masked
    probabilities are not renormalised. Means count only pairs of queries and keys that the
    attention mask allows.
    """

    config: ElementwiseConfig
    context: int

    @nn.compact
    def drop_probs(self, probs_BKGTS, allowed_BTS, call, key_positions_BS):
        """Masked probabilities; see `attend.attend`."""
        a_and_b_2S = jnp.stack(_frequency_and_phase(self, self.config, "position", self.context))
        a_and_b_2BS = a_and_b_2S[:, jnp.clip(key_positions_BS, 0, self.context - 1)]
        a, b = a_and_b_2BS[:, :, None, None, None]
        m_BKGTS, rounded_BKGTS = _elementwise_mask(self.config, probs_BKGTS, a, b)
        if not call.decode:
            counted_BTS = allowed_BTS & call.valid_mask(len(probs_BKGTS))[..., None]
            _sow_mask(self, m_BKGTS, rounded_BKGTS, counted_BTS[:, None, None], call)
        return probs_BKGTS * rounded_BKGTS


# ---- attention -----------------------------------------------------------------------------------


def _linear(module, name, x_BTD, axes, block):
    """x W [B, T, D] in the model's dtype."""
    init = nn.initializers.normal(block.std)
    kernel = parameter(module, name, init, (x_BTD.shape[-1],) * 2, axes)
    return matmul(x_BTD.astype(block.dtype), kernel.astype(block.dtype))


class MaskAttention(nn.Module):
    """x [B, T, D] -> u [B, T, D]: causal multi-head self-attention without output projection.

    It has the window of the block's attention, but no rotary positions and no softcap.
    """

    block: BlockConfig

    @property
    def dtype(self):  # `attend_cached` reads it
        return self.block.dtype

    @nn.compact
    def __call__(self, x_BTD, call):
        c, num_heads = self.block.attention, self.block.attention.num_heads
        batch, length, width = x_BTD.shape
        head_dim = width // num_heads

        def project(name):
            y_BTD = _linear(self, name, x_BTD, ("embed", "heads"), self.block)
            y_BTNH = y_BTD.reshape(batch, length, num_heads, head_dim)
            return constrain(y_BTNH, "batch", "length", "act_heads", None)

        q_BTNH, k_BTNH, v_BTNH = (project(f"mask_{name}") for name in ("query", "key", "value"))
        options = dict(scale=c.score_factor * head_dim**-0.5, window=c.window)
        if call.decode:
            # A block with `kv_for_skipped` has cached the keys of all tokens and only reads now.
            # Its masks attend to the computed tokens, so they write as well.
            call = call.with_cache(access="both", kv_size=0)
            u_BTNH = attend_cached(self, q_BTNH, k_BTNH, v_BTNH, call, call, None, **options)
        else:
            options |= dict(chunk=c.chunk, kernel=c.kernel, has_gaps=call.has_gaps)
            options |= dict(positions_BT=call.positions_BT, segment_ids_BT=call.segment_ids_BT)
            u_BTNH = attend(q_BTNH, k_BTNH, v_BTNH, **options)
        return u_BTNH.reshape(batch, length, width)


class MaskInput(nn.Module):
    """emb [B, T, D] -> E' [B, T, D]; `detach` stops the gradient to emb."""

    block: BlockConfig

    @nn.compact
    def __call__(self, embedded_BTD, call):
        c = self.block.dropout.attention
        if c.detach:
            embedded_BTD = jax.lax.stop_gradient(embedded_BTD)
        x_BTD = MaskAttention(self.block, name="attention")(embedded_BTD, call)
        if c.input == "embedding":
            x_BTD = _linear(self, "mask_linear", x_BTD, ("heads", "embed"), self.block)
        return constrain(x_BTD, "batch", "length", "act_embed")


class AttentionMask(nn.Module):
    """x [B, T, D] -> x * round(m), m = 0.5 cos(u + b) + 0.5, b [D]."""

    block: BlockConfig

    @nn.compact
    def __call__(self, x_BTD, call):
        c = self.block.dropout.attention
        u_BTD = call.mask_input_BTD
        if c.input == "hidden":
            u_BTD = jax.lax.stop_gradient(x_BTD) if c.detach else x_BTD
        if c.input == "embedding_linear":
            u_BTD = _linear(self, "mask_linear", u_BTD, ("heads", "embed"), self.block)
        else:
            u_BTD = MaskAttention(self.block, name="attention")(u_BTD, call)
        b_init = nn.initializers.constant(c.shift_init)
        b_D = parameter(self, "mask_shift", b_init, x_BTD.shape[-1:], ("norm",))
        m_BTD = cosine_mask(u_BTD.astype(jnp.float32) + b_D[None, None])
        uniform = None
        if c.rounding == "stochastic" and call.train:
            uniform = jax.random.uniform(self.make_rng("dropout"), m_BTD.shape, jnp.float32)
        rounded_BTD = round_mask(m_BTD, c.rounding, uniform, c.sigmoid_scale)
        return _apply_mask(self, x_BTD, m_BTD, rounded_BTD, call)


# ---- from the config -----------------------------------------------------------------------------


def make_dropout(block, site, name=None):
    """Make the dropout module of a site of `dropout.sites`, or return None if it has none."""
    c = block.dropout
    if not c.active(site):
        return None
    if c.kind == "standard":
        return StandardDropout(c.rate, name=name)
    if c.kind == "attention":
        return AttentionMask(block, name=name)
    if site == "attention_probs":
        return ElementwiseProbsMask(c.elementwise, block.context, name=name)
    return ElementwiseMask(c.elementwise, name=name)


def make_mask_input(block, name=None):
    """Make the module of `TokenContext.mask_input_BTD`, or return None if no mask reads it."""
    return MaskInput(block, name=name) if block.dropout.has_mask_input else None
