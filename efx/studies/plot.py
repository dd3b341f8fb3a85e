"""Curves of several runs in one picture.

    python -m efx.studies.plot runs/mod runs/dense --x flops --y eval/loss --out curves.png

Runs of one study row, the directories NAME-seed<n>, are one curve: their mean, with a band of one
standard deviation. --y and --x are columns of metrics.jsonl: eval/loss, train/loss,
eval/bits_per_byte, mfu, ... over step, tokens, flops, flops_realised or seconds. Writes the picture
as PNG and PDF, and the values of each run as CSV. Prints the last value of each row, with the
settings in which the rows differ; diverged rows come last.
"""

import sys

import numpy as np
from scipy.optimize import isotonic_regression

from efx.errors import UsageError, nearest
from efx.logging import quantity, tables
from efx.studies import cli, metrics

DIRECT_LABELS = 6  # curves with a label at their end; more have a legend
STYLE = {"axes.grid": True, "grid.alpha": 0.35, "axes.spines.top": False, "pdf.fonttype": 42}
STYLE |= {"axes.spines.right": False, "axes.edgecolor": "0.4"}


def draw(curves, x, y):
    """Return a figure of the curves of `metrics.means_over_seeds`."""
    import matplotlib as mpl
    import seaborn as sns
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    style = sns.axes_style("ticks") | sns.plotting_context("notebook") | STYLE
    names = list(curves.row.unique())
    colours = metrics.palette(len(names))
    with mpl.rc_context(style):
        # High enough for a legend of all rows.
        figure = Figure(figsize=(8, max(4.8, 0.25 * len(names))), layout="constrained")
        axes = figure.subplots()
        for name, colour in zip(names, colours, strict=True):
            curve = curves[curves.row == name]
            marker = {"marker": "o", "markersize": 7} if len(curve) == 1 else {}
            axes.plot(curve[x], curve["mean"], color=colour, label=name, **marker)
            low, high = (curve["mean"] + sign * curve["std"] for sign in (-1, 1))
            if len(curve) == 1:
                axes.vlines(curve[x], low, high, color=colour)
            axes.fill_between(curve[x], low, high, color=colour, alpha=0.2, linewidth=0)
        if metrics.is_wide(curves[x]):
            axes.set_xscale("log")
        if metrics.is_wide(curves["mean"]):
            axes.set_yscale("log")
        if curves[x].max() >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.set_xlabel(metrics.title(x))
        axes.set_ylabel(metrics.title(y))
        if curves["std"].notna().any():
            note = "mean and standard deviation over seeds"
            axes.set_title(note, loc="left", size="small", color="0.4")
        if len(names) <= DIRECT_LABELS:
            label_ends(axes, curves, x, colours)
        else:
            figure.legend(loc="outside right upper", frameon=False)
    return figure


def label_ends(axes, curves, x, colours):
    """Write each row's name beside the axes, at the height of the end of its curve."""
    axes.autoscale_view()  # sets the limits that the heights depend on
    ends = curves.groupby("row", sort=False).last()
    points = axes.transData.transform(ends[[x, "mean"]].to_numpy())
    height_N = axes.transAxes.inverted().transform(points)[:, 1]
    label_N = spread(height_N, 0.065)
    for (name, end), height, colour in zip(ends.iterrows(), label_N, colours, strict=True):
        axes.annotate(
            name, (end[x], end["mean"]), (1.03, height), textcoords=axes.transAxes, color=colour,
            va="center", arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.5}
            | {"relpos": (0, 0.5), "shrinkA": 2},
        )  # fmt: skip


def spread(height_N, gap):
    """Return the nearest heights in the same order that are at least `gap` apart."""
    order = np.argsort(height_N, kind="stable")
    steps_N = gap * np.arange(len(order))
    result_N = np.empty(len(order))
    result_N[order] = isotonic_regression(height_N[order] - steps_N).x + steps_N
    return result_N


def last_values(table, runs, x, y):
    """Return a row for each study row: seeds, the last x and y, and the settings that differ."""
    last = table.groupby("run", sort=False)[[x, y]].last()
    last = last.join(runs.set_index("run"), how="right")
    last.loc[last.diverged, y] = np.inf
    groups = last.groupby("row", sort=False)
    result = groups[[x]].mean().map(quantity)
    result.insert(0, "seeds", groups.size())
    result[y] = [tables.mean_and_spread(y, group[y].dropna()) for _, group in groups]
    is_diverged = groups.diverged.all()
    result.loc[is_diverged, y] = "diverged"
    for key in last.settings.iloc[0]:
        result[key] = [group.settings.iloc[0][key] for _, group in groups]
    return result.loc[is_diverged.sort_values(kind="stable").index]


def plot(arguments):
    """Draw the curves."""
    out, x, y = cli.output_file(arguments.out, ".png", ".pdf"), arguments.x, arguments.y
    table, runs = metrics.read_runs(arguments.runs)
    columns = list(table.select_dtypes("number"))
    for name in (x, y):
        if name not in columns:
            raise UsageError(f"{name}: no run logs this column{nearest(name, columns)}")
    table = table.dropna(subset=[x, y])
    curves = metrics.means_over_seeds(table, y, x)
    if curves.empty:
        raise UsageError(f"--y={y}: no step has a finite value in all seeds; use another column")
    curves["row"] = curves.row.map(metrics.row_labels(runs))
    figure = draw(curves, x, y)
    for ending in (".png", ".pdf"):
        figure.savefig(out.with_suffix(ending), dpi=200)
    table[["run", x, y]].to_csv(out.with_suffix(".csv"), index=False)
    for line in metrics.warnings(runs, y):
        print(line)
    print(last_values(table, runs, x, y).to_string())
    print("written:", ", ".join(str(out.with_suffix(end)) for end in (".png", ".pdf", ".csv")))


def main(argv=None):
    parser = cli.Parser("efx.studies.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--x", default="tokens", help="column (default: tokens)")
    parser.add_argument("--y", default="eval/loss", help="column (default: eval/loss)")
    parser.add_argument("--out", default="curves.png", help="picture (default: curves.png)")
    return parser.run(plot, argv)


if __name__ == "__main__":
    sys.exit(main())
