"""What one family loses or gains against others at each training budget, from published results.

Of each family the size counts that has the least mean loss of those with three seeds or more, and
differences are by pairs of seeds, with 95% intervals by Student's t. A result of this kind
(`efx.studies.results`) has the field

    derived   family: the one that is compared; over: {title: another family};
              budgets: [{name, flops, result}], result: the name of the file whose runs count;
              and size, where its rows do not tell it
"""

import re

import numpy as np

from efx.errors import UsageError
from efx.logging import tables
from efx.studies import plot
from efx.studies.isoflop.report import LEVEL

_SEEDS = 3  # that a size must have to be compared
LOSS, SIZE = "held-out loss (nats)", "size"


def check(path, derived):
    """UsageError unless the field `derived` of a file has all that it needs."""
    needed = {"family": derived, "over": derived, "budgets": derived}
    for number, budget in enumerate(derived.get("budgets", ())):
        needed |= {f"{key} of budget {number}": budget for key in ("name", "flops", "result")}
    for name, where in needed.items():
        if name.split(" of ")[0] not in where:
            raise UsageError(f"{path}: derived lacks {name}")


def columns(derived):
    """{title: format} of a result's table."""
    return {SIZE: "text", LOSS: ".3f", **{over(title): ".3f" for title in derived["over"]}}


def over(title):
    """The column of the difference from a family that is called so."""
    return f"over {title}"


def rows(derived, results):
    """The rows of a result, a budget each.

    Args:
      results: {name: result}.
    """
    import scipy.stats  # takes half a second

    made = []
    for budget in derived["budgets"]:
        result = results.get(budget["result"])
        if result is None:
            raise UsageError(f"derived names {budget['result']!r}, not a result")

        size, losses = _best(result, derived["family"], budget)
        cells = {SIZE: size, LOSS: tables.summary(losses.values())}
        for title, family in derived["over"].items():
            _, others = _best(result, family, budget)
            pairs = [loss - others[seed] for seed, loss in losses.items() if seed in others]
            if len(pairs) < _SEEDS:
                raise UsageError(
                    f"derived, {budget['name']}: {derived['family']!r} and {family!r} have fewer"
                    f" than {_SEEDS} seeds in common"
                )
            interval = scipy.stats.ttest_1samp(pairs, 0).confidence_interval(LEVEL / 100)
            cells[over(title)] = {
                "mean": float(np.mean(pairs)),
                "interval": [float(end) for end in interval],
                "values": pairs,
            }
        made.append({"name": budget["name"], "cells": cells})
    return made


def _losses(result, family, budget):
    """{size: {seed: loss}} of a family's runs with a budget."""
    found = {}
    if result["study"]:
        for point in result["study"]["points"]:
            if (point["family"], point["budget"]) == (family, budget["flops"]) and point["fitted"]:
                found.setdefault(point["size"], {})[point["seed"]] = point["loss"]
        return found
    for row in result["rows"]:  # of a sweep at this budget: `family`, or `family, SIZE`
        if named := re.fullmatch(rf"{re.escape(family)}(?:, (\d+ wide))?", row["name"]):
            values = row["cells"][LOSS]["values"]
            found[named[1] or budget.get("size", "")] = dict(
                zip(result["seeds"], values, strict=True)
            )
    return found


def _best(result, family, budget):
    """(size, {seed: loss}) of a family's size with the least mean loss."""
    losses = _losses(result, family, budget)
    complete = {size: of for size, of in losses.items() if len(of) >= _SEEDS}
    if not complete:
        raise UsageError(f"derived, {budget['name']}: no size of {family!r} has {_SEEDS} seeds")
    size = min(complete, key=lambda size: np.mean([*complete[size].values()]))
    return size, complete[size]


def draw(result, path):
    """A picture of the differences over the budgets: each pair of seeds, mean and interval."""
    import matplotlib.figure

    derived = result["derived"]
    flops = np.array([budget["flops"] for budget in derived["budgets"]])
    figure = matplotlib.figure.Figure((8, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color="0.6", linestyle="--", linewidth=1, zorder=0)
    shifts = np.geomspace(0.94, 1 / 0.94, len(derived["over"]))
    colours = ("tab:blue", "tab:orange", "tab:green")
    for shift, colour, title in zip(shifts, colours, derived["over"], strict=False):
        cells = [row["cells"][over(title)] for row in result["rows"]]
        means = np.array([cell["mean"] for cell in cells])
        ends = np.array([cell["interval"] for cell in cells]).T
        around = np.abs(ends - means)
        axis.errorbar(
            flops * shift, means, yerr=around, color=colour, marker="o", capsize=3, linestyle="",
            label=over(title),
        )  # fmt: skip
        for x, cell in zip(flops * shift, cells, strict=True):
            axis.plot([x] * len(cell["values"]), cell["values"], ".", color=colour, alpha=0.5)
    axis.set_xscale("log")
    axis.set_xticks(flops, [f"{number / 1e12:,g}" for number in flops])
    axis.minorticks_off()
    axis.set_xlabel("training budget (TFLOPs)")
    axis.set_ylabel(f"loss of {derived['family']} less that of others (nats)")
    axis.annotate("worse", (0.005, 0.97), xycoords="axes fraction", va="top", color="0.4")
    axis.annotate("better", (0.005, 0.03), xycoords="axes fraction", va="bottom", color="0.4")
    axis.legend(frameon=False)
    plot.save(figure, path, dpi=120)
