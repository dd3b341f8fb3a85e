"""The results that README and docs quote: data in results/, one page and two pictures made of it.

    python -m efx.studies.results
    python -m efx.studies.results --from runs/latent_table --name latent_table

Without --from: writes docs/results.md, its pictures, and the part of README.md between
`<!-- results -->` and `<!-- end of results -->`, all from results/*.json, the same bytes each time.

With --from: takes the table of a finished study (sweep, isoflop, cbtm_table, phatgoose, calm) out
of its WORKDIR into results/NAME.json first. Seeds, git revision and machine are read from the run
folders. What the file NAME.json says already (title, text, config, command, columns, which rows are
compared in the README) stays, but for `stale`, which is emptied; a new one needs --title,
--section and --command. --add keeps the rows that WORKDIR does not have, with their revision, and
`stale`, which may still be true of them.

A file holds

    title, section, about     what was measured; one of SECTIONS; text in Markdown
    stale                     why the numbers are not of today's settings; "" if they are
    config, sweep, commands   what it takes to measure again
    seeds, machine, revision, revision_of   a row may have a revision of its own
    headline                  [[row, the row it is compared with], ...] for the README
    picture                   "dots": the first column of every row, "curves": of an isoFLOP study
                              (from `curves`), "kept": docs/NAME.png as it is, or ""
    first, columns            title of the rows' names; {title: how its numbers are written}
    rows                      [{name, cells: {column: number, text, or {mean, spread, n}}}]

where numbers are written as `tables.number` has it, and the values of each seed stand beside mean
and spread (`values`) where they are known.
"""

import json
import pathlib
import re
import statistics
import sys

import numpy as np

from efx import tables
from efx.errors import UsageError, nearest
from efx.metrics import quantity
from efx.runfolder import write_atomic
from efx.studies import cli, isoflop, sweep

SECTIONS = (
    "Dense models",
    "Mixture-of-Depths",
    "Learned dropout and the encoder-decoder",
    "The grouped-latent transformer",
    "Composition of experts",
    "Speed",
)
# In the order in which they are written. Those with a default may be absent in a file.
FIELDS = {
    "title": None,
    "section": None,
    "about": "",
    "stale": "",
    "config": "",
    "sweep": "",
    "commands": None,
    "seeds": (),
    "machine": None,
    "revision": None,
    "revision_of": "the code that ran",
    "headline": (),
    "picture": "",
    "first": "run",
    "columns": None,
    "rows": None,
    "curves": (),
}
START, END = "<!-- results -->", "<!-- end of results -->"


def load(path):
    """The dict of a file of results, checked."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path}: no JSON: {error}") from error
    return check(path, found)


def check(path, found):
    """The same dict with a value for each of FIELDS; UsageError for what does not fit together."""
    for key in found:
        if key not in FIELDS:
            raise UsageError(f"{path}: {key!r} is not a field of a result{nearest(key, FIELDS)}")
    for key, default in FIELDS.items():
        if key not in found and default is None:
            raise UsageError(f"{path}: the result lacks {key!r}")
    found = FIELDS | found
    if found["section"] not in SECTIONS:
        hint = nearest(found["section"], SECTIONS)
        raise UsageError(f"{path}: section={found['section']!r} is not a section{hint}")
    names = [row["name"] for row in found["rows"]]
    for name in (name for pair in found["headline"] for name in pair):
        if name not in names:
            raise UsageError(f"{path}: headline names {name!r}, no row{nearest(name, names)}")
    for row in found["rows"]:
        for column in row["cells"]:
            if column not in found["columns"]:
                hint = nearest(column, found["columns"])
                raise UsageError(f"{path}: {row['name']}: {column!r} is not a column{hint}")
    return found


def save(path, result):
    """Writes the file: a field to a line, a row to a line, what is at its default left out."""
    lines = []
    for key, default in FIELDS.items():
        if result[key] in (default, list(default or ())):
            continue
        value = json.dumps(result[key], ensure_ascii=False)
        if key in ("commands", "rows", "curves"):
            parts = [f"  {json.dumps(part, ensure_ascii=False)}" for part in result[key]]
            value = "[\n" + ",\n".join(parts) + "\n ]"
        lines.append(f' "{key}": {value}')
    write_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load_all(folder):
    """{name: result} of a folder, sections in their order, names in alphabetical order in each."""
    found = {path.stem: load(path) for path in sorted(pathlib.Path(folder).glob("*.json"))}
    if not found:
        raise UsageError(f"{folder}: there are no results (*.json)")
    return dict(sorted(found.items(), key=lambda item: SECTIONS.index(item[1]["section"])))


# ---- the page ----------------------------------------------------------------------------------


def anchor(title):
    """What a heading's link is called where Markdown is shown: "#a-title"."""
    return "#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def table(result):
    """The table as Markdown."""
    columns = result["columns"]
    rows = []
    for row in result["rows"]:
        cells = [tables.text(row["cells"].get(title), form) for title, form in columns.items()]
        rows.append([row["name"], *cells])
    return tables.markdown([result["first"], *columns], rows)


