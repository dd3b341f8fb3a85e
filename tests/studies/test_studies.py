"""Sweeps: commands, budgets, tables; and how studies start, stop and end their runs."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time

import pytest
from refusals import refused
from study_helpers import error_line

from efx import main
from efx.errors import UsageError
from efx.logging import MetricsWriter, tables
from efx.parallel import signals
from efx.studies import cli, jobs, rehearsal, sweep

SWEEP = """
def get_sweep():
    return dict(config="configs/mod.py", seeds=(0, 1, 2), equal="flops",
                runs={"MoD, 12.5%": {}, "dense twin": {"model.depth_routing.kind": "none"}},
                columns={"decision accuracy": "eval/router/accuracy"})
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "sweep.py"
    path.write_text(SWEEP)
    return sweep.load_sweep(path)


def fake_run(spec, workdir, name, seed, loss, accuracy=None, fraction=1.0):
    """The folder of a finished run, with these numbers."""
    run = sweep.folder(workdir, name, seed)
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"steps": 40, "train_flops": 0.0}))
    with MetricsWriter(run, tensorboard=False, resume_step=None) as writer:
        for step, rate in ((10, 50.0), (20, 100.0), (30, 200.0), (40, 100.0)):
            row = {"train/loss": 3.0, "tokens": 10 * step, "flops": 1e9 * step}
            writer.write(step, row | {"tokens_per_second": rate})
        row = {"eval/loss": loss, "eval/bits_per_byte": 2 * loss}
        row |= {"eval/split_fraction": fraction} if fraction else {}
        writer.write(40, row if accuracy is None else {**row, "eval/router/accuracy": accuracy})


def fake_runs(spec, workdir):
    for name in spec["runs"]:
        for seed in range(3):
            fake_run(spec, workdir, name, seed, 1.0, accuracy=0.9)


def table_only(folder):
    return [f"--sweep={folder / 'sweep.py'}", f"--workdir={folder}", "--table-only"]


def test_the_budget_overrides_arguments_for_all_runs(spec, tmp_path):
    assert sweep.folder(tmp_path, "MoD, 12.5%", 2).name == "MoD_12.5-seed2"
    first = sweep.command(spec, tmp_path, "MoD, 12.5%", 0, {}, ["--config.steps=7"])
    assert "--config.steps=7" in first and "--config.seed=0" in first
    other = sweep.command(spec, tmp_path, "dense twin", 1, {"flops": 5e12}, ["--config.steps=7"])
    assert "--config.model.depth_routing.kind=none" in other
    assert other.index("--config.steps=0") > other.index("--config.steps=7")
    assert "--config.train_flops=5000000000000.0" in other


def test_a_table_has_mean_and_deviation_over_seeds(spec, tmp_path, capsys):
    for seed, loss in enumerate((1.0, 1.2, 1.7)):
        fake_run(spec, tmp_path, "MoD, 12.5%", seed, loss, accuracy=0.9 + seed / 100)
        fake_run(spec, tmp_path, "dense twin", seed, 2 * loss)
    assert sweep.main(table_only(tmp_path)) == 0
    text = (tmp_path / "table.md").read_text()
    mean, spread = statistics.fmean((1.0, 1.2, 1.7)), statistics.stdev((1.0, 1.2, 1.7))
    row = next(line for line in text.splitlines() if line.startswith("| MoD"))
    assert f"| {mean:.4f} ± {spread:.4f} |" in row and "0.9100 ± 0.0100" in row
    assert "| 40.0 GFLOPs | 400 | 40 |" in row and "seeds 0, 1, 2" in text
    dense = next(line for line in text.splitlines() if line.startswith("| dense"))
    assert "±" in dense and "|  |" in dense  # no accuracy where nothing is routed
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert numbers["MoD, 12.5%"]["held-out loss (nats)"] == [1.0, 1.2, 1.7]
    times = {"MoD, 12.5%": (20.0, 800.0), "dense twin": (30.0, 533.3)}
    timed = sweep.markdown(spec, sweep.collect_table(spec, tmp_path, times), "how", "split")
    assert "| 30 | 533.3 | 1.50 |" in timed  # dense, whose steps take half as long again


@pytest.mark.parametrize(
    "budget, finished",
    [
        ({"steps": 0, "train_flops": 40.4e9}, True),
        ({"steps": 60, "train_flops": 0.0}, False),
    ],
)
def test_a_table_needs_finished_runs(spec, tmp_path, capsys, budget, finished):
    fake_runs(spec, tmp_path)
    last = sweep.folder(tmp_path, "dense twin", 2)
    (last / "config.json").write_text(json.dumps(budget))
    assert sweep.main(table_only(tmp_path)) == (0 if finished else 2)
    assert (tmp_path / "table.md").exists() == finished
    if not finished:
        error_line(capsys, last.name)


