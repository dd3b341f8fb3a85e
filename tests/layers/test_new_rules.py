"""A score, a selection, a gate and a decision that no list of efx names have what others have."""

import inspect

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_documents
import test_families
from new_rules import new_rules  # noqa: F401 (a fixture)
from refusals import refused
from routing_reference import LENGTH, activations, layer, np_topk, run

from efx.interop import hf_export
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
        "depth_routing.causal_decision": "threshold",
        "depth_routing.extra_decisions": ("aux_loss", "predictor"),
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
    model = families.make({**ROUTED, "depth_routing.causal_decision": "drawn", "scan_layers": True})
    variables = {"params": families.random_params(model), **families.random_state(model)}
    _, sown = families.jit(
        lambda: model.apply(variables, families.tokens(), rngs=families.keys(), mutable=["stats"])
    )()
    stats = sown["stats"]["layers"]["units"]["block_0"]
    (decided_L,) = stats["router/decided_fraction"]
    assert np.all((decided_L > 0.3) & (decided_L < 0.7)) and decided_L[0] != decided_L[1]


# ---- scores and gates --------------------------------------------------------------------------

PROPERTIES = (
    test_families.test_causal,
    test_families.test_cached_decoding_is_the_full_forward,
    test_families.test_scanned_and_recomputed_layers_on_eight_devices_are_the_plain_program,
    test_documents.test_a_document_does_not_change_the_next,
)


@pytest.mark.parametrize("check", PROPERTIES)
def test_a_model_with_a_new_score_keeps_the_contract(check, monkeypatch):
    changes = {**ROUTED, "depth_routing.score": "probe", "depth_routing.gate": "softplus"}
    monkeypatch.setitem(families.FAMILIES, "probe", families.Family(changes, looks_ahead=True))
    fixtures = {"name": "probe", "mesh": "mixed", "monkeypatch": monkeypatch}
    check(**{name: fixtures[name] for name in inspect.signature(check).parameters})


def test_parameters_of_a_score():
    of_block = {"attention", "mlp", "norm_attention", "norm_mlp"}
    for score, own in (("norm", set()), ("probe", {"scorer"}), ("gumbel", {"router"})):
        model = families.make({**ROUTED, "depth_routing.score": score})
        block = families.variable_shapes(model)["params"]["layers"]["block_0"]
        assert {*block} - of_block == own


def test_a_new_gate_multiplies_the_increment():
    x_BTD, outputs = activations(), {}
    for gate in ("softplus", "one"):
        module, p = layer(depth_routing__gate=gate)
        outputs[gate] = run(module, p, x_BTD, selection="topk")[0] - x_BTD
    gate_BT1 = np.log1p(np.exp(x_BTD @ p["router"]))[..., None]
    np.testing.assert_allclose(outputs["softplus"], gate_BT1 * outputs["one"], atol=1e-5)


@pytest.mark.parametrize("score", ["norm", "position", "token_hash", "stochastic"])
def test_aux_loss_needs_a_score_with_parameters(score):
    for settings in ({"causal_decision": "aux_loss"}, {"extra_decisions": ("aux_loss",)}):
        routing = {"score": score, **settings}
        refused(lambda r=routing: DepthRoutingConfig(kind="mod", **r), f"score={score!r}")
        assert DepthRoutingConfig(kind="none", **routing)
    assert DepthRoutingConfig(kind="mod", score="probe", causal_decision="aux_loss")


def test_a_new_score_is_not_exported():
    config = families.make({**ROUTED, "depth_routing.score": "norm"}).config
    refused(lambda: hf_export.check_exportable(config, "none"), "score='norm'")
