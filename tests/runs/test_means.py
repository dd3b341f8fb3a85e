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


def test_a_mere_value_is_one_of_each_batch():
    sown, other = (means.sown({"losses": {"x": (jnp.float32(x),)}}, "losses") for x in (3, 1))
    assert losses.collect_sown(sown) == {"x": 3.0}
    whole = jax.tree.map(jnp.add, sown, other)
    assert losses.collect_sown(whole) == {"x": 2.0}
    assert losses.collect_sown(sown, whole) == {"x": 1.5}
