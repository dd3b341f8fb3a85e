"""Runs that start from other runs, and capacities that change while a run trains."""

import io
import shutil

import jax
import numpy as np
import pytest
from new_rules import new_rules  # noqa: F401 (a fixture)
from test_train import text, tiny  # noqa: F401 (a fixture)

from efx.config.load import config_of_run, to_config
from efx.configs import mod
from efx.layers import flops
from efx.logging import read_metrics
from efx.run_dir import CHECKPOINTS
from efx.train import inference, setup, trainer

pytestmark = pytest.mark.usefixtures("one_device")
DENSE = {"mesh.data": -1, "model.depth": 1, "model.depth_routing.kind": "none", "steps": 1}
ROUTED = {"mesh.data": -1, "model.depth": 1, "model.depth_routing.every": 1, "steps": 4}


def arrays(folder):
    """{path: array} of a run's newest parameters."""
    params = inference.restore(config_of_run(folder), folder)[2]
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def run(folder, config):
    return trainer.train_and_evaluate(config, folder)


def training_rows(folder):
    return [row for row in read_metrics(folder) if "train/loss" in row]


def assert_same_parameters(folder, other):
    expected, got = arrays(folder), arrays(other)
    assert expected.keys() == got.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def resume(folder, copy, step):
    """Repeat a run from a checkpoint in a copy of its folder without the last one, of `step`."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / CHECKPOINTS / str(step))
    run(copy, config_of_run(folder))


# ---- from another run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(text, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("dense") / "run"
    run(folder, tiny(text, **DENSE))
    return folder


def test_only_new_parameters_train(text, dense, tmp_path):  # noqa: F811
    changes = {**ROUTED, **mod.VARIANTS["router_only"], "init.run": str(dense)}
    run(tmp_path / "run", tiny(text, **changes))
    before, after = arrays(dense), arrays(tmp_path / "run")
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    new = {path for path in after if path not in before}
    assert new and all("router" in path for path in new)
    first, *_, last = training_rows(tmp_path / "run")
    assert last["losses/router_bce"] < first["losses/router_bce"]
    # Beside the forward pass a step computes the gradients of the router and of the head's input.
    e = setup.experiment(to_config(config_of_run(tmp_path / "run")))
    parts = e.ledger.nominal
    sequence = sum(parts.values()) + parts["router"] + parts["head"]
    tokens = last["step"] * e.tokens_per_step
    assert last["flops"] == pytest.approx(tokens * sequence / e.ledger.length, rel=0.01)
    ratio = last["flops"] / (tokens * e.ledger.nominal_per_token)
    executed = flops.executed(e.model, e.config.data.seq_len, e.config.data.batch_size)
    assert last["flops_realised"] == pytest.approx(last["step"] * ratio * executed)


# ---- capacities that change ----------------------------------------------------------------------


STAGES = {
    **ROUTED,
    "steps": 6,
    "model.depth_routing.capacity": 0.25,
    "model.depth_routing.capacity_stages": ((0.34, 1.0), (0.67, 0.5)),
}


@pytest.fixture(scope="module")
def staged(text, tmp_path_factory):  # noqa: F811
    """A run whose steps 1-2 have the capacity 1, 3-4 0.5, 5-6 0.25."""
    folder = tmp_path_factory.mktemp("staged") / "run"
    run(folder, tiny(text, **STAGES))
    return folder


def flops_of(experiment, stages):
    """The logged {"flops", "flops_realised"} of steps in these stages."""
    e = experiment
    nominal = [stage.ledger.train_flops(e.tokens_per_step) for stage in stages]
    shape = e.config.data.seq_len, e.config.data.batch_size
    realised = [3 * flops.executed(stage.model, *shape) for stage in stages]
    return {"flops": np.cumsum(nominal), "flops_realised": np.cumsum(realised)}


def test_capacity_goes_through_its_stages(staged):
    e = setup.experiment(to_config(config_of_run(staged)))
    assert [stage.start for stage in e.stages] == [0, 2, 4]
    rows = training_rows(staged)
    # (selected and predicted / predicted) * (predicted / all) / (selected and predicted / selected)
    precision, decided, recall = (
        np.array([row[f"router/{name}"] for row in rows])
        for name in ("precision", "decided_fraction", "recall")
    )
    np.testing.assert_allclose(precision * decided / recall, [1, 1, 0.5, 0.5, 0.25, 0.25])
    expected = flops_of(e, [e.stages[i] for i in (0, 0, 1, 1, 2, 2)])
    assert np.all(np.diff(expected["flops"], 2)[[0, 2]] < 0)
    for name, values in expected.items():
        np.testing.assert_allclose([row[name] for row in rows], values)


def test_a_run_resumed_inside_a_stage_is_the_uninterrupted_run(staged, tmp_path):
    resume(staged, tmp_path / "parts", 6)
    assert_same_parameters(staged, tmp_path / "parts")
    losses, resumed = (
        [row["train/loss"] for row in training_rows(folder)]
        for folder in (staged, tmp_path / "parts")
    )
    assert losses == resumed


def test_a_stage_has_thresholds_of_its_own(text, tmp_path):  # noqa: F811
    """The selected fraction is near the stage's capacity from its second step on."""
    changes = {
        **ROUTED,
        "steps": 8,
        "checkpoint.every": 0,
        "model.depth_routing.capacity_stages": ((0.5, 1.0),),
        "model.depth_routing.train_selection": "threshold",
        "model.depth_routing.threshold_warmup": 2,
        "model.depth_routing.causal_decision": "threshold",
        "optim.learning_rate": 1e-4,
    }
    run(tmp_path / "run", tiny(text, **changes))
    decided = np.array([row["router/decided_fraction"] for row in training_rows(tmp_path / "run")])
    assert np.all(decided[1:4] > 0.9) and np.all(np.abs(decided[5:] - 0.25) < 0.2)


