"""The grid of a study: which runs there are, and the settings of each."""

import itertools
import math
import pathlib
from typing import NamedTuple

from efx.errors import UsageError
from efx.logging import quantity
from efx.studies import cli
from efx.studies import sweep as sweep_lib

KEYS = ("config", "seeds", "budgets", "families", "sizes")
OPTIONAL = {
    "learning_rates": (), "rates_budget": None, "timed_budgets": None, "sizes_at": None,
    "against": (), "fit_within": None, "seeds_at": None, "without": (),
}  # fmt: skip
_LEAST_SIZES = 3
RATE = "optim.learning_rate"
_NO_LIMIT = 10**9


class Run(NamedTuple):
    """One run of a grid; rate: None where the config decides the learning rate."""

    family: str
    size: str
    budget: float
    seed: int
    rate: float | None

    @property
    def name(self):
        """What the run is called, without the seed."""
        rate = [] if self.rate is None else [f"rate {self.rate:g}"]
        return ", ".join([self.family, self.size, quantity(self.budget, "FLOPs"), *rate])


def load_grid(path):
    """The dict of a grid file, checked: with all of KEYS and OPTIONAL, budgets ascending, `seeds` a
    dict, {family: {size: its seeds}}, and `seeds_at` one of those for every budget."""
    grid = OPTIONAL | sweep_lib.load_file(path, "grid", KEYS, optional=OPTIONAL)
    sweep_lib.check_numbers(path, grid, "budgets", _is_positive, "(1e12, 2e12)")
    for key in ("families", "sizes"):
        sweep_lib.check_changes(path, grid, key)
    if len(grid["sizes"]) < _LEAST_SIZES:
        raise UsageError(f"{path}: {len(grid['sizes'])} sizes; a parabola needs at least three")
    named = [quantity(budget, "FLOPs") for budget in grid["budgets"]]
    if len(set(named)) < len(named):
        raise UsageError(
            f"{path}: budgets={grid['budgets']}: two of them are {max(named, key=named.count)}"
        )
    for family in grid["families"]:
        for size in grid["sizes"]:
            _family_changes(path, grid, family, size)
    grid = grid | {"seeds": _seeds(path, grid, "seeds", grid["seeds"])}
    grid |= {"budgets": tuple(sorted(grid["budgets"]))}
    grid |= {"seeds_at": _seeds_at(path, grid)}
    grid |= _rates(path, grid)
    _check_tried(path, grid)
    grid |= {"timed_budgets": _timed(path, grid), "sizes_at": _sizes_at(path, grid)}
    _check_fits(path, grid)
    for of_families in (grid["seeds"], *grid["seeds_at"].values()):
        for of_sizes in of_families.values():
            for seeds in of_sizes.values():
                sweep_lib.check_folders(path, {"runs": {}, "seeds": seeds})
    names = dict.fromkeys(run.name for run in all_runs(grid))
    sweep_lib.check_folders(path, {"runs": names, "seeds": ()})
    return grid


def up_to(grid, most):
    """The grid with its budgets up to `most` FLOPs alone; UsageError if that leaves none."""
    budgets = tuple(budget for budget in grid["budgets"] if budget <= most)
    needed = max(grid["rates_budget"] if grid["learning_rates"] else 0, grid["budgets"][0])
    if most < needed:
        raise UsageError(f"--up-to={most:g}: must include the budget of {needed:g} FLOPs")
    return grid | {"budgets": budgets}


def _is_positive(number):
    return type(number) in (int, float) and 0 < number < math.inf


def _seeds(path, grid, named, seeds):
    """{family: {size: seeds}} of a grid's `seeds`, which may be the same for all of either; named:
    the key that they are the value of."""
    families, given = grid["families"], seeds
    if not isinstance(seeds, dict):
        seeds = dict.fromkeys(families, seeds)
    if set(seeds) != set(families):
        raise UsageError(
            f"{path}: {named}={sweep_lib.shown(given)}: expected numbers, or numbers for each"
            f" of the families {', '.join(families)}"
        )
    checked = {}
    for family in families:
        of_sizes = seeds[family]
        if not isinstance(of_sizes, dict):
            of_sizes = dict.fromkeys(grid["sizes"], of_sizes)
        if set(of_sizes) != set(grid["sizes"]):
            raise UsageError(
                f"{path}: {named}[{family!r}]={sweep_lib.shown(of_sizes)}: expected numbers, or "
                f"numbers for each of the sizes {', '.join(grid['sizes'])}"
            )
        # A size without seeds is one at which the family is not trained.
        for own in of_sizes.values():
            if own != () or not any(of_sizes.values()):
                sweep_lib.check_seeds(path, {"seeds": own})
        checked[family] = {size: tuple(of_sizes[size]) for size in grid["sizes"]}
    return checked


