"""What the report page shows of an isoFLOP study: points, fits, optima with their intervals."""

import dataclasses
import itertools
import math

import numpy as np

from efx import reading, runfolder, tables
from efx.errors import UsageError
from efx.metrics import quantity
from efx.studies import isoflop, page
from efx.studies.isoflop import report as isoflop_tables
from efx.studies.isoflop.bootstrap import with_draws

FILE = "isoflop.json"


@dataclasses.dataclass(frozen=True)
class Fit:
    """One family at one budget.

    Attributes:
      budget: training FLOPs. family: its name.
      sizes, parameters, means, spreads: [points] names, parameters, losses over seeds.
      line: [4, N] of the fit: parameters, losses, low and high ends of their intervals.
      best, loss: (value, low, high) of the best size and of its loss; None where there is none.
      note: of how many seeds that is, or the like.
    """

    budget: float
    family: str
    sizes: list
    parameters: np.ndarray
    means: np.ndarray
    spreads: np.ndarray
    line: np.ndarray
    best: tuple | None
    loss: tuple | None
    note: str


@dataclasses.dataclass(frozen=True)
class Study:
    """What is shown of a study.

    Attributes:
      fits: [Fit].
      forms: {column of the table of optima: format of its numbers}.
      cells: {(budget, family): {column: cell}}, as in efx.tables.
      intervals: what the intervals are, in words.
    """

    fits: list
    forms: dict
    cells: dict
    intervals: str


def study_of(data):
    """The Study in the data of efx.studies.isoflop. All that this page knows of that package."""
    data = data["study"] if "study" in data else data
    analysis = isoflop.analysis_of(isoflop.points_of(data, FILE), data)
    fits = [
        _fit(analysis, family, measured, budget)
        for budget in analysis.budgets
        for family, measured in analysis.families.items()
        if budget in measured.budgets
    ]
    return Study(
        fits=fits,
        forms=isoflop_tables.FORMS,
        cells=isoflop_tables.optima_table(analysis),
        intervals="Points are means over seeds, with one standard deviation. Lines and stars are of"
        f" the law, of parabolas where there is none; bands and bars are {isoflop_tables.LEVEL}%"
        " intervals of the bootstrap.",
    )


def _fit(analysis, family, measured, budget):
    here = measured.at(budget)
    parameters, means = measured.parameters[here], measured.means[here]
    fine = np.geomspace(parameters.min(), parameters.max(), 60)
    fit = analysis.laws.get(family, analysis.parabolas[family])
    if family in analysis.laws:
        draws = [with_draws(fit.loss_at(budget, size)) for size in fine]
        line = [(one.value, *one.interval(isoflop_tables.LEVEL)) for one in draws]
    else:
        x, weights = np.log(parameters), np.sqrt(measured.seeds[here])
        parabola = np.polyfit(x - x.mean(), means, 2, w=weights)
        line = [(loss,) * 3 for loss in np.polyval(parabola, np.log(fine) - x.mean())]
    how = "by the law" if family in analysis.laws else "by a parabola"
    beyond = not parameters.min() <= fit.parameters[budget][0] <= parameters.max()
    best, loss = (_ends(with_draws(of[budget])) for of in (fit.parameters, fit.losses))
    return Fit(
        budget=float(budget),
        family=str(family),
        sizes=[measured.sizes[i] for i in here],
        parameters=parameters,
        means=means,
        spreads=np.array([_spread(np.array(measured.losses[i])) for i in here]),
        line=np.stack([fine, *np.array(line).T]),
        best=best,
        loss=loss,
        note=how + ", beyond the sizes measured" * beyond,
    )


def _ends(estimate):
    """(value, low, high) of an Estimate; None unless all three are finite."""
    ends = (estimate.value, *(estimate.interval(isoflop_tables.LEVEL) or (math.nan,) * 2))
    return ends if np.isfinite(ends).all() else None


def _spread(values):
    """Standard deviation over the first axis; 0 of one value."""
    return np.std(values, axis=0, ddof=1 if len(values) > 1 else 0)


