"""Checkpoints that are damaged, or cannot be written: damage, kill -9, a full disk."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import abstract, assert_same, files_of, flip, make, make_state, saved
from refusals import refused
from run_files import largest_file

from efx.checkpoint import CheckpointError, manifest, restore_params
from efx.checkpoint.manifest import MANIFEST

# ---- damage ----------------------------------------------------------------------------------


def test_flipped_cut_and_deleted_bytes_of_every_file_are_found_by_name(tmp_path):
    states = saved(tmp_path, steps=(4,))
    shape, folder, checkpointer = abstract(states[4]), tmp_path / "4", make(tmp_path)
    paths = [p for p in folder.rglob("*") if p.is_file() and p.parent != folder]
    assert len(paths) > 8
    for path in paths:
        whole = path.read_bytes()
        flip(path)
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", path.name)  # noqa: B023
        path.write_bytes(whole[:-1])
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", path.name)  # noqa: B023
        path.unlink()
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", path.name)  # noqa: B023
        path.write_bytes(whole)
    manifest = (folder / MANIFEST).read_text()
    for content in ("{", "[]", None):
        (folder / MANIFEST).unlink()
        if content:
            (folder / MANIFEST).write_text(content)
        refused(lambda: checkpointer.restore(shape), "checkpoint 4", MANIFEST)
        (folder / MANIFEST).write_text(manifest)
    assert_same(checkpointer.restore(shape).state, states[4])
    assert {p.name for p in tmp_path.iterdir()} == {"4"}


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_on_request(tmp_path, capfd):
    states = saved(tmp_path)
    flip(files_of(tmp_path, 4)[-1])
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
        # The damaged directory is renamed when its step is saved again.
        checkpointer.save(3, states[2], {}, {})
        checkpointer.save(4, states[4], {}, {})
        checkpointer.wait()
        assert_same(checkpointer.restore(shape).state, states[4])
        assert checkpointer.steps() == [3, 4] and (tmp_path / "damaged_4").is_dir()


def test_without_an_intact_checkpoint_nothing_is_restored(tmp_path):
    shape = abstract(saved(tmp_path)[4])
    for step in (2, 4):
        flip(files_of(tmp_path, step)[-1])
    refused(lambda: make(tmp_path).restore(shape, on_damage="fall_back"), "no earlier")
    with make(tmp_path / "absent") as checkpointer:
        refused(lambda: checkpointer.restore(shape), str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()


def test_a_checkpoint_that_its_run_deletes_while_it_is_read(tmp_path, monkeypatch):
    """The newest one by then is read instead, unless the step was requested by number."""
    states, later = saved(tmp_path / "c"), tmp_path / "6"
    root, verify = tmp_path / "c", manifest.verify

    def deleted(folder):
        if folder.name == "4":
            shutil.rmtree(folder)
            shutil.copytree(later, root / "6")
        verify(folder)

    shutil.copytree(root / "4", later)
    monkeypatch.setattr(manifest, "verify", deleted)
    assert_same(make(root).restore(abstract(states[4])).state, states[4])
    shutil.move(root / "6", root / "4")
    refused(lambda: restore_params(root, abstract(states[4].params), 4), "checkpoint 4")


def test_an_unfinished_directory_is_not_the_newest_checkpoint(tmp_path, capfd):
    states = saved(tmp_path)
    (tmp_path / "6/state").mkdir(parents=True)
    (tmp_path / "6/state/_METADATA").write_text("x")
    with make(tmp_path) as checkpointer:
        assert checkpointer.steps() == [2, 4] and checkpointer.latest_step() == 4
        assert checkpointer.restore(abstract(states[4])).step == 4
        assert f"{tmp_path}/6" in capfd.readouterr().err
        refused(lambda: checkpointer.restore(abstract(states[4]), step=6), "checkpoint 6", "2, 4")
        assert checkpointer.save(6, states[4], {}, {})  # its number can be saved
        checkpointer.wait()
        assert checkpointer.latest_step() == 6
    assert (tmp_path / "damaged_6").is_dir()


def test_a_state_of_other_shapes_types_or_leaves_is_refused(tmp_path, capfd):
    states = saved(tmp_path)
    same = abstract(states[4])
    more = abstract(states[4].replace(variables={"theta": jnp.ones(2)}))
    wider = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), same)
    with make(tmp_path) as checkpointer:
        for shapes, names in (
            (abstract(make_state(0, width=12)), ("block_0/mlp/up/kernel", "[8,16]", "[12,16]")),
            (more, ("variables/theta",)),
            (wider, ("head/kernel", "bfloat16")),
        ):
            refused(
                lambda: checkpointer.restore(shapes, on_damage="fall_back"),  # noqa: B023
                "checkpoint 4",
                *names,
            )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "error, root, status",
    [
        (OSError(errno.EIO, "Input/output error"), "runs/a", 75),
        (OSError(errno.ENOSPC, "No space left on device"), "runs/a", 2),
        (ValueError("UNAVAILABLE: Stale file handle"), "runs/a", 75),
        (RuntimeError("503 Service Unavailable"), "gs://bucket/a", 75),
        (RuntimeError("Permission denied"), "gs://bucket/a", 2),
    ],
)
def test_the_status_of_a_failed_save_tells_whether_a_rerun_may_succeed(error, root, status):
    kind = manifest.Passing if manifest.may_pass(error, root) else CheckpointError
    assert kind.status == status


# ---- crashes and full disks ------------------------------------------------------------------


def test_kill_9_in_the_middle_of_a_save(tmp_path, root):
    script = """if True:
        import sys, time, jax.numpy as jnp
        from efx.checkpoint import Checkpointer
        x = jnp.arange(20_000_000, dtype=jnp.float32)
        c = Checkpointer(sys.argv[1], every=1, keep_last=1, keep_best=0, scores={},
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
    half = [p.name for p in tmp_path.iterdir()]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(half) == 2 and "2" not in half, half  # it was killed in time
    shape = {"x": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    with make(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1]
        restored = checkpointer.restore(shape)
        assert restored.step == 1 and restored.data_state == {"next_index": 1}
        np.testing.assert_array_equal(restored.state["x"], np.arange(1000, dtype=np.float32))
        checkpointer.save(3, restored.state, {"next_index": 3}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "3"]  # the half save is gone


def test_no_directory_has_a_steps_name_before_its_manifest(tmp_path):
    x = jnp.arange(4_000_000, dtype=jnp.float32)
    with make(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x}, {}, {})
        deadline = time.monotonic() + 60
        while not (tmp_path / "1").exists() and time.monotonic() < deadline:
            pass
        assert (tmp_path / "1" / MANIFEST).exists()


def large_tree():
    """Many arrays, of which several are written or read at a time."""
    rng = np.random.default_rng(0)
    return {f"{i}": jnp.asarray(rng.random((256, 256)), jnp.float32) for i in range(12)}


def test_a_full_disk_is_one_line_and_later_saves_succeed(tmp_path, capfd):
    x = large_tree()
    with make(tmp_path, every=2) as checkpointer:
        checkpointer.save(2, {"x": x["0"][:2]}, {}, {})
        checkpointer.wait()

        def fail():
            checkpointer.save(4, x, {}, {})
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:  # it is reported without another save
                checkpointer.check()

        with largest_file(20_000):
            refused(fail, "checkpoint 4")
        assert checkpointer.steps() == [2]
        assert checkpointer.save(4, x, {}, {})
        checkpointer.wait()
        assert checkpointer.latest_step() == 4
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_failed_save_does_not_hide_the_error_before_it(tmp_path, capfd):
    x = large_tree()
    with largest_file(20_000), pytest.raises(ZeroDivisionError), make(tmp_path) as checkpointer:
        checkpointer.save(4, x, {}, {})
        raise ZeroDivisionError
    error = capfd.readouterr().err
    assert error.startswith("efx: warning: checkpoint 4 could not") and error.count("\n") == 1


def test_a_run_directory_that_vanishes_is_not_made_again(tmp_path):
    """The run would be in two places, and neither could resume."""
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    (run / "config.json").write_text("{}")
    with make(run / "checkpoints") as checkpointer:
        assert checkpointer.save(1, make_state(1), {}, {})
        checkpointer.wait()
        run.rename(away)
        refused(lambda: checkpointer.save(2, make_state(2), {}, {}), f"{run}/checkpoints")
        assert not run.exists()
