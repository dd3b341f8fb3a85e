"""Traced programs on disk, beside the compiled ones.

JAX's compile cache spares a process the compiling of a program that was compiled before, and only
once it has traced the program again. Of a model that takes longer than all else that sampling
waits for, and longer the more layers it has. What is kept here is the program as tracing leaves it
(`jax.export`), under a hash of all that tracing depends on.
"""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform

import jax
from jax import export

from efx import atomic

# Packages whose code is part of a traced program.
_TRACED = ("flax", "jax", "jaxlib", "numpy")


def kept(function, of, shapes):
    """The `jax.export.Exported` of a function, from an earlier process if one kept it.

    Nothing is kept where JAX keeps no compiled programs.

    Args:
      of: a text that says what the function depends on: beside the code of efx, that of libraries
        and the settings of the environment, which count anyway.
      shapes: () -> the arguments as shapes; called if nothing was kept.
    """
    folder = jax.config.jax_compilation_cache_dir
    key = hashlib.sha256("\n".join([_environment(), of]).encode()).hexdigest()
    path = pathlib.Path(folder or "") / f"efx_{key}.traced"
    if folder and path.is_file():
        return export.deserialize(bytearray(path.read_bytes()))
    exported = export.export(jax.jit(function))(*shapes())
    if folder:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as part:
            part.write_bytes(exported.serialize())
    return exported


@functools.cache
def _environment():
    package = pathlib.Path(__file__).parent
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.read_bytes())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _TRACED]
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("JAX_", "XLA_"))]
    device = jax.devices()[0]
    kind = f"{device.platform} {device.device_kind} {jax.config.jax_default_matmul_precision}"
    return "\n".join([code.hexdigest(), platform.python_version(), kind, *versions, *settings])
