"""Launches of a run one after another: what a later one takes from the folder, refuses, or leaves.

One tiny run is trained; the tests spoil copies of it.
"""

import errno
import json
import math
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import edit, forget, move

from efx import build, main, run_settings, runfolder, settings, signals, train, use
from efx.checkpoint import Checkpointer, files, start_from
from efx.configs import common
from efx.errors import UsageError
from efx.metrics import read_metrics
from efx.step import TrainState
from efx.studies import jobs, rehearsal

TINY = {
    "steps": 2,
    "data.seq_len": 16,
    "data.batch_size": 8,
    "model.width": 16,
    "model.depth": 1,
    "model.attention.num_heads": 2,
    "optim.schedule.warmup_steps": 1,
    "evaluate.every": 0,
    "evaluate.batch_size": 8,
    "sample.every": 0,
    "log.every": 1,
    "log.tensorboard": False,
}
TEXT = "".join(f"line {i} of the text\n" for i in range(100))


def tiny(text, **changes):
    config = common.base()
    return common.apply(config, {**TINY, "data.source": f"text:{text}", **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_device):
    """(folder with a.txt in it, run folder of two steps on a.txt)."""
    top = tmp_path_factory.mktemp("launches")
    (top / "a.txt").write_text(TEXT)
    train.train_and_evaluate(tiny(top / "a.txt"), top / "run")
    return top


@pytest.fixture
def copy(trained, tmp_path, monkeypatch):
    """The same, to spoil; with its own text under the path that the run knows."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copy(trained / "a.txt", tmp_path / "a.txt")
    move(tmp_path / "run/config.json", trained, tmp_path)
    return tmp_path


def contents(folder):
    """Everything in a run folder but the lock, which says who looked last."""
    return {str(path): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != runfolder.LOCK_FILE}  # fmt: skip


def refused(config, folder, *said):
    """The message of a launch that is refused, and that leaves all files as they were."""
    before = contents(folder)
    with pytest.raises(UsageError) as error:
        train.train_and_evaluate(config, folder)
    line = str(error.value)
    assert "\n" not in line and all(part in line for part in said), line
    assert contents(folder) == before
    return line


# ---- the text ----------------------------------------------------------------------------------


def test_the_text_grew_between_two_launches(copy, capsys):
    """Property: a run goes on with the text that it began with, or, if told to, with what was held
    out held out still; whoever only reads the run is not told otherwise than it is."""
    text, run = copy / "a.txt", copy / "run"
    record = runfolder.run_record(run)
    assert record["text"]["source"] and len(record["launches"]) == 1
    with open(text, "a") as file:
        file.write("more\n" * 200)
    more = {"steps": 3}
    refused(tiny(text, **more), run, f"config.data.source='text:{text}' has changed since the run",
            "on_change=keep_split", "another --workdir")  # fmt: skip
    with pytest.raises(UsageError, match="has changed since the run started"):
        use.evaluate(tiny(text), run)
    use.sample(common.apply(tiny(text), {"sample.max_new_tokens": 1}), run)
    before = evaluate_text(tiny(text, **{"data.on_change": "keep_split"}), run, capsys)
    assert before["eval/tokens"] == int(0.1 * len(TEXT)) - 1  # what it held out, and no more
    train.train_and_evaluate(tiny(text, **more, **{"data.on_change": "keep_split"}), run)
    said = capsys.readouterr().out
    assert "resuming" in said
    # Accepted once, and known from then on.
    again = runfolder.run_record(run)
    assert again["text"]["held_out"] == record["text"]["held_out"]
    assert again["text"]["source"] != record["text"]["source"]
    train.train_and_evaluate(tiny(text, **more), run)
    assert evaluate_text(tiny(text, **more), run, capsys)["eval/tokens"] == before["eval/tokens"]


def evaluate_text(config, run, capsys):
    capsys.readouterr()
    metrics = use.evaluate(config, run)
    metrics["said"] = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("scored: ")
    )
    return metrics


def test_evaluating_another_text_scores_a_part_of_a_part(trained, tmp_path, capsys):
    """Property: eval_source is scored from its first byte to its last, whatever the run's settings
    are and though its own text is gone; and every evaluation says what it scored."""
    (tmp_path / "other.txt").write_text("another text\n" * 30)
    own = tiny(trained / "a.txt")
    said = evaluate_text(own, trained / "run", capsys)["said"]
    assert "held-out part (split='tail', eval_fraction=0.1) of config.data.source=" in said
    assert said.endswith(f"{int(len(TEXT) * 0.1) - 1} tokens, {int(len(TEXT) * 0.1) - 1} bytes")
    other = tiny("/gone", **{"data.eval_source": f"text:{tmp_path}/other.txt",
                             "data.max_bytes": 40, "data.eval_fraction": 0.01})  # fmt: skip
    found = evaluate_text(other, trained / "run", capsys)
    assert found["eval/tokens"] == 13 * 30 - 1
    assert f"all of config.data.eval_source='text:{tmp_path}/other.txt'" in found["said"]
    assert found["said"].endswith(": 389 tokens, 389 bytes")
    other.evaluate.max_batches = 1
    said = evaluate_text(other, trained / "run", capsys)["said"]
    assert "128 tokens, about 128 bytes, spread over its 389 tokens, 389 bytes" in said
    assert "(config.evaluate.max_batches=1)" in said
    # Other settings of the split for the run's own text would score what it was trained on.
    for key, value in (("eval_fraction", 0.5), ("max_bytes", 500), ("split", "documents")):
        with pytest.raises(UsageError, match=f"config.data.{key}: .*score training text"):
            use.evaluate(tiny(trained / "a.txt", **{f"data.{key}": value}), trained / "run")
    # The same text in another place is the run's text, and a part of another text is told so.
    shutil.copy(trained / "a.txt", tmp_path / "moved.txt")
    moved = evaluate_text(tiny(tmp_path / "moved.txt"), trained / "run", capsys)
    assert moved["eval/tokens"] == int(len(TEXT) * 0.1) - 1
    part = tiny(tmp_path / "other.txt", **{"data.max_bytes": 300})
    said = evaluate_text(part, trained / "run", capsys)["said"]
    assert "of the first 300 bytes of config.data.source=" in said and "30 tokens" not in said


def test_a_run_with_an_official_test_file(trained, tmp_path):
    """Trained on all of one file, evaluated on all of the other, which has to stay the same."""
    text = tmp_path / "test.txt"
    text.write_text("held out\n" * 40)
    config = tiny(trained / "a.txt", **{"data.eval_source": f"text:{text}", "steps": 1})
    row = train.train_and_evaluate(config, tmp_path / "run")
    assert row["eval/tokens"] == 359 and not (tmp_path / "run" / "held_out.json").exists()
    text.write_text("held out\n" * 41)
    refused(config, tmp_path / "run", "config.data.eval_source=", "has changed since")


def test_hosts_with_different_texts_train_on_both(monkeypatch):
    """Property: processes that hold out different text are told before anything is trained."""
    from jax.experimental import multihost_utils

    data = types.SimpleNamespace(fingerprint="00" * 15 + "07")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for other, same in ((0, True), (1, False)):
        monkeypatch.setattr(multihost_utils, "process_allgather",
                            lambda x, other=other: np.stack([x, x + np.uint32(other)]))  # fmt: skip
        if same:
            build._same_everywhere(data)
        else:
            with pytest.raises(UsageError, match="the processes have different texts"):
                build._same_everywhere(data)


# ---- failing, and what it leaves behind ----------------------------------------------------------


def test_a_launch_that_fails_blocks_its_folder(trained, tmp_path):
    """Property: before its first checkpoint a run leaves nothing that binds the next one."""
    lacking = {"init.run": str(trained / "run"), "model.norm": "layernorm", "model.use_bias": True}
    with pytest.raises(UsageError, match="lacks"):
        train.train_and_evaluate(tiny(trained / "a.txt", **lacking), tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # as if not installed
        with pytest.raises(UsageError, match="install the extra `wandb`"):
            config = tiny(trained / "a.txt", **{"log.wandb": "a project"})
            train.train_and_evaluate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # One that was killed later, with a tokenizer of another text: the next config takes its place.
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    (tmp_path / "run/tokenizer.json").write_text('{"kind": "chars", "characters": "abc"}')
    (tmp_path / "run/samples").mkdir()
    (tmp_path / "run/samples/step_9.txt").write_text("of the other run")
    config = tiny(trained / "a.txt", **{"seed": 1, "steps": 1})
    train.train_and_evaluate(config, tmp_path / "run")
    assert runfolder.recorded_config(tmp_path / "run")["seed"] == 1
    assert json.loads((tmp_path / "run/tokenizer.json").read_text())["kind"] == "bytes"
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]
    assert len(runfolder.run_record(tmp_path / "run")["launches"]) == 1
    assert not list((tmp_path / "run/samples").iterdir())


def test_a_resume_that_fails_rewrites_the_folder(copy):
    """Property: config.json, run.json and all else are as they were after a launch that failed."""
    config, run = tiny(copy / "a.txt", **{"steps": 5}), copy / "run"  # which may change
    parts = [path for path in (run / "checkpoints/2/state").rglob("*") if path.is_file()]
    part = max(parts, key=lambda path: path.stat().st_size)
    sound = part.read_bytes()
    part.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    refused(config, run, "checkpoint 2", "is damaged")
    part.write_bytes(sound)
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b"broken\n" + lines)
    refused(config, run, "metrics.jsonl line 1 is not a metrics row")
    (run / "metrics.jsonl").write_bytes(lines + b'{"step": 2, "x": 1, "trai\n')
    config.log.wandb = "a project"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "wandb", None)  # as if not installed
        refused(config, run, "install the extra `wandb`")
    (run / "tokenizer.json").unlink()
    config.log.wandb = ""
    refused(config, run, "tokenizer.json is missing")


def test_a_lost_record_let_held_out_text_be_trained_on(copy):
    """Property: what decides a run is known to its checkpoint: run.json and config.json can neither
    be lost nor be those of another run, whoever reads them. A checkpoint that knows of none, of an
    earlier efx, goes on, and its successor does know."""
    text, run = copy / "a.txt", copy / "run"
    config, record, config_file = tiny(text, **{"steps": 3}), run / "run.json", run / "config.json"
    whole, whole_config = record.read_text(), config_file.read_text()
    text.write_text(TEXT[::-1])  # what was held out would be trained on
    record.unlink()
    refused(config, run, f"{record} is missing: checkpoint 2 needs it", "restore")
    with pytest.raises(UsageError, match="run.json is missing: .* with --config.init.run"):
        use.evaluate(tiny(text), run)
    # What needs nothing of it but the tokenizer, which the checkpoint knows, goes without.
    assert use.sample(tiny(text), run)["tokens_per_second"] > 0
    train.train_and_evaluate(tiny(text, **{"init.run": str(run), "steps": 1}), copy / "next")
    tokenizer = run / "tokenizer.json"
    its_own = tokenizer.read_text()
    for wrong in (its_own + " ", None):
        tokenizer.write_text(wrong) if wrong else tokenizer.unlink()
        with pytest.raises(UsageError, match="is missing, or not the tokenizer of this run"):
            use.sample(tiny(text), run)
    tokenizer.write_text(its_own)
    for spoilt in ({}, {"launches": [5]}, {**json.loads(whole), "tokenizer": "another"}):
        record.write_text(json.dumps({**spoilt}))
        if "checksum" in spoilt:
            edit(record, lambda contents: contents)
        refused(config, run, str(record), "checkpoint 2 needs it")
    record.write_text(whole)
    refused(config, run, "has changed since the run started")
    text.write_text(TEXT)
    # A config.json that is whole, but that of another run.
    other = settings.as_dict(run_settings.check(tiny(text, **{"seed": 5})))
    runfolder.open_run(copy / "other", other, command_line=[]).commit({})
    shutil.copy(copy / "other/config.json", config_file)
    refused(tiny(text, **{"seed": 5}), run, f"{config_file} is not the config of checkpoint 2")
    config_file.write_text(whole_config)
    forget(run)
    train.train_and_evaluate(tiny(text), run)  # which has nothing to do but that
    record.unlink()
    refused(config, run, "run.json is missing")


def test_a_lost_config_ended_the_run(copy, capsys):
    """Property: whoever gives the settings of a run whose config.json is lost goes on with it, bit
    for bit; with others nothing is written."""
    config, run = tiny(copy / "a.txt", **{"steps": 3}), copy / "run"
    train.train_and_evaluate(tiny(copy / "a.txt"), run)  # so that the checkpoint knows the copy
    whole = (run / "config.json").read_bytes()
    (run / "config.json").unlink()
    with pytest.raises(UsageError, match="has no config.json; to resume training in it"):
        use.sample(config, run)
    refused(tiny(copy / "a.txt", **{"seed": 5}), run, "no config.json", "was saved with other")
    assert not (run / "config.json").exists()
    train.train_and_evaluate(tiny(copy / "a.txt"), run)  # which has nothing else to do
    assert (run / "config.json").read_bytes() == whole
    assert "config.json was missing and is written again: checkpoint 2" in capsys.readouterr().err
    (run / "config.json").unlink()
    train.train_and_evaluate(config, run)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    # An earlier efx told its checkpoints nothing.
    (run / "config.json").unlink()
    forget(run)
    refused(config, run, "but no config.json")


def test_an_upgrade_that_is_killed_between_two_files(copy, monkeypatch):
    """Property: a launch that writes another config.json than the checkpoint was saved with (of an
    efx with more settings, or edited on purpose) can be killed after that file, and goes on."""
    config, run = tiny(copy / "a.txt", **{"steps": 3}), copy / "run"
    path, write = run / "config.json", runfolder._write_sealed
    older = {k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}
    del older["optim"]["momentum"]
    write(path, older)

    def killed(file, content):
        if file != path:
            raise KeyboardInterrupt
        write(file, content)

    with build.checkpointer(run, run_settings.check(config).checkpoint) as checkpoints:
        known = runfolder.fingerprints(run, train.MAY_DIFFER)
        checkpoints.amend(2, None, {"fingerprints": known})  # as that efx had saved it
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runfolder, "_write_sealed", killed)
        train.train_and_evaluate(config, run)
    assert "momentum" in json.loads(path.read_text())["optim"]
    train.train_and_evaluate(config, run)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    assert runfolder._remembered(run)[1] == runfolder.fingerprints(run, train.MAY_DIFFER)


def test_a_run_was_finished_before_a_save_that_failed(copy, capsys, monkeypatch):
    """Property: what is said of a run that is saved waits for the save. And a command does not wait
    for the threads of one that has failed."""

    def fail(*arguments):
        time.sleep(0.3)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(signals, "_left", False)
    monkeypatch.setattr(files, "write_manifest", fail)
    refused_line = "checkpoint 3 could not be saved .*: the disk is full"
    with pytest.raises(UsageError, match=refused_line):
        train.train_and_evaluate(tiny(copy / "a.txt", **{"steps": 3}), copy / "run")
    assert "finished: " not in capsys.readouterr().out and signals.work_is_left()


def test_a_missing_or_altered_metrics_row_does_not_stop_a_resume(copy):
    path = copy / "run/metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first.replace(b"loss", b"lost"))
    train.train_and_evaluate(tiny(copy / "a.txt", **{"steps": 3}), copy / "run")
    assert [row["step"] for row in read_metrics(copy / "run")] == [1, 3]


def test_two_launches_at_once(copy, capsys):
    """Property: one run folder, one launch that writes; reading is free."""
    config, run = tiny(copy / "a.txt", **{"steps": 3}), copy / "run"
    with runfolder.Lock(run):
        refused(config, run, f"--workdir={run} is in use by process ", "another --workdir")
        for action in (train.compose, train.train_and_evaluate):
            with pytest.raises(UsageError, match="is in use by"):
                action(config, run)
        assert math.isfinite(use.evaluate(tiny(copy / "a.txt"), run)["eval/loss"])
        use.sample(common.apply(tiny(copy / "a.txt"), {"sample.max_new_tokens": 1}), run)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "x": 1, "trai\n')  # and killed in the middle of a write
    train.train_and_evaluate(config, run)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]


# Listed when a process that samples has come to its end.
IMPORTED = """
import sys
from efx.main import main
assert main(["efx", "--mode=sample", "--workdir=" + sys.argv[1], "--prompt=line"]) == 0
print(*sys.modules)
"""


def test_sampling_imports_nothing_that_only_training_needs(trained, root):
    command = [sys.executable, "-c", IMPORTED, str(trained / "run")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("line"), done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert {"jax", "flax", "orbax.checkpoint", "efx.sample"} <= modules
    training = {"grain", "array_record", "tensorboardX", "tokenizers", "matplotlib", "efx.train",
                "efx.cbtm", "efx.studies", "efx.interop", "safetensors", "wandb", "torch",
                "transformers", "sklearn", "datasets"}  # fmt: skip
    assert not training & modules


# ---- the end -----------------------------------------------------------------------------------


def launch(folder, text, *more, **changes):
    given = {**TINY, "data.source": f"text:{text}", **changes}
    arguments = [f"--config.{key}={value}" for key, value in given.items()]
    return main.main(["efx", "--config=configs/mod.py", f"--workdir={folder}", *arguments, *more])


DIVERGED = {"optim.name": "sgd", "optim.learning_rate": 3e38, "optim.clip_norm": 0.0, "steps": 4,
            "optim.lr_multipliers": ((".*", 1e9),),  # the two together are inf in float32
            "evaluate.every": 1, "checkpoint.every": 1, "checkpoint.keep_last": 4,
            "train.max_nonfinite": 1000, "model.depth_routing.kind": "none",
            "log.every": 4}  # fmt: skip


def test_a_run_that_ends_in_nan_has_finished(trained, tmp_path, capsys, monkeypatch, root):
    """Property: its status says so, its last line why, and another launch says it again."""
    monkeypatch.chdir(root)
    for _ in range(2):
        assert launch(tmp_path / "run", trained / "a.txt", **DIVERGED) == 3
        said = capsys.readouterr()
        (line,) = [line for line in said.err.splitlines() if line.startswith("efx: stopped: ")]
        assert "at step 4, the last, the held-out loss is" in line
        assert "nan: the parameters are not finite; a lower config.optim.learning_rate" in line
        assert "finished:" not in said.out
    last = read_metrics(tmp_path / "run")[-1]
    # Skipped steps are counted up to the row's; of the others a row has means.
    assert last["eval/loss"] is None
    assert last["train/nonfinite_run"] == last["train/nonfinite_total"] == 3


def test_steps_skipped_at_the_end_are_told_from_parameters_that_are_lost(trained, tmp_path):
    """A loss that is not finite in the last steps alone leaves sound parameters behind."""
    config = tiny(trained / "a.txt", **{"train.max_nonfinite": 1000, "evaluate.every": 1,
                                        "checkpoint.every": 1, "steps": 3})  # fmt: skip
    real = train._Launch._pause

    def poisoned(self, due, stop, position):
        """As if the steps after the first had been skipped."""
        zero = jnp.zeros_like(self.state.nonfinite_run)
        self.state = self.state.replace(nonfinite_run=zero + max(0, self.step - 1))
        real(self, due, stop, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train._Launch, "_pause", poisoned)
        with pytest.raises(train.NotFinite) as error:
            train.train_and_evaluate(config, tmp_path / "run")
    line = str(error.value)
    assert "of the last 2 steps was not finite" in line and "those of step 1," in line
    assert "The parameters are finite" in line and "\n" not in line
    # A loss that is lost though the parameters are not is told from parameters that are.
    this = types.SimpleNamespace(state=types.SimpleNamespace(nonfinite_run=0))
    for value, why in ((1e38, "finite, but the forward pass overflows"), (np.inf, "not finite")):
        found = train._Launch._ending(this, math.nan, {"a": jnp.float32([1, value])})
        assert found == f"the held-out loss is nan: the parameters are {why}"
    # The best checkpoint is one of those with a finite loss.
    with Checkpointer(tmp_path / "run/checkpoints", every=1, keep_last=1, keep_best=1,
                      best_metric="eval/loss", asynchronous=False) as found:  # fmt: skip
        assert found.best_step() in (1, 2, 3)


# ---- starting from another run -----------------------------------------------------------------


def test_running_averages_of_the_run_started_from_are_dropped(tmp_path):
    """Property: init.run brings thresholds along where shapes agree, and says what it left."""

    def state(fill, width, blocks):
        params = {"embed": {"embedding": jnp.full((4, 2), fill)}}
        layers = {f"block_{i}": {"quantile": jnp.full(width, fill), "steps": jnp.int32(fill)}
                  for i in blocks}  # fmt: skip
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, (), {"state": {"layers": layers}}, zero, zero)

    (tmp_path / "a").mkdir()
    with Checkpointer(tmp_path / "a/checkpoints", every=1, keep_last=1, keep_best=0,
                      best_metric="", asynchronous=False) as checkpoints:  # fmt: skip
        saved = state(7.0, (3,), (1, 3, 5))
        saved.variables["state"]["layers"]["block_3"]["quantile"] = jnp.full((9,), 7.0)
        checkpoints.save(5, saved, {}, {})
    config, said = common.base(), []
    config.init.run = str(tmp_path / "a")
    config.init.rename = (("layers/block_2/(.*)", r"layers/block_5/\1"),)
    fresh = jax.tree.map(jnp.asarray, state(0.0, (3,), (1, 2, 3, 4)))
    model = types.SimpleNamespace(vocab_size=4, members={})
    found, _ = start_from(fresh, config, model, said.append)
    values = {name: (float(np.ravel(leaf["quantile"])[0]), int(leaf["steps"]))
              for name, leaf in found.variables["state"]["layers"].items()}  # fmt: skip
    assert values == {"block_1": (7.0, 7), "block_2": (7.0, 7),  # block_3 is longer there
                      "block_3": (0.0, 7), "block_4": (0.0, 0)}  # fmt: skip
    (line,) = said
    words = f"starting from {tmp_path / 'a'}, checkpoint 5: 1 parameter arrays loaded, 5 running"
    assert line.startswith(f"{words} averages (3 as in a new run: ") and "\n" not in line
    assert "state/layers/block_3/quantile" in line


def test_what_a_run_starts_from_is_said(trained, tmp_path, capsys):
    """Property: that all parameters came along was not said, where nothing else was to be."""
    config = tiny(trained / "a.txt", **{"init.run": str(trained / "run"), "steps": 1})
    train.train_and_evaluate(config, tmp_path / "next")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "starting from" in line]
    assert re.fullmatch(
        rf"starting from {trained / 'run'}, checkpoint 2: \d+ parameter arrays loaded;"
        " the optimiser and the position in the text are new",
        line,
    )


def test_the_tokenizer_of_the_run_started_from_is_the_one_recorded(trained, tmp_path):
    """Property: a run says the tokenizer that it has; one that was asked for was passed over, and
    recorded."""
    run = trained / "run"
    for spec in ("chars", "bpe:300"):
        config = tiny(trained / "a.txt", **{"init.run": str(run), "data.tokenizer": spec})
        refused(
            config,
            tmp_path / "next",
            f"config.data.tokenizer={spec!r}: config.init.run={run} was trained with 'bytes'",
            "use --config.data.tokenizer=bytes",
        )
        # A study says so before the first of its runs trains, of a run that it still makes, too.
        for made in ({}, {str(run): tiny(trained / "a.txt")}):
            with pytest.raises(UsageError, match="config.init.run=.* was trained with 'bytes'"):
                rehearsal.flops_of(run_settings.check(config), 1, 0.0, made)
    assert not (tmp_path / "next").exists()
    # Its file is the same tokenizer by another name.
    shutil.copy(run / "tokenizer.json", tmp_path)
    same = {"init.run": str(run), "data.tokenizer": str(tmp_path / "tokenizer.json")}
    e = build.experiment(tiny(trained / "a.txt", **same), tmp_path / "next")
    assert e.tokenizer.kind == "bytes"
    for made in ({}, {str(run): tiny(trained / "a.txt")}):
        rehearsal.flops_of(run_settings.check(tiny(trained / "a.txt", **same)), 1, 0.0, made)


def test_more_steps_say_that_the_learning_rate_jumps(copy, capsys):
    """Property: a longer run has a longer schedule, whose rate is not what the run ended with."""
    build.experiment(tiny(copy / "a.txt"), copy / "run")
    for same_rate in ({"optim.schedule.decay_steps": 4}, {"optim.schedule.kind": "constant"}):
        build.experiment(tiny(copy / "a.txt", **{"steps": 5, **same_rate}), copy / "run")
    assert capsys.readouterr().err == ""
    build.experiment(tiny(copy / "a.txt", **{"steps": 5}), copy / "run")
    assert capsys.readouterr().err == (
        "efx: warning: the learning rate schedule ends with the run: with 5 steps instead of 2,"
        " the rate at step 2 is 0.000868 instead of 0.0001\n"
    )


def test_a_study_does_not_start_a_finished_run_again(copy, monkeypatch, capsys):
    """A finished sweep printed the lines of each of its runs before its table."""
    started, command = [], [f"--workdir={copy / 'run'}"]
    monkeypatch.setattr(jobs, "_status_of", lambda command, *_, **__: started.append(command) or 0)
    assert jobs.run_main("a run", command, copy / "log")[0] == 0
    assert not started and capsys.readouterr().out == ""
    for change in ("steps=3", "seed=1"):  # the first continues the run, the second is refused
        jobs.run_main("a run", [*command, f"--config.{change}"], copy / "log")
    assert len(started) == 2


@pytest.mark.parametrize("key, rows, width, hidden", [
    ("data.batch_size", 2**12, 8, 2**16), ("evaluate.batch_size", 2**15, 512, 8),
])  # fmt: skip
def test_a_batch_that_the_runtime_cannot_allocate_is_one_line(
    key, rows, width, hidden, trained, tmp_path
):
    """The least that is needed fits, so nothing is refused before a device allocates. The address
    space of this process has a GiB left, which is less than the activations of the batch."""
    size = {"model.width": width, "model.mlp.hidden": hidden, "data.batch_size": 1, key: rows}
    config = tiny(trained / "a.txt", **size)
    status = pathlib.Path("/proc/self/status").read_text()
    used = 1024 * int(re.search(r"VmSize:\s+(\d+) kB", status)[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
    try:
        with pytest.raises(UsageError, match=f"ran out of memory .*; lower config.{key}={rows}"):
            train.train_and_evaluate(config, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
