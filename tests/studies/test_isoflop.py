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
from study_helpers import error_line

from efx import build, settings
from efx.metrics import MetricsWriter
from efx.studies import cli, isoflop, rehearsal, step_time, sweep
from efx.studies.isoflop import analysis, law, picture, report
from efx.studies.isoflop import grid as grid_lib
from efx.studies.isoflop import points as points_lib

GRID = """
def get_grid():
    return dict(config="configs/mod.py", seeds=(0, 1), budgets=(2e9, 1e9),
                families={"dense": {"model.depth_routing.kind": "none"}, "MoD": {}},
                sizes={f"{n} blocks": {"model.depth": n} for n in (2, 4, 8)})
"""
RATES = GRID.replace("seeds=", "learning_rates=(1e-3, 4e-3, 2e-3), seeds=")
LAW = law.Law(1.0, 8.0, 9.0, 0.3, 0.25)
TEXT = {"source": "abc", "eval_source": None, "held_out": "def"}
CHECK = cli.check_command


@functools.cache
def checked(name, arguments):
    return CHECK(name, arguments)


def check_once(name, arguments):
    """`cli.check_command`, which is slow, once for runs that differ in seed and folder alone."""
    alike = [
        argument for argument in arguments if not re.match(r"--(workdir|config.seed)=", argument)
    ]
    return checked(name, (*alike, "--workdir=x"))


def fake_run(grid, workdir, run, loss=None, row=(), launch=(), record=()):
    """The folder of a finished run, with a loss of LAW.

    loss: a function of (run, that loss). The others: changed entries of the last row of metrics,
    of the launch's record, of run.json.
    """
    plain = settings.as_dict(check_once(run.name, grid_lib.command(grid, workdir, run)))
    folder = grid_lib.folder(workdir, run)
    folder.mkdir(parents=True)
    blocks = int(run.size.split()[0])
    parameters, cost = 1000 * blocks, 6000 * blocks * (0.5 if run.family == "MoD" else 1)
    by_law = float(LAW.loss(parameters, run.budget / cost)) + 0.01 * run.seed
    last = {"tokens": run.budget / cost, "flops": run.budget, "seconds": 1e-9 * run.budget}
    last |= {"eval/loss": loss(run, by_law) if loss else by_law, "eval/split_fraction": 1.0}
    (folder / "config.json").write_text(json.dumps(plain | {"seed": run.seed}))
    made_by = {
        "git": {"revision": "c0ffee" * 6, "dirty": False},
        "devices": {"kind": "cpu"},
        "device_count": 1,
        "cpu_count": 3,
        "command_line": ["efx", "--config=configs/mod.py"],
    }
    says = {"launches": [made_by | dict(launch)], "text": TEXT, "tokenizer": "words"}
    (folder / "run.json").write_text(json.dumps(says | dict(record)))
    with MetricsWriter(folder, tensorboard=False) as writer:
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


@pytest.fixture(scope="module")
def points_file(finished, tmp_path_factory):
    """The points of the finished runs."""
    path = tmp_path_factory.mktemp("points") / "points.json"
    grid = finished / "grid.py"
    call = [f"--grid={grid}", f"--workdir={finished / 'w'}", f"--save-points={path}"]
    assert isoflop.main(call) == 0
    return path


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
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def saved(top, workdir="w"):
    return json.loads((top / workdir / "isoflop.json").read_text())


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
    for part in ("train_flops=1000000000.0", "steps=0", "seed=1", "model.depth=2",
                 "model.depth_routing.kind=none", "data.batch_size=2"):  # fmt: skip
        assert f"--config.{part}" in command


def test_larger_budgets_can_be_left_out(tmp_path):
    grid = loaded(tmp_path, GRID)
    small = grid_lib.up_to(grid, 1.5e9)
    assert grid_lib.runs_of(small, {}) == grid_lib.runs_of(grid, {})[:12]
    assert grid_lib.up_to(grid, 2e9) == grid
    refused(lambda: grid_lib.up_to(grid, 5e8), "--up-to=5e+08")
    rates = grid | {"learning_rates": (1e-3,), "rates_budget": 2e9}
    refused(lambda: grid_lib.up_to(rates, 1.5e9), "--up-to=1.5e+09")


def test_budgets_can_have_some_of_the_sizes(tmp_path):
    at = {2e9: [f"{n} blocks" for n in (4, 8, 16)], 1e9: [f"{n} blocks" for n in (2, 4, 8)]}
    text = GRID.replace("(2, 4, 8)", "(2, 4, 8, 16)").replace("seeds=", f"sizes_at={at}, seeds=")
    runs = grid_lib.all_runs(loaded(tmp_path, text))
    assert len(runs) == len({*runs}) == 2 * 3 * 2 * 2
    for budget, sizes in at.items():
        assert {run.size for run in runs if run.budget == budget} == {*sizes}


