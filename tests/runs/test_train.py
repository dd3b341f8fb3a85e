"""The train step and the loop: accumulation, resume, skipping, sharding, signals."""

import copy
import json
import shutil
import signal
import subprocess
import sys
import time
import types

import devices
import families
import jax
import numpy as np
import pytest
from flax import linen as nn

from efx import build, models, optim, sharding, train
from efx import step as step_lib
from efx.configs import common
from efx.errors import UsageError
from efx.evaluate import Evaluator
from efx.layers import attention_kernels
from efx.metrics import read_metrics
from efx.sample import TextSampler

TINY = {
    "steps": 6,
    "data.seq_len": 32,
    "data.batch_size": 8,
    "data.max_bytes": 30_000,
    "model.width": 32,
    "model.depth": 2,
    "model.attention.num_heads": 2,
    "model.depth_routing.kind": "mod",
    "model.depth_routing.capacity": 0.25,
    "model.depth_routing.causal": "aux_loss",
    "optim.schedule.warmup_steps": 1,
    "optim.schedule.decay_steps": 6,  # the same rates, however many steps a run is started for
    "checkpoint.every": 3,
    "evaluate.every": 0,
    "evaluate.batch_size": 8,
    "evaluate.max_batches": 2,
    "sample.every": 0,
    "log.every": 1,
    "log.tensorboard": False,
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
    config = common.base()
    common.apply(config, {**TINY, "data.source": f"text:{text}", **changes})
    return config


def batch_of(config, vocab=64, seed=0):
    rng = np.random.default_rng(seed)
    shape = (config.data.batch_size, config.data.seq_len)
    tokens = rng.integers(0, vocab, (shape[0], shape[1] + 1)).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones(shape, np.float32),
    }


def setup(config, vocab=64):
    model = models.build(
        config.model, vocab_size=vocab, context=config.data.seq_len, dtype=config.train.dtype
    )
    shapes = families.variable_shapes(model)["params"]
    optimizer, schedule = optim.make_optimizer(config.optim, 6, shapes)
    state = jax.jit(lambda v: step_lib.state_of(v, optimizer))(families.initial(model))
    step = step_lib.make_train_step(model, optimizer, schedule, config, total_steps=6)
    return state, jax.jit(step)


@pytest.fixture(scope="module")
def reference(text):
    """(config, state, step on one device) of a model that can be split over eight."""
    config = tiny(text, **{"train.loss_chunk": 16, "model.vocab_multiple": 8})
    return config, *setup(config)


def close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_accumulation_in_chunks_equals_the_big_batch(text):
    """Same parameters after a step whose loss is computed in chunks, of rows with unequal numbers
    of scored tokens; gradients with every other loss are in test_accumulation.py."""
    batch = batch_of(tiny(text))
    weights = np.ones(batch["weights"].shape, np.float32)
    weights[:3, 5:] = 0
    batch["weights"] = weights
    changes = {"optim.name": "sgd", "optim.clip_norm": 0.0, "losses.z_loss": 1e-3}
    state, big = setup(tiny(text, **changes))
    _, small = setup(tiny(text, **changes, **{"train.accumulation": 4, "train.loss_chunk": 8}))
    expected, metrics = big(state, batch, np.uint32(0))
    got, metrics_small = small(state, batch, np.uint32(0))
    close(expected.params, got.params, 2e-6)
    assert metrics.keys() == metrics_small.keys()
    for name in ("train/loss", "train/objective", "losses/router_bce", "train/grad_norm"):
        np.testing.assert_allclose(metrics[name], metrics_small[name], rtol=1e-5)


def bad_batch_of(config):
    """The batch without a finite loss."""
    batch = batch_of(config)
    batch["weights"][0, 0] = np.nan
    return batch


