"""metrics.jsonl, samples, TensorBoard, W&B, late fetching and the progress line."""

import json
import math
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from run_files import largest_file, writer_of

from efx.logging import (
    MetricsBuffer,
    MetricsWriter,
    Progress,
    mean_of,
    read_metrics,
)


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


# ---- metrics.jsonl ---------------------------------------------------------------------------


def test_rows_are_on_disk_at_once_and_valid_json(tmp_path):
    writer = writer_of(tmp_path)  # never closed: what a killed run leaves behind
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


def test_one_line_per_step(tmp_path):
    with writer_of(tmp_path) as writer:
        writer.write(1, {"train/loss": 2.5})
        writer.write(2, {"train/loss": 2.123456789, "x": 1})
        writer.write(2, {"eval/loss": 3.0})
        writer.write(2, {"train/loss": 2.0, "eval/loss": 3.0})  # shorter than before
        assert json.loads(lines(tmp_path)[1])["train/loss"] == 2.0 and len(lines(tmp_path)) == 2
        writer.write(3, {"train/loss": 1.0})
    with writer_of(tmp_path) as writer:  # another process
        writer.write(3, {"eval/loss": 4.0})
        with pytest.raises(ValueError, match="step 2 .* step 3"):
            writer.write(2, {"x": 1})
    assert [json.loads(line) for line in lines(tmp_path)] == [
        {"step": 1, "train/loss": 2.5},
        {"step": 2, "train/loss": 2.0, "x": 1, "eval/loss": 3.0},
        {"step": 3, "train/loss": 1.0, "eval/loss": 4.0},
    ]


