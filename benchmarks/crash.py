"""Faults: does a run lose anything when it is killed, signalled, or its disk fails?

    python -m benchmarks.crash --kills=30 --seed=0

One tiny run is left alone. Others like it are disturbed and launched again until they finish; the
last checkpoint, the metrics and the samples must then be the same, bit for bit. The faults: kill -9
at random moments; SIGINT, SIGTERM and SIGHUP, once and twice; a limit on the size of files, which
fails as a full disk does; a directory that vanishes; a second launch in one directory.

Exit status 1 if anything is lost, or a launch ends with another status or more than one line.
"""

import argparse
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
from efx.logging import read_metrics
from efx.run_dir import finished_steps

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTINGS = {
    "steps": 120, "data.source": "pydoc", "data.max_bytes": 20_000, "data.seq_len": 16,
    "data.batch_size": 4, "model.width": 16, "evaluate.every": 5, "evaluate.batch_size": 4,
    "sample.every": 10, "sample.max_new_tokens": 4, "checkpoint.every": 3, "log.every": 1,
}  # fmt: skip
KILLS_OF_A_RUN = 6
SECONDS_TO_STOP = 30
# Signals also count where this benchmark runs under nohup.
CHILD = """
import resource, signal, sys
largest_file = int(sys.argv.pop(1))
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
from efx import main
sys.exit(main.main())
"""


class Lost(Exception):
    """A run lost something, or a launch did not end as expected."""


class Bench:
    """The command of all runs, and `expected`, the contents of an undisturbed one."""

    def __init__(self, scratch, seed):
        self.scratch, self.rng, self.count = scratch, random.Random(seed), 0
        self.arguments = [f"--config={ROOT / 'configs/mod.py'}:smoke"]
        self.arguments += [f"--config.{key}={value}" for key, value in SETTINGS.items()]
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "EFX_CACHE": str(scratch / "cache"),
            "EFX_COMPILE_CACHE": str(scratch / "compiled"),
        }
        folder = self.folder()
        process, started = self.launch(folder), time.monotonic()
        check_end(process, [0])
        self.seconds, self.expected = time.monotonic() - started, contents(folder)
        self.metrics_bytes = (folder / "metrics.jsonl").stat().st_size

    def folder(self):
        self.count += 1
        return self.scratch / f"run{self.count}"

    def launch(self, folder, largest_file=0):
        """Return a process that has trained a step in a run directory, or ended."""
        command = [sys.executable, "-u", "-c", CHILD, str(largest_file), f"--workdir={folder}"]
        log = open(f"{self.folder()}.log", "w+b")
        process = subprocess.Popen(
            [*command, *self.arguments], env=self.environment, stdout=log, stderr=log
        )
        process.log = pathlib.Path(log.name)
        while process.poll() is None and b"first step after" not in process.log.read_bytes():
            time.sleep(0.01)
        return process

    def launch_until_random_moment(self, folder):
        process = self.launch(folder)
        time.sleep(self.rng.uniform(0, self.seconds / (KILLS_OF_A_RUN + 2)))
        return process

    def check_finished(self, folder):
        """Launch a run a last time; it must then equal the undisturbed one."""
        check_end(self.launch(folder), [0])
        found = contents(folder)
        changed = [name for name in found if found[name] != self.expected[name]]
        if changed:
            raise Lost(f"{folder}: other {', '.join(changed)}")


def check_end(process, statuses, words="", seconds=300):
    """Wait for the end; raise Lost for another status, or status 2 without one line of `words`."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        status = "none"
    lines = process.log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("efx: error: ")]
    is_clear = status != 2 or (len(errors) == 1 and words in errors[0])
    if status not in statuses or not is_clear or any("Traceback" in line for line in lines):
        raise Lost(f"status {status}, expected {statuses} {words}: {lines[-4:]}")


def contents(folder):
    """Return {name: value} of what two equal runs have alike."""
    checkpoints = manifest.as_root(folder / "checkpoints")
    newest = checkpoints / str(finished_steps(checkpoints)[-1])
    manifest.verify(newest)
    targets = {
        path: arrays.with_sharding(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        for path, leaf in arrays.read_metadata(newest).items()
    }
    state = arrays.read_state(newest, targets)
    rows, names = read_metrics(folder), ("step", "loss", "eval/loss")
    return {
        "state": {path: np.asarray(leaf).tobytes() for path, leaf in state.items()},
        "losses": [[row.get(name) for name in names] for row in rows],
        "samples": {path.name: path.read_bytes() for path in (folder / "samples").iterdir()},
    }


def kills(bench):
    while bench.kills > 0:
        folder = bench.folder()
        for _ in range(min(KILLS_OF_A_RUN, bench.kills)):
            process = bench.launch_until_random_moment(folder)
            bench.kills -= process.poll() is None
            process.kill()
            process.wait()
        bench.check_finished(folder)


def signals(bench):
    """One signal saves and stops; a second one, later than the same request repeated, ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        folder = bench.folder()
        for times in (1, 2):
            process = bench.launch_until_random_moment(folder)
            process.send_signal(number)
            if times == 2:
                time.sleep(1.1)
                process.send_signal(number)
            # A second signal may come when all is saved, or nothing listens any more.
            statuses = [0] if times == 1 else [0, 128 + number, -number]
            check_end(process, statuses, seconds=SECONDS_TO_STOP)
        bench.check_finished(folder)


def disks(bench):
    folder = bench.folder()
    process = bench.launch(folder, largest_file=bench.metrics_bytes // 2)
    check_end(process, [2], "too large")
    bench.check_finished(folder)
    folder, away = bench.folder(), bench.folder()
    process = bench.launch_until_random_moment(folder)
    folder.rename(away)
    check_end(process, [2], str(folder), SECONDS_TO_STOP)
    if finished_steps(folder / "checkpoints"):
        raise Lost(f"{folder}: a checkpoint in a directory that had vanished")
    bench.check_finished(away)


def two_launches(bench):
    folder = bench.folder()
    first = bench.launch_until_random_moment(folder)
    check_end(bench.launch(folder), [2], f"in use by process {first.pid} on")
    check_end(first, [0])
    bench.check_finished(folder)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="kills with -9 in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(argv)
    status = 0
    with tempfile.TemporaryDirectory(prefix="efx_crash_") as scratch:
        bench = Bench(pathlib.Path(scratch), options.seed)
        bench.kills = options.kills
        for fault in (kills, signals, disks, two_launches):
            try:
                fault(bench)
                print(f"{fault.__name__}: nothing lost", flush=True)
            except Lost as error:
                status = 1
                print(f"{fault.__name__}: LOST: {error}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
