"""One batch of an evaluation as a pure function; its randomness depends on seed and batch alone."""

import jax
import jax.numpy as jnp
import numpy as np

from efx import models
from efx.layers import batch_means
from efx.layers.report import label, layer_of
from efx.train import losses
from efx.train.step import features, loss_sums

EVALUATION = np.uint32(2**32 - 1)  # folded into a key in place of a step; no run is as long


def evaluation_keys(seed, index):
    """`rngs` of a model for batch number `index` of an evaluation: stochastic routing draws other
    tokens in each batch, the same at every evaluation."""
    key = jax.random.fold_in(jax.random.key(seed), EVALUATION)
    return {"routing": jax.random.fold_in(key, index)}


def make_eval_step(model, config, *, groups=1):
    """eval_step(params, variables, batch, seed, index) -> {"loss", "correct", "weights", "stats"}.

    Sums over the tokens of batch number `index`, and the tree of sown Means, which add up over
    batches.

    A partial batch repeats its rows. Without packing nothing marks the repeated rows as padding, so
    the Means of a batch are weighted by its fraction of scored tokens.
    """

    def eval_step(params, variables, batch, seed, index):
        rngs = evaluation_keys(seed, index)
        x_BTD, mutated = features(model, {"params": params, **variables}, batch, rngs, train=False)
        sums = loss_sums(model, params, x_BTD, batch, config, groups, with_gradients=False)
        real_tokens = batch["weights"].size
        if "segment_ids" in batch:
            real_tokens = jnp.maximum(jnp.sum(batch["segment_ids"] > 0), 1)
        stats = jax.tree.map(
            lambda x: x * (sums.weights / real_tokens), batch_means.sown(mutated, "stats")
        )
        return {"loss": sums.loss, "correct": sums.correct, "weights": sums.weights, "stats": stats}

    return eval_step


def by_layer(stats, model):
    """{name: mean over layers, "name/<layer>": of one layer} of statistics, see `report.label`.

    Args:
      stats: a tree of values or Means by module.
    """
    named, layers = losses.collect_sown(stats), {}
    if "units" in stats.get("layers", {}):
        stats = models.unroll_variables(model, {"stats": stats})["stats"]
    for path, value in batch_means.leaves(stats):
        *modules, name = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        layers.setdefault(layer_of("/".join(modules)), []).append({name: value})
    for layer, layer_stats in layers.items():
        for name, value in losses.collect_sown(layer_stats).items():
            named[f"{name}/{label(layer)}"] = value
    return named
