"""Checkpoints on real files: exact round trips, retention, parameters alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_helpers import abstract, assert_same, damage, make, make_state, saved
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refusals import refused

from efx.checkpoint import CheckpointError, arrays, restore_params
from efx.checkpoint.manifest import MANIFEST
from efx.parallel.sharding import path_names

# ---- round trips -----------------------------------------------------------------------------


def test_a_round_trip_is_exact(tmp_path):
    """Leaves of every dtype, empty nodes and the state of a nested optimizer."""
    optimizer = optax.multi_transform(
        {"a": optax.contrib.schedule_free_adamw(1e-3), "b": optax.set_to_zero()},
        {"embed": "b", "block_0": "a", "head": "a"},
    )
    others = {
        "nan": jnp.array([np.nan, -0.0, np.inf]),
        "int8": jnp.arange(-3, 3, dtype=jnp.int8),
        "bool": jnp.array([True, False]),
        "uint32": jnp.uint32(2**32 - 1),
        "empty": {},
        "none": None,
        "tuple": (jnp.int32(1), (), {"deep": [jnp.float32(2), optax.EmptyState()]}),
    }
    state = make_state(3, optimizer=optimizer).replace(variables=others)
    with make(tmp_path / "c") as checkpointer:
        checkpointer.save(7, state, {"next_index": 70}, {"tokens": 1.5, "list": [1, None]})
        restored = checkpointer.restore(abstract(state))
    assert (restored.step, restored.data_state) == (7, {"next_index": 70})
    assert restored.meta == {"tokens": 1.5, "list": [1, None]}
    assert_same(restored.state, state)


def test_a_state_may_be_donated_while_it_is_saved(tmp_path):
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


def split(state, mesh):
    """Shardings that split each matrix over both axes of a mesh."""
    specs = {2: PartitionSpec("data", "model")}
    return jax.tree.map(lambda x: NamedSharding(mesh, specs.get(x.ndim, PartitionSpec())), state)


@pytest.mark.parametrize("before, after", [((2, 4), (4, 2)), ((1, 1), (2, 4))])
def test_a_checkpoint_restores_onto_another_mesh(tmp_path, before, after):
    state, target = make_state(1), split(make_state(1), mesh_of(*after))
    with make(tmp_path) as checkpointer:
        checkpointer.save(1, jax.device_put(state, split(state, mesh_of(*before))), {}, {})
        restored = checkpointer.restore(abstract(state, target)).state
    assert_same(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == target


@pytest.mark.parametrize("size", [13, 24])
def test_the_padding_of_the_vocabulary_may_differ(tmp_path, size):
    """Tables of 13 tokens are saved with 16 rows and restored with fewer or more; added rows are 0.
    The moments of the optimizer too."""

    def padded(state, size):
        def one(path, x):
            axis = arrays.VOCABULARY.get(path_names(path)[-2:])
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
        assert_same(checkpointer.restore(abstract(expected), vocab_size=13).state, expected)
        refused(lambda: checkpointer.restore(abstract(expected)), "embed/embedding")
    params, _ = restore_params(tmp_path, abstract(expected.params), vocab_size=13)
    assert_same(params, expected.params)


def test_a_state_of_other_shapes_dtypes_or_leaves_is_refused(tmp_path):
    states = saved(tmp_path, steps=(4,))
    same = abstract(states[4])
    cases = [
        (abstract(make_state(0, width=12)), ("block_0/mlp/up/kernel", "[8,16]", "[12,16]")),
        (abstract(states[4].replace(variables={"theta": jnp.ones(2)})), ("variables/theta",)),
        (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), same), ("bfloat16",)),
    ]
    for shapes, names in cases:
        refused(
            lambda: make(tmp_path).restore(shapes, on_damage="fall_back"),  # noqa: B023
            "checkpoint 4",
            *names,
        )


# ---- when to save, which steps to keep -------------------------------------------------------


def test_a_step_is_saved_once_and_at_once_without_a_background(tmp_path):
    state = {"x": jnp.ones(3)}
    with make(tmp_path, asynchronous=False) as checkpointer:
        assert checkpointer.latest_step() is None and checkpointer.steps() == []
        checkpointer.save(7, state, {"first": True}, {})
        assert (tmp_path / "7" / MANIFEST).exists()  # without waiting
        checkpointer.save(7, state, {"first": False}, {})
        assert checkpointer.steps() == [7] and checkpointer.latest_step() == 7
        assert checkpointer.restore(abstract(state)).data_state == {"first": True}


def test_a_save_does_not_count_as_a_check_for_preemption(tmp_path, monkeypatch):
    """JAX counts the checks of each process, and the processes would stop as many steps late."""
    calls = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", calls.append)
    with make(tmp_path) as checkpointer:
        checkpointer.save(4, {"x": jnp.ones(3)}, {}, {})
    assert not calls


def test_the_last_and_the_best_steps_are_kept(tmp_path):
    losses = [1.0, 2.0, 2.0, 4.0, -math.inf, None, math.nan]
    kept, scores = [], {}
    (tmp_path / "900").mkdir()  # not a checkpoint: neither counted nor deleted
    with make(tmp_path, keep_last=1, keep_best=2, scores=scores) as checkpointer:
        for step, loss in enumerate(losses, 1):
            checkpointer.save(step, {"x": jnp.ones(3)}, {}, {})
            checkpointer.wait()
            scores[step] = loss  # a step is evaluated after its save
            kept.append(checkpointer.steps())
        assert checkpointer.best_step() == 1
    # The newer of equal losses is the better; a loss that is not finite is never best.
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 3, 5], [1, 3, 6], [1, 3, 7]]
    assert (tmp_path / "900").is_dir()


# ---- parameters alone ------------------------------------------------------------------------


def test_missing_and_unexpected_parameters_need_permission(tmp_path):
    states = saved(tmp_path)
    target = abstract(states[4].params)
    target["router"] = {"kernel": jnp.full((8, 2), 7.0)}
    del target["embed"]

    def restore(missing="", unexpected=""):
        return restore_params(
            tmp_path, target, missing=missing, unexpected=unexpected, prefix="init."
        )

    refused(lambda: restore("rout", ".*"), "router/kernel", "init.missing")
    refused(lambda: restore("router/.*"), "embed/embedding", "init.unexpected")
    with pytest.raises(CheckpointError, match="^((?!rename|allow).)*$"):  # there are no flags
        restore_params(tmp_path, target)
    params, diff = restore("router/.*", "embed/.*")
    assert diff.missing == ("router/kernel",) and diff.unexpected == ("embed/embedding",)
    np.testing.assert_array_equal(params["router"]["kernel"], np.full((8, 2), 7.0))
    assert_same(params["block_0"], states[4].params["block_0"])
    assert "router/kernel" in str(diff) and "embed/embedding" in str(diff)


def test_parameters_are_renamed_cast_and_sharded(tmp_path):
    """One MLP into each of three experts (upcycling), one of them in bfloat16."""
    states, mesh = saved(tmp_path), mesh_of(2, 4)
    specs = [NamedSharding(mesh, PartitionSpec(*s)) for s in (("data",), ("model",), ())]
    target = abstract(states[4].params)
    del target["block_0"]["mlp"]
    target["block_0"] |= {
        f"expert_{i}": {"up": {"kernel": jax.ShapeDtypeStruct((8, 16), kind, sharding=specs[i])}}
        for i, kind in enumerate((jnp.float32, jnp.bfloat16, jnp.float32))
    }
    rename = [(r"(block_\d+)/expert_\d+/(.*)", r"\1/mlp/\2")]
    params, diff = restore_params(tmp_path, target, rename=rename)
    source = states[4].params["block_0"]["mlp"]["up"]["kernel"]
    for i in range(3):
        kernel = params["block_0"][f"expert_{i}"]["up"]["kernel"]
        assert kernel.sharding == specs[i]
        np.testing.assert_array_equal(kernel, source.astype(kernel.dtype))
    assert len(diff.renamed) == 3 and not diff.unexpected


def test_a_source_of_two_parameters_is_skipped_for_that_of_another_shape(tmp_path):
    saved(tmp_path, steps=(4,))
    target = {name: {"scale": jnp.zeros(size)} for name, size in (("a", 8), ("b", 9))}
    params, diff = restore_params(
        tmp_path,
        target,
        missing=".*",
        unexpected=".*",
        rename=[("[ab]/scale", "block_0/norm/scale")],
        skip_other_shapes=True,
    )
    assert diff.missing == ("b/scale",) and "block_0/norm/scale" not in diff.unexpected
    assert params["a"]["scale"].sum() == 8 and params["b"]["scale"].sum() == 0


def test_parameters_of_any_step_but_of_no_other_shape_and_no_damaged_step(tmp_path):
    states = saved(tmp_path)
    target = abstract(states[4].params)
    params, diff = restore_params(tmp_path, target)
    assert_same(params, states[4].params)
    assert (diff.step, diff.loaded) == (4, 4)
    assert_same(restore_params(tmp_path, target, step=2)[0], states[2].params)
    wide = abstract(make_state(0, width=12).params)
    refused(lambda: restore_params(tmp_path, wide), "embedding", "float32[16,8]")
    refused(lambda: restore_params(tmp_path, target, step=3), "checkpoint 3", "2, 4")
    name = damage(tmp_path, 4)
    refused(lambda: restore_params(tmp_path, target), "checkpoint 4", name)
