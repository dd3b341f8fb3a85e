"""Recursion: a shared stack applied to fewer tokens each time, against a plain loop in numpy."""

import dataclasses
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from formulas import mlp, norm
from routing_reference import GATES, np_admit, np_layer, np_topk

from efx import models
from efx.layers import flops
from efx.layers import selection as routing_selection
from efx.layers.token_context import TokenContext
from efx.models import stack
from efx.routing.mod import MoDBlock

LENGTH = families.LENGTH
RECURSION = {
    "depth": 4,
    "depth_routing.kind": "recursion",
    "depth_routing.recursions": 3,
    "depth_routing.capacity": (1.0, 0.6, 0.3),
    "depth_routing.slack": 1.0,
    "depth_routing.causal_decision": "aux_loss",
}


def np_recursion(model, params, x_TD, selection):
    """(x after the last block, [tokens of each routed step]) of one row."""
    params, survivors = jax.tree.map(np.float64, params), []
    left_T = np.ones(len(x_TD), bool)
    counts_T = np.arange(len(x_TD)) + 1
    for name, spec in zip(stack.names(model.specs()), model.specs(), strict=True):
        if spec.step is None:
            x_TD, _ = np_layer(x_TD, params["layers"][name], spec)
            continue
        routing, gate_T1, kept_TD = spec.routing, 1.0, x_TD
        if routing is not None:
            score_T = x_TD @ params["layers"][name]["router"]
            if selection == "train":
                slots = routing_selection.num_slots(spec.capacity, len(x_TD))
                left_T = np_topk(score_T, slots, left_T)
            else:
                rate = spec.capacity * routing.slack
                left_T = np_admit(left_T & (score_T > 0), rate, counts_T)
            gate_T1 = GATES[routing.gate](score_T)[:, None]
            if routing.skip_mlp:
                b, q = spec.blocks[0], params["layers"][name]["skip_mlp"]
                h_TD = norm(x_TD, q["norm"], b.norm, b.norm_eps)
                kept_TD = x_TD + mlp(h_TD, q["mlp"], b.mlp.activation)
            survivors.append(left_T)
        y_TD, all_T = x_TD, np.ones(len(x_TD), bool)
        seen_T = all_T if routing is None or routing.kv_for_skipped else left_T
        for i, block in enumerate(spec.blocks, 1):
            p, inner = params["layers"][f"block_{i}"], stack.LayerSpec((block,))
            y_TD, _ = np_layer(y_TD, p, inner, lambda _, mask=left_T: mask, seen_T=seen_T)
        x_TD = np.where(left_T[:, None], x_TD + gate_T1 * (y_TD - x_TD), kept_TD)
    return x_TD, survivors


@functools.cache
def build(capacity=RECURSION["depth_routing.capacity"], **options):
    options = {f"depth_routing.{name}": value for name, value in options.items()}
    model = families.make({**RECURSION, "depth_routing.capacity": capacity, **options})
    return model, families.random_params(model)


def traced(model, params, tokens_BT, segments_BT=None):
    """(state of the stack after the last block, [(x in, x out, routed) of each routed step])."""
    seen = []

    def keep(next_function, arguments, keywords, context):
        result = next_function(*arguments, **keywords)
        if isinstance(context.module, MoDBlock) and context.method_name == "__call__":
            seen.append((arguments[0], *result))
        return result

    @families.jit
    def apply(params, tokens_BT):
        seen.clear()
        with nn.intercept_methods(keep):
            x_BTD = model.bind({"params": params}).embed(tokens_BT)
            out_BTD = stack.Stack(model.specs(), False, "none").apply(
                {"params": params["layers"]},
                x_BTD,
                TokenContext(
                    jnp.arange(tokens_BT.shape[1])[None], segments_BT, selection=model.selection
                ),
            )
        return out_BTD, list(seen)

    return jax.device_get(apply(params, tokens_BT))


@pytest.mark.parametrize(
    "selection, capacity, options",
    [
        ("train", (1.0, 0.6, 0.3), {}),
        ("causal", (1.0, 0.6, 0.1), {}),
        pytest.param("train", (0.5, 0.5, 0.1), {}, marks=pytest.mark.slow),
        ("causal", 0.6, {"kv_for_skipped": True, "skip_mlp": 12}),
    ],
)
def test_model_is_the_loop(selection, capacity, options):
    """Survivors are nested; without a skip MLP a token that is not among them keeps its state bit
    for bit, also where its score is positive."""
    model, params = build(capacity, **options)
    model, tokens_BT = model.clone(selection=selection), families.tokens(batch=3)
    out_BTD, seen = traced(model, params, tokens_BT)
    dropped = 0
    for b in range(3):
        x_TD = np.float64(params["embed"]["embedding"])[tokens_BT[b]]
        expected_TD, survivors = np_recursion(model, params, x_TD, selection)
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=1e-3)
        assert len(survivors) == len(seen) == (3 if capacity == (0.5, 0.5, 0.1) else 2)
        left_T = np.ones(LENGTH, bool)
        for (in_BTD, state_BTD, routed_BT), routed_T in zip(seen, survivors, strict=True):
            np.testing.assert_array_equal(routed_BT[b], routed_T)
            assert not np.any(routed_T & ~left_T)
            changed_T = np.any(state_BTD[b] != in_BTD[b], axis=-1)
            assert np.all(changed_T[routed_T]) and (options or not np.any(changed_T[~routed_T]))
            dropped += np.sum(left_T & ~routed_T)
            left_T = routed_T
    assert dropped > 5


