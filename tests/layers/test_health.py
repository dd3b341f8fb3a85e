"""Statistics of how much a routed block does, computed by hand."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from routing_reference import GATES, LENGTH, activations, layer, run

from efx.layers.token_context import TokenContext
from efx.models.adapters import Adapter, AdapterConfig
from efx.routing.reports import DEPTH
from efx.train.evaluator import Passes
from efx.train.health import RULES

HEALTH = ("gate", "gate_median", "score_std", "increment")
FRACTIONS = ("decided_fraction", "pairs_fraction")
NAMES = [f"router/{name}" for name in (*HEALTH, *FRACTIONS)]


@pytest.mark.parametrize("gate", ["sigmoid", "identity"])
def test_health_of_a_routed_block_by_hand(gate):
    """Of selected tokens, but for scores; padding does not count, nor a row without any."""
    module, p = layer(depth_routing__gate=gate, depth_routing__slack=2.0)
    x_BTD, segments_BT = activations(1), np.ones((3, LENGTH), np.int32)
    segments_BT[0, 12:] = 0
    x_BTD[2] -= 9 * p["router"].astype(np.float32)  # no score of this row is positive
    out_BTD, sown = run(module, p, x_BTD, selection="causal", segments=segments_BT)
    score_BT, valid_BT = np.float64(x_BTD) @ p["router"], segments_BT > 0
    selected_BT = (score_BT > 0) & valid_BT
    assert {*selected_BT.sum(axis=1) % 2} == {0, 1} and not selected_BT[2].any()
    gate_BT, norms = np.abs(GATES[gate](score_BT)), {}
    for name, y_BTD in (("increment", np.float64(out_BTD) - x_BTD), ("stream", x_BTD)):
        norms[name] = np.linalg.norm(np.float64(y_BTD)[selected_BT])
    expected = {
        "gate": gate_BT[selected_BT].mean(),
        "gate_median": np.mean([np.median(gate_BT[b, selected_BT[b]]) for b in (0, 1)]),
        "score_std": score_BT[valid_BT].std(),
        "increment": norms["increment"] / norms["stream"],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(sown[f"router/{name}"], value, rtol=1e-4, err_msg=name)


def test_a_negative_gate_is_not_a_closed_one():
    module, p = layer(depth_routing__gate="identity", depth_routing__causal_decision="threshold")
    x_BTD = activations() - 9 * p["router"].astype(np.float32)
    state = {"threshold": {"quantile": np.float32(-99), "steps": np.int32(99)}}
    sown = run(module, p, x_BTD, selection="causal", state={"state": state})[1]
    assert sown["router/gate"] > 1 and sown["router/gate_median"] > 1


@pytest.mark.parametrize("selection", ["train", "topk", "off"])
def test_only_the_causal_decision_of_evaluation_computes_health(selection):
    sown = run(*layer(), activations(), selection=selection)[1]
    assert not {f"router/{name}" for name in HEALTH} & set(sown)


def test_a_block_without_selected_tokens_has_no_gate():
    model, means = families.build("mod_options"), dict.fromkeys(NAMES, 0.3)
    for block, gate in (("block_0", 0.0), ("block_1", 0.4)):
        means |= {f"{name}/{block}": gate for name in NAMES}
    means |= {f"router/overflow_fraction{end}": 0.0 for end in ("", "/block_0", "/block_1")}
    passes = Passes({name: {"loss": 2.0, **means} for name in ("causal", "topk", "off")}, None)
    rows = DEPTH.rows(model, families.LENGTH, passes)
    assert "eval/router/gate/block_0" not in rows and rows["eval/router/gate_min"] == 0.4
    lines = [line for rule in RULES if (line := rule.line(rows))]
    assert len(lines) == 2 and "all of them off costs 0 nats" in lines[0]
    assert "no token, block_0: 0 of all" in lines[1]


def test_gate_of_an_adapter_by_hand():
    x_BTD = activations()
    config = AdapterConfig(kind="lora", rank=2, gate=True)
    module = Adapter(config, 5, ("embed", "mlp"), jnp.float32)
    segments_BT = np.ones((3, LENGTH), np.int32)
    segments_BT[1, 5:] = 0
    call = TokenContext(jnp.arange(LENGTH)[None], segments_BT)
    params = module.init(jax.random.key(0), x_BTD, call)["params"]
    params["gate"] = families.constant(np.linspace(-1, 1, 32), np.float32)
    _, sown = module.apply({"params": params}, x_BTD, call, mutable=["stats"])
    gate_BT = GATES["sigmoid"](np.float64(x_BTD) @ np.linspace(-1, 1, 32))
    expected = gate_BT[segments_BT > 0].mean()
    np.testing.assert_allclose(sown["stats"]["adapter/gate"][0], expected, rtol=1e-5)
    training = call.replace(train=True)
    assert not module.apply({"params": params}, x_BTD, training, mutable=["stats"])[1]
