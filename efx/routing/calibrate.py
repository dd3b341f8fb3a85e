"""Set the thresholds of routed blocks from a few batches, with fixed parameters.

The running mean of training lags behind; a converted model has no thresholds.
"""

import jax
import jax.numpy as jnp
import numpy as np


def calibrate(model, params, variables, batches):
    """`variables` in which each threshold is the mean of its quantile over these batches.

    Args:
      batches: device arrays as for `train_step`; tokens are routed by top-k.
    """
    if not model.config.depth_routing.has_threshold:
        return variables
    model = model.clone(selection="topk")

    def quantiles(params, variables, batch, index):
        # The first update sets the threshold to the quantile of the batch.
        variables = reset_threshold_steps(variables, True)
        _, mutated = model.apply_to_batch(
            {"params": params, **variables},
            batch,
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
    """If `is_start`, reset update counts, so that the next batch alone sets the thresholds."""

    def reset(path, x):
        return jnp.where(is_start, 0, x) if _is_threshold(path, "steps") else x

    return jax.tree_util.tree_map_with_path(reset, variables)


def _is_threshold(path, name):
    return [key.key for key in path[-2:]] == ["threshold", name]
