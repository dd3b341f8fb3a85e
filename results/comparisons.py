"""Compute `comparisons.csv` and its picture from the other files of results/.

    python -m results.comparisons

A row is the mean of `measure` of `name` minus that of `against`, each at its best size of three
seeds or more. To add one, append a row with the page that holds it, its files, budget, measure,
name and against. Pairs that differ in the selection of tokens alone are paired by seed; all others
have Welch's intervals. `holm_p` corrects p for the comparisons of the page.
"""

import dataclasses
import math
import pathlib

import numpy as np
import pandas as pd

from efx.logging import tables
from efx.studies import statistics

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MIN_SEEDS = 3
# Seeds that selected the learning rates do not estimate the loss as well.
RATES_SELECTED_ON = {"mod_evidence_own_rates": 0}
INPUTS = ["page", "files", "budget", "measure", "name", "against"]


@dataclasses.dataclass
class Model:
    """A family at one size. runs: a row a seed; None if only means are published."""

    size: str
    loss: float
    values: tuple  # mean, standard deviation, number of seeds
    runs: pd.DataFrame | None = None


def models(file, budget, measure, family):
    """Yield the family's Models in a file, at one budget or, if it is NaN, at all."""
    table, _ = tables.read_csv(RESULTS / f"{file}.csv")
    table = table[table["name" if "name" in table else "family"] == family]
    if not pd.isna(budget):
        table = table[table.budget == budget]
    if "seed" not in table:
        for _, row in table.iterrows():
            values = row[measure], row[f"{measure}_std"], row.seeds
            yield Model(row.get("size", math.nan), row.get("loss", row[measure]), values)
        return
    table = table[table.seed != RATES_SELECTED_ON.get(file)]
    keys = [key for key in ("size", "rate") if key in table]
    for _, runs in table.groupby(keys, dropna=False):
        # A diverged seed counts.
        values = runs[measure].mean(skipna=False), runs[measure].std(skipna=False), len(runs)
        loss = runs.loss.fillna(math.inf).mean()
        yield Model(runs["size"].iloc[0], loss, values, runs)


def best(files, budget, measure, family):
    """Return the Model of lowest loss among those with enough seeds."""
    sizes = [each for file in files.split() for each in models(file, budget, measure, family)]
    return min((each for each in sizes if each.values[2] >= MIN_SEEDS), key=lambda each: each.loss)


def differ_in_selection_alone(a, b):
    """Whether two Models share shape, learning rate, seeds and order of the text."""
    if a.runs is None or b.runs is None or not {"parameters", "tokens"} <= {*a.runs}:
        return False
    same = np.array_equal(a.runs.seed, b.runs.seed)
    same = same and np.array_equal(a.runs.rate, b.runs.rate, equal_nan=True)
    close = [np.allclose(a.runs[key], b.runs[key], rtol=0.01) for key in ("parameters", "tokens")]
    return same and all(close)


def compare(row):
    """Return the columns of one comparison."""
    a, b = (best(row.files, row.budget, row.measure, row[key]) for key in ("name", "against"))
    columns = dict(row)
    for prefix, model in (("", a), ("against_", b)):
        names = f"{prefix}size", f"{prefix}mean", f"{prefix}std", f"{prefix}seeds"
        columns |= dict(zip(names, (model.size, *model.values), strict=True))
    if differ_in_selection_alone(a, b):
        paired = statistics.paired_difference(a.runs[row.measure], b.runs[row.measure])
        return columns | {"test": "paired"} | paired
    return columns | {"test": "Welch"} | statistics.difference(a.values, b.values)


def comparisons():
    """Return the table of comparisons.csv with new numbers; its rows remain."""
    rows, _ = tables.read_csv(RESULTS / "comparisons.csv")
    table = pd.DataFrame([compare(row) for _, row in rows[INPUTS].iterrows()])
    pages = table.groupby("page").p
    table["holm_p"] = pages.transform(statistics.holm)
    table["comparisons"] = pages.transform("size")
    return table.round(4)


def draw(table, path):
    """A picture of the differences of Mixture-of-Depths and dense models by budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    groups = table[table.page == "mod_by_budget"].groupby("against")
    for offset, (family, rows) in zip((0.96, 1.04), groups, strict=True):
        errors = [rows.difference - rows.low, rows.high - rows.difference]
        label = f"minus {family}"
        axes.errorbar(
            rows.budget * offset, rows.difference, errors, fmt="o", capsize=3, label=label
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("MoD loss minus baseline loss (nats)")
    axes.set_title("Above 0 the baseline is better. Bars: Welch's 95% intervals, uncorrected")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    computed = comparisons()
    header = tables.read_csv(RESULTS / "comparisons.csv")[1]
    tables.write_csv(RESULTS / "comparisons.csv", computed, header)
    draw(computed, ROOT / "docs/images/mod_by_budget.png")
    print(computed.drop(columns=["size", "against_size"]).to_string(index=False))
