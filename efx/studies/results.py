"""Published results: CSV files with their provenance, and the comparison by training budget.

    python -m efx.studies.results

A file of `results/` begins with lines `# key: value` (title, command, config, machine, revision);
the rest is a table, one row a run or one row a measured mean. The command writes
`results/mod_by_budget.csv`, Mixture-of-Depths against dense models at each budget, from the other
files, and draws it as `docs/images/mod_by_budget.png`.
"""

import pathlib
import sys

import pandas as pd

from efx import io
from efx.studies import cli
from efx.studies.statistics import difference

RESULTS = pathlib.Path("results")
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
    path = pathlib.Path(folder) / f"{name}.csv"
    header = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        key, _, value = line.removeprefix("#").strip().partition(": ")
        header.setdefault(key, []).append(value)
    return pd.read_csv(path, comment="#"), header


def write(path, table, header):
    """Write a table with its header, {key: value or list of values}."""
    lines = []
    for key, values in header.items():
        values = values if isinstance(values, list) else [values]
        lines += [f"# {key}: {value}\n" for value in values]
    io.write_atomic(pathlib.Path(path), "".join(lines) + table.to_csv(index=False))


def means(name, budget, folder=RESULTS):
    """Mean loss by family and size: columns family, size, loss, std, n, at one budget."""
    table, _ = read(name, folder)
    table = table[table.budget == budget]
    if "seed" not in table:  # published as means
        table = table.rename(columns={"name": "family", "loss_std": "std", "seeds": "n"})
        return table[["family", "size", "loss", "std", "n"]]
    if name in RATES_SELECTED_ON:
        table = table[table.seed != RATES_SELECTED_ON[name]]
    groups = table.groupby(["family", "size", *(["rate"] if name in RATES_SELECTED_ON else [])])
    return groups.loss.agg(loss="mean", std="std", n="count").reset_index()


def by_budget(folder=RESULTS):
    """Losses of Mixture-of-Depths and its baselines, each at its best size of three seeds."""
    rows = []
    for budget, names in BUDGETS.items():
        table = pd.concat([means(name, budget, folder) for name in names], ignore_index=True)
        table = table[table.n >= MIN_SEEDS]
        best = {
            family: table.loc[table[table.family == family].loss.idxmin()]
            for family in (MOD, *BASELINES.values())
        }
        row = {"budget": budget}
        for key, family in {"mod": MOD, **BASELINES}.items():
            row |= {f"{key}_size": best[family]["size"], f"{key}_seeds": best[family].n}
            row |= {f"{key}_loss": best[family].loss, f"{key}_std": best[family]["std"]}
        for key, family in BASELINES.items():
            names = ("", "_low", "_high", "_equivalence_p")
            pair = [tuple(best[name][["loss", "std", "n"]]) for name in (MOD, family)]
            found = difference(*pair)
            row |= {f"minus_{key}{name}": value for name, value in zip(names, found, strict=True)}
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
    pictures = pathlib.Path("docs/images")
    pictures.mkdir(exist_ok=True)
    draw(table, pictures / f"{OUT}.png")
    print(table.filter(regex="budget|loss|minus_(dense|half_depth)$").to_string(index=False))


def main(argv=None):
    return cli.Parser("efx.studies.results", __doc__).run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
