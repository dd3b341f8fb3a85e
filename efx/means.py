"""Means over the tokens of a batch, kept as the sums that they are made of, so that batches add up.

A layer sows what it reports twice by one call: the value for this batch into `losses` or `stats`,
and, into the collection `means`, the `Mean` that the value is taken from. Whoever puts batches
together (accumulation, evaluation) adds the latter and takes the value last: a mean of means is
another number where batches count unequally many tokens or the value is not linear in the mean.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

COLLECTION = "means"


@struct.dataclass
class Mean:
    """function(total / count), or total / count itself. `jax.tree.map(jnp.add, a, b)` is that of
    two batches together. Where nothing is counted the mean is 0.

    Attributes:
      total: float32 [*L, ...], what the tokens of the batch add up to; *L where layers are scanned.
      count: [*L], how many tokens (or other things) they are. No gradient goes through it.
      function: of the mean [...], one number; None: the mean is one number.
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
        return self.mean() if self.function is None else self._each(self.mean())

    def contribution(self, whole):
        """[*L]: this batch's part of the value of `whole`, a Mean that it is one of the parts of.

        It is linear in `total`, and the gradients of all parts add up to the gradient of
        `whole.value()`. Of a `whole` without function, `count` alone is read.
        """
        part = self.replace(count=whole.count).mean()
        if self.function is None:
            return part
        return jax.jvp(self._each, (whole.mean(),), (part,))[1]

    def needed(self):
        """What `contribution` reads of a whole."""
        return self if self.function is not None else self.replace(total=None)

    def _each(self, mean):
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


def sow(module, collection, name, mean):
    """Reports a Mean under a name, see the module's docstring."""
    module.sow(collection, name, mean.value())
    module.sow(COLLECTION, name, mean)


def sown(mutated, collection):
    """The tree of what was sown into a collection, with the Mean of each in place of its value.

    What was sown as a mere value counts as one thing that every batch has.
    """
    made_of = dict(leaves(mutated[COLLECTION])) if COLLECTION in mutated else {}

    def find(path, value):
        return made_of.get(path) or Mean(value, jnp.ones_like(value))

    return jax.tree_util.tree_map_with_path(find, mutated.get(collection, {}))


def is_mean(leaf):
    return isinstance(leaf, Mean)


def leaves(tree):
    """[(path, leaf)] of a tree in which a Mean is a leaf."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_mean)
