"""Layout of arrays: the mesh of the config, and the mapping of logical axes to mesh axes.

Layers name logical axes only (the tables below). The config maps them to mesh axes in one table,
`config.rules`; a logical name that the table does not list is an error, so that a misspelt name
cannot mean "replicated".
"""

import collections
import contextlib
import contextvars
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from efx.errors import UsageError, nearest
from efx.settings import as_dict

MESH_AXES = ("data", "fsdp", "tensor", "expert", "sequence")

# Logical axes of parameters, then of activations.
PARAMETER_AXES = (
    "vocab",
    "table",
    "embed",
    "heads",
    "kv_heads",
    "mlp",
    "norm",
    "position",
    "expert",
    "layers",
)
ACTIVATION_AXES = (
    "batch",
    "expert_batch",
    "length",
    "act_embed",
    "act_heads",
    "act_kv_heads",
    "act_mlp",
    "act_vocab",
    "act_expert",
)

# The first rule of a name whose mesh axes no other dimension of the array has yet is taken.
DEFAULT_RULES = (
    # Outside of experts the axis `expert` is one more that splits the batch and the parameters.
    ("batch", ("data", "fsdp", "expert")),
    ("expert_batch", ("data", "fsdp")),
    ("expert", "expert"),
    ("act_expert", "expert"),
    ("length", "sequence"),
    # The embedding table is split by rows over all axes: a table split by columns makes the
    # partitioner rematerialise the whole lookup.
    ("vocab", ("tensor", "fsdp", "expert")),
    ("table", None),
    ("embed", ("fsdp", "expert")),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("norm", None),
    ("position", None),
    ("layers", None),
    ("act_embed", None),
    ("act_heads", "tensor"),
    ("act_kv_heads", "tensor"),
    ("act_mlp", "tensor"),
    ("act_vocab", "tensor"),
)

# Logical axes of the activations that layers lay out, those of one array together.
_TOGETHER = (
    ("batch", "length", "act_embed"),
    ("batch", "length", "act_heads"),
    ("batch", "length", "act_kv_heads"),
    ("batch", "length", "act_mlp"),
    ("batch", "length", "act_vocab"),
    ("act_vocab", "act_embed"),
    ("act_expert", "expert_batch", "length", "act_embed"),
    ("act_expert", "expert_batch", "act_mlp"),
)

_NO_MESH = types.SimpleNamespace(size=1)
_TILE_ROWS, _TILE_LANES = 8, 128  # of the tiles in which a TPU keeps matrices