def test_a_nonfinite_step_is_skipped_and_counted(reference):
    config, state, step = reference
    good, bad = batch_of(config), bad_batch_of(config)
    after, metrics = step(state, bad, np.uint32(0))
    close(state.params, after.params, 0)
    close(jax.tree.leaves(state.opt_state), jax.tree.leaves(after.opt_state), 0)
    assert (after.step, after.nonfinite_total, after.nonfinite_run) == (1, 1, 1)
    after, _ = step(after, bad, np.uint32(0))
    assert (after.nonfinite_total, after.nonfinite_run) == (2, 2)
    after, metrics = step(after, good, np.uint32(0))
    assert (after.step, after.nonfinite_total, after.nonfinite_run) == (3, 2, 0)
    assert np.isfinite(metrics["train/loss"])
    assert any(
        np.any(np.asarray(x) != np.asarray(y))
        for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True)
    )


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


def test_a_nonfinite_step_moves_no_average_and_no_rate(text):
    """The scores of a batch without a finite loss count in no threshold; the rate that is logged is
    that of the steps that were taken."""
    config = tiny(
        text, **{"model.depth_routing.causal": "threshold", "optim.schedule.warmup_steps": 3}
    )
    state, step = setup(config)
    after, metrics = step(state, bad_batch_of(config), np.uint32(0))
    close(state.variables, after.variables, 0)
    rates = [metrics["train/learning_rate"]]
    for _ in range(2):
        before, (after, metrics) = after, step(after, batch_of(config), np.uint32(0))
        rates.append(metrics["train/learning_rate"])
        for old, new in zip(
            *map(jax.tree.leaves, (before.variables, after.variables)), strict=True
        ):
            assert np.all(old != new)
    peak = config.optim.learning_rate
    np.testing.assert_allclose(rates, [peak / 4, peak / 4, peak / 2], rtol=1e-6)


@pytest.mark.parametrize("sizes", [dict(data=8), dict(data=2, fsdp=2, tensor=2)])
def test_eight_devices_train_like_one(reference, sizes):
    """Pure data parallelism and a mixed mesh give the losses of one device, optimiser included."""
    config, state, step = reference
    config, expected = copy.deepcopy(config), []
    batches = [batch_of(config, seed=i) for i in range(3)]
    for batch in batches:
        state, metrics = step(state, batch, np.uint32(0))
        expected.append(float(metrics["train/loss"]))
    for name in sharding.MESH_AXES:
        config.mesh[name] = sizes.get(name, 1)
    mesh = sharding.make_mesh(config.mesh)
    rules = sharding.check_rules(config.rules)
    model = models.build(config.model, vocab_size=64, context=32, dtype="float32")
    shapes = families.variable_shapes(model)["params"]
    optimizer, schedule = optim.make_optimizer(config.optim, 6, shapes)
    boxed = models.variable_shapes(model)["params"]
    shapes = jax.eval_shape(lambda: step_lib.init_state(model, optimizer, 0))
    placed = step_lib.state_shardings(boxed, shapes, mesh, rules)
    function = step_lib.make_train_step(
        model, optimizer, schedule, config, total_steps=6, groups=sharding.batch_shards(mesh, rules)
    )
    losses, placement = [], sharding.Placement(mesh, rules, config.data.batch_size)
    with sharding.use(mesh, rules):
        state = jax.jit(lambda: step_lib.init_state(model, optimizer, 0), out_shardings=placed)()
        jitted = jax.jit(function, donate_argnums=0, out_shardings=(placed, None))
        for batch in batches:
            batch = placement(jax.tree.map(np.asarray, batch))
            state, metrics = jitted(state, batch, np.uint32(0))
            losses.append(float(metrics["train/loss"]))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    if sizes.get("fsdp", 1) * sizes.get("tensor", 1) > 1:
        kernel = state.params["layers"]["block_0"]["mlp"]["up"]["kernel"]
        moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == kernel.shape]
        assert not kernel.sharding.is_fully_replicated
        assert all(m.sharding == kernel.sharding for m in moments) and len(moments) >= 2


def launch(config_changes, workdir, text):
    """The process of a real `python -m efx.main` with the tiny config."""
    arguments = [
        f"--config.{k}={v}"
        for k, v in {**TINY, "data.source": f"text:{text}", **config_changes}.items()
    ]
    command = [sys.executable, "-u", "-m", "efx.main", "--config=configs/mod.py"]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses_of(workdir):
    return {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}


