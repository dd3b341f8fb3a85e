"""Routed layers and models against a plain numpy form of the maths."""

import dataclasses
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from formulas import norm
from routing_reference import (
    LENGTH,
    ROWS,
    activations,
    layer,
    np_admit,
    np_layer,
    np_topk,
    positive,
    run,
    topk,
)
from scipy import special

from efx import models
from efx.layers import selection
from efx.layers.config import BlockConfig
from efx.layers.linear import dot_float32
from efx.layers.token_context import TokenContext
from efx.routing.config import warn_if_router_is_untrained
from efx.routing.mod import MoDBlock

PARALLEL = dict(block_kind="parallel")
CASES = {
    "identity": dict(depth_routing__gate="identity"),
    "tanh_window": dict(depth_routing__gate="tanh", attention__window=5),
    "twice_sigmoid": dict(depth_routing__gate="twice_sigmoid", preset="gpt2"),
    "one_parallel": dict(depth_routing__gate="one", **PARALLEL),
    "kv_for_skipped": dict(depth_routing__kv_for_skipped=True, attention__window=5),
    "skip_mlp": dict(depth_routing__skip_mlp=8),
    "router_norm": dict(depth_routing__router_norm="rms"),
    "attention": dict(depth_routing__target="attention"),
    "attention_parallel": dict(
        depth_routing__target="attention", depth_routing__kv_for_skipped=True, **PARALLEL
    ),
    "mlp": dict(depth_routing__target="mlp", depth_routing__router_norm="rms"),
    "mlp_only": dict(depth_routing__target="mlp_only"),
    "mlp_parallel": dict(depth_routing__target="mlp", depth_routing__skip_mlp=8, **PARALLEL),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_is_the_formula(name):
    """Residual once, the gate, original positions for RoPE and window, causal among the routed."""
    module, p = layer(**CASES[name])
    routing, x_BTD = module.spec.routing, activations()
    positions_T = np.arange(LENGTH) * 2 + 3  # not the places in the row
    out_BTD, sown = run(module, p, x_BTD, positions=positions_T[None])
    assert ("norm_router" in p) == (routing.router_norm == "rms")
    for b in range(ROWS):
        choose = topk(LENGTH // 2)
        expected_TD, routed_T = np_layer(np.float64(x_BTD[b]), p, module.spec, choose, positions_T)
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=2e-4)
        if routing.target == "block" and not routing.skip_mlp:
            np.testing.assert_array_equal(out_BTD[b][~routed_T], x_BTD[b][~routed_T])
    if name == "tanh_window":  # not the positions 0..C-1, a published defect
        renumbered_T = np.cumsum(routed_T) - 1
        wrong_TD, _ = np_layer(x_BTD[-1], p, module.spec, choose, renumbered_T)
        assert np.abs(out_BTD[-1] - wrong_TD).max() > 0.01


@pytest.mark.parametrize("target", ["block", "attention", "mlp", "mlp_only"])
def test_without_selected_tokens_the_routed_part_is_left_out(target):
    """selection="off"."""
    module, p = layer(depth_routing__target=target)
    x_BTD = activations()
    out_BTD, _ = run(module, p, x_BTD, selection="off")
    for b in range(ROWS):
        nobody = np.zeros(LENGTH, bool)
        expected_TD, _ = np_layer(np.float64(x_BTD[b]), p, module.spec, lambda _, n=nobody: n)
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=2e-4)


def test_causal_decision_is_the_formula():
    """r > 0 under a limit for each position; unused slots reach nothing."""
    module, p = layer(depth_routing__slack=1.0, depth_routing__capacity=0.25)
    x_BTD = activations()
    push_D = 10 * p["router"] / np.sum(p["router"] ** 2)  # 10 more in every score
    x_BTD[0] += push_D.astype(np.float32)  # row 0 selects every token, row 2 none
    x_BTD[2] -= push_D.astype(np.float32)
    out_BTD, sown = run(module, p, x_BTD, selection="causal")
    decided_BT = x_BTD @ p["router"] > 0
    assert decided_BT[0].all() and not decided_BT[2].any()
    admitted_BT = [np_admit(row_T, 0.25, np.arange(LENGTH) + 1) for row_T in decided_BT]
    assert np.sum(admitted_BT[0]) == 0.25 * LENGTH + selection.HEADROOM
    for b in range(ROWS):
        expected_TD, _ = np_layer(np.float64(x_BTD[b]), p, module.spec, positive(0.25))
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=2e-4)
    np.testing.assert_array_equal(out_BTD[2], x_BTD[2])
    np.testing.assert_allclose(sown["router/decided_fraction"], decided_BT.mean(), rtol=1e-5)
    overflow = decided_BT.mean() - np.mean(admitted_BT)
    assert overflow > 0
    np.testing.assert_allclose(sown["router/overflow_fraction"], overflow, atol=1e-6)
    routed_B = np.sum(admitted_BT, axis=1)
    pairs = np.mean(routed_B * (routed_B + 1)) / (LENGTH * (LENGTH + 1))
    np.testing.assert_allclose(sown["router/pairs_fraction"], pairs, rtol=1e-5)


