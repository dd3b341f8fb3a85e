"""One page about several runs: curves, a sortable table, samples.

    python -m efx.studies.report runs/mod runs/dense --out report.html

The page needs a browser and no network: curves of held-out and training loss by step, tokens, FLOPs
or seconds; a table of runs with the settings in which they differ; the last samples. TensorBoard
and Weights & Biases are the dashboards; this is a page to keep or to send.
"""

import html
import math
import pathlib
import sys

from efx import io
from efx.logging import quantity
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
TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


def figure_of(table, column):
    """Return a plotly figure of one metric, with a menu of axes; None without values."""
    import plotly.graph_objects as go

    axes = [axis for axis in AXES if axis in table]
    if column not in table or table[column].isna().all():
        return None
    figure, by_run = go.Figure(), table.dropna(subset=[column]).groupby("run", sort=False)
    for name, rows in by_run:
        # Plotly reads some tags in names.
        name = name.replace("<", "&lt;")
        figure.add_scatter(x=rows[axes[0]], y=rows[column], name=name, mode="lines+markers")
    buttons = [
        {
            "label": axis,
            "method": "update",
            "args": [{"x": [rows[axis] for _, rows in by_run]}, {"xaxis.title.text": axis}],
        }
        for axis in axes
    ]
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.15, "yanchor": "top"}
    figure.update_layout(updatemenus=[menu], height=430, margin={"t": 60, "b": 40})
    # Legible on a light and on a dark page.
    clear, grey = "rgba(0, 0, 0, 0)", "#808080"
    figure.update_layout(paper_bgcolor=clear, plot_bgcolor=clear, font_color=grey)
    for update, title in ((figure.update_xaxes, axes[0]), (figure.update_yaxes, CURVES[column])):
        update(title_text=title, gridcolor="rgba(128, 128, 128, 0.3)", zeroline=False)
    return figure


def cell(value, shown=None):
    """Return a table cell that sorts by its value."""
    shown = str(value) if shown is None else shown
    return f'<td data-key="{html.escape(str(value))}">{html.escape(shown)}</td>'


def page(paths):
    """Return the page of these runs as HTML."""
    table, runs = metrics.read_runs(paths)
    figures, script = [], True
    finite = table.replace(math.inf, math.nan)
    for column in CURVES:
        if (figure := figure_of(finite, column)) is not None:
            figures.append(figure.to_html(full_html=False, include_plotlyjs=script))
            script = False
    last = table.groupby("run", sort=False).last()
    columns = {name: title for name, title in COLUMNS.items() if name in last}
    rows, samples = [], []
    for _, run in runs.iterrows():
        cells = [cell(run["run"]), cell(run.settings)]
        for name in columns:
            value = last[name][run["run"]]
            unit = {"tokens": "", "parameters": "", "flops": "FLOPs"}.get(name)
            text = f"{value:.5g}" if unit is None else quantity(value, unit)
            if run.diverged and name in metrics.LOSSES:
                value, text = math.nan, "diverged"
            elif math.isnan(value):
                text = "–"
            cells.append(cell(value, text))
        rows.append(f"<tr>{''.join(cells)}</tr>")
        found = sorted((pathlib.Path(run.path) / "samples").glob("step_*.txt"))
        if found:
            text = html.escape(found[-1].read_text(errors="replace"))
            name = html.escape(run["run"])
            samples.append(f"<h3>{name}, {found[-1].stem}</h3><pre>{text}</pre>")
    headings = ["run", "settings", *columns.values()]
    lines = [f'<p class="warning">{html.escape(line)}</p>' for line in metrics.warnings(runs)]
    parts = {
        "title": f"{len(runs)} runs" if len(runs) > 1 else html.escape(runs["run"][0]),
        "warnings": "\n".join(lines),
        "headings": "".join(f"<th><button>{title}</button></th>" for title in headings),
        "rows": "\n".join(rows),
        "samples": "\n".join(samples) or "<p>none</p>",
        "figures": "\n".join(figures),  # last: its script may contain the names of parts
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
