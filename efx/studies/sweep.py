"""Several runs, several seeds, one table.

    python -m efx.studies.sweep --sweep configs/sweeps/mod_vs_dense.py --workdir runs/mod_vs_dense

A sweep file is plain data: `get_sweep()` returns

    dict(config="configs/mod.py",          # the config every run starts from
         seeds=(0, 1, 2),
         equal="flops" | "tokens" | "",    # what every run gets as much of as the first one
         runs={"name": {"model.depth": 8}, ...},   # dotted keys that each run changes; with
                                                   # "config", it starts from another file
         columns={"title": "metric|other", ...})   # more columns: the first of these metrics, or
                                                   # the least value of one, "min:metric", or the
                                                   # mean of all, "mean:metric"

Each run is a `python -m efx.main` of its own in WORKDIR/<name>-seed<n>, one after another, so an
interrupted sweep goes on where it was. Arguments after `--` go to every run, to scale a sweep up
or down. The table is written to WORKDIR/table.md and its numbers to WORKDIR/table.json; making it
needs no JAX.
"""

import pathlib
import re
import statistics
import sys

from efx import tables
from efx.config import run_file
from efx.errors import UsageError, nearest
from efx.metrics import portion, read_metrics
from efx.studies import cli
from efx.studies import jobs as jobs_lib

KEYS = ("config", "seeds", "equal", "runs", "columns")
NOT_FINITE = 3  # exit status of a run that came to its end: a result too, if not a number
STEP_TIME = "step time over the first's"
LOSSES = {"held-out loss (nats)": "eval/loss", "bits per byte": "eval/bits_per_byte"}


def load_file(path, kind, keys):
    """What `get_<kind>()` of the file `--<kind>` returns: a dict with just these keys."""
    found = run_file(kind, str(path), folder="sweeps")
    for key in found:
        if key not in keys:
            raise UsageError(f"{path}: {key!r} is not a key of a {kind}{nearest(key, keys)}")
    for key in keys:
        if key not in found:
            raise UsageError(f"{path}: the {kind} lacks {key!r}")
    return found


def load_sweep(path):
    """The dict of a sweep file, checked."""
    sweep = load_file(path, "sweep", KEYS)
    if sweep["equal"] not in ("flops", "tokens", ""):
        raise UsageError(f"{path}: equal={sweep['equal']!r}, expected 'flops', 'tokens' or ''")
    check_folders(path, sweep)
    return sweep


def check_folders(path, sweep):
    """UsageError where two runs would share a folder, or there are none."""
    for key in ("runs", "seeds"):
        if not sweep[key]:
            raise UsageError(f"{path}: {key} is empty")
    if len(set(sweep["seeds"])) < len(sweep["seeds"]):
        raise UsageError(f"{path}: seeds={sweep['seeds']} has one of them twice")
    owners = {}
    for name in sweep["runs"]:
        # Some file systems do not tell capitals from small letters.
        own = folder("", name, 0).name.lower()
        if own in owners:
            raise UsageError(
                f"{path}: the runs {owners[own]!r} and {name!r} would share the folder "
                f"{folder('', name, 0)}: letters, digits and dots count; rename one of them"
            )
        owners[own] = name


def folder(workdir, name, seed):
    """WORKDIR/<name>-seed<n>, the name made fit for a file system."""
    return pathlib.Path(workdir) / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name).strip('_')}-seed{seed}"


def command(sweep, workdir, name, seed, budget, extra):
    """Arguments of `python -m efx.main` for one run.

    budget: {} or {"flops": ...} or {"tokens": ...} that the run is to use.
    """
    changes = dict(sweep["runs"][name])
    arguments = [
        f"--config={changes.pop('config', sweep['config'])}",
        f"--workdir={folder(workdir, name, seed)}",
        f"--config.seed={seed}",
    ]
    arguments += [f"--config.{key}={value}" for key, value in changes.items()]
    arguments += extra
    if "flops" in budget:
        arguments += ["--config.steps=0", f"--config.train_flops={budget['flops']}"]
    return arguments


def run_all(sweep, workdir, extra=(), jobs=1):
    """Every run of the sweep, `jobs` at a time; the very first one sets the budget of the others.

    Several at a time share the machine's CPUs, and each writes what it would print to a file.
    """
    check_commands(sweep, workdir, extra)
    first = next(iter(sweep["runs"]))
    todo = [(name, seed) for seed in sweep["seeds"] for name in sweep["runs"]]
    budget = {}
    if sweep["equal"]:
        name, seed = todo.pop(0)
        _run(sweep, workdir, name, seed, {}, extra)
        last = final_row(folder(workdir, name, seed))
        budget = {sweep["equal"]: last[sweep["equal"]]}

    def one(item, cpus):
        name, seed = item
        _run(sweep, workdir, name, seed, {} if name == first else budget, extra, cpus)

    jobs_lib.run_all(one, todo, jobs)


def check_commands(sweep, workdir, extra):
    """UsageError for a run whose command line `efx.main` would refuse, before anything trains."""
    from efx import command_line

    cli.check_extra(extra)
    for name in sweep["runs"]:
        try:
            command_line.parse(["efx", *command(sweep, workdir, name, 0, {}, extra)])
        except UsageError as error:
            raise UsageError(f"the run {name!r}: {error}") from error


