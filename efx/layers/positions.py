"""Positions: rotary embedding. Learned positions are an `Embedding` table in the model."""

import math

import jax
import jax.numpy as jnp

from efx import flops, sharding


def rope(x_BTNH, positions_BT, c):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves convention of Llama.

    Pair i of H/2 turns by positions * theta^(-2i/H): element i with element i + H/2. With
    `rope_fraction` H is that part of a head, and the rest of it stays as it is.
    Computed in float32, returned in x's dtype.

    Args:
      c: an `AttentionConfig`.
    """
    size = c.rotary_size(x_BTNH.shape[-1])
    if size == x_BTNH.shape[-1]:
        return _turned(x_BTNH, positions_BT, c)
    turned_BTNR = _turned(x_BTNH[..., :size], positions_BT, c)
    return jnp.concatenate([turned_BTNR, x_BTNH[..., size:]], axis=-1)


def _frequencies(half, c):
    """float32 [half]: angles by which pairs of features turn from one position to the next."""
    frequency = c.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scaling = c.rope_scaling
    if scaling.kind == "none":
        return frequency
    lowered = frequency / scaling.factor
    if scaling.kind == "linear":
        return lowered
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1.0 - kept) * lowered


def _turned(x_BTNH, positions_BT, c):
    head_dim = x_BTNH.shape[-1]
    half = head_dim // 2
    frequency = _frequencies(half, c)
    angle = positions_BT[:, :, None].astype(jnp.float32) * frequency[None, None]  # [B, T, H/2]
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    if sharding.platform() == "tpu" and not flops.is_counting():
        # Halves of a head are fractions of a TPU's vector registers. A product with a matrix that
        # moves each element to its partner's place is exact, and next to free. Its batch axis of
        # one element is for the remat policy "dots", which saves products without batch axes.
        y_BTNH = jax.lax.dot_general(
            x_BTNH[None],
            _quarter_turn(head_dim).astype(x_BTNH.dtype)[None],
            (((4,), (1,)), ((0,), (0,))),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )[0]
        cos, sin = (jnp.concatenate([y, y], axis=-1) for y in (cos, sin))
        return (x_BTNH.astype(jnp.float32) * cos + y_BTNH * sin).astype(x_BTNH.dtype)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def _quarter_turn(head_dim):
    """The matrix that takes a pair (a, b) of elements to (-b, a)."""
    half = jnp.eye(head_dim // 2)
    return jnp.block([[jnp.zeros_like(half), half], [-half, jnp.zeros_like(half)]])