def make_mesh(mesh_config, devices=None):
    """Mesh with the axes of `MESH_AXES`; one size may be -1: all devices that the others leave.

    Devices are laid out so that the later axes, which communicate most, lie near each other.

    Args:
      mesh_config: the block `config.mesh`, or a dict of the axes' sizes.
    """
    devices = jax.devices() if devices is None else list(devices)
    settings = as_dict(mesh_config)
    sizes = {name: settings[name] for name in MESH_AXES}
    inferred = [name for name, size in sizes.items() if size == -1]
    bad = {name: size for name, size in sizes.items() if size < 1 and size != -1}
    if bad or len(inferred) > 1:
        raise UsageError(
            f"config.mesh={sizes}: each size must be at least 1, and at most one of them -1"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (fixed != len(devices) and not inferred):
        raise UsageError(
            f"config.mesh={sizes}: needs {'a multiple of ' if inferred else ''}{fixed} "
            f"devices, but there are {len(devices)}"
        )
    if inferred:
        sizes[inferred[0]] = len(devices) // fixed
    # Auto, not Explicit: linen's logical constraints are hints to the partitioner.
    return jax.sharding.Mesh(
        _laid_out(sizes, settings.get("dcn_data", 0), devices),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def _laid_out(sizes, groups, devices):
    """The devices as an array of these sizes; `groups`: as in `config.mesh.dcn_data`."""
    if devices[0].platform != "tpu" and groups <= 1:
        # In the order of processes: the later axes lie within a host. Nothing is known of GPUs and
        # CPUs that would tell of a better one.
        return np.array(devices).reshape(tuple(sizes.values()))
    # Devices of a single slice may have no number of it. Of GPUs, the slices are the machines,
    # whether each has one process or one for each of its devices.
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    hosts = len({device.process_index for device in devices})
    groups = groups or slices
    if groups not in ({slices} if slices > 1 else {1, hosts}):
        kind = "slices" if devices[0].platform == "tpu" else "machines"
        joined = f"{slices} {kind}" if slices > 1 else f"{hosts} hosts"
        raise UsageError(
            f"config.mesh.dcn_data={groups}: there are {joined} of devices; use 0 to detect "
            "the number"
        )
    if sizes["data"] % groups:
        raise UsageError(
            f"config.mesh={sizes}: data={sizes['data']} must be a multiple of the {groups} "
            "groups of devices on the slower network (config.mesh.dcn_data; TPU slices), "
            "because only the data axis may span them"
        )
    inner = (sizes["data"] // groups, *list(sizes.values())[1:])
    options = dict(devices=devices, allow_split_physical_axes=True)
    try:
        if groups == 1:
            return mesh_utils.create_device_mesh(inner, **options)
        outer = (groups, *(1,) * (len(sizes) - 1))
        by_host = slices == 1
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, process_is_granule=by_host, **options
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise UsageError(
            f"config.mesh={sizes} does not fit these {len(devices)} devices: "
            + (" ".join(str(error).split()) or type(error).__name__)
        ) from error


def check_rules(rules):
    """`rules` as a tuple of pairs, checked: a rule for every logical axis, no unknown mesh axis,
    and one that can be taken for each axis of an activation."""
    for i, rule in enumerate(rules):
        is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2
        if not is_pair or not isinstance(rule[1], (str, tuple, list, types.NoneType)):
            raise UsageError(
                f"config.rules[{i}]={rule!r}: must be a pair (logical axis, mesh axis or axes or "
                "None)"
            )
    rules = tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules)
    names = [name for name, _ in rules]
    for name in PARAMETER_AXES + ACTIVATION_AXES:
        if name not in names:
            raise UsageError(f"config.rules: there is no rule for the logical axis {name!r}")
    for name, axes in rules:
        if name not in PARAMETER_AXES + ACTIVATION_AXES:
            known = nearest(name, PARAMETER_AXES + ACTIVATION_AXES)
            raise UsageError(f"config.rules: {name!r} is not a logical axis{known}")
        for axis in _as_tuple(axes):
            if axis not in MESH_AXES:
                raise UsageError(
                    f"config.rules: {name!r} is mapped to {axis!r}, not a mesh axis; the axes "
                    f"are {', '.join(MESH_AXES)}"
                )
        if len(set(_as_tuple(axes))) < len(_as_tuple(axes)):
            raise UsageError(
                f"config.rules: {name!r} is mapped to {axes!r}; use each mesh axis once"
            )
    for names in _TOGETHER:
        _check_together(rules, names)
    return rules


def _check_together(rules, names):
    """UsageError unless each of these dimensions of an array has a rule that leaves the others'
    mesh axes to them."""
    taken = {}  # {mesh axis: the dimension that has it}
    left = list(names)
    for name, axes in rules:
        axes = _as_tuple(axes)
        if name in left and not taken.keys() & set(axes):
            left.remove(name)
            taken |= dict.fromkeys(axes, name)
    for name in left:
        axis = next(a for n, axes in rules if n == name for a in _as_tuple(axes) if a in taken)
        raise UsageError(
            f"config.rules: both {taken[axis]!r} and {name!r} are mapped to {axis!r}, but are "
            f"dimensions of one array; map {name!r} to another mesh axis, or to None"
        )


@contextlib.contextmanager
def use(mesh, rules):
    """Trace under this mesh and these rules. Rules are not part of jit's cache key: one jitted
    function belongs to one mesh and one set of rules."""
    with _kept_where_sound(mesh), used_in_thread(mesh, rules):
        yield


@contextlib.contextmanager
def used_in_thread(mesh, rules):
    """In another thread of a program that is in `use` of this mesh and these rules."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


@contextlib.contextmanager
def _kept_where_sound(mesh):
    """Programs for several CPU devices are not written to the compile cache.

    Read back, they no longer know the order of their collectives (jaxlib 0.10.2): devices that
    take two of them in different orders wait for each other until XLA ends the process.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        yield
        return
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def single_device():
    """Trace for one device of this host, also inside `use`."""
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1), jax.local_devices()[:1])
    return jax.set_mesh(mesh)


def as_one_device():
    """Trace what one device would compute of everything, whatever mesh is traced for."""
    return nn.logical_axis_rules(unsplit(DEFAULT_RULES, *PARAMETER_AXES, *ACTIVATION_AXES))


