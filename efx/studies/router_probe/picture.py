"""The picture of a probe: what explains the choices, how many blocks a token goes through, router
weights."""

import numpy as np

from efx.studies import plot
from efx.studies.router_probe.analysis import BEYOND
from efx.studies.router_probe.report import combined

_ACROSS = 4  # histograms side by side


def draw(data, path):
    """Writes the PNG. Bars are 95% intervals, of several runs the standard deviation."""
    import matplotlib.figure  # takes half a second

    probe = combined(data["probes"])
    blocks = probe["blocks"]
    weights = {name: block for name, block in blocks.items() if block["weights"] is not None}
    lines = -(-len(weights) // _ACROSS)
    figure = matplotlib.figure.Figure((13, 4.6 + 2.3 * lines), layout="constrained")
    top, bottom = figure, None
    if weights:
        top, bottom = figure.subfigures(2, 1, height_ratios=[4.6, 2.3 * lines])
    axes = top.subplots(1, 3, width_ratios=[2.2, 1, 1])
    _draw_explained(blocks, axes[0])
    _draw_counts(probe["together"]["by_count"], axes[1])
    _draw_entropy(probe["together"]["by_count"], axes[2])
    if weights:
        below = bottom.subplots(lines, min(_ACROSS, len(weights)), squeeze=False).ravel()
        for axis, (name, block) in zip(below, weights.items(), strict=False):
            _draw_weights(name, block, axis)
        for axis in below[len(weights) :]:
            axis.set_axis_off()
        below[0].legend(fontsize="x-small")
    plot.save(figure, path, dpi=110)


def ends(cell):
    """[2]: how far the bar of a cell goes to the left and to the right."""
    if "interval" in cell:
        low, high = cell["interval"]
        return np.maximum([cell["mean"] - low, high - cell["mean"]], 0)
    return np.full(2, cell.get("spread", 0.0))


def _draw_explained(blocks, axis):
    from matplotlib import colormaps

    names = list(next(iter(blocks.values()))["choice"]) if blocks else []
    offsets = np.linspace(-0.3, 0.3, len(blocks)) if len(blocks) > 1 else [0.0]
    colours = colormaps["viridis"](np.linspace(0.0, 0.85, max(len(blocks), 1)))
    for (block, figures), offset, colour in zip(blocks.items(), offsets, colours, strict=False):
        label = block
        for y, name in enumerate(names):
            cell = figures["choice"][name]["explained"]
            if cell is not None:
                bar = dict(xerr=ends(cell)[:, None], color=colour, marker="o", markersize=4)
                axis.errorbar(cell["mean"], y + offset, capsize=2, label=label, **bar)
                label = None
    own = sum(name not in BEYOND for name in names)
    if own < len(names):
        axis.axhline(own - 0.5, color="0.8", linewidth=1)
    axis.axvline(0, color="0.6", linewidth=1, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("share of the choice's entropy that it explains, held out")
    axis.set_title("what explains whether a token is computed", fontsize="medium")
    axis.grid(axis="x", color="0.92")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="x-small")


def _draw_counts(by_count, axis):
    count = np.arange(len(by_count))
    shares = [of["share"]["mean"] for of in by_count]
    bars = np.stack([ends(of["share"]) for of in by_count], axis=-1)
    axis.bar(count, shares, yerr=bars, color="tab:blue", alpha=0.7, capsize=3, label="measured")
    independent = [of["independent"] for of in by_count]
    axis.plot(count, independent, "k_", markersize=18, label="if blocks chose independently")
    axis.set_xticks(count)
    axis.set_xlabel("blocks that compute a token")
    axis.set_ylabel("share of the tokens")
    axis.set_ylim(top=1.2 * max([*shares, *independent]))
    axis.legend(fontsize="x-small")


def _draw_entropy(by_count, axis):
    for name, colour in (("entropy", "tab:purple"), ("loss", "tab:gray")):
        there = [k for k, of in enumerate(by_count) if of[name] is not None]
        means = [by_count[k][name]["mean"] for k in there]
        bars = np.stack([ends(by_count[k][name]) for k in there], axis=-1)
        axis.errorbar(there, means, bars, color=colour, marker="o", capsize=3, label=name)
    axis.set_xticks(range(len(by_count)))
    axis.set_xlabel("blocks that compute a token")
    axis.set_ylabel("nats")
    axis.legend(fontsize="x-small")


def _draw_weights(name, block, axis):
    weights = block["weights"]
    edges = np.linspace(0, 1, len(weights["all"]) + 1)
    axis.stairs(weights["all"], edges, fill=True, color="0.8", label="all tokens")
    axis.stairs(weights["routed"], edges, fill=True, color="tab:blue", label="computed")
    axis.axvline(0.5, color="0.3", linewidth=1, label="0.5")
    if weights["threshold"] is not None:
        axis.axvline(weights["threshold"], color="tab:red", linestyle="--", label="decided at")
    share = f"{block['routed']['mean']:.1%} computed, {weights['above_half']['mean']:.1%} above 0.5"
    axis.set_title(f"{name}: {share}", fontsize="small")
    axis.set_xlabel("sigmoid of the score", fontsize="small")
    axis.set_ylabel("share of tokens", fontsize="small")
    axis.set_yscale("symlog", linthresh=1e-3)
    axis.set_ylim(bottom=0)
