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

VOCAB, PADDING = 11, 3  # the last columns are padding: their logits are -inf


def batch(rows=2, length=7, vocab=VOCAB, width=4, padding=0, seed=0):
    """(head_params, x_BTD, targets_BT, weights_BT); some weights are 0, some not 1."""
    rng = np.random.default_rng(seed)
    head = {
        "kernel": np.float32(rng.normal(size=(width, vocab))),
        "bias": np.float32(rng.normal(size=vocab)),
    }
    head["bias"][vocab - padding :] = -np.inf
    return (
        head,
        np.float32(rng.normal(size=(rows, length, width))),
        np.int32(rng.integers(0, vocab - padding, (rows, length))),
        np.float32(rng.choice([0.0, 0.5, 1.0], (rows, length))),
    )


def head_fn(params, x_ND):
    params = jax.tree.map(lambda p: p.astype(x_ND.dtype), params)
    return x_ND @ params["kernel"] + jnp.expand_dims(params["bias"], range(x_ND.ndim - 1))


@functools.partial(jax.jit, static_argnames=("chunk", "groups"))
def computed(head, x, targets, weights, z_loss=0.0, chunk=0, groups=1, teacher=None):
    """Half of the sums, and of the gradients of `total` in (head, x, teacher), by the code.

    chunk: 0: all logits at once. teacher: (head_params, x_BTD).
    """

    def total(head, x, teacher):
        options = dict(z_loss=z_loss, distill=0.7)
        if chunk:
            options |= dict(chunk=chunk, groups=groups)
            options["teacher"] = teacher and losses.Teacher(head_fn, *teacher)
            sums = losses.chunked_cross_entropy(head_fn, head, x, targets, weights, **options)
        else:
            options["teacher_logits_BTV"] = teacher and head_fn(*teacher)
            sums = losses.cross_entropy(head_fn(head, x), targets, weights, **options)
        return 0.5 * sums.total, jax.tree.map(lambda value: 0.5 * value, sums)

    (_, sums), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(head, x, teacher)
    return sums, *gradients


def reference(head, x, targets, weights, z_loss=0.0, teacher=None):
    """Half of the sums and of the gradients in (head, x) in numpy and float64, by the formulas."""

    def probabilities(head, x):
        logits = np.float64(x) @ np.float64(head["kernel"]) + np.float64(head["bias"])
        lse = np.log(np.exp(logits).sum(-1))
        return np.exp(logits - lse[..., None]), lse

    weights = 0.5 * np.float64(weights)
    p, lse = probabilities(head, x)
    is_target = np.eye(p.shape[-1])[targets]
    loss, correct = -np.log((p * is_target).sum(-1)), p.argmax(-1) == targets
    d_logits = p - is_target + z_loss * 2 * lse[..., None] * p
    distance = np.zeros_like(loss)
    if teacher is not None:
        q, _ = probabilities(*teacher)
        seen = np.isfinite(head["bias"])
        distance = (q * np.log(np.divide(q, p, where=seen, out=np.ones_like(p)))).sum(-1)
        d_logits += 0.7 * (p - q)
    total = loss + z_loss * lse**2 + 0.7 * distance
    values = total, loss, lse**2, np.ones_like(loss), correct, distance
    sums = losses.LossSums(*((weights * value).sum() for value in values))
    d_logits *= weights[..., None]
    d_head = {"kernel": np.einsum("btd,btv->dv", x, d_logits), "bias": d_logits.sum((0, 1))}
    return sums, d_head, d_logits @ np.float64(head["kernel"]).T


def assert_same(got, want, rtol=1e-5):
    """Equal up to rtol of the largest entry of each array."""

    def close(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max() + 1e-7)

    jax.tree.map(close, got, want)


# --- cross-entropy --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, length, chunk, groups, z_loss, padding, distill",
    [
        (2, 7, 0, 1, 0.0, 0, False),
        (2, 7, 0, 1, 0.1, PADDING, True),
        (2, 8, 3, 1, 0.1, PADDING, False),
        (2, 1, 10, 1, 0.1, 0, False),
        (4, 7, 3, 2, 0.1, PADDING, True),
        (4, 7, 7, 4, 0.0, 0, False),
    ],
)
def test_sums_and_gradients_are_those_of_the_formulas(
    rows, length, chunk, groups, z_loss, padding, distill
):
    """Whole and in chunks; a teacher gets no gradient, and padding columns neither."""
    args, teacher = batch(rows, length, padding=padding), None
    if distill:
        teacher = batch(rows, length, width=5, padding=padding, seed=1)[:2]
    *got, d_teacher = computed(*args, z_loss, chunk, groups, teacher)
    assert_same(tuple(got), reference(*args, z_loss, teacher))
    assert not got[1]["kernel"][:, VOCAB - padding :].any()
    assert not any(map(np.any, jax.tree.leaves(d_teacher)))
    assert (got[0].distance > 0.5) == distill


