"""The router probe finds the causes of made-up selections, and runs on a real run."""

import functools

import numpy as np
import pytest
from study_helpers import error_line, train

pytest.importorskip("pandas", reason="the extra `studies` is not installed")
pytest.importorskip("sklearn", reason="the extra `studies` is not installed")

import pandas as pd

from efx.studies import router_probe

ROWS, LENGTH, TYPES = 80, 64, 40


@functools.cache
def tokens():
    """80 rows: types by Zipf's law, an entropy with a part by type and a random part."""
    draw, count = np.random.default_rng(0), ROWS * LENGTH
    share = 1 / np.arange(1, TYPES + 1)
    token_N = draw.choice(TYPES, count, p=share / share.sum())
    position_N = np.tile(np.arange(LENGTH), ROWS)
    entropy_N = draw.gamma(2, 0.5, TYPES)[token_N] + draw.gamma(2, 1, count)
    columns = {"row": np.repeat(np.arange(ROWS), LENGTH), "position": position_N, "token": token_N}
    columns |= {"previous": np.where(position_N > 0, np.roll(token_N, 1), -1)}
    columns |= {"frequency": -np.log2(share / share.sum())[token_N], "entropy": entropy_N}
    return pd.DataFrame(columns | {"loss": draw.exponential(entropy_N)})


def noise():
    return np.random.default_rng(1).random(ROWS * LENGTH)


CAUSES = {
    "position": lambda t: t.position % 8 == 0,
    "token": lambda t: t.token.isin([0, 5, 7]),
    "bigram": lambda t: (t.previous < 3) ^ (t.token < 3),
    "entropy": lambda t: t.entropy > t.entropy.quantile(0.875),
}


@functools.cache
def figures(cause):
    selected_N = CAUSES[cause](tokens()).to_numpy(float)
    return router_probe.probe(tokens(), selected_N, selected_N - 0.9 + 0.05 * noise())


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_a_selection_is_found(cause):
    found = figures(cause)
    assert found[cause] > 0.85 and found[f"score_{cause}"] > 0.85 and found["all"] > 0.85


def test_features_that_are_not_the_cause_explain_nothing():
    assert abs(figures("position")["token"]) < 0.05
    assert abs(figures("token")["position"]) < 0.05
    assert abs(figures("token")["entropy_beyond_bigram"]) < 0.05
    assert figures("entropy")["entropy_beyond_bigram"] > 0.5
    assert figures("entropy")["entropy_correlation"] > 0.4


def test_chance_is_explained_by_nothing():
    found = router_probe.probe(tokens(), (noise() < 0.125).astype(float))
    assert max(found[name] for name in router_probe.FEATURES) < 0.02 and found["all"] < 0.02
    assert "score_token" not in found  # a control has no score


def test_tokens_without_a_decision_do_not_count():
    selected_N = CAUSES["token"](tokens()).to_numpy(float)
    selected_N[::3] = np.nan
    assert router_probe.probe(tokens(), selected_N)["token"] > 0.85


def test_a_block_that_computes_everything_has_nothing_to_explain():
    found = router_probe.probe(tokens(), np.ones(ROWS * LENGTH))
    assert found == {"selected_fraction": 1.0}


def test_a_block_that_selects_in_one_half_of_the_rows_only():
    selected_N = np.zeros(ROWS * LENGTH)
    selected_N[3] = 1.0
    for y in (selected_N, 1 - selected_N):
        assert -0.1 < router_probe.probe(tokens(), y)["token"] < 0.05


def test_a_probe_of_a_run(root, tmp_path, one_device, capsys):
    settings = ("steps=3", "data.max_bytes=600000")
    run = train(root, str(tmp_path / "mod"), "mod.py:smoke", *settings)
    argv = ["--workdir", run, "--tokens=2000", f"--out={tmp_path}/probe"]
    assert router_probe.main(argv) == 0
    table = pd.read_csv(tmp_path / "probe/probe.csv")
    assert [*table.block] == ["block_1", "block_3"] and (tmp_path / "probe/probe.png").exists()
    other = train(root, str(tmp_path / "other"), "mod.py:smoke", *settings, "optim.name=lion")
    capsys.readouterr()
    assert router_probe.main(["--workdir", run, other, f"--out={tmp_path}/no"]) == 2
    error_line(capsys, "config.optim.name")
    assert router_probe.main(["--workdir", run, "--tokens=0"]) == 2
    error_line(capsys, "--tokens=0")
