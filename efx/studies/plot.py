"""Curves of several runs in one picture.

    python -m efx.studies.plot runs/mod runs/dense --x flops --y eval/loss --out curves.png

--y and --x name columns of metrics.jsonl: eval/loss, train/loss, eval/bits_per_byte, mfu, ... over
step, tokens, flops, flops_realised or seconds. A run is called by its folder and by the settings in
which the runs differ. Prints the last point of each; the same points, in a CSV file beside the
picture. --smooth N draws means of N points.
"""

import csv
import itertools
import pathlib
import sys

import numpy as np

from efx import runfolder, tables
from efx.errors import UsageError, nearest
from efx.metrics import read_metrics
from efx.studies import cli

# Where a run writes and on what it is computed: what a reader of curves does not ask for.
_UNASKED = ("log.", "checkpoint.", "sample.", "evaluate.", "mesh.", "rules.", "losses.distill")


def curve(workdir, x, y):
    """[2, N]: the points of a run at which both columns have a finite number."""
    rows = read_metrics(workdir)
    points = [(row[x], row[y]) for row in rows if None not in (row.get(x), row.get(y))]
    for name in (x, y):
        names = sorted({key for row in rows for key in row})
        if name not in names:
            raise UsageError(f"{workdir} has no column {name!r}{nearest(name, names)}")
    if not points:
        raise UsageError(f"{workdir} has no row with both {x} and {y}; try --x=step")
    return np.array(points, float).T


def labels(workdirs):
    """A name for each run: its folder's, and the settings that are not the same in all of them."""
    try:
        configs = [runfolder.recorded_config(workdir) for workdir in workdirs]
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--workdir=")) from error
    return names(workdirs, differing(configs))


def differing(configs):
    """[{dotted key: value}] of the settings of each run that are not the same in all of them."""
    runs = [runfolder.dotted(config) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(key for settings in runs for key in settings)
        if not key.startswith(_UNASKED)
        and any(settings.get(key) != runs[0].get(key) for settings in runs)
    ]
    return [{key: settings[key] for key in keys if key in settings} for settings in runs]


def names(workdirs, settings):
    """A name for each run, no two the same: its folder's, and its settings as `differing` says."""
    said = []
    for name, of in zip(_folders(workdirs), settings, strict=True):
        changed = [f"{key.removeprefix('model.')}={value}" for key, value in of.items()]
        name += f" ({', '.join(changed)})" if changed else ""
        said.append(runfolder.shortened(name, 80))
    if len(set(said)) < len(said):
        said = [f"{name} [{workdir}]" for name, workdir in zip(said, workdirs, strict=True)]
    return said


def _folders(workdirs):
    """The names of the folders, with as many of those above them as tell them apart."""
    parts = [pathlib.PurePath(workdir).parts for workdir in workdirs]
    most = max(map(len, parts))
    for count in range(1, most):
        tails = [str(pathlib.PurePath(*path[-count:])) for path in parts]
        if len(set(tails)) == len(set(parts)):
            return tails
    return [str(workdir) for workdir in workdirs]


def smoothed(points, count):
    """Means of each `count` successive points, of the y's and of the x's."""
    count = min(count, points.shape[1])
    return np.stack([np.convolve(row, np.ones(count) / count, "valid") for row in points])


def draw(curves, x, y, path, log_x=False):
    """A picture of {name: [2, N]}."""
    import matplotlib.figure  # takes half a second

    figure = matplotlib.figure.Figure((8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*points, label=name, marker="." if points.shape[1] < 40 else None)
    axes.set(xlabel=x, ylabel=y, xscale="log" if log_x else "linear")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def plot(arguments):
    """What the command does."""
    if arguments.smooth < 1:
        raise UsageError(f"--smooth={arguments.smooth}: must be at least 1")
    out = cli.picture(arguments.out)
    curves = {
        name: curve(run, arguments.x, arguments.y)
        for name, run in zip(labels(arguments.runs), arguments.runs, strict=True)
    }
    drawn = {name: smoothed(points, arguments.smooth) for name, points in curves.items()}
    with runfolder.writing(out):
        draw(drawn, arguments.x, arguments.y, out, arguments.log_x)
        with open(out.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["run", arguments.x, arguments.y])
            for name, points in curves.items():
                writer.writerows(zip(itertools.repeat(name), *points.tolist(), strict=False))
    last = [(name, *(f"{value:.6g}" for value in points[:, -1])) for name, points in curves.items()]
    print(tables.markdown(["run", arguments.x, arguments.y], last))
    print(f"written: {out}, {out.with_suffix('.csv')}")


def main(argv=None):
    parser = cli.Parser("efx.studies.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument("--x", default="tokens", help="column of metrics.jsonl (default: tokens)")
    parser.add_argument("--y", default="eval/loss", help="column (default: eval/loss)")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="means of N points")
    parser.add_argument("--log-x", action="store_true", help="a logarithmic x axis")
    parser.add_argument("--out", default="curves.png", help="picture (default: curves.png)")
    return parser.run(plot, argv)


if __name__ == "__main__":
    sys.exit(main())
