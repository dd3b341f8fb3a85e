"""cBTM against one model trained on everything, at equal training FLOPs: several seeds, one table.

    python -m efx.composition.cbtm_table --workdir runs/cbtm_table --jobs 2

For every seed: one model on everything with the whole budget, a seed model, and from it ensembles
of 1, 2, 4 and 8 experts, and 4 experts on random clusters. One cluster is the seed model trained
further. All are evaluated on the same held-out documents. About an hour on 2 CPU cores.
Arguments after `--` go to every run. WORKDIR/table.md is the table; table.csv has a row for each
seed.
"""

import pathlib
import sys

import pandas as pd

from efx.composition import cbtm
from efx.logging import tables
from efx.studies import cli
from efx.studies import runs as runs_lib
from efx.studies.runs import Run

DENSE, SEED_MODEL = "one model on everything", "seed model"
CLUSTERS, RANDOM_CLUSTERS = (1, 2, 4, 8), 4


def plan_of_seed(arguments, seed):
    """Return (Run on everything, Run of the seed model, {name of an ensemble: its stages})."""
    workdir, source = pathlib.Path(arguments.workdir), arguments.config
    extra = [*arguments.extra, f"--config.seed={seed}"]
    whole = Run(DENSE, workdir, (f"--config={source}", f"--workdir={workdir}", *extra))
    total, seed_steps, _ = cbtm.budget(whole.config())

    def folder(name):
        return workdir / f"{name}-seed{seed}"

    dense = cbtm.train_run(f"{DENSE}, seed {seed}", source, folder("dense"), extra, total)
    title = f"{SEED_MODEL}, seed {seed}"
    seed_run = cbtm.train_run(title, source, folder("seed_model"), extra, seed_steps)

    def ensemble(name, count, *settings):
        own = [f"--config.cluster.count={count}", f"--config.ensemble.top_k={min(2, count)}"]
        return cbtm.make_stages(source, folder(name), [*extra, *own, *settings], seed_run.folder)

    ensembles = {
        f"{count} cluster" + "s" * (count > 1): ensemble(f"k{count}", count) for count in CLUSTERS
    }
    control = ensemble("random", RANDOM_CLUSTERS, "--config.cluster.method=random")
    ensembles[f"{RANDOM_CLUSTERS} random clusters"] = control
    return dense, seed_run, ensembles


def evaluate(plan, seed):
    """Return a DataFrame with a row for each model and mixture of a seed."""
    from efx.composition.ensemble import Ensemble
    from efx.composition.evaluation import score

    dense, seed_run, ensembles = plan
    others, parts = {DENSE: (dense.folder, None), SEED_MODEL: (seed_run.folder, None)}, []
    for name, (_, _, experts, (evaluation,)) in ensembles.items():
        table = score(Ensemble(evaluation.config(), evaluation.folder), others)
        table = table.drop(columns=[column for column in table if column.startswith("cluster ")])
        names = {row: f"{name}, {row}" for row in table.index}
        names = {row: names[row] for row in names if row.startswith(("top", "uniform", "oracle"))}
        if len(experts) == 1:  # then all mixtures are equal
            names = {"top 1": name}
        parts += [table.loc[list(others)], table.loc[list(names)].rename(names)]
        others = {}  # evaluated once a seed
    return pd.concat(parts).assign(seed=seed).rename_axis("name").reset_index()


def study(arguments):
    """Make all runs and evaluations, then the table."""
    seeds = cli.numbers("--seeds", arguments.seeds)
    plans = {seed: plan_of_seed(arguments, seed) for seed in seeds}
    single = [run for dense, seed_run, _ in plans.values() for run in (seed_run, dense)]
    stages = [stages for *_, ensembles in plans.values() for stages in ensembles.values()]
    clusterings = [run for clustering, *_ in stages for run in clustering]
    experts = [run for _, _, experts, _ in stages for run in experts]
    runs_lib.check([*single, *experts], arguments.extra)
    if arguments.print_commands:
        return runs_lib.print_commands([*clusterings, *single, *experts])
    for runs in (clusterings, single, experts):
        runs_lib.run_all(runs, arguments.jobs)
    table = pd.concat([evaluate(plan, seed) for seed, plan in plans.items()])
    text = tables.means_markdown(table) + f"\nCommand: `{arguments.command}`\n"
    tables.save(arguments.workdir, "table", table, text)


def main(argv=None):
    parser = cli.Parser("efx.composition.cbtm_table", __doc__)
    parser.add_argument("--config", default="cbtm:table", help="config file or name, and variants")
    parser.add_runs()
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
