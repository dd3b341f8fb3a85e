"""metrics.jsonl, TensorBoard, W&B, late fetching and the progress line."""

import contextlib
import json
import math
import os
import pty
import resource
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from metrics_helpers import environment, make, run_script

from efx.errors import UsageError
from efx.metrics import (
    MetricsBuffer,
    MetricsWriter,
    Progress,
    duration,
    mean_of,
    quantity,
    read_metrics,
)


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


# ---- metrics.jsonl ---------------------------------------------------------------------------


def test_rows_are_on_disk_at_once_and_valid_json(tmp_path):
    writer = make(tmp_path)  # never closed: what a killed run leaves behind
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


def test_one_line_per_step(tmp_path):
    with make(tmp_path) as writer:
        writer.write(1, {"train/loss": 2.5})
        writer.write(2, {"train/loss": 2.123456789, "x": 1})
        writer.write(2, {"eval/loss": 3.0})
        writer.write(2, {"train/loss": 2.0, "eval/loss": 3.0})  # shorter than it was
        assert json.loads(lines(tmp_path)[1])["train/loss"] == 2.0 and len(lines(tmp_path)) == 2
        writer.write(3, {"train/loss": 1.0})
    with make(tmp_path) as writer:  # another process goes on
        writer.write(3, {"eval/loss": 4.0})
        with pytest.raises(ValueError, match="step 2 were logged after those of step 3"):
            writer.write(2, {"x": 1})
    assert [json.loads(line) for line in lines(tmp_path)] == [
        {"step": 1, "train/loss": 2.5},
        {"step": 2, "train/loss": 2.0, "x": 1, "eval/loss": 3.0},
        {"step": 3, "train/loss": 1.0, "eval/loss": 4.0},
    ]


