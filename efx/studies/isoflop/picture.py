"""The picture of a study: curves of each budget, the optimum over budgets, and speedups."""

import itertools

import numpy as np

from efx.logging import quantity
from efx.studies import plot
from efx.studies.isoflop.bootstrap import LEVELS

_NO_END = 1e6  # drawn for infinity
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "v"))  # line and marker of a family
_LABELS = 10  # of an axis of parameters, at most: they stand beside each other
_LEGEND = 0.17  # inches of a line of a legend


def draw(analysis, path, further):
    """Writes the PNG. Bands are 80% and 95% intervals; lines are dashed beyond the budgets."""
    import matplotlib.figure  # takes half a second

    told = any(np.isfinite(one.flops.value) for one in analysis.speedups(analysis.laws).values())
    panels = 1 + (len(analysis.budgets) > 1) + told
    # Legends stand below, where they cover no curve, and take no height from the panels.
    lines = len(analysis.families) * (1 if _many(analysis) else len(analysis.budgets))
    height = 4.6 + _LEGEND * (1 + (lines + _many(analysis) * len(analysis.budgets)) // 2)
    figure = matplotlib.figure.Figure((6.2 * panels, height), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    _draw_curves(analysis, axes[0])
    if len(analysis.budgets) > 1:
        _draw_optima(analysis, axes[1], further)
    if panels == 3:
        _draw_speedups(analysis, axes[2], further)
    for axis in axes:
        _legend_below(axis)
    plot.save(figure, path, dpi=110)


def _many(analysis):
    """Whether colours tell families apart, since there are more than styles, or one budget."""
    return len(analysis.families) > len(_STYLES) or len(analysis.budgets) == 1


def _legend_below(axis):
    """The legend of a panel, below the label of its axis however high the panel is."""
    from matplotlib.transforms import ScaledTranslation

    inches = axis.get_figure().dpi_scale_trans
    below = axis.transAxes + ScaledTranslation(0, -0.5, inches)
    options = dict(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below)
    axis.legend(fontsize="x-small", ncols=2, handlelength=3, **options)


def _styles(analysis):
    """{family: (line, marker)}, and {family: colour}."""
    from matplotlib import colormaps

    styles = dict(zip(analysis.families, itertools.cycle(_STYLES)))
    colours = [colormaps["tab10"](i % 10) for i in range(len(analysis.families))]
    return styles, dict(zip(analysis.families, colours, strict=True))


def _band(axis, x, draws_XR, colour):
    """The intervals of draws over x, the narrow one darker; one without an end leaves the axes."""
    some_X = ~np.isnan(draws_XR).all(1)
    if not some_X.any():
        return
    x, draws_XR = x[some_X], np.minimum(draws_XR[some_X], _NO_END)
    for level in LEVELS:
        tail = (100 - level) / 2
        ends = np.nanpercentile(draws_XR, [tail, 100 - tail], axis=1, method="inverted_cdf")
        axis.fill_between(x, *ends, color=colour, alpha=0.13, linewidth=0)


def _draw_curves(analysis, axis):
    """Losses over parameters: a colour a budget and a style a family, or the other way round where
    `_many`; stars at the optima; curves of the law with their intervals, or
    parabolas of families without one."""
    from matplotlib import colormaps

    shades = colormaps["viridis"](np.linspace(0.0, 0.85, len(analysis.budgets)))
    by_budget = dict(zip(analysis.budgets, zip(shades, itertools.cycle(_STYLES)), strict=False))
    styles, colours = _styles(analysis)
    many, stars = _many(analysis), 0
    for family, measured in analysis.families.items():
        fit = analysis.laws.get(family, analysis.parabolas[family])
        for budget in sorted({*measured.budgets}):
            here, (colour, style) = measured.at(budget), by_budget[budget]
            colour, (line, marker) = (colours[family], style) if many else (colour, styles[family])
            sizes, means = measured.parameters[here], measured.means[here]
            spreads = [np.std(measured.losses[i], ddof=len(measured.losses[i]) > 1) for i in here]
            axis.errorbar(
                sizes, means, spreads, color=colour, linestyle="", marker=marker, capsize=2
            )
            fitted = fit.measured.parameters[fit.measured.at(budget)]
            fine = np.geomspace(fitted.min(), fitted.max(), 40)
            if family in analysis.laws:
                losses = np.stack([fit.loss_at(budget, size) for size in fine])
                _band(axis, fine, losses[:, 1:], colour)
                losses = losses[:, 0]
            else:
                losses = fit.curve(budget, fine)
            axis.plot(fine, losses, color=colour, linestyle=line)
            if not many:
                label = f"{family}, {quantity(budget, 'FLOPs')}"
                axis.plot([], [], color=colour, linestyle=line, marker=marker, label=label)
            best, loss = fit.parameters[budget][0], fit.losses[budget][0]
            if fine[0] <= best <= fine[-1]:
                axis.plot(best, loss, "*", color=colour, markersize=13, markeredgecolor="black")
                stars += 1
    if many:
        for family, colour in colours.items():
            axis.plot([], [], color=colour, label=family)
        for budget, (_, (line, marker)) in by_budget.items():
            label = quantity(budget, "FLOPs")
            axis.plot([], [], color="black", linestyle=line, marker=marker, label=label)
    axis.set_xscale("log")
    ticks = labelled_sizes(np.concatenate([of.parameters for of in analysis.families.values()]))
    axis.set_xticks(ticks, [quantity(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("parameters")
    axis.set_ylabel("held-out loss (nats)")
    axis.set_title("each budget; stars: optima" if stars else "each budget; no size is the best")


def labelled_sizes(parameters, most=_LABELS):
    """Those of the sizes that have a label on a logarithmic axis, far enough from each other for
    `most` labels; the least and the greatest are among them."""
    sizes = sorted({float(size) for size in parameters})
    apart = np.log(sizes[-1] / sizes[0]) / most
    chosen = sizes[:1]
    for size in sizes[1:]:
        if np.log(size / chosen[-1]) >= apart:
            chosen.append(size)
    # The greatest in place of the last one, which may be too near to it.
    return [*chosen[:-1], sizes[-1]]


def smooth_budgets(analysis, further):
    """(budgets for a smooth curve, from the least measured to the furthest asked for, if any law
    says something of that; how many of them are within those measured)."""
    first, last = analysis.budgets[0], analysis.budgets[-1]
    inside = np.geomspace(first, last, 20)
    told = further and any(fit.extrapolates for fit in analysis.laws.values())
    beyond = np.geomspace(last, last * max(further), 12)[1:] if told else []
    return np.concatenate([inside, beyond]), len(inside)


def _line(axis, budgets, inside, draws_XR, colour, label, band=True):
    """A line over the budgets of what the fit says, dashed beyond those that were measured, with
    the intervals of its draws (`band`); where it says nothing they alone would be of half of the
    draws."""
    values = draws_XR[:, 0]
    if not np.isfinite(values).any():
        axis.plot([], [], color=colour, label=f"{label}: none within reach")
        return
    if band:
        _band(axis, budgets, draws_XR[:, 1:], colour)
    axis.plot(budgets[:inside], values[:inside], color=colour, label=label)
    axis.plot(budgets[inside - 1 :], values[inside - 1 :], color=colour, linestyle="--")


def _draw_optima(analysis, axis, further):
    """The loss of the optimum over budgets, by the law, and the vertices of parabolas."""
    styles, colours = _styles(analysis)
    budgets, inside = smooth_budgets(analysis, further)
    seen, bars = [], []
    for family, fit in analysis.parabolas.items():
        colour, marker = colours[family], styles[family][1]
        for budget, losses in fit.losses.items():
            if np.isfinite(losses[0]):
                drawn = losses[1:][np.isfinite(losses[1:])]
                ends = np.percentile(drawn, [2.5, 97.5]) if len(drawn) else [losses[0]] * 2
                errors = np.maximum([[losses[0] - ends[0]], [ends[1] - losses[0]]], 0)
                axis.errorbar(budget, losses[0], errors, color=colour, marker=marker, capsize=3)
                seen.append(losses[0])
                bars.extend(ends)
    for family in analysis.families:
        colour = colours[family]
        if family in analysis.laws:
            optimum = analysis.laws[family].optimum
            losses = np.stack([optimum(budget)[1] for budget in budgets])
            _line(axis, budgets, inside, losses, colour, family)
            seen.extend(_finite_ends(losses))
        else:
            axis.plot([], [], color=colour, label=family)
    if seen:
        axis.set_ylim(*_limits(seen, bars))
    _budget_axis(axis, analysis, further)
    axis.set_xlabel("training FLOPs")
    axis.set_ylabel("held-out loss of the optimum (nats)")
    axis.set_title("optima by the law; marks: by parabolas")


def _finite_ends(draws_XR):
    """The ends of the widest band of `_band`, and of the line in it."""
    some_X, tail = np.isfinite(draws_XR[:, 0]), (100 - max(LEVELS)) / 2
    drawn = np.where(np.isfinite(draws_XR), draws_XR, np.nan)[some_X]
    return np.nanpercentile(drawn, [tail, 100 - tail], axis=1).ravel()


def _limits(seen, bars):
    """(lowest, highest) of an axis with all that is seen. A bar, which may be far wider than what
    it belongs to, adds half of that at most and leaves the axes with the rest."""
    low, high = min(seen), max(seen)
    reach = 0.5 * (high - low) or max((abs(end - low) for end in bars), default=0.1)
    low, high = max(low - reach, min([low, *bars])), min(high + reach, max([high, *bars]))
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def _budget_axis(axis, analysis, further):
    """A logarithmic axis of FLOPs with the study's budgets for labels, and those asked for as far
    as something is drawn there."""
    axis.set_xscale("log")
    last, end = analysis.budgets[-1], axis.get_xlim()[1]
    beyond = [last * times for times in further if last * times <= end]
    ticks = labelled_sizes([*analysis.budgets, *beyond], 6)
    axis.set_xticks(ticks, [quantity(tick, "FLOPs") for tick in ticks])
    axis.minorticks_off()


def _draw_speedups(analysis, axis, further):
    """By the law: how many times the FLOPs the baseline needs."""
    _, colours = _styles(analysis)
    (budgets, inside), base = smooth_budgets(analysis, further), analysis.laws[analysis.base]
    axis.axhline(1.0, color=colours[analysis.base], label=analysis.base)
    highest = 1.5
    for family, fit in analysis.laws.items():
        if family == analysis.base:
            continue
        times = np.stack([base.reaching(fit.optimum(budget)[1])[0] / budget for budget in budgets])
        band = len(analysis.laws) <= len(_STYLES)  # of more, one covers the other
        _line(axis, budgets, inside, times, colours[family], family, band)
        highest = max([highest, *times[:inside][np.isfinite(times[:inside, 0]), 0]])
    axis.set_ylim(0, 2 * highest)
    axis.set_xlim(budgets[0], budgets[-1])
    _budget_axis(axis, analysis, further)
    axis.set_xlabel("training FLOPs of the family")
    axis.set_ylabel(f"FLOPs of {analysis.base} / FLOPs of the family")
    axis.set_title("effective speedup at equal loss")