# Of each family what a checkpoint has to hold or a step to draw anew: thresholds, noise, masks,
# weights that rise; in one block of each kind.
RESUMED = {
    "latent": {
        "model.encoder_local": 0,
        "model.decoder_global": 0,
        "model.group_size": 8,
        "model.latents": (2,),
        "model.level_widths": (16,),
        "model.embedding_noise": 5.0,
        "model.dense_former.on": True,
        "model.soft_experts.num": 2,
        "model.depth_routing.kind": "mod",
        "model.depth_routing.capacity": 0.5,
        "model.depth_routing.causal": "threshold",
        "model.depth_routing.train_selection": "threshold",
        "model.depth_routing.threshold_warmup": 2,
        "model.latent_loss.kind": "cosine",
        "losses.latent_prediction": dict(schedule="linear", c_start=0.0, c_end=0.1, steps=5),
    },
    "encoder_decoder": {
        "model.dropout.kind": "attention",
        "model.dropout.sites": ("embedding", "mlp_output"),
        "model.positions": "rope",
        "model.depth_routing.kind": "mod",
        "model.depth_routing.capacity": 0.5,
        "model.depth_routing.causal": "threshold",
        "losses.dropout_l1": dict(schedule="exponential", rate=0.1, c_min=0.0, c_max=1.0),
    },
}


@pytest.mark.parametrize("family, count", [("latent", 1), ("encoder_decoder", 8)])
def test_three_steps_and_three_more_equal_six(text, tmp_path, family, count):
    """Losses, parameters and thresholds of the other families, bit for bit, on one device and on
    eight; a row of metrics is of the steps on both sides of the break. Decoders that are killed are
    in test_faults.py."""
    shared = {key: value for key, value in TINY.items() if "depth_routing" not in key}
    shared |= {"model.width": 16, "model.depth": 1, "model.depth_routing.every": 1}

    def run(folder, steps):
        config = common.base(family)
        changes = {"data.source": f"text:{text}", "mesh.data": -1, "steps": steps}
        changes |= {"checkpoint.every": 3, "checkpoint.keep_last": 2, "log.every": 2}
        common.apply(config, shared | changes | RESUMED[family])
        train.train_and_evaluate(config, folder)
        return build.finished(config, folder)[1:]

    with devices.only(count):
        straight = run(tmp_path / "straight", 6)
        shutil.copytree(tmp_path / "straight", tmp_path / "broken")
        shutil.rmtree(tmp_path / "broken/checkpoints/6")
        resumed = run(tmp_path / "broken", 6)
    assert losses_of(tmp_path / "straight") == losses_of(tmp_path / "broken")
    assert list(losses_of(tmp_path / "straight")) == [2, 4, 6]
    (row,) = (row for row in read_metrics(tmp_path / "broken") if row["step"] == 4)
    meta = json.loads((tmp_path / "broken/checkpoints/3/meta/metadata").read_text())
    seconds = row["seconds"] - meta["seconds"]  # of the one step since the break
    np.testing.assert_allclose(row["tokens_per_second"], row["tokens"] / 4 / seconds)
    assert straight[0] == 6 and straight[2]  # there are thresholds
    close(straight, resumed, 0)


def test_seconds_are_those_of_all_steps_whenever_it_pauses(text, tmp_path, monkeypatch):
    """After an evaluation or a save between two rows, the row that followed had the time of the
    steps since, and the tokens of all."""
    read_next, evaluator = train._Launch._next, Evaluator.__call__

    def slowly(wait, function):
        def call(*arguments):
            time.sleep(wait)
            return function(*arguments)

        return call

    monkeypatch.setattr(train._Launch, "_next", slowly(0.1, read_next))
    monkeypatch.setattr(Evaluator, "__call__", slowly(0.5, evaluator))
    changes = {"steps": 8, "log.every": 3, "evaluate.every": 2, "checkpoint.every": 4}
    with devices.only(1):
        train.train_and_evaluate(tiny(text, **changes), tmp_path)
    logged = [row for row in read_metrics(tmp_path) if "train/loss" in row]
    assert [row["step"] for row in logged] == [3, 6, 8]
    # The batch of the first step is there before, and nothing is read in the last.
    assert 0.7 <= logged[-1]["seconds"] < 1.2
    for before, row in zip([{"step": 0, "seconds": 0}, *logged], logged, strict=False):
        steps, seconds = row["step"] - before["step"], row["seconds"] - before["seconds"]
        # What is read for the next step may count to this one.
        assert seconds >= 0.1 * (steps - 1)
        tokens = row["tokens"] / row["step"]
        np.testing.assert_allclose(row["tokens_per_second"], steps * tokens / seconds)
    meta = json.loads((tmp_path / "checkpoints/4/meta/metadata").read_text())
    assert 0.4 <= meta["seconds"] < logged[1]["seconds"]


