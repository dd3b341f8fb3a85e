"""Soft experts on fewer latents: s (K/m)^2 attention scores in place of K^2, by ledger and clock.

    python -m benchmarks.soft_experts            K = 2048 latents, 256 wide: some minutes
    python -m benchmarks.soft_experts --quick    tiny sizes, seconds: only to see that it works

For every pair (s channels, shrink m): the attention of one block on K latents against that of s
channels on K/m latents, as claimed, then the whole blocks, projections and MLPs included,
forwards and backwards, in float32. All of them take turns in one run. Nominal ratios of FLOPs count
the pairs that the mask allows, executed ones the products in the traced program.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks import common
from efx import models
from efx.configs.common import apply, base
from efx.errors import UsageError
from efx.layers import attend, costs, flops
from efx.layers.call import Call
from efx.layers.stack import Layer
from efx.studies.step_time import take_turns


@common.command
def main(argv=None):
    args = _arguments(argv)
    cpus = common.limit_cpus(args.threads)
    specs = {"dense": (_spec(args, 0), args.latents)}
    for channels, shrink in args.pairs:
        if args.latents % shrink:
            raise UsageError(f"--latents={args.latents} does not divide by {shrink}")
        spec = _spec(args, channels)
        specs[f"{channels} channels, K/{shrink}"] = spec, args.latents // shrink
    print(
        f"K = {args.latents} latents, {args.width} wide, {args.heads} heads, batch {args.batch}, "
        f"float32, {cpus} CPUs; scores and values alone, then whole blocks"
    )
    claims = {name: _claim(args, name) for name in specs}
    attention = take_turns(
        {name: _attention(spec, length, args) for name, (spec, length) in specs.items()},
        args.rounds,
        args.warmup,
    )
    _report(
        "attention",
        specs,
        attention,
        claims,
        lambda nominal: nominal["attention_scores"],
        _executed_attention,
    )
    blocks = take_turns(
        {name: _block(spec, length, args) for name, (spec, length) in specs.items()},
        args.rounds,
        args.warmup,
    )
    _report("block", specs, blocks, claims, lambda nominal: sum(nominal.values()), _executed_block)
    for name, claim in claims.items():
        ratio = common.ratio(attention[name], attention["dense"])[1]
        cpu = np.median(attention[name].cpu) / np.median(attention["dense"].cpu)
        print(
            f"{name}: attention over dense, clock {ratio:.3f}, CPU time {cpu:.3f}, "
            f"claim {claim:.3f}"
        )
    return 0


def _report(title, specs, turns, claims, total, executed):
    """Prints a table; `total` sums FLOPs of a block's components that count, `executed` is their
    traced number from a spec and a length."""

    def nominal(spec, length):
        attention = costs.attention_flops(spec.block, length, flops.causal_pairs(length))
        return total(attention | costs.mlp_flops(spec.block, length))

    def ratios(count):
        counts = {name: count(spec, length) for name, (spec, length) in specs.items()}
        return {name: f"{count / counts['dense']:.4f}" for name, count in counts.items()}

    nominal_ratios, executed_ratios = ratios(nominal), ratios(executed)
    rows = [
        (
            name,
            *common.times(turns[name]),
            f"{claims[name]:.4f}",
            nominal_ratios[name],
            executed_ratios[name],
            common.ratio(turns[name], turns["dense"])[0],
        )
        for name in specs
    ]
    titles = ("scores, s/m^2", "FLOPs, nominal", "FLOPs, executed", "time / dense")
    print(common.table((title, *common.TIMES, *titles), *rows))


def _claim(args, name):
    for channels, shrink in args.pairs:
        if name == f"{channels} channels, K/{shrink}":
            return channels / shrink**2
    return 1.0


def _spec(args, channels):
    config = apply(
        base(),
        {
            "model.width": args.width,
            "model.attention.num_heads": args.heads,
            "model.depth": 1,
            "model.soft_experts.num": channels,
            "model.soft_experts.hidden_multiple": args.hidden_multiple,
            "model.soft_experts.tied": False,  # as in results/speed_soft_experts.json
        },
    )
    model = models.build(config.model, vocab_size=256, context=args.latents, dtype="float32")
    return model.specs()[0]


def _normal(*shape):
    draw = np.random.default_rng(0)
    return jnp.asarray(draw.standard_normal(shape, np.float32))


def _shape(spec, length, batch):
    """The shape of queries, keys and values of all channels."""
    block = spec.block
    heads = costs.channels(block) * block.attention.num_heads
    return batch, length, heads, block.attention.head_dim


def _executed_attention(spec, length):
    """FLOPs of the scores and weighted values of one sequence."""
    q_BTNH = jax.ShapeDtypeStruct(_shape(spec, length, 1), jnp.float32)
    return flops.jaxpr_flops(functools.partial(attend.attend, scale=1.0), q_BTNH, q_BTNH, q_BTNH)


def _executed_block(spec, length):
    """FLOPs of the block on one sequence."""
    x_BTD = jax.ShapeDtypeStruct((1, length, spec.block.width), jnp.float32)
    call = Call(jnp.arange(length, dtype=jnp.int32)[None], train=True)
    layer = Layer(spec)
    return flops.jaxpr_flops(lambda key, x: layer.init(key, x, call), jax.random.key(0), x_BTD)


def _attention(spec, length, args):
    """Forwards and backwards through scores and weighted values of all channels."""
    q_BTNH, k_BTNH, v_BTNH, d_BTNH = (_normal(*_shape(spec, length, args.batch)) for _ in range(4))
    attention = functools.partial(attend.attend, scale=spec.block.attention.head_dim**-0.5)

    @jax.jit
    def forward_and_backward(q_BTNH, k_BTNH, v_BTNH):
        output, pullback = jax.vjp(attention, q_BTNH, k_BTNH, v_BTNH)
        return output, pullback(d_BTNH)

    return lambda turn: jax.block_until_ready(forward_and_backward(q_BTNH, k_BTNH, v_BTNH))


def _block(spec, length, args):
    layer, x_BTD = Layer(spec), _normal(args.batch, length, args.width)
    call = Call(jnp.arange(length, dtype=jnp.int32)[None], train=True)
    params = nn.unbox(layer.init(jax.random.key(0), x_BTD, call))["params"]

    @jax.jit
    def forward_and_backward(params, x_BTD):
        output, pullback = jax.vjp(lambda p, x: layer.apply({"params": p}, x, call), params, x_BTD)
        return output, pullback(x_BTD)

    return lambda turn: jax.block_until_ready(forward_and_backward(params, x_BTD))


def _pairs(text):
    pairs = [pair.partition(":")[::2] for pair in text.split(",")]
    if not all(number.isdigit() and int(number) for pair in pairs for number in pair):
        raise UsageError(f"--pairs={text}: expected channels:shrink, as in 4:2,12:8")
    return [(int(channels), int(shrink)) for channels, shrink in pairs]


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = dict(latents=2048, width=256, heads=4, batch=1)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--hidden-multiple", type=float, default=4.0, help="of an expert's MLP")
    parser.add_argument("--pairs", default="4:4,4:2,12:8", help="channels:shrink, ...")
    parser.add_argument("--rounds", type=int, default=10, help="timed passes of each")
    parser.add_argument("--warmup", type=int, default=2, help="untimed passes before these")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few passes")
    quick = dict(latents=128, width=32, heads=2, rounds=3, warmup=1)
    if parser.parse_args(argv).quick:
        parser.set_defaults(**quick)
    args = common.checked(parser.parse_args(argv), zero=("warmup",))
    args.pairs = _pairs(args.pairs)
    return args


if __name__ == "__main__":
    sys.exit(main())
