"""Faults: does a run lose anything when it is killed, signalled, or its disk fails?

    python -m benchmarks.crash --kills=30 --seed=0

One tiny run is left alone. Others like it are disturbed, go on, and have to come to the same end:
each bit of the last checkpoint, each row of the metrics, each sample. The faults are kill -9 at
random moments of the start, the steps, the evaluations and the saves; SIGTERM, SIGHUP and SIGINT,
at the start and later, once and twice; a disk that is full (a tmpfs where this is root, and always
a limit on the size of files); a folder that is read-only (the tmpfs, or the permissions) or
vanishes; two launches in one folder; and clocks that jump, by seconds or by years.

Prints a table. Exit status 1 if anything is lost, or a launch ends in other words than one line.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

import efx
from benchmarks.common import command, table
from efx.checkpoint import arrays, files
from efx.errors import UsageError
from efx.metrics import read_metrics

SETTINGS = {
    "data.seq_len": 16,
    "data.batch_size": 4,
    "model.width": 16,
    "model.depth": 2,
    "model.attention.num_heads": 2,
    "optim.schedule.warmup_steps": 1,
    "evaluate.every": 5,
    "evaluate.batch_size": 4,
    "evaluate.max_batches": 2,
    "sample.every": 10,
    "sample.max_new_tokens": 4,
    "checkpoint.every": 3,
    "checkpoint.keep_best": 1,
    "log.every": 1,
}
# What a row says of the launch that wrote it, and not of the run.
OF_A_LAUNCH = {
    "seconds", "tokens_per_second", "flops_per_second", "mfu", "startup_seconds", "parameters",
}  # fmt: skip
# More in one run, and it would come to its end before the last of them.
KILLS_OF_A_RUN = 6
PHASES = ("start-up", "steps", "evaluation", "save")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Seconds: for a launch to come to its end; to stop after a signal or once its disk has failed.
_WHOLE, _STOPPING = 300, 30

# Signals are heeded also where this benchmark runs under nohup. A clock that jumps is patched
# before anything else is imported.
_CHILD = """
import json, random, resource, signal, sys, time
given = json.loads(sys.argv.pop(1))
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if given["largest_file"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (given["largest_file"], resource.RLIM_INFINITY))
if given["clock"] is not None:
    rng, real = random.Random(given["clock"]), time.time
    def jump():
        return rng.choice((-1, 1)) * 10 ** rng.uniform(0, 8.7)  # up to 16 years
    state = {"offset": jump()}
    def jumping():
        if rng.random() < given["jumps"]:
            state["offset"] = jump()
        return real() + state["offset"]
    time.time, time.time_ns = jumping, lambda: int(jumping() * 1e9)
