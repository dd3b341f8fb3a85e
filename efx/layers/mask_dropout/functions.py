"""Masks as functions: the cosine that makes one, how it is rounded, its penalties and statistics.

See efx/layers/learned_dropout.py for where they are used. All arithmetic is float32.
"""

import math

import jax
import jax.numpy as jnp

# Of cos(sqrt(h)), highest power first; enough for float32 up to h = (pi / 2)^2.
_COSINE = [(-1) ** n / math.factorial(2 * n) for n in range(6, -1, -1)]
_TURN = 6.28125  # 2 pi in eight bits: its multiples are exact


def cosine_mask(angle):
    """0.5 cos(angle) + 0.5 in float32, as cos(angle / 2)^2, which never leaves [0, 1].

    By a polynomial: the cosine of XLA on CPUs goes element by element, and once more in every sum
    of penalties or statistics that the mask is fused into. A mask with all of these takes a sixth
    of the time so.
    """
    u = angle.astype(jnp.float32)
    turns = jnp.round(u / (2 * math.pi))
    u = (u - turns * _TURN) - turns * (2 * math.pi - _TURN)
    return jnp.square(jnp.polyval(jnp.array(_COSINE, jnp.float32), 0.25 * jnp.square(u), unroll=16))


def sharpened(m, scale):
    """sigmoid(scale (m - 1/2)): the larger `scale`, the nearer to 0 below a half, to 1 above."""
    return jax.nn.sigmoid(scale * m - scale / 2)


def rounded(m, rounding, uniform=None, scale=None):
    """The mask that is applied.

    Args:
      m: float32 in [0, 1].
      rounding: "none"; "stochastic": 1 with probability m, else 0, and without `uniform` 1 where
        m >= 0.5; "sigmoid": `sharpened`; "sigmoid_straight_through". The gradient of
        "stochastic" and "sigmoid_straight_through" is that of m (Bengio et al. 2013,
        arXiv 1308.3432, section 4).
      uniform: random numbers in [0, 1) of m's shape, or None.
      scale: of the two sigmoids.
    """
    if rounding == "none":
        return m
    if rounding == "sigmoid":
        return sharpened(m, scale)
    if rounding == "sigmoid_straight_through":
        hard = sharpened(m, scale)
    elif uniform is None:
        hard = (m >= 0.5).astype(m.dtype)
    else:
        hard = (uniform < m).astype(m.dtype)
    return jax.lax.stop_gradient(hard) + (m - jax.lax.stop_gradient(m))


def entropy(m):
    """-m log2 m elementwise, 0 with gradient 0 at m = 0."""
    positive = m >= jnp.finfo(jnp.float32).tiny
    safe = jnp.where(positive, m, 1.0)
    return jnp.where(positive, -safe * jnp.log2(safe), 0.0)


def penalties(m):
    """{loss: its value at each element} of an unrounded mask; their means are what is sown."""
    return {
        "dropout_entropy": entropy(m),
        "dropout_alternate_entropy": entropy(1.0 - m),
        "dropout_l1": m,
        "dropout_squared_l1": 0.5 * jnp.square(m),
    }


def statistics(m, applied):
    """{name: its value at each element}; `kept`: whether the applied mask is nearer 1 than 0."""
    m, applied = jax.lax.stop_gradient((m, applied))
    values = {
        "dropout/near_one": m > 0.9,
        "dropout/near_zero": m < 0.1,
        "dropout/kept": applied >= 0.5,
        "dropout/entropy": entropy(m),
    }
    return {name: value.astype(jnp.float32) for name, value in values.items()}
