"""Faults: does a run lose anything when it is killed, signalled, or its disk fails?

    python -m benchmarks.crash --kills=30 --seed=0

One tiny run is left alone. Others like it are disturbed and launched again until they finish; the
last checkpoint, the metrics and the samples must then be the same, bit for bit. The faults: kill -9
at random moments; SIGINT, SIGTERM and SIGHUP, once and twice; a limit on the size of files, which
fails as a full disk does; a directory that vanishes; a second launch in one directory.

Exit status 1 if anything is lost, or a launch ends otherwise than in one line.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from benchmarks.common import command
from efx.checkpoint import arrays, manifest
from efx.errors import UsageError
from efx.logging import read_metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTINGS = {
    "data.seq_len": 16, "data.batch_size": 4, "model.width": 16, "model.depth": 2,
    "model.attention.num_heads": 2, "optim.schedule.warmup_steps": 1, "evaluate.every": 5,
    "evaluate.batch_size": 4, "evaluate.max_batches": 2, "sample.every": 10,
    "sample.max_new_tokens": 4, "checkpoint.every": 3, "checkpoint.keep_best": 1, "log.every": 1,
}  # fmt: skip
# Columns of a row that describe a launch, not the run.
OF_A_LAUNCH = {
    "seconds", "tokens_per_second", "flops_per_second", "mfu", "startup_seconds", "parameters",
}  # fmt: skip
KILLS_OF_A_RUN = 6
SECONDS = {"end": 300, "stop": 30}  # within which a launch ends by itself, or stops on a signal

# Signals also count where this benchmark runs under nohup.
_CHILD = """
import resource, signal, sys
largest_file = int(sys.argv.pop(1))
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
from efx import main
sys.exit(main.command())
"""


class Launch:
    """One process that trains in a run directory."""

    def __init__(self, bench, folder, largest_file=0):
        self.folder, self._output = folder, tempfile.TemporaryFile(dir=bench.scratch)
        arguments = [str(largest_file), f"--workdir={folder}", *bench.arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _CHILD, *arguments],
            env=bench.environment, stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def output(self):
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    def is_training(self):
        """Wait for the first step; whether the process is still running."""
        while self.process.poll() is None and "first step after" not in self.output():
            time.sleep(0.01)
        return self.process.poll() is None

    def problems(self, expected, words="", seconds=SECONDS["end"]):
        """Wait for the end. Returns a line unless the status is an expected one, with one line that
        has these words where it is 2."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        status, output = self.process.poll(), self.output()
        self.process.kill()
        errors = [line for line in output.splitlines() if line.startswith("efx: error: ")]
        if status in expected and "Traceback" not in output:
            if status != 2 or (len(errors) == 1 and words in errors[0]):
                return []
        end = "did not end" if status is None else f"ended with status {status}"
        return [f"a launch {end}, expected {expected} {words}: {output.splitlines()[-4:]}"]


class Bench:
    """The undisturbed run, and the command of all runs."""

    def __init__(self, scratch, seed, steps):
        self.scratch, self.rng, self.count = scratch, random.Random(seed), 0
        text = scratch / "text.txt"
        words = ["".join(self.rng.choices("abcdefgh", k=self.rng.randint(2, 6))) for _ in range(60)]
        text.write_text(" ".join(self.rng.choices(words, k=3000)))
        settings = {**SETTINGS, "steps": steps, "data.source": f"text:{text}"}
        self.arguments = [f"--config={ROOT / 'configs/mod.py'}"]
        self.arguments += [f"--config.{key}={value}" for key, value in settings.items()]
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "EFX_CACHE": str(scratch / "cache"),
            "EFX_COMPILE_CACHE": str(scratch / "compiled"),
        }
        straight = self.folder()
        launch = Launch(self, straight)
        launch.is_training()
        begin = time.monotonic()
        if problems := launch.problems([0]):
            raise UsageError(f"the undisturbed run: {problems[0]}")
        self.seconds, self.expected = time.monotonic() - begin, contents(straight)

    def folder(self):
        self.count += 1
        return self.scratch / f"run{self.count}"

    def disturbed(self, folder, **options):
        """A launch at a random moment of its training, still running."""
        launch = Launch(self, folder, **options)
        if launch.is_training():
            time.sleep(self.rng.uniform(0, self.seconds / (KILLS_OF_A_RUN + 2)))
        return launch

    def finish(self, folder):
        """The differences of a run, launched a last time, from the undisturbed one."""
        if problems := Launch(self, folder).problems([0]):
            return problems
        found = contents(folder)
        return [f"{folder}: other {name}" for name in found if found[name] != self.expected[name]]


