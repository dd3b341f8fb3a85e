"""The fraction of the masks of learned dropout that changes from one evaluation to the next."""

import jax
import jax.numpy as jnp

from efx import sharding
from efx.step import by_layer, evaluation_keys


class MaskChanges:
    """The fraction of rounded entries that differ from those of the previous call, on fixed rows.

    Entries of padding, and of slots that a routed block left empty either time, do not count. The
    masks of the previous call stay on the devices: one byte an entry, one row for each shard of the
    batch. A stochastic control draws the same tokens as in the first batch of an evaluation.

    Attributes:
      placement: of the rows that masks are compared on, the first of a batch.
    """

    def __init__(self, model, mesh, rules, seed):
        self.placement = sharding.Placement(mesh, rules, sharding.batch_shards(mesh, rules))
        self._masks = jax.jit(lambda *arguments: _masks(model, seed, *arguments))
        self._changes = jax.jit(lambda old, new: by_layer(_changes(model, old, new), model))
        self._previous = None

    def __call__(self, params, variables, batch):
        """{"dropout/changed": fraction, "dropout/changed/block_<i>": ...}; {} the first time.

        Args:
          batch: the rows `placement.rows` of a batch, the same at every call.
        """
        masks = self._masks(params, variables, self.placement(batch))
        previous, self._previous = self._previous, masks
        if previous is None:
            return {}
        return {
            name: float(x) for name, x in jax.device_get(self._changes(previous, masks)).items()
        }


def _masks(model, seed, params, variables, batch):
    _, mutated = model.apply(
        {"params": params, **variables},
        batch["inputs"],
        batch.get("positions"),
        batch.get("segment_ids"),
        method="features",
        rngs=evaluation_keys(seed, 0),
        mutable=("masks",),
    )
    return mutated["masks"]


def _changes(model, old, new):
    """The tree of masks, each replaced by the fraction of it that changed."""

    def changed_fraction(path, a, b):
        # Layers of a scanned stack lie along the first axis.
        first_axis = int(any(getattr(key, "key", None) == "units" for key in path))
        axes = tuple(range(first_axis, a.ndim))
        counted = (a >= 0) & (b >= 0)
        changed = jnp.sum(counted & (a != b), axis=axes) / jnp.maximum(
            jnp.sum(counted, axis=axes), 1
        )
        return changed.astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(changed_fraction, old, new)
