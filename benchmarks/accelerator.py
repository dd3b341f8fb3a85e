"""Everything that is claimed of accelerators, on the one at hand: is it right, and how fast is it.

    python -m benchmarks.accelerator                      all parts, as far as 9 minutes go
    python -m benchmarks.accelerator --parts matmul,dense     some of them
    python -m benchmarks.accelerator --smoke              tiny sizes on a CPU: no measurement

Called again it goes on where it ended: what results/accelerator-<device>.json has is not measured
again, unless with `--again`. A part is a process of its own; `--minutes` are those of the whole
call, and the next measurement is begun only if there is time for one like the longest before it.
`python -m efx.studies.results` puts the numbers into docs/results.md.

The parts:
    kernels     attention kernels against plain XLA: values and gradients, every kind of mask
    tests       tests of the suite on the device: decoding is the full pass, nothing looks ahead,
                a run that goes on is bit for bit one that never stopped
    matmul      products of square matrices: what part of the data sheet's peak is there at all
    dense       training steps at 124M and 350M with each kernel: MFU, tokens/s, memory
    mod         Mixture-of-Depths over its dense twin at 350M and 1.3B, beside the ratio of FLOPs
    moe         Mixtures of Experts over their dense twin
    latent      the grouped-latent transformer over a decoder at contexts 8192 and 32768
    masks       learned masks over none
    decode      greedy decoding at batch 1, 16 and 128, dense and MoD, over transformers' generate
                (with its default and its static cache) where the extra `interop` is installed
    characters  nanoGPT's recipe for a GPU on tinyshakespeare (--text), dense, three seeds, and MoD:
                the loss, and seconds of training until it; the dense curves go to
                results/reference_curves.json, or are compared with those that are there
    isoflop     dense and MoD at one budget, each at its best size

A batch that does not fit into memory is halved until it does. MFU and ratios count nominal FLOPs,
against the peak of `efx.flops.device_peak`. Exit status: 0 all is measured, 1 something failed, 2
bad input, 3 the time was up: call again.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time

from benchmarks import common
from benchmarks.accelerator_parts import COLUMNS, PARTS, Setup, Skipped, Unfinished, failure
from efx import tables
from efx.errors import UsageError, nearest
from efx.runfolder import git_revision
from efx.studies import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAILED, TIME_IS_UP = 1, 3


@common.command
def main(argv=None):
    begin = time.monotonic()
    args = _arguments(argv)
    # PyTorch, and runs in processes of their own, need the memory that JAX would take ahead.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several GPUs one is measured
    deadline = begin + 60 * args.minutes
    if len(args.parts) > 1:
        return _parts_in_processes(args, deadline)
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu" and not args.smoke:
        raise UsageError(
            "JAX finds no accelerator here, and only on one these times say anything; --smoke "
            "tries all of it on a CPU"
        )
    name = "smoke" if args.smoke else re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower())
    folder = args.workdir / name
    path = (folder if args.smoke else ROOT / "results") / f"accelerator-{name}.json"
    machine = f"{jax.device_count()} x {device.device_kind}"
    record = Record(path, machine, args.smoke)
    setup = Setup(args.smoke, folder.absolute(), args.text.absolute(), deadline)
    (part,) = args.parts
    if args.again:
        record.forget(part)
        setup.forget_runs(part)
    smoke = "; SMOKE RUN, NO MEASUREMENT" if args.smoke else ""
    print(f"== {part}, {machine}{smoke}", flush=True)
    status = _measure(part, setup, record)
    print(f"-- {path}", flush=True)
    return status


def _measure(part, setup, record):
    """Does what the record of a part lacks, and returns the exit status."""
    longest, failed = 0.0, False
    for title, measure in PARTS[part](setup):
        if title in record:
            record.show(title)
            failed |= record.failed(title)
            continue
        begin = time.monotonic()
        if begin + longest >= setup.deadline:
            print(f"time is up before {title!r}; the same command goes on from here", flush=True)
            return TIME_IS_UP
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
    return FAILED if failed else 0


def _parts_in_processes(args, deadline):
    """One process a part, so that none has another's memory or dies of its errors."""
    statuses = []
    for part in args.parts:
        minutes = max(0.0, deadline - time.monotonic()) / 60
        if minutes == 0 and not args.again:  # which has to forget what all parts had
            statuses.append(TIME_IS_UP)
            break
        command = [sys.executable, "-m", "benchmarks.accelerator", "--parts", part]
        command += ["--minutes", f"{minutes:.3f}", "--workdir", args.workdir, "--text", args.text]
        command += ["--smoke"] * args.smoke + ["--again"] * args.again
        status = subprocess.run(command, check=False).returncode
        if status == 2:
            return 2
        statuses.append(status if status in (0, TIME_IS_UP) else FAILED)
    return next((status for status in (TIME_IS_UP, FAILED) if status in statuses), 0)


class Record:
    """The file of one device's measurements, one of results/: written after each."""

    def __init__(self, path, machine, smoke):
        self.path = path
        if path.is_file():
            self.result = results.read_result(path)
        else:
            title = f"On {machine}"
            about = "Training steps in bfloat16, medians; `python -m benchmarks.accelerator --help`"
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
        """Whether this has been measured; what was skipped has not."""
        rows = self._rows(title)
        return bool(rows) and not rows[0]["cells"]["says"].startswith("skipped")

    def _rows(self, title):
        return [row for row in self.result["rows"] if row["measurement"] == title]

    def failed(self, title):
        return any(row["cells"]["says"].startswith("FAILED") for row in self._rows(title))

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
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default: 9)")
    parser.add_argument("--again", action="store_true", help="measure what has been measured too")
    parser.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs/accelerator"),
        help="for runs that are trained, and for what --smoke writes",
    )
    parser.add_argument(
        "--text",
        type=pathlib.Path,
        default=ROOT.parent / "shared/data/tinyshakespeare/input.txt",
        help="of tinyshakespeare (default: in shared/data, beside the project)",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    args = parser.parse_args(argv)
    if not args.minutes >= 0:
        raise UsageError(f"--minutes={args.minutes}: must be 0 or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
