"""What run directories have logged, for studies that show several runs: rows, axes, what compares.

Of two runs that read other tokens, or were evaluated on other text, a loss in nats a token says
nothing about which is better; `differences` says so before anything is drawn.
"""

import dataclasses
import functools
import math
import pathlib
import statistics

import numpy as np

from efx import io, run_dir
from efx.errors import UsageError
from efx.logging import read_metrics

# Columns that count from 0 on, so that a row without one lies between its neighbours.
COUNTED = ("tokens", "flops", "flops_realised", "flops_teacher", "seconds")
# Beginnings of the columns that count by tokens: of other tokens or text they are other numbers.
BY_TOKEN = ("train/loss", "train/objective", "train/accuracy", "eval/loss", "eval/accuracy")
TOKENIZERS, HELD_OUT = "tokenizers", "held-out text"  # what `differences` tells apart
BYTES_OF_TEXTS = (
    "Bits per byte of different texts cannot be compared directly: compare the shapes of the "
    "curves, not their levels."
)
TRAINED_UNLIKE = "The runs were trained on different texts: training losses cannot be compared."
_LOSSES = ("train/loss", "eval/loss", "eval/bits_per_byte")  # one of them, or nothing is to be seen
# Where a run writes and on what it is computed: what a reader of curves does not ask for.
_UNASKED = ("log.", "checkpoint.", "sample.", "evaluate.", "mesh.", "rules.", "losses.distill")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory says.

    Attributes:
      path: as it was given or found.
      config: the recorded config.
      record: run.json, {} without one.
      rows: of metrics.jsonl, finite numbers or None.
    """

    path: pathlib.Path
    config: dict
    record: dict
    rows: list

    @functools.cached_property
    def last(self):
        """The last value of each metric, and the least as "min:<metric>"."""
        return last_values(self.rows)

    def curve(self, column):
        """(numbers of the rows, values) where a row has the column; a value may be None."""
        found = [(i, row[column]) for i, row in enumerate(self.rows) if column in row]
        return [i for i, _ in found], [value for _, value in found]

    def median(self, column):
        values = [value for value in self.curve(column)[1] if value is not None]
        return float(np.median(values)) if values else None


def read_run(path):
    """The Run in a folder; UsageError if it has nothing to show."""
    try:
        config, record = run_dir.recorded_config(path), run_dir.run_record(path)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--workdir=")) from error
    if not (io.folder(path) / run_dir.METRICS_FILE).is_file():
        raise UsageError(f"{path} has no {run_dir.METRICS_FILE}: nothing has been logged yet")
    rows = [
        {name: number(value) for name, value in row.items() if _is_number(value)}
        for row in read_metrics(path)
    ]
    if not any(name in row for row in rows for name in _LOSSES):
        raise UsageError(
            f"{path}/{run_dir.METRICS_FILE} has no row with one of {', '.join(_LOSSES)}: no "
            "step has been logged yet"
        )
    return Run(path, config, record, rows)


def _is_number(value):
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def number(value):
    """A float of what a file says; None if it is not finite."""
    try:
        value = float(value)
    except (OverflowError, TypeError):
        return None
    return value if math.isfinite(value) else None


def last_values(rows):
    """The last value of every metric in rows; "min:<metric>" is the least value and
    "mean:<metric>" the mean, both over finite values.

    None for a last value that was not finite, and for the others if no value was."""
    last, finite = {}, {}
    for row in rows:
        for name, value in row.items():
            last[name] = value
            if value is not None:
                finite.setdefault(name, []).append(value)
    for name in list(last):
        values = finite.get(name)
        last[f"min:{name}"] = min(values) if values else None
        last[f"mean:{name}"] = statistics.fmean(values) if values else None
    return last


def axis_values(run, axis):
    """[rows] where each row of a run lies on an axis; None where that is not known.

    Rows of an evaluation have a step alone, and on an axis of COUNTED lie between those that have
    the rest; these axes begin at 0.
    """
    if axis not in COUNTED:
        return [row.get(axis) for row in run.rows]
    steps = [row["step"] for row in run.rows]
    known = [(row["step"], row[axis]) for row in run.rows if row.get(axis) is not None]
    if not known:
        return [None] * len(steps)
    x, y = np.array([(0.0, 0.0), *known]).T
    values = np.interp(steps, x, y, right=np.nan)
    return [number(value) for value in values]


# ---- which runs can be compared ----------------------------------------------------------------


def differing(configs):
    """[{dotted key: value}] of the settings of each run that are not the same in all of them."""
    runs = [run_dir.dotted(config) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(key for settings in runs for key in settings)
        if not key.startswith(_UNASKED)
        and any(settings.get(key) != runs[0].get(key) for settings in runs)
    ]
    return [{key: settings[key] for key in keys if key in settings} for settings in runs]


def differences(runs):
    """What keeps the losses of runs from being compared: {TOKENIZERS or HELD_OUT: a few words}."""
    said = {}
    for what, identity, keys in (
        (TOKENIZERS, _tokenizer, ("tokenizer",)),
        (HELD_OUT, _held_out, ("source", "eval_source", "max_bytes", "eval_fraction")),
    ):
        first = runs[0]
        other = next((run for run in runs if not _same(identity, first, run)), None)
        if other is not None:
            settings = differing([_block(run) for run in (first, other)])
            named = [
                f"config.data.{key}={settings[0].get(key)!r} and {settings[1].get(key)!r}"
                for key in keys
                if key in settings[0] or key in settings[1]
            ]
            because = ", ".join(named) or "the same settings, of other text"
            said[what] = f"{first.path} and {other.path} have different {what} ({because})"
    return said


def trained_alike(runs):
    """Whether all of them were trained on the same text."""
    return all(_same(_trained_on, runs[0], run) for run in runs)


def _same(identity, a, b):
    """By their hashes if both runs recorded them, by their settings otherwise."""
    (recorded_a, set_a), (recorded_b, set_b) = identity(a), identity(b)
    if recorded_a is None or recorded_b is None:
        return set_a == set_b
    return recorded_a == recorded_b


def _block(run):
    """The settings of a run's data; {} if it recorded none."""
    data = run.config["data"] if "data" in run.config else {}
    return data if isinstance(data, dict) else {}


def _tokenizer(run):
    """(the hash that the run recorded or None, the setting)"""
    settings = _block(run)
    return run.record.get("tokenizer"), settings.get("tokenizer")


def _held_out(run):
    text, settings = run.record.get("text"), _block(run)
    of_setting = [
        settings.get(key)
        for key in ("source", "eval_source", "max_bytes", "eval_fraction", "split")
    ]
    return text and (text["eval_source"] or text["held_out"]), of_setting


def _trained_on(run):
    text, settings = run.record.get("text"), _block(run)
    recorded = text and (text["source"], run.record.get("subset"))
    return recorded, [settings.get(key) for key in ("source", "max_bytes", "subset")]
