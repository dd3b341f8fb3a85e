"""isoFLOP studies: from a grid to runs, from runs to points, tables, numbers and picture; points of
other machines; what is refused in one line."""

import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from efx import settings, tables
from efx.errors import UsageError
from efx.metrics import MetricsWriter
from efx.studies import cli, isoflop, rehearsal, report_fits, sweep
from efx.studies.isoflop import analysis, law, picture, report
from efx.studies.isoflop import grid as grid_lib
from efx.studies.isoflop import points as points_lib
from efx.studies.isoflop.bootstrap import Estimate

GRID = """
def get_grid():
    return dict(config="configs/mod.py", seeds=(0, 1), budgets=(2e9, 1e9),
                families={"dense": {"model.depth_routing.kind": "none"}, "MoD": {}},
                sizes={f"{n} blocks": {"model.depth": n} for n in (2, 4, 8)})
"""
ROOT = Path(__file__).parents[2]
THREE = ("2 blocks", "4 blocks", "8 blocks")
RATES = GRID.replace("seeds=", "learning_rates=(1e-3, 4e-3, 2e-3), seeds=")
LAW = law.Law(1.0, 8.0, 9.0, 0.3, 0.25)
TEXT = {"source": "abc", "eval_source": None, "held_out": "def"}


CHECK = cli.check_command


@functools.cache
def checked(name, arguments):
    return CHECK(name, arguments)


def check_once(name, arguments):
    """`cli.check_command`, which takes long: once for runs that differ in seed and folder alone."""
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
    """Settings are parsed once, and pictures, which take as long as all else, drawn by one test."""
    monkeypatch.setattr(cli, "check_command", check_once)
    if "picture" not in request.node.name:
        monkeypatch.setattr(picture, "draw", lambda *_: None)


def call(top, *more, workdir="w"):
    how = [f"--grid={top / 'grid.py'}", f"--workdir={top / workdir}", "--draws=20"]
    return isoflop.main([*how, *more])


def refused(capsys, words):
    """The one line that a call has said."""
    said = capsys.readouterr().err
    assert said.startswith("efx: error: ") and said.count("\n") == 1, said
    assert words in said, said


# ---- grids -------------------------------------------------------------------------------------


def test_the_grid_as_runs(tmp_path):
    path = tmp_path / "grid.py"
    path.write_text(GRID)
    grid = isoflop.load_grid(path)
    runs = grid_lib.runs_of(grid, {})
    assert len(runs) == len({*runs}) == 2 * 3 * 2 * 2
    # The small budget first, of it the first seed.
    assert runs[0] == ("dense", "2 blocks", 1e9, 0, None)
    assert [run.seed for run in runs] == ([0] * 6 + [1] * 6) * 2
    assert [run.budget for run in runs] == [1e9] * 12 + [2e9] * 12
    assert runs[0].name == "dense, 2 blocks, 1.00 GFLOPs"
    command = grid_lib.command(grid, tmp_path, runs[6], ["--config.data.batch_size=2"])
    for part in ("train_flops=1000000000.0", "steps=0", "seed=1", "model.depth=2",
                 "model.depth_routing.kind=none", "data.batch_size=2"):  # fmt: skip
        assert f"--config.{part}" in command


def test_budgets_up_to_one(tmp_path):
    path = tmp_path / "grid.py"
    path.write_text(GRID)
    grid = isoflop.load_grid(path)
    small = grid_lib.up_to(grid, 1.5e9)
    assert grid_lib.runs_of(small, {}) == grid_lib.runs_of(grid, {})[:12]
    assert grid_lib.up_to(grid, 2e9) == grid_lib.up_to(grid, float("inf")) == grid
    with pytest.raises(UsageError, match="--up-to=5e.08: must include the budget of 1e.09"):
        grid_lib.up_to(grid, 5e8)
    rates = grid | {"learning_rates": (1e-3,), "rates_budget": 2e9}
    with pytest.raises(UsageError, match="must include the budget of 2e.09"):
        grid_lib.up_to(rates, 1.5e9)


def test_budgets_with_some_of_the_sizes(tmp_path, trained, capsys):
    """The largest budget has larger sizes: what is left out is not made, its cells are empty."""
    path, small, large = tmp_path / "grid.py", (2, 4, 8), (4, 8, 16)
    at = {budget: [f"{n} blocks" for n in some] for budget, some in ((2e9, large), (1e9, small))}
    text = GRID.replace("(2, 4, 8)", "(2, 4, 8, 16)").replace("seeds=", f"sizes_at={at}, seeds=")
    path.write_text(text)
    made = trained(path, tmp_path / "w")
    assert call(tmp_path) == 0
    assert len(made) == len({*made}) == 2 * 3 * 2 * 2
    rows = rows_of(capsys.readouterr().out)
    measured = {tuple(row[:2]): [bool(cell) for cell in row[4:]] for row in rows[2:10:2]}
    assert measured == {
        ("2 blocks", "dense"): [True, False],
        ("4 blocks", "dense"): [True, True],
        ("8 blocks", "dense"): [True, True],
        ("16 blocks", "dense"): [False, True],
    }


