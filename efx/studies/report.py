"""Runs and isoFLOP studies on one page: curves, fits, a table, samples, speed.

    python -m efx.studies.report runs/mod runs/dense --out report.html

The page is one HTML file that needs no network. An argument is a run directory, a folder with runs
below it (that of a sweep, of cBTM or of another study), or an isoFLOP study: its folder or its
isoflop.json.
The curves are of training and held-out loss, held-out bits per byte and accuracy, the norm of the
gradient, the learning rate, tokens/s and MFU, and of --metrics, names of columns of metrics.jsonl,
by step, tokens, FLOPs or seconds.

Losses in nats a token say nothing of runs whose tokens or held-out text differ, so these are
refused; --bits-per-byte has them compared by their bits per byte, and the page says what differs.
Runs below a folder that cannot be read yet are left out, and the page names them.
"""

import itertools
import math
import sys

import numpy as np

from efx import io, run_dir
from efx.composition import CLUSTERS
from efx.errors import UsageError, nearest
from efx.logging import portion, tables
from efx.logging.writer import SAMPLES
from efx.studies import cli, logged, page, plot, report_fits

# {column of metrics.jsonl: title} of what the curves may be drawn over.
AXES = {
    "step": "step",
    "tokens": "tokens",
    "flops": "training FLOPs",
    "seconds": "seconds of training",
}
# {title: columns} of what is drawn if a run has it; where two are, the first is drawn thinner.
CURVES = {
    "training and held-out loss (nats a token)": ("train/loss", "eval/loss"),
    "held-out loss (nats a token)": ("eval/loss",),
    "training loss (nats a token)": ("train/loss",),
    "held-out bits per byte": ("eval/bits_per_byte",),
    "held-out accuracy": ("eval/accuracy",),
    "norm of the gradient": ("train/grad_norm",),
    "learning rate": ("train/learning_rate",),
    "tokens/s": ("tokens_per_second",),
    "MFU": ("mfu",),
}
_MOST_POINTS = 1500  # of a curve on the page; of more, means of successive ones are shown
_MOST_SAMPLES = 20  # of a run, the last ones
_LONGEST_SAMPLE = 20_000  # characters
_LARGEST_SAMPLE = 16 << 20  # bytes of the file
_DEEPEST = 4  # folders between the one that is given and a run
_LONGEST_NAME = 48  # characters of a run's name; more where that keeps two apart
_SETTINGS = 8  # columns of the table; a switch shows the others


# ---- what is given -----------------------------------------------------------------------------


def collect(arguments):
    """([logged.Run], {name: report_fits.Study}, [what was left out and why]) of paths as given."""
    runs, studies, left_out = {}, {}, []
    for given in arguments:
        path = io.folder(given, "RUN")
        if path.suffix == ".json" and path.is_file():
            studies[str(path)] = report_fits.read(path)
            continue
        if not path.is_dir():
            what = "a file" if path.exists() else "no such folder"
            raise UsageError(
                f"{given}: {what}; use a run directory, a folder with runs below it, or the "
                f"{report_fits.FILE} of a study"
            )
        found = list(_run_folders(path))
        if (path / report_fits.FILE).is_file():
            studies[str(path)] = report_fits.read(path / report_fits.FILE)
        elif not found or _is_run(path):
            runs[str(path)] = logged.read_run(path)
            continue
        refused = []
        for folder in found:
            try:
                runs[str(folder)] = logged.read_run(folder)
            except UsageError as error:
                refused.append(str(error))
        if refused and len(refused) == len(found) and str(path) not in studies:
            raise UsageError(refused[0])
        left_out += refused
    return list(runs.values()), studies, left_out


def _is_run(path):
    """A folder of cBTM is none, though it has a config: its seed and its experts are."""
    if (path / CLUSTERS).is_dir() and not (path / run_dir.METRICS_FILE).exists():
        return False
    return any((path / name).exists() for name in (run_dir.CONFIG_FILE, run_dir.METRICS_FILE))


def _run_folders(path, depth=0):
    """The folders of runs in a folder, in the order of their names; none lies within another."""
    if _is_run(path):
        yield path
    elif depth < _DEEPEST:
        try:
            below = sorted((child for child in path.iterdir() if child.is_dir()), key=str)
        except OSError:  # of a folder that is not ours to read
            return
        for child in below:
            if not child.name.startswith("."):
                yield from _run_folders(child, depth + 1)


# ---- curves ------------------------------------------------------------------------------------


