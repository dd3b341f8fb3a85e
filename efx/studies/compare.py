"""Compare configs at equal training FLOPs by a plan that is fixed before the first run.

    python -m efx.studies.compare plan A.py B.py --flops 1.2e13 --looks 4,8,12 --sd 0.012
    python -m efx.studies.compare run compare.json --jobs 2
    python -m efx.studies.compare report compare.json

`plan` writes all that decides the outcome: hashes of the arms' settings, of efx's code, of text and
tokenizer; seeds, learning rates, looks, margin, levels and tests. It prints the power to call equal
models equivalent and to find a difference of the margin. `run` searches the same learning rates for
every arm on a seed that is not used again, then trains to the next look; each call goes one look
further until all tests are decided. It refuses a plan, code or text that has changed. `report`
writes report.json, runs.csv and report.png. Rows of runs.csv count as finished runs, also
without run directories, so this file resumes a comparison on another machine.

An arm is a config, `mod:dense` or `NAME=mod:dense`; arguments after `--` go to every run. In a test
A-B, below 0 the arm A is better. Each look tests at the levels of all looks (`statistics.levels`).
With --order=fixed a test counts once those before it are decided; with --order=holm all count, at
Holm's p values. Paired tests are for arms of one shape, initial values and order of text.
"""

import hashlib
import itertools
import json
import math
import pathlib
import sys

import pandas as pd

from efx import io, run_dir
from efx.config.load import config_of_run, to_config
from efx.errors import UsageError, nearest
from efx.logging import quantity, read_metrics, tables
from efx.studies import cli, statistics, verdicts
from efx.studies import runs as runs_lib

RATE = "optim.learning_rate"
PARITY = 0.005  # largest deviation from the planned FLOPs, as a fraction
SAME_SHAPE = 0.01  # largest difference of paired arms in parameters and tokens, as a fraction
COLUMNS = {
    "loss": "eval/loss",
    "gain": "eval/repeated/gain",
    "uncopied_loss": "eval/uncopied_loss",
    "worth": "eval/router/worth",
    "gate": "eval/router/gate_median",
    "tokens": "tokens",
    "flops": "flops",
    "seconds": "seconds",
}
KEYS = ["name", "seed", "rate"]  # labels of a run


# ---- the plan ------------------------------------------------------------------------------------


def plan(
    arms,
    flops,
    *,
    looks,
    std,
    margin=statistics.MARGIN,
    rates=(),
    rate_seed=1000,
    tests=(),
    paired=(),
    order="fixed",
    extra=(),
):
    """Return the plan of a comparison, plain data.

    Args:
      arms: {name: config}, the baseline first.
      flops: training FLOPs of each run.
      looks: rising numbers of seeds an arm.
      std: expected deviation of a loss over seeds.
      rates: learning rates to search; (): half, one and two times that of the first arm.
      tests: pairs of arms; (): every arm against the first.
      paired: those tests that are paired.
      order: "fixed" or "holm".
      extra: arguments of every run.

    Raises:
      UsageError: the arms are not comparable, or an argument is out of range.
    """
    from efx import models
    from efx.layers.flops import count_params
    from efx.train import setup

    looks = tuple(looks)
    _check_numbers(flops, margin, looks, std, rate_seed)
    if len(arms) < 2:
        raise UsageError(f"{len(arms)} arms; a comparison needs two configs or more")
    first = next(iter(arms))
    tests = [tuple(test) for test in tests] or [(name, first) for name in arms if name != first]
    git = _committed_code()
    described, texts = {}, {}
    for name, config in arms.items():
        config = _run({"flops": flops, "extra": list(extra)}, "", name, config, 0).config()
        experiment = setup.experiment(config)
        used = experiment.flops(experiment.steps)
        if abs(used / flops - 1) > PARITY:
            raise UsageError(
                f"{name}: {experiment.steps} steps are {used:.4g} FLOPs, the plan has {flops:.4g}; "
                "use more FLOPs or a smaller config.data.batch_size"
            )
        described[name] = {
            "config": arms[name],
            "settings": runs_lib.settings_digest(config),
            "rate": config.optim.learning_rate,
            "parameters": count_params(models.unboxed_shapes(experiment.model)["params"]),
            "tokens": experiment.steps * experiment.tokens_per_step,
        }
        texts[name] = _text(experiment.data)
        if texts[name] != texts[first]:
            raise UsageError(
                f"{name} and {first} differ in text or tokenizer, so their losses cannot be "
                "compared; use one config.data for all arms"
            )
    for a, b in paired:
        for key in ("parameters", "tokens"):
            if not math.isclose(described[a][key], described[b][key], rel_tol=SAME_SHAPE):
                raise UsageError(
                    f"{a}-{b} cannot be paired: {described[a][key]:,} and {described[b][key]:,} "
                    f"{key}; pairs need one shape, one set of initial values and one order of text"
                )
    rates = list(rates) or [described[first]["rate"] * factor for factor in (0.5, 1, 2)]
    at = statistics.levels(looks)
    contents = {
        "arms": described,
        "flops": flops,
        "looks": list(looks),
        "seeds": list(range(looks[-1])),
        "rates": rates,
        "rate_seed": rate_seed,
        "margin": margin,
        "levels": at._asdict(),
        "endpoint": COLUMNS["loss"],
        "tests": [list(test) for test in tests],
        "paired": [list(test) for test in paired],
        "order": order,
        "std": std,
        "extra": list(extra),
        "revision": git["revision"],
        "code": git["code"],
        **texts[first],
    }
    return contents | {"sum": _checksum(contents)}


