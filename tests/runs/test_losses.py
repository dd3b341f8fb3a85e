"""Cross-entropy and its chunked form against formulas, coefficients, sown losses, a teacher."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from refusals import refused

from efx.train import losses


def batch(rows=2, length=7, vocab=11, width=4, seed=0):
    """(head_params, x_BTD, targets_BT, weights_BT); some weights are 0, some not 1."""
    rng = np.random.default_rng(seed)
    head = {
        "kernel": np.float32(rng.normal(size=(width, vocab))),
        "bias": np.float32(rng.normal(size=vocab)),
    }
    return (
        head,
        np.float32(rng.normal(size=(rows, length, width))),
        np.int32(rng.integers(0, vocab, (rows, length))),
        np.float32(rng.choice([0.0, 0.5, 1.0], (rows, length))),
    )


def head_fn(params, x_ND):
    params = jax.tree.map(lambda p: p.astype(x_ND.dtype), params)
    return x_ND @ params["kernel"] + jnp.expand_dims(params["bias"], range(x_ND.ndim - 1))


@functools.partial(jax.jit, static_argnums=5)
def plain(head, x, targets, weights, z_loss=0.0, vocab_size=None):
    """Sums, and gradients of `total` in (head, x), without chunks."""

    def total(head, x):
        sums = losses.cross_entropy(head_fn(head, x), targets, weights, z_loss, vocab_size)
        return sums.total, sums

    (_, sums), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(head, x)
    return sums, *grads


def reference(head, x, targets, weights, z_loss=0.0, vocab_size=None):
    """The same in numpy and float64, from the formulas."""
    kernel, bias, x, weights = (
        np.asarray(a, np.float64) for a in (head["kernel"], head["bias"], x, weights)
    )
    logits = x @ kernel + bias
    logits[..., vocab_size or logits.shape[-1] :] = -np.inf
    lse = np.log(np.exp(logits).sum(-1))
    p, hit = np.exp(logits - lse[..., None]), np.eye(logits.shape[-1])[np.asarray(targets)]
    loss, z = -np.log((p * hit).sum(-1)), lse**2
    correct = logits.argmax(-1) == np.asarray(targets)
    sums = losses.LossSums(
        *((weights * a).sum() for a in (loss + z_loss * z, loss, z, np.ones_like(z), correct)),
        0.0,
    )
    d_logits = weights[..., None] * (p - hit + z_loss * 2 * lse[..., None] * p)
    d_head = {"kernel": np.einsum("btd,btv->dv", x, d_logits), "bias": d_logits.sum((0, 1))}
    return sums, d_head, d_logits @ kernel.T


def assert_same(got, want, rtol=1e-5):
    """Equal up to rtol of the largest entry of each array."""

    def close(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max() + 1e-7)

    jax.tree.map(close, got, want)


# --- cross-entropy --------------------------------------------------------------------------------


def test_a_tie_of_all_logits_is_not_correct():
    sums = jax.jit(losses.cross_entropy)(np.zeros((1, 3), np.float32), np.array([0]), np.ones(1))
    assert sums.correct == 0
    np.testing.assert_allclose(sums.loss, math.log(3), rtol=1e-6)


@pytest.mark.parametrize(("z_loss", "vocab_size"), [(0.0, None), (0.1, None), (0.1, 8)])
def test_value_and_gradients_are_those_of_the_formulas(z_loss, vocab_size):
    head, x, targets, weights = batch()
    targets = targets % (vocab_size or 11)
    got = plain(head, x, targets, weights, z_loss, vocab_size)
    assert_same(got, reference(head, x, targets, weights, z_loss, vocab_size))
    if vocab_size:
        assert not got[1]["kernel"][:, vocab_size:].any()


def test_half_precision_logits_are_summed_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512, 9)), jnp.bfloat16)
    targets, ones = jnp.zeros((4, 512), jnp.int32), jnp.ones((4, 512), jnp.bfloat16)
    sums = jax.jit(losses.cross_entropy)
    got = sums(logits, targets, ones)
    want = sums(logits.astype(jnp.float32), targets, ones)
    assert all(leaf.dtype == jnp.float32 for leaf in got)
    assert got == want and got.weights == 2048


def test_unscored_positions_may_be_anything():
    head, x, targets, weights = batch()
    wild_targets = jnp.where(weights == 0, -100, targets)
    wild_x = jnp.where(weights[..., None] == 0, 1e30, x)  # their loss overflows to inf
    got = plain(head, wild_x, wild_targets, weights, 0.1)
    sums, d_head, d_x = plain(head, x, targets, weights, 0.1)
    assert_same(got[0], sums)
    assert_same(got[2], d_x)
    assert got[0].weights == weights.sum() and np.isfinite(got[1]["bias"]).all()


# --- the chunked form -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, length, chunk, groups, z_loss, vocab_size",
    [
        (2, 8, 3, 1, 0.1, 8),
        (2, 1, 10, 1, 0.1, None),
        (4, 7, 3, 2, 0.1, None),
        (4, 7, 7, 4, 0.0, None),
    ],
)
def test_chunks_sum_to_the_whole(rows, length, chunk, groups, z_loss, vocab_size):
    """With a cotangent that is not 1, and a traced z_loss."""
    head, x, targets, weights = batch(rows, length)
    args = head, x, targets % (vocab_size or 11), weights

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def half(head, x, z_loss):
        how = dict(chunk=chunk, groups=groups, z_loss=z_loss, vocab_size=vocab_size)
        sums = losses.chunked_cross_entropy(head_fn, head, x, *args[2:], **how)
        return 0.5 * sums.total, sums

    (_, sums), gradients = half(head, x, z_loss)
    twice = jax.tree.map(lambda d: 2 * d, gradients)
    assert_same((sums, *twice), reference(*args, z_loss, vocab_size))


def test_head_gradients_accumulate_in_float32():
    """1024 slices of equal gradient: added in bfloat16 the sum would stop growing at 256."""
    length = 1024
    head = {"kernel": np.zeros((1, 2), jnp.bfloat16), "bias": np.zeros(2, jnp.bfloat16)}
    x, targets = np.ones((1, length, 1), jnp.bfloat16), np.zeros((1, length), np.int32)
    weights = np.ones((1, length), np.float32)

    def total(head):
        return losses.chunked_cross_entropy(head_fn, head, x, targets, weights, chunk=1).total

    grads = jax.jit(jax.grad(total))(head)
    np.testing.assert_array_equal(np.asarray(grads["bias"], np.float32), [-512, 512])


def test_memory_falls_with_the_chunk():
    """Temporaries: many times [B, T, V] when whole, a few times [B, chunk, V] when chunked."""
    rows, length, vocab, width = 2, 256, 4096, 16
    head, x, targets, weights = batch(rows, length, vocab, width)

    def temporaries(function):
        step = jax.jit(jax.value_and_grad(lambda head, x: function(head, x).total, argnums=(0, 1)))
        return step.lower(head, x).compile().memory_analysis().temp_size_in_bytes

    whole = temporaries(lambda head, x: losses.cross_entropy(head_fn(head, x), targets, weights))
    chunked = temporaries(
        lambda head, x: losses.chunked_cross_entropy(head_fn, head, x, targets, weights, chunk=16)
    )
    logits = rows * length * vocab * 4
    assert whole > 0.9 * logits
    assert chunked < 0.25 * logits, (chunked, logits)


# --- coefficients ---------------------------------------------------------------------------------


def table(spec, steps, total=100):
    many = jax.jit(jax.vmap(lambda step: losses.coefficient(spec, step, total)))
    return many(jnp.asarray(steps))


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (0.25, [0.25] * 5),
        ({"schedule": "linear", "c_start": 1.0, "c_end": 3.0, "steps": 40}, [1, 1.5, 2, 3, 3]),
        ({"schedule": "linear", "c_start": 0.0, "c_end": 1.0, "steps": 0}, [0, 0.1, 0.2, 0.4, 1]),
        (
            {"schedule": "cosine", "c_start": 2.0, "c_end": 0.0, "steps": 40},
            [2, 1 + math.cos(math.pi / 4), 1, 0, 0],
        ),
        (
            {"schedule": "exponential", "rate": 0.01, "c_min": 0.5, "c_max": 0.9},
            [0.5, math.exp(0.1) - 0.5, math.exp(0.2) - 0.5, 0.9, 0.9],
        ),
    ],
)
def test_coefficients_by_hand(spec, want):
    np.testing.assert_allclose(table(spec, [0, 10, 20, 40, 100]), want, rtol=1e-5, atol=1e-7)
    if isinstance(spec, dict):
        spec = ml_collections.ConfigDict(spec)
        np.testing.assert_allclose(table(spec, [10]), want[1:2], rtol=1e-5)


@pytest.mark.parametrize(
    "spec, key",
    [
        ({"schedule": "expo", "rate": 1.0}, "schedule='expo'"),
        ({"schedule": "linear", "c_start": 0.0, "c_end": 1.0}, "steps"),
        ({"schedule": "exponential", "rate": 1.0, "c_min": 0.0, "cmax": 1.0}, "cmax"),
    ],
)
def test_bad_coefficients_are_refused(spec, key):
    refused(lambda: losses.coefficient(spec, 0, 100, "mask_l1"), f"config.losses.mask_l1.{key}")
    refused(lambda: losses.coefficient("linear", 0, 100, "mask_l1"), "config.losses.mask_l1")


# --- sown losses ----------------------------------------------------------------------------------


def test_weighted_sum_follows_the_schedules():
    sown = {"router_bce": jnp.float32(2.0), "mask_l1": jnp.float32(0.5)}
    config = ml_collections.ConfigDict(
        {
            "router_bce": 0.1,
            "unused": 1.0,
            "mask_l1": {"schedule": "linear", "c_start": 0.0, "c_end": 4.0, "steps": 0},
        }
    )
    total = jax.jit(lambda sown, step: losses.weighted_sum(sown, config, step, 10))(sown, 5)
    np.testing.assert_allclose(total, 0.1 * 2.0 + 2.0 * 0.5, rtol=1e-6)
    assert losses.check_names(sown, config) == ["unused"]


def test_unweighted_losses_are_refused():
    sown = {"mask_l1": 1.0}
    refused(lambda: losses.weighted_sum(sown, {"router_bce": 1.0}, 0, 10), "config.losses.mask_l1")
    refused(
        lambda: losses.check_names(["router_bce"], {"router_bec": 1.0}),
        "config.losses.router_bce",
        "router_bec",
    )


def test_bits_per_byte():
    assert losses.bits_per_byte(math.log(2), 1.0) == 1.0
    np.testing.assert_allclose(losses.bits_per_byte(4.0, 3.2), 4.0 / math.log(2) / 3.2)


# --- a teacher ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk, vocab_size", [(0, None), (3, 8)])
def test_distance_to_a_teacher(chunk, vocab_size):
    """KL(teacher || model) and its gradient p - q by the formula, over the scored positions and the
    vocabulary without padding; the teacher gets no gradient."""
    head, x, targets, weights = batch()
    targets, rng = targets % 8, np.random.default_rng(1)
    theirs = {"kernel": rng.normal(size=(5, 11)), "bias": rng.normal(size=11)}
    theirs = {name: jnp.asarray(a, jnp.float32) for name, a in theirs.items()}
    their_x = jnp.asarray(rng.normal(size=(*x.shape[:2], 5)), jnp.float32)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def loss(head, x, theirs):
        if chunk:
            teacher = losses.Teacher(head_fn, theirs, their_x)
            sums = losses.chunked_cross_entropy(
                *(head_fn, head, x, targets, weights),
                chunk=chunk,
                vocab_size=vocab_size,
                teacher=teacher,
                distill=0.7,
            )
        else:
            logits = head_fn(head, x), targets, weights, 0.0, vocab_size, head_fn(theirs, their_x)
            sums = losses.cross_entropy(*logits, 0.7)
        return sums.total, sums

    (_, sums), (d_head, d_x, d_theirs) = loss(head, x, theirs)

    def probabilities(head, x):
        logits = np.asarray(x, np.float64) @ np.asarray(head["kernel"], np.float64)
        odds = np.exp(logits + np.asarray(head["bias"], np.float64))[..., :vocab_size]
        return odds / odds.sum(-1, keepdims=True)

    plain_sums, plain_head, plain_x = reference(head, x, targets, weights, 0.0, vocab_size)
    p, q = probabilities(theirs, their_x), probabilities(head, x)
    distance = (np.asarray(weights) * (p * np.log(p / q)).sum(-1)).sum()
    assert distance > 1
    expected = distance, plain_sums.total + 0.7 * distance, plain_sums.loss
    assert_same((sums.distance, sums.total, sums.loss), expected)
    d_logits = 0.7 * np.asarray(weights)[..., None] * (q - p)
    kernel = np.asarray(head["kernel"], np.float64)[:, :vocab_size]
    assert_same(d_x, plain_x + d_logits @ kernel.T)
    d_bias = np.zeros(11)
    d_bias[:vocab_size] = d_logits.sum((0, 1))
    assert_same(d_head["bias"], plain_head["bias"] + d_bias)
    assert not any(map(np.any, jax.tree.leaves(d_theirs)))
