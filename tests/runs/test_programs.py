"""Traced programs that are kept on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import hosts, programs, runfolder
from efx.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_program_is_traced_once(folder, monkeypatch):
    """Again where it depends on something else: what it is told to, the code, a setting."""
    traced = []

    def shapes():
        return ({"x": jax.ShapeDtypeStruct((3,), np.float32)},)

    def call(of):
        def double(tree):
            traced.append(of)
            return {"y": 2 * tree["x"]}

        x = np.arange(3, dtype=np.float32)
        y = programs.kept(double, of, shapes).call({"x": x})["y"]
        np.testing.assert_array_equal(y, 2 * x)
        return len(traced)

    assert [call("a"), call("a"), call("b"), call("b")] == [1, 1, 2, 2]
    assert len(list(folder.glob("efx_*"))) == 2
    programs._environment.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert call("a") == 3
    programs._environment.cache_clear()
    monkeypatch.setattr(programs, "__file__", str(folder / "other" / "programs.py"))
    assert call("a") == 4
    programs._environment.cache_clear()


def test_what_is_damaged_or_has_no_room_is_traced_again(folder, monkeypatch):
    def call():
        shapes = lambda: (jax.ShapeDtypeStruct((3,), np.float32),)  # noqa: E731
        x = np.arange(3, dtype=np.float32)
        found = programs.kept(lambda x: 2 * x, "a", shapes).call(x)
        np.testing.assert_array_equal(found, 2 * x)
        return programs.kept_shapes(lambda: {"x": jnp.zeros(2)}, "a")["x"].shape

    assert call() == (2,)
    sound = {path: path.read_bytes() for path in folder.glob("efx_*")}
    assert len(sound) == 2
    for path, content in sound.items():
        for damaged in (b"", content[:-1], content[:40], bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(damaged)
            assert call() == (2,)
            assert programs._read(path)  # made again, and sound
    for path in sound:
        path.unlink()
    (folder / "file").write_text("")
    monkeypatch.setattr(programs, "_path", lambda of, suffix: folder / "file" / suffix)
    assert call() == (2,)


def test_shapes_are_made_out_once(folder):
    """With the boxes that name logical axes, and what holds nothing."""
    made = []

    def variables():
        made.append(1)
        box = nn.LogicallyPartitioned(jnp.zeros((2, 3), jnp.bfloat16), ("embed", None))
        return {"params": {"layer": {"kernel": box}, "step": jnp.zeros((), jnp.int32)}, "state": {}}

    def shapes(of):  # of a new function each time: JAX keeps what it has traced
        return programs.kept_shapes(lambda: variables(), of)

    first, second = shapes("x"), shapes("x")
    assert len(made) == 1 and len(list(folder.glob("efx_*.shapes.json"))) == 1
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert jax.tree.leaves(first) == jax.tree.leaves(second)
    assert second["params"]["layer"]["kernel"].names == ("embed", None)
    shapes("y")
    assert len(made) == 2


def test_a_number_is_made_out_once(folder):
    made = []

    def number():
        made.append(1)
        return 2**70 + 1  # more than a float or an int64 holds

    assert [programs.kept_value(number, of) for of in "aab"] == [2**70 + 1] * 3
    assert len(made) == 2


def test_nothing_is_kept_in_an_object_store(folder, tmp_path, monkeypatch):
    """JAX can write there. What is kept here was in a folder `gs:` of the current one."""
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    try:
        assert programs.kept_value(lambda: 7, "a") == 7
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert not (tmp_path / "gs:").exists()


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
        programs.keep_compiled()
        assert update.pop("jax_compilation_cache_dir") == str(tmp_path) and not asked
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    programs.keep_compiled()
    assert update == {"jax_compilation_cache_dir": None}  # whatever JAX_COMPILATION_CACHE_DIR says
    assert asked == [(str(tmp_path), "EFX_COMPILE_CACHE")]
    assert "compiled programs are not cached: is not one folder" in caplog.text
