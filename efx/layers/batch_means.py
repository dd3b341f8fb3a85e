"""Means over the tokens of a batch, kept as sums and counts, so that batches can be added.

`sow` sows a value into `losses` or `stats`, and the `Mean` that it comes from into `means`.
Accumulation and evaluation add the Means of several batches and compute the value last: a mean of
means would differ if batches count different numbers of tokens, or if the value is not linear in
the mean.
"""

import contextlib
import contextvars
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

COLLECTION = "means"
_WITHOUT_LOSSES = contextvars.ContextVar("without_losses", default=False)


@struct.dataclass
class Mean:
    """The value function(total / count), or total / count; 0 if the count is 0.

    `jax.tree.map(jnp.add, a, b)` is the Mean of two batches together.

    Attributes:
      total: float32 [*L, ...], sum over the tokens of the batch; *L if layers are scanned.
      count: [*L], number of tokens (or other things). Carries no gradient.
      function: from the mean [...] to a scalar; None: the mean is a scalar.
    """

    total: jax.Array
    count: jax.Array
    function: Callable | None = struct.field(pytree_node=False, default=None)

    def mean(self):
        """[*L, ...]."""
        count = jnp.asarray(self.count, jnp.float32)
        count = jnp.where(count > 0, count, 1.0)
        return self.total / count.reshape(count.shape + (1,) * (self.total.ndim - count.ndim))

    def value(self):
        """[*L]."""
        return self.mean() if self.function is None else self._apply(self.mean())

    def contribution(self, whole):
        """[*L]: contribution of this micro-batch to the value of `whole`, the Mean of its batch.

        Linear in `total`. The gradients of the contributions of all micro-batches add up to the
        gradient of `whole.value()`. Without a function only `whole.count` is used, so the compiler
        drops the computation of `whole.total`.
        """
        mean_part = self.replace(count=whole.count).mean()
        if self.function is None:
            return mean_part
        return jax.jvp(self._apply, (whole.mean(),), (mean_part,))[1]

    def _apply(self, mean):
        function = self.function
        for _ in range(jnp.ndim(self.count)):
            function = jax.vmap(function)
        return function(mean)


def over(value, valid_BT=None, function=None):
    """The Mean of value [B, T, ...] over the tokens in `valid_BT`; None: over all."""
    if valid_BT is None:
        count = jnp.float32(value.shape[0] * value.shape[1])
        return Mean(jnp.sum(value, axis=(0, 1)), count, function)
    valid = valid_BT.reshape(*valid_BT.shape, *(1,) * (value.ndim - 2))
    total = jnp.sum(jnp.where(valid, value, 0), axis=(0, 1))
    return Mean(total, jnp.sum(valid_BT, dtype=jnp.float32), function)


def is_collecting(module):
    """Whether the caller collects losses or statistics of this module."""
    return any(map(module.is_mutable_collection, ("losses", "stats", COLLECTION)))


@contextlib.contextmanager
def without_losses():
    """Context in which modules sow no losses: for frozen models inside a trained one."""
    token = _WITHOUT_LOSSES.set(True)
    try:
        yield
    finally:
        _WITHOUT_LOSSES.reset(token)


def sow(module, collection, name, mean):
    """Sow the value of a Mean into `collection`, and the Mean into `means`."""
    if collection == "losses" and _WITHOUT_LOSSES.get():
        return
    module.sow(collection, name, mean.value())
    module.sow(COLLECTION, name, mean)


def sown(mutated, collection):
    """The tree sown into a collection, with each value replaced by its Mean.

    A value without a Mean counts as the mean of one token.
    """
    mean_at = dict(leaves(mutated[COLLECTION])) if COLLECTION in mutated else {}

    def mean_of(path, value):
        return mean_at.get(path) or Mean(value, jnp.ones_like(value))

    return jax.tree_util.tree_map_with_path(mean_of, mutated.get(collection, {}))


def leaves(tree):
    """[(path, leaf)] of a tree whose Means are leaves."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Mean))
