"""Checkpoints on real files: exact round trips, retention, damage, crashes, partial loading."""

import json
import math
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from efx.checkpoint import Checkpointer, CheckpointError, restore_params
from efx.checkpoint.files import MANIFEST
from efx.errors import UsageError


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: optax.OptState
    variables: dict


def make_state(seed=0, width=8, optimizer=None):
    """Parameters of several types and depths, and a real optimiser state."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embed": {"embedding": jax.random.normal(keys[0], (16, width))},
        "block_0": {
            "mlp": {"up": {"kernel": jax.random.normal(keys[1], (width, 16))}},
            "norm": {"scale": jnp.ones(width)},
        },
        "head": {"kernel": jax.random.normal(keys[2], (width, 16)).astype(jnp.bfloat16)},
    }
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(jnp.int32(seed), params, optimizer.init(params), {})


def abstract(tree, shardings=None):
    """The tree's shapes with shardings (by default those that it has)."""
    if shardings is None:
        shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def make(root, **changes):
    values = dict(every=1, keep_last=2, keep_best=0, best_metric="loss", asynchronous=True)
    return Checkpointer(root, **values | changes)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        # Bytes, so that NaN equals NaN and -0 does not equal 0.
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def saved(root, steps=(2, 4), **changes):
    """A folder of finished checkpoints; returns the states by step."""
    states = {step: make_state(step) for step in steps}
    with make(root, **changes) as checkpointer:
        for step, state in states.items():
            assert checkpointer.save(step, state, {"next_index": step}, {"name": "run"})
    return states


def files_of(root, step, least=0):
    found = [p for p in (root / str(step) / "state").rglob("*") if p.is_file()]
    return sorted((p for p in found if p.stat().st_size > least), key=lambda p: p.stat().st_size)


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(bytes(data))


def one_line(error):
    """The message, which must be one line for main to print."""
    text = str(error.value)
    assert "\n" not in text and isinstance(error.value, UsageError)
    return text


# ---- round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.lion(1e-3),
        optax.contrib.muon(1e-3),
        optax.contrib.schedule_free_adamw(1e-3),
        optax.sgd(1e-3),
        optax.multi_transform(
            {"a": optax.adamw(1e-3), "b": optax.set_to_zero()},
            {"embed": "b", "block_0": "a", "head": "a"},
        ),
    ],
    ids=["adamw", "lion", "muon", "schedule_free", "sgd", "multi_transform"],
)
def test_round_trip_is_exact(tmp_path, optimizer):
    state = make_state(3, optimizer=optimizer)
    with make(tmp_path / "c") as checkpointer:
        checkpointer.save(7, state, {"next_index": 70}, {"tokens": 1.5, "list": [1, None]})
        restored = checkpointer.restore(abstract(state))
    assert restored.step == 7
    assert restored.data_state == {"next_index": 70}
    assert restored.meta == {"tokens": 1.5, "list": [1, None]}
    assert_same(restored.state, state)


def test_odd_leaves_and_empty_nodes(tmp_path):
    tree = {
        "nan": jnp.array([np.nan, -0.0, np.inf]),
        "int8": jnp.arange(-3, 3, dtype=jnp.int8),
        "bool": jnp.array([True, False]),
        "uint32": jnp.uint32(2**32 - 1),
        "bf16": jnp.array([1e-30, 3.0], jnp.bfloat16),
        "numpy": np.arange(3, dtype=np.float32),
        "empty": {},
        "none": None,
        "tuple": (jnp.int32(1), (), {"deep": [jnp.float32(2), optax.EmptyState()]}),
    }
    with make(tmp_path) as checkpointer:
        checkpointer.save(1, tree, {}, {})
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        restored = checkpointer.restore(shapes).state
    assert_same(restored, tree)


def test_donation_while_the_save_runs(tmp_path):
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    x = jnp.arange(2_000_000, dtype=jnp.float32)
    before = np.asarray(x).copy()
    with make(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x}, {}, {})
        for _ in range(10):
            x = step(x)
        restored = checkpointer.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)})
    np.testing.assert_array_equal(np.asarray(restored.state["x"]), before)


def mesh_of(*shape):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_restore_onto_another_mesh(tmp_path):
    def sharded(state, mesh):
        def sharding(x):
            spec = PartitionSpec("data", "model") if x.ndim == 2 else PartitionSpec()
            return NamedSharding(mesh, spec)

        return jax.tree.map(sharding, state)

    state = make_state(1)
    on_8 = jax.device_put(state, sharded(state, mesh_of(2, 4)))
    saved_from = {"8": on_8, "1": state}
    for name, source in saved_from.items():
        with make(tmp_path / name) as checkpointer:
            checkpointer.save(1, source, {}, {})
        for target_mesh in (mesh_of(4, 2), mesh_of(2, 1), mesh_of(1, 1)):
            target = sharded(state, target_mesh)
            with make(tmp_path / name) as checkpointer:
                restored = checkpointer.restore(abstract(state, target)).state
            assert_same(restored, state)
            assert jax.tree.map(lambda x: x.sharding, restored) == target


