"""Several runs, several seeds, one table.

    python -m efx.studies.sweep --sweep configs/sweeps/mod_table.py --workdir runs/mod_table

A sweep file is plain data: `get_sweep()` returns

    dict(config="configs/mod.py",                  # every run starts from it
         seeds=(0, 1, 2),
         equal="flops",                            # or "tokens", or "", see below
         runs={"name": {"model.depth": 8}, ...},   # changed settings; "config" is another file
         columns={"title": "metric", ...},         # of metrics.jsonl, or "first|second|..."
         depth=("name", "name"),                   # optional: runs of half and of full depth
         certify=True)                             # optional: a column of `efx.certify`

With equal="flops" or "tokens", the first run trains before the others, and all get as many FLOPs or
tokens as it used; with "" the settings decide. Every command line is checked before the first run.
`--sweep FILE:PART` calls `get_sweep("PART")`. Runs are in WORKDIR/<name>-seed<n>. An interrupted
sweep resumes, and finished runs are not repeated. Arguments after `--` go to every run. The table,
WORKDIR/table.md, compares each row with the first: differences are paired by seed, and a star marks
those that are significant after Holm's correction. WORKDIR/table.csv has a row for each run. They
have no seconds if runs shared the machine (--jobs).

With `depth` the table has the price of depth at equal tokens (SPEC section 8): `recovered`, the
part of the gain of full depth over half depth that a model recovers, with its 95% interval, and
`cost`, its part of their difference in FLOPs. Routed depth pays where recovered exceeds cost.
WORKDIR/price.csv has the same and the means of all columns by name, and price.png shows it.

With `certify` the model of the first seed of each name is held to the properties of `efx.certify`;
the column names those that it fails.
"""

import math
import sys

import pandas as pd

from efx import io
from efx.config.load import run_file
from efx.errors import UsageError, nearest
from efx.logging import quantity, tables
from efx.studies import cli
from efx.studies import runs as runs_lib
from efx.studies.statistics import holm, paired_difference, recovered_share

KEYS = ("config", "seeds", "equal", "runs", "columns")
COLUMNS = {
    tables.LOSS: "eval/loss",
    "bits per byte": "eval/bits_per_byte",
    "training FLOPs": "flops",
    "tokens": "tokens",
    "steps": "step",
    "seconds": "seconds",
}
QUANTITIES = {"training FLOPs": "FLOPs", "tokens": "", "steps": "", "seconds": "s"}


def load_file(kind, source, keys, optional=()):
    """Return the dict of `get_<kind>()` of a file; UsageError for wrong keys."""
    contents = run_file(kind, source, folder="sweeps")
    if not isinstance(contents, dict):
        raise UsageError(f"--{kind}={source}: get_{kind}() must return a dict, not {contents!r}")
    for key in contents.keys() - {*keys, *optional}:
        hint = nearest(key, (*keys, *optional))
        raise UsageError(f"--{kind}={source}: {key!r} is not a key of a {kind}{hint}")
    for key in keys:
        if key not in contents:
            raise UsageError(f"--{kind}={source}: the {kind} lacks {key!r}")
    return contents


def load_sweep(source):
    """Return the checked dict of a sweep file."""
    sweep = load_file("sweep", source, KEYS, optional=("depth", "certify"))
    check_seeds(f"--sweep={source}", sweep["seeds"])
    runs, columns = sweep["runs"], sweep["columns"]
    if (
        not isinstance(runs, dict)
        or not runs
        or not all(isinstance(r, dict) for r in runs.values())
    ):
        raise UsageError(f"--sweep={source}: runs={runs!r}: expected {{name: {{setting: value}}}}")
    if not isinstance(columns, dict) or not all(isinstance(c, str) for c in columns.values()):
        raise UsageError(f"--sweep={source}: columns={columns!r}: expected {{title: metric}}")
    depth = sweep.get("depth", ())
    if not isinstance(depth, tuple | list) or len(depth) not in (0, 2) or {*depth} - {*runs}:
        raise UsageError(f"--sweep={source}: depth={depth!r}: expected two names of runs")
    if sweep["equal"] not in ("flops", "tokens", ""):
        raise UsageError(f"--sweep={source}: equal={sweep['equal']!r}: use 'flops', 'tokens' or ''")
    return sweep


def check_seeds(where, seeds):
    """Raise UsageError unless `seeds` are different whole numbers."""
    is_sequence = isinstance(seeds, (tuple, list)) and seeds
    if not is_sequence or {type(s) for s in seeds} != {int} or len({*seeds}) < len(seeds):
        raise UsageError(f"{where}: seeds={seeds!r}: expected different whole numbers")


