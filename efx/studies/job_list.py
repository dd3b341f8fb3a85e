"""Runs as lists of commands, for machines other than this one: see `FORMATS`."""

import heapq
import pathlib
import shlex

from efx import storage
from efx.errors import UsageError
from efx.runfolder import write_atomic, writing

FORMATS = {
    "plain": "one command a line, each of one run",
    "slurm": "the same for a cluster, and PATH.sbatch, an array job that runs a line a task",
    "tpu": "a script for each of --hosts machines, PATH.0, PATH.1 and so on, alike in FLOPs",
}
# What a line begins with; the scripts make the environment first, where it is missing.
_PROGRAM = {
    "plain": "python -m efx.main",
    "slurm": "bash launch/scheduled.sh",
    "tpu": "bash launch/local.sh",
}
_SLURM = """\
#!/usr/bin/env bash
# Runs line SLURM_ARRAY_TASK_ID of a list of {count} runs, each on one GPU.
#
#   sbatch {script}
#
# Submit it from the efx repository, on a file system that all nodes see; options given to sbatch
# win over those below. A task that is preempted, or whose time is up, saves and is queued again.
# Tasks of runs that have ended end at once, so the whole array can be submitted again.
#SBATCH --job-name=efx-runs
#SBATCH --array=1-{count}
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@300
set -euo pipefail

cd -- "${{SLURM_SUBMIT_DIR:?submit this file with sbatch}}"
export EFX_EXTRAS="${{EFX_EXTRAS:-cuda13}}"
line="$(sed -n "${{SLURM_ARRAY_TASK_ID:?this is an array job}}p" {list})"
if [ -z "$line" ]; then
  echo "efx: error: the list has no line $SLURM_ARRAY_TASK_ID" >&2
  exit 2
fi
status=0
# Since Slurm 22.05 srun does not take --cpus-per-task from the job.
srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-8}}" bash -c "$line" || status=$?
# 143: told to stop, and saved. A job that was cancelled is not RUNNING any more.
task="${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
if [ "$status" -eq 143 ] && [ "$(squeue --noheader --job="$task" --format=%T)" = RUNNING ]; then
  scontrol requeue "$task"
fi
exit "$status"
"""
_HOST = """\
#!/usr/bin/env bash
# Host {host} of {hosts}: {count} runs, one after another, on the devices of this machine alone.
#
#   bash {script}
#
# Start it in the efx repository, with a --workdir that outlives this machine. A run that has ended
# ends at once, one that was stopped goes on, so the same script can be started again. A run that
# fails does not keep the others from starting; the exit status tells of the last that did.
set -uo pipefail
status=0
"""


def write(format, path, jobs, hosts=1):
    """Writes the list of [(arguments of `python -m efx.main`, FLOPs)]; returns the files' paths."""
    if format not in FORMATS:
        formats = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
        raise UsageError(f"--list-jobs {format}: expected one of {formats}")
    if hosts < 1 or (hosts > 1 and format != "tpu"):
        raise UsageError(f"--hosts={hosts}: must be at least 1, and needs --list-jobs tpu")
    path = pathlib.Path(storage.local_folder(str(path)))
    files = {path: _lines(jobs, _PROGRAM[format])}
    if format == "slurm":
        script = path.with_name(f"{path.name}.sbatch")
        files[script] = _SLURM.format(count=len(jobs), script=_quoted(script), list=_quoted(path))
    if format == "tpu":
        if hosts > len(jobs):
            raise UsageError(f"--hosts={hosts}: must be at most the number of runs, {len(jobs)}")
        files = {}
        for host, share in enumerate(shares(jobs, hosts)):
            script = path.with_name(f"{path.name}.{host}")
            head = _HOST.format(host=host, hosts=hosts, count=len(share), script=_quoted(script))
            commands = _lines(share, _PROGRAM[format], end=" || status=$?")
            files[script] = f'{head}{commands}exit "$status"\n'
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        write_atomic(file, text)
    return list(files)


def shares(jobs, hosts):
    """The jobs of each host, in their order: the dearest first, each to who has least to do."""
    load, share = [(0.0, host) for host in range(hosts)], [[] for _ in range(hosts)]
    for place in sorted(range(len(jobs)), key=lambda place: -jobs[place][1]):
        flops, host = heapq.heappop(load)
        share[host].append(place)
        heapq.heappush(load, (flops + jobs[place][1], host))
    return [[jobs[place] for place in sorted(places)] for places in share]


def _quoted(path):
    return shlex.quote(str(path))


def _lines(jobs, program, end=""):
    return "".join(f"{program} {shlex.join(arguments)}{end}\n" for arguments, _ in jobs)
