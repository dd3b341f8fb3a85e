"""The logged metrics of several runs as one table."""

import math
import pathlib
import re

import numpy as np
import pandas as pd

from efx import run_dir
from efx.errors import UsageError
from efx.logging import read_metrics

# Columns that count from 0 on: an evaluation's row lies between the training rows around it.
COUNTED = ("tokens", "epochs", "flops", "flops_realised", "seconds")
LOSSES = ("eval/loss", "eval/bits_per_byte", "train/loss")
# {column: its title with its unit}
AXES = {
    "step": "training steps",
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "training time (seconds)",
}
TITLES = AXES | {
    "flops_realised": "executed training FLOPs",
    "eval/loss": "held-out loss (nats per token)",
    "eval/bits_per_byte": "held-out bits per byte",
    "train/loss": "training loss (nats per token)",
    "eval/router/routed_fraction": "fraction of tokens that routed blocks compute",
    "eval/router/gate": "mean gate of computed tokens",
    "eval/router/gate_min": "lowest mean gate of a routed block",
    "eval/router/worth": "cost of switching routed blocks off (nats per token)",
    "eval/router/increment": "routed output norm / residual stream norm",
    "eval/moe/min_load": "load of the least used expert / mean load",
    "eval/dropout/kept": "fraction that learned masks keep",
    "eval/adapter/gate": "mean gate of adapters",
    "eval/latent/increment": "latent output norm / skip connection norm",
    "eval/cross/increment": "cross-attention output norm / residual stream norm",
}
_HELD_OUT_SET = re.compile(r"eval/([\w-]+)/(loss|bits_per_byte)")
_SEED = re.compile(r"-seed\d+$")  # the end of a run directory of a study
# Settings that do not decide the result, or are no difference between two study rows.
_IGNORED = ("log.", "checkpoint.", "sample.", "evaluate.", "mesh.", "rules.", "seed")


def read_runs(paths):
    """Return (metrics, runs): a row for each logged step, and a row for each run.

    A study row is the runs of one setting by several seeds: the directories NAME-seed<n>.

    metrics has the columns run, row, step, and those of metrics.jsonl, with COUNTED columns filled
    in for evaluations; a logged value that was not finite is inf, so that it is not taken for one
    that was not logged. runs has run, row, path, seed, text, tokenizer, `settings`, the dict of
    those that differ, and `diverged`, whether the last value of a loss is not finite.
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
        labels = {"run": name, "row": _SEED.sub("", name).replace("_", " ")}
        tables.append(table.assign(**labels))
        record = run_dir.RunDir(path).record
        rows.append(labels | {"path": str(path), "settings": {key: config.get(key) for key in keys}}
                    | {"seed": config.get("seed"), "tokenizer": record.get("tokenizer")}
                    | {"text": str(record.get("text"))}
                    | {"diverged": math.inf in last_losses.to_list()})  # fmt: skip
    return pd.concat(tables, ignore_index=True), pd.DataFrame(rows)


def means_over_seeds(table, y, *axes):
    """Return the curves of a column: a row for each study row and step that all its seeds logged.

    A curve ends before the first value that is not finite.

    Args:
      table: the metrics of `read_runs`. axes: columns.

    Returns: columns row, step, the axes (means over seeds), mean, std (NaN for one seed), seeds.
    """
    table = table.dropna(subset=[y])
    groups = table.groupby(["row", "step"], sort=False)
    curves = groups[[axis for axis in axes if axis != "step"]].mean()
    curves["mean"], curves["seeds"] = groups[y].mean(), groups.size()
    with np.errstate(invalid="ignore"):
        curves["std"] = groups[y].std()
    curves = curves.reset_index()
    curves = curves[curves.seeds == curves.row.map(table.groupby("row").run.nunique())]
    is_finite = np.isfinite(curves["mean"]).groupby(curves.row).cummin()
    return curves[is_finite.astype(bool)]


def row_labels(runs):
    """Return {study row: its name, with the number of diverged runs}."""
    labels = {}
    for row, group in runs.groupby("row", sort=False):
        count = group.diverged.sum()
        note = "diverged" if len(group) == 1 else f"{count} of {len(group)} diverged"
        labels[row] = f"{row} ({note})" if count else row
    return labels


def title(column):
    """Return the title of a column with its unit; without a known title, the column."""
    if match := _HELD_OUT_SET.fullmatch(column):
        name, measure = match.groups()
        return f"{name}: {TITLES[f'eval/{measure}']}"
    return TITLES.get(column, column)


def columns_of_curves(table):
    """Return the columns of a table that have a title and are no axis, the held-out sets last."""
    known = [column for column in TITLES if column in table and column not in (*AXES, *COUNTED)]
    return [*known, *filter(_HELD_OUT_SET.fullmatch, table)]


def palette(count):
    """Return this many colours as hex, each legible on white and on dark pages."""
    import seaborn as sns

    colours = sns.color_palette("colorblind").as_hex()
    colours = [colour for colour in colours if colour not in ("#fbafe4", "#ece133")]  # pale
    return colours[:count] if count <= len(colours) else sns.husl_palette(count, l=0.6).as_hex()


def is_wide(values):
    """Return whether these numbers want a logarithmic axis."""
    values = values.dropna()
    return bool(len(values) and values.min() > 0 and values.max() > 20 * values.min())


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
