"""Initial values drawn by pieces are those of one program, and equal pieces are one program."""

import families
import jax
import numpy as np
import pytest
from flax import linen as nn

from efx import draws, models, sharding

ROWS = {
    "drawn states and adapters": {
        **families.FAMILIES["mod_fixed"].changes,
        "adapter.kind": "lora",
        "adapter.experts": ("a", "b"),
        "adapter.sites": ".*/(query|up)",
    },
    "scanned layers": {"scan_layers": True, "attention.qk_norm": "head"},
}


def initial(model, seed):
    return nn.unbox(models.init(model, jax.random.key(seed)))


@pytest.mark.parametrize("row", ROWS)
def test_pieces_are_the_one_program_bit_for_bit(row):
    model = families.make(ROWS[row])
    mesh = sharding.make_mesh(
        {**dict.fromkeys(sharding.MESH_AXES, 1), "fsdp": 2}, jax.devices()[:2]
    )
    shapes = jax.eval_shape(lambda: initial(model, 0))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    shardings = jax.tree.map(
        lambda x: split if x.ndim and x.shape[0] % 2 == 0 else sharding.replicated(mesh), shapes
    )
    seed = np.uint32(3)
    expected = jax.jit(lambda seed: initial(model, seed), out_shardings=shardings)(seed)
    drawn = draws.by_pieces(lambda seed: initial(model, seed), shardings, seed)
    assert jax.tree.structure(drawn) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_layers_that_are_alike_share_a_program(monkeypatch):
    monkeypatch.setattr(draws, "_programs", {})
    counts = []
    for depth in (2, 6):
        model = families.make({"width": 8, "depth": depth, "mlp.hidden": 16})
        shapes = jax.eval_shape(lambda model=model: initial(model, 0))
        here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
        draws.by_pieces(lambda seed, model=model: initial(model, seed), here, np.uint32(0))
        counts.append(len(draws._programs))
    # Of six blocks only what is drawn smaller the deeper a model is, and what is not drawn, is new.
    assert counts[0] < 8 and counts[1] - counts[0] <= 3


def test_what_is_captured_tells_pieces_apart():
    """Two draws that differ in a constant array only."""

    def function(seed):
        key = jax.random.key(seed)
        return [
            jax.random.normal(jax.random.fold_in(key, number), (3,)) * np.float32([1.0, 2.0, scale])
            for number, scale in ((1, 5.0), (2, 5.0), (3, 7.0))
        ]

    here = [jax.sharding.SingleDeviceSharding(jax.devices()[0])] * 3
    for one, other in zip(
        draws.by_pieces(function, here, np.uint32(1)), jax.jit(function)(np.uint32(1)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
