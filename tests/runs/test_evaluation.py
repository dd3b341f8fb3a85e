"""Evaluation changes nothing of a training and is repeatable from a checkpoint."""

import json
import math

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import run_files
from new_rules import new_rules  # noqa: F401 (a fixture)
from refusals import refused

from efx.config.load import config_of_run
from efx.logging import read_metrics
from efx.train import inference, trainer

STEPS = 3
MOD = {
    "steps": STEPS,
    "model.depth_routing.kind": "mod",
    "model.depth_routing.every": 1,
    "model.depth_routing.capacity": 0.5,
    "model.depth_routing.train_selection": "threshold",
    "model.depth_routing.threshold_warmup": 1,
    "model.depth_routing.causal_decision": "threshold",
    "evaluate.calibrate": 1,
    "evaluate.repeated_rows": 8,
    "evaluate.max_batches": 2,
}


def bytes_of(checkpoint):
    """{path: (dtype, shape, bytes)} of the arrays in a checkpoint."""
    state = ocp.PyTreeCheckpointer().restore(checkpoint / "state")
    return {
        jax.tree_util.keystr(path): (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@pytest.mark.usefixtures("one_device")
def test_evaluation_changes_no_bit_of_a_training_and_is_repeatable(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 80)
    runs = {every: tmp_path / f"every_{every}" for every in (0, 1)}
    for every, workdir in runs.items():
        config = run_files.tiny(text, **MOD, **{"evaluate.every": every})
        trainer.train_and_evaluate(config, workdir)
    last = [workdir / "checkpoints" / str(STEPS) for workdir in runs.values()]
    states = [bytes_of(checkpoint) for checkpoint in last]
    assert states[0] == states[1]
    assert any("threshold" in path for path in states[0])
    positions = [json.loads((checkpoint / "data/metadata").read_text()) for checkpoint in last]
    assert positions[0] == positions[1]
    rows = [{row["step"]: row for row in read_metrics(workdir)} for workdir in runs.values()]
    for step in range(1, STEPS + 1):
        for name in ("tokens", "train/loss", "router/decided_fraction"):
            assert rows[0][step][name] == rows[1][step][name]
        assert "eval/loss" in rows[1][step]
    for workdir, row in zip(runs.values(), (rows[0][STEPS], rows[1][STEPS]), strict=True):
        again = inference.evaluate(config_of_run(workdir), workdir)
        evaluated = {name: value for name, value in row.items() if name.startswith("eval/")}
        assert again == evaluated and evaluated["eval/repeated/gain"]


# The end has three bytes a character.
MIXED = "the quick brown fox jumps over the lazy dog. " * 50 + "日本語の文章、だ。漢字 " * 30


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("max_batches", [0, 1, 3])
def test_bits_per_byte_divide_the_nats_and_the_bytes_of_the_same_targets(
    max_batches, tmp_path, capsys
):
    (tmp_path / "text.txt").write_text(MIXED, encoding="utf-8")
    changes = {"data.tokenizer": "chars", "data.eval_fraction": 0.3, "evaluate.batch_size": 5}
    changes |= {"evaluate.max_batches": max_batches, "data.cache_dir": str(tmp_path / "cache")}
    config = run_files.tiny(tmp_path / "text.txt", **changes)
    row = trainer.train_and_evaluate(config, tmp_path / "run")
    e, *_ = inference.restore(config, tmp_path / "run", None, ("eval",))
    batches = list(e.data.eval_batches(5, max_batches))
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    text = "".join(sorted(set(MIXED))[i] for i in targets)
    assert len(text) == row["eval/tokens"] and ("日" in text and "fox" in text)
    expected = row["eval/loss"] * len(text) / math.log(2) / len(text.encode())
    assert row["eval/bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert f"({expected:.4f} bits per byte)" in capsys.readouterr().out
    again = inference.evaluate(config_of_run(tmp_path / "run"), tmp_path / "run")
    assert again["eval/bits_per_byte"] == row["eval/bits_per_byte"]
    assert f"{len(text):,} tokens, {len(text.encode()):,} bytes" in capsys.readouterr().out


@pytest.mark.usefixtures("one_device")
def test_a_tokenizer_that_loses_text_is_evaluated_without_bits_per_byte(tmp_path, capsys):
    library = pytest.importorskip("tokenizers")
    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    inner = library.Tokenizer(library.models.BPE(letters, []))
    inner.decoder = library.decoders.Fuse()
    inner.save(str(tmp_path / "letters.json"))
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 100)
    changes = {"data.tokenizer": str(tmp_path / "letters.json"), "evaluate.every": 1}
    changes |= {"data.cache_dir": str(tmp_path / "cache")}
    config = run_files.tiny(tmp_path / "text.txt", **changes)

    def train():
        return trainer.train_and_evaluate(config, tmp_path / "run")

    refused(train, "lossy_tokenizer", "'. the quick")
    config.data.lossy_tokenizer, config.checkpoint.best_metric = True, "eval/bits_per_byte"
    refused(train, "best_metric")
    config.checkpoint.best_metric = "eval/loss"
    row = train()
    row |= inference.evaluate(config_of_run(tmp_path / "run"), tmp_path / "run")
    printed = capsys.readouterr().out
    assert row["eval/loss"] > 0 and not any("byte" in name for name in row)
    assert "held-out loss" in printed and "byte" not in printed


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("selection", ["first", "threshold"])
def test_calibration_sets_the_thresholds_of_the_last_checkpoint(selection, new_rules, tmp_path):  # noqa: F811
    """Before it is evaluated, so that what is evaluated is what samples. The thresholds are means
    over batches of training text: they select the capacity of it."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 80)
    changes = {**MOD, "model.depth_routing.train_selection": selection, "evaluate.every": 1}
    # Scores move far in each step, so that a running mean is far behind.
    changes |= {"checkpoint.every": 1, "checkpoint.keep_last": 9, "optim.learning_rate": 0.1}
    found = {}
    for count in (0, 2):
        workdir = tmp_path / f"calibrate_{count}"
        changes["evaluate.calibrate"] = count
        trainer.train_and_evaluate(run_files.tiny(text, **changes), workdir)
        rows = {row["step"]: row for row in read_metrics(workdir)}
        for step in (STEPS - 1, STEPS):
            state = inference.restore(config_of_run(workdir), workdir, step)[3]["state"]
            threshold = state["layers"]["block_0"]["threshold"]["quantile"]
            found[count, step] = rows[step], float(threshold)
    (row, threshold), (other_row, other_threshold) = found[2, STEPS], found[0, STEPS]
    assert threshold != other_threshold
    assert row["eval/loss"] != other_row["eval/loss"]
    assert abs(row["eval/router/routed_fraction"] - 0.5) < 0.1
    earlier, other_earlier = (found[count, STEPS - 1][0] for count in (2, 0))
    assert earlier["eval/loss"] == other_earlier["eval/loss"]
    config = config_of_run(workdir)
    config.evaluate.calibrate = 0
    assert inference.evaluate(config, workdir)["eval/loss"] == row["eval/loss"]
    config.evaluate.calibrate = 1
    refused(lambda: inference.evaluate(config, workdir), "config.evaluate.calibrate=1")


@pytest.mark.usefixtures("one_device")
def test_a_mixture_and_held_out_sets_are_logged_and_decide_the_best_checkpoint(tmp_path, capsys):
    """The loss of a set is that of the run evaluated on this set alone."""
    texts = {"a": "the quick brown fox ", "b": "日本語の文章 ", "c": "quick brown "}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{text} {i}" for i in range(200)), "utf-8")
    parts = {
        "a": (f"text:{tmp_path}/a.txt", 0.75),
        "b": (f"text:{tmp_path}/b.txt", ((0, 0.25), (2, 0))),
    }
    config = run_files.tiny("/none", **{"steps": 3, "evaluate.every": 1, "checkpoint.every": 1})
    config.data.mixture, config.data.eval_sets = parts, {"c": f"text:{tmp_path}/c.txt"}
    config.checkpoint.best_metric = "eval/c/bits_per_byte"
    row, run = trainer.train_and_evaluate(config, tmp_path / "run"), tmp_path / "run"
    assert row["train/a/tokens"] + row["train/b/tokens"] == row["tokens"]
    rows = {each["step"]: each for each in read_metrics(run)}
    assert rows[3]["train/b/tokens"] == rows[2]["train/b/tokens"] > 0
    assert rows[3]["train/a/epochs"] > rows[2]["train/a/epochs"]
    assert "held-out sets: a " in capsys.readouterr().out
    alone = config_of_run(run)
    alone.data.eval_source, alone.data.mixture = alone.data.eval_sets["c"], ()
    alone.data.eval_sets = ()
    metrics = inference.evaluate(alone, run)
    for name in ("loss", "bits_per_byte", "tokens"):
        assert row[f"eval/c/{name}"] == pytest.approx(metrics[f"eval/{name}"], rel=1e-6)
    total = sum(row[f"eval/{name}/loss"] * row[f"eval/{name}/tokens"] for name in "ab")
    total /= sum(row[f"eval/{name}/tokens"] for name in "ab")
    assert row["eval/loss"] == pytest.approx(total, rel=0.05)  # and the first token of the second
    config.checkpoint.best_metric = "eval/d/loss"
    train = lambda: trainer.train_and_evaluate(config, tmp_path / "other")  # noqa: E731
    refused(train, "eval/d/loss", "eval/c/loss")
