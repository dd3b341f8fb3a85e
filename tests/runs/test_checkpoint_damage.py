"""Checkpoints that are damaged, or cannot be written: flipped bits, kill -9, a full disk."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_helpers import abstract, assert_same, damage, flip, make, make_state, saved
from refusals import refused
from run_files import largest_file, watched_flushes

from efx.checkpoint import CheckpointError, errors, manifest
from efx.checkpoint.manifest import MANIFEST

# ---- damage ----------------------------------------------------------------------------------


def test_flipped_cut_and_deleted_bytes_of_every_file_are_found_by_name(tmp_path):
    states = saved(tmp_path, steps=(4,))
    shape, folder, checkpointer = abstract(states[4]), tmp_path / "4", make(tmp_path)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]
    assert len(paths) > 8
    for path in (*paths, folder / MANIFEST):
        whole = path.read_bytes()
        # Not every bit of the manifest matters, but each bracket does.
        path.write_bytes(whole.replace(b"{", b"[", 1)) if path.name == MANIFEST else flip(path)
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", path.name)  # noqa: B023
        path.write_bytes(whole[:-1])
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", path.name)  # noqa: B023
        path.unlink()
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", path.name)  # noqa: B023
        path.write_bytes(whole)
    assert_same(checkpointer.restore(shape).state, states[4])


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_on_request(tmp_path, capfd):
    states = saved(tmp_path)
    damage(tmp_path, 4)
    shape = abstract(states[4])
    with make(tmp_path) as checkpointer:
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", "checkpoint 2", "fall_back")
        # A step requested by number is never replaced.
        refused(lambda: checkpointer.restore(shape, step=4, on_damage="fall_back"), "checkpoint 4")
        assert capfd.readouterr().err == ""
        restored = checkpointer.restore(shape, on_damage="fall_back")
        assert restored.step == 2 and restored.data_state == {"next_index": 2}
        assert_same(restored.state, states[2])
        warning = capfd.readouterr().err
        assert warning.startswith("efx: warning: checkpoint 4") and warning.count("\n") == 1
        # The next save renames the damaged directory, which would be the newest step again.
        checkpointer.save(3, states[2], {}, {})
        checkpointer.save(4, states[4], {}, {})
        assert_same(checkpointer.restore(shape).state, states[4])
        assert checkpointer.steps() == [3, 4] and (tmp_path / "damaged_4").is_dir()


def test_without_an_intact_checkpoint_nothing_is_restored(tmp_path):
    shape = abstract(saved(tmp_path)[4])
    for step in (2, 4):
        damage(tmp_path, step)
    refused(lambda: make(tmp_path).restore(shape, on_damage="fall_back"), "no earlier")
    refused(lambda: make(tmp_path / "absent").restore(shape), str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()


def test_a_file_server_that_fails_once_is_not_damage(tmp_path, monkeypatch):
    """No healthy checkpoint is given up: the launch ends with the status of a rerun."""
    states = saved(tmp_path)
    for name in (MANIFEST, "manifest.ocdbt"):
        with monkeypatch.context() as patch:
            patch.setattr(type(manifest.as_root(tmp_path)), "open", failing_open(name))
            with make(tmp_path) as checkpointer, pytest.raises(CheckpointError) as raised:
                checkpointer.restore(abstract(states[4]), on_damage="fall_back")
        assert raised.value.status == 75 and "Stale" in str(raised.value)
    assert make(tmp_path).restore(abstract(states[4])).step == 4


def failing_open(name):
    """`open` of a path that fails for the files `name`, as on a file server that restarts."""
    original = type(manifest.as_root("/")).open

    def opened(path, *arguments, **options):
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(path, *arguments, **options)

    return opened


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path):
    shape = abstract(saved(tmp_path)[4])
    shutil.copytree(tmp_path / "2", tmp_path / "9")
    (tmp_path / "007").mkdir()  # not the name of a step
    checkpointer = make(tmp_path)
    refused(lambda: checkpointer.restore(shape), "checkpoint 9", "step 2")
    assert checkpointer.steps() == [2, 4, 9]


def test_a_checkpoint_that_its_run_deletes_while_it_is_read_is_replaced(tmp_path, monkeypatch):
    """By the newest one at that time, unless its step was requested."""
    states, verify = saved(tmp_path, (2, 4, 6), keep_last=3), manifest.verify
    (tmp_path / "6").rename(tmp_path / "away")

    def deleted(folder):
        if folder.name == "4":
            (tmp_path / "away").rename(tmp_path / "6")
            shutil.rmtree(folder)
        verify(folder)

    monkeypatch.setattr(manifest, "verify", deleted)
    assert make(tmp_path).restore(abstract(states[4])).step == 6
    shutil.copytree(tmp_path / "6", tmp_path / "4")
    (tmp_path / "6").rename(tmp_path / "away")
    refused(lambda: make(tmp_path).restore(abstract(states[4]), step=4), "checkpoint 4", "2, 6")


def test_an_unfinished_directory_is_not_the_newest_checkpoint(tmp_path, capfd):
    states = saved(tmp_path)
    (tmp_path / "6/state").mkdir(parents=True)
    (tmp_path / "6/state/_METADATA").write_text("x")
    with make(tmp_path) as checkpointer:
        assert checkpointer.steps() == [2, 4] and checkpointer.latest_step() == 4
        assert checkpointer.restore(abstract(states[4])).step == 4
        assert f"{tmp_path}/6" in capfd.readouterr().err
        refused(lambda: checkpointer.restore(abstract(states[4]), step=6), "checkpoint 6", "2, 4")
        checkpointer.save(6, states[4], {}, {})
        checkpointer.wait()
        assert checkpointer.latest_step() == 6
    assert (tmp_path / "damaged_6").is_dir()


# ---- crashes and full disks ------------------------------------------------------------------


def test_kill_9_in_the_middle_of_a_save(tmp_path, root):
    script = """if True:
        import sys, time, jax.numpy as jnp
        from efx.checkpoint import Checkpointer
        x = jnp.arange(20_000_000, dtype=jnp.float32)
        c = Checkpointer(sys.argv[1], keep_last=1, keep_best=0, scores={},
                         asynchronous=True)
        c.save(1, {"x": x[:1000]}, {"next_index": 1}, {})
        c.wait()
        c.save(2, {"x": x * 3}, {"next_index": 2}, {})
        print("saving", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"saving\n"
    half = [path.name for path in tmp_path.iterdir()]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(half) == 2 and "2" not in half, half  # it was killed in time
    shape = {"x": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    with make(tmp_path) as checkpointer:
        restored = checkpointer.restore(shape)
        assert restored.step == 1 and restored.data_state == {"next_index": 1}
        np.testing.assert_array_equal(restored.state["x"], np.arange(1000, dtype=np.float32))
        checkpointer.save(3, restored.state, {"next_index": 3}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]  # the half is deleted


def test_no_directory_has_the_name_of_a_step_before_its_manifest(tmp_path):
    with make(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": jnp.arange(4_000_000, dtype=jnp.float32)}, {}, {})
        deadline = time.monotonic() + 60
        while not (tmp_path / "1").exists() and time.monotonic() < deadline:
            pass
        assert (tmp_path / "1" / MANIFEST).exists()


def test_a_checkpoint_is_flushed_before_it_has_its_name(tmp_path):
    with watched_flushes() as flushes:
        saved(tmp_path)
        folder = tmp_path / "4"
        needed = [*manifest.read_manifest(folder)["files"], MANIFEST]
        assert not {str(folder / name) for name in needed} & {*flushes.missing(folder)}


def test_a_full_disk_is_one_line_and_does_not_hide_an_earlier_error(tmp_path, capfd, caplog):
    # Many arrays, of which several are written at a time.
    values = np.random.default_rng(0).random((12, 256, 256))
    state = {f"{i}": jnp.asarray(x, jnp.float32) for i, x in enumerate(values)}
    saved(tmp_path, steps=(2,))

    def fail():
        checkpointer.save(4, state, {}, {})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # it is reported without another save
            checkpointer.check()

    with largest_file(20_000), make(tmp_path) as checkpointer:
        refused(fail, "checkpoint 4")
        assert checkpointer.steps() == [2]
    assert capfd.readouterr().err == "" and not caplog.records
    with (
        largest_file(20_000),
        pytest.raises(ZeroDivisionError),
        make(tmp_path / "other") as checkpointer,
    ):
        checkpointer.save(4, state, {}, {})
        raise ZeroDivisionError
    error = capfd.readouterr().err
    assert error.startswith("efx: warning: checkpoint 4 could not") and error.count("\n") == 1


@pytest.mark.parametrize(
    "error, root, status",
    [
        (OSError(errno.EIO, "Input/output error"), "runs/a", 75),
        (OSError(errno.ENOSPC, "No space left on device"), "runs/a", 2),
        (ValueError("UNAVAILABLE: Stale file handle"), "runs/a", 75),
        (RuntimeError("503 Service Unavailable"), "gs://bucket/a", 75),
        (RuntimeError("Permission denied"), "gs://bucket/a", 2),
        (TimeoutError(), "runs/a", 75),
        (jax.errors.JaxRuntimeError("Gloo: Connection closed by peer"), "runs/a", 75),
        (ValueError("other"), "runs/a", 2),
    ],
)
def test_the_status_of_a_failed_save_or_read_tells_whether_a_rerun_may_succeed(error, root, status):
    assert errors.save_error(4, root, error).status == status
    if root == "runs/a":
        with pytest.raises(CheckpointError) as raised, errors.read_errors("checkpoint 4"):
            raise error
        assert raised.value.status == status


def test_a_process_whose_write_failed_does_not_wait_for_the_others(tmp_path, monkeypatch):
    """Orbax waits for them, and they for this one."""
    checkpointer, answers = make(tmp_path), itertools.repeat(True, 1000)
    with largest_file(20_000):
        checkpointer.save(1, {"x": jax.random.normal(jax.random.key(0), (100_000,))}, {}, {})
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        for name in ("wait_until_finished", "is_saving_in_progress"):
            monkeypatch.setattr(ocp.CheckpointManager, name, lambda _: next(answers, False))
        with pytest.raises(CheckpointError, match="checkpoint 1 could not be saved"):
            checkpointer.wait()
        checkpointer.close()


def test_a_run_directory_that_vanishes_is_not_made_again(tmp_path):
    """The run would be in two places, and neither could resume."""
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    (run / "config.json").write_text("{}")
    with make(run / "checkpoints") as checkpointer:
        checkpointer.save(1, make_state(1), {}, {})
        checkpointer.wait()
        run.rename(away)
        refused(lambda: checkpointer.save(2, make_state(2), {}, {}), f"{run}/checkpoints")
        assert not run.exists()
        run.mkdir()  # a mount point without its disk
        refused(lambda: checkpointer.save(2, make_state(2), {}, {}), "config.json")
        assert not list(run.iterdir())
