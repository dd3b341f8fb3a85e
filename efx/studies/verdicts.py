"""What the finished runs of a plan say (see `efx.studies.compare`): verdicts, warnings, a picture.

A plan is the dict of `compare.plan`. The table of its runs has a row for each, with the columns
name, seed, loss (NaN: diverged) and, if measured, gain and others.
"""

import math

import numpy as np
import pandas as pd

from efx.logging import quantity, tables
from efx.studies import statistics

COPYING = 0.3, 3.0  # gains, in nats, between which models learn to copy and losses are a lottery


def assess(plan, table):
    """Return one row for each test of a plan, at its last look.

    Returns:
      [{"name", "against", "look": number of seeds, `statistics.difference`, "percent", "verdict",
      "is_final", "note"}]. A test that waits for one before it is "not tested".
    """
    rows = [
        dict(name=a, against=b, look=0, verdict="undecided", is_final=False, note="")
        for a, b in plan["tests"]
    ]
    for look, n in enumerate(plan["looks"]):
        for row in rows:
            pair = [_losses(table, row[key], plan["seeds"][:n]) for key in ("name", "against")]
            if not row["is_final"] and min(map(len, pair)) == n:
                row |= _test(plan, row, *pair, look)
        _decide(plan, [row for row in rows if row["look"]])
        if plan["order"] == "fixed":
            _wait(rows)
    return rows


def _losses(table, name, seeds):
    rows = table[(table["name"] == name) & table.seed.isin(seeds)]
    return rows.sort_values("seed").loss.to_numpy()


def _test(plan, row, a, b, look):
    """Return the columns of a test at a look."""
    moments = [(x.mean(), x.std(ddof=1), len(x)) for x in (a, b)]
    if [row["name"], row["against"]] in plan["paired"]:
        columns = statistics.paired_difference(a, b, plan["margin"])
    else:
        columns = statistics.difference(*moments, plan["margin"])
    is_futile = statistics.is_futile(moments[0][1], moments[1][1], look, plan["margin"])
    note = "futile: the deviation is too large for the margin" if is_futile else ""
    if diverged := np.isnan([*a, *b]).sum():
        note = f"{diverged} of {len(a) + len(b)} runs diverged, so there is no mean"
    columns |= {"look": len(a), "percent": 100 * columns["difference"] / moments[1][0]}
    return columns | {"note": note, "ends": bool(is_futile) or look + 1 == len(plan["looks"])}


def _decide(plan, rows):
    """Set "verdict" and "is_final" of rows that have been tested."""
    corrected = pd.DataFrame(rows, columns=["difference", "p", "equivalence_p"])
    if plan["order"] == "holm" and rows:
        corrected[["p", "equivalence_p"]] = corrected[["p", "equivalence_p"]].apply(statistics.holm)
    levels = statistics.Levels(**plan["levels"])
    for row, values in zip(rows, corrected.to_dict("records"), strict=True):
        if not row["is_final"]:
            row["verdict"] = statistics.verdict(values, levels)
            is_decided = row["verdict"] != "undecided"
            row["is_final"] = is_decided or row["ends"]
            row["note"] = "" if is_decided else row["note"]


def _wait(rows):
    """Let tests count only when all tests before them are decided."""
    blocking = None
    for row in rows:
        if blocking:
            row |= {"verdict": "not tested", "note": "", "is_final": blocking["is_final"]}
        elif row["verdict"] == "undecided":
            blocking = row


def warnings_of(plan, table):
    """Return texts about runs in the transition to copying, and about unequal deviations."""
    low, high = COPYING
    inside, found = table.gain.between(low, high).sum(), []
    if inside:
        found.append(
            f"in transition: {inside} of {len(table)} runs gain {low:g} to {high:g} nats by "
            "copying, where losses are a lottery"
        )
    variances = table.groupby("name").loss.var()
    for name, against in plan["tests"]:
        pair = variances.reindex([name, against])
        if pair.max() > 4 * pair.min():
            found.append(f"in transition? variances of {name} and {against} differ over fourfold")
    return found


def at_equal_gain(a, b):
    """Return `statistics.intervals` of two arms' difference at an equal gain by copying, which is
    the part that does not go through copying: a regression of the loss on arm and gain.

    Args:
      a, b: rows of two arms. Without enough of them, or of different gains, None is returned.
    """
    both = pd.concat([a.assign(arm=1.0), b.assign(arm=0.0)]).dropna(subset=["loss", "gain"])
    x = np.stack([np.ones(len(both)), both.arm, both.gain], 1)
    freedom = len(both) - 3
    if freedom < 1 or np.linalg.matrix_rank(x) < 3:
        return None
    solution, squares, *_ = np.linalg.lstsq(x, both.loss, rcond=None)
    error = math.sqrt(squares[0] / freedom * np.linalg.inv(x.T @ x)[1, 1])
    return statistics.intervals(solution[1], error, freedom)


