"""Published results: CSV files with their provenance, and the comparison by training budget.

    python -m efx.studies.results

A file of `results/` begins with lines `# key: value` (title, command, config, machine, revision);
the rest is a table, one row a run or one row a measured mean. The command writes two of them from
the others. `mod_by_budget.csv` is Mixture-of-Depths against dense models at each budget, and is
drawn as `docs/images/mod_by_budget.png`. `comparisons.csv` has differences of losses: to add one,
append a row with its file, budget, name and against.
"""

import itertools
import pathlib
import sys

import pandas as pd

from efx import io
from efx.studies import cli
from efx.studies.statistics import difference

RESULTS = pathlib.Path("results")
# Columns of names and hashes, whatever they look like.
TEXTS = (
    "file", "name", "family", "size", "against", "method", "text", "tokenizer", "settings",
    "machine", "revision",
)  # fmt: skip
OUT = "mod_by_budget"
MOD = "MoD 12.5%"
BASELINES = {"dense": "dense", "half_depth": "dense, half as deep"}
MIN_SEEDS = 3  # of a size, to be compared
# {training FLOPs: its files}
BUDGETS = {
    7.5e11: ("mod_evidence",),
    3e12: ("mod_evidence",),
    1.2e13: ("mod_evidence_own_rates", "mod_48_tflops"),
    4.8e13: ("mod_48_tflops",),
    1e14: ("mod_evidence_accelerator_100",),
    3e14: ("mod_evidence_accelerator_300",),
    1e15: ("mod_evidence_accelerator",),
}
# Seeds that selected the learning rates do not estimate the loss as well.
RATES_SELECTED_ON = {"mod_evidence_own_rates": 0}


def read(name, folder=RESULTS):
    """The table of a result, and its header as {key: [values]}."""
    return read_file(pathlib.Path(folder) / f"{name}.csv")


def read_file(path):
    """The table of a CSV file, and its header as {key: [values]}."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    header = {}
    for line in comments:
        key, _, value = line.removeprefix("#").strip().partition(": ")
        header.setdefault(key, []).append(value)
    # Below the header "#", and "None" or "NA", may be names or parts of one.
    options = {"skiprows": len(comments), "keep_default_na": False, "na_values": [""]}
    return pd.read_csv(path, **options, dtype=dict.fromkeys(TEXTS, str)), header


def write(path, table, header):
    """Write a table with its header, {key: value or list of values}."""
    lines = []
    for key, values in header.items():
        values = values if isinstance(values, list) else [values]
        lines += [f"# {key}: {' '.join(str(value).splitlines())}\n" for value in values]
    io.write_atomic(pathlib.Path(path), "".join(lines) + table.to_csv(index=False))


def means(name, budget=None, folder=RESULTS):
    """Mean loss by family and size: columns family, size, loss, std, n, at one budget or at all."""
    table, _ = read(name, folder)
    table = table if pd.isna(budget) else table[table.budget == budget]
    if "seed" not in table:  # published as means
        measure = "loss" if "loss" in table else "mean"
        columns = {"name": "family", "seeds": "n", measure: "loss", f"{measure}_std": "std"}
        table = table.rename(columns=columns)
        return table.reindex(columns=["family", "size", "loss", "std", "n"])
    if name in RATES_SELECTED_ON:
        table = table[table.seed != RATES_SELECTED_ON[name]]
    groups = table.groupby(["family", "size", *(["rate"] if name in RATES_SELECTED_ON else [])])
    return groups.loss.agg(loss="mean", std="std", n="count").reset_index()


def best(table, family):
    """The row of a family's lowest mean loss among the sizes with enough seeds."""
    rows = table[(table.family == family) & (table.n >= MIN_SEEDS)]
    return rows.loc[rows.loss.idxmin()]


def difference_columns(prefix, a, b):
    """The difference of two rows of `means` as {column: value}."""
    names = (prefix, f"{prefix}_low", f"{prefix}_high", f"{prefix}_equivalence_p")
    found = difference(*(tuple(row[["loss", "std", "n"]]) for row in (a, b)))
    return dict(zip(names, found, strict=True))


def comparisons(folder=RESULTS):
    """The table of comparisons.csv with new numbers; its rows remain."""
    rows = []
    for _, row in read("comparisons", folder)[0][["file", "budget", "name", "against"]].iterrows():
        table = means(row.file, row.budget, folder)
        pair = best(table, row["name"]), best(table, row.against)
        rows.append(dict(row) | difference_columns("difference", *pair))
    return pd.DataFrame(rows)


def by_budget(folder=RESULTS):
    """Losses of Mixture-of-Depths and its baselines, each at its best size of three seeds."""
    rows = []
    for budget, names in BUDGETS.items():
        table = pd.concat([means(name, budget, folder) for name in names], ignore_index=True)
        found = {key: best(table, family) for key, family in {"mod": MOD, **BASELINES}.items()}
        row = {"budget": budget}
        for key, one in found.items():
            row |= {f"{key}_size": one["size"], f"{key}_seeds": one.n}
            row |= {f"{key}_loss": one.loss, f"{key}_std": one["std"]}
        for key in BASELINES:
            row |= difference_columns(f"minus_{key}", found["mod"], found[key])
        rows.append(row)
    return pd.DataFrame(rows)


def draw(table, path):
    """A picture of the differences by budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for offset, (key, family) in zip((0.96, 1.04), BASELINES.items(), strict=True):
        mean = table[f"minus_{key}"]
        errors = [mean - table[f"minus_{key}_low"], table[f"minus_{key}_high"] - mean]
        axes.errorbar(
            table.budget * offset, mean, errors, fmt="o", capsize=3, label=f"minus {family}"
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("MoD loss minus baseline loss (nats)")
    axes.set_title("Above 0 the baseline is better. Bars: 95% intervals, unpaired")
    axes.legend()
    figure.savefig(path, dpi=110)


def study(arguments):
    table = by_budget()
    header = {
        "title": "Mixture-of-Depths minus dense models at equal training FLOPs, by budget",
        "command": "python -m efx.studies.results",
        "machine": "2 CPU cores up to 48 TFLOPs, 1 x NVIDIA H100 80GB HBM3 above",
    }
    write(RESULTS / f"{OUT}.csv", table.round(4), header)
    _, header = read("comparisons")
    write(RESULTS / "comparisons.csv", comparisons().round(4), header)
    pictures = pathlib.Path("docs/images")
    pictures.mkdir(exist_ok=True)
    draw(table, pictures / f"{OUT}.png")
    print(table.filter(regex="budget|loss|minus_(dense|half_depth)$").to_string(index=False))


def main(argv=None):
    return cli.Parser("efx.studies.results", __doc__).run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
