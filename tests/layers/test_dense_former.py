"""DenseFormer averages: the plain stack at first, the formula afterwards."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx.errors import UsageError
from efx.interop import hf_config
from efx.layers.config import DenseFormerConfig
from efx.layers.dense_former import StateAverage
from efx.layers.info import CallInfo, Tokens
from efx.layers.stack import Layer, Stack

ON = {"dense_former.on": True, "depth": 6}
LENGTH = 9


def states(dilation, period, depth):
    c = DenseFormerConfig(on=True, dilation=dilation, period=period)
    return [c.states(i) for i in range(1, depth + 1)]


def test_which_states_are_averaged():
    assert states(1, 1, 3) == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert states(2, 1, 4) == [(1,), (0, 2), (1, 3), (0, 2, 4)]
    assert states(2, 3, 6) == [(), (), (1, 3), (), (), (0, 2, 4, 6)]
    # d (d + 3) / 2 weights without dilation and period, as the paper counts.
    assert sum(len(DenseFormerConfig(on=True).states(i)) for i in range(1, 49)) == 48 * 51 // 2
    assert not any(DenseFormerConfig().states(i) for i in range(1, 49))


@pytest.mark.parametrize("changes", [{}, {"depth_routing.kind": "mod"}])
def test_at_first_it_is_the_plain_stack(changes):
    """Bit for bit, from the same seed."""
    plain, dense = families.make({"depth": 6, **changes}), families.make({**ON, **changes})
    params = families.initial(dense, 3)["params"]
    alike = families.initial(plain, 3)["params"]
    averages = {name for name in params["layers"] if name.startswith("average")}
    assert len(averages) == 6
    for i in range(1, 7):
        np.testing.assert_array_equal(params["layers"][f"average_{i}"]["alpha"], [0.0] * i + [1.0])
    rest = {
        **params,
        "layers": {name: value for name, value in params["layers"].items() if name not in averages},
    }
    jax.tree.map(np.testing.assert_array_equal, rest, alike)
    tokens_BT = families.tokens(length=LENGTH)
    np.testing.assert_array_equal(
        families.jit(dense.apply)({"params": params}, tokens_BT),
        families.jit(plain.apply)({"params": alike}, tokens_BT),
    )


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


@pytest.mark.parametrize("dilation, period", [(1, 1), (2, 1), (1, 2), (3, 2), (4, 5), (7, 6)])
def test_the_formula(dilation, period):
    model = families.make({**ON, "dense_former.dilation": dilation, "dense_former.period": period})
    params = families.random_params(model)["layers"]
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, 32)), jnp.float32)
    info = CallInfo(Tokens(jnp.arange(LENGTH, dtype=jnp.int32)[None]))
    stack = Stack(model.specs(), False, "none", model.config.dense_former)
    result = families.jit(stack.apply)({"params": params}, x_BTD, info)
    every_x, y = [x_BTD], x_BTD
    for i, spec in enumerate(model.specs(), 1):
        x = families.jit(Layer(spec).apply)({"params": params[f"block_{i - 1}"]}, y, info)
        every_x.append(x)
        y = x
        if i % period == 0:
            alpha, y = list(params[f"average_{i}"]["alpha"]), 0.0
            for j in range(i + 1):
                if (i - j) % dilation == 0:
                    y = y + alpha.pop(0) * every_x[j]
            assert not alpha
        else:
            assert f"average_{i}" not in params
    np.testing.assert_allclose(result, y, atol=2e-5 * float(abs(y).max()))


def test_weights_of_a_recursion_count_steps():
    model = families.make(
        {
            **ON,
            "depth_routing.kind": "recursion",
            "depth_routing.capacity": (1.0, 0.5),
        }
    )
    params = families.random_params(model)
    sizes = [params["layers"][f"average_{i}"]["alpha"].size for i in (1, 2, 3, 4)]
    assert sizes == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dense_former.dilation": 0}, r"dense_former\.dilation=0: must be at least 1"),
        ({"dense_former.period": -1}, r"dense_former\.period=-1: must be at least 1"),
        ({"scan_layers": True}, r"scan_layers=True: not with config\.model\.dense_former\.on=True"),
    ],
)
def test_bad_values(changes, words):
    with pytest.raises(UsageError, match=words):
        families.make({**ON, **changes})


@pytest.mark.parametrize(
    "changes, key",
    [
        (ON, "dense_former.on"),
        ({"soft_experts.num": 2}, "soft_experts.num"),
        ({"mup.base_width": 8}, "mup.base_width"),
    ],
)
def test_hugging_face_has_no_place_for_it(changes, key):
    with pytest.raises(UsageError, match=f"config.model.{key}=.*does not support"):
        hf_config.config_to_hf(families.make({**changes, "attention.qk_norm": "none"}))
