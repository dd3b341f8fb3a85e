"""isoFLOP curves: families of models, each at several sizes and several budgets of training FLOPs.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop.py --workdir runs/isoflop --jobs 2

Comparing two models at equal FLOPs says little if one of them is far from the best size for the
budget. So every family is trained at every size and budget, and a parabola in the logarithm of the
number of parameters,

    loss = a + b (log N - c)^2,

fitted for each family, budget and seed, gives its best size, exp(c), and its loss there, a
(Hoffmann et al. 2022, arXiv 2203.15556, approach 2; Raposo et al. 2024, arXiv 2404.02258, figure
4). If the sizes do not enclose a minimum there is no such number, and the table says so.

A grid file is plain data: `get_grid()` returns

    dict(config="configs/mod.py",                # the config every run starts from
         seeds=(0, 1, 2),
         budgets=(5e11, 1e12),                   # training FLOPs
         families={"dense": {"model.depth_routing.kind": "none"}, ...},  # the first: the baseline
         sizes={"4 blocks": {"model.depth": 4}, ...})                    # three or more

Each run is a separate `python -m efx.main` in WORKDIR; an interrupted study continues where it
stopped. Arguments after `--` go to every run. WORKDIR/isoflop.md has the tables, isoflop.png the
curves and isoflop.json every number.
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
import sys

import numpy as np

from efx import tables
from efx.errors import UsageError
from efx.metrics import quantity
from efx.runfolder import writing
from efx.studies import cli
from efx.studies import sweep as sweep_lib
from efx.tables import mean_and_spread, summary, text

KEYS = ("config", "seeds", "budgets", "families", "sizes")
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "v"))  # line and marker of a family


@dataclasses.dataclass(frozen=True)
class Curve:
    """One family at one budget.

    Attributes:
      parameters, flops: [sizes] parameters; training FLOPs a token by the ledger.
      losses: [sizes, seeds] held-out loss in nats, under the causal decision.
    """

    parameters: np.ndarray
    flops: np.ndarray
    losses: np.ndarray

    def optima(self):
        """[the Optimum of each seed, or None if the sizes enclose no minimum]"""
        return [fit_parabola(self.parameters, self.flops, losses) for losses in self.losses.T]

    def of_means(self):
        """The Optimum of the mean losses, or None."""
        return fit_parabola(self.parameters, self.flops, self.losses.mean(1))


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The vertex of a fitted parabola.

    Attributes:
      parameters, loss: its coordinates, exp(c) and a.
      flops: training FLOPs a token there, interpolated between the sizes.
      residual: root mean square deviation of the losses from the parabola, in nats.
    """

    parameters: float
    loss: float
    flops: float
    residual: float


def fit_parabola(parameters, flops, losses):
    """The Optimum of loss = a + b (log N - c)^2; None if it lies outside the sizes given.

    parameters, flops, losses: one of each size, three sizes or more.
    """
    order = np.argsort(parameters)
    x, y = np.log(np.asarray(parameters, float)[order]), np.asarray(losses, float)[order]
    b, slope, offset = np.polyfit(x - x.mean(), y, 2)
    if b <= 0:
        return None
    c = x.mean() - slope / (2 * b)
    if not x[0] <= c <= x[-1]:
        return None
    return Optimum(
        parameters=float(np.exp(c)),
        loss=float(offset - slope**2 / (4 * b)),
        flops=float(np.exp(np.interp(c, x, np.log(np.asarray(flops, float)[order])))),
        residual=float(np.sqrt(np.mean((np.polyval((b, slope, offset), x - x.mean()) - y) ** 2))),
    )


def load_grid(path):
    """The dict of a grid file, checked."""
    grid = sweep_lib.load_file(path, "grid", KEYS)
    sweep_lib.check_numbers(path, grid, "budgets", _is_budget, "(1e12, 2e12)")
    for key in ("families", "sizes"):
        sweep_lib.check_changes(path, grid, key)
    if len(grid["sizes"]) < 3:
        raise UsageError(f"{path}: {len(grid['sizes'])} sizes; a parabola needs three or more")
    named = [quantity(budget, "FLOPs") for budget in grid["budgets"]]
    if len(set(named)) < len(named):
        raise UsageError(
            f"{path}: budgets={grid['budgets']}: two of them are {max(named, key=named.count)}"
        )
    sweep_lib.check_folders(path, as_sweep(grid))
    return grid


def _is_budget(number):
    return type(number) in (int, float) and 0 < number < math.inf


def run_name(family, size, budget):
    """The name of the runs of one point of the grid, without the seed."""
    return f"{family}, {size}, {quantity(budget, 'FLOPs')}"


