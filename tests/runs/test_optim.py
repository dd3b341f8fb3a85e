"""Schedules, clipping, decay and parameter groups by hand; optimisers against papers and optax."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from efx.config.run import OptimConfig
from efx.configs import common
from efx.train import optim

STEPS = 20
OPTIMIZERS = typing.get_args(typing.get_type_hints(OptimConfig)["name"])
CONSTANT = dict(kind="constant", warmup_steps=0)


def config(schedule=None, **changes):
    config = common.base().optim
    config.update(dict(learning_rate=0.01, b2=0.95, momentum=0.9) | changes)
    config.schedule.update(dict(warmup_steps=4) | (schedule or {}))
    return config


@pytest.fixture(scope="module")
def params():
    """A tree shaped like a model's: one plain block and a scanned stack of 3."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32)

    return {
        "embed": {"embedding": array(11, 4)},
        "block_0": {
            "attention": {"query": {"kernel": array(4, 6), "bias": array(6)}},
            "router": {"kernel": array(4, 1)},
        },
        "units": {
            "block": {"mlp": {"up": {"kernel": array(3, 4, 8)}}, "norm": {"scale": array(3, 4)}}
        },
        "head": {"kernel": array(4, 11)},
    }


def gradients(params, step, size=1.0):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: np.float32(size * rng.normal(size=p.shape)), params)


@functools.partial(jax.jit, static_argnums=0)
def one_step(transformation, params, state, grads):
    updates, state = transformation.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def run(transformation, params, steps=4, size=1.0):
    state = transformation.init(params)
    for step in range(steps):
        params, state = one_step(transformation, params, state, gradients(params, step, size))
    return params, state


def first_update(transformation, params, grads):
    """(updates by path, state) of the first step."""
    updates, state = jax.jit(
        lambda params, grads: transformation.update(grads, transformation.init(params), params)
    )(params, grads)
    return optim.param_paths(updates), state


def built(params, **changes):
    return optim.make_optimizer(config(**changes), STEPS, params)[0]


def assert_same(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b)


# --- schedules ------------------------------------------------------------------------------------


HALF_COSINE = 0.5 * (1 + np.cos(np.pi / 4 * np.arange(5)))
WSD = dict(kind="wsd", decay_fraction=0.4, final_fraction=0.0)
WSD_RATES = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]


@pytest.mark.parametrize(
    "total, shape, expected",
    [
        (4, dict(kind="constant", warmup_steps=4), [0.2, 0.4, 0.6, 0.8, 1, 1, 1]),
        (
            5,
            dict(kind="linear", warmup_steps=2, final_fraction=0.25),
            [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0.25, 0.25],
        ),
        (
            8,
            dict(kind="cosine", warmup_steps=4, final_fraction=0.1),
            [0.2, 0.4, 0.6, 0.8, *(0.1 + 0.9 * HALF_COSINE), 0.1, 0.1],
        ),
        (10, WSD | dict(warmup_steps=1), WSD_RATES),
        # A warm-up that does not fit lasts a tenth of the run.
        (10, WSD | dict(warmup_steps=50), WSD_RATES),
        # The larger of both warm-ups counts.
        (10, WSD | dict(warmup_steps=0, warmup_fraction=0.1), WSD_RATES),
        # decay_steps replaces the length of the run.
        (20, WSD | dict(warmup_steps=1, decay_steps=10), [*WSD_RATES, *[0] * 10]),
    ],
)
def test_rates_by_hand(total, shape, expected):
    schedule = optim.make_schedule(config(learning_rate=1.0, schedule=shape), total)
    rates = jax.jit(jax.vmap(schedule))(np.arange(total + 3))
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-7)


# --- clipping, decay, freezing, multipliers -------------------------------------------------------


