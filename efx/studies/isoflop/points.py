"""The points of a study: what each run measured, with the settings that it had, as plain data.

A file of points makes a study portable: another machine that reads it trains only what it lacks.
So that runs of other settings, texts or tokenizers are never mixed in, each point carries all
settings of its run that decide what it computes (those that all points share are written once) and
hashes of text and tokenizer, and is compared with what the grid asks for.
"""

import dataclasses
import json
import math
import pathlib
import re

import numpy as np

from efx import io, run_dir
from efx.config.load import to_config
from efx.config.run import default_config
from efx.errors import UsageError
from efx.logging import quantity, read_metrics
from efx.studies import sweep as sweep_lib
from efx.studies.isoflop.analysis import Measured
from efx.studies.isoflop.grid import Run

# Settings that may differ on resume and yet decide what a run ends with.
_DECIDING = r"steps|train_flops|data\.subset|evaluate\.(?!every$).*"
# Where the text lies: which text it is, its hash says.
_PLACES = r"seed|data\.(eval_)?source"
_SHOWN = 3  # differing settings that a message names


class Unfinished(UsageError):
    """A run that has not ended, or was never begun."""


@dataclasses.dataclass(frozen=True)
class Point:
    """What a finished run measured.

    Attributes:
      run: `grid.Run`. fitted: False if it only served to find a learning rate.
      parameters, tokens, flops, seconds: of the model, and of all training.
      loss: held-out, in nats, under the causal decision; None if it is not finite.
      split: the fraction of the held-out text that was scored.
      machine, revision: in words. text, tokenizer: hashes. settings: {dotted key: value}.
      source: the file or folder that it was read from.
      copied: the nats that a repeat of random tokens gains (`config.evaluate.repeated_rows`); None
        if that was not measured.
    """

    run: Run
    fitted: bool
    parameters: int
    tokens: int
    flops: float
    seconds: float | None
    loss: float | None
    split: float | None
    machine: str
    revision: str
    text: str
    tokenizer: str
    settings: dict
    source: str
    copied: float | None = None


_FIELDS = [field.name for field in dataclasses.fields(Point)]
_OWN = [name for name in _FIELDS if name not in ("run", "settings", "source", "copied")]


# ---- settings ----------------------------------------------------------------------------------


def deciding(config):
    """{dotted key: plain value} of the settings that decide what a run of this config computes,
    without its seed. config: nested plain dict."""
    from efx.train.run_files import MAY_DIFFER

    plain = run_dir.dotted(json.loads(json.dumps(config)))
    free = re.compile("|".join(MAY_DIFFER))
    return {
        key: value
        for key, value in plain.items()
        if not re.fullmatch(_PLACES, key)
        and (re.fullmatch(_DECIDING, key) or not free.fullmatch(key))
    }


def expected_settings(config):
    """`deciding` of a checked config."""
    from efx.config import schema

    return deciding(schema.as_dict(config))


def differing_settings(found, expected):
    """[(dotted key, value in `found`, value in `expected`)], the values in words, of two results of
    `deciding`. A setting that was not there yet when `found` was written is at its default."""
    from efx.config import schema

    absent, defaults = object(), {}
    if expected.keys() - found.keys():
        known = to_config(default_config(expected["model.family"]))
        defaults = deciding(schema.as_dict(known))
    differing = []
    for key in sorted(found.keys() | expected.keys()):
        before = found[key] if key in found else defaults.get(key, absent)
        wanted = expected[key] if key in expected else absent
        if before != wanted or isinstance(before, bool) != isinstance(wanted, bool):
            words = ["absent" if value is absent else repr(value) for value in (before, wanted)]
            differing.append((key, *words))
    return differing


def check_settings(where, found, expected):
    """UsageError if settings of a point are not those that the grid asks for."""
    differing = [
        f"config.{key} is {before} there and {wanted} in the grid"
        for key, before, wanted in differing_settings(found, expected)
    ]
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise UsageError(
            f"{where}: a run with other settings: {'; '.join(differing[:_SHOWN])}{more}; leave "
            "it out, or use its own grid and arguments after --"
        )


# ---- from run directories ----------------------------------------------------------------------


