"""Runs in separate processes, one after another or several at a time on one machine."""

import concurrent.futures
import contextlib
import os
import pathlib
import queue
import shlex
import signal
import subprocess
import sys
import threading

from efx import run_dir
from efx.config import schema
from efx.config.load import completed, to_config
from efx.errors import UsageError
from efx.parallel.signals import PARENT_PIPE, STOPPING


class Stopped(KeyboardInterrupt):
    """A signal came, and the runs that it was passed on to have ended. number: of the signal."""

    def __init__(self, number):
        super().__init__()
        self.number = number


class Stoppable:
    """Passes SIGINT, SIGTERM and SIGHUP on to the runs of a study, which save what they have; once
    they have ended the study is Stopped, and without a run it is so at once. A run left behind
    would keep its folder, and the same command would be refused there.

    A context manager; outside of the main thread it does nothing.
    """

    def __enter__(self):
        global _stopped_by
        _stopped_by, self._previous_handlers = 0, {}
        for number in STOPPING:
            # Whoever starts a study with nohup, or in the background, wants it to go on.
            if signal.getsignal(number) != signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # not in the main thread
                    self._previous_handlers[number] = signal.signal(number, _pass_on)
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)


# A pipe to which nothing is written: its end is that of this process, also by a kill -9.
_alive = ()
_running = set()  # processes
# For runs that may share a GPU: alone each would take three quarters of its memory.
_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_parsing = threading.Lock()  # runs of several threads are parsed one after another
_stopped_by = 0  # the number of the signal that came


def _pass_on(number, frame):
    global _stopped_by
    _stopped_by = signal.Signals(number)
    running = tuple(_running)
    for process in running:
        process.send_signal(number)
    if not running:
        raise Stopped(_stopped_by)


def _status_of(command, defaults=(), **streams):
    """The exit status of a process; Stopped, when it has ended, if a signal came.

    defaults: of its environment.
    """
    if _stopped_by:
        raise Stopped(_stopped_by)
    process = subprocess.Popen(command, **streams, **_ends_with_this_process(dict(defaults)))
    _running.add(process)
    try:
        if _stopped_by:  # while it was started
            process.send_signal(_stopped_by)
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        _running.discard(process)
    if _stopped_by:
        raise Stopped(_stopped_by)
    return status


def _ends_with_this_process(defaults):
    """Arguments of `Popen` for a run that stops when this process is no more."""
    global _alive
    _alive = _alive or os.pipe()
    environment = defaults | os.environ | {PARENT_PIPE: str(_alive[0])}
    return {"pass_fds": [_alive[0]], "env": environment}


def run_all(run, items, jobs=1):
    """`run(item, cpus)` of every item, `jobs` at a time; the first error ends all.

    cpus: None with one job; otherwise the set of CPUs that a job has to itself.
    """

    failed = threading.Event()  # set by the worker, which would start the next item at once
    free_cpus = queue.SimpleQueue()
    for cpus in _split_cpus(jobs) if jobs > 1 else [None]:
        free_cpus.put(cpus)

    def run_item(item):
        if failed.is_set():
            return None
        cpus = free_cpus.get()
        try:
            return run(item, cpus)
        except BaseException:
            failed.set()
            raise
        finally:
            free_cpus.put(cpus)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_item, item) for item in items]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _split_cpus(jobs):
    """A set of CPUs for each job; empty sets if the system does not let processes choose."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * jobs
    cpus = sorted(os.sched_getaffinity(0))
    return [set(cpus[i::jobs]) or {cpus[i % len(cpus)]} for i in range(jobs)]


def _is_finished(arguments):
    """Whether `python -m efx.main` has no work: the run is at its last step, evaluated and sampled,
    with a finite loss."""
    from efx.config import flags
    from efx.train import run_files, trainer

    try:
        values = flags.parse(["efx", *arguments])
        if values.mode != "train":
            return False
        config, workdir = to_config(values.config), values.workdir
        step, meta = run_dir.newest_meta(workdir)
        if step is None or meta.get("last_step") != step:
            return False
        plain = schema.as_dict(config)
        changed = run_dir.check_config(workdir, plain, run_files.MAY_DIFFER, completed)
        if changed.keys() & {"steps", "train_flops"}:
            return False
        row = trainer.row_of(workdir, step)
    except UsageError:  # the command itself reports it
        return False
    is_finite = row.get("eval/loss") is not None and not row.get("train/nonfinite_run")
    return is_finite and not trainer.missing_work(config, workdir, step, step)


def run_main(title, arguments, log, cpus=None):
    """Runs `python -m efx.main` with `arguments`: (exit status, name of the text that says why).

    Nothing is started, or printed, for a run that has finished. Otherwise the command is printed
    first. With a set of `cpus` it runs on these, its output goes to the file `log`, and the line
    that ends a finished run is shown.
    """
    with _parsing:
        if _is_finished(arguments):
            return 0, ""
    print(f"== {title}: python -m efx.main {shlex.join(arguments)}", flush=True)
    run = [sys.executable, "-m", "efx.main", *arguments]
    if cpus is None:
        return _status_of(run), "its last line"
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)  # of this thread and the process it starts
    log = pathlib.Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        status = _status_of(run, _SHARED, stdout=file, stderr=subprocess.STDOUT)
    last_lines = [line for line in log.read_text().splitlines() if line.startswith("finished")]
    print(f"-- {title}: {' '.join(last_lines[-1:])}", flush=True)
    return status, str(log)
