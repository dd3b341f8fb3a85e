"""Matrix products, the linear layer and the embedding table."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from efx.layers import flops
from efx.parallel import sharding
from efx.parallel.sharding import parameter

_PROJECTION = "projection"
saves_projections = jax.checkpoint_policies.save_only_these_names(_PROJECTION)


def mark_projection(y):
    """Mark y for the `jax.checkpoint` policy `saves_projections`.

    JAX's own policies save neither rotated projections nor products with an axis of experts or
    channels.
    """
    return checkpoint_name(y, _PROJECTION)


def broadcast(y, shape):
    """Broadcast y; its gradient is summed in float32. GPUs sum bfloat16 in bfloat16, and the
    gradient of a bias is a sum over all tokens."""
    return jnp.broadcast_to(y.astype(jnp.float32), shape).astype(y.dtype)


def dot_float32(vector_D, x_BTD):
    """float32 products [B, T] of x, of any dtype, with one vector."""
    return jnp.einsum(
        "BTD,D->BT", x_BTD.astype(jnp.float32), vector_D, precision=jax.lax.Precision.HIGHEST
    )


@flops.custom_vjp(nondiff_argnums=(2,))
def matmul_float32(x, w, axis):
    """`matmul` with a float32 result of factors of any dtype: bfloat16 logits have only 8 bits.

    Gradients are products in the dtype of x and w. JAX would make one factor float32, which takes
    GPUs twice the time.
    """
    dimensions = ((x.ndim - 1,), (axis,)), ((), ())
    return jax.lax.dot_general(x, w, dimensions, preferred_element_type=jnp.float32)


def _matmul_float32_backward(axis, residuals, gradient):
    x, w = residuals
    gradient, rows = gradient.astype(x.dtype), tuple(range(x.ndim - 1))
    d_x = jax.lax.dot_general(gradient, w, (((x.ndim - 1,), (1 - axis,)), ((), ())))
    factors = (x, gradient) if axis == 0 else (gradient, x)
    return d_x, jax.lax.dot_general(*factors, ((rows, rows), ((), ())))


matmul_float32.defvjp(
    lambda x, w, axis: (matmul_float32(x, w, axis), (x, w)), _matmul_float32_backward
)


def matmul(x, w, axis=0, float32_output=False):
    """x [..., D] times w over its axis `axis`: [..., F].

    Rows and tokens become one axis, because the gradient of w then contracts one axis, which halves
    the time of a training step on XLA:CPU. Not where devices share a sequence: a joint axis of rows
    and tokens cannot be sharded over them.
    """
    shape = x.shape[:-1]
    if sharding.shard_count("length") == 1:
        x = x.reshape(math.prod(shape), x.shape[-1])
    y = matmul_float32(x, w, axis) if float32_output else jnp.dot(x, w)
    return y.reshape(*shape, y.shape[-1])


def padded(init, size, axis):
    """Initialiser that draws the first `size` entries along `axis`, independent of the number of
    others, which are 0."""

    def draw(key, shape, dtype):
        real = [size if i == axis else n for i, n in enumerate(shape)]
        padding = [(0, n - m) for n, m in zip(shape, real, strict=True)]
        return jnp.pad(init(key, tuple(real), dtype), padding)

    return draw


class Linear(nn.Module):
    """y = x W (+ b) over the last axis.

    Attributes:
      axes: logical names of the kernel's (input, output) axes.
      padding: number of unused last features, added so that features divide over a mesh.
      float32_output: see `matmul_float32`.
    """

    features: int
    axes: tuple
    std: float
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32
    padding: int = 0
    float32_output: bool = False

    @nn.compact
    def __call__(self, x):
        zeros = nn.initializers.zeros
        init = nn.initializers.normal(self.std) if self.std else zeros
        if self.padding:
            init = padded(init, self.features - self.padding, axis=1)
        kernel = parameter(self, "kernel", init, (x.shape[-1], self.features), self.axes)
        kernel = kernel.astype(self.dtype)
        y = matmul(x.astype(self.dtype), kernel, float32_output=self.float32_output)
        if not self.use_bias:
            return y
        bias = parameter(self, "bias", zeros, (self.features,), self.axes[1:])
        return y + broadcast(bias.astype(self.dtype), y.shape)


@flops.custom_vjp(nondiff_argnums=(2, 3))
def _lookup(table_VD, tokens_BT, dtype, axes):
    """Rows [B, T, D] of a table with these logical axes, in `dtype`.

    The gradient of the table is a sum over tokens in float32, whatever `dtype` is: in bfloat16 a
    frequent token would add little to its sum.
    """
    return jnp.take(table_VD.astype(dtype), tokens_BT, axis=0)


def _lookup_forward(table_VD, tokens_BT, dtype, axes):
    # An empty slice carries the table's size and dtype to the backward pass.
    return _lookup(table_VD, tokens_BT, dtype, axes), (table_VD[:, :0], tokens_BT)


def _lookup_backward(dtype, axes, residuals, gradient_BTD):
    empty_V0, tokens_BT = residuals
    table = jax.ShapeDtypeStruct((len(empty_V0), gradient_BTD.shape[-1]), jnp.float32)

    take = functools.partial(jnp.take, indices=tokens_BT, axis=0)
    (gradient_VD,) = jax.linear_transpose(take, table)(gradient_BTD.astype(jnp.float32))
    return sharding.constrain(gradient_VD, *axes).astype(empty_V0.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


class Embedding(nn.Module):
    """Token table [V, D], usable as the tied output layer by `attend`.

    Attributes:
      axes: logical names of the table's axes.
      padding: number of the last rows, which are no tokens.
    """

    num_embeddings: int
    features: int
    std: float
    dtype: jnp.dtype = jnp.float32
    axes: tuple = ("vocab", "table")
    padding: int = 0

    def setup(self):
        init = padded(nn.initializers.normal(self.std), self.num_embeddings - self.padding, axis=0)
        shape = self.num_embeddings, self.features
        self.embedding = parameter(self, "embedding", init, shape, self.axes)

    def __call__(self, tokens_BT):
        return _lookup(self.embedding, tokens_BT, self.dtype, self.axes)

    def attend(self, x):
        """float32 logits [..., V] of x [..., D]."""
        table_VD = self.embedding.astype(self.dtype)
        return matmul(x.astype(self.dtype), table_VD, axis=1, float32_output=True)
