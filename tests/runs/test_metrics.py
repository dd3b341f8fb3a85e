"""metrics.jsonl, samples, TensorBoard, W&B, late fetching and the progress line."""

import io
import json
import math
import sys
import time
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from run_files import largest_file, watched_flushes, writer_of

from efx.logging import (
    MetricsWriter,
    Progress,
    duration,
    quantity,
    read_metrics,
)
from efx.train.run_log import RunLog, mean_of


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


# ---- metrics.jsonl ---------------------------------------------------------------------------


def test_rows_are_on_disk_at_once_and_valid_json(tmp_path):
    writer = writer_of(tmp_path)  # never closed: the files of a killed run
    writer.write(1, {"train/loss": 2.5, "tokens": 10**18, "ok": True})
    writer.write(2, {"a": np.float32(0.5), "b": jnp.float32(1.5), "c": np.int64(3)})
    writer.write(3, {"nan": math.nan, "inf": jnp.float32(jnp.inf), "minus": -math.inf})

    def no_constants(name):
        raise AssertionError(f"{name} is not JSON")

    rows = [json.loads(line, parse_constant=no_constants) for line in lines(tmp_path)]
    assert rows == [
        {"step": 1, "train/loss": 2.5, "tokens": 10**18, "ok": 1},
        {"step": 2, "a": 0.5, "b": 1.5, "c": 3},
        {"step": 3, "nan": None, "inf": None, "minus": None},
    ]
    assert read_metrics(tmp_path) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]  # no TensorBoard


def test_rows_and_samples_are_flushed_when_a_write_returns(tmp_path):
    with watched_flushes() as flushes, writer_of(tmp_path) as writer:
        for step in (1, 2, 2):
            writer.write(step, {"loss": 2.5})
            assert flushes.missing(tmp_path / "metrics.jsonl") == []
        writer.write_samples(2, ["text"])
        assert flushes.early == flushes.missing(tmp_path / "samples") == []


def test_a_step_has_one_line_that_later_values_extend(tmp_path):
    with writer_of(tmp_path) as writer:
        writer.write(1, {"train/loss": 2.5})
        writer.write(2, {"train/loss": 2.123456789, "x": 1})
        writer.write(2, {"train/loss": 2.0, "eval/loss": 3.0})
        writer.write(3, {"train/loss": 1.0})
    with writer_of(tmp_path) as writer:  # another launch
        writer.write(3, {"eval/loss": 4.0})
        with pytest.raises(ValueError, match="step 2 .* step 3"):
            writer.write(2, {"x": 1})
    assert [json.loads(line) for line in lines(tmp_path)] == [
        {"step": 1, "train/loss": 2.5},
        {"step": 2, "train/loss": 2.0, "x": 1, "eval/loss": 3.0},
        {"step": 3, "train/loss": 1.0, "eval/loss": 4.0},
    ]