def test_a_column_that_no_run_has_is_refused(tmp_path, capsys):
    """Before the tables of an earlier call are overwritten."""
    path = tmp_path / "sweep.py"
    path.write_text(SWEEP.replace("eval/router/accuracy", "none|eval/router/acuracy"))
    fake_runs(sweep.load_sweep(path), tmp_path)
    (tmp_path / "table.md").write_text("of an earlier call")
    assert sweep.main(table_only(tmp_path)) == 2
    error_line(capsys, "'decision accuracy'")
    assert (tmp_path / "table.md").read_text() == "of an earlier call"


def test_a_table_states_the_evaluated_part_of_the_split(spec, tmp_path, capsys):
    for name in spec["runs"]:
        for seed, fraction in enumerate((0.25, 1.0, 0.5)):
            fake_run(spec, tmp_path, name, seed, 1.0, accuracy=0.9, fraction=fraction)
    assert sweep.main(table_only(tmp_path)) == 0
    assert "; 25% to 100% of the held-out split" in capsys.readouterr().out


def test_the_command_line_of_a_study(tmp_path, capsys):
    """Its statuses, its arguments for runs, and the command that tables quote."""
    given = []

    def parser(runs=True):
        parser = cli.Parser("efx.studies.x", "About.")
        if runs:
            parser.add_runs(jobs="runs")
        return parser

    argv = ["--workdir", str(tmp_path / "a b"), "--jobs=2", "--", "--config.steps=3"]
    assert parser().run(given.append, argv) == 0
    assert given[0].extra == ["--config.steps=3"] and given[0].jobs == 2
    assert given[0].command == (
        f"python -m efx.studies.x --workdir '{tmp_path}/a b' --jobs=2 -- --config.steps=3"
    )
    assert parser().run(given.append, ["--workdir=w", "--jobs=0"]) == 2
    error_line(capsys, "--jobs=0")
    with pytest.raises(SystemExit) as end:  # a study that starts no runs
        parser(runs=False).run(given.append, ["--", "--config.steps=3"])
    assert end.value.code == 2 and len(given) == 1
    refused(lambda: cli.numbers("--seeds", "1,1"), "--seeds")


def test_tables_of_markdown():
    assert tables.mean_and_spread([1.0, 1.5, 2.0]) == "1.5000 ± 0.5000"
    assert tables.mean_and_spread([1.5]) == "1.5000"  # one seed has no deviation
    text = tables.markdown(["run", "loss"], [["a", 1], ["b", "2.0"]])
    assert text == "| run | loss |\n|---|---|\n| a | 1 |\n| b | 2.0 |"
    assert tables.markdown(["a|b"], [["c\nd"]]) == "| a\\|b |\n|---|\n| c d |"


