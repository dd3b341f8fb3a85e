"""Training steps compiled for accelerators that are not there: sizes, contexts, dense and MoD.

    python -m benchmarks.compiled                      what is missing, into runs/compiled: hours
    python -m benchmarks.compiled --only 340M,v5e      rows whose name has all of these words
    python -m benchmarks.compiled --list               names of all rows, and which are there
    python -m benchmarks.compiled --table-only         what is there: a table, and which targets
    python -m benchmarks.compiled --table-only --write results/speed_compiled.json

Each row is one `efx --mode=compile --json` in a process of its own, one after the other, and is
kept as runs/compiled/NAME.json, so that a benchmark that was cut goes on with the next row. Rows
for TPUs need the extra `tpu`, rows for GPUs `cuda12` or `cuda13`; an environment that lacks one
leaves its rows out, and another can add them. Nothing runs on a device: times are estimates.
"""

import argparse
import collections
import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

from benchmarks import common
from efx import io, run_dir
from efx.errors import UsageError
from efx.logging import tables
from efx.studies import results

# Width, depth, heads of 64 or 128 (a TPU's lanes).
SIZES = {
    "340M": (1024, 24, 16),
    "1.3B": (2048, 24, 16),
    "7B": (4096, 32, 32),
    "30B": (6656, 60, 52),
}
VOCAB = 32_000
MOD = {"depth_routing.kind": "mod", "depth_routing.causal": "threshold"}
# The estimate of a dense step of 340M on v5e when attention was plain XLA, seconds: 396M cycles.
BEFORE = 0.264
ABOUT = (
    "Nothing has run: XLA compiled the real training step for chips that are described, and the"
    " times are estimates that no step can beat, the TPU compiler's cycles or a roofline of each"
    " kernel on GPUs, with attention kernels counted by their FLOPs at half of the peak. bfloat16,"
    " a vocabulary of 32,000, scanned layers (`unrolled`: each compiled by itself), recomputation"
    " `dots` (7B and 30B: `full`). Every"
    " second block of MoD routes 12.5% of the tokens, by a threshold. Memory is what a chip needs"
    " of 15.75 (v5e) or 79.1 GiB (H100); exchanged is all communication at the links' full speed,"
    " between hosts that of the network of each GPU."
)
ABOUT_MISSING = " Some rows of the benchmark are not compiled yet."


class Row(NamedTuple):
    """batch: sequences in a step. mesh: (axis, size) of the axes that are set. remat: what the
    backward pass recomputes. scanned: whether one compiled layer is all of them."""

    size: str
    kind: str
    topology: str
    length: int
    batch: int
    mesh: tuple
    remat: str = "dots"
    scanned: bool = True

    @property
    def name(self):
        chips = self.topology.replace(":", "-")
        name = f"{self.size}-{self.kind}-{chips}-T{self.length}"
        name = name if self.remat == "dots" else f"{name}-{self.remat}"
        return name if self.scanned else f"{name}-unrolled"

    def command(self):
        """The arguments of `efx.main`."""
        width, depth, heads = SIZES[self.size]
        settings = {
            "model.width": width,
            "model.depth": depth,
            "model.attention.num_heads": heads,
            "model.attention.num_kv_heads": heads,
            "model.tied": True,
            "model.remat": self.remat,
            "model.scan_layers": self.scanned,
            "data.seq_len": self.length,
            "data.batch_size": self.batch,
            "evaluate.batch_size": self.batch,
            "sample.every": 0,  # whose programs would not be in any table
            "train.accumulation": 1,
            **{f"mesh.{axis}": size for axis, size in self.mesh},
        }
        if self.kind == "MoD":
            settings |= {f"model.{key}": value for key, value in MOD.items()}
        given = [f"--config.{key}={value}" for key, value in settings.items()]
        flags = ["--mode=compile", "--json", f"--topology={self.topology}", f"--vocab_size={VOCAB}"]
        return ["--config=configs/llama.py", *flags, *given]


