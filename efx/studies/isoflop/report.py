"""The tables of a study: what was measured, and what both approaches make of it."""

import math

import numpy as np
import scipy.stats

from efx.logging import quantity, tables
from efx.logging.tables import mean_and_spread, text
from efx.studies.isoflop import points as points_lib
from efx.studies.isoflop.analysis import growth, speedup
from efx.studies.isoflop.bootstrap import with_draws

LEVEL = 95  # percent, of the intervals in tables
_ENOUGH = 0.995  # share of draws with a number from which on none need be mentioned
_REJECTED = 0.01  # p of the lack of fit below which a law is said to miss its points

# Columns of the table of optima, and the formats of their numbers.
FORMS = {
    "least measured at": "text",
    "least measured": ".4f",
    "loss at the best size": ".4f",
    "its parameters": "quantity",
    "its FLOPs a token": "FLOPs",
    "residual": ".4f",
    "loss by the law": ".4f",
    "parameters by the law": "quantity",
    "loss over the baseline's": ".4f",
    "speedup in FLOPs": ".2f",
}


def cell(estimate, how=""):
    """A cell of a table: value and interval; a text where there is no value, and a note of draws
    that lack one. how: a further note, of what the value is by."""
    if math.isnan(estimate.value):
        return "none" + f"; in {estimate.share:.0%} of draws" * (estimate.share > 1 - _ENOUGH)
    interval = estimate.interval(LEVEL)
    notes = [f"{estimate.share:.0%} of draws"] * (estimate.share < _ENOUGH)
    notes = "; ".join((["no interval"] if interval is None else notes) + [how] * bool(how))
    found = {"mean": estimate.value}
    if interval is not None:
        found["interval"] = [end if math.isfinite(end) else None for end in interval]
    return found | ({"note": notes} if notes else {})


def speedup_cell(estimate, beyond=False, how=""):
    """`cell`, or a text where the baseline's curve ends before that loss, or begins below it: a
    curve by parabolas ends with the budgets, and so does that of a law that is not extrapolated.

    beyond: whether the baseline's own budget for that loss is larger than all that it was measured
      at: then the number is an extrapolation, which its cell says.
      how: as of `cell`.
    """
    if estimate.value in (0, math.inf):
        return "beyond the baseline's curve" if estimate.value else "the baseline begins there"
    found = cell(estimate, how)
    if beyond and isinstance(found, dict):
        found["note"] = "; ".join([*([found["note"]] if "note" in found else []), "extrapolated"])
    return found


def _beyond(analysis, budget, found):
    """Whether the baseline would need more FLOPs for that Speedup than it was measured at."""
    return found.flops.value * budget > analysis.families[analysis.base].budgets.max()


def optimum_cells(analysis, budget, family):
    """{column: cell} of a row of the table of optima; differences and speedups are by the law where
    both families have one, else by parabolas, which their cells say, and are of the seeds that both
    families have."""
    measured, fit = analysis.families[family], analysis.parabolas[family]
    here = measured.at(budget)
    # The minimum over sizes of a single seed is not comparable with a mean of three.
    here = here[measured.seeds[here] >= min(3, measured.seeds[here].max())]
    best = here[measured.means[here].argmin()]
    parameters, losses = fit.parameters[budget], fit.losses[budget]
    least, seeds = tables.summary(measured.losses[best].tolist()), measured.seeds[best]
    if seeds < max(of_family.seeds.max() for of_family in analysis.families.values()):
        least |= {"note": f"{seeds} seed{'s' * bool(seeds > 1)}"}
    cells = {
        "least measured at": measured.sizes[best],
        "least measured": least,
        "loss at the best size": cell(with_draws(losses)),
        "its parameters": cell(with_draws(parameters)),
    }
    if not math.isnan(fit.residual[budget]):
        cells["residual"] = fit.residual[budget]
    if not math.isnan(parameters[0]):
        cells["its FLOPs a token"] = float(measured.flops_per_token(parameters[0]))
    if family in analysis.laws:
        law = analysis.laws[family]
        cells["loss by the law"] = cell(with_draws(law.losses[budget]))
        cells["parameters by the law"] = cell(with_draws(law.parameters[budget]))
    if family == analysis.base:
        return cells
    pair, how = analysis.compared(analysis.laws, family, analysis.base), "by the law"
    if pair is None:
        pair, how = analysis.compared(analysis.parabolas, family, analysis.base), "by parabolas"
    own, base = pair
    if budget in base.losses:
        difference = with_draws(own.losses[budget] - base.losses[budget])
        cells["loss over the baseline's"] = cell(difference, how)
        found = speedup(base, own, budget)
        cells["speedup in FLOPs"] = speedup_cell(found.flops, _beyond(analysis, budget, found), how)
    return cells


