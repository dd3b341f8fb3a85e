"""The one matrix multiplication and the one embedding table that every layer uses."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from efx import sharding
from efx.parameter import parameter


def padded(init, size, axis):
    """An initialiser that draws `size` entries along `axis` as if there were no others; the others
    start at 0. What is drawn then does not depend on how many these are."""

    def draw(key, shape, dtype):
        real = [size if i == axis else n for i, n in enumerate(shape)]
        padding = [(0, n - m) for n, m in zip(shape, real, strict=True)]
        return jnp.pad(init(key, tuple(real), dtype), padding)

    return draw


def _flattened(x):
    """x [..., D] as [N, D], where that is faster, with rows of zeros after so few."""
    rows = math.prod(x.shape[:-1])
    if padding := padding_of_rows(rows):
        return jnp.pad(x.reshape(rows, x.shape[-1]), ((0, padding), (0, 0)))
    if sharding.platform() == "tpu" or sharding.ways("length") > 1:
        return x
    return x.reshape(rows, x.shape[-1])


def _unflattened(y, x):
    """y [..., F] of the product of `_flattened(x)`, over the leading axes of x."""
    rows = math.prod(x.shape[:-1])
    y = y[:rows] if padding_of_rows(rows) else y
    return y.reshape(*x.shape[:-1], y.shape[-1])


def padding_of_rows(rows):
    """How many rows of zeros to add to so few before a product with a matrix: the compiler for TPUs
    takes less than 8 from the matrix units, for which others are slower."""
    return max(0, 8 - rows) if sharding.platform() == "tpu" else 0


_PROJECTION = "projection"
is_projection = jax.checkpoint_policies.save_only_these_names(_PROJECTION)


def projection(y):
    """The result of a product of tokens with a matrix, marked as such where `jax.checkpoint` does
    not see it.

    It takes none for a plain product that has an axis of experts or channels, as scores of
    attention have one of heads, nor one that has been rotated. The policy `is_projection` keeps
    what is marked.
    """
    return checkpoint_name(y, _PROJECTION)


def broadcast(y, shape):
    """y, broadcast to a shape. Its gradient is summed in float32: GPUs sum what is bfloat16 in
    bfloat16, and of a bias all tokens of a batch come together."""
    return jnp.broadcast_to(y.astype(jnp.float32), shape).astype(y.dtype)


def onto(vector_D, x_BTD):
    """Products [B, T] of all places with one vector, in float32, whatever the dtype of x is.

    Of x in bfloat16 a TPU's matrix units give the same numbers as a sum over the last axis in
    float32, which its vector units take several times as long for, and for which the compiler turns
    round all of x, too.
    """
    if x_BTD.dtype == jnp.bfloat16 and sharding.platform() == "tpu":
        return _onto_by_parts(vector_D, x_BTD)
    return jnp.einsum(
        "BTD,D->BT", x_BTD.astype(jnp.float32), vector_D, precision=jax.lax.Precision.HIGHEST
    )


@jax.custom_vjp
def _onto_by_parts(vector_D, x_BTD):
    # Places come last in the result: remat keeps it.
    y_RBT = jax.lax.dot_general(
        _parts(vector_D), x_BTD, (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.sum(y_RBT, axis=0)


def _onto_by_parts_backward(residuals, gradient_BT):
    vector_D, x_BTD = residuals
    of_vector_RD = jax.lax.dot_general(
        _parts(gradient_BT), x_BTD, (((1, 2), (0, 1)), ((), ())), preferred_element_type=jnp.float32
    )
    of_x_BTD = gradient_BT[..., None] * vector_D
    return jnp.sum(of_vector_RD, axis=0), of_x_BTD.astype(x_BTD.dtype)


_onto_by_parts.defvjp(
    lambda vector_D, x_BTD: (_onto_by_parts(vector_D, x_BTD), (vector_D, x_BTD)),
    _onto_by_parts_backward,
)


def _parts(x):
    """bfloat16 [R, ...] whose sum over R is x, of float32: each has the next eight bits of its 24.
    Of the R = 8 rows, with fewer of which products go to the vector units, the last are zeros."""
    parts = []
    for _ in range(3):
        # A conversion to bfloat16 and back the compiler may leave out.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack([*parts, *[jnp.zeros_like(parts[0])] * padding_of_rows(len(parts))])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def in_float32(x, w, axis):
    """x [..., D] times w over this one of its two axes, in float32 whatever the dtype of both is:
    of logits in bfloat16 8 bits are left.

    Gradients are products in the dtype of x and w, as those of every other layer. Of a product that
    is widened they would be products with a float32 factor, for which GPUs take twice the time.
    """
    of_x = ((x.ndim - 1,), (axis,)), ((), ())
    return jax.lax.dot_general(x, w, of_x, preferred_element_type=jnp.float32)


def _in_float32_backward(axis, residuals, gradient):
    x, w = residuals
    gradient = gradient.astype(x.dtype)
    of_x = jax.lax.dot_general(gradient, w, (((x.ndim - 1,), (1 - axis,)), ((), ())))
    rows = (tuple(range(x.ndim - 1)),) * 2, ((), ())
    of_w = jax.lax.dot_general(*((x, gradient) if axis == 0 else (gradient, x)), rows)
    return of_x, of_w


in_float32.defvjp(lambda x, w, axis: (in_float32(x, w, axis), (x, w)), _in_float32_backward)


class Linear(nn.Module):
    """y = x W (+ b) over the last axis.

    Leading axes are flattened to one before the product: the weight gradient then contracts a
    single axis, which on XLA:CPU halves the time of a training step. Not on TPUs, where that moves
    data about, and not where devices share a sequence: one axis of both rows and places cannot be
    split over them.

    Attributes:
      features: size of the last axis of the output.
      axes: logical names of the kernel's (input, output) axes.
      std: standard deviation of the normal initialisation.
      padding: so many of the features, the last, are there only so that they divide over a mesh.
      wide: whether the result is float32, see `in_float32`.
    """

    features: int
    axes: tuple
    std: float
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32
    padding: int = 0
    wide: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(self.std) if self.std else nn.initializers.zeros
        init = padded(init, self.features - self.padding, axis=1)
        kernel = parameter(self, "kernel", init, (x.shape[-1], self.features), self.axes)
        x = x.astype(self.dtype)
        kernel = sharding.parted_gradient(kernel.astype(self.dtype), self.axes)
        x_ND = _flattened(x)
        y = in_float32(x_ND, kernel, 0) if self.wide else jnp.dot(x_ND, kernel)
        if self.use_bias:
            zeros = nn.initializers.zeros
            bias = parameter(self, "bias", zeros, (self.features,), self.axes[1:])
            y = y + broadcast(bias.astype(self.dtype), y.shape)
        return _unflattened(y, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rows(table_VD, tokens_BT, dtype, axes):
    """Rows [B, T, D] of a table, which lies by `axes`, in `dtype`.

    The gradient of the table adds up what all places of a token say of it in float32, whatever
    `dtype` is: a token that is frequent would add little to its sum in bfloat16.
    """
    return jnp.take(table_VD.astype(dtype), tokens_BT, axis=0)


def _rows_forward(table_VD, tokens_BT, dtype, axes):
    # An empty slice carries the table's dtype to the backward pass, its shape what it is of.
    return _rows(table_VD, tokens_BT, dtype, axes), (table_VD[:, :0], tokens_BT)


def _rows_backward(dtype, axes, residuals, gradient_BTD):
    like, tokens_BT = residuals
    table = jax.ShapeDtypeStruct((len(like), gradient_BTD.shape[-1]), jnp.float32)

    def of_shard(tokens_BT, gradient_BTD):
        taken = functools.partial(jnp.take, indices=tokens_BT, axis=0)
        return jax.linear_transpose(taken, table)(gradient_BTD.astype(jnp.float32))[0]

    # A sum of each shard of the batch, so that devices exchange sums of their parts alone.
    gradient_SVD = sharding.each_shard(of_shard, tokens_BT, gradient_BTD)
    gradient_VD = sharding.summed_over_shards(gradient_SVD, axes)
    return gradient_VD.astype(like.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


class Embedding(nn.Module):
    """Token table [V, D], usable as the tied output layer by `attend`.

    Attributes:
      padding: so many of the rows, the last, stand for no token.
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
        return _rows(self.embedding, tokens_BT, self.dtype, self.axes)

    def attend(self, x):
        """Logits [..., V] in float32 of x [..., D]."""
        table_VD = self.embedding.astype(self.dtype)
        x_ND = _flattened(x.astype(self.dtype))
        return _unflattened(in_float32(x_ND, table_VD, 1), x)