def np_model(model, p, tokens_T, slots_of):
    """Logits of one sequence; `slots_of`: spec of a routed layer -> tokens that it computes."""
    x_TD = p["embed"]["embedding"][tokens_T]
    for i, spec in enumerate(model.specs()):
        choose = None if spec.routing is None else topk(slots_of(spec))
        x_TD, _ = np_layer(x_TD, p["layers"][f"block_{i}"], spec, choose)
    x_TD = norm(x_TD, p["norm_final"], model.config.norm, model.config.norm_eps)
    return (x_TD @ p["head"]["kernel"])[:, : model.vocab_size]


def test_packed_documents_and_the_gradient_are_the_formulas():
    """Each document is computed alone, with its part of the row's slots, [ceil(c s), ceil(c e))
    for the places [s, e); the gradient in a direction is what small steps along it give."""
    model, params = families.build("mod_options"), families.params_of("mod_options")
    model, length = model.clone(selection="train"), families.LENGTH
    documents = [(0, 0, 11), (0, 11, 16), (0, 16, 32), (1, 0, 3), (1, 3, 23)]  # row, places
    tokens_BT, rng = np.asarray(families.tokens(batch=2)), np.random.default_rng(0)
    positions_BT, segments_BT = np.zeros((2, 2, length), np.int32)
    for number, (row, start, end) in enumerate(documents, 1):
        positions_BT[row, start:end], segments_BT[row, start:end] = np.arange(end - start), number
    weight_BTV = rng.normal(size=(2, length, families.VOCAB)) * (segments_BT > 0)[..., None]

    @families.jit
    def run(params):
        def total(params):
            logits = model.apply({"params": params}, tokens_BT, positions_BT, segments_BT)
            return jnp.sum(logits[..., : families.VOCAB] * weight_BTV.astype(np.float32)), logits

        return jax.grad(total, has_aux=True)(params)

    def formula(p):
        """[(place of a document, its logits)]"""
        for row, start, end in documents:

            def slots_of(spec, start=start, end=end):
                return np.ceil(spec.capacity * end).astype(int) - np.ceil(
                    spec.capacity * start
                ).astype(int)

            places = row, slice(start, end)
            yield places, np_model(model, p, tokens_BT[places], slots_of)

    gradient, logits_BTV = jax.device_get(run(params))
    p = jax.tree.map(np.float64, params)
    for places, expected_TV in formula(p):
        np.testing.assert_allclose(logits_BTV[places], expected_TV, atol=1e-3)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), p)

    def along(step):
        stepped = jax.tree.map(lambda x, d: x + step * d, p, direction)
        return sum(np.sum(weight_BTV[places] * y_TV) for places, y_TV in formula(stepped))

    slope = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    np.testing.assert_allclose(slope, (along(1e-6) - along(-1e-6)) / 2e-6, rtol=1e-3)


@pytest.mark.parametrize("preset, dtype", [("gpt2", "float32"), ("llama", "bfloat16")])
def test_full_capacity_and_gate_one_is_the_dense_model(preset, dtype):
    """Bit for bit, where the compiler rounds as the program says: fused loops may round less. With
    selection="off" a model is the one without its routed blocks."""
    changes = {"kind": "mod", "capacity": 1.0, "gate": "one", "causal_decision": "aux_loss"}
    routed = families.make({"preset": preset, **families.dotted({"depth_routing": changes})}, dtype)
    kind = dataclasses.replace(routed.config.depth_routing, kind="none")
    dense = models.changed(routed, depth_routing=kind)
    params, tokens_BT = families.random_params(routed), families.tokens(batch=2)
    blocks = params["layers"]
    assert "router" in blocks["block_1"]
    unrouted = {k: v for k, v in blocks["block_1"].items() if k != "router"}
    layers = {"block_0": blocks["block_0"], "block_1": unrouted}
    exact = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}

    def logits(model, layers):
        variables = {"params": {**params, "layers": layers}}
        return jax.jit(model.apply, compiler_options=exact)(variables, tokens_BT)

    expected = logits(dense, layers)
    np.testing.assert_array_equal(logits(routed.clone(selection="train"), blocks), expected)
    if dtype == "float32":
        alone = logits(models.changed(dense, depth=1), {"block_0": blocks["block_0"]})
        np.testing.assert_array_equal(logits(routed.clone(selection="off"), blocks), alone)