def optima_table(analysis):
    """{(budget, family): {column: cell}}."""
    return {
        (budget, family): optimum_cells(analysis, budget, family)
        for budget in analysis.budgets
        for family, measured in analysis.families.items()
        if budget in measured.budgets
    }


def _rows(cells_of_rows, forms):
    """Lists of texts; cells_of_rows: [(first texts, {column: cell})]."""
    return [
        [*first, *(text(cells.get(title), form) for title, form in forms.items())]
        for first, cells in cells_of_rows
    ]


def _measured(analysis):
    """Losses by size, family and budget."""
    named = [quantity(budget, "FLOPs") for budget in analysis.budgets]
    titles = ["size", "family", "parameters", "FLOPs a token", *named]
    sizes = dict.fromkeys(size for one in analysis.families.values() for size in one.sizes)
    rows = []
    for size in sizes:
        here = {name: one for name, one in analysis.families.items() if size in one.sizes}
        for number, (family, measured) in enumerate(here.items()):
            points = [i for i, own in enumerate(measured.sizes) if own == size]
            losses = {measured.budgets[i]: measured.losses[i] for i in points}
            cells = [
                mean_and_spread(losses[budget].tolist()) if budget in losses else ""
                for budget in analysis.budgets
            ]
            parameters, flops = measured.parameters[points[0]], measured.flops[points[0]]
            begins = [size if not number else "", family]
            rows.append([*begins, quantity(parameters), quantity(flops, "FLOPs"), *cells])
    return f"Held-out loss (nats):\n\n{tables.markdown(titles, rows)}"


def _optima(analysis):
    titles = {title: FORMS[title] for title in list(FORMS)[:8]}
    rows = [
        ([quantity(budget, "FLOPs") if family == analysis.base else "", family], cells)
        for (budget, family), cells in optima_table(analysis).items()
    ]
    about = (
        "The optimum of each budget: the vertex of a parabola (approach 2, which is biased even"
        " without noise), of which are loss, parameters, FLOPs a token and residual, and by the law"
        " (approach 3), where its columns say so."
    )
    if analysis.within:
        about += (
            f" Fitted are the sizes within {analysis.within:g} times that of the least loss of"
            " their budget, in both directions."
        )
    return f"{about}\n\n{tables.markdown(['budget', 'family', *titles], _rows(rows, titles))}"


LAW_FORMS = {
    "E": ".4f", "A": ".4g", "B": ".4g", "a": ".3f", "b": ".3f", "residual": ".4f", "p": ".2g",
    "at a bound": ".0%", "best size grows as C to the": ".3f", "by parabolas": ".3f",
}  # fmt: skip


def _laws(analysis):
    """E, A, B, a, b and the growth of the best size; then why there are none."""
    rows, notes = [], []
    for family, fit in analysis.laws.items():
        law = fit.law
        cells = {name: cell(with_draws(getattr(law, name))) for name in ("E", "A", "B", "a", "b")}
        cells |= {
            "residual": fit.residual,
            "p": "" if math.isnan(fit.p) else fit.p,
            "at a bound": "itself" if law.one(0).at_a_bound() else fit.at_a_bound,
            "best size grows as C to the": cell(growth(fit)),
            "by parabolas": cell(growth(analysis.parabolas[family])),
        }
        rows.append(([family], cells))
        if fit.p < _REJECTED:
            notes.append(
                f"{family}: the law misses the means of its points by more than their seeds scatter"
                f" (p = {fit.p:.2g}); what it extrapolates is as much the form of the law as the"
                " data."
            )
        if not fit.extrapolates:
            notes.append(
                f"{family}: nothing is extrapolated by the law: a parameter of it is at a bound (E,"
                " A or B at 0, or an exponent at the end of the range searched)"
                + ("." if law.one(0).at_a_bound() else f" in {fit.at_a_bound:.0%} of draws.")
            )
    table = tables.markdown(["family", *LAW_FORMS], _rows(rows, LAW_FORMS))
    about = (
        "The law L = E + A / N^a + B / D^b, N all parameters, D tokens; p is that of the lack of"
        " fit, against the scatter of seeds where points have several; at a bound: the share of"
        " draws with E, A or B at 0 or an exponent at the end of the range searched, or the fit"
        " itself:"
    )
    parts = [about, table] * bool(rows)
    without = {}
    for family, why in analysis.refusals.items():
        without.setdefault(why, []).append(family)
    notes += [f"No law of {'; '.join(families)}: {why}." for why, families in without.items()]
    return "\n\n".join([*parts, *notes])


