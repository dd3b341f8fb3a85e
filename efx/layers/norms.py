"""Normalisation, always in float32."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.parameter import parameter


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * scale (+ bias) over the last axis."""

    eps: float = 1e-5
    use_bias: bool = True
    use_scale: bool = True
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        shape = x.shape
        x = x.astype(jnp.float32)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        if self.use_scale:
            y = y * _vector(self, "scale", nn.initializers.ones, shape)
        if self.use_bias:
            y = y + _vector(self, "bias", nn.initializers.zeros, shape)
        return y.astype(self.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis."""

    eps: float = 1e-5
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        shape = x.shape
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (y * _vector(self, "scale", nn.initializers.ones, shape)).astype(self.dtype)


def unit(x):
    """x at length one along the last axis, in float32; 0 stays 0."""
    x = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-12))


def _vector(module, name, init, shape):
    """A parameter [D], shaped to multiply an array of `shape` [..., D]."""
    vector_D = parameter(module, name, init, shape[-1:], ("norm",))
    return vector_D.reshape((1,) * (len(shape) - 1) + shape[-1:])


def make_norm(kind, *, use_bias, eps, dtype, name):
    """`layernorm` or `rmsnorm` under the given name."""
    if kind == "layernorm":
        return LayerNorm(eps=eps, use_bias=use_bias, dtype=dtype, name=name)
    return RMSNorm(eps=eps, dtype=dtype, name=name)