def _run(sweep, workdir, name, seed, budget, extra, cpus=None):
    arguments = command(sweep, workdir, name, seed, budget, extra)
    status, where = jobs_lib.run_main(
        f"{name}, seed {seed}", arguments, f"{folder(workdir, name, seed)}.log", cpus
    )
    if status == NOT_FINITE:
        print(f"-- {name}, seed {seed}: not finite at its end; {where} says why", flush=True)
    elif status:
        raise UsageError(
            f"the run {name!r} with seed {seed} ended with status {status}; "
            f"{where} says why. Start the sweep again to go on from here"
        )


def final_row(run):
    """All the last values of a run's metrics in one dict; the least ones by "min:<metric>", their
    means by "mean:<metric>".

    None for a last value that was not finite, and where none was; the others leave it out."""
    last, finite = {}, {}
    for row in read_metrics(run):
        for name, value in row.items():
            last[name] = value
            if value is not None:
                finite.setdefault(name, []).append(value)
    for name in list(last):
        values = finite.get(name)
        last[f"min:{name}"] = min(values) if values else None
        last[f"mean:{name}"] = statistics.fmean(values) if values else None
    return last


def timed(sweep, workdir, steps):
    """{name: (milliseconds of a training step, sequences/s)}, the runs' models taking turns.

    The logs of the runs have times too, but those were made one after another, on a machine whose
    speed may have drifted in between.
    """
    from efx.studies.step_time import step_times

    first = sweep["seeds"][0]
    folders = {name: folder(workdir, name, first) for name in sweep["runs"]}
    return step_times(folders, steps)


def collect(sweep, workdir, times):
    """{name: {column: [value of each seed]}} of the finished runs; step times once a name."""
    columns = LOSSES | dict(sweep["columns"])
    table = {}
    for name in sweep["runs"]:
        values = {title: [] for title in columns}
        values |= {"training FLOPs": [], "tokens": [], "steps": []}
        for seed in sweep["seeds"]:
            run = folder(workdir, name, seed)
            last = final_row(run)
            for title, metric in columns.items():
                named = [last[name] for name in metric.split("|") if name in last]
                values[title].append(named[0] if named else None)
            values["training FLOPs"].append(last["flops"])
            values["tokens"].append(last["tokens"])
            values["steps"].append(last["step"])
        if times:
            first = times[next(iter(times))]
            values["ms a step"], values["sequences/s"] = [times[name][0]], [times[name][1]]
            values[STEP_TIME] = [times[name][0] / first[0]]
        table[name] = values
    return table


# How the numbers of a column are written, where it is not with four digits and a spread.
FORMS = {
    "training FLOPs": "FLOPs",
    "tokens": "quantity",
    "parameters": "quantity",
    "steps": ".0f",
    "ms a step": ".0f",
    "sequences/s": ".1f",
    STEP_TIME: ".2f",
}


def form(title):
    """How the numbers of the column `title` are written: the second argument of `tables.number`."""
    return FORMS.get(title, ".4f")


def cell(title, values):
    """What a table holds of a column's values, one of each seed: their mean, with spread and the
    values themselves where the column shows a spread; None where one was not finite."""
    if any(value is None for value in values):
        return None
    return statistics.fmean(values) if title in FORMS else tables.summary(values)


def scored(sweep, workdir):
    """What the held-out losses of the finished runs are of, in words."""
    runs = [folder(workdir, name, seed) for name in sweep["runs"] for seed in sweep["seeds"]]
    return portion([final_row(run).get("eval/split_fraction") for run in runs])


def markdown(sweep, table, how, split):
    """The table as Markdown, with config, seeds, what was scored and command under it."""
    titles = list(next(iter(table.values())))
    rows = [
        [name, *(tables.text(cell(title, values[title]), form(title)) for title in titles)]
        for name, values in table.items()
    ]
    equal = f"every run with the {sweep['equal']} of the first; " if sweep["equal"] else ""
    seeds = ", ".join(str(seed) for seed in sweep["seeds"])
    return (
        f"{tables.markdown(['run', *titles], rows)}\n\n"
        f"`{sweep['config']}`; {equal}seeds {seeds}: mean ± standard deviation; {split}. "
        f"Step times: medians of alternating steps. Command: `{how}`\n"
    )


def main(argv=None):
    parser = cli.Parser("efx.studies.sweep", __doc__)
    parser.add_argument("--sweep", required=True, help="sweep file, or the name of one of efx's")
    parser.add_runs(jobs="runs")
    parser.add_argument("--table-only", action="store_true", help="only read finished runs")
    parser.add_argument(
        "--time-steps",
        type=int,
        default=0,
        metavar="N",
        help="also time N training steps of each run's model, taking turns in one process",
    )
    return parser.run(study, argv)


def study(arguments):
    """The runs, then the table."""
    sweep, workdir = load_sweep(arguments.sweep), arguments.workdir
    if not arguments.table_only:
        run_all(sweep, workdir, arguments.extra, arguments.jobs)
    times = arguments.time_steps and timed(sweep, workdir, arguments.time_steps)
    table = collect(sweep, workdir, times)
    text = markdown(sweep, table, arguments.command, scored(sweep, workdir))
    tables.save(workdir, "table", text, table)


if __name__ == "__main__":
    sys.exit(main())