def _committed_code():
    git = run_dir.git_revision()
    if git is None or git["dirty"]:
        problem = "is not a git checkout" if git is None else "has uncommitted or untracked files"
        raise UsageError(
            f"efx {problem}, so its revision does not name the code of a run; see git status"
        )
    return git


def _check_numbers(flops, margin, looks, std, rate_seed):
    for name, value in (("flops", flops), ("margin", margin), ("sd", std)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name}={value}: must be a number above 0")
    if min(looks) < 2 or any(b <= a for a, b in itertools.pairwise(looks)):
        text = ",".join(map(str, looks))
        raise UsageError(f"--looks={text}: must be rising numbers of seeds, from 2 on, e.g. 4,8,12")
    if 0 <= rate_seed < looks[-1]:
        raise UsageError(
            f"--rate-seed={rate_seed}: is a seed of the comparison, 0 to {looks[-1] - 1}; the best "
            "of several rates flatters its seed, so use another"
        )


def _text(data):
    """`runs.text_digests` of a `Data`."""
    return runs_lib.text_digests(data.text_record, run_dir.checksum(data.tokenizer.to_json()))


def _checksum(contents):
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]


def load(path):
    """Return the plan in a file; UsageError if it is none or was changed."""
    try:
        contents = io.parse_json(io.local_path(path, "PLAN").read_text())
        total = contents.pop("sum")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{path} is not a plan ({error}); `compare plan` writes one") from error
    if _checksum(contents) != total:
        raise UsageError(f"{path} was changed after it was made; make a new plan")
    return contents | {"sum": total}


def check_unchanged(contents):
    """Raise UsageError unless code, settings, text and tokenizer are those of the plan."""
    from efx.data import load as load_data

    if _committed_code()["code"] != contents["code"]:
        raise UsageError(
            f"efx is not at the code of the plan; check out {contents['revision']}, or make a new "
            "plan"
        )
    for name, arm in contents["arms"].items():
        config = _run(contents, "", name, arm["config"], 0).config()
        if runs_lib.settings_digest(config) != arm["settings"]:
            raise UsageError(f"{name}: {arm['config']} has changed since the plan was made")
        text = _text(load_data(config.data, seed=0))
        if text != {key: contents[key] for key in text}:
            raise UsageError(f"{name}: text or tokenizer has changed since the plan was made")


def deviation(folders):
    """Return (pooled deviation over seeds of finished runs, its degrees of freedom, mean seconds
    a FLOP); UsageError without two seeds of one config."""
    rows = []
    for folder in folders:
        last = _last_row(folder)
        if last.get("eval/loss") is None:
            raise UsageError(f"--pilot: {folder} has no run with a held-out loss")
        settings = runs_lib.settings_digest(to_config(config_of_run(folder)))
        rows.append((settings, last["eval/loss"], last["seconds"] / last["flops"]))
    table = pd.DataFrame(rows, columns=["settings", "loss", "seconds"])
    groups = table.groupby("settings").loss
    freedom = int((groups.size() - 1).sum())
    if not freedom:
        raise UsageError("--pilot: no two runs have one config and different seeds; use --sd")
    squares = ((table.loss - groups.transform("mean")) ** 2).sum()
    return math.sqrt(squares / freedom), freedom, table.seconds.mean()


def _last_row(folder):
    last = {}
    for row in read_metrics(folder):
        last |= row
    return last


