"""Cost of the grouped-latent transformer against a dense decoder, by the length of the context.

    python -m benchmarks.latent_cost            context 512, 2048 and 8192: about half an hour
    python -m benchmarks.latent_cost --quick    small models, seconds: only to see that it works
    python -m benchmarks.latent_cost --contexts 512    one of them

Both models have as many blocks of the same width: the decoder on all tokens, the latent transformer
(`configs/latent.py`, with `--variant` any of its variants) in its stack on the latents, in addition
to its levels. A step is a whole training step, with embedding, output layer, loss, clipping and
optimiser, in float32, on the same number of tokens for every context. The two take turns. Memory is
that of the compiled step: its arguments and its temporary arrays.
"""

import argparse
import sys

import numpy as np

from benchmarks import common
from efx import models
from efx.configs import latent, mod
from efx.configs.common import apply


@common.command
def main(argv=None):
    args = arguments(argv)
    cpus = common.limit_cpus(args.threads)
    print(
        f"{args.depth} blocks, {args.heads} heads, {args.width} wide; latent transformer: variant "
        f"{args.variant or 'default'}, {args.latents} latents for {args.group_size} tokens; "
        f"{args.tokens} tokens a step, vocabulary {args.vocab}, float32; {cpus} CPUs"
    )
    ratios = {context: _compare(args, context) for context in args.contexts}
    print(
        common.table(
            ("latent/dense", "time (quartiles)", "FLOPs", "memory"),
            *(
                (context, text, f"{flop_ratio:.3f}", f"{memory:.3f}")
                for context, (text, _, flop_ratio, memory) in ratios.items()
            ),
        )
    )
    print(f"nominal FLOPs are equal at a context of about {_equal_flops(args)}")
    times = {context: time for context, (_, time, _, _) in ratios.items()}
    print(f"step times are equal {_crossing(times)}")
    return 0


def _compare(args, context):
    """(time ratio with quartiles as text, time ratio, of FLOPs, of memory) at one context."""
    steps = common.training_steps(configs(args, context), args.vocab, args.steps, args.warmup)
    print(
        common.table(
            (f"context {context}", *common.TIMES, "tokens/s", "GFLOP", "memory, MB", "params, M"),
            *(
                (
                    name,
                    *common.times(step.times),
                    f"{step.tokens_per_second:.0f}",
                    f"{step.executed / 1e9:.1f}",
                    f"{step.memory / 1e6:.0f}",
                    f"{step.parameters / 1e6:.2f}",
                )
                for name, step in steps.items()
            ),
        )
    )
    latent, dense = steps["latent"], steps["dense"]
    text, time = common.ratio(latent.times, dense.times)
    return text, time, latent.executed / dense.executed, latent.memory / dense.memory


def configs(args, context):
    """The config of each of the two at one context; args: of `arguments`."""
    return {"dense": _dense(args, context), "latent": _latent(args, context)}


def _equal_flops(args):
    """The shortest context, in whole groups, at which a token of the latent model costs less."""
    for groups in range(1, 65536 // args.group_size + 1):
        context = groups * args.group_size
        counts = []
        for make in (_latent, _dense):
            config = make(args, context)
            model = models.build(
                config.model, vocab_size=args.vocab, context=context, dtype="float32"
            )
            counts.append(model.ledger(context).nominal_per_token)
        if counts[0] <= counts[1]:
            return context
    return "more than 65536"


def _crossing(times):
    """The context where the ratio of times passes 1, interpolated linearly in logarithms."""
    contexts = sorted(times)
    if times[contexts[0]] <= 1:
        return f"below a context of {contexts[0]}"
    for shorter, longer in zip(contexts, contexts[1:], strict=False):
        if times[longer] <= 1:
            ends = np.log([times[shorter], times[longer]])
            fraction = ends[0] / (ends[0] - ends[1])
            return f"at a context of about {shorter * (longer / shorter) ** fraction:.0f}"
    return f"above a context of {contexts[-1]}"


def _dense(args, context):
    return _sized(mod.get_config("dense"), args, context)


def _latent(args, context):
    config = latent.get_config(args.variant)
    changes = {name: getattr(args, name) for name in ("group_size", "latents", "level_widths")}
    changes = {f"model.{name}": value for name, value in changes.items()}
    return _sized(apply(config, changes), args, context)


def _sized(config, args, context):
    return apply(
        config,
        {
            "data.seq_len": context,
            "data.batch_size": max(1, args.tokens // context),
            "model.width": args.width,
            "model.depth": args.depth,
            "model.attention.num_heads": args.heads,
            "train.loss_chunk": min(context, 512),
        },
    )


def arguments(argv):
    def whole_numbers(text):
        return tuple(int(number) for number in text.split(","))

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=whole_numbers, default=(512, 2048, 8192))
    sizes = dict(tokens=8192, width=256, depth=8, heads=8, vocab=257, group_size=8)
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--latents", type=whole_numbers, default=(4, 2))
    parser.add_argument("--level-widths", type=whole_numbers, default=(64, 128))
    parser.add_argument("--variant", default="", help="of configs/latent.py, e.g. local")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each model")
    parser.add_argument("--warmup", type=int, default=2, help="untimed turns before these")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    if parser.parse_args(argv).quick:
        parser.set_defaults(
            contexts=(64,),
            tokens=256,
            width=64,
            depth=2,
            heads=4,
            latents=(4,),
            level_widths=(32,),
            steps=3,
            warmup=1,
        )
    return common.checked(parser.parse_args(argv), zero=("warmup",))


if __name__ == "__main__":
    sys.exit(main())
