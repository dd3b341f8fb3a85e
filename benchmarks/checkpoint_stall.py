"""How long a checkpoint holds up the training, in the background and in the foreground.

    python -m benchmarks.checkpoint_stall [--width=768] [--depth=12] [--saves=3] [--steps=12]
                                          [--workdir=DIR or gs://BUCKET/FOLDER]

The state is that of GPT-2's 124M parameters with AdamW by default: 1.5 GB in float32. For each of
both ways a run of --saves rounds: --steps of a jitted update of every parameter, then a save. A
row's stall is the time that `save` takes to return; the slowdown is what the steps while a save is
written take more than those before the first one; the last column is how long the end of the run
waits for its last save. Medians of the rounds. A save that comes before the last one is written
waits for it, which is part of its stall: take as many steps as lie between saves.
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
from efx import io, models
from efx.checkpoint import Checkpointer
from efx.configs import common
from efx.train import optim
from efx.train import step as step_lib


def build(arguments):
    """`TrainState` of step 0."""
    config = common.base()
    changes = {
        "model.preset": "gpt2",
        "model.width": arguments.width,
        "model.depth": arguments.depth,
        "model.attention.num_heads": arguments.width // 64,
        "model.depth_routing.kind": "none",
    }
    common.apply(config, changes)
    model = models.build(
        config.model, vocab_size=arguments.vocab, context=1024, dtype=config.train.dtype
    )
    params = models.unboxed_shapes(model)["params"]
    optimizer, _ = optim.make_optimizer(config.optim, 1000, params)
    return jax.jit(lambda: step_lib.init_state(model, optimizer, 0))()


@jax.jit
def update(state):
    """Reads and writes all parameters, as a step does, with some work on each."""
    params = jax.tree.map(lambda x: x + 1e-6 * jnp.tanh(x), state.params)
    return state.replace(params=params)


def steps_seconds(state, count):
    """(state, seconds of one step)."""
    begin = time.perf_counter()
    for _ in range(count):
        state = update(state)
    jax.block_until_ready(state)
    return state, (time.perf_counter() - begin) / count


def measure(state, root, asynchronous, arguments):
    """(stall, step before any save, step while one is written, wait at the end), in seconds."""
    stalls, steps = [], []
    state, _ = steps_seconds(state, arguments.steps)  # memory that is new is slow
    state, before = steps_seconds(state, arguments.steps)
    with Checkpointer(
        root, every=1, keep_last=1, keep_best=0, scores={}, asynchronous=asynchronous
    ) as checkpoints:
        for step in range(1, arguments.saves + 1):
            begin = time.perf_counter()
            checkpoints.save(step, state, {}, {})
            stalls.append(time.perf_counter() - begin)
            state, seconds = steps_seconds(state, arguments.steps)
            steps.append(seconds)
        begin = time.perf_counter()
        checkpoints.wait()
        end = time.perf_counter() - begin
    return statistics.median(stalls), before, statistics.median(steps), end


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workdir", default="", help="where to write (and leave it)")
    arguments = checked(parser.parse_args(argv))
    state = build(arguments)
    size = optax.tree.size(state.params)
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    print(f"{size / 1e6:.1f} M parameters, state of {total / 1e9:.2f} GB")
    print(f"{'':<16}{'stall, s':>10}{'step, s':>10}{'slowdown':>10}{'wait, s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        top = io.folder(arguments.workdir or folder)
        top.mkdir(parents=True, exist_ok=True)
        for name in ("synchronous", "asynchronous"):
            root = top / f"{name}-{time.time_ns()}"  # new, where checkpoints of before may be
            stall, before, during, end = measure(state, root, name == "asynchronous", arguments)
            print(f"{name:<16}{stall:>10.3f}{before:>10.3f}{during / before:>10.2f}{end:>10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