def describe_power(contents, std):
    """Return (text about a comparison with this deviation, the smaller of its two powers)."""
    options = dict(margin=contents["margin"], looks=contents["looks"])
    equal = statistics.power(std, **options)
    apart = statistics.power(std, true=contents["margin"], **options)
    text = (
        f"deviation {std:.4f}: power {equal['equivalent']:.2f} to call equal models equivalent, "
        f"{apart['worse']:.2f} to find a difference of {contents['margin']:g}; "
        f"{equal['seeds']:.1f} and {apart['seeds']:.1f} seeds an arm expected"
    )
    return text, min(equal["equivalent"], apart["worse"])


# ---- its runs ------------------------------------------------------------------------------------


def _run(contents, workdir, name, config, seed, rate=None):
    changes = {"steps": 0, "train_flops": contents["flops"]} | runs_lib.MAY_DIVERGE
    label = name
    if rate is not None:
        changes[RATE], label = rate, f"{name}, rate {rate:g}"
    labels = {"name": name, "rate": rate}
    return runs_lib.training_run(
        workdir, label, seed, config, changes, tuple(contents["extra"]), labels
    )


def rate_runs(contents, workdir):
    """Return the runs that select the learning rates."""
    return [
        _run(contents, workdir, name, arm["config"], contents["rate_seed"], rate)
        for name, arm in contents["arms"].items()
        for rate in contents["rates"]
        if len(contents["rates"]) > 1
    ]


def best_rates(contents, workdir, results):
    """Return {arm: its best learning rate}; results: `finished_rows` of `rate_runs`."""
    searched = rate_runs(contents, workdir)
    if not searched:
        return dict.fromkeys(contents["arms"], contents["rates"][0])
    if len(results) < len(searched):
        raise UsageError(
            f"{workdir}: the runs that select learning rates have not finished; run the plan"
        )
    return runs_lib.best_rates(results, "name")


def final_runs(contents, workdir, rates, arms, seeds):
    """Return the runs of some arms, seed by seed."""
    return [
        _run(contents, workdir, name, contents["arms"][name]["config"], seed, rates[name])
        for seed in seeds
        for name in arms
    ]


def next_runs(contents, workdir, rates):
    """Return the missing runs of the next look; [] if all tests are decided."""
    arms, looks, reached = contents["arms"], contents["looks"], 0
    runs = final_runs(contents, workdir, rates, arms, contents["seeds"])
    table = finished_rows(contents, workdir, runs)
    if len(table):
        rows = verdicts.assess(contents, table)
        rows = [row for row in rows if not row["is_final"]]
        arms = [arm for arm in arms if any(arm in (r["name"], r["against"]) for r in rows)]
        reached = min((row["look"] for row in rows), default=looks[-1])
    look = next((n for n in looks if n > reached), 0)
    needed = final_runs(contents, workdir, rates, arms, contents["seeds"][:look])
    return missing_runs(needed, table)


def missing_runs(runs, table):
    """Return the runs without a row in a table of `finished_rows`."""
    known = set(zip(table["name"], table.seed, table.rate, strict=True))
    return [run for run in runs if tuple(run.labels[key] for key in KEYS) not in known]


def finished_rows(contents, workdir, runs):
    """Return one row for each finished run: of its directory, or else of WORKDIR/runs.csv.

    Raises:
      UsageError: a run had another text than the plan, or runs.csv has runs of another plan.
    """
    results = runs_lib.results([run for run in runs if runs_lib.is_finished(run)])
    for key in ("text", "tokenizer"):
        if len(results) and (results[key] != contents[key]).any():
            name = results["name"][results[key] != contents[key]].iloc[0]
            raise UsageError(f"a run of {name} had another {key} than the plan; make a new plan")
    results = results.rename(columns={metric: name for name, metric in COLUMNS.items()})
    found = [results] if len(results) else []
    path = workdir / "runs.csv"
    if path.exists():
        kept, header = tables.read_csv(path)
        if header.get("plan") != [contents["sum"]]:
            raise UsageError(f"{path} has runs of another plan; use another directory")
        found.append(kept)
    columns = [*KEYS, *COLUMNS, "machine", "revision"]
    found = pd.concat(found or [results.reindex(columns=KEYS)]).drop_duplicates(KEYS)
    labels = pd.DataFrame([run.labels for run in runs], columns=KEYS)
    return labels.merge(found.reindex(columns=columns), on=KEYS)


# ---- commands ------------------------------------------------------------------------------------


