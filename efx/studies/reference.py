"""Whether a run learns as it should: its held-out loss by step beside the curves of its recipe.

    python -m efx.studies.reference runs/shakespeare
    python -m efx.studies.reference runs/seed0 runs/seed1 runs/seed2 --record cpu

For a new machine, another version of JAX, a change of the code: train a recipe there and compare.
The recipes are those of `RECIPES`, nanoGPT's two on tinyshakespeare; which one a run is of, its
settings say. results/reference_curves.json has the loss by step of several seeds of each, training
and held-out, with settings, text, device and revision. The band at a step is where 95% of further
seeds would be, by Student's t for so few of them, so that up to one right run in twenty is out of
it there. Runs of other settings or another text are refused. Exit status: 0 within the band, or
nothing to judge by, 1 not, 2 bad input.

--record writes the curves of finished runs, of different seeds, as those of a recipe.
"""

import math
import pathlib
import statistics
import sys

from efx import io, run_dir
from efx.config.load import load_config, to_config
from efx.errors import UsageError, nearest
from efx.logging import read_metrics, tables
from efx.studies import cli, results
from efx.studies.isoflop import points

CURVES = "results/reference_curves.json"
# {recipe: (its config, settings that are changed in it)}
RECIPES = {
    "cpu": ("shakespeare_char:cpu", {}),
    "gpu": ("shakespeare_char:gpu", {"train.dtype": "bfloat16"}),
}
MEASURED_BY = {
    "cpu": "python -m efx.studies.reference RUN RUN RUN --record cpu",
    "gpu": "python -m benchmarks.accelerator --parts characters --text input.txt",
}
TRAIN, HELD_OUT = "train/loss", "eval/loss"
LEVEL = 0.95
COLUMNS = {
    "held-out loss (nats)": ".4f",
    "95% of further seeds": "",
    "training loss (nats)": ".4f",
    "seeds": "",
    "device": "",
}
_SHOWN = 4  # differing settings that a message names
_STEADY = 5  # logged training losses, each of some steps, of which the table shows the mean


# ---- the band ------------------------------------------------------------------------------------


def bands(losses):
    """{step: (low, high) between which a further seed is with a chance of LEVEL or more}; None in
    place of limits for one seed.

    losses: {step: [loss of each seed]}, of the same seeds at all steps. So few seeds may be close
    together at one step by chance: the spread is taken to be that over all steps at least.
    """
    from scipy import stats  # takes half a second

    n = min(map(len, losses.values()))
    if n < 2:
        return dict.fromkeys(losses)
    spreads = {step: statistics.stdev(values) for step, values in losses.items()}
    usual = math.sqrt(statistics.fmean(spread**2 for spread in spreads.values()))
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * math.sqrt(1 + 1 / n)
    limits = {}
    for step, values in losses.items():
        mean, reach = statistics.fmean(values), quantile * max(spreads[step], usual)
        limits[step] = (mean - reach, mean + reach)
    return limits


def at_steps(seeds):
    """{step: [held-out loss of each seed]} of the steps at which all seeds were evaluated."""
    curves = [curves[HELD_OUT] for curves in seeds.values()]
    common = set.intersection(*map(set, curves))
    return {step: [curve[step] for curve in curves] for step in sorted(common, key=int)}


# ---- runs ----------------------------------------------------------------------------------------


def read_run(folder):
    """{settings, text, tokenizer, seed, device, revision, steps, curves} of a run directory."""
    config, record = run_dir.recorded_config(folder), run_dir.run_record(folder)
    if not (io.folder(folder) / run_dir.METRICS_FILE).is_file() or "launches" not in record:
        raise UsageError(f"{folder}: no step has been logged yet")
    rows = read_metrics(folder)
    curves = {
        name: {str(row["step"]): _rounded(row[name]) for row in rows if name in row}
        for name in (TRAIN, HELD_OUT)
    }
    return {
        "settings": points.deciding(config),
        "text": record.get("text"),
        "tokenizer": record.get("tokenizer"),
        "seed": config["seed"],
        "device": ", ".join(dict.fromkeys(map(run_dir.machine_of, record["launches"]))),
        "revision": run_dir.revision_of(record["launches"][-1]),
        "curves": curves,
    }


def _rounded(loss):
    """With as many digits as say something; None stands for what is not finite."""
    return None if loss is None or not math.isfinite(loss) else float(f"{loss:.6g}")


