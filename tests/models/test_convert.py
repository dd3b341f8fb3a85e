"""--mode=convert: a dense run's model with routed blocks, which starts as its parent."""

import json
import shutil

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import edit_record
from test_import import TEXT, error_line, folder, imported, run  # noqa: F401
from test_interop import transformers  # noqa: F401

from efx import models, run_dir
from efx.config.load import config_of_run, to_config
from efx.layers import flops
from efx.logging import read_metrics
from efx.train import inference, optim, setup

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = {
    "data.seq_len": 16,
    "data.batch_size": 4,
    "log.tensorboard": False,
    "log.every": 1,
    "evaluate.every": 0,
    "evaluate.max_batches": 1,
    "sample.every": 0,
    "optim.schedule.warmup_steps": 1,
}
DENSE = {
    "model.width": 32,
    "model.attention.num_heads": 2,
    "model.init_std": 0.3,
    "model.depth_routing.kind": "none",
    "model.scan_layers": True,
    "steps": 2,
}


def converted(parent, workdir, *arguments, to="mod", **changes):
    flags = ("--mode=convert", "--from", parent, "--to", to, "--workdir", workdir)
    changes = {"optim.schedule.warmup_steps": 1, **changes}
    assert run(*flags, *arguments, **changes) == 0
    return workdir


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return {**SMALL, "data.source": f"text:{path}"}


@pytest.fixture(scope="module")
def parent(settings, tmp_path_factory):
    """A dense run with scanned layers."""
    run_path = tmp_path_factory.mktemp("runs") / "parent"
    changes = {**settings, **DENSE}
    assert run("--config", "mod:smoke", "--workdir", run_path, **changes) == 0
    return run_path


@pytest.fixture(scope="module")
def child(parent):
    """Its conversion, to routed blocks as by default."""
    return converted(parent, parent.parent / "child")


def record(run, changes):
    """Write other settings into the record of a run."""
    config = config_of_run(run)
    config.update_from_flattened_dict(changes)
    edit_record(run, lambda record: record | {"config": json.loads(config.to_json())})


def read(workdir):
    """(model, variables) of a run, unrolled."""
    e, _, params, averages = inference.restore(config_of_run(workdir), workdir)
    variables = models.unroll_variables(e.model, {"params": params, **averages})
    return models.unrolled(e.model), variables


def assert_equal_at_capacity_1(parent, child):
    """The capacity of the first stage. Bit for bit without compilation, as training selects and as
    evaluation decides."""
    (dense, before), (routed, after) = read(parent), read(child)
    assert [spec.capacity for spec in routed.specs() if spec.routing] == [1.0, 1.0]
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, dense.vocab_size, (2, 16)), jnp.int32)
    with jax.disable_jit():
        logits = dense.apply(before, tokens_BT)
        for selection in ("train", "causal"):
            found = routed.clone(selection=selection).apply(after, tokens_BT)
            np.testing.assert_array_equal(found, logits)


def test_at_capacity_1_a_converted_model_is_its_parent(parent, child):
    assert_equal_at_capacity_1(parent, child)


def test_a_converted_run_has_the_text_of_its_parent_and_records_it(parent, child):
    config, record = config_of_run(child), run_dir.RunDir(child).record
    routing = config.model.depth_routing
    assert (routing.kind, routing.gate, routing.causal_decision) == (
        "mod",
        "twice_sigmoid",
        "threshold",
    )
    assert config.train.teacher == str(parent) and config.losses.distill == 0
    assert record["converted"]["to"] == "mod" and record["converted"]["step"] == 2
    assert "teacher" not in record
    for name in ("tokenizer", "text"):
        assert record[name] == run_dir.RunDir(parent).record[name]


@pytest.mark.slow
def test_an_imported_run_is_converted(imported, tmp_path):  # noqa: F811
    child = converted(imported, tmp_path / "child", **{"model.depth_routing.every": 1})
    assert_equal_at_capacity_1(imported, child)
    record = run_dir.RunDir(child).record
    assert record["converted"]["step"] == 0 and "text" not in record


def test_every_second_block_is_dropped(parent, tmp_path):
    """The other blocks, and all around them, are the parent's."""
    run_path = converted(parent, tmp_path / "drop", to="layer_drop")
    (_, before), (half, after) = read(parent), read(run_path)
    assert half.config.depth == 2 and half.config.depth_routing.kind == "none"
    layers = before["params"]["layers"]
    layers = {"block_0": layers["block_0"], "block_1": layers["block_2"]}
    expected = dict(before["params"], layers=layers)
    families.assert_trees_close(after["params"], expected, rtol=0, atol=0)


@pytest.mark.slow
def test_blocks_whose_positions_go_by_their_number_are_not_dropped(settings, tmp_path, capsys):
    changes = settings | DENSE | {"model.scan_layers": False, "model.attention.no_rope_every": 2}
    assert run("--config", "mod:smoke", "--workdir", tmp_path / "parent", **changes) == 0
    flags = ("--mode=convert", "--from", tmp_path / "parent", "--to", "layer_drop")
    assert run(*flags, "--workdir", tmp_path / "drop") == 2
    assert "block 2" in error_line(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["routers", "adapters"])
