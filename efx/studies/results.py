"""The results that README and docs quote: data in results/, and a page and pictures made from it.

    python -m efx.studies.results
    python -m efx.studies.results --from runs/latent_table --name latent_table
    python -m efx.studies.results --from runs/mod/router_probe.json --name router_probe

Without --from: writes docs/results.md, its pictures, and the part of README.md between
`<!-- results -->` and `<!-- end of results -->`, all from results/*.json, the same bytes each time.

With --from: first copies the table of a finished study (sweep, isoflop, cbtm_table, phatgoose,
calm, convert) from its WORKDIR, or the data of a router_probe, into results/NAME.json. Seeds, git
revision and machine are read from the run directories. The other fields of an existing NAME.json
(title, text, config, command, columns, which rows are compared in the README) stay, except `stale`,
which is emptied; a new file needs --title, --section and --command. --add keeps the rows that
WORKDIR does not have, with their revision, and `stale`, which may still be true of them.

A file holds

    title, section, about     of the measurement: its name, one of SECTIONS, text in Markdown
    stale                     why the numbers are not of today's settings; "" if they are
    config, sweep, commands   config, sweep file and commands that repeat the measurement
    seeds, machine, revision, revision_of   a row may have a revision of its own
    headline                  [[row, the row it is compared with], ...] for the README
    picture                   "dots": the first column of every row, "curves": of an isoFLOP study
                              (from `study`), "probe": of a router probe (from `study`),
                              "budgets": of differences by budget (from `derived`), "kept":
                              docs/NAME.png as it is, or ""
    first, columns            title of the rows' names; {title: format of its numbers}
    rows                      [{name, cells: {column: number, text, {mean, spread, n}, or
                              {mean, interval}}}]
    tables                    of an isoFLOP study all others, as Markdown
    derived                   how the rows follow from other results, which have them then: see
                              `efx.studies.by_budget`
    study                     of an isoFLOP study all points, with the settings of their runs, from
                              which `python -m efx.studies.isoflop --from` goes on elsewhere; of a
                              router probe its data
    curves                    of the recipes of `python -m efx.studies.reference`, which writes it

where formats are those of `tables.number`, and a cell has the values of each seed (`values`) beside
mean and spread if they are known.
"""

import collections
import json
import pathlib
import re
import statistics
import sys

import numpy as np

from efx import io, run_dir
from efx.errors import UsageError, nearest
from efx.logging import quantity, tables
from efx.studies import by_budget, cli, isoflop, plot, router_probe, sweep
from efx.studies.isoflop import picture, report
from efx.studies.router_probe import picture as probe_picture
from efx.studies.router_probe import report as probe_report

SECTIONS = (
    "Dense models",
    "Mixture-of-Depths",
    "Learned dropout and the encoder-decoder",
    "The grouped-latent transformer",
    "Composition of experts",
    "Speed",
)
# What a section begins with.
INTRODUCTIONS = {
    "Speed": """\
On a GPU or TPU one program measures all that is claimed of accelerators: whether kernels, decoding
and resuming are right there, and how fast training and decoding are. A call takes 9 minutes at most
(`--minutes`), and the same command goes on where it ended; `--help` says what each part is and what
it needs, and `--again` measures a part anew. It writes `results/accelerator-<device>.json`, or into
the folder `--results`, where the machine's own disk is lost afterwards;
`python -m efx.studies.results` makes a table of it here. On a CPU `--smoke` tries all of it at tiny
sizes, which measures nothing.

```bash
python -m benchmarks.accelerator --parts matmul         # the peak that there is
python -m benchmarks.accelerator --parts dense          # training steps: MFU, tokens/s, memory
python -m benchmarks.accelerator --parts kernels,tests  # is it right
python -m benchmarks.accelerator --parts mod            # Mixture-of-Depths, 350M and 1.3B
python -m benchmarks.accelerator --parts moe
python -m benchmarks.accelerator --parts latent
python -m benchmarks.accelerator --parts masks
python -m benchmarks.accelerator --parts decode         # over transformers: the extra interop
python -m benchmarks.accelerator --parts characters --text input.txt  # nanoGPT's recipe to 1.4697
python -m benchmarks.accelerator --parts isoflop        # one budget; the study itself is:
python -m efx.studies.isoflop --grid configs/sweeps/isoflop_accelerator.py \\
    --workdir runs/isoflop_accelerator
```""",
}
# The order of the fields in a file, with their defaults; None: the field must be there.
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
    "derived": (),
    "tables": (),
    "study": (),
    "curves": (),
}
# What a derived result has of those that it names.
_OF_OTHERS = {"machine": "", "revision": "", "columns": {}, "rows": []}
_CHANGED = " with changes"  # of a revision: what the run had was not committed
START, END = "<!-- results -->", "<!-- end of results -->"


