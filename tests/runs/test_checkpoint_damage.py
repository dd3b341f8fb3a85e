"""Checkpoints where something goes wrong: damage, crashes, full disks; and of two processes."""

import contextlib
import errno
import itertools
import json
import logging
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_helpers import (
    abstract,
    assert_same,
    files_of,
    flip,
    make,
    make_state,
    one_line,
    saved,
)
from jax.experimental import multihost_utils
from test_hosts import free_port

from efx.checkpoint import CheckpointError, files, restore_params
from efx.checkpoint.files import MANIFEST

# ---- damage ----------------------------------------------------------------------------------


def flip_a_data_byte(root):
    flip(files_of(root, 4)[-1])


def truncate_a_file(root):
    path = files_of(root, 4)[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_a_file(root):
    files_of(root, 4)[-1].unlink()


def remove_the_state(root):
    shutil.rmtree(root / "4" / "state")


def flip_the_data_position(root):
    path = root / "4" / "data" / "metadata"
    path.write_text(path.read_text().replace("4", "5"))


def cut_the_metadata(root):
    path = root / "4" / "state" / "_METADATA"
    path.write_text(path.read_text()[:40])


def remove_the_manifest(root):
    (root / "4" / MANIFEST).unlink()


def break_the_manifest(root):
    (root / "4" / MANIFEST).write_text("{")


def empty_the_manifest(root):
    (root / "4" / MANIFEST).write_text("[]")


DAMAGE = {
    flip_a_data_byte: "item state, file",
    truncate_a_file: "bytes, expected",
    remove_a_file: "is missing",
    remove_the_state: "item state, file",
    flip_the_data_position: "item data, file metadata does not match",
    cut_the_metadata: "item state, file _METADATA has 40 bytes",
    remove_the_manifest: f"the file of checksums, {MANIFEST}, is missing",
    break_the_manifest: f"the file of checksums, {MANIFEST}, is not readable",
    empty_the_manifest: f"the file of checksums, {MANIFEST}, is not readable",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_newest_checkpoint(tmp_path, damage, capfd):
    states = saved(tmp_path)
    damage(tmp_path)
    shape = abstract(states[4])
    with make(tmp_path) as checkpointer, pytest.raises(CheckpointError) as error:
        checkpointer.restore(shape)
    line = one_line(error)
    assert line.startswith(f"checkpoint 4 in {tmp_path} is damaged: ") and DAMAGE[damage] in line
    assert "checkpoint 2, the one before it, is intact" in line
    assert "--config.checkpoint.on_damage=fall_back" in line
    with make(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="checkpoint 4 in"):
        checkpointer.restore(shape, step=4, on_damage="fall_back")  # asked for by number
    assert capfd.readouterr().err == ""
    assert (tmp_path / "4").exists()  # looking changes nothing

    with make(tmp_path) as checkpointer:
        restored = checkpointer.restore(shape, on_damage="fall_back")
        assert restored.step == 2 and restored.data_state == {"next_index": 2}
        assert_same(restored.state, states[2])
        warning = capfd.readouterr().err
        assert warning.startswith(f"efx: warning: checkpoint 4 in {tmp_path} is damaged")
        assert warning.endswith("going back to checkpoint 2\n") and warning.count("\n") == 1
        assert checkpointer.latest_step() == 2
        # Going on: step 3 then 4 again; the damaged folder makes way and is kept for the user.
        checkpointer.save(3, states[2], {}, {})
        assert "renamed it to damaged_4" in capfd.readouterr().err
        checkpointer.save(4, states[4], {}, {})
        checkpointer.wait()
        assert_same(checkpointer.restore(shape).state, states[4])
        assert checkpointer.steps() == [3, 4]
    assert (tmp_path / "damaged_4").is_dir()


def test_every_file_is_covered(tmp_path):
    """A flipped bit in any file under the items is caught, small or large."""
    states = saved(tmp_path, steps=(4,))
    shape = abstract(states[4])
    checkpointer = make(tmp_path)
    paths = [p for p in (tmp_path / "4").rglob("*") if p.is_file() and p.parent != tmp_path / "4"]
    assert len(paths) > 8
    for path in paths:
        original = path.read_bytes()
        flip(path)
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpointer.restore(shape)
        path.write_bytes(original)
    assert_same(checkpointer.restore(shape).state, states[4])


def test_what_a_run_deletes_while_it_is_read(tmp_path, monkeypatch):
    """Evaluating beside the training, which had just saved again and deleted the step that was
    read, was told of a damaged checkpoint and of backups."""
    states = saved(tmp_path)
    shutil.copytree(tmp_path / "4", tmp_path.parent / "6")

    def deleted(folder, verify=files.verify):
        if folder.name == "4" and folder.exists():
            shutil.rmtree(folder)
            shutil.move(tmp_path.parent / "6", tmp_path / "6")
        verify(folder)

    for read in (
        lambda step: make(tmp_path).restore(abstract(states[4]), step).state.params,
        lambda step: restore_params(tmp_path, abstract(states[4].params), step)[0],
    ):
        monkeypatch.setattr(files, "verify", deleted)
        assert_same(read(None), states[4].params)
        monkeypatch.undo()
        shutil.copytree(tmp_path / "6", tmp_path / "4")
        shutil.move(tmp_path / "6", tmp_path.parent / "6")
        monkeypatch.setattr(files, "verify", deleted)
        words = "checkpoint 4 in .* was deleted while it was read .*; there are: 2, 6"
        with pytest.raises(CheckpointError, match=words):
            read(4)
        monkeypatch.undo()
        shutil.copytree(tmp_path / "6", tmp_path / "4")
        shutil.move(tmp_path / "6", tmp_path.parent / "6")


def test_all_damaged(tmp_path, capfd):
    states = saved(tmp_path)
    flip(files_of(tmp_path, 4)[-1])
    flip(files_of(tmp_path, 2)[-1])
    for choice in ("error", "fall_back"):
        with make(tmp_path) as checkpointer, pytest.raises(CheckpointError) as error:
            checkpointer.restore(abstract(states[4]), on_damage=choice)
        assert "no earlier checkpoint is intact" in one_line(error)


@pytest.mark.parametrize("contents", [(), ("state/d/x",), ("state/_METADATA", "meta/metadata")])
def test_unfinished_folder_is_not_the_latest(tmp_path, contents, capfd):
    states = saved(tmp_path)
    (tmp_path / "6").mkdir()
    for name in contents:
        (tmp_path / "6" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "6" / name).write_text("x")
    with make(tmp_path) as checkpointer:
        assert checkpointer.steps() == [2, 4] and checkpointer.latest_step() == 4
        restored = checkpointer.restore(abstract(states[4]))
        assert restored.step == 4
        assert f"{tmp_path}/6 is not a finished checkpoint; ignoring" in capfd.readouterr().err
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(abstract(states[4]), step=6)
        assert "there is no checkpoint 6" in one_line(error) and "2, 4" in one_line(error)
        assert checkpointer.save(6, states[4], {}, {})  # the number is not lost
        checkpointer.wait()
        assert checkpointer.latest_step() == 6
    assert (tmp_path / "damaged_6").is_dir()


def test_no_checkpoint(tmp_path):
    for root in (tmp_path, tmp_path / "absent"):
        with make(root) as checkpointer, pytest.raises(CheckpointError) as error:
            checkpointer.restore({"x": jax.ShapeDtypeStruct((1,), jnp.float32)})
        assert "no finished checkpoint" in one_line(error) and str(root) in one_line(error)
    assert not (tmp_path / "absent").exists()


def test_another_shape_of_model(tmp_path, capfd):
    states = saved(tmp_path)
    state = make_state(0, width=12)
    with make(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(abstract(state), on_damage="fall_back")
        line = one_line(error)
        assert "checkpoint 4" in line and "does not match the config" in line and "more" in line
        assert "block_0/mlp/up/kernel is float32[8,16] there, float32[12,16] here" in line
        fewer = abstract(states[4].replace(variables={"theta": jnp.ones(2)}))
        with pytest.raises(CheckpointError, match=r"variables/theta is absent there, float32\[2\]"):
            checkpointer.restore(fewer)
        wider = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), abstract(states[4])
        )
        with pytest.raises(CheckpointError, match="head/kernel is bfloat16"):
            checkpointer.restore(wider)
    assert capfd.readouterr().err == ""


def test_orbax_noise_stays_off_the_terminal(tmp_path):
    """Reads under way when one fails raise "Event loop is closed"; failed saves are logged."""
    script = """
        import pathlib, resource, sys, jax, numpy as np
        from efx.checkpoint import Checkpointer, CheckpointError
        from efx.checkpoint import files
        root = sys.argv[1]
        tree = {str(i): np.random.default_rng(i).random((1024, 1024)) for i in range(12)}
        tree = jax.tree.map(lambda x: x.astype(np.float32), tree)
        shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        with Checkpointer(root, every=1, keep_last=1, keep_best=0, best_metric="",
                          asynchronous=True) as c:
            c.save(1, tree, {}, {})
            c.wait()
            data = [p for p in pathlib.Path(root, "1", "state").rglob("*")
                    if p.is_file() and p.stat().st_size > 100_000]
            data[0].unlink()
            files.verify = lambda folder: None  # as if the file vanished after the check
            try:
                c.restore(shape)
            except CheckpointError as error:
                print(f"one line: {error}")
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            try:
                c.save(2, tree, {}, {})
                c.wait()
            except CheckpointError as error:
                print(f"one line: {error}")
    """
    done = python(script, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("one line: checkpoint 1 in"), done.stdout
    assert lines[1].startswith("one line: checkpoint 2 could not be saved")
    assert done.stderr == ""


def test_what_orbax_left_unfinished_stays_off_the_terminal(caplog):
    """Of writes that failed beside the one that is reported asyncio logs each, whenever it is
    collected: one by its traceback, one without any, by the name of its file."""
    files.quieten()
    caught = {}
    for name in ("/orbax/checkpoint/serialization.py", "own.py"):
        try:
            exec(compile("raise OSError('No space left on device')", name, "exec"))
        except OSError:
            caught[name] = sys.exc_info()
    log = logging.getLogger("asyncio")
    for name, error in caught.items():
        log.error("Task exception was never retrieved, %s", name, exc_info=error)
    log.error("Future exception: /run/3.orbax-checkpoint-tmp/state: No space left on device")
    log.error("Future exception: something else")
    assert [record.getMessage() for record in caplog.records] == [
        "Task exception was never retrieved, own.py",
        "Future exception: something else",
    ]


def test_a_failed_save_is_said_once(tmp_path, monkeypatch):
    """Orbax raises the error of the background again when its threads are ended."""

    def fail(manager):
        raise OSError(errno.ENOSPC, "No space left on device", "state")

    checkpointer = make(tmp_path)
    checkpointer.save(1, make_state(), {}, {})
    checkpointer.wait()
    monkeypatch.setattr(ocp.CheckpointManager, "close", fail)
    with pytest.raises(CheckpointError, match=r"could not be closed: the disk is full \(state\)"):
        checkpointer.close()
    checkpointer.save(2, make_state(), {}, {})
    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", fail)
    with pytest.raises(CheckpointError, match="checkpoint 2 could not be saved .* disk is full"):
        checkpointer.close()


@pytest.mark.parametrize(
    "error, root, passes",
    [
        (OSError(errno.EIO, "Input/output error"), "runs/a", True),
        (OSError(errno.ENOSPC, "No space left on device"), "runs/a", False),
        (OSError(errno.EROFS, "Read-only file system"), "runs/a", False),
        # A folder that is gone would be made anew, and the run begin from nothing.
        (OSError(errno.ENOENT, "No such file or directory"), "runs/a", False),
        (ValueError("UNAVAILABLE: Stale file handle"), "runs/a", True),
        (ValueError("Permission denied"), "runs/a", False),
        (KeyError("state"), "runs/a", False),
        (RuntimeError("503 Service Unavailable"), "gs://bucket/a", True),
        (RuntimeError("Permission denied"), "gs://bucket/a", False),
    ],
)
def test_launchers_start_again_where_a_save_may_do_the_next_time(error, root, passes):
    try:
        raise RuntimeError("of orbax's thread") from error
    except RuntimeError as outer:
        told = outer if isinstance(error, OSError) else error
        assert files.may_pass(told, root) == passes
    assert files.Passing.status == 75 and CheckpointError.status == 2


def test_a_step_that_another_process_does_not_see_yet(monkeypatch, tmp_path):
    """Process 0 decides which is the newest; the others wait, and all of them end together."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: np.asarray(x) + 0)
    seen = iter([False, False, True])
    monkeypatch.setattr(files, "is_finished", lambda folder: next(seen, False))
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.asarray([1, x]))
    monkeypatch.setattr(files, "_SEEN_SECONDS", 2)
    assert files.shared_step(tmp_path, [2, 4], None) == 4 and next(seen, None) is None
    monkeypatch.setattr(files, "_SEEN_SECONDS", 0)
    with pytest.raises(files.Passing, match="process 1 does not see checkpoint 2 in .*, but proc"):
        files.shared_step(tmp_path, [2, 4], 2)
    with pytest.raises(CheckpointError, match="there is no checkpoint 3"):
        files.shared_step(tmp_path, [2, 4], 3)


# ---- crashes and full disks ------------------------------------------------------------------


def python(script, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment(),
        **options,
    )


def child_environment():
    root = pathlib.Path(__file__).resolve().parents[2]
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}


def test_kill_9_in_the_middle_of_a_save(tmp_path):
    script = """
        import sys, time, jax.numpy as jnp
        from efx.checkpoint import Checkpointer
        x = jnp.arange(20_000_000, dtype=jnp.float32)
        c = Checkpointer(sys.argv[1], every=1, keep_last=1, keep_best=0, best_metric="",
                         asynchronous=True)
        c.save(1, {"x": x[:1000]}, {"next_index": 1}, {})
        c.wait()
        c.save(2, {"x": x * 3}, {"next_index": 2}, {})
        print("saving", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment())
    assert process.stdout.readline() == b"saving\n"
    half = [p.name for p in tmp_path.iterdir()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(half) == 2 and "2" not in half, half  # it was killed in time
    shape = {"x": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    with make(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1]
        restored = checkpointer.restore(shape)
        assert restored.step == 1 and restored.data_state == {"next_index": 1}
        np.testing.assert_array_equal(restored.state["x"], np.arange(1000, dtype=np.float32))
        checkpointer.save(3, restored.state, {"next_index": 3}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "3"]  # the half save is gone


def test_the_manifest_is_part_of_the_commit(tmp_path):
    """At no moment is there a folder with a step's name and no manifest in it."""
    x = jnp.arange(4_000_000, dtype=jnp.float32)
    with make(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x}, {}, {})
        deadline = time.monotonic() + 60
        while not (tmp_path / "1").exists() and time.monotonic() < deadline:
            pass
        assert (tmp_path / "1" / MANIFEST).exists()


def test_a_full_disk_is_one_line(tmp_path, capfd):
    x = {"x": jax.random.normal(jax.random.key(0), (100_000,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with make(tmp_path, every=2) as checkpointer:
        checkpointer.save(2, {"x": x["x"][:10]}, {}, {})
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            checkpointer.save(4, x, {}, {})
            with pytest.raises(CheckpointError) as error:  # heard of without another save
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    checkpointer.check()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        line = one_line(error)
        assert "checkpoint 4 could not be saved" in line and "larger than" in line, line
        assert checkpointer.steps() == [2]
        assert checkpointer.save(4, x, {}, {})  # and it works again
        checkpointer.wait()
        assert checkpointer.latest_step() == 4
    assert capfd.readouterr().err == ""


def test_a_run_folder_that_vanishes_is_not_made_again(tmp_path):
    """The run would be in two places, and neither could go on."""
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    (run / "config.json").write_text("{}")
    with make(run / "checkpoints") as checkpointer:
        for is_there_again in (False, True):  # a folder of this name, but not of this run
            assert checkpointer.save(1 + 2 * is_there_again, make_state(1), {}, {})
            checkpointer.wait()
            run.rename(away)
            if is_there_again:
                run.mkdir()
            with pytest.raises(CheckpointError) as error:
                checkpointer.save(2 + 2 * is_there_again, make_state(2), {}, {})
            assert f"could not be saved in {run}/checkpoints: No such file" in one_line(error)
            assert run.exists() == is_there_again and not list(run.glob("*"))
            if is_there_again:
                run.rmdir()
            away.rename(run)
        assert checkpointer.steps() == [1, 3]


def test_a_clock_that_jumps_in_a_save_is_told(tmp_path, monkeypatch):
    real = time.time
    jumping = itertools.count(real(), 10**6)
    with make(tmp_path) as checkpointer:
        monkeypatch.setattr(time, "time", lambda: next(jumping))
        with pytest.raises(CheckpointError) as error:
            checkpointer.save(1, make_state(1), {}, {})
            checkpointer.wait()
        assert "the clock of this machine jumped while it was written" in one_line(error)
        monkeypatch.setattr(time, "time", real)
        for _ in range(5):  # orbax may still write what it has given up
            with contextlib.suppress(CheckpointError):
                assert checkpointer.save(1, make_state(1), {}, {})
                checkpointer.wait()
                break
        assert checkpointer.steps() == [1]


def test_a_failed_save_does_not_hide_the_error_before_it(tmp_path, capfd):
    x = {"x": jax.random.normal(jax.random.key(0), (100_000,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(ZeroDivisionError), make(tmp_path) as checkpointer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
            checkpointer.save(4, x, {}, {})
            raise ZeroDivisionError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capfd.readouterr().err
    assert error.startswith("efx: warning: checkpoint 4 could not") and error.count("\n") == 1


def test_unwritable_root(tmp_path):
    (tmp_path / "file").write_text("")
    with make(tmp_path / "file" / "checkpoints") as checkpointer:
        with pytest.raises(CheckpointError) as error:
            checkpointer.save(1, {"x": jnp.ones(1)}, {}, {})
    line = one_line(error)
    assert "checkpoint" in line and "is a file, not a folder" in line


def test_wrong_types_are_told_at_the_call(tmp_path):
    with make(tmp_path) as checkpointer:
        with pytest.raises(TypeError):
            checkpointer.save(1, {"x": jnp.ones(1)}, {"it": object()}, {})
        assert checkpointer.save(1, {"x": jnp.ones(1)}, {}, {})


# ---- two processes ---------------------------------------------------------------------------


def test_two_processes(tmp_path):
    """Two processes save one sharded array, each with the checksums of its own part; both restore
    it; damage is told by both."""
    script = """
        import sys, pathlib, jax, jax.numpy as jnp, numpy as np
        root, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank,
                                   heartbeat_timeout_seconds=30)
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from efx.checkpoint import Checkpointer, CheckpointError, files
        digest, hashed = files._digest, []
        files._digest = lambda path: hashed.append(str(path)) or digest(path)
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, P("data"))
        whole = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
        x = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
        shape = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}
        def make():
            return Checkpointer(root, every=1, keep_last=2, keep_best=0, best_metric="",
                                asynchronous=True)
        with make() as c:
            for step in (1, 2, 3):
                assert c.save(step, {"x": x * step}, {"next_index": step}, {})
                assert not c.save(step, {"x": x}, {}, {})
            c.wait()
            arrays = [path for path in hashed if "ocdbt.process_" in path]
            assert arrays and all(f"ocdbt.process_{rank}" in path for path in arrays)
            assert rank == 0 or arrays == hashed
            assert not list(pathlib.Path(root).rglob("efx_checksums*"))
            r = c.restore(shape)
            assert r.step == 3 and r.data_state == {"next_index": 3} and c.steps() == [2, 3]
            for shard in r.state["x"].addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index] * 3)
        from jax.experimental import multihost_utils
        if rank == 0:
            big = max((p for p in pathlib.Path(root, "3").rglob("*") if p.is_file()),
                      key=lambda p: p.stat().st_size)
            data = bytearray(big.read_bytes()); data[len(data) // 2] ^= 1
            big.write_bytes(bytes(data))
        multihost_utils.sync_global_devices("damaged")
        with make() as c:
            try:
                c.restore(shape)
            except CheckpointError as error:
                assert "checkpoint 3" in str(error) and "item state, file" in str(error)
            else:
                raise AssertionError("not noticed")
            r = c.restore(shape, on_damage="fall_back")
            assert r.step == 2
            c.save(3, {"x": x * 3}, {"next_index": 3}, {})
        with make() as c:
            assert c.restore(shape).step == 3
        print(f"rank {rank} done", flush=True)
        jax.distributed.shutdown()
    """
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, err[-3000:]
        assert f"rank {rank} done" in out
    warnings = [line for _, err in outputs for line in err.splitlines() if "efx: warning" in line]
    assert len(warnings) == 2, warnings  # going back, renamed: from process 0 only
    manifest = json.loads((tmp_path / "3" / MANIFEST).read_text())
    assert any("process_1" in name for name in manifest["files"])
    assert (tmp_path / "damaged_3").is_dir()
