"""Everything that is claimed of accelerators, on the one at hand: is it right, and how fast is it.

    python -m benchmarks.accelerator                      all parts, as far as 9 minutes go
    python -m benchmarks.accelerator --parts matmul,dense     some of them
    python -m benchmarks.accelerator --smoke              tiny sizes on a CPU: no measurement

Called again it goes on where it ended: what the record, accelerator-<device>.json in --results, has
is not measured again, unless with `--again`; what failed or was skipped is tried again, last of its
part. A kernel that is not installed, or cannot do what is asked of it, is `refused` with its
reason: that is an answer, which only `--again` asks for anew. A part is a process of its own, and
goes on in a fresh one after an error of the device. No call lasts longer than its `--minutes`: the
next measurement is begun only if there is time for one like the longest before it, and the last 100
seconds are for ending what still runs then.
`python -m efx.studies.results` puts the numbers into docs/results.md.

Needed on the machine: efx with the extra of the device (`cuda13`, `cuda12` or `tpu`); `interop`,
with a torch that has CUDA, for what decoding is compared with; `dev` for the part `tests`; and the
text of tinyshakespeare (--text) for `characters`. Where its disk is lost afterwards, `--results`
names a folder that lasts, which may have the record of earlier calls; a `--workdir` that lasts
keeps the trained runs and the compiled programs too.

The parts:
    matmul      products of square matrices: what part of the data sheet's peak is there at all
    dense       training steps at 124M and 350M with each kernel: MFU, tokens/s, memory
    kernels     attention kernels against plain XLA: values and gradients, every kind of mask
    tests       tests of the suite on the device: decoding is the full pass, nothing looks ahead,
                a run that goes on is bit for bit one that never stopped
    mod         Mixture-of-Depths over its dense twin at 350M and 1.3B, beside the ratio of FLOPs
    moe         Mixtures of Experts over their dense twin
    latent      the grouped-latent transformer over a decoder at contexts 8192 and 32768
    masks       learned masks over none
    decode      greedy decoding at batch 1, 16 and 128, dense and MoD, over transformers' generate
                (with its default and its static cache) where the extra `interop` is installed
    compiling   seconds until training steps of 6 layers are compiled, and milliseconds of a step,
                with flags that spare XLA what it tries on the device
    characters  nanoGPT's recipe for a GPU on tinyshakespeare (--text), dense, three seeds, and MoD:
                the loss, and seconds of training until it; the dense curves go to
                reference_curves.json in --results, or are compared with those that are there
    isoflop     dense and MoD at one budget, each at its best size

A batch that does not fit into memory is halved until it does. MFU and ratios count nominal FLOPs,
against the peak of `efx.layers.flops.device_peak`. Exit status: 0 all is measured, 1 something
failed, 2 bad input, 3 the time was up: call again, 4 all is measured but what was
skipped for something that is missing.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from benchmarks import children, common
from benchmarks.accelerator_parts import (
    COLUMNS,
    OF_PROGRAMS,
    PARTS,
    Setup,
    Skipped,
    Unfinished,
    failure,
    of_the_device,
)
from efx.errors import UsageError, nearest
from efx.logging import tables
from efx.run_dir import git_revision
from efx.studies import reference, results

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAILED, TIME_IS_UP, SKIPPED = 1, 3, 4
GO_ON = 5  # of the process of a part: the rest in a fresh one
# Seconds from when nothing more is begun until a part that has not ended, of whose runs each has a
# minute to save, is asked to; until it is killed; and those in which a call starts and ends itself.
OVERRUN, GRACE, OWN = 75, 15, 10
RESERVE = OVERRUN + GRACE + OWN


@common.command
def main(argv=None):
    begin = time.monotonic()
    args = _arguments(argv)
    deadline = begin + 60 * args.minutes - RESERVE
    if args.tried is None:
        return _in_processes(args, deadline)
    part = args.parts[0]
    platform, kind, count = _device(part)
    if platform == "cpu" and not args.smoke:
        raise UsageError(
            "JAX finds no accelerator here, and only on one these times say anything; --smoke "
            "tries all of it on a CPU"
        )
    name = "smoke" if args.smoke else re.sub(r"[^a-z0-9]+", "-", kind.lower())
    folder = args.workdir / name
    path = (folder if args.smoke else args.results) / f"accelerator-{name}.json"
    machine = f"{count} x {kind}"
    record = Record(path, machine, args.smoke)
    curves = ROOT / reference.CURVES if args.smoke else args.results / "reference_curves.json"
    setup = Setup(
        args.smoke, folder.absolute(), args.text.absolute(), deadline, curves.absolute(), platform
    )
    if args.again:
        for forgotten in args.parts:
            record.forget(forgotten)
            setup.forget_runs(forgotten)
    smoke = "; SMOKE RUN, NO MEASUREMENT" if args.smoke else ""
    print(f"== {part}, {machine}{smoke}", flush=True)
    status = _measure(part, setup, record, Tried(args.tried))
    print(f"-- {path}", flush=True)
    return status


_ASK = """
import jax, json
devices = jax.devices()
print(json.dumps([devices[0].platform, devices[0].device_kind, len(devices)]))
"""


def _device(part):
    """(platform, kind, number) of the devices. Where a part's own programs need them, a program
    that ends says it: a TPU belongs to the process that has asked for it."""
    if part not in OF_PROGRAMS:
        import jax

        devices = jax.devices()
        return devices[0].platform, devices[0].device_kind, len(devices)
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(f"JAX finds no device: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(part, setup, record, tried):
    """Does what the record of a part lacks, what failed before last, and returns the exit
    status."""
    longest, failed, skipped = 0.0, False, []
    measurements = sorted(PARTS[part](setup), key=lambda entry: record.failed(entry[0]))
    for title, measure in measurements:
        if title in tried and not record.has(title):
            record.add(part, title, {"": {"says": "FAILED: the process ended within it"}})
        if title in record or title in tried:
            record.show(title)
            failed |= record.failed(title)
            skipped += [title] * record.skipped(title)
            continue
        begin = time.monotonic()
        if begin + longest >= setup.deadline:
            print(f"time is up before {title!r}; the same command goes on from here", flush=True)
            return TIME_IS_UP
        tried.add(title)
        try:
            rows = measure()
        except Unfinished:
            print(f"time is up within {title!r}; the same command goes on from here", flush=True)
            return TIME_IS_UP
        except Skipped as reason:
            rows = {"": {"says": f"skipped: {reason}"}}
        except Exception as error:
            rows = {"": failure(error)}
        longest = max(longest, time.monotonic() - begin)
        record.add(part, title, rows)
        record.show(title)
        failed |= record.failed(title)
        skipped += [title] * record.skipped(title)
        if any(map(of_the_device, rows.values())):
            print("what follows is measured in a fresh process", flush=True)
            return GO_ON
    if skipped:
        print(f"NOT MEASURED: {'; '.join(skipped)}", flush=True)
    return FAILED if failed else SKIPPED if skipped else 0


class Tried:
    """Titles of what has been begun in this call, in a file: a process that goes on for another
    tells by it what the other died of."""

    def __init__(self, path):
        self.path = path
        self.titles = path.read_text().splitlines() if path.is_file() else []

    def __contains__(self, title):
        return title in self.titles

    def add(self, title):
        self.titles.append(title)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{title}\n" for title in self.titles))


def _in_processes(args, deadline):
    """One process a part, so that none has another's memory or dies of its errors."""
    statuses = []
    for i in range(len(args.parts)):
        if time.monotonic() >= deadline:
            statuses.append(TIME_IS_UP)
            break
        statuses.append(_part(args.parts[i:], args, deadline))
        if statuses[-1] == 2:
            return 2
    return next((one for one in (TIME_IS_UP, FAILED, SKIPPED) if one in statuses), 0)


