"""Runs of studies: checks before the first one, processes, signals; and sweeps over them."""

import math
import shutil
import signal
import subprocess
import sys
import time

import pytest
from refusals import refused
from study_helpers import error_line, logged_run, make_runs_here

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

import numpy as np
import pandas as pd

from efx.composition import calm, cbtm, cbtm_table, phatgoose
from efx.logging import tables
from efx.studies import conversion, coord_check, isoflop, report, statistics, sweep
from efx.studies import runs as runs_lib

SWEEP = """
def get_sweep():
    changes = {"model.depth": 2, "model.width": 16, "model.attention.num_heads": 1, "steps": STEPS,
               "data.max_bytes": 100000, "evaluate.max_batches": 1, "sample.max_new_tokens": 2}
    runs = {"MoD": changes, "dense": changes | {"model.depth_routing.kind": "none"}}
    return dict(config="mod:smoke", seeds=(0, 1), equal="flops", runs=runs,
                columns={"selected": "eval/router/routed_fraction"})
"""


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.chdir(root)


@pytest.fixture
def started(monkeypatch):
    return make_runs_here(monkeypatch)


def test_a_sweep_from_runs_to_table(tmp_path, started, one_device, capsys):
    path, workdir = tmp_path / "sweep.py", tmp_path / "w"
    path.write_text(SWEEP.replace("STEPS", "3"))
    argv = [f"--sweep={path}", f"--workdir={workdir}"]
    assert sweep.main(argv) == 0
    assert [run.name for run in started] == [
        "MoD, seed 0",
        "dense, seed 0",
        "MoD, seed 1",
        "dense, seed 1",
    ]
    table = pd.read_csv(workdir / "table.csv")
    flops = table.groupby("name")["training FLOPs"].mean()
    assert abs(flops["dense"] / flops["MoD"] - 1) < 0.5  # of three steps
    assert table.set_index("name").selected.isna()["dense"].all()
    text = (workdir / "table.md").read_text()
    assert "±" in text and "minus MoD" in text and "max_nonfinite" in text
    shown = capsys.readouterr().out
    assert "4 of 4 runs" in shown and "max_nonfinite" in shown and "efx.main --config" not in shown
    assert "efx.main --config" in (workdir / "MoD-seed1.log").read_text()
    assert sweep.main(argv) == 0 and len(started) == 4  # finished runs are not repeated
    assert table.seconds.gt(0).all() and "seconds" in text
    # Those of a run that shared the machine do not compare, also in a later launch.
    shutil.rmtree(workdir / "dense-seed1")
    for flags in (["--jobs=2"], []):
        assert sweep.main([*argv, *flags]) == 0 and len(started) == 5
        assert "seconds" not in pd.read_csv(workdir / "table.csv")
        assert "seconds" not in (workdir / "table.md").read_text()


def test_equal_tokens_are_steps_of_each_batch(tmp_path, monkeypatch):
    results = pd.DataFrame([{"tokens": 10 * 8 * 64, "flops": 7.0}])
    monkeypatch.setattr(runs_lib, "results", lambda runs: results)
    size = {"data.batch_size": 4, "data.seq_len": 32}
    spec = {"config": "mod:smoke", "seeds": (0,), "equal": "tokens"}
    spec |= {"runs": {"first": size, "second": size}}
    first = sweep.make_runs(spec, tmp_path)[0]
    budget = sweep.equal_budget(spec, first)
    second = sweep.make_runs(spec, tmp_path, (), budget)[1]
    assert second.config().steps == 40 and first.config().steps != 40


@pytest.mark.parametrize("key, value", [
    ("seeds", 3), ("seeds", (0, 0)), ("equal", "steps"), ("runs", {}), ("runs", {"a": None}),
    ("columns", ["eval/loss"]), ("column", {}), ("depth", ("a",)), ("depth", ("a", "b")),
])  # fmt: skip
def test_malformed_sweep_files_are_refused(key, value, tmp_path, capsys):
    path = tmp_path / "sweep.py"
    spec = dict(config="mod:smoke", seeds=(0,), equal="", runs={"a": {}}, columns={})
    path.write_text(f"def get_sweep():\n    return {spec | {key: value}!r}\n")
    assert sweep.main([f"--sweep={path}", f"--workdir={tmp_path}/w"]) == 2
    error_line(capsys, str(path), key)


