"""Shared by the benchmarks: timings in turns, ratios, tables."""

import dataclasses
import functools
import os
import sys
import time

import numpy as np

from benchmarks.stepper import Stepper
from efx.errors import UsageError
from efx.layers import flops


def command(main):
    """Print a UsageError of `main(argv)` as one line; the exit status is then 2."""

    @functools.wraps(main)
    def one_line(argv=None):
        try:
            return main(argv)
        except UsageError as error:
            print(f"efx: error: {error}", file=sys.stderr)
            return 2

    return one_line


def limit_cpus(count):
    """Limit this process to `count` CPUs; call it before the first use of JAX."""
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


@dataclasses.dataclass
class Times:
    """Seconds of each call of a function, by the clock and by all CPUs: [rounds]."""

    wall: np.ndarray
    cpu: np.ndarray

    @property
    def median(self):
        """Seconds by the clock."""
        return float(np.median(self.wall))


def take_turns(runs, rounds, warmup=2):
    """Time functions against each other: other work on the machine slows all of them alike.

    Args:
      runs: {name: function of the number of the turn, which returns when its work is done}.
      rounds, warmup: timed calls of each, and untimed calls before them.

    Returns: {name: Times}.
    """
    names, records = list(runs), {name: [] for name in runs}
    for turn in range(warmup + rounds):
        first = turn % len(names)  # each goes first equally often
        for name in names[first:] + names[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name](turn)
            record = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= warmup:
                records[name].append(record)
    return {name: Times(*np.array(values).T) for name, values in records.items()}


def ratio(measured, baseline):
    """Return the ratio of two Times, the median and quartiles of turns: "0.810 (0.790-0.840)"."""
    low, median, high = np.percentile(measured.wall / baseline.wall, (25, 50, 75))
    return f"{median:.3f} ({low:.3f}-{high:.3f})"


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """The cost of a model's training step.

    Attributes:
      memory: bytes of the compiled step. executed, nominal: FLOPs of a step.
    """

    times: Times
    tokens: int
    memory: int
    parameters: int
    executed: float
    nominal: float


def training_steps(configs, vocab_size, steps, warmup=2):
    """Return {name: TrainingStep} of configs, whose steps take turns on random tokens."""
    steppers = {name: Stepper(config, vocab_size) for name, config in configs.items()}
    calls = {name: lambda turn, step=step: step() for name, step in steppers.items()}
    found = {}
    for name, times in take_turns(calls, steps, warmup).items():
        step, data = steppers[name], configs[name].data
        tokens = data.batch_size * data.seq_len
        executed = flops.TRAIN_FACTOR * flops.executed(step.model, data.seq_len, data.batch_size)
        found[name] = TrainingStep(
            times=times,
            tokens=tokens,
            memory=step.memory,
            parameters=flops.count_params(step.state.params),
            executed=executed,
            nominal=step.model.ledger(data.seq_len).train_flops(1) * tokens,
        )
    return found


def table(header, *rows):
    """Return aligned text; the first column to the left, the others to the right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