def test_families_have_their_own_seeds_and_settings(tmp_path):
    half = '"half": {"model.width": {"2 blocks": 32, "4 blocks": 64, "8 blocks": 96}}, "MoD"'
    several = '{"2 blocks": (0, 1), "4 blocks": (0,), "8 blocks": ()}'
    text = GRID.replace("(0, 1)", f'{{"dense": (0, 1, 2), "half": (3,), "MoD": {several}}}')
    grid = loaded(tmp_path, text.replace('"MoD": {}', f"{half}: {{}}"))
    runs = grid_lib.runs_of(grid, {})
    assert len(runs) == (3 + 1) * 6 + (2 + 1) * 2
    places = [(run.size, run.seed) for run in runs if run.family == "MoD" and run.budget == 1e9]
    assert sorted(places) == [("2 blocks", 0), ("2 blocks", 1), ("4 blocks", 0)]
    widths = {
        run.size: grid_lib.changes(grid, run)["model.width"] for run in runs if run.family == "half"
    }
    assert widths == {"2 blocks": 32, "4 blocks": 64, "8 blocks": 96}


@pytest.mark.parametrize(
    "before, after, name",
    [
        # A size without a seed of MoD at the budget of the learning rates.
        (
            "seeds=(0, 1)",
            "learning_rates=(1e-3, 2e-3), seeds={'dense': (0,), 'MoD': "
            "{'2 blocks': (), '4 blocks': (0,), '8 blocks': (0,)}}, seeds_at={2e9: (0,)}",
            "MoD, 2 blocks",
        ),
        ("(2, 4, 8)", "(2, 4)", "2 sizes"),
        ("families=", "family=", "'family'"),
        ("(2e9, 1e9)", "()", "budgets"),
        ("(2e9, 1e9)", "(1e9, float('nan'))", "budgets"),
        ("families={", "families=None and {", "families=None"),
        ("(0, 1)", '{"dense": (0,)}', "seeds="),
        ("(0, 1)", '{"dense": (0,), "MoD": {"2 blocks": (0,)}}', "seeds['MoD']"),
        ("(0, 1)", "(0, 0)", "seed"),
        ('"MoD": {}', '"MoD": {"model.width": {"2 blocks": 8}}', "model.width"),
        ("seeds=", "rates_budget=1e9, seeds=", "rates_budget"),
        ("seeds=", "learning_rates=(1e-3,), seeds=", "learning_rates"),
        ("seeds=", "learning_rates={'2 blocks': (1e-3, 2e-3)}, seeds=", "learning_rates"),
        ("seeds=", "against=('MoE',), seeds=", "against"),
        ("seeds=", "without=('MoD',), seeds=", "without"),
        ("seeds=", "seeds_at={3e9: (0,)}, seeds=", "seeds_at"),
        ("seeds=", "fit_within=0.5, seeds=", "fit_within"),
        ("seeds=", "timed_budgets=(3e9,), seeds=", "timed_budgets"),
        ("seeds=", "sizes_at={3e9: ('2 blocks',)}, seeds=", "sizes_at"),
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
    optima = rows[10:14]
    places = [["1.00 GFLOPs", "dense"], ["", "MoD"], ["2.00 GFLOPs", "dense"], ["", "MoD"]]
    assert [row[:2] for row in optima] == places
    losses = {n: float(LAW.loss(1e3 * n, 1e9 / (6e3 * n))) + 0.005 for n in (2, 4, 8)}
    least = min(losses, key=losses.get)
    assert optima[0][2:4] == [f"{least} blocks", f"{losses[least]:.4f}{spread}"]
    further = [row[0] for row in rows if row[0] in ("20.0 GFLOPs", "200 GFLOPs")]
    assert further == ["20.0 GFLOPs"] * 2 + ["200 GFLOPs"] * 2
    # MoD needs half the FLOPs for the same loss, and half the seconds.
    speedup = rows[-1]
    assert speedup[:2] == ["2.00 GFLOPs", "MoD"]
    assert speedup[3].startswith("2.0") and speedup[5].startswith("2.0")

    data = saved(copy)
    assert len(data["points"]) == 24 and data["settings"]["model.family"] == "decoder"
    first = data["points"][0]
    assert first["loss"] == pytest.approx(loss - 0.005) and first["machine"] == "3 CPU cores"
    assert first["revision"] == "c0ffee" * 6 and first["settings"]["model.depth"] == 2
    assert "seed" not in data["settings"] and first["seconds"] == 1.0
    fits = data["fits"]["laws"][0]
    assert [optimum["measured"] for optimum in fits["optima"]] == [True, True, False, False]
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
    for text in ('{"title": "x"}', '{"points": [{}]}', "[]", "{"):
        (copy / "points.json").write_text(text)
        refused(lambda: points_lib.read_points(copy / "points.json"), "points.json")


def test_points_of_another_text_are_refused_after_one_run(copy, trained, capsys):
    """And not after hours of training all that are missing."""
    assert call(copy, "--table-only") == 0
    data = saved(copy)
    for point in data["points"]:
        point["text"] = "of another Python"
    (copy / "points.json").write_text(json.dumps(data))
    (copy / "grid.py").write_text(GRID.replace("(2e9, 1e9)", "(2e9, 4e9, 1e9)"))
    made = trained(copy / "grid.py", copy / "elsewhere")
    capsys.readouterr()
    assert call(copy, f"--from={copy / 'points.json'}", workdir="elsewhere") == 2
    error_line(capsys, "texts")
    assert len(made) == 1


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
    # Of learning rates: all with the first seed, and the best of each place for the others.
    grid = isoflop.load_grid("mod_evidence:rates")
    points = [
        point
        for point in points_lib.read_points(root / "results/mod_evidence_own_rates.json")
        if point.run.family in grid["families"]
    ]
    tried = [point for point in points if point.run.seed == 0]
    assert {point.run for point in tried} == {*grid_lib.rate_runs(grid)}
    fitted = {point.run for point in points if point.fitted}
    assert fitted == {*grid_lib.runs_of(grid, points_lib.best_rates(tried))}


@pytest.mark.parametrize(
    "change, name",
    [
        ({"loss": math.nan}, "loss=nan"),
        ({"tokens": 0}, "tokens=0"),
        ({"parameters": True}, "parameters=True"),
        ({"budget": "1e9"}, "budget='1e9'"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"size": 2}, "size=2"),
        ({"seed": 1}, "seed 1"),  # a second point of one run
    ],
)
def test_points_that_no_run_has_measured_are_refused(change, name, points_file, tmp_path):
    data = json.loads(points_file.read_text())
    data["points"][0] |= change
    path = tmp_path / "points.json"
    path.write_text(json.dumps(data))
    refused(lambda: points_lib.read_points(path), name)


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
        ({"record": {"tokenizer": "letters"}}, "tokenizers"),
        ({"record": {"text": TEXT | {"source": "xyz"}}}, "texts"),
        ({"row": {"eval/split_fraction": 0.5}}, "held-out"),
        ({"row": {"eval/loss": math.nan}}, "loss"),
        ({"row": {"flops": 1e9}}, "1.00 GFLOPs"),
        ({"record": {"launches": []}}, "run.json"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(changed, name, copy, capsys):
    grid = isoflop.load_grid(copy / "grid.py")
    run = grid_lib.Run("MoD", "4 blocks", 2e9, 1, None)
    shutil.rmtree(grid_lib.folder(copy / "w", run))
    fake_run(grid, copy / "w", run, **changed)
    assert call(copy, "--table-only") == 2
    error_line(capsys, name)


def test_a_run_folder_that_is_incomplete_is_refused(copy, capsys):
    folder = grid_lib.folder(copy / "w", grid_lib.Run("MoD", "4 blocks", 2e9, 1, None))
    metrics, config = folder / "metrics.jsonl", folder / "config.json"
    start, end = metrics.read_text().splitlines()
    later = json.dumps({"step": 11, "flops": 2e9})
    for lines in (
        f"{start}\n{end}\n{later}\n",  # evaluated, but not at its end
        f"{start}\n{end}",  # its last row is cut
        "nonsense\nnonsense\n",
        "",
        None,
    ):
        metrics.write_text(lines or "")
        if lines is None:
            config.unlink()
        assert call(copy, "--table-only") == 2
        error_line(capsys, folder.name)


def test_seconds_of_untimed_budgets_do_not_count(copy, capsys):
    """A FLOP of theirs takes the time of the same size at the timed budgets."""
    grid = isoflop.load_grid(copy / "grid.py")
    for run in grid_lib.all_runs(grid):
        if run.budget == 2e9:
            shutil.rmtree(grid_lib.folder(copy / "w", run))
            fake_run(grid, copy / "w", run, row={"seconds": 1e3})
    text = (copy / "grid.py").read_text()
    (copy / "grid.py").write_text(text.replace("dict(", "dict(timed_budgets=(1e9,), ", 1))
    assert call(copy, "--table-only") == 0
    assert rows_of(capsys.readouterr().out)[-1][5].startswith("2.0")
    points = saved(copy)["points"]
    assert {(one["budget"], one["seconds"]) for one in points} == {(1e9, 1.0), (2e9, None)}


def test_timed_steps_replace_the_seconds_of_runs(copy, capsys, monkeypatch):
    """A step of MoD takes as long as a dense one here, which has twice the FLOPs."""
    setup = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=7))
    monkeypatch.setattr(build, "setup", lambda config: setup)
    monkeypatch.setattr(step_time, "Stepper", lambda config, _: SimpleNamespace(config=config))
    times = step_time.Times(np.full(5, 2.0), np.zeros(5))
    monkeypatch.setattr(step_time, "time_steps", lambda steppers, _: dict.fromkeys(steppers, times))
    assert call(copy, "--table-only", "--time-steps=5") == 0
    row = rows_of(capsys.readouterr().out)[-1]
    assert row[3].startswith("2.0") and row[5].startswith("1.0")
    tokens = {one["tokens"] / one["seconds"] for one in saved(copy)["points"]}
    assert len(tokens) == 1 and tokens.pop() == pytest.approx(16 * 256 / 2.0)


