"""Several runs, several seeds, one table.

    python -m efx.studies.sweep --sweep configs/sweeps/mod_vs_dense.py --workdir runs/mod_vs_dense

A sweep file is plain data: `get_sweep()` returns

    dict(config="configs/mod.py",          # the config every run starts from
         seeds=(0, 1, 2),
         equal="flops" | "tokens" | "",    # every run gets as many of these as the first one
         runs={"name": {"model.depth": 8}, ...},   # dotted keys that each run changes; with
                                                   # "config", it starts from another file
         columns={"title": "metric|other", ...})   # more columns: the first metric that a run has;
                                                   # "min:metric" is the least value of a metric,
                                                   # "mean:metric" the mean of all its values

Each run is a separate `python -m efx.main` in WORKDIR/<name>-seed<n>, one after another, so an
interrupted sweep continues where it stopped. Arguments after `--` go to every run, to scale a sweep
up or down. The table is written to WORKDIR/table.md and its numbers to WORKDIR/table.json; making
it needs no JAX.
"""

import math
import pathlib
import re
import statistics
import sys

from efx import run_dir
from efx.config.load import run_file
from efx.config.run import Seed
from efx.config.schema import converted
from efx.errors import UsageError, nearest
from efx.logging import portion, read_metrics, tables
from efx.studies import cli, logged, rehearsal
from efx.studies import jobs as jobs_lib

KEYS = ("config", "seeds", "equal", "runs", "columns")
NOT_FINITE = 3  # exit status of a finished run whose loss is not finite, which is a result too
STEP_TIME = "step time over the first's"
LOSSES = {"held-out loss (nats)": "eval/loss", "bits per byte": "eval/bits_per_byte"}


def load_file(path, kind, keys, optional=()):
    """The result of `get_<kind>()` of the file `--<kind>`: a dict with these keys, perhaps also
    some of those that are optional."""
    contents = run_file(kind, path, folder="sweeps")
    if not isinstance(contents, dict):
        raise UsageError(
            f"{path}: get_{kind}() returned {shown(contents)}; expected a dict with the keys "
            f"{', '.join(keys)}"
        )
    for key in contents:
        if key not in (*keys, *optional):
            hint = nearest(key, (*keys, *optional))
            raise UsageError(f"{path}: {key!r} is not a key of a {kind}{hint}")
    for key in keys:
        if key not in contents:
            raise UsageError(f"{path}: the {kind} lacks {key!r}")
    if not isinstance(contents["config"], str):
        raise UsageError(
            f"{path}: config={shown(contents['config'])}: expected a config file or the name of"
            " one, such as 'configs/mod.py'"
        )
    return contents


def check_seeds(path, contents):
    """UsageError unless contents["seeds"] are seeds that `config.seed` may be."""
    check_numbers(path, contents, "seeds", lambda seed: type(seed) is int and seed >= 0, "(0, 1)")
    for seed in contents["seeds"]:
        converted(Seed, seed, f"{path}: seed")


def check_numbers(path, contents, key, is_right, example):
    """UsageError unless contents[key] is a tuple or list of one or more numbers that are right."""
    numbers = contents[key]
    if isinstance(numbers, tuple | list) and not numbers:
        raise UsageError(f"{path}: {key} is empty")
    if not isinstance(numbers, tuple | list) or not all(map(is_right, numbers)):
        raise UsageError(f"{path}: {key}={shown(numbers)}: expected numbers, e.g. {example}")


def check_changes(path, contents, key):
    """UsageError unless contents[key] says for one or more names which settings they change."""
    changes = contents[key]
    if not isinstance(changes, dict):
        raise UsageError(f"{path}: {key}={shown(changes)}: expected a dict")
    if not changes:
        raise UsageError(f"{path}: {key} is empty")
    for name, settings in changes.items():
        if not isinstance(name, str) or not isinstance(settings, dict):
            raise UsageError(
                f"{path}: {key}[{name!r}]={shown(settings)}: expected a name and a dict of its "
                "changed settings, e.g. {'model.depth': 8}"
            )
        for setting in settings:
            if not isinstance(setting, str):
                raise UsageError(
                    f"{path}: {key}[{name!r}]: {setting!r} is not the name of a setting"
                )