# ---- when to save, what to keep --------------------------------------------------------------


def test_every_force_and_idempotence(tmp_path):
    state = {"x": jnp.ones(3)}
    with make(tmp_path, every=3, keep_last=9) as checkpointer:
        assert checkpointer.latest_step() is None and checkpointer.steps() == []
        done = [checkpointer.save(step, state, {}, {}) for step in range(1, 8)]
        assert done == [False, False, True, False, False, True, False]
        assert checkpointer.save(7, state, {}, {}, force=True)
        assert not checkpointer.save(7, state, {}, {}, force=True)  # may still be in flight
        checkpointer.wait()
        assert checkpointer.steps() == [3, 6, 7] and checkpointer.latest_step() == 7
    with make(tmp_path, every=3) as checkpointer:
        assert not checkpointer.save(6, state, {}, {})
    with make(tmp_path / "never", every=0) as checkpointer:
        assert not checkpointer.save(10, state, {}, {})
        assert checkpointer.save(11, state, {}, {}, force=True)


def test_synchronous_save_is_on_disk_at_once(tmp_path):
    checkpointer = make(tmp_path, asynchronous=False)
    checkpointer.save(5, {"x": jnp.ones(3)}, {}, {})
    assert (tmp_path / "5" / MANIFEST).exists() and checkpointer.latest_step() == 5
    checkpointer.close()


def test_keeps_the_last_and_the_best(tmp_path):
    losses = [1.0, 2.0, 5.0, 4.0, -math.inf, None, 1.5, 2.5, math.nan]
    state = {"x": jnp.ones(3)}
    kept = []
    for chunk in (range(0, 5), range(5, 9)):  # a new process knows the old metrics
        with make(tmp_path, keep_last=2, keep_best=2) as checkpointer:
            for i in chunk:
                metrics = None if losses[i] is None else {"loss": losses[i], "other": -i}
                checkpointer.save(i + 1, state, {}, {}, metrics)
                checkpointer.wait()
                kept.append(checkpointer.steps())
    assert kept == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 4, 5],  # what is not finite is never best
        [1, 2, 5, 6],  # and what has no metric neither
        [1, 6, 7],
        [1, 7, 8],
        [1, 7, 8, 9],
    ]


def test_retention_leaves_foreign_folders_alone_and_does_not_count_them(tmp_path):
    (tmp_path / "900").mkdir(parents=True)
    (tmp_path / "901").mkdir()
    (tmp_path / "notes").mkdir()
    saved(tmp_path, steps=(1, 2, 3), keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "900", "901", "notes"]


def test_a_step_below_the_newest_is_kept_too(tmp_path):
    """After going back by hand: the new save must not be what retention deletes."""
    saved(tmp_path, steps=(2, 4), keep_last=2)
    with make(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(3, {"x": jnp.ones(3)}, {}, {})
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]


@pytest.mark.parametrize("key,value", [("every", -1), ("keep_last", 0), ("keep_best", -1)])
def test_bad_settings(tmp_path, key, value):
    with pytest.raises(UsageError) as error:
        make(tmp_path, **{key: value})
    assert f"config.checkpoint.{key}={value}" in one_line(error)


# ---- damage ----------------------------------------------------------------------------------


def flip_a_data_byte(root):
    flip(files_of(root, 4)[-1])


