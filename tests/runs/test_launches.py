"""Launches of one run after another: what a later one resumes, refuses, or leaves as it was.

One tiny run is trained; the tests damage copies of it.
"""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
from run_files import TINY, edit_record, largest_file, move, tiny

from efx import main, run_dir
from efx.checkpoint import start_from
from efx.config.load import config_of_run, to_config
from efx.configs import common
from efx.logging import read_metrics
from efx.train import inference, setup, trainer
from efx.train.step import TrainState

TEXT = "".join(f"line {i} of the text\n" for i in range(100))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_device):
    """(folder with a.txt in it, run directory of two steps on a.txt)."""
    top = tmp_path_factory.mktemp("launches")
    (top / "a.txt").write_text(TEXT)
    trainer.train_and_evaluate(tiny(top / "a.txt"), top / "run")
    return top


@pytest.fixture
def copy(trained, tmp_path):
    """The same, to be damaged; with its own text under the path that the run knows."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copy(trained / "a.txt", tmp_path / "a.txt")
    move(tmp_path / "run", trained, tmp_path)
    return tmp_path


def contents(folder):
    """Every file of a run but the lock, which names the last process."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != run_dir.LOCK_FILE
    }


def refused(config, folder, *names):
    """The launch is refused, and leaves all files as they were."""
    before = contents(folder)
    refusals.refused(lambda: trainer.train_and_evaluate(config, folder), *names)
    assert contents(folder) == before


def steps_of(run):
    return [row["step"] for row in read_metrics(run)]


# ---- kill -9 -------------------------------------------------------------------------------------


def arguments_of(run, text, **changes):
    given = {**TINY, "data.source": f"text:{text}", **changes}
    settings = [f"--config.{key}={value}" for key, value in given.items()]
    return ["--config=configs/mod.py", f"--workdir={run}", *settings]


def test_a_killed_run_resumes_bit_for_bit(trained, tmp_path, root, monkeypatch):
    """Parameters and metrics are those of a run that was not interrupted; the lock of the killed
    process does not stop the next."""
    monkeypatch.chdir(root)
    killed, straight, text = tmp_path / "killed", tmp_path / "straight", trained / "a.txt"
    changes = {"checkpoint.every": 3, "optim.schedule.decay_steps": 40}
    changes |= {"mesh.data": 1, "model.depth_routing.every": 1}
    command = [sys.executable, "-m", "efx.main"]
    command += arguments_of(killed, text, steps=10**6, **changes)
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)
    try:
        while not (killed / "checkpoints/3").exists():
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = max(steps_of(killed)) + 2
    for run in (killed, straight):
        assert main.main(["efx", *arguments_of(run, text, steps=last, **changes)]) == 0
    for a, b in zip(read_metrics(killed), read_metrics(straight), strict=True):
        for key in ("step", "train/loss", "train/grad_norm", "tokens"):
            assert a[key] == b[key]
    assert_same_parameters(killed, straight)


