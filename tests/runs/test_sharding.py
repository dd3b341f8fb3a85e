"""Meshes and rules: what they make, and that every mistake in them is named."""

import dataclasses
import itertools
import pathlib
import re
import shlex
import time
from types import SimpleNamespace

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from efx import build, flops, losses, main, models, sharding, step
from efx.checkpoint import params as checkpoint_params
from efx.errors import UsageError
from efx.layers import linear
from efx.sharding import DEFAULT_RULES

ONE = dict.fromkeys(sharding.MESH_AXES, 1)


def mesh_of(**sizes):
    return sharding.make_mesh(ONE | sizes)


# ---- meshes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (dict(data=-1), dict(data=8)),
        (dict(data=-1, tensor=4), dict(data=2, tensor=4)),
        (dict(fsdp=-1, data=2), dict(fsdp=4, data=2)),
        (dict(data=2, fsdp=2, tensor=2), dict(data=2, fsdp=2, tensor=2)),
        (dict(data=-1, expert=8), dict(expert=8)),
    ],
)
def test_make_mesh(sizes, expected):
    mesh = mesh_of(**sizes)
    assert dict(mesh.shape) == ONE | expected
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_mesh_of_given_devices():
    mesh = sharding.make_mesh(ONE | dict(data=-1, tensor=2), jax.devices()[:4])
    assert dict(mesh.shape) == ONE | dict(data=2, tensor=2)
    assert set(mesh.devices.flat) == set(jax.devices()[:4])


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(data=-1, fsdp=-1), "at most one of them -1"),
        (dict(data=0), "at least 1"),
        (dict(data=-2), "at least 1"),
        (dict(data=4), "needs 4 devices, but there are 8"),
        (dict(data=16), "needs 16 devices, but there are 8"),
        (dict(data=-1, tensor=3), "devices, but there are 8"),
        (dict(data=-1, tensor=16), "needs a multiple of 16 devices, but there are 8"),
    ],
)
def test_impossible_meshes(sizes, message):
    with pytest.raises(UsageError, match=rf"config\.mesh=.*{message}"):
        mesh_of(**sizes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a mesh is laid out by, of a TPU."""

    id: int
    coords: tuple
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0

    @property
    def process_index(self):
        return self.id // 4


def chips(slices, rows, columns):
    places = itertools.product(range(slices), range(rows), range(columns))
    return [Chip(i, (x, y, 0), n) for i, (n, y, x) in enumerate(places)]


def test_a_mesh_splits_physical_axes():
    """Four neighbours of a row of 16 are an axis: JAX's own mesh refuses that."""
    laid_out = sharding.make_mesh(ONE | dict(fsdp=64, tensor=4), chips(1, 16, 16)).devices
    for row in laid_out.reshape(64, 4):
        (x, y, _), *others = (chip.coords for chip in row)
        assert others == [(x + i, y, 0) for i in (1, 2, 3)]


def test_only_data_goes_over_slices():
    laid_out = sharding.make_mesh(ONE | dict(data=-1, fsdp=4, tensor=2), chips(2, 4, 4)).devices
    assert laid_out.shape == (4, 4, 2, 1, 1)
    slices = np.vectorize(lambda chip: chip.slice_index)(laid_out)
    np.testing.assert_array_equal(slices[:, 0, 0, 0, 0], [0, 0, 1, 1])
    assert np.all(slices == slices[:, :1, :1])


@pytest.mark.parametrize(
    "sizes, message",
    [
        (
            dict(fsdp=-1),
            r"data=1 must be a multiple of the 2 groups .*\(config\.mesh\.dcn_data; .*",
        ),
        (dict(data=-1, dcn_data=4), r"config\.mesh\.dcn_data=4: there are 2 slices"),
    ],
)
def test_a_mesh_that_slices_have_no_place_for_is_named(sizes, message):
    with pytest.raises(UsageError, match=message):
        sharding.make_mesh(ONE | sizes, chips(2, 4, 4))


def test_groups_of_devices_are_hosts_or_slices():
    assert mesh_of(data=8, dcn_data=1).devices.shape == (8, 1, 1, 1, 1)
    with pytest.raises(UsageError, match=r"config\.mesh\.dcn_data=2: there are 1 hosts"):
        mesh_of(data=8, dcn_data=2)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a mesh is laid out by, of a GPU with a process of its own, eight to a machine."""

    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"

    @property
    def process_index(self):
        return self.id

    @property
    def slice_index(self):
        return self.id // 8


def test_groups_of_gpus_are_machines_however_many_processes_these_have():
    gpus = [Gpu(i) for i in range(16)]
    laid_out = sharding.make_mesh(ONE | dict(data=2, fsdp=8, dcn_data=2), gpus).devices
    assert [{gpu.slice_index for gpu in row.flat} for row in laid_out] == [{0}, {1}]
    # Unless it is said that the network between them is slow, any axis may go over it.
    assert sharding.make_mesh(ONE | dict(fsdp=16), gpus).devices.shape == (1, 16, 1, 1, 1)
    with pytest.raises(UsageError, match=r"config\.mesh\.dcn_data=16: there are 2 machines"):
        sharding.make_mesh(ONE | dict(data=16, dcn_data=16), gpus)


# ---- rules -------------------------------------------------------------------------------------


def without(name):
    return tuple(rule for rule in DEFAULT_RULES if rule[0] != name)


@pytest.mark.parametrize("devices", [1, 8])
def test_programs_for_several_cpu_devices_are_not_kept(devices):
    """Such a program, read from the compile cache, waited for itself until XLA ended the process:
    `test_micro_batches_are_the_big_batch_on_a_mesh` in its second run."""
    seconds = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    program = f"kept_for_{devices}_{time.time_ns()}"

    def total(x):
        return x.sum()

    total.__name__ = program
    mesh = sharding.make_mesh(ONE | dict(data=devices), jax.devices()[:devices])
    jax.config.update(seconds, 0)
    try:
        with sharding.use(mesh, DEFAULT_RULES):
            rows = jax.device_put(np.ones((8, 1)), sharding.batch_sharding(mesh, DEFAULT_RULES))
            jax.jit(total)(rows)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    finally:
        jax.config.update(seconds, before)
    kept = list(pathlib.Path(jax.config.jax_compilation_cache_dir).glob(f"jit_{program}*"))
    assert bool(kept) == (devices == 1)
    for path in kept:
        path.unlink()


def test_check_rules():
    assert sharding.check_rules(DEFAULT_RULES) == DEFAULT_RULES
    listed = [
        [name, list(axes) if isinstance(axes, tuple) else axes] for name, axes in DEFAULT_RULES
    ]
    assert sharding.check_rules(listed) == DEFAULT_RULES  # as JSON gives them back


@pytest.mark.parametrize("name", sharding.PARAMETER_AXES + sharding.ACTIVATION_AXES)
def test_a_missing_rule_is_named(name):
    with pytest.raises(UsageError, match=rf"config\.rules: there is no rule .*'{name}'"):
        sharding.check_rules(without(name))


@pytest.mark.parametrize("axes", ["modle", ("data", "modle"), ["modle"]])
def test_an_unknown_mesh_axis_is_named(axes):
    with pytest.raises(UsageError, match="'mlp' is mapped to 'modle'.*data, fsdp, tensor"):
        sharding.check_rules((*without("mlp"), ("mlp", axes)))


@pytest.mark.parametrize(
    "name, axes, message",
    [
        ("mlp", ("tensor", "tensor"), "'mlp' is mapped to .*; use each mesh axis once"),
        ("length", "data", "both 'batch' and 'length' are mapped to 'data'"),
        ("act_embed", "tensor", "both 'act_.*' and 'act_embed' are mapped to 'tensor'"),
        ("act_expert", "data", "both 'expert_batch' and 'act_expert' are mapped to 'data'"),
    ],
)
def test_rules_that_exclude_each_other_are_named(name, axes, message):
    """They ended in an error of JAX or of Flax when a step was traced, or when parameters were
    laid out."""
    with pytest.raises(UsageError, match=rf"config\.rules: {message}"):
        sharding.check_rules((*without(name), (name, axes)))
    # A later rule is taken where the first cannot be.
    sharding.check_rules((*DEFAULT_RULES, ("length", "data")))


def boxed_of(name):
    model = families.build(name)
    return models.variable_shapes(model)["params"]


@pytest.mark.parametrize("name", families.NAMES)
def test_every_parameter_names_axes_that_have_rules(name):
    """A name without a rule would mean "replicated" without anyone having said so."""
    boxed = boxed_of(name)
    specs, shapes = nn.get_partition_spec(boxed), nn.unbox(boxed)
    for path, spec in jax.tree_util.tree_leaves_with_path(
        specs, is_leaf=lambda leaf: isinstance(leaf, P)
    ):
        names = set(spec) - {None}
        assert names, f"{jax.tree_util.keystr(path)} names no axis"
        assert names <= set(sharding.PARAMETER_AXES), jax.tree_util.keystr(path)
    ranks = jax.tree.map(lambda shape, spec: len(shape.shape) == len(spec), shapes, specs)
    assert all(jax.tree.leaves(ranks))


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_output_layer_lies_as_it_does(tied):
    """The loss uses a copy on every device; the gradient of that would be one on every device, too,
    where each needs the sum of its own part."""
    model, mesh = families.make({"tied": tied, "vocab_multiple": 8}), mesh_of(fsdp=8)
    params = nn.unbox(families.random_params(model))

    def loss(params):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(model.head_params(params)))

    with sharding.use(mesh, DEFAULT_RULES):
        equations = jax.make_jaxpr(jax.grad(loss))(params).eqns
    used, gradient = (
        set(equation.params["sharding"].spec)
        for equation in equations
        if equation.primitive.name == "sharding_constraint"
    )
    assert used == {"tensor", None}
    assert gradient == {("tensor", "fsdp", "expert"), None}


@pytest.mark.parametrize(
    "sizes, rows",
    [
        (dict(data=2, fsdp=4), 8),
        (dict(data=2, fsdp=2, tensor=2), 8),
        (dict(fsdp=2, tensor=2, expert=2), 8),
        (dict(data=2, fsdp=2, sequence=2), 8),
        (dict(data=2, fsdp=4), 3),  # which do not divide over the batch's shards
    ],
)
def test_gradients_of_the_table_are_sums_of_parts(sizes, rows):
    """Those of the lookup and of the output layer: the numbers of one device, and each device gets
    the sum of its part, where a sum with a constraint made one of all on every device."""
    model, mesh = families.make({"vocab_multiple": 16}), mesh_of(**sizes)
    params = nn.unbox(families.random_params(model))
    vocab = len(params["embed"]["embedding"])
    batch = {
        "inputs": jax.random.randint(jax.random.key(1), (rows, 8), 0, 45),
        "targets": jax.random.randint(jax.random.key(2), (rows, 8), 0, 45),
        "weights": jnp.ones((rows, 8)),
    }

    def gradients(groups):
        chunk, parts = 3, sharding.ways("length")

        def total(params, batch):
            x_BTD = model.apply({"params": params}, batch["inputs"], method="features")
            return losses.chunked_cross_entropy(
                model.head_fn,
                model.head_params(params),
                *(step._as_rows(x, groups, parts) for x in (x_BTD, *list(batch.values())[1:])),
                chunk=chunk,
                groups=groups * parts,
                sum_groups=model.sum_head_gradients,
            ).total

        return jax.grad(total)

    wanted, boxed = gradients(1)(params, batch), models.variable_shapes(model)["params"]
    layout = sharding.tree_shardings(boxed, mesh, DEFAULT_RULES)
    with sharding.use(mesh, DEFAULT_RULES):
        shards = sharding.batch_shards(mesh, DEFAULT_RULES)
        divides = rows % shards == 0
        by_row = sharding.batch_sharding(mesh, DEFAULT_RULES) if divides else None
        compiled = (
            jax.jit(
                gradients(shards if divides else 1),
                in_shardings=(layout, by_row),
                out_shardings=layout,
            )
            .lower(params, batch)
            .compile()
        )
        placed = jax.device_put(batch, by_row) if divides else batch
        got = compiled(jax.device_put(params, layout), placed)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    whole = rf"f32\[(1,)?{vocab // sizes.get('tensor', 1)},32\]"
    summed = re.findall(rf"= .*{whole}.* all-reduce\(", compiled.as_text())
    assert not divides or not summed, summed


def test_slots_that_do_not_divide_over_a_sequence_leave_the_first_token_alone():
    """Of 5 slots over two devices, beside tensor=2, padding was added to the first place: logits
    were off by 0.7."""
    changes = {"depth_routing.kind": "mod", "depth_routing.capacity": 0.25, "vocab_multiple": 8}
    model = families.make(changes, context=20).clone(selection="train")
    boxed = models.variable_shapes(model)["params"]
    params = families.random_params(model, 1)
    tokens_BT = np.random.default_rng(0).integers(0, families.VOCAB, (4, 20)).astype(np.int32)

    def logits(params, tokens_BT):
        return model.apply({"params": params}, tokens_BT)

    wanted = jax.jit(logits)(params, tokens_BT)
    mesh = mesh_of(data=2, sequence=2, tensor=2)
    layout = sharding.tree_shardings(boxed, mesh, DEFAULT_RULES)
    by_row = sharding.batch_sharding(mesh, DEFAULT_RULES)
    with sharding.use(mesh, DEFAULT_RULES):
        placed = jax.device_put((jax.device_get(params), tokens_BT), (layout, by_row))
        got = jax.jit(logits, in_shardings=(layout, by_row))(*placed)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize(
    "sizes, rows", [(dict(data=4, sequence=2), 1), (dict(data=2, sequence=2, tensor=2), 4)]
)
def test_attention_over_a_sequence_takes_what_does_not_divide(sizes, rows):
    """A single row, as in initialising, and one head of keys for tensor=2 ended in JAX's error."""
    model = families.make({"attention.num_kv_heads": 1, "vocab_multiple": 8}, context=8)
    params = families.random_params(model, 1)
    tokens_BT = np.random.default_rng(0).integers(0, families.VOCAB, (rows, 8)).astype(np.int32)

    def logits(params, tokens_BT):
        return model.apply({"params": params}, tokens_BT)

    wanted = jax.jit(logits)(params, tokens_BT)
    with sharding.use(mesh_of(**sizes), DEFAULT_RULES):
        got = jax.jit(logits)(jax.device_get(params), tokens_BT)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_heads_of_queries_read_their_own_keys_where_these_are_whole():
    """Two heads of keys on every device, of four heads of queries two: each of these read another
    one, as if they were four heads of two devices."""
    changes = {"attention.num_kv_heads": 2, "vocab_multiple": 8, "depth": 1}
    model = families.make(changes, context=8)
    params = families.random_params(model, 1)
    tokens_BT = np.random.default_rng(0).integers(0, families.VOCAB, (4, 8)).astype(np.int32)

    def logits(params, tokens_BT):
        return model.apply({"params": params}, tokens_BT)

    wanted = families.jit(logits)(params, tokens_BT)
    rules = sharding.check_rules(sharding.unsplit(DEFAULT_RULES, "kv_heads", "act_kv_heads"))
    with sharding.use(mesh_of(data=2, sequence=2, tensor=2), rules):
        got = families.jit(logits)(jax.device_get(params), tokens_BT)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_many_places_of_a_token_count_in_bfloat16_too():
    """A running sum in bfloat16 stops at 256."""
    table = linear.Embedding(4, 2, 1.0, jnp.bfloat16)
    tokens = jnp.zeros((8, 128), jnp.int32)
    params = table.init(jax.random.key(0), tokens)
    gradient = jax.grad(lambda params: jnp.sum(table.apply(params, tokens)))(params)
    assert nn.unbox(gradient)["params"]["embedding"].tolist() == [[1024, 1024]] + [[0, 0]] * 3


def test_scanned_parameters_name_the_layer_axis():
    model = models.changed(families.build("llama"), scan_layers=True)
    boxed = models.variable_shapes(model)["params"]
    specs = nn.get_partition_spec(boxed)["layers"]
    up = specs["units"]["block_0"]["mlp"]["up"]["kernel"]
    assert up == P("layers", "embed", "mlp")


def test_activations_name_axes_that_have_rules():
    """Under a mesh a misspelt name is an error, not a tensor that silently stays whole."""
    x = jnp.ones((8, 4))
    with sharding.use(mesh_of(data=8), DEFAULT_RULES):
        placed = jax.jit(lambda x: sharding.constrain(x, "batch", None))(x)
        assert placed.addressable_shards[0].data.shape == (1, 4)
        with pytest.raises(ValueError, match="bacth"):
            jax.jit(lambda x: sharding.constrain(x, "bacth", None))(x)
    assert sharding.constrain(x, "bacth", None) is x  # outside a mesh there is nothing to place


# ---- shardings of a model ----------------------------------------------------------------------


def test_tree_shardings():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    shardings = sharding.tree_shardings(boxed_of("mod"), mesh, DEFAULT_RULES)
    block = shardings["layers"]["block_1"]
    assert block["mlp"]["up"]["kernel"].spec == P(("fsdp", "expert"), "tensor")
    assert block["mlp"]["down"]["kernel"].spec == P("tensor", ("fsdp", "expert"))
    assert block["attention"]["query"]["kernel"].spec == P(("fsdp", "expert"), "tensor")
    assert block["attention"]["out"]["kernel"].spec == P("tensor", ("fsdp", "expert"))
    assert shardings["embed"]["embedding"].spec == P(("tensor", "fsdp", "expert"), None)
    assert all(axis is None for axis in block["router"].spec)
    # Plain arrays, without names, are replicated: counters of an optimiser.
    mixed = {"params": boxed_of("mod")["norm_final"], "count": jax.ShapeDtypeStruct((), jnp.int32)}
    count = sharding.tree_shardings(mixed, mesh, DEFAULT_RULES)["count"]
    assert count.is_fully_replicated and isinstance(count, NamedSharding)


@pytest.mark.parametrize(
    "changes, sizes, message",
    [
        (
            {"vocab_multiple": 1},
            dict(fsdp=8),
            r"embed/embedding of shape \(45, 32\): 45 .*"
            r"8 devices .*'fsdp'.*vocab_multiple=0, or a multiple of 8",
        ),
        (
            {"width": 36, "attention.head_dim": 8},
            dict(fsdp=8),
            r"attention/\w+/kernel of shape .*36 is not a multiple",
        ),
        (
            {"attention.num_kv_heads": 1, "attention.head_dim": 6},
            dict(tensor=4, data=2),
            r"layers/block_0/attention/key/kernel of shape \(32, 6\): 6 is not a .*'tensor'",
        ),
    ],
)
def test_what_does_not_divide_is_named(changes, sizes, message):
    model = families.make(changes)
    boxed = models.variable_shapes(model)["params"]
    with pytest.raises(UsageError, match=message):
        sharding.tree_shardings(boxed, mesh_of(**sizes), DEFAULT_RULES)


def test_pieces_of_no_whole_tiles_are_told_of():
    """What a TPU gathers of them it copies: more than half of a step of 32B parameters on 256."""
    split = NamedSharding(mesh_of(fsdp=8), P("fsdp"))

    def told(*shapes):
        return sharding.torn_tiles(
            [jax.ShapeDtypeStruct(shape, "float32", sharding=split) for shape in shapes]
        )

    assert told((96, 5)) == (
        "config.mesh splits 96 into 8 pieces of 12, not a multiple of the tile of 8 rows, so a TPU"
        " copies the gathered arrays once more; with config.mesh.data=-1, 4 pieces are multiples"
    )
    assert told((40, 5)).endswith(
        "copies the gathered arrays once more"
    )  # nor are 4 of 10, 2 of 20
    assert told((64, 5)) == told((24,)) == told((24, 5, 5)) == ""
    assert told((96, 5), (1024, 64)) == ""  # a small part of all


def test_sums_that_tell_parameters_apart_are_of_each_shard():
    """Of an array that is split in its second dimension: one that is reshaped was gathered."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 16, 5)).astype(np.float32)
    layout = NamedSharding(jax.make_mesh((8,), ("data",)), P(None, "data"))
    sums = checkpoint_params._sums.lower({"x": jax.device_put(x, layout)}, 0).compile()
    assert "all-gather" not in sums.as_text()
    bits = x.view(np.uint32).ravel()
    places = np.arange(bits.size, dtype=np.uint32)
    expected = [bits.sum(dtype=np.uint32), (bits * (2 * places + 1)).sum(dtype=np.uint32)]
    assert np.asarray(sums({"x": jax.device_put(x, layout)})["x"]).tolist() == expected


def test_advice_on_tiles_is_for_tpus():
    split = NamedSharding(mesh_of(fsdp=8), P("fsdp"))
    shapes = SimpleNamespace(params=[jax.ShapeDtypeStruct((96, 5), "float32", sharding=split)])
    for platform, is_told in (("tpu", True), ("gpu", False), ("cpu", False)):
        training = build.Training.__new__(build.Training)
        devices = np.array([SimpleNamespace(platform=platform)])
        training.experiment = SimpleNamespace(mesh=SimpleNamespace(devices=devices))
        training.shapes = shapes
        assert bool(training.advice()) == is_told


def test_the_documented_mesh_of_eight_fake_devices(root, monkeypatch):
    """The command of docs/laptop_to_pod.md: its vocabulary of 257 had no place on four devices."""
    monkeypatch.chdir(root)
    page = (root / "docs/laptop_to_pod.md").read_text()
    command = re.search(r"python -m (efx\.main[^`]*--cpu_devices=8[^`]*)```", page)[1]
    config = main.parse(shlex.split(command.replace("\\\n", " "))).config
    mesh = sharding.make_mesh(config.mesh)
    assert dict(mesh.shape) == ONE | dict(data=2, fsdp=2, tensor=2)
    model = models.build(
        config.model,
        vocab_size=257,
        context=config.data.seq_len,
        dtype="float32",
        vocab_ways=sharding.shard_count(mesh, DEFAULT_RULES, "vocab"),
    )
    assert model.padded_vocab == 260
    boxed = models.variable_shapes(model)["params"]
    placed = sharding.tree_shardings(boxed, mesh, DEFAULT_RULES)
    assert placed["embed"]["embedding"].spec == P(("tensor", "fsdp", "expert"), None)


@pytest.mark.parametrize("family", ["decoder", "latent", "encoder_decoder"])
def test_padding_of_the_vocabulary_changes_nothing(family):
    """What is drawn, what is said to cost and what is computed are those of the model without."""
    tied = {} if family == "encoder_decoder" else {"tied": False}
    less = {"encoder_local": 0, "decoder_global": 0} if family == "latent" else {}
    shared = {"family": family, "depth": 1, **tied, **less}
    plain, wide = (families.make({**shared, "vocab_multiple": n}) for n in (1, 8))
    assert (plain.padded_vocab, wide.padded_vocab) == (45, 48)
    params, padded = (families.initial(m)["params"] for m in (plain, wide))
    table = padded["embed"]["embedding"]
    np.testing.assert_array_equal(table, np.pad(params["embed"]["embedding"], ((0, 3), (0, 0))))
    if tied:
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


@pytest.mark.parametrize(
    "sizes, shards",
    [
        (dict(data=8), 8),
        (dict(data=2, fsdp=4), 8),
        (dict(data=2, tensor=4), 2),
        (dict(tensor=8), 1),
    ],
)
def test_batches(sizes, shards):
    mesh = mesh_of(**sizes)
    assert sharding.batch_shards(mesh, DEFAULT_RULES) == shards
    rows = np.arange(8 * 5).reshape(8, 5)
    batch = sharding.Placement(mesh, DEFAULT_RULES, 8)({"inputs": rows})["inputs"]
    np.testing.assert_array_equal(batch, rows)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(8 // shards, 5)}
    assert sharding.replicated(mesh).is_fully_replicated
