"""Published results: CSV files with their provenance.

A file of `results/` begins with lines `# key: value` (title, command, config, machine, revision);
the rest is a table, one row a run or one row a measured mean.
"""

import itertools
import pathlib

import pandas as pd

from efx import io

RESULTS = pathlib.Path("results")
# Columns of names and hashes, whatever they look like.
TEXTS = (
    "page", "files", "measure", "test", "name", "family", "size", "against", "method", "text",
    "tokenizer", "settings", "machine", "revision",
)  # fmt: skip


def read(name, folder=RESULTS):
    """The table of a result, and its header as {key: [values]}."""
    return read_file(pathlib.Path(folder) / f"{name}.csv")


def read_file(path):
    """The table of a CSV file, and its header as {key: [values]}."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    header = {}
    for line in comments:
        key, _, value = line.removeprefix("#").strip().partition(": ")
        header.setdefault(key, []).append(value)
    # Below the header "#", and "None" or "NA", may be names or parts of one.
    options = {"skiprows": len(comments), "keep_default_na": False, "na_values": [""]}
    return pd.read_csv(path, **options, dtype=dict.fromkeys(TEXTS, str)), header


def write(path, table, header):
    """Write a table with its header, {key: value or list of values}."""
    lines = []
    for key, values in header.items():
        values = values if isinstance(values, list) else [values]
        lines += [f"# {key}: {' '.join(str(value).splitlines())}\n" for value in values]
    io.write_atomic(pathlib.Path(path), "".join(lines) + table.to_csv(index=False))
