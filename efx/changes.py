"""The fraction of what layers sow that changes from one evaluation to the next."""

import jax
import jax.numpy as jnp

from efx import means, sharding
from efx.step import by_layer, evaluation_keys


class Changes:
    """The fraction of the entries of a collection that differ from those of the previous call, on
    fixed rows.

    Entries below 0 do not count: padding, and slots that a routed block left empty either time. The
    arrays of the previous call stay on the devices: one byte an entry, one row for each shard of
    the batch. A stochastic control draws the same tokens as in the first batch of an evaluation.

    Args:
      collection: see `Report.compared`.
    Attributes:
      placement: of the rows that are compared, the first of a batch.
    """

    def __init__(self, model, collection, mesh, rules, seed):
        self.placement = sharding.Placement(mesh, rules, sharding.batch_shards(mesh, rules))
        self._sown = jax.jit(lambda *arguments: _sown(model, collection, seed, *arguments))
        self._changes = jax.jit(lambda old, new: by_layer(_changes(old, new), model))
        self._previous = None

    def __call__(self, params, variables, batch):
        """{name: fraction, "<name>/<layer>": ...}, by the names sown; {} the first time.

        Args:
          batch: the rows `placement.rows` of a batch, the same at every call.
        """
        sown = self._sown(params, variables, self.placement(batch))
        previous, self._previous = self._previous, sown
        if previous is None:
            return {}
        return {name: float(x) for name, x in jax.device_get(self._changes(previous, sown)).items()}

    def names(self, params, variables, batch):
        """The names that calls give from the second on; the arguments are shapes."""
        sown = self._sown.eval_shape(params, variables, batch)
        return list(self._changes.eval_shape(sown, sown))


def _sown(model, collection, seed, params, variables, batch):
    _, mutated = model.apply(
        {"params": params, **variables},
        batch["inputs"],
        batch.get("positions"),
        batch.get("segment_ids"),
        method="features",
        rngs=evaluation_keys(seed, 0),
        mutable=(collection,),
    )
    return mutated[collection]


def _changes(old, new):
    """The tree of what was sown, with the `means.Mean` of whether an entry changed for each value.

    A value is a tuple of arrays that are one thing; all of its entries count alike.
    """

    def changed(path, old_calls, new_calls):
        # Layers of a scanned stack lie along the first axis.
        scanned = int(any(getattr(key, "key", None) == "units" for key in path))

        def total(marked):
            # Whole numbers along the last axis, as float32 would stop at 2^24 were it added to one
            # by one; then float32, as there may be more entries than an int32 counts.
            of_rows = jnp.sum(marked, axis=-1, dtype=jnp.int32).astype(jnp.float32)
            return jnp.sum(of_rows, axis=tuple(range(scanned, of_rows.ndim)))

        def mean(old_arrays, new_arrays):
            pairs = list(zip(old_arrays, new_arrays, strict=True))
            counted = [(a >= 0) & (b >= 0) for a, b in pairs]
            differ = [c & (a != b) for c, (a, b) in zip(counted, pairs, strict=True)]
            return means.Mean(sum(map(total, differ)), sum(map(total, counted)))

        return tuple(map(mean, old_calls, new_calls))

    # Of each module and name the calls, as linen keeps them: a tuple.
    return jax.tree_util.tree_map_with_path(
        changed, old, new, is_leaf=lambda node: isinstance(node, tuple)
    )