def read_result(path):
    """The dict of a file of results, checked."""
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    return checked(path, fields)


def checked(path, fields):
    """The dict with a value for each of FIELDS; UsageError for a wrong name or section in it."""
    for key in fields:
        if key not in FIELDS:
            raise UsageError(f"{path}: {key!r} is not a field of a result{nearest(key, FIELDS)}")
    if derived := fields.get("derived"):
        by_budget.check(path, derived)
        fields = _OF_OTHERS | fields
    for key, default in FIELDS.items():
        if key not in fields and default is None:
            raise UsageError(f"{path}: the result lacks {key!r}")
    fields = FIELDS | fields
    if fields["section"] not in SECTIONS:
        hint = nearest(fields["section"], SECTIONS)
        raise UsageError(f"{path}: section={fields['section']!r} is not a section{hint}")
    names = [row["name"] for row in fields["rows"]]
    for name in (name for pair in fields["headline"] for name in pair):
        if name not in names:
            raise UsageError(f"{path}: headline has {name!r}, not a row{nearest(name, names)}")
    for row in fields["rows"]:
        for column in row["cells"]:
            if column not in fields["columns"]:
                hint = nearest(column, fields["columns"])
                raise UsageError(f"{path}: {row['name']}: {column!r} is not a column{hint}")
    return fields


def write_result(path, result):
    """Writes the file: one line a field, one line a row, without fields at their defaults."""
    lines = []
    for key, default in FIELDS.items():
        if result[key] in (default, list(default or ())):
            continue
        value = json.dumps(result[key], ensure_ascii=False)
        if key in ("commands", "rows", "tables"):
            value = _one_a_line(result[key])
        if key == "study":
            entries = {k: json.dumps(v, ensure_ascii=False) for k, v in result[key].items()}
            many = "probes" if "probes" in result[key] else "points"
            entries[many] = _one_a_line(result[key][many])
            value = "{" + ",\n ".join(f'"{k}": {v}' for k, v in entries.items()) + "}"
        if key == "curves":
            value = json.dumps(result[key], ensure_ascii=False, indent=1)
            # A curve, {step: loss}, is one line.
            value = re.sub(r"\{[^{}]*\}", lambda curve: re.sub(r"\s*\n\s*", " ", curve[0]), value)
        lines.append(f' "{key}": {value}')
    io.write_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _one_a_line(elements):
    lines = [f"  {json.dumps(element, ensure_ascii=False)}" for element in elements]
    return "[\n" + ",\n".join(lines) + "\n ]"


def read_results(folder):
    """{name: result} of a folder, ordered by section, then by name."""
    results = {path.stem: read_result(path) for path in sorted(pathlib.Path(folder).glob("*.json"))}
    if not results:
        raise UsageError(f"{folder}: there are no results (*.json)")
    for result in results.values():
        if derived := result["derived"]:
            result["columns"] = by_budget.columns(derived)
            result["rows"] = by_budget.rows(derived, results)
    return dict(sorted(results.items(), key=lambda item: SECTIONS.index(item[1]["section"])))


# ---- the page ----------------------------------------------------------------------------------


def anchor(title):
    """The link of a heading in rendered Markdown: "#a-title"."""
    return "#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def table(result):
    """The table as Markdown."""
    columns = result["columns"]
    rows = []
    for row in result["rows"]:
        cells = [tables.text(row["cells"].get(title), form) for title, form in columns.items()]
        rows.append([row["name"], *cells])
    return tables.markdown([result["first"], *columns], rows)


def provenance(result):
    """A sentence on the origin of the numbers: config, seeds, machine, revisions."""
    if result["derived"]:
        links = dict.fromkeys(
            f"[{budget['result']}.json](../results/{budget['result']}.json)"
            for budget in result["derived"]["budgets"]
        )
        return f"From {', '.join(links)}, with the seeds, machines and revisions told there."
    facts = [f"`{result['config']}`"] if result["config"] else []
    if len(result["seeds"]) > 1:
        facts.append(f"seeds {', '.join(map(str, result['seeds']))}: mean ± standard deviation")
    facts += [result["machine"], f"{_revisions(result)} ({result['revision_of']})"]
    rows_of_revision = {}
    for row in result["rows"]:
        if "revision" in row:
            rows_of_revision.setdefault(_short(row["revision"]), []).append(row["name"])
    facts += [
        f"revision {revision} for {'; '.join(names)}"
        for revision, names in rows_of_revision.items()
    ]
    return "; ".join(facts) + "."


