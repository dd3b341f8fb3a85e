"""Published results: CSV files with their provenance.

A file of `results/` begins with lines `# key: value` (title, command, config, machine, revision);
the rest is a table, one row a run or one row a measured mean.
"""

import pathlib

import pandas as pd

from efx import io

RESULTS = pathlib.Path("results")


def read(name, folder=RESULTS):
    """The table of a result, and its header as {key: [values]}."""
    path = pathlib.Path(folder) / f"{name}.csv"
    header = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        key, _, value = line.removeprefix("#").strip().partition(": ")
        header.setdefault(key, []).append(value)
    return pd.read_csv(path, comment="#"), header


def write(path, table, header):
    """Write a table with its header, {key: value or list of values}."""
    lines = []
    for key, values in header.items():
        values = values if isinstance(values, list) else [values]
        lines += [f"# {key}: {value}\n" for value in values]
    io.write_atomic(pathlib.Path(path), "".join(lines) + table.to_csv(index=False))
