"""isoFLOP curves: families of models at several sizes and budgets of training FLOPs.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop.py --workdir runs/isoflop --jobs 2

A comparison at equal FLOPs says little if one model is far from its best size. So every family is
trained at every size and budget, and its best size is found by parabolas and by a law
(`efx.studies.scaling`). A grid file is plain data: `get_grid()` returns

    dict(config="configs/mod.py",                # every run starts from it
         seeds=(0, 1, 2),                        # or seeds(family, size, budget), () for no run
         budgets=(5e11, 1e12),                   # training FLOPs
         families={"dense": {"model.depth_routing.kind": "none"}, ...},  # the baseline first
         sizes={"4 blocks": {"model.depth": 4}, ...},
         learning_rates=(1e-3, 2e-3),            # optional: see below
         rate_seed=9,                            # seed that selects the learning rates
         fit_within=5.0,                         # optional: fit sizes within 5 times the best
         against=("dense",))                     # optional: families to compare with

A family's setting may be a dict with a value for each size. With learning_rates (a tuple, or one
for each size) the seed rate_seed tries all of them at each size and budget where a family has
seeds, and the seeds use the best.

WORKDIR gets points.csv (a row for each run), optima.csv, differences.csv, table.md and curves.png.
Finished runs are not repeated. `--from FILE` uses the runs of another points.csv, or of a file of
results/, and refuses those of other settings, text or tokenizer. Arguments after `--` go to every
run.
"""

import hashlib
import json
import re
import sys

import numpy as np
import pandas as pd

from efx import io, run_dir
from efx.config import schema
from efx.config.load import to_config
from efx.config.run import default_config
from efx.errors import UsageError
from efx.logging import quantity, tables
from efx.studies import cli, results, scaling
from efx.studies import runs as runs_lib
from efx.studies.statistics import difference
from efx.studies.sweep import check_seeds, load_file

KEYS = ("config", "seeds", "budgets", "families", "sizes")
OPTIONAL = {"learning_rates": (), "rate_seed": None, "fit_within": None, "against": ()}
RATE = "optim.learning_rate"
KEY = ["family", "size", "budget", "rate", "seed"]  # identifies a run
POINT = [*KEY, "parameters", "tokens", "flops", "seconds", "loss", "repeat_gain"]
PROVENANCE = ["text", "tokenizer", "settings", "machine", "revision"]
TEXTS = ["family", "size", *PROVENANCE]
METRICS = {"eval/loss": "loss", "eval/repeated/gain": "repeat_gain"}
DRAWS = 300
# Settings that do not decide the result: the text is compared by its hash.
_IGNORED = re.compile(
    r"seed|steps|rules|(log|checkpoint|sample|mesh|cluster|ensemble)\..*"
    r"|data\.(source|eval_source|cache_dir|on_change)|evaluate\.every|model\.remat|train\.max_nonfinite"
)


# ---- the grid ----------------------------------------------------------------------------------


def load_grid(source):
    """Return the checked dict of a grid file; `seeds` is a function afterwards."""
    where = f"--grid={source}"
    grid = OPTIONAL | load_file("grid", source, KEYS, OPTIONAL)
    if not callable(grid["seeds"]):
        check_seeds(where, seeds := grid["seeds"])
        grid["seeds"] = lambda family, size, budget: seeds
    if len(grid["sizes"]) < scaling.MIN_SIZES:
        raise UsageError(f"{where}: {len(grid['sizes'])} sizes; a parabola needs three or more")
    if not grid["budgets"] or not all(budget > 0 for budget in grid["budgets"]):
        raise UsageError(f"{where}: budgets={grid['budgets']!r}: expected training FLOPs")
    for family in {*grid["against"]} - grid["families"].keys():
        raise UsageError(f"{where}: against={family!r}: is not a family")
    if grid["learning_rates"] and grid["rate_seed"] is None:
        raise UsageError(f"{where}: learning_rates need rate_seed, a seed that is not used again")
    return grid


def make_run(grid, workdir, extra, family, size, budget, rate, seed):
    """Return the Run of one point of the grid."""
    changes = dict(grid["sizes"][size])
    for key, value in grid["families"][family].items():
        changes[key] = value[size] if isinstance(value, dict) else value
    config = changes.pop("config", grid["config"])
    changes |= {"steps": 0, "train_flops": budget}
    name = f"{family}, {size}, {quantity(budget, 'FLOPs')}"
    if rate is not None:
        changes |= {RATE: rate, "train.max_nonfinite": 10**9}  # too high a rate is a result
        name += f", rate {rate:g}"
    labels = {"family": family, "size": size, "budget": budget, "rate": rate}
    return runs_lib.training_run(workdir, name, seed, config, changes, extra, labels)