def test_a_final_value_that_is_not_finite_leaves_a_cell_empty(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        for step, loss in enumerate((3.0, 2.0, float("nan")), 1):
            writer.write(step, {"eval/loss": loss, "eval/bad": float("nan")})
    last = sweep.final_row(tmp_path)
    assert last["eval/loss"] is None and last["min:eval/loss"] == 2.0
    assert last["eval/bad"] is None and last["min:eval/bad"] is None
    assert last["mean:eval/loss"] == 2.5 and last["mean:eval/bad"] is None


@pytest.mark.parametrize(
    "before, after, name",
    [
        ('equal="flops"', 'equal="time"', "equal='time'"),
        ("seeds=", "seed=", "'seed'"),
        ("return dict", "1 / 0; dict", "ZeroDivisionError"),
        ("(0, 1, 2)", "()", "seeds"),
        ("runs={", "runs={} and {", "runs"),
        ('12.5%": {}', '12.5%": None', "runs['MoD, 12.5%']"),
        ("eval/router/accuracy", "a|", "'decision accuracy'"),
    ],
)
def test_bad_sweeps_are_refused(tmp_path, before, after, name):
    path = tmp_path / "sweep.py"
    path.write_text(SWEEP.replace(before, after))
    refused(lambda: sweep.load_sweep(path), name)


def test_a_missing_sweep_and_missing_runs_are_refused(tmp_path, capsys):
    assert sweep.main(["--sweep", "nowhere.py", "--workdir", str(tmp_path)]) == 2
    error_line(capsys, "nowhere.py")
    (tmp_path / "sweep.py").write_text(SWEEP)
    assert sweep.main(table_only(tmp_path)) == 2
    error_line(capsys, str(tmp_path))


def test_runs_at_a_time(spec, tmp_path, monkeypatch):
    """Two at a time on CPUs of their own, after the first, which sets the budget of the others."""
    running, most, seen = [], [], {}

    def run(title, arguments, folder, cpus=None):
        running.append(title)
        most.append(len(running))
        seen[title] = cli.check_command(title, arguments).train_flops
        assert cpus is None or cpus <= os.sched_getaffinity(0)
        time.sleep(0.05)
        running.remove(title)

    monkeypatch.setattr(sweep, "run_one", run)
    monkeypatch.setattr(rehearsal, "check", lambda runs: None)
    monkeypatch.setattr(sweep, "final_row", lambda folder: {"flops": 7.0})
    sweep.run_sweep(spec, tmp_path, jobs=2)
    budgets = {"MoD, 12.5%": 0.0, "dense twin": 7.0}
    assert seen == {f"{name}, seed {i}": budgets[name] for name in budgets for i in range(3)}
    assert most[0] == 1 and max(most) == 2


def test_runs_of_other_batches_take_the_steps_for_equal_tokens(spec, tmp_path, monkeypatch):
    smaller = {"data.batch_size": 4, "data.seq_len": 32, "train_flops": 1e9, "steps": 0}
    runs = {"first": {"data.batch_size": 8, "data.seq_len": 64}, "smaller": smaller}
    seen = {}
    monkeypatch.setattr(
        sweep, "run_one", lambda title, arguments, *_: seen.update({title: arguments})
    )
    monkeypatch.setattr(rehearsal, "check", lambda runs: None)
    monkeypatch.setattr(sweep, "final_row", lambda folder: {"tokens": 10 * 8 * 64, "flops": 7.0})
    sweep.run_sweep(spec | {"equal": "tokens", "runs": runs, "seeds": (0,)}, tmp_path)
    config = cli.check_command("smaller", seen["smaller, seed 0"])
    assert (config.steps, config.train_flops) == (40, 0.0)


@pytest.mark.slow
def test_the_error_of_a_failed_run_names_its_log(spec, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    short = {"data.source": f"text:{tmp_path / 'short.txt'}"}
    loaded = spec | {"equal": "", "runs": {"short": short}, "seeds": (0,)}
    refused(lambda: sweep.run_sweep(loaded, tmp_path, jobs=2), ".log")
    assert "short.txt" in next(tmp_path.glob("*.log")).read_text()


def test_nothing_starts_after_a_failure():
    started = []

    def run(item, cpus):
        started.append(item)
        time.sleep(0.01)
        raise UsageError("the first")

    for _ in range(20):
        started.clear()
        refused(lambda: jobs.run_all(run, range(50)), "the first")
        assert started == [0]


def test_runs_at_a_time_share_the_memory_of_a_gpu(tmp_path, monkeypatch):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    run.write_text(f"#!/bin/sh\necho ${name} >> {tmp_path}/said")
    run.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(run))
    jobs.run_all(lambda _, cpus: jobs.run_main("", [], tmp_path / "log", cpus), range(2), jobs=2)
    jobs.run_all(lambda _, cpus: jobs.run_main("", [], tmp_path / "log", cpus), range(1))
    assert (tmp_path / "said").read_text().split("\n") == ["false", "false", "", ""]


# Replaces Python: a run that marks its state, and saves for half a second on a signal.
RUN = """#!{python}
import os, pathlib, signal, sys, time
mark = pathlib.Path(__file__).parent / f"run_{{os.getpid()}}"
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(0.5)
    mark.write_text(f"saved by {{signal.Signals(number).name}}")
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
sys.path.insert(0, os.getcwd())
from efx.parallel.signals import end_with_starter
end_with_starter()
mark.write_text("runs")
time.sleep(60)
"""
STUDY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell with & has it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
from efx.studies import cli, jobs
sys.executable, at_a_time = sys.argv[1], int(sys.argv[2])
def study(arguments):
    def run(item, cpus):
        jobs.run_main(f"run {item}", [], sys.argv[1] + ".log", cpus)
    jobs.run_all(run, range(4), at_a_time)
sys.exit(cli.Parser("x", "").run(study, []))
"""


def marks(folder):
    return [path.read_text() for path in folder.glob("run_*")]


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def started_study(tmp_path, root):
    """A function of the number of runs at a time: (folder of their marks, the study's process)."""

    def start(at_a_time):
        run = tmp_path / "run"
        run.write_text(RUN.format(python=sys.executable))
        run.chmod(0o755)
        study = subprocess.Popen(
            [sys.executable, "-c", STUDY, str(run), str(at_a_time)], cwd=root, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        wait_until(lambda: study.poll() is not None or marks(tmp_path) == ["runs"] * at_a_time)
        assert study.poll() is None
        return tmp_path, study

    return start


@pytest.mark.parametrize(
    "number, at_a_time",
    [
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_a_study_ends_its_runs(number, at_a_time, started_study):
    """The runs save and end before the study does, and no other one starts."""
    folder, study = started_study(at_a_time)
    study.send_signal(number)  # to the study alone, as `kill` and a batch system do
    _, said = study.communicate(timeout=30)
    assert marks(folder) == [f"saved by {number.name}"] * at_a_time
    assert study.returncode == 128 + number, said
    assert said.count("\n") == 1


def test_a_study_that_is_killed_leaves_no_run_behind(started_study):
    folder, study = started_study(2)
    study.kill()
    study.wait()
    wait_until(lambda: marks(folder) == ["saved by SIGTERM"] * 2)


def test_a_run_ends_when_its_study_has_ended(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setenv(signals.PARENT_PIPE, str(reader))
    caught = []
    before = signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
    try:
        assert main.main(["efx", "--help"]) == 0
        assert signals.PARENT_PIPE not in os.environ and not caught
        os.close(writer)
        wait_until(lambda: caught)
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