def assert_same_parameters(*runs):
    restored = [inference.restore(config_of_run(run), run)[2] for run in runs]
    for a, b in zip(*map(jax.tree.leaves, restored), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- the text ----------------------------------------------------------------------------------


def test_a_text_that_grew_keeps_its_held_out_part(copy):
    """A run resumes on a changed text on request only, and what was held out stays held out."""
    text, run = copy / "a.txt", copy / "run"
    record = run_dir.RunDir(run).record
    with open(text, "a") as file:
        file.write("more\n" * 200)
    more = {"steps": 3}
    refused(tiny(text, **more), run, "config.data.source=", "keep_split")
    refusals.refused(lambda: inference.evaluate(tiny(text), run), "config.data.source=")
    keep = {"data.on_change": "keep_split"}
    assert inference.evaluate(tiny(text, **keep), run)["eval/tokens"] == int(0.1 * len(TEXT)) - 1
    trainer.train_and_evaluate(tiny(text, **more, **keep), run)
    # The new text is recorded, and no longer needs permission.
    again, before = (each["text"]["train"][""] for each in (run_dir.RunDir(run).record, record))
    assert again["held_out"] == before["held_out"] and again["content"] != before["content"]
    metrics = inference.evaluate(tiny(text, **more), run)
    assert metrics["eval/tokens"] == int(0.1 * len(TEXT)) - 1


def test_a_text_may_move_but_not_change(copy):
    moved, run = copy / "moved.txt", copy / "run"
    moved.write_text(TEXT[::-1])
    refused(tiny(moved, **{"steps": 3}), run, f"config.data.source=text:{moved}")
    (copy / "a.txt").rename(moved)
    trainer.train_and_evaluate(tiny(moved, **{"steps": 3}), run)
    metrics = inference.evaluate(config_of_run(run), run)
    assert metrics["eval/tokens"] == int(0.1 * len(TEXT)) - 1


def test_another_text_is_evaluated_from_its_first_byte_to_its_last(trained, tmp_path):
    """Whatever part of its own text the run holds out, and also when that text is gone."""
    (tmp_path / "other.txt").write_text("another text\n" * 30)
    changes = {"data.max_bytes": 40, "data.eval_fraction": 0.01}
    other = tiny("/gone", **changes, **{"data.eval_source": f"text:{tmp_path}/other.txt"})
    assert inference.evaluate(other, trained / "run")["eval/tokens"] == 13 * 30 - 1
    # Another split of the run's own text would evaluate on text that it was trained on.
    for key, value in (("eval_fraction", 0.5), ("max_bytes", 500), ("split", "documents")):
        config = tiny(trained / "a.txt", **{f"data.{key}": value})
        run = trained / "run"
        refusals.refused(functools.partial(inference.evaluate, config, run), f"config.data.{key}")


def test_a_run_with_an_evaluation_text_holds_nothing_out_and_refuses_another(trained, tmp_path):
    text = tmp_path / "test.txt"
    text.write_text("held out\n" * 40)
    config = tiny(trained / "a.txt", **{"data.eval_source": f"text:{text}", "steps": 1})
    row = trainer.train_and_evaluate(config, tmp_path / "run")
    assert row["eval/tokens"] == 359
    assert run_dir.RunDir(tmp_path / "run").text_record["train"][""]["held_out"] is None
    text.write_text("held out\n" * 41)
    refused(config, tmp_path / "run", "config.data.eval_source=")


# ---- failed launches -----------------------------------------------------------------------------


def test_a_directory_without_a_checkpoint_is_free_for_any_config(trained, tmp_path):
    lacking = {"init.run": str(trained / "run"), "model.norm": "layernorm", "model.use_bias": True}
    refused(tiny(trained / "a.txt", **lacking), tmp_path / "run", "config.init.missing")
    assert not (tmp_path / "run").exists()
    # A run whose first save failed, with the tokenizer of another text.
    with largest_file(20_000):
        refusals.refused(
            lambda: trainer.train_and_evaluate(tiny(trained / "a.txt"), tmp_path / "run"),
            "checkpoint 2",
        )
    assert steps_of(tmp_path / "run") == [1, 2]
    (tmp_path / "run/tokenizer.json").write_text('{"kind": "chars", "characters": "abc"}')
    (tmp_path / "run/samples").mkdir()
    (tmp_path / "run/samples/step_9.txt").write_text("of the other run")
    config = tiny(trained / "a.txt", **{"seed": 1, "steps": 1})
    trainer.train_and_evaluate(config, tmp_path / "run")
    assert run_dir.RunDir(tmp_path / "run").config["seed"] == 1
    assert json.loads((tmp_path / "run/tokenizer.json").read_text())["kind"] == "bytes"
    assert steps_of(tmp_path / "run") == [1]
    assert len(run_dir.RunDir(tmp_path / "run").record["launches"]) == 1
    assert not list((tmp_path / "run/samples").iterdir())


def empty(path):
    """As a mount point without its disk."""
    shutil.rmtree(path)
    path.mkdir()


def dangle(path):
    path.rename(path.parent / "moved")
    path.symlink_to("/absent/disk")


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/2"])
@pytest.mark.parametrize("lose", [shutil.rmtree, empty, dangle])
def test_a_run_whose_checkpoints_are_missing_is_refused(copy, lose, name):
    """Moved, deleted or not mounted; it would start again from step 0."""
    run = copy / "run"
    lose(run / name)
    for changes in ({}, {"steps": 3}, {"seed": 1}):
        refused(tiny(copy / "a.txt", **changes), run, f"--workdir={run}", "checkpoints/2")


def test_a_run_without_its_metrics_or_record_is_refused(copy):
    config, run = tiny(copy / "a.txt"), copy / "run"
    (run / "metrics.jsonl").rename(copy / "rows")
    refused(config, run, f"--workdir={run}", "metrics.jsonl")
    (copy / "rows").rename(run / "metrics.jsonl")
    # The record is a copy, which any launch writes again, unless the checkpoints are missing too.
    (run / "run.json").unlink()
    trainer.train_and_evaluate(tiny(copy / "a.txt", **{"steps": 3}), run)
    shutil.rmtree(run / "checkpoints")
    refused(config, run, f"--workdir={run}", "checkpoints/3")
    (run / "run.json").unlink()
    refused(config, run, f"--workdir={run}", "run.json")


def test_a_resume_that_fails_leaves_the_run_as_it_was(copy):
    config, run = tiny(copy / "a.txt", **{"steps": 5}), copy / "run"
    parts = [path for path in (run / "checkpoints/2/state").rglob("*") if path.is_file()]
    part = max(parts, key=lambda path: path.stat().st_size)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(config, run, "checkpoint 2", part.name)
    part.write_bytes(whole)
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b"broken\n" + lines)
    refused(config, run, "metrics.jsonl")