def read(path):
    """The Study in a file: isoflop.json, or one of results/ that has its points."""
    try:
        data = reading.read_json(path)
        return study_of(data)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {runfolder.reason(error)}") from error
    except (ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise UsageError(
            f"{path} is not the {FILE} of a study, nor a result with its points"
            f" ({type(error).__name__}: {error})"
        ) from error


# ---- on the page -------------------------------------------------------------------------------


def traces(study):
    """Plotly's traces: a colour is a budget, a line and a symbol are a family, stars the optima."""
    budgets = list(dict.fromkeys(fit.budget for fit in study.fits))
    families = list(dict.fromkeys(fit.family for fit in study.fits))
    colours = dict(zip(budgets, itertools.cycle(page.COLOURS)))
    looks = dict(zip(families, itertools.cycle(zip(page.DASHES, page.SYMBOLS, strict=True))))
    drawn = []
    for fit in study.fits:
        colour, (dash, symbol) = colours[fit.budget], looks[fit.family]
        name = page.plain(f"{fit.family}, {quantity(fit.budget, 'FLOPs')}")
        # Switched on and off together; the points stand for all in the legend.
        shared = {"type": "scatter", "legendgroup": name, "name": name}
        beside = shared | {"hoverinfo": "skip", "showlegend": False}
        x, y, low, high = fit.line
        band = {"x": [*x, *x[::-1]], "y": [*high, *low[::-1]]}
        points = {
            "x": fit.parameters,
            "y": fit.means,
            "error_y": {"type": "data", "array": fit.spreads, "thickness": 1.2},
            "mode": "markers",
            "marker": {"color": colour, "symbol": symbol, "size": 8},
            "text": [page.plain(size) for size in fit.sizes],
            "hovertemplate": "%{fullData.name}<br>%{text}: %{x:.3s} parameters<br>"
            "loss %{y:.4f}<extra></extra>",
        }
        drawn += [
            beside | band | {"fill": "toself", "mode": "none", "fillcolor": _faint(colour)},
            beside | {"x": x, "y": y, "mode": "lines", "line": {"color": colour, "dash": dash}},
            shared | points,
        ]
        if fit.best and fit.loss:
            drawn.append(shared | _star(fit, colour) | {"showlegend": False})
    return drawn


def _star(fit, colour):
    (best, *best_ends), (loss, *loss_ends) = fit.best, fit.loss
    said = (
        "%{fullData.name}",
        f"best size: {quantity(best)} parameters ({' to '.join(map(quantity, best_ends))})",
        f"its loss: %{{y:.4f}} ({loss_ends[0]:.4f} to {loss_ends[1]:.4f})",
        page.plain(fit.note) + "<extra></extra>",
    )
    return {
        "x": [best],
        "y": [loss],
        "error_x": _bars(best, *best_ends),
        "error_y": _bars(loss, *loss_ends),
        "mode": "markers",
        "marker": {
            "symbol": "star",
            "size": 15,
            "color": colour,
            "line": {"width": 1, "color": "#14171c"},
        },
        "hovertemplate": "<br>".join(said),
    }


def _bars(value, low, high):
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value],
        "arrayminus": [value - low],
        "thickness": 1.5,
    }


def _faint(colour):
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def rows(study):
    """Rows of the table of optima, as `page.table` takes them."""
    found = []
    for (budget, family), cells in study.cells.items():
        row = [(quantity(budget, "FLOPs"), float(budget)), str(family)]
        for title, form in study.forms.items():
            cell = cells.get(title)
            key = cell["mean"] if isinstance(cell, dict) else cell
            # A text among numbers says why there is none.
            key = None if isinstance(key, str) and form != "text" else key
            row.append((tables.text(cell, form), key))
        found.append(row)
    return found


def section(name, study):
    """The fits of a study and the table of their optima."""
    layout = {
        "xaxis": {"title": {"text": "parameters"}, "type": "log", "tickformat": "~s"},
        "yaxis": {"title": {"text": "held-out loss (nats a token)"}, "tickformat": ".3f"},
        "legend": {"orientation": "h", "y": -0.18},
        "hovermode": "closest",
    }
    note = (
        f"{study.intervals} A star is the best size of a budget; the first family is the baseline."
    )
    blocks = [
        page.paragraph(note, "note"),
        page.figure(traces(study), layout, height=560),
        page.table(["budget", "family", *study.forms], rows(study)),
    ]
    return page.Section(f"isoFLOP study {name}", blocks)
