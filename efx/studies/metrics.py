"""The logged metrics of several runs as one table."""

import pathlib

import numpy as np
import pandas as pd

from efx import run_dir
from efx.errors import UsageError
from efx.logging import read_metrics

# Columns that count from 0 on: an evaluation's row lies between the training rows around it.
COUNTED = ("tokens", "epochs", "flops", "flops_realised", "seconds")
# Settings that do not decide the result.
_IGNORED = ("log.", "checkpoint.", "sample.", "evaluate.", "mesh.", "rules.")


def read_runs(paths):
    """Return (metrics, runs): a row for each logged step, and a row for each run.

    metrics has the columns run, step, and those of metrics.jsonl, with COUNTED columns filled in
    for evaluations. runs has run, path, seed, text, tokenizer, and the differing `settings`.
    """
    configs = [run_dir.dotted(run_dir.recorded_config(path)) for path in paths]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if not key.startswith(_IGNORED) and len({str(c.get(key)) for c in configs}) > 1
    ]
    names, tables, rows = _names(paths), [], []
    for path, name, config in zip(paths, names, configs, strict=True):
        table = pd.DataFrame(read_metrics(path))
        if table.empty:
            raise UsageError(f"{path}: no step has been logged yet")
        for column in {*COUNTED} & {*table}:
            known = table[column].notna()
            x, y = table.step[known], table[column][known].astype(float)
            filled = np.interp(table.step, [0, *x], [0, *y], right=np.nan)
            table[column] = filled
        table.insert(0, "run", name)
        tables.append(table)
        record = run_dir.run_record(path)
        settings = ", ".join(f"{key}={config[key]}" for key in keys if key in config)
        rows.append({"run": name, "path": str(path), "settings": settings}
                    | {"seed": config.get("seed"), "tokenizer": record.get("tokenizer")}
                    | {"text": str(record.get("text"))})  # fmt: skip
    return pd.concat(tables, ignore_index=True), pd.DataFrame(rows)


def _names(paths):
    """Return the directories' names, with as many of their parents as make them unique."""
    parts = [pathlib.Path(path).resolve().parts for path in paths]
    for i, path in enumerate(paths):
        if parts[i] in parts[:i]:
            raise UsageError(f"{path}: this run is listed twice; leave one out")
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len({*names}) == len(names):
            return names


def warnings(runs, column="eval/loss"):
    """Return lines about runs whose values of a column cannot be compared."""
    lines = []
    if runs.tokenizer.nunique() > 1 and column != "eval/bits_per_byte":
        lines.append(f"Different tokenizers: compare eval/bits_per_byte, not {column}.")
    if runs.text.nunique() > 1:
        lines.append("Different training or held-out texts: do not compare the losses.")
    return lines