def _revisions(result):
    """The revisions of a result in words; of each how many runs there are where they are known."""
    points = result["study"].get("points", ()) if result["study"] else ()
    runs = collections.Counter(point["revision"] for point in points)
    if len(runs) < 2:
        plural = "s" * (", " in result["revision"])
        return f"revision{plural} {_short(result['revision'])}"
    named = [
        f"{_short(revision)} ({count} run{'s' * (count > 1)})"
        for revision, count in runs.most_common()
    ]
    return f"revisions {', '.join(named)}"


def _short(revisions):
    """Nine characters of each revision of a list, and whether there were changes to it."""
    return ", ".join(
        revision[:9] + _CHANGED * revision.endswith(_CHANGED) for revision in revisions.split(", ")
    )


def section(name, result):
    """One result as Markdown, from its heading on."""
    paragraphs = [f"### {result['title']}", result["about"]]
    if result["picture"]:
        paragraphs.append(f"![{result['title']}]({name}.png)")
    if result["stale"]:
        paragraphs.append(f"**Not as efx is today.** {result['stale']}")
    data = f"Data: [results/{name}.json](../results/{name}.json)"
    paragraphs.append(table(result))
    if result["tables"]:
        summary = "<summary>What was measured, and what follows from it</summary>"
        paragraphs += ["<details>", summary, *result["tables"], "</details>"]
    paragraphs.append(f"{provenance(result)} {data}")
    paragraphs.append("```bash\n" + "\n".join(result["commands"]) + "\n```")
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def page(results):
    """docs/results.md as text."""
    paragraphs = [
        "# Results",
        "<!-- Written by `python -m efx.studies.results` from results/*.json: change those. -->",
        "Every figure that the README or a page of the documentation quotes. Differences in these "
        "pages are by pairs of seeds. One machine's small models: what they say of large ones is "
        "for larger runs of the same commands to tell.",
    ]
    for heading in SECTIONS:
        in_section = {
            name: result for name, result in results.items() if result["section"] == heading
        }
        if in_section:
            paragraphs.append(f"## {heading}")
            if heading in INTRODUCTIONS:
                paragraphs.append(INTRODUCTIONS[heading])
            paragraphs += [section(name, result) for name, result in in_section.items()]
    return "\n\n".join(paragraphs) + "\n"


def readme_part(results):
    """The part of the README between START and END: the picture and the headlines."""
    kinds = "budgets", "dots"
    drawn = {name: result for name, result in results.items() if result["picture"] in kinds}
    paragraphs = [f"![{result['title']}](docs/{name}.png)" for name, result in drawn.items()]
    lines = ["| measured | held-out loss (nats) | against | its loss |", "|---|---|---|---|"]
    for result in results.values():
        if not result["headline"]:
            continue
        # The first column of numbers: before it isoFLOP studies have the size that they are of.
        column, form = next(item for item in result["columns"].items() if item[1] != "text")
        cells = {row["name"]: tables.text(row["cells"][column], form) for row in result["rows"]}
        mark = " †" * bool(result["stale"])
        for name, baseline in result["headline"]:
            link = f"[{name}](docs/results.md{anchor(result['title'])}){mark}"
            lines.append(f"| {link} | {cells[name]} | {baseline} | {cells[baseline]} |")
    paragraphs.append("\n".join(lines))
    if any(result["stale"] and result["headline"] for result in results.values()):
        paragraphs.append("†: not measured with today's settings; the page says what differs.")
    return "\n\n".join(paragraphs)


