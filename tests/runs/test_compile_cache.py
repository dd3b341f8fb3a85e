"""The persistent compilation cache."""

import jax
import pytest

from efx.errors import UsageError
from efx.parallel import compile_cache, multihost


@pytest.mark.parametrize(
    "processes, backend, is_cached", [(1, "gpu", True), (2, "cpu", True), (2, "gpu", False)]
)
def test_gpu_processes_that_do_not_share_the_cache_do_not_use_it(
    tmp_path, monkeypatch, processes, backend, is_cached
):
    """Only process 0 writes it; a process that finds a program there leaves the others waiting."""

    def refuse(folder, setting):
        raise UsageError(f"{setting}={folder}: is not shared")

    updates = {}
    monkeypatch.setenv("EFX_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(multihost, "check_shared", refuse)
    monkeypatch.setattr(multihost, "connected", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    compile_cache.enable_compile_cache()
    assert updates == {"jax_compilation_cache_dir": str(tmp_path) if is_cached else None}
