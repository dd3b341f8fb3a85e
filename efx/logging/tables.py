"""Tables of results: Markdown, and CSV files with their provenance.

A CSV file may begin with lines `# key: value` (title, command, config, machine, revision); the rest
is the table.
"""

import itertools
import math
import statistics
import sys

from efx import io
from efx.logging.progress import is_live

LOSS = "held-out loss (nats)"
LOSSES = (LOSS, "loss", "mean")  # titles of columns that every run has, unless it diverged
# Columns of names and hashes, whatever they look like.
TEXTS = (
    "page", "files", "measure", "test", "name", "family", "size", "against", "method", "text",
    "tokenizer", "settings", "machine", "revision",
)  # fmt: skip


def mean_and_spread(title, values):
    """Return "1.2345 ± 0.0678 (1 not finite)": mean and standard deviation of the finite values.

    Without any: "not finite" for a loss, and "" for a column that these runs do not have.

    Args:
      values: a Series.
    """
    finite = [value for value in values.astype(float) if math.isfinite(value)]
    if not finite:
        return "not finite" if title in LOSSES else ""
    spread = f" ± {statistics.stdev(finite):.4f}" if len(finite) > 1 else ""
    diverged = len(values) - len(finite)
    note = f" ({diverged} not finite)" if diverged else ""
    return f"{statistics.fmean(finite):.4f}{spread}{note}"


def with_interval(row, name, form="{:.4f}"):
    """Return "0.1 (0.0 to 0.2)" of the columns name, name_low and name_high; "" where NaN."""
    value, low, high = (row.get(key, math.nan) for key in (name, f"{name}_low", f"{name}_high"))
    if math.isnan(value):
        return ""
    interval = "" if math.isnan(low) else f" ({form.format(low)} to {form.format(high)})"
    return form.format(value) + interval


def means_markdown(table):
    """Return Markdown with mean ± standard deviation over the rows of each name.

    Args:
      table: a DataFrame with columns name, seed and numbers.
    """
    groups = table.drop(columns="seed").groupby("name", sort=False)
    titles, rows = [column for column in table if column not in ("name", "seed")], []
    for name, group in groups:
        rows.append([name, *(mean_and_spread(title, group[title]) for title in titles)])
    return markdown(["", *titles], rows) + "\n"


def markdown(titles, rows):
    """Return a Markdown table.

    Args:
      rows: lists of texts or numbers, each as long as `titles`. Floats get four digits; NaN is "".
    """
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (titles, *rows)]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


def _cell(value):
    """Return a value as text without line breaks and column separators."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4f}"
    return " ".join(str(value).splitlines()).replace("|", r"\|")


def save(folder, name, table, text):
    """Write a DataFrame to FOLDER/NAME.csv, and its Markdown to NAME.md; show it."""
    folder = io.folder(folder)
    with io.report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    io.write_atomic(folder / f"{name}.csv", table.to_csv(index=False))
    io.write_atomic(folder / f"{name}.md", text)
    show(text)


def show(text):
    """Print Markdown: drawn, with aligned tables, in a terminal."""
    if not is_live(sys.stdout):
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def read_csv(path):
    """Return the table of a CSV file, and its header as {key: [values]}."""
    import pandas as pd

    lines = path.read_text(encoding="utf-8").splitlines()
    comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    header = {}
    for line in comments:
        key, _, value = line.removeprefix("#").strip().partition(": ")
        header.setdefault(key, []).append(value)
    # Below the header "#", and "None" or "NA", may be names or parts of one.
    options = {"skiprows": len(comments), "keep_default_na": False, "na_values": [""]}
    return pd.read_csv(path, **options, dtype=dict.fromkeys(TEXTS, str)), header


def write_csv(path, table, header):
    """Write a DataFrame with its header, {key: value or list of values}."""
    lines = []
    for key, values in header.items():
        values = values if isinstance(values, list) else [values]
        lines += [f"# {key}: {' '.join(str(value).splitlines())}\n" for value in values]
    io.write_atomic(path, "".join(lines) + table.to_csv(index=False))