def plan_command(arguments):
    """Make a plan and print its power; UsageError if that is below 0.8."""
    arms = {}
    for spec in arguments.arms:
        name, is_named, config = spec.rpartition("=")
        name = name if is_named else pathlib.Path(spec).name.replace(".py", "")
        if name in arms:
            raise UsageError(f"{spec}: two arms are called {name!r}; write NAME={config}")
        arms[name] = config
    std, freedom, seconds = arguments.sd, 0, None
    if (arguments.pilot is None) == (std is None):
        raise UsageError("use --sd=DEVIATION or --pilot RUN RUN..., one of the two")
    if arguments.pilot is not None:
        std, freedom, seconds = deviation(arguments.pilot)
    contents = plan(
        arms,
        arguments.flops,
        looks=cli.numbers("--looks", arguments.looks),
        std=std,
        margin=arguments.margin,
        rates=_rates(arguments.rates),
        rate_seed=arguments.rate_seed,
        tests=_tests("--tests", arguments.tests, arms),
        paired=_tests("--paired", arguments.paired, arms),
        order=arguments.order,
        extra=arguments.extra,
    )
    text, power = describe_power(contents, std)
    print(text)
    if freedom:
        upper = statistics.upper_deviation(std, freedom)
        print(f"at the deviation's upper 80% bound: {describe_power(contents, upper)[0]}")
    most = len(rate_runs(contents, "")) + len(arms) * contents["looks"][-1]
    hours = "" if seconds is None else f", {most * seconds * arguments.flops / 3600:.1f} hours"
    print(f"at most {most} runs of {quantity(arguments.flops, 'FLOPs')}{hours} by one job")
    if power < 0.8 and not arguments.underpowered:
        raise UsageError(
            f"the power is {power:.2f}, below 0.8; plan more seeds or a wider margin, or use "
            "--underpowered"
        )
    io.write_atomic(io.local_path(arguments.out, "--out"), json.dumps(contents, indent=1) + "\n")
    print(
        f"wrote {arguments.out}; commit it, then: python -m efx.studies.compare run {arguments.out}"
    )


def _rates(text):
    try:
        return [float(rate) for rate in text.split(",") if rate]
    except ValueError as error:
        raise UsageError(f"--rates={text}: expected numbers, e.g. 1e-3,2e-3") from error


def _tests(flag, text, arms):
    """[(name, against)] of "B-A,C-A"."""
    pairs = {f"{a}-{b}": (a, b) for a, b in itertools.permutations(arms, 2)}
    tests = [test for test in text.split(",") if test]
    for test in tests:
        if test not in pairs:
            hint = nearest(test, pairs)
            raise UsageError(f"{flag}={text}: {test!r} is not a pair of arms, as in B-A{hint}")
    return [pairs[test] for test in tests]


def run_command(arguments):
    """Train to the next look and report."""
    contents, workdir = load(arguments.plan), _workdir(arguments)
    check_unchanged(contents)
    known = workdir / "plan.json"
    if known.exists() and load(known)["sum"] != contents["sum"]:
        raise UsageError(f"--workdir={workdir}: has runs of another plan; use another directory")
    searched = rate_runs(contents, workdir)
    searched = missing_runs(searched, finished_rows(contents, workdir, searched))
    if arguments.print_commands and searched:
        runs_lib.print_commands(searched)
        return print("# these select the learning rates: rerun when they have finished")
    workdir.mkdir(parents=True, exist_ok=True)
    io.write_atomic(known, json.dumps(contents, indent=1) + "\n")
    print(runs_lib.MAY_DIVERGE_NOTE)
    runs_lib.run_all(searched, arguments.jobs)
    results = finished_rows(contents, workdir, rate_runs(contents, workdir))
    missing = next_runs(contents, workdir, best_rates(contents, workdir, results))
    if arguments.print_commands:
        return runs_lib.print_commands(missing)
    runs_lib.run_all(missing, arguments.jobs)
    report_command(arguments)


