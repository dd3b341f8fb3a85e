"""cBTM from documents to an evaluated ensemble: cluster, seed model, one expert a cluster.

    python -m efx.cbtm.run --config configs/cbtm.py --workdir runs/cbtm

`config.steps` (or `config.train_flops`) is the budget of the seed model and all experts together:
the seed model takes `config.cluster.seed_fraction` of it, each expert an equal part of the rest, so
that any number of clusters costs the same training. Every part is a `python -m efx.main` of its
own, in WORKDIR/seed and WORKDIR/expert_<j>, whose command is printed; an expert needs nothing of
the others, so these commands may run on other machines that have the corpus, WORKDIR/seed and
WORKDIR/clusters. `--commands` only prints them. What is finished is passed over: start the same
command again to go on after an interruption. Arguments after `--` go to every part.
"""

import dataclasses
import pathlib
import shlex
import sys

from efx import command_line, runfolder
from efx.cbtm import SEED, documents_file, expert_folder
from efx.cbtm.clustering import check
from efx.errors import UsageError
from efx.studies import cli
from efx.studies import jobs as jobs_lib


@dataclasses.dataclass(frozen=True)
class Job:
    """One `python -m efx.main`; `steps`: until which it trains, 0 if it does not train."""

    title: str
    folder: pathlib.Path
    arguments: tuple
    steps: int = 0

    def command(self):
        return f"python -m efx.main {shlex.join(self.arguments)}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The jobs of one ensemble; the experts wait for the cluster and (if there is one) the seed."""

    cluster: Job
    seed: Job | None
    experts: tuple
    evaluate: Job

    def jobs(self):
        """All of them, in order."""
        return [self.cluster, *([self.seed] if self.seed else []), *self.experts, self.evaluate]


def read_config(source, workdir, extra):
    """The config that a command line comes to."""
    return command_line.parse(["efx", f"--config={source}", f"--workdir={workdir}", *extra]).config


def read_config_of(job):
    """The config of a job."""
    return command_line.parse(["efx", *job.arguments]).config


def make_plan(source, workdir, extra=(), seed_run=""):
    """The Plan of a config file and overrides.

    seed_run: run folder of a seed model that is there already; "": it is trained in WORKDIR/seed.
    """
    workdir, extra = pathlib.Path(workdir), list(extra)
    config = read_config(source, workdir, extra)
    check(config.cluster)
    total, count = total_steps(config), config.cluster.count
    first = round(config.cluster.seed_fraction * total)
    each = (total - first) // count
    if first < 1 or each < 1:
        raise UsageError(
            f"config.steps={total}: too few for a seed model and {count} experts, which get "
            f"{first} and {each} of them"
        )

    def job(title, mode):
        arguments = (f"--config={source}", f"--mode={mode}", f"--workdir={workdir}", *extra)
        return Job(title, workdir, arguments)

    seed = pathlib.Path(seed_run) if seed_run else workdir / SEED
    experts = tuple(
        train_job(
            f"expert {j} of {count}",
            source,
            expert_folder(workdir, j),
            extra,
            each,
            f"--config.init.run={seed}",
            f"--config.data.subset={documents_file(workdir, j)}",
        )
        for j in range(count)
    )
    return Plan(
        job("clusters", "cluster"),
        None if seed_run else train_job("seed model", source, seed, extra, first),
        experts,
        job("evaluation", "evaluate"),
    )


def train_job(title, source, folder, extra, steps, *settings):
    """A Job that trains for so many steps, a tenth of them at most warming up."""
    warmup = read_config(source, folder, extra).optim.schedule.warmup_steps
    arguments = [f"--config={source}", f"--workdir={folder}", *extra, *settings]
    arguments += [f"--config.steps={steps}", "--config.train_flops=0.0"]
    arguments += [f"--config.optim.schedule.warmup_steps={min(warmup, max(1, steps // 10))}"]
    return Job(title, pathlib.Path(folder), tuple(arguments), steps)


def total_steps(config):
    """Steps of the whole budget."""
    if config.steps and not config.train_flops:
        return config.steps
    from efx.build import experiment

    return experiment(config).steps


def finished(job):
    """Whether a job has trained to its end; UsageError if its folder holds another run."""
    from efx.checkpoint import files
    from efx.train import MAY_DIFFER

    if not runfolder.holds_result(job.folder):
        return False
    runfolder.check_config(job.folder, read_config_of(job).to_dict(), MAY_DIFFER)
    steps = files.finished_steps(files.as_root(job.folder / runfolder.CHECKPOINTS))
    return max(steps, default=0) >= job.steps


def run_jobs(jobs, at_a_time=1):
    """Run what is not finished; UsageError naming the first that fails or is stopped."""

    def one(job, cpus):
        log = f"{job.folder}.log"
        status, where = jobs_lib.run_main(job.title, list(job.arguments), log, cpus)
        if status:
            raise UsageError(
                f"{job.title} ended with status {status}; {where} says why. The same command goes "
                "on from here"
            )
        if job.steps and not finished(job):
            raise UsageError(f"{job.title} was stopped; the same command goes on from here")

    todo = []
    for job in jobs:
        if job.steps and finished(job):
            print(f"== {job.title}: finished already, {job.folder}", flush=True)
        else:
            todo.append(job)
    jobs_lib.run_all(one, todo, at_a_time)


def run_plan(plan, at_a_time=1):
    """All of it, in order; the experts `at_a_time` at a time."""
    run_jobs([plan.cluster])
    run_jobs([plan.seed] if plan.seed else [])
    run_jobs(plan.experts, at_a_time)
    run_jobs([plan.evaluate])


def main(argv=None):
    parser = cli.Parser("efx.cbtm.run", __doc__)
    parser.add_argument("--config", required=True, help="config file or name, such as cbtm")
    parser.add_runs(jobs="experts")
    parser.add_argument("--seed-run", default="", help="a run folder to take as the seed model")
    parser.add_argument("--commands", action="store_true", help="print the commands, run nothing")
    return parser.run(study, argv)


def study(arguments):
    """All parts of the plan, or their commands."""
    plan = make_plan(arguments.config, arguments.workdir, arguments.extra, arguments.seed_run)
    if arguments.commands:
        print("\n".join(f"# {job.title}\n{job.command()}" for job in plan.jobs()))
    else:
        run_plan(plan, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