def rows():
    """All rows, the quick ones first. No mesh of TPUs cuts widths into pieces of no whole tiles."""
    fsdp, squares = (("data", 1), ("fsdp", -1)), (("data", 16), ("fsdp", 16))
    # 6656 wide: 26 rows a piece for all 256 chips, 104 for 64.
    whole_tiles = {"30B": (("data", 2), ("fsdp", 64), ("tensor", 2))}
    listed = []
    for size in ("340M", "1.3B"):
        for length, tpu_batch, gpu_batch in ((2048, 512, 64), (8192, 256, 16), (32_768, 256, 8)):
            for kind in ("dense", "MoD"):
                listed.append(Row(size, kind, "v5e:16x16", length, tpu_batch, squares))
                if length == 32_768:  # one row a chip is too much with what "dots" keeps
                    listed.append(listed[-1]._replace(remat="full"))
                listed.append(Row(size, kind, "h100:1x1x8", length, gpu_batch, fsdp))
        scanned = [row for row in listed if (row.size, row.length) == (size, 2048)]
        listed += [row._replace(scanned=False) for row in scanned]
    for size in ("7B", "30B"):
        for kind in ("dense", "MoD"):
            mesh = whole_tiles.get(size, fsdp)
            listed.append(Row(size, kind, "v5e:16x16", 2048, 256, mesh, "full"))
            listed.append(Row(size, kind, "h100:1x32x8", 2048, 256, fsdp, "full"))
    return listed


@common.command
def main(argv=None):
    args = _arguments(argv)
    folder, every = pathlib.Path(args.workdir), rows()
    words = args.only.split(",") if args.only else []
    chosen = [row for row in every if all(word in row.name for word in words)]
    if not chosen:
        raise UsageError(f"--only={args.only}: no row has these words; --list shows all rows")
    if args.list:
        for row in chosen:
            print(row.name, "there" if _path(folder, row).exists() else "missing")
        return 0
    if not args.table_only:
        folder.mkdir(parents=True, exist_ok=True)
        for row in chosen:
            _compile(folder, row)
    found = {
        row: json.loads(path.read_text()) for row in every if (path := _path(folder, row)).exists()
    }
    if not found:
        raise UsageError(f"--workdir={folder}: no row has been compiled yet")
    listed = [(row.name, *_texts(cells(report))) for row, report in found.items()]
    print(common.table(("row", *COLUMNS), *listed))
    print("\n".join(_targets(found)))
    if args.write:
        _write(args.write, found)
    return 0


def _path(folder, row):
    return folder / f"{row.name}.json"


