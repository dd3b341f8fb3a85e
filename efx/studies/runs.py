"""The runs of a study: separate `python -m efx.main` processes, and their results as a table."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pandas as pd

from efx import run_dir
from efx.config import flags, schema
from efx.config.load import to_config, with_new_defaults
from efx.config.run import default_config
from efx.errors import UsageError
from efx.logging import Progress, duration, read_metrics
from efx.parallel.signals import STOPPING

NOT_FINITE = 3  # exit status of a finished run whose loss is not finite
# For studies in which a run that diverges is a result.
MAY_DIVERGE = {"train.max_nonfinite": 10**9}
MAY_DIVERGE_NOTE = (
    f"config.train.max_nonfinite={10**9} unless set otherwise: a run that diverges trains to its "
    "end and is a row of the table"
)
_SHARED = "# with other runs on this machine"  # ends the command in the log of such a run
_SHOWN_SECONDS = 0.5  # between two updates of the live lines
_STEP = r"step (\d+)/(\d+) "  # begins the line of a step of training
# Arguments that a study sets for each run.
_OWN = re.compile(r"(\w*:)?--?(config|config\.seed|workdir|mode)(=|$)")
# Settings that do not decide the result: the text is compared by its hash.
_IGNORED = re.compile(
    r"seed|steps|rules|(log|checkpoint|sample|mesh|cluster|ensemble)\..*"
    r"|data\.(source|eval_source|cache_dir|on_change)|evaluate\.every|model\.remat|train\.max_nonfinite"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
      name: shown in messages. folder: the run directory. arguments: of `efx.main`.
      labels: {column: value} of the run in the study's table, such as its name and seed.
    """

    name: str
    folder: pathlib.Path
    arguments: tuple
    labels: dict = dataclasses.field(default_factory=dict, hash=False)

    def command(self):
        return f"python -m efx.main {shlex.join(self.arguments)}"

    def config(self):
        """The checked config; UsageError, with the run's name, if `efx.main` would refuse it."""
        try:
            return to_config(flags.parse(["efx", *self.arguments]).config)
        except UsageError as error:
            raise UsageError(f"the run {self.name!r}: {error}") from error


def training_run(workdir, name, seed, config, changes, extra=(), labels=None):
    """Return the Run of a config with changed settings, in WORKDIR/<name>-seed<n>.

    Args:
      changes: {dotted key: value}. extra: further arguments of `efx.main`.
    """
    folder = pathlib.Path(workdir) / f"{safe_name(name)}-seed{seed}"
    arguments = [f"--config={config}", f"--workdir={folder}", f"--config.seed={seed}"]
    arguments += [f"--config.{key}={value}" for key, value in changes.items()]
    labels = {"name": name, **(labels or {}), "seed": seed}
    return Run(f"{name}, seed {seed}", folder, (*arguments, *extra), labels)


