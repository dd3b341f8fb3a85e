"""The dense feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers.linear import Linear
from efx.parallel.sharding import constrain


@jax.checkpoint
def exact_gelu(x):
    """x Phi(x), Phi of the normal distribution (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    Recomputed in the backward pass: its intermediate results would be the largest activations of a
    model. In float32, because erfc in bfloat16 has 8 bits.
    """
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def activate(activation, project):
    """Hidden activations [..., F]; `project(name)` is the input times the matrix `name`."""
    if activation == "swiglu":
        return jax.nn.silu(project("gate")) * project("up")
    gelu = jax.nn.gelu if activation == "gelu_tanh" else exact_gelu
    return gelu(project("up"))


class MLP(nn.Module):
    """act(x W_up) W_down, or for swiglu (silu(x W_gate) * x W_up) W_down (Shazeer 2020)."""

    hidden: int
    activation: str
    use_bias: bool
    std: float
    std_out: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD):
        options, width = (self.use_bias, self.dtype), x_BTD.shape[-1]

        def project(name):
            return Linear(self.hidden, ("embed", "mlp"), self.std, *options, name=name)(x_BTD)

        h_BTF = constrain(activate(self.activation, project), "batch", "length", "act_mlp")
        return Linear(width, ("mlp", "embed"), self.std_out, *options, name="down")(h_BTF)