def as_sweep(grid):
    """The grid as a sweep; the runs with few FLOPs come first."""
    points = itertools.product(sorted(grid["budgets"]), grid["sizes"], grid["families"])
    return {
        "config": grid["config"],
        "seeds": grid["seeds"],
        "equal": "",  # each run sets its budget
        "runs": {
            run_name(family, size, budget): {
                **grid["sizes"][size],
                **grid["families"][family],
                "steps": 0,
                "train_flops": budget,
            }
            for budget, size, family in points
        },
        "columns": {},
    }


def collect_curves(grid, workdir):
    """{(budget, family): Curve} of finished runs, budgets in their order."""
    curves = {}
    for budget, family in itertools.product(sorted(grid["budgets"]), grid["families"]):
        rows = [
            [
                _final_row(sweep_lib.folder(workdir, run_name(family, size, budget), seed), budget)
                for seed in grid["seeds"]
            ]
            for size in grid["sizes"]
        ]
        curves[budget, family] = Curve(
            parameters=np.array([row[0]["parameters"] for row in rows]),
            flops=np.array([row[0]["flops"] / row[0]["tokens"] for row in rows]),
            losses=np.array([[seed["eval/loss"] for seed in row] for row in rows]),
        )
    return curves


def _final_row(run, budget):
    """The last values of a run's metrics; UsageError unless it used its budget and was evaluated.

    The last step is the one that reaches the budget or comes closest to it.
    """
    final_row = sweep_lib.final_row(run)
    if not 0.9 <= final_row.get("flops", 0) / budget <= 1.1:
        used = quantity(final_row.get("flops", 0), "FLOPs")
        raise UsageError(f"{run}: {used} of training, its budget is {quantity(budget, 'FLOPs')}")
    if final_row.get("eval/loss") is None:
        raise UsageError(f"{run}: no held-out loss; the run has not finished, or its loss is NaN")
    return final_row


# Columns of the table of optima, and the formats of their numbers.
FORMS = {
    "least measured at": "text",
    "least measured": ".4f",
    "loss at the best size": ".4f",
    "its parameters": "quantity",
    "its FLOPs a token": "FLOPs",
    "residual": ".3f",
    "loss over the baseline's": ".4f",
    "parameters / the baseline's": ".2f",
    "FLOPs a token / the baseline's": ".2f",
}


def optimum_cells(sizes, curve, base):
    """{column: cell} of a row of the table of optima: the fit, and the fit against the baseline's.

    If the sizes do not enclose a minimum for every seed, both are fits of the mean losses over
    seeds, with a note.
    """
    best = int(curve.losses.mean(1).argmin())
    optima, base_optima, note = curve.optima(), base.optima(), ""
    cells = {
        "least measured at": list(sizes)[best],
        "least measured": summary(curve.losses[best].tolist()),
    }
    if None in optima:
        note = f"enclosed in {len(optima) - optima.count(None)} of {len(optima)} seeds"
        optima = [curve.of_means()]
        if None in optima:
            return cells | {"loss at the best size": note}
        note = f"fit of the means; {note}"
    cells |= {
        "loss at the best size": summary([optimum.loss for optimum in optima])
        | ({"note": note} if note else {}),
        "its parameters": statistics.geometric_mean([optimum.parameters for optimum in optima]),
        "its FLOPs a token": statistics.geometric_mean([optimum.flops for optimum in optima]),
        "residual": statistics.fmean([optimum.residual for optimum in optima]),
    }
    if None in base_optima or len(optima) < len(base_optima):
        optima, base_optima = [curve.of_means()], [base.of_means()]
    if curve is base or None in optima or None in base_optima:
        return cells
    pairs = list(zip(optima, base_optima, strict=True))
    sizes = statistics.geometric_mean(
        [optimum.parameters / baseline.parameters for optimum, baseline in pairs]
    )
    flops = statistics.geometric_mean(
        [optimum.flops / baseline.flops for optimum, baseline in pairs]
    )
    return cells | {
        "loss over the baseline's": summary(
            [optimum.loss - baseline.loss for optimum, baseline in pairs]
        ),
        "parameters / the baseline's": sizes,
        "FLOPs a token / the baseline's": flops,
    }


def optima_table(sizes, curves):
    """{(budget, family): {column: cell}}; the baseline is the first family of each budget."""
    base = next(family for _, family in curves)
    return {
        (budget, family): optimum_cells(sizes, curve, curves[budget, base])
        for (budget, family), curve in curves.items()
    }