def points_of_grid(grid):
    """Yield (family, size, budget, seeds) of all points that have seeds, small budgets first."""
    for budget in sorted(grid["budgets"]):
        for size in grid["sizes"]:
            for family in grid["families"]:
                if seeds := tuple(grid["seeds"](family, size, budget)):
                    yield family, size, budget, seeds


def rate_runs(grid, workdir, extra):
    """Return the runs that select learning rates."""
    rates = grid["learning_rates"]
    return [
        make_run(grid, workdir, extra, family, size, budget, rate, grid["rate_seed"])
        for family, size, budget, _ in (points_of_grid(grid) if rates else ())
        for rate in (rates[size] if isinstance(rates, dict) else rates)
    ]


def final_runs(grid, workdir, extra, best_rates):
    """Return the runs whose losses are fitted; best_rates: {(family, size, budget): rate}."""
    return [
        make_run(grid, workdir, extra, *point, best_rates.get(point), seed)
        for *point, seeds in points_of_grid(grid)
        for point in [tuple(point)]
        for seed in seeds
    ]


def settings_digest(config):
    """Return a hash of the settings that decide a result and are not at their default."""
    plain = run_dir.dotted(json.loads(json.dumps(schema.as_dict(config))))
    defaults = schema.as_dict(to_config(default_config(plain["model.family"])))
    defaults = run_dir.dotted(json.loads(json.dumps(defaults)))
    deciding = {
        key: value
        for key, value in plain.items()
        if value != defaults.get(key) and not _IGNORED.fullmatch(key)
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:12]


# ---- points ------------------------------------------------------------------------------------


def read_points(path):
    """Return the points of a CSV file."""
    try:
        points = pd.read_csv(path, comment="#", dtype=dict.fromkeys(TEXTS, str))
    except (OSError, ValueError) as error:
        raise UsageError(f"--from={path}: cannot be read: {error}") from error
    for column in {*POINT, *PROVENANCE} - {*points}:
        raise UsageError(f"--from={path}: lacks the column {column!r}; use a points.csv")
    return points


class Points:
    """The measured points of a grid: finished runs, and those of other files."""

    def __init__(self, files):
        self._given = pd.concat(
            [read_points(file) for file in files] or [pd.DataFrame(columns=KEY)]
        )

    def given(self, run):
        """The row of another file for this run, or None; UsageError for other settings."""
        match = np.ones(len(self._given), bool)
        for key in KEY:
            value = run.labels[key]
            column = self._given[key]
            match &= (column.isna() if value is None else column == value).to_numpy(bool)
        if not match.any():
            return None
        row = self._given[match].iloc[0]
        expected = settings_digest(run.config())
        if row.settings != expected:
            raise UsageError(
                f"--from: {run.name}: the run has other settings (digest {row.settings}, this grid "
                f"{expected}); leave it out, or use the grid it was trained with"
            )
        return row

    def missing(self, runs):
        return [run for run in runs if self.given(run) is None]

    def table(self, runs):
        """Return the points of these runs, all of one text and tokenizer."""
        rows = []
        for run in runs:
            row = self.given(run)
            if row is None:
                row = runs_lib.results([run]).rename(columns=METRICS).iloc[0]
                row["settings"] = settings_digest(run.config())
            rows.append(row)
        table = pd.DataFrame(rows).reindex(columns=[*POINT, *PROVENANCE]).reset_index(drop=True)
        runs_lib.check_comparable(table.assign(name=[run.name for run in runs]))
        return table


def best_rates(points):
    """Return {(family, size, budget): the rate of the lowest loss}."""
    best = {}
    for key, group in points.groupby(["family", "size", "budget"], sort=False):
        if group.loss.isna().all():
            raise UsageError(f"{key[0]}, {key[1]}: no learning rate ends with a finite loss")
        best[key] = group.rate[group.loss.idxmin()]
    return best


# ---- analysis ----------------------------------------------------------------------------------