def truncate_a_file(root):
    path = files_of(root, 4)[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_a_file(root):
    files_of(root, 4)[-1].unlink()


def remove_the_state(root):
    import shutil

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
    truncate_a_file: "bytes where",
    remove_a_file: "is missing",
    remove_the_state: "item state, file",
    flip_the_data_position: "item data, file metadata differs",
    cut_the_metadata: "item state, file _METADATA has 40 bytes",
    remove_the_manifest: f"file {MANIFEST}, which holds the checksums, is missing",
    break_the_manifest: f"file {MANIFEST}, which holds the checksums, is not readable",
    empty_the_manifest: f"file {MANIFEST}, which holds the checksums, is not readable",
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
    assert "checkpoint 2, before it, is sound" in line
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


def test_all_damaged(tmp_path, capfd):
    states = saved(tmp_path)
    flip(files_of(tmp_path, 4)[-1])
    flip(files_of(tmp_path, 2)[-1])
    for choice in ("error", "fall_back"):
        with make(tmp_path) as checkpointer, pytest.raises(CheckpointError) as error:
            checkpointer.restore(abstract(states[4]), on_damage=choice)
        assert "no checkpoint before it is sound" in one_line(error)


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
        assert f"{tmp_path}/6 is not a finished checkpoint; ignored" in capfd.readouterr().err
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
        assert "checkpoint 4" in line and "is of another config" in line and "more" in line
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
    root = pathlib.Path(__file__).resolve().parent.parent
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


# ---- parameters alone ------------------------------------------------------------------------


def test_restore_params_exactly(tmp_path):
    states = saved(tmp_path)
    said = []
    params, diff = restore_params(tmp_path, abstract(states[4].params), report=said.append)
    assert_same(params, states[4].params)
    assert (diff.step, diff.loaded, said) == (4, 4, [])
    assert not (diff.missing or diff.unexpected or diff.renamed or diff.cast)
    params, diff = restore_params(tmp_path, abstract(states[2].params), step=2)
    assert_same(params, states[2].params)


def test_restore_params_partly(tmp_path, capsys):
    states = saved(tmp_path)
    wanted = abstract(states[4].params)
    wanted["router"] = {"kernel": jnp.full((8, 2), 7.0)}
    del wanted["embed"]
    with pytest.raises(CheckpointError, match="lacks router/kernel; .*allow_missing"):
        restore_params(tmp_path, wanted, allow_unexpected="embed/.*")
    with pytest.raises(CheckpointError, match="has besides embed/embedding; .*allow_unexpected"):
        restore_params(tmp_path, wanted, allow_missing="router/.*")
    with pytest.raises(CheckpointError, match="lacks router/kernel"):
        restore_params(tmp_path, wanted, allow_missing="rout", allow_unexpected=".*")  # in full
    params, diff = restore_params(
        tmp_path, wanted, allow_missing="router/.*", allow_unexpected="embed/.*"
    )
    assert diff.missing == ("router/kernel",) and diff.unexpected == ("embed/embedding",)
    np.testing.assert_array_equal(params["router"]["kernel"], np.full((8, 2), 7.0))
    assert_same(params["block_0"], states[4].params["block_0"])
    assert capsys.readouterr().out == (
        "checkpoint 4: 3 parameter arrays loaded\n"
        "  not in the checkpoint, left as it was: router/kernel\n"
        "  in the checkpoint, not used: embed/embedding\n"
    )
    wanted["router"]["kernel"] = jax.ShapeDtypeStruct((8, 2), jnp.float32)
    with pytest.raises(CheckpointError, match="give an initialised array"):
        restore_params(tmp_path, wanted, allow_missing="router/.*", allow_unexpected="embed/.*")


def test_restore_params_renamed_cast_and_sharded(tmp_path):
    """One MLP into each of three experts (upcycling), onto meshes, one of them in bfloat16."""
    states = saved(tmp_path)
    mesh = mesh_of(2, 4)
    specs = [NamedSharding(mesh, PartitionSpec(*s)) for s in (("data",), ("model",), ())]
    wanted = abstract(states[4].params)
    del wanted["block_0"]["mlp"]
    wanted["block_0"] |= {
        f"expert_{i}": {"up": {"kernel": jax.ShapeDtypeStruct((8, 16), kind, sharding=specs[i])}}
        for i, kind in enumerate((jnp.float32, jnp.bfloat16, jnp.float32))
    }
    rename = [(r"(block_\d+)/expert_\d+/(.*)", r"\1/mlp/\2")]
    said = []
    params, diff = restore_params(tmp_path, wanted, rename=rename, report=said.append)
    source = states[4].params["block_0"]["mlp"]["up"]["kernel"]
    for i in range(3):
        kernel = params["block_0"][f"expert_{i}"]["up"]["kernel"]
        assert kernel.sharding == specs[i]
        np.testing.assert_array_equal(kernel, source.astype(kernel.dtype))
    assert len(diff.renamed) == 3 and len(diff.cast) == 1 and not diff.unexpected
    assert "  block_0/expert_2/up/kernel from block_0/mlp/up/kernel" in said[0]
    assert "  block_0/expert_1/up/kernel: float32 turned into bfloat16" in said[0]
    with pytest.raises(CheckpointError, match=r"lacks .*\(looked for as block_0/nlp"):
        restore_params(
            tmp_path, wanted, rename=[("(.*)/expert_.*?/(.*)", r"\1/nlp/\2")], allow_unexpected=".*"
        )


def test_restore_params_bad_input(tmp_path, capfd):
    states = saved(tmp_path)
    wanted = abstract(states[4].params)
    wide = abstract(make_state(0, width=12).params)
    with pytest.raises(CheckpointError, match=r"embedding is float32\[16,8\] there") as error:
        restore_params(tmp_path, wide)
    one_line(error)
    with pytest.raises(CheckpointError, match="there is no checkpoint 3 .* 2, 4"):
        restore_params(tmp_path, wanted, step=3)
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        restore_params(tmp_path / "absent", wanted)
    flip(files_of(tmp_path, 4)[-1])
    with pytest.raises(CheckpointError, match="checkpoint 4 .* is damaged: item state, file"):
        restore_params(tmp_path, wanted)
    assert capfd.readouterr().err == ""
    (tmp_path / "2" / MANIFEST).unlink()  # foreign checkpoints have none
    params, _ = restore_params(tmp_path, wanted, step=2)
    assert_same(params, states[2].params)
    assert "cannot be verified" in capfd.readouterr().err


# ---- two processes ---------------------------------------------------------------------------


def test_two_processes(tmp_path):
    """Two processes save one sharded array; both restore it; damage is told by both."""
    script = """
        import sys, pathlib, jax, jax.numpy as jnp, numpy as np
        root, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank,
                                   heartbeat_timeout_seconds=30)
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from efx.checkpoint import Checkpointer, CheckpointError
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
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
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
