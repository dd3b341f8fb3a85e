"""From the command to the first step, and from the command to the first sampled text.

    python -m benchmarks.start [--config=configs/mod.py] [--runs=5] [--against=FOLDER]

Each start is a process of its own. "cold" finds no compiled program, "warm" finds those of the cold
start before it; sampling is that of the config's smoke run. Seconds are medians, clock and CPU; CPU
seconds hardly depend on other work on the machine. With --against, another checkout of the project
starts in turns with this one, and the ratio is this one's share of its seconds.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import common
from efx.errors import UsageError

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIRST_STEP = re.compile(r"first step after ([\d.]+) s \((.*)\)")
PHASE = re.compile(r"([^,]+?) ([\d.]+) s")
NO_WORK = ("--config.evaluate.every=0", "--config.sample.every=0")


class Start:
    """One start: `wall` and `cpu` seconds, and {phase: seconds} as the command prints them."""

    def __init__(self, tree, cache, *arguments, until=None):
        command = [sys.executable, "-m", "efx.main", *arguments]
        environment = os.environ | {"EFX_COMPILE_CACHE": str(cache), "PYTHONPATH": str(tree)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody starts without compiled modules
        began, output, self.phases = time.perf_counter(), [], {}
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen(command, cwd=tree, env=environment, **pipe)
        for line in process.stdout:
            output.append(line)
            if until and (found := until.search(line)):
                self.phases = {name.strip(): float(s) for name, s in PHASE.findall(found[2])}
                process.kill()
                break
        _, status, usage = os.wait4(process.pid, 0)
        process.stdout.close()
        self.wall, self.cpu = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
        if not (self.phases if until else status == 0):
            raise UsageError(f"{' '.join(command)}: {''.join(output[-3:]).strip()}")


@common.command
def main(argv=None):
    arguments = _arguments(argv)
    trees = {"this": ROOT}
    if arguments.against:
        trees["other"] = pathlib.Path(arguments.against).resolve()
    starts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, tree in trees.items():
            smoke = f"--config={arguments.config}:smoke"
            Start(tree, _cache(folder, name, "smoke"), smoke, f"--workdir={folder}/{name}/run")
        for turn in range(arguments.runs):
            for name, tree in trees.items():
                for kind, start in _starts(pathlib.Path(folder), name, tree, arguments, turn):
                    starts.setdefault((kind, name), []).append(start)
    for kind in dict.fromkeys(kind for kind, _ in starts):
        _print(kind, {name: starts[kind, name] for name in trees})
    return 0


def _cache(folder, name, which):
    return pathlib.Path(folder) / name / "cache" / which


def _starts(folder, name, tree, arguments, turn):
    """(kind, Start) of one turn."""
    cache = _cache(folder, name, f"train{turn}")
    for kind in ("first step, cold", "first step, warm"):
        workdir = folder / name / f"{kind[-4:]}{turn}"
        train = f"--config={arguments.config}", f"--workdir={workdir}", *NO_WORK
        yield kind, Start(tree, cache, *train, until=FIRST_STEP)
    sample = ("--mode=sample", f"--workdir={folder}/{name}/run", "--prompt=def ")
    if turn == 0:
        Start(tree, _cache(folder, name, "smoke"), *sample)  # compiles
    yield "sampling, warm", Start(tree, _cache(folder, name, "smoke"), *sample)


def _print(kind, starts):
    def median(name, of):
        return statistics.median(map(of, starts[name]))

    quantities = {"clock": lambda start: start.wall, "CPU": lambda start: start.cpu}
    phases = {phase: None for some in starts.values() for one in some for phase in one.phases}
    quantities |= {phase: lambda one, p=phase: one.phases.get(p, 0.0) for phase in phases}
    rows = []
    for quantity, of in quantities.items():
        values = [median(name, of) for name in starts]
        ratio = [f"{values[0] / values[1]:.2f}" if values[1] else ""] if len(values) > 1 else []
        rows.append((quantity, *(f"{value:.2f}" for value in values), *ratio))
    header = (kind, *(f"{name}, s" for name in starts), *(["ratio"] if len(starts) > 1 else []))
    print(common.table(header, *rows), end="\n\n")


def _arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/mod.py")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--against", help="another checkout of the project")
    arguments = parser.parse_args(argv)
    if arguments.runs < 1:
        raise UsageError(f"--runs={arguments.runs}: at least 1")
    if arguments.against and not (pathlib.Path(arguments.against) / "efx/main.py").is_file():
        raise UsageError(f"--against={arguments.against}: there is no efx/main.py in it")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
