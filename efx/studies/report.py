"""One page about several runs: curves, a sortable table, samples.

    python -m efx.studies.report runs/mod runs/dense --out report.html

The page needs a browser, no network, and plotly.min.js, which is written beside it. The runs of one
study row, the directories NAME-seed<n>, are one line of the table, which opens to its seeds, and
one curve: their mean, with a band of one standard deviation. TensorBoard and Weights & Biases are
the dashboards; this is a page to keep or to send.
"""

import html
import json
import math
import pathlib
import sys

import numpy as np
import plotly.offline

from efx import io
from efx.logging import quantity, tables
from efx.studies import cli, metrics

# {column: title in the table}
COLUMNS = {"eval/loss": "held-out loss (nats)", "eval/bits_per_byte": "bits per byte",
           "train/loss": "training loss (nats)",
           "eval/router/worth": "loss added without routed blocks (nats)", "flops": "FLOPs",
           "tokens": "tokens", "step": "steps", "seconds": "seconds",
           "parameters": "parameters"}  # fmt: skip
COUNTS = ("step", "tokens", "flops", "seconds", "parameters")
POINTS = 100  # of a curve; longer ones are thinned
TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


def curves(table, rows, column):
    """Return the figure of one column for the page: its title and a curve for each study row."""
    axes = [axis for axis in metrics.AXES if axis in table]
    means = metrics.means_over_seeds(table, column, *axes)
    figure = {"title": metrics.title(column), "log": metrics.is_wide(means["mean"])}
    figure["wide"] = [axis for axis in axes if metrics.is_wide(means[axis])]
    figure["curves"] = []
    for row, curve in means.groupby("row", sort=False):
        kept = np.unique(np.linspace(0, len(curve) - 1, POINTS).round().astype(int))
        curve = curve.iloc[kept]
        made = {"row": rows.index(row), "mean": _rounded(curve["mean"])}
        made |= {axis: _rounded(curve[axis]) for axis in axes}
        if curve["std"].notna().all():
            made["low"] = _rounded(curve["mean"] - curve["std"])
            made["high"] = _rounded(curve["mean"] + curve["std"])
        figure["curves"].append(made)
    return figure


def _rounded(values):
    """Return five digits of each value, None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in values]


def table_of_runs(runs, last, colours):
    """Return the table of runs as HTML, a body for each study row.

    Args:
      last: the last value of each metric, by run. colours: of the study rows.
    """
    last = last.loc[runs.run].set_index(runs.index)
    last.loc[runs.diverged, [loss for loss in metrics.LOSSES if loss in last]] = math.inf
    columns = [column for column in COLUMNS if column in last]
    heads = [("run", ""), ("seeds", "")]
    heads += [(COLUMNS[column], "number") for column in columns if column not in COUNTS]
    heads += [(key, "") for key in runs.settings[0]]
    heads += [(COLUMNS[column], "number") for column in columns if column in COUNTS]
    heads = "".join(
        f'<th aria-sort="none" class="{kind}"><button>{title.replace(".", ".<wbr>")}</button></th>'
        for title, kind in heads
    )
    lines = [f'<table id="runs"><thead><tr>{heads}</tr></thead>']
    for (row, group), colour in zip(runs.groupby("row", sort=False), colours, strict=True):
        mark = f'<i style="background:{colour}"></i>'
        lines.append("<tbody>")
        if len(group) == 1:
            lines.append(_line("<tr>", mark, row, group, last[columns]))
        else:
            mark = f'<button aria-expanded="false" aria-label="seeds of this row">▸</button>{mark}'
            lines.append(_line("<tr>", mark, row, group, last[columns]))
            for _, one in group.groupby("run", sort=False):
                tag = '<tr class="seed" hidden>'
                lines.append(_line(tag, "", one.run.iloc[0], one, last[columns]))
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>"])


def _line(tag, mark, name, group, last):
    """Return the line of the table about some runs."""
    seeds = f"seed {group.seed.iloc[0]}" if len(group) == 1 else f"{len(group)} seeds"
    cells = [f'<td data-value="{html.escape(name)}">{mark}{html.escape(name)}</td>']
    cells.append(f'<td data-value="{seeds}">{seeds}</td>')
    last = last.loc[group.index].astype(float)
    cells += [_cell(column, last[column].dropna()) for column in last if column not in COUNTS]
    for value in group.settings.iloc[0].values():
        text = "" if value is None else html.escape(str(value))
        cells.append(f'<td data-value="{text}">{text}</td>')
    cells += [_cell(column, last[column].dropna()) for column in last if column in COUNTS]
    return f"{tag}{''.join(cells)}</tr>"


def _cell(column, values):
    """Return the cell of the mean of some runs; it sorts as missing where one diverged."""
    text, kind, mean = "–", "number", ""
    if len(values) and np.isfinite(values).all():
        mean = f"{values.mean():.6g}"
    if len(values) and column in COUNTS:
        text = quantity(values.mean(), "FLOPs" if column == "flops" else "")
    elif len(values):
        text = tables.mean_and_spread(COLUMNS[column], values)
    if np.isinf(values).any():
        kind = "number diverged"
        text = "diverged" if np.isinf(values).all() else text.replace("not finite", "diverged")
    return f'<td class="{kind}" data-value="{mean}">{text}</td>'


def page(paths):
    """Return the page of these runs as HTML; it loads plotly.min.js from its own folder."""
    table, runs = metrics.read_runs(paths)
    labels = metrics.row_labels(runs)
    rows = list(labels)
    colours = metrics.palette(len(rows))
    diverged = runs.groupby("row").diverged.any()
    figures = [
        curves(table, rows, column)
        for column in metrics.columns_of_curves(table)
        if np.isfinite(table[column]).any()
    ]
    has_seeds = len(rows) < len(runs)
    data = {
        "axes": {axis: title for axis, title in metrics.AXES.items() if axis in table},
        "rows": [
            {"label": labels[row], "colour": colour, "diverged": bool(diverged[row])}
            for row, colour in zip(rows, colours, strict=True)
        ],
        "figures": figures,
        "note": "Mean and standard deviation over seeds." if has_seeds else "",
    }
    samples = []
    for name, path in zip(runs.run, runs.path, strict=True):
        files = sorted((pathlib.Path(path) / "samples").glob("step_*.txt"))
        if files:
            text = html.escape(files[-1].read_text(errors="replace"))
            heading = f"{html.escape(name)}, step {int(files[-1].stem[5:])}"
            samples.append(f"<details><summary>{heading}</summary><pre>{text}</pre></details>")
    lines = [f'<p class="warning">{html.escape(line)}</p>' for line in metrics.warnings(runs)]
    parts = {
        "<!--title-->": f"{len(runs)} runs" if len(runs) > 1 else html.escape(runs["run"][0]),
        "<!--warnings-->": "\n".join(lines),
        "<!--runs-->": table_of_runs(runs, table.groupby("run", sort=False).last(), colours),
        # "<" could end the script.
        "/*DATA*/ null": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "<!--samples-->": "\n".join(samples) or "<p>none</p>",
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def study(arguments):
    out = cli.output_file(arguments.out, ".html")
    io.write_atomic(out, page(arguments.runs))
    script = out.with_name("plotly.min.js")
    io.write_atomic(script, plotly.offline.get_plotlyjs())
    print(f"written: {out}, {script}")


def main(argv=None):
    parser = cli.Parser("efx.studies.report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--out", default="report.html", help="page (default: report.html)")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