# ---- comparing -----------------------------------------------------------------------------------


def compare(folder, recipes):
    """(name of the run's recipe, lines of text, whether its held-out loss is in the band at all
    steps; None if there is no band) of a run directory. recipes: `curves` of the file."""
    run = read_run(folder)
    name = _recipe_of(folder, run, recipes)
    recipe = recipes[name]
    if recipe is None:
        raise UsageError(
            f"{folder}: there are no curves of its recipe {name!r} yet; measure them with "
            f"`{MEASURED_BY[name]}`"
        )
    for field, words in (("text", "another text"), ("tokenizer", "another tokenizer")):
        if run[field] != recipe[field]:
            raise UsageError(
                f"{folder}: a run of {words} than the recipe {name!r}, so their losses cannot "
                "be compared"
            )
    wanted = at_steps(recipe["seeds"])
    limits_at = bands(wanted)
    found = run["curves"][HELD_OUT]
    shared = [step for step in wanted if step in found]
    if not shared:
        raise UsageError(
            f"{folder}: no held-out loss at any of the steps {', '.join(wanted)} of the recipe "
            f"{name!r}"
        )
    lines = [
        f"{folder}: recipe {name!r} ({recipe['config']}), measured on {recipe['device']}, seeds"
        f" {', '.join(recipe['seeds'])}, revision {recipe['revision'][:9]}",
        f"{'step':>6}  {'this run':>8}  {'mean':>8}  band",
    ]
    outside = []
    for step in shared:
        loss, limits, mean = found[step], limits_at[step], statistics.fmean(wanted[step])
        says, out = _judged(loss, mean, limits)
        outside += [step] * out
        between = f"{limits[0]:.4f} to {limits[1]:.4f}" if limits else "none"
        shown = "no number" if loss is None else f"{loss:.4f}"
        lines.append(f"{step:>6}  {shown:>8}  {mean:8.4f}  {between}: {says}")
    missing = [step for step in wanted if step not in found]
    if missing:
        lines.append(f"no held-out loss of this run at {_steps(missing)}: not compared")
    if outside:
        lines.append(f"NOT as the recipe: outside the band at {_steps(outside)}")
        return name, lines, False
    if len(recipe["seeds"]) < 2:
        lines.append("there is no band with one seed: differences are shown, but not judged")
        return name, lines, None
    lines.append(f"as the recipe: within the band at {_steps(shared)}")
    return name, lines, True


def _judged(loss, mean, limits):
    """(what is said of a loss, whether it is outside of the band)"""
    if loss is None:
        return "NOT FINITE", True
    if limits is None:
        return f"{loss - mean:+.4f} from the one seed", False
    low, high = limits
    if loss > high:
        return f"OUTSIDE, {loss - high:.4f} above", True
    if loss < low:
        return f"OUTSIDE, {low - loss:.4f} below", True
    return "within", False


def _steps(steps):
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(steps)}"


def _recipe_of(folder, run, recipes):
    """The name of the recipe with the settings of a run; UsageError with what differs."""
    differing = {
        name: points.differing_settings(_settings(name, recipe), run["settings"])
        for name, recipe in recipes.items()
    }
    name = min(differing, key=lambda name: len(differing[name]))
    if differing[name]:
        shown = [
            f"config.{key} is {there} in it and {here} in the run"
            for key, there, here in differing[name][:_SHOWN]
        ]
        more = len(differing[name]) - len(shown)
        raise UsageError(
            f"{folder}: matches none of the recipes {', '.join(recipes)}; the nearest is "
            f"{name!r}: {'; '.join(shown)}" + f" and {more} more" * bool(more)
        )
    return name


def _settings(name, recipe):
    """Of a recipe; without curves, those that its config has today."""
    return recipe["settings"] if recipe else todays_settings(name)


def todays_settings(name):
    config, changes = RECIPES[name]
    return points.expected_settings(to_config(load_config(config, changes)))


# ---- the file ------------------------------------------------------------------------------------