def _seeds_at(path, grid):
    """{budget: {family: {size: seeds}}} of a grid's `seeds_at` (default: `seeds` at all)."""
    at, budgets = grid["seeds_at"], grid["budgets"]
    at = {} if at is None else at
    if not isinstance(at, dict) or not all(budget in budgets for budget in at):
        raise UsageError(
            f"{path}: seeds_at={sweep_lib.shown(at)}: expected seeds for some of"
            f" budgets={budgets}, as in {{{budgets[-1]:g}: (0, 1)}}"
        )
    return {
        budget: _seeds(path, grid, f"seeds_at[{budget:g}]", at[budget])
        if budget in at
        else grid["seeds"]
        for budget in budgets
    }


def _rates(path, grid):
    """The grid's checked `learning_rates`, as {size: rates}, {} for none, and `rates_budget`
    (default: the smallest budget)."""
    rates, budget = grid["learning_rates"], grid["rates_budget"]
    if rates:
        rates = _rates_of_sizes(path, grid, rates)
        for key in ("families", "sizes"):
            for name, changes in grid[key].items():
                if RATE in changes:
                    raise UsageError(
                        f"{path}: {key}[{name!r}] sets {RATE}, but learning_rates lists the "
                        "rates to try; leave one of them out"
                    )
    elif budget is not None:
        raise UsageError(f"{path}: rates_budget={budget!r}: needs learning_rates to try")
    if budget is not None and budget not in grid["budgets"]:
        raise UsageError(
            f"{path}: rates_budget={budget!r}: expected one of budgets={grid['budgets']}"
        )
    return {"learning_rates": rates or {}, "rates_budget": budget or grid["budgets"][0]}


def _check_tried(path, grid):
    """UsageError for a family that is trained at a size whose learning rates are not tried with it,
    since the budget of the rates has no seed of it there."""
    if not grid["learning_rates"]:
        return
    tried = grid["seeds_at"][grid["rates_budget"]]
    places = itertools.product(grid["budgets"], grid["families"], grid["sizes"])
    for budget, family, size in places:
        if grid["seeds_at"][budget][family][size] and not tried[family][size]:
            raise UsageError(
                f"{path}: {family}, {size}, has seeds at {budget:g} FLOPs but none at "
                f"{grid['rates_budget']:g}, the budget of the learning rates; add one there"
            )


def _rates_of_sizes(path, grid, given):
    """{size: rates} of a grid's `learning_rates`, which may be the same for all sizes."""
    sizes = grid["sizes"]
    of_sizes = given if isinstance(given, dict) else dict.fromkeys(sizes, given)
    if set(of_sizes) != set(sizes):
        raise UsageError(
            f"{path}: learning_rates={sweep_lib.shown(given)}: expected numbers, or numbers for"
            f" each of the sizes {', '.join(sizes)}"
        )
    for rates in of_sizes.values():
        found = {"learning_rates": rates}
        sweep_lib.check_numbers(path, found, "learning_rates", _is_positive, "(1e-3, 2e-3)")
        if len({f"{rate:g}" for rate in rates}) < max(2, len(rates)):
            raise UsageError(
                f"{path}: learning_rates={rates}: expected two or more different rates"
            )
    return {size: tuple(of_sizes[size]) for size in sizes}


def _timed(path, grid):
    """The budgets whose seconds count (default: all)."""
    timed, budgets = grid["timed_budgets"], grid["budgets"]
    if timed is None:
        return budgets
    if not isinstance(timed, tuple | list) or not all(budget in budgets for budget in timed):
        raise UsageError(
            f"{path}: timed_budgets={timed!r}: expected some of budgets={budgets}, as in"
            f" ({budgets[0]:g},), or () for none"
        )
    return tuple(timed)


def _check_fits(path, grid):
    """UsageError for wrong `against`, `fit_within` or `without`."""
    against, within, families = grid["against"], grid["fit_within"], grid["families"]
    without = grid["without"]
    if not isinstance(without, tuple | list) or any(name in [*families] for name in without):
        raise UsageError(
            f"{path}: without={sweep_lib.shown(without)}: expected names other than those of "
            f"the families {', '.join(families)}"
        )
    if not isinstance(against, tuple | list) or not all(name in [*families] for name in against):
        raise UsageError(
            f"{path}: against={sweep_lib.shown(against)}: expected some of the families"
            f" {', '.join(families)}"
        )
    if within is not None and not (_is_positive(within) and within > 1):
        raise UsageError(f"{path}: fit_within={sweep_lib.shown(within)}: expected a number above 1")


