"""The mesh, the rules from logical to mesh axes, and collectives between devices.

Layers name logical axes only (the tables below). One table, `config.rules`, maps them to mesh axes;
a logical name that it does not list is an error, so that a misspelt name cannot mean "replicated".
"""

import collections
import contextlib
import contextvars
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from efx.config.schema import as_dict
from efx.errors import UsageError, nearest

MESH_AXES = ("data", "fsdp", "tensor", "expert", "sequence")

# Several rules may name one logical axis: the first one applies whose mesh axes no other dimension
# of the array uses.
DEFAULT_RULES = (
    # Outside of experts the mesh axis `expert` splits the batch and the parameters, like `fsdp`.
    ("batch", ("data", "fsdp", "expert")),
    ("expert_batch", ("data", "fsdp")),
    ("expert", "expert"),
    ("act_expert", "expert"),
    ("length", "sequence"),
    # Rows of the embedding table are split over all axes: if its columns were split, the
    # partitioner would rematerialise the whole lookup.
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
LOGICAL_AXES = tuple(dict.fromkeys(name for name, _ in DEFAULT_RULES))

# Logical axes of each kind of activation that layers constrain.
_ACTIVATIONS = (
    ("batch", "length", "act_embed"),
    ("batch", "length", "act_heads"),
    ("batch", "length", "act_kv_heads"),
    ("batch", "length", "act_mlp"),
    ("batch", "length", "act_vocab"),
    ("act_vocab", "act_embed"),
    ("act_expert", "expert_batch", "length", "act_embed"),
    ("act_expert", "expert_batch", "act_mlp"),
)

_TILE_ROWS = 8  # a TPU stores matrices in tiles of 8 rows


def make_mesh(mesh_config, devices=None):
    """A mesh with the axes of `MESH_AXES`; one size may be -1: all remaining devices.

    Neighbouring devices go to the later axes, which communicate most.

    Args:
      mesh_config: the block `config.mesh`, or a dict of the sizes.
      devices: None: all devices of JAX.
    """
    devices = jax.devices() if devices is None else list(devices)
    settings = as_dict(mesh_config)
    sizes = {name: settings[name] for name in MESH_AXES}
    inferred = [name for name, size in sizes.items() if size == -1]
    if len(inferred) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
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
        _device_array(sizes, settings.get("dcn_data", 0), devices),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def _device_array(sizes, groups, devices):
    """Array of the devices with these sizes.

    Args:
      groups: `config.mesh.dcn_data`, the number of groups of devices on the slower network; 0: the
        number of TPU slices.
    """
    is_tpu = devices[0].platform == "tpu"
    if not is_tpu and groups <= 1:
        # In the order of processes: later axes lie within a host. GPUs and CPUs report no topology.
        return np.array(devices).reshape(tuple(sizes.values()))
    # Devices of a single slice may have no slice_index. For GPUs it numbers the machines, whether a
    # process has one GPU or all of its machine.
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    hosts = len({device.process_index for device in devices})
    groups = groups or slices
    if groups not in ({slices} if slices > 1 else {1, hosts}):
        kind = "slices" if is_tpu else "machines"
        found = f"{slices} {kind}" if slices > 1 else f"{hosts} hosts"
        raise UsageError(
            f"config.mesh.dcn_data={groups}: there are {found} of devices; use 0 to detect the "
            "number"
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
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, process_is_granule=slices == 1, **options
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise UsageError(
            f"config.mesh={sizes} does not fit these {len(devices)} devices: "
            + (" ".join(str(error).split()) or type(error).__name__)
        ) from error


def check_rules(rules):
    """`config.rules` as a tuple of pairs.

    Raises:
      UsageError: a rule is no pair, a name is unknown, a logical axis has no rule, or two
        dimensions of one activation are mapped to the same mesh axis.
    """
    for i, rule in enumerate(rules):
        is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2
        if not is_pair or not isinstance(rule[1], (str, tuple, list, types.NoneType)):
            raise UsageError(
                f"config.rules[{i}]={rule!r}: must be a pair (logical axis, mesh axis or axes or "
                "None)"
            )
    rules = tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules)
    with_rule = {name for name, _ in rules}
    for name in LOGICAL_AXES:
        if name not in with_rule:
            raise UsageError(f"config.rules: there is no rule for the logical axis {name!r}")
    for name, axes in rules:
        if name not in LOGICAL_AXES:
            hint = nearest(name, LOGICAL_AXES)
            raise UsageError(f"config.rules: {name!r} is not a logical axis{hint}")
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
    for names in _ACTIVATIONS:
        for name, axes in zip(names, nn.logical_to_mesh_axes(names, rules), strict=True):
            # Flax returns None for a dimension without an applicable rule, too.
            if axes is None and (name, None) not in rules:
                raise UsageError(
                    f"config.rules: {name!r} is mapped to a mesh axis of another dimension of the "
                    f"activation {names}; map it to a different mesh axis, or to None"
                )
    return rules


@contextlib.contextmanager
def use(mesh, rules):
    """Context in which arrays are laid out by this mesh and these rules.

    Rules are not part of jit's cache key: one jitted function belongs to one mesh and one set of
    rules.
    """
    with _without_cached_collectives(mesh), used_in_thread(mesh, rules):
        yield


@contextlib.contextmanager
def used_in_thread(mesh, rules):
    """`use` in another thread of a program that is inside `use` of the same mesh."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


@contextlib.contextmanager
def _without_cached_collectives(mesh):
    """Context in which programs for several CPU devices are not written to the compilation cache.

    Programs read from the cache do not keep the order of their collectives (jaxlib 0.10.2), so
    devices deadlock until XLA aborts the process.
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
    """Context that traces for one device of this host, also inside `use`."""
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1), jax.local_devices()[:1])
    return jax.set_mesh(mesh)


