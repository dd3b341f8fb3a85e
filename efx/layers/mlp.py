"""The dense feed-forward layer."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers.linear import Linear
from efx.sharding import constrain


@jax.custom_vjp
def exact_gelu(x):
    """x Phi(x), Phi of the normal distribution (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    The backward pass computes Phi again from x; automatic differentiation would keep five arrays
    of the size of x, which are the largest activations of a model.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _normal_cdf(x):
    return 0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5))


def _exact_gelu_forward(x):
    return exact_gelu(x), x


def _exact_gelu_backward(x, d):
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (1.0 / math.sqrt(2.0 * math.pi))
    return ((d * (_normal_cdf(wide) + wide * density)).astype(x.dtype),)


exact_gelu.defvjp(_exact_gelu_forward, _exact_gelu_backward)


def activate(activation, inward):
    """h [..., F]; `inward(name)` is the input times the matrix `name`."""
    if activation == "swiglu":
        return jax.nn.silu(inward("gate")) * inward("up")
    gelu = jax.nn.gelu if activation == "gelu_tanh" else exact_gelu
    return gelu(inward("up"))


class MLP(nn.Module):
    """act(x W_up) W_down, or for swiglu (silu(x W_gate) * x W_up) W_down (Shazeer 2020)."""

    hidden: int
    activation: str
    use_bias: bool
    std: float
    std_out: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD, call=None):
        """[B, T, D]. `call` is not used: every token is treated alike."""

        def inward(name):
            return Linear(
                self.hidden, ("embed", "mlp"), self.std, self.use_bias, self.dtype, name=name
            )(x_BTD)

        h_BTF = constrain(activate(self.activation, inward), "batch", "length", "act_mlp")
        return Linear(
            x_BTD.shape[-1], ("mlp", "embed"), self.std_out, self.use_bias, self.dtype, name="down"
        )(h_BTF)