def test_seconds_of_different_machines_are_not_compared(copy, capsys):
    grid = isoflop.load_grid(copy / "grid.py")
    run = grid_lib.Run("MoD", "4 blocks", 2e9, 1, None)
    shutil.rmtree(grid_lib.folder(copy / "w", run))
    fake_run(grid, copy / "w", run, launch={"cpu_count": 64})
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
    # From its file alone nothing is trained either, and the table is the same.
    (tmp_path / "w/isoflop.json").rename(tmp_path / "points.json")
    shutil.rmtree(tmp_path / "w")
    made.clear()
    assert call(tmp_path, f"--from={tmp_path / 'points.json'}") == 0 and not made
    again = capsys.readouterr().out
    assert again.splitlines()[:-2] == text[text.index("Held-out loss (nats)") :].splitlines()[:-2]


def test_sizes_have_learning_rates_and_families_sizes_of_their_own(tmp_path):
    rates = "{'2 blocks': (2e-3, 4e-3), '4 blocks': (1e-3, 2e-3, 4e-3), '8 blocks': (1e-3, 2e-3)}"
    seeds = '{"dense": (0, 1), "MoD": {"2 blocks": (), "4 blocks": (1, 0), "8 blocks": (0,)}}'
    text = RATES.replace("(1e-3, 4e-3, 2e-3)", rates).replace("(0, 1)", seeds)
    tried = [run[:2] + run[3:] for run in grid_lib.rate_runs(loaded(tmp_path, text))]
    assert len(tried) == len({*tried}) == 7 + 5
    assert [one for one in tried if "MoD" in one] == [
        ("MoD", "4 blocks", 1, 1e-3),
        ("MoD", "4 blocks", 1, 2e-3),
        ("MoD", "4 blocks", 1, 4e-3),
        ("MoD", "8 blocks", 0, 1e-3),
        ("MoD", "8 blocks", 0, 2e-3),
    ]


