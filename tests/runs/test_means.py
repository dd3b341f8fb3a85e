"""Means that are kept as sums add up over batches, values and gradients alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx.layers import batch_means
from efx.train import losses


def square(mean_E):
    return jnp.sum(jnp.square(mean_E))


@pytest.mark.parametrize("function", [square, jnp.max])
def test_contributions_add_up_to_the_mean_of_both_batches(function):
    """Their values and their gradients."""
    rng = np.random.default_rng(0)
    values = [np.float32(rng.normal(size=(b, 3, 2))) for b in (1, 2)]
    valid = [rng.random((b, 3)) < 0.6 for b in (1, 2)]

    def total(values):
        both = [batch_means.over(x, v, function) for x, v in zip(values, valid, strict=True)]
        return jax.tree.map(jnp.add, *both)

    def contributions(values, whole):
        both = [batch_means.over(x, v, function) for x, v in zip(values, valid, strict=True)]
        return sum(mean.contribution(whole) for mean in both)

    def together(values):
        return batch_means.over(jnp.concatenate(values), np.concatenate(valid), function).value()

    @jax.jit
    def computed(values):
        whole = total(values)
        return whole.value(), jax.grad(contributions)(values, whole)

    value, gradient = computed(values)
    expected, expected_gradient = jax.jit(jax.value_and_grad(together))(values)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradient, expected_gradient
    )


def test_means_without_tokens_and_of_scanned_layers():
    empty = batch_means.Mean(jnp.zeros(2), jnp.zeros(()), square)
    assert empty.value() == 0 and np.isfinite(empty.contribution(empty))
    layers = batch_means.Mean(jnp.ones((4, 2)), jnp.arange(4.0), square)
    np.testing.assert_allclose(layers.value(), [2.0, 2.0, 0.5, 2 / 9], rtol=1e-6)


def sown(*layers):
    """The means sown by a stack of scanned layers and one layer outside of it, the scanned ones
    first: of pairs (values [B, T], whether each counts)."""
    *scanned, last = (batch_means.over(jnp.float32(x), valid) for x, valid in layers)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *scanned)
    return {"units": {"x": (stacked,)}, "last": {"x": (last,)}}


def test_layers_without_tokens_count_in_no_mean_over_layers():
    one, none = jnp.array([[True, False]]), jnp.zeros((1, 2), bool)
    layers = [([[v, 9.0]], valid) for v, valid in ((1.0, one), (5.0, none), (2.0, one))]
    assert losses.collect_sown(sown(*layers)) == {"x": 1.5}
    assert losses.collect_sown(sown(*([[[7.0, 9.0]], none],) * 3)) == {"x": 0.0}


def test_micro_batches_skip_the_layers_without_tokens_in_the_batch():
    """Of four layers the first has tokens in both micro-batches, the second in one, the third in
    none, the last in the other: the mean is over three. Values and gradients add up to its own."""
    values = np.float32(np.random.default_rng(0).normal(size=(2, 4, 1, 3)))
    valid = np.zeros((2, 4, 1, 3), bool)
    valid[:, 0, 0, :2] = valid[0, 1] = valid[1, 3, 0, 0] = True

    def layers(values, i):
        return sown(*zip(jnp.square(values[i]), valid[i], strict=True))

    def of_batch(values):
        both = (layers(values, i) for i in (0, 1))
        return losses.collect_sown(jax.tree.map(jnp.add, *both))["x"]

    def of_micro_batches(values, whole):
        return sum(losses.collect_sown(layers(values, i), whole)["x"] for i in (0, 1))

    @jax.jit
    def computed(values):
        whole = jax.tree.map(jnp.add, *(layers(values, i) for i in (0, 1)))
        parts = jax.value_and_grad(of_micro_batches)(values, whole)
        return jax.value_and_grad(of_batch)(values), parts

    (value, gradient), (parts, gradient_of_parts) = computed(values)
    squares = np.square(values)
    expected = np.mean([squares[:, i][valid[:, i]].mean() for i in (0, 1, 3)])
    assert [float(value), float(parts)] == pytest.approx([expected] * 2, rel=1e-6)
    np.testing.assert_allclose(gradient_of_parts, gradient, rtol=1e-6)


def test_a_plain_value_is_one_token_of_its_batch():
    one, other = (batch_means.sown({"losses": {"x": (jnp.float32(x),)}}, "losses") for x in (3, 1))
    assert losses.collect_sown(one) == {"x": 3.0}
    whole = jax.tree.map(jnp.add, one, other)
    assert losses.collect_sown(whole) == {"x": 2.0}
    assert losses.collect_sown(one, whole) == {"x": 1.5}