def test_what_follows_a_colon_is_the_argument_of_the_grid(tmp_path):
    def decoder(context):
        families = isoflop.load_grid(f"latent_context:{context}")["families"]
        kinds = "decoder", "latent", "latent, local levels"
        assert list(families) == [f"{kind}, context {context}" for kind in kinds]
        return families[f"decoder, context {context}"]

    assert decoder(256) == {"data.seq_len": 256, "data.batch_size": 16}
    assert decoder(4096) == {"data.seq_len": 4096, "data.batch_size": 1}
    with pytest.raises(UsageError, match="context '512': expected one of 256, 1024, 4096"):
        decoder(512)
    path = tmp_path / "grid.py"
    path.write_text(GRID)
    with pytest.raises(UsageError, match=r"grid.py:512: get_grid\(\) has no variants"):
        isoflop.load_grid(f"{path}:512")


def test_families_have_seeds_and_settings_of_their_own(tmp_path):
    path = tmp_path / "grid.py"
    half = '"half": {"model.width": {"2 blocks": 32, "4 blocks": 64, "8 blocks": 96}}, "MoD"'
    several = '{"2 blocks": (0, 1), "4 blocks": (0,), "8 blocks": (0,)}'
    text = GRID.replace("(0, 1)", f'{{"dense": (0, 1, 2), "half": (3,), "MoD": {several}}}')
    path.write_text(text.replace('"MoD": {}', f"{half}: {{}}"))
    grid = isoflop.load_grid(path)
    runs = grid_lib.runs_of(grid, {})
    assert len(runs) == (3 + 1) * 6 + (2 + 1 + 1) * 2
    assert {run.size for run in runs if run.family == "MoD" and run.seed == 1} == {"2 blocks"}
    widths = {
        run.size: grid_lib.changes(grid, run)["model.width"]
        for run in runs
        if run.family == "half" and run.seed == 3
    }
    assert widths == {"2 blocks": 32, "4 blocks": 64, "8 blocks": 96}


def test_a_size_without_seeds_is_left_out_of_a_family(tmp_path):
    of_mod = '{"2 blocks": (0, 1), "4 blocks": (0,), "8 blocks": ()}'
    seeds = f'seeds={{"dense": (0,), "MoD": {of_mod}}}'
    (tmp_path / "grid.py").write_text(GRID.replace("seeds=(0, 1)", seeds))
    grid = isoflop.load_grid(tmp_path / "grid.py")
    runs = [(run.size, run.seed) for run in grid_lib.all_runs(grid) if run.family == "MoD"]
    assert sorted({*runs}) == [("2 blocks", 0), ("2 blocks", 1), ("4 blocks", 0)]
    assert {run.size for run in grid_lib.all_runs(grid)} == {"2 blocks", "4 blocks", "8 blocks"}
    fake_runs(grid, tmp_path / "w")
    assert call(tmp_path, "--table-only") == 0
    rows = rows_of((tmp_path / "w/isoflop.md").read_text())
    assert [row[:2] for row in rows[2:7]] == [
        ["2 blocks", "dense"], ["", "MoD"], ["4 blocks", "dense"], ["", "MoD"],
        ["8 blocks", "dense"],
    ]  # fmt: skip
    assert rows[7][0] == "budget"


@pytest.mark.parametrize("before, after, words", [
    ("(2, 4, 8)", "(2, 4)", "2 sizes; a parabola needs at least three"),
    ("families=", "family=", "'family' is not a key of a grid (did you mean 'families'"),
    ("seeds=", "learning_rate=1, seeds=", "'learning_rate' is not a key of a grid (did you mean"),
    ("(2e9, 1e9)", "()", "budgets is empty"),
    ("(2e9, 1e9)", "(1e9, 0)", "expected numbers"),
    ("(2e9, 1e9)", "(1e9, float('nan'))", "expected numbers"),
    ("families={", "families=None and {", "families=None: expected a dict"),
    ("sizes={", "sizes={} and {", "sizes is empty"),
    ("return dict", "dict", "get_grid() returned None"),
    ("(0, 1)", '{"dense": (0,)}', "or numbers for each of the families dense, MoD"),
    ("(0, 1)", '{"dense": (0,), "MoD": ()}', "seeds is empty"),
    ("(0, 1)", '{"dense": (0,), "MoD": {"2 blocks": (0,)}}', "for each of the sizes 2 blocks, 4 b"),
    ("(0, 1)", "(0, 0)", "has a seed twice"),
    ('"MoD": {}', '"MoD": {"model.width": {"2 blocks": 8}}', "or one for each of the sizes 2 bl"),
    ("seeds=(0, 1)", 'learning_rates=(1e-3, 2e-3), seeds={"dense": (0,), "MoD": '
     '{"2 blocks": (), "4 blocks": (0,), "8 blocks": (0,)}}, seeds_at={2e9: (0,)}',
     "MoD, 2 blocks, has seeds at 2e+09 FLOPs but none at 1e+09"),
    ("seeds=", "rates_budget=1e9, seeds=", "needs learning_rates to try"),
    ("seeds=", "learning_rates=(1e-3,), seeds=", "expected two or more different rates"),
    ("seeds=", "learning_rates=(1e-3, 'x'), seeds=", "expected numbers, e.g. (1e-3, 2e-3)"),
    ("seeds=", "learning_rates={'2 blocks': (1e-3, 2e-3)}, seeds=",
     "expected numbers, or numbers for each of the sizes 2 blocks, 4 blocks, 8 blocks"),
    ("seeds=", "learning_rates=(1e-3, 2e-3), rates_budget=3e9, seeds=", "expected one of budgets"),
    ('"MoD": {}', '"MoD": {"optim.learning_rate": 1.0}', "sets optim.learning_rate"),
    ("seeds=", "against=('MoE',), seeds=", "against=('MoE',): expected some of the families dense"),
    ("seeds=", "without=('MoD',), seeds=", "without=('MoD',): expected names other"),
    ("seeds=", "seeds_at={3e9: (0,)}, seeds=", "seeds_at={3000000000.0: (0,)}: expected seeds for"),
    ("seeds=", "seeds_at={2e9: {'MoD': (0,)}}, seeds=", "seeds_at[2e+09]={'MoD': (0,)}: expected"),
    ("seeds=", "fit_within=0.5, seeds=", "fit_within=0.5: expected a number above 1"),
    ("seeds=", "sizes_at=1e9, seeds=", "sizes_at=1000000000.0: expected sizes for some of budgets"),
    ("seeds=", "sizes_at={3e9: ('2 blocks',)}, seeds=", "expected sizes for some of budgets"),
    ("seeds=", "sizes_at={2e9: ('2 blocks',)}, seeds=", "expected three or more of the sizes 2 bl"),
    ("seeds=", "sizes_at={2e9: ['1 block'] * 3}, seeds=", "expected three or more of the sizes"),
    ("seeds=", f"sizes_at={{1e9: {THREE}, 2e9: {THREE}}}, seeds=", "leaves out 16 blocks at every"),
    ("seeds=", f"learning_rates=(1e-3, 2e-3), sizes_at={{1e9: {THREE}}}, seeds=",
     "sizes_at[1e+09] leaves out sizes, but the learning rate"),
])  # fmt: skip
def test_bad_grids_are_one_line(before, after, words, tmp_path, capsys):
    assert before in GRID
    text = GRID.replace(before, after)
    if repr(THREE) in after:
        text = text.replace("(2, 4, 8)", "(2, 4, 8, 16)")
    if "sets optim" in words:
        text = text.replace("seeds=", "learning_rates=(1e-3, 2e-3), seeds=")
    (tmp_path / "grid.py").write_text(text)
    assert call(tmp_path, "--table-only") == 2
    refused(capsys, words)