def test_a_tie_of_all_logits_is_not_correct():
    sums = jax.jit(losses.cross_entropy)(np.zeros((1, 3), np.float32), np.array([0]), np.ones(1))
    assert sums.correct == 0


def test_half_precision_logits_are_summed_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512, 9)), jnp.bfloat16)
    targets, ones = jnp.zeros((4, 512), jnp.int32), jnp.ones((4, 512), jnp.bfloat16)
    sums = jax.jit(losses.cross_entropy)
    got = sums(logits, targets, ones)
    assert all(leaf.dtype == jnp.float32 for leaf in got)
    assert got == sums(logits.astype(jnp.float32), targets, ones) and got.weights == 2048


def test_unscored_positions_may_be_anything():
    head, x, targets, weights = batch()
    wild_targets = jnp.where(weights == 0, -100, targets)
    wild_x = jnp.where(weights[..., None] == 0, 1e30, x)  # their loss overflows to inf
    sums, d_head, d_x, _ = computed(head, wild_x, wild_targets, weights, 0.1)
    expected, _, expected_d_x, _ = computed(head, x, targets, weights, 0.1)
    assert_same((sums, d_x), (expected, expected_d_x))
    assert np.isfinite(d_head["bias"]).all()


def test_head_gradients_accumulate_in_float32():
    """1024 slices of equal gradient: added in bfloat16 the sum would stop growing at 256."""
    length = 1024
    head = {"kernel": np.zeros((1, 2), jnp.bfloat16), "bias": np.zeros(2, jnp.bfloat16)}
    x, targets = np.ones((1, length, 1), jnp.bfloat16), np.zeros((1, length), np.int32)
    _, d_head, *_ = computed(head, x, targets, np.ones((1, length), np.float32), chunk=1)
    np.testing.assert_array_equal(np.asarray(d_head["bias"], np.float32), [-256, 256])


def test_memory_falls_with_the_chunk():
    """Temporaries: many times [B, T, V] when whole, a few times [B, chunk, V] when chunked."""
    rows, length, vocab = 2, 256, 4096
    args, logits = batch(rows, length, vocab, 16), 4 * rows * length * vocab

    def temporaries(chunk):
        compiled = computed.lower(*args, chunk=chunk).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(0) > 0.9 * logits and temporaries(16) < 0.3 * logits


# --- coefficients and sown losses -----------------------------------------------------------------


LINEAR = {"schedule": "linear", "c_start": 0.0, "c_end": 1.0, "steps": 0}


@pytest.mark.parametrize(
    "spec, want",
    [
        (0.25, [0.25] * 5),
        (LINEAR | {"c_start": 1.0, "c_end": 3.0, "steps": 40}, [1, 1.5, 2, 3, 3]),
        (ml_collections.ConfigDict(LINEAR), [0, 0.1, 0.2, 0.4, 1]),
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
    coefficients = jax.jit(jax.vmap(lambda step: losses.coefficient(spec, step, 100)))
    got = coefficients(jnp.array([0, 10, 20, 40, 100]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "spec, key",
    [
        ("linear", ""),
        ({"schedule": "expo", "rate": 1.0}, ".schedule='expo'"),
        ({"schedule": "linear", "c_start": 0.0, "c_end": 1.0}, ".steps"),
        ({"schedule": "exponential", "rate": 1.0, "c_min": 0.0, "cmax": 1.0}, ".cmax"),
    ],
)
def test_bad_coefficients_are_refused(spec, key):
    refused(lambda: losses.coefficient(spec, 0, 100, "mask_l1"), f"config.losses.mask_l1{key}")


def test_weighted_sum_follows_the_schedules():
    sown = {"router_bce": jnp.float32(2.0), "mask_l1": jnp.float32(0.5)}
    config = ml_collections.ConfigDict({"router_bce": 0.1, "unused": 1.0, "mask_l1": LINEAR})
    total = jax.jit(lambda sown, step: losses.weighted_sum(sown, config, step, 10))(sown, 5)
    np.testing.assert_allclose(total, 0.1 * 2.0 + 0.5 * 0.5, rtol=1e-6)
    bad = {"mask_l2": 1.0}
    refused(lambda: losses.weighted_sum(sown, bad, 0, 10), "config.losses.router_bce")
    del sown["router_bce"]
    refused(lambda: losses.weighted_sum(sown, bad, 0, 10), "config.losses.mask_l1", "mask_l2")


def test_bits_per_byte():
    np.testing.assert_allclose(losses.bits_per_byte(4.0, 3.2), 4.0 / math.log(2) / 3.2)
