"""The logged metrics of several runs as one table."""

import math
import pathlib

import numpy as np
import pandas as pd

from efx import run_dir
from efx.errors import UsageError
from efx.logging import read_metrics

# Columns that count from 0 on: an evaluation's row lies between the training rows around it.
COUNTED = ("tokens", "epochs", "flops", "flops_realised", "seconds")
LOSSES = ("eval/loss", "eval/bits_per_byte", "train/loss")
# Settings that do not decide the result.
_IGNORED = ("log.", "checkpoint.", "sample.", "evaluate.", "mesh.", "rules.")


def read_runs(paths):
    """Return (metrics, runs): a row for each logged step, and a row for each run.

    metrics has the columns run, step, and those of metrics.jsonl, with COUNTED columns filled in
    for evaluations; a logged value that was not finite is inf, so that it is not taken for one that
    was not logged. runs has run, path, seed, text, tokenizer, the differing `settings`, and
    `diverged`, whether the last value of a loss is not finite.
    """
    configs = [run_dir.dotted(run_dir.RunDir(path).config) for path in paths]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if not key.startswith(_IGNORED) and len({str(c.get(key)) for c in configs}) > 1
    ]
    names, tables, rows = _names(paths), [], []
    for path, name, config in zip(paths, names, configs, strict=True):
        logged = [
            {key: math.inf if value is None else value for key, value in row.items()}
            for row in read_metrics(path)
        ]
        if not logged:
            raise UsageError(f"{path}: no step has been logged yet")
        table = pd.DataFrame(logged)
        last_losses = table.reindex(columns=LOSSES).ffill().iloc[-1]
        for column in {*COUNTED} & {*table}:
            known = table[column].notna()
            x, y = table.step[known], table[column][known].astype(float)
            filled = np.interp(table.step, [0, *x], [0, *y], right=np.nan)
            table[column] = filled
        table.insert(0, "run", name)
        tables.append(table)
        record = run_dir.RunDir(path).record
        settings = ", ".join(f"{key}={config[key]}" for key in keys if key in config)
        rows.append({"run": name, "path": str(path), "settings": settings}
                    | {"seed": config.get("seed"), "tokenizer": record.get("tokenizer")}
                    | {"text": str(record.get("text"))}
                    | {"diverged": math.inf in last_losses.to_list()})  # fmt: skip
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
    """Return lines about runs that diverged, or whose values of a column cannot be compared."""
    lines = []
    if diverged := list(runs.run[runs.diverged]):
        lines.append(f"{len(diverged)} of {len(runs)} runs diverged: {', '.join(diverged)}.")
    if runs.tokenizer.nunique() > 1 and column != "eval/bits_per_byte":
        lines.append(f"Different tokenizers: compare eval/bits_per_byte, not {column}.")
    if runs.text.nunique() > 1:
        lines.append("Different training or held-out texts: do not compare the losses.")
    return lines