def test_an_evaluation_that_ends_the_process_costs_no_step(text, tmp_path, monkeypatch):
    """For want of memory, say: what was due at the same step was saved after it, and each launch
    came to the same end without a checkpoint."""
    config = tiny(text, **{"evaluate.every": 3, "sample.every": 3, "sample.max_new_tokens": 4})
    folders = straight, broken = tmp_path / "straight", tmp_path / "broken"
    with devices.only(1):
        train.train_and_evaluate(config, straight)
        for owner in (Evaluator, TextSampler):
            name = "__call__" if owner is Evaluator else "texts"
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(owner, name, out_of_memory)
                train.train_and_evaluate(config, broken)
            assert [path.name for path in (broken / "checkpoints").iterdir()] == ["3"]
        train.train_and_evaluate(config, broken)
    of_each = [[{k: row.get(k) for k in KEYS} for row in read_metrics(f)] for f in folders]
    assert of_each[0] == of_each[1] and of_each[0][2]["eval/loss"]
    scores = []
    for folder in folders:
        with build.checkpointer(folder, build.run_settings.check(config).checkpoint) as found:
            scores.append([found._score(step) for step in found.steps()])
        made = sorted(path.name for path in (folder / "samples").iterdir())
        assert made == ["step_00000003.txt", "step_00000006.txt"]
    assert scores[0] == scores[1] and None not in scores[0]


KEYS = "step", "train/loss", "eval/loss", "tokens"


def out_of_memory(*arguments, **options):
    raise MemoryError


def test_a_run_that_is_further_stays_what_it_is(text, tmp_path, capsys):
    """A command with fewer steps wrote them into config.json, whence the report took them."""
    with devices.only(1):
        last = train.train_and_evaluate(tiny(text, steps=3), tmp_path)
    before = (tmp_path / "config.json").read_bytes(), (tmp_path / "run.json").read_bytes()
    capsys.readouterr()
    with devices.only(1):
        again = train.train_and_evaluate(tiny(text, steps=2), tmp_path)
    assert f"finished already: {tmp_path} is at step 3; config.steps=" in capsys.readouterr().out
    assert before == (
        (tmp_path / "config.json").read_bytes(),
        (tmp_path / "run.json").read_bytes(),
    )
    # What is returned is the last row, as it was to the launch that trained.
    assert again.items() >= {k: last[k] for k in ("step", "train/loss", "eval/loss")}.items()
    with devices.only(1):
        assert train.train_and_evaluate(tiny(text, steps=3), tmp_path).items() >= again.items()


def test_ctrl_c_saves_and_exits_cleanly(text, tmp_path, root, monkeypatch):
    """Other signals are in test_stopping.py."""
    monkeypatch.chdir(root)
    process = launch({"steps": 100_000, "checkpoint.every": 50_000}, tmp_path / "run", text)
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "the run is saved" in out and "Traceback" not in out
    steps = [int(p.name) for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdigit()]
    assert len(steps) == 1 and steps[0] > 0
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] == 100_000


def test_training_stops_after_too_many_nonfinite_steps(text, tmp_path, capsys):
    config = tiny(
        text,
        **{
            "optim.learning_rate": 1e30,
            "optim.clip_norm": 0.0,
            "optim.name": "sgd",
            "model.depth": 1,
            "model.depth_routing.kind": "none",
            "train.max_nonfinite": 3,
            "steps": 50,
        },
    )
    config.mesh.data = -1
    with pytest.raises(train.RunStopped, match="3 steps in a row"):
        train.train_and_evaluate(config, tmp_path / "run")


