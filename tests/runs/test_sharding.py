"""Meshes and rules: layout of devices, parameters, activations and batches."""

import dataclasses
import itertools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from refusals import refused

from efx import models
from efx.layers import flops, linear
from efx.parallel import sharding
from efx.parallel.sharding import DEFAULT_RULES
from efx.train import losses

ONE = dict.fromkeys(sharding.MESH_AXES, 1)


def mesh_of(**sizes):
    return sharding.make_mesh(ONE | sizes)


# ---- meshes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, expected", [(dict(fsdp=-1, data=2), dict(fsdp=4, data=2)), (dict(expert=8),) * 2]
)
def test_sizes_of_a_mesh(sizes, expected):
    mesh = mesh_of(**sizes)
    assert dict(mesh.shape) == ONE | expected
    assert set(mesh.axis_types) == {AxisType.Auto}


@dataclasses.dataclass(frozen=True)
class Device:
    """A TPU chip or a GPU, as `make_mesh` sees it."""

    id: int
    slice_index: int
    process_index: int
    coords: tuple = ()
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0


CHIPS = [  # 2 slices of 4 x 4
    Device(i, n, i // 4, (x, y, 0))
    for i, (n, y, x) in enumerate(itertools.product(range(2), range(4), range(4)))
]
# Each has a process of its own; eight are in a machine.
GPUS = [Device(i, i // 8, i, platform="gpu", device_kind="NVIDIA H100") for i in range(16)]


@pytest.mark.parametrize(
    "devices, sizes", [(CHIPS, dict(data=-1, fsdp=4, tensor=2)), (GPUS, dict(data=2, fsdp=8))]
)
def test_only_data_crosses_slices_and_machines(devices, sizes):
    laid_out = sharding.make_mesh(ONE | sizes, devices).devices
    slices = np.vectorize(lambda device: device.slice_index)(laid_out)
    assert np.all(slices == slices[:, :1, :1]) and set(slices.flat) == {0, 1}


def test_meshes_that_do_not_fit_the_slices_are_refused():
    refused(lambda: sharding.make_mesh(ONE | dict(fsdp=-1), CHIPS), "data=1", "2 TPU slices")


# ---- rules -------------------------------------------------------------------------------------


def with_rule(name, *axes):
    return (*(rule for rule in DEFAULT_RULES if rule[0] != name), *((name, x) for x in axes))


@pytest.mark.parametrize(
    "rules, names",
    [
        (with_rule("act_mlp"), ("'act_mlp'",)),
        (with_rule("mlp", ("data", "modle")), ("'mlp'", "'modle'")),
        (with_rule("mlp", ("tensor", "tensor")), ("'mlp'",)),
    ],
)
def test_wrong_rules_are_refused(rules, names):
    refused(lambda: sharding.check_rules(rules), "config.rules", *names)


def test_a_dimension_without_an_applicable_rule_is_an_error():
    """It is not silently replicated: a misspelt name, and a mesh axis that another one uses."""
    x, mesh = jnp.ones((8, 8, 4)), mesh_of(data=8)
    for rules, length in ((DEFAULT_RULES, "lenght"), (with_rule("length", "data"), "length")):
        with sharding.use(mesh, rules):
            refused(lambda name=length: sharding.constrain(x, "batch", name, None), length)
    with sharding.use(mesh, DEFAULT_RULES):
        placed = jax.jit(lambda x: sharding.constrain(x, "batch", "length", None))(x)
    assert placed.addressable_shards[0].data.shape == (1, 8, 4)


def boxed_params(model):
    return models.variable_shapes(model)["params"]


# Together these have every kind of module.
DISTINCT = {"llama_options", "mod_context", "moe", "soft_options", "averages", "streams_parallel"}
DISTINCT |= {"adapter_inclusion", "mod_capacity_list", "latent_rope", "dropout_attention"}


@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_every_parameter_names_axes_that_have_rules(name):
    """Without a name an axis would silently be replicated."""
    boxed = boxed_params(families.build(name))
    specs, shapes = nn.get_partition_spec(boxed), nn.unbox(boxed)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        axes = set(spec) - {None}
        assert axes and axes <= set(sharding.LOGICAL_AXES), path
    ranks = jax.tree.map(lambda shape, spec: len(shape.shape) == len(spec), shapes, specs)
    assert all(jax.tree.leaves(ranks))


# ---- one device and several compute the same ---------------------------------------------------


def test_gradients_of_the_table_on_a_mesh_are_those_of_one_device():
    """Of the lookup and of the output layer, whose gradient each shard of the batch accumulates."""
    model, mesh = (
        families.make({"vocab_multiple": 16, "depth": 1}),
        mesh_of(data=2, fsdp=2, tensor=2),
    )
    params = nn.unbox(families.random_params(model))
    inputs, targets = np.random.default_rng(0).integers(0, 45, (2, 8, 8)).astype(np.int32)
    batch = inputs, targets, np.ones((8, 8), np.float32)

    def gradients(groups):
        def total(params, inputs, targets, weights):
            return losses.chunked_cross_entropy(
                model.head_fn,
                model.head_params(params),
                model.apply({"params": params}, inputs, method="features"),
                targets,
                weights,
                chunk=3,
                groups=groups,
                sum_groups=model.sum_head_gradients,
            ).total

        return jax.grad(total)

    expected = jax.jit(gradients(1))(params, *batch)
    layout = sharding.tree_shardings(boxed_params(model), mesh, DEFAULT_RULES)
    by_row = sharding.batch_sharding(mesh, DEFAULT_RULES)
    with sharding.use(mesh, DEFAULT_RULES):
        got = jax.jit(
            gradients(sharding.shard_count("batch", mesh, DEFAULT_RULES)),
            in_shardings=(layout, by_row, by_row, by_row),
            out_shardings=layout,
        )(params, *batch)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


MOD = {"depth": 2, "depth_routing.kind": "mod", "depth_routing.capacity": 0.25}
ONE_HEAD, TWO_HEADS = ({"depth": 1, "attention.num_kv_heads": n} for n in (1, 2))


@pytest.mark.parametrize(
    "changes, length, sizes, rows",
    [
        (MOD, 20, dict(data=2, sequence=2, tensor=2), 4),  # 5 slots on two devices
        (ONE_HEAD, 8, dict(data=4, sequence=2), 1),
        (ONE_HEAD, 8, dict(data=2, sequence=2, tensor=2), 4),
        # Each device has both key heads and two of the four query heads.
        (TWO_HEADS, 8, dict(data=2, sequence=2, tensor=2), 4),
    ],
)
def test_logits_of_split_sequences_are_those_of_one_device(changes, length, sizes, rows):
    """Although slots, rows or heads do not divide over the devices."""
    model = families.make({**changes, "vocab_multiple": 8}, context=length)
    model = model.clone(selection="train")
    params, state = families.random_params(model, 1), families.random_state(model)
    tokens_BT = np.random.default_rng(0).integers(0, families.VOCAB, (rows, length))
    tokens_BT = tokens_BT.astype(np.int32)

    def logits(params, tokens_BT):
        return model.apply({"params": params, **state}, tokens_BT)

    expected = families.jit(logits)(params, tokens_BT)
    rules = DEFAULT_RULES
    if changes == TWO_HEADS:
        rules = sharding.check_rules(sharding.unsplit(rules, "kv_heads", "act_kv_heads"))
    with sharding.use(mesh_of(**sizes), rules):
        got = families.jit(logits)(jax.device_get(params), tokens_BT)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_gradients_of_a_frequent_token_do_not_saturate_in_bfloat16():
    """A running sum of ones in bfloat16 stops at 256."""
    table = linear.Embedding(4, 2, 1.0, jnp.bfloat16)
    tokens = jnp.zeros((8, 128), jnp.int32)

    @jax.jit
    def gradient():
        params = table.init(jax.random.key(0), tokens)
        return jax.grad(lambda params: jnp.sum(table.apply(params, tokens)))(params)

    gradients = nn.unbox(gradient())["params"]["embedding"]
    assert gradients.tolist() == [[1024, 1024]] + [[0, 0]] * 3


# ---- layouts -----------------------------------------------------------------------------------


def test_layout_of_parameters():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    shardings = sharding.tree_shardings(boxed_params(families.build("mod")), mesh, DEFAULT_RULES)
    block = shardings["layers"]["block_1"]
    assert block["mlp"]["up"]["kernel"].spec == P(("fsdp", "expert"), "tensor")
    assert block["attention"]["out"]["kernel"].spec == P("tensor", ("fsdp", "expert"))
    assert shardings["embed"]["embedding"].spec == P(("tensor", "fsdp", "expert"), None)
    assert all(axis is None for axis in block["router"].spec)
    # Arrays without names, such as an optimiser's counters, are replicated.
    count = {"count": jax.ShapeDtypeStruct((), jnp.int32)}
    assert sharding.tree_shardings(count, mesh, DEFAULT_RULES)["count"].is_fully_replicated


@pytest.mark.parametrize(
    "changes, sizes, names",
    [
        ({"vocab_multiple": 1}, dict(fsdp=8), ("embed/embedding", "vocab_multiple")),
        (
            {"attention.num_kv_heads": 1, "attention.head_dim": 6},
            dict(tensor=4, data=2),
            ("layers/block_0/attention/key/kernel", "'tensor'"),
        ),
    ],
)
def test_parameters_that_do_not_divide_are_refused(changes, sizes, names):
    boxed = boxed_params(families.make(changes))
    refused(lambda: sharding.tree_shardings(boxed, mesh_of(**sizes), DEFAULT_RULES), *names)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding_of_the_vocabulary_changes_nothing(tied):
    """Initial values, logits and costs are those of the model without padding."""
    changes = {"depth": 1, "tied": tied}
    plain, wide = (families.make({**changes, "vocab_multiple": n}) for n in (1, 8))
    assert (plain.padded_vocab, wide.padded_vocab) == (45, 48)
    params, padded = (families.initial(m)["params"] for m in (plain, wide))
    table = padded["embed"]["embedding"]
    np.testing.assert_array_equal(table, np.pad(params["embed"]["embedding"], ((0, 3), (0, 0))))
    if not tied:
        kernel = np.pad(params["head"]["kernel"], ((0, 0), (0, 3)))
        np.testing.assert_array_equal(padded["head"]["kernel"], kernel)
    tokens = families.tokens(batch=1, length=4)
    logits = [
        families.jit(m.apply)({"params": p}, tokens) for m, p in ((plain, params), (wide, padded))
    ]
    np.testing.assert_allclose(*logits, atol=1e-6)
    assert plain.ledger(16).nominal == wide.ledger(16).nominal
    width = table.shape[1]
    assert flops.executed(wide, 16) - flops.executed(plain, 16) == flops.matmul(16, width, 3)


def test_the_vocabulary_is_padded_for_the_mesh():
    ways = sharding.shard_count("vocab", mesh_of(data=2, fsdp=2, tensor=2), DEFAULT_RULES)
    config = families.small_config({"vocab_multiple": 0}).model
    model = models.build(config, vocab_size=257, context=8, dtype="float32", vocab_ways=ways)
    assert model.padded_vocab == 260


@pytest.mark.parametrize("sizes, shards", [(dict(data=2, fsdp=4), 8), (dict(data=2, tensor=4), 2)])
def test_batches_are_split_by_row(sizes, shards):
    mesh = mesh_of(**sizes)
    assert sharding.shard_count("batch", mesh, DEFAULT_RULES) == shards
    rows = np.arange(8 * 5).reshape(8, 5)
    batch = sharding.Placement(mesh, DEFAULT_RULES, 8)({"inputs": rows})["inputs"]
    np.testing.assert_array_equal(batch, rows)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(8 // shards, 5)}
