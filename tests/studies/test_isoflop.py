"""isoFLOP studies: fits of known laws and published numbers, reuse of points, a whole study."""

import json
import pathlib

import numpy as np
import pytest
from refusals import refused
from study_helpers import make_runs_here

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

import pandas as pd

from efx import run_dir
from efx.logging import tables
from efx.studies import isoflop, scaling
from efx.studies import runs as runs_lib

LAW = scaling.Law(E=1.7, A=60.0, B=400.0, a=0.4, b=0.5)
SIZES = np.geomspace(1e4, 3e5, 6)


def points_of(law, family, noise=0.0, flops_of=lambda n: 6 * n, rng=None, sizes=SIZES):
    """Points of a family that follows a law, at two budgets, with three seeds."""
    rows = []
    for budget in (1e12, 4e12):
        for size in sizes:
            tokens = budget / flops_of(size)
            for seed in range(3):
                error = noise * rng.normal() if noise else 0.0
                rows.append({
                    "family": family, "size": f"{size:.0f}", "budget": budget, "rate": None,
                    "seed": seed, "parameters": size, "tokens": tokens, "flops": budget,
                    "loss": law.loss(size, tokens) + error,
                })  # fmt: skip
    return pd.DataFrame(rows)


def analyse(points, draws=100, **grid):
    grid = {"families": dict.fromkeys(points.family), "fit_within": None, "against": ()} | grid
    return isoflop.analyse(points, grid, draws)


def test_a_law_is_found_exactly():
    means = scaling.mean_points(points_of(LAW, "dense"))
    law, fitted = scaling.fit_law(means, means.loss.to_numpy())
    np.testing.assert_allclose(
        [law.E, law.A, law.B, law.a, law.b], [1.7, 60, 400, 0.4, 0.5], rtol=1e-4
    )
    # At the optimum of budget C with 6 N FLOPs a token, N^(a + b) = (a A / (b B)) (C / 6)^b.
    size, _ = scaling.LawFit(means, 0, None).optimum(law, 2e12)
    expected = (0.4 * 60 / (0.5 * 400) * (2e12 / 6) ** 0.5) ** (1 / 0.9)
    np.testing.assert_allclose(size, expected, rtol=2e-3)
    assert np.isnan(scaling.LawFit(means, 0, None).optimum(law, 1e20)).all()  # far from the sizes


def test_a_parabola_is_found_exactly_and_needs_enclosed_minima():
    x = np.log(SIZES)

    def optimum(losses, seeds=1):
        points = pd.DataFrame({"parameters": SIZES, "loss": losses, "n": seeds})
        return scaling.parabola_optimum(points)

    np.testing.assert_allclose(optimum(2 + 0.1 * (x - 11) ** 2), [np.exp(11), 2.0], rtol=1e-6)
    for losses in (x, -((x - 11) ** 2), 2 + 0.1 * (x - 20) ** 2):
        assert np.isnan(optimum(losses)).all()
    outlier = 2 + 0.1 * (x - 11) ** 2 + 0.1 * (x == x[0])
    few, many = optimum(outlier, [1, 9, 9, 9, 9, 9]), optimum(outlier, [9, 1, 1, 1, 1, 1])
    assert abs(few[1] - 2) < abs(many[1] - 2)  # points count as often as they have seeds


@pytest.mark.parametrize("name, fit_within", [
    ("isoflop", None), ("mod_evidence", 5.0), ("mod_evidence_accelerator", None),
])  # fmt: skip
def test_published_optima_come_out_again(root, name, fit_within):
    points, _ = tables.read_csv(root / f"results/{name}.csv")
    published, _ = tables.read_csv(root / f"results/{name}_optima.csv")
    optima, *_ = analyse(points, draws=0, fit_within=fit_within)
    columns = ["budget", "family", "method", "loss"]
    pd.testing.assert_frame_equal(optima[columns], published[columns], atol=1e-4, rtol=0)


def test_the_interval_and_the_speedup_of_a_known_difference():
    """MoD reaches the loss of dense with two thirds of the FLOPs a token."""
    rng = np.random.default_rng(1)
    dense = points_of(LAW, "dense", 0.01, rng=rng)
    mod = points_of(LAW, "MoD", 0.01, flops_of=lambda n: 4 * n, rng=rng)
    optima, differences, *_ = analyse(pd.concat([dense, mod]))
    row = differences[(differences.method == "law") & (differences.budget == 1e12)].iloc[0]
    dense_loss, mod_loss = (
        scaling.LawFit(scaling.mean_points(points), 0, None).optimum(LAW, 1e12)[1]
        for points in (dense, mod)
    )
    assert row.low < mod_loss - dense_loss < row.high < 0
    speedup = optima[(optima.method == "law") & (optima.family == "MoD")].iloc[0]
    assert speedup.speedup_flops_low < 1.5 < speedup.speedup_flops_high < 2