def constrain(x, *axes):
    """Constrains the layout of an activation by logical names; does nothing outside a mesh.

    Places that do not divide over the devices that share a sequence, such as the slots of a routed
    block, are not split over these: beside another axis the partitioner would add what it computes
    of its padding to the state of a row's first token.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    if "length" in axes and x.shape[axes.index("length")] % ways("length"):
        axes = tuple(None if name == "length" else name for name in axes)
    return nn.with_logical_constraint(x, axes, fallback=nn.spmd.RulesFallback.RAISE_ERROR)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def used_as(x, stored, used):
    """A parameter, which lies by the logical axes `stored`, laid out by `used`.

    Its gradient lies as it does. The gradient of a constraint alone would have to lie by `used`:
    all of it on every device, summed over all, where each needs its part of the sum.
    """
    return constrain(x, *used)


def _used_as_forward(x, stored, used):
    return constrain(x, *used), None


def _used_as_backward(stored, used, _, gradient):
    return (constrain(gradient, *stored),)


used_as.defvjp(_used_as_forward, _used_as_backward)


def parted_gradient(matrix, stored):
    """A matrix, laid out by the logical axes `stored`, whose gradient devices sum part by part.

    A device needs its own part of the sum alone, which is half of what a sum of everything takes.
    The compiler for TPUs makes one of everything where the dimension that is split lies in the
    lanes of tiles and a part has less than two tiles of them, and lets dimensions lie as the last
    tiles are fullest. Here such a dimension lies in the rows.
    """
    mesh, by_row, by_place = _shards()
    if mesh.size == 1 or platform() != "tpu" or matrix.ndim != 2:
        return matrix
    axes = _axes_of_dimensions(stored)
    split = [i for i in range(2) if {*axes[i]} & {*by_row, *by_place}]
    if len(split) != 1 or matrix.shape[split[0]] // _ways(mesh, axes[split[0]]) >= 2 * _TILE_LANES:
        return matrix
    return _with_gradient_in_rows(matrix, split[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_gradient_in_rows(matrix, dimension):
    return matrix


def _with_gradient_in_rows_backward(dimension, _, gradient):
    rows_and_lanes = Layout(major_to_minor=(dimension, 1 - dimension))
    return (with_layout_constraint(gradient, rows_and_lanes),)


_with_gradient_in_rows.defvjp(
    lambda matrix, dimension: (matrix, None), _with_gradient_in_rows_backward
)


def each_shard(function, *arrays):
    """[shards, ...]: what function gives of the part of a batch that each of its shards holds.

    Args:
      arrays: [B, T, ...], split by rows and by places of a sequence.
    Returns:
      As many entries as there are shards, on their devices, or one if the batch does not divide.
    """
    mesh, by_row, by_place = _shards()
    rows, places = arrays[0].shape[:2]
    divides = rows % _ways(mesh, by_row) == 0 and places % _ways(mesh, by_place) == 0

    def own_entry(*arrays):
        return function(*arrays)[None]

    if mesh.size == 1 or not divides:
        return own_entry(*arrays)
    specs = dict(
        in_specs=PartitionSpec(by_row, by_place), out_specs=PartitionSpec(by_row + by_place)
    )
    return jax.shard_map(own_entry, **specs, check_vma=False)(*arrays)


def summed_over_shards(x, stored):
    """The sum over the first axis of x, which has an entry for each shard of a batch.

    Each device keeps its part of the sum: where mesh axes that split the batch split a dimension of
    the sum, devices exchange sums of their parts alone. Of a sum with a constraint the compiler for
    TPUs makes one of everything on every device.

    Args:
      x: [shards, ...], as `each_shard` gives it; of other numbers of entries it is a plain sum.
      stored: logical axes by which the sum will lie.
    """
    mesh, by_row, by_place = _shards()
    if mesh.size == 1:
        return jnp.sum(x, axis=0)
    summed, axes = by_row + by_place, _axes_of_dimensions(stored)
    kept = [tuple(itertools.takewhile(lambda axis: axis not in summed, a)) for a in axes]
    added = [a[len(before) :] for before, a in zip(kept, axes, strict=True)]
    scattered = sum(added, ())
    if not set(scattered) <= set(summed) or len(x) != _ways(mesh, summed):
        return constrain(jnp.sum(x, axis=0), *stored)

    def own_part(x):
        x = x[0]
        for dimension, axes in enumerate(added):
            if axes:
                x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
        return jax.lax.psum(x, tuple(axis for axis in summed if axis not in scattered))

    specs = dict(in_specs=PartitionSpec(summed, *kept), out_specs=PartitionSpec(*axes))
    return jax.shard_map(own_part, **specs, check_vma=False)(x)


def _shards():
    """The mesh that is traced for, and its axes that split a batch by rows and by places."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _NO_MESH, (), ()
    return mesh, *_axes_of_dimensions(("batch", "length"))


