"""isoFLOP studies: runs of a grid, points of runs, tables and numbers, points of other machines."""

import functools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from study_helpers import LAUNCH, TEXT, error_line

from efx.config import schema
from efx.logging import MetricsWriter
from efx.studies import cli, isoflop, rehearsal, step_time, sweep
from efx.studies.isoflop import analysis, law, picture, report
from efx.studies.isoflop import grid as grid_lib
from efx.studies.isoflop import points as points_lib
from efx.train import setup

GRID = """
def get_grid():
    return dict(config="configs/mod.py", seeds=(0, 1), budgets=(2e9, 1e9),
                families={"dense": {"model.depth_routing.kind": "none"}, "MoD": {}},
                sizes={f"{n} blocks": {"model.depth": n} for n in (2, 4, 8)})
"""
RATES = GRID.replace("seeds=", "learning_rates=(1e-3, 4e-3, 2e-3), seeds=")
ONE = grid_lib.Run("MoD", "4 blocks", 2e9, 1, None)
LAW = law.Law(1.0, 8.0, 9.0, 0.3, 0.25)
CHECK = cli.check_command


@functools.cache
def checked(name, arguments):
    return CHECK(name, arguments)


def check_once(name, arguments):
    """`cli.check_command`, which is slow, once for runs that differ in seed and folder alone."""
    alike = (one for one in arguments if not re.match(r"--(workdir|config.seed)=", one))
    return checked(name, (*alike, "--workdir=x"))


def fake_run(grid, workdir, run, loss=None, row=(), launch=(), record=()):
    """The folder of a finished run with a loss of LAW, which loss(run, that loss) replaces.

    The others: changed entries of the last row of metrics, of the launch, of run.json.
    """
    plain = schema.as_dict(check_once(run.name, grid_lib.command(grid, workdir, run)))
    folder = grid_lib.folder(workdir, run)
    folder.mkdir(parents=True)
    blocks = int(run.size.split()[0])
    parameters, cost = 1000 * blocks, 6000 * blocks * (0.5 if run.family == "MoD" else 1)
    by_law = float(LAW.loss(parameters, run.budget / cost)) + 0.01 * run.seed
    last = {"tokens": run.budget / cost, "flops": run.budget, "seconds": 1e-9 * run.budget}
    last |= {"eval/loss": loss(run, by_law) if loss else by_law, "eval/split_fraction": 1.0}
    (folder / "config.json").write_text(json.dumps(plain | {"seed": run.seed}))
    says = {"launches": [LAUNCH | dict(launch)], "text": TEXT, "tokenizer": "words"}
    (folder / "run.json").write_text(json.dumps(says | dict(record)))
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        writer.write(0, {"parameters": parameters})
        writer.write(10, last | dict(row))
    return folder