def test_the_same_family_twice_is_equivalent():
    rng = np.random.default_rng(2)
    points = pd.concat([points_of(LAW, name, 0.002, rng=rng) for name in ("a", "b")])
    _, differences, *_ = analyse(points)
    assert (differences.equivalence_p < 0.05).all()
    assert (differences.low < 0).all() and (differences.high > 0).all()


def test_intervals_from_few_points_cover_the_true_loss():
    """Percentiles without the uncertainty of the variance would be too narrow."""
    covered, cases = 0, 20
    for case in range(cases):
        rng = np.random.default_rng(case)
        points = points_of(LAW, "dense", 0.02, rng=rng, sizes=SIZES[1:5])
        means = scaling.mean_points(points[points.seed == 0])
        fit = scaling.LawFit(means, 40, rng)
        low, high = scaling.interval(fit.losses[1e12][1:])
        covered += low < fit.optimum(LAW, 1e12)[1] < high
    assert covered > 0.88 * cases


def test_a_fit_without_misfit_to_look_at_has_no_interval():
    """Six points and five parameters: too little is known about the error."""
    rng = np.random.default_rng(3)
    points = [points_of(LAW, name, 0.001, rng=rng, sizes=SIZES[3:]) for name in ("a", "b")]
    optima, differences, *_ = analyse(pd.concat(points), against=("b",))
    rows = optima[(optima.method == "law") & (optima.budget == 1e12)]
    assert len(rows) == 2 and rows.loss.notna().all() and rows.loss_low.isna().all()
    rows = differences[(differences.method == "law") & (differences.budget == 1e12)]
    assert rows.difference.notna().all() and rows[["low", "equivalence_p"]].isna().all(axis=None)
    assert np.isnan(scaling.equivalence_p(np.array([0.1, np.nan, np.nan])))  # few have an optimum


def test_the_first_family_of_the_grid_is_the_baseline():
    points = pd.concat([points_of(LAW, name) for name in ("MoD", "dense")])
    _, differences, *_ = analyse(points, draws=0, families={"dense": {}, "MoD": {}})
    assert {*differences.family} == {"MoD"} and {*differences.against} == {"dense"}


def test_sizes_of_equal_parameters_are_not_fitted():
    points = points_of(LAW, "dense").assign(parameters=1e4)
    optima, *_, laws = analyse(points)
    assert not laws and {*optima.method} == {"measured"}


def test_a_loss_that_is_not_finite_is_refused():
    points = points_of(LAW, "dense")
    points.loc[3, "loss"] = np.nan
    refused(lambda: analyse(points), "dense", "optim.learning_rate")


NAMES = ["MoD #2", "#1", 'a, "b"', "two\nlines", "a\r\nb", "None", "NA", "007", "1e3", " x ", "±|"]


def test_names_and_headers_of_results_round_trip(tmp_path):
    table = points_of(LAW, "dense")[: len(NAMES)].assign(family=NAMES, size=NAMES, rate=0.01)
    table.loc[2, "loss"] = np.nan
    header = {"title": "a # b: c", "command": "study '--grid=a\nb'", "machine": ["x", "y"]}
    tables.write_csv(tmp_path / "points.csv", table, header)
    read, header = tables.read_csv(tmp_path / "points.csv")
    pd.testing.assert_frame_equal(read, table, check_dtype=False)
    assert header.pop("machine") == ["x", "y"]
    assert header == {"title": ["a # b: c"], "command": ["study '--grid=a b'"]}


# ---- grids and points --------------------------------------------------------------------------


@pytest.fixture
def here(root, monkeypatch):
    monkeypatch.chdir(root)


def settings_of_points(name, runs):
    """Return [(digest of a run's settings, that of its published point)]; each run has a point."""
    points, _ = tables.read_csv(pathlib.Path(f"results/{name}.csv"))
    points = points.set_index(["family", "size", "budget", "seed"])
    pairs = []
    for run in runs:
        key = tuple(run.labels[name] for name in points.index.names)
        rows = points.sort_index().loc[[key]]
        rate = run.labels["rate"]
        (settings,) = rows.settings if rate is None else rows.settings[rows.rate == rate]
        pairs.append((runs_lib.settings_digest(run.config()), settings))
    return pairs


def test_published_points_are_those_of_their_grid(here):
    loaded = isoflop.load_grid("configs/sweeps/isoflop.py")
    pairs = settings_of_points("isoflop", isoflop.final_runs(loaded, "w", (), {}))
    assert pairs and all(found == published for found, published in pairs)
    changed = isoflop.final_runs(loaded, "w", ("--config.optim.b2=0.9",), {})
    pairs = settings_of_points("isoflop", changed)
    assert not any(found == published for found, published in pairs)


