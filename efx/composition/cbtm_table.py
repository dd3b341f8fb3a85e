"""cBTM against one model trained on everything, at equal training FLOPs: several seeds, one table.

    python -m efx.composition.cbtm_table --workdir runs/cbtm_table --jobs 2

For every seed: one model on everything with the whole budget, a seed model, and from it ensembles
of `--clusters` experts and `--random` experts on random clusters. One cluster is the seed model
trained further. All are evaluated on the same held-out documents. About an hour on 2 CPU cores.
Arguments after `--` go to every run. WORKDIR/table.md is the table; table.csv has a row for each
seed.
"""

import pathlib
import sys

import pandas as pd

from efx import io
from efx.composition import cbtm
from efx.logging import tables
from efx.studies import cli
from efx.studies import runs as runs_lib
from efx.studies.runs import Run

DENSE, SEED_MODEL = "one model on everything", "seed model"


def plan_of_seed(arguments, seed):
    """Return (Run on everything, Run of the seed model, {name of an ensemble: Stages})."""
    workdir = pathlib.Path(arguments.workdir)
    extra = [*arguments.extra, f"--config.seed={seed}"]
    whole = Run(DENSE, workdir, (f"--config={arguments.config}", f"--workdir={workdir}", *extra))
    total, seed_steps, _ = cbtm.budget(whole.config())

    def train(title, name, steps):
        folder = workdir / f"{name}-seed{seed}"
        return cbtm.train_run(f"{title}, seed {seed}", arguments.config, folder, extra, steps)

    dense, seed_run = train(DENSE, "dense", total), train(SEED_MODEL, "seed_model", seed_steps)

    def ensemble(name, count, *settings):
        own = [f"--config.cluster.count={count}", f"--config.ensemble.top_k={min(2, count)}"]
        folder = workdir / f"{name}-seed{seed}"
        settings = [*extra, *own, *settings]
        return cbtm.make_stages(arguments.config, folder, settings, seed_run.folder)

    ensembles = {
        f"{count} cluster" + "s" * (count > 1): ensemble(f"k{count}", count)
        for count in arguments.clusters
    }
    if count := arguments.random:
        control = ensemble("random", count, "--config.cluster.method=random")
        ensembles[f"{count} random clusters"] = control
    return dense, seed_run, ensembles


def evaluate(plan, seed):
    """Return one row for each model and mixture of a seed."""
    from efx.composition import evaluation
    from efx.composition.ensemble import Ensemble

    (dense, seed_run, ensembles), rows = plan, []

    def add(name, row):
        columns = [column for column in row if not column.startswith(("cluster ", "tokens"))]
        rows.append({"name": name, "seed": seed} | {column: row[column] for column in columns})

    others = {DENSE: dense.folder, SEED_MODEL: seed_run.folder}
    for name, stages in ensembles.items():
        (run,) = stages.evaluate
        config = run.config()
        scores, _ = evaluation.score(Ensemble(config, run.folder), config, others)
        evaluation.write(run.folder, scores)
        for model in others:
            add(model, scores[model])
        others = {}  # evaluated once a seed
        for mixture, row in scores.items():
            if config.cluster.count == 1 and mixture == "top 1":
                add(name, row)
            elif config.cluster.count > 1 and mixture.startswith(("top", "uniform", "oracle")):
                add(f"{name}, {mixture}", row)
    return rows


def study(arguments):
    """Make all runs and evaluations, then the table."""
    arguments.clusters = cli.numbers("--clusters", arguments.clusters)
    seeds = cli.numbers("--seeds", arguments.seeds)
    plans = {seed: plan_of_seed(arguments, seed) for seed in seeds}
    independent = [run for dense, seed_run, _ in plans.values() for run in (seed_run, dense)]
    stages = [stages for *_, ensembles in plans.values() for stages in ensembles.values()]
    clusters = [run for stage in stages for run in stage.cluster]
    experts = [run for stage in stages for run in stage.experts]
    runs_lib.check([*independent, *experts], arguments.extra)
    if arguments.print_commands:
        return runs_lib.print_commands([*clusters, *independent, *experts])
    for runs in (clusters, independent, experts):
        runs_lib.run_all(runs, arguments.jobs)
    rows = pd.DataFrame([row for seed, plan in plans.items() for row in evaluate(plan, seed)])
    folder = io.folder(arguments.workdir)
    rows.to_csv(folder / "table.csv", index=False)
    text = tables.means_markdown(rows) + f"\nCommand: `{arguments.command}`\n"
    io.write_atomic(folder / "table.md", text)
    print(text)


def main(argv=None):
    parser = cli.Parser("efx.composition.cbtm_table", __doc__)
    parser.add_argument("--config", default="cbtm:table", help="config file or name, and variants")
    parser.add_runs()
    parser.add_argument("--clusters", default="1,2,4,8", help="experts of each ensemble")
    parser.add_argument("--random", type=int, default=4, metavar="N", help="control; 0: none")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
