"""Runs that start from other runs, and capacities that change while a run trains."""

import shutil

import jax
import numpy as np
import pytest
from test_train import text, tiny  # noqa: F401 (a fixture)

from efx import build, flops, models, train
from efx.checkpoint import restore_params
from efx.configs import mod
from efx.errors import UsageError
from efx.metrics import read_metrics
from efx.runfolder import CHECKPOINTS

pytestmark = pytest.mark.usefixtures("one_device")
DENSE = {"mesh.data": -1, "model.depth_routing.kind": "none", "steps": 3}


def arrays(folder):
    """{path: array} of a run's newest parameters."""
    model = build.experiment(CONFIGS[folder]).model
    shapes = models.unboxed_shapes(model)["params"]
    params, _ = restore_params(folder / CHECKPOINTS, shapes)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


CONFIGS = {}  # of the runs made here, by folder


def run(folder, config):
    CONFIGS[folder] = config
    return train.train_and_evaluate(config, folder)


@pytest.fixture(scope="module")
def dense(text, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("dense") / "run"
    run(folder, tiny(text, **DENSE))
    return folder


@pytest.mark.parametrize(
    "variant, missing", [("router_only", "router"), ("predictor_only", "predictor")]
)
def test_only_what_is_new_trains(text, dense, tmp_path, capsys, variant, missing):  # noqa: F811
    changes = {"mesh.data": -1, "steps": 4, **mod.VARIANTS[variant], "init.run": str(dense)}
    if variant == "predictor_only":  # of a model that has routers
        changes["init.missing"] = r".*/(router|predictor/.*)"
    run(tmp_path / "run", tiny(text, **changes))
    said = capsys.readouterr().out
    assert f"starting from {dense}" in said and f"left unchanged: layers/block_1/{missing}" in said
    before, after = arrays(dense), arrays(tmp_path / "run")
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    new = {path for path in after if path not in before}
    assert new and all("router" in path or "predictor" in path for path in new)
    rows = [r for r in read_metrics(tmp_path / "run") if "train/loss" in r]
    name = {"router_only": "router_bce", "predictor_only": "predictor_bce"}[variant]
    assert rows[-1][f"losses/{name}"] < rows[0][f"losses/{name}"]


def test_what_the_other_run_lacks_must_be_named(text, dense, tmp_path):  # noqa: F811
    config = tiny(text, **{"mesh.data": -1, "init.run": str(dense)})
    with pytest.raises(UsageError, match="layers/block_1/router"):
        train.train_and_evaluate(config, tmp_path / "run")
    config.init.run = str(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="config.init.run=.*there is no such run folder"):
        train.train_and_evaluate(config, tmp_path / "other")


AVERAGED = {"optim.name": "schedule_free_adamw", "optim.schedule.kind": "constant"}
STILL = {"optim.learning_rate": 1e-9, "optim.weight_decay": 0.0}


@pytest.mark.parametrize("optimiser", [AVERAGED, {}], ids=["averages too", "averages nothing"])
def test_a_run_starts_from_the_averages_that_another_is_evaluated_with(
    text,  # noqa: F811
    tmp_path,
    optimiser,
):
    """Property: what a run starts from is the model that was evaluated. Of an optimiser that
    averages it was the place of the gradient, and the new optimiser averaged with random
    parameters, those it had been made with: after a step of no size nothing was left."""
    averaged = {**DENSE, **AVERAGED, "optim.learning_rate": 0.01, "steps": 12}
    first = run(tmp_path / "first", tiny(text, **averaged))
    changes = {"init.run": str(tmp_path / "first"), **STILL, "steps": 1}
    second = run(tmp_path / "second", tiny(text, **{**DENSE, **optimiser, **changes}))
    assert second["eval/loss"] == pytest.approx(first["eval/loss"], abs=1e-4)


STAGES = {
    "mesh.data": -1,
    "model.depth_routing.capacity": 0.25,
    "model.depth_routing.capacity_stages": ((0.34, 1.0), (0.67, 0.5)),
}


def test_steps_that_were_trained_are_counted_as_they_were(text, tmp_path, capsys):  # noqa: F811
    """Property: a run that goes on with more steps, and so with other stages, counts the FLOPs of
    the steps that it has trained; they were counted by stages that they never had. That it goes
    back to an earlier stage is said."""
    folder = tmp_path / "run"
    run(folder, tiny(text, **{**STAGES, "steps": 6}))
    capsys.readouterr()
    longer = tiny(text, **{**STAGES, "steps": 12})
    run(folder, longer)
    said = capsys.readouterr().err
    assert "with 12 steps instead of 6, the capacity at step 6 is 0.5 instead of 0.25" in said
    rows = [r for r in read_metrics(folder) if "train/loss" in r]
    e = build.experiment(longer)
    c = longer.data
    for name, of_step in (
        ("flops", lambda stage: stage.ledger.train_flops(e.tokens_per_step)),
        ("flops_realised", lambda stage: 3 * flops.executed(stage.model, c.seq_len, c.batch_size)),
    ):
        full, half, quarter = map(of_step, e.stages)
        steps = [full] * 2 + [half] * 2 + [quarter] * 2 + [half] * 2 + [quarter] * 4
        np.testing.assert_allclose([r[name] for r in rows], np.cumsum(steps))


def test_capacity_goes_through_its_stages(text, tmp_path):  # noqa: F811
    """Steps 1-2 at 1, 3-4 at 0.5, 5-6 at 0.25; the books count each as what it was."""
    config = tiny(text, **STAGES)
    e = build.experiment(config)
    assert [stage.start for stage in e.stages] == [0, 2, 4]
    assert e.model.config.depth_routing.capacity == 0.25
    steps = [e.stages[i].ledger.train_flops(e.tokens_per_step) for i in (0, 0, 1, 1, 2, 2)]
    full = build.experiment(tiny(text, **DENSE)).ledger.train_flops(e.tokens_per_step)
    router = 3 * 2 * 32 * e.tokens_per_step
    assert steps[0] == full + router and steps[0] > steps[2] > steps[4]
    run(tmp_path / "straight", config)
    rows = [r for r in read_metrics(tmp_path / "straight") if "train/loss" in r]
    np.testing.assert_allclose([r["flops"] for r in rows], np.cumsum(steps))
    # What is decided and computed, of what is decided and of what is computed.
    precision, decided, recall = (
        np.array([r[f"router/{name}"] for r in rows])
        for name in ("precision", "decided_fraction", "recall")
    )
    np.testing.assert_allclose(precision * decided / recall, [1, 1, 0.5, 0.5, 0.25, 0.25])
    c = config.data
    traced = [3 * flops.executed(e.stages[i].model, c.seq_len, c.batch_size) for i in (0, 1, 2)]
    assert traced[0] > traced[1] > traced[2]
    expected = np.cumsum(np.repeat(traced, 2))
    np.testing.assert_array_equal([r["flops_realised"] for r in rows], expected)
    # Stopped inside a stage and resumed: the same parameters, bit for bit.
    shutil.copytree(tmp_path / "straight", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / CHECKPOINTS / "6")
    run(tmp_path / "parts", config)
    straight, parts = arrays(tmp_path / "straight"), arrays(tmp_path / "parts")
    for path, value in straight.items():
        np.testing.assert_array_equal(parts[path], value, err_msg=path)


def test_a_stage_has_thresholds_of_its_own(text, tmp_path):  # noqa: F811
    """Property: what the threshold routes is near the capacity of the stage. Having followed the
    scores of a stage that computes all tokens, it let all pass for the time of its average, and
    the first of each row filled all the room that there is. Resumed where a stage begins it is the
    same, bit for bit."""
    changes = {
        "mesh.data": -1,
        "steps": 12,
        "checkpoint.every": 6,
        "model.depth_routing.capacity_stages": ((0.5, 1.0),),
        "model.depth_routing.train_selection": "threshold",
        "model.depth_routing.threshold_warmup": 2,
        "optim.learning_rate": 1e-4,
        "model.depth_routing.causal": "threshold",
    }
    config = tiny(text, **changes)
    run(tmp_path / "straight", config)
    rows = [r for r in read_metrics(tmp_path / "straight") if "train/loss" in r]
    decided = np.array([r["router/decided_fraction"] for r in rows])
    assert np.all(decided[1:6] > 0.9) and np.all(np.abs(decided[7:] - 0.25) < 0.2)
    shapes = {"state": models.unboxed_shapes(build.experiment(config).model)["state"]}
    averages, _ = restore_params(
        tmp_path / "straight" / CHECKPOINTS, shapes, collection=("variables",)
    )
    followed = [
        int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(averages)
        if path[-1].key == "quantile_steps"
    ]
    assert followed == [6]  # the steps of the stage, all of them
    shutil.copytree(tmp_path / "straight", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / CHECKPOINTS / "12")
    run(tmp_path / "parts", config)
    straight, parts = arrays(tmp_path / "straight"), arrays(tmp_path / "parts")
    for path, value in straight.items():
        np.testing.assert_array_equal(parts[path], value, err_msg=path)


def test_flops_of_stages_decide_the_steps(text, monkeypatch):  # noqa: F811
    """Nominal ones, for which nothing is traced."""
    monkeypatch.setattr(flops, "executed", None)
    config = tiny(text, **STAGES, **{"steps": 0, "train_flops": 1e10})
    e = build.experiment(config)
    assert e.flops(e.steps) == pytest.approx(1e10, rel=0.02)
    assert e.flops(0) == 0
    assert e.flops(1) == e.stages[0].ledger.train_flops(e.tokens_per_step)


@pytest.mark.parametrize(
    "stages", [((0.5, 1.5),), ((0.5, 0.0),), ((0.6, 0.5), (0.3, 0.5)), ((1.0, 0.5),), ((0.5,),)]
)
def test_bad_stages(text, stages):  # noqa: F811
    with pytest.raises(UsageError, match="config.model.depth_routing.capacity_stages"):
        build.experiment(tiny(text, **{**STAGES, "model.depth_routing.capacity_stages": stages}))
