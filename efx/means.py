"""Means over the tokens of a batch, kept as sums and counts, so that batches can be added.

`sow` reports a number twice: its value for this batch into `losses` or `stats`, and the `Mean` with
that value into the collection `means`. Accumulation and evaluation add the Means of several batches
and compute the value last: a mean of means differs if batches count different numbers of tokens or
the value is not linear in the mean.
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
    """function(total / count), or total / count itself. `jax.tree.map(jnp.add, a, b)` is the Mean
    of two batches together. The mean of nothing (count 0) is 0.

    Attributes:
      total: float32 [*L, ...], the sum over the tokens of the batch; *L if layers are scanned.
      count: [*L], the number of tokens (or other things). No gradient goes through it.
      function: from the mean [...] to one number; None: the mean is one number.
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
        """[*L]: the contribution of this micro-batch to the value of `whole`, its batch's Mean.

        It is linear in `total`, and the gradients of all micro-batches' contributions add up to the
        gradient of `whole.value()`. Without a function only `whole.count` is read.
        """
        mean_part = self.replace(count=whole.count).mean()
        if self.function is None:
            return mean_part
        return jax.jvp(self._apply, (whole.mean(),), (mean_part,))[1]

    def for_contribution(self):
        """This Mean without the fields that `contribution` does not read of a `whole`."""
        return self if self.function is not None else self.replace(total=None)

    def _apply(self, mean):
        function = self.function
        for _ in range(jnp.ndim(self.count)):
            function = jax.vmap(function)
        return function(mean)


def over(value, valid_BT=None, function=None):
    """The Mean of value [B, T, ...] over the tokens of `valid_BT`, or over all of them."""
    if valid_BT is None:
        count = jnp.float32(value.shape[0] * value.shape[1])
        return Mean(jnp.sum(value, axis=(0, 1)), count, function)
    valid = valid_BT.reshape(*valid_BT.shape, *(1,) * (value.ndim - 2))
    total = jnp.sum(jnp.where(valid, value, 0), axis=(0, 1))
    return Mean(total, jnp.sum(valid_BT, dtype=jnp.float32), function)


def wanted(module):
    """Whether the caller collects losses or statistics, so that they are worth computing."""
    return any(map(module.is_mutable_collection, ("losses", "stats", COLLECTION)))


@contextlib.contextmanager
def without_losses():
    """A context in which modules sow no losses: for frozen models inside a trained one, whose
    routers and masks do not learn."""
    token = _WITHOUT_LOSSES.set(True)
    try:
        yield
    finally:
        _WITHOUT_LOSSES.reset(token)


def sow(module, collection, name, mean):
    """Sow the value of a Mean, and the Mean itself."""
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


def is_mean(leaf):
    return isinstance(leaf, Mean)


def leaves(tree):
    """[(path, leaf)] of a tree in which a Mean is a leaf."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_mean)
