"""isoFLOP curves: families of models at several sizes and budgets of training FLOPs.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop.py --workdir runs/isoflop --jobs 2

A comparison at equal FLOPs says little if one model is far from its best size. So every family is
trained at every size and budget, and its best size is found by parabolas and by a law
(`efx.studies.scaling`). A grid file is plain data: `get_grid()` returns

    dict(config="configs/mod.py",                # every run starts from it
         seeds=(0, 1, 2),                        # or a function: see below
         budgets=(5e11, 1e12),                   # training FLOPs
         families={"dense": {"model.depth_routing.kind": "none"}, ...},  # the baseline first
         sizes={"4 blocks": {"model.depth": 4}, ...},
         learning_rates=(1e-3, 2e-3),            # optional: see below
         rate_seed=9,                            # seed that selects the learning rates
         fit_within=5.0,                         # optional: fit sizes within 5 times the best
         against=("dense",))                     # optional: further families to compare with

A family's setting may be a dict with a value for each size. seeds(family, size, budget) returns the
seeds of a point, or None for no run. With learning_rates (a tuple, or one for each size) the seed
rate_seed tries all of them at each point, and the other seeds use the best; a point with seeds ()
only tries them.

WORKDIR gets points.csv (a row for each run, those of rate_seed included), optima.csv,
differences.csv, table.md and curves.png. Finished runs are not repeated. Arguments
after `--` go to every run. `--grid FILE:PART` calls `get_grid("PART")`.

Columns. points: budget and flops are training FLOPs, planned and used; loss is held-out, in nats;
repeat_gain: nats that the repeat of a row of random tokens costs less (config.evaluate
.repeated_rows); text, tokenizer, settings: hashes. optima: method is "measured" (the best size that
was trained; std over seeds), "parabola" or "law"; _low and _high end 95% intervals of the law;
speedup_flops: FLOPs that the baseline needs for this loss by its law, over those of the budget.
differences: the loss of `family` minus that of `against`, each at its best size; p: of Welch's test
(measured only); equivalence_p: of two one-sided tests of a difference within 0.02 nats.
"""

import sys

import numpy as np
import pandas as pd

from efx import io
from efx.errors import UsageError
from efx.logging import quantity, tables
from efx.studies import cli, scaling
from efx.studies import runs as runs_lib
from efx.studies.statistics import difference
from efx.studies.sweep import check_seeds, load_file

KEYS = ("config", "seeds", "budgets", "families", "sizes")
OPTIONAL = {"learning_rates": (), "rate_seed": None, "fit_within": None, "against": ()}
RATE = "optim.learning_rate"
POINT = ["family", "size", "budget", "rate", "seed", "parameters", "tokens", "flops", "seconds",
         "loss", "repeat_gain"]  # fmt: skip
PROVENANCE = ["text", "tokenizer", "settings", "machine", "revision"]
METRICS = {"eval/loss": "loss", "eval/repeated/gain": "repeat_gain"}
DRAWS = 300


# ---- the grid ----------------------------------------------------------------------------------


