"""Tables of results: as Markdown, and in files beside the numbers that they are made of."""

import json
import pathlib
import statistics

from efx.runfolder import write_atomic, writing


def markdown(titles, rows):
    """Lines of a table; rows: lists of cells, each as long as `titles`."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def mean_and_spread(values):
    """ "1.2345 ± 0.0678": mean and standard deviation; of a single value just that."""
    mean = f"{statistics.fmean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def save(workdir, name, text, numbers):
    """Writes WORKDIR/<name>.md, and its numbers as plain data to <name>.json; prints the text."""
    folder = pathlib.Path(workdir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.md", text)
    write_atomic(folder / f"{name}.json", json.dumps(numbers, indent=1) + "\n")
    print(text)
