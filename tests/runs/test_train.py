"""The train step and the loop: non-finite steps, meshes, resuming, evaluation, logs."""

import shutil
import time
from types import SimpleNamespace

import devices
import families
import jax
import numpy as np
import pytest
import run_files

from efx import models
from efx.checkpoint import Checkpointer
from efx.config.load import to_config
from efx.configs import common
from efx.logging import read_metrics
from efx.parallel import sharding
from efx.run_dir import finished_steps
from efx.sampling import TextSampler
from efx.train import inference, optim, run_log, setup, trainer
from efx.train import step as step_lib
from efx.train.evaluator import Evaluator

TINY = {
    "steps": 6,
    "data.seq_len": 32,
    "data.max_bytes": 30_000,
    "model.width": 32,
    "model.depth": 2,
    "model.depth_routing.kind": "mod",
    "model.depth_routing.capacity": 0.25,
    "model.depth_routing.causal_decision": "aux_loss",
    "optim.schedule.decay_steps": 6,  # the same rates, however many steps a run is started for
    "checkpoint.every": 3,
    "evaluate.max_batches": 2,
    "mesh.data": 1,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(60)]
    path.write_text(" ".join(rng.choice(words, 6000)))
    return path


def tiny(text, **changes):
    return run_files.tiny(text, **TINY | changes)


def batch_of(config, vocab=64, seed=0):
    rng = np.random.default_rng(seed)
    shape = (config.data.batch_size, config.data.seq_len)
    tokens = rng.integers(0, vocab, (shape[0], shape[1] + 1)).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones(shape, np.float32),
    }


def train_step_of(config, groups=1):
    """(model, optimizer, train step)."""
    model = models.build(config.model, vocab_size=64, context=32, dtype="float32")
    shapes = families.variable_shapes(model)["params"]
    optimizer, schedule = optim.make_optimizer(config.optim, 6, shapes)
    step = step_lib.make_train_step(
        model, optimizer, schedule, config, total_steps=6, groups=groups
    )
    return model, optimizer, step


@pytest.fixture(scope="module")
def reference(text):
    """(config, state, step on one device) of a model that can be split over eight."""
    changes = {
        "train.loss_chunk": 16,
        "model.vocab_multiple": 8,
        "model.depth_routing.causal_decision": "threshold",
        "optim.schedule.warmup_steps": 3,
    }
    config = tiny(text, **changes)
    model, optimizer, step = train_step_of(config)
    return config, jax.jit(lambda: step_lib.init_state(model, optimizer, 0))(), jax.jit(step)


def close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def bad_batch_of(config):
    """The batch without a finite loss."""
    batch = batch_of(config)
    batch["weights"][0, 0] = np.nan
    return batch


def test_a_nonfinite_step_changes_nothing_and_is_counted(reference):
    """Neither parameters nor moments nor thresholds; the schedule counts the steps taken."""
    config, state, step = reference
    good, bad = batch_of(config), bad_batch_of(config)
    after, metrics = step(state, bad, np.uint32(0))
    rates = [metrics["train/learning_rate"]]
    for name in ("params", "opt_state", "variables"):
        close(getattr(state, name), getattr(after, name), 0)
    assert (after.step, after.nonfinite_total, after.nonfinite_run) == (1, 1, 1)
    after, _ = step(after, bad, np.uint32(0))
    assert (after.nonfinite_total, after.nonfinite_run) == (2, 2)
    for _ in range(2):
        before, (after, metrics) = after, step(after, good, np.uint32(0))
        rates.append(metrics["train/learning_rate"])
        old, new = map(jax.tree.leaves, (before.variables, after.variables))
        assert old and all(np.all(x != y) for x, y in zip(old, new, strict=True))
    assert (after.step, after.nonfinite_total, after.nonfinite_run) == (4, 2, 0)
    assert np.isfinite(metrics["train/loss"])
    assert any(map(np.any, jax.tree.leaves(jax.tree.map(np.not_equal, state.params, after.params))))
    peak = config.optim.learning_rate
    np.testing.assert_allclose(rates, [peak / 4, peak / 4, peak / 2], rtol=1e-6)


def test_a_finite_loss_with_an_overflowing_gradient_is_not_applied(reference):
    """A large scale before small kernels keeps the loss, and the kernels' gradients overflow."""
    config, state, step = reference

    def rescale(path, x):
        name = "/".join(key.key for key in path)
        if name.endswith("block_0/norm_mlp/scale"):
            return x * 1e30
        return x * 1e-30 if "block_0/mlp/" in name and "down" not in name else x

    batch = batch_of(config)
    _, expected = step(state, batch, np.uint32(0))
    state = state.replace(params=jax.tree_util.tree_map_with_path(rescale, state.params))
    after, metrics = step(state, batch, np.uint32(0))
    np.testing.assert_allclose(metrics["train/loss"], expected["train/loss"], rtol=1e-5)
    assert not np.isfinite(metrics["train/grad_norm"])
    close(state.params, after.params, 0)
    assert after.nonfinite_total == 1