def analyse(points, grid, draws=DRAWS):
    """Return (optima, differences, {(family, method): Fit}) of measured points."""
    if points.loss.isna().any():
        point = points[points.loss.isna()].iloc[0]
        raise UsageError(
            f"{point.family}, {point['size']}, seed {point.seed}: the loss is not finite; a lower "
            f"{RATE} may help"
        )
    rng, fits, means = np.random.default_rng(0), {}, {}
    for family, group in points.groupby("family", sort=False):
        means[family] = scaling.mean_points(group)
        fitted = means[family]
        if grid["fit_within"]:
            fitted = scaling.within(fitted, grid["fit_within"])
        if fitted["size"].nunique() >= scaling.MIN_SIZES:
            fits[family, "parabola"] = scaling.Fit("parabola", fitted, draws, rng)
        if scaling.can_fit_law(fitted):
            fits[family, "law"] = scaling.Fit("law", fitted, draws, rng)
    base = next(iter(means))
    optima, differences = [], []
    for budget in sorted({*points.budget}):
        best = {family: best_measured(rows, budget) for family, rows in means.items()}
        best = {family: row for family, row in best.items() if row is not None}
        for family, row in best.items():
            measured = {"size": row["size"], "parameters": row.parameters, "loss": row.loss}
            measured |= {"std": row["std"], "seeds": row.n}
            optima.append({"budget": budget, "family": family, "method": "measured", **measured})
        for (family, method), fit in fits.items():
            if budget in fit.losses:
                row = {"budget": budget, "family": family, "method": method}
                for name, values in (("parameters", fit.sizes), ("loss", fit.losses)):
                    low, high = scaling.interval(values[budget][1:])
                    row |= {name: values[budget][0], f"{name}_low": low, f"{name}_high": high}
                if (base, method) in fits and family != base:
                    times = scaling.speedup(fits[base, method], fit, budget)
                    for name, values in zip(("flops", "seconds"), times, strict=True):
                        low, high = scaling.interval(values[1:])
                        row |= {f"speedup_{name}": values[0]}
                        row |= {f"speedup_{name}_low": low, f"speedup_{name}_high": high}
                optima.append(row)
        for other in dict.fromkeys((base, *grid["against"])):
            for family in means:
                if family != other:
                    differences += _differences(budget, family, other, best, fits)
    return pd.DataFrame(optima), pd.DataFrame(differences), fits


def best_measured(means, budget):
    """Return the point of lowest mean loss among those with most seeds, three at most required."""
    rows = means[means.budget == budget]
    if rows.empty:
        return None
    rows = rows[rows.n >= min(3, rows.n.max())]
    return rows.loc[rows.loss.idxmin()]


def _differences(budget, family, other, best, fits):
    """Yield the differences of two families' best losses by each method."""
    row = {"budget": budget, "family": family, "against": other}
    names = ("difference", "low", "high", "equivalence_p")
    if family in best and other in best:
        a, b = ((one.loss, one["std"], one.n) for one in (best[family], best[other]))
        yield row | {"method": "measured"} | dict(zip(names, difference(a, b), strict=True))
    for method in ("parabola", "law"):
        if (family, method) in fits and (other, method) in fits:
            a, b = fits[family, method].losses, fits[other, method].losses
            if budget in a and budget in b:
                draws = a[budget] - b[budget]
                low, high = scaling.interval(draws[1:])
                values = draws[0], low, high, scaling.equivalence_p(draws[1:])
                yield row | {"method": method} | dict(zip(names, values, strict=True))


# ---- output ------------------------------------------------------------------------------------


