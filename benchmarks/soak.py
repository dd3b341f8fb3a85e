"""What a run holds on to: memory, threads, open files and disk of one that saves, evaluates and
samples all the time.

    python -m benchmarks.soak [--config=configs/mod.py] [--seconds=3600] [--every=5]

Trains with an evaluation, a sample and a checkpoint every --every steps, and looks at the process
(Linux: /proc) every second. Of each fortieth of the time it keeps the least memory and the fewest
threads and open files, for what an evaluation or a save holds while it lasts is given back. Prints
a table of ten of them, the growth of each quantity from the second half of the time by least
squares with its standard error, which threads there are, and warnings that were printed more than
once. Exit status 1 if memory grows by more than --most MB in 1,000 steps by two standard errors, or
if there are more threads or open files in the last quarter of the time than in the one before.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import common
from efx.errors import UsageError
from efx.logging import read_metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOOKS, SHOWN = 40, 10
SWAY = 4  # threads or files that one look may find more than another, of pools that fill and empty
NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Look:
    """A process for a while: seconds from its start to the while's end, the run's last logged step,
    resident bytes, {name of a thread: how many} and open files, each where it was least, bytes of
    the run directory."""

    seconds: float
    step: int
    memory: int
    threads: collections.Counter
    files: int
    disk: int


QUANTITIES = {
    "memory, MB": lambda look: look.memory / 1e6,
    "threads": lambda look: sum(look.threads.values()),
    "open files": lambda look: look.files,
    "disk, MB": lambda look: look.disk / 1e6,
}


def glance(process):
    """(resident bytes, {name of a thread: how many}, open files) of now, or None once the process
    has ended."""
    proc = pathlib.Path(f"/proc/{process.pid}")
    try:
        resident = re.search(r"VmRSS:\s+(\d+) kB", (proc / "status").read_text())
        tasks = collections.Counter()
        for task in (proc / "task").iterdir():
            try:
                name = (task / "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                continue
            # Threads of a pool are numbered: their names differ in that alone.
            tasks[NUMBER.sub("#", name)] += 1
        files = len(os.listdir(proc / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if resident is None or process.poll() is not None:
        return None
    return int(resident[1]) * 1024, tasks, files


def look_until(end, process, began, workdir):
    """The `Look` at a process from now until a time of the monotonic clock, or None if the process
    ends before."""
    glances = []
    while not glances or time.monotonic() < end:
        glances.append(glance(process))
        if glances[-1] is None:
            return None
        time.sleep(max(0.0, min(1.0, end - time.monotonic())))
    memory, threads, files = zip(*glances, strict=True)
    steps = [row["step"] for row in read_metrics(workdir)] if workdir.exists() else []
    disk = 0
    for folder, _, names in os.walk(workdir):  # it passes over folders that have just gone
        for name in names:
            try:
                disk += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # of an old checkpoint
                continue
    fewest = min(threads, key=lambda names: sum(names.values()))
    seconds = time.monotonic() - began
    return Look(seconds, max(steps, default=0), min(memory), fewest, min(files), disk)


def growth(looks, of):
    """(a quantity's slope in 1,000 steps, its standard error), by least squares over the second
    half of the looks."""
    half = [look for look in looks[len(looks) // 2 :] if look.step]
    steps = np.array([look.step for look in half], float)
    if len(set(steps)) < 2:
        raise UsageError("too short: fewer than two steps were logged; give it more --seconds")
    values = np.array([of(look) for look in half])
    slope, level = np.polyfit(steps, values, 1)
    rest = np.sum(np.square(values - level - slope * steps)) / max(1, len(steps) - 2)
    error = np.sqrt(rest / np.sum(np.square(steps - steps.mean())))
    return 1000 * slope, 1000 * error


def repeated(lines):
    """{warning: how often} of those that came more than once, whatever numbers are in them."""
    warning = re.compile(r"efx: |[WE]\d{4} |.*[Ww]arning")
    shapes = collections.Counter(NUMBER.sub("#", line) for line in lines if warning.match(line))
    return {line: count for line, count in shapes.items() if count > 1}


def rise(looks, of):
    """How much higher the highest look of the last quarter is than that of the quarter before."""
    quarter = len(looks) // 4
    return max(map(of, looks[-quarter:])) - max(map(of, looks[-2 * quarter : -quarter]))


def soak(config, seconds, every, workdir):
    """(looks, lines of the log) of a run of so many seconds."""
    log = workdir.parent / "log.txt"
    command = [sys.executable, "-m", "efx.main", f"--config={config}", f"--workdir={workdir}"]
    command += [f"--config.{name}.every={every}" for name in ("evaluate", "sample", "checkpoint")]
    command += ["--config.log.every=1", "--config.steps=10000000"]
    began, looks = time.monotonic(), []
    with open(log, "w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
        try:
            for number in range(1, LOOKS + 1):
                end = began + seconds * number / LOOKS
                look = look_until(end, process, began, workdir)
                if look is None:
                    raise UsageError(f"the run ended by itself: {log.read_text()[-300:].strip()}")
                looks.append(look)
        finally:
            process.kill()
            process.wait()
    return looks, log.read_text(errors="replace").splitlines()


@common.command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/mod.py")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--most", type=float, default=5.0, help="MB in 1,000 steps")
    arguments = parser.parse_args(argv)
    if not pathlib.Path("/proc/self/status").exists():
        raise UsageError("benchmarks.soak looks into /proc, which only Linux has")
    if arguments.seconds <= 0 or arguments.every < 1:
        raise UsageError("--seconds is more than 0, and --every at least 1")
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        looks, lines = soak(arguments.config, arguments.seconds, arguments.every, workdir)
    rows = [
        (f"{look.seconds:.0f} s", look.step, *(f"{of(look):.0f}" for of in QUANTITIES.values()))
        for look in looks[LOOKS // SHOWN - 1 :: LOOKS // SHOWN]
    ]
    slopes = {name: growth(looks, of) for name, of in QUANTITIES.items()}
    shown = (f"{slope:+.1f} ± {error:.1f}" for slope, error in slopes.values())
    rows.append(("in 1,000 steps", "", *shown))
    print(common.table(("after", "step", *QUANTITIES), *rows))
    threads = looks[-1].threads
    print("threads at the end:", ", ".join(f"{n} {name}" for name, n in threads.most_common()))
    rises = {name: rise(looks, QUANTITIES[name]) for name in ("threads", "open files")}
    for name, value in rises.items():
        print(f"{name}: at most {value:+d} in the last quarter against the one before")
    for line, count in repeated(lines).items():
        print(f"printed {count} times: {line}")
    slope, error = slopes["memory, MB"]
    return int(slope - 2 * error > arguments.most or max(rises.values()) > SWAY)


if __name__ == "__main__":
    sys.exit(main())