def safe_name(name):
    """Return a file name: other characters than letters, digits and dots become "_"."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_")


def check(runs, extra=(), written=()):
    """Raise UsageError, before anything trains, for a run that `efx.main` would refuse.

    Settings and text sources are checked; no model is built.

    Args:
      extra: the user's arguments for every run.
      written: text sources that earlier runs write.
    """
    from efx.data.sources import check_present

    for argument in extra:
        if _OWN.match(argument):
            raise UsageError(f"{argument}: the study sets this for each run; leave it out")
    folders = {}
    for run in runs:
        other = folders.setdefault(str(run.folder).lower(), run)
        if other is not run:
            raise UsageError(f"{run.name!r} and {other.name!r} have one directory; rename one")
    checked = set()
    for run in runs:
        key = tuple(
            word for word in run.arguments if not re.match(r"--(workdir|config.seed)", word)
        )
        if key in checked:
            continue
        checked.add(key)
        for setting, source in run.config().data.specs().items():
            if source not in written:
                check_present(source, setting)


def print_commands(runs):
    """Print the commands of the runs that have not finished."""
    for run in runs:
        if not is_finished(run):
            print(run.command())


def run_all(runs, jobs=1, total=None):
    """Make all missing runs, `jobs` at a time; the first failure stops the study.

    Each writes its command and its output to FOLDER.log. With several jobs each gets an equal part
    of the CPUs. After a failure or a signal no further run starts, and those that run save and end
    before this returns.

    Args:
      total: number of runs of the study, if more follow.
    """
    missing, total = [run for run in runs if not is_finished(run)], total or len(runs)
    if not missing:
        return
    print(f"each run writes to a file of its own, such as {log_of(missing[0])}", flush=True)
    with Progress(total) as progress:
        ended = len(runs) - len(missing)
        _run_missing(missing, jobs, Overview(progress, ended, len(missing), total))


def _run_missing(missing, jobs, overview):
    free_cpus = _split_cpus(jobs) if jobs > 1 else [None]
    running, received = {}, []  # {process: (Run, its CPUs)}; signals to this process
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:  # nohup stays in effect
            signal.signal(number, lambda number, frame: received.append(signal.Signals(number)))
    try:
        while (missing or running) and not received:
            while missing and free_cpus and not received:
                run, cpus = missing.pop(0), free_cpus.pop(0)
                running[start(run, cpus)] = run, cpus
                overview.begin(run)
            for process in [each for each in running if each.poll() is not None]:
                run, cpus = running.pop(process)
                free_cpus.append(cpus)
                if not received:  # else it may have stopped early
                    check_status(run, process.returncode)
                    overview.end(run)
            overview.refresh()
            time.sleep(0.05)
    finally:
        for process in running:
            process.send_signal(received[0] if received else signal.SIGINT)
        for process in running:
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        interrupt = KeyboardInterrupt()
        interrupt.number = received[0]
        raise interrupt


def start(run, cpus):
    """Start a run with its command and output in its log; return its process.

    Args:
      cpus: its CPUs beside other runs; None: it has the machine to itself.
    """
    command, log = [sys.executable, "-m", "efx.main", *run.arguments], log_of(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment, mark = dict(os.environ), ""
    if cpus is not None:
        # JAX would reserve three quarters of the GPU's memory for each run.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        mark = f"  {_SHARED}"
    with open(log, "a") as file:
        print(f"$ {run.command()}{mark}", file=file, flush=True)
        options = {"stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, **options)
    if cpus:
        os.sched_setaffinity(process.pid, cpus)
    return process


def check_status(run, status):
    """Raise UsageError if a run failed; a run that diverged has not."""
    if status not in (0, NOT_FINITE):
        raise UsageError(
            f"the run {run.name!r} ended with status {status}: {newest_line(run)}; see "
            f"{log_of(run)}. Rerun to resume"
        )


def log_of(run):
    """Return the path of the log of a run."""
    return run.folder.with_name(f"{run.folder.name}.log")


def newest_line(run, pattern=""):
    """Return the newest line of a run's log, of those that begin with a pattern; "" without one."""
    with open(log_of(run), "rb") as file:
        file.seek(max(0, log_of(run).stat().st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((x for x in reversed(lines) if x.strip() and re.match(pattern, x)), "").strip()


class Overview:
    """The lines of a study: how many runs have ended, the time left, and each current run.

    Args:
      progress: the `Progress` of the terminal.
      earlier: number of runs that had ended before. missing: of runs to make. total: of all runs.
    """

    def __init__(self, progress, earlier, missing, total):
        self._progress, self._earlier, self._missing = progress, earlier, missing
        self._total, self._ended = total, 0
        self._start, self._refreshed = time.monotonic(), -math.inf
        self._current = {}  # {Run: (ExitStack of its spinner, function that replaces its text)}

    def begin(self, run):
        """Show a run that has started."""
        stack = contextlib.ExitStack()
        show = stack.enter_context(self._progress.phase(run.name, is_logged=True))
        self._current[run] = stack, show

    def refresh(self):
        """Show the newest lines of the current runs."""
        now = time.monotonic()
        if not self._progress.is_live or now - self._refreshed < _SHOWN_SECONDS:
            return
        self._refreshed, done = now, self._ended
        for run, (_, show) in self._current.items():
            line = newest_line(run, _STEP)
            show(f"{run.name}: {line or newest_line(run)}")
            if line:
                step, last_step = re.match(_STEP, line).groups()
                done += int(step) / int(last_step)
        self._progress.show(self._earlier + self._ended, self._describe(done))

    def end(self, run):
        """Print how a run ended."""
        stack, _ = self._current.pop(run)
        stack.close()
        self._ended += 1
        rows = read_metrics(run.folder) if (run.folder / run_dir.METRICS_FILE).exists() else [{}]
        outcome = "finished"
        if "eval/loss" in rows[-1]:
            loss = rows[-1]["eval/loss"]
            outcome = "diverged" if loss is None else f"held-out loss {loss:.4f} nats"
        self._progress.println(f"{run.name}: {outcome}; {self._describe(self._ended)}")

    def _describe(self, done):
        """Return "3 of 8 runs, 0:12:00 left".

        Args:
          done: number of missing runs that have been computed, with fractions of current ones.
        """
        text = f"{self._earlier + self._ended} of {self._total} runs"
        if not 0 < done < self._missing:
            return text
        left = (time.monotonic() - self._start) / done * (self._missing - done)
        return f"{text}, {duration(left)} left"


def _split_cpus(jobs):
    """Return a set of CPUs for each job; empty sets if the system has no CPU affinity."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * jobs
    cpus = sorted(os.sched_getaffinity(0))
    return [set(cpus[i::jobs]) or {cpus[i % len(cpus)]} for i in range(jobs)]


def is_finished(run):
    """Whether a run is at its last step, evaluated and sampled."""
    from efx.train import launch, trainer

    found = run_dir.RunDir(run.folder)
    if not found.has_result or any(a == "--mode=evaluate" for a in run.arguments):
        return False
    config = run.config()
    if found.step is None or found.meta.get("last_step") != found.step:
        return False
    try:
        plain = schema.as_dict(config)
        changed = found.check_config(plain, launch.MAY_DIFFER, with_new_defaults)
    except UsageError:
        return False  # the command reports it
    if changed.keys() & {"steps", "train_flops"}:
        return False
    return not trainer.missing_work(config, run.folder, found.step, found.step)


def results(runs):
    """Return one row for each run: its labels and the last value of each metric.

    "min:eval/loss" is the least held-out loss, None if the last one is not finite. "seconds" is NaN
    for a run that shared the machine with others, see `run_all`: they do not compare.

    Raises: UsageError for a run that has not finished.
    """
    rows = []
    for run in runs:
        if not is_finished(run):
            raise UsageError(f"{run.folder}: the run {run.name!r} has not finished; resume it")
        last, losses = {}, []
        for row in read_metrics(run.folder):
            last |= row  # None where a value was not finite
            losses += [row["eval/loss"]] if row.get("eval/loss") is not None else []
        is_finite = last.get("eval/loss") is not None
        last["min:eval/loss"] = min(losses) if is_finite else None
        if log_of(run).exists() and _SHARED in log_of(run).read_text(errors="replace"):
            last["seconds"] = math.nan
        record = run_dir.RunDir(run.folder).record
        launch = record["launches"][-1]
        rows.append(
            run.labels
            | last
            | text_digests(record.get("text"), record.get("tokenizer") or "")
            | {
                "machine": run_dir.machine_of(launch),
                "revision": run_dir.revision_of(launch),
            }
        )
    return pd.DataFrame(rows)


def best_rates(table, by):
    """Return {group: the rate of its lowest loss}; UsageError if none of its losses is finite.

    Args:
      table: with columns loss and rate. by: columns that name a group.
    """
    best = {}
    for group, rows in table.groupby(by, sort=False):
        if rows.loss.isna().all():
            label = group if isinstance(group, str) else ", ".join(map(str, group))
            raise UsageError(f"{label}: no learning rate ends with a finite loss; add smaller ones")
        best[group] = float(rows.rate[rows.loss.idxmin()])
    return best


def text_digests(text_record, tokenizer):
    """Return {"text", "tokenizer": hash}; tokenizer: the checksum of its file."""
    text = run_dir.checksum(json.dumps(text_record, sort_keys=True))
    return {"text": text[:12], "tokenizer": tokenizer[:12]}


def settings_digest(config):
    """Return a hash of the settings that decide a result and are not at their default."""

    def plain(config):
        return run_dir.dotted(json.loads(json.dumps(schema.as_dict(config))))

    settings = plain(config)
    defaults = plain(to_config(default_config(settings["model.family"])))
    deciding = {
        key: value
        for key, value in settings.items()
        if value != defaults.get(key) and not _IGNORED.fullmatch(key)
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:12]


def check_comparable(table):
    """Raise UsageError if runs were trained or evaluated on different texts or tokenizers."""
    for column, setting in (("tokenizer", "data.tokenizer"), ("text", "data.source")):
        if column in table and table[column].nunique() > 1:
            first = table.iloc[0]
            other = table[table[column] != first[column]].iloc[0]
            raise UsageError(
                f"{first['name']!r} and {other['name']!r} have a different {column}, so their "
                f"losses cannot be compared; use one config.{setting} for all runs"
            )