def _part(parts, args, deadline):
    """Exit status of the first of these parts, in as many processes as it takes. With `--again` the
    first process forgets what all of them had: the others may get no time in this call."""
    part = parts[0]
    path = args.workdir / "tried.txt"
    path.unlink(missing_ok=True)
    compiled = str(args.workdir.absolute() / "compiled")
    environment = {
        # PyTorch, and runs in processes of their own, need the memory that JAX would take ahead.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "CUDA_VISIBLE_DEVICES": "0",  # of several GPUs one is measured
        # What has been compiled is there in the next process and the next call.
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "EFX_COMPILE_CACHE": compiled,
    } | os.environ
    again = args.again
    while True:
        tried = Tried(path).titles
        minutes = (deadline + RESERVE - time.monotonic()) / 60
        command = [sys.executable, "-m", "benchmarks.accelerator"]
        command += ["--parts", ",".join(parts) if again else part]
        command += ["--minutes", f"{minutes:.3f}", "--tried", path, "--workdir", args.workdir]
        command += ["--text", args.text, "--results", args.results]
        command += ["--smoke"] * args.smoke + ["--again"] * again
        try:
            status = children.run(command, deadline + OVERRUN, GRACE, env=environment)
        except children.Late:
            title = (Tried(path).titles or ["its start"])[-1]
            print(f"{part} was ended within {title!r}: give it more --minutes", flush=True)
            return TIME_IS_UP
        if status in (0, FAILED, 2, TIME_IS_UP, SKIPPED):
            return status
        again = False
        if Tried(path).titles == tried:
            print(f"{part} ended with status {status} before it measured anything", flush=True)
            return FAILED


