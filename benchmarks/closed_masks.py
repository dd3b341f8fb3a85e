"""Savings of leaving out closed tokens at inference, against computing all and masking them.

    python -m benchmarks.closed_masks            512 wide, 8 layers: ten minutes or more
    python -m benchmarks.closed_masks --quick    a small model, seconds: only to see that it works

`configs/learned_dropout.py:skip` at the size below: one mask value a token, known before the MLP.
The masks' shifts are set so that the given fraction of tokens is open; all other parameters are as
initialised. Forward passes over whole sequences, and decoding steps of several rows, with and
without `skip_tile`, take turns; FLOPs are traced.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from efx import models
from efx.configs import learned_dropout
from efx.configs.common import apply
from efx.errors import UsageError
from efx.layers import flops
from efx.layers.learned_dropout import AttentionMask
from efx.studies.step_time import take_turns


@common.command
def main(argv=None):
    args = _arguments(argv)
    cpus = common.limit_cpus(args.threads)
    print(
        f"{args.depth} layers, {args.heads} heads, {args.width} wide, context {args.context}, "
        f"float32, {args.tile} tokens a tile; {jax.devices()[0].device_kind}, {cpus} CPUs"
    )
    full, skipping = _model(args, 0), _model(args, args.tile)
    params = models.init(full, jax.random.key(0))["params"]
    params = jax.tree.map(lambda leaf: leaf.unbox(), params, is_leaf=lambda x: hasattr(x, "unbox"))
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, args.vocab, (args.batch, args.context)), jnp.int32)
    mlp = full.ledger(args.context).nominal["mlp"]
    total_flops = flops.executed(full, args.context, train=False)
    rows = []
    for fraction in args.shares:
        params = opened(full, params, tokens_BT, fraction)
        runs = {"full": _forward(full, params, tokens_BT)}
        runs["skip"] = _forward(skipping, params, tokens_BT)
        outputs = [float(runs[name](0)) for name in runs]
        np.testing.assert_allclose(*outputs, rtol=1e-3)  # the same function
        turns = take_turns(runs, args.rounds)
        cells = [f"{fraction:.0%}", common.ratio(turns["skip"], turns["full"])[0]]
        cells.append(f"{1.0 - (1.0 - fraction) * mlp / total_flops:.3f}")
        for batch in args.batches:
            runs = {
                name: _decode(model, params, batch, args)
                for name, model in (("full", full), ("skip", skipping))
            }
            turns = take_turns(runs, args.rounds)
            cells.append(common.ratio(turns["skip"], turns["full"])[0])
        rows.append(cells)
    titles = [f"{args.steps} tokens decoded at batch {batch}" for batch in args.batches]
    print(common.table(("open", "forward pass", "its FLOPs", *titles), *rows))
    return 0


def opened(model, params, tokens_BT, fraction):
    """The parameters with shifts at which `fraction` of the tokens is open, layer by layer."""

    @jax.jit
    def angles(params):
        _, state = model.apply(
            {"params": params},
            tokens_BT,
            mutable=("intermediates", "masks"),
            capture_intermediates=lambda module, method: (
                isinstance(module, AttentionMask) and method == "angle"
            ),
        )
        return state["intermediates"]["layers"]

    angles_of_layer = angles(params)
    layers = dict(params["layers"])
    for name, block in angles_of_layer.items():
        u_BT1 = block["dropout_mlp_output"]["angle"][0]
        # A token is open if |u + b| < pi / 2: b moves the quantile of u to pi / 2.
        shift_1 = jnp.pi / 2 - jnp.quantile(u_BT1, fraction)
        mask = {**layers[name]["dropout_mlp_output"], "mask_shift": shift_1[None]}
        layers[name] = {**layers[name], "dropout_mlp_output": mask}
    return {**params, "layers": layers}


def _forward(model, params, tokens_BT):
    function = jax.jit(
        lambda params, tokens: jnp.mean(model.apply({"params": params}, tokens) ** 2)
    )
    return lambda turn: jax.block_until_ready(function(params, tokens_BT))


def _decode(model, params, batch, args):
    """`args.steps` new tokens for each of `batch` rows, after a prompt of half the context."""
    cache = models.init_cache(model, batch, args.context)
    rng = np.random.default_rng(1)
    prompt_BT = jnp.asarray(rng.integers(0, args.vocab, (batch, args.context // 2)), jnp.int32)
    positions_BT = jnp.tile(jnp.arange(args.context // 2)[None], (batch, 1))

    def step(cache, tokens_BT, positions_BT):
        logits, state = model.apply(
            {"params": params, "cache": cache},
            tokens_BT,
            positions_BT,
            decode=True,
            cache_size=args.context,
            mutable=["cache"],
        )
        return state["cache"], jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32)

    @jax.jit
    def decode_all(cache, tokens_B1):
        def decode_one(carry, position):
            cache, tokens_B1 = carry
            return step(cache, tokens_B1, jnp.full((batch, 1), position)), None

        positions = args.context // 2 + jnp.arange(args.steps)
        return jax.lax.scan(decode_one, (cache, tokens_B1), positions)[0][1]

    cache, tokens_B1 = jax.jit(step)(cache, prompt_BT, positions_BT)
    return lambda turn: jax.block_until_ready(decode_all(cache, tokens_B1))


def _model(args, tile):
    config = apply(
        learned_dropout.get_config("skip"),
        {
            "data.seq_len": args.context,
            "model.width": args.width,
            "model.depth": args.depth,
            "model.attention.num_heads": args.heads,
            "model.dropout.attention.skip_tile": tile,
        },
    )
    return models.build(config.model, vocab_size=args.vocab, context=args.context, dtype="float32")


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = dict(batch=4, context=1024, width=512, depth=8, heads=8, vocab=256, tile=128, steps=32)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few rounds")
    quick = dict(batch=2, context=64, width=64, depth=2, heads=2, tile=16, steps=4, rounds=2)
    if parser.parse_args(argv).quick:
        parser.set_defaults(**quick)
    args = common.checked(parser.parse_args(argv), zero=("shares",))
    if max(args.shares) > 1:
        raise UsageError(f"--shares={max(args.shares)}: of the tokens, at most 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