def _compile(folder, row):
    """Compiles a row that is not there, and keeps what is said of it."""
    plugin = "libtpu" if row.topology.startswith("v") else "jax_plugins"
    if _path(folder, row).exists():
        return
    if importlib.util.find_spec(plugin) is None:
        print(f"{row.name}: left out, its compiler is not installed here")
        return
    print(f"{row.name}: compiling", flush=True)
    command = [sys.executable, "-m", "efx.main", *row.command()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{row.name}: failed: {done.stderr.strip().splitlines()[-1]}")
        return
    report = json.loads(done.stdout.splitlines()[-1]) | {"revision": _revision()}
    io.write_atomic(_path(folder, row), json.dumps(report) + "\n")


def _revision():
    git = run_dir.git_revision()
    return git["revision"] + " with changes" * git["dirty"] if git else "unknown"


# ---- what it comes to ---------------------------------------------------------------------------


# Formats as in results/*.json.
COLUMNS = {
    "parameters": "quantity",
    "fits": "",
    "memory, GiB": ".2f",
    "temporaries, GiB": ".2f",
    "ms, about": ".0f",
    "of it kernels": ".0f",
    "exchanged, ms": ".0f",
    "MFU, about": ".2f",
    "exchanges, runs / MB a chip": "",
}


def cells(report):
    """One row of the table: {column: number or text}; a program that does not fit has few."""
    memory, estimate = report["memory"], report["estimate"]
    row = {
        "parameters": report["parameters"],
        "fits": "yes" if memory["fits"] else "no",
        "memory, GiB": memory["needed"] / 2**30,
    }
    if estimate:
        row |= {
            "temporaries, GiB": memory["temporaries"] / 2**30,
            "ms, about": 1e3 * estimate["step"],
            "of it kernels": 1e3 * estimate["kernels"],
            "exchanged, ms": 1e3 * estimate["communication"],
            "MFU, about": estimate["mfu"],
            "exchanges, runs / MB a chip": ", ".join(
                f"{kind} {runs}/{size / 1e6:.0f}"
                for kind, (runs, size) in report["collectives_by_kind"].items()
            ),
        }
    return row


def _texts(row):
    return [tables.text(row[title] if title in row else None, COLUMNS[title]) for title in COLUMNS]


def _write(path, found):
    """The rows as a file of results, from which the page is made; most have its revision, the
    others their own. Rows that it has from before, perhaps of another machine, stay in it."""
    path, before = pathlib.Path(path), {}
    if path.exists():
        kept = results.read_result(path)
        first = {"name": "", "revision": kept["revision"]}  # in this order, as in rows of now
        before = {row["name"]: first | row for row in kept["rows"]}
    now = {
        row.name: {"name": row.name, "revision": report["revision"], "cells": cells(report)}
        for row, report in found.items()
    }
    every = before | now
    listed = [every[row.name] for row in rows() if row.name in every]
    ((revision, _),) = collections.Counter(row["revision"] for row in listed).most_common(1)
    missing = ABOUT_MISSING * (len(listed) < len(rows()))

    def own(row):
        """Without the revision that most have."""
        return {k: v for k, v in row.items() if (k, v) != ("revision", revision)}

    result = results.checked(
        path,
        {
            "title": "Training steps compiled ahead of time",
            "section": "Speed",
            "about": ABOUT + missing,
            "commands": ["python -m benchmarks.compiled"],
            "machine": "none: described TPUs and GPUs",
            "revision": revision,
            "revision_of": "the commit that was compiled",
            "columns": COLUMNS,
            "rows": [own(row) for row in listed],
        },
    )
    results.write_result(path, result)


def _targets(found):
    """Lines that say which of the targets are reached."""
    by_name = {row.name: (row, report) for row, report in found.items()}
    said = []
    base = by_name.get("340M-dense-v5e-16x16-T2048")
    if base and base[1]["estimate"]:
        value = base[1]["estimate"]["step"] / BEFORE
        said.append(
            common.verdict("dense 340M on v5e, of the step in plain XLA", value, 0.45, False)
        )
    for row, report in found.items():
        if not report["estimate"]:
            continue
        longer = by_name.get(row._replace(length=32_768).name)
        if row.length == 2048 and longer:  # what does not fit has a size, too
            per_token = [
                r["memory"]["needed"] / (w.batch * w.length) for w, r in ((row, report), longer)
            ]
            title = f"{row.name}: memory a token at 32k, of that at 2k"
            said.append(common.verdict(title, per_token[1] / per_token[0], 1.1, False))
        said += _whole_parameters(row, report)
        dense = by_name.get(row._replace(kind="dense").name)
        if row.kind == "MoD" and dense and dense[1]["estimate"]:
            said += _against_dense(row, report, dense[1])
    return said


def _against_dense(row, report, dense):
    flops = report["ledger_flops"] / dense["ledger_flops"]
    time = _computing(report) / _computing(dense)
    title = f"{row.name}: MoD/dense, estimated time over FLOPs ({time:.3f} over {flops:.3f})"
    said = [common.verdict(title, time / flops, 1.05, False)]
    runs = [sum(count for count, _ in r["collectives_by_kind"].values()) for r in (report, dense)]
    routed = SIZES[row.size][1] // 2
    title = f"{row.name}: exchanges more than dense, a routed layer"
    said.append(common.verdict(title, (runs[0] - runs[1]) / routed, 1.0, False))
    return said


def _computing(report):
    """Estimated seconds of a step without communication."""
    return report["estimate"]["compute"] + report["estimate"]["kernels"]


def _whole_parameters(row, report):
    """Float32 parameters that are gathered in one piece."""
    width = SIZES[row.size][0]
    found = [
        c
        for c in report["collectives"]
        if c["kind"] == "all-gather"
        and "f32[" in c["shapes"]
        and c["bytes"] / c["runs"] > 4 * width**2
    ]
    listed = "; ".join(f"{c['shapes']} {c['where'][-50:]}".rstrip() for c in found[:2])
    title = f"{row.name}: parameters gathered whole in float32"
    return [common.verdict(title, len(found), 0, False) + f" {listed}".rstrip()]


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", default="runs/compiled", help="where rows are kept")
    parser.add_argument("--only", default="", help="words of names, joined by commas")
    parser.add_argument("--list", action="store_true", help="show the rows")
    parser.add_argument("--table-only", action="store_true", help="compile nothing")
    parser.add_argument("--write", default="", help="file of results to write, for docs/results.md")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