def test_a_run_whose_text_tokenizer_or_settings_were_replaced_is_refused(copy):
    """Held-out text would be trained on, or the ids of tokens would mean something else. What the
    copies of the record say, config.json and run.json, does not matter."""
    text, run = copy / "a.txt", copy / "run"
    config = tiny(text, **{"steps": 3})
    copied = json.loads((run / "run.json").read_text())
    edited = {**copied, "tokenizer": "of another run", "subset": "of another run"}
    (run / "run.json").write_text(json.dumps(edited))
    (run / "config.json").write_text('{"seed": 5, "steps": 5, "model": {}}')
    text.write_text(TEXT[::-1])
    refused(config, run, str(text))
    text.write_text(TEXT)
    refused(tiny(text, **{"seed": 5}), run, "config.seed: 0 in the run, 5 here")
    path = run / "tokenizer.json"
    whole = path.read_text()
    path.write_text(whole + " ")
    refused(config, run, path.name)
    refusals.refused(lambda: inference.sample(tiny(text), run), path.name)
    path.unlink()
    refused(config, run, path.name)
    path.write_text(whole)
    edit_record(run, lambda record: record | {"subset": "of other documents"})
    refused(config, run, "config.data.subset")
    edit_record(run, lambda record: {k: v for k, v in record.items() if k != "subset"})
    trainer.train_and_evaluate(config, run)
    assert json.loads((run / "config.json").read_text())["seed"] == 0


def test_running_out_of_memory_is_one_line_with_the_settings_to_lower(copy, monkeypatch):
    def too_large(training, seed):
        return jax.block_until_ready(jax.jit(lambda: jnp.zeros((2**23, 2**23)) + 1.0)())

    monkeypatch.setattr(setup.Training, "new_state", too_large)
    launch = functools.partial(trainer.train_and_evaluate, tiny(copy / "a.txt"), copy / "new")
    names = "config.data.batch_size=8", "config.train.accumulation=1", "--mode=compile"
    refusals.refused(launch, "training ran out of memory", *names)


def test_a_run_whose_last_save_fails_has_not_finished(copy, capsys):
    run = copy / "run"
    with largest_file(20_000):
        refusals.refused(
            lambda: trainer.train_and_evaluate(tiny(copy / "a.txt", **{"steps": 3}), run),
            "checkpoint 3",
        )
    assert "finished: " not in capsys.readouterr().out
    trainer.train_and_evaluate(tiny(copy / "a.txt", **{"steps": 3}), run)
    assert "finished: " in capsys.readouterr().out and steps_of(run) == [1, 2, 3]


def test_a_missing_or_altered_metrics_row_does_not_stop_a_resume(copy):
    path = copy / "run/metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first.replace(b"loss", b"lost"))
    trainer.train_and_evaluate(tiny(copy / "a.txt", **{"steps": 3}), copy / "run")
    assert steps_of(copy / "run") == [1, 3]


def test_one_launch_at_a_time_writes_and_others_may_read(copy):
    config, run = tiny(copy / "a.txt", **{"steps": 3}), copy / "run"
    with run_dir.Lock(run):
        refused(config, run, f"--workdir={run}", f"process {os.getpid()}")
        compose = functools.partial(trainer.train_and_evaluate, config, run, train=False)
        refusals.refused(compose, f"--workdir={run}")
        assert math.isfinite(inference.evaluate(tiny(copy / "a.txt"), run)["eval/loss"])


def test_of_two_launches_that_start_in_a_new_directory_one_trains(copy, monkeypatch):
    """The other one finds the lock taken, or a run where there was none."""
    config, folder, take = tiny(copy / "a.txt"), copy / "new", run_dir.Lock.take

    def take_late(lock):
        shutil.copytree(copy / "run", folder)
        take(lock)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir.Lock, "take", take_late)
        refusals.refused(lambda: trainer.train_and_evaluate(config, folder), "while this one")
    shutil.rmtree(folder)
    with run_dir.Lock(folder) as other, monkeypatch.context() as patch:
        patch.setattr(run_dir.Lock, "__enter__", lambda lock: lock)  # it was absent at the start
        other.take()
        launch = functools.partial(trainer.train_and_evaluate, config, folder)
        refusals.refused(launch, f"process {os.getpid()}")
    assert not (folder / "checkpoints").exists()


