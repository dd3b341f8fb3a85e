"""cBTM against one model on everything, at equal training FLOPs: several seeds, one table.

    python -m efx.cbtm.table --workdir runs/cbtm_table

For every seed: one model trained on everything with the whole budget; a seed model; from it, the
ensembles of `--clusters` experts, each with its own clustering; and, as the control, `--random`
experts on random clusters. One cluster is the seed model trained further on everything. All are
asked about the same held-out documents. About an hour on 2 cores as it stands
(configs/cbtm.py:table); arguments after `--` go to every run, to scale the study up or down.

WORKDIR/table.md has the table, table.json its numbers: of every seed, so that more can be made of
them. What is finished is passed over: start the same command again to go on.
"""

import pathlib
import statistics
import sys

from efx import tables
from efx.cbtm import run as cbtm
from efx.metrics import portion, quantity
from efx.studies import cli
from efx.studies.sweep import final_row
from efx.tables import mean_and_spread

DENSE, SEED_MODEL = "one model on everything", "seed model"


def make_plan(arguments, extra, seed):
    """(Job of one model on everything, Job of the seed model, {name of an ensemble: its Plan})."""
    top, extra = pathlib.Path(arguments.workdir), [*extra, f"--config.seed={seed}"]
    everything = (f"--config={arguments.config}", f"--workdir={top}", *extra)
    total, first, _ = cbtm.budget(cbtm.Job(DENSE, top, everything).config())

    def train(title, name, steps):
        folder = top / f"{name}-seed{seed}"
        return cbtm.train_job(f"{title}, seed {seed}", arguments.config, folder, extra, steps)

    dense, seed_job = train(DENSE, "dense", total), train(SEED_MODEL, "seed_model", first)

    def ensemble(name, count, *settings):
        settings = [*extra, f"--config.cluster.count={count}", *settings]
        settings += [f"--config.ensemble.top_k={min(2, count)}"]
        folder = top / f"{name}-seed{seed}"
        return cbtm.make_plan(arguments.config, folder, settings, seed_job.folder)

    ensembles = {
        f"{count} cluster" + "s" * (count > 1): ensemble(f"k{count}", count)
        for count in arguments.clusters
    }
    if count := arguments.random:
        control = ensemble("random", count, "--config.cluster.method=random")
        ensembles[f"{count} random clusters"] = control
    return dense, seed_job, ensembles


def run(plans, jobs):
    """Everything that is not finished: what waits for nothing first, then the experts."""
    ensembles = [plan for *_, named in plans for plan in named.values()]
    cbtm.run_jobs([job for plan in ensembles for job in plan.cluster], jobs)
    cbtm.run_jobs([job for dense, seed, _ in plans for job in (seed, dense)], jobs)
    cbtm.run_jobs([job for plan in ensembles for job in plan.experts], jobs)


def evaluate(plans):
    """({row: {column: [value of each seed]}}, fractions of the held-out text that were scored)."""
    from efx.cbtm import evaluation
    from efx.cbtm.ensemble import Ensemble

    models, table, fractions = {}, {}, []
    for dense, seed_job, ensembles in plans:
        others = {DENSE: dense.folder, SEED_MODEL: seed_job.folder}
        for name, plan in ensembles.items():
            (job,) = plan.evaluate
            config = job.config()
            ensemble = Ensemble(config, job.folder)
            result, held_out = evaluation.score(ensemble, config, others)
            evaluation.write(job.folder, result)
            fractions.append(held_out.fraction)
            for model, folder in others.items():
                _add(models, model, result["models"][model], _flops(folder))
            others = {}  # asked once a seed
            flops = _flops(seed_job.folder, *ensemble.folders)
            if ensemble.count == 1:
                _add(table, name, result["mixtures"]["top 1"], flops)
                continue
            for mixture, row in result["mixtures"].items():
                _add(table, f"{name}, {mixture}", row, flops)
    return {**models, **table}, fractions


def _flops(*folders):
    return sum(final_row(folder)["flops"] for folder in folders)


def _add(table, title, row, flops):
    values = {
        "held-out loss (nats)": row["loss"],
        "bits per byte": row["bits_per_byte"],
        **row["parts"],
        "experts a token": row["experts"],
        "training FLOPs": flops,
    }
    columns = table.setdefault(title, {name: [] for name in values})
    for name, value in values.items():
        columns[name].append(value)


def markdown(table, seeds, how, documents):
    """The table as Markdown, with seeds, what was scored and command under it."""
    titles = list(next(iter(table.values())))
    rows = [
        [name, *(_cell(title, columns[title]) for title in titles)]
        for name, columns in table.items()
    ]
    return (
        f"{tables.markdown(['', *titles], rows)}\n\n"
        f"Seeds {', '.join(map(str, seeds))}: mean ± standard deviation; {documents}. "
        f"Command: `{how}`\n"
    )


def _cell(title, values):
    mean = statistics.fmean(values)
    if title == "training FLOPs":
        return quantity(mean, "FLOPs")
    if title == "experts a token":
        return f"{mean:.3g}"
    return mean_and_spread(values)


def main(argv=None):
    parser = cli.Parser("efx.cbtm.table", __doc__)
    parser.add_argument("--config", default="cbtm:table", help="config file or name, and variants")
    parser.add_runs(jobs="runs")
    parser.add_argument("--clusters", default="1,2,4,8", help="experts of each ensemble")
    parser.add_argument("--random", type=int, default=4, metavar="N", help="control; 0: none")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    return parser.run(study, argv)


def study(arguments):
    """All runs and evaluations, then the table."""
    arguments.clusters = cli.numbers("--clusters", arguments.clusters)
    arguments.seeds = cli.numbers("--seeds", arguments.seeds)
    cli.check_extra(arguments.extra)
    plans = [make_plan(arguments, arguments.extra, seed) for seed in arguments.seeds]
    run(plans, arguments.jobs)
    table, fractions = evaluate(plans)
    text = markdown(table, arguments.seeds, arguments.command, portion(fractions))
    tables.save(arguments.workdir, "table", text, table)


if __name__ == "__main__":
    sys.exit(main())