class Record:
    """The file of one device's measurements, one of results/: written after each."""

    def __init__(self, path, machine, smoke):
        self.path = path
        if path.is_file():
            self.result = results.read_result(path)
        else:
            title = f"On {machine}"
            about = (
                "Training steps in bfloat16, medians; [the program](../benchmarks/accelerator.py)"
            )
            about += " says what each part measures. A batch is the largest that fits, up to ours."
            if smoke:
                title = "A smoke run of benchmarks.accelerator: its numbers mean nothing"
            fields = {
                "title": title,
                "section": "Speed",
                "about": about,
                "commands": ["python -m benchmarks.accelerator"],
                "machine": machine,
                "revision": "",
                "columns": {},
                "rows": [],
            }
            self.result = results.checked(path, fields)

    def __contains__(self, title):
        """Whether this has been measured; what was skipped or failed has not."""
        return self.has(title) and not self.skipped(title) and not self.failed(title)

    def has(self, title):
        return bool(self._rows(title))

    def _rows(self, title):
        return [row for row in self.result["rows"] if row["measurement"] == title]

    def failed(self, title):
        return self._says(title, "FAILED")

    def skipped(self, title):
        return self._says(title, "skipped")

    def _says(self, title, word):
        return any(row["cells"]["says"].startswith(word) for row in self._rows(title))

    def show(self, title):
        for row in self._rows(title):
            cells = [
                f"{column} {tables.text(row['cells'][column], form)}"
                for column, form in COLUMNS.items()
                if column in row["cells"] and column != "says"
            ]
            print("; ".join([row["name"], *cells, row["cells"]["says"]]), flush=True)

    def forget(self, part):
        kept = [row for row in self.result["rows"] if row["part"] != part]
        if kept != self.result["rows"]:
            self._write(kept)

    def add(self, part, title, rows):
        """rows: {what comes after the title in a row's name: {column: value}}."""
        git = git_revision() or {"revision": "unknown", "dirty": False}
        revision = git["revision"] + " with changes" * git["dirty"]
        kept = [row for row in self.result["rows"] if row["measurement"] != title]
        for row in kept:
            row.setdefault("revision", self.result["revision"])
            if row["revision"] == revision:
                del row["revision"]
        self.result["revision"] = revision
        new = [
            {
                "name": title + suffix,
                "part": part,
                "measurement": title,
                "cells": {"says": "", **cells},
            }
            for suffix, cells in rows.items()
        ]
        order = list(PARTS)
        self._write(sorted([*kept, *new], key=lambda row: order.index(row["part"])))

    def _write(self, rows):
        used = {column for row in rows for column in row["cells"]} | {"says"}
        columns = {column: form for column, form in COLUMNS.items() if column in used}
        self.result |= {"rows": rows, "columns": columns}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        results.write_result(self.path, results.checked(self.path, self.result))


class _Parts(argparse.Action):
    """The names of parts, checked."""

    def __call__(self, parser, namespace, values, option_string=None):
        names = values.split(",")
        for name in names:
            if name not in PARTS:
                raise UsageError(
                    f"--parts={values}: {name!r} is no part; they are {', '.join(PARTS)}"
                    + nearest(name, PARTS)
                )
        setattr(namespace, self.dest, list(dict.fromkeys(names)))


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", action=_Parts, default=list(PARTS), help="names, with commas")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="that this call may last (default: 9)"
    )
    parser.add_argument("--again", action="store_true", help="measure what has been measured too")
    parser.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs/accelerator"),
        help="for runs that are trained, and for what --smoke writes",
    )
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=ROOT / "results",
        help="of the record and the reference curves (default: results/ of the project)",
    )
    # Of the processes of parts: the file of what this call has begun. Such a process measures the
    # first of its --parts.
    parser.add_argument("--tried", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--text",
        type=pathlib.Path,
        default=ROOT.parent / "shared/data/tinyshakespeare/input.txt",
        help="of tinyshakespeare (default: in shared/data, beside the project)",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    args = parser.parse_args(argv)
    if args.tried is None and not 60 * args.minutes > RESERVE:
        raise UsageError(
            f"--minutes={args.minutes}: must be more than {RESERVE / 60:.2f}, the {RESERVE} seconds"
            " in which a call ends what still runs"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