def shown(value):
    """A value of any type and length, in a few words."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_sweep(path):
    """The dict of a sweep file, checked."""
    sweep = load_file(path, "sweep", KEYS)
    check_seeds(path, sweep)
    if sweep["equal"] not in ("flops", "tokens", ""):
        raise UsageError(f"{path}: equal={shown(sweep['equal'])}, expected 'flops', 'tokens' or ''")
    check_changes(path, sweep, "runs")
    columns = sweep["columns"]
    if not isinstance(columns, dict) or not all(
        isinstance(text, str) for item in columns.items() for text in item
    ):
        raise UsageError(f"{path}: columns={shown(columns)}: expected a dict, {{title: metric}}")
    for title, metric in columns.items():
        if not all(metric.split("|")) or metric.split() != [metric]:
            raise UsageError(
                f"{path}: columns[{title!r}]={metric!r}: expected names of metrics with | between"
                " them and no spaces, e.g. 'eval/loss_topk|eval/loss'"
            )
    check_folders(path, sweep)
    return sweep


def check_folders(path, sweep):
    """UsageError if two runs would share a folder."""
    if len(set(sweep["seeds"])) < len(sweep["seeds"]):
        raise UsageError(f"{path}: seeds={sweep['seeds']} has a seed twice")
    run_of_folder = {}
    for name in sweep["runs"]:
        # Some file systems do not tell capitals from small letters.
        folder_name = folder("", name, 0).name.lower()
        if folder_name in run_of_folder:
            raise UsageError(
                f"{path}: the runs {run_of_folder[folder_name]!r} and {name!r} would share the "
                f"folder {folder('', name, 0)} (only letters, digits and dots of a name are "
                "used); rename one of them"
            )
        run_of_folder[folder_name] = name


def folder(workdir, name, seed):
    """WORKDIR/<name>-seed<n>, other characters than letters, digits and dots replaced by "_"."""
    return pathlib.Path(workdir) / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name).strip('_')}-seed{seed}"


def command(sweep, workdir, name, seed, budget, extra):
    """Arguments of `python -m efx.main` for one run.

    budget: {} or {"flops": ...} or {"steps": ...}, which the run has to use.
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
    if "steps" in budget:
        arguments += [f"--config.steps={budget['steps']}", "--config.train_flops=0"]
    return arguments


def run_sweep(sweep, workdir, extra=(), jobs=1):
    """Every run of the sweep, `jobs` at a time; the very first one sets the budget of the others.

    Several at a time share the machine's CPUs, and each writes its output to a file.
    """
    configs = check_commands(sweep, workdir, extra)
    first_name = next(iter(sweep["runs"]))
    remaining = [(name, seed) for seed in sweep["seeds"] for name in sweep["runs"]]
    budgets = dict.fromkeys(sweep["runs"], {})
    if sweep["equal"]:
        name, seed = remaining.pop(0)
        _run_one(sweep, workdir, name, seed, {}, extra)
        used = final_row(folder(workdir, name, seed))[sweep["equal"]]
        budgets |= {
            other: _budget(sweep["equal"], used, config)
            for other, config in configs.items()
            if other != first_name
        }

    def run_item(item, cpus):
        name, seed = item
        _run_one(sweep, workdir, name, seed, budgets[name], extra, cpus)

    jobs_lib.run_all(run_item, remaining, jobs)


def _budget(equal, used, config):
    """The budget of a run of this config, as of `command`, that has as many FLOPs or tokens as were
    used; tokens to the nearest step, of which there is one at least."""
    if equal == "flops":
        return {"flops": used}
    return {"steps": max(1, round(used / (config.data.batch_size * config.data.seq_len)))}


