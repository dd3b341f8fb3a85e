"""A Mixture-of-Depths training step against its dense twin's, and the cost of routing itself.

    python -m benchmarks.mod_step            512 wide, 8 layers, context 1024: some minutes
    python -m benchmarks.mod_step --quick    a small model, seconds: only to see that it works

Every second block computes 12.5% of the tokens (`configs/mod.py` at the size below). A step is a
whole training step, with embedding, output layer, loss, clipping and AdamW, in float32. The two
models take turns. Then one routed layer alone, forwards and backwards, against the same block
without router on as many tokens as it routes: the difference is the routing (scores, top-k,
gather, scatter, gate, auxiliary loss, statistics).
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks import common
from efx.configs import mod
from efx.configs.common import apply
from efx.layers.call import Call
from efx.layers.stack import Layer
from efx.routing import selection
from efx.studies.step_time import take_turns

STEP_TARGET = 0.58  # of the dense step's time
ROUTING_TARGET = 0.06  # of a routed layer's time


@common.command
def main(argv=None):
    args = _arguments(argv)
    cpus = common.limit_cpus(args.threads)
    steps = common.training_steps(
        {"dense": _config(args, "dense"), "MoD": _config(args, "")},
        args.vocab,
        args.steps,
        args.warmup,
    )
    print(
        f"{args.depth} layers, {args.heads} heads, {args.width} wide, context {args.context}, "
        f"batch {args.batch}, vocabulary {args.vocab}, float32; every {args.every}. block at "
        f"{args.capacity:.1%}; loss in slices of {args.loss_chunk or args.context}; {cpus} CPUs"
    )
    text, value = common.ratio(steps["MoD"].times, steps["dense"].times)
    print(
        common.table(
            ("a step", *common.TIMES, "tokens/s", "GFLOP", "GFLOP/s", "memory, MB"),
            *(
                (
                    name,
                    *common.times(step.times),
                    f"{step.tokens_per_second:.0f}",
                    f"{step.executed / 1e9:.0f}",
                    f"{step.executed / 1e9 / step.times.median:.1f}",
                    f"{step.memory / 1e6:.0f}",
                )
                for name, step in steps.items()
            ),
        )
    )
    flop_ratio = steps["MoD"].executed / steps["dense"].executed
    print(f"MoD/dense: time {text}, FLOPs {flop_ratio:.3f}")
    layers = _layers(steps["MoD"].model, args)
    turns = take_turns(layers, args.layer_rounds, args.warmup)
    routed, body = turns["routed layer"], turns["its block alone"]
    print(
        common.table(
            ("one layer", *common.TIMES),
            *((name, *common.times(values)) for name, values in turns.items()),
        )
    )
    routing_fraction = 1.0 - body.median / routed.median
    ratio_text, ratio = common.ratio(routed, turns["dense layer"])
    print(f"routed layer / dense layer: {ratio_text}")
    routed_fraction = sum(s.routing is not None for s in steps["MoD"].model.specs()) / args.depth
    stack = 1.0 - routed_fraction + routed_fraction * ratio
    print(f"the stack of layers, MoD/dense: {stack:.3f}")
    if not args.quick:
        print(common.verdict("stack of layers, MoD/dense", stack, STEP_TARGET, at_least=False))
        print(common.verdict("step time, MoD/dense", value, STEP_TARGET, at_least=False))
        title = "routing, fraction of a routed layer"
        print(common.verdict(title, routing_fraction, ROUTING_TARGET, at_least=False))
        memory = steps["MoD"].memory / steps["dense"].memory
        print(common.verdict("memory, MoD/dense", memory, 1.0, at_least=False))
    return 0


def _layers(model, args):
    """{name: function of the turn}: forwards and backwards through single layers."""
    spec = next(spec for spec in model.specs() if spec.routing is not None)
    size = selection.num_slots(spec.capacity, args.context)
    dense = dataclasses.replace(spec, routing=None)
    return {
        "dense layer": _layer(dense, args.batch, args.context, args.width),
        "routed layer": _layer(spec, args.batch, args.context, args.width),
        "its block alone": _layer(dense, args.batch, size, args.width),
    }


def _layer(spec, batch, length, width):
    layer = Layer(spec)
    draw = np.random.default_rng(0)
    x_BTD, cotangent_BTD = (
        jnp.asarray(draw.standard_normal((batch, length, width), np.float32)) for _ in range(2)
    )
    call = Call(jnp.arange(length, dtype=jnp.int32)[None], train=True, selection="train")
    variables = nn.unbox(layer.init(jax.random.key(0), x_BTD, call))
    params = variables["params"]
    state = {"state": variables["state"]} if "state" in variables else {}

    def forward(params, x_BTD):
        out_BTD, sown = layer.apply(
            {"params": params, **state}, x_BTD, call, mutable=("losses", "stats", *state)
        )
        extra = sum(jnp.sum(jnp.asarray(loss)) for loss in jax.tree.leaves(sown.get("losses", {})))
        return (out_BTD, jnp.asarray(extra, jnp.float32)), sown

    @jax.jit
    def forward_and_backward(params, x_BTD, cotangent_BTD):
        outputs, pullback, sown = jax.vjp(forward, params, x_BTD, has_aux=True)
        return outputs, pullback((cotangent_BTD, jnp.float32(0.01))), sown

    return lambda turn: jax.block_until_ready(forward_and_backward(params, x_BTD, cotangent_BTD))


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = dict(batch=4, context=1024, width=512, depth=8, heads=8, vocab=8192, every=2)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--capacity", type=float, default=0.125, help="fraction of tokens routed")
    parser.add_argument(
        "--loss-chunk", type=int, default=0, help="config.train.loss_chunk of both models"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each model")
    parser.add_argument("--layer-rounds", type=int, default=20, help="timed passes of each layer")
    parser.add_argument("--warmup", type=int, default=2, help="untimed turns before these")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    quick = dict(
        batch=2, context=128, width=64, depth=4, heads=2, vocab=256, steps=3, layer_rounds=3
    )
    if parser.parse_args(argv).quick:
        parser.set_defaults(**quick)
    return common.checked(parser.parse_args(argv), zero=("loss_chunk", "warmup"))


def _config(args, variant):
    return apply(
        mod.get_config(variant),
        {
            "data.batch_size": args.batch,
            "data.seq_len": args.context,
            "model.width": args.width,
            "model.depth": args.depth,
            "model.attention.num_heads": args.heads,
            "model.depth_routing.every": args.every,
            "model.depth_routing.capacity": args.capacity,
            "train.loss_chunk": args.loss_chunk,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
