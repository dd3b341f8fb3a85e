"""The fraction of sown entries that change from one evaluation to the next."""

import jax
import jax.numpy as jnp

from efx.layers import batch_means
from efx.parallel import sharding
from efx.train.eval_step import by_layer, evaluation_keys


class Changes:
    """The fraction of the entries of a collection that differ from the previous call, on the same
    rows.

    Entries below 0 do not count: padding, and empty slots of a routed block in either call. The
    arrays of the previous call stay on the devices: one byte an entry, one row for each shard of
    the batch. A stochastic control draws the same tokens as in the first batch of an evaluation.

    Args:
      collection: see `Report.compared`.
    Attributes:
      placement: of the rows that are compared, the first of a batch.
    """

    def __init__(self, model, collection, mesh, rules, seed):
        self.placement = sharding.Placement(mesh, rules, sharding.shard_count("batch", mesh, rules))
        self._sown = jax.jit(lambda *arguments: _sown(model, collection, seed, *arguments))
        self._changes = jax.jit(lambda old, new: by_layer(_changes(old, new), model))
        self._previous = None

    def __call__(self, params, variables, batch):
        """{sown name: fraction, "<name>/<layer>": fraction}; {} the first time.

        Args:
          batch: the rows `placement.rows` of a batch, the same at every call.
        """
        sown = self._sown(params, variables, self.placement(batch))
        previous, self._previous = self._previous, sown
        if previous is None:
            return {}
        return {name: float(x) for name, x in jax.device_get(self._changes(previous, sown)).items()}

    def names(self, params, variables, batch):
        """The names in the results of all calls but the first; the arguments are shapes."""
        sown = self._sown.eval_shape(params, variables, batch)
        return list(self._changes.eval_shape(sown, sown))


def _sown(model, collection, seed, params, variables, batch):
    _, mutated = model.apply_to_batch(
        {"params": params, **variables},
        batch,
        method="features",
        rngs=evaluation_keys(seed, 0),
        mutable=(collection,),
    )
    return mutated[collection]


def _changes(old, new):
    """The tree of sown values, tuples of arrays, each replaced by the `batch_means.Mean` of whether
    an entry of any of its arrays changed."""

    def is_value(node):  # linen keeps a tuple of the values of all calls under each name
        return isinstance(node, tuple) and not isinstance(node[0], tuple)

    def mean_of_value(path, old_arrays, new_arrays):
        # Layers of a scanned stack lie along the first axis.
        is_scanned = any(getattr(key, "key", None) == "units" for key in path)

        def num_true(marked):
            # In int32 along the last axis: adding ones in float32 stops at 2^24. Then in float32,
            # because there may be more entries than an int32 counts.
            row_counts = jnp.sum(marked, axis=-1, dtype=jnp.int32).astype(jnp.float32)
            return jnp.sum(row_counts, axis=tuple(range(is_scanned, row_counts.ndim)))

        num_changed = num_counted = 0
        for a, b in zip(old_arrays, new_arrays, strict=True):
            is_counted = (a >= 0) & (b >= 0)
            num_changed += num_true(is_counted & (a != b))
            num_counted += num_true(is_counted)
        return batch_means.Mean(num_changed, num_counted)

    return jax.tree_util.tree_map_with_path(mean_of_value, old, new, is_leaf=is_value)
