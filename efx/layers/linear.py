"""Matrix products, the linear layer and the embedding table."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from efx import sharding
from efx.parameter import parameter

_PROJECTION = "projection"
saves_projections = jax.checkpoint_policies.save_only_these_names(_PROJECTION)


def mark_projection(y):
    """y, which the `jax.checkpoint` policy `saves_projections` saves.

    The policy of JAX itself does not save rotated projections, nor products with an axis of
    experts or channels, which it takes for scores of attention.
    """
    return checkpoint_name(y, _PROJECTION)


def row_padding(rows):
    """Number of zero rows to add before a product: XLA:TPU runs products of fewer than 8 rows on
    the vector units, which are slower."""
    return max(0, 8 - rows) if sharding.platform() == "tpu" else 0


def broadcast(y, shape):
    """y, broadcast to a shape, with its gradient summed in float32: GPUs sum bfloat16 in bfloat16,
    and the gradient of a bias is a sum over all tokens."""
    return jnp.broadcast_to(y.astype(jnp.float32), shape).astype(y.dtype)


def dot_float32(vector_D, x_BTD):
    """Products [B, T] with one vector, in float32 whatever the dtype of x."""
    return jnp.einsum(
        "BTD,D->BT", x_BTD.astype(jnp.float32), vector_D, precision=jax.lax.Precision.HIGHEST
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_float32(x, w, axis):
    """x [..., D] times w over its axis `axis` (of two), float32 whatever the dtype of both: logits
    in bfloat16 have 8 bits.

    Gradients are products in the dtype of x and w. With a float32 factor, as JAX would
    differentiate it, they take GPUs twice the time.
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


def _apply_to_rows(function, x):
    """function, [N, D] -> [N, F], of x [..., D]: [..., F].

    One leading axis, because the gradient of a matrix then contracts one axis, which halves the
    time of a training step on XLA:CPU. Not on TPUs, where it moves data, and not where devices
    share a sequence: a joint axis of rows and tokens cannot be sharded over them.
    """
    *shape, width = x.shape
    rows = math.prod(shape)
    padding = row_padding(rows)
    if not padding and (sharding.platform() == "tpu" or sharding.ways("length") > 1):
        return function(x)
    x_ND = x.reshape(rows, width)
    if padding:
        x_ND = jnp.pad(x_ND, ((0, padding), (0, 0)))
    y_NF = function(x_ND)[:rows] if padding else function(x_ND)
    return y_NF.reshape(*shape, y_NF.shape[-1])


def padded(init, size, axis):
    """An initialiser that draws the first `size` entries along `axis`, whatever the number of
    others, which are 0."""

    def draw(key, shape, dtype):
        real = [size if i == axis else n for i, n in enumerate(shape)]
        padding = [(0, n - m) for n, m in zip(shape, real, strict=True)]
        return jnp.pad(init(key, tuple(real), dtype), padding)

    return draw


class Linear(nn.Module):
    """y = x W (+ b) over the last axis.

    Attributes:
      features: size of the last axis of the output.
      axes: logical names of the kernel's (input, output) axes.
      std: standard deviation of the normal initialisation.
      padding: number of the last features that exist only so that they divide over a mesh.
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
        init, zeros = nn.initializers.normal(self.std), nn.initializers.zeros
        init = padded(init if self.std else zeros, self.features - self.padding, axis=1)
        kernel = parameter(self, "kernel", init, (x.shape[-1], self.features), self.axes)
        kernel = sharding.parted_gradient(kernel.astype(self.dtype), self.axes)
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", zeros, (self.features,), self.axes[1:])

        def function(x):
            y = matmul_float32(x, kernel, 0) if self.float32_output else jnp.dot(x, kernel)
            return y if bias is None else y + broadcast(bias.astype(self.dtype), y.shape)

        return _apply_to_rows(function, x.astype(self.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
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

    def sum_of_shard(tokens_BT, gradient_BTD):
        take = functools.partial(jnp.take, indices=tokens_BT, axis=0)
        return jax.linear_transpose(take, table)(gradient_BTD.astype(jnp.float32))[0]

    # A sum for each shard of the batch, so that devices exchange only their parts of the sum.
    gradient_SVD = sharding.each_shard(sum_of_shard, tokens_BT, gradient_BTD)
    gradient_VD = sharding.summed_over_shards(gradient_SVD, axes)
    return gradient_VD.astype(empty_V0.dtype), None


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
        return _apply_to_rows(lambda x: matmul_float32(x, table_VD, 1), x.astype(self.dtype))
