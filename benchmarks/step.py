"""Training steps side by side: Mixture-of-Depths, experts, masks and latents over dense, and dense
over eager PyTorch.

    python -m benchmarks.step                       every part, some minutes of 2 CPU cores
    python -m benchmarks.step --parts mod latent    some of them
    python -m benchmarks.step --quick               tiny sizes, seconds: only to see that it works
    python -m benchmarks.step --configs mod:dense,smoke mod:smoke    configs as they are

A step is a whole training step in float32: forward, loss, backward, clipping, optimiser. The models
of a part take turns in one process; ratios are medians over turns, with quartiles.
"""

import argparse
import sys

from benchmarks import common
from benchmarks.stepper import Stepper, random_tokens
from efx.config.load import load_config
from efx.config.names import apply
from efx.errors import UsageError

SIZE = {
    "data.batch_size": 4,
    "data.seq_len": 1024,
    "model.width": 512,
    "model.depth": 8,
    "model.attention.num_heads": 8,
}
QUICK = {
    "data.batch_size": 2,
    "data.seq_len": 64,
    "model.width": 32,
    "model.depth": 4,
    "model.attention.num_heads": 2,
}
MOE = {"model.mlp.kind": "moe", "model.mlp.moe.num_experts": 8, "model.mlp.moe.top_k": 2}
# {part: {name: (config, changes)}}; the first of a part is the baseline.
PARTS = {
    "mod": {
        "dense": ("mod:dense", {}),
        "dense, half as deep": ("mod:dense", {"model.depth": 4}),
        "MoD 12.5%": ("mod", {}),
        "MoD 12.5%, attention only": ("mod", {"model.depth_routing.target": "attention"}),
        "MoD 12.5%, MLP only": ("mod:published", {"model.depth_routing.target": "mlp"}),
        "recursion": ("mod:recursion", {"model.depth": 5}),
    },
    "experts": {
        "dense": ("mod:dense", {}),
        "MoE, 2 of 8": ("mod:dense", MOE),
        "staged MoDE": ("mod", MOE),
    },
    "masks": {
        "dense": ("learned_dropout:none", {}),
        "masks": ("learned_dropout", {}),
        "elementwise masks": ("learned_dropout:elementwise", {}),
    },
    "latent": {
        "dense": ("mod:dense", {"model.width": 256}),
        "latent": ("latent", {"model.width": 256}),
        "latent, local levels": ("latent:local", {"model.width": 256}),
    },
}


def configs_of(part, quick, loss_chunk):
    """Return {name: config} of a part."""
    found = {}
    for name, (source, changes) in PARTS[part].items():
        size = SIZE | changes
        if quick:
            size = QUICK | changes | {"model.width": QUICK["model.width"]}
            size["model.depth"] = -(-changes.get("model.depth", 8) // 2)
        if source.startswith("latent"):
            size |= {"model.level_widths": (size["model.width"] // 2,) * 2}
            size |= {"model.level_heads": (1, 1)} if quick else {}
        found[name] = apply(load_config(source), size | {"train.loss_chunk": loss_chunk})
    return found


def over_pytorch(quick, rounds):
    """Return {name: Times} of the same dense model in efx and in eager PyTorch."""
    try:
        import torch

        from benchmarks.torch_reference import TrainStep
    except ImportError:
        raise UsageError("--parts torch: install the extra interop") from None
    size = {"data.batch_size": 12, "data.seq_len": 256, "model.width": 384, "model.depth": 6}
    size |= {"model.attention.num_heads": 6}
    config = apply(load_config("gpt2"), (QUICK if quick else size) | {"train.accumulation": 1})
    step = Stepper(config, 256)
    torch.set_num_threads(2)
    reference = TrainStep(
        step.parameters, optim=config.optim, vocab_size=256, context=config.data.seq_len,
        width=config.model.width, depth=config.model.depth,
        heads=config.model.attention.num_heads, bias="norm_final/bias" in step.parameters,
    )  # fmt: skip
    tokens_BT1 = random_tokens(config, 256)
    first = step(tokens_BT1), reference(tokens_BT1)
    if abs(first[0] - first[1]) > 1e-3:
        raise AssertionError(f"the losses of one function differ: {first}")
    calls = {"PyTorch": lambda turn: reference(tokens_BT1), "efx": lambda turn: step(tokens_BT1)}
    return common.take_turns(calls, rounds)


@common.command
def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [*PARTS, "torch"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    help = "configs to time in place of the parts, the baseline first"
    parser.add_argument("--configs", nargs="+", default=[], metavar="CONFIG", help=help)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--loss-chunk", type=int, default=0, help="config.train.loss_chunk")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each model")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    args = parser.parse_args(argv)
    common.limit_cpus(args.threads)
    rounds = 3 if args.quick else args.steps
    for part in ["configs"] if args.configs else args.parts:
        if part == "torch":
            times = over_pytorch(args.quick, rounds)
            text = common.ratio(times["PyTorch"], times["efx"])
            print(f"\n== torch\ndense, tokens per second over eager PyTorch: {text}")
            continue
        configs = {source: load_config(source) for source in args.configs}
        configs = configs or configs_of(part, args.quick, args.loss_chunk)
        steps = common.training_steps(configs, args.vocab, rounds)
        base = next(iter(steps.values()))
        rows = [
            (
                name,
                f"{1e3 * step.times.median:.1f}",
                common.ratio(step.times, base.times),
                f"{step.nominal / base.nominal:.3f}",
                f"{step.executed / base.executed:.3f}",
                f"{step.memory / base.memory:.3f}",
                f"{step.tokens / step.times.median:,.0f}",
            )
            for name, step in steps.items()
        ]
        header = ("model", "ms", "time ratio", "nominal FLOPs", "executed", "memory", "tokens/s")
        print(f"\n== {part}, vocabulary {args.vocab}\n{common.table(header, *rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
