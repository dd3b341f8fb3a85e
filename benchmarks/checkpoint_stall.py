"""Time that checkpoints take from training, written in the background and in the foreground.

    python -m benchmarks.checkpoint_stall [--parameters=124000000] [--arrays=148] [--saves=3]
                                          [--steps=12] [--workdir=DIR or gs://BUCKET/FOLDER]

The default state has the size of GPT-2 (124M) with AdamW: 1.5 GB in float32. Both ways take --saves
rounds: --steps jitted updates of every parameter, then a save. Columns are medians of the rounds in
seconds: stall is the time until `save` returns; slowdown is the time of a step during a save,
relative to one before the first save; wait is for the last save at the end of the run. A save
waits for the one before it, so use as many steps as lie between two saves.
"""

import argparse
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import optax

from benchmarks.common import checked, command
from efx import io
from efx.checkpoint import Checkpointer

WIDTH = 1024


def make_state(parameters, arrays):
    """Return parameters as matrices, and a state of AdamW."""
    rows = max(parameters // arrays // WIDTH, 1)
    params = {f"layer_{i}": {"kernel": jnp.ones((rows, WIDTH))} for i in range(arrays)}
    return {"params": params, "opt_state": optax.adamw(1e-3).init(params)}


@jax.jit
def update(state):
    """Read and write all parameters, as a training step does, with some work on each."""
    return state | {"params": jax.tree.map(lambda x: x + 1e-6 * jnp.tanh(x), state["params"])}


def take_steps(state, count):
    """Return (state, seconds of one step)."""
    start = time.perf_counter()
    for _ in range(count):
        state = update(state)
    jax.block_until_ready(state)
    return state, (time.perf_counter() - start) / count


def measure(state, root, asynchronous, arguments):
    """Return (stall, step before the saves, step during a save, wait at the end), in seconds."""
    stalls, steps = [], []
    state, _ = take_steps(state, arguments.steps)  # new memory is slow
    state, before = take_steps(state, arguments.steps)
    with Checkpointer(
        root, keep_last=1, keep_best=0, scores={}, asynchronous=asynchronous
    ) as checkpoints:
        for step in range(1, arguments.saves + 1):
            start = time.perf_counter()
            checkpoints.save(step, state, {}, {})
            stalls.append(time.perf_counter() - start)
            state, seconds = take_steps(state, arguments.steps)
            steps.append(seconds)
        start = time.perf_counter()
        checkpoints.wait()
        wait = time.perf_counter() - start
    return statistics.median(stalls), before, statistics.median(steps), wait


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=124_000_000)
    parser.add_argument("--arrays", type=int, default=148)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workdir", default="", help="where to write; the files stay there")
    arguments = checked(parser.parse_args(argv))
    state = make_state(arguments.parameters, arguments.arrays)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    print(f"state of {size / 1e9:.2f} GB")
    print(f"{'':<16}{'stall, s':>10}{'step, s':>10}{'slowdown':>10}{'wait, s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        top = io.folder(arguments.workdir or folder)
        top.mkdir(parents=True, exist_ok=True)
        for name in ("synchronous", "asynchronous"):
            root = top / f"{name}-{time.time_ns()}"  # without earlier checkpoints
            stall, before, during, wait = measure(state, root, name == "asynchronous", arguments)
            print(f"{name:<16}{stall:>10.3f}{before:>10.3f}{during / before:>10.2f}{wait:>10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
