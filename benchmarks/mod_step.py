"""A training step of the default Mixture-of-Depths stack against its dense twin, taking turns.

    python benchmarks/mod_step.py

512 wide, 8 layers, 8 heads, context 1024, batch 4, vocabulary 8192, float32; every second block
routed at 12.5%. Prints step times, their ratio, the FLOP ledger's prediction and the compiled
programs' memory. `--quick` is a small version.
"""

# ruff: noqa: E402 (threads are pinned before JAX starts its own)
import argparse
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
for flag, value in dict(
    width=512,
    depth=8,
    heads=8,
    context=1024,
    batch=4,
    vocab=8192,
    steps=10,
    threads=2,
    loss_chunk=256,
).items():
    parser.add_argument(f"--{flag}", type=int, default=value)
parser.add_argument("--capacity", type=float, default=0.125)
parser.add_argument("--quick", action="store_true", help="128 wide, 4 layers, context 256")
options = parser.parse_args()
if options.quick:
    options.width, options.depth, options.context, options.vocab = 128, 4, 256, 512
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])

from configs import common
from efx.studies.step_time import Stepper, median_ratio, race


def stepper(kind):
    config = common.base()
    common.apply(
        config,
        {
            "data.seq_len": options.context,
            "data.batch_size": options.batch,
            "model.preset": "llama",
            "model.width": options.width,
            "model.depth": options.depth,
            "model.num_heads": options.heads,
            "model.depth_routing.kind": kind,
            "model.depth_routing.capacity": options.capacity,
            "train.loss_chunk": options.loss_chunk,
        },
    )
    return Stepper(config, options.vocab)


def memory_of(runner):
    """Bytes that the compiled step needs: its state and batch, and its temporaries."""
    m = runner.compiled.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes


def main():
    runners = {"dense": stepper("none"), "MoD": stepper("mod")}
    times = race(runners, options.steps)
    tokens = options.batch * options.context
    dense = runners["dense"]
    dense_flops = dense.model.ledger(options.context).train_flops(tokens, nominal=False)
    dense_memory = memory_of(dense)
    print(f"{'':<8}{'ms a step':>11}{'tokens/s':>10}{'time':>8}{'FLOPs':>8}{'memory':>20}")
    for name, runner in runners.items():
        ms = statistics.median(times[name])
        flops = runner.model.ledger(options.context).train_flops(tokens, nominal=False)
        memory = memory_of(runner)
        print(
            f"{name:<8}{ms:>11.0f}{1e3 * tokens / ms:>10.0f}"
            f"{median_ratio(times[name], times['dense']):>8.3f}{flops / dense_flops:>8.3f}"
            f"{memory / 2**20:>13.0f} MiB{memory / dense_memory:>7.2f}"
        )
    print(f"ratios to dense; medians of {options.steps} alternating steps")


if __name__ == "__main__":
    main()