# ---- the end -------------------------------------------------------------------------------------


DIVERGED = {
    "optim.name": "sgd", "optim.learning_rate": 3e38, "optim.clip_norm": 0.0,
    "optim.lr_multipliers": ((".*", 1e9),),  # the two together are inf in float32
}  # fmt: skip
SKIPPED = {"losses.z_loss": 3e38, "steps": 1}


@pytest.mark.parametrize(
    "changes, name",
    [(DIVERGED, "config.optim.learning_rate"), (SKIPPED, "The parameters are those of step 0")],
)
def test_a_run_that_ends_without_a_finite_step_has_status_3_at_each_launch(
    trained, tmp_path, capsys, monkeypatch, root, changes, name
):
    monkeypatch.chdir(root)
    changes = changes | {"train.max_nonfinite": 1000, "model.depth_routing.kind": "none"}
    arguments = arguments_of(tmp_path / "run", trained / "a.txt", **changes)
    for _ in range(2):
        assert main.main(["efx", *arguments]) == 3
        captured = capsys.readouterr()
        (line,) = [x for x in captured.err.splitlines() if x.startswith("efx: stopped: ")]
        assert name in line and "finished:" not in captured.out
    last = read_metrics(tmp_path / "run")[-1]
    assert (last["eval/loss"] is None) == ("losses.z_loss" not in changes)
    assert last["train/nonfinite_run"] == last["train/nonfinite_total"] == 1


# ---- starting from another run -------------------------------------------------------------------


def test_running_averages_of_the_same_shape_come_from_the_run_started_from(tmp_path):
    def state(fill, widths):
        layers = {
            block: {"quantile": jnp.full(width, fill), "steps": jnp.int32(fill)}
            for block, width in widths.items()
        }
        params, zero = {"embed": {"embedding": jnp.full((4, 2), fill)}}, jnp.zeros((), jnp.int32)
        return TrainState(zero, params, (), {"state": {"layers": layers}}, zero, zero)

    (tmp_path / "a").mkdir()
    config = common.base()
    old = state(7.0, {"block_1": 3, "block_3": 9, "block_5": 3})
    with inference.checkpointer(tmp_path / "a", to_config(config).checkpoint) as checkpoints:
        checkpoints.save(5, old, {}, {})
    config.init.run = str(tmp_path / "a")
    config.init.rename = (("layers/block_2/(.*)", r"layers/block_5/\1"),)
    fresh = state(0.0, {f"block_{i}": 3 for i in (1, 2, 3, 4)})
    model = types.SimpleNamespace(vocab_size=4, members={})
    found, _ = start_from(fresh, config, model, lambda line: None)
    quantiles = {
        name: leaf["quantile"][0] for name, leaf in found.variables["state"]["layers"].items()
    }
    # Those of block_3 have another shape, and there was no block_4.
    assert quantiles == {"block_1": 7, "block_2": 7, "block_3": 0, "block_4": 0}


def test_a_run_starts_with_the_parameters_of_the_run_started_from(trained, tmp_path):
    changes = {"init.run": str(trained / "run"), "steps": 1, "optim.learning_rate": 1e-30}
    config = tiny(trained / "a.txt", **changes)
    trainer.train_and_evaluate(config, tmp_path / "next")
    assert_same_parameters(trained / "run", tmp_path / "next")
    assert run_dir.RunDir(tmp_path / "next").record["origin"]["step"] == 2


def test_the_tokenizer_is_that_of_the_run_started_from(trained, tmp_path):
    run = trained / "run"
    # Its file is the same tokenizer by another name.
    shutil.copy(run / "tokenizer.json", tmp_path)
    same = {"init.run": str(run), "data.tokenizer": str(tmp_path / "tokenizer.json")}
    e = setup.experiment(
        to_config(tiny(trained / "a.txt", **same)), run_dir.RunDir(tmp_path / "next")
    )
    assert e.tokenizer.kind == "bytes"


def test_more_steps_warn_if_they_change_the_learning_rate(copy, capsys):
    longer = {"steps": 5, "optim.schedule.kind": "constant"}
    run = run_dir.RunDir(copy / "run")
    setup.experiment(to_config(tiny(copy / "a.txt", **longer)), run)
    assert capsys.readouterr().err == ""
    close = {"steps": 5, "optim.schedule.final_fraction": 0.9999}  # rates that print alike
    setup.experiment(to_config(tiny(copy / "a.txt", **close)), run)
    assert capsys.readouterr().err == ""
    setup.experiment(to_config(tiny(copy / "a.txt", **{"steps": 5})), run)
    assert "0.000868 instead of 0.0001" in capsys.readouterr().err
