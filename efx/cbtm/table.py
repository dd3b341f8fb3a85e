"""cBTM against one model trained on everything, at equal training FLOPs: several seeds, one table.

    python -m efx.cbtm.table --workdir runs/cbtm_table

For every seed: one model trained on everything with the whole budget; a seed model; from it, the
ensembles of `--clusters` experts, each with its own clustering; and, as the control, `--random`
experts on random clusters. One cluster is the seed model trained further on everything. All are
evaluated on the same held-out documents. About an hour on 2 cores with the default config
(configs/cbtm.py:table); arguments after `--` go to every run, to scale the study up or down.

WORKDIR/table.md has the table, table.json its numbers of every seed. Finished runs are skipped:
start the same command again to continue.
"""

import pathlib
import statistics
import sys

from efx.cbtm import run as cbtm
from efx.logging import portion, quantity, tables
from efx.logging.tables import mean_and_spread
from efx.studies import cli
from efx.studies.sweep import final_row

DENSE, SEED_MODEL = "one model on everything", "seed model"


def jobs_of_seed(arguments, extra, seed):
    """(Job of the model on everything, Job of the seed model, {name of an ensemble: Stages})."""
    workdir, extra = pathlib.Path(arguments.workdir), [*extra, f"--config.seed={seed}"]
    everything = (f"--config={arguments.config}", f"--workdir={workdir}", *extra)
    total, seed_steps, _ = cbtm.budget(cbtm.Job(DENSE, workdir, everything).config())

    def train(title, name, steps):
        folder = workdir / f"{name}-seed{seed}"
        return cbtm.train_job(f"{title}, seed {seed}", arguments.config, folder, extra, steps)

    dense, seed_job = train(DENSE, "dense", total), train(SEED_MODEL, "seed_model", seed_steps)

    def ensemble(name, count, *settings):
        settings = [*extra, f"--config.cluster.count={count}", *settings]
        settings += [f"--config.ensemble.top_k={min(2, count)}"]
        folder = workdir / f"{name}-seed{seed}"
        return cbtm.make_stages(arguments.config, folder, settings, seed_job.folder)

    ensembles = {
        f"{count} cluster" + "s" * (count > 1): ensemble(f"k{count}", count)
        for count in arguments.clusters
    }
    if count := arguments.random:
        control = ensemble("random", count, "--config.cluster.method=random")
        ensembles[f"{count} random clusters"] = control
    return dense, seed_job, ensembles


def run_plans(plans, jobs):
    """Runs all unfinished jobs: first those that depend on no other, then the experts."""
    ensembles = [stages for *_, named in plans for stages in named.values()]
    cbtm.run_jobs([job for stages in ensembles for job in stages.cluster], jobs)
    cbtm.run_jobs([job for dense, seed, _ in plans for job in (seed, dense)], jobs)
    cbtm.run_jobs([job for stages in ensembles for job in stages.experts], jobs)


def evaluate_plans(plans):
    """({row: {column: [value of each seed]}}, fractions of the held-out text that were scored)."""
    from efx.cbtm import evaluation
    from efx.cbtm.ensemble import Ensemble

    models, table, fractions = {}, {}, []
    for dense, seed_job, ensembles in plans:
        other_runs = {DENSE: dense.folder, SEED_MODEL: seed_job.folder}
        for name, stages in ensembles.items():
            (job,) = stages.evaluate
            config = job.config()
            ensemble = Ensemble(config, job.folder)
            scores, held_out = evaluation.score(ensemble, config, other_runs)
            evaluation.write(job.folder, scores)
            fractions.append(held_out.fraction)
            for model, folder in other_runs.items():
                _add_row(models, model, scores["models"][model], _flops(folder))
            other_runs = {}  # evaluated once a seed
            flops = _flops(seed_job.folder, *ensemble.folders)
            if ensemble.count == 1:
                _add_row(table, name, scores["mixtures"]["top 1"], flops)
                continue
            for mixture, row in scores["mixtures"].items():
                _add_row(table, f"{name}, {mixture}", row, flops)
    return {**models, **table}, fractions


def _flops(*folders):
    return sum(final_row(folder)["flops"] for folder in folders)


def _add_row(table, title, row, flops):
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


def markdown(table, seeds, command, documents):
    """The table as Markdown, with seeds, what was scored and command under it."""
    titles = list(next(iter(table.values())))
    rows = [
        [name, *(_cell(title, columns[title]) for title in titles)]
        for name, columns in table.items()
    ]
    return (
        f"{tables.markdown(['', *titles], rows)}\n\n"
        f"Seeds {', '.join(map(str, seeds))}: mean ± standard deviation; {documents}. "
        f"Command: `{command}`\n"
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
    """Makes all runs and evaluations, then the table."""
    arguments.clusters = cli.numbers("--clusters", arguments.clusters)
    arguments.seeds = cli.numbers("--seeds", arguments.seeds)
    cli.check_extra(arguments.extra)
    plans = [jobs_of_seed(arguments, arguments.extra, seed) for seed in arguments.seeds]
    dense, seed_job, ensembles = plans[0]  # seeds differ in nothing else, nor do experts
    experts = [stages.experts[0] for stages in ensembles.values()]
    cbtm.check_models([dense, seed_job, *experts])
    run_plans(plans, arguments.jobs)
    table, fractions = evaluate_plans(plans)
    text = markdown(table, arguments.seeds, arguments.command, portion(fractions))
    tables.save(arguments.workdir, "table", text, table)


if __name__ == "__main__":
    sys.exit(main())