def test_only_new_parameters_are_trained(parent, tmp_path, variant):
    """By a config of its own, whose model becomes the parent's."""
    config = ("--config", f"convert_mod:{variant}")
    changes = {"data.seq_len": 16, "adapter.sites": ".*/(query|up)"}
    run_path = converted(parent, tmp_path / "run", *config, **changes)
    config, (_, variables) = config_of_run(run_path), read(run_path)
    assert config.init.run == (str(parent) if variant == "adapters" else "")
    assert config.model.width == 32 and config.data.source == "stdlib"
    groups = optim.parameter_groups(config.optim, variables["params"])
    trained = {path for path, group in groups.items() if not group.frozen}
    ends = ("/router", *(("/adapter/down", "/adapter/up") if variant == "adapters" else ()))
    assert trained == {path for path in groups if path.endswith(ends)}
    assert all(any(path.endswith(end) for path in trained) for end in ends)


# ---- distillation from the parent ----------------------------------------------------------------


@pytest.fixture(scope="module")
def distilled(parent, tmp_path_factory):
    """(A conversion, a copy of it that has followed its parent for four steps)."""
    start, run_path = (tmp_path_factory.mktemp("distilled") / name for name in ("start", "run"))
    changes = {"losses.distill": 0.5, "steps": 4, "model.depth_routing.capacity_stages": "()"}
    converted(parent, start, **changes)
    shutil.copytree(start, run_path)
    assert run("--workdir", run_path, **{"checkpoint.every": 2}) == 0
    return start, run_path


@pytest.mark.slow
def test_a_converted_run_follows_its_parent(parent, distilled):
    """The distance is logged, and the teacher's FLOPs are counted."""
    _, run_path = distilled
    rows = [row for row in read_metrics(run_path) if "train/loss" in row]
    assert all(row["losses/distill"] > 0 for row in rows)
    objective = rows[-1]["train/loss"] + 0.5 * rows[-1]["losses/distill"]
    np.testing.assert_allclose(rows[-1]["train/objective"], objective, rtol=1e-5)
    e = setup.experiment(to_config(config_of_run(run_path)), run_dir.RunDir(run_path))
    teacher = e.teacher.model.ledger(16, "causal").nominal_per_token * e.tokens_per_step
    assert rows[-1]["flops"] == 4 * (e.ledger.train_flops(e.tokens_per_step) + teacher)
    forward = flops.executed(e.teacher.model, 16, 4, train=False)
    assert rows[-1]["flops_realised"] == 4 * (3 * flops.executed(e.model, 16, 4) + forward)
    assert rows[-1]["flops_teacher"] == 4 * forward
    record = run_dir.RunDir(run_path).record["teacher"]
    assert record["run"] == str(parent) and record["step"] == 2


@pytest.mark.slow
def test_another_teacher_is_refused(parent, distilled, tmp_path, capsys):
    start, _ = distilled
    student = tmp_path / "run"
    shutil.copytree(start, student)
    teacher = run_dir.RunDir(student).record["teacher"] | {"parameters": "0" * 32}
    edit_record(student, lambda record: record | {"teacher": teacher})
    assert run("--workdir", student, **{"train.teacher": parent}) == 2
    assert f"config.train.teacher={parent}" in error_line(capsys)


# ---- refusals ------------------------------------------------------------------------------------

# What the command gets, what is changed in the parent's config.json, what the message names.
REFUSED = {
    "unknown kind": ({"--to": "mode"}, {}, "--to=mode"),
    "routed parent": ({}, {"model.depth_routing.kind": "mod"}, "depth_routing.kind='mod'"),
    "adapted parent": ({}, {"adapter.kind": "lora"}, "config.adapter.kind='lora'"),
    "gate": ({"model.depth_routing.gate": "sigmoid"}, {}, "depth_routing.gate='sigmoid'"),
    "width": ({"model.width": 64}, {}, "config.model.width=64"),
    "tokenizer": ({"data.tokenizer": "bpe:300"}, {}, "config.data.tokenizer='bpe:300'"),
    "family": ({"--config": "latent:smoke"}, {}, "config.model.family='latent'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_cannot_be_converted_are_refused(parent, tmp_path, capsys, monkeypatch, case):
    given, recorded, name = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    run_path = parent
    if recorded:
        run_path = tmp_path / "parent"
        shutil.copytree(parent, run_path)
        record(run_path, recorded)
    flags = {"--from": run_path, "--to": "mod", "--workdir": "run"}
    flags |= {key: value for key, value in given.items() if key.startswith("--")}
    changes = {key: value for key, value in given.items() if not key.startswith("--")}
    arguments = [f"{flag}={value}" for flag, value in flags.items()]
    assert run("--mode=convert", *arguments, **changes) == 2
    assert name in error_line(capsys)
    assert not (tmp_path / "run").exists()


def test_runs_without_a_checkpoint_and_with_a_run_are_refused(parent, child, tmp_path, capsys):
    flags = ("--to", "mod", "--workdir")
    shutil.copytree(parent, tmp_path / "parent")
    shutil.rmtree(tmp_path / "parent/checkpoints")
    for arguments, name in (
        (("--mode=convert", "--from", tmp_path / "parent", *flags, tmp_path / "run"), "parent"),
        (("--mode=convert", "--from", parent, *flags, child), str(child)),
        ((*flags, child), "--to"),
    ):
        assert run(*arguments) == 2
        assert name in error_line(capsys)
    assert not (tmp_path / "run").exists()
