"""Scores, a selection, a gate and a decision that no list of efx names have what others have."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from new_rules import new_rules  # noqa: F401 (a fixture)
from refusals import refused
from routing_reference import LENGTH, activations, layer, np_topk, run

from efx import models
from efx.interop import hf_export
from efx.layers import flops
from efx.models import stack
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

NEW_SCORES = "norm", "probe", "gumbel"


@functools.cache
def scored(score, **changes):
    """(model, variables, compiled (variables, tokens, documents) -> logits) of two blocks."""
    settings = {"depth_routing.score": score, "depth_routing.gate": "softplus", "width": 16}
    model = families.make({**ROUTED, **settings, **changes})
    variables = {"params": families.random_params(model), **families.random_state(model)}

    @families.jit
    def logits(variables, tokens_BT, documents_BT=None):
        positions_BT = None
        if documents_BT is not None:
            positions_BT = jnp.broadcast_to(jnp.arange(families.LENGTH) % 16, tokens_BT.shape)
        options = dict(positions_BT=positions_BT, segment_ids_BT=documents_BT)
        return model.apply(variables, tokens_BT, **options, rngs=families.keys())

    return model, variables, logits


@pytest.mark.parametrize("score", NEW_SCORES)
def test_a_model_with_a_new_score_is_causal_and_keeps_documents_apart(score):
    _, variables, logits = scored(score)
    tokens_BT, other_BT = families.tokens(batch=2), families.tokens(seed=1, batch=2)
    later_BT = jnp.where(jnp.arange(families.LENGTH) < 16, tokens_BT, other_BT)
    whole, changed = (np.asarray(logits(variables, x_BT)) for x_BT in (tokens_BT, later_BT))
    np.testing.assert_array_equal(whole[:, :16], changed[:, :16])
    assert np.any(whole[:, 16:] != changed[:, 16:])
    # The second of two packed documents is as the first of a row that begins with it.
    documents_BT = jnp.asarray(np.repeat([[1] * 16 + [2] * 16], 2, axis=0))
    swapped_BT = jnp.roll(tokens_BT, 16, axis=1)
    packed, swapped = (
        np.asarray(logits(variables, x_BT, documents_BT)) for x_BT in (tokens_BT, swapped_BT)
    )
    np.testing.assert_allclose(packed, np.roll(swapped, 16, axis=1), atol=1e-5)


@pytest.mark.parametrize("score", NEW_SCORES)
def test_a_model_with_a_new_score_decodes_what_a_full_pass_computes(score):
    model, variables, logits = scored(score)
    tokens_BT, length_B = families.tokens(batch=2), np.full(2, families.LENGTH)
    cache = models.init_cache(model, 2, families.LENGTH)
    step = families.decoder(model, variables, families.LENGTH)
    calls = families.chunks(length_B - 4, length_B, 5)
    decoded, cache = families.read(step, cache, tokens_BT, calls)
    np.testing.assert_allclose(decoded, logits(variables, tokens_BT), atol=1e-4)
    admitted = cache["layers"]["block_0"]["admitted"]
    assert np.all((admitted > 0) & (admitted < families.LENGTH))


@pytest.mark.parametrize("score", NEW_SCORES)
def test_a_scan_with_remat_trains_a_new_score_as_a_loop_does(score):
    """The same loss and gradients, some of them of the score's own parameters."""
    model, variables, _ = scored(score)
    scanned, tokens_BT = scored(score, scan_layers=True, remat="full")[0], families.tokens(batch=2)

    def scan(tree):
        return {**tree, "layers": stack.scan_params(tree["layers"], model.specs())}

    def train(model, variables):
        model = model.clone(selection="train")
        rest = {name: tree for name, tree in variables.items() if name != "params"}

        def loss(params):
            logits = model.apply({"params": params, **rest}, tokens_BT, rngs=families.keys())
            return jnp.mean(jnp.square(logits))

        return families.jit(jax.value_and_grad(loss))(variables["params"])

    loss, grads = train(model, variables)
    scanned_loss, scanned_grads = train(
        scanned, {name: scan(tree) for name, tree in variables.items()}
    )
    np.testing.assert_allclose(loss, scanned_loss, rtol=1e-5)
    families.assert_trees_close(scan(grads), scanned_grads)
    block = grads["layers"]["block_0"]
    own = {"norm": (), "probe": ("scorer", "point"), "gumbel": ("router",)}[score]
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves([block[name] for name in own[:1]]))
    assert set(block) - {"attention", "mlp", "norm_attention", "norm_mlp"} == {*own[:1]}


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


def test_a_new_score_is_not_exported(tmp_path):
    model, variables, _ = scored("norm")
    refused(lambda: hf_export.write_model(tmp_path / "x", model, variables), "score='norm'")
