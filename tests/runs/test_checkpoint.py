"""Checkpoints on real files: exact round trips, retention, partial loading."""

import errno
import math
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from efx.checkpoint import CheckpointError, files, restore_params
from efx.checkpoint.files import MANIFEST
from efx.sharding import path_names

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


def test_copies_of_small_arrays_are_not_cut(tmp_path, caplog):
    """Orbax would write an eighth from each device, and compile a program for each of them."""
    everywhere = NamedSharding(mesh_of(2, 4), PartitionSpec())
    state = jax.device_put({"b": np.arange(4096, dtype=np.float32)}, everywhere)
    with make(tmp_path) as checkpointer, jax.log_compiles():
        checkpointer.save(1, state, {}, {})
        checkpointer.wait()
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
        restored = checkpointer.restore(abstract(state, {"b": everywhere})).state
    assert_same(restored, state)


@pytest.mark.parametrize("size", [13, 14, 24])
def test_a_vocabulary_may_be_padded_otherwise(tmp_path, size):
    """13 tokens in tables of 16 are read into tables of another size, moments and all, as a mesh
    that splits the vocabulary over other numbers of devices asks for; what is added is 0."""

    def padded(state, size):
        def one(path, x):
            axis = files.VOCABULARY.get(path_names(path)[-2:])
            if axis is None:
                return x
            x = jnp.moveaxis(x, axis, 0)[:13]
            return jnp.moveaxis(jnp.pad(x, ((0, size - 13), (0, 0))), 0, axis)

        return jax.tree_util.tree_map_with_path(one, state)

    optimizer, state = optax.adamw(1e-3), make_state(optimizer=optax.adamw(1e-3))
    gradient = jax.tree.map(jnp.ones_like, state.params)
    state = state.replace(opt_state=optimizer.update(gradient, state.opt_state, state.params)[1])
    expected = padded(state, size)
    with make(tmp_path) as checkpointer:
        checkpointer.save(1, padded(state, 16), {}, {})
    with make(tmp_path) as checkpointer:
        assert_same(checkpointer.restore(abstract(expected), vocab_size=13).state, expected)
        for vocab_size in (0, size + 1, 17):
            with pytest.raises(CheckpointError, match="does not match the config.*embed/embedding"):
                checkpointer.restore(abstract(expected), vocab_size=vocab_size)
    params, _ = restore_params(tmp_path, abstract(expected.params), vocab_size=13)
    assert_same(params, expected.params)
    with pytest.raises(CheckpointError, match=r"embed/embedding is float32\[16,8\] there"):
        restore_params(tmp_path, abstract(expected.params))


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


def test_saving_leaves_the_notice_of_a_preemption_alone(tmp_path, monkeypatch):
    """JAX counts all who ask in one place. Orbax asked by the number of the step, so that the
    processes of a run that was gone on from stopped as many steps late as it had."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with make(tmp_path) as checkpointer:
        checkpointer.save(4, make_state(), {}, {})
        checkpointer.wait()
        assert checkpointer.steps() == [4] and not asked
        ocp.CheckpointManager.reached_preemption(checkpointer._manager, 4)
        assert asked == [4]


def test_a_process_whose_write_failed_waits_for_no_other(tmp_path, monkeypatch):
    """Orbax waits for the others, whose saves wait for this one: it took an hour to be told."""
    full, ended = OSError(errno.ENOSPC, "No space left on device"), threading.Event()
    monkeypatch.setattr(files, "write_own_digests", raising(full))
    finalize = ocp.CheckpointManager._finalize

    def waits_for_others(self, *arguments):
        try:
            finalize(self, *arguments)
        except BaseException:
            ended.wait(60)
            raise

    monkeypatch.setattr(ocp.CheckpointManager, "_finalize", waits_for_others)
    checkpointer = make(tmp_path)
    checkpointer.save(1, make_state(), {}, {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    begun = time.monotonic()
    try:
        with pytest.raises(CheckpointError, match="checkpoint 1 .* the disk is full"):
            while True:
                checkpointer.check()
        checkpointer.close()
        assert time.monotonic() - begun < 30
    finally:
        ended.set()


def raising(error):
    def function(*arguments):
        raise error

    return function


def test_what_one_process_cannot_read_is_damage_for_all(tmp_path, monkeypatch):
    """One went back to an older step by itself, and trained on with parameters of two."""
    saved(tmp_path)
    with make(tmp_path) as checkpointer:
        monkeypatch.setattr(files, "minimum_over_processes", lambda value: 0)
        with pytest.raises(CheckpointError, match="another process cannot read"):
            checkpointer.restore(abstract(make_state()))


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


def test_of_equals_the_newest_is_the_best(tmp_path):
    """The best that was told of was the oldest, which the next save deleted."""
    with make(tmp_path, keep_last=2, keep_best=1) as checkpointer:
        for step, loss, best in ((1, 1.0, 1), (2, 1.0, 2), (3, 4.0, 2), (4, 5.0, 2)):
            checkpointer.save(step, {"x": jnp.ones(3)}, {}, {}, {"loss": loss})
            checkpointer.wait()
            assert checkpointer.best_step() == best
        assert checkpointer.steps() == [2, 3, 4]


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
    with pytest.raises(CheckpointError, match="lacks router/kernel; .*allow_missing") as error:
        restore_params(tmp_path, wanted, allow_unexpected="embed/.*")
    # What the message proposes does it, beside what was allowed before.
    offered = re.search("allow_missing='(.*?)'", str(error.value))[1]
    assert offered == "(.*/)?(router)(/.*)?"
    options = dict(allow_unexpected="embed/.*", report=None)
    restore_params(tmp_path, wanted, allow_missing=offered, **options)
    names = ("--config.init.missing", "--config.init.unexpected", "--config.init.rename")
    words = r"--config\.init\.missing='other\|\(.*, or map the names with --config\.init\.rename"
    with pytest.raises(CheckpointError, match=words):
        restore_params(tmp_path, wanted, allow_missing="other", options=names)
    with pytest.raises(
        CheckpointError, match="has extra arrays embed/embedding; .*allow_unexpected"
    ):
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
        "  not in the checkpoint, left unchanged: router/kernel\n"
        "  in the checkpoint, not used: embed/embedding\n"
    )
    wanted["router"]["kernel"] = jax.ShapeDtypeStruct((8, 2), jnp.float32)
    with pytest.raises(CheckpointError, match="pass an initialised array"):
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
    assert "  block_0/expert_1/up/kernel: float32 converted to bfloat16" in said[0]
    with pytest.raises(CheckpointError, match=r"lacks .*\(read as block_0/nlp"):
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
