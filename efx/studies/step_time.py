"""Training step times of several models, taking turns in one process."""

import statistics
import time

import jax
import numpy as np

from efx import optim, run_config, sharding
from efx import step as step_lib
from efx.experiment import prepare


def step_times(folders, steps):
    """{name: median milliseconds of a real training step} of the runs in `folders`.

    Each model trains from its initial parameters on the first batch of its data, through the same
    step, mesh and donation as in a run; two steps of each are a warm-up.
    """
    runs = {name: _Stepper(folder) for name, folder in folders.items()}
    taken = {name: [] for name in runs}
    for i in range(steps + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run.step()
            if i >= 2:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in taken.items()}


class _Stepper:
    def __init__(self, folder):
        config = run_config.get_config(folder)
        e = prepare(config, folder)
        shapes = jax.eval_shape(lambda: step_lib.init_state_params(e.model))
        optimizer, schedule = optim.make_optimizer(config.optim, e.steps, shapes)
        placed = step_lib.state_shardings(e.model, optimizer, e.mesh, e.rules)
        function = step_lib.make_train_step(
            e.model,
            optimizer,
            schedule,
            config,
            total_steps=e.steps,
            groups=sharding.batch_shards(e.mesh, e.rules),
        )
        self.seed = np.uint32(config.seed)
        with sharding.use(e.mesh, e.rules):
            self.state = jax.jit(
                lambda seed: step_lib.init_state(e.model, optimizer, seed), out_shardings=placed
            )(self.seed)
            self.batch = sharding.place_batch(
                next(e.data.train_iterator()), sharding.batch_sharding(e.mesh, e.rules)
            )
            self.compiled = (
                jax.jit(function, donate_argnums=0, out_shardings=(placed, None))
                .lower(self.state, self.batch, self.seed)
                .compile()
            )

    def step(self):
        self.state, metrics = self.compiled(self.state, self.batch, self.seed)
        jax.block_until_ready((self.state, metrics))