_EXCHANGED = "exchanged"
is_exchanged = jax.checkpoint_policies.save_only_these_names(_EXCHANGED)


def exchange(x, before, after):
    """x laid out by the logical axes `after`, where it was by `before`.

    Where they differ in one mesh axis, the last of those of a dimension, which goes to another
    dimension, devices exchange what the others need. The partitioner does not always see this and
    then keeps all of x on every device. The policy `is_exchanged` of `jax.checkpoint` keeps it, so
    that the backward pass need not exchange it once more.
    """
    x = constrain(x, *before)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    old, new = (_axes_of_dimensions(names) for names in (before, after))
    changed = [i for i in range(x.ndim) if old[i] != new[i]]
    if not changed:
        return constrain(x, *after)
    giving = [i for i in changed if old[i][:-1] == new[i]]
    taking = [i for i in changed if old[i] == new[i][:-1]]
    if len(changed) == 2 and giving and taking and old[giving[0]][-1] == new[taking[0]][-1]:
        longer = [max(axes, key=len) for axes in zip(old, new, strict=True)]
        if all(size % _ways(mesh, axes) == 0 for size, axes in zip(x.shape, longer, strict=True)):
            x = jax.shard_map(
                lambda x: jax.lax.all_to_all(
                    x, old[giving[0]][-1], split_axis=taking[0], concat_axis=giving[0], tiled=True
                ),
                in_specs=PartitionSpec(*old),
                out_specs=PartitionSpec(*new),
                check_vma=False,
            )(x)
    return checkpoint_name(constrain(x, *after), _EXCHANGED)


def platform():
    """Of the mesh that is traced for, "cpu", "gpu" or "tpu"; without one, of JAX's own devices."""
    mesh = jax.sharding.get_abstract_mesh()
    name = jax.default_backend() if mesh.empty else mesh.abstract_device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def ways(name):
    """Over how many devices the rules split the logical axis, under the mesh that is traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    return _ways(mesh, *_axes_of_dimensions((name,)))


def _axes_of_dimensions(names):
    """The mesh axes, as tuples, over which the rules split dimensions of these logical names."""
    return [_as_tuple(axes) for axes in nn.logical_to_mesh_axes(names)]


def _as_tuple(axes):
    """The entry of a PartitionSpec, a mesh axis, several, or None, as a tuple of them."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _ways(mesh, axes):
    """Devices along these axes of a mesh together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def path_names(path):
    """A key path of a pytree as a tuple of strings, one for each level."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def tree_shardings(boxed, mesh, rules):
    """NamedSharding of every leaf of a tree of (possibly boxed) abstract arrays.

    Raises UsageError naming the parameter if a dimension does not divide over its mesh axes.
    """
    specs = nn.get_partition_spec(boxed)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    shapes = nn.unbox(boxed)

    def check(path, shape, sharding):
        if not isinstance(sharding, NamedSharding):
            return NamedSharding(mesh, PartitionSpec())
        for size, axes in zip(shape.shape, sharding.spec, strict=False):
            axes = _as_tuple(axes)
            ways = _ways(mesh, axes)
            if size % ways:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise UsageError(
                    f"{name} of shape {shape.shape}: {size} is not a multiple of the {ways} "
                    f"devices of the mesh axes {axes}; change config.mesh, config.rules or the "
                    "model's width (for a vocabulary: config.model.vocab_multiple=0, or a "
                    f"multiple of {ways})"
                )
        return sharding

    return jax.tree_util.tree_map_with_path(check, shapes, shardings)


