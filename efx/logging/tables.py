"""Tables of results over seeds: Markdown, and files of a table and its numbers."""

import math
import statistics

from efx import io

LOSS = "held-out loss (nats)"
LOSSES = (LOSS, "loss", "mean")  # titles of columns that every run has, unless it diverged


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
    """Return a Markdown table. rows: lists of texts or numbers, each as long as `titles`."""
    lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (titles, *rows)]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


def _escaped(cell):
    """Return a cell without line breaks and column separators."""
    return " ".join(str(cell).splitlines()).replace("|", r"\|")


def save(workdir, name, table, text):
    """Write a DataFrame to WORKDIR/NAME.csv, and its Markdown to NAME.md and the terminal."""
    folder = io.folder(workdir)
    with io.report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    io.write_atomic(folder / f"{name}.csv", table.to_csv(index=False))
    io.write_atomic(folder / f"{name}.md", text)
    print(text)