@pytest.mark.parametrize("selection", ["first", "threshold"])
def test_a_checkpoint_is_evaluated_and_sampled_at_the_capacity_of_its_stage(
    selection,
    new_rules,  # noqa: F811
    text,  # noqa: F811
    tmp_path,
):
    """In training, where the log names the capacity, and afterwards."""
    changes = {
        **STAGES,
        "checkpoint.every": 1,
        "checkpoint.keep_last": 9,
        "evaluate.every": 1,
        "sample.every": 0,
        "model.depth_routing.train_selection": selection,
        "model.depth_routing.causal_decision": "threshold",
    }
    folder = tmp_path / "run"
    run(folder, tiny(text, **changes))
    rows = {row["step"]: row for row in read_metrics(folder) if "eval/loss" in row}
    capacity = [rows[step]["eval/router/capacity"] for step in range(1, 7)]
    assert capacity == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    for step, row in rows.items():
        routed, overflow = (row[f"eval/router/{name}_fraction"] for name in ("routed", "overflow"))
        assert overflow < 0.02 and abs(routed - row["eval/router/capacity"]) < 0.2, step
    for step in (2, 4):
        again = inference.evaluate(config_of_run(folder), folder, step)
        assert again["eval/loss"] == rows[step]["eval/loss"]
        sampled = inference.sample(config_of_run(folder), folder, step, io.StringIO())
        assert sampled["overflow"] == 0
        assert abs(sampled["routed_fraction"] - rows[step]["eval/router/capacity"]) < 0.2


def test_nominal_flops_of_stages_decide_the_steps(text):  # noqa: F811
    config = tiny(text, **STAGES | {"steps": 0, "train_flops": 1e10})
    e = setup.experiment(to_config(config))
    assert e.flops(e.steps) == pytest.approx(1e10, rel=0.02)
    assert e.flops(0) == 0
    assert e.flops(1) == e.stages[0].ledger.train_flops(e.tokens_per_step)
