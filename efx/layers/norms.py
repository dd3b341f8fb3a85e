"""Layer norm and RMS norm, computed in float32."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.parallel.sharding import parameter


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * scale (+ bias) over the last axis."""

    eps: float = 1e-5
    use_bias: bool = True
    use_scale: bool = True
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32)
        y = _normalize(x - jnp.mean(x, axis=-1, keepdims=True), self.eps)
        if self.use_scale:
            y = y * _vector(self, "scale", nn.initializers.ones, x)
        if self.use_bias:
            y = y + _vector(self, "bias", nn.initializers.zeros, x)
        return y.astype(self.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis."""

    eps: float = 1e-5
    dtype: jnp.dtype = jnp.float32
    use_bias: bool = False  # a field of every norm; an RMS norm has no bias

    @nn.compact
    def __call__(self, x):
        y = _normalize(x.astype(jnp.float32), self.eps)
        return (y * _vector(self, "scale", nn.initializers.ones, x)).astype(self.dtype)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def _vector(module, name, init, x):
    """A parameter [D] with the rank of x [..., D]."""
    vector_D = parameter(module, name, init, x.shape[-1:], ("norm",))
    return vector_D.reshape((1,) * (x.ndim - 1) + vector_D.shape)


def _normalize(x, eps):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def l2_normalize(x):
    """x / |x| over the last axis, in float32; 0 stays 0."""
    x = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-12))
