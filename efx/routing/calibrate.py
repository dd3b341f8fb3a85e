"""Set the thresholds of routed blocks from a few batches, with the parameters as they are.

Training tracks them by a running mean, which lags behind; a converted model has none.
"""

import jax
import jax.numpy as jnp
import numpy as np


def calibrate(model, params, variables, batches):
    """`variables` with each threshold at the mean, over these batches, of its quantile.

    Args:
      batches: device arrays as for `train_step`; tokens are routed by top-k.
    """
    if not model.config.depth_routing.has_threshold:
        return variables
    model = model.clone(selection="topk")

    def quantiles(params, variables, batch, index):
        # An update by step 0 takes the quantile of the batch as it is.
        variables = reset_threshold_steps(variables, True)
        _, mutated = model.apply(
            {"params": params, **variables},
            batch["inputs"],
            batch.get("positions"),
            batch.get("segment_ids"),
            method="features",
            rngs={"routing": jax.random.key(index)},
            mutable=["state"],
        )
        return mutated["state"]

    step = jax.jit(quantiles)
    states = [
        step(params, variables, batch, np.uint32(index)) for index, batch in enumerate(batches)
    ]

    def mean(path, old, *new):
        return sum(new) / len(new) if _is_threshold(path, "quantile") else old

    state = jax.tree_util.tree_map_with_path(mean, variables["state"], *states)
    return {**variables, "state": state}


def reset_threshold_steps(variables, is_start):
    """The variables with thresholds that take the next batch's quantile as it is, if `is_start`."""

    def reset(path, x):
        return jnp.where(is_start, 0, x) if _is_threshold(path, "steps") else x

    return jax.tree_util.tree_map_with_path(reset, variables)


def _is_threshold(path, name):
    return [key.key for key in path[-2:]] == ["threshold", name]
