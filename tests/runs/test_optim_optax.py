"""Optimisers against plain optax and their papers, and on a problem that each has to learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_helpers import (
    CONSTANT,
    OPTIMIZERS,
    STEPS,
    assert_same,
    built,
    config,
    first_update,
    make_params,
    run,
)

from efx import optim


@pytest.fixture(scope="module")
def params():
    return make_params()


def by_path(params, value):
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: value(jax.tree_util.keystr(keys, simple=True, separator="/")), params
    )


def mask(params):
    return by_path(params, lambda path: path.endswith(("kernel", "embedding")))


def clipped(*parts):
    return optax.chain(optax.clip_by_global_norm(1.0), *parts)


def test_adamw_is_optax_adamw(params):
    got, _ = run(built(params), params)
    schedule = optim.make_schedule(config(), STEPS)
    want, _ = run(
        clipped(optax.adamw(schedule, 0.9, 0.95, weight_decay=0.1, mask=mask(params))), params
    )
    assert_same(got, want)


def test_lion_is_optax_lion(params):
    got, _ = run(built(params, name="lion", schedule=CONSTANT), params)
    want, _ = run(clipped(optax.lion(0.01, 0.9, 0.95, weight_decay=0.1, mask=mask(params))), params)
    assert_same(got, want)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_optax_sgd(params, momentum):
    got, _ = run(
        built(params, name="sgd", momentum=momentum, weight_decay=0.0, schedule=CONSTANT), params
    )
    want, _ = run(clipped(optax.sgd(0.01, momentum or None)), params)
    assert_same(got, want)


def test_schedule_free_is_optax_schedule_free(params):
    got, state = run(
        built(params, name="schedule_free_adamw", weight_decay=0.0, schedule=CONSTANT), params
    )
    plain = clipped(optax.contrib.schedule_free_adamw(0.01, b1=0.9, b2=0.95))
    want, want_state = run(plain, params)
    assert_same(got, want)
    assert_same(
        optim.eval_params("schedule_free_adamw", state, got),
        optax.contrib.schedule_free_eval_params(want_state[1], want),
    )


def test_schedule_free_follows_the_paper_through_warmup_and_decay():
    """Algorithm of arXiv 2405.15682 in numpy: weights of the average follow the same rates."""
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=(3, 2)), rng.normal(size=(6, 3, 2))
    tree = {"a": {"kernel": jnp.asarray(start, jnp.float32)}}
    transformation, schedule = optim.make_optimizer(
        config(
            name="schedule_free_adamw",
            clip_norm=0.0,
            decay="a/kernel",
            schedule=dict(kind="constant", warmup_steps=3),
        ),
        STEPS,
        tree,
    )
    state, params, update = transformation.init(tree), tree, jax.jit(transformation.update)
    x = y = z = start
    second, weight_sum = np.zeros_like(start), 0.0
    for step, grad in enumerate(grads):
        rate = min(1, (step + 1) / 4) * 0.01
        np.testing.assert_allclose(schedule(step), rate, rtol=1e-6)
        second = 0.95 * second + 0.05 * grad**2
        scaled = grad / (np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8)
        z = z - rate * (scaled + 0.1 * y)
        weight_sum += rate**2
        share = rate**2 / weight_sum
        x = (1 - share) * x + share * z
        y = 0.9 * x + 0.1 * z
        updates, state = update({"a": {"kernel": np.float32(grad)}}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["a"]["kernel"], y, atol=1e-6)
    evaluated = optim.eval_params("schedule_free_adamw", state, params)
    np.testing.assert_allclose(evaluated["a"]["kernel"], x, atol=1e-6)
    assert np.abs(x - y).max() > 1e-4


def test_eval_params_of_others_are_the_trained_ones(params):
    state = built(params).init(params)
    assert optim.eval_params("adamw", state, params) is params


def test_muon_is_optax_muon_on_single_matrices(params):
    tree = {"block_0": params["block_0"]["attention"], "head": params["head"]}
    got, _ = run(built(tree, name="muon", weight_decay=0.0, schedule=CONSTANT), tree)
    matrices = optax.contrib.MuonDimensionNumbers()
    plain = optax.contrib.muon(
        0.01,
        beta=0.9,
        adam_b1=0.9,
        adam_b2=0.95,
        consistent_rms=0.2,
        muon_weight_dimension_numbers={
            "block_0": {"query": {"kernel": matrices, "bias": None}},
            "head": {"kernel": None},
        },
    )
    # optax's own Adam half has Nesterov momentum, ours is the AdamW of every other name.
    assert_same(
        got["block_0"]["query"]["kernel"],
        run(clipped(plain), tree)[0]["block_0"]["query"]["kernel"],
        rtol=1e-5,
    )
    adam = built(tree, weight_decay=0.0, schedule=CONSTANT)
    assert_same(got["head"], run(adam, tree)[0]["head"])


def test_muon_treats_each_matrix_of_a_stack_on_its_own():
    """A stack [L, in, out] moves exactly as its layers would, and every step is orthogonal."""
    stack = jax.random.normal(jax.random.key(0), (2, 4, 8))
    stacked = {"units": {"up": {"kernel": stack}}}
    apart = {f"block_{i}": {"up": {"kernel": stack[i]}} for i in range(2)}
    settings = dict(
        name="muon", schedule=CONSTANT, clip_norm=0.0, weight_decay=0.0, decay="", learning_rate=1.0
    )
    grads = jax.random.normal(jax.random.key(1), (2, 4, 8))

    def update(tree, grad_tree):
        return first_update(built(tree, **settings), tree, grad_tree)[0]

    together = update(stacked, {"units": {"up": {"kernel": grads}}})["units/up/kernel"]
    single = update(apart, {f"block_{i}": {"up": {"kernel": grads[i]}} for i in range(2)})
    for i in range(2):
        np.testing.assert_allclose(
            together[i], single[f"block_{i}/up/kernel"], rtol=1e-4, atol=1e-5
        )
        values = np.linalg.svd(np.asarray(together[i]), compute_uv=False) / (0.2 * 8**0.5)
        assert values.min() > 0.6 and values.max() < 1.3  # Newton-Schulz is approximate


def test_muon_leaves_embeddings_head_norms_biases_and_routers_to_adam(params):
    groups = optim.parameter_groups(config(name="muon"), params)
    assert {path for path, group in groups.items() if group.muon} == {
        "block_0/attention/query/kernel",
        "units/block/mlp/up/kernel",
    }
    assert not any(g.muon for g in optim.parameter_groups(config(), params).values())


def test_every_optimiser_learns_a_small_problem():
    """Linear regression: each of the five gets well below the loss it starts from."""
    x = jax.random.normal(jax.random.key(0), (32, 4))
    y = x @ jax.random.normal(jax.random.key(1), (4, 3))
    start = {"layer": {"kernel": jnp.zeros((4, 3))}}

    def loss(params):
        return jnp.mean((x @ params["layer"]["kernel"] - y) ** 2)

    for name in OPTIMIZERS:
        transformation, _ = optim.make_optimizer(
            config(name=name, learning_rate=0.1, weight_decay=0.0, schedule=CONSTANT), 60, start
        )

        def train(start, transformation=transformation):
            def step(_, carry):
                params, state = carry
                updates, state = transformation.update(jax.grad(loss)(params), state, params)
                return optax.apply_updates(params, updates), state

            return jax.lax.fori_loop(0, 60, step, (start, transformation.init(start)))

        params, state = jax.jit(train)(start)
        final = loss(optim.eval_params(name, state, params))
        assert final < 0.15 * loss(start), (name, final, loss(start))