def check_commands(sweep, workdir, extra):
    """{name: the checked config of its run}; UsageError, before anything trains, for a run whose
    command line `efx.main` would refuse."""
    cli.check_extra(extra)
    seed, runs, first_name = sweep["seeds"][0], [], next(iter(sweep["runs"]))
    configs = {}
    for name in sweep["runs"]:
        arguments = command(sweep, workdir, name, seed, {}, extra)
        configs[name] = cli.check_command(name, arguments)
        gets_flops = sweep["equal"] == "flops" and name != first_name
        if not run_dir.holds_result(folder(workdir, name, seed)):  # which was checked then
            runs.append((name, arguments, gets_flops))
    rehearsal.check(runs)
    return configs


def _run_one(sweep, workdir, name, seed, budget, extra, cpus=None):
    arguments = command(sweep, workdir, name, seed, budget, extra)
    run_one(f"{name}, seed {seed}", arguments, folder(workdir, name, seed), cpus)


def run_one(title, arguments, run, cpus=None):
    """`jobs.run_main` for the run directory `run`; UsageError unless the run reached its last
    step, with a finite loss or without."""
    status, log_name = jobs_lib.run_main(title, arguments, f"{run}.log", cpus)
    if status == NOT_FINITE:
        print(f"-- {title}: its last values are not finite; see {log_name}", flush=True)
    elif status:
        raise UsageError(
            f"the run {title!r} ended with status {status}; see {log_name}. Rerun the study to "
            "resume"
        )


def final_row(run):
    """`logged.last_values` of a run."""
    return logged.last_values(read_metrics(run))


def measure_step_times(sweep, workdir, steps):
    """{name: (milliseconds of a training step, sequences/s)}, the runs' models taking turns.

    The logs of the runs have times too, but those runs came one after another, and the speed of the
    machine may have changed in between.
    """
    from efx.studies.step_time import step_times

    first_seed = sweep["seeds"][0]
    folders = {name: folder(workdir, name, first_seed) for name in sweep["runs"]}
    return step_times(folders, steps)


def check_finished(sweep, workdir):
    """UsageError for a run that has steps left to train, whose numbers would look like results."""
    for name in sweep["runs"]:
        for seed in sweep["seeds"]:
            run = folder(workdir, name, seed)
            row = final_row(run)
            config, step = run_dir.recorded_config(run), row.get("step", 0)
            # Of a run that is to use FLOPs by what its steps have used so far, which may differ.
            flops = row.get("flops", 0)
            steps = config["steps"] or (config["train_flops"] * step / flops if flops else math.inf)
            if step + (2 if config["train_flops"] else 0) < steps:
                of = f"{steps:,.0f}" if steps < math.inf else "its training"
                raise UsageError(
                    f"{run} is at step {step:,} of {of}: it has not finished; run the sweep "
                    "without --table-only to resume it"
                )


def check_columns(path, sweep, workdir):
    """UsageError for a column that no finished run can fill: before the runs nobody knows which
    metrics they will have, and after them an empty column would look like a result."""
    runs = [folder(workdir, name, seed) for name in sweep["runs"] for seed in sweep["seeds"]]
    known = sorted({metric for run in runs for metric in final_row(run)})
    for title, metric in sweep["columns"].items():
        if not any(name in known for name in metric.split("|")):
            hint = next(filter(None, (nearest(name, known) for name in metric.split("|"))), "")
            raise UsageError(
                f"{path}: columns[{title!r}]={metric!r}: no run has such a metric{hint}; "
                "correct it or leave it out; --table-only then writes the table of the "
                "existing runs"
            )


