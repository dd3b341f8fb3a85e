"""Layers in numpy, in float64 and one sequence at a time, that models are compared with."""

import itertools

import numpy as np
from scipy import special


def gelu(x):
    return x * (1 + special.erf(x / np.sqrt(2))) / 2


def linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def mlp(x, p, activation="gelu"):
    up = linear(x, p["up"])
    if activation == "gelu":
        return linear(gelu(up), p["down"])
    gate = linear(x, p["gate"])
    return linear(gate * special.expit(gate) * up, p["down"])


def norm(x, p, kind="rmsnorm", eps=1e-5):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * p["scale"] + p.get("bias", 0)


def rotated(x_TNH, positions_T, theta):
    """Rotary positions: element i of the first half turns with element i of the second."""
    half = x_TNH.shape[-1] // 2
    angle_TI = positions_T[:, None] * theta ** (-np.arange(half) / half)
    z_TNI = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * np.exp(1j * angle_TI)[:, None]
    return np.concatenate([z_TNI.real, z_TNI.imag], axis=-1)


def attention(
    q_TD, kv_SD, p, heads, kv_heads=None, q_at=None, k_at=None, theta=0, window=0, softcap=0
):
    """A query at position t sees the keys at positions up to t, the last `window` of them.

    Args:
      q_at, k_at: positions of the queries and keys; None: 0, 1, ...
      theta: of rotary positions; 0: there are none.
    """
    q_at = np.arange(len(q_TD)) if q_at is None else q_at
    k_at = np.arange(len(kv_SD)) if k_at is None else k_at
    kv_heads = kv_heads or heads

    def projected(x, name, heads):
        y = linear(x, p[name])
        if gain := p.get(f"norm_{name}"):  # of each head, or of the whole width
            y = norm(y.reshape(len(y), -1, len(gain["scale"])), gain)
        return y.reshape(len(x), heads, -1)

    q = projected(q_TD, "query", heads)
    k, v = projected(kv_SD, "key", kv_heads), projected(kv_SD, "value", kv_heads)
    if theta:
        q, k = rotated(q, q_at, theta), rotated(k, k_at, theta)
    out = np.zeros_like(q)
    for h, t in itertools.product(range(heads), range(len(q))):
        seen, kv = k_at <= q_at[t], h // (heads // kv_heads)
        if window:
            seen &= k_at > q_at[t] - window
        scores = k[seen, kv] @ q[t, h] / np.sqrt(q.shape[-1])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[seen, kv] / weights.sum()
    out_TD = out.reshape(len(q), -1)
    return linear(out_TD, p["out"]) if "out" in p else out_TD