def load_grid(source):
    """Return the checked dict of a grid file; `seeds` is a function afterwards."""
    where = f"--grid={source}"
    grid = OPTIONAL | load_file("grid", source, KEYS, OPTIONAL)
    seeds, sizes, rates = grid["seeds"], grid["sizes"], grid["learning_rates"]
    kinds = {"families": dict, "sizes": dict, "budgets": (tuple, list), "against": (tuple, list)}
    kinds |= {"learning_rates": (tuple, list, dict)}
    if not callable(seeds):
        kinds["seeds"] = tuple, list
    for key, kind in kinds.items():
        if not isinstance(grid[key], kind):
            raise UsageError(
                f"{where}: {key}={grid[key]!r}: expected a {'dict' if kind is dict else 'tuple'}"
            )
    if not callable(seeds):
        check_seeds(where, seeds)
        grid["seeds"] = lambda family, size, budget: seeds
    if len(sizes) < scaling.MIN_SIZES:
        raise UsageError(f"{where}: {len(sizes)} sizes; a parabola needs three or more")
    if not grid["budgets"] or not all(
        isinstance(b, (int, float)) and b > 0 for b in grid["budgets"]
    ):
        raise UsageError(f"{where}: budgets={grid['budgets']!r}: expected training FLOPs")
    for family in {*grid["against"]} - grid["families"].keys():
        raise UsageError(f"{where}: against={family!r}: is not a family")
    settings = {k: v for changes in grid["families"].values() for k, v in changes.items()}
    for key, value in [*settings.items(), ("learning_rates", rates)]:
        if missing := sizes.keys() - value if isinstance(value, dict) else ():
            raise UsageError(f"{where}: {key} lacks the size {min(missing)!r}")
    used = {seed for *_, seeds in points_of_grid(grid) for seed in seeds}
    if not used:
        raise UsageError(f"{where}: seeds: no point has one")
    if rates and (grid["rate_seed"] is None or grid["rate_seed"] in used):
        raise UsageError(
            f"{where}: rate_seed={grid['rate_seed']}: learning_rates need a seed that is not used "
            "again, as the best of several runs flatters its seed"
        )
    return grid


def check_extra(grid, extra):
    """Raise UsageError for an argument that would contradict the budgets or rates of the points."""
    fixed = ["steps", "train_flops", *([RATE] if grid["learning_rates"] else [])]
    for argument in extra:
        if argument.partition("=")[0].removeprefix("--config.") in fixed:
            raise UsageError(f"{argument}: the grid sets this for each run; leave it out")


def _at(size, value):
    """Return the value for a size of a setting, which may be a dict of sizes."""
    return value[size] if isinstance(value, dict) else value


def make_run(grid, workdir, extra, family, size, budget, rate, seed):
    """Return the Run of one point of the grid."""
    changes = dict(grid["sizes"][size])
    changes |= {key: _at(size, value) for key, value in grid["families"][family].items()}
    config = changes.pop("config", grid["config"])
    changes |= {"steps": 0, "train_flops": budget}
    name = f"{family}, {size}, {quantity(budget, 'FLOPs')}"
    if rate is not None:
        changes |= {RATE: rate} | runs_lib.MAY_DIVERGE  # too high a rate is a result
        name += f", rate {rate:g}"
    labels = {"family": family, "size": size, "budget": budget, "rate": rate}
    return runs_lib.training_run(workdir, name, seed, config, changes, extra, labels)


def points_of_grid(grid):
    """Yield (family, size, budget, seeds) of all points, small budgets first."""
    for budget in sorted(grid["budgets"]):
        for size in grid["sizes"]:
            for family in grid["families"]:
                seeds = grid["seeds"](family, size, budget)
                if seeds is not None:
                    yield family, size, budget, tuple(seeds)


def rate_runs(grid, workdir, extra):
    """Return the runs that select learning rates."""
    rates = grid["learning_rates"]
    return [
        make_run(grid, workdir, extra, family, size, budget, rate, grid["rate_seed"])
        for family, size, budget, _ in points_of_grid(grid)
        for rate in _at(size, rates)
    ]


def final_runs(grid, workdir, extra, best_rates):
    """Return the runs whose losses are fitted; best_rates: {(family, size, budget): rate}."""
    return [
        make_run(grid, workdir, extra, *point, best_rates.get(tuple(point)), seed)
        for *point, seeds in points_of_grid(grid)
        for seed in seeds
    ]


# ---- points ------------------------------------------------------------------------------------


def points_of(runs):
    """Return the points of finished runs, all of one text and tokenizer."""
    table = runs_lib.results(runs).rename(columns=METRICS)
    table["settings"] = [runs_lib.settings_digest(run.config()) for run in runs]
    runs_lib.check_comparable(table)
    return table.reindex(columns=[*POINT, *PROVENANCE])


# ---- analysis ----------------------------------------------------------------------------------


