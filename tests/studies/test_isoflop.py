"""isoFLOP studies: fits of known laws and published numbers, reuse of points, a whole study."""

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from efx import main
from efx.studies import isoflop, results, scaling
from efx.studies import runs as runs_lib

LAW = scaling.Law(E=1.7, A=60.0, B=400.0, a=0.4, b=0.5)
SIZES = np.geomspace(1e4, 3e5, 6)


def points_of(law, family, noise=0.0, seeds=3, flops_of=lambda n: 6 * n, time=1e-12, rng=None):
    """Points of a family that follows a law, at two budgets."""
    rng = rng or np.random.default_rng(0)
    rows = []
    for budget in (1e12, 4e12):
        for size in SIZES:
            tokens = budget / flops_of(size)
            for seed in range(seeds):
                rows.append({
                    "family": family, "size": f"{size:.0f}", "budget": budget, "rate": None,
                    "seed": seed, "parameters": size, "tokens": tokens, "flops": budget,
                    "seconds": budget * time, "loss": law.loss(size, tokens) + noise * rng.normal(),
                })  # fmt: skip
    return pd.DataFrame(rows)


def grid(**changes):
    return {"fit_within": None, "against": ()} | changes


def test_a_law_is_found_exactly():
    means = scaling.mean_points(points_of(LAW, "dense"))
    law, fitted = scaling.fit_law(means, means.loss.to_numpy())
    np.testing.assert_allclose(
        [law.E, law.A, law.B, law.a, law.b], [1.7, 60, 400, 0.4, 0.5], rtol=1e-4
    )
    # At the optimum of budget C with 6 N FLOPs a token, N^(a + b) = (a A / (b B)) (C / 6)^b.
    size, _ = scaling.law_optimum(law, means, 2e12)
    expected = (0.4 * 60 / (0.5 * 400) * (2e12 / 6) ** 0.5) ** (1 / 0.9)
    np.testing.assert_allclose(size, expected, rtol=2e-3)


def test_a_parabola_is_found_exactly_and_needs_enclosed_minima():
    x = np.log(SIZES)
    size, loss, _ = scaling.parabola(SIZES, 2 + 0.1 * (x - 11) ** 2, np.ones(6))
    np.testing.assert_allclose([size, loss], [np.exp(11), 2.0], rtol=1e-6)
    for losses in (x, -((x - 11) ** 2), 2 + 0.1 * (x - 20) ** 2):
        assert np.isnan(scaling.parabola(SIZES, losses, np.ones(6))[0])


@pytest.mark.parametrize("name, fit_within", [("isoflop", None), ("mod_evidence", 5.0)])
def test_published_optima_come_out_again(root, name, fit_within):
    points, _ = results.read(name, root / "results")
    published, _ = results.read(f"{name}_optima", root / "results")
    optima, _, _ = isoflop.analyse(points, grid(fit_within=fit_within), draws=2)
    columns = ["budget", "family", "method", "loss"]
    pd.testing.assert_frame_equal(optima[columns], published[columns], atol=1e-4, rtol=0)


def test_intervals_and_speedups_of_a_known_difference():
    """MoD reaches the loss of dense with half the FLOPs a token, and a tenth more time a FLOP."""
    rng = np.random.default_rng(1)
    dense = points_of(LAW, "dense", 0.01, rng=rng)
    mod = points_of(LAW, "MoD", 0.01, flops_of=lambda n: 3 * n, time=1.1e-12, rng=rng)
    optima, differences, _ = isoflop.analyse(pd.concat([dense, mod]), grid(), draws=100)
    row = differences[(differences.method == "law") & (differences.budget == 1e12)].iloc[0]
    dense_loss, mod_loss = (
        scaling.law_optimum(LAW, scaling.mean_points(points), 1e12)[1] for points in (dense, mod)
    )
    assert row.low < mod_loss - dense_loss < row.high < 0
    speedup = optima[(optima.method == "law") & (optima.family == "MoD")].iloc[0]
    assert speedup.speedup_flops_low < 2 < speedup.speedup_flops_high
    np.testing.assert_allclose(speedup.speedup_seconds, speedup.speedup_flops / 1.1, rtol=1e-6)


def test_the_same_family_twice_is_equivalent():
    rng = np.random.default_rng(2)
    points = pd.concat([points_of(LAW, name, 0.002, rng=rng) for name in ("a", "b")])
    _, differences, _ = isoflop.analyse(points, grid(), draws=100)
    assert (differences.equivalence_p < 0.05).all()
    assert (differences.low < 0).all() and (differences.high > 0).all()


def test_a_loss_that_is_not_finite_is_refused():
    points = points_of(LAW, "dense")
    points.loc[3, "loss"] = np.nan
    refused(lambda: isoflop.analyse(points, grid()), "dense", "optim.learning_rate")


# ---- grids and points --------------------------------------------------------------------------


@pytest.fixture
def here(root, monkeypatch):
    monkeypatch.chdir(root)


def test_published_points_are_those_of_their_grid(here):
    """All settings, so that a study can add to them; of one seed, as seeds change nothing."""
    loaded = isoflop.load_grid("configs/sweeps/isoflop.py")
    points = isoflop.Points(["results/isoflop.csv"])
    runs = isoflop.final_runs(loaded, "w", (), {})
    assert not points.missing(runs)
    changed = isoflop.final_runs(loaded, "w", ("--config.model.width=24",), {})
    refused(lambda: points.missing(changed), "other settings")


def test_settings_that_do_not_decide_the_result_do_not_matter(here):
    loaded = isoflop.load_grid("configs/sweeps/isoflop.py")
    run = isoflop.final_runs(loaded, "w", (), {})[0]
    same = isoflop.final_runs(loaded, "w", ("--config.log.every=7", "--config.seed=4"), {})[0]
    assert isoflop.settings_digest(run.config()) == isoflop.settings_digest(same.config())


@pytest.mark.parametrize("change, name", [
    ({"budgets": ()}, "budgets"),
    ({"sizes": {"1": {}, "2": {}}}, "sizes"),
    ({"against": ("x",)}, "against"),
    ({"seeds": (0, 0)}, "seeds"),
    ({"learning_rates": (1e-3, 2e-3)}, "rate_seed"),
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


def test_a_whole_study(tmp_path, here, monkeypatch, one_device):
    started = []

    def start(run, cpus, processes):
        started.append(run)
        assert main.main(["efx", *run.arguments]) == 0

    monkeypatch.setattr(runs_lib, "start", start)
    (tmp_path / "grid.py").write_text(GRID)
    argv = [f"--grid={tmp_path}/grid.py", f"--workdir={tmp_path}/w"]
    assert isoflop.main(argv) == 0
    assert len(started) == 3 * 2 + 3 * 2  # rates, then seeds
    points = isoflop.read_points(tmp_path / "w/points.csv")
    assert {*points.seed} == {0, 1}  # the seed that selected the rates is not used again
    assert (tmp_path / "w/curves.png").exists() and (tmp_path / "w/table.md").exists()
    # From the points of another directory nothing is trained but the search of rates.
    again = [argv[0], f"--workdir={tmp_path}/v", f"--from={tmp_path}/w/points.csv"]
    monkeypatch.setattr(isoflop, "rate_runs", lambda *arguments: [])
    monkeypatch.setattr(isoflop, "best_rates", lambda points: {})
    rates = {tuple(row[:3]): row[3] for row in points[isoflop.KEY].itertuples(index=False)}
    final = isoflop.final_runs
    monkeypatch.setattr(isoflop, "final_runs", lambda g, w, e, r: final(g, w, e, rates))
    assert isoflop.main(again) == 0 and len(started) == 12
