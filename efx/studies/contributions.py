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

import sys

import jax
import numpy as np
import pandas as pd

from efx import models
from efx.config.load import config_of_model
from efx.errors import UsageError
from efx.logging import tables
from efx.models.parts import find_parts, switch_parts
from efx.parallel import sharding
from efx.studies import cli
from efx.train import inference
from efx.train.eval_step import make_eval_step
from efx.train.health import ASLEEP


def measure(workdir, num_batches, step=None):
    """Return (DataFrame with a row for each part, held-out loss with all parts on)."""
    config = config_of_model(workdir)
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
