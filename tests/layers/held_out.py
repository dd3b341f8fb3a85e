"""An evaluation on a held-out split that is made of seeds."""

import families
import jax
import numpy as np

from efx.configs import common
from efx.parallel import sharding
from efx.train.evaluator import Evaluator


class HeldOut:
    """A batch of random tokens for each seed."""

    eval_sets = ()

    def __init__(self, *seeds):
        self.seeds = seeds

    def eval_batches(self, batch_size, max_batches, rows):
        for seed in self.seeds:
            tokens = np.asarray(families.tokens(seed))
            weights = np.ones(tokens.shape, np.float32)
            batch = {"inputs": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}
            yield {name: x[rows] for name, x in batch.items()}

    def scored_bytes(self, batch_size, max_batches):
        return None

    def scored_tokens(self, split):
        return len(self.seeds) * families.BATCH * families.LENGTH


def evaluate(model, params, state, *splits):
    """The metrics of each split, all by one compiled program."""
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    config, held = common.base(), HeldOut()
    config.data.seq_len, config.evaluate.batch_size = families.LENGTH, families.BATCH
    evaluator, metrics = Evaluator(model, config, held, mesh, sharding.DEFAULT_RULES), []
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        for held.seeds in splits:
            metrics.append(evaluator(params, state))
    return metrics