def markdown(grid, curves, command, split):
    """Both tables as Markdown, with config, seeds, scored text and command below them."""
    budgets, families, sizes = sorted(grid["budgets"]), list(grid["families"]), list(grid["sizes"])
    points = []
    for size, (number, family) in itertools.product(range(len(sizes)), enumerate(families)):
        smallest_budget = curves[budgets[0], family]
        points.append(
            [
                sizes[size] if not number else "",
                family,
                quantity(smallest_budget.parameters[size]),
                quantity(smallest_budget.flops[size], "FLOPs"),
                *(mean_and_spread(list(curves[budget, family].losses[size])) for budget in budgets),
            ]
        )
    named = [quantity(budget, "FLOPs") for budget in budgets]
    titles = ["size", "family", "parameters", "FLOPs a token", *named]
    rows = [
        [
            quantity(budget, "FLOPs") if family == families[0] else "",
            family,
            *(text(cells.get(title), form) for title, form in FORMS.items()),
        ]
        for (budget, family), cells in optima_table(sizes, curves).items()
    ]
    seeds = ", ".join(str(seed) for seed in grid["seeds"])
    return (
        f"Held-out loss (nats):\n\n{tables.markdown(titles, points)}\n\n"
        f"The optimum of each curve, the baseline is {families[0]}:\n\n"
        f"{tables.markdown(['budget', 'family', *FORMS], rows)}\n\n"
        f"`{grid['config']}`; seeds {seeds}: mean ± standard deviation, differences and ratios by "
        f"pairs of seeds, without a spread of fits of the means; {split}; FLOPs of "
        f"training. Command: `{command}`\n"
    )


def as_data(grid, curves):
    """Everything as plain data: [{budget, family, sizes, parameters, ..., optima}]."""
    return [
        {
            "budget": budget,
            "family": family,
            "sizes": list(grid["sizes"]),
            "parameters": curve.parameters.tolist(),
            "training_flops_per_token": curve.flops.tolist(),
            "losses": curve.losses.tolist(),
            "optima": [optimum and dataclasses.asdict(optimum) for optimum in curve.optima()],
        }
        for (budget, family), curve in curves.items()
    ]


def from_data(data):
    """(sizes, curves) of the data of `as_data`."""
    curves = {
        (curve["budget"], curve["family"]): Curve(
            parameters=np.array(curve["parameters"]),
            flops=np.array(curve["training_flops_per_token"]),
            losses=np.array(curve["losses"]),
        )
        for curve in data
    }
    return data[0]["sizes"], curves


def draw(curves, path):
    """The curves: a colour a budget, a line style a family, optima as stars."""
    import matplotlib.figure  # takes half a second
    from matplotlib import colormaps

    figure = matplotlib.figure.Figure((8, 5), layout="constrained")
    axis = figure.subplots()
    budgets = list(dict.fromkeys(budget for budget, _ in curves))
    families = list(dict.fromkeys(family for _, family in curves))
    colours = colormaps["viridis"](np.linspace(0.0, 0.85, len(budgets)))
    styles = dict(zip(families, itertools.cycle(STYLES)))
    for (budget, family), curve in curves.items():
        colour, (line_style, marker) = colours[budgets.index(budget)], styles[family]
        means, spreads = curve.losses.mean(1), curve.losses.std(1, ddof=curve.losses.shape[1] > 1)
        axis.errorbar(
            curve.parameters, means, spreads, color=colour, linestyle="", marker=marker, capsize=2
        )
        x = np.log(curve.parameters)
        fine = np.linspace(x.min(), x.max(), 100)
        parabola = np.polyval(np.polyfit(x - x.mean(), means, 2), fine - x.mean())
        label = f"{family}, {quantity(budget, 'FLOPs')}"
        axis.plot(
            np.exp(fine), parabola, color=colour, linestyle=line_style, marker="", label=label
        )
        if best := curve.of_means():
            star = {"marker": "*", "markersize": 14, "markeredgecolor": "black"}
            axis.plot(best.parameters, best.loss, color=colour, **star)
    axis.set_xscale("log")
    ticks = next(iter(curves.values())).parameters
    axis.set_xticks(ticks, [quantity(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("parameters")
    axis.set_ylabel("held-out loss (nats)")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = cli.Parser("efx.studies.isoflop", __doc__)
    parser.add_argument("--grid", required=True, help="grid file, or the name of one of efx's")
    parser.add_runs(jobs="runs")
    parser.add_argument("--table-only", action="store_true", help="only read finished runs")
    return parser.run(study, argv)


def study(arguments):
    """Makes the runs, then tables, curves and numbers."""
    grid, top = load_grid(arguments.grid), pathlib.Path(arguments.workdir)
    if not arguments.table_only:
        sweep_lib.run_sweep(as_sweep(grid), top, arguments.extra, arguments.jobs)
    curves = collect_curves(grid, top)
    text = markdown(grid, curves, arguments.command, sweep_lib.scored_text(as_sweep(grid), top))
    tables.save(top, "isoflop", text, as_data(grid, curves))
    with writing(top):
        draw(curves, top / "isoflop.png")


if __name__ == "__main__":
    sys.exit(main())