def test_once_for_all_tokens_is_the_dense_model():
    """The same blocks, under the same names: a dense model's parameters are those of R = 1, and
    each further step adds a router."""
    once = families.make(
        {**RECURSION, "depth_routing.recursions": 1, "depth_routing.capacity": (1.0,)}
    )
    kind = dataclasses.replace(once.config.depth_routing, kind="none")
    dense = models.changed(once, depth_routing=kind)
    params, tokens_BT = families.random_params(dense), families.tokens(batch=2)
    np.testing.assert_array_equal(
        *(families.jit(model.apply)({"params": params}, tokens_BT) for model in (once, dense))
    )
    assert once.ledger(LENGTH) == dense.ledger(LENGTH)
    assert flops.executed(once, LENGTH) == flops.executed(dense, LENGTH)
    assert families.cache_bytes(once, LENGTH) == families.cache_bytes(dense, LENGTH)
    more = build()[1]["layers"]
    assert set(more) - set(params["layers"]) == {"recursion_1", "recursion_2"}
    assert all(set(more[f"recursion_{i}"]) == {"router"} for i in (1, 2))


@pytest.mark.slow
def test_losses_statistics_and_thresholds_are_of_the_survivors():
    """Loss, agreement and quantile among the tokens that are left, fractions of the sequence."""
    model, params = build(extra_decisions=("threshold",))
    state = {"state": families.random_state(model)["state"]}
    state = jax.tree.map(jnp.zeros_like, state)
    collections = ["losses", "stats", "state"]

    @families.jit
    def apply(params, tokens_BT):
        return model.apply({"params": params, **state}, tokens_BT, train=True, mutable=collections)

    sown = apply(params, families.tokens())[1]
    _, seen = traced(build()[0].clone(selection="train"), build()[1], families.tokens())
    before_BT = np.ones((families.BATCH, LENGTH), bool)
    for number, (in_BTD, _, routed_BT) in enumerate(seen, 1):
        name = f"recursion_{number}"
        score_BT = in_BTD @ np.asarray(params["layers"][name]["router"])
        loss_BT = np.logaddexp(0, score_BT) - score_BT * routed_BT
        stats = {key: float(value[0]) for key, value in sown["stats"]["layers"][name].items()}
        loss = sown["losses"]["layers"][name]["router_bce"][0]
        np.testing.assert_allclose(loss, loss_BT[before_BT].mean(), rtol=1e-4)
        decided_BT = (score_BT > 0) & before_BT
        accuracy = (decided_BT == routed_BT)[before_BT].mean()
        np.testing.assert_allclose(stats["router/accuracy"], accuracy, rtol=1e-5)
        np.testing.assert_allclose(stats["router/decided_fraction"], decided_BT.mean(), rtol=1e-5)
        slots = routed_BT[0].sum()
        falling = -np.sort(np.where(before_BT, -score_BT, np.inf), axis=1)
        quantile = sown["state"]["layers"][name]["threshold"]["quantile"]
        np.testing.assert_allclose(quantile, falling[:, slots - 1 : slots + 1].mean(), rtol=1e-3)
        before_BT = routed_BT


@pytest.mark.slow
def test_the_parameters_are_the_same_at_every_stage_of_the_capacity():
    """Also at a stage where no step leaves a token out: each is as if its capacity were that one,
    with a router for every step but the first."""
    model, params = build(
        0.6, causal_decision="threshold", capacity_stages=((0.3, 1.0), (0.6, 0.8))
    )
    variables = {"params": params, **families.random_state(model)}
    for capacity, capacities in ((1.0, (1.0, 1.0, 1.0)), (0.8, (1.0, 0.8, 0.64)), (0.6, None)):
        staged = models.changed(model, **{"depth_routing.capacity": capacity})
        shapes = nn.unbox(models.variable_shapes(staged))
        kept = {name: shapes[name] for name in variables}
        assert jax.tree.structure(kept) == jax.tree.structure(variables)
        steps = staged.specs()[1:-1]
        assert capacities is None or [s.capacity for s in steps] == pytest.approx(capacities)
        assert [s.routing is not None for s in steps] == [False, True, True]
    # After the last stage the model is the one without stages.
    plain, tokens_BT = build(0.6, causal_decision="threshold")[0], families.tokens(batch=2)
    np.testing.assert_array_equal(
        *(families.jit(m.apply)(variables, tokens_BT) for m in (model, plain))
    )


def test_every_step_has_a_cache_of_its_own_size():
    """As many slots as `admit` may fill; T for a step that computes all tokens."""
    model, _ = build()
    cache = models.init_cache(model, 2, LENGTH)["layers"]
    slots = {
        f"recursion_{i}": routing_selection.num_causal_slots(c, LENGTH)
        for i, c in enumerate(RECURSION["depth_routing.capacity"])
    }
    assert list(slots.values()) == [32, 24, 14]
    for block in ("block_1", "block_2"):
        found = {name: part["position"] for name, part in cache[block]["attention"].items()}
        assert {name: position.shape[1] for name, position in found.items()} == slots
        assert all(np.all(position == -1) for position in found.values())
    assert cache["block_3"]["attention"]["position"].shape[1] == LENGTH
    assert set(cache["recursion_2"]) == {"reached", "admitted", "overflow"}
    assert "recursion_0" not in cache
