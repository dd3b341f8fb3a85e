"""Curves of several runs in one picture.

    python -m efx.studies.plot runs/mod runs/dense --x flops --y eval/loss --out curves.png

--y and --x name columns of metrics.jsonl: eval/loss, train/loss, eval/bits_per_byte, mfu, ... over
step, tokens, flops, flops_realised or seconds; evaluations between two logged rows lie between
them. A run is called by its folder and by the settings in which the runs differ. Prints the last
point of each; the same points, in a CSV file beside the picture. --smooth N draws means of N
points.

Losses and accuracies count by tokens, and are refused for runs of different tokenizers or held-out
text; eval/bits_per_byte over flops can be drawn, and what differs is printed.
"""

import csv
import itertools
import pathlib
import sys

import numpy as np

from efx import io, run_dir
from efx.errors import UsageError, nearest
from efx.logging import tables
from efx.studies import cli, logged


def curve(run, x, y):
    """([2, N], count): the points of a run at which both columns have a finite number, and how many
    values of y are left out because they come after the last row with x."""
    known = sorted({name for row in run.rows for name in row})
    for name in (x, y):
        if name not in known:
            raise UsageError(f"{run.path} has no column {name!r}{nearest(name, known)}")
    places, values = logged.axis_values(run, x), [row.get(y) for row in run.rows]
    points = [pair for pair in zip(places, values, strict=True) if None not in pair]
    if not points:
        raise UsageError(f"{run.path} has no row with both {x} and {y}; try --x=step")
    left_out = sum(value is not None for value in values) - len(points)
    return np.array(points, float).T, left_out if x in logged.COUNTED else 0


def unlike(runs, x, y):
    """Lines on what a reader must know to compare the curves of runs; UsageError if they are of a
    column that cannot be compared."""
    differences = logged.differences(runs)
    for column in (y, x):
        # The held-out text says nothing of how a run did in training.
        of_column = [
            words
            for what, words in differences.items()
            if what == logged.TOKENIZERS or column.startswith("eval/")
        ]
        if column.startswith(logged.BY_TOKEN) and of_column:
            raise UsageError(
                f"{of_column[0]}: their {column} cannot be compared; use fewer runs, or "
                "--y=eval/bits_per_byte --x=flops"
            )
    said = []
    if "tokens" in (x, y) and logged.TOKENIZERS in differences:
        words = "their tokens are different amounts of text; use --x=flops"
        said.append(f"{differences[logged.TOKENIZERS]}: {words}")
    if "eval/bits_per_byte" in (x, y) and logged.HELD_OUT in differences:
        said.append(f"{differences[logged.HELD_OUT]}. {logged.BYTES_OF_TEXTS}")
    by_token = [column for column in (x, y) if column.startswith(logged.BY_TOKEN)]
    if any(column.startswith("train/") for column in by_token) and not logged.trained_alike(runs):
        said.append(logged.TRAINED_UNLIKE)
    return said


def names(workdirs, settings):
    """A name for each run, no two the same: its folder's, and its settings as `differing` says."""
    said = []
    for name, of in zip(_folders(workdirs), settings, strict=True):
        changed = [f"{key.removeprefix('model.')}={value}" for key, value in of.items()]
        name += f" ({', '.join(changed)})" if changed else ""
        said.append(run_dir.shortened(name, 80))
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
    lines = [
        axes.plot(*points, marker="." if points.shape[1] < 40 else None)[0]
        for points in curves.values()
    ]
    axes.set(xlabel=x, ylabel=y, xscale="log" if log_x else "linear")
    axes.grid(alpha=0.3)
    # Names are set afterwards: a legend leaves out what begins with "_", and "$" begins a formula.
    legend = axes.legend(lines, [*map(str, range(len(lines)))], fontsize="small")
    for text, name in zip(legend.get_texts(), curves, strict=True):
        text.set_parse_math(False)
        text.set_text(name)
    figure.savefig(path, dpi=150)


def save(figure, path, dpi, bare=("top", "right")):
    """Writes a picture without these sides of its frames, and without the library's version in it,
    so that the same numbers give the same file."""
    for axis in figure.axes:
        axis.spines[[*bare]].set_visible(False)
    figure.savefig(path, dpi=dpi, metadata={"Software": None})


def plot(arguments):
    """What the command does."""
    if arguments.smooth < 1:
        raise UsageError(f"--smooth={arguments.smooth}: must be at least 1")
    out = cli.picture(arguments.out)
    runs = [logged.read_run(run) for run in arguments.runs]
    said = unlike(runs, arguments.x, arguments.y)
    called = names(arguments.runs, logged.differing([run.config for run in runs]))
    curves = {}
    for name, run in zip(called, runs, strict=True):
        curves[name], count = curve(run, arguments.x, arguments.y)
        if count:
            what = f"{count} of {arguments.y} after its last {arguments.x}"
            said.append(f"left out of {name}: {what}")
    drawn = {name: smoothed(points, arguments.smooth) for name, points in curves.items()}
    with io.report_write_errors(out):
        draw(drawn, arguments.x, arguments.y, out, arguments.log_x)
        with open(out.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["run", arguments.x, arguments.y])
            for name, points in curves.items():
                writer.writerows(zip(itertools.repeat(name), *points.tolist(), strict=False))
    for words in said:
        print(words)
    last = [(name, *(f"{value:.6g}" for value in points[:, -1])) for name, points in curves.items()]
    print(tables.markdown(["run", arguments.x, arguments.y], last))
    print(f"written: {out}, {out.with_suffix('.csv')}")


def main(argv=None):
    parser = cli.Parser("efx.studies.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument("--x", default="tokens", help="column of metrics.jsonl (default: tokens)")
    parser.add_argument("--y", default="eval/loss", help="column (default: eval/loss)")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="means of N points")
    parser.add_argument("--log-x", action="store_true", help="a logarithmic x axis")
    parser.add_argument("--out", default="curves.png", help="picture (default: curves.png)")
    return parser.run(plot, argv)


if __name__ == "__main__":
    sys.exit(main())