def origin(result):
    """A sentence on where the numbers are from: config, seeds, machine, revisions."""
    parts = [f"`{result['config']}`"] if result["config"] else []
    if len(result["seeds"]) > 1:
        parts.append(f"seeds {', '.join(map(str, result['seeds']))}: mean ± standard deviation")
    parts += [result["machine"], f"revision {result['revision'][:9]} ({result['revision_of']})"]
    others = {}
    for row in result["rows"]:
        if "revision" in row:
            others.setdefault(row["revision"][:9], []).append(row["name"])
    parts += [f"revision {revision} for {'; '.join(names)}" for revision, names in others.items()]
    return "; ".join(parts) + "."


def section(name, result):
    """One result as Markdown, from its heading on."""
    parts = [f"### {result['title']}", result["about"]]
    if result["picture"]:
        parts.append(f"![{result['title']}]({name}.png)")
    if result["stale"]:
        parts.append(f"**Not as efx is today.** {result['stale']}")
    data = f"Data: [results/{name}.json](../results/{name}.json)"
    parts += [table(result), f"{origin(result)} {data}"]
    parts.append("```bash\n" + "\n".join(result["commands"]) + "\n```")
    return "\n\n".join(part for part in parts if part)


def page(results):
    """docs/results.md as text."""
    parts = [
        "# Results",
        "<!-- Written by `python -m efx.studies.results` from results/*.json: change those. -->",
        "Every figure that the README or a page of the documentation quotes. Differences in these "
        "pages are by pairs of seeds. One machine's small models: what they say of large ones is "
        "for larger runs of the same commands to tell.",
    ]
    for heading in SECTIONS:
        inside = {name: one for name, one in results.items() if one["section"] == heading}
        if inside:
            parts.append(f"## {heading}")
            parts += [section(name, one) for name, one in inside.items()]
    return "\n\n".join(parts) + "\n"


def readme_part(results):
    """What stands in the README between START and END: the picture and the headlines."""
    drawn = {name: one for name, one in results.items() if one["picture"] == "dots"}
    parts = [f"![{one['title']}](docs/{name}.png)" for name, one in drawn.items()]
    lines = ["| measured | held-out loss (nats) | against | its loss |", "|---|---|---|---|"]
    stale = False
    for one in results.values():
        column, form = next(iter(one["columns"].items()))
        cells = {row["name"]: tables.text(row["cells"][column], form) for row in one["rows"]}
        for name, other in one["headline"]:
            link = f"[{name}](docs/results.md{anchor(one['title'])})" + " †" * bool(one["stale"])
            lines.append(f"| {link} | {cells[name]} | {other} | {cells[other]} |")
            stale = stale or bool(one["stale"])
    parts.append("\n".join(lines))
    if stale:
        parts.append("†: not measured with today's settings; the page says what differs.")
    return "\n\n".join(parts)


