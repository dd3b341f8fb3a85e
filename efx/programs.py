"""Traced programs on disk, beside the compiled ones.

JAX's compile cache spares a process the compiling of a program that was compiled before, and only
once it has traced the program again. Of a model that takes longer than all else that sampling
waits for, and longer the more layers it has. What is kept here is the program as tracing leaves it
(`jax.export`), and what tracing was for, where that is shapes or a number, under a hash of all that
tracing depends on.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform

import jax
from flax import linen as nn
from flax import traverse_util
from jax import export

from efx import atomic, hosts, runfolder, storage
from efx.errors import UsageError

_log = logging.getLogger(__name__)
# Packages whose code is part of a traced program.
_TRACED = ("flax", "jax", "jaxlib", "numpy", "optax")
_DIGEST = hashlib.sha256().digest_size


def cache_folder():
    """Where programs that an efx process keeps are."""
    return os.environ.get("EFX_COMPILE_CACHE", str(pathlib.Path.home() / ".cache/efx/compiled"))


def keep_compiled():
    """Has JAX keep compiled programs in `cache_folder()`, unless several processes on GPUs do not
    share it.

    Their compilers try kernels together, each a part, and wait for the parts of the others; process
    0 alone writes. A process that read there what the others lack would leave these waiting.
    """
    if hosts.connected() and jax.process_count() > 1 and jax.default_backend() == "gpu":
        try:
            runfolder.check_shared(cache_folder(), "EFX_COMPILE_CACHE")
        except UsageError as error:
            if jax.process_index() == 0:
                _log.warning("compiled programs are not cached: %s", error)
            # Nor where JAX_COMPILATION_CACHE_DIR says.
            jax.config.update("jax_compilation_cache_dir", None)
            return
    jax.config.update("jax_compilation_cache_dir", cache_folder())


def are_kept():
    """Whether anything is kept: not where JAX keeps no compiled programs, or keeps them in an
    object store."""
    return _path("", "") is not None


def kept(function, of, shapes):
    """The `jax.export.Exported` of a function, from an earlier process if one kept it.

    Args:
      of: a text that says what the function depends on: beside the code of efx, that of libraries
        and the settings of the environment, which count anyway.
      shapes: () -> the arguments as shapes; called if nothing was kept.
    """
    path = _path(of, ".traced")
    if content := _read(path):
        return export.deserialize(bytearray(content))
    exported = export.export(jax.jit(function))(*shapes())
    _write(path, exported.serialize())
    return exported


def kept_value(function, of):
    """`function()`, of what JSON has, from an earlier process if one kept it. of: as in `kept`."""
    path = _path(of, ".json")
    if content := _read(path):
        return json.loads(content)
    value = function()
    _write(path, json.dumps(value).encode())
    return value


def kept_shapes(function, of):
    """`jax.eval_shape(function)` of a nested dict, from an earlier process if one kept it.

    Boxes of logical axes are kept with the shapes in them. of: as in `kept`.
    """
    path = _path(of, ".shapes.json")
    if content := _read(path):
        rows = json.loads(content)
        leaves = {tuple(keys): _leaf(*of_leaf) for keys, *of_leaf in rows}
        return traverse_util.unflatten_dict(leaves)
    tree = jax.eval_shape(function)
    leaves = traverse_util.flatten_dict(tree, keep_empty_nodes=True)
    rows = [[keys, *_row(leaf)] for keys, leaf in leaves.items()]
    _write(path, json.dumps(rows).encode())
    return tree


def _row(leaf):
    """(shape, dtype, logical axes): no axes without a box, no shape without an array."""
    if leaf is traverse_util.empty_node:
        return None, None, None
    names = leaf.names if isinstance(leaf, nn.LogicallyPartitioned) else None
    array = nn.unbox(leaf)
    return array.shape, array.dtype.name, names


def _leaf(shape, dtype, names):
    if shape is None:
        return traverse_util.empty_node
    array = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return array if names is None else nn.LogicallyPartitioned(array, tuple(names))


def _path(of, suffix):
    """Where something is kept that depends on `of`; None: nothing is."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or storage.is_remote(folder):  # to which JAX writes, and nothing here
        return None
    key = hashlib.sha256("\n".join([_environment(), of]).encode()).hexdigest()
    return pathlib.Path(folder) / f"efx_{key}{suffix}"


def _read(path):
    """What `_write` wrote; nothing if there is none, or it is damaged."""
    with contextlib.suppress(OSError):
        stored = path.read_bytes() if path else b""
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return stored[_DIGEST:]
    return b""


def _write(path, content):
    """Keeps `content` where there is room for it; without it another process traces again."""
    if path:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(path) as part:
                part.write_bytes(hashlib.sha256(content).digest() + content)


def code_hash():
    """Of the code of efx as it is on the disk now."""
    code = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


@functools.cache
def _environment():
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _TRACED]
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("JAX_", "XLA_"))]
    device = jax.devices()[0]
    kind = f"{device.platform} {device.device_kind} {jax.config.jax_default_matmul_precision}"
    return "\n".join([code_hash(), platform.python_version(), kind, *versions, *settings])
