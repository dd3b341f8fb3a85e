"""Curves of several runs in one picture.

    python -m efx.studies.plot runs/mod runs/dense --x flops --y eval/loss --out curves.png

--y and --x are columns of metrics.jsonl: eval/loss, train/loss, eval/bits_per_byte, mfu, ... over
step, tokens, flops, flops_realised or seconds. Prints the last value of each run, with the settings
in which they differ; runs whose last loss is not finite come last, as diverged.
"""

import sys

from efx.errors import UsageError, nearest
from efx.studies import cli, metrics


def plot(arguments):
    """Draw the curves."""
    import matplotlib.figure
    import seaborn as sns

    out = cli.output_file(arguments.out, ".png", ".pdf", ".svg")
    table, runs = metrics.read_runs(arguments.runs)
    columns = list(table.select_dtypes("number"))
    for name in (arguments.x, arguments.y):
        if name not in columns:
            raise UsageError(f"{name}: no run logs this column{nearest(name, columns)}")
    table = table.dropna(subset=[arguments.x, arguments.y])
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    columns = {"x": arguments.x, "y": arguments.y, "hue": "run", "units": "run"}
    sns.lineplot(table, **columns, estimator=None, ax=axes)
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=150)
    table[["run", arguments.x, arguments.y]].to_csv(out.with_suffix(".csv"), index=False)
    for line in metrics.warnings(runs, arguments.y):
        print(line)
    last = table.groupby("run", sort=False)[[arguments.x, arguments.y]].last()
    last = last.join(runs.set_index("run")[["settings", "diverged"]])
    last = last.sort_values("diverged", kind="stable")
    shown = last[arguments.y].map("{:.6g}".format)
    last[arguments.y] = shown.where(~last.diverged, "diverged")
    print(last.drop(columns="diverged").to_string())
    print(f"written: {out}, {out.with_suffix('.csv')}")


def main(argv=None):
    parser = cli.Parser("efx.studies.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--x", default="tokens", help="column (default: tokens)")
    parser.add_argument("--y", default="eval/loss", help="column (default: eval/loss)")
    parser.add_argument("--out", default="curves.png", help="picture (default: curves.png)")
    return parser.run(plot, argv)


if __name__ == "__main__":
    sys.exit(main())
