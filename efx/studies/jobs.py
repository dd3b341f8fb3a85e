"""Runs in separate processes, one after another or several at a time on one machine."""

import concurrent.futures
import os
import pathlib
import queue
import shlex
import subprocess
import sys
import threading


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


def run_main(title, arguments, log, cpus=None):
    """Runs `python -m efx.main` with `arguments`: (exit status, name of the text that says why).

    The command is printed first. With a set of `cpus` it runs on these, its output goes to the file
    `log`, and the line that ends a finished run is shown.
    """
    print(f"== {title}: python -m efx.main {shlex.join(arguments)}", flush=True)
    run = [sys.executable, "-m", "efx.main", *arguments]
    if cpus is None:
        return subprocess.run(run, check=False).returncode, "its last line"
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)  # of this thread and the process it starts
    log = pathlib.Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        process = subprocess.run(run, check=False, stdout=file, stderr=subprocess.STDOUT)
    last_lines = [line for line in log.read_text().splitlines() if line.startswith("finished")]
    print(f"-- {title}: {' '.join(last_lines[-1:])}", flush=True)
    return process.returncode, str(log)