def analyse(points, grid, draws=DRAWS):
    """Return (optima, differences, {family: means that are fitted}, {family: LawFit})."""
    if points.loss.isna().any():
        point = points[points.loss.isna()].iloc[0]
        raise UsageError(
            f"{point.family}, {point['size']}, seed {point.seed}: the loss is not finite; a lower "
            f"{RATE} may help"
        )
    means = {
        family: scaling.mean_points(points[points.family == family])
        for family in grid["families"]
        if family in {*points.family}
    }
    limit, rng = grid["fit_within"], np.random.default_rng(0)
    fitted = {
        family: scaling.within(rows, limit) if limit else rows for family, rows in means.items()
    }
    laws = {
        family: scaling.LawFit(rows, draws, rng)
        for family, rows in fitted.items()
        if scaling.can_fit_law(rows)
    }
    base = next(iter(grid["families"]))
    optima, differences = [], []
    for budget in sorted({*points.budget}):
        best = {
            family: best_measured(rows[rows.budget == budget])
            for family, rows in means.items()
            if budget in {*rows.budget}
        }
        for family, row in best.items():
            columns = {"size": row["size"], "parameters": row.parameters, "loss": row.loss}
            columns |= {"std": row["std"], "seeds": row.n}
            optima.append({"budget": budget, "family": family, "method": "measured", **columns})
        for family, rows in fitted.items():
            if family in best and rows.parameters.nunique() >= scaling.MIN_SIZES:
                size, loss = scaling.parabola_optimum(rows[rows.budget == budget])
                columns = {"method": "parabola", "parameters": size, "loss": loss}
                optima.append({"budget": budget, "family": family, **columns})
            if family in best and family in laws:
                optima.append(
                    {"budget": budget, "family": family, **_by_law(family, base, laws, budget)}
                )
        for other in dict.fromkeys((base, *grid["against"])):
            for family in means:
                if family != other:
                    differences += _differences(budget, family, other, best, laws)
    return pd.DataFrame(optima), pd.DataFrame(differences), fitted, laws


def best_measured(rows):
    """Return the row of lowest mean loss among those with most seeds, three at most required."""
    rows = rows[rows.n >= min(3, rows.n.max())]
    return rows.loc[rows.loss.idxmin()]


def _by_law(family, base, laws, budget):
    """Return the columns of a family's optimum by its law, with intervals."""
    fit = laws[family]
    columns = {"parameters": fit.sizes[budget], "loss": fit.losses[budget]}
    if base in laws and family != base:
        columns["speedup_flops"] = scaling.speedup(laws[base], fit, budget)
    row = {"method": "law"}
    for name, values in columns.items():
        low, high = scaling.interval(values[1:])
        row |= {name: values[0], f"{name}_low": low, f"{name}_high": high}
    return row


def _differences(budget, family, other, best, laws):
    """Yield the differences of two families' best losses, measured and by their laws."""
    if family not in best or other not in best:
        return
    row = {"budget": budget, "family": family, "against": other}
    a, b = ((one.loss, one["std"], one.n) for one in (best[family], best[other]))
    yield row | {"method": "measured"} | difference(a, b)
    if family in laws and other in laws:
        draws = laws[family].losses[budget] - laws[other].losses[budget]
        low, high = scaling.interval(draws[1:])
        values = {"difference": draws[0], "low": low, "high": high}
        values["equivalence_p"] = scaling.equivalence_p(draws[1:])
        yield row | {"method": "law"} | values


# ---- output ------------------------------------------------------------------------------------


