"""isoFLOP curves: the fit, what is said where there is none, and the study from runs to tables."""

import itertools
import json
import math

import numpy as np
import pytest

from efx import tables
from efx.errors import UsageError
from efx.metrics import MetricsWriter
from efx.studies import isoflop, sweep

GRID = """
def get_grid():
    return dict(config="configs/mod.py", seeds=(0, 1), budgets=(2e9, 1e9),
                families={"dense": {"model.depth_routing.kind": "none"}, "MoD": {}},
                sizes={f"{n} blocks": {"model.depth": n} for n in (2, 4, 8)})
"""
SIZES = np.array([1e3, 3e3, 1e4, 5e4])


def parabola(n, a, b, best):
    return a + b * (np.log(n) - math.log(best)) ** 2


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.py"
    path.write_text(GRID)
    return isoflop.load_grid(path)


def fake_runs(grid, workdir, best):
    """Run folders with losses on parabolas whose minima, and where they lie, are chosen.

    best: {(budget, family): (a, best size)}; the second seed is 0.1 worse everywhere.
    """
    for (budget, family), (a, size) in best.items():
        for number, seed in [(n, s) for n in (2, 4, 8) for s in grid["seeds"]]:
            name = isoflop.run_name(family, f"{number} blocks", budget)
            run = sweep.folder(workdir, name, seed)
            run.mkdir(parents=True)
            parameters = 1000 * number
            loss = parabola(parameters, a, 0.5, size) + 0.1 * seed
            cost = 6 * parameters * (0.5 if family == "MoD" else 1)
            with MetricsWriter(run, tensorboard=False) as writer:
                writer.write(0, {"parameters": parameters})
                row = {"tokens": budget / cost, "flops": budget, "train/loss": 9.0}
                writer.write(10, {**row, "eval/loss": loss, "eval/bits_per_byte": 2 * loss})


def test_a_fit_finds_the_vertex_whatever_the_order():
    losses = parabola(SIZES, a=1.7, b=0.3, best=4e3)
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        best = isoflop.fit_parabola(SIZES[order], 6 * SIZES[order], losses[order])
        assert best.parameters == pytest.approx(4e3)
        assert best.loss == pytest.approx(1.7)
        assert best.flops == pytest.approx(6 * 4e3)  # proportional: interpolated in logarithms
        assert best.residual == pytest.approx(0, abs=1e-9)
    best = isoflop.fit_parabola(SIZES, 6 * SIZES, losses + np.array([0.1, -0.1, 0.1, -0.1]))
    assert 0.02 < best.residual < 0.1


@pytest.mark.parametrize("best", [900.0, 6e4])
def test_no_minimum_among_the_sizes_is_no_optimum(best):
    assert isoflop.fit_parabola(SIZES, SIZES, parabola(SIZES, 1.7, 0.3, best)) is None
    assert isoflop.fit_parabola(SIZES, SIZES, parabola(SIZES, 1.7, -0.3, 4e3)) is None  # a maximum


def test_the_grid_as_runs(grid, tmp_path):
    spec = isoflop.as_sweep(grid)
    assert len(spec["runs"]) == 2 * 3 * 2
    first = next(iter(spec["runs"]))
    assert first == "dense, 2 blocks, 1.00 GFLOPs"  # the small budget first
    command = sweep.command(spec, tmp_path, first, 1, {}, ["--config.data.batch_size=2"])
    for part in (
        "train_flops=1000000000.0",
        "steps=0",
        "seed=1",
        "model.depth=2",
        "model.depth_routing.kind=none",
        "data.batch_size=2",
    ):
        assert f"--config.{part}" in command