def test_published_points_with_searched_rates_are_those_of_their_grid(here):
    # Its text is the code of packages, also of this extra.
    pytest.importorskip("transformers", reason="the extra `interop` is not installed")
    name, loaded = (
        "mod_evidence_own_rates",
        isoflop.load_grid("configs/sweeps/mod_evidence.py:rates"),
    )
    points, _ = tables.read_csv(pathlib.Path(f"results/{name}.csv"))
    selected = points[points.seed == loaded["rate_seed"]]
    rates = runs_lib.best_rates(selected, ["family", "size", "budget"])
    runs = isoflop.rate_runs(loaded, "w", ()) + isoflop.final_runs(loaded, "w", (), rates)
    # Controls were not scores when these were measured.
    routed = [run for run in runs if run.config().model.depth_routing.score == "router"]
    assert len(routed) == 41 + 15 < len(runs)
    assert all(found == published for found, published in settings_of_points(name, routed))


def test_settings_that_do_not_decide_the_result_do_not_matter(here):
    loaded = isoflop.load_grid("configs/sweeps/isoflop.py")
    run = isoflop.final_runs(loaded, "w", (), {})[0]
    same = isoflop.final_runs(loaded, "w", ("--config.log.every=7", "--config.seed=4"), {})[0]
    assert runs_lib.settings_digest(run.config()) == runs_lib.settings_digest(same.config())


@pytest.mark.parametrize("change, name", [
    ({"budgets": ()}, "budgets"),
    ({"budgets": 5e11}, "budgets"),
    ({"seeds": 3}, "seeds=3"),
    ({"sizes": {"1": {}, "2": {}}}, "sizes"),
    ({"against": ("x",)}, "against"),
    ({"seeds": (0, 0)}, "seeds"),
    ({"learning_rates": (1e-3, 2e-3)}, "rate_seed"),
    ({"learning_rates": (1e-3, 2e-3), "rate_seed": 0}, "rate_seed=0"),
    ({"learning_rates": {"1": (1e-3,), "2": (1e-3,)}, "rate_seed": 9}, "learning_rates"),
    ({"families": {"d": {"model.width": {"1": 8, "2": 16}}}}, "model.width"),
    ({"sizs": {}}, "'sizes'"),
])  # fmt: skip
def test_bad_grids_are_refused(change, name, tmp_path):
    spec = dict(config="mod", seeds=(0,), budgets=(1e10,), families={"d": {}})
    spec |= {"sizes": {"1": {}, "2": {}, "3": {}}} | change
    path = tmp_path / "grid.py"
    path.write_text(f"def get_grid():\n    return {spec!r}\n")
    refused(lambda: isoflop.load_grid(str(path)), name)


GRID = """
BASE = {"model.depth": 2, "model.attention.num_heads": 1, "data.max_bytes": 100000,
        "evaluate.max_batches": 1, "sample.every": 0, "data.batch_size": 2}

def get_grid():
    return dict(config="mod:smoke,dense", seeds=(0, 1), budgets=(1e8,), families={"dense": {}},
                sizes={str(w): BASE | {"model.width": w} for w in (8, 16, 24)},
                learning_rates=(1e-3, 1e-2), rate_seed=9)
"""


@pytest.fixture
def started(monkeypatch):
    return make_runs_here(monkeypatch)


def test_a_whole_study(tmp_path, here, started, one_device, capsys):
    (tmp_path / "grid.py").write_text(GRID)
    grid, workdir = f"--grid={tmp_path}/grid.py", tmp_path / "w"
    commands = [grid, f"--workdir={workdir}", "--print-commands"]
    assert isoflop.main(commands) == 0
    assert capsys.readouterr().out.count("config.optim.learning_rate") == 6
    assert isoflop.main([grid, f"--workdir={workdir}"]) == 0
    assert len(started) == 3 * 2 + 3 * 2  # rates, then seeds
    capsys.readouterr()
    assert isoflop.main(commands) == 0 and not capsys.readouterr().out
    points, _ = tables.read_csv(workdir / "points.csv")
    assert points.groupby("seed").size().to_dict() == {0: 3, 1: 3, 9: 6}
    optima, _ = tables.read_csv(workdir / "optima.csv")
    assert optima.seeds[0] == 2  # the seed that selected the rates is not used again
    assert (workdir / "curves.png").exists() and (workdir / "table.md").exists()
    text = json.dumps(run_dir.RunDir(started[0].folder).record["text"], sort_keys=True)
    assert {*points.text} == {run_dir.checksum(text)[:12]}  # as in published points
    assert isoflop.main([grid, f"--workdir={workdir}"]) == 0 and len(started) == 12
