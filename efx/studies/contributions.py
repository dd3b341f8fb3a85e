"""What each part of a trained model is worth: the held-out loss when the part is switched off.

    python -m efx.studies.contributions runs/mod --out runs/worth

A part is a layer, its attention, cross-attention or MLP, a step of a recursion, an expert, a level
of latents with all coarser ones, a learned mask, or the adapters. Switched off, it adds nothing to
the residual stream; a mask is 1. `routed layers` are all of them at once. Columns:

    nats             held-out loss without the part minus loss with it, by the causal decisions
    error            standard error of nats over batches
    gflops           forward GFLOPs of the part on one row, with the selections of training
    nats_per_gflop   nats / gflops
    asleep           nats < 0.001

Parts replace each other, so nats do not add up; and a part that is worth nothing may still have
helped training. --out gets contributions.csv, contributions.md and contributions.png.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import linen as nn

from efx import models
from efx.errors import UsageError
from efx.layers import flops
from efx.layers.attention import Attention
from efx.layers.learned_dropout import AttentionMask, ElementwiseMask, ElementwiseProbsMask
from efx.layers.mlp import MLP
from efx.layers.moe import Experts
from efx.layers.report import label
from efx.layers.soft_experts import SoftMLP
from efx.logging import tables
from efx.models.adapters import Adapter
from efx.models.latent import DecoderLevel
from efx.models.stack import Layer
from efx.parallel import sharding
from efx.routing.mod import MoDBlock
from efx.studies import cli
from efx.train import inference
from efx.train.eval_step import make_eval_step
from efx.train.health import ASLEEP

ROUTED, ADAPTERS = "routed layers", "adapters"


def _zeros(args, result):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)


def _input(args, result):
    return args[0]


# {class: (kind, method, (arguments, result) -> the result of the method when the part is off)}. A
# module is of the first class that fits.
PARTS = {
    Layer: ("layer", "__call__", _input),
    # A step of a recursion. Off, it selects no token for the next step either.
    MoDBlock: ("layer", "__call__", lambda args, result: (args[0], _zeros(args, result[1]))),
    # The finer state joins nothing that was compressed.
    DecoderLevel: ("level", "__call__", lambda args, result: args[1]),
    Experts: ("expert", "__call__", _zeros),
    (MLP, SoftMLP): ("mlp", "__call__", _zeros),
    Attention: ("attention", "__call__", _zeros),
    (AttentionMask, ElementwiseMask): ("mask", "__call__", _input),
    ElementwiseProbsMask: ("probs mask", "drop_probs", _input),
    Adapter: (ADAPTERS, "__call__", _zeros),
}


def intercept_parts(replace):
    """Context manager in which a part returns replace(path, kind, off, args, compute): `off` as in
    PARTS, `compute` a function without arguments."""
    classes = {}  # {path: class of the part}

    def intercept(next_function, args, kwargs, context):
        path, module = "/".join(context.module.path), type(context.module)
        row = next((row for part, row in PARTS.items() if issubclass(module, part)), None)
        if row is None or context.method_name != row[1]:
            return next_function(*args, **kwargs)
        # The block of a layer has the layer's path and is called by it.
        if classes.setdefault(path, module) is not module:
            return next_function(*args, **kwargs)
        compute = functools.partial(next_function, *args, **kwargs)
        return replace(path, row[0], row[2], args, compute)

    return nn.intercept_methods(intercept)


@dataclasses.dataclass
class Part:
    """A row of the result: modules that are switched off together.

    Attributes:
      off: {path: bool array, False, or [E] with one False for an expert}.
      flops: forward FLOPs on one row.
    """

    name: str
    kind: str
    off: dict
    flops: float


def find_parts(model, length):
    """The `Part`s of a model with unrolled layers, in order of computation."""

    def forward_flops():
        return flops.executed.__wrapped__(model, length)  # the function without its cache

    found = {}

    def record(path, kind, off, args, compute):
        _, results = found.setdefault(path, (kind, []))
        results.append(compute())
        return results[-1]

    with intercept_parts(record):
        total = forward_flops()
    parts, routed, adapters = [], {}, {}
    layers = model.blocks()
    for path, (kind, results) in found.items():
        shapes = iter(results)  # of a recursion several: it computes its blocks several times

        def leave_out(name, kind, off, args, compute, path=path, shapes=shapes):
            if name != path:
                return compute()
            return off(args, next(shapes))

        with intercept_parts(leave_out):
            count = total - forward_flops()
        if kind == "expert":
            number = len(results[0])
            for e, keep_E in enumerate(~np.eye(number, dtype=bool)):
                parts.append(Part(f"{label(path)}/{e}", kind, {path: keep_E}, count / number))
            continue
        part = Part(label(path), kind, {path: np.array(False)}, count)
        if kind == ADAPTERS:
            adapters[path] = part
            continue
        parts.append(part)
        if path in layers and layers[path].routing is not None:
            routed[path] = part
    for name, group in ((ROUTED, routed), (ADAPTERS, adapters)):
        if group:
            off = {path: np.array(False) for path in group}
            parts.append(Part(name, name, off, sum(part.flops for part in group.values())))
    return parts


def switch_parts(on):
    """Context manager in which a part is off where on[path] is False.

    Args:
      on: {path: bool array}, as `Part.off`; may be traced.
    """

    def switch(path, kind, off, args, compute):
        result, is_on = compute(), on[path]
        is_on = is_on.reshape(*is_on.shape, *(1,) * (2 * is_on.ndim))  # of experts [E, 1, 1]
        return jax.tree.map(lambda y, z: jnp.where(is_on, y, z), result, off(args, result))

    return intercept_parts(switch)


def measure(workdir, num_batches, step=None):
    """Return (DataFrame with a row for each part, held-out loss with all parts on)."""
    config = cli.config_of_model(workdir)
    built, _, params, variables = inference.restore(config, workdir, step, ("eval",))
    c, model = built.config, models.unrolled(built.model)
    variables = models.unroll_variables(built.model, {"params": params, **variables})
    params, eval_step = variables.pop("params"), make_eval_step(model.clone(selection="causal"), c)

    @jax.jit
    def loss_sums(on, *args):
        with switch_parts(on):
            sums = eval_step(*args)
        return sums["loss"], sums["weights"]

    placement = sharding.Placement(built.mesh, built.rules, c.evaluate.batch_size)
    with sharding.use(built.mesh, built.rules):
        parts, seed = find_parts(model, c.data.seq_len), np.uint32(c.seed)
        all_on = {path: np.ones_like(x) for part in parts for path, x in part.off.items()}
        batches = built.data.eval_batches(c.evaluate.batch_size, num_batches, placement.rows)
        sums = []  # [batches][1 + parts][2]
        for index, batch in enumerate(batches):
            args = params, variables, placement(batch), seed, np.uint32(index)
            sums.append([loss_sums(all_on | off, *args) for off in ({}, *(p.off for p in parts))])
    loss_NP, weight_NP = np.moveaxis(np.array(jax.device_get(sums), np.float64), -1, 0)
    lost_NP = (loss_NP[:, 1:] - loss_NP[:, :1]) / weight_NP[:, 1:]
    weight_N = weight_NP[:, 0]
    table = pd.DataFrame({"part": [p.name for p in parts], "kind": [p.kind for p in parts]})
    table["nats"] = np.average(lost_NP, axis=0, weights=weight_N)
    table["error"] = lost_NP.std(axis=0, ddof=1) / len(lost_NP) ** 0.5
    table["gflops"] = [part.flops / 1e9 for part in parts]
    table["nats_per_gflop"] = table.nats / table.gflops.where(table.gflops > 0)
    table["asleep"] = table.nats < ASLEEP
    return table, loss_NP[:, 0].sum() / weight_N.sum()


def draw(table, path):
    """Draw a bar for each part, with its standard error."""
    import matplotlib.figure
    import seaborn as sns

    figure = matplotlib.figure.Figure(figsize=(8, 1 + 0.22 * len(table)), layout="constrained")
    axes = figure.subplots()
    sns.barplot(table, x="nats", y="part", hue="kind", dodge=False, ax=axes)
    axes.errorbar(table.nats, range(len(table)), xerr=table.error, fmt="none", color="black")
    axes.axvline(ASLEEP, color="gray", linestyle=":")
    axes.set_xlabel("held-out nats per token lost without the part")
    figure.savefig(path, dpi=110)


def study(arguments):
    if arguments.batches < 2:
        raise UsageError(f"--batches={arguments.batches}: must be at least 2")
    folder = cli.output_folder(arguments.out)
    table, loss = measure(arguments.run, arguments.batches, arguments.step)
    folder.mkdir(parents=True, exist_ok=True)
    draw(table, folder / "contributions.png")
    shown = table.assign(asleep=np.where(table.asleep, "asleep", ""))
    rows = tables.markdown(list(table), shown.to_numpy())
    text = f"{rows}\n\nLoss with all parts: {loss:.4f} nats.\n"
    text += f"Command: `{arguments.command}`\n"
    tables.save(folder, "contributions", table.round(6), text)


def main(argv=None):
    parser = cli.Parser("efx.studies.contributions", __doc__)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--batches", type=int, default=16, help="of held-out text (default: 16)")
    help = "directory (default: %(default)s)"
    parser.add_argument("--out", default="runs/contributions", help=help)
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
