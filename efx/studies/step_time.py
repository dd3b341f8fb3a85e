"""Training step times of several models, taking turns in one process."""

import dataclasses
import time

import jax
import numpy as np

from efx import build, optim, sharding
from efx import step as step_lib
from efx.config import config_of_run
from efx.hostmemory import keep_freed_memory
from efx.runfolder import TOKENIZER_FILE


class Stepper:
    """The real training step of a config, ready to be called: same mesh, donation, optimiser.

    Starts from initial parameters. Called without tokens it trains on random ones: what a step
    costs depends on shapes alone.

    Attributes:
      config, model: as given, and built from it. state: TrainState.
      compile_seconds: tracing and compiling.
      memory: bytes that the compiled step needs: its arguments and its temporary arrays.
    """

    def __init__(self, config, vocab_size):
        keep_freed_memory()
        e = build.without_text(config, vocab_size)
        training, self.config, self.model = build.Training(e), e.config, e.model
        self._placement = sharding.Placement(e.mesh, e.rules, e.config.data.batch_size)
        function = step_lib.make_train_step(
            e.model,
            training.optimizer,
            training.schedule,
            e.config,
            total_steps=e.steps,
            groups=sharding.batch_shards(e.mesh, e.rules),
        )
        self._seed = np.uint32(config.seed)
        self._batch = self._place(random_tokens(config, vocab_size, 1)[0])
        with sharding.use(e.mesh, e.rules):
            self.state = jax.jit(training.init, out_shardings=training.shardings)(self._seed)
            begin = time.perf_counter()
            self._step = (
                jax.jit(function, donate_argnums=0, out_shardings=(training.shardings, None))
                .lower(self.state, self._batch, self._seed)
                .compile()
            )
        self.compile_seconds = time.perf_counter() - begin
        needs = self._step.memory_analysis()
        self.memory = needs.argument_size_in_bytes + needs.temp_size_in_bytes

    @property
    def parameters(self):
        """{path: numpy array}"""
        return {path: np.array(leaf) for path, leaf in optim.param_paths(self.state.params).items()}

    def __call__(self, tokens_BT1=None):
        """One step on rows of context + 1 tokens, waited for; the loss before it, in nats."""
        batch = self._batch if tokens_BT1 is None else self._place(tokens_BT1)
        self.state, metrics = self._step(self.state, batch, self._seed)
        jax.block_until_ready((self.state, metrics))
        return float(metrics["train/loss"])

    def _place(self, tokens_BT1):
        batch = {
            "inputs": tokens_BT1[:, :-1],
            "targets": tokens_BT1[:, 1:],
            "weights": np.ones(tokens_BT1[:, 1:].shape, np.float32),
        }
        return self._placement(batch)


def random_tokens(config, vocab_size, count):
    """[count, B, T + 1] random tokens: the time of a step does not depend on what they are."""
    shape = (count, config.data.batch_size, config.data.seq_len + 1)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


@dataclasses.dataclass
class Times:
    """Of one function's turns: seconds on the clock, and of all its threads on a CPU, [rounds]."""

    wall: np.ndarray
    cpu: np.ndarray

    @property
    def median(self):
        """Seconds on the clock."""
        return float(np.median(self.wall))


def take_turns(runs, rounds, warmup=2):
    """Time functions against each other: whatever else the machine does slows all of them alike.

    Args:
      runs: {name: function of the number of the turn, which returns when its work is done}.
      rounds: how often each is timed.
      warmup: how often each is called before that.

    Returns: {name: Times}.
    """
    names, records = list(runs), {name: [] for name in runs}
    for turn in range(warmup + rounds):
        first = turn % len(names)  # everyone goes first equally often
        for name in names[first:] + names[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name](turn)
            record = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= warmup:
                records[name].append(record)
    return {name: Times(*np.array(values).T) for name, values in records.items()}


def step_times(folders, steps):
    """{name: (median milliseconds of a training step, sequences a second)} of runs in `folders`."""
    from efx.data import load_tokenizer

    steppers = {
        name: Stepper(config_of_run(folder), load_tokenizer(folder / TOKENIZER_FILE).vocab_size)
        for name, folder in folders.items()
    }
    turns = take_turns({name: lambda turn, s=s: s() for name, s in steppers.items()}, steps)
    return {
        name: (1e3 * times.median, steppers[name].config.data.batch_size / times.median)
        for name, times in turns.items()
    }
