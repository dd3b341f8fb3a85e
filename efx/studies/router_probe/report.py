"""The tables of a probe, from its data."""

import itertools

from efx.logging import tables
from efx.studies.router_probe.analysis import BEYOND, LEVELS, TOGETHER

MOST_PAIRS = 10  # of blocks in a table, the most correlated

# Columns of a block in docs/results.md, and the formats of their numbers.
FORMS = {
    "computed": ".1%",
    **dict.fromkeys([*LEVELS, TOGETHER, *BEYOND], ".1%"),
    "entropy (Spearman)": ".3f",
    "the same within tokens": ".3f",
    "weights above 0.5": ".1%",
}


def combined(values):
    """Combine figures of several runs, of the same form: {mean, spread} of those with an interval,
    means of numbers. Figures of one run are returned unchanged."""
    values = [value for value in values if value is not None]
    if not values or len(values) == 1:
        return values[0] if values else None
    first = values[0]
    if isinstance(first, int | float):
        return sum(values) / len(values)
    if isinstance(first, list):
        return [combined(each) for each in zip(*values, strict=True)]
    if "mean" in first:
        return tables.summary([value["mean"] for value in values])
    there = [key for key in first if all(key in value for value in values)]
    return {key: combined([value[key] for value in values]) for key in there}


def cells(data):
    """{block: {column: cell}} with the columns of `FORMS`."""
    rows = {}
    for name, block in combined(data["probes"])["blocks"].items():
        correlation, weights = block["correlations"]["entropy"], block["weights"]
        rows[name] = {
            "computed": block["routed"],
            **{predictor: of["explained"] for predictor, of in block["choice"].items()},
            "entropy (Spearman)": correlation["spearman"],
            "the same within tokens": correlation["spearman within token"],
            "weights above 0.5": weights and weights["above_half"],
        }
        rows[name] = {title: cell for title, cell in rows[name].items() if cell is not None}
    return rows


def markdown(data):
    """All tables."""
    probe, runs = combined(data["probes"]), data["runs"]
    blocks = probe["blocks"]
    parts = ["\n".join(_about(data, probe))]
    if blocks:
        parts += [
            "## What explains whether a token is computed (share of the choice's entropy)",
            _predictors(blocks, "choice", "explained", ".1%", computed=True),
            "## The same as area under the ROC curve",
            _predictors(blocks, "choice", "auc", ".3f"),
        ]
        if any(block["score"] for block in blocks.values()):
            parts += [
                "## What explains the router's score (R²)",
                _predictors(blocks, "score", "explained", ".1%"),
            ]
        parts += ["## Correlations", _correlations(probe)]
        if any(block["weights"] for block in blocks.values()):
            parts += ["## Router weights", _weights(blocks)]
    parts += ["## By how many blocks a token is computed", _by_count(probe["together"])]
    if pairs := probe["together"]["pairs"]:
        parts += ["## Pairs of blocks", _pairs(pairs)]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    how = f"seeds {seeds}: mean ± standard deviation" if len(runs) > 1 else "intervals: 95%"
    return "\n\n".join([*parts, f"{how}, {runs[0]['machine']}, revision {runs[0]['revision']}."])


def _about(data, probe):
    run = data["runs"][0]
    chosen = "the causal decision" if data["selection"] == "causal" else "training's selection"
    yield f"# Router probe of {', '.join(run['run'] for run in data['runs'])}"
    yield ""
    yield f"{round(probe['tokens']):,} tokens in {round(probe['rows'])} rows of {run['text']}, step"
    yield f"{run['step']}, chosen by {chosen} (train_selection={run['selection']!r})."
    blocks = probe["blocks"].values()
    if blocks and not any(block["score"] for block in blocks):
        yield "A control has no router: its choices are probed, there are no scores."
    for name, count in probe["left_out"].items():
        yield f"{name} is left out: it decides about {round(count)} tokens only."
    for name, block in probe["blocks"].items():
        if block["choice"]["token"]["explained"] is None:
            yield f"{name} computes all tokens alike, so that there is nothing to explain."


def _predictors(blocks, of, figure, form, computed=False):
    """A row for each block, a column for each predictor that has the figure."""
    there = {name: block for name, block in blocks.items() if block[of] is not None}
    first = next(iter(there.values()))[of]
    names = [name for name, figures in first.items() if figure in figures]
    rows = []
    for name, block in there.items():
        own = [tables.text(block[name], ".1%") for name in ("routed", "overflow")] * computed
        rows.append([name, *own, *(tables.text(block[of][n][figure], form) for n in names)])
    titles = ["block", *["computed", "dropped over capacity"] * computed, *names]
    return tables.markdown(titles, rows)


def _correlations(probe):
    rows = []
    for name, block in probe["blocks"].items():
        rows += _correlation_rows(f"{name}, computed", block["correlations"])
        if block["score_correlations"] is not None:
            rows += _correlation_rows(f"{name}, score", block["score_correlations"])
    rows += _correlation_rows("number of blocks", probe["together"]["correlations"])
    kinds = list(probe["together"]["correlations"]["entropy"])
    return tables.markdown(["", "with", *kinds], rows)


def _correlation_rows(name, correlations):
    for other, kinds in correlations.items():
        yield [name, other, *(tables.text(cell, ".3f") for cell in kinds.values())]


def _weights(blocks):
    rows = []
    for name, block in blocks.items():
        if (weights := block["weights"]) is not None:
            threshold = weights["threshold"]
            decides = "" if threshold is None else f"{threshold:.3f}"
            rows.append([name, tables.text(weights["above_half"], ".1%"), decides])
    return tables.markdown(["block", "sigmoid of the score above 0.5", "decided at"], rows)


def _by_count(together):
    titles = ["blocks", "tokens", "if blocks chose independently", "entropy (nats)", "loss (nats)"]
    rows = [
        [
            count,
            tables.text(of["share"], ".1%"),
            f"{of['independent']:.1%}",
            tables.text(of["entropy"], ".3f"),
            tables.text(of["loss"], ".3f"),
        ]
        for count, of in enumerate(together["by_count"])
    ]
    return tables.markdown(titles, rows)


def _pairs(pairs):
    def strength(pair):
        return abs(pair[1]["correlation"]["mean"]) if pair[1]["correlation"] else 0.0

    rows = [
        [
            name,
            tables.text(pair["both"], ".1%"),
            f"{pair['independent']:.1%}",
            tables.text(pair["correlation"], ".3f"),
        ]
        for name, pair in itertools.islice(
            sorted(pairs.items(), key=strength, reverse=True), MOST_PAIRS
        )
    ]
    return tables.markdown(["blocks", "both compute", "if independent", "correlation"], rows)
