"""What the report page shows of an isoFLOP study: points, fits, optima with their intervals, and
all tables that the study itself writes."""

import dataclasses
import itertools
import math
import re

import numpy as np

from efx import io
from efx.errors import UsageError
from efx.logging import quantity, tables
from efx.studies import isoflop, page
from efx.studies.isoflop import picture
from efx.studies.isoflop import report as isoflop_tables
from efx.studies.isoflop.bootstrap import with_draws

FILE = "isoflop.json"
_LABELS = 14  # of an axis of parameters, at most
_WIDTH, _LETTER, _LINE = 1300, 7, 20  # pixels of a legend, of a letter and of a line in it


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
class Optima:
    """The loss at the best size of one family over budgets.

    Attributes:
      family: its name.
      line: [4, N] by the law: budgets, losses, low and high ends; N is 0 without a law.
      measured: how many of these budgets are within those measured.
      marks: [4, M] the same by a parabola at budgets that have one.
    """

    family: str
    line: np.ndarray
    measured: int
    marks: np.ndarray


@dataclasses.dataclass(frozen=True)
class Study:
    """What is shown of a study.

    Attributes:
      fits: [Fit].
      optima: [Optima]; [] of one budget.
      budgets: those measured and those that are extrapolated to.
      forms: {column of the table of optima: format of its numbers}.
      cells: {(budget, family): {column: cell}}, as in efx.logging.tables.
      intervals: what the intervals are, in words.
      details: [Markdown of a table with its sentences] of all but the optima.
    """

    fits: list
    optima: list
    budgets: list
    forms: dict
    cells: dict
    intervals: str
    details: list


def study_of(data, where):
    """The Study in the data of efx.studies.isoflop, of the file `where`. All that this page knows
    of that package."""
    data = data["study"] if "study" in data else data
    points = isoflop.points_of(data, where)
    analysis = isoflop.analysis_of(points, data)
    fits = [
        _fit(analysis, family, measured, budget)
        for budget in analysis.budgets
        for family, measured in analysis.families.items()
        if budget in measured.budgets
    ]
    return Study(
        fits=fits,
        optima=_optima(analysis, data["further"]) if len(analysis.budgets) > 1 else [],
        budgets=[*analysis.budgets, *(analysis.budgets[-1] * x for x in data["further"])],
        forms=isoflop_tables.FORMS,
        cells=isoflop_tables.optima_table(analysis),
        intervals="Points are means over seeds, with one standard deviation. Lines and stars are of"
        f" the law, of parabolas where there is none; bands and bars are {isoflop_tables.LEVEL}%"
        " intervals of the bootstrap.",
        details=isoflop_tables.details(analysis, points, data),
    )


def _fit(analysis, family, measured, budget):
    here = measured.at(budget)
    parameters, means = measured.parameters[here], measured.means[here]
    fit = analysis.laws.get(family, analysis.parabolas[family])
    fitted = fit.measured.parameters[fit.measured.at(budget)]
    fine = np.geomspace(fitted.min(), fitted.max(), 60)
    if family in analysis.laws:
        draws = [with_draws(fit.loss_at(budget, size)) for size in fine]
        line = [_with_ends(one) for one in draws]
    else:
        line = [(loss,) * 3 for loss in fit.curve(budget, fine)]
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


def _optima(analysis, further):
    """[Optima] of all families."""
    budgets, inside = picture.smooth_budgets(analysis, further)
    found = []
    for family in analysis.families:
        by_law = {}
        if family in analysis.laws:
            by_law = {budget: analysis.laws[family].optimum(budget)[1] for budget in budgets}
        line, marks = _columns(by_law), _columns(analysis.parabolas[family].losses)
        measured = int((line[0] <= budgets[inside - 1]).sum())
        found.append(Optima(str(family), line, measured, marks))
    return found