def fake_runs(grid, workdir, **how):
    for run in grid_lib.all_runs(grid):
        fake_run(grid, workdir, run, **how)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a grid and all its runs; not to be changed: `copy` is."""
    top = tmp_path_factory.mktemp("finished")
    (top / "grid.py").write_text(GRID)
    fake_runs(isoflop.load_grid(top / "grid.py"), top / "w")
    return top


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture
def trained(monkeypatch):
    """Runs that the study would have started are made by `fake_run`: [(run's name, seed)]."""
    made = []

    def run_one(title, arguments, folder, cpus=None):
        run = next(run for run in trained.runs if grid_lib.folder(trained.workdir, run) == folder)
        made.append((run.name, run.seed))
        fake_run(trained.grid, trained.workdir, run, loss=trained.loss)

    def of(path, workdir, loss=None):
        trained.grid, trained.workdir, trained.loss = isoflop.load_grid(path), workdir, loss
        trained.runs = grid_lib.all_runs(trained.grid)
        made.clear()
        return made

    trained = of
    monkeypatch.setattr(sweep, "run_one", run_one)
    monkeypatch.setattr(rehearsal, "check", lambda runs: None)  # a process for each of these tests
    return of


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Parses settings once and draws pictures in one test alone."""
    monkeypatch.setattr(cli, "check_command", check_once)
    if "picture" not in request.node.name:
        monkeypatch.setattr(picture, "draw", lambda *_: None)


def call(top, *more, workdir="w"):
    how = [f"--grid={top / 'grid.py'}", f"--workdir={top / workdir}", "--draws=20"]
    return isoflop.main([*how, *more])


def rows_of(text):
    lines = (line for line in text.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def saved(top, workdir="w"):
    return json.loads((top / workdir / "isoflop.json").read_text())


def rerun(top, run, **how):
    """Replaces the run of a grid by `fake_run` with other entries."""
    shutil.rmtree(grid_lib.folder(top / "w", run))
    fake_run(isoflop.load_grid(top / "grid.py"), top / "w", run, **how)


# ---- grids -------------------------------------------------------------------------------------


def loaded(tmp_path, text):
    path = tmp_path / "grid.py"
    path.write_text(text)
    return isoflop.load_grid(path)


def test_runs_are_ordered_by_budget_then_seed(tmp_path):
    grid = loaded(tmp_path, GRID)
    runs = grid_lib.runs_of(grid, {})
    assert len(runs) == len({*runs}) == 2 * 3 * 2 * 2
    assert runs[0] == ("dense", "2 blocks", 1e9, 0, None)
    assert [run.seed for run in runs] == ([0] * 6 + [1] * 6) * 2
    assert [run.budget for run in runs] == [1e9] * 12 + [2e9] * 12
    command = grid_lib.command(grid, tmp_path, runs[6], ["--config.data.batch_size=2"])
    for part in ("train_flops=1000000000.0", "steps=0", "seed=1", "model.depth=2"):
        assert f"--config.{part}" in command
    assert "--config.data.batch_size=2" in command


def test_larger_budgets_can_be_left_out(tmp_path):
    grid = loaded(tmp_path, GRID)
    small = grid_lib.up_to(grid, 1.5e9)
    assert grid_lib.runs_of(small, {}) == grid_lib.runs_of(grid, {})[:12]
    refused(lambda: grid_lib.up_to(grid, 5e8), "--up-to=5e+08")


def test_families_have_their_own_seeds_and_settings_and_budgets_their_sizes(tmp_path):
    several = '{"2 blocks": (0, 1), "4 blocks": (0,), "8 blocks": ()}'
    widths = '{"2 blocks": 32, "4 blocks": 64, "8 blocks": 96}'
    text = GRID.replace("(0, 1)", f'{{"dense": (0, 1, 2), "half": (3,), "MoD": {several}}}')
    text = text.replace('"MoD": {}', f'"half": {{"model.width": {widths}}}, "MoD": {{}}')
    at = "sizes_at={2e9: ('4 blocks', '8 blocks', '16 blocks')}, seeds="
    runs = grid_lib.runs_of(grid := loaded(tmp_path, text), {})
    assert len(runs) == (3 + 1) * 6 + (2 + 1) * 2
    places = [(run.size, run.seed) for run in runs if run.family == "MoD" and run.budget == 1e9]
    assert sorted(places) == [("2 blocks", 0), ("2 blocks", 1), ("4 blocks", 0)]
    half = [run for run in runs if run.family == "half"]
    assert {grid_lib.changes(grid, run)["model.width"] for run in half} == {32, 64, 96}
    text = GRID.replace("(2, 4, 8)", "(2, 4, 8, 16)").replace("seeds=", at)
    runs = grid_lib.all_runs(loaded(tmp_path, text))
    assert len({run.size for run in runs if run.budget == 1e9}) == 4
    sizes = {run.size for run in runs if run.budget == 2e9}
    assert sizes == {"4 blocks", "8 blocks", "16 blocks"}


@pytest.mark.parametrize(
    "before, after, name",
    [
        ("(2, 4, 8)", "(2, 4)", "2 sizes"),
        ("families=", "family=", "'family'"),
        ("(2e9, 1e9)", "(1e9, float('nan'))", "budgets"),
        ("(0, 1)", '{"dense": (0,)}', "seeds="),
        ("(0, 1)", "(0, 0)", "seed"),
        ('"MoD": {}', '"MoD": {"model.width": {"2 blocks": 8}}', "model.width"),
        ("seeds=", "learning_rates=(1e-3,), seeds=", "learning_rates"),
        ("seeds=", "against=('MoE',), seeds=", "against"),
        ("seeds=", "timed_budgets=(3e9,), seeds=", "timed_budgets"),
        ("seeds=", "sizes_at={2e9: ('2 blocks',)}, seeds=", "sizes_at[2e+09]"),
    ],
)
def test_bad_grids_are_refused(before, after, name, tmp_path):
    assert before in GRID
    refused(lambda: loaded(tmp_path, GRID.replace(before, after)), "grid.py", name)


# ---- from runs to tables -----------------------------------------------------------------------


def test_tables_numbers_and_picture(copy, capsys):
    assert call(copy, "--table-only", "--further", "10", "100") == 0
    text = (copy / "w/isoflop.md").read_text()
    assert text in capsys.readouterr().out
    rows = rows_of(text)
    loss = float(LAW.loss(2000, 1e9 / 12e3)) + 0.005
    spread = f" ± {0.01 / math.sqrt(2):.4f}"
    assert rows[2][:5] == ["2 blocks", "dense", "2.00k", "12.0 kFLOPs", f"{loss:.4f}{spread}"]
    assert rows[3][:4] == ["", "MoD", "2.00k", "6.00 kFLOPs"]
    losses = {n: float(LAW.loss(1e3 * n, 1e9 / (6e3 * n))) + 0.005 for n in (2, 4, 8)}
    least = min(losses, key=losses.get)
    optimum = ["1.00 GFLOPs", "dense", f"{least} blocks", f"{losses[least]:.4f}{spread}"]
    assert rows[10][:4] == optimum
    assert [row[0] for row in rows].count("200 GFLOPs") == 2
    # MoD needs half the FLOPs for the same loss, and half the seconds.
    speedup = rows[-1]
    assert speedup[:2] == ["2.00 GFLOPs", "MoD"]
    assert speedup[3].startswith("2.0") and speedup[5].startswith("2.0")
    data = saved(copy)
    assert len(data["points"]) == 24 and data["settings"]["model.family"] == "decoder"
    first = data["points"][0]
    assert first["loss"] == pytest.approx(loss - 0.005) and first["machine"] == "3 CPU cores"
    assert first["settings"]["model.depth"] == 2 and first["seconds"] == 1.0
    assert (copy / "w/isoflop.png").read_bytes().startswith(b"\x89PNG")


def test_the_least_measured_loss_is_of_a_size_with_three_seeds():
    """One lucky seed of another size does not replace a mean of three."""
    losses = [np.array(seeds) for seeds in ([3.0, 3.1, 3.2], [2.9, 3.0, 3.1], [2.5])]
    sizes, numbers = np.array([1e3, 2e3, 4e3]), [np.arange(len(seeds)) for seeds in losses]
    columns = [np.full(3, 1e9), sizes, 1e9 / (6 * sizes), 6 * sizes]
    seconds = [np.full(len(seeds), np.nan) for seeds in losses]
    measured = analysis.Measured(["s", "m", "l"], *columns, seconds, losses, numbers)
    cells = report.optimum_cells(analysis.analyse({"dense": measured}, 20), 1e9, "dense")
    assert cells["least measured at"] == "m"
    assert cells["least measured"]["mean"] == pytest.approx(3.0)


# ---- points of this and of other machines ------------------------------------------------------


def test_a_finished_run_is_not_trained_again_when_the_grid_grows(copy, trained):
    grid = copy / "grid.py"
    made = trained(grid, copy / "w")
    assert call(copy) == 0 and made == []
    grid.write_text(GRID.replace("(2e9, 1e9)", "(2e9, 4e9, 1e9)").replace("(0, 1)", "(0, 1, 2)"))
    made = trained(grid, copy / "w")
    assert call(copy) == 0
    new = {("4.00" in name, seed) for name, seed in made}
    assert len(made) == 6 * 3 + 6 * 2 and new == {(True, 0), (True, 1), (True, 2), (False, 2)}
    assert len(saved(copy)["points"]) == 54


def test_a_study_resumes_from_the_points_of_another_machine(copy, trained, capsys):
    assert call(copy, "--table-only") == 0
    here = (copy / "w/isoflop.md").read_text()
    (copy / "w/isoflop.json").rename(copy / "points.json")
    shutil.rmtree(copy / "w")
    given = f"--from={copy / 'points.json'}"
    made = trained(copy / "grid.py", copy / "w")
    assert call(copy, given) == 0 and made == []
    assert (copy / "w/isoflop.md").read_text().splitlines()[:-1] == here.splitlines()[:-1]

    # A new budget is trained here, and the new file has all points.
    (copy / "grid.py").write_text(GRID.replace("(2e9, 1e9)", "(2e9, 4e9, 1e9)"))
    made = trained(copy / "grid.py", copy / "w")
    assert call(copy, given) == 0 and len(made) == 12
    assert len(saved(copy)["points"]) == 36

    # Points of other settings or of no run of the grid are refused.
    capsys.readouterr()
    assert call(copy, given, "--", "--config.model.width=32") == 2
    error_line(capsys, "points.json", "config.model.width")
    (copy / "grid.py").write_text(GRID.replace("(2e9, 1e9)", "(2e9, 3e9)"))
    assert call(copy, given) == 2
    error_line(capsys, "dense, 2 blocks, 1.00 GFLOPs, seed 0")


def test_points_of_several_files_are_joined_without_the_families_left_out(copy, trained, capsys):
    grid = copy / "grid.py"
    both, files = grid.read_text(), []
    three = both.replace('"MoD": {}', '"MoD": {}, "MoE": {"model.width": 32}')
    for name, text, budget in (("a", three, "1e9"), ("b", both, "2e9")):
        grid.write_text(text.replace("(2e9, 1e9)", f"({budget},)"))
        trained(grid, copy / name)
        assert call(copy, workdir=name) == 0
        files.append(f"--from={copy / name / 'isoflop.json'}")
    capsys.readouterr()
    grid.write_text(both)
    assert call(copy, *files, "--table-only", workdir="both") == 2
    error_line(capsys, "MoE, 2 blocks, 1.00 GFLOPs, seed 0")
    grid.write_text(both.replace("seeds=", "without=('MoE',), seeds="))
    assert call(copy, *files, "--table-only", workdir="both") == 0
    found = {(one["family"], one["budget"]) for one in saved(copy, "both")["points"]}
    assert found == {(name, budget) for name in ("dense", "MoD") for budget in (1e9, 2e9)}


def test_published_points_are_the_runs_of_their_grids(root):
    grid = isoflop.load_grid("mod_evidence:three")
    held = {
        point.run
        for name in ("mod_evidence", "mod_evidence_largest")
        for point in points_lib.read_points(root / f"results/{name}.json")
        if point.run.family not in grid["without"]
    }
    assert {*grid_lib.all_runs(grid)} == held
    grid = isoflop.load_grid("mod_evidence:rates")
    points = points_lib.read_points(root / "results/mod_evidence_own_rates.json")
    points = [point for point in points if point.run.family in grid["families"]]
    tried = [point for point in points if point.run.seed == 0]
    fitted = {point.run for point in points if point.fitted}
    assert fitted == {*grid_lib.runs_of(grid, points_lib.best_rates(tried))}


@pytest.mark.parametrize(
    "change, name",
    [
        ({"loss": math.nan}, "loss=nan"),
        ({"parameters": True}, "parameters=True"),
        ({"seed": 1}, "seed 1"),  # a second point of one run
    ],
)
def test_points_that_no_run_has_measured_are_refused(change, name, finished, tmp_path):
    path = tmp_path / "points.json"
    assert call(finished, f"--save-points={path}") == 0
    data = json.loads(path.read_text())
    data["points"][0] |= change
    path.write_text(json.dumps(data))
    refused(lambda: points_lib.read_points(path), name)
    path.write_text('{"points": [{}]}')
    refused(lambda: points_lib.read_points(path), "points.json")


def test_a_setting_absent_from_a_point_has_its_default():
    expected = {"model.family": "decoder", "model.width": 8, "model.init_std": 0.02}
    older = {"model.family": "decoder", "model.width": 8}
    points_lib.check_settings("x", older, expected)
    other = expected | {"model.init_std": 0.5}
    refused(lambda: points_lib.check_settings("x", older, other), "x: ", "config.model.init_std")
    gone = expected | {"gone": 1}
    refused(lambda: points_lib.check_settings("x", gone, expected), "config.gone")


@pytest.mark.parametrize(
    "changed, name",
    [
        ({"record": {"text": TEXT | {"source": "xyz"}}}, "texts"),
        ({"row": {"eval/split_fraction": 0.5}}, "held-out"),
        ({"row": {"flops": 1e9}}, "1.00 GFLOPs"),
        ({"record": {"launches": []}}, "run.json"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(changed, name, copy, capsys):
    rerun(copy, ONE, **changed)
    assert call(copy, "--table-only") == 2
    error_line(capsys, name)


def test_a_run_folder_that_is_incomplete_is_refused(copy, capsys):
    folder = grid_lib.folder(copy / "w", ONE)
    metrics = folder / "metrics.jsonl"
    start, end = metrics.read_text().splitlines()
    later = json.dumps({"step": 11, "flops": 2e9})
    # Not evaluated at its end; its last row is cut; nothing of it can be read.
    for lines in (f"{start}\n{end}\n{later}\n", f"{start}\n{end}", "nonsense\nnonsense\n"):
        metrics.write_text(lines)
        assert call(copy, "--table-only") == 2
        error_line(capsys, folder.name)


def test_seconds_of_untimed_budgets_do_not_count(copy, capsys):
    """A FLOP of theirs takes the time of the same size at the timed budgets."""
    for run in grid_lib.all_runs(isoflop.load_grid(copy / "grid.py")):
        if run.budget == 2e9:
            rerun(copy, run, row={"seconds": 1e3})
    text = (copy / "grid.py").read_text()
    (copy / "grid.py").write_text(text.replace("dict(", "dict(timed_budgets=(1e9,), ", 1))
    assert call(copy, "--table-only") == 0
    assert rows_of(capsys.readouterr().out)[-1][5].startswith("2.0")
    points = saved(copy)["points"]
    assert {(one["budget"], one["seconds"]) for one in points} == {(1e9, 1.0), (2e9, None)}


def test_timed_steps_replace_the_seconds_of_runs(copy, capsys, monkeypatch):
    """A step of MoD takes as long as a dense one here, which has twice the FLOPs."""
    built = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=7))
    monkeypatch.setattr(setup, "setup", lambda config: built)
    monkeypatch.setattr(step_time, "Stepper", lambda config, _: SimpleNamespace(config=config))
    times = step_time.Times(np.full(5, 2.0), np.zeros(5))
    monkeypatch.setattr(step_time, "time_steps", lambda steppers, _: dict.fromkeys(steppers, times))
    assert call(copy, "--table-only", "--time-steps=5") == 0
    row = rows_of(capsys.readouterr().out)[-1]
    assert row[3].startswith("2.0") and row[5].startswith("1.0")
    tokens = {one["tokens"] / one["seconds"] for one in saved(copy)["points"]}
    assert len(tokens) == 1 and tokens.pop() == pytest.approx(16 * 256 / 2.0)


def test_seconds_of_different_machines_are_not_compared(copy, capsys):
    rerun(copy, ONE, launch={"cpu_count": 64})
    assert call(copy, "--table-only") == 0
    row = rows_of(capsys.readouterr().out)[-1]
    assert row[4:] == ["", ""] and row[3]


# ---- learning rates ----------------------------------------------------------------------------


def test_each_size_is_trained_with_its_best_learning_rate(tmp_path, trained, capsys):
    (tmp_path / "grid.py").write_text(RATES)
    best = {"2 blocks": 2e-3, "4 blocks": 4e-3, "8 blocks": 1e-3}

    def loss(run, by_law):
        if run.family == "MoD" and run.rate == 4e-3:
            return math.nan
        wanted = 2e-3 if run.family == "MoD" else best[run.size]
        return by_law + abs(math.log(run.rate / wanted))

    made = trained(tmp_path / "grid.py", tmp_path / "w", loss)
    assert call(tmp_path) == 0
    # All rates with the first seed at the smallest budget; the best of them is no further run.
    first = made[: 6 * 3]
    assert {(seed, "1.00 GFLOPs" in name) for name, seed in first} == {(0, True)}
    assert len(made) == len({*made}) == 6 * 3 + 6 * 3
    for name, _ in made[18:]:
        family, size = name.split(", ")[:2]
        assert name.endswith(f"rate {2e-3 if family == 'MoD' else best[size]:g}")
    text = capsys.readouterr().out
    rows = {tuple(row[:2]): row[2:] for row in rows_of(text)}
    assert rows["dense", "4 blocks"][-1] == "at the end" and "**" in rows["dense", "4 blocks"][2]
    assert rows["MoD", "4 blocks"][2:] == ["not finite", ""] and "**" in rows["MoD", "4 blocks"][1]

    trained(tmp_path / "grid.py", tmp_path / "none", lambda run, by_law: math.nan)
    assert call(tmp_path, workdir="none") == 2
    error_line(capsys, "dense, 2 blocks", "0.001, 0.004, 0.002")


def test_sizes_have_learning_rates_and_families_sizes_of_their_own(tmp_path):
    rates = "{'2 blocks': (2e-3, 4e-3), '4 blocks': (1e-3, 2e-3, 4e-3), '8 blocks': (1e-3, 2e-3)}"
    seeds = '{"dense": (0, 1), "MoD": {"2 blocks": (), "4 blocks": (1, 0), "8 blocks": (0,)}}'
    text = RATES.replace("(1e-3, 4e-3, 2e-3)", rates).replace("(0, 1)", seeds)
    tried = grid_lib.rate_runs(loaded(tmp_path, text))
    assert len(tried) == len({*tried}) == 7 + 5
    routed = [(run.size, run.seed, run.rate) for run in tried if run.family == "MoD"]
    assert routed == [
        *(("4 blocks", 1, rate) for rate in (1e-3, 2e-3, 4e-3)),
        *(("8 blocks", 0, rate) for rate in (1e-3, 2e-3)),
    ]


def test_points_of_an_unfinished_study_can_be_saved(tmp_path, trained, capsys):
    """Another machine takes them, and trains only what is missing."""
    path, points = tmp_path / "grid.py", tmp_path / "new/points.json"
    path.write_text(RATES)
    assert call(tmp_path, "--save-points", str(points)) == 2
    error_line(capsys, "--save-points")
    grid = isoflop.load_grid(path)
    ended = grid_lib.rate_runs(grid)
    for run in ended:
        fake_run(grid, tmp_path / "w", run)
    assert call(tmp_path, "--save-points", str(points)) == 0
    made = trained(path, tmp_path / "elsewhere")
    assert call(tmp_path, f"--from={points}", workdir="elsewhere") == 0
    assert not {(run.name, run.seed) for run in ended} & {*made}
    rates = points_lib.best_rates(points_lib.read_points(points))
    wanted = {*ended, *grid_lib.runs_of(grid, rates)}
    found = points_lib.read_points(tmp_path / "elsewhere/isoflop.json")
    assert {point.run for point in found} == wanted
