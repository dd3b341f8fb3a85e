"""Shared by the benchmarks: limits on CPUs, training steps in turns, and tables of measurements."""

import dataclasses
import functools
import os
import sys

import numpy as np

from efx.errors import UsageError
from efx.layers import flops
from efx.studies.step_time import Stepper, Times, random_tokens, take_turns


def command(main):
    """`main(argv)` of a benchmark; a UsageError is printed as one line and gives status 2."""

    @functools.wraps(main)
    def one_line(argv=None):
        try:
            return main(argv)
        except UsageError as error:
            print(f"efx: error: {error}", file=sys.stderr)
            return 2

    return one_line


def checked(args, zero=()):
    """What a benchmark's flags say, with numbers that can be.

    Args:
      args: of `argparse`. zero: names of the flags that may be 0.

    Raises UsageError for any other whole number, alone or in a list, below 1, and any other below
    or at 0.
    """
    for name, value in vars(args).items():
        for number in value if isinstance(value, list | tuple) else [value]:
            whole = type(number) is int
            if not (whole or type(number) is float):
                continue
            if not (number >= 0 if name in zero else number >= 1 if whole else number > 0):
                least = "at least 0" if name in zero else "at least 1" if whole else "more than 0"
                raise UsageError(f"--{name.replace('_', '-')}={number}: must be {least}")
    return args


def limit_cpus(count):
    """Limits this process to `count` CPUs; returns the number that it got. Call it before the first
    use of JAX, which sizes its thread pool by it."""
    if not hasattr(os, "sched_setaffinity"):  # not on macOS
        return os.cpu_count()
    allowed = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, allowed)
    return len(allowed)


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """What a training step of a model costs.

    Attributes:
      times: of the steps that were timed.
      memory: bytes that the compiled step needs, see `Stepper`. parameters: how many.
    """

    model: object
    batch: int
    context: int
    times: Times
    memory: int
    parameters: int

    @property
    def tokens_per_second(self):
        return self.batch * self.context / self.times.median

    @property
    def executed(self):
        """FLOPs as traced, which sees products of plain XLA and none inside of a kernel."""
        return flops.TRAIN_FACTOR * flops.executed(self.model, self.context, self.batch)

    @property
    def nominal(self):
        """FLOPs by the papers' convention."""
        return self.per_token * self.batch * self.context

    @property
    def per_token(self):
        """`nominal` of one token."""
        return self.model.ledger(self.context).train_flops(1)


def training_steps(configs, vocab_size, steps, warmup, compiled=None):
    """{name: `TrainingStep`} of configs of equal batches, whose steps take turns on random tokens.

    Args:
      configs: {name: config}.
      steps, warmup: timed and untimed ones of each.
      compiled: {name: their `Stepper`} where they are there.
    """
    steppers = compiled or {name: Stepper(config, vocab_size) for name, config in configs.items()}
    data = next(iter(configs.values()))
    batches = random_tokens(data, vocab_size, warmup + steps)
    turns = take_turns(
        {name: lambda turn, step=step: step(batches[turn]) for name, step in steppers.items()},
        steps,
        warmup,
    )
    return {
        name: TrainingStep(
            model=step.model,
            batch=data.data.batch_size,
            context=data.data.seq_len,
            times=turns[name],
            memory=step.memory,
            parameters=flops.count_params(step.state.params),
        )
        for name, step in steppers.items()
    }


def ratio(measured, baseline):
    """(text, number): the ratio of the median clock times of two `Times` of the same turns; the
    text adds the quartiles of the ratios of single turns: "0.81 (0.79-0.84)"."""
    value = measured.median / baseline.median
    low, high = np.percentile(measured.wall / baseline.wall, (25, 75))
    return f"{value:.3f} ({low:.3f}-{high:.3f})", value


TIMES = ("ms (quartiles)", "fastest", "CPU ms")


def times(values):
    """Columns for `TIMES`. CPU time hardly depends on other work on the machine."""
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


def verdict(quantity, value, target, at_least):
    """One line that says whether a measured number reaches its target."""
    reached = value >= target if at_least else value <= target
    bound = "at least" if at_least else "at most"
    return f"{quantity}: {value:.3f}, target {bound} {target}: {'reached' if reached else 'MISSED'}"