def measured_point(run, folder, expected, fitted=True):
    """The Point of a run directory.

    Raises Unfinished if the run has not used its budget or was not evaluated at its end, and
    another UsageError if the folder is damaged or of other settings than `expected`.
    """
    if not (folder / run_dir.CONFIG_FILE).is_file():
        if folder.is_dir() and (folder / run_dir.METRICS_FILE).exists():
            raise UsageError(
                f"{folder} has {run_dir.METRICS_FILE} but no {run_dir.CONFIG_FILE}: an "
                "incomplete copy; restore it, or delete the folder to train the run again"
            )
        raise Unfinished(f"{folder}: the run has not started")
    check_settings(folder, deciding(run_dir.recorded_config(folder)), expected)
    if not (folder / run_dir.METRICS_FILE).is_file():
        raise Unfinished(f"{folder}: no step has been logged yet")
    row = sweep_lib.final_row(folder)
    flops, step = row.get("flops", 0), row.get("step", 0)
    if abs(flops - run.budget) > 2 * flops / max(step, 1):
        used, budget = (quantity(number, "FLOPs") for number in (flops, run.budget))
        raise Unfinished(f"{folder}: {used} of training; its budget is {budget}")
    record = run_dir.run_record(folder)
    if "parameters" not in row or not record.get("launches"):
        raise UsageError(
            f"{folder}: the start of {run_dir.METRICS_FILE} or {run_dir.RUN_FILE} is "
            "missing; restore it, or delete the folder to train the run again"
        )
    if "eval/loss" not in read_metrics(folder)[-1]:  # an earlier one may be in the rows before
        raise Unfinished(f"{folder}: no held-out loss: the run has not finished")
    launches = record["launches"]
    return Point(
        run=run,
        fitted=fitted,
        parameters=row["parameters"],
        tokens=row["tokens"],
        flops=flops,
        seconds=row.get("seconds"),
        loss=row["eval/loss"],
        split=row.get("eval/split_fraction"),
        machine=", ".join(dict.fromkeys(map(run_dir.machine_of, launches))),
        revision=run_dir.revision_of(launches[-1]),
        text=run_dir.checksum(json.dumps(record.get("text"), sort_keys=True)),
        tokenizer=record.get("tokenizer") or "",
        settings=deciding(run_dir.recorded_config(folder)),
        source=str(folder),
        copied=row.get("eval/repeated/gain"),
    )


# ---- from files, and to them -------------------------------------------------------------------


def as_data(points):
    """{"settings": those that all points share, "points": [a dict each]}."""
    first = points[0].settings
    shared = {
        key: value
        for key, value in first.items()
        if all(key in point.settings and point.settings[key] == value for point in points)
    }
    return {
        "settings": shared,
        "points": [
            point.run._asdict()
            | {name: getattr(point, name) for name in _OWN}
            | ({} if point.copied is None else {"copied": point.copied})
            | {"settings": {k: v for k, v in point.settings.items() if k not in shared}}
            for point in points
        ],
    }


def from_data(data, where):
    """[Point] of the data of `as_data`; UsageError, which names `where`, if it is none, or if a
    point is not what a run can have measured, or is there twice."""
    try:
        points = [
            Point(
                run=Run(*(one[name] for name in Run._fields)),
                settings=data["settings"] | one["settings"],
                source=str(where),
                copied=one.get("copied"),
                **{name: one[name] for name in _OWN},
            )
            for one in data["points"]
        ]
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{where}: not the points of an isoFLOP study ({type(error).__name__}: {error}); "
            "use the isoflop.json of a study, or a file of results/ with points"
        ) from error
    seen = set()
    for number, point in enumerate(points, 1):
        _check_point(f"{where}: point {number}", point)
        if point.run in seen:
            raise UsageError(
                f"{where}: point {number}, {point.run.name}, seed {point.run.seed}, is a "
                "duplicate and would count as another seed; remove one of them"
            )
        seen.add(point.run)
    return points


