"""A dense training step of efx against the same model in eager PyTorch, taking turns.

    python benchmarks/dense_step.py

nanoGPT's GPU recipe by default: 6 layers, 6 heads, 384 wide, context 256, batch 12, 65 characters,
no dropout, no biases, AdamW, float32, two threads. Both sides start from equal weights and must
agree on the loss. Needs the extra `interop`.
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
    width=384, depth=6, heads=6, context=256, batch=12, vocab=65, steps=20, threads=2
).items():
    parser.add_argument(f"--{flag}", type=int, default=value)
options = parser.parse_args()
# Before JAX starts its threads.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])

import jax
import numpy as np

from configs import common
from efx.optim import param_paths
from efx.studies.step_time import Stepper, median_ratio, race

try:
    import torch
except ImportError:
    raise SystemExit("benchmarks/dense_step.py needs PyTorch: pip install 'efx[interop]'") from None
import torch_reference


def main():
    torch.set_num_threads(options.threads)
    config = common.base()
    common.apply(
        config,
        {
            "data.seq_len": options.context,
            "data.batch_size": options.batch,
            "model.preset": "gpt2",
            "model.use_bias": False,
            "model.width": options.width,
            "model.depth": options.depth,
            "model.num_heads": options.heads,
        },
    )
    ours = Stepper(config, options.vocab)
    model = torch_reference.GPT(
        vocab_size=options.vocab,
        context=options.context,
        width=options.width,
        depth=options.depth,
        heads=options.heads,
        bias=False,
    )
    torch_reference.load(model, {k: np.array(v) for k, v in param_paths(ours.state.params).items()})
    c = config.optim
    optimizer = torch_reference.make_adamw(
        model, learning_rate=c.learning_rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay
    )
    ids = torch.from_numpy(ours.host_batch["inputs"]).long()
    targets = torch.from_numpy(ours.host_batch["targets"]).long()

    def theirs():
        return torch_reference.train_step(model, optimizer, ids, targets, c.clip_norm)

    with torch.no_grad():
        expected = float(model.loss(ids, targets))
    first = ours()
    if abs(first - expected) > 1e-4:
        raise SystemExit(f"the models differ: efx's loss {first:.6f}, PyTorch's {expected:.6f}")
    print(f"equal weights, equal loss: {first:.6f} and {expected:.6f} nats")
    times = race({"PyTorch eager": theirs, "efx": ours}, options.steps)
    tokens = options.batch * options.context
    print(f"{'':<16}{'ms a step':>12}{'tokens/s':>12}{'of PyTorch':>12}")
    for name, ms in times.items():
        ratio = median_ratio(times["PyTorch eager"], ms)
        middle = statistics.median(ms)
        print(f"{name:<16}{middle:>12.0f}{1e3 * tokens / middle:>12.0f}{ratio:>12.2f}")
    print(
        f"medians of {options.steps} alternating steps; jax {jax.__version__}, "
        f"torch {torch.__version__}, {options.threads} threads"
    )


if __name__ == "__main__":
    main()