def report_command(arguments):
    """Print the verdicts; write report.json, runs.csv and report.png."""
    contents, workdir = load(arguments.plan), _workdir(arguments)
    searched = finished_rows(contents, workdir, rate_runs(contents, workdir))
    rates = best_rates(contents, workdir, searched)
    runs = final_runs(contents, workdir, rates, contents["arms"], contents["seeds"])
    table = finished_rows(contents, workdir, runs)
    if not len(table):
        raise UsageError(f"{arguments.plan}: the plan has no finished runs in {workdir}; run it")
    rows = verdicts.assess(contents, table)
    here = [run for run in runs if runs_lib.is_finished(run)]
    curves = pd.DataFrame(
        [
            run.labels | {"tokens": row["tokens"], "gain": row[COLUMNS["gain"]]}
            for run in here
            for row in read_metrics(run.folder)
            if row.get(COLUMNS["gain"]) is not None
        ],
        columns=["name", "seed", "tokens", "gain"],
    )
    last = pd.DataFrame(map(_last_row, getattr(arguments, "ladder", None) or ()))
    ladder = last.rename(columns={COLUMNS["loss"]: "loss"}).reindex(
        columns=["flops", "seconds", "loss"]
    )
    report = {
        "plan": contents["sum"],
        "rates": rates,
        "tests": rows,
        "at_equal_gain": {
            f"{a}-{b}": verdicts.at_equal_gain(*(table[table["name"] == arm] for arm in (a, b)))
            for a, b in contents["tests"]
        },
        "tokens_to_copy": verdicts.tokens_to_copy(contents, curves),
        "multiples": verdicts.multiples(table, ladder) if len(ladder) else {},
        "warnings": verdicts.warnings_of(contents, table),
    }
    header = {"title": arguments.plan, "command": arguments.command, "plan": contents["sum"]}
    tables.write_csv(workdir / "runs.csv", pd.concat([searched, table]), header)
    io.write_atomic(workdir / "report.json", json.dumps(report, indent=1) + "\n")
    verdicts.draw(contents, table, rows, curves, workdir / "report.png")
    print(verdicts.describe(contents, table, report))
    left = [row for row in rows if not row["is_final"]]
    arms = {row[key] for row in left for key in ("name", "against")}
    count = sum(len(contents["seeds"]) - (table["name"] == name).sum() for name in arms)
    if count:
        seconds = pd.Series([_last_row(run.folder)["seconds"] for run in here]).mean()
        hours = f", {count * seconds / 3600:.1f} hours by one job" if here else ""
        print(f"at most {count} runs are left{hours}")


def _workdir(arguments):
    default = pathlib.Path("runs") / pathlib.Path(arguments.plan).stem
    return io.local_path(arguments.workdir or default)


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv else ""
    study = {"plan": plan_command, "run": run_command, "report": report_command}.get(command)
    if study is None:
        parser = cli.Parser("efx.studies.compare", __doc__)
        parser.add_argument("command", choices=("plan", "run", "report"))
        parser.parse_args(argv[:1])
    parser = cli.Parser(f"efx.studies.compare {command}", __doc__)
    if command == "plan":
        parser.set_defaults(extra=[])
        parser.add_argument("arms", nargs="+", metavar="[NAME=]CONFIG", help="the baseline first")
        parser.add_argument("--flops", type=float, required=True, help="training FLOPs of a run")
        parser.add_argument("--margin", type=float, default=statistics.MARGIN, help="nats")
        parser.add_argument("--looks", default="4,8,12", help="numbers of seeds an arm")
        parser.add_argument("--sd", type=float, help="deviation of a loss over seeds")
        parser.add_argument("--pilot", nargs="+", help="finished runs that estimate it")
        help = "learning rates to search; default: half, one and two times the first arm's"
        parser.add_argument("--rates", default="", help=help)
        parser.add_argument("--rate-seed", type=int, default=1000, help="seed of the search")
        parser.add_argument("--tests", default="", help="B-A,C-A: default, all against the first")
        parser.add_argument("--paired", default="", help="tests of the same form that are paired")
        parser.add_argument("--order", choices=("fixed", "holm"), default="fixed")
        parser.add_argument("--underpowered", action="store_true", help="accept a low power")
        parser.add_argument("--out", default="compare.json", help="file of the plan")
        return parser.run(study, argv[1:])
    parser.add_argument("plan", help="file of the plan")
    parser.add_argument("--workdir", default="", help="default: runs/<name of the plan>")
    if command == "run":
        help = "runs at a time, each on an equal part of the CPUs"
        parser.add_argument("--jobs", type=int, default=1, metavar="N", help=help)
        help = "print the commands of the missing runs, for other machines, and run nothing"
        parser.add_argument("--print-commands", action="store_true", help=help)
    else:
        help = "runs of a dense model at several budgets: losses as multiples of its FLOPs"
        parser.add_argument("--ladder", nargs="+", metavar="RUN", help=help)
    return parser.run(study, argv[1:])


if __name__ == "__main__":
    sys.exit(main())