def torn_tiles(shapes):
    """A line on matrices that a mesh cuts into pieces of no whole tiles; "" where few are.

    A TPU keeps matrices in tiles of 8 rows. What it gathers of pieces of whole tiles lies as it is
    used; of others it is copied once more, each time that it is gathered, which may take more than
    all products of a step (benchmarks/NOTES.md).

    shapes: tree of arrays or shapes with shardings.
    """
    torn, everything = collections.Counter(), 0
    for leaf in jax.tree.leaves(shapes):
        everything += leaf.size
        if len(leaf.shape) > 1:
            pieces = leaf.sharding.shard_shape(leaf.shape)[-2:]
            for size, piece in zip(leaf.shape[-2:], pieces, strict=True):
                if piece < size and piece % _TILE_ROWS:
                    torn[size, size // piece] += leaf.size
    if not torn or max(torn.values()) < everything / 10:
        return ""
    (size, count), _ = torn.most_common(1)[0]
    fewer = [n for n in range(2, count) if count % n == 0 and size // n % _TILE_ROWS == 0]
    return (
        f"config.mesh splits {size} into {count} pieces of {size // count}, not a multiple of "
        f"the tile of {_TILE_ROWS} rows, so a TPU copies the gathered arrays once more"
        + (f"; with config.mesh.data=-1, {max(fewer)} pieces are multiples" if fewer else "")
    )


def batch_sharding(mesh, rules):
    """Sharding of a [batch, length] array of the pipeline."""
    return nn.logical_to_mesh_sharding(PartitionSpec("batch", "length"), mesh, rules)


def replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


def shard_count(mesh, rules, name):
    """The number of shards of the logical axis `name`."""
    axes = nn.logical_to_mesh_sharding(PartitionSpec(name), mesh, rules).spec[0]
    return _ways(mesh, _as_tuple(axes))


def batch_shards(mesh, rules):
    """The number of shards of the batch axis."""
    return shard_count(mesh, rules, "batch")


class Placement:
    """The layout of batches of `size` rows on a mesh, and the rows that this process has to read.

    The number of a row in the whole batch decides where it goes, not the number of the process:
    several processes hold the same rows if a mesh axis that does not split the batch, such as
    tensor, spans them.

    Attributes:
      rows: int64, ascending: the numbers of the rows that devices of this process hold.

    Args:
      size: rows of the whole batch, a multiple of `batch_shards`.
    """

    def __init__(self, mesh, rules, size):
        self._sharding, self._size = batch_sharding(mesh, rules), size
        by_row = NamedSharding(mesh, PartitionSpec(self._sharding.spec[0]))
        local_indices = by_row.addressable_devices_indices_map((size,)).values()
        self.rows = np.unique(np.concatenate([np.arange(size)[index] for index in local_indices]))

    def __call__(self, batch):
        """{name: the rows `rows` of an array [size, T]} as {name: global array [size, T]}."""
        return {name: self._global_array(x) for name, x in batch.items()}

    def _global_array(self, x):
        if len(x) != len(self.rows):
            raise ValueError(f"{len(x)} rows were read, but this process has {len(self.rows)}")

        def local_block(index):
            start, stop, _ = index[0].indices(self._size)
            begin = np.searchsorted(self.rows, start)
            return x[begin : begin + stop - start, *index[1:]]

        return jax.make_array_from_callback((self._size, *x.shape[1:]), self._sharding, local_block)


def whole(tree):
    """Arrays of a tree that no mesh splits, on one device of this host; nothing is sent."""

    def one(x):
        on_mesh = isinstance(x, jax.Array) and not x.is_fully_addressable
        return x.addressable_data(0) if on_mesh else x

    return jax.device_put(jax.tree.map(one, tree), jax.local_devices()[0])


def mesh_that_splits(tree):
    """The mesh over which an array of a tree, or a shape with a sharding, is split; None if every
    device has the whole of it."""
    for x in jax.tree.leaves(tree):
        layout = getattr(x, "sharding", None)
        if layout is not None and not layout.is_fully_replicated:
            return layout.mesh
    return None


def unsplit(rules, *names):
    """The rules with these logical axes on no mesh axis."""
    return tuple((name, None if name in names else axes) for name, axes in rules)


def local(tree):
    """Arrays on one device of this host, gathered from all devices that hold shards of them."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_put(tree, jax.devices()[0])


# ---- parameters --------------------------------------------------------------------------------

_SHAPES_ONLY = contextvars.ContextVar("shapes_only", default=False)


@contextlib.contextmanager
def only_shapes():
    """Initialise parameters with zeros: noise takes a third of the time of tracing `init`."""
    token = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(token)


def parameter(module, name, init, shape, axes):
    """A float32 parameter.

    It replaces `module.param`, which traces `init` at every call of the module only to compare
    shapes: a fifth of the time of tracing a model.

    Args:
      init: (key, shape, dtype) -> initial values.
      axes: logical names, one for each dimension.
    Raises:
      flax.errors.ScopeParamShapeError: the parameter exists with another shape.
    """
    if not module.has_variable("params", name):
        if _SHAPES_ONLY.get():
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, axes)
            return module.variable("params", name, zeros, None, shape, jnp.float32).value
        return module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
    value = nn.unbox(module.get_variable("params", name))
    if value.shape != shape:
        raise ScopeParamShapeError(name, "/".join(module.path), value.shape, shape)
    return value