from efx import main
sys.exit(main.command())
"""


@dataclasses.dataclass
class Outcome:
    """What became of the runs that one kind of fault was done to.

    Attributes:
      times: faults. survived: those after which the next launch went on.
      bits: that differ in the last checkpoint. doubled, missing, different: rows of the metrics.
      samples: files of samples that differ. repeated: steps that were done again.
      seconds: that the launches took longer than an undisturbed run; None where that says nothing.
      problems: launches that ended otherwise than they should, in words.
    """

    times: int = 0
    survived: int = 0
    bits: int = 0
    doubled: int = 0
    missing: int = 0
    different: int = 0
    samples: int = 0
    repeated: int = 0
    seconds: float | None = None
    problems: list = dataclasses.field(default_factory=list)

    @property
    def lost(self):
        return (
            self.bits + self.doubled + self.missing + self.different + self.samples
            + len(self.problems) + self.times - self.survived + (not self.times)
        )  # fmt: skip


class Launch:
    """One process that trains in a folder."""

    def __init__(self, bench, folder, *, clock=None, jumps=0.0, largest_file=0):
        given = json.dumps({"clock": clock, "jumps": jumps, "largest_file": largest_file})
        self.folder = folder
        self._output = tempfile.TemporaryFile(dir=bench.scratch)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _CHILD, given, f"--workdir={folder}", *bench.arguments],
            env=bench.environment, stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        bench.launches.append(self)

    def output(self):
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    def until(self, condition):
        """Waits until `condition()` or the end of the process; whether it still runs."""
        end = time.monotonic() + _WHOLE
        while self.process.poll() is None and time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def stepping(self):
        """Waits for the first step of this launch; whether the process still runs."""
        return self.until(lambda: "first step after" in self.output())

    def end(self, seconds=_WHOLE):
        """Its exit status; None, and it is killed, if it does not end within `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self):
        self.process.kill()
        self.process.wait()

    def seconds(self):
        return time.monotonic() - self.began

    def problem(self, status, expected, words=""):
        """What is wrong with the end of this launch, in a list of one line or none."""
        output = self.output()
        said = [line for line in output.splitlines() if line.startswith("efx: error: ")]
        if "Traceback" in output:
            wrong = "ended in a traceback"
        elif status not in expected:
            wrong = "did not end" if status is None else f"ended with status {status}"
        elif 2 in expected and (len(said) != 1 or words not in said[0]):
            wrong = f"said {said or 'nothing'} where {words!r} was to be said"
        else:
            return []
        return [f"{wrong}, expected {sorted(expected)}: {' | '.join(output.splitlines()[-4:])}"]


class Bench:
    """The undisturbed run, and what the faults have in common."""

    def __init__(self, scratch, seed, steps):
        self.scratch, self.rng, self.launches = scratch, random.Random(seed), []
        text = scratch / "text.txt"
        words = ["".join(self.rng.choices("abcdefgh", k=self.rng.randint(2, 6))) for _ in range(60)]
        text.write_text(" ".join(self.rng.choices(words, k=3000)))
        root = pathlib.Path(__file__).resolve().parent.parent
        settings = {**SETTINGS, "steps": steps, "data.source": f"text:{text}"}
        self.arguments = [f"--config={root / 'configs/mod.py'}"]
        self.arguments += [f"--config.{key}={value}" for key, value in settings.items()]
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {
            **os.environ,
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            # Killed launches leave their traces in these, too.
            "EFX_CACHE": str(scratch / "cache"),
            "EFX_COMPILE_CACHE": str(scratch / "compiled"),
        }
        self._folders = 0
        self.straight = self.folder()
        launch = Launch(self, self.straight)
        launch.stepping()
        self.startup = launch.seconds()
        if problem := launch.problem(launch.end(), {0}):
            raise UsageError(f"the undisturbed run {problem[0]}")
        self.stepping = launch.seconds() - self.startup
        self.startups = []  # of launches that found full caches
        self.leaves, self.rows = leaves(self.straight), rows(self.straight)
        self.samples = samples(self.straight)

    def folder(self, below=None):
        self._folders += 1
        return (below or self.scratch) / f"run{self._folders}"

    def moment(self, phase, launch):
        """Waits for a random moment of a phase of a launch; whether the process still runs."""
        if phase == "start-up":
            time.sleep(self.rng.uniform(0, min([self.startup, *self.startups])))
            return launch.process.poll() is None
        if not launch.stepping():
            return False
        if phase == "steps":
            time.sleep(self.rng.uniform(0, self.stepping / (KILLS_OF_A_RUN + 2)))
            return launch.process.poll() is None
        is_now = {
            "evaluation": lambda: evaluates(launch.folder),
            "save": lambda: saves(launch.folder),
        }
        for _ in range(self.rng.randint(1, 3)):
            launch.until(lambda: not is_now[phase]())
            if not launch.until(is_now[phase]):
                return False
        time.sleep(self.rng.uniform(0, 0.05))
        return launch.process.poll() is None

    def finish(self, outcome, folder, **options):
        """The last launch in a folder, undisturbed, and the comparison of its run."""
        launch = Launch(self, folder, **options)
        if launch.stepping():
            self.startups.append(launch.seconds())
        problem = launch.problem(launch.end(), {0})
        outcome.problems += problem
        if not problem:
            self.compare(outcome, folder)
        return launch.seconds()

    def undisturbed(self):
        """Seconds of a run that nothing disturbs and that finds full caches."""
        return min([self.startup, *self.startups]) + self.stepping

    def compare(self, outcome, folder):
        mine, found = self.rows, rows(folder)
        steps = [row["step"] for row in found]
        by_step = {row["step"]: row for row in found}
        outcome.doubled += len(steps) - len(set(steps))
        outcome.missing += sum(row["step"] not in by_step for row in mine)
        outcome.different += sum(
            row["step"] in by_step and row != by_step[row["step"]] for row in mine
        ) + len(by_step.keys() - {row["step"] for row in mine})
        theirs = samples(folder)
        names = self.samples.keys() | theirs.keys()
        outcome.samples += sum(self.samples.get(name) != theirs.get(name) for name in names)
        outcome.bits += bits(self.leaves, leaves(folder))

    def end(self):
        for launch in self.launches:
            if launch.process.poll() is None:
                launch.kill()


# ---- what is in a run folder -----------------------------------------------------------------


def code_hash():
    """SHA-256 of the source files of efx on disk."""
    code = hashlib.sha256()
    for path in sorted(pathlib.Path(efx.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


def rows(folder):
    return [
        {key: value for key, value in row.items() if key not in OF_A_LAUNCH}
        for row in read_metrics(folder)
    ]


def samples(folder):
    return {path.name: path.read_bytes() for path in (folder / "samples").iterdir()}


def leaves(folder):
    """{path: array} of the newest checkpoint: parameters, the optimiser's state, everything."""
    checkpoints = files.as_root(folder / "checkpoints")
    newest = checkpoints / str(files.finished_steps(checkpoints)[-1])
    files.verify(newest)
    targets = {
        path: files.with_sharding(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        for path, leaf in arrays.read_metadata(newest).items()
    }
    state = arrays.read_state(newest, targets, partial=False)
    return {path: np.asarray(leaf) for path, leaf in files.flatten(state).items()}


def bits(mine, theirs):
    """How many bits differ; an array that only one of the two has, or of another shape, counts
    with all of them."""
    count = 0
    for path in mine.keys() | theirs.keys():
        pair = [leaves[path] for leaves in (mine, theirs) if path in leaves]
        if len(pair) < 2 or pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype:
            count += 8 * max(array.nbytes for array in pair)
            continue
        a, b = (np.frombuffer(array.tobytes(), np.uint8) for array in pair)
        count += int(np.bitwise_count(a ^ b).sum())
    return count


def last_row(folder):
    """The last row of the metrics of a run that goes on meanwhile; {} if there is none."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 14)))
            return json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}


def evaluates(folder):
    row = last_row(folder)
    return "step" in row and not row["step"] % SETTINGS["evaluate.every"] and "eval/loss" not in row


def saves(folder):
    try:
        return any("tmp" in name for name in os.listdir(folder / "checkpoints"))
    except OSError:
        return False


def repeated(folder):
    """Steps that were done and not saved."""
    if "step" not in (row := last_row(folder)):
        return 0
    return row["step"] - max(files.finished_steps(files.as_root(folder / "checkpoints")), default=0)


# ---- faults ----------------------------------------------------------------------------------


def kills(bench, count, phases=PHASES):
    """kill -9 at random moments, the phases by turns; {phase: how many} beside the outcome."""
    outcome, aimed = Outcome(seconds=0.0), dict.fromkeys(phases, 0)
    while outcome.times < count and not outcome.problems:
        folder, spent, of_this = bench.folder(), 0.0, 0
        while of_this < KILLS_OF_A_RUN and outcome.times < count:
            phase = phases[outcome.times % len(phases)]
            launch = Launch(bench, folder)
            if not bench.moment(phase, launch):
                outcome.problems += launch.problem(launch.end(), {0})
                spent += launch.seconds()
                break  # this run has come to its end; the next one gets this kill
            launch.kill()
            spent += launch.seconds()
            outcome.times, of_this, aimed[phase] = outcome.times + 1, of_this + 1, aimed[phase] + 1
            outcome.repeated += repeated(folder)
        spent += bench.finish(outcome, folder)
        outcome.survived += of_this - bool(of_this and outcome.problems)
        outcome.seconds += spent - bench.undisturbed()
    said = ", ".join(f"{number} in the {phase}" for phase, number in aimed.items())
    return {"kill -9": outcome}, [f"kills: {said}"]


def signals(bench):
    """Each signal at the start, once in the steps, and twice."""
    outcomes = {}
    for number in SIGNALS:
        outcome, folder = Outcome(), bench.folder()
        # Before there is anything to save, a signal ends the process as it does any other.
        default = {-number, 130, 128 + number}
        for phase, times in (("start-up", 1), ("steps", 1), ("evaluation", 2)):
            launch = Launch(bench, folder)
            while not bench.moment(phase, launch) and not outcome.problems:
                # It came to its end before; the next run gets this signal.
                outcome.problems += launch.problem(launch.end(), {0})
                folder = bench.folder()
                launch = Launch(bench, folder)
            had_begun = "first step after" in launch.output()
            launch.process.send_signal(number)
            if times == 2:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launch.process.wait(1.1)
                if launch.process.poll() is None:
                    launch.process.send_signal(number)
            expected = {0} if had_begun else {0, *default}
            if times == 2:  # the second may come when all is saved and nobody listens any more
                expected = {0, 128 + number, -number}
            problem = launch.problem(launch.end(_STOPPING), expected)
            outcome.problems += problem
            outcome.times += 1
            outcome.survived += not problem
        bench.finish(outcome, folder)
        outcomes[signal.Signals(number).name] = outcome
    return outcomes, []


def refused(bench, outcome, launch, words):
    """A launch has to end in one line with these words and status 2."""
    problem = launch.problem(launch.end(_STOPPING), {2}, words)
    outcome.times += 1
    outcome.survived += not problem
    outcome.problems += problem


@contextlib.contextmanager
def small_disk(bench):
    """A tmpfs of its own; None where this is not root, or may not mount."""
    folder = bench.scratch / "disk"
    folder.mkdir(exist_ok=True)
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True
    ).returncode  # fmt: skip
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            bench.end()
            subprocess.run(["umount", "--lazy", folder], check=True)


def disks(bench):
    """A full and a read-only disk, a limit on files, a folder that vanishes."""
    outcomes, notes = {}, []
    full, read_only, limited, gone = (Outcome() for _ in range(4))
    with small_disk(bench) as disk:
        folder = bench.folder(disk)
        if disk:
            launch = Launch(bench, folder)
            bench.moment("steps", launch)
            ballast = disk / "ballast"
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            refused(bench, full, launch, "the disk is full")
            refused(bench, full, Launch(bench, folder), "the disk is full")
            ballast.unlink()
            bench.finish(full, folder)
            outcomes["full disk (tmpfs)"] = full
            folder = bench.folder(disk)
        stop_in_steps(bench, read_only, folder)
        if disk:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            refused(bench, read_only, Launch(bench, folder), "the file system is read-only")
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        elif os.geteuid():
            paths = [folder, *folder.rglob("*")]
            for path in paths:
                path.chmod(0o500 if path.is_dir() else 0o400)
            refused(bench, read_only, Launch(bench, folder), "permission denied")
            for path in paths:
                path.chmod(0o700 if path.is_dir() else 0o600)
        else:
            notes.append("no read-only disk and no full one: root may not mount here")
        if read_only.times:
            bench.finish(read_only, folder)
            outcomes[f"read-only {'disk' if disk else 'folder'}"] = read_only
    folder = bench.folder()
    largest = (bench.straight / "metrics.jsonl").stat().st_size // 2
    refused(bench, limited, Launch(bench, folder, largest_file=largest), "limit")
    bench.finish(limited, folder)
    outcomes["limit on files"] = limited
    folder = bench.folder()
    launch, away = Launch(bench, folder), bench.folder()
    bench.moment("steps", launch)
    folder.rename(away)
    refused(bench, gone, launch, str(folder))
    if folder.exists():
        # What was being written meanwhile goes on being so, but it is no run.
        if found := [name for name in os.listdir(folder) if name != "checkpoints"]:
            gone.problems.append(f"made the folder that vanished again, with {found}")
        if found := files.finished_steps(files.as_root(folder / "checkpoints")):
            gone.problems.append(f"saved {found} in a folder that had vanished")
        shutil.rmtree(folder)
    away.rename(folder)
    bench.finish(gone, folder)
    outcomes["vanished folder"] = gone
    return outcomes, notes


def stop_in_steps(bench, outcome, folder, **options):
    """A launch that is stopped by a SIGTERM somewhere in its steps."""
    launch = Launch(bench, folder, **options)
    bench.moment("steps", launch)
    launch.process.send_signal(signal.SIGTERM)
    outcome.problems += launch.problem(launch.end(_STOPPING), {0})


def two(bench):
    """A second launch in the folder of one that trains, and two at the same moment."""
    outcome, folder = Outcome(), bench.folder()
    first = Launch(bench, folder)
    first.stepping()
    refused(bench, outcome, Launch(bench, folder), f"is in use by process {first.process.pid} on")
    outcome.problems += first.problem(first.end(), {0})
    bench.compare(outcome, folder)
    folder = bench.folder()
    pair = [Launch(bench, folder) for _ in range(2)]
    pair.sort(key=lambda launch: launch.end())
    refused(bench, outcome, pair[1], "")
    outcome.problems += pair[0].problem(pair[0].end(), {0})
    bench.compare(outcome, folder)
    return {"two launches": outcome}, []


def clocks(bench):
    """Clocks that jump within a launch, and from one to the next. A jump in the middle of a save
    may end a launch, in one line; the next one goes on."""
    outcome, folder = Outcome(), bench.folder()
    for _ in range(3):
        launch = Launch(bench, folder, clock=bench.rng.getrandbits(32), jumps=0.02)
        bench.moment("save", launch)
        launch.process.send_signal(signal.SIGTERM)
        status, said = launch.end(_STOPPING), "the clock of this machine jumped"
        problem = launch.problem(status, {2}, said) if status else launch.problem(status, {0})
        outcome.times += 1
        outcome.survived += not problem
        outcome.problems += problem
    bench.finish(outcome, folder, clock=bench.rng.getrandbits(32))
    return {"clock jumps": outcome}, []


FAULTS = {"kills": kills, "signals": signals, "disks": disks, "two": two, "clocks": clocks}


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="kills with -9 in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--steps", type=int, default=120, help="of a run")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which, joined by commas")
    options = parser.parse_args(argv)
    chosen = options.faults.split(",")
    if unknown := [name for name in chosen if name not in FAULTS]:
        raise UsageError(
            f"--faults={options.faults}: {unknown[0]!r} is none of {', '.join(FAULTS)}"
        )
    for name, least in (("kills", 1), ("steps", 20)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}={getattr(options, name)}: must be at least {least}")
    began, outcomes, notes = time.monotonic(), {}, []
    code = code_hash()
    with tempfile.TemporaryDirectory(prefix="efx_crash_") as scratch:
        bench = Bench(pathlib.Path(scratch), options.seed, options.steps)
        try:
            for name in chosen:
                given = (options.kills,) if name == "kills" else ()
                of_fault, said = FAULTS[name](bench, *given)
                outcomes |= of_fault
                notes += said
        finally:
            bench.end()
    if code_hash() != code:
        raise UsageError(
            "the code of efx was edited meanwhile: launches of two versions are not compared; start"
            " again in a checkout that rests"
        )
    print(report(outcomes))
    minutes = (time.monotonic() - began) / 60
    notes.append(
        f"an undisturbed run: {options.steps} steps in {bench.undisturbed():.1f} s;"
        f" {len(bench.launches)} launches in {minutes:.1f} minutes, seed {options.seed}"
    )
    print("\n".join(notes))
    problems = [(name, line) for name, o in outcomes.items() for line in o.problems]
    for name, line in problems:
        print(f"{name}: a launch {line}")
    is_lost = any(outcome.lost for outcome in outcomes.values())
    print("something is LOST" if is_lost else "nothing is lost")
    return int(is_lost)


def report(outcomes):
    """The table: a row for each kind of fault."""
    header = (
        "fault", "times", "survived", "bits different", "rows doubled", "missing", "different",
        "samples different", "steps repeated each", "seconds lost each",
    )  # fmt: skip
    return table(
        header,
        *(
            (
                name, o.times, o.survived, o.bits, o.doubled, o.missing, o.different, o.samples,
                "" if o.seconds is None else f"{o.repeated / o.times:.1f}",
                "" if o.seconds is None else f"{o.seconds / o.times:.1f}",
            )
            for name, o in outcomes.items()
        ),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
