"""Causal self-attention and rotary positions. The arithmetic of scores is in `attend.py`."""

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from efx.layers.attend import attend, attend_context
from efx.layers.config import AttentionConfig
from efx.layers.kv_cache import attend_cached
from efx.layers.linear import Linear, mark_projection
from efx.layers.norms import RMSNorm
from efx.parallel import sharding
from efx.parallel.sharding import constrain


class Attention(nn.Module):
    """Multi-head attention; returns the increment of the residual.

    Attributes:
      config: resolved; the N query heads share K heads of keys and values.
      std, std_out: initialisation of the input and output projections.
      probs_dropout: factory of a module that drops attention probabilities, or None.
      width: of the output.
    """

    config: AttentionConfig
    std: float
    std_out: float
    norm_eps: float
    probs_dropout: Callable | None
    dtype: jnp.dtype
    width: int

    @nn.compact
    def __call__(self, x_BTD, call, context=None):
        """Attention from the tokens x to themselves, or to `context` = (states [B, S, D], their
        `TokenContext`; None: other states of the same tokens, S = T).

        While decoding, the keys and values go into the cache; see `CacheView.access`. The result is
        None if the call only writes.
        """
        c = self.config
        states_BSD, context_call = (x_BTD, None) if context is None else context
        key_call = context_call or call
        q_BTNH = k_BSKH = v_BSKH = None
        if call.access != "write":
            q_BTNH = self._heads("query", x_BTD, call)
        if call.access != "read":
            k_BSKH = self._heads("key", states_BSD, key_call)
            v_BSKH = self._heads("value", states_BSD, key_call)
        dropout = None if self.probs_dropout is None else self.probs_dropout(name="probs_dropout")
        options = dict(scale=c.factor, window=c.window, softcap=c.softcap)
        if call.decode:
            # Prefill of empty rows writes the cache, but need not read it.
            reads_cache = not call.cache.first or dropout is not None
            cache_call = call if reads_cache else call.with_cache(access="write")
            arrays = q_BTNH, k_BSKH, v_BSKH
            out_BTNH = attend_cached(self, *arrays, cache_call, key_call, dropout, **options)
            if reads_cache:
                return None if out_BTNH is None else self._out(out_BTNH)
        if dropout is not None:
            options["drop_probs"] = partial(
                dropout.drop_probs, call=call, key_positions_BS=key_call.positions_BT
            )
        if context_call is not None:
            out_BTNH = attend_context(q_BTNH, k_BSKH, v_BSKH, call, key_call, **options)
        else:
            options |= dict(chunk=c.chunk, kernel=c.kernel, has_gaps=call.has_gaps)
            options |= dict(positions_BT=call.positions_BT, segment_ids_BT=call.segment_ids_BT)
            out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, **options)
        return self._out(out_BTNH)

    def _heads(self, name, x_BTD, call):
        """Queries, keys or values [B, T, N or K, H]."""
        c = self.config
        heads, axis = (c.num_heads, "heads") if name == "query" else (c.num_kv_heads, "kv_heads")
        features, axes, use_bias = heads * c.head_dim, ("embed", axis), c.bias != "none"
        y = Linear(features, axes, self.std, use_bias, self.dtype, name=name)(x_BTD)
        shape = *x_BTD.shape[:2], heads, c.head_dim
        if name != "value":
            if c.qk_norm != "none":
                norm = RMSNorm(eps=self.norm_eps, dtype=self.dtype, name=f"norm_{name}")
                is_head = c.qk_norm == "head"
                y = norm(y.reshape(shape)) if is_head else self._norm_width(norm, y, heads)
            if c.rope_theta:
                y = rope(y.reshape(shape), call.positions_BT, c)
                # On a GPU remat saves rotated queries and keys: rotating them again takes two
                # passes over memory.
                if c.qk_norm == "none" and sharding.platform() == "gpu":
                    y = mark_projection(y)
        return constrain(y.reshape(shape), "batch", "length", f"act_{axis}", None)

    def _norm_width(self, norm, y, heads):
        return norm(y)

    def _out(self, out_BTNH):
        out_BTD = out_BTNH.reshape(*out_BTNH.shape[:2], -1)
        if self.width is None:
            return out_BTD
        axes, use_bias = ("heads", "embed"), self.config.bias == "all"
        return Linear(self.width, axes, self.std_out, use_bias, self.dtype, name="out")(out_BTD)


# ---- rotary positions --------------------------------------------------------------------------


def rope(x_BTNH, positions_BT, c):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with the halves of Llama.

    Features i and i + H/2 rotate by positions * theta^(-2i/H). With `rope_fraction` H is that
    fraction of a head, whose other features do not rotate. Computed in float32, returned in the
    dtype of x. c: an `AttentionConfig`.
    """
    size, dtype = c.rotary_size(x_BTNH.shape[-1]), x_BTNH.dtype
    x_BTNR = x_BTNH if size == x_BTNH.shape[-1] else x_BTNH[..., :size]
    position_BT1 = positions_BT[:, :, None].astype(jnp.float32)
    angle_BTF = position_BT1 * _frequencies(size // 2, c)[None, None]
    cos, sin = jnp.cos(angle_BTF)[:, :, None], jnp.sin(angle_BTF)[:, :, None]
    a, b = jnp.split(x_BTNR.astype(jnp.float32), 2, axis=-1)
    y_BTNR = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    y_BTNR = y_BTNR.astype(dtype)
    if size == x_BTNH.shape[-1]:
        return y_BTNR
    return jnp.concatenate([y_BTNR, x_BTNH[..., size:]], axis=-1)


def _frequencies(pairs, c):
    """float32 [pairs]: angle in radians by which each pair of features rotates per position."""
    frequency = c.rope_theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    scaling = c.rope_scaling
    if scaling.kind == "none":
        return frequency
    scaled = frequency / scaling.factor
    if scaling.kind == "linear":
        return scaled
    # Llama 3: fast pairs keep their frequency, slow ones are scaled, the others interpolate.
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    weight = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return weight * frequency + (1.0 - weight) * scaled