def _check_point(where, point):
    """UsageError for a value that no run has."""
    run = point.run
    texts = {"family": run.family, "size": run.size, "machine": point.machine}
    for name, value in (texts | {"revision": point.revision}).items():
        if not isinstance(value, str):
            raise UsageError(f"{where}: {name}={value!r}: expected a text")
    where = f"{where}, {run.family}, {run.size}"
    if type(run.seed) is not int:
        raise UsageError(f"{where}: seed={run.seed!r}: expected a whole number")
    positive = {name: getattr(point, name) for name in ("parameters", "tokens", "flops")}
    positive |= {"budget": run.budget}
    may_lack = {"rate": run.rate, "seconds": point.seconds, "split": point.split}
    positive |= {name: value for name, value in may_lack.items() if value is not None}
    for name, value in positive.items():
        if not (_is_number(value) and value > 0):
            raise UsageError(f"{where}: {name}={value!r}: expected a number above 0")
    for name in ("loss", "copied"):
        value = getattr(point, name)
        if value is not None and not _is_number(value):
            raise UsageError(
                f"{where}: {name}={value!r}: expected a number of nats, or null for a diverged run"
            )


def _is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def read_points(path):
    """[Point] of a study's isoflop.json, or of a file of results/ that was made from one."""
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {io.describe_os_error(error)}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if isinstance(data, dict) and "title" in data and "study" not in data:
        raise UsageError(
            f"{path}: a result without the points of its study; use the isoflop.json of the study"
        )
    return from_data(data["study"] if isinstance(data, dict) and "study" in data else data, path)


# ---- together ----------------------------------------------------------------------------------


def check_together(points):
    """UsageError if points were trained or scored on different texts, by different tokenizers, or
    scored on different parts of the held-out text."""
    for field, words, right in (
        ("tokenizer", "other tokenizers", "config.data.tokenizer"),
        ("text", "other texts", "config.data.source and config.data.eval_source"),
        ("split", "other parts of the held-out text", "config.evaluate"),
    ):
        first = points[0]
        for point in points:
            if getattr(point, field) != getattr(first, field):
                raise UsageError(
                    f"{first.run.name} ({first.source}) and {point.run.name} ({point.source}) "
                    f"have {words}, so their losses cannot be compared; {right} must be the "
                    "same in all runs of a study"
                )


def best_rates(points):
    """{(family, size): the learning rate of the least loss} of the points of the rates' runs."""
    losses = {}
    for point in points:
        loss = math.inf if point.loss is None else point.loss
        losses.setdefault((point.run.family, point.run.size), {})[point.run.rate] = loss
    for (family, size), of_rates in losses.items():
        if min(of_rates.values()) == math.inf:
            rates = ", ".join(f"{rate:g}" for rate in of_rates)
            raise UsageError(
                f"{family}, {size}: no learning rate of {rates} ends with a finite loss; add"
                " smaller ones to learning_rates"
            )
    return {place: min(of_rates, key=of_rates.get) for place, of_rates in losses.items()}


def families(points):
    """{family: Measured} of the points that are to be fitted, in their order.

    Seconds of different machines do not compare: with several of them none are known.
    """
    groups, one_machine = {}, len(machines(points)) == 1
    for point in points:
        if not point.fitted:
            continue
        if point.loss is None:
            raise UsageError(
                f"{point.run.name}, seed {point.run.seed} ({point.source}): its held-out loss "
                "is not finite; a lower optim.learning_rate may help"
            )
        of_family = groups.setdefault(point.run.family, {})
        of_family.setdefault((point.run.budget, point.run.size), []).append(point)
    # Draws of two families are paired by the place of a seed, however each lists its seeds.
    for of_family in groups.values():
        for group in of_family.values():
            group.sort(key=lambda point: point.run.seed)
    return {family: _measured(of_family, one_machine) for family, of_family in groups.items()}


def machines(points):
    """The names of those whose seconds are known."""
    return sorted({point.machine for point in points if point.fitted and point.seconds})


def _measured(groups, one_machine):
    def means(value):
        return np.array([np.mean([value(point) for point in group]) for group in groups.values()])

    def of_seeds(value):
        return [np.array([value(point) for point in group]) for group in groups.values()]

    def seconds(point):
        return point.seconds / point.flops if point.seconds and one_machine else math.nan

    return Measured(
        sizes=[size for _, size in groups],
        budgets=np.array([budget for budget, _ in groups], float),
        parameters=means(lambda point: point.parameters),
        tokens=means(lambda point: point.tokens),
        flops=means(lambda point: point.flops / point.tokens),
        seconds=of_seeds(seconds),
        losses=of_seeds(lambda point: point.loss),
        numbers=of_seeds(lambda point: point.run.seed),
    )