@pytest.mark.parametrize("step, left", [(0, []), (3, [1, 2]), (4, [1, 2, 4]), (9, [1, 2, 4, 5])])
def test_a_resume_drops_the_rows_of_later_steps(tmp_path, step, left):
    with writer_of(tmp_path) as writer:
        for s in (1, 2, 4, 5):
            writer.write(s, {"loss": s / 3})
    with writer_of(tmp_path) as writer:
        writer.truncate_after(step)
        writer.write(step + 1, {"loss": 0.0})
        writer.write(step + 1, {"more": 0.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [*left, step + 1]
    assert all(math.isclose(r["loss"], r["step"] / 3) for r in read_metrics(tmp_path)[:-1])


@pytest.mark.parametrize("last", [b'{"step": 3, "lo', b'{"step": 3, "lo\n', b"\0\0\n", b"7\n"])
def test_a_broken_last_line_is_dropped(tmp_path, last):
    """With a line end too: a row that was being extended, or what a crash of the machine left."""
    with writer_of(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 2.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(last)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    with writer_of(tmp_path) as writer:
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(last)  # opening changes nothing
        writer.write(3, {"loss": 3.0})
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_samples_are_files_named_by_step_and_a_resume_drops_later_ones(tmp_path):
    samples = tmp_path / "samples"
    with writer_of(tmp_path) as writer:
        for step in (20, 1000):
            writer.write(step, {"loss": 1.0})
            writer.write_samples(step, ["def f(x):\n    return 'é'", "class"])
        (samples / "notes.txt").write_text("mine")
    with writer_of(tmp_path) as writer:
        writer.truncate_after(400)
        writer.write_samples(1000, ["new"])
    found = {path.name: path.read_text(encoding="utf-8") for path in samples.iterdir()}
    assert found == {
        "step_00000020.txt": "## sample 0\ndef f(x):\n    return 'é'\n## sample 1\nclass\n",
        "step_00001000.txt": "## sample 0\nnew\n",
        "notes.txt": "mine",
    }


@pytest.mark.parametrize(
    "text", ['{"step": 1}\nnot json\n{"step": 3}\n', '{"step": 1}\n{"step": "2"}\n{"step": 3}\n']
)
def test_a_broken_line_in_the_middle_is_refused(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    for call in (lambda: writer_of(tmp_path), lambda: read_metrics(tmp_path)):
        refused(call, "metrics.jsonl", "line 2")
    assert (tmp_path / "metrics.jsonl").read_text() == text
    refused(lambda: read_metrics(tmp_path / "absent"), str(tmp_path / "absent"))
    refused(lambda: writer_of(tmp_path / "absent"), str(tmp_path / "absent"))


def test_a_full_disk_is_one_line(tmp_path):
    with writer_of(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        with largest_file(20):
            refused(lambda: writer.write(2, {"loss": 1.0}), "metrics.jsonl")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_other_processes_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with writer_of(tmp_path, tensorboard=True) as writer, Progress(3, plain_seconds=0) as progress:
        writer.truncate_after(0)
        writer.write(1, {"loss": 1.0})
        writer.write_samples(1, ["text"])
        progress.update(1, loss=1.0)
        progress.println("hello")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


# ---- TensorBoard, W&B ------------------------------------------------------------------------


def events(workdir):
    """[(step, tag, value or "text")] that TensorBoard would show, purging as it does."""
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
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
        writer.write(4, {"bad": math.nan, "n": 10**12})
        writer.write_samples(5, ["def f"])
    found = events(tmp_path)
    assert found[:3] == [(1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0)]
    assert math.isnan(found[3][2]) and found[4] == (4, "n", float(np.float32(1e12)))
    assert found[5] == (5, "sample 0/text_summary", "text")
    assert capfd.readouterr() == ("", "")
    with writer_of(tmp_path, tensorboard=True) as writer:
        writer.truncate_after(1)
        writer.write(2, {"loss": 20.0})
    assert events(tmp_path) == [(1, "loss", 1.0), (2, "loss", 20.0)]


def test_wandb_resumes_the_same_run_and_rewinds_it(tmp_path, monkeypatch):
    """Against a stand-in, with and without a server that can rewind."""
    calls, can_rewind = [], True

    def init(**arguments):
        calls.append(arguments)
        if "resume_from" in arguments and not can_rewind:
            raise RuntimeError("no such feature")
        return types.SimpleNamespace(
            id="abc123", step=0, define_metric=lambda *a, **k: None, finish=lambda: None,
            log=lambda row, step: calls.append((step, row)),
            config=types.SimpleNamespace(update=lambda *a, **k: None),
        )  # fmt: skip

    setup = types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, setup=lambda: setup))
    of_run = {"project": "project", "tags": ["x"], "config": {"seed": 1}}

    def launch(resume_step, *steps):
        calls.clear()
        with MetricsWriter(
            tmp_path, tensorboard=False, wandb=of_run, resume_step=resume_step
        ) as writer:
            writer.truncate_after(resume_step or 0)
            for step in steps:
                writer.write(step, {"loss": 2.0})
        return list(calls)

    def sent(*steps):
        return [(step, {"step": step, "loss": 2.0}) for step in steps]

    first, *rows = launch(None, 1, 2, 3)
    assert first["id"] is None and rows == sent(1, 2, 3) and first.items() >= of_run.items()
    again, *rows = launch(3, 4)
    assert (again["id"], again["resume"]) == ("abc123", "allow") and rows == sent(4)
    rewound, *rows = launch(2, 3)
    assert rewound["resume_from"] == "abc123?_step=2" and "id" not in rewound and rows == sent(3)
    can_rewind = False
    _, again, *rows = launch(1, 2, 3, 4)
    assert again["id"] == "abc123" and rows == sent(4)


WANDB = """if True:
    import sys
    from efx.logging import MetricsWriter
    for resume_step, last in ((None, 13), (10, 12), (10, 15)):
        with MetricsWriter(
            sys.argv[1], tensorboard=False, wandb={"project": "p"}, resume_step=resume_step
        ) as writer:
            writer.truncate_after(resume_step or 0)
            for step in range(resume_step + 1 if resume_step else 9, last + 1):
                writer.write(step, {"loss": 1.0})
                writer.write(step, {"eval": 1.0})
"""


@pytest.mark.slow
def test_wandb_has_each_step_once_after_a_resume_offline(tmp_path, root):
    pytest.importorskip("wandb")
    command = [sys.executable, "-c", WANDB, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root), "WANDB_MODE": "offline"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    rows = [row for path in files for row in wandb_rows(path)]
    assert sorted(row["step"] for row in rows) == [9, 10, 11, 12, 13, 14, 15]
    assert all(row["_step"] == row["step"] and row["eval"] == 1.0 for row in rows)
    assert [row["step"] for row in read_metrics(tmp_path)] == [9, 10, 11, 12, 13, 14, 15]


def wandb_rows(path):
    """Rows of a .wandb file: after 7 bytes of header protobuf records in LevelDB's log format, each
    fragment with checksum (4 bytes), length (2) and type (1); this one has a single block."""
    from wandb.proto import wandb_internal_pb2

    data, content = path.read_bytes()[7:], b""
    assert len(data) < 32768
    while data:
        size, kind = int.from_bytes(data[4:6], "little"), data[6]
        content, data = content + data[7 : 7 + size], data[7 + size :]
        if kind in (1, 4):  # whole, or the last fragment
            record, content = wandb_internal_pb2.Record.FromString(content), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


# ---- late fetching and means -----------------------------------------------------------------


def test_buffer_never_returns_the_newest_step():
    buffer = MetricsBuffer()
    assert buffer.pop_ready() == [] and buffer.pop_all() == []
    buffer.push(1, {"loss": jnp.float32(1.0)})
    assert buffer.pop_ready() == []
    buffer.push(2, {"loss": jnp.float32(2.0), "n": jnp.int32(3)})
    buffer.push(3, {"loss": jnp.bfloat16(3.0)})
    assert buffer.pop_ready() == [(1, {"loss": 1.0}), (2, {"loss": 2.0, "n": 3})]
    assert buffer.pop_ready() == []
    assert buffer.pop_all() == [(3, {"loss": 3.0})] and buffer.pop_all() == []


def test_means_leave_out_what_is_not_finite():
    assert mean_of([]) == {}
    assert mean_of([{"a": 1, "b": 1.0}, {"a": 2}]) == {"a": 1.5, "b": 1.0}
    means = mean_of([{"a": math.nan, "b": math.inf}, {"a": 4.0, "b": math.nan}])
    assert means["a"] == 4.0 and math.isnan(means["b"])


# ---- progress --------------------------------------------------------------------------------


def test_progress_prints_a_line_from_time_to_time_without_a_terminal(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress(1000, plain_seconds=60) as progress:
        for step in (100, 200, 300):  # 200 comes too soon after 100
            progress.update(step, loss=2.0)
            now[0] += 50.0
        progress.println("held-out loss 1.9")
    assert capsys.readouterr().out.splitlines() == [
        "step 100/1000  loss 2.0000",
        "step 300/1000  loss 2.0000  0:05:50 left",
        "held-out loss 1.9",
    ]
