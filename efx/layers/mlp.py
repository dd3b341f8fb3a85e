"""The dense feed-forward layer."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers.linear import Linear
from efx.sharding import constrain

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """`config.model.mlp`.

    Attributes:
      kind: "dense".
      activation: "gelu" (exact), "gelu_tanh", "swiglu"; None: the preset's.
      hidden: F; 0: 4D, or for swiglu multiple_of * ceil((8D/3) / multiple_of).
      multiple_of: rounding of the swiglu width.
    """

    kind: str
    activation: str | None
    hidden: int
    multiple_of: int

    def hidden_size(self, width):
        if self.hidden:
            return self.hidden
        if self.activation != "swiglu":
            return 4 * width
        return self.multiple_of * -(-8 * width // (3 * self.multiple_of))


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
        def inward(name):
            return Linear(
                self.hidden, ("embed", "mlp"), self.std, self.use_bias, self.dtype, name=name
            )(x_BTD)

        if self.activation == "swiglu":
            h_BTF = jax.nn.silu(inward("gate")) * inward("up")
        else:
            h_BTF = jax.nn.gelu(inward("up"), approximate=self.activation == "gelu_tanh")
        h_BTF = constrain(h_BTF, "batch", "length", "act_mlp")
        return Linear(
            x_BTD.shape[-1], ("mlp", "embed"), self.std_out, self.use_bias, self.dtype, name="down"
        )(h_BTF)