def test_clipping_precedes_the_moments_and_the_norm_is_that_before_clipping(params):
    transformation = built(params, schedule=CONSTANT)
    huge, state = run(transformation, params, steps=3, size=1e4)
    modest, _ = run(transformation, params, steps=3, size=1e2)
    assert_same(huge, modest, rtol=1e-5)
    norm = optax.tree.norm(gradients(params, 2, 1e4))
    np.testing.assert_allclose(optim.grad_norm(state), norm, rtol=1e-6)
    limited, unlimited = (built(params, name="sgd", clip_norm=limit) for limit in (1e3, 0.0))
    assert_same(run(limited, params)[0], run(unlimited, params)[0], rtol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_shrinks_decayed_parameters_by_lr_times_decay(params, name):
    """With gradient 0 only the decay moves a parameter; norm scales of a stack are not decayed."""
    transformation = built(params, name=name, schedule=CONSTANT, lr_multipliers=(("head/.*", 0.5),))
    updates, _ = first_update(transformation, params, jax.tree.map(np.zeros_like, params))
    for path, update in updates.items():
        factor = 0.01 * 0.1 * path.endswith(("kernel", "embedding"))
        factor *= 0.5 if path.startswith("head") else 1.0
        np.testing.assert_allclose(
            update, -factor * optim.param_paths(params)[path], rtol=2e-4, atol=1e-7, err_msg=path
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_do_not_change_and_have_no_state(params, name):
    """And their gradients do not count in the norm."""
    transformation = built(params, name=name, frozen="embed/.*|block_0/.*", schedule=CONSTANT)
    after, state = run(transformation, params)
    before, after = optim.param_paths(params), optim.param_paths(after)
    for path, leaf in before.items():
        is_frozen = path.startswith(("embed", "block_0"))
        assert np.array_equal(leaf, after[path]) == is_frozen, path
    trained = sum(leaf.size for path, leaf in before.items() if path.startswith(("head", "units")))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) <= 2 * trained + 12
    last = gradients(params, 3)
    norm = optax.tree.norm([last["units"], last["head"]])
    np.testing.assert_allclose(optim.grad_norm(state), norm, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_multipliers_scale_the_update_and_the_first_match_wins(params, name):
    def update(multipliers, **changes):
        changes |= {"name": name, "schedule": CONSTANT, "lr_multipliers": multipliers}
        return first_update(built(params, **changes), params, gradients(params, 0))[0]

    plain = update(())
    got = update(((".*/bias", 3.0), ("block_0/.*", 0.25), (".*/query/.*", 7.0)), router_rate=9.0)
    for path, value in plain.items():
        factor = {
            "block_0/attention/query/bias": 3.0,
            "block_0/attention/query/kernel": 0.25,
            "block_0/router/kernel": 0.25,
        }.get(path, 1.0)
        np.testing.assert_allclose(got[path], factor * value, rtol=2e-4, atol=1e-7, err_msg=path)
    slowed = update((), router_rate=0.1)
    for path, value in plain.items():
        factor = 0.1 if path == "block_0/router/kernel" else 1.0
        np.testing.assert_allclose(slowed[path], factor * value, rtol=2e-4, atol=1e-7, err_msg=path)


def test_patterns_match_whole_paths():
    leaf = jnp.ones((2, 2))
    tree = {"block_1": {"kernel": leaf, "kernel_2": leaf}, "first": {"block_1": {"kernel": leaf}}}
    groups = optim.parameter_groups(config(frozen="block_1/kernel"), tree)
    assert {path for path, group in groups.items() if group.frozen} == {"block_1/kernel"}


# --- papers and optax -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, reference",
    [
        (dict(), lambda rate, mask: optax.adamw(rate, 0.9, 0.95, weight_decay=0.1, mask=mask)),
        (
            dict(name="lion"),
            lambda rate, mask: optax.lion(rate, 0.9, 0.95, weight_decay=0.1, mask=mask),
        ),
        (dict(name="sgd", weight_decay=0.0), lambda rate, _: optax.sgd(rate, 0.9)),
        (dict(name="sgd", weight_decay=0.0, momentum=0.0), lambda rate, _: optax.sgd(rate)),
    ],
)
def test_settings_give_the_optimiser_of_optax(params, changes, reference):
    """Clipped gradients, the moments, the decayed parameters and the schedule are the same."""
    decayed = jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )
    rate = optim.make_schedule(config(), STEPS)
    plain = optax.chain(optax.clip_by_global_norm(1.0), reference(rate, decayed))
    assert_same(run(built(params, **changes), params)[0], run(plain, params)[0])


def test_muon_is_optax_muon_for_each_hidden_matrix_and_adam_for_the_rest(params):
    """Also for each matrix of a stack; not for embeddings, head, norms, biases and routers."""
    groups = optim.parameter_groups(config(name="muon"), params)
    query, up = "block_0/attention/query/kernel", "units/block/mlp/up/kernel"
    assert {path for path, group in groups.items() if group.muon} == {query, up}
    settings = dict(weight_decay=0.0, schedule=CONSTANT, clip_norm=0.0)
    got = optim.param_paths(run(built(params, name="muon", **settings), params)[0])
    adam = optim.param_paths(run(built(params, **settings), params)[0])
    by_path = optim.param_paths(params)
    plain = optax.contrib.muon(
        0.01, beta=0.9, consistent_rms=0.2,
        muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(),
    )  # fmt: skip
    for path in set(by_path) - {query, up}:
        assert_same(got[path], adam[path])
    grads = [optim.param_paths(gradients(params, step)) for step in range(4)]
    for path, i in ((query, ...), (up, 0), (up, 2)):
        matrix = by_path[path][i]
        state = plain.init(matrix)
        for grad in grads:
            matrix, state = one_step(plain, matrix, state, grad[path][i])
        assert_same(got[path][i], matrix, rtol=1e-4)