def stand_in_for_wandb(monkeypatch):
    """{function: arguments of its calls}; the real one needs an account or a server process."""
    told = {"init": [], "log": []}

    def init(**of_run):
        told["init"].append(of_run)
        return types.SimpleNamespace(
            id="1",
            define_metric=lambda *a, **k: None,
            step=0,
            log=lambda row, step: told["log"].append(row),
            finish=lambda: None,
            config=types.SimpleNamespace(update=lambda *a, **k: None),
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return told


def test_a_run_learns_evaluates_samples_and_reports(text, tmp_path, capsys, monkeypatch):
    """The whole loop in process, on eight devices: rows, evaluation of both routings, samples."""
    config = tiny(
        text,
        **{
            "mesh.data": -1,
            "steps": 12,
            "evaluate.every": 6,
            "sample.every": 12,
            "sample.max_new_tokens": 8,
            "sample.prompt": "a",
            "evaluate.repeated_rows": 8,
            "log.every": 3,
            "log.tensorboard": True,
        },
    )
    monkeypatch.setattr(train, "device_peak", lambda dtype: 1e12)
    told = stand_in_for_wandb(monkeypatch)
    config.log.wandb, config.log.wandb_group, config.log.wandb_tags = "project", "group", ("tag",)
    command = ["efx", "--config=configs/mod.py:smoke", "--config.seed=3"]
    row = train.train_and_evaluate(config, tmp_path / "run", command_line=command)
    out = capsys.readouterr().out
    assert 0 <= out.find("estimated time: about ") < out.find("first step after ")
    rows = read_metrics(tmp_path / "run")
    assert [r["step"] for r in rows if "train/loss" in r] == [3, 6, 9, 12]
    for r in rows:
        if "train/loss" in r:
            assert {"tokens", "flops", "flops_realised", "seconds"} <= r.keys()
            assert r["tokens"] == r["step"] * 8 * 32
            assert r["mfu"] == r["flops_per_second"] / (8 * 1e12) > 0
            per_second = r["tokens_per_second"] * r["flops"] / r["tokens"]
            assert r["flops_per_second"] == pytest.approx(per_second)
    (of_run,) = told.pop("init")
    assert of_run["name"] == "run (mod:smoke, seed=3)" and of_run["config"]["model"]["width"] == 32
    assert (of_run["project"], of_run["group"], of_run["tags"]) == ("project", "group", ["tag"])
    assert [(r["step"], r["mfu"]) for r in told["log"] if "mfu" in r] == [
        (r["step"], r["mfu"]) for r in rows if "mfu" in r
    ]
    losses = [r["train/loss"] for r in rows if "train/loss" in r]
    assert losses[-1] < losses[0] - 0.2
    assert {
        "eval/loss",
        "eval/loss_topk",
        "eval/bits_per_byte",
        "eval/router/accuracy",
        "eval/router/routed_fraction",
        "eval/router/routed_fraction/block_1",
        "eval/repeated/second",
    } <= row.keys()
    assert f"repeats gain {row['eval/repeated/gain']:.2f} nats" in out
    first, second = losses_of_repeats(config, tmp_path / "run")
    assert row["eval/repeated/first"] == pytest.approx(first, rel=1e-5)
    assert row["eval/repeated/second"] == pytest.approx(second, rel=1e-5)
    assert row["eval/repeated/gain"] == pytest.approx(first - second, abs=1e-5) != 0
    assert list((tmp_path / "run/samples").iterdir())
    assert list((tmp_path / "run/tensorboard").iterdir())
    (started,) = [line for line in out.splitlines() if line.startswith("first step after")]
    assert started.endswith("; attention by xla")
    assert "finished" in out and "--mode=sample" in out
    record = json.loads((tmp_path / "run/run.json").read_text())["launches"][0]
    assert record["efx"] and record["libraries"]["jax"] and record["command_line"] == command


def test_compiling_counts_as_compile_wherever_it_happens():
    """Initialising compiles programs of its own: 24 of 29 s of a first start."""
    launch = object.__new__(train._Launch)
    launch.timings = {}
    start = time.monotonic()
    with launch._timed("restore or initialise"):
        lowered = jax.jit(lambda x: jax.numpy.linalg.qr(x)[0] @ x).lower(np.ones((9, 9)))
        compiling = time.monotonic()
        lowered.compile()
        compiling = time.monotonic() - compiling
    total = time.monotonic() - start
    assert 0.9 * compiling <= launch.timings["compile"] <= total
    assert sum(launch.timings.values()) == pytest.approx(total, abs=0.01)


def test_run_json_names_the_attention_kernel_and_why_another_was_refused(
    text, tmp_path, monkeypatch
):
    """As if cuDNN were for the devices here, which it refuses."""
    cudnn = attention_kernels.KERNELS["cudnn"]._replace(platform="cpu")
    monkeypatch.setitem(attention_kernels.KERNELS, "cudnn", cudnn)
    with devices.only(2):
        train.train_and_evaluate(tiny(text, **{"mesh.data": 2, "steps": 1}), tmp_path)
    (launch,) = json.loads((tmp_path / "run.json").read_text())["launches"]
    (choice,) = launch["attention"]
    assert (choice["setting"], choice["kernel"]) == ("auto", "xla")
    assert choice["refused"]["cudnn"].startswith("needs a GPU of compute capability 8.0")


def losses_of_repeats(config, workdir):
    """Mean losses of 8 rows of random tokens and of their repetition, on one device."""
    e, _, params, variables = build.finished(config, workdir, None, ("eval",))
    variables = sharding.local({"params": params, **variables})
    (halves,) = e.data.repeated_batches(8, 8)
    model = e.model.clone(selection="causal")
    log_p_BTV = jax.nn.log_softmax(model.apply(variables, halves["first"]["inputs"]))
    targets_BT = halves["first"]["targets"]
    nats_BT = -np.take_along_axis(np.asarray(log_p_BTV), targets_BT[..., None], -1)[..., 0]
    half = targets_BT.shape[1] // 2
    return nats_BT[:, : half - 1].mean(), nats_BT[:, half:-1].mean()


def test_flops_can_be_given_instead_of_steps(text):
    config = tiny(text, **{"steps": 0, "train_flops": 1e9})
    config.mesh.data = -1
    e = build.experiment(config)
    per_step = e.ledger.train_flops(e.tokens_per_step)
    assert e.steps == round(1e9 / per_step) > 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train_flops": 1e9}, "exactly one"),
        ({"steps": 0, "train_flops": 1.0}, "less than one step"),
        ({"train.accumulation": 3}, "config.train.accumulation=3"),
        ({"data.batch_size": 12}, "not a multiple of the 8 devices"),
        ({"evaluate.batch_size": 3}, "config.evaluate.batch_size=3"),
        ({"evaluate.repeated_rows": 8, "data.seq_len": 3}, "config.data.seq_len of at least 4"),
        ({"model.context": 16}, "config.model.context=16"),
        ({"model.attention.num_heads": 5}, "config.model.attention.num_heads=5"),
        ({"model.depth_routing.capacity": 0.0}, "capacity=0.0: must be in (0, 1]"),
        ({"model.depth_routing.capacity": 1.5}, "capacity=1.5: must be in (0, 1]"),
        ({"data.seq_len": 100_000}, "config.data.seq_len=100000: "),
        ({"mesh.tensor": 3}, "config.mesh"),
        ({"mesh.sequence": 8, "data.seq_len": 36}, "config.data.seq_len=36: must be a multiple"),
    ],
)
def test_bad_settings_are_one_clear_line_and_nothing_is_written(text, tmp_path, changes, words):
    config = tiny(text, **{"mesh.data": -1, **changes})
    with pytest.raises(UsageError) as error:
        train.train_and_evaluate(config, tmp_path / "run")
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_boxes_do_not_reach_the_state(reference):
    _, state, _ = reference
    assert not any(
        isinstance(x, nn.Partitioned)
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    )
