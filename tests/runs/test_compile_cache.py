"""The persistent compilation cache."""

import jax

from efx import compile_cache, hosts, runfolder
from efx.errors import UsageError


def test_a_cache_that_processes_on_gpus_do_not_share_is_not_used(tmp_path, monkeypatch, caplog):
    """JAX writes it from process 0 alone, and where only some find a program there, the compilers
    of the others wait a day for what these do not say."""
    asked, update = [], {}
    monkeypatch.setenv("EFX_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(jax.config, "update", update.__setitem__)

    def refuse(folder, setting):
        asked.append((folder, setting))
        raise UsageError("is not one folder for all processes")

    monkeypatch.setattr(runfolder, "check_shared", refuse)
    for connected, count, backend in ((False, 1, "gpu"), (True, 1, "gpu"), (True, 2, "cpu")):
        monkeypatch.setattr(hosts, "connected", lambda connected=connected: connected)
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        compile_cache.keep_compiled()
        assert update.pop("jax_compilation_cache_dir") == str(tmp_path) and not asked
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    compile_cache.keep_compiled()
    assert update == {"jax_compilation_cache_dir": None}  # whatever JAX_COMPILATION_CACHE_DIR says
    assert asked == [(str(tmp_path), "EFX_COMPILE_CACHE")]
    assert "compiled programs are not cached: is not one folder" in caplog.text