def make_runs(sweep, workdir, extra=(), budget=()):
    """Return the Runs, all names of the first seed first.

    Args:
      budget: further arguments of all runs but those of the first name, see `equal_budget`.
    """
    first = next(iter(sweep["runs"]))
    runs = []
    for seed in sweep["seeds"]:
        for name, changes in sweep["runs"].items():
            changes = {**runs_lib.MAY_DIVERGE, **changes}
            config = changes.pop("config", sweep["config"])
            own = () if name == first else budget
            runs.append(runs_lib.training_run(workdir, name, seed, config, changes, (*extra, *own)))
    return runs


def equal_budget(sweep, first):
    """Return the arguments that give a run the budget that the finished run `first` has used."""
    used = runs_lib.results([first]).iloc[0]
    if sweep["equal"] == "flops":
        return "--config.steps=0", f"--config.train_flops={used['flops']}"
    data = first.config().data
    steps = max(1, round(used["tokens"] / (data.batch_size * data.seq_len)))
    return f"--config.steps={steps}", "--config.train_flops=0"


def failed_properties(runs):
    """Return {name: the properties of `efx.certify` that the run fails, or "pass"}."""
    from efx import certify

    verdicts = {}
    for run in runs:
        print(f"== certify {run.name}", flush=True)
        try:
            results = list(certify.certify(certify.of_run(run.folder)))
            failed = [result.name for result in results if result.verdict == certify.FAIL]
            verdict = ", ".join(failed) or "pass"
        except UsageError as error:  # such as logits that are not finite
            verdict = str(error)
        verdicts[run.labels["name"]] = verdict
    return verdicts


def table_of(results, sweep, verdicts=None):
    """Return (one row for each run, Markdown with mean and deviation over seeds).

    Args:
      verdicts: {name: text} of a last column, see `failed_properties`.
    """
    columns = dict(COLUMNS)
    if "seconds" in results and results["seconds"].isna().any():
        del columns["seconds"]
    for title, metrics in sweep["columns"].items():
        known = [metric for metric in metrics.split("|") if metric in results]
        if not known:
            hint = nearest(metrics.split("|")[0], list(results))
            raise UsageError(f"columns[{title!r}]={metrics!r}: no run logs this metric{hint}")
        results[title] = results[known].bfill(axis=1).iloc[:, 0]
        columns[title] = title
    columns = {"name": "name", "seed": "seed"} | columns
    known = {title: metric for title, metric in columns.items() if metric in results}
    per_run = pd.DataFrame({title: results[metric] for title, metric in known.items()})
    groups, rows = per_run.groupby("name", sort=False), []
    first, differences = per_run.name.iloc[0], _difference_cells(per_run)
    for name, group in groups:
        cells = [_cell(title, group[title]) for title in per_run if title not in ("name", "seed")]
        cells.insert(1, differences.get(name, ""))
        rows.append([name, *cells])
    titles = list(per_run)[2:]
    titles.insert(1, f"minus {first}")
    if verdicts:
        titles.append("certify")
        rows = [[*row, verdicts[row[0]]] for row in rows]
    if "depth" not in sweep:
        return per_run, tables.markdown(["", *titles], rows)
    price = price_of_depth(per_run, *sweep["depth"])
    priced = [
        row + _price_cells(each) for row, (_, each) in zip(rows, price.iterrows(), strict=True)
    ]
    text = tables.markdown(["", *titles, "recovered", "cost"], priced)
    half, full = sweep["depth"]
    if math.isnan(price.recovered[full]):
        text += f"\n\n{full} is not significantly ahead of {half}: depth does not pay here."
    return per_run, text


def price_of_depth(per_run, half, full):
    """Return a row for each name: its loss, `recovered_share` and share of the cost of depth.

    Args:
      per_run: the first result of `table_of`. half, full: names.
    """
    groups = per_run.groupby("name", sort=False)
    means = groups.mean().drop(columns=["seed", tables.LOSS])
    flops = means["training FLOPs"]
    stats = {name: _stats(group[tables.LOSS]) for name, group in groups}
    rows = {}
    for name, (loss, std, seeds) in stats.items():
        cost = (flops[name] - flops[half]) / (flops[full] - flops[half])
        gain = {"loss": loss, "std": std, "seeds": seeds, "gain": stats[half][0] - loss}
        rows[name] = gain | {"cost": cost} | recovered_share(stats[half], stats[full], stats[name])
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("name").join(means)


