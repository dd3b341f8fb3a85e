"""A dense training step of efx against eager PyTorch, on the same CPU cores.

    python -m benchmarks.dense_step            nanoGPT's GPU recipe at batch 12, some minutes
    python -m benchmarks.dense_step --quick    a small model, seconds: only to see that it works

The recipe: 6 layers, 6 heads, 384 wide, context 256, vocabulary 65, no dropout, no bias, exact
GELU, tied output layer, AdamW, clipping at 1, float32. Both sides start from the same weights, must
agree on the first loss, and then take turns on the same batches.
"""

import argparse
import sys

from benchmarks import common
from efx.configs import shakespeare_char
from efx.configs.common import apply
from efx.studies.step_time import Stepper, random_tokens, take_turns

TARGET = 0.72  # of PyTorch's tokens a second, in float32
TOLERANCE = 1e-4  # between the two first losses, in nats


@common.command
def main(argv=None):
    args = _arguments(argv)
    cpus = common.limit_cpus(args.threads)
    try:
        import torch

        from benchmarks import torch_reference
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _fail("PyTorch is not installed; install the extra: pip install -e '.[interop]'")
    torch.set_num_threads(cpus)
    config = _config(args)
    ours = Stepper(config, args.vocab)
    theirs = torch_reference.TrainStep(
        ours.parameters,
        vocab_size=args.vocab,
        context=args.context,
        width=args.width,
        depth=args.depth,
        heads=args.heads,
        bias=args.bias,
        optim=config.optim,
        fused=args.torch_fused,
    )
    batches = random_tokens(config, args.vocab, args.warmup + args.steps)
    print(
        f"{args.depth} layers, {args.heads} heads, {args.width} wide, context {args.context}, "
        f"batch {args.batch}, vocabulary {args.vocab}, float32; {cpus} CPUs; "
        f"PyTorch {torch.__version__}"
    )
    losses = {"PyTorch": [], "efx": []}
    turns = take_turns(
        {
            "PyTorch": lambda turn: losses["PyTorch"].append(theirs(batches[turn])),
            "efx": lambda turn: losses["efx"].append(ours(batches[turn])),
        },
        args.steps,
        args.warmup,
    )
    first = {name: values[0] for name, values in losses.items()}
    print(f"first loss: PyTorch {first['PyTorch']:.6f}, efx {first['efx']:.6f}")
    if abs(first["PyTorch"] - first["efx"]) > TOLERANCE:
        return _fail(f"they differ by more than {TOLERANCE}: not the same function, no comparison")
    tokens = args.batch * args.context
    text, speed = common.ratio(turns["PyTorch"], turns["efx"])
    print(
        common.table(
            ("a step", *common.TIMES, "tokens/s", "of PyTorch's"),
            *(
                (
                    name,
                    *common.times(turns[name]),
                    f"{tokens / turns[name].median:.0f}",
                    text if name == "efx" else "1",
                )
                for name in turns
            ),
        )
    )
    print(f"efx: compiled in {ours.compile_seconds:.1f} s, {ours.memory / 1e6:.0f} MB")
    if not args.quick:
        print(common.verdict("efx's tokens/s over PyTorch's", speed, TARGET, at_least=True))
    return 0


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = dict(batch=12, context=256, width=384, depth=6, heads=6, vocab=65)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bias", action="store_true", help="biases in linear layers and norms")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before these")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument(
        "--torch-fused", action="store_true", help="PyTorch's fused AdamW, not its default"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    quick = dict(batch=4, context=64, width=64, depth=2, heads=2, steps=3, warmup=2)
    if parser.parse_args(argv).quick:
        parser.set_defaults(**quick)
    return common.checked(parser.parse_args(argv), zero=("warmup",))


def _config(args):
    return apply(
        shakespeare_char.get_config("gpu"),
        {
            "data.batch_size": args.batch,
            "data.seq_len": args.context,
            "model.width": args.width,
            "model.depth": args.depth,
            "model.attention.num_heads": args.heads,
            "model.use_bias": args.bias,
            "model.dropout.kind": "none",
        },
    )


def _fail(message):
    print(f"benchmarks.dense_step: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