def choices(runs, metrics, by_byte):
    """{title: columns} of what the curves can be switched to; `metrics`: of the user."""
    known = sorted({name for run in runs for row in run.rows for name in row})
    for name in metrics:
        if name not in known:
            raise UsageError(f"--metrics: no run has the column {name!r}{nearest(name, known)}")
        if by_byte and name.startswith(logged.BY_TOKEN):
            raise UsageError(f"--metrics: {name} counts by tokens; --bits-per-byte leaves it out")
    offered = CURVES | {name: (name,) for name in metrics if (name,) not in CURVES.values()}
    return {
        title: columns
        for title, columns in offered.items()
        if all(column in known for column in columns)
        and not (by_byte and columns[0].startswith(logged.BY_TOKEN))
    }


def thinned(rows, values):
    """At most some number of points: means of so many successive values, at their last rows."""
    count = math.ceil(len(rows) / _MOST_POINTS)
    if count < 2:
        return rows, values
    parts = [values[i : i + count] for i in range(0, len(values), count)]
    finite = [[value for value in part if value is not None] for part in parts]
    means = [logged.number(math.fsum(part) / len(part)) if part else None for part in finite]
    last = [min(i + count, len(rows)) - 1 for i in range(0, len(rows), count)]
    return [rows[i] for i in last], means


def _short(values):
    """With as many digits as can be seen on a page."""
    return [None if value is None else float(f"{value:.8g}") for value in values]


def curves_block(runs, names, styles, offered, settings, by_byte):
    """The curves with their switches. settings: of each run, what a reader may ask for."""
    columns = list(dict.fromkeys(column for group in offered.values() for column in group))
    axes = [axis for axis in AXES if any(axis in row for run in runs for row in run.rows)]
    drawn, labels = [], page.cut_names(names, _LONGEST_NAME)
    for run, name, label, style, of in zip(runs, names, labels, styles, settings, strict=True):
        of_columns = {}
        for column in columns:
            rows, values = thinned(*run.curve(column))
            if rows:
                of_columns[column] = {"rows": rows, "values": _short(values)}
        # The page has where the points lie, not where all that was logged does.
        used = sorted({row for of_column in of_columns.values() for row in of_column["rows"]})
        places = {row: place for place, row in enumerate(used)}
        for of_column in of_columns.values():
            of_column["rows"] = [places[row] for row in of_column["rows"]]
        of_axes = {}
        for axis in axes:
            values = logged.axis_values(run, axis)
            of_axes[axis] = _short([values[row] for row in used])
        about = ", ".join(f"{key.removeprefix('model.')}={value}" for key, value in of.items())
        words = {"name": name, "label": label, "about": run_dir.shortened(about, 1000)}
        drawn.append(words | style | {"axes": of_axes, "columns": of_columns})
    data = {
        "axes": {axis: AXES[axis] for axis in axes},
        "metrics": [{"title": title, "columns": group} for title, group in offered.items()],
        "runs": drawn,
    }
    # Bits per byte are asked for of runs that are unlike: of different tokenizers, tokens are
    # different amounts of text, and of models of different cost, FLOPs are what is fair.
    wanted = "flops" if by_byte else "tokens"
    values = {"axes": data["axes"], "metrics": list(offered)}
    values["chosen"] = wanted if wanted in axes else axes[0]
    return page.Block("curves.html", values, script="curves.js", data=data)


def styles_of(count):
    """[{colour, dash}] of so many runs, no two the same until all are used."""
    endless = itertools.cycle(itertools.product(page.DASHES, page.COLOURS))
    return [{"colour": colour, "dash": dash} for dash, colour in itertools.islice(endless, count)]


# ---- the table ---------------------------------------------------------------------------------


def runs_table(runs, names, settings, styles, by_byte):
    """The table of runs: final losses, cost, speed, then the settings that differ, machine.
    Settings that some of the runs do not have, and those beyond some number, are shown by a
    switch."""
    losses = {
        "held-out loss": [_last(run, "eval/loss", ".4f") for run in runs],
        "least held-out loss": [_last(run, "min:eval/loss", ".4f") for run in runs],
        "training loss": [_last(run, "train/loss", ".4f") for run in runs],
    }
    if losses["least held-out loss"] == losses["held-out loss"]:
        del losses["least held-out loss"]
    measured = {} if by_byte else losses
    measured |= {
        "bits per byte": [_last(run, "eval/bits_per_byte", ".4f") for run in runs],
        "training FLOPs": [_last(run, "flops", "FLOPs") for run in runs],
        "tokens": [_last(run, "tokens", "quantity") for run in runs],
        "steps": [_last(run, "step", ",.0f") for run in runs],
        "seconds": [_last(run, "seconds", ",.1f") for run in runs],
        "tokens/s": [_cell(run.median("tokens_per_second"), "quantity") for run in runs],
        "MFU": [_cell(run.median("mfu"), ".1%") for run in runs],
        "parameters": [_last(run, "parameters", "quantity") for run in runs],
    }
    machine = {"machine": [_machine(run) for run in runs]}

    def heading(key):
        """Of a setting: `steps` is also what was trained, and may be 0 where FLOPs end a run."""
        return f"config.{key}" if key in measured | machine else key

    of_settings = {
        heading(key): [_setting(of[key]) if key in of else None for of in settings]
        for key in dict.fromkeys(key for of in settings for key in of)
    }
    # What says what kind of model it is comes first.
    shared = [key for key, cells in of_settings.items() if None not in cells]
    shared.sort(key=lambda key: not key.endswith(("kind", "family")))
    first = {key: of_settings.pop(key) for key in shared[:_SETTINGS]}
    columns = measured | first | machine
    # What no run has said is no column.
    shown = {title: cells for title, cells in columns.items() if any(cells)} | of_settings
    cut = zip(page.cut_names(names, _LONGEST_NAME), names, strict=True)
    rows = [list(cells) for cells in zip(cut, *shown.values(), strict=True)]
    colours = [style["colour"] for style in styles]
    return page.table(["run", *shown], rows, colours, len(of_settings), "settings that differ")


