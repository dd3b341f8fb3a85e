"""What the benchmarks share: an efx training step, and timing things that take turns."""

import dataclasses
import os
import time

import jax
import numpy as np

from efx import models, optim, step


class TrainStep:
    """The compiled, donated training step of a config on one device, as `efx.train` runs it.

    Attributes:
      config, model: as given and built from it.
      compile_seconds: tracing and compiling.
      memory: bytes that the compiled step needs: its arguments and its temporary arrays.
    """

    def __init__(self, config, vocab_size):
        self.config = config
        self.model = models.build(
            config.model,
            vocab_size=vocab_size,
            context=config.data.seq_len,
            dtype=config.train.dtype,
        )
        shapes = jax.eval_shape(lambda: step.init_state_params(self.model))
        optimizer, schedule = optim.make_optimizer(config.optim, config.steps, shapes)
        self.state = jax.jit(lambda: step.init_state(self.model, optimizer, config.seed))()
        function = step.make_train_step(
            self.model, optimizer, schedule, config, total_steps=config.steps
        )
        begin = time.perf_counter()
        rows = np.zeros((config.data.batch_size, config.data.seq_len + 1), np.int32)
        self._step = (
            jax.jit(function, donate_argnums=0)
            .lower(self.state, self._batch(rows), config.seed)
            .compile()
        )
        self.compile_seconds = time.perf_counter() - begin
        memory = self._step.memory_analysis()
        self.memory = memory.argument_size_in_bytes + memory.temp_size_in_bytes

    @property
    def parameters(self):
        """{path: numpy array}"""
        return {path: np.array(leaf) for path, leaf in optim.param_paths(self.state.params).items()}

    def __call__(self, tokens_BT1):
        """One step on rows of context + 1 tokens; returns the loss before it."""
        self.state, metrics = self._step(self.state, self._batch(tokens_BT1), self.config.seed)
        jax.block_until_ready(self.state)
        return float(metrics["train/loss"])

    @staticmethod
    def _batch(tokens_BT1):
        inputs_BT = tokens_BT1[:, :-1]
        weights_BT = np.ones(inputs_BT.shape, np.float32)
        return {"inputs": inputs_BT, "targets": tokens_BT1[:, 1:], "weights": weights_BT}


def random_batches(config, vocab_size, count):
    """[count, B, T + 1] random tokens: the time of a step does not depend on what they are."""
    shape = (count, config.data.batch_size, config.data.seq_len + 1)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


def limit_cpus(count):
    """Let this process run on `count` CPUs only, and return on how many it does. JAX sizes its
    thread pool by this when it is first used, so call it before."""
    if not hasattr(os, "sched_setaffinity"):  # not on macOS
        return os.cpu_count()
    allowed = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, allowed)
    return len(allowed)


@dataclasses.dataclass
class Times:
    """Of one function's turns: seconds on the clock, and of all its threads on a CPU, [rounds]."""

    wall: np.ndarray
    cpu: np.ndarray


def take_turns(runs, rounds, warmup):
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


def ratio(one, other):
    """(text, number): the ratio of the median clock times of two `Times` of the same turns; the
    text adds the quartiles of the ratios of single turns: "0.81 (0.79-0.84)"."""
    value = median(one) / median(other)
    low, high = np.percentile(one.wall / other.wall, (25, 75))
    return f"{value:.3f} ({low:.3f}-{high:.3f})", value


def median(times):
    """Seconds on the clock."""
    return float(np.median(times.wall))


TIMES = ("ms (quartiles)", "fastest", "CPU ms")


def times(values):
    """Columns for `TIMES`. CPU time hardly depends on what else the machine does."""
    low, middle, high = np.percentile(1e3 * values.wall, (25, 50, 75))
    return (
        f"{middle:.1f} ({low:.1f}-{high:.1f})",
        f"{1e3 * values.wall.min():.1f}",
        f"{1e3 * np.median(values.cpu):.1f}",
    )


def table(header, *rows):
    """Aligned text; the first column to the left, the others to the right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def verdict(what, value, target, at_least):
    """One line that says whether a measured number keeps its target."""
    kept = value >= target if at_least else value <= target
    bound = "at least" if at_least else "at most"
    return f"{what}: {value:.3f}, target {bound} {target}: {'reached' if kept else 'MISSED'}"