def _further(analysis, further):
    """Loss and size of the optimum at further budgets, by the laws that extrapolate; "" without."""
    laws = {family: fit for family, fit in analysis.laws.items() if fit.extrapolates}
    if not laws:
        return ""
    budgets = [analysis.budgets[-1] * factor for factor in further]
    rows = []
    for budget in budgets:
        for family, fit in laws.items():
            sizes, losses = fit.optimum(budget)
            cells = {"loss": cell(with_draws(losses)), "parameters": cell(with_draws(sizes))}
            rows.append(([quantity(budget, "FLOPs"), family], cells))
    forms = {"loss": ".4f", "parameters": "quantity"}
    titles = ["budget", "family", *forms]
    return (
        "The optimum of further budgets, extrapolated by the law:\n\n"
        f"{tables.markdown(titles, _rows(rows, forms))}"
    )


def _speedups(analysis):
    """How many times as much the baseline needs for the same loss."""
    forms = dict.fromkeys(
        f"{what}, {how}" for what in ("FLOPs", "seconds") for how in ("parabolas", "law")
    )
    by_parabolas = analysis.speedups(analysis.parabolas)
    by_law = analysis.speedups(analysis.laws)
    rows = []
    for (budget, family), found in by_parabolas.items():
        cells = {}
        for how, one in (("parabolas", found), ("law", by_law.get((budget, family)))):
            if one is not None:
                beyond = _beyond(analysis, budget, one)
                cells[f"FLOPs, {how}"] = speedup_cell(one.flops, beyond)
                cells[f"seconds, {how}"] = one.seconds and speedup_cell(one.seconds, beyond)
        rows.append(([quantity(budget, "FLOPs"), family], cells))
    titles = ["budget", "family", *forms]
    timed = sorted({b for m in analysis.families.values() for b in m.budgets[m.timed]})
    some = 0 < len(timed) < len(analysis.budgets)
    of = f" of {', '.join(quantity(budget, 'FLOPs') for budget in timed)}" if some else ""
    return (
        f"Effective speedup over {analysis.base}: how many times the training FLOPs, or seconds,"
        " it needs at its best size for the loss that the family has at its own, of the seeds that"
        " both have; intervals are of the scatter of losses and of runs' seconds. Seconds are those"
        f" of the runs{of}, on their machine and with what ran beside them; parabolas are read"
        " between the budgets alone, and what the law says beyond the budgets of"
        f" {analysis.base} is marked as extrapolated:\n\n"
        f"{tables.markdown(titles, _rows(rows, dict.fromkeys(forms, '.2f')))}"
    )


def _differences(analysis, other):
    """How the loss of the best size differs from that of the family `other`."""
    forms, rows = {"by parabolas": ".4f", "by the law": ".4f"}, []
    for budget in analysis.budgets:
        for family in analysis.families:
            cells = {}
            for title, fits in (
                ("by parabolas", analysis.parabolas),
                ("by the law", analysis.laws),
            ):
                pair = analysis.compared(fits, family, other)
                if pair and all(budget in fit.losses for fit in pair):
                    own, its = (fit.losses[budget] for fit in pair)
                    cells[title] = cell(with_draws(own - its))
            if family != other and cells:
                seeds = _seeds_in_common(analysis, family, other)
                rows.append(([quantity(budget, "FLOPs"), family, seeds], cells))
    titles = ["budget", "family", "seeds in common", *forms]
    return (
        f"The loss at the best size over that of {other} (nats), of the seeds that both have;"
        " intervals are of paired draws:\n\n"
        f"{tables.markdown(titles, _rows(rows, forms))}"
    )