def test_tables_numbers_and_picture(grid, tmp_path, capsys):
    fake_runs(
        grid,
        tmp_path,
        {
            (1e9, "dense"): (2.0, 3000),
            (1e9, "MoD"): (1.9, 6000),
            (2e9, "dense"): (1.5, 4000),
            (2e9, "MoD"): (1.6, 20_000),
        },
    )
    how = ["--grid", str(tmp_path / "grid.py"), "--workdir", str(tmp_path), "--table-only"]
    assert isoflop.main(how) == 0
    text = (tmp_path / "isoflop.md").read_text()
    assert text in capsys.readouterr().out and "python -m efx.studies.isoflop --grid" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
            if line.startswith("|")]  # fmt: skip
    loss = parabola(4000, 2.0, 0.5, 3000) + 0.05
    spread = 0.1 / math.sqrt(2)
    assert rows[2][:4] == ["2 blocks", "dense", "2.00k", "12.0 kFLOPs"]
    assert rows[4][:2] == ["4 blocks", "dense"] and rows[4][4] == f"{loss:.4f} ± {spread:.4f}"
    fits = rows[8:]
    best = parabola(2000, 2.0, 0.5, 3000), parabola(4000, 2.0, 0.5, 3000)
    assert best[1] < best[0]
    assert fits[2] == ["1.00 GFLOPs", "dense", "4 blocks", f"{best[1] + 0.05:.4f} ± {spread:.4f}",
                       f"2.0500 ± {spread:.4f}", "3.00k", "18.0 kFLOPs", "0.000",
                       "", "", ""]  # fmt: skip
    # By pairs of seeds: each is 0.1 better, twice as large, as costly.
    assert fits[3][1:5:3] == ["MoD", f"1.9500 ± {spread:.4f}"]
    assert fits[3][8:] == ["-0.1000 ± 0.0000", "2.00", "1.00"]
    assert fits[4][:5:4] == ["2.00 GFLOPs", f"1.5500 ± {spread:.4f}"]
    assert fits[5][2] == "8 blocks"
    assert fits[5][4] == "enclosed in 0 of 2 seeds" and not any(fits[5][5:])
    numbers = json.loads((tmp_path / "isoflop.json").read_text())
    assert [one["family"] for one in numbers] == ["dense", "MoD", "dense", "MoD"]
    assert numbers[0]["optima"][0]["loss"] == pytest.approx(2.0)
    assert numbers[3]["optima"] == [None, None]
    assert (tmp_path / "isoflop.png").read_bytes().startswith(b"\x89PNG")


def test_where_only_some_seeds_enclose_a_minimum_the_means_are_fitted():
    sizes = np.array([2e3, 4e3, 8e3])

    def curve(*optima):
        losses = np.stack([parabola(sizes, a, 0.5, size) for a, size in optima], axis=1)
        return isoflop.Curve(sizes, 6 * sizes, losses)

    base, other = curve((2.0, 3000), (2.0, 1500)), curve((1.9, 4000), (1.9, 4000))
    assert [one is None for one in base.optima()] == [False, True]
    mean = base.of_means()

    def cells(curve):
        found = isoflop.optimum_cells(["a", "b", "c"], curve, base)
        return [tables.text(found.get(title), form) for title, form in isoflop.FORMS.items()][2:]

    own = cells(base)
    assert own[0] == f"{mean.loss:.4f} (fit of the means; enclosed in 1 of 2 seeds)"
    assert not any(own[4:])
    better = cells(other)
    assert better[0] == "1.9000 ± 0.0000"
    assert better[4:6] == [f"{1.9 - mean.loss:.4f}", f"{4000 / mean.parameters:.2f}"]


def test_bad_grids_and_missing_runs_are_one_line(grid, tmp_path, capsys):
    path = tmp_path / "grid.py"
    path.write_text(GRID.replace("(2, 4, 8)", "(2, 4)"))
    with pytest.raises(UsageError, match="2 sizes; a parabola needs three"):
        isoflop.load_grid(path)
    path.write_text(GRID.replace("families=", "family="))
    with pytest.raises(UsageError, match="'family' is not a key of a grid .*did you mean 'famil"):
        isoflop.load_grid(path)
    for before, after, words in (
        ("(2e9, 1e9)", "()", "budgets is empty"),
        ("(2e9, 1e9)", "(1e9, 0)", "budgets=.*: expected numbers"),
        ("(2e9, 1e9)", "(1e9, float('nan'))", "budgets=.*: expected numbers"),
        ("families={", "families=None and {", "families=None: expected a dict"),
        ("sizes={", "sizes={} and {", "sizes is empty"),
        ("return dict", "dict", r"get_grid\(\) gave None"),
    ):
        assert before in GRID
        path.write_text(GRID.replace(before, after))
        with pytest.raises(UsageError, match=words):
            isoflop.load_grid(path)
    with pytest.raises(UsageError, match=r"has no function get_sweep\(\)"):
        sweep.load_sweep(path)
    path.write_text(GRID)
    assert isoflop.main(["--grid", str(path), "--workdir", str(tmp_path), "--table-only"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("efx: error: cannot read") and "Traceback" not in said


def test_a_run_that_has_not_ended_is_one_line(grid, tmp_path, capsys):
    everywhere = itertools.product(grid["budgets"], grid["families"])
    fake_runs(grid, tmp_path, {point: (2.0, 3000) for point in everywhere})
    run = sweep.folder(tmp_path, isoflop.run_name("MoD", "4 blocks", 2e9), 1)
    start, end = (run / "metrics.jsonl").read_text().splitlines()
    how = ["--grid", str(tmp_path / "grid.py"), "--workdir", str(tmp_path), "--table-only"]
    for change, words in (
        ({"flops": 1e9}, "1.00 GFLOPs of training, its budget is 2.00 GFLOPs"),
        ({"eval/loss": None}, "no held-out loss"),
    ):
        (run / "metrics.jsonl").write_text(f"{start}\n{json.dumps(json.loads(end) | change)}\n")
        assert isoflop.main(how) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(run) in said and words in said
