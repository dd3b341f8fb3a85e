"""What it costs to convert a dense model to Mixture-of-Depths.

    python -m efx.studies.conversion --workdir runs/conversion --jobs 2

For each seed: a dense parent; its conversion (`--mode=convert`), trained with fractions of the
parent's training FLOPs, by the loss alone and with distillation, whose teacher's forward passes
count; the same with every second block left out (`--to layer_drop`); and a Mixture-of-Depths from
scratch with the parent's FLOPs. WORKDIR/table.md has the table, table.csv a row for each run.
Arguments after `--` go to the parent and the model from scratch.
"""

import pathlib
import sys

from efx import run_dir
from efx.config.load import with_variants
from efx.errors import UsageError
from efx.logging import tables
from efx.studies import cli
from efx.studies import runs as runs_lib
from efx.studies.runs import Run

# {stage: (title, --to, variant of the config)}
CONVERSIONS = {
    "mod": ("converted to MoD", "mod", ""),
    "distilled": ("converted to MoD, distilled", "mod", "distill"),
    "drop": ("every second block left out", "layer_drop", ""),
}
COLUMNS = {"eval/loss": "loss", "eval/loss_topk": "loss_topk", "flops": "train_flops",
           "eval/router/routed_fraction": "selected_fraction", "tokens": "tokens"}  # fmt: skip


def from_scratch(arguments, title, variant, seed, flops=0):
    """Return the Run of the parent or of the model from scratch."""
    folder = pathlib.Path(arguments.workdir) / f"seed{seed}" / variant
    config = with_variants(arguments.config, variant)
    words = [f"--config={config}", f"--workdir={folder}", f"--config.seed={seed}"]
    words += ["--config.evaluate.every=0", "--config.sample.every=0", *arguments.extra]
    words += ["--config.steps=0", f"--config.train_flops={flops}"] if flops else []
    return Run(f"{title}, seed {seed}", folder, tuple(words), {"name": title, "seed": seed})


def convert(arguments, parent, stage, fraction, seed, flops):
    """Convert a parent, unless that was done; return the Run that trains the conversion."""
    title, to, variant = CONVERSIONS[stage]
    folder = parent.folder.parent / f"{stage}_{100 * fraction:g}"
    if not run_dir.RunDir(folder).has_result:
        config = with_variants(arguments.config, *filter(None, [variant]))
        words = (f"--config={config}", "--mode=convert", f"--from={parent.folder}", f"--to={to}")
        words += (f"--workdir={folder}", f"--config.seed={seed}")
        words += ("--config.evaluate.every=0", "--config.sample.every=0")
        runs_lib.run_all([Run(f"{title}, seed {seed}", folder, words)])
    title = f"{title}, {100 * fraction:g}% of its FLOPs"
    words = (f"--workdir={folder}", "--config.steps=0", f"--config.train_flops={fraction * flops}")
    return Run(f"{title}, seed {seed}", folder, words, {"name": title, "seed": seed})


def study(arguments):
    """Make the runs, then the table."""
    seeds = cli.numbers("--seeds", arguments.seeds)
    try:
        fractions = [float(text) for text in arguments.fractions.split(",")]
    except ValueError:
        raise UsageError(f"--fractions={arguments.fractions}: use numbers, e.g. 0.01,0.2") from None
    parents = {seed: from_scratch(arguments, "dense parent", "parent", seed) for seed in seeds}
    runs_lib.check(parents.values(), arguments.extra)
    if arguments.print_commands:
        return runs_lib.print_commands(parents.values())
    runs_lib.run_all(parents.values(), arguments.jobs)
    runs = list(parents.values())
    for seed, parent in parents.items():
        flops = runs_lib.results([parent]).flops[0]
        runs.append(from_scratch(arguments, "MoD from scratch", "scratch", seed, flops))
        for stage in CONVERSIONS:
            for fraction in fractions:
                runs.append(convert(arguments, parent, stage, fraction, seed, flops))
    runs_lib.run_all(runs, arguments.jobs)
    results = runs_lib.results(runs)
    table = results.rename(columns=COLUMNS).reindex(columns=["name", "seed", *COLUMNS.values()])
    parent_loss = table[table.name == "dense parent"].set_index("seed").loss
    table.insert(3, "minus_parent", table.loss - table.seed.map(parent_loss))
    text = f"{tables.means_markdown(table)}\nCommand: `{arguments.command}`\n"
    tables.save(arguments.workdir, "table", table, text)


def main(argv=None):
    parser = cli.Parser("efx.studies.conversion", __doc__)
    parser.add_argument("--config", default="convert_mod", help="config file or name, and variants")
    parser.add_runs()
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--fractions", default="0.01,0.05,0.2", help="of the parent's FLOPs")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