def markdown(optima, differences, laws, arguments, grid):
    """Return the tables as Markdown."""
    titles = "budget", "family", "method", "loss (nats)", "parameters", "speedup in FLOPs"
    rows = []
    for row in optima.to_dict("records"):
        spread = f" ± {row['std']:.4f}" if row["std"] == row["std"] else ""
        parameters = "" if row["parameters"] != row["parameters"] else quantity(row["parameters"])
        rows.append([quantity(row["budget"], "FLOPs"), row["family"], row["method"]]
                    + [tables.with_interval(row, "loss") + spread, parameters]
                    + [tables.with_interval(row, "speedup_flops", "{:.2f}")])  # fmt: skip
    parts = [tables.markdown(titles, rows)]
    if len(differences):
        titles = "budget", "family", "minus", "method", "difference (nats)", "p of equivalence"
        ends = {"low": "difference_low", "high": "difference_high"}
        rows = [
            [quantity(row["budget"], "FLOPs"), row["family"], row["against"], row["method"]]
            + [tables.with_interval(row, "difference"), row["equivalence_p"]]
            for row in differences.rename(columns=ends).to_dict("records")
        ]
        parts.append(tables.markdown(titles, rows))
    if laws:
        rows = [
            [family, *map("{:.4g}".format, vars(fit.law).values())] for family, fit in laws.items()
        ]
        parts.append(tables.markdown(["L = E + A / N^a + B / D^b", *"EABab"], rows))
    parts.append(
        "95% intervals: Welch's for measured losses, bootstrap over points and seeds for laws. "
        "p: two one-sided tests of a difference within 0.02 nats. "
        f"`{grid['config']}`; command: `{arguments.command}`"
    )
    return "\n\n".join(parts) + "\n"


def draw(points, fitted, path):
    """Draw loss over parameters, one panel a budget, with the parabolas."""
    import seaborn as sns
    from matplotlib import ticker

    families, budgets = points.family.unique(), points.budget.nunique()
    palette = sns.color_palette("tab10" if len(families) <= 10 else "husl", len(families))
    colours = dict(zip(families, palette, strict=True))
    plot = sns.relplot(
        points, x="parameters", y="loss", hue="family", palette=colours, col="budget",
        col_wrap=min(3, budgets), facet_kws={"sharey": False}, height=3.5,
    )  # fmt: skip
    plot.set_ylabels("held-out loss (nats)")
    for budget, axes in plot.axes_dict.items():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_title(quantity(budget, "FLOPs"))
        for family, means in fitted.items():
            rows = means[means.budget == budget]
            if rows.parameters.nunique() >= scaling.MIN_SIZES:
                sizes = np.geomspace(rows.parameters.min(), rows.parameters.max(), 50)
                axes.plot(sizes, scaling.parabola(rows)(np.log(sizes)), color=colours[family])
    plot.savefig(path, dpi=110)


def study(arguments):
    """Make the runs, then the fits; or print the commands."""
    grid, extra, workdir = load_grid(arguments.grid), arguments.extra, arguments.workdir
    check_extra(grid, extra)
    selecting = rate_runs(grid, workdir, extra)
    runs_lib.check([*selecting, *final_runs(grid, workdir, extra, {})], extra)
    if not arguments.print_commands:
        if selecting:
            print(runs_lib.MAY_DIVERGE_NOTE)
        runs_lib.run_all(selecting, arguments.jobs)
    elif not all(map(runs_lib.is_finished, selecting)):
        runs_lib.print_commands(selecting)
        print("# these select the learning rates: rerun when they have finished")
        return
    selected = points_of(selecting)
    rates = runs_lib.best_rates(selected, ["family", "size", "budget"])
    final = final_runs(grid, workdir, extra, rates)
    if arguments.print_commands:
        return runs_lib.print_commands(final)
    runs_lib.run_all(final, arguments.jobs)
    table = points_of(final)
    optima, differences, fitted, laws = analyse(table, grid)
    folder = io.folder(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    all_points = pd.concat([selected, table]) if selecting else table
    header = {"title": arguments.grid, "command": arguments.command, "config": grid["config"]}
    header |= {key: ", ".join(all_points[key].unique()) for key in ("machine", "revision")}
    if selecting:
        header["rate_seed"] = grid["rate_seed"]
    for name, contents in {
        "points": all_points,
        "optima": optima,
        "differences": differences,
    }.items():
        tables.write_csv(folder / f"{name}.csv", contents, header)
    text = markdown(optima, differences, laws, arguments, grid)
    io.write_atomic(folder / "table.md", text)
    draw(table, fitted, folder / "curves.png")
    tables.show(text)


def main(argv=None):
    parser = cli.Parser("efx.studies.isoflop", __doc__)
    parser.add_argument("--grid", required=True, help="grid file, or the name of one of efx")
    parser.add_runs()
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
