"""cBTM from documents to an evaluated ensemble: cluster, seed model, one expert a cluster.

    python -m efx.composition.cbtm --config configs/cbtm.py --workdir runs/cbtm

`config.steps` (or `config.train_flops`) is the budget of the seed model and all experts together:
the seed model takes `config.cluster.seed_fraction` of it and each expert an equal part of the rest,
so any number of clusters costs the same training. Every step is a `python -m efx.main`.
`--print-commands` prints them: experts do not depend on each other and may run on machines that
have the corpus, WORKDIR/seed and WORKDIR/clusters. A second call resumes. Arguments after `--` go
to every run.
"""

import dataclasses
import pathlib
import sys

from efx.composition import SEED, documents_file, expert_folder
from efx.errors import UsageError
from efx.studies import cli
from efx.studies import runs as runs_lib
from efx.studies.runs import Run


def make_stages(source, workdir, extra=(), seed_run=""):
    """Return lists of Runs: [clustering], [seed model], experts, [evaluation].

    Runs of one list do not depend on each other.

    Args:
      extra: arguments of every run.
      seed_run: run directory of a seed model that another study trains; "": WORKDIR/seed.
    """
    workdir = pathlib.Path(workdir)
    seed = seed_run or workdir / SEED

    def whole(title, mode):
        arguments = (f"--config={source}", f"--mode={mode}", f"--workdir={workdir}", *extra)
        return Run(f"{title} of {workdir.name}", workdir, arguments)

    clustering = whole("clusters", "cluster")
    config = clustering.config()
    (total, seed_steps, expert_steps), count = budget(config), config.cluster.count
    if seed_steps < 1 or expert_steps < 1:
        raise UsageError(
            f"config.steps={total}: too few for a seed model ({seed_steps} steps) and {count} "
            f"experts ({expert_steps} steps each); use more"
        )
    seed_model = train_run(f"seed model of {workdir.name}", source, seed, extra, seed_steps)
    experts = []
    for j in range(count):
        subset = f"--config.data.subset={documents_file(workdir, j)}"
        own, folder = [*extra, f"--config.init.run={seed}", subset], expert_folder(workdir, j)
        title = f"expert {j} of {workdir.name}"
        experts.append(train_run(title, source, folder, own, expert_steps))
    evaluation = whole("evaluation", "evaluate")
    return [clustering], [] if seed_run else [seed_model], experts, [evaluation]


def budget(config):
    """Return the steps of (all runs together, the seed model, one expert)."""
    total = config.steps
    if not total or config.train_flops:
        from efx.train.setup import experiment

        total = experiment(config).steps
    seed_steps = round(config.cluster.seed_fraction * total)
    return total, seed_steps, (total - seed_steps) // config.cluster.count


def train_run(title, source, folder, extra, steps):
    """Return a Run of `steps` steps, at most a tenth of them warm-up."""
    arguments = [f"--config={source}", f"--workdir={folder}", *extra]
    arguments += [f"--config.steps={steps}", "--config.train_flops=0.0"]
    run = Run(title, pathlib.Path(folder), tuple(arguments))
    warmup = min(run.config().optim.schedule.warmup_steps, max(1, steps // 10))
    warmup = f"--config.optim.schedule.warmup_steps={warmup}"
    return dataclasses.replace(run, arguments=(*run.arguments, warmup))


def study(arguments):
    """Run all stages, or print their commands."""
    stages = make_stages(arguments.config, arguments.workdir, arguments.extra)
    _, seed_model, experts, _ = stages
    runs_lib.check([*seed_model, *experts], arguments.extra)
    if arguments.print_commands:
        return runs_lib.print_commands(sum(stages, []))
    for runs in stages:
        runs_lib.run_all(runs, arguments.jobs if len(runs) > 1 else 1)


def main(argv=None):
    parser = cli.Parser("efx.composition.cbtm", __doc__)
    parser.add_argument("--config", required=True, help="config file or name, such as cbtm")
    parser.add_runs()
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
