"""Runs as processes of their own, one after another or several at a time on one machine."""

import concurrent.futures
import os
import pathlib
import queue
import shlex
import subprocess
import sys
import threading


def run_all(run, items, jobs=1):
    """`run(item, cpus)` of every item, `jobs` at a time; the first error ends it.

    cpus: None with one job; otherwise the share of the machine's CPUs that a job has to itself.
    """

    failed = threading.Event()  # set by the worker itself, which would take the next item at once
    shares = queue.SimpleQueue()
    for share in _split_cpus(jobs) if jobs > 1 else [None]:
        shares.put(share)

    def one(item):
        if failed.is_set():
            return None
        cpus = shares.get()
        try:
            return run(item, cpus)
        except BaseException:
            failed.set()
            raise
        finally:
            shares.put(cpus)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _split_cpus(jobs):
    """A set of CPUs for each of `jobs`, where the system lets a process choose its CPUs."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * jobs
    cpus = sorted(os.sched_getaffinity(0))
    return [set(cpus[i::jobs]) or {cpus[i % len(cpus)]} for i in range(jobs)]


def run_main(title, arguments, log, cpus=None):
    """Runs `python -m efx.main` with `arguments`: (exit status, where it says why).

    Its command is printed first. With a set of `cpus` it keeps to these, and what it prints goes to
    the file `log`; its last word is shown.
    """
    print(f"== {title}: python -m efx.main {shlex.join(arguments)}", flush=True)
    run = [sys.executable, "-m", "efx.main", *arguments]
    if cpus is None:
        return subprocess.run(run, check=False).returncode, "its last line"
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)  # of this thread, and of what it starts
    log = pathlib.Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        done = subprocess.run(run, check=False, stdout=file, stderr=subprocess.STDOUT)
    ended = [line for line in log.read_text().splitlines() if line.startswith("finished")]
    print(f"-- {title}: {' '.join(ended[-1:])}", flush=True)
    return done.returncode, str(log)
