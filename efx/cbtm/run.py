"""cBTM from documents to an evaluated ensemble: cluster, seed model, one expert a cluster.

    python -m efx.cbtm.run --config configs/cbtm.py --workdir runs/cbtm

`config.steps` (or `config.train_flops`) is the budget of the seed model and all experts together:
the seed model takes `config.cluster.seed_fraction` of it, each expert an equal part of the rest, so
that any number of clusters costs the same training. Every job is a separate `python -m efx.main`,
in WORKDIR/seed and WORKDIR/expert_<j>, whose command is printed. An expert does not depend on the
others, so these commands may run on other machines that have the corpus, WORKDIR/seed and
WORKDIR/clusters. `--commands` only prints them. Finished jobs are skipped: start the same command
again to continue after an interruption. Arguments after `--` go to every job.
"""

import dataclasses
import pathlib
import shlex
import sys
from typing import NamedTuple

from efx import run_dir
from efx.cbtm import SEED, documents_file, expert_folder
from efx.config import flags, schema
from efx.config.load import completed, to_config
from efx.errors import UsageError
from efx.studies import cli, rehearsal
from efx.studies import jobs as jobs_lib


@dataclasses.dataclass(frozen=True)
class Job:
    """One `python -m efx.main`; `steps`: its last step, 0 if it does not train."""

    title: str
    folder: pathlib.Path
    arguments: tuple
    steps: int = 0

    def command(self):
        return f"python -m efx.main {shlex.join(self.arguments)}"

    def config(self):
        return to_config(flags.parse(["efx", *self.arguments]).config)


class Stages(NamedTuple):
    """The jobs of one ensemble; jobs of the same stage do not depend on each other."""

    cluster: list
    seed: list  # empty if there is a seed model already
    experts: list
    evaluate: list

    def jobs(self):
        return [job for stage in self for job in stage]


def make_stages(source, workdir, extra=(), seed_run=""):
    """The Stages of a config file and overrides.

    seed_run: run directory of a finished seed model; "": it is trained in WORKDIR/seed.
    """
    workdir = pathlib.Path(workdir)
    seed = pathlib.Path(seed_run) if seed_run else workdir / SEED

    def whole_job(title, mode):
        arguments = (f"--config={source}", f"--mode={mode}", f"--workdir={workdir}", *extra)
        return Job(title, workdir, arguments)

    cluster, evaluate = whole_job("clusters", "cluster"), whole_job("evaluation", "evaluate")
    config = cluster.config()
    (total, seed_steps, expert_steps), count = budget(config), config.cluster.count
    if seed_steps < 1 or expert_steps < 1:
        raise UsageError(
            f"config.steps={total}: too few for a seed model ({seed_steps} steps) and {count} "
            f"experts ({expert_steps} steps each); use more"
        )
    experts = [
        train_job(
            f"expert {j} of {count}",
            source,
            expert_folder(workdir, j),
            [
                *extra,
                f"--config.init.run={seed}",
                f"--config.data.subset={documents_file(workdir, j)}",
            ],
            expert_steps,
        )
        for j in range(count)
    ]
    seeds = [] if seed_run else [train_job("seed model", source, seed, extra, seed_steps)]
    return Stages([cluster], seeds, experts, [evaluate])


def budget(config):
    """(steps of all runs together, of the seed model, of one expert)."""
    total = config.steps
    if not total or config.train_flops:
        from efx.train.setup import experiment

        total = experiment(config).steps
    seed_steps = round(config.cluster.seed_fraction * total)
    return total, seed_steps, (total - seed_steps) // config.cluster.count


def train_job(title, source, folder, extra, steps):
    """A Job that trains for `steps` steps, at most a tenth of them as warm-up."""
    arguments = [f"--config={source}", f"--workdir={folder}", *extra]
    arguments += [f"--config.steps={steps}", "--config.train_flops=0.0"]
    job = Job(title, pathlib.Path(folder), tuple(arguments), steps)
    warmup = min(job.config().optim.schedule.warmup_steps, max(1, steps // 10))
    warmup_argument = f"--config.optim.schedule.warmup_steps={warmup}"
    return dataclasses.replace(job, arguments=(*job.arguments, warmup_argument))


def is_finished(job):
    """Whether a job has trained to its last step; UsageError if its folder holds another run."""
    from efx.checkpoint import manifest
    from efx.train.run_files import MAY_DIFFER

    if not job.steps or not run_dir.holds_result(job.folder):
        return False
    config = schema.as_dict(job.config())
    run_dir.check_config(job.folder, config, MAY_DIFFER, completed)
    steps = manifest.finished_steps(manifest.as_root(job.folder / run_dir.CHECKPOINTS))
    return max(steps, default=0) >= job.steps


def run_jobs(jobs, at_a_time=1):
    """Runs the unfinished jobs; UsageError naming the first that fails or is stopped."""

    def run_job(job, cpus):
        log = f"{job.folder}.log"
        status, log_name = jobs_lib.run_main(job.title, list(job.arguments), log, cpus)
        if status:
            raise UsageError(
                f"{job.title} ended with status {status}; see {log_name}. Rerun the command to "
                "resume"
            )
        if job.steps and not is_finished(job):
            raise UsageError(f"{job.title} was stopped; rerun the command to resume")

    finished_jobs = [job for job in jobs if is_finished(job)]
    for job in finished_jobs:
        print(f"== {job.title}: finished already, {job.folder}", flush=True)
    jobs_lib.run_all(run_job, [job for job in jobs if job not in finished_jobs], at_a_time)


def check_models(jobs):
    """UsageError, before anything is computed, for a job whose model cannot be or be trained."""
    left = [job for job in jobs if not run_dir.holds_result(job.folder)]
    rehearsal.check([(job.title, job.arguments, False) for job in left], in_order=True)


def main(argv=None):
    parser = cli.Parser("efx.cbtm.run", __doc__)
    parser.add_argument("--config", required=True, help="config file or name, such as cbtm")
    parser.add_runs(jobs="experts")
    parser.add_argument(
        "--seed-run", default="", help=("existing run directory to use as the seed model")
    )
    parser.add_argument(
        "--commands", action="store_true", help=("print the commands and run nothing")
    )
    return parser.run(study, argv)


def study(arguments):
    """Runs all stages, or prints their commands."""
    stages = make_stages(arguments.config, arguments.workdir, arguments.extra, arguments.seed_run)
    if arguments.commands:
        print("\n".join(f"# {job.title}\n{job.command()}" for job in stages.jobs()))
        return
    check_models([*stages.seed, *stages.experts[:1]])  # experts differ in their documents
    for stage in stages:
        run_jobs(stage, max(1, min(arguments.jobs, len(stage))))


if __name__ == "__main__":
    sys.exit(main())
