"""Training step times of several models, taking turns in one process."""

import statistics
import time

import jax
import numpy as np

from efx import models, optim, run_config, sharding
from efx import step as step_lib
from efx.experiment import TOKENIZER_FILE


class Stepper:
    """The real training step of a config, ready to be called: same mesh, donation, optimiser.

    Trains on random tokens from initial parameters; what a step costs depends on shapes alone.

    Attributes:
      state: TrainState. model: the module. compiled: the compiled step.
    """

    def __init__(self, config, vocab_size, seed=0):
        rules = sharding.check_rules(config.rules)
        mesh = sharding.make_mesh(config.mesh)
        c = config.data
        self.model = models.build(
            config.model, vocab_size=vocab_size, context=c.seq_len, dtype=config.train.dtype
        )
        shapes = jax.eval_shape(lambda: step_lib.init_state_params(self.model))
        steps = config.steps or 1000
        optimizer, schedule = optim.make_optimizer(config.optim, steps, shapes)
        placed = step_lib.state_shardings(self.model, optimizer, mesh, rules)
        function = step_lib.make_train_step(
            self.model,
            optimizer,
            schedule,
            config,
            total_steps=steps,
            groups=sharding.batch_shards(mesh, rules),
        )
        tokens = np.random.default_rng(seed).integers(0, vocab_size, (c.batch_size, c.seq_len + 1))
        self.host_batch = {
            "inputs": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "weights": np.ones((c.batch_size, c.seq_len), np.float32),
        }
        self.seed = np.uint32(seed)
        with sharding.use(mesh, rules):
            self.state = jax.jit(
                lambda seed: step_lib.init_state(self.model, optimizer, seed), out_shardings=placed
            )(self.seed)
            self.batch = sharding.place_batch(self.host_batch, sharding.batch_sharding(mesh, rules))
            self.compiled = (
                jax.jit(function, donate_argnums=0, out_shardings=(placed, None))
                .lower(self.state, self.batch, self.seed)
                .compile()
            )

    def __call__(self):
        """One step, waited for; its cross-entropy in nats."""
        self.state, metrics = self.compiled(self.state, self.batch, self.seed)
        jax.block_until_ready((self.state, metrics))
        return float(metrics["train/loss"])


def race(runners, steps, warm_up=2):
    """{name: [milliseconds of each call]} of functions that take turns, warm-up calls left out."""
    taken = {name: [] for name in runners}
    for i in range(steps + warm_up):
        for name, runner in runners.items():
            start = time.perf_counter()
            runner()
            if i >= warm_up:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return taken


def median_ratio(first, second):
    """Median of first[i] / second[i]: of neighbours in time, so that drift cancels."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def step_times(folders, steps):
    """{name: median milliseconds of a training step} of the runs in `folders`."""
    from efx.data import load_tokenizer

    runners = {
        name: Stepper(
            run_config.get_config(folder), load_tokenizer(folder / TOKENIZER_FILE).vocab_size
        )
        for name, folder in folders.items()
    }
    return {name: statistics.median(ms) for name, ms in race(runners, steps).items()}
