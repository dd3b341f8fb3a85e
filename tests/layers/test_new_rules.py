"""A selection, a control and a decision that no list of efx names have what the others have."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from new_rules import new_rules  # noqa: F401 (a fixture)
from refusals import refused
from routing_reference import LENGTH, activations, layer, np_topk, run

from efx.layers import flops
from efx.routing.config import DepthRoutingConfig
from efx.train import step

pytestmark = pytest.mark.usefixtures("new_rules")
ROUTED = {"depth_routing.kind": "mod", "depth_routing.every": 1, "depth_routing.capacity": 0.25}


def test_a_new_exact_selection_needs_no_more_slots_than_topk():
    """In training; its causal decision has those of all."""
    exact, topk, causal = (
        families.make({**ROUTED, "depth_routing.train_selection": name})
        for name in ("first", "topk", "threshold")
    )
    assert exact.specs()[0].routing.slots(0.25, 32, "train") == 8
    assert flops.executed(exact, 32) == flops.executed(topk, 32) < flops.executed(causal, 32)
    assert exact.ledger(32).nominal == topk.ledger(32).nominal
    assert exact.ledger(32, "causal").nominal == causal.ledger(32, "causal").nominal


def test_a_new_selection_selects_in_training_only():
    module, p = layer(depth_routing__train_selection="first")
    x_BTD = activations()
    computed = {
        mode: np.any(run(module, p, x_BTD, selection=mode)[0] != x_BTD, axis=-1)
        for mode in ("train", "topk")
    }
    first_BT = np.tile(np.arange(LENGTH) < LENGTH // 2, (len(x_BTD), 1))
    np.testing.assert_array_equal(computed["train"], first_BT)
    topk_BT = [np_topk(score_T, LENGTH // 2) for score_T in x_BTD @ p["router"]]
    np.testing.assert_array_equal(computed["topk"], topk_BT)


@pytest.mark.parametrize("name", ["topk", "threshold", "first"])
def test_a_training_step_sorts_the_scores_of_a_block_once(name):
    """For the selection, the targets of the decisions and the threshold together."""
    changes = {
        **ROUTED,
        "depth_routing.train_selection": name,
        "depth_routing.causal": "threshold",
        "depth_routing.also_train": ("aux_loss", "predictor"),
    }
    model, config = families.make(changes), families.small_config(changes)
    optimizer = optax.chain(optax.snapshot("grad_norm", optax.tree.norm), optax.set_to_zero())
    train_step = step.make_train_step(model, optimizer, lambda _: 0.0, config, total_steps=9)
    shapes = families.variable_shapes(model)
    state = jax.eval_shape(lambda variables: step.state_of(variables, optimizer), shapes)
    tokens_BT = families.tokens()
    batch = {"inputs": tokens_BT, "targets": tokens_BT, "weights": jnp.ones(tokens_BT.shape)}
    traced = jax.make_jaxpr(train_step)(state, batch, jnp.uint32(0))
    names = [equation.primitive.name for equation in families.equations(traced.jaxpr)]
    assert sum(name in ("sort", "top_k") for name in names) == 2  # of two blocks


def test_a_decision_of_scanned_layers_draws_for_each_of_them():
    model = families.make({**ROUTED, "depth_routing.causal": "drawn", "scan_layers": True})
    variables = {"params": families.random_params(model), **families.random_state(model)}
    _, sown = families.jit(
        lambda: model.apply(variables, families.tokens(), rngs=families.keys(), mutable=["stats"])
    )()
    stats = sown["stats"]["layers"]["units"]["block_0"]
    (decided_L,) = stats["router/decided_fraction"]
    assert np.all((decided_L > 0.3) & (decided_L < 0.7)) and decided_L[0] != decided_L[1]


@pytest.mark.parametrize("name", ["even", "limited"])
def test_settings_without_effect_on_a_new_control_are_refused(name):
    """Those of a router and of its decisions; the limit's only where it has none."""
    without_effect = {
        "gate": "tanh",
        "router_norm": "rms",
        "causal": "aux_loss",
        "also_train": ("predictor",),
        "predictor_hidden": 3,
        "threshold_decay": 0.5,
        "threshold_warmup": 3,
        "bce_reaches_input": False,
    }
    with_effect = {"target": "attention", "kv_for_skipped": True, "skip_mlp": 3, "capacity": 0.3}
    (without_effect if name == "even" else with_effect)["slack"] = 1.0
    for key, value in without_effect.items():
        settings = {"train_selection": name, key: value}
        refused(lambda s=settings: DepthRoutingConfig(kind="mod", **s), f"{key}=", f"{name!r}")
        assert DepthRoutingConfig(kind="none", **settings)
    for key, value in with_effect.items():
        assert DepthRoutingConfig(kind="mod", train_selection=name, **{key: value})
