"""What the report page shows of an isoFLOP study: points, fits, optima with their intervals."""

import dataclasses
import itertools

import numpy as np

from efx import reading, runfolder, tables
from efx.errors import UsageError
from efx.metrics import quantity
from efx.studies import isoflop, page

FILE = "isoflop.json"


@dataclasses.dataclass(frozen=True)
class Fit:
    """One family at one budget.

    Attributes:
      budget: training FLOPs. family: its name.
      sizes, parameters, means, spreads: [points] names, parameters, losses over seeds.
      line: [3, N] of the fit: parameters, losses, half the width of the interval around them.
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
    """The Study in the data of efx.studies.isoflop. All that this page knows of that module."""
    sizes, curves = isoflop.from_data(data)
    fits = []
    for (budget, family), curve in curves.items():
        optima = [optimum for optimum in curve.optima() if optimum]
        best = loss = None
        if optima:
            best = _around([optimum.parameters for optimum in optima])
            loss = _around([optimum.loss for optimum in optima])
        x = np.log(curve.parameters)
        fine = np.linspace(x.min(), x.max(), 60)
        of_seeds = [np.polyfit(x - x.mean(), losses, 2) for losses in curve.losses.T]
        lines = np.array([np.polyval(one, fine - x.mean()) for one in of_seeds])
        fits.append(
            Fit(
                budget=float(budget),
                family=str(family),
                sizes=list(sizes),
                parameters=curve.parameters,
                means=curve.losses.mean(1),
                spreads=_spread(curve.losses.T),
                line=np.stack([np.exp(fine), lines.mean(0), _spread(lines)]),
                best=best,
                loss=loss,
                note=f"enclosed in {len(optima)} of {curve.losses.shape[1]} seeds",
            )
        )
    return Study(
        fits=fits,
        forms=isoflop.FORMS,
        cells=isoflop.optima_table(sizes, curves),
        intervals="Points, fits and stars are means over seeds; bars, bands and ± are one standard"
        " deviation over seeds.",
    )


def _spread(values):
    """Standard deviation over the first axis; 0 of one value."""
    return np.std(values, axis=0, ddof=1 if len(values) > 1 else 0)


def _around(values):
    """(mean, low, high): one standard deviation around the mean."""
    mean, spread = float(np.mean(values)), float(_spread(values))
    return mean, mean - spread, mean + spread


def read(path):
    """The Study in a file: isoflop.json, or one of results/ that has its points."""
    try:
        data = reading.read_json(path)
        return study_of(data["curves"] if isinstance(data, dict) else data)
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
        x, y, half = fit.line
        band = {"x": [*x, *x[::-1]], "y": [*(y + half), *(y - half)[::-1]]}
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
        if fit.best:
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
