"""One page about several runs: curves, a sortable table, samples.

    python -m efx.studies.report runs/mod runs/dense --out report.html

The page needs a browser and no network: curves of held-out and training loss by step, tokens, FLOPs
or seconds; a table of runs with the settings in which they differ; the last samples. TensorBoard
and Weights & Biases are the dashboards; this is a page to keep or to send.
"""

import html
import math
import pathlib
import re
import sys

import numpy as np
import pandas as pd
import plotly
import plotly.express as px

from efx import io
from efx.studies import cli, metrics

AXES = ("step", "tokens", "flops", "seconds")
CURVES = {"eval/loss": "held-out loss (nats)", "eval/bits_per_byte": "held-out bits per byte",
          "train/loss": "training loss (nats)",
          "eval/router/worth": "worth of all routed blocks (nats)",
          "eval/router/gate_min": "least mean gate of a routed block",
          "eval/router/increment": "norm of routed increments over the stream's",
          "eval/moe/min_load": "load of the least chosen expert over the mean",
          "eval/dropout/kept": "fraction that learned masks keep",
          "eval/adapter/gate": "mean gate of adapters",
          "eval/latent/increment": "norm of latents over the skip connection's",
          "eval/cross/increment": "norm of cross-attention over the stream's"}  # fmt: skip
COLUMNS = {"step": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "seconds",
           "parameters": "parameters", "eval/loss": "held-out loss",
           "eval/bits_per_byte": "bits per byte", "train/loss": "training loss",
           "eval/router/worth": "worth of routed blocks (nats)"}  # fmt: skip
HELD_OUT_SET = re.compile(r"eval/[\w-]+/(loss|bits_per_byte)")
TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


def curves(table, column):
    """Return a plotly figure of one metric: a panel for each axis, a line for each run."""
    axes = [axis for axis in AXES if axis in table]
    rows = table.dropna(subset=[column]).melt(["run", column], axes, "axis", "value")
    rows["run"] = rows.run.str.replace("<", "&lt;")  # plotly reads some tags in names
    labels = {column: CURVES.get(column, column), "value": ""}
    figure = px.line(rows, x="value", y=column, color="run", facet_col="axis", markers=True,
                     labels=labels, template="plotly_white", height=330)  # fmt: skip
    figure.for_each_annotation(lambda title: title.update(text=title.text.removeprefix("axis=")))
    return figure.update_xaxes(matches=None)


def table_of_runs(runs, last):
    """Return the table of runs as HTML. last: the last value of each metric, by run."""
    cells = runs[["run", "settings"]].copy()
    for name, title in COLUMNS.items():
        if name in last:
            values = last[name][runs.run].map("{:.5g}".format).replace("nan", "–").to_numpy()
            is_diverged = runs.diverged & (name in metrics.LOSSES)
            cells[title] = np.where(is_diverged, "diverged", values)
    with pd.option_context("display.max_colwidth", None):
        return cells.to_html(index=False, border=0, justify="left", table_id="runs")


def page(paths):
    """Return the page of these runs as HTML."""
    table, runs = metrics.read_runs(paths)
    finite = table.replace(math.inf, math.nan)
    figures = [
        curves(finite, column).to_html(full_html=False, include_plotlyjs=False)
        for column in (*CURVES, *filter(HELD_OUT_SET.fullmatch, finite))
        if column in finite and finite[column].notna().any()
    ]
    samples = []
    for name, path in zip(runs.run, runs.path, strict=True):
        files = sorted((pathlib.Path(path) / "samples").glob("step_*.txt"))
        if files:
            text = html.escape(files[-1].read_text(errors="replace"))
            samples.append(f"<h3>{html.escape(name)}, {files[-1].stem}</h3><pre>{text}</pre>")
    lines = [f'<p class="warning">{html.escape(line)}</p>' for line in metrics.warnings(runs)]
    parts = {
        "title": f"{len(runs)} runs" if len(runs) > 1 else html.escape(runs["run"][0]),
        "warnings": "\n".join(lines),
        "runs": table_of_runs(runs, table.groupby("run", sort=False).last()),
        "samples": "\n".join(samples) or "<p>none</p>",
        "figures": "\n".join(figures),
        # Last, because it may contain the names of parts.
        "plotly": f"<script>{plotly.offline.get_plotlyjs()}</script>",
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def study(arguments):
    out = cli.output_file(arguments.out, ".html")
    io.write_atomic(out, page(arguments.runs))
    print(f"written: {out}")


def main(argv=None):
    parser = cli.Parser("efx.studies.report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--out", default="report.html", help="page (default: report.html)")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