def as_one_device():
    """Context in which no rule splits anything, whatever the mesh."""
    return nn.logical_axis_rules(unsplit(DEFAULT_RULES, *LOGICAL_AXES))


def constrain(x, *axes):
    """Constrain the layout of an activation by logical names; does nothing outside a mesh.

    Positions that do not divide over the devices of `length`, such as the slots of a routed block,
    are not split: beside another split axis the partitioner would add results of its padding to the
    first token of a row.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    if "length" in axes and x.shape[axes.index("length")] % ways("length"):
        axes = tuple(None if name == "length" else name for name in axes)
    return nn.with_logical_constraint(x, axes, fallback=nn.spmd.RulesFallback.RAISE_ERROR)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reshard(x, stored, used):
    """A parameter, stored by the logical axes `stored`, laid out by `used`.

    Its gradient is laid out by `stored`. Without this rule it would be laid out by `used`: every
    device would sum the whole gradient, not only its part.
    """
    return constrain(x, *used)


def _reshard_forward(x, stored, used):
    return constrain(x, *used), None


def _reshard_backward(stored, used, _, gradient):
    return (constrain(gradient, *stored),)


reshard.defvjp(_reshard_forward, _reshard_backward)


_EXCHANGED = "exchanged"
saves_exchanged = jax.checkpoint_policies.save_only_these_names(_EXCHANGED)


def exchange(x, before, after):
    """x, laid out by the logical axes `before`, laid out by `after`.

    An all-to-all where one mesh axis moves from one dimension to another: the partitioner does not
    always find it and then gathers all of x on every device. The policy `saves_exchanged` of
    `jax.checkpoint` saves the result, so that the backward pass does not repeat the exchange.
    """
    x = constrain(x, *before)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    old, new = _mesh_axes(before), _mesh_axes(after)
    changed = [i for i in range(x.ndim) if old[i] != new[i]]
    if not changed:
        return constrain(x, *after)
    source = max(changed, key=lambda i: len(old[i]) - len(new[i]))
    target = next((i for i in changed if i != source), source)
    moved = old[source][-1:]
    is_all_to_all = (
        len(changed) == 2
        and old[source] == (*new[source], *moved)
        and new[target] == (*old[target], *moved)
    )
    divides = all(
        size % math.lcm(_num_devices(mesh, a), _num_devices(mesh, b)) == 0
        for size, a, b in zip(x.shape, old, new, strict=True)
    )
    if is_all_to_all and divides:
        x = jax.shard_map(
            lambda x: jax.lax.all_to_all(
                x, moved, split_axis=target, concat_axis=source, tiled=True
            ),
            in_specs=PartitionSpec(*old),
            out_specs=PartitionSpec(*new),
            check_vma=False,
        )(x)
    return checkpoint_name(constrain(x, *after), _EXCHANGED)


def platform():
    """ "cpu", "gpu" or "tpu": the platform of the current mesh, or of JAX's default backend."""
    mesh = jax.sharding.get_abstract_mesh()
    name = jax.default_backend() if mesh.empty else mesh.abstract_device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def ways(name):
    """Number of devices over which the current mesh and rules split a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else _num_devices(mesh, *_mesh_axes((name,)))


def _mesh_axes(names):
    """For each logical axis the tuple of mesh axes that splits it, by the current rules."""
    return [_as_tuple(axes) for axes in nn.logical_to_mesh_axes(names)]


def _as_tuple(axes):
    """An entry of a PartitionSpec (a mesh axis, several, or None) as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _num_devices(mesh, axes):
    """Number of devices along these mesh axes together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def path_names(path):
    """The key path of a leaf as a tuple of strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def tree_shardings(boxed, mesh, rules):
    """NamedSharding of every leaf of a tree of (possibly boxed) abstract arrays.

    Raises:
      UsageError: a dimension of a parameter does not divide over its mesh axes.
    """
    specs = nn.get_partition_spec(boxed)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    shapes = nn.unbox(boxed)

    def check(path, shape, sharding):
        if not isinstance(sharding, NamedSharding):
            return NamedSharding(mesh, PartitionSpec())
        for size, axes in zip(shape.shape, sharding.spec, strict=False):
            axes = _as_tuple(axes)
            count = _num_devices(mesh, axes)
            if size % count:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise UsageError(
                    f"{name} of shape {shape.shape}: {size} is not a multiple of the {count} "
                    f"devices of the mesh axes {axes}; change config.mesh, config.rules or the "
                    "model's width (for a vocabulary: config.model.vocab_multiple=0, or a "
                    f"multiple of {count})"
                )
        return sharding

    return jax.tree_util.tree_map_with_path(check, shapes, shardings)