def read_curves(path):
    """The result with the curves of recipes; UsageError if it has none."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise UsageError(
            f"--curves={path}: there is no such file; it is {CURVES} in a checkout of efx"
        )
    result = results.read_result(path)
    if not isinstance(result["curves"], dict) or set(result["curves"]) != set(RECIPES):
        raise UsageError(f"--curves={path}: has no curves of the recipes {', '.join(RECIPES)}")
    return result


def record(path, name, folders):
    """Writes the curves of runs as those of a recipe."""
    if name not in RECIPES:
        raise UsageError(
            f"--record={name}: expected one of {', '.join(RECIPES)}{nearest(name, RECIPES)}"
        )
    result = read_curves(path)
    runs = [read_run(folder) for folder in folders]
    first = runs[0]
    for folder, run in zip(folders, runs, strict=True):
        for key, there, here in points.differing_settings(first["settings"], run["settings"]):
            raise UsageError(
                f"{folder}: config.{key} is {here} there and {there} in {folders[0]}; the runs "
                "of a recipe may differ only in their seeds"
            )
        for field in ("text", "tokenizer", "device", "revision"):
            if run[field] != first[field]:
                raise UsageError(f"{folder}: its {field} differs from that of {folders[0]}")
        last, steps = max(map(int, run["curves"][TRAIN])), first["settings"]["steps"]
        if last < steps:
            raise UsageError(f"{folder}: the run is at step {last} of {steps}; finish it first")
        if not all(curve and None not in curve.values() for curve in run["curves"].values()):
            raise UsageError(
                f"{folder}: a loss is missing or not finite, so it cannot be a reference"
            )
    seeds = {str(run["seed"]): run["curves"] for run in runs}
    if len(seeds) < len(runs):
        raise UsageError(f"--record: two runs have the same seed ({', '.join(map(str, folders))})")
    kept = {field: first[field] for field in ("device", "revision", "text", "tokenizer")}
    kept = {"config": RECIPES[name][0], **kept, "settings": first["settings"], "seeds": seeds}
    recipes = result["curves"] | {name: kept}
    measured = [recipe for recipe in recipes.values() if recipe]
    result |= {
        "curves": recipes,
        "seeds": sorted({int(seed) for recipe in measured for seed in recipe["seeds"]}),
        "machine": "; ".join(dict.fromkeys(recipe["device"] for recipe in measured)),
        "revision": ", ".join(dict.fromkeys(recipe["revision"] for recipe in measured)),
        "revision_of": results.FIELDS["revision_of"],
        "columns": COLUMNS,
        "rows": [row for name, recipe in recipes.items() for row in rows_of(name, recipe)],
    }
    results.write_result(pathlib.Path(path), results.checked(path, result))


def rows_of(name, recipe):
    """Rows of the result's table: a recipe's loss at each step with a held-out one."""
    if recipe is None:
        cell = f"not measured yet: `{MEASURED_BY[name]}`"
        return [{"name": name, "cells": {next(iter(COLUMNS)): cell}}]
    rows, losses = [], at_steps(recipe["seeds"])
    for step, limits in bands(losses).items():
        training = [_training(curves[TRAIN], int(step)) for curves in recipe["seeds"].values()]
        between = f"{limits[0]:.4f} to {limits[1]:.4f}" if limits else "one seed has no band"
        cells = (
            tables.summary(losses[step]), between, tables.summary(training),
            ", ".join(recipe["seeds"]), recipe["device"],
        )  # fmt: skip
        row = {"name": f"{name}, step {step}", "cells": dict(zip(COLUMNS, cells, strict=True))}
        rows.append(row)
    return rows


def _training(curve, step):
    """The mean of the last logged training losses until a step, each of which is noisy."""
    logged = [loss for at, loss in curve.items() if int(at) <= step]
    return statistics.fmean(logged[-_STEADY:])


# ---- the command ---------------------------------------------------------------------------------


def main(argv=None):
    parser = cli.Parser("efx.studies.reference", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--curves", default=CURVES, help=f"file of results (default: {CURVES})")
    help = f"write the curves of the runs as those of a recipe: {', '.join(RECIPES)}"
    parser.add_argument("--record", metavar="RECIPE", help=help)
    judged = []
    status = parser.run(lambda arguments: judged.extend(_run(arguments)), argv)
    return status or int(False in judged)


def _run(arguments):
    """Records or compares; yields of each run that is compared whether it is in the band."""
    if arguments.record is not None:
        record(arguments.curves, arguments.record, arguments.runs)
        print(f"{arguments.curves}: recipe {arguments.record!r}, {len(arguments.runs)} seeds")
        return
    recipes = read_curves(arguments.curves)["curves"]
    for folder in arguments.runs:
        _, lines, within = compare(folder, recipes)
        print("\n".join(lines))
        yield within


if __name__ == "__main__":
    sys.exit(main())