def _pairs(analysis, other, told):
    """How the losses of seeds differ from those of the family `other` of the same size, budget and
    seed, where there are two such pairs or more; "" if there are not. told: families to leave out,
    whose own table has `other`."""
    theirs = _runs(analysis.families[other])
    rows = []
    for family, measured in analysis.families.items():
        groups = {}
        for (*place, seed), loss in _runs(measured).items():
            if family not in (other, *told) and (*place, seed) in theirs:
                groups.setdefault(tuple(place), {})[seed] = loss - theirs[*place, seed]
        for (budget, size), of_seeds in groups.items():
            if len(of_seeds) > 1:
                differences = [*of_seeds.values()]
                interval = scipy.stats.ttest_1samp(differences, 0).confidence_interval(LEVEL / 100)
                cell = text({"mean": np.mean(differences), "interval": interval}, ".4f")
                seeds = ", ".join(map(str, of_seeds))
                rows.append([quantity(budget, "FLOPs"), family, size, seeds, cell])
    if not rows:
        return ""
    titles = ["budget", "family", "size", "seeds in common", "difference"]
    return (
        f"The loss over that of {other} of the same size (nats), by pairs of seeds, with {LEVEL}%"
        " intervals by Student's t of the pairs alone:\n\n"
        f"{tables.markdown(titles, rows)}"
    )


def _runs(measured):
    """{(budget, size, seed): loss} of a family."""
    places = zip(measured.budgets, measured.sizes, measured.numbers, measured.losses, strict=True)
    return {
        (budget, size, int(number)): float(loss)
        for budget, size, numbers, losses in places
        for number, loss in zip(numbers, losses, strict=True)
    }


def rates_table(points):
    """Losses by size and learning rate of the runs that looked for the best one; "" without any."""
    tried = [point for point in points if not point.fitted]
    if not tried:
        return ""
    budget, losses = tried[0].run.budget, {}
    seeds = {(point.run.family, point.run.size): point.run.seed for point in tried}
    for point in points:
        run = point.run
        if run.budget == budget and seeds.get((run.family, run.size)) == run.seed:
            losses.setdefault((run.family, run.size), {})[run.rate] = (
                math.inf if point.loss is None else point.loss
            )
    rates = sorted({rate for of_rates in losses.values() for rate in of_rates})
    rows, best_rates = [], {}
    families = list(dict.fromkeys(family for family, _ in losses))
    for family, size in sorted(losses, key=lambda place: families.index(place[0])):
        of_rates = losses[family, size]
        best = min(of_rates, key=of_rates.get)
        best_rates.setdefault(family, []).append(best)
        named = {rate: f"{loss:.4f}" for rate, loss in of_rates.items()}
        named = {rate: "not finite" if "inf" in name else name for rate, name in named.items()}
        named[best] = f"**{named[best]}**"
        ends = "at the end" if best in (min(of_rates), max(of_rates)) else ""
        rows.append([family, size, *(named.get(rate, "") for rate in rates), ends])
    titles = ["family", "size", *(f"{rate:g}" for rate in rates), "best"]
    ranges = "; ".join(
        f"{family}: {min(best):g} for all sizes"
        if len({*best}) == 1
        else f"{family}: {min(best):g} to {max(best):g}, {max(best) / min(best):.3g} times"
        for family, best in best_rates.items()
    )
    return (
        f"Held-out loss by learning rate at {quantity(budget, 'FLOPs')}, first seed; the best rate"
        f" of each size is that of its other runs. Where it is the least or the greatest tried, a"
        f" better one may lie beyond:\n\n{tables.markdown(titles, rows)}\n\nBest rates: {ranges}."
    )


def copying_table(points):
    """What repeats gain, beside the losses, by family, size and learning rate; "" where that was
    not measured."""
    groups = {}
    for point in points:
        if point.copied is not None:
            place = point.run.budget, point.run.family, point.run.size, point.run.rate
            groups.setdefault(place, []).append(point)
    rated = any(rate is not None for *_, rate in groups)
    rows = []
    for (budget, family, size, rate), group in groups.items():
        losses, copied = ([getattr(p, of) for p in group] for of in ("loss", "copied"))
        own = "" if rate is None else f"{rate:g}"
        begins = [quantity(budget, "FLOPs"), family, size, *[own] * rated]
        losses = "not finite" if None in losses else mean_and_spread(losses)
        each = ", ".join(f"{nats:.2f}" for nats in copied) if len(group) > 1 else ""
        rows.append([*begins, losses, tables.text(tables.summary(copied), ".2f"), each])
    if not rows:
        return ""
    places = ["budget", "family", "size", *["rate"] * rated]
    titles = [*places, "held-out loss", "gain", "of each seed"]
    return (
        "How many nats a token costs less where a row of random tokens repeats itself: what a model"
        f" copies from its context:\n\n{tables.markdown(titles, rows)}"
    )


def _seeds_in_common(analysis, family, other):
    """Which seeds both have, at any of the points that both have."""
    own, its = (_runs(analysis.parabolas[name].measured) for name in (family, other))
    numbers = {number for *_, number in own.keys() & its.keys()}
    return ", ".join(map(str, sorted(numbers)))


