"""cBTM against one model on everything, at equal training FLOPs: several seeds, one table.

    python -m efx.studies.cbtm_table --workdir runs/cbtm_table

For every seed: one model trained on everything with the whole budget; a seed model; from it, the
ensembles of `--clusters` experts, each with its own clustering; and, as the control, `--random`
experts on random clusters. One cluster is the seed model trained further on everything. All are
asked about the same held-out documents. About an hour on 2 cores as it stands
(configs/cbtm.py:table); arguments after `--` go to every run, to scale the study up or down.

WORKDIR/table.md has the table, table.json its numbers: of every seed, so that more can be made of
them. What is finished is passed over: start the same command again to go on.
"""

import json
import pathlib
import shlex
import statistics
import sys

from efx.errors import UsageError
from efx.metrics import portion, quantity
from efx.runfolder import write_atomic, writing
from efx.studies import cbtm, cli
from efx.studies.sweep import final_row, mean_and_spread

DENSE, SEED_MODEL = "one model on everything", "seed model"


def plans(arguments, extra):
    """{seed: (dense Job, seed Job, {name of an ensemble: Plan})}."""
    top, found = pathlib.Path(arguments.workdir), {}
    for seed in arguments.seeds:
        seeded = [*extra, f"--config.seed={seed}"]
        seed_folder = top / f"seed_model-seed{seed}"

        def plan(name, count, *own, seeded=seeded, seed=seed, seed_folder=seed_folder):
            top_k = min(2, count)
            own = [*seeded, f"--config.cluster.count={count}", *own]
            own += [f"--config.ensemble.top_k={top_k}"]
            folder = top / f"{name.replace(' ', '_')}-seed{seed}"
            return cbtm.make_plan(arguments.config, folder, own, seed_folder)

        named = {ensemble_name(count): plan(f"k{count}", count) for count in arguments.clusters}
        if arguments.random:
            control = plan("random", arguments.random, "--config.cluster.method=random")
            named[f"{arguments.random} random clusters"] = control
        config = cbtm.read_config(arguments.config, top, seeded)
        total = cbtm.total_steps(config)
        first = round(config.cluster.seed_fraction * total)
        # One seed model for all ensembles of a seed, where they look for it.
        seed_job = cbtm.train_job(
            f"{SEED_MODEL}, seed {seed}", arguments.config, seed_folder, seeded, first
        )
        dense = cbtm.train_job(
            f"{DENSE}, seed {seed}", arguments.config, top / f"dense-seed{seed}", seeded, total
        )
        found[seed] = (dense, seed_job, named)
    return found


def ensemble_name(count):
    return f"{count} cluster" + "s" * (count > 1)


def run(found, jobs):
    """Everything that is not finished: what waits for nothing first, then the experts."""
    every = found.values()
    ensembles = [plan for *_, named in every for plan in named.values()]
    cbtm.run_jobs([plan.cluster for plan in ensembles], jobs)
    cbtm.run_jobs([job for dense, seed, _ in every for job in (seed, dense)], jobs)
    cbtm.run_jobs([job for plan in ensembles for job in plan.experts], jobs)


def evaluate(found):
    """({row: {column: [value of each seed]}}, fractions of the held-out text that were scored)."""
    from efx.compose.corpus import Corpus
    from efx.compose.evaluate import evaluate_ensemble, write
    from efx.compose.members import Ensemble

    table, fractions = {}, []
    for dense, seed_job, named in found.values():
        others = [(DENSE, dense.folder), (SEED_MODEL, seed_job.folder)]
        for name, plan in named.items():
            config = cbtm.read_config_of(plan.evaluate)
            ensemble = Ensemble(config, plan.evaluate.folder)
            result = evaluate_ensemble(ensemble, Corpus(config.data), config, others)
            write(plan.evaluate.folder, result)
            fractions += [row["fraction"] for row in result.values()]
            flops = _flops(seed_job.folder, *ensemble.folders)
            for mixture, row in result.items():
                if mixture in (DENSE, SEED_MODEL):
                    own = _flops(dense.folder if mixture == DENSE else seed_job.folder)
                    if others:
                        _add(table, mixture, row, own)
                elif not mixture.startswith("expert ") and (
                    ensemble.count > 1 or mixture == "top 1"
                ):
                    title = f"{name}, {mixture}" if ensemble.count > 1 else name
                    _add(table, title, row, flops)
            others = []  # asked once a seed
    models = {name: table.pop(name) for name in (DENSE, SEED_MODEL)}
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
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name, columns in table.items():
        cells = [_cell(title, columns[title]) for title in titles]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Seeds {', '.join(map(str, seeds))}: mean ± standard deviation; {documents}. "
        f"Command: `{how}`",
    ]
    return "\n".join(lines) + "\n"


def _cell(title, values):
    mean = statistics.fmean(values)
    if title == "training FLOPs":
        return quantity(mean, "FLOPs")
    if title == "experts a token":
        return f"{mean:.3g}"
    return mean_and_spread(values)


def main(argv=None):
    parser = cli.Parser("cbtm_table", __doc__)
    parser.add_argument("--config", default="configs/cbtm.py:table", help="config file and variant")
    parser.add_argument("--workdir", required=True, help="folder of all runs and the table")
    parser.add_argument("--clusters", default="1,2,4,8", help="experts of each ensemble")
    parser.add_argument("--random", type=int, default=4, metavar="N", help="control; 0: none")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    own, extra = cli.split_extra(argv)
    arguments = parser.parse_args(own)
    try:
        if arguments.jobs < 1:
            raise UsageError(f"--jobs={arguments.jobs}: must be at least 1")
        arguments.clusters = cli.numbers("--clusters", arguments.clusters)
        arguments.seeds = cli.numbers("--seeds", arguments.seeds)
        cli.check_extra(extra)
        found = plans(arguments, extra)
        run(found, arguments.jobs)
        table, fractions = evaluate(found)
        given = sys.argv[1:] if argv is None else argv
        how = "python -m efx.studies.cbtm_table " + shlex.join(given)
        text = markdown(table, arguments.seeds, how, portion(fractions, "documents"))
        with writing(arguments.workdir):
            top = pathlib.Path(arguments.workdir)
            write_atomic(top / "table.md", text)
            write_atomic(top / "table.json", json.dumps(table, indent=1) + "\n")
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("efx: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