def publish(root):
    """Writes the page, its pictures and the README's part. root: of the checkout."""
    root = pathlib.Path(root)
    results = read_results(root / "results")
    readme = (root / "README.md").read_text()
    if readme.count(START) != 1 or readme.count(END) != 1:
        raise UsageError(f"{root / 'README.md'}: expected one line {START} and one line {END}")
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    io.write_atomic(root / "docs/results.md", page(results))
    new_readme = f"{before}{START}\n{readme_part(results)}\n{END}{after}"
    io.write_atomic(root / "README.md", new_readme)
    for name, result in results.items():
        if result["picture"] == "dots":
            draw_dots(result, root / f"docs/{name}.png")
        elif result["picture"] == "curves":
            study = result["study"]
            points = isoflop.points_of(study, root / f"results/{name}.json")
            analysis = isoflop.analysis_of(points, study)
            picture.draw(analysis, root / f"docs/{name}.png", study["further"])
        elif result["picture"] == "budgets":
            by_budget.draw(result, root / f"docs/{name}.png")
        elif result["picture"] == "probe":
            probe_picture.draw(result["study"], root / f"docs/{name}.png")


def draw_dots(result, path):
    """The first column of every row, best first, with its spread; a line at the baseline of the
    first headline, and step times, if there are any, at the right."""
    import matplotlib.figure  # takes half a second

    column, form = next(iter(result["columns"].items()))
    rows = sorted(result["rows"], key=lambda row: row["cells"][column]["mean"], reverse=True)
    means = np.array([row["cells"][column]["mean"] for row in rows])
    spreads = [row["cells"][column].get("spread", 0) for row in rows]
    baseline = result["headline"][0][1]
    reference = next(row["cells"][column]["mean"] for row in rows if row["name"] == baseline)
    figure = matplotlib.figure.Figure((8, 0.5 + 0.29 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(reference, color="0.6", linestyle="--", linewidth=1, zorder=0)
    for i, (mean, spread) in enumerate(zip(means, spreads, strict=True)):
        colour = "0.25" if mean == reference else "tab:blue" if mean < reference else "tab:orange"
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
    plot.save(figure, path, dpi=120, bare=("top", "right", "left"))


# ---- from a finished study ---------------------------------------------------------------------


def read_study(workdir):
    """({row: {column: [value of each seed]}}, None) of the tables that a study has written, or
    (None, the contents of its isoflop.json)."""
    workdir = pathlib.Path(workdir)
    if (workdir / "isoflop.json").is_file():
        return None, json.loads((workdir / "isoflop.json").read_text())
    if not (workdir / "table.json").is_file():
        raise UsageError(
            f"--from={workdir}: no table.json or isoflop.json; use the folder of a finished study"
        )
    rows = json.loads((workdir / "table.json").read_text())
    for name, row in rows.items():
        if isinstance(row, list):  # a dict of columns for each seed
            titles = list(dict.fromkeys(title for cells in row for title in cells))
            rows[name] = {title: [cells.get(title) for cells in row] for title in titles}
    return rows, None


def read_probe(workdir):
    """The data of a router probe, or None; `workdir`: the file, or a run directory that has it."""
    path = pathlib.Path(workdir)
    path = path if path.is_file() else path / router_probe.FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"--from={workdir}: not JSON: {error}") from error
    if not isinstance(data, dict) or not {"runs", "probes", "selection"} <= set(data):
        raise UsageError(f"--from={workdir}: not an output of efx.studies.router_probe")
    return data


def describe_runs(workdir):
    """Config, seeds, machine and revision of the runs below a folder, from their records."""
    launches, seeds = [], set()
    for path in sorted(pathlib.Path(workdir).rglob("run.json")):
        recorded = run_dir.run_record(path.parent).get("launches", [])
        if recorded and (path.parent / "metrics.jsonl").is_file():
            launches.append(recorded[-1])
            seeds.add(run_dir.recorded_setting(path.parent, "seed"))
    if not launches:
        raise UsageError(f"--from={workdir}: no run directory in it records its code revision")
    config_flags = [
        arg for launch in launches for arg in launch["command_line"] if arg.startswith("--config=")
    ]
    return {
        "config": statistics.mode(config_flags).partition("=")[2] if config_flags else "",
        "seeds": sorted(seeds),
        "machine": run_dir.machine_of(launches[0]),
        "revision": ", ".join(sorted({*map(run_dir.revision_of, launches)})),
    }


def describe_points(points, config):
    """The same of the points of an isoFLOP study, whose runs may be on other machines."""
    return {
        "config": config,
        "seeds": sorted({point.run.seed for point in points}),
        "machine": "; ".join(sorted({point.machine for point in points})),
        "revision": ", ".join(sorted({point.revision for point in points})),
    }


def describe_probe(probed):
    """The same of the runs of a router probe."""
    runs = probed["runs"]
    return {
        "config": runs[0]["config"],
        "seeds": sorted({run["seed"] for run in runs}),
        "machine": "; ".join(sorted({run["machine"] for run in runs})),
        "revision": ", ".join(sorted({run["revision"] for run in runs})),
    }


def import_study(path, workdir, new_fields, add=False):
    """Writes the results of the study in `workdir` to the file `path`.

    new_fields: {field: text} of a new file. add: keep rows that `workdir` lacks.
    """
    probed = read_probe(workdir)
    if probed and add:
        raise UsageError(
            "--add: the blocks of a router probe belong to one set of runs; leave it out"
        )
    rows, study = (None, None) if probed else read_study(workdir)
    if path.is_file():
        result = read_result(path)
    else:
        for field in ("title", "section", "commands"):
            if not new_fields.get(field):
                flag = "command" if field == "commands" else field
                raise UsageError(f"--{flag} is missing: the result {path} is new")
        result = FIELDS | new_fields | {"columns": {}, "rows": []}
    if probed:
        cells = probe_report.cells(probed)
        there = {title for row in cells.values() for title in row}
        columns = {title: form for title, form in probe_report.FORMS.items() if title in there}
        kept = {name: value for name, value in probed.items() if name != "command"}
        result |= {"study": kept, "picture": "probe", "first": "block"}
    elif study:
        points = isoflop.points_of(study, pathlib.Path(workdir) / "isoflop.json")
        analysis = isoflop.analysis_of(points, study)
        cells = {
            f"{family}, {quantity(budget, 'FLOPs')}": row
            for (budget, family), row in report.optima_table(analysis).items()
        }
        there = {title for row in cells.values() for title in row}
        columns = {title: form for title, form in report.FORMS.items() if title in there}
        result["tables"] = report.details(analysis, points, study)
        kept = {name: value for name, value in study.items() if name != "fits"}
        result |= {"study": kept, "picture": "curves"}
    else:
        titles = list(dict.fromkeys(title for row in rows.values() for title in row))
        columns = {title: sweep.form(title) for title in titles}
        cells = {
            name: {title: sweep.cell(title, values) for title, values in row.items()}
            for name, row in rows.items()
        }
    if not (result["columns"] and set(result["columns"]) & set(columns)):
        result["columns"] = columns
    kept_rows = {row["name"]: row for row in result["rows"]} if add else {}
    for row in kept_rows.values():
        row.setdefault("revision", result["revision"])
    shown = {
        name: {title: row[title] for title in result["columns"] if row.get(title) is not None}
        for name, row in cells.items()
    }
    measured_rows = {name: {"name": name, "cells": row} for name, row in shown.items()}
    if probed:
        runs = describe_probe(probed)
    else:
        runs = describe_points(points, study["config"]) if study else describe_runs(workdir)
    runs |= {"revision_of": FIELDS["revision_of"]}
    runs["config"] = result["config"] or runs["config"]
    if add:
        runs["seeds"] = sorted({*runs["seeds"], *result["seeds"]})
    else:
        runs["stale"] = ""
    result |= runs
    result["rows"] = list((kept_rows | measured_rows).values())
    write_result(path, checked(path, result))


def main(argv=None):
    parser = cli.Parser("efx.studies.results", __doc__)
    parser.add_argument("--root", default=".", help="of the checkout (default: this folder)")
    parser.add_argument("--from", dest="workdir", metavar="WORKDIR", help="a finished study")
    parser.add_argument("--name", help="with --from: of the file in results/")
    parser.add_argument("--add", action="store_true", help="keep rows that WORKDIR does not have")
    parser.add_argument("--title", default="", help="of a new result")
    parser.add_argument("--section", default="", help="of a new result")
    help = "of a new result: the command that measures it"
    parser.add_argument("--command", dest="measured_by", default="", help=help)
    return parser.run(update, argv)


def update(arguments):
    """Imports the study if one is given, then writes the page."""
    if bool(arguments.workdir) != bool(arguments.name):
        raise UsageError("--from and --name: set both, a study and the name of its result")
    if arguments.workdir:
        new_fields = {"title": arguments.title, "section": arguments.section}
        new_fields["commands"] = [arguments.measured_by] if arguments.measured_by else []
        path = pathlib.Path(arguments.root) / f"results/{arguments.name}.json"
        import_study(path, arguments.workdir, new_fields, arguments.add)
    publish(arguments.root)


if __name__ == "__main__":
    sys.exit(main())