def without_blocks_that_are_off(settings, config):
    """The settings of a run, {dotted key: value}, that do something in it: not those of a block
    whose kind is "none", nor of one for another kind than the one that is chosen."""
    every = run_dir.dotted(config)
    chosen = {key.rpartition(".")[0]: kind for key, kind in every.items() if key.endswith(".kind")}
    off = {key.rpartition(".")[0] for key, on in every.items() if key.endswith(".on") and not on}

    def does_something(key):
        for block, name in _blocks_of(key):
            kind, part = chosen.get(block), name.partition(".")
            if (block in off and name != "on") or (kind == "none" and name != "kind"):
                return False
            # "mlp.moe.top_k" is of the kind "moe".
            if kind is not None and part[2] and part[0] != kind:
                return False
        return True

    return {key: value for key, value in settings.items() if does_something(key)}


def _blocks_of(key):
    """(block, name within it) of a dotted key: ("a", "b.c"), ("a.b", "c")."""
    names = key.split(".")
    return [(".".join(names[:i]), ".".join(names[i:])) for i in range(1, len(names))]


def _last(run, metric, form):
    if metric not in run.last:
        return None
    value = run.last[metric]
    return ("not finite", None) if value is None else _cell(value, form)


def _cell(value, form):
    return None if value is None else (tables.number(value, form), value)


def _setting(value):
    if type(value) in (int, float) and math.isfinite(value):
        return (str(value), value)
    return run_dir.shortened(str(value), 200)


def _machine(run):
    launches = run.record.get("launches", [])
    try:
        return run_dir.machine_of(launches[-1])
    except (IndexError, KeyError, TypeError):  # of a record that somebody else wrote
        return None


# ---- speed, samples ----------------------------------------------------------------------------


def speed_block(runs, names, styles):
    """Tokens/s of each run: the median of its rows, and between which values 8 of 10 are."""
    found, labels = [], page.cut_names(names, _LONGEST_NAME)
    for run, name, style in zip(runs, labels, styles, strict=True):
        values = [value for value in run.curve("tokens_per_second")[1] if value is not None]
        if values:
            low, middle, high = np.percentile(values, (10, 50, 90)).tolist()
            found.append((page.plain(name), style, low, middle, high))
    if not found:
        return page.paragraph("No run has logged its tokens/s.", "note")
    numbers = list(range(len(found)))
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [middle for *_, middle, _ in found],
        "y": numbers,
        "text": [name for name, *_ in found],
        "marker": {"size": 11, "color": [style["colour"] for _, style, *_ in found]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - middle for *_, middle, high in found],
            "arrayminus": [middle - low for *_, low, middle, _ in found],
            "color": "#8a93a0",
            "thickness": 1.5,
        },
        "hovertemplate": "%{text}<br>%{x:.4s} tokens/s<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero", "tickformat": "~s"},
        "yaxis": {
            "tickvals": numbers,
            "ticktext": [name for name, *_ in found],
            "range": [len(found) - 0.5, -0.5],
            "zeroline": False,
        },
        "margin": {"t": 10},
        "showlegend": False,
    }
    return page.figure([trace], layout, height=90 + 28 * len(found))


def samples_block(runs, names, styles):
    """The samples of all runs beside each other, with a choice of the step."""
    drawn = []
    for run, name, style in zip(runs, names, styles, strict=True):
        if samples := read_samples(run.path):
            drawn.append({"name": name, "colour": style["colour"], "samples": samples})
    if not drawn:
        return page.paragraph("No run has samples; set config.sample.every to log some.", "note")
    steps = sorted({sample["step"] for run in drawn for sample in run["samples"]})
    return page.Block("samples.html", {"steps": steps}, script="samples.js", data={"runs": drawn})


