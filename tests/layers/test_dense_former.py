"""DenseFormer averages: the plain stack at first, the formula afterwards."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx.interop import hf_config
from efx.layers.call import Call
from efx.layers.config import DenseFormerConfig
from efx.layers.stack import Layer, Stack, StateAverage

ON = {"dense_former.on": True, "depth": 6, "width": 16}
LENGTH = 9


def states(dilation, period, depth):
    c = DenseFormerConfig(on=True, dilation=dilation, period=period)
    return [c.states(i) for i in range(1, depth + 1)]


def test_averaged_states_by_hand():
    assert states(1, 1, 3) == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert states(2, 1, 4) == [(1,), (0, 2), (1, 3), (0, 2, 4)]
    assert states(2, 3, 6) == [(), (), (1, 3), (), (), (0, 2, 4, 6)]
    # d (d + 3) / 2 weights without dilation and period, as the paper counts.
    assert sum(len(DenseFormerConfig(on=True).states(i)) for i in range(1, 49)) == 48 * 51 // 2
    assert not any(DenseFormerConfig().states(i) for i in range(1, 49))


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


@pytest.mark.parametrize("dilation, period", [(1, 1), (3, 2), (7, 6)])
def test_the_formula(dilation, period):
    model = families.make({**ON, "dense_former.dilation": dilation, "dense_former.period": period})
    params = families.random_params(model)["layers"]
    x_BTD = np.random.default_rng(0).normal(size=(2, LENGTH, 16)).astype(np.float32)
    call = Call(np.arange(LENGTH, dtype=np.int32)[None])

    @families.jit
    def both(params, x_BTD):
        stack = Stack(model.specs(), False, "none", model.config.dense_former)
        every_x, y = [x_BTD], x_BTD
        for i, spec in enumerate(model.specs(), 1):
            every_x.append(Layer(spec).apply({"params": params[f"block_{i - 1}"]}, y, call))
            y = every_x[-1]
            if i % period == 0:
                states = [x for j, x in enumerate(every_x) if (i - j) % dilation == 0]
                alpha = params[f"average_{i}"]["alpha"]
                assert alpha.size == len(states)
                y = sum(a * x for a, x in zip(alpha, states, strict=True))
            else:
                assert f"average_{i}" not in params
        return stack.apply({"params": params}, x_BTD, call), y

    got, expected = both(params, x_BTD)
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_weights_of_a_recursion_count_steps():
    changes = {"depth_routing.kind": "recursion", "depth_routing.capacity": (1.0, 0.5)}
    layers = families.variable_shapes(families.make({**ON, **changes}))["params"]["layers"]
    sizes = [layers[f"average_{i}"]["alpha"].size for i in (1, 2, 3, 4)]
    assert sizes == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "changes, key",
    [
        (ON, "dense_former.on"),
        ({"soft_experts.num": 2}, "soft_experts.num"),
        ({"mup.base_width": 8}, "mup.base_width"),
        ({"mlp.kind": "moe"}, "mlp.kind"),
    ],
)
def test_hugging_face_has_no_place_for_it(changes, key):
    model = families.make({**changes, "attention.qk_norm": "none"})
    refused(lambda: hf_config.config_to_hf(model), f"config.model.{key}=")