def write(root):
    """Writes the page, its pictures and the README's part. root: of the checkout."""
    root = pathlib.Path(root)
    results = load_all(root / "results")
    readme = (root / "README.md").read_text()
    if readme.count(START) != 1 or readme.count(END) != 1:
        raise UsageError(f"{root / 'README.md'}: expected one line {START} and one line {END}")
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    write_atomic(root / "docs/results.md", page(results))
    new = f"{before}{START}\n{readme_part(results)}\n{END}{after}"
    write_atomic(root / "README.md", new)
    for name, one in results.items():
        if one["picture"] == "dots":
            draw_dots(one, root / f"docs/{name}.png")
        elif one["picture"] == "curves":
            isoflop.draw(isoflop.from_numbers(one["curves"])[1], root / f"docs/{name}.png")


def draw_dots(result, path):
    """The first column of every row, best first, with its spread; a line at the first headline's
    baseline, and step times, where there are some, at the right."""
    import matplotlib.figure  # takes half a second: only who draws pays

    column, form = next(iter(result["columns"].items()))
    rows = sorted(result["rows"], key=lambda row: row["cells"][column]["mean"], reverse=True)
    means = np.array([row["cells"][column]["mean"] for row in rows])
    spreads = [row["cells"][column].get("spread", 0) for row in rows]
    baseline = result["headline"][0][1]
    line = next(row["cells"][column]["mean"] for row in rows if row["name"] == baseline)
    figure = matplotlib.figure.Figure((8, 0.5 + 0.29 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(line, color="0.6", linestyle="--", linewidth=1, zorder=0)
    for i, (mean, spread) in enumerate(zip(means, spreads, strict=True)):
        colour = "0.25" if mean == line else "tab:blue" if mean < line else "tab:orange"
        axis.errorbar(mean, i, xerr=spread, color=colour, marker="o", capsize=3)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_xlabel(f"{column}, less is better; dashed: {baseline}")
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", color="0.9")
    axis.set_axisbelow(True)
    times = {i: row["cells"].get(sweep.STEP_TIME) for i, row in enumerate(rows)}
    if any(times.values()):
        right = axis.secondary_yaxis("right")
        form = result["columns"][sweep.STEP_TIME]
        right.set_yticks(range(len(rows)), [tables.text(time, form) for time in times.values()])
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)
        right.set_ylabel(f"time of a training step ({baseline}: 1)")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    # Without the library's version in it, so that the file follows from the numbers.
    figure.savefig(path, dpi=120, metadata={"Software": None})


# ---- from a finished study ---------------------------------------------------------------------


def measured(workdir):
    """({row: {column: [value of each seed]}}, curves) of the tables that a study has written."""
    workdir = pathlib.Path(workdir)
    if (workdir / "isoflop.json").is_file():
        curves = json.loads((workdir / "isoflop.json").read_text())
        return None, curves
    if not (workdir / "table.json").is_file():
        raise UsageError(
            f"--from={workdir}: no table.json or isoflop.json: give the folder of a finished study"
        )
    rows = json.loads((workdir / "table.json").read_text())
    for name, row in rows.items():
        if isinstance(row, list):  # a dict of columns for each seed
            titles = list(dict.fromkeys(title for one in row for title in one))
            rows[name] = {title: [one.get(title) for one in row] for title in titles}
    return rows, ()


def runs_below(workdir):
    """What the runs of a study say of themselves: config, seeds, machine, revision."""
    launches, seeds = [], set()
    for path in sorted(pathlib.Path(workdir).rglob("run.json")):
        said = json.loads(path.read_text()).get("launches", [])
        if said and (path.parent / "metrics.jsonl").is_file():
            launches.append(said[-1])
            seeds.add(json.loads((path.parent / "config.json").read_text())["seed"])
    if not launches:
        raise UsageError(f"--from={workdir}: no run folder in it says which code made it")
    last = launches[0]
    given = [arg for one in launches for arg in one["command_line"] if arg.startswith("--config=")]
    kind, cores = last["devices"]["kind"], last["cpu_count"]
    machine = f"{cores} CPU cores" if kind == "cpu" else f"{last['device_count']} x {kind}"
    git = [launch["git"] or {"revision": "unknown", "dirty": False} for launch in launches]
    revisions = sorted({one["revision"] + " with changes" * one["dirty"] for one in git})
    return {
        "config": statistics.mode(given).partition("=")[2] if given else "",
        "seeds": sorted(seeds),
        "machine": machine,
        "revision": ", ".join(revisions),
    }


def take(path, workdir, new, add=False):
    """Writes the results of the study in `workdir` to the file `path`.

    new: {field: text} of a result that is not there yet. add: keep rows that `workdir` lacks.
    """
    rows, curves = measured(workdir)
    if path.is_file():
        result = load(path)
    else:
        for field in ("title", "section", "commands"):
            if not new.get(field):
                flag = "command" if field == "commands" else field
                raise UsageError(f"--{flag} is missing: {path} is new")
        result = FIELDS | new | {"columns": {}, "rows": []}
    if curves:
        sizes, found = isoflop.from_numbers(curves)
        columns = isoflop.FORMS
        cells = {
            f"{family}, {quantity(budget, 'FLOPs')}": row
            for (budget, family), row in isoflop.optima(sizes, found).items()
        }
        result |= {"curves": curves, "picture": "curves"}
    else:
        titles = list(dict.fromkeys(title for row in rows.values() for title in row))
        columns = {title: sweep.form(title) for title in titles}
        cells = {
            name: {title: sweep.cell(title, values) for title, values in row.items()}
            for name, row in rows.items()
        }
    if not (result["columns"] and set(result["columns"]) & set(columns)):
        result["columns"] = columns
    old = {row["name"]: row for row in result["rows"]} if add else {}
    for row in old.values():
        row.setdefault("revision", result["revision"])
    shown = {
        name: {title: row[title] for title in result["columns"] if row.get(title) is not None}
        for name, row in cells.items()
    }
    fresh = {name: {"name": name, "cells": row} for name, row in shown.items()}
    said = runs_below(workdir) | {"revision_of": FIELDS["revision_of"]}
    said["config"] = result["config"] or said["config"]
    if add:
        said["seeds"] = sorted({*said["seeds"], *result["seeds"]})
    else:
        said["stale"] = ""
    result |= said
    result["rows"] = list((old | fresh).values())
    save(path, check(path, result))


def main(argv=None):
    parser = cli.Parser("efx.studies.results", __doc__)
    parser.add_argument("--root", default=".", help="of the checkout (default: this folder)")
    parser.add_argument("--from", dest="workdir", metavar="WORKDIR", help="a finished study")
    parser.add_argument("--name", help="with --from: of the file in results/")
    parser.add_argument("--add", action="store_true", help="keep rows that WORKDIR does not have")
    parser.add_argument("--title", default="", help="of a new result")
    parser.add_argument("--section", default="", help="of a new result")
    help = "of a new result: what measures it again"
    parser.add_argument("--command", dest="measured_by", default="", help=help)
    return parser.run(update, argv)


def update(arguments):
    """Takes in a study where one is named, then writes the page."""
    if bool(arguments.workdir) != bool(arguments.name):
        raise UsageError("--from and --name go together: a study and what its result is called")
    if arguments.workdir:
        new = {"title": arguments.title, "section": arguments.section}
        new["commands"] = [arguments.measured_by] if arguments.measured_by else []
        path = pathlib.Path(arguments.root) / f"results/{arguments.name}.json"
        take(path, arguments.workdir, new, arguments.add)
    write(arguments.root)


if __name__ == "__main__":
    sys.exit(main())