@pytest.mark.parametrize("more, words", [
    (["--draws=3"], "--draws=3: must be at least 20"),
    (["--further", "0.5"], "expected numbers above 1"),
    (["--time-steps=-1"], "--time-steps=-1: expected a number of steps"),
    (["--save-points=x", "--table-only"], "--save-points and --table-only: use only one"),
    (["--from=nothing.json"], "cannot read nothing.json"),
])  # fmt: skip
def test_bad_flags_are_one_line(more, words, finished, tmp_path, capsys):
    shutil.copy(finished / "grid.py", tmp_path)
    assert call(tmp_path, *more) == 2
    refused(capsys, words)
    assert [path.name for path in tmp_path.iterdir()] == ["grid.py"]


# ---- from runs to tables -----------------------------------------------------------------------


def rows_of(text):
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_tables_numbers_and_picture(copy, capsys):
    assert call(copy, "--table-only", "--further", "10", "100") == 0
    text = (copy / "w/isoflop.md").read_text()
    assert text in capsys.readouterr().out and "python -m efx.studies.isoflop --grid" in text
    assert "whole held-out split" in text and "2 seeds a point" in text
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
    further = [row[:2] for row in rows if row[0] in ("20.0 GFLOPs", "200 GFLOPs")]
    assert further == [["20.0 GFLOPs", "dense"], ["20.0 GFLOPs", "MoD"],
                       ["200 GFLOPs", "dense"], ["200 GFLOPs", "MoD"]]  # fmt: skip
    # Half the FLOPs for the same: a speedup of two, and as much in seconds, a FLOP of which is
    # alike here.
    speedup = rows[-1]
    assert speedup[:2] == ["2.00 GFLOPs", "MoD"]
    assert speedup[3].startswith("2.0") and speedup[5].startswith("2.0")

    data = json.loads((copy / "w/isoflop.json").read_text())
    assert len(data["points"]) == 24 and data["settings"]["model.family"] == "decoder"
    first = data["points"][0]
    assert first["loss"] == pytest.approx(loss - 0.005) and first["machine"] == "3 CPU cores"
    assert first["revision"] == "c0ffee" * 6 and first["settings"]["model.depth"] == 2
    assert "seed" not in data["settings"] and first["seconds"] == 1.0
    fits = data["fits"]["laws"][0]
    assert [optimum["measured"] for optimum in fits["optima"]] == [True, True, False, False]
    assert {"value", "80", "95", "share"} == {*fits["law"]["a"]}
    assert (copy / "w/isoflop.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [2, 6])
def test_words_of_the_picture_cover_nothing(count, tmp_path, monkeypatch):
    """Legends no label and no curve, labels of sizes no other; sizes that the first family does not
    have are labelled too."""
    import matplotlib.figure

    figures, save = [], matplotlib.figure.Figure.savefig

    def saved(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", saved)
    families = {}
    for number in range(count):
        sizes = np.geomspace(1e3, 64e3, 13) * (1 + 0.5 * number)
        parameters, budgets = np.tile(sizes, 2), np.repeat([1e10, 4e10], 13)
        tokens = budgets / (6 * parameters)
        losses = [np.array([loss, loss + 0.01]) for loss in LAW.loss(parameters, tokens)]
        names, unknown = [f"{size:.0f}" for size in parameters], [np.full(2, np.nan)] * 26
        seeds = [np.arange(2)] * 26
        of = (names, budgets, parameters, tokens, 6 * parameters, unknown, losses, seeds)
        families[f"family of a long name, number {number}"] = analysis.Measured(*of)
    picture.draw(analysis.analyse(families, 20), tmp_path / "a.png", [10.0])
    (figure,) = figures
    assert len(figure.axes) == 3
    for axis in figure.axes:
        legend = axis.get_legend().get_window_extent()
        assert legend.y0 >= 0 and not legend.overlaps(axis.get_window_extent())
        assert not legend.overlaps(axis.xaxis.label.get_window_extent())
        assert axis.get_window_extent().height > 300  # legends take nothing from the panels
    for axis, least in zip(figure.axes, (5, 3, 3), strict=True):
        labels = [label.get_window_extent() for label in axis.get_xticklabels()]
        assert len(labels) >= least and axis.get_xaxis().get_minorticklocs().size == 0
        assert not any(a.overlaps(b) for a, b in itertools.combinations(labels, 2))
    greatest = max(of.parameters.max() for of in families.values())
    ticks = figure.axes[0].get_xticks()
    assert ticks[0] == pytest.approx(1e3) and ticks[-1] == pytest.approx(greatest)


def test_a_bar_that_is_far_wider_than_all_else_leaves_the_picture():
    low, high = picture._limits([3.0, 3.5, 4.0], [3.4, 3.6, 1.0, 4.2])
    assert 2.3 < low < 2.5 and 4.2 < high < 4.3
    low, high = picture._limits([3.0], [2.9, 3.1])
    assert 2.85 < low < 2.9 and 3.1 < high < 3.15


def test_what_the_tables_say_where_there_is_nothing():
    """One budget, sizes that enclose no minimum, a baseline that is never as good."""
    sizes = np.array([1e3, 2e3, 4e3])

    def measured(losses, budgets):
        parts = [np.repeat(budgets, 3), np.tile(sizes, len(budgets))]
        columns = [*parts, 1e9 / parts[1], 6 * parts[1], [np.array([np.nan])] * len(parts[0])]
        names, seeds = [f"{size:g}" for size in parts[1]], [np.array([0])] * len(parts[0])
        return analysis.Measured(names, *columns, [np.array([loss]) for loss in losses], seeds)

    found = analysis.analyse(
        {"dense": measured([3.0, 2.9, 2.8], [1e9]), "MoD": measured([2.9, 2.5, 2.6], [1e9])}, 20
    )
    cells = report.optima_table(found)
    assert cells[1e9, "dense"]["loss at the best size"].startswith("none")
    assert cells[1e9, "MoD"]["loss over the baseline's"] == "none"
    best = cells[1e9, "MoD"]["loss at the best size"]
    assert best["mean"] == pytest.approx(2.477, abs=2e-3)
    # A parabola through three points of one seed each says nothing of its scatter.
    assert best["note"] == "no interval" and "interval" not in best

    # A baseline that does not get there in some draws.
    open_ended = report.speedup_cell(Estimate(1.5, np.array([1.25, np.inf, np.nan, np.inf])))
    assert tables.text(open_ended, ".2f") == "1.50 (1.25 to ∞; 75% of draws)"
    assert "beyond" in report.speedup_cell(Estimate(np.inf, np.array([np.inf])))

    class Seen:
        fitted, machine, seconds, copied = True, "m", 1.0, None

    text = report.markdown(found, [Seen], {"further": [10.0]}, "facts")
    assert "No law of dense; MoD: the law L(N, D) has 5 parameters" in text
    assert "further budgets" not in text and "1 seed a point" in text


def test_the_least_measured_loss_is_of_a_size_with_three_seeds():
    """One lucky seed of another size does not replace a mean of three."""
    losses = [np.array([3.0, 3.1, 3.2]), np.array([2.9, 3.0, 3.1]), np.array([2.5])]
    parameters = np.array([1e3, 2e3, 4e3])
    measured = analysis.Measured(
        ["small", "medium", "large"],
        np.full(3, 1e9),
        parameters,
        1e9 / (6 * parameters),
        6 * parameters,
        [np.full(len(seeds), np.nan) for seeds in losses],
        losses,
        [np.arange(len(seeds)) for seeds in losses],
    )
    cells = report.optimum_cells(analysis.analyse({"dense": measured}, 20), 1e9, "dense")
    assert cells["least measured at"] == "medium"
    assert cells["least measured"]["mean"] == pytest.approx(3.0)


# ---- points that exist, and others -------------------------------------------------------------


def test_runs_that_have_ended_are_not_made_again_and_a_grid_may_grow(copy, trained):
    grid = copy / "grid.py"
    made = trained(grid, copy / "w")
    assert call(copy) == 0 and made == []
    grid.write_text(GRID.replace("(2e9, 1e9)", "(2e9, 4e9, 1e9)").replace("(0, 1)", "(0, 1, 2)"))
    made = trained(grid, copy / "w")
    assert call(copy) == 0
    new = {("4.00" in name, seed) for name, seed in made}
    assert len(made) == 6 * 3 + 6 * 2 and new == {(True, 0), (True, 1), (True, 2), (False, 2)}
    assert len(json.loads((copy / "w/isoflop.json").read_text())["points"]) == 54


def test_a_study_goes_on_on_another_machine(copy, trained, capsys):
    assert call(copy, "--table-only") == 0
    here = (copy / "w/isoflop.md").read_text()
    shutil.rmtree(copy / "w/dense_2_blocks_1.00_GFLOPs-seed0")
    (copy / "w/isoflop.json").rename(copy / "points.json")
    shutil.rmtree(copy / "w")
    given = f"--from={copy / 'points.json'}"
    made = trained(copy / "grid.py", copy / "w")
    assert call(copy, given) == 0 and made == []
    assert (copy / "w/isoflop.md").read_text().splitlines()[:-1] == here.splitlines()[:-1]

    # A new budget is trained here, and all points are in the new file.
    (copy / "grid.py").write_text(GRID.replace("(2e9, 1e9)", "(2e9, 4e9, 1e9)"))
    made = trained(copy / "grid.py", copy / "w")
    assert call(copy, given) == 0 and len(made) == 12
    points = json.loads((copy / "w/isoflop.json").read_text())["points"]
    assert len(points) == 36

    # Foreign points are told, not mixed in.
    capsys.readouterr()
    assert call(copy, given, "--", "--config.model.width=32") == 2
    refused(
        capsys, "dense, 2 blocks, 1.00 GFLOPs: a run with other settings: config.model.width is"
    )
    (copy / "grid.py").write_text(GRID.replace("(2e9, 1e9)", "(2e9, 3e9)"))
    assert call(copy, given) == 2
    refused(
        capsys, "dense, 2 blocks, 1.00 GFLOPs, seed 0, is not a run of the grid; add its family"
    )
    for text, words in (
        ('{"title": "x"}', "a result without the points of its study"),
        ('{"points": [{}]}', "not the points of an isoFLOP study (KeyError"),
        ("[]", "not the points of an isoFLOP study (TypeError"),
        ("{", "not JSON"),
    ):
        (copy / "points.json").write_text(text)
        assert call(copy, given) == 2
        refused(capsys, words)


def test_points_of_another_text_are_told_after_one_run(copy, trained, capsys):
    """And not after all that are missing, hours later."""
    assert call(copy, "--table-only") == 0
    data = json.loads((copy / "w/isoflop.json").read_text())
    for point in data["points"]:
        point["text"] = "of another Python"
    (copy / "points.json").write_text(json.dumps(data))
    (copy / "grid.py").write_text(GRID.replace("(2e9, 1e9)", "(2e9, 4e9, 1e9)"))
    made = trained(copy / "grid.py", copy / "elsewhere")
    capsys.readouterr()
    assert call(copy, f"--from={copy / 'points.json'}", workdir="elsewhere") == 2
    refused(capsys, "have other texts")
    assert len(made) == 1

    # Nothing is trained where those that are there are not of one text.
    data["points"][0]["text"] = "of a third"
    (copy / "points.json").write_text(json.dumps(data))
    made = trained(copy / "grid.py", copy / "third")
    assert call(copy, f"--from={copy / 'points.json'}", workdir="third") == 2
    refused(capsys, "have other texts")
    assert made == []


def test_points_of_several_files_and_families_that_are_left_out(copy, trained, capsys):
    """Two studies of a budget each, of which one has a family and a seed more."""
    grid, seeds = copy / "grid.py", '{"dense": (0, 1), "MoD": (0, 1), "MoE": (0,)}'
    one = GRID.replace("(2e9, 1e9)", "(1e9,)").replace("(0, 1)", seeds)
    texts = {
        "a": one.replace('"MoD": {}', '"MoD": {}, "MoE": {"model.width": 32}'),
        "b": GRID.replace("(2e9, 1e9)", "(2e9,)").replace("(0, 1)", "(0,)"),
    }
    files = []
    for name, text in texts.items():
        grid.write_text(text)
        trained(grid, copy / name)
        assert call(copy, workdir=name) == 0
        files.append(f"--from={copy / name / 'isoflop.json'}")
    given = [*files, "--table-only"]
    grid.write_text(GRID.replace("seeds=", "without=('MoE',), seeds_at={2e9: (0,)}, seeds="))
    capsys.readouterr()
    assert call(copy, *given, workdir="both") == 0
    assert "1 to 2 seeds a point" in capsys.readouterr().out
    points = json.loads((copy / "both/isoflop.json").read_text())["points"]
    found = {(one["family"], one["budget"], one["seed"]) for one in points}
    families = "dense", "MoD"
    assert found == {(name, *at) for name in families for at in ((1e9, 0), (1e9, 1), (2e9, 0))}
    grid.write_text(GRID.replace("seeds=", "seeds_at={2e9: (0,)}, seeds="))
    assert call(copy, *given, workdir="both") == 2
    refused(capsys, "MoE, 2 blocks, 1.00 GFLOPs, seed 0, is not a run of the grid")


def test_three_families_of_two_files_of_results():
    """The variant that analyses the points of both files together has their runs, no others."""
    grid = isoflop.load_grid("mod_evidence:three")
    held = {
        point.run
        for name in ("mod_evidence", "mod_evidence_largest")
        for point in points_lib.read_points(ROOT / f"results/{name}.json")
        if point.run.family not in grid["without"]
    }
    wanted = {*grid_lib.all_runs(grid)}
    assert wanted == held and len(grid["families"]) == 3 and len(grid["budgets"]) == 3


def test_the_grid_of_learning_rates_is_that_of_its_results():
    """All rates of the first seed, and the best one of each place for the others."""
    grid = isoflop.load_grid("mod_evidence:rates")
    points = [
        point
        for point in points_lib.read_points(ROOT / "results/mod_evidence_own_rates.json")
        if point.run.family in grid["families"]
    ]
    tried = [point for point in points if point.run.seed == 0]
    assert {point.run for point in tried} == {*grid_lib.rate_runs(grid)}
    fitted = {point.run for point in points if point.fitted}
    assert fitted == {*grid_lib.runs_of(grid, points_lib.best_rates(tried))}
    assert len(points) == 77 and all(point.copied is not None for point in points)


@pytest.mark.parametrize("change, words", [
    ({"loss": math.nan}, "point 1, dense, 2 blocks: loss=nan: expected a number of nats, or null"),
    ({"loss": "x"}, "point 1, dense, 2 blocks: loss='x': expected a number of nats, or null"),
    ({"copied": "x"}, "point 1, dense, 2 blocks: copied='x': expected a number of nats, or null"),
    ({"tokens": 0}, "point 1, dense, 2 blocks: tokens=0: expected a number above 0"),
    ({"parameters": -3}, "dense, 2 blocks: parameters=-3: expected a number above 0"),
    ({"parameters": True}, "dense, 2 blocks: parameters=True: expected a number above 0"),
    ({"seconds": 0}, "dense, 2 blocks: seconds=0: expected a number above 0"),
    ({"flops": None}, "dense, 2 blocks: flops=None: expected a number above 0"),
    ({"budget": "1e9"}, "dense, 2 blocks: budget='1e9': expected a number above 0"),
    ({"seed": 0.5}, "dense, 2 blocks: seed=0.5: expected a whole number"),
    ({"size": 2}, "point 1: size=2: expected a text"),
    ({"seed": 1}, "dense, 2 blocks, 1.00 GFLOPs, seed 1, is a duplicate and would count as"),
])  # fmt: skip
def test_points_that_no_run_has_measured_are_one_line(change, words, copy, capsys):
    assert call(copy, "--table-only") == 0
    data = json.loads((copy / "w/isoflop.json").read_text())
    data["points"][0] |= change
    (copy / "points.json").write_text(json.dumps(data))
    assert call(copy, f"--from={copy / 'points.json'}", "--table-only") == 2
    refused(capsys, words)
    with pytest.raises(UsageError, match=re.escape(words)):
        report_fits.read(copy / "points.json")


def test_settings_that_came_later_are_at_their_default():
    expected = {"model.family": "decoder", "model.width": 8, "model.init_std": 0.02}
    points_lib.check_settings("x", {"model.family": "decoder", "model.width": 8}, expected)
    with pytest.raises(UsageError, match=r"x: .*model.init_std is 0.02 there and 0.5 in the grid"):
        points_lib.check_settings(
            "x", {"model.family": "decoder", "model.width": 8}, expected | {"model.init_std": 0.5}
        )
    with pytest.raises(UsageError, match=r"config.gone is 1 there and absent in the grid"):
        points_lib.check_settings("x", expected | {"gone": 1}, expected)
    with pytest.raises(UsageError, match="and 2 more; leave"):
        points_lib.check_settings("x", expected | dict.fromkeys("abcde", 1), expected)


@pytest.mark.parametrize("changed, words", [
    ({"record": {"tokenizer": "letters"}}, "have other tokenizers"),
    ({"record": {"text": TEXT | {"source": "xyz"}}}, "have other texts"),
    ({"row": {"eval/split_fraction": 0.5}}, "have other parts of the held-out text"),
    ({"row": {"eval/loss": math.nan}}, "held-out loss is not finite"),
    ({"row": {"flops": 1e9}}, "1.00 GFLOPs of training; its budget is 2.00 GFLOPs"),
    ({"record": {"launches": []}}, "the start of metrics.jsonl or run.json is missing"),
])  # fmt: skip
def test_runs_that_do_not_belong_together_are_one_line(changed, words, copy, capsys):
    grid = isoflop.load_grid(copy / "grid.py")
    run = grid_lib.Run("MoD", "4 blocks", 2e9, 1, None)
    folder = grid_lib.folder(copy / "w", run)
    shutil.rmtree(folder)
    fake_run(grid, copy / "w", run, **changed)
    assert call(copy, "--table-only") == 2
    refused(capsys, words)


def test_half_written_folders_are_one_line(copy, capsys):
    folder = grid_lib.folder(copy / "w", grid_lib.Run("MoD", "4 blocks", 2e9, 1, None))
    metrics = (folder / "metrics.jsonl").read_text()
    start, end = metrics.splitlines()
    # Evaluated once, but not at its end.
    later = json.dumps({"step": 11, "flops": 2e9})
    for lines, words in (
        (f"{start}\n{end}\n{later}\n", "no held-out loss: the run has not finished"),
        (f"{start}\n{end}", "0 FLOPs of training; its budget is 2.00 GFLOPs"),
        ("nonsense\nnonsense\n", "line 1 is not a metrics row"),
    ):
        (folder / "metrics.jsonl").write_text(lines)
        assert call(copy, "--table-only") == 2
        refused(capsys, words)
    (folder / "metrics.jsonl").unlink()
    assert call(copy, "--table-only") == 2
    refused(capsys, "no step has been logged yet")
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "config.json").unlink()
    assert call(copy, "--table-only") == 2
    refused(capsys, "has metrics.jsonl but no config.json: an incomplete copy")
    shutil.rmtree(folder)
    assert call(copy, "--table-only") == 2
    refused(capsys, "the run has not started")


def test_budgets_whose_seconds_do_not_count(copy, capsys):
    """Of runs beside other work: a FLOP of theirs takes as long as at the same size elsewhere."""
    grid = isoflop.load_grid(copy / "grid.py")
    for run in grid_lib.all_runs(grid):
        if run.budget == 2e9:
            shutil.rmtree(grid_lib.folder(copy / "w", run))
            fake_run(grid, copy / "w", run, row={"seconds": 1e3})
    text = (copy / "grid.py").read_text()
    (copy / "grid.py").write_text(text.replace("dict(", "dict(timed_budgets=(1e9,), ", 1))
    assert call(copy, "--table-only") == 0
    said = capsys.readouterr().out
    assert "Seconds are those of the runs of 1.00 GFLOPs, on their machine" in said
    assert rows_of(said)[-1][5].startswith("2.0")
    points = json.loads((copy / "w/isoflop.json").read_text())["points"]
    assert {(one["budget"], one["seconds"]) for one in points} == {(1e9, 1.0), (2e9, None)}
    (copy / "grid.py").write_text(text.replace("dict(", "dict(timed_budgets=(3e9,), ", 1))
    assert call(copy, "--table-only") == 2
    refused(capsys, "timed_budgets=(3000000000.0,): expected some of budgets=")


def test_seconds_of_steps_that_take_turns(copy, capsys, monkeypatch):
    """Those that the runs have themselves are left out."""
    from efx import build
    from efx.studies import step_time

    class Stepper:
        """A step of MoD takes as long as a dense one, which has twice the FLOPs."""

        def __init__(self, config, vocab_size):
            assert vocab_size == 7
            self.config = config

        def __call__(self):
            pass

    class Setup:
        class tokenizer:
            vocab_size = 7

    def take_turns(calls, steps):
        assert steps == 5 and len(calls) == 2 * 3
        return {name: step_time.Times(np.full(steps, 2.0), np.zeros(steps)) for name in calls}

    monkeypatch.setattr(step_time, "Stepper", Stepper)
    monkeypatch.setattr(step_time, "take_turns", take_turns)
    monkeypatch.setattr(build, "setup", lambda config: Setup)
    text = (copy / "grid.py").read_text()
    (copy / "grid.py").write_text(text.replace("dict(", "dict(timed_budgets=(), ", 1))
    assert call(copy, "--table-only") == 0
    assert rows_of(capsys.readouterr().out)[-1][4:] == ["", ""]
    assert call(copy, "--table-only", "--time-steps=5") == 0
    said = rows_of(capsys.readouterr().out)
    assert said[-1][3].startswith("2.0") and said[-1][5].startswith("1.0")
    points = json.loads((copy / "w/isoflop.json").read_text())["points"]
    tokens = {one["tokens"] / one["seconds"] for one in points}
    assert len(tokens) == 1 and tokens.pop() == pytest.approx(16 * 256 / 2.0)


def test_seconds_of_different_machines_are_not_compared(copy, capsys):
    grid = isoflop.load_grid(copy / "grid.py")
    run = grid_lib.Run("MoD", "4 blocks", 2e9, 1, None)
    shutil.rmtree(grid_lib.folder(copy / "w", run))
    fake_run(grid, copy / "w", run, launch={"cpu_count": 64})
    assert call(copy, "--table-only") == 0
    text = capsys.readouterr().out
    assert "of different machines (3 CPU cores; 64 CPU cores)" in text
    assert rows_of(text)[-1][4:] == ["", ""] and rows_of(text)[-1][3]


# ---- learning rates ----------------------------------------------------------------------------


def test_the_best_rate_of_each_size_is_that_of_its_other_runs(tmp_path, trained, capsys):
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
    assert "from its context" not in text
    rows = {tuple(row[:2]): row[2:] for row in rows_of(text)}
    assert rows["dense", "4 blocks"][-1] == "at the end" and "**" in rows["dense", "4 blocks"][2]
    assert rows["MoD", "4 blocks"][2:] == ["not finite", ""] and "**" in rows["MoD", "4 blocks"][1]
    assert "dense: 0.001 to 0.004, 4 times; MoD: 0.002 for all sizes" in text
    # From its file alone nothing is trained either, and the table is there again.
    (tmp_path / "w/isoflop.json").rename(tmp_path / "points.json")
    shutil.rmtree(tmp_path / "w")
    assert len(json.loads((tmp_path / "points.json").read_text())["points"]) == 36
    made.clear()
    assert call(tmp_path, f"--from={tmp_path / 'points.json'}") == 0 and not made
    again = capsys.readouterr().out
    assert again.splitlines()[:-2] == text[text.index("Held-out loss (nats)") :].splitlines()[:-2]


def test_sizes_have_learning_rates_of_their_own(tmp_path, trained, capsys):
    rates = "{'2 blocks': (2e-3, 4e-3), '4 blocks': (1e-3, 2e-3, 4e-3), '8 blocks': (1e-3, 2e-3)}"
    (tmp_path / "grid.py").write_text(RATES.replace("(1e-3, 4e-3, 2e-3)", rates))
    made = trained(tmp_path / "grid.py", tmp_path / "w", lambda run, by_law: by_law + run.rate)
    assert call(tmp_path) == 0 and len(made) == len({*made}) == 2 * (2 + 3 + 2) + 6 * 3
    rows = {tuple(row[:2]): row[2:] for row in rows_of(capsys.readouterr().out)}
    assert rows["dense", "2 blocks"][0] == "" and rows["dense", "8 blocks"][2] == ""
    assert all(rows["MoD", size][3] == "at the end" for size in THREE)
    tried = {(run.size, run.rate) for run in grid_lib.all_runs(trained.grid)}
    assert tried == {(size, rate) for size, own in trained.grid["learning_rates"].items()
                     for rate in own}  # fmt: skip


def test_a_family_may_lack_a_size_that_has_learning_rates(tmp_path, trained):
    seeds = '{"dense": (0, 1), "MoD": {"2 blocks": (), "4 blocks": (1, 0), "8 blocks": (0,)}}'
    (tmp_path / "grid.py").write_text(RATES.replace("seeds=(0, 1)", f"seeds={seeds}"))
    made = trained(tmp_path / "grid.py", tmp_path / "w", lambda run, by_law: by_law + run.rate)
    assert call(tmp_path) == 0 and len(made) == len({*made})
    tried = [run for run in grid_lib.rate_runs(trained.grid) if run.family == "MoD"]
    assert {(run.size, run.seed) for run in tried} == {("4 blocks", 1), ("8 blocks", 0)}
    assert len(tried) == 6 and not any(
        run.family == "MoD" and run.size == "2 blocks" for run in grid_lib.all_runs(trained.grid)
    )


def test_what_models_copy_is_told_beside_their_losses(copy, capsys):
    """Of runs that measured it; it is kept with the points."""
    grid = isoflop.load_grid(copy / "grid.py")
    for run in grid_lib.all_runs(grid):
        if run.family == "MoD" and run.budget == 1e9 and run.size == "2 blocks":
            shutil.rmtree(grid_lib.folder(copy / "w", run))
            fake_run(grid, copy / "w", run, row={"eval/repeated/gain": 0.5 + run.seed})
    assert call(copy) == 0
    text = capsys.readouterr().out
    (row,) = (row for row in rows_of(text) if row[-1] == "0.50, 1.50")
    assert row[:3] == ["1.00 GFLOPs", "MoD", "2 blocks"] and row[4] == "1.00 ± 0.71"
    points = json.loads((copy / "w/isoflop.json").read_text())["points"]
    assert sorted(point["copied"] for point in points if "copied" in point) == [0.5, 1.5]
    (copy / "w/isoflop.json").rename(copy / "points.json")
    shutil.rmtree(copy / "w")
    assert call(copy, f"--from={copy / 'points.json'}") == 0
    assert "0.50, 1.50" in capsys.readouterr().out


@pytest.mark.parametrize("text, rates_ended", [(GRID, False), (RATES, False), (RATES, True)])
def test_points_of_a_study_that_is_not_finished(tmp_path, trained, capsys, text, rates_ended):
    """Another machine takes them, and trains only what is missing."""
    path, saved = tmp_path / "grid.py", tmp_path / "new/points.json"
    path.write_text(text)
    assert call(tmp_path, "--save-points", str(saved)) == 2
    refused(capsys, "--save-points: no run of the grid has finished")
    grid = isoflop.load_grid(path)
    ended = grid_lib.rate_runs(grid)
    if not rates_ended:
        ended = (ended or grid_lib.runs_of(grid, {}))[:5]
    for run in ended:
        fake_run(grid, tmp_path / "w", run)
    assert call(tmp_path, "--save-points", str(saved)) == 0
    assert f"{saved}: {len(ended)} points" in capsys.readouterr().out
    made = trained(path, tmp_path / "elsewhere")
    assert call(tmp_path, f"--from={saved}", workdir="elsewhere") == 0
    elsewhere = [*made]
    assert not {(run.name, run.seed) for run in ended} & {*elsewhere}
    made = trained(path, tmp_path / "anew")
    assert call(tmp_path, workdir="anew") == 0
    assert len(made) == len(elsewhere) + len(ended)
    both = [tmp_path / name / "isoflop.json" for name in ("elsewhere", "anew")]
    runs = [
        [
            [one[name] for name in grid_lib.Run._fields]
            for one in json.loads(file.read_text())["points"]
        ]
        for file in both
    ]
    assert runs[0] == runs[1]


def test_no_rate_with_a_finite_loss_is_one_line(tmp_path, trained, capsys):
    (tmp_path / "grid.py").write_text(RATES)
    trained(tmp_path / "grid.py", tmp_path / "w", lambda run, by_law: math.nan)
    assert call(tmp_path) == 2
    refused(capsys, "dense, 2 blocks: no learning rate of 0.001, 0.004, 0.002 ends with a finite")


# ---- commands of the missing runs --------------------------------------------------------------


def test_printed_commands_train_the_missing_runs(tmp_path, capsys):
    (top := tmp_path / "it's a folder").mkdir()
    (top / "grid.py").write_text(GRID)
    small = ["data.seq_len=32", "data.batch_size=2", "model.width=16"]
    flags = ["--print-commands", "--", *(f"--config.{setting}" for setting in small)]
    assert call(top, *flags) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert len(others) == 23
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", first], cwd=ROOT, env=env, check=True)
    assert call(top, *flags) == 0
    assert capsys.readouterr().out.splitlines() == others


def test_commands_that_need_the_best_learning_rate_come_later(tmp_path, capsys):
    (tmp_path / "grid.py").write_text(RATES)
    assert call(tmp_path, "--print-commands") == 0
    assert capsys.readouterr().out.count("\n") == 18
    grid = isoflop.load_grid(tmp_path / "grid.py")
    for run in grid_lib.rate_runs(grid):
        fake_run(grid, tmp_path / "w", run, loss=lambda run, by_law: run.rate)
    assert call(tmp_path, "--print-commands") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18 and all("rate_0.001-" in line for line in lines)