def markdown(optima, differences, fits, arguments, grid):
    """Return the tables as Markdown."""

    def with_interval(row, name, form):
        value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
        if pd.isna(value):
            return "none"
        return form(value) + ("" if pd.isna(low) else f" ({form(low)} to {form(high)})")

    rows = []
    for _, row in optima.iterrows():
        loss = with_interval(row, "loss", "{:.4f}".format)
        if row.method == "measured" and row.seeds > 1:
            loss = f"{row.loss:.4f} ± {row['std']:.4f}"
        size = with_interval(row, "parameters", quantity)
        times = [with_interval(row, f"speedup_{name}", "{:.2f}".format) if f"speedup_{name}" in row
                 and row.method != "measured" else "" for name in ("flops", "seconds")]  # fmt: skip
        rows.append([quantity(row.budget, "FLOPs"), row.family, row.method, loss, size, *times])
    titles = ["budget", "family", "method", "loss (nats)", "parameters", "speedup in FLOPs",
              "speedup in seconds"]  # fmt: skip
    parts = [tables.markdown(titles, rows)]
    rows = [
        [quantity(row.budget, "FLOPs"), row.family, row.against, row.method,
         with_interval(row.rename({"low": "difference_low", "high": "difference_high"}),
                       "difference", "{:.4f}".format), f"{row.equivalence_p:.3f}"]
        for _, row in differences.iterrows()
    ]  # fmt: skip
    titles = ["budget", "family", "minus", "method", "difference (nats)", "p of equivalence"]
    parts.append(tables.markdown(titles, rows))
    laws = {family: fit.law for (family, method), fit in fits.items() if method == "law"}
    if laws:
        rows = [[family, *(f"{getattr(law, name):.4g}" for name in "EABab")]
                for family, law in laws.items()]  # fmt: skip
        parts.append(tables.markdown(["L = E + A / N^a + B / D^b", *"EABab"], rows))
    parts.append(
        "95% intervals: unpaired with a pooled deviation for measured losses, bootstrap over "
        "points and seeds for fits. p: two one-sided tests of a difference within 0.02 nats. "
        f"`{grid['config']}`; command: `{arguments.command}`"
    )
    return "\n\n".join(parts) + "\n"


def draw(points, fits, path):
    """Draw loss over parameters, one panel a budget, with the fitted parabolas."""
    import seaborn as sns

    plot = sns.relplot(
        points, x="parameters", y="loss", hue="family", col="budget", col_wrap=3,
        facet_kws={"sharey": False}, height=3.5,
    )  # fmt: skip
    colours = dict(zip(points.family.unique(), sns.color_palette(), strict=False))
    for budget, axes in plot.axes_dict.items():
        axes.set_xscale("log")
        axes.set_title(quantity(budget, "FLOPs"))
        for (family, method), fit in fits.items():
            rows = fit.means[fit.means.budget == budget]
            if method == "parabola" and rows["size"].nunique() >= scaling.MIN_SIZES:
                x = np.log(rows.parameters)
                curve = np.polyfit(x - x.mean(), rows.loss, 2, w=np.sqrt(rows.n))
                sizes = np.geomspace(rows.parameters.min(), rows.parameters.max(), 50)
                axes.plot(sizes, np.polyval(curve, np.log(sizes) - x.mean()), color=colours[family])
    plot.savefig(path, dpi=110)


def study(arguments):
    """Make the runs, then the fits; or print the commands."""
    grid, extra, workdir = load_grid(arguments.grid), arguments.extra, arguments.workdir
    points = Points(arguments.points)
    selecting = rate_runs(grid, workdir, extra)
    runs_lib.check([*selecting, *final_runs(grid, workdir, extra, {})], extra)
    trains = not (arguments.table_only or arguments.print_commands)
    if trains:
        runs_lib.run_all(points.missing(selecting), arguments.jobs)
    if arguments.print_commands and not all(map(runs_lib.is_finished, points.missing(selecting))):
        return runs_lib.print_commands(points.missing(selecting))
    rates = best_rates(points.table(selecting)) if selecting else {}
    final = final_runs(grid, workdir, extra, rates)
    if arguments.print_commands:
        return runs_lib.print_commands(points.missing(final))
    if trains:
        runs_lib.run_all(points.missing(final), arguments.jobs)
    table = points.table(final)
    optima, differences, fits = analyse(table, grid)
    folder = io.folder(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    header = {"title": arguments.grid, "command": arguments.command, "config": grid["config"]}
    for name, contents in (("points", table), ("optima", optima), ("differences", differences)):
        results.write(folder / f"{name}.csv", contents, header)
    text = markdown(optima, differences, fits, arguments, grid)
    io.write_atomic(folder / "table.md", text)
    draw(table, fits, folder / "curves.png")
    print(text)


def main(argv=None):
    parser = cli.Parser("efx.studies.isoflop", __doc__)
    parser.add_argument("--grid", required=True, help="grid file, or the name of one of efx")
    parser.add_runs()
    help = "points.csv of another study or machine, or a file of results/; can be repeated"
    parser.add_argument("--from", dest="points", action="append", default=[], help=help)
    parser.add_argument("--table-only", action="store_true", help="only read finished runs")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