def read_samples(workdir):
    """[{step, text}] of a run's last samples, by step."""
    paths = {}
    folder = io.folder(workdir) / SAMPLES
    for path in folder.glob("step_*.txt") if folder.is_dir() else ():
        number = path.stem.removeprefix("step_")
        if number.isdecimal() and len(number) < 16:
            paths[int(number)] = path
    samples = []
    for step in sorted(paths)[-_MOST_SAMPLES:]:
        try:
            text = io.read_text(paths[step], _LARGEST_SAMPLE)
        except (OSError, ValueError) as error:
            text = f"(cannot be read: {error})"
        samples.append({"step": step, "text": run_dir.shortened(text.strip(), _LONGEST_SAMPLE)})
    return samples


# ---- the page ----------------------------------------------------------------------------------


def notes(runs, unlike, by_byte):
    """Paragraphs on what a reader of the page has to know before the numbers."""
    blocks = []
    if by_byte and unlike:
        text = "Losses in nats a token are left out, because they cannot be compared here: "
        text += "; ".join(unlike.values()) + ". "
        if logged.HELD_OUT in unlike:
            text += logged.BYTES_OF_TEXTS
        else:
            text += "Bits per byte of the same text can be compared."
        blocks.append(page.paragraph(text, "warning"))
    if not logged.trained_alike(runs):
        blocks.append(page.paragraph(logged.TRAINED_UNLIKE, "warning"))
    silent = [str(run.path) for run in runs if "eval/loss" not in run.last]
    if silent:
        blocks.append(page.paragraph(f"Without an evaluation: {', '.join(silent)}.", "note"))
    evaluated = [run for run in runs if "eval/loss" in run.last]
    if evaluated:
        of = portion([run.last.get("eval/split_fraction") for run in evaluated])
        of = of if of[0].isdigit() else f"the {of}"
        blocks.append(page.paragraph(f"Held-out numbers are over {of}.", "note"))
    return blocks


def sections_of(runs, metrics, by_byte):
    """The sections that show runs."""
    unlike = logged.differences(runs)
    if unlike and not by_byte:
        raise UsageError(
            f"{next(iter(unlike.values()))}: their losses in nats a token cannot be compared; "
            "use fewer runs, or --bits-per-byte"
        )
    if by_byte and not any("eval/bits_per_byte" in run.last for run in runs):
        raise UsageError("--bits-per-byte: no run has the column eval/bits_per_byte")
    settings = logged.differing([run.config for run in runs])
    settings = [
        without_blocks_that_are_off(of, run.config) for of, run in zip(settings, runs, strict=True)
    ]
    names, styles = plot.names([run.path for run in runs], [{}] * len(runs)), styles_of(len(runs))
    offered = choices(runs, metrics, by_byte)
    return [
        page.Section(
            "Curves",
            [
                *notes(runs, unlike, by_byte),
                curves_block(runs, names, styles, offered, settings, by_byte),
            ],
        ),
        page.Section("Runs", [runs_table(runs, names, settings, styles, by_byte)]),
        page.Section("Samples", [samples_block(runs, names, styles)]),
        page.Section(
            "Speed",
            [
                speed_block(runs, names, styles),
                page.paragraph(
                    "Medians of the logged rows, with the range of the middle 80%; not "
                    "comparable between runs on different machines or on a shared one.",
                    "note",
                ),
            ],
        ),
    ]


def report(arguments):
    """What the command does."""
    out = page.output(arguments.out)
    metrics = [name for name in arguments.metrics.split(",") if name]
    runs, studies, left_out = collect(arguments.runs)
    sections = sections_of(runs, metrics, arguments.bits_per_byte) if runs else []
    studied = [report_fits.section(name, study) for name, study in studies.items()]
    what = [f"{len(runs)} run{'s' * (len(runs) > 1)}"] * bool(runs)
    what += [f"{len(studies)} isoFLOP stud{'ies' if len(studies) > 1 else 'y'}"] * bool(studies)
    if left_out:
        text = "Left out:\n" + "\n".join(left_out)
        studied.append(page.Section("What could not be read", [page.paragraph(text, "warning")]))
    title = f"Report of {' and '.join(what)}"
    page.write_page(out, title, [*sections[:1], *studied, *sections[1:]], arguments.command)
    for words in left_out:
        print(f"left out: {words}")
    print(f"written: {out}, a page of {' and '.join(what)}")


def main(argv=None):
    parser = cli.Parser("efx.studies.report", __doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, folder of runs, or isoflop.json"
    )
    parser.add_argument("--out", default="report.html", help="page (default: report.html)")
    parser.add_argument(
        "--metrics",
        default="",
        metavar="NAMES",
        help=("further columns to draw, e.g. router/accuracy"),
    )
    parser.add_argument(
        "--bits-per-byte",
        action="store_true",
        help=("instead of losses, for runs with different tokenizers"),
    )
    return parser.run(report, argv)


if __name__ == "__main__":
    sys.exit(main())
