"""JAX's persistent compilation cache."""

import logging
import os
import pathlib

import jax

from efx.errors import UsageError
from efx.parallel import multihost

_log = logging.getLogger(__name__)


def cache_folder():
    """Return the directory of compiled programs."""
    return os.environ.get("EFX_COMPILE_CACHE", str(pathlib.Path.home() / ".cache/efx/compiled"))


def enable_compile_cache():
    """Cache compiled programs, unless several GPU processes do not share the directory.

    XLA tunes the kernels of several GPU processes together, and only process 0 writes the cache. A
    process that finds a program there does not tune, so the others would wait for it forever.
    """
    folder = cache_folder()
    if multihost.connected() and jax.process_count() > 1 and jax.default_backend() == "gpu":
        try:
            multihost.check_shared(folder, "EFX_COMPILE_CACHE")
        except UsageError as error:
            if jax.process_index() == 0:
                _log.warning("compiled programs are not cached: %s", error)
            folder = None  # overrides JAX_COMPILATION_CACHE_DIR too
    jax.config.update("jax_compilation_cache_dir", folder)
