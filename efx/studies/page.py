"""Pages of HTML that need nothing but a browser: no network, no other file.

    write_page(path, title, [Section("Losses", [paragraph("..."), figure(traces, layout)])])

A page is sections of blocks. A block is a template of efx/studies/pages, which is filled with
`values`, and, if it moves, a script of that folder, which gets the block's element and its `data`.
Whatever comes from a run (names, settings, samples) is hostile until it is escaped, which values
and data are by themselves: Jinja2 escapes the former, the latter are JSON without a "<". What
Plotly draws has a markup of its own: text in `traces` and `layout` goes through `plain`. The
page's policy lets the browser run no script but those that are written here, and load nothing.

A block with a template and a script of its own:

    pages/map.html   <div class="map">{{ count }} tokens</div>
    pages/map.js     efx.block("map.js", (element, data) => {
                         efx.plot(element.querySelector(".map"), data.traces, {height: 300})
                     })
    Block("map.html", {"count": 3}, script="map.js", data={"traces": [...]})

`efx.plot(element, traces, layout)` draws a Plotly figure in the page's colours, light or dark as
the reader's system is, and draws it anew when called again; `efx.plain(text)` is `plain`.
Drawing and filling in need the extra `studies`. `frame` shows a page in a notebook.
"""

import base64
import dataclasses
import functools
import hashlib
import html
import itertools
import pathlib

from efx import io
from efx.errors import UsageError, extra
from efx.studies import cli

FOLDER = pathlib.Path(__file__).parent / "pages"
# Colours that stay apart on a light and on a dark page, for runs, families and the like.
COLOURS = (
    "#4c8bd6", "#f0883e", "#3fa66b", "#e0526e", "#9a6fd0",
    "#b08a2e", "#2ba7b5", "#d56bb1", "#7f8fa3", "#8a6d5b",
)  # fmt: skip
# Kinds of lines and of points, of Plotly, for what a colour does not say.
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "triangle-up", "diamond")


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a page.

    Attributes:
      template: a file of efx/studies/pages.
      values: {name: value} that the template shows, escaped.
      script: a file of efx/studies/pages, which calls `efx.block(its name, function)`; "": none.
      data: what the function gets beside the element: plain data, arrays, no NaN.
    """

    template: str
    values: dict = dataclasses.field(default_factory=dict)
    script: str = ""
    data: object = None


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    heading: str
    blocks: list


def paragraph(text, kind="text"):
    """kind: "text", "note" (small), or "warning" (what a reader must not miss)."""
    return Block("paragraph.html", {"text": text, "kind": kind})


def figure(traces, layout, height=440):
    """A Plotly figure: its traces and layout as plain data."""
    data = {"traces": traces, "layout": layout}
    return Block("figure.html", {"height": height}, script="figure.js", data=data)


def table(columns, rows, colours=None, further=0, what=""):
    """A table that a click on a heading sorts, by numbers if the column has them.

    Args:
      columns: the headings.
      colours: of each row, as in a figure above or below the table; None: no colours.
      rows: lists of cells as long as `columns`: a text, a number, None, or (what is shown, what it
        is sorted by). A column is one of numbers if all that it is sorted by are.
      further: so many of the last columns are hidden until a switch is on, which says `what` they
        are.
    """
    values = _table(columns, rows, colours, further) | {"sortable": True, "what": what}
    return Block("table.html", values, script="table.js")


def folded(summary, paragraphs, columns, rows):
    """A table, with what is said of it, which a click on the summary shows. No heading sorts it:
    cells may be blank where they say what those above do."""
    values = _table(columns, rows) | {"sortable": False}
    return Block("folded.html", values | {"summary": summary, "paragraphs": paragraphs})


def _table(columns, rows, colours=None, further=0):
    cells = [[_cell(cell) for cell in row] for row in rows]
    numeric = [_all_numbers([row[i][1] for row in cells]) for i in range(len(columns))]
    return {
        "columns": list(zip(columns, numeric, strict=True)),
        "further": further,
        "rows": list(zip(cells, colours or [""] * len(cells), strict=True)),
    }


def _cell(cell):
    """(what is shown, what it is sorted by)"""
    if isinstance(cell, tuple):
        return cell
    return ("" if cell is None else str(cell)), cell


def _all_numbers(keys):
    kinds = {type(key) for key in keys if key is not None}
    return bool(kinds) and kinds <= {int, float}


def cut_names(names, most):
    """Names of at most so many characters, cut in their middles: their ends tell them apart as
    well as their beginnings do. Longer where cut ones would be the same."""
    for size in itertools.count(most):
        cut = [_cut(name, size) for name in names]
        if len({*cut}) == len({*names}):
            return cut


def _cut(name, most):
    end = most // 2
    return name if len(name) <= most else f"{name[: most - 1 - end]}…{name[-end:]}"


def plain(text):
    """Text for a Plotly figure, which would take what looks like a tag for one."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def output(out):
    """The path of a page; UsageError, before anything is computed, if none can be made there."""
    path = cli.new_file(out, (".html",), "page.html")
    _tools()
    return path


def write_page(path, title, sections, about=""):
    """Writes a page. about: text below the title, such as the command that wrote it."""
    jinja2, plotly = _tools()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "default": _listed}
    blocks = [block for section in sections for block in section.blocks]
    own = dict.fromkeys(block.script for block in blocks if block.script)
    scripts = [plotly, *(_script(name) for name in ("page.js", *own))]
    filled = [
        (
            section.heading,
            [
                (block, environment.get_template(block.template).render(block.values))
                for block in section.blocks
            ],
        )
        for section in sections
    ]
    text = environment.get_template("page.html").render(
        title=title,
        about=about,
        sections=filled,
        scripts=[(script, _hash(script)) for script in scripts],
    )
    # Names of files may have bytes that are no text.
    io.write_atomic(path, text.encode("utf-8", "replace").decode("utf-8"))


def frame(path, height=700):
    """HTML that shows a page within a notebook's output, for `IPython.display.HTML`.

    The whole page is in it: Colab shows outputs in a place of their own, from which no file of the
    runtime can be loaded. It is in ASCII, since the scripts have to stay what the page's policy
    knows them by, however the page around it is encoded.
    """
    text = html.escape(pathlib.Path(path).read_text(encoding="utf-8"))
    text = text.encode("ascii", "xmlcharrefreplace").decode()
    style = f"width: 100%; height: {int(height)}px; border: 0"
    return f'<div><iframe style="{style}" srcdoc="{text}"></iframe></div>'


def _tools():
    """(jinja2, the text of Plotly's script)."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(f"a page needs {extra('studies')}: {error.name} is missing") from error
    return jinja2, get_plotlyjs()


@functools.cache
def _script(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(script):
    """By which the page's policy knows a script that may run."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _listed(array):
    """An array or a numpy scalar as plain data."""
    return array.tolist()