def _degrees(analysis):
    """How many degrees of freedom the intervals of each family are of."""

    def said(fit):
        if fit is None:
            return ""
        points, seeds = fit.degrees
        found = f"{points} of points, {seeds} of seeds"
        return found + ": no interval" * (not fit.degrees.suffice)

    rows = [
        [family, said(fit), said(analysis.laws.get(family))]
        for family, fit in analysis.parabolas.items()
    ]
    return (
        "Degrees of freedom that intervals are of: means of points about the fit, and seeds about"
        " their mean. With one of points or none what a fit misses is not known, and there is no"
        " interval:\n\n"
        f"{tables.markdown(['family', 'parabolas', 'law'], rows)}"
    )


def details(analysis, points, study):
    """[table with its sentence] of all but the optima: what was measured, learning rates, laws,
    what they extrapolate, speedups, differences to other families.

    study: a dict with `further`, the times of the greatest budget that are extrapolated to, and
      perhaps `against`, the families that all others are compared with.
    """
    return [*_of_points(analysis, points), *_of_fits(analysis, study)]


def _of_points(analysis, points):
    parts = _measured(analysis), rates_table(points), copying_table(points)
    return [part for part in parts if part]


def _of_fits(analysis, study):
    parts = [_degrees(analysis), _laws(analysis)]
    if analysis.laws:
        parts.append(_further(analysis, study["further"]))
    if len(analysis.families) > 1 and len(analysis.budgets) > 1:
        parts.append(_speedups(analysis))
    against = study.get("against", ())
    for i, other in enumerate(against):
        parts += [_differences(analysis, other), _pairs(analysis, other, against[:i])]
    return [part for part in parts if part]


def markdown(analysis, points, study, facts):
    """All tables; study: see `details`. facts: a sentence on what they are of."""
    parts = [*_of_points(analysis, points), _optima(analysis), *_of_fits(analysis, study)]
    machines = points_lib.machines(points)
    if len(machines) > 1:
        parts.append(
            f"Seconds are not compared: the runs are of different machines ({'; '.join(machines)})."
        )
    most = max(measured.seeds.max() for measured in analysis.families.values())
    least = min(measured.seeds.min() for measured in analysis.families.values())
    seeds = f"{least} to {most} seeds" if least < most else f"{most} seed{'s' * bool(most > 1)}"
    parts.append(
        f"{facts}; {seeds} a point, mean ± standard deviation; in parentheses {LEVEL}% intervals of"
        f" {analysis.draws} bootstrap draws over points and seeds. Differences and speedups are of"
        " the seeds that both families have."
    )
    return "\n\n".join(parts) + "\n"


def as_data(analysis, further):
    """What the tables say, with 80% and 95% intervals, as plain data."""

    def data(values):
        return with_draws(np.asarray(values)).as_data()

    found = {"draws": analysis.draws, "parabolas": [], "laws": [], "speedups": []}
    for family, fit in analysis.parabolas.items():
        for budget in fit.losses:
            row = {"family": family, "budget": budget}
            residual = fit.residual[budget]
            row |= {"residual": None if math.isnan(residual) else residual}
            row |= {"degrees": fit.degrees._asdict()}
            row |= {"loss": data(fit.losses[budget]), "parameters": data(fit.parameters[budget])}
            found["parabolas"].append(row)
    for family, fit in analysis.laws.items():
        law = {name: data(getattr(fit.law, name)) for name in ("E", "A", "B", "a", "b")}
        optima = []
        beyond = [analysis.budgets[-1] * factor for factor in further] * fit.extrapolates
        for budget in [*fit.losses, *beyond]:
            sizes, losses = fit.optimum(budget)
            row = {"budget": budget, "measured": budget in fit.losses}
            optima.append(row | {"loss": data(losses), "parameters": data(sizes)})
        row = {"family": family, "residual": fit.residual, "law": law, "optima": optima}
        row |= {"p": None if math.isnan(fit.p) else fit.p, "at_a_bound": fit.at_a_bound}
        row |= {"degrees": fit.degrees._asdict(), "extrapolates": fit.extrapolates}
        found["laws"].append(row | {"growth": growth(fit).as_data()})
    for how, fits in (("parabolas", analysis.parabolas), ("law", analysis.laws)):
        for (budget, family), one in analysis.speedups(fits).items():
            row = {"family": family, "budget": budget, "by": how, "flops": one.flops.as_data()}
            row["seconds"] = one.seconds and one.seconds.as_data()
            found["speedups"].append(row)
    return found
