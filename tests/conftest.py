"""Eight fake CPU devices, strict rank promotion, a compile cache, and where the real text is."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Compiling takes most of the suite's time: with these it takes a fourth. The programs that tests
# start inherit them.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
_CACHE = pathlib.Path(os.environ.get("EFX_COMPILE_CACHE", pathlib.Path.home() / ".cache/efx/jax"))
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root():
    """The top of the project."""
    return ROOT


@pytest.fixture(scope="session")
def shakespeare_path():
    """The tinyshakespeare text beside the project."""
    path = ROOT.parent / "shared/data/tinyshakespeare/input.txt"
    if not path.exists():
        pytest.skip("tinyshakespeare is not here: expected shared/data beside the project")
    return path