def test_a_table_shows_diverged_seeds():
    """They are no part of a mean without notice, and there is no difference to them."""
    losses = {"a": (1.0, 2.0), "b": (3.0, None), "c": (None, None)}
    rows = [
        {"name": name, "seed": seed, "eval/loss": loss, "x": 1.0}
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    _, text = sweep.table_of(pd.DataFrame(rows), {"columns": {}})
    cells = {row.split(" | ")[0]: row.split(" | ")[1:] for row in text.splitlines()}
    assert cells["| a"][0].startswith("1.5000 ± 0.7071")
    assert "1 not finite" in cells["| b"][0] and cells["| b"][1].strip(" |") == ""
    assert cells["| c"][0] == "not finite"
    _, text = sweep.table_of(pd.DataFrame(rows[4:]), {"columns": {}})  # all diverged
    assert "| c | not finite |" in text


def test_a_table_marks_paired_differences_that_are_significant():
    """Seeds differ by more than names do, so that only pairs tell the names apart."""
    seeds = np.array([0.0, 1.0, 2.0])
    noise = np.array([0.01, -0.01, 0.0])
    losses = {"a": seeds, "b": seeds + 0.5 + noise, "c": seeds + 0.001 + noise}
    rows = [
        {"name": name, "seed": seed, "eval/loss": values[seed]}
        for seed in (2, 0, 1)
        for name, values in losses.items()
    ]
    _, text = sweep.table_of(pd.DataFrame(rows), {"columns": {}})
    b, c = text.splitlines()[-2:]
    assert "| 0.5000 (0.4752 to 0.5248) * |" in b and "| 0.0010 (-0.0238 to 0.0258) |" in c


def depth_table(losses):
    """The table of runs {name: losses by seed}; each name costs a FLOP more than the one before."""
    rows = [
        {"name": name, "seed": seed, "eval/loss": loss, "flops": 4.0 + i}
        for i, (name, values) in enumerate(losses.items())
        for seed, loss in enumerate(values)
    ]
    sweep_file = {"columns": {}, "depth": ("half", "full")}
    per_run, text = sweep.table_of(pd.DataFrame(rows), sweep_file)
    lines = [line for line in text.splitlines() if "|" in line]
    return per_run, text, {line.split(" | ")[0].strip("| "): line for line in lines}


def test_the_price_of_depth_is_shown_where_depth_pays(tmp_path):
    losses = {"half": [3.0, 3.01, 2.99], "routed": [2.9, 2.91, 2.89], "full": [2.6, 2.61, 2.59]}
    per_run, text, rows = depth_table(losses)
    assert "depth does not pay" not in text
    # By hand: R = 0.1 / 0.4, and C = 1 FLOP of 2.
    assert "| 0.25 (" in rows["routed"] and rows["routed"].endswith("| 0.50 |")
    price = sweep.price_of_depth(per_run, "half", "full")
    assert price.gain.routed == pytest.approx(0.1) and price.cost.routed == 0.5
    sweep.save_price(str(tmp_path), price, "half", "full")
    assert pd.read_csv(tmp_path / "price.csv").name.tolist() == ["half", "routed", "full"]
    assert (tmp_path / "price.png").stat().st_size > 10_000
    _, text, rows = depth_table(losses | {"full": [3.01, 2.98, 3.0]})
    assert "depth does not pay" in text and rows["routed"].endswith("|  | 0.50 |")


def test_a_table_shows_failed_properties():
    rows = [{"name": name, "seed": 0, "eval/loss": 1.0, "flops": 1.0} for name in ("a", "b")]
    verdicts = {"a": "pass", "b": "no look ahead"}
    _, text = sweep.table_of(pd.DataFrame(rows), {"columns": {}}, verdicts)
    lines = text.splitlines()
    assert lines[0].endswith("| certify |") and lines[-1].endswith("| no look ahead |")


def test_intervals_of_the_recovered_share_cover_it():
    draw, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        half, full, other = (
            (sample.mean(), sample.std(ddof=1), 4)
            for sample in (draw.normal(mean, 0.01, 4) for mean in (3.0, 2.9, 2.94))
        )
        share = statistics.recovered_share(half, full, other)
        covered += share["low"] < 0.6 < share["high"]
    assert 930 < covered < 990


def test_a_table_shows_numbers_with_four_digits_and_texts_in_one_line():
    cells = [[1.23456, math.nan], ["a|b\nc", 3]]
    assert tables.markdown(["x", "y"], cells).splitlines() == [
        "| x | y |", "|---|---|", "| 1.2346 |  |", r"| a\|b c | 3 |",
    ]  # fmt: skip


def test_a_table_of_means_counts_diverged_seeds():
    losses = {"a": [2.0, 2.1, math.nan], "b": [math.nan] * 3, "c": [3.0] * 3}
    rows = [
        {"name": name, "seed": seed, "loss": loss} | ({"selected": 0.5} if name == "c" else {})
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    a, b, c = tables.means_markdown(pd.DataFrame(rows)).splitlines()[2:]
    assert a == "| a | 2.0500 ± 0.0707 (1 not finite) |  |"
    assert b == "| b | not finite |  |"
    assert c == "| c | 3.0000 ± 0.0000 | 0.5000 ± 0.0000 |"


@pytest.mark.parametrize("losses, least", [((3.0, 1.9, 2.5), 1.9), ((3.0, 1.9, math.nan), None)])
def test_a_diverged_run_has_no_best_loss(losses, least, tmp_path, monkeypatch):
    rows = [(10 * i, {"eval/loss": loss}) for i, loss in enumerate(losses, 1)]
    config = {"data": {"tokenizer": "bytes"}}
    folder = logged_run(tmp_path / "run", config, rows)
    monkeypatch.setattr(runs_lib, "is_finished", lambda run: True)
    (result,) = runs_lib.results([runs_lib.Run("a", folder, ())]).to_dict("records")
    assert result["min:eval/loss"] == least or (least is None and pd.isna(result["min:eval/loss"]))


@pytest.mark.parametrize("runs, name", [
    ({"lr +1": {}, "lr -1": {}}, "lr -1"),  # one directory for both
    ({"a": {}, "b": {"model.depht": 2}}, "config.model.depht"),
    ({"a": {}, "b": {"model.depth": 0}}, "config.model.depth=0"),
    ({"a": {}, "b": {"data.source": "text:none.txt"}}, "text:none.txt"),
])  # fmt: skip
def test_each_run_is_checked_before_the_first_starts(runs, name, tmp_path, capsys, started):
    path = tmp_path / "sweep.py"
    spec = f"dict(config='mod:smoke', seeds=(0,), equal='', runs={runs!r}, columns={{}})"
    path.write_text(f"def get_sweep():\n    return {spec}\n")
    assert sweep.main([f"--sweep={path}", f"--workdir={tmp_path}/w"]) == 2
    error_line(capsys, name)
    assert not started


MOD_TABLE, GRID = "--sweep=configs/sweeps/mod_table.py", "--grid=configs/sweeps/isoflop.py"


@pytest.mark.parametrize("study, arguments, extra, name", [
    (phatgoose, [], "bse:--config.steps=3", "'bse'"),
    (phatgoose, [], "base:--config.stps=3", "--config.stps"),
    (phatgoose, [], "--workdir=x", "--workdir=x"),
    (phatgoose, ["--domain=x=text:none", "--domain=y=stdlib"], "--config.steps=3", "text:none"),
    (phatgoose, ["--domain=a"], "--config.steps=3", "--domain"),
    (phatgoose, ["--seeds=0,0"], "--config.steps=3", "--seeds=0,0"),
    (calm, ["--domain=base=text:x"], "--config.steps=3", "--domain"),
    (calm, [], "bridge:--config.optim.learning_rate=-1", "config.optim.learning_rate"),
    (cbtm, ["--config=configs/cbtm.py"], "--config.stps=3", "config.stps"),
    (cbtm_table, [], "--config.seed=3", "--config.seed=3"),
    (conversion, ["--fractions=a"], "--config.steps=3", "--fractions"),
    (sweep, [MOD_TABLE], "--config.seed=3", "--config.seed=3"),
    (sweep, ["--sweep=nowhere.py"], "--config.steps=3", "nowhere.py"),
    (isoflop, [GRID], "--config.stps=3", "steps"),
    (isoflop, [GRID], "--config.train_flops=1e9", "--config.train_flops"),
    (isoflop, [GRID, "--jobs=0"], "--config.steps=3", "--jobs=0"),
])  # fmt: skip
def test_bad_arguments_of_studies_are_refused(study, arguments, extra, name, tmp_path, capsys,
                                              started):  # fmt: skip
    assert study.main([*arguments, f"--workdir={tmp_path}/w", "--", extra]) == 2
    error_line(capsys, name)
    assert not started and not (tmp_path / "w").exists()


@pytest.mark.parametrize("study", [sweep, cbtm, coord_check])
def test_misspelt_flags_of_studies_are_refused(study, capsys):
    with pytest.raises(SystemExit) as end:
        study.main(["--wokdir=x"])
    assert end.value.code == 2
    error_line(capsys, "--wokdir")


def test_a_flag_that_a_study_does_not_have_shows_its_usage(capsys):
    with pytest.raises(SystemExit):
        report.main(["--workdir=runs/a"])
    error_line(capsys, "--workdir is not a flag", "RUN")


def test_runs_of_different_texts_are_not_compared():
    rows = [
        {"name": "a", "text": "1", "tokenizer": "t"},
        {"name": "b", "text": "2", "tokenizer": "t"},
    ]
    refused(lambda: runs_lib.check_comparable(pd.DataFrame(rows)), "'a'", "'b'", "text")


# ---- processes ---------------------------------------------------------------------------------

# Replaces Python: a run that marks its state, and saves for two seconds on a signal.
RUN = """#!{python}
import os, pathlib, signal, sys, time
mark = pathlib.Path(__file__).parent / f"run_{{os.getpid()}}"
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(2)
    mark.write_text(f"saved by {{signal.Signals(number).name}}")
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
mark.write_text("runs")
time.sleep(60)
"""
STUDY = """
import pathlib, sys
from efx.studies import cli, runs
sys.executable = sys.argv[1]
folder = pathlib.Path(sys.argv[1]).parent
all_runs = [runs.Run(f"run {i}", folder / str(i), ()) for i in range(4)]
def study(arguments):
    runs.run_all(all_runs, 2)
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
def study_process(tmp_path, root):
    """A study with two runs at a time, both of which have started."""
    run = tmp_path / "run"
    run.write_text(RUN.format(python=sys.executable))
    run.chmod(0o755)
    study = subprocess.Popen(
        [sys.executable, "-c", STUDY, str(run)], cwd=root, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: study.poll() is not None or marks(tmp_path) == ["runs"] * 2)
    assert study.poll() is None
    return study


def test_a_signal_to_a_study_ends_its_runs(study_process, tmp_path):
    """The runs save and end before the study does, and no other one starts."""
    study_process.send_signal(signal.SIGTERM)  # to the study alone, as a batch system does
    _, lines = study_process.communicate(timeout=30)
    assert marks(tmp_path) == ["saved by SIGTERM"] * 2
    assert study_process.returncode == 128 + signal.SIGTERM, lines
    assert lines.count("\n") == 1


def test_a_failed_run_ends_the_study_and_names_its_log(tmp_path, monkeypatch):
    program = tmp_path / "fails"
    program.write_text("#!/bin/sh\necho reason; exit 9\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    runs = [runs_lib.Run(f"run {i}", tmp_path / str(i), ()) for i in range(9)]
    refused(lambda: runs_lib.run_all(runs, 2), "status 9", "reason", ".log")
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert 1 <= len(logs) <= 2  # the other may have been stopped
    assert any(log.endswith("\nreason\n") for log in logs)
