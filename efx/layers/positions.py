"""Positions: rotary embedding. Learned positions are an `Embedding` table in the model."""

import jax.numpy as jnp


def rope(x_BTNH, positions_BT, theta):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves convention of Llama.

    Pair i of H/2 turns by positions * theta^(-2i/H): element i with element i + H/2.
    Computed in float32, returned in x's dtype.
    """
    half = x_BTNH.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[:, :, None].astype(jnp.float32) * frequency[None, None]  # [B, T, H/2]
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
