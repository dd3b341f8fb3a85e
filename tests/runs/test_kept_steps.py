"""Steps and initial values that an earlier process has traced: they are the same bit for bit, and
found by what they depend on alone."""

import jax
import numpy as np
import pytest

from efx import build, programs
from efx import step as step_lib
from efx.configs import common

SETTINGS = {
    "steps": 2, "data.seq_len": 16, "data.batch_size": 4, "model.width": 16, "model.depth": 2,
    "model.attention.num_heads": 2, "model.depth_routing.kind": "mod",
    "model.depth_routing.every": 2, "model.depth_routing.capacity_stages": ((0.5, 0.5),),
    "optim.schedule.warmup_steps": 0, "train.accumulation": 2, "train.dtype": "bfloat16",
}  # fmt: skip
CHANGES = {
    "optim.learning_rate": 0.5, "optim.weight_decay": 0.5, "optim.schedule.kind": "constant",
    "steps": 6, "losses.z_loss": 0.1, "train.accumulation": 1, "train.loss_chunk": 8,
    "data.batch_size": 8, "model.attention.chunk": 8, "model.depth_routing.gate": "tanh",
}  # fmt: skip
OF_INITIAL_VALUES = {"model.init_std": 0.5, "model.mlp.hidden": 24, "optim.name": "lion"}
SAME = {"seed": 3, "log.every": 7, "checkpoint.every": 5, "evaluate.every": 9, "sample.every": 0}


@pytest.fixture(autouse=True)
def folder(tmp_path, one_device):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def traced(monkeypatch):
    """What is traced: "step", "init"."""
    names, make, init = [], step_lib.make_train_step, step_lib.init_state

    def counted_step(*arguments, **options):
        step = make(*arguments, **options)
        return lambda *values: names.append("step") or step(*values)

    monkeypatch.setattr(step_lib, "make_train_step", counted_step)
    monkeypatch.setattr(
        step_lib, "init_state", lambda *values: names.append("init") or init(*values)
    )
    return names


def training(**changes):
    config = common.base()
    common.apply(config, SETTINGS | changes)
    return build.Training(build.without_text(config, 31, of_run=True))


def batch_of(t):
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(31, size=x.shape).astype(x.dtype) if x.dtype == np.int32
        else np.ones(x.shape, x.dtype)
        for name, x in t.batch.items()
    }  # fmt: skip


def trained(t):
    """(All numbers of a run of two steps, each a stage of its own, bytes of its programs)."""
    state, rows, sizes = t.new_state(5), [], []
    for stage in t.experiment.stages:
        step, kernels = t.compile_step(stage.model, stage.start)
        assert list(kernels) == ["xla"]
        state, metrics = step(state, batch_of(t), np.uint32(5), None)
        rows.append(metrics)
        memory = step.memory_analysis()
        sizes.append((memory.alias_size_in_bytes, memory.temp_size_in_bytes))
    assert int(state.step) == 2
    return jax.tree.map(np.asarray, (state, rows)), sizes


def test_the_same_bits_and_nothing_is_traced(folder, traced, monkeypatch):
    """Nor does a step take more memory: the state is written over by it as by any other."""
    kept, sizes = trained(training())
    assert set(traced) == {"step", "init"} and list(folder.glob("efx_*"))
    traced.clear()
    again, _ = trained(training())
    assert not traced
    monkeypatch.setattr(build.Training, "keeps_traced", False)
    plain, sizes_of_plain = trained(training())
    assert set(traced) == {"step", "init"}
    for other in (again, plain):
        assert jax.tree.structure(other) == jax.tree.structure(kept)
        jax.tree.map(np.testing.assert_array_equal, other, kept)
    for (alias, temporary), (alias_of_plain, temporary_of_plain) in zip(
        sizes, sizes_of_plain, strict=True
    ):
        assert alias == alias_of_plain > 0
        assert temporary <= 1.01 * temporary_of_plain


class Asked(Exception):
    """What was to be found."""


@pytest.fixture
def found_by(monkeypatch):
    """(settings to change) -> what the initial values and the steps of both stages are found by."""

    def ask(*arguments):
        (of,) = (x for x in arguments if isinstance(x, str))
        raise Asked(of)

    def found(**changes):
        t, texts = training(**changes), []
        works = [lambda: t.new_state(0)]
        works += [lambda s=stage: t.compile_step(s.model, s.start) for stage in t.experiment.stages]
        for work in works:
            with pytest.raises(Asked) as asked:
                work()
            texts.append(str(asked.value))
        return texts

    monkeypatch.setattr(programs, "kept", ask)
    monkeypatch.setattr(programs, "kept_value", ask)
    return found


def test_what_decides_tells_them_apart(found_by):
    """And what does not decide is no reason to trace anything anew."""
    assert all(found_by(**{name: value}) == found_by() for name, value in SAME.items())
    of_step = [found_by()[1], *(found_by(**{name: x})[1] for name, x in CHANGES.items())]
    assert len(set(of_step)) == len(of_step)
    for name, value in OF_INITIAL_VALUES.items():
        assert found_by(**{name: value})[0] != found_by()[0]
    assert len(set(found_by())) == 3


def test_a_step_reads_nothing_of_a_config_that_does_not_tell_it_apart():
    t = training()
    with pytest.raises(AttributeError, match="evaluate"):
        t._step_config.evaluate  # noqa: B018