@pytest.mark.parametrize("rates_ended", [pytest.param(False, marks=pytest.mark.slow), True])
def test_points_of_an_unfinished_study_can_be_saved(tmp_path, trained, capsys, rates_ended):
    """Another machine takes them, and trains only what is missing."""
    path, points = tmp_path / "grid.py", tmp_path / "new/points.json"
    path.write_text(RATES)
    assert call(tmp_path, "--save-points", str(points)) == 2
    error_line(capsys, "--save-points")
    grid = isoflop.load_grid(path)
    ended = grid_lib.rate_runs(grid)[: None if rates_ended else 5]
    for run in ended:
        fake_run(grid, tmp_path / "w", run)
    assert call(tmp_path, "--save-points", str(points)) == 0
    made = trained(path, tmp_path / "elsewhere")
    assert call(tmp_path, f"--from={points}", workdir="elsewhere") == 0
    elsewhere = [*made]
    assert not {(run.name, run.seed) for run in ended} & {*elsewhere}
    made = trained(path, tmp_path / "anew")
    assert call(tmp_path, workdir="anew") == 0
    assert len(made) == len(elsewhere) + len(ended)
    runs = [
        [[one[name] for name in grid_lib.Run._fields] for one in saved(tmp_path, workdir)["points"]]
        for workdir in ("elsewhere", "anew")
    ]
    assert runs[0] == runs[1]


def test_learning_rates_without_a_finite_loss_are_refused(tmp_path, trained, capsys):
    (tmp_path / "grid.py").write_text(RATES)
    trained(tmp_path / "grid.py", tmp_path / "w", lambda run, by_law: math.nan)
    assert call(tmp_path) == 2
    error_line(capsys, "dense, 2 blocks", "0.001, 0.004, 0.002")
