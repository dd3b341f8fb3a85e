"""Schedules by hand, clipping, decay, groups by path, errors by message."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optim_helpers import (
    CONSTANT,
    OPTIMIZERS,
    STEPS,
    assert_same,
    built,
    config,
    first_update,
    gradients,
    make_params,
    run,
)

from efx import optim
from efx.errors import UsageError


@pytest.fixture(scope="module")
def params():
    return make_params()


# --- schedules ------------------------------------------------------------------------------------


def rates(total=STEPS, lr=1.0, **shape):
    schedule = optim.make_schedule(config(learning_rate=lr, schedule=shape), total)
    return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(total + 3)))


def test_warmup_rises_from_the_first_step_and_reaches_the_peak():
    np.testing.assert_allclose(
        rates(kind="constant", warmup_steps=4)[:7], [0.2, 0.4, 0.6, 0.8, 1, 1, 1], rtol=1e-6
    )
    assert rates(kind="constant", warmup_steps=0)[0] == 1.0


def test_linear_table():
    got = rates(total=10, kind="linear", warmup_steps=2, final_fraction=0.2)
    want = [1 / 3, 2 / 3, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_cosine_table():
    got = rates(total=8, kind="cosine", warmup_steps=4, final_fraction=0.1)
    half = 0.5 * (1 + np.cos(np.pi / 4 * np.arange(5)))
    want = [0.2, 0.4, 0.6, 0.8, *(0.1 + 0.9 * half), 0.1, 0.1]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(got[6], 0.55, rtol=1e-5)


def test_wsd_table():
    got = rates(total=10, kind="wsd", warmup_steps=1, decay_fraction=0.4, final_fraction=0.0)
    want = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_wsd_without_a_stable_part():
    got = rates(total=4, kind="wsd", warmup_steps=2, decay_fraction=0.5, final_fraction=0.0)
    np.testing.assert_allclose(got[:5], [1 / 3, 2 / 3, 1, 0.5, 0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_decay_steps_replaces_the_length_of_the_run(kind):
    short = rates(total=20, kind=kind, warmup_steps=2, decay_steps=10)
    np.testing.assert_allclose(short[:13], rates(total=10, kind=kind, warmup_steps=2), rtol=1e-6)
    np.testing.assert_allclose(short[10:], 0.1, rtol=1e-5)


def test_warmup_may_fill_the_run():
    np.testing.assert_allclose(
        rates(total=3, kind="cosine", warmup_steps=3)[:4], [0.25, 0.5, 0.75, 1], rtol=1e-6
    )


@pytest.mark.parametrize(
    "total, shape",
    [
        (40, dict(warmup_steps=50)),
        (40, dict(warmup_steps=50, decay_steps=80)),
        (52, dict(warmup_steps=50, kind="wsd")),  # 10 of the 52 steps decay
        (3, dict(warmup_steps=50)),
    ],
)
def test_a_warmup_that_does_not_fit_is_a_tenth_of_the_run(total, shape, params, caplog):
    """The rates follow from settings and number of steps alone, so a resumed run has the same."""
    tenth = max(1, total // 10)
    np.testing.assert_array_equal(
        rates(total=total, **shape), rates(total=total, **shape | dict(warmup_steps=tenth))
    )
    optim.make_optimizer(config(schedule=shape), total, params)
    assert "config.optim.schedule.warmup_steps=50" in caplog.text


@pytest.mark.parametrize("warmup_steps,fraction,as_steps", [(0, 0.2, 4), (5, 0.2, 5), (3, 0.2, 4)])
def test_the_larger_of_both_warmups_counts(warmup_steps, fraction, as_steps):
    got = rates(total=20, warmup_steps=warmup_steps, warmup_fraction=fraction)
    np.testing.assert_array_equal(got, rates(total=20, warmup_steps=as_steps))
    # Of the decay's length, as `decay_fraction` is.
    shorter = rates(total=30, decay_steps=20, warmup_steps=warmup_steps, warmup_fraction=fraction)
    np.testing.assert_array_equal(shorter[:20], got[:20])


def test_schedule_is_the_rate_that_updates_use(params):
    shape = dict(kind="linear", warmup_steps=3)
    transformation, schedule = optim.make_optimizer(
        config(name="sgd", momentum=0.0, weight_decay=0.0, clip_norm=0.0, schedule=shape),
        STEPS,
        params,
    )
    state, update = transformation.init(params), jax.jit(transformation.update)
    rate = jax.jit(schedule)
    for step in range(6):
        updates, state = update(jax.tree.map(np.ones_like, params), state, params)
        np.testing.assert_allclose(updates["head"]["kernel"], -np.asarray(rate(step)), rtol=1e-6)


# --- clipping, decay, freezing, multipliers -------------------------------------------------------


def test_clipping_comes_before_the_moments_and_the_norm_is_reported(params):
    transformation = built(params, schedule=CONSTANT)
    huge, state = run(transformation, params, steps=3, size=1e4)
    modest, _ = run(transformation, params, steps=3, size=1e2)
    assert_same(huge, modest, rtol=1e-5)
    norm = jax.jit(optax.tree.norm)(gradients(params, 2, 1e4))
    np.testing.assert_allclose(optim.grad_norm(state), norm, rtol=1e-6)


def test_small_gradients_are_not_clipped(params):
    """... and without clipping the norm is reported all the same."""
    got, _ = run(built(params, name="sgd", clip_norm=1e3), params)
    want, state = run(built(params, name="sgd", clip_norm=0.0), params)
    assert_same(got, want, rtol=0)
    norm = optax.tree.norm(gradients(params, 3))
    np.testing.assert_allclose(optim.grad_norm(state), norm, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_shrinks_decayed_parameters_by_lr_times_decay(params, name):
    """With gradient 0 only the decay moves a parameter; norm scales of a stack are not decayed."""
    transformation = built(params, name=name, schedule=CONSTANT, lr_multipliers=(("head/.*", 0.5),))
    updates, _ = first_update(transformation, params, jax.tree.map(np.zeros_like, params))
    # Schedule-free moves y, a mean of x and z; on the first step both move alike.
    for path, update in updates.items():
        factor = 0.01 * 0.1 * path.endswith(("kernel", "embedding"))
        factor *= 0.5 if path.startswith("head") else 1.0
        np.testing.assert_allclose(
            update, -factor * optim.param_paths(params)[path], rtol=2e-4, atol=1e-7, err_msg=path
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_keep_every_bit_and_have_no_state(params, name):
    params = jax.tree.map(lambda p: p, params)
    params["embed"] = {"embedding": params["embed"]["embedding"].at[0].set(-0.0)}
    transformation = built(params, name=name, frozen="embed/.*|block_0/.*", schedule=CONSTANT)
    after, state = run(transformation, params)
    updates, _ = first_update(transformation, params, gradients(params, 0))
    before, after = optim.param_paths(params), optim.param_paths(after)
    for path, leaf in before.items():
        # By numpy too: XLA simplifies p + 0.0 to p, which hides a sign lost elsewhere.
        for value in (after[path], np.asarray(leaf) + np.asarray(updates[path])):
            same = np.asarray(leaf).tobytes() == np.asarray(value).tobytes()
            assert same == path.startswith(("embed", "block_0")), path
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert (11, 4) not in shapes and (4, 6) not in shapes and (3, 4, 8) in shapes or name == "sgd"
    trained = sum(leaf.size for path, leaf in before.items() if path.startswith(("head", "units")))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) <= 2 * trained + 12
    evaluated = optim.param_paths(optim.eval_params(name, state, params))
    assert np.array_equal(evaluated["embed/embedding"], before["embed/embedding"])


def test_frozen_gradients_do_not_count_in_the_norm(params):
    transformation = built(params, frozen="embed/.*")
    grads = gradients(params, 0)
    _, state = first_update(transformation, params, grads)
    rest = {key: value for key, value in grads.items() if key != "embed"}
    np.testing.assert_allclose(optim.grad_norm(state), optax.tree.norm(rest), rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free_adamw"])
def test_multipliers_scale_the_update_and_the_first_match_wins(params, name):
    def update(multipliers):
        transformation = built(params, name=name, schedule=CONSTANT, lr_multipliers=multipliers)
        return first_update(transformation, params, gradients(params, 0))[0]

    plain = update(())
    got = update(((".*/bias", 3.0), ("block_0/.*", 0.25), (".*/query/.*", 7.0)))
    for path, value in plain.items():
        factor = {
            "block_0/attention/query/bias": 3.0,
            "block_0/attention/query/kernel": 0.25,
            "block_0/router/kernel": 0.25,
        }.get(path, 1.0)
        np.testing.assert_allclose(got[path], factor * value, rtol=2e-4, atol=1e-7, err_msg=path)


def test_patterns_match_whole_paths():
    tree = {f"block_{i}": {"kernel": jnp.ones((2, 2))} for i in (1, 10)}
    groups = optim.parameter_groups(config(frozen="block_1/.*"), tree)
    assert groups["block_1/kernel"].frozen and not groups["block_10/kernel"].frozen


def test_paths_of_boxed_and_abstract_trees():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
            return x @ self.param("kernel", init, (2, 3))

    boxed = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((1, 2)))["params"]
    assert list(optim.param_paths(boxed)) == ["kernel"]
    transformation, _ = optim.make_optimizer(config(decay="kernel"), STEPS, boxed)
    state = jax.eval_shape(transformation.init, boxed)
    specs = jax.tree.leaves(nn.get_partition_spec(state))
    assert specs.count(jax.sharding.PartitionSpec("embed", "mlp")) == 2  # both moments


def test_state_leaves_can_be_told_from_parameters_by_optax(params):
    """`optax.tree.map_params` is how callers lay out the state; the wrappers must allow it."""
    for name in ("adamw", "muon"):
        transformation = built(params, name=name, frozen="head/.*", schedule=CONSTANT)
        state = transformation.init(params)
        marked = optax.tree.map_params(
            transformation,
            lambda leaf: "parameter",
            state,
            transform_non_params=lambda leaf: "other",
        )
        assert {"parameter", "other"} <= set(jax.tree.leaves(marked))


def test_describe(params):
    text = optim.describe_groups(
        config(name="muon", frozen="embed/.*", lr_multipliers=((".*/bias", 0.5), ("head/.*", 2))),
        params,
    )
    rows = {
        line[: line.index("tensors")].rsplit(None, 1)[0]: line.split()[-2]
        for line in text.splitlines()
    }
    assert rows == {
        "muon": "230",
        "decayed by lr * 0.1": "168",
        "not decayed": "18",
        "frozen": "44",
        "orthogonalised": "120",
        "lr * 0.5: .*/bias": "6",
        "lr * 2: head/.*": "44",
    }


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(learning_rate=-1e-3), r"config\.optim\.learning_rate=-0\.001: must be"),
        (dict(learning_rate=float("nan")), r"config\.optim\.learning_rate=nan"),
        (dict(weight_decay=-0.1), r"config\.optim\.weight_decay=-0\.1"),
        (dict(clip_norm=-1.0), r"config\.optim\.clip_norm=-1\.0"),
        (dict(b1=1.0), r"config\.optim\.b1=1\.0: must be in \[0, 1\)"),
        (dict(b2=1.5), r"config\.optim\.b2=1\.5"),
        (dict(momentum=-0.1), r"config\.optim\.momentum"),
        (dict(eps=-1e-8), r"config\.optim\.eps"),
        (
            dict(schedule=dict(warmup_steps=9, decay_steps=8)),
            r"warmup_steps=9: must be at most config\.optim\.schedule\.decay_steps=8",
        ),
        (dict(schedule=dict(warmup_steps=-1)), r"config\.optim\.schedule\.warmup_steps=-1"),
        (dict(schedule=dict(decay_steps=-1)), r"config\.optim\.schedule\.decay_steps=-1"),
        (dict(schedule=dict(final_fraction=1.5)), r"config\.optim\.schedule\.final_fraction=1\.5"),
        (
            dict(schedule=dict(kind="wsd", decay_fraction=0.0)),
            r"decay_fraction=0\.0: must be in \(0",
        ),
        (
            dict(schedule=dict(kind="wsd", warmup_fraction=0.9)),
            r"warmup_fraction=0\.9\) .*decay_fraction=0\.2",
        ),
        (dict(name="schedule_free_adamw"), r"schedule\.kind='cosine': must be 'constant'"),
        (
            dict(name="schedule_free_adamw", b1=0.0, schedule=CONSTANT),
            r"config\.optim\.b1=0\.0.*more than",
        ),
        (
            dict(decay=".*/kernal"),
            r"config\.optim\.decay='\.\*/kernal' matches no parameter.*embed",
        ),
        (
            dict(frozen="block_0"),
            r"config\.optim\.frozen='block_0' .*whole path, such as '\.\*block_0",
        ),
        (dict(frozen=".*"), r"config\.optim\.frozen='\.\*' freezes every parameter"),
        (dict(frozen="("), r"config\.optim\.frozen='\(' is not a regular expression"),
        (
            dict(lr_multipliers=((".*/bias", 1.0), ("x", 2.0))),
            r"lr_multipliers\[1\]='x' matches no",
        ),
        (dict(lr_multipliers=((".*/bias", -1.0),)), r"config\.optim\.lr_multipliers\[0\]=.*factor"),
        (dict(lr_multipliers=((".*/bias",),)), r"config\.optim\.lr_multipliers\[0\]=.*pair"),
        (dict(lr_multipliers=((".*/bias", "2"),)), r"config\.optim\.lr_multipliers\[0\]=.*pair"),
    ],
)
def test_bad_config_is_one_line_naming_the_key(params, changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        optim.make_optimizer(config(**changes), STEPS, params)
    assert "\n" not in str(caught.value)


def test_no_steps():
    with pytest.raises(UsageError, match=r"config\.steps=0"):
        optim.make_schedule(config(), 0)
