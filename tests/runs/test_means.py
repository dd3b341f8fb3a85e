"""Means that are kept as sums add up over batches, values and gradients alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx import losses, means


def square(mean_E):
    return jnp.sum(jnp.square(mean_E))


@pytest.mark.parametrize("function", [square, jnp.max])
def test_means_add_up(function):
    """The value of two batches together, and contributions whose gradients add up to its own."""
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.normal(size=(b, 3, 2)), jnp.float32) for b in (1, 2)]
    valid = [jnp.asarray(rng.random((b, 3)) < 0.6) for b in (1, 2)]

    def mean(x, i):
        return means.over(x, [*valid, jnp.concatenate(valid)][i], function)

    whole = jax.tree.map(jnp.add, mean(values[0], 0), mean(values[1], 1))
    together = jnp.concatenate(values)
    np.testing.assert_allclose(whole.value(), mean(together, 2).value(), rtol=1e-6)
    expected = jax.grad(lambda x: mean(x, 2).value())(together)
    got = [jax.grad(lambda x, i=i: mean(x, i).contribution(whole))(values[i]) for i in (0, 1)]
    np.testing.assert_allclose(jnp.concatenate(got), expected, rtol=1e-5)


def test_means_of_nothing_and_of_layers():
    nothing = means.Mean(jnp.zeros(2), jnp.zeros(()), square)
    assert nothing.value() == 0 and np.isfinite(nothing.contribution(nothing))
    layers = means.Mean(jnp.ones((4, 2)), jnp.arange(4.0), square)  # as a scanned stack gives them
    np.testing.assert_allclose(layers.value(), [2.0, 2.0, 0.5, 2 / 9], rtol=1e-6)


def sown(*layers):
    """What a stack of scanned layers and one layer outside of it sow: a Mean each of the values
    [B, T] and of which of them count, the scanned ones first."""
    *scanned, last = (means.over(jnp.float32(x), valid) for x, valid in layers)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *scanned)
    return {"units": {"x": (stacked,)}, "last": {"x": (last,)}}


def test_a_mean_of_nothing_counts_in_no_mean_over_layers():
    some, none = jnp.array([[True, False]]), jnp.zeros((1, 2), bool)
    layers = [([[v, 9.0]], valid) for v, valid in ((1.0, some), (5.0, none), (2.0, some))]
    assert losses.collect_sown(sown(*layers)) == {"x": 1.5}
    assert losses.collect_sown(sown(*([[[7.0, 9.0]], none],) * 3)) == {"x": 0.0}


def test_micro_batches_leave_out_the_layers_that_the_batch_has_nothing_of():
    """Of four layers the first has tokens in both micro-batches, the second in one, the third in
    none, the last in the other: the mean is over three, in both. Gradients add up to its own."""
    values = jnp.float32(np.random.default_rng(0).normal(size=(2, 4, 1, 3)))
    valid = jnp.zeros((2, 4, 1, 3), bool).at[:, 0, 0, :2].set(True)
    valid = valid.at[0, 1].set(True).at[1, 3, 0, 0].set(True)

    def layers(values, i):
        return sown(*zip(jnp.square(values), valid[i], strict=True))

    whole = jax.tree.map(jnp.add, *(layers(values[i], i) for i in (0, 1)))

    def of_batch(values):
        both = (layers(values[i], i) for i in (0, 1))
        return losses.collect_sown(jax.tree.map(jnp.add, *both))["x"]

    squares = np.square(values)
    expected = np.mean([squares[:, i][np.asarray(valid[:, i])].mean() for i in (0, 1, 3)])
    assert of_batch(values) == pytest.approx(expected, rel=1e-6)
    parts = [
        jax.value_and_grad(lambda x, i=i: losses.collect_sown(layers(x, i), whole)["x"])(values[i])
        for i in (0, 1)
    ]
    assert sum(value for value, _ in parts) == pytest.approx(expected, rel=1e-6)
    gradients = jnp.stack([gradient for _, gradient in parts])
    np.testing.assert_allclose(gradients, jax.grad(of_batch)(values), rtol=1e-6)


def test_a_mere_value_is_one_of_each_batch():
    one, other = (means.sown({"losses": {"x": (jnp.float32(x),)}}, "losses") for x in (3, 1))
    assert losses.collect_sown(one) == {"x": 3.0}
    whole = jax.tree.map(jnp.add, one, other)
    assert losses.collect_sown(whole) == {"x": 2.0}
    assert losses.collect_sown(one, whole) == {"x": 1.5}