@pytest.mark.parametrize(
    "step,left", [(0, []), (2, [1, 2]), (3, [1, 2]), (4, [1, 2, 4]), (9, [1, 2, 4, 5])]
)
def test_truncate_after(tmp_path, step, left):
    with make(tmp_path) as writer:
        for s in (1, 2, 4, 5):
            writer.write(s, {"loss": s / 3})
    with make(tmp_path) as writer:
        writer.truncate_after(step)
        writer.write(step + 1, {"loss": 0.0})
        writer.write(step + 1, {"more": 0.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [*left, step + 1]
    assert all(math.isclose(r["loss"], r["step"] / 3) for r in read_metrics(tmp_path)[:-1])


def test_a_torn_last_line_is_dropped(tmp_path):
    with make(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 2.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    with make(tmp_path) as writer:
        writer.write(2, {"loss": 3.0})
    assert [json.loads(line)["loss"] for line in lines(tmp_path)] == [1.0, 3.0]


@pytest.mark.parametrize("last", [b'{"step": 3, "lo\n', b"\0\0\0\0\n", b"\0\0", b"7\n", b"\n"])
def test_a_broken_last_line_stops_a_resume(tmp_path, last):
    """Property: a last line that is no row is dropped, also one with an end: what was being
    written over an older line, or what a crash of the machine left."""
    with make(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 2.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(last)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    with make(tmp_path) as writer:
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(last)  # looked at, not touched
        writer.write(3, {"loss": 3.0})
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_samples_of_later_steps_stay_beside_those_of_the_resumed_run(tmp_path):
    """Property: what was written past the step that a run goes on from is gone, samples too."""
    with make(tmp_path) as writer:
        for step in (2, 4):
            writer.write(step, {"loss": 1.0})
            writer.write_text(step, "sample 0", f"old {step}")
        (tmp_path / "samples" / "notes.txt").write_text("mine")
        (tmp_path / "samples" / "step_by_step.txt").write_text("mine")
    with make(tmp_path) as writer:
        writer.truncate_after(2)
        writer.write_text(4, "sample 0", "new 4")
    found = {path.name: path.read_text() for path in (tmp_path / "samples").iterdir()}
    assert found == {"step_00000002.txt": "## sample 0\nold 2\n",
                     "step_00000004.txt": "## sample 0\nnew 4\n",
                     "notes.txt": "mine", "step_by_step.txt": "mine"}  # fmt: skip


def test_names_of_samples_sort_by_step(tmp_path):
    """Names without leading zeros, as earlier versions wrote them, are still dropped by step."""
    samples = tmp_path / "samples"
    with make(tmp_path) as writer:
        for step in (1000, 250):
            writer.write_text(step, "sample 0", "text")
        named = sorted(path.name for path in samples.iterdir())
        assert [int(name[len("step_") : -len(".txt")]) for name in named] == [250, 1000]
        (samples / "step_500.txt").write_text("of an earlier version")
        writer.truncate_after(400)
    assert [path.name for path in samples.iterdir()] == named[:1]


def test_kill_9_while_writing(tmp_path):
    script = """if True:
        import sys
        from efx.metrics import MetricsWriter
        assert "jax" not in sys.modules and "numpy" not in sys.modules
        writer = MetricsWriter(sys.argv[1], tensorboard=False)
        writer.truncate_after(0)
        print("go", flush=True)
        step = 0
        while True:
            step += 1
            writer.write(step, {"loss": 1 / step})
            writer.write(step, {"eval": 1 / step})
    """
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment()
    )
    try:
        assert process.stdout.readline() == b"go\n"
        while (tmp_path / "metrics.jsonl").stat().st_size < 20_000:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with make(tmp_path) as writer:
        rows = read_metrics(tmp_path)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) > 100
        writer.write(len(rows) + 1, {"loss": 0.0})
    assert len(read_metrics(tmp_path)) == len(rows) + 1


@pytest.mark.parametrize("step", ['"1"', "null", "[1]", "1.5"])
def test_a_step_that_is_no_number_is_one_line(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n{{"step": 2}}\n')
    for call in (lambda: make(tmp_path), lambda: read_metrics(tmp_path)):
        with pytest.raises(UsageError, match="metrics.jsonl line 1 is not a metrics row"):
            call()


def test_bad_files_are_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    for call in (lambda: make(tmp_path), lambda: read_metrics(tmp_path)):
        with pytest.raises(UsageError, match="metrics.jsonl line 2 is not a metrics row"):
            call()
    assert (tmp_path / "metrics.jsonl").read_text().endswith('{"step": 3}\n')  # left as it was
    with pytest.raises(UsageError, match="cannot read .*No such file"):
        read_metrics(tmp_path / "absent")
    with pytest.raises(UsageError, match="cannot write .*absent: "):
        make(tmp_path / "absent")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    """Every write to this device fails with the error of a full disk."""
    with make(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, writer._file)
        os.close(full)
        with pytest.raises(UsageError) as error:
            writer.write(2, {"loss": 1.0})
    assert "metrics.jsonl: the disk is full" in str(error.value) and "\n" not in str(error.value)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_other_processes_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with make(tmp_path, tensorboard=True) as writer, Progress(3, plain_seconds=0) as progress:
        writer.truncate_after(0)
        writer.write(1, {"loss": 1.0})
        writer.write_text(1, "sample", "text")
        progress.update(1, loss=1.0)
        progress.println("hello")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


# ---- TensorBoard, text, W&B ------------------------------------------------------------------


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


@pytest.mark.parametrize("is_there_again", [False, True])
def test_a_folder_that_vanished_is_not_made_again(tmp_path, is_there_again):
    """A save that is under way may make it again, without the run."""
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    (run / "config.json").write_text("{}")
    with make(run) as writer:
        writer.write(1, {"loss": 2.0})
        run.rename(away)
        if is_there_again:
            run.mkdir()
        for write in (
            lambda: writer.write_text(2, "sample 0", "def f"),
            lambda: writer.write(2, {}),
        ):
            with pytest.raises(UsageError, match=f"cannot write {run}.*: No such file"):
                write()
        assert run.exists() == is_there_again and not list(run.glob("*"))
    assert len((away / "metrics.jsonl").read_text().splitlines()) == 1


def test_tensorboard_events_and_resume(tmp_path, capfd):
    with make(tmp_path, tensorboard=True) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
        writer.write(4, {"bad": math.nan, "n": 10**12})
        writer.write_text(5, "sample 0", "def f")
    found = events(tmp_path)
    assert found[:3] == [(1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0)]
    assert math.isnan(found[3][2]) and found[4] == (4, "n", float(np.float32(1e12)))
    assert found[5] == (5, "sample 0/text_summary", "text")
    assert capfd.readouterr() == ("", "")
    with make(tmp_path, tensorboard=True) as writer:
        writer.truncate_after(1)
        writer.write(2, {"loss": 20.0})
    assert events(tmp_path) == [(1, "loss", 1.0), (2, "loss", 20.0)]


def test_tensorboard_on_a_full_disk_is_one_line_and_no_hang(tmp_path):
    """The event file is the larger of the two, so the limit meets it alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = make(tmp_path, tensorboard=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(UsageError, match="cannot write .*tensorboard: File too large"):
            writer.write(1, {f"n{i}": 1.0 for i in range(100)})
            writer.close()
        assert [row["step"] for row in read_metrics(tmp_path)] == [1]
        (tmp_path / "b").mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
        with pytest.raises(ZeroDivisionError), make(tmp_path / "b", tensorboard=True) as writer:
            writer.write(1, {f"n{i}": 1.0 for i in range(20)})
            raise ZeroDivisionError  # not hidden by the error that close() meets
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_tensorboard_does_not_bring_torch_in(tmp_path):
    """Importing torch takes seconds of a run's start, and tensorboardX would."""
    script = """if True:
        import sys
        from efx.metrics import MetricsWriter
        with MetricsWriter(sys.argv[1], tensorboard=True) as writer:
            writer.write(1, {"loss": 1.0})
        print(any(name.startswith("torch.") for name in sys.modules))
    """
    done = run_script(script, tmp_path)
    assert done.stdout == "False\n", done.stderr


def test_no_tensorboard_unless_asked(tmp_path):
    with make(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_samples_go_to_files(tmp_path):
    with make(tmp_path) as writer:
        writer.write_text(20, "sample 0", "def f(x):\n    return 'é'")
        writer.write_text(20, "sample 1", "class")
    text = (tmp_path / "samples" / "step_00000020.txt").read_text(encoding="utf-8")
    assert text == "## sample 0\ndef f(x):\n    return 'é'\n## sample 1\nclass\n"


def test_wandb_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(UsageError) as error:
        make(tmp_path, wandb={"project": "project"})
    assert "config.log.wandb='project': wandb is not installed; install the extra `wandb`" in str(
        error.value
    )


def test_wandb_resumes_the_same_run(tmp_path, monkeypatch):
    """Against a stand-in: a server is needed to rewind. One without the feature refuses it."""
    calls, configs, can_rewind = [], [], True

    def init(**arguments):
        calls.append(arguments)
        if "resume_from" in arguments and not can_rewind:
            raise RuntimeError("no such feature")
        return types.SimpleNamespace(
            id="abc123",
            step=0,
            define_metric=lambda *a, **k: None,
            log=lambda row, step: calls.append((step, row)),
            finish=lambda: calls.append("finish"),
            config=types.SimpleNamespace(update=lambda config, **_: configs.append(config)),
        )

    settings = types.SimpleNamespace(mode="online")
    setup = types.SimpleNamespace(settings=settings)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, setup=lambda: setup))
    of_run = {"project": "project", "name": "a", "tags": ["x"], "config": {"seed": 1}}

    def launch(resume_step, *steps):
        calls.clear()
        with MetricsWriter(
            tmp_path, tensorboard=False, wandb=of_run, resume_step=resume_step
        ) as writer:
            writer.truncate_after(resume_step or 0)
            for step in steps:
                writer.write(step, {"loss": 2.0})
        return [call for call in calls if call != "finish"]

    def sent(*steps):
        return [(step, {"step": step, "loss": 2.0}) for step in steps]

    first, *rows = launch(None, 1, 2, 3)
    assert first["id"] is None and rows == sent(1, 2, 3) and calls[-1] == "finish"
    assert first["project"] == "project" and first["resume"] == "allow"
    assert first["config"] == configs[0] == {"seed": 1} and first["tags"] == ["x"]
    again, *rows = launch(3, 4)
    assert (again["id"], again["resume"]) == ("abc123", "allow") and rows == sent(4)
    rewound, *rows = launch(2, 3)
    assert rewound["resume_from"] == "abc123?_step=2" and "id" not in rewound and rows == sent(3)
    can_rewind = False
    _, again, *rows = launch(1, 2, 3, 4)
    assert again["id"] == "abc123" and rows == sent(4)


WANDB = """if True:
    import sys
    from efx.metrics import MetricsWriter
    for resume_step, last in ((None, 13), (10, 12), (10, 15)):
        with MetricsWriter(
            sys.argv[1], tensorboard=False, wandb={"project": "p"}, resume_step=resume_step
        ) as writer:
            writer.truncate_after(resume_step or 0)
            for step in range(resume_step + 1 if resume_step else 9, last + 1):
                writer.write(step, {"loss": 1.0})
                writer.write(step, {"eval": 1.0})
"""


def test_wandb_has_each_step_once_after_a_resume_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = run_script(WANDB, tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    rows = [row for path in files for row in wandb_rows(path)]
    assert sorted(row["step"] for row in rows) == [9, 10, 11, 12, 13, 14, 15]
    assert all(row["_step"] == row["step"] and row["eval"] == 1.0 for row in rows)
    assert [row["step"] for row in read_metrics(tmp_path)] == [9, 10, 11, 12, 13, 14, 15]
    assert done.stderr.count("steps 11 to 13 are not sent") == 2


def wandb_rows(path):
    """Rows of a .wandb file: after 7 bytes of header protobuf records in LevelDB's log format, in
    blocks of 32 KiB, each fragment with checksum (4 bytes), length (2) and type (1)."""
    from wandb.proto import wandb_internal_pb2

    data, position, content = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        content += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            record, content = wandb_internal_pb2.Record.FromString(content), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


# ---- late fetching and means -----------------------------------------------------------------


def test_buffer_never_hands_out_the_newest_step():
    buffer = MetricsBuffer()
    assert buffer.pop_ready() == [] and buffer.pop_all() == []
    buffer.push(1, {"loss": jnp.float32(1.0)})
    assert buffer.pop_ready() == []
    buffer.push(2, {"loss": jnp.float32(2.0), "n": jnp.int32(3)})
    buffer.push(3, {"loss": jnp.bfloat16(3.0)})
    assert buffer.pop_ready() == [(1, {"loss": 1.0}), (2, {"loss": 2.0, "n": 3})]
    assert buffer.pop_ready() == []
    assert buffer.pop_all() == [(3, {"loss": 3.0})] and buffer.pop_all() == []


def test_buffer_does_not_wait_for_the_newest_step():
    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 200, lambda i, y: jnp.sin(y @ y), x).sum()

    x = jnp.ones((400, 400))
    step(x).block_until_ready()
    buffer = MetricsBuffer()
    buffer.push(1, {"loss": jnp.float32(1.0)})
    newest = step(x)
    buffer.push(2, {"loss": newest})
    assert buffer.pop_ready() == [(1, {"loss": 1.0})]
    assert not newest.is_ready()  # still being computed
    assert buffer.pop_all() == [(2, {"loss": float(newest)})]


def test_mean_of():
    assert mean_of([]) == {}
    assert mean_of([{"a": 1, "b": 1.0}, {"a": 2}]) == {"a": 1.5, "b": 1.0}
    means = mean_of([{"a": math.nan, "b": math.inf}, {"a": 4.0, "b": math.nan}])
    assert means["a"] == 4.0 and math.isnan(means["b"])


# ---- progress --------------------------------------------------------------------------------


def test_progress_prints_plain_lines_without_a_terminal(capsys):
    with Progress(100, peak_flops_per_second=1e12, plain_seconds=3600) as progress:
        for step in range(10, 101, 10):
            progress.update(
                step, loss=2.0, tokens_per_second=12345.0, flops=1e15, flops_per_second=5e11
            )
        progress.println("held-out loss 1.9")
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "step 10/100  loss 2.0000  12.3k tokens/s  1.00 PFLOPs  500 GFLOP/s  MFU 50.0%",
        "step 100/100  loss 2.0000  12.3k tokens/s  1.00 PFLOPs  500 GFLOP/s  MFU 50.0%",
        "held-out loss 1.9",
    ]


def test_progress_tells_the_time_left(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress(1000, plain_seconds=0) as progress:
        for step in (100, 200, 300):
            progress.update(step, loss=1.0)
            now[0] += 50.0
    out = capsys.readouterr().out.splitlines()
    assert "left" not in out[0]
    assert out[1].endswith("0:06:40 left") and out[2].endswith("0:05:50 left")


def test_progress_is_one_live_line_in_a_terminal():
    def updates(progress):
        progress.update(1, loss=5.0)
        progress.println("[an evaluation]\nof two lines")
        progress.update(2, loss=4.0)
        progress.update(3, loss=3.0)

    screen = in_a_terminal(3, updates)
    assert screen == ["[an evaluation]", "of two lines", "step 3/3  loss 3.0000"], screen


@pytest.mark.parametrize("columns, words", [
    (100, "11.6k tokens/s  4.45 GFLOPs  10.0 GFLOP/s  MFU 1.0%"),
    (80, "11.6k tokens/s  10.0 GFLOP/s  MFU 1.0%"),
    (60, "11.6k tokens/s"),
    (40, ""),
])  # fmt: skip
def test_what_matters_least_gives_way_in_a_narrow_terminal(monkeypatch, columns, words):
    """The time left, at the end of the line, was cut off."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", str(columns))
    rates = dict(tokens_per_second=11_600, flops=4.45e9, flops_per_second=1e10)

    def updates(progress):
        progress.update(5, loss=5.0)
        now[0] += 0.2
        progress.update(10, loss=4.7246, **rates)

    (line,) = in_a_terminal(100, updates, peak_flops_per_second=1e12)
    expected = ["step 10/100", "loss 4.7246", *[words] * bool(words), "0:00:04 left"]
    assert line == "  ".join(expected) and len(line) <= columns


def in_a_terminal(total, updates, **options):
    """The lines that a terminal shows after these updates."""
    reader, writer = pty.openpty()
    with open(writer, "w", encoding="utf-8") as stream:
        progress = Progress(total, stream=stream, **options)
        progress._LIVE_SECONDS = 0.0
        with progress:
            updates(progress)
        stream.flush()
        os.set_blocking(reader, False)
        out = ""
        with contextlib.suppress(BlockingIOError):  # raised when nothing is left
            while True:
                out += os.read(reader, 100_000).decode()
    os.close(reader)
    return shown(out)


def shown(out):
    """What a terminal shows after `out`, for the few control codes that are used here."""
    import re

    rows, row, column = [""], 0, 0
    for code, text in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", out):
        if code == "\r":
            column = 0
        elif code == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif code.endswith("A"):
            row -= int(code[2:-1] or 1)
        elif code.endswith("K"):
            rows[row] = ""
        elif text:
            rows[row] = rows[row][:column] + text + rows[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in rows if line.strip()]


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0, "tokens", "0 tokens"),
        (999, "", "999"),
        (999.9, "", "1.00k"),
        (247_104, "parameters", "247k parameters"),
        (6100, "tokens/s", "6.10k tokens/s"),
        (99_990, "", "100k"),
        (1.5e9, "tokens", "1.50B tokens"),
        (2.5e15, "tokens", "2500T tokens"),
        (0, "FLOPs", "0 FLOPs"),
        (1.5e9, "FLOPs", "1.50 GFLOPs"),
        (2.5e21, "FLOP/s", "2.50 ZFLOP/s"),
        (0.01234, "", "0.0123"),
    ],
)
def test_quantities_are_written_as_people_read_them(value, unit, text):
    assert quantity(value, unit) == text


def test_duration():
    assert [duration(x) for x in (0, 59.6, 3661, 90061)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "1 d 1:01:01",
    ]