# ---- the router --------------------------------------------------------------------------------


def test_scores_and_their_gradients_are_of_float32():
    """Of activations in bfloat16."""
    rng = np.random.default_rng(0)
    vector_D = rng.normal(size=384).astype(np.float32)
    x_BTD = jnp.asarray(rng.normal(size=(2, 40, 384)), jnp.bfloat16)
    gradient_BT = rng.normal(size=(2, 40)).astype(np.float32)
    score_BT, back = jax.vjp(dot_float32, vector_D, x_BTD)
    of_vector_D, of_x_BTD = back(gradient_BT)
    x, vector, gradient = (np.float64(array) for array in (x_BTD, vector_D, gradient_BT))
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    near(score_BT, x @ vector)
    near(of_vector_D, np.einsum("btd,bt->d", x, gradient))
    assert np.abs(np.float64(x_BTD @ jnp.bfloat16(vector_D)) - x @ vector).max() > 1e-2
    assert of_x_BTD.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(of_x_BTD), gradient[..., None] * vector, rtol=2**-8)


def test_router_is_float32_under_bfloat16():
    """Scores of a bfloat16 x are those of exact arithmetic on it, not of a bfloat16 product."""
    module, p = layer(dtype="bfloat16")
    x_BTD = activations().astype(jnp.bfloat16)
    out_BTD, sown = run(module, p, x_BTD)
    assert out_BTD.dtype == jnp.bfloat16
    assert all(value.dtype == jnp.float32 for value in sown.values())
    score_BT = np.float64(x_BTD) @ np.float64(p["router"].astype(np.float32))
    target_BT = np.stack([np_topk(score_T, LENGTH // 2) for score_T in score_BT])
    loss = np.mean(np.logaddexp(0, score_BT) - score_BT * target_BT)
    np.testing.assert_allclose(sown["router_bce"], loss, rtol=1e-6)


class Increments(nn.Module):
    """A block whose increment is 1 to 2 over the features, whatever it reads."""

    config: BlockConfig

    def __call__(self, x_BTD, call, context=None):
        increment_D = jnp.linspace(1, 2, x_BTD.shape[-1]).astype(x_BTD.dtype)
        return jnp.broadcast_to(increment_D, x_BTD.shape)


def test_a_gate_multiplies_in_float32_under_bfloat16():
    """Added is the exact product, rounded once: tokens are 0 but where the router looks."""
    spec = layer(dtype="bfloat16")[0].spec
    module = MoDBlock(Increments(spec.blocks[0]), spec.routing, spec.capacity)
    x_BTD = np.zeros((ROWS, LENGTH, 32), jnp.bfloat16)
    x_BTD[..., 0] = activations()[..., 0]
    (out_BTD, _), _ = run(module, {"router": np.eye(32, dtype=np.float32)[0]}, x_BTD)
    score_BT = np.float64(x_BTD[..., 0])
    routed_BT = np.stack([np_topk(score_T, LENGTH // 2) for score_T in score_BT])
    gate_BT = np.where(routed_BT, special.expit(score_BT), 0)
    exact_BTD = gate_BT[..., None] * np.float64(jnp.linspace(1, 2, 32).astype(jnp.bfloat16))
    off_BTD = np.abs(np.float64(out_BTD) - exact_BTD)[..., 1:]
    # Half of a step, of which there are 128 from a power of 2 to the next.
    step_BTD = 2.0 ** (np.floor(np.log2(np.where(exact_BTD > 0, exact_BTD, 1))) - 7)
    assert np.all(off_BTD <= 0.501 * step_BTD[..., 1:])


def test_losses_and_stats_by_hand():
    """Targets are each row's own top-k; padding counts nowhere."""
    module, p = layer()
    x_BTD = activations(1)
    x_BTD[1] += 0.7 * p["router"].astype(np.float32)  # row 1 scores above row 0 everywhere
    segments_BT = np.ones((ROWS, LENGTH), np.int32)
    segments_BT[0, 12:] = 0
    out_BTD, sown = run(module, p, x_BTD, segments=segments_BT)
    valid_BT = segments_BT > 0
    score_BT = np.float64(x_BTD) @ p["router"]
    target_BT = np.stack([
        np_topk(score_T, valid_T.sum() // 2, valid_T)
        for score_T, valid_T in zip(score_BT, valid_BT, strict=True)
    ])  # fmt: skip
    np.testing.assert_array_equal(np.any(np.asarray(out_BTD) != x_BTD, axis=-1), target_BT)
    decided_BT = (score_BT > 0) & valid_BT
    hit, routed_B = (decided_BT & target_BT).sum(), decided_BT.sum(axis=1)
    expected = {
        "router_bce": np.mean((np.logaddexp(0, score_BT) - score_BT * target_BT)[valid_BT]),
        "router/accuracy": np.mean((decided_BT == target_BT)[valid_BT]),
        "router/precision": hit / decided_BT.sum(),
        "router/recall": hit / target_BT.sum(),
        "router/decided_fraction": decided_BT[valid_BT].mean(),
        "router/overflow_fraction": 0.0,
        "router/pairs_fraction": np.mean(routed_B * (routed_B + 1)) / (LENGTH * (LENGTH + 1)),
    }
    assert set(sown) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(sown[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def gradients_of(loss, module, p, x_BTD):
    """Gradients of loss(output, losses) by the parameters and the input."""

    def value(params, x_BTD):
        call = TokenContext(jnp.arange(LENGTH)[None], selection="train")
        out_BTD, sown = module.apply({"params": params}, x_BTD, call, mutable=["losses"])
        return loss(out_BTD, sown["losses"])

    return families.jit(jax.grad(value, argnums=(0, 1)))(jax.tree.map(np.float32, p), x_BTD)


@pytest.mark.parametrize("reaches", [True, False])
def test_gradient_of_the_router_loss(reaches):
    module, p = layer(depth_routing__bce_reaches_input=reaches)
    x_BTD = activations()
    grads, grad_x_BTD = gradients_of(lambda out, sown: sown["router_bce"][0], module, p, x_BTD)
    score_BT = x_BTD @ p["router"]
    error_BT = special.expit(score_BT)
    error_BT -= np.stack([np_topk(score_T, LENGTH // 2) for score_T in score_BT])
    error_BT /= error_BT.size
    expected_D = np.einsum("bt,btd->d", error_BT, x_BTD)
    np.testing.assert_allclose(grads.pop("router"), expected_D, atol=1e-6)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(grads))
    expected_BTD = error_BT[..., None] * p["router"] if reaches else 0 * x_BTD
    np.testing.assert_allclose(grad_x_BTD, expected_BTD, atol=1e-6)


@pytest.mark.parametrize("gate, reaches", [("sigmoid", True), ("one", False)])
def test_the_gate_trains_the_router(gate, reaches):
    """Through the output alone, the gate is the router's only way to learn."""
    module, p = layer(depth_routing__gate=gate)
    grads, _ = gradients_of(lambda out, sown: jnp.sum(jnp.square(out)), module, p, activations())
    assert np.all(np.isfinite(grads["router"]))
    assert np.any(np.asarray(grads["router"]) != 0) == reaches


@pytest.mark.parametrize(
    "extra_decisions, trained", [(("threshold",), False), (("aux_loss",), True)]
)
def test_a_router_that_nothing_trains_is_warned_of(extra_decisions, trained, caplog):
    """With a gate of 1 only the loss of `aux_loss` reaches it."""
    warn_if_router_is_untrained.cache_clear()
    routing = dict(
        kind="mod", gate="one", causal_decision="predictor", extra_decisions=extra_decisions
    )
    families.make(families.dotted({"depth_routing": routing}))
    assert ("gate='one'" in caplog.text) != trained


def test_unused_slots_have_finite_gradients():
    module, p = layer()
    x_BTD = activations()
    x_BTD[2] -= 10 * p["router"] / np.sum(p["router"] ** 2)  # no token of row 2 is routed
    call = TokenContext(np.arange(LENGTH)[None], selection="causal")

    def total(params, x_BTD):
        return jnp.sum(jnp.square(module.apply({"params": params}, x_BTD, call)))

    grads = families.jit(jax.grad(total, argnums=(0, 1)))(jax.tree.map(np.float32, p), x_BTD)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    np.testing.assert_allclose(grads[1][2], 2 * x_BTD[2], rtol=1e-6)
