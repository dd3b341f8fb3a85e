"""Tables of results: cells as text, Markdown, and files of a table and its numbers.

A cell is a number, a text, None (empty), the `summary` of several seeds, or a fitted number with
its interval, {"mean": x, "interval": [low, high]}, in which None is infinity. A dict may have a
"note".
"""

import statistics

from efx import io
from efx.logging import quantity


def summary(values):
    """Return {mean, spread, n, values}; spread is the standard deviation, absent for one value."""
    fields = {"mean": statistics.fmean(values), "n": len(values), "values": list(values)}
    return fields | ({"spread": statistics.stdev(values)} if len(values) > 1 else {})


def number(value, form):
    """Return a number as text.

    Args:
      form: a format such as ".4f", or "quantity" (1.54M), or "FLOPs" (1.54 MFLOPs).
    """
    if form in ("quantity", "FLOPs"):
        return quantity(value, "FLOPs" if form == "FLOPs" else "")
    return format(value, form)


def text(cell, form):
    """Return a cell as text: "1.2345 ± 0.0678 (note)" or "1.2345 (1.1000 to 1.3000; note)"."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if not isinstance(cell, dict):
        return number(cell, form)
    spread = f" ± {number(cell['spread'], form)}" if "spread" in cell else ""
    ends = ["∞" if end is None else number(end, form) for end in cell.get("interval", ())]
    notes = [note for note in (" to ".join(ends), cell.get("note")) if note]
    return number(cell["mean"], form) + spread + (f" ({'; '.join(notes)})" if notes else "")


def mean_and_spread(values):
    """Return "1.2345 ± 0.0678": mean and standard deviation, or one value alone."""
    return text(summary(values), ".4f")


def means_markdown(table):
    """Return Markdown with mean ± standard deviation over the rows of each name.

    Args:
      table: a DataFrame with columns name, seed and numbers.
    """
    groups = table.drop(columns="seed").groupby("name", sort=False)
    titles, rows = [column for column in table if column not in ("name", "seed")], []
    for name, group in groups:
        known = [group[title].dropna().tolist() for title in titles]
        rows.append([name, *(mean_and_spread(values) if values else "" for values in known)])
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