def save_price(workdir, price, half, full):
    """Write `price_of_depth` to WORKDIR/price.csv, and its picture to price.png."""
    folder = io.folder(workdir)
    io.write_atomic(folder / "price.csv", price.to_csv())
    draw_price(price, half, full, folder / "price.png")


def draw_price(price, half, full, path):
    """A picture of the gain of each model over half depth, and of the gain that its cost buys."""
    from matplotlib.figure import Figure

    shown = price.drop(index=half).sort_values("gain")
    figure = Figure(figsize=(8, 1.5 + 0.28 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(shown.gain, shown.index, xerr=shown["std"].fillna(0), fmt="o", label="gain")
    axes.plot(shown.cost * price.gain[full], shown.index, "|", color="black", ms=14,
              label="gain of as much cost spent on full depth")  # fmt: skip
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(f"loss of {half!r} minus loss (nats); bars: standard deviation over seeds")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def _price_cells(price):
    recovered = f"{price.recovered:.2f} ({price.low:.2f} to {price.high:.2f})"
    return ["" if math.isnan(price.recovered) else recovered, f"{price.cost:.2f}"]


def _stats(values):
    values = values.astype(float)
    return values.mean(skipna=False), values.std(), len(values)


def _difference_cells(per_run):
    """Return {name: loss minus that of the first name, paired by seed, with its interval}.

    "*" marks a difference that is significant after Holm's correction for all names. A name is
    absent if one of its runs, or of the first name's, has no finite loss.
    """
    losses = per_run.pivot(index="seed", columns="name", values=tables.LOSS).astype(float)
    first, *names = per_run.name.unique()
    rows = {name: paired_difference(losses[name], losses[first]) for name in names}
    rows = {name: row for name, row in rows.items() if math.isfinite(row["difference"])}
    adjusted, cells = holm([row["p"] for row in rows.values()]), {}
    for (name, row), p in zip(rows.items(), adjusted, strict=True):
        interval = f" ({row['low']:.4f} to {row['high']:.4f})" if math.isfinite(row["low"]) else ""
        cells[name] = f"{row['difference']:.4f}{interval}{' *' * bool(p < 0.05)}"
    return cells


def _cell(title, values):
    if title not in QUANTITIES:
        return tables.mean_and_spread(title, values)
    known = values.dropna()
    return "" if known.empty else quantity(known.mean(), QUANTITIES[title])


def study(arguments):
    """Make the runs, then the table; or print the commands."""
    sweep, extra = load_sweep(arguments.sweep), arguments.extra
    workdir = arguments.workdir
    runs = make_runs(sweep, workdir, extra)
    runs_lib.check(runs, extra)
    if not arguments.print_commands:
        print(runs_lib.MAY_DIVERGE_NOTE)
    if sweep["equal"]:
        first = runs[0]
        if not arguments.print_commands:
            runs_lib.run_all([first], total=len(runs))
        elif not runs_lib.is_finished(first):
            print(first.command())
            print("# the others get as many FLOPs or tokens: rerun when this run has finished")
            return
        runs = make_runs(sweep, workdir, extra, equal_budget(sweep, first))
    if arguments.print_commands:
        return runs_lib.print_commands(runs)
    runs_lib.run_all(runs, arguments.jobs)
    results = runs_lib.results(runs)
    runs_lib.check_comparable(results)
    of_first_seed = runs[: len(sweep["runs"])]
    verdicts = failed_properties(of_first_seed) if sweep.get("certify") else None
    per_run, text = table_of(results, sweep, verdicts)
    text += f"\n\n`{sweep['config']}`, seeds {', '.join(map(str, sweep['seeds']))}. "
    if len(sweep["seeds"]) > 1:
        text += (
            "Mean ± standard deviation; differences paired by seed, with 95% intervals; \\* marks "
            "p < 0.05 after Holm's correction. "
        )
    text += f"{runs_lib.MAY_DIVERGE_NOTE}. Command: `{arguments.command}`\n"
    tables.save(workdir, "table", per_run, text)
    if "depth" in sweep:
        price = price_of_depth(per_run, *sweep["depth"])
        if verdicts:
            price["certify"] = pd.Series(verdicts)
        save_price(workdir, price, *sweep["depth"])


def main(argv=None):
    parser = cli.Parser("efx.studies.sweep", __doc__)
    parser.add_argument("--sweep", required=True, help="sweep file, or the name of one of efx")
    parser.add_runs()
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