@pytest.mark.parametrize("step, kept", [(0, []), (3, [1, 2]), (4, [1, 2, 4]), (9, [1, 2, 4, 5])])
def test_a_resume_drops_the_rows_of_later_steps(tmp_path, step, kept):
    with writer_of(tmp_path) as writer:
        for s in (1, 2, 4, 5):
            writer.write(s, {"loss": s / 3})
    with writer_of(tmp_path) as writer:
        writer.truncate_after(step)
        assert read_metrics(tmp_path) == [{"step": s, "loss": s / 3} for s in kept]
        writer.write(step + 1, {"loss": 0.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [*kept, step + 1]


@pytest.mark.parametrize("last", [b'{"step": 3, "lo', b'{"step": 3}', b"\0\0\n", b"7\n"])
def test_an_incomplete_last_line_is_dropped(tmp_path, last):
    """A row that was being written, or the blocks that a crash of the machine left."""
    with writer_of(tmp_path) as writer:
        writer.write(2, {"loss": 2.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(last)
    assert [row["step"] for row in read_metrics(tmp_path)] == [2]
    with writer_of(tmp_path) as writer:
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(last)  # opening changes nothing
        writer.write(3, {"loss": 3.0})
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [2, 3]


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path):
    refused(lambda: read_metrics(tmp_path / "absent"), str(tmp_path / "absent"))
    with writer_of(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        with largest_file(20):
            refused(lambda: writer.write(2, {"loss": 1.0}), "metrics.jsonl")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    text = '{"step": 1}\n{"step": "2"}\n{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    for call in (lambda: writer_of(tmp_path), lambda: read_metrics(tmp_path)):
        refused(call, "metrics.jsonl", "line 2")
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_a_run_directory_that_vanishes_is_not_made_again(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with writer_of(run, tensorboard=True) as writer:
        writer.write(1, {"loss": 1.0})
        run.rename(tmp_path / "away")
        refused(lambda: writer.write(2, {"loss": 1.0}), "run/metrics.jsonl")
        refused(lambda: writer.write_samples(2, ["text"]), "run/samples")
    assert not run.exists()


def test_samples_are_files_named_by_step_and_a_resume_drops_later_ones(tmp_path):
    samples = tmp_path / "samples"
    with writer_of(tmp_path) as writer:
        for step in (20, 1000):
            writer.write_samples(step, ["def f(x):\n    return 'é'", "class"])
        (samples / "notes.txt").write_text("mine")
    with writer_of(tmp_path) as writer:
        writer.truncate_after(400)
    found = {path.name: path.read_text(encoding="utf-8") for path in samples.iterdir()}
    assert found == {
        "step_00000020.txt": "## sample 0\ndef f(x):\n    return 'é'\n## sample 1\nclass\n",
        "notes.txt": "mine",
    }


def test_other_processes_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with writer_of(tmp_path, tensorboard=True) as writer, Progress(3) as progress:
        writer.truncate_after(0)
        writer.write(1, {"loss": 1.0})
        writer.write_samples(1, ["text"])
        progress.update(1, ROW)
        progress.println("hello")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


# ---- TensorBoard, W&B ------------------------------------------------------------------------


def events(workdir):
    """[(step, tag, value or "text")] that TensorBoard shows."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.session_log.status == SessionLog.START:
                found = [e for e in found if e[0] < event.step]
            for value in event.summary.value:
                is_text = value.HasField("tensor")
                found.append((event.step, value.tag, "text" if is_text else value.simple_value))
    return found


def test_tensorboard_events_and_resume(tmp_path, capfd):
    with writer_of(tmp_path, tensorboard=True) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": float(step)})
        writer.write(4, {"bad": math.nan, "n": 10**12})
        writer.write_samples(5, ["def f"])
    *first, bad, n, text = events(tmp_path)
    assert first == [(1, "loss", 1.0), (2, "loss", 2.0)]
    assert math.isnan(bad[2]) and n == (4, "n", float(np.float32(1e12)))
    assert text == (5, "sample 0/text_summary", "text")
    assert capfd.readouterr() == ("", "")
    with writer_of(tmp_path, tensorboard=True) as writer:
        writer.truncate_after(1)
        writer.write(2, {"loss": 20.0})
    assert events(tmp_path) == [(1, "loss", 1.0), (2, "loss", 20.0)]


def test_wandb_resumes_the_same_run_and_gets_each_step_once(tmp_path, monkeypatch):
    calls = []

    def init(**arguments):
        calls.append(arguments)
        return types.SimpleNamespace(
            id="abc123", step=0, define_metric=lambda *a, **k: None, finish=lambda: None,
            log=lambda row, step: calls.append((step, row)),
            config=types.SimpleNamespace(update=lambda *a, **k: None),
        )  # fmt: skip

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__="spec"))
    arguments = {"project": "project", "tags": ["x"], "config": {"seed": 1}}

    def launch(resume_step, *steps):
        calls.clear()
        with MetricsWriter(
            tmp_path, tensorboard=False, wandb=arguments, resume_step=resume_step
        ) as writer:
            writer.truncate_after(resume_step or 0)
            for step in steps:
                writer.write(step, {"loss": 2.0})
        return calls[0], [step for step, _ in calls[1:]]

    first, sent = launch(None, 1, 2, 3)
    assert first["id"] is None and first.items() >= arguments.items() and sent == [1, 2, 3]
    again, sent = launch(3, 3, 4)  # an evaluation of step 3 was missing
    assert (again["id"], again["resume"]) == ("abc123", "allow") and sent == [3, 4]
    assert launch(1, 2)[1] == []
    assert launch(1, 2, 3, 4, 5)[1] == [5]
    assert launch(None, 1)[0]["id"] is None


# ---- late fetching and means -----------------------------------------------------------------


def test_the_log_leaves_the_newest_step_to_the_device():
    config = SimpleNamespace(log=SimpleNamespace(every=10), train=SimpleNamespace(dtype="float32"))
    log = RunLog(SimpleNamespace(config=config, steps=10), {})
    assert log.collect() == [] and log.collect(wait=True) == []
    log.push(1, {"loss": jnp.float32(1.0)})
    assert log.collect() == []
    log.push(2, {"loss": jnp.float32(2.0), "n": jnp.int32(3)})
    log.push(3, {"loss": jnp.bfloat16(3.0)})
    assert log.collect() == [(1, {"loss": 1.0}), (2, {"loss": 2.0, "n": 3})]
    assert log.collect() == [] and log.collect(wait=True) == [(3, {"loss": 3.0})]


def test_means_leave_out_values_that_are_not_finite():
    assert mean_of([]) == {}
    assert mean_of([{"a": 1, "b": 1.0}, {"a": 2}]) == {"a": 1.5, "b": 1.0}
    means = mean_of([{"a": math.nan, "b": math.inf}, {"a": 4.0, "b": math.nan}])
    assert means["a"] == 4.0 and math.isnan(means["b"])


# ---- progress --------------------------------------------------------------------------------


def report(progress, clock):
    """Two rows of metrics with a step between them, a sample and a last line."""
    progress.update(100, ROW)
    clock[0] += 50.0
    progress.update(150)
    clock[0] += 50.0
    progress.update(200, ROW)
    progress.print_sample("sample", "a\x1b[2J\nb")
    progress.println("the end", "bold")


ROW = {"train/loss": 2.0, "train/learning_rate": 0.001, "train/grad_norm": 0.5}
ROW |= {"tokens_per_second": 1234, "mfu": 0.25, "device_memory": 2**30, "epochs": 0.5}


def test_progress_without_a_terminal_prints_plain_lines(monkeypatch):
    clock, stream = [1000.0], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(1000, stream=stream) as progress:
        report(progress, clock)
    first, second, *others = stream.getvalue().splitlines()
    assert first.startswith("step 100/1000  loss 2.0000  1.23k tokens/s  MFU 25.0%  ")
    assert second == first.replace("step 100/1000", "step 200/1000  0:13:20 left")
    assert others == ["sample:", "  | a\\x1b[2J", "  | b", "the end"]


def test_the_live_line_of_a_terminal_disappears_at_the_end(monkeypatch):
    clock, stream = [1000.0], io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("efx.logging.progress.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Progress(1000, stream=stream) as progress:
        with progress.phase("evaluating"):
            time.sleep(0.6)  # until it has been drawn
        report(progress, clock)
    shown = stream.getvalue()
    assert "evaluating" in shown and "\x1b[0m step 200/1000" in shown and "\x1b[2J" not in shown
    _, end = shown.split("the end")
    assert "step" not in end.rpartition("\x1b[2K")[2]


def test_numbers_as_text():
    cases = {
        (0.5, ""): "0.5",
        (999.4, ""): "999",
        (999.5, ""): "1.00k",
        (247_300, "parameters"): "247k parameters",
        (1.5e12, "tokens"): "1.50T tokens",
        (26.34e12, "FLOPs"): "26.3 TFLOPs",
        (12, "FLOP/s"): "12 FLOP/s",
    }
    assert {case: quantity(*case) for case in cases} == cases
    assert duration(3661.4) == "1:01:01" and duration(90_000) == "1 day, 1:00:00"