def state_of(folder):
    """{path: bytes} of the arrays in the newest checkpoint of a run."""
    checkpoints = manifest.as_root(folder / "checkpoints")
    newest = checkpoints / str(manifest.finished_steps(checkpoints)[-1])
    manifest.verify(newest)
    targets = {
        path: arrays.with_sharding(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        for path, leaf in arrays.read_metadata(newest).items()
    }
    state = arrays.read_state(newest, targets)
    return {path: np.asarray(leaf).tobytes() for path, leaf in state.items()}


def contents(folder):
    """{name: value} of what two equal runs have alike."""
    rows = [{k: v for k, v in row.items() if k not in OF_A_LAUNCH} for row in read_metrics(folder)]
    return {
        "state": state_of(folder),
        "metrics": json.dumps(rows),
        "samples": {path.name: path.read_bytes() for path in (folder / "samples").iterdir()},
    }


def kills(bench, count):
    problems, done = [], 0
    while done < count and not problems:
        folder = bench.folder()
        for _ in range(min(KILLS_OF_A_RUN, count - done)):
            launch = bench.disturbed(folder)
            if launch.process.poll() is None:
                launch.process.kill()
                launch.process.wait()
                done += 1
        problems += bench.finish(folder)
    return problems


def signals(bench):
    """One signal saves and stops; a second one, later than the same request repeated, ends."""
    problems = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        folder = bench.folder()
        for times in (1, 2):
            launch = bench.disturbed(folder)
            launch.process.send_signal(number)
            if times == 2:
                time.sleep(1.1)
                launch.process.send_signal(number)
            # A second signal may come when all is saved, or nothing listens any more.
            expected = [0] if times == 1 else [0, 128 + number, -number]
            problems += launch.problems(expected, seconds=SECONDS["stop"])
        problems += bench.finish(folder)
    return problems


def disks(bench):
    folder = bench.folder()
    largest = len(bench.expected["metrics"]) // 2
    problems = Launch(bench, folder, largest_file=largest).problems([2], "too large")
    problems += bench.finish(folder)
    folder, away = bench.folder(), bench.folder()
    launch = bench.disturbed(folder)
    folder.rename(away)
    problems += launch.problems([2], str(folder), SECONDS["stop"])
    if manifest.finished_steps(manifest.as_root(folder / "checkpoints")):
        problems.append(f"{folder}: a checkpoint in a directory that had vanished")
    return problems + bench.finish(away)


def two_launches(bench):
    folder = bench.folder()
    first = bench.disturbed(folder)
    holder = f"in use by process {first.process.pid} on"
    problems = Launch(bench, folder).problems([2], holder, SECONDS["stop"])
    return problems + first.problems([0]) + bench.finish(folder)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="kills with -9 in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--steps", type=int, default=120, help="of a run")
    options = parser.parse_args(argv)
    if options.steps < 20:
        raise UsageError(f"--steps={options.steps}: must be at least 20")
    is_lost = False
    with tempfile.TemporaryDirectory(prefix="efx_crash_") as scratch:
        bench = Bench(pathlib.Path(scratch), options.seed, options.steps)
        for name, fault in {
            f"{options.kills} kills with -9": lambda: kills(bench, options.kills),
            "signals": lambda: signals(bench),
            "disks": lambda: disks(bench),
            "two launches": lambda: two_launches(bench),
        }.items():
            problems = fault()
            is_lost |= bool(problems)
            print("\n".join([f"{name}: {'LOST' if problems else 'nothing lost'}", *problems]))
    return int(is_lost)


if __name__ == "__main__":
    sys.exit(main())
