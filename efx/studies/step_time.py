"""Training step times of several models, taking turns in one process."""

import concurrent.futures
import dataclasses
import functools
import time

import jax
import numpy as np

from efx.config.load import config_of_run, to_config
from efx.parallel import sharding
from efx.parallel.host_memory import keep_freed_memory
from efx.run_dir import TOKENIZER_FILE
from efx.train import optim, setup


class Stepper:
    """The compiled training step of a config, with the mesh, donation and optimiser of training.

    Starts from initial parameters. Called without tokens it trains on random ones: the cost of a
    step depends on shapes alone.

    Attributes:
      config: as given. model: built from it.
      state: TrainState, which takes no memory before it is first used.
      compile_seconds: tracing and compiling.
      memory: bytes that the compiled step needs: its arguments and its temporary arrays.
    """

    def __init__(self, config, vocab_size):
        keep_freed_memory()
        experiment = setup.without_text(to_config(config), vocab_size)
        self.config, self.model = experiment.config, experiment.model
        self._training = setup.Training(experiment)
        mesh, rules = self._mesh_and_rules = experiment.mesh, experiment.rules
        self._placement = sharding.Placement(mesh, rules, self.config.data.batch_size)
        self._seed = np.uint32(config.seed)
        self._batch = self._put_batch(random_tokens(config, vocab_size, 1)[0])
        self._teacher = experiment.teacher and setup.read_teacher(experiment)[1]
        begin = time.perf_counter()
        with sharding.use(mesh, rules):
            self._step, _ = self._training.compile_step(self.model)
        self.compile_seconds = time.perf_counter() - begin
        needs = self._step.memory_analysis()
        self.memory = needs.argument_size_in_bytes + needs.temp_size_in_bytes

    @functools.cached_property
    def state(self):
        with sharding.use(*self._mesh_and_rules):
            return self._training.new_state(self._seed)

    @property
    def parameters(self):
        """{path: numpy array}"""
        return {path: np.array(leaf) for path, leaf in optim.param_paths(self.state.params).items()}

    def __call__(self, tokens_BT1=None):
        """Waits for one step on rows of context + 1 tokens; returns the loss before it, in nats."""
        batch = self._batch if tokens_BT1 is None else self._put_batch(tokens_BT1)
        self.state, metrics = self._step(self.state, batch, self._seed, self._teacher)
        jax.block_until_ready((self.state, metrics))
        return float(metrics["train/loss"])

    def _put_batch(self, tokens_BT1):
        batch = {
            "inputs": tokens_BT1[:, :-1],
            "targets": tokens_BT1[:, 1:],
            "weights": np.ones(tokens_BT1[:, 1:].shape, np.float32),
        }
        if self.config.data.packing:  # a document a row
            shape = batch["inputs"].shape
            batch["positions"] = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
            batch["segment_ids"] = np.ones(shape, np.int32)
        return self._placement(batch)


def compiled_together(configs, vocab_size):
    """{name: Future of the `Stepper` of a config}, all of them compiled when this returns.

    In threads: for a GPU 24 layers take a minute or two, most of it on one core. A CPU's compiler
    takes all of them, and `sharding.use` may change what all threads have there.
    """
    threads = 1 if jax.default_backend() == "cpu" else len(configs)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return {name: pool.submit(Stepper, config, vocab_size) for name, config in configs.items()}


def random_tokens(config, vocab_size, count):
    """[count, B, T + 1] random tokens: the time of a step does not depend on their values."""
    shape = (count, config.data.batch_size, config.data.seq_len + 1)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


@dataclasses.dataclass
class Times:
    """Seconds of each call of a function, on the clock and on the CPUs by all threads: [rounds]."""

    wall: np.ndarray
    cpu: np.ndarray

    @property
    def median(self):
        """Seconds on the clock."""
        return float(np.median(self.wall))


def take_turns(runs, rounds, warmup=2):
    """Times functions against each other: other work on the machine slows all of them alike.

    Args:
      runs: {name: function of the number of the turn, which returns when its work is done}.
      rounds: timed calls of each.
      warmup: untimed calls of each before these.

    Returns: {name: Times}.
    """
    names, records = list(runs), {name: [] for name in runs}
    for turn in range(warmup + rounds):
        first_index = turn % len(names)  # each goes first equally often
        for name in names[first_index:] + names[:first_index]:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name](turn)
            record = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= warmup:
                records[name].append(record)
    return {name: Times(*np.array(values).T) for name, values in records.items()}


def time_steps(steppers, steps):
    """{name: Times} of so many training steps of each Stepper, taking turns."""
    calls = {name: lambda turn, stepper=stepper: stepper() for name, stepper in steppers.items()}
    return take_turns(calls, steps)


def step_times(folders, steps):
    """{name: (median milliseconds of a training step, sequences a second)} of runs in `folders`."""
    from efx.data import load_tokenizer

    steppers = {
        name: Stepper(config_of_run(folder), load_tokenizer(folder / TOKENIZER_FILE).vocab_size)
        for name, folder in folders.items()
    }
    return {
        name: (1e3 * times.median, steppers[name].config.data.batch_size / times.median)
        for name, times in time_steps(steppers, steps).items()
    }
