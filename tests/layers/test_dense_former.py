"""DenseFormer averages: the plain stack at first, the formula afterwards."""

import families
import jax
import jax.numpy as jnp
import numpy as np

from efx.layers.token_context import TokenContext
from efx.models.stack import Layer, Stack, StateAverage

ON = {"dense_former.on": True, "depth": 6, "width": 16}
LENGTH = 9


def test_at_first_it_is_the_plain_stack():
    """Bit for bit, from the same seed."""
    plain, dense = (
        families.make({**ON, "depth": 2, "dense_former.on": on}) for on in (False, True)
    )
    params, alike = families.initial(dense, 3)["params"], families.initial(plain, 3)["params"]
    layers = dict(params["layers"])
    for i in range(1, 3):
        np.testing.assert_array_equal(layers.pop(f"average_{i}")["alpha"], [0.0] * i + [1.0])
    jax.tree.map(np.testing.assert_array_equal, {**params, "layers": layers}, alike)

    @families.jit
    def both(params, alike):
        tokens_BT = families.tokens(length=LENGTH)
        return dense.apply({"params": params}, tokens_BT), plain.apply({"params": alike}, tokens_BT)

    np.testing.assert_array_equal(*both(params, alike))


def test_an_average_in_bfloat16_is_rounded_once():
    rng = np.random.default_rng(0)
    alpha_J, x_JBTD = np.float32(rng.normal(size=9)), rng.normal(size=(9, 2, LENGTH, 32))
    states = [jnp.asarray(x_BTD, jnp.bfloat16) for x_BTD in x_JBTD]
    average = families.jit(
        lambda states: StateAverage().apply({"params": {"alpha": alpha_J}}, states)
    )
    wide = average([x_BTD.astype(jnp.float32) for x_BTD in states])
    same = average(states) == wide.astype(jnp.bfloat16)
    assert np.mean(same) > 0.99


def test_the_formula():
    model = families.make(ON)
    params = families.random_params(model)["layers"]
    x_BTD = np.random.default_rng(0).normal(size=(2, LENGTH, 16)).astype(np.float32)
    call = TokenContext(np.arange(LENGTH, dtype=np.int32)[None])

    @families.jit
    def both(params, x_BTD):
        stack = Stack(model.specs(), False, "none", model.config.dense_former)
        states, y = [x_BTD], x_BTD
        for i, spec in enumerate(model.specs(), 1):
            states.append(Layer(spec).apply({"params": params[f"block_{i - 1}"]}, y, call))
            alpha = params[f"average_{i}"]["alpha"]
            y = sum(a * x for a, x in zip(alpha, states, strict=True))
        return stack.apply({"params": params}, x_BTD, call), y

    got, expected = both(params, x_BTD)
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_weights_of_a_recursion_count_steps():
    changes = {"depth_routing.kind": "recursion", "depth_routing.capacity": (1.0, 0.5)}
    layers = families.variable_shapes(families.make({**ON, **changes}))["params"]["layers"]
    sizes = [layers[f"average_{i}"]["alpha"].size for i in (1, 2, 3, 4)]
    assert sizes == [2, 3, 4, 5]
