"""Traced programs that are kept on disk."""

import jax
import numpy as np
import pytest

from efx import programs


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