def _columns(losses):
    """[4, N] budgets, losses and the ends of their intervals, of {budget: [R]}, where there is a
    loss; one without an interval is its own ends."""
    found = []
    for budget, losses_R in losses.items():
        estimate = with_draws(losses_R)
        if math.isfinite(estimate.value):
            found.append((budget, *_with_ends(estimate)))
    return np.array(found, float).reshape(-1, 4).T


def _ends(estimate):
    """(value, low, high) of an Estimate; None unless all three are finite."""
    ends = (estimate.value, *(estimate.interval(isoflop_tables.LEVEL) or (math.nan,) * 2))
    return ends if np.isfinite(ends).all() else None


def _with_ends(estimate):
    """The same, with the value for its ends where there is no finite interval."""
    return _ends(estimate) or (estimate.value,) * 3


def _spread(values):
    """Standard deviation over the first axis; 0 of one value."""
    return np.std(values, axis=0, ddof=1 if len(values) > 1 else 0)


def read(path):
    """The Study in a file: isoflop.json, or one of results/ that has its points."""
    try:
        data = io.read_json(path)
        return study_of(data, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {io.describe_os_error(error)}") from error
    except UsageError:  # which says all of it
        raise
    except (ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise UsageError(
            f"{path} is not the {FILE} of a study, nor a result with its points"
            f" ({type(error).__name__}: {error})"
        ) from error


# ---- on the page -------------------------------------------------------------------------------


def looks_of(study):
    """{(budget, family): (colour, dash, symbol)}, no two the same while there are enough of them. A
    colour is a budget and a line with its symbol a family; where families are more than symbols it
    is the other way round, and symbols are hollow once all colours are used."""
    budgets = list(dict.fromkeys(fit.budget for fit in study.fits))
    families = list(dict.fromkeys(fit.family for fit in study.fits))
    looks = list(zip(page.DASHES, page.SYMBOLS, strict=True))
    found = {}
    for (i, budget), (j, family) in itertools.product(enumerate(budgets), enumerate(families)):
        many = len(families) > len(looks)
        of_colour, of_look = (j, i) if many else (i, j)
        dash, symbol = looks[of_look % len(looks)]
        symbol += "-open" * (of_colour // len(page.COLOURS) % 2)
        found[budget, family] = page.COLOURS[of_colour % len(page.COLOURS)], dash, symbol
    return found


def traces(study):
    """Plotly's traces, which look as `looks_of` says; stars are the optima."""
    looks, drawn = looks_of(study), []
    for fit in study.fits:
        colour, dash, symbol = looks[fit.budget, fit.family]
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


def optima_traces(study):
    """Plotly's traces of the loss at the best size over budgets, a colour a family; dashed beyond
    the budgets that were measured."""
    drawn = []
    for i, one in enumerate(study.optima):
        colour = page.COLOURS[i % len(page.COLOURS)]
        symbol = page.SYMBOLS[i // len(page.COLOURS) % len(page.SYMBOLS)]
        none = not one.line.size and not one.marks.size
        name = page.plain(one.family + ": none within reach" * none)
        budgets, losses, low, high = one.line
        shared = {"type": "scatter", "legendgroup": name, "name": name}
        hidden = shared | {"showlegend": False}
        said = "%{fullData.name}<br>%{x:.3s}FLOPs<br>loss %{y:.4f} HOW<extra></extra>"
        band = {"x": [*budgets, *budgets[::-1]], "y": [*high, *low[::-1]], "hoverinfo": "skip"}
        parts = ((slice(0, one.measured), "solid"), (slice(max(one.measured - 1, 0), None), "dash"))
        drawn.append(
            hidden | band | {"fill": "toself", "mode": "none", "fillcolor": _faint(colour)}
        )
        for part, dash in parts:
            line = {"x": budgets[part], "y": losses[part], "mode": "lines"}
            line["hovertemplate"] = said.replace("HOW", "by the law")
            drawn.append(hidden | line | {"line": {"color": colour, "dash": dash}})
        # They stand for the family in the legend, also where no parabola has an optimum.
        budgets, losses, low, high = one.marks if one.marks.size else [[None]] * 4
        marks = {"x": budgets, "y": losses, "mode": "markers"}
        marks["marker"] = {"color": colour, "symbol": symbol, "size": 9}
        marks["hovertemplate"] = said.replace("HOW", "by a parabola")
        if one.marks.size:
            ends = {"array": high - losses, "arrayminus": losses - low}
            marks["error_y"] = {"type": "data", "symmetric": False, "thickness": 1.2, **ends}
        drawn.append(shared | marks)
    return drawn


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


def details_blocks(text):
    """Blocks of a table with its sentences, in the Markdown of `efx.logging.tables`: the table is
    folded away behind the beginning of the first sentence. None of a table without rows."""
    parts = text.split("\n\n")
    sentences = [part for part in parts if not part.startswith("|")]
    found = [part.splitlines() for part in parts if part.startswith("|")]
    if not found:
        return [page.paragraph("\n".join(sentences), "note")]
    (titles, _, *lines), count = found[0], found[0][0].count(" | ") + 1
    # What is best is bold there. A name may have a bar in it: then the cells after it are one.
    cells = [re.sub(r"\*\*(.+?)\*\*", r"\1 (best)", line[2:-2]) for line in lines]
    rows = [cell.split(" | ", count - 1) for cell in cells]
    rows = [row + [""] * (count - len(row)) for row in rows]
    if not rows:
        return []
    summary = re.split("[:;]", sentences[0])[0]
    said = [words for words in sentences if words.rstrip(":") != summary]
    return [page.folded(summary, said, titles[2:-2].split(" | "), rows)]


def _legend_lines(names):
    """Of a legend below a figure as wide as the page."""
    columns = max(1, _WIDTH // (_LETTER * max(map(len, names)) + 50))
    return -(-len(names) // columns)


def section(name, study):
    """The fits of a study, the tables of their optima and of all else, and the optimum's course."""
    sizes = picture.labelled_sizes(
        np.concatenate([fit.parameters for fit in study.fits]), most=_LABELS
    )
    layout = {
        "xaxis": {
            "title": {"text": "parameters"},
            "type": "log",
            "tickvals": sizes,
            "ticktext": [quantity(size) for size in sizes],
        },
        "yaxis": {"title": {"text": "held-out loss (nats a token)"}, "tickformat": ".3f"},
        # Below the title of the axis, however high the figure is.
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "hovermode": "closest",
    }
    note = (
        f"{study.intervals} A star is the best size of a budget; the first family is the baseline."
    )
    legend = [f"{fit.family}, {quantity(fit.budget, 'FLOPs')}" for fit in study.fits]
    blocks = [
        page.paragraph(note, "note"),
        page.figure(traces(study), layout, height=520 + _LINE * _legend_lines(legend)),
        page.table(["budget", "family", *study.forms], rows(study)),
    ]
    if study.optima:
        about = "The loss of the optimum over budgets: lines by the law, dashed beyond the budgets"
        about += " that were measured; marks by parabolas."
        axis = {"title": {"text": "training FLOPs"}, "type": "log", "tickvals": study.budgets}
        axis |= {"ticktext": [quantity(budget, "FLOPs") for budget in study.budgets]}
        ends = math.log10(study.budgets[0]), math.log10(max(study.budgets))
        axis |= {"range": [ends[0] - 0.05, ends[1] + 0.05]}  # a label at the very end is not drawn
        title = {"text": "held-out loss of the optimum (nats a token)"}
        layout = layout | {"xaxis": axis, "yaxis": layout["yaxis"] | {"title": title}}
        height = 440 + _LINE * _legend_lines([one.family for one in study.optima])
        blocks += [
            page.paragraph(about, "note"),
            page.figure(optima_traces(study), layout, height=height),
        ]
    for text in study.details:
        blocks += details_blocks(text)
    return page.Section(f"isoFLOP study {name}", blocks)
