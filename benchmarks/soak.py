"""What a run holds on to: memory, threads, open files and disk of one that saves, evaluates and
samples all the time.

    python -m benchmarks.soak [--config=configs/mod.py] [--seconds=3600] [--every=5]

Trains with an evaluation, a sample and a checkpoint every --every steps, and looks at the process
(Linux: /proc) forty times. Prints a table of ten looks, the growth of each quantity from the second
half of the time by least squares, which threads there are, and warnings that were printed more
than once. Exit status 1 if memory grows by more than --most MB in 1,000 steps, or if there are more
threads or open files in the last quarter of the time than in the one before.
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
from efx.metrics import read_metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOOKS, SHOWN = 40, 10
SWAY = 4  # threads or files that one look may find more than another, of a save that is under way
NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Look:
    """A process at a time: seconds since its start, the run's last logged step, resident bytes,
    {name of a thread: how many}, open files, bytes of the run folder."""

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


def look_at(process, began, workdir):
    """The `Look` of now, or None once the process has ended."""
    proc = pathlib.Path(f"/proc/{process.pid}")
    try:
        resident = re.search(r"VmRSS:\s+(\d+) kB", (proc / "status").read_text())
        tasks = collections.Counter()
        for task in (proc / "task").iterdir():
            # Threads of a pool are numbered: their names differ in that alone.
            tasks[NUMBER.sub("#", (task / "comm").read_text().strip())] += 1
        files = len(os.listdir(proc / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if resident is None or process.poll() is not None:
        return None
    steps = [row["step"] for row in read_metrics(workdir)] if workdir.exists() else []
    disk = 0
    for path in workdir.rglob("*"):
        try:
            disk += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # an old checkpoint that has just gone
            continue
    memory = int(resident[1]) * 1024
    return Look(time.monotonic() - began, max(steps, default=0), memory, tasks, files, disk)


def growth(looks, of):
    """A quantity's slope in 1,000 steps, by least squares over the second half of the looks."""
    half = [look for look in looks[len(looks) // 2 :] if look.step]
    steps = np.array([look.step for look in half], float)
    if len(set(steps)) < 2:
        raise UsageError("too short: fewer than two steps were logged; give it more --seconds")
    return 1000 * np.polyfit(steps, [of(look) for look in half], 1)[0]


def repeated(lines):
    """{warning: how often} of those that came more than once, whatever numbers are in them."""
    warning = re.compile(r"efx: |[WE]\d{4} |.*[Ww]arning")
    shapes = collections.Counter(NUMBER.sub("#", line) for line in lines if warning.match(line))
    return {line: count for line, count in shapes.items() if count > 1}


def rise(looks, of):
    """How much higher the highest look of the last quarter is than that of the quarter before:
    threads and files come and go with each save."""
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
                time.sleep(max(0.0, began + seconds * number / LOOKS - time.monotonic()))
                look = look_at(process, began, workdir)
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
    rows.append(("in 1,000 steps", "", *(f"{slope:+.1f}" for slope in slopes.values())))
    print(common.table(("after", "step", *QUANTITIES), *rows))
    threads = looks[-1].threads
    print("threads at the end:", ", ".join(f"{n} {name}" for name, n in threads.most_common()))
    rises = {name: rise(looks, QUANTITIES[name]) for name in ("threads", "open files")}
    for name, value in rises.items():
        print(f"{name}: at most {value:+d} in the last quarter against the one before")
    for line, count in repeated(lines).items():
        print(f"printed {count} times: {line}")
    return int(slopes["memory, MB"] > arguments.most or max(rises.values()) > SWAY)


if __name__ == "__main__":
    sys.exit(main())