def _sizes_at(path, grid):
    """{budget: its sizes, in the order of the grid} of a grid's `sizes_at` (default: all)."""
    at, sizes = grid["sizes_at"], tuple(grid["sizes"])
    at = {} if at is None else at
    right = isinstance(at, dict) and all(budget in grid["budgets"] for budget in at)
    for budget, some in at.items() if right else ():
        known = isinstance(some, tuple | list) and all(size in sizes for size in some)
        if not known or len({*some}) < max(_LEAST_SIZES, len(some)):
            raise UsageError(
                f"{path}: sizes_at[{budget:g}]={sweep_lib.shown(some)}: expected three or more of"
                f" the sizes {', '.join(sizes)}"
            )
    if not right:
        raise UsageError(
            f"{path}: sizes_at={sweep_lib.shown(at)}: expected sizes for some of"
            f" budgets={grid['budgets']}, as in {{{grid['budgets'][-1]:g}: {sizes[-3:]}}}"
        )
    found = {
        budget: tuple(size for size in sizes if size in at.get(budget, sizes))
        for budget in grid["budgets"]
    }
    if grid["learning_rates"] and found[grid["rates_budget"]] != sizes:
        raise UsageError(
            f"{path}: sizes_at[{grid['rates_budget']:g}] leaves out sizes, but the learning "
            "rate of each size is found at that budget"
        )
    for size in sizes:
        if not any(size in some for some in found.values()):
            raise UsageError(f"{path}: sizes_at leaves out {size} at every budget")
    return found


def _family_changes(path, grid, family, size):
    """The settings that a family changes at a size: a value that is a dict has one for each."""
    changes = {}
    for key, value in grid["families"][family].items():
        if isinstance(value, dict):
            if set(value) != set(grid["sizes"]):
                raise UsageError(
                    f"{path}: families[{family!r}][{key!r}]={sweep_lib.shown(value)}: expected one"
                    f" value, or one for each of the sizes {', '.join(grid['sizes'])}"
                )
            value = value[size]
        changes[key] = value
    return changes


def rate_runs(grid):
    """The runs that find the learning rate of each family at each size; none without rates."""
    budget = grid["rates_budget"]
    return [
        Run(family, size, budget, seeds[0], rate)
        for size in grid["sizes"]
        for family in grid["families"]
        for seeds in [grid["seeds_at"][budget][family][size]]
        if seeds
        for rate in grid["learning_rates"].get(size, ())
    ]


def runs_of(grid, best_rates):
    """The runs whose losses are fitted, few FLOPs first, then first seeds first: a study that is
    interrupted has whole budgets.

    best_rates: {(family, size): rate}; {} for a grid without learning rates.
    """
    most = max(
        len(seeds)
        for of_families in grid["seeds_at"].values()
        for of_sizes in of_families.values()
        for seeds in of_sizes.values()
    )
    return [
        Run(family, size, budget, seeds[number], best_rates.get((family, size)))
        for budget, number, size, family in itertools.product(
            grid["budgets"], range(most), grid["sizes"], grid["families"]
        )
        for seeds in [grid["seeds_at"][budget][family][size]]
        if number < len(seeds) and size in grid["sizes_at"][budget]
    ]


def all_runs(grid):
    """Every run that there can be, whatever the best rates are."""
    if not grid["learning_rates"]:
        return runs_of(grid, {})
    return [
        run
        for size, rates in grid["learning_rates"].items()
        for rate in rates
        for run in runs_of(grid, {(family, size): rate for family in grid["families"]})
        if run.size == size
    ]


def changes(grid, run):
    """{setting: value} of what a run of the grid changes in its config, but for the seed."""
    changes = {
        **grid["sizes"][run.size],
        **_family_changes("the grid", grid, run.family, run.size),
        "steps": 0,
        "train_flops": run.budget,
    }
    if run.rate is not None:
        # A rate that is too high is to be seen in the loss, not to end the study.
        changes |= {RATE: run.rate, "train.max_nonfinite": _NO_LIMIT}
    return changes


def folder(workdir, run):
    return sweep_lib.folder(workdir, run.name, run.seed)


def command(grid, workdir, run, extra=()):
    """Arguments of `python -m efx.main` for a run."""
    sweep = {"config": grid["config"], "runs": {run.name: changes(grid, run)}}
    return sweep_lib.command(sweep, workdir, run.name, run.seed, {}, list(extra))


def configs(grid, workdir, runs, extra=()):
    """{run: its checked config}; UsageError, before anything trains, for a run that `efx.main`
    would refuse."""
    cli.check_extra(extra)
    return {
        run: cli.check_command(run.name, command(grid, pathlib.Path(workdir), run, extra))
        for run in runs
    }