def test_moments_are_laid_out_like_their_parameters(text):
    config = tiny(text, **{"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2})
    state = setup.Training(setup.experiment_without_data(to_config(config), 64)).shapes
    kernel = state.params["layers"]["block_0"]["mlp"]["up"]["kernel"]
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == kernel.shape]
    assert not kernel.sharding.is_fully_replicated and len(moments) >= 2
    assert all(moment.sharding == kernel.sharding for moment in moments)


# A model that compiles fast.
SHALLOW = {"model.depth": 1, "model.depth_routing.kind": "none", "mesh.data": -1}


def losses_of(workdir):
    return {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}


# Everything that a checkpoint holds or a step draws anew: thresholds, noise, masks, rising weights.
RESUMED = {
    "latent": {
        "model.encoder_local": 0,
        "model.decoder_global": 0,
        "model.group_size": 8,
        "model.latents": (2,),
        "model.level_widths": (16,),
        "model.embedding_noise": 5.0,
        "model.depth_routing.kind": "mod",
        "model.depth_routing.capacity": 0.5,
        "model.depth_routing.causal_decision": "threshold",
        "model.depth_routing.train_selection": "threshold",
        "model.depth_routing.threshold_warmup": 1,
        "model.latent_loss.kind": "cosine",
        "losses.latent_prediction": dict(schedule="linear", c_start=0.0, c_end=0.1, steps=5),
    },
    "encoder_decoder": {
        "model.dropout.kind": "attention",
        "model.dropout.sites": ("embedding", "mlp_output"),
        "model.positions": "rope",
        "model.depth_routing.kind": "mod",
        "model.depth_routing.capacity": 0.5,
        "model.depth_routing.causal_decision": "threshold",
        "losses.dropout_l1": dict(schedule="exponential", rate=0.1, c_min=0.0, c_max=1.0),
    },
}


@pytest.mark.parametrize("family", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_run(text, tmp_path, family):
    """Losses, parameters and thresholds, bit for bit; for decoders see test_stages.py."""
    shared = run_files.TINY | {"model.depth_routing.every": 1, "optim.schedule.decay_steps": 6}

    def run(folder):
        config = common.base(family)
        changes = {"data.source": f"text:{text}", "mesh.data": -1, "steps": 2}
        changes |= {"checkpoint.every": 1, "checkpoint.keep_last": 2}
        common.apply(config, shared | changes | RESUMED[family])
        trainer.train_and_evaluate(config, folder)
        return inference.restore(config, folder)[1:]

    with devices.only(1):
        straight = run(tmp_path / "straight")
        shutil.copytree(tmp_path / "straight", tmp_path / "broken")
        shutil.rmtree(tmp_path / "broken/checkpoints/2")
        resumed = run(tmp_path / "broken")
    assert losses_of(tmp_path / "straight") == losses_of(tmp_path / "broken")
    assert straight[0] == 2 and straight[2]  # there are thresholds
    close(straight, resumed, 0)


def test_a_failing_evaluation_costs_no_step(text, tmp_path, monkeypatch):
    """The checkpoint of its step is saved first; the next launch makes up for what was due."""
    changes = {**SHALLOW, "steps": 1, "evaluate.every": 1, "sample.every": 1}
    config = tiny(text, **changes, **{"checkpoint.every": 1, "sample.max_new_tokens": 4})

    def out_of_memory(*arguments, **options):
        raise MemoryError

    with devices.only(1):
        for owner, name in ((Evaluator, "__call__"), (TextSampler, "texts")):
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(owner, name, out_of_memory)
                trainer.train_and_evaluate(config, tmp_path)
            assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
        trainer.train_and_evaluate(config, tmp_path)
    (row,) = read_metrics(tmp_path)
    assert row["train/loss"] and row["eval/loss"]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_00000001.txt"]


def test_checkpoints_by_time_are_saved_at_logged_steps_and_kept_by_the_same_rules(
    text, tmp_path, monkeypatch
):
    """A step takes a minute of this clock, and a save is due after three."""
    config = tiny(text, **SHALLOW, **{"steps": 9, "log.every": 2, "evaluate.every": 2})
    common.apply(config, {"checkpoint.every": 0, "checkpoint.minutes": 3.0})
    common.apply(config, {"checkpoint.keep_last": 2, "checkpoint.keep_best": 1})
    saved, save, push, clock = [], Checkpointer.save, run_log.RunLog.push, [0.0]

    def push_and_wait(self, step, metrics):
        clock[0] += 60
        push(self, step, metrics)

    def save_and_record(self, step, *arguments):
        saved.append(step)
        save(self, step, *arguments)

    def evaluate(self, params, variables):
        return {"eval/loss": float(clock[0] != 240), "eval/split_fraction": 1.0}

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(run_log.RunLog, "push", push_and_wait)
    monkeypatch.setattr(Checkpointer, "save", save_and_record)
    monkeypatch.setattr(Evaluator, "__call__", evaluate)
    with devices.only(1):
        trainer.train_and_evaluate(config, tmp_path)
    assert saved == [4, 8, 9]
    assert finished_steps(tmp_path / "checkpoints") == [4, 8, 9]  # 4 is the best


def test_a_run_beyond_the_given_steps_is_not_changed(text, tmp_path, capsys):
    def files():
        return [(tmp_path / name).read_bytes() for name in ("config.json", "run.json")]

    with devices.only(1):
        last = trainer.train_and_evaluate(tiny(text, **SHALLOW, steps=2), tmp_path)
        before = files()
        again = trainer.train_and_evaluate(tiny(text, **SHALLOW, steps=1), tmp_path)
    assert files() == before
    assert "finished already" in capsys.readouterr().out
    # The last row is returned, as by the launch that trained.
    assert again.items() >= {k: last[k] for k in ("step", "train/loss", "eval/loss")}.items()


def test_training_stops_after_too_many_nonfinite_steps(text, tmp_path):
    changes = {"optim.learning_rate": 1e30, "optim.clip_norm": 0.0, "optim.name": "sgd"}
    changes |= {**SHALLOW, "train.max_nonfinite": 3, "steps": 50}
    with devices.only(1), pytest.raises(trainer.RunStopped, match="3 steps in a row"):
        trainer.train_and_evaluate(tiny(text, **changes), tmp_path / "run")


def test_a_run_learns_evaluates_samples_and_reports(text, tmp_path, capsys, monkeypatch):
    """The whole loop in process, on two devices: rows, evaluation of both routings, samples."""
    changes = {
        "mesh.data": -1,
        "steps": 12,
        "evaluate.every": 4,
        "sample.every": 12,
        "sample.max_new_tokens": 8,
        "sample.prompt": "a",
        "evaluate.repeated_rows": 8,
        "log.every": 3,
    }
    evaluate = Evaluator.__call__

    def evaluate_slowly(*arguments):
        time.sleep(2)
        return evaluate(*arguments)

    monkeypatch.setattr(Evaluator, "__call__", evaluate_slowly)
    monkeypatch.setattr(run_log, "device_peak", lambda dtype: 1e12)
    config = tiny(text, **changes)
    with devices.only(2):
        row = trainer.train_and_evaluate(config, tmp_path / "run")
    rows = [r for r in read_metrics(tmp_path / "run") if "train/loss" in r]
    assert [r["step"] for r in rows] == [3, 6, 9, 12]
    assert 0 < rows[-1]["seconds"] < 4  # without evaluations
    for before, r in zip([{"seconds": 0, "tokens": 0}, *rows], rows, strict=False):
        assert r["tokens"] == r["step"] * 8 * 32
        assert r["epochs"] == pytest.approx(r["tokens"] / 27_000, rel=0.01)
        assert r["flops"] > 0 and r["flops_realised"] > 0
        assert r["mfu"] == r["flops_per_second"] / (2 * 1e12) > 0
        seconds, tokens = (r[name] - before[name] for name in ("seconds", "tokens"))
        assert r["tokens_per_second"] == pytest.approx(tokens / seconds)
        per_second = r["tokens_per_second"] * r["flops"] / r["tokens"]
        assert r["flops_per_second"] == pytest.approx(per_second)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.2
    evaluated = {"loss", "loss_topk", "bits_per_byte", "router/accuracy"}
    evaluated |= {"router/routed_fraction", "router/routed_fraction/block_1"}
    assert {f"eval/{name}" for name in evaluated} <= row.keys()
    with devices.only(2):
        first, second = losses_of_repeats(config, tmp_path / "run")
    assert row["eval/repeated/first"] == pytest.approx(first, rel=1e-5)
    assert row["eval/repeated/second"] == pytest.approx(second, rel=1e-5)
    assert row["eval/repeated/gain"] == pytest.approx(first - second, abs=1e-5) != 0
    assert list((tmp_path / "run/samples").iterdir())
    out = capsys.readouterr().out
    assert f"{rows[-1]['epochs']:.3g} epochs" in out and "finished" in out
    assert "config.data.eval_fraction" in out  # the line on few held-out tokens


def losses_of_repeats(config, workdir):
    """Mean losses of 8 rows of random tokens and of their repetition, on one device."""
    e, _, params, variables = inference.restore(config, workdir, None, ("eval",))
    variables = sharding.gather({"params": params, **variables})
    (halves,) = e.data.repeated_batches(8, 8)
    model = e.model.clone(selection="causal")
    logits_BTV = jax.jit(model.apply)(variables, halves["first"]["inputs"])
    log_p_BTV = jax.nn.log_softmax(logits_BTV)
    targets_BT = halves["first"]["targets"]
    nats_BT = -np.take_along_axis(np.asarray(log_p_BTV), targets_BT[..., None], -1)[..., 0]
    half = targets_BT.shape[1] // 2
    return nats_BT[:, : half - 1].mean(), nats_BT[:, half:-1].mean()