def tokens_to_copy(plan, curves):
    """Return {"median": {arm: tokens to a gain of 1 nat, by Kaplan-Meier; None if most runs never
    gain it}, "p": {test: of the log-rank test}}.

    Args:
      curves: DataFrame with name, seed, tokens and gain of each evaluation.
    """
    from scipy import stats

    times, medians, p = {}, {}, {}
    for name, runs in curves.groupby("name"):
        reached = runs[runs.gain >= 1].groupby("seed").tokens.min()
        censored = runs.groupby("seed").tokens.max().drop(reached.index)
        times[name] = stats.CensoredData(uncensored=reached, right=censored)
        survival = stats.ecdf(times[name]).sf
        half = survival.quantiles[survival.probabilities <= 0.5]
        medians[name] = float(half[0]) if len(half) else None
    for a, b in plan["tests"]:
        if any(medians.get(name) for name in (a, b)):
            p[f"{a}-{b}"] = float(stats.logrank(times[a], times[b]).pvalue)
    return {"median": medians, "p": p}


def multiples(table, ladder):
    """Return {arm: {"flops", "seconds"}}: what the ladder's model needs for the loss of the arm,
    over the arm's own; None beyond the ladder.

    Args:
      ladder: DataFrame with flops, seconds and loss of runs of one model at several budgets.
    """
    points = ladder.groupby("flops").mean().reset_index().sort_values("loss")
    found = {}
    for name, runs in table.groupby("name"):
        loss, found[name] = runs.loss.mean(), {}
        for key in ("flops", "seconds"):
            needed = np.interp(loss, points.loss, np.log(points[key]), math.nan, math.nan)
            value = math.exp(needed) / runs[key].mean()
            found[name][key] = value if math.isfinite(value) else None
    return found


def describe(plan, table, report):
    """Return the tables of arms and tests as Markdown, and what else there is to know."""
    numbers = table.select_dtypes(float).dropna(axis=1, how="all")
    columns = [name for name in numbers if name != "flops"]  # equal in all runs
    arms = tables.means_markdown(table[["name", "seed", *columns]])
    titles = ["", "seeds", "difference (nats)", "%", "p", "p of equivalence", "verdict"]
    rows, lines = [], []
    for row in report["tests"]:
        numbers = [""] * 4
        if row["look"]:
            ends = {"d": row["difference"], "d_low": row["low"], "d_high": row["high"]}
            numbers = [tables.with_interval(ends, "d"), row["percent"]]
            numbers += [row["p"], row["equivalence_p"]]
        note = f" ({row['note']})" if row["note"] else ""
        test = f"{row['name']} - {row['against']}"
        rows.append([test, row["look"], *numbers, row["verdict"] + note])
    for test, row in report["at_equal_gain"].items():
        if row:
            ends = f"{row['difference']:.4f} ({row['low']:.4f} to {row['high']:.4f})"
            lines.append(f"{test} at equal gain, the part that does not go through copying: {ends}")
    for name, tokens in report["tokens_to_copy"]["median"].items():
        if tokens:
            lines.append(f"{name}: half of the runs copy after {quantity(tokens)} tokens")
    for name, row in report["multiples"].items():
        if row["flops"]:
            seconds = f", {row['seconds']:.2f} times its seconds" if row["seconds"] else ""
            lines.append(f"{name}: as the ladder at {row['flops']:.2f} times its FLOPs{seconds}")
    levels = statistics.Levels(**plan["levels"])
    lines.append(
        f"95% intervals; margin {plan['margin']:g} nats; one-sided levels of each look: "
        f"equivalence {levels.equivalence:g}, difference {levels.difference:g}; order: "
        f"{plan['order']}"
    )
    return "\n".join([arms, tables.markdown(titles, rows), "", *lines, *report["warnings"]])


def draw(plan, table, rows, curves, path):
    """A picture: losses of all runs, differences beside the margin, gains by copying."""
    import seaborn as sns
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    losses, differences, gains = figure.subplots(1, 3)
    sns.stripplot(table, x="loss", y="name", hue="name", ax=losses)
    losses.set(xlabel="held-out loss (nats)", ylabel="", title="every run")
    for y, row in enumerate(row for row in rows if row["look"]):
        error, text = row["high"] - row["difference"], f"{row['name']} - {row['against']}"
        differences.errorbar(row["difference"], y, xerr=error, fmt="o", capsize=3, color="black")
        options = dict(textcoords="offset points", ha="center")
        text = f"{text}: {row['verdict']}"
        differences.annotate(text, (row["difference"], y), (0, 8), **options)
    differences.axvspan(-plan["margin"], plan["margin"], color="0.9", zorder=0)
    differences.axvline(0, color="black", linewidth=0.8)
    differences.set(yticks=[], xlabel="difference (nats)", title="95% intervals; grey: equivalent")
    differences.margins(x=0.3, y=0.3)
    # Runs that runs.csv alone knows have no curve, only its end.
    curves = pd.concat([curves, table[["name", "seed", "tokens", "gain"]]])
    options = dict(hue="name", units="seed", estimator=None, marker="o", ax=gains)
    sns.lineplot(curves, x="tokens", y="gain", **options)
    gains.set(ylabel="gain by copying (nats)", title="copying")
    figure.savefig(path, dpi=110)
