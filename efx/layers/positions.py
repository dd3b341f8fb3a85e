"""Positions: rotary embedding. Learned positions are an `Embedding` table in the model."""

import jax
import jax.numpy as jnp

from efx import sharding


def rope(x_BTNH, positions_BT, theta):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves convention of Llama.

    Pair i of H/2 turns by positions * theta^(-2i/H): element i with element i + H/2.
    Computed in float32, returned in x's dtype.
    """
    head_dim = x_BTNH.shape[-1]
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[:, :, None].astype(jnp.float32) * frequency[None, None]  # [B, T, H/2]
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    if sharding.platform() == "tpu":
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
