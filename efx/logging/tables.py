"""Tables of results: numbers as text, Markdown, and files of both the table and its numbers.

A cell is a number, a text, None (nothing to show), the `summary` of several seeds, or a fitted
number with its interval, {mean, interval: [low, high]}, an end of which is None if it is infinite;
the dicts may have a `note`.
"""

import json
import statistics

from efx import io
from efx.logging import quantity


def summary(values):
    """{mean, spread, n, values}: mean and standard deviation, which one value does not have."""
    fields = {"mean": statistics.fmean(values), "n": len(values), "values": list(values)}
    return fields | ({"spread": statistics.stdev(values)} if len(values) > 1 else {})


def number(value, form):
    """A number as text. form: ".4f" and the like, "quantity" (1.54M) or "FLOPs" (1.54 MFLOPs)."""
    if form in ("quantity", "FLOPs"):
        return quantity(value, "FLOPs" if form == "FLOPs" else "")
    return format(value, form)


def text(cell, form):
    """A cell as text: "1.2345 ± 0.0678 (note)", "1.2345 (1.1000 to 1.3000; note)", a number, a
    text as it is, or ""."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if not isinstance(cell, dict):
        return number(cell, form)
    spread = f" ± {number(cell['spread'], form)}" if "spread" in cell else ""
    ends = ["∞" if end is None else number(end, form) for end in cell.get("interval", ())]
    notes = [" to ".join(ends)] if ends else []
    notes += [cell["note"]] if "note" in cell else []
    return number(cell["mean"], form) + spread + (f" ({'; '.join(notes)})" if notes else "")


def mean_and_spread(values):
    """ "1.2345 ± 0.0678": mean and standard deviation; one value alone."""
    return text(summary(values), ".4f")


def markdown(titles, rows):
    """Lines of a table; rows: lists of texts or numbers, each as long as `titles`."""
    lines = ["| " + " | ".join(map(_in_a_row, row)) + " |" for row in (titles, *rows)]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


def _in_a_row(cell):
    """A cell, such as a name that a user gave, which neither ends its row nor begins another."""
    return " ".join(str(cell).splitlines()).replace("|", r"\|")


def write(workdir, name, text, numbers):
    """Writes WORKDIR/<name>.md, and its numbers as plain data to <name>.json."""
    folder = io.folder(workdir)
    with io.report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    io.write_atomic(folder / f"{name}.md", text)
    io.write_atomic(folder / f"{name}.json", json.dumps(numbers, indent=1) + "\n")


def save(workdir, name, text, numbers):
    """`write`, and prints the text."""
    write(workdir, name, text, numbers)
    print(text)