def collect_table(sweep, workdir, times):
    """{name: {column: [value of each seed]}} of the finished runs; step times once a name."""
    columns = LOSSES | dict(sweep["columns"])
    table = {}
    for name in sweep["runs"]:
        values = {title: [] for title in columns}
        values |= {"training FLOPs": [], "tokens": [], "steps": []}
        for seed in sweep["seeds"]:
            run = folder(workdir, name, seed)
            last_values = final_row(run)
            for title, metric in columns.items():
                recorded = [last_values[name] for name in metric.split("|") if name in last_values]
                values[title].append(recorded[0] if recorded else None)
            values["training FLOPs"].append(last_values["flops"])
            values["tokens"].append(last_values["tokens"])
            values["steps"].append(last_values["step"])
        if times:
            first_times = times[next(iter(times))]
            values["ms a step"], values["sequences/s"] = [times[name][0]], [times[name][1]]
            values[STEP_TIME] = [times[name][0] / first_times[0]]
        table[name] = values
    return table


# The format of the numbers of a column that does not have four digits and a spread.
FORMS = {
    "training FLOPs": "FLOPs",
    "tokens": "quantity",
    "parameters": "quantity",
    "steps": ".0f",
    "ms a step": ".0f",
    "sequences/s": ".1f",
    STEP_TIME: ".2f",
    "FLOPs a token": "FLOPs",
    "decoding over the parent's": ".2f",
}


def form(title):
    """The format of the numbers of the column `title`: the second argument of `tables.number`."""
    return FORMS.get(title, ".4f")


def cell(title, values):
    """The cell of a column's values, one of each seed: their mean, with spread and the values
    themselves if the column shows a spread; None if one was not finite."""
    if any(value is None for value in values):
        return None
    return statistics.fmean(values) if title in FORMS else tables.summary(values)


def scored_text(sweep, workdir):
    """The text that the held-out losses of the finished runs are taken over, in words; also that it
    is not the same text or its tokens are others, which rows may be about, or another Python's
    standard library."""
    folders = [folder(workdir, name, seed) for name in sweep["runs"] for seed in sweep["seeds"]]
    split = portion([final_row(run).get("eval/split_fraction") for run in folders])
    unlike = logged.differences([logged.read_run(run) for run in folders])
    return "; ".join([split, *unlike.values()])


def markdown(sweep, table, command, split):
    """The table as Markdown, with config, seeds, scored text and command below it."""
    titles = list(next(iter(table.values())))
    rows = [
        [name, *(tables.text(cell(title, values[title]), form(title)) for title in titles)]
        for name, values in table.items()
    ]
    equal = f"every run with the {sweep['equal']} of the first; " if sweep["equal"] else ""
    seeds = ", ".join(str(seed) for seed in sweep["seeds"])
    timed = "Step times: medians of alternating steps. " if STEP_TIME in titles else ""
    return (
        f"{tables.markdown(['run', *titles], rows)}\n\n"
        f"`{sweep['config']}`; {equal}seeds {seeds}: mean ± standard deviation; {split}. "
        f"{timed}Command: `{command}`\n"
    )


def main(argv=None):
    parser = cli.Parser("efx.studies.sweep", __doc__)
    parser.add_argument(
        "--sweep", required=True, help=("sweep file, or the name of a sweep of efx")
    )
    parser.add_runs(jobs="runs")
    parser.add_argument("--table-only", action="store_true", help="only read finished runs")
    parser.add_argument(
        "--time-steps",
        type=int,
        default=0,
        metavar="N",
        help="also time N training steps of each run's model, alternating in one process",
    )
    return parser.run(study, argv)


def study(arguments):
    """Makes the runs, then the table."""
    sweep, workdir = load_sweep(arguments.sweep), arguments.workdir
    if not arguments.table_only:
        run_sweep(sweep, workdir, arguments.extra, arguments.jobs)
    check_finished(sweep, workdir)
    check_columns(arguments.sweep, sweep, workdir)
    times = arguments.time_steps and measure_step_times(sweep, workdir, arguments.time_steps)
    table = collect_table(sweep, workdir, times)
    text = markdown(sweep, table, arguments.command, scored_text(sweep, workdir))
    tables.save(workdir, "table", text, table)


if __name__ == "__main__":
    sys.exit(main())
