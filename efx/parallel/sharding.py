"""Layouts of arrays on the mesh: the rules from logical to mesh axes, constraints, placement.

Layers name logical axes only. One table, `config.rules`, maps these to mesh axes; a logical name
without a rule is an error, so that a misspelt name cannot mean "replicated".
"""

import contextlib
import contextvars
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jax.sharding import NamedSharding, PartitionSpec

from efx.errors import UsageError, nearest
from efx.parallel.mesh import MESH_AXES, make_mesh  # noqa: F401 (callers use both from here)

# A logical axis may have several rules: the first one applies whose mesh axes no other dimension
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


# ---- rules -------------------------------------------------------------------------------------


def check_rules(rules):
    """Return `config.rules` as a tuple of pairs.

    Raises: UsageError if a rule is not a pair, a name is unknown, or a logical axis has no rule.
    """
    for i, rule in enumerate(rules):
        is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2
        if not is_pair or not isinstance(rule[1], (str, tuple, list, types.NoneType)):
            raise UsageError(
                f"config.rules[{i}]={rule!r}: must be a pair (logical axis, mesh axis or axes or "
                "None)"
            )
        name, axes = rule[0], _as_tuple(rule[1])
        if name not in LOGICAL_AXES:
            hint = nearest(name, LOGICAL_AXES)
            raise UsageError(f"config.rules: {name!r} is not a logical axis{hint}")
        if not set(axes) <= set(MESH_AXES) or len(set(axes)) < len(axes):
            raise UsageError(
                f"config.rules: {name!r} is mapped to {rule[1]!r}; use each of the mesh axes "
                f"{', '.join(MESH_AXES)} at most once"
            )
    rules = tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules)
    if missing := [name for name in LOGICAL_AXES if name not in dict(rules)]:
        raise UsageError(f"config.rules: there is no rule for the logical axis {missing[0]!r}")
    return rules


def unsplit(rules, *names):
    """Return the rules with these logical axes not split."""
    return tuple((name, None if name in names else axes) for name, axes in rules)


def shard_count(name, mesh=None, rules=None):
    """Return the number of shards of a logical axis, by the current mesh and rules if none are
    given."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return 1 if mesh.empty else num_devices(mesh, *mesh_axes((name,), rules))


def _as_tuple(axes):
    """Return an entry of a PartitionSpec (a mesh axis, several, or None) as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def num_devices(mesh, axes):
    """Return the number of devices along these mesh axes together."""
    return math.prod(mesh.shape[axis] for axis in axes)


# ---- the current mesh --------------------------------------------------------------------------


@contextlib.contextmanager
def use(mesh, rules):
    """Context in which arrays are laid out by this mesh and these rules.

    The rules are not part of jit's cache key: use a jitted function with one mesh and one set of
    rules only.
    """
    with _without_cached_collectives(mesh), jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


@contextlib.contextmanager
def _without_cached_collectives(mesh):
    """Context in which programs for several CPU devices are not written to the compilation cache.

    Programs read from the cache do not keep the order of their collectives (jaxlib 0.10.2), so
    devices deadlock until XLA aborts the process.
    """
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    is_affected = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    seconds = math.inf if is_affected else before
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def as_one_device():
    """Context in which no rule splits anything, whatever the mesh."""
    return nn.logical_axis_rules(unsplit(DEFAULT_RULES, *LOGICAL_AXES))


def platform():
    """Return "cpu", "gpu" or "tpu": of the current mesh, or without one JAX's default backend."""
    mesh = jax.sharding.get_abstract_mesh()
    name = jax.default_backend() if mesh.empty else mesh.abstract_device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def mesh_axes(names, rules=None):
    """Return for each logical axis the tuple of mesh axes that splits it; rules: None: current."""
    return [_as_tuple(axes) for axes in nn.logical_to_mesh_axes(names, rules)]


# ---- constraints in the model ------------------------------------------------------------------


def constrain(x, *axes):
    """Constrain the layout of an activation by logical names; does nothing without a mesh.

    Positions that do not divide over the devices of `length`, such as the slots of a routed block,
    are not split: beside another split axis the partitioner would add results of its padding to the
    first token of a row.

    Raises: UsageError for a logical name without a rule, or whose mesh axes other dimensions use.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    if "length" in axes and x.shape[axes.index("length")] % shard_count("length"):
        axes = tuple(None if name == "length" else name for name in axes)
    try:
        return nn.with_logical_constraint(x, axes, fallback=nn.spmd.RulesFallback.RAISE_ERROR)
    except ValueError as error:
        raise UsageError(
            f"config.rules: no rule applies to a dimension of the activation {axes}; map it to a "
            f"mesh axis that no other dimension uses, or to None ({error})"
        ) from error


# ---- layouts of parameters and batches ---------------------------------------------------------


def path_names(path):
    """Return the key path of a leaf as a tuple of strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def tree_shardings(boxed, mesh, rules):
    """Return the NamedSharding of every leaf of a tree of (possibly boxed) abstract arrays.

    Raises: UsageError if a dimension of a parameter does not divide over its mesh axes.
    """
    specs = nn.get_partition_spec(boxed)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)

    def check(path, shape, sharding):
        if not isinstance(sharding, NamedSharding):
            return replicated(mesh)
        for size, axes in zip(shape.shape, sharding.spec, strict=False):
            count = num_devices(mesh, _as_tuple(axes))
            if size % count:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise UsageError(
                    f"{name} of shape {shape.shape}: {size} is not a multiple of the {count} "
                    f"devices of the mesh axes {_as_tuple(axes)}; change config.mesh, config.rules "
                    "or the model's width (for a vocabulary: config.model.vocab_multiple=0, or a "
                    f"multiple of {count})"
                )
        return sharding

    return jax.tree_util.tree_map_with_path(check, nn.unbox(boxed), shardings)


def batch_sharding(mesh, rules):
    """Return the sharding of a [batch, length] array of the data pipeline."""
    return nn.logical_to_mesh_sharding(PartitionSpec("batch", "length"), mesh, rules)


def replicated(mesh):
    """Return the sharding of an array that every device holds."""
    return NamedSharding(mesh, PartitionSpec())


class Placement:
    """Places batches of `size` rows on a mesh, and lists the rows that this process has to read.

    The index of a row in the batch decides its devices. Several processes hold the same rows if a
    mesh axis that does not split the batch, such as tensor, spans them.

    Args:
      size: rows of the global batch, a multiple of the shards of the batch.
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


def copy_to_one_device(tree):
    """Copy replicated arrays to one device of this host, without communication."""

    def one(x):
        on_mesh = isinstance(x, jax.Array) and not x.is_fully_addressable
        return x.addressable_data(0) if on_mesh else x

    return jax.device_put(jax.tree.map(one, tree), jax.local_devices()[0])


def gather(tree):
    """Gather split arrays on one device of this host."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_put(tree, jax.devices()[0])


def mesh_that_splits(tree):
    """Return the mesh over which an array of a tree is split, or None if all are replicated."""
    for x in jax.tree.leaves(tree):
        layout = getattr(x, "sharding", None)
        if layout is not None and not layout.is_fully_replicated:
            return layout.mesh
    return None


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
    """Return a float32 parameter.

    `module.param` alone would trace `init` at every call of the module to compare shapes, a fifth
    of the time of tracing a model.

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