def torn_tiles(shapes):
    """Advice for a mesh that splits matrices into shards that are no whole tiles, or "".

    A TPU stores matrices in tiles of 8 rows. It copies arrays that it has gathered from other
    shards once more, which may take longer than all products of a step (benchmarks/NOTES.md).

    Args:
      shapes: tree of arrays or shapes with shardings.
    """
    torn, total = collections.Counter(), 0
    for leaf in jax.tree.leaves(shapes):
        total += leaf.size
        if len(leaf.shape) < 2:
            continue
        shard = leaf.sharding.shard_shape(leaf.shape)
        for size, rows in zip(leaf.shape[-2:], shard[-2:], strict=True):
            if rows < size and rows % _TILE_ROWS:
                torn[size, size // rows] += leaf.size
    if not torn or max(torn.values()) < total / 10:
        return ""
    (size, count), _ = torn.most_common(1)[0]
    fewer = [n for n in range(2, count) if count % n == 0 and size // n % _TILE_ROWS == 0]
    return (
        f"config.mesh splits {size} into {count} shards of {size // count}, not a multiple of the "
        f"{_TILE_ROWS} rows of a tile, so a TPU copies the gathered arrays once more"
        + (f"; with config.mesh.data=-1, {max(fewer)} shards are multiples" if fewer else "")
    )


def batch_sharding(mesh, rules):
    """Sharding of a [batch, length] array of the data pipeline."""
    return nn.logical_to_mesh_sharding(PartitionSpec("batch", "length"), mesh, rules)


def replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


def shard_count(mesh, rules, name):
    """The number of shards of the logical axis `name`."""
    axes = nn.logical_to_mesh_sharding(PartitionSpec(name), mesh, rules).spec[0]
    return _num_devices(mesh, _as_tuple(axes))


def batch_shards(mesh, rules):
    """The number of shards of the batch axis."""
    return shard_count(mesh, rules, "batch")


class Placement:
    """Places batches of `size` rows on a mesh, and lists the rows that this process has to read.

    A row's index in the batch decides where it goes, not the process: several processes hold the
    same rows if a mesh axis that does not split the batch, such as tensor, spans them.

    Args:
      size: rows of the global batch, a multiple of `batch_shards`.
    Attributes:
      rows: int64, ascending: indices of the rows that devices of this process hold.
    """

    def __init__(self, mesh, rules, size):
        self._sharding, self._size = batch_sharding(mesh, rules), size
        by_row = NamedSharding(mesh, PartitionSpec(self._sharding.spec[0]))
        local_indices = by_row.addressable_devices_indices_map((size,)).values()
        self.rows = np.unique(np.concatenate([np.arange(size)[index] for index in local_indices]))

    def __call__(self, batch):
        """{name: array of the rows `rows`} as {name: global array [size, T]}."""
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
    """Replicated arrays on one device of this host, without communication."""

    def one(x):
        on_mesh = isinstance(x, jax.Array) and not x.is_fully_addressable
        return x.addressable_data(0) if on_mesh else x

    return jax.device_put(jax.tree.map(one, tree), jax.local_devices()[0])


def mesh_that_splits(tree):
    """The mesh over which an array (or shape) of a tree is split; None if all are replicated."""
    for x in jax.tree.leaves(tree):
        layout = getattr(x, "sharding", None)
        if layout is not None and not layout.is_fully_replicated:
            return layout.mesh
    return None


def unsplit(rules, *names):
    """The rules, with these logical axes not split."""
    return tuple((name, None if name in names else axes) for name, axes in rules)


def local(tree):
    """Arrays gathered on one device of this host."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_put(tree, jax.devices()[0])


# ---- parameters --------------------------------------------------------------------------------

_SHAPES_ONLY = contextvars.ContextVar("shapes_only", default=False)


@contextlib.contextmanager
def only_shapes():
    """Context in which parameters are zeros: tracing random values takes a third of `init`."""
    token = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(token)


def parameter(module, name, init, shape, axes):
    """A float32 parameter.

    `module.param` would trace `init` at every call of the module to compare shapes, which takes a
    fifth of the time of tracing a model.

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
