"""Causal decisions of depth routing, against plain numpy."""

import functools
import re

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import norm
from routing_reference import (
    LENGTH,
    OPTIONS,
    ROWS,
    activations,
    layer,
    np_admit,
    np_layer,
    np_topk,
    run,
)
from scipy import special

from efx.layers.token_context import TokenContext
from efx.routing import decisions
from efx.routing.calibrate import calibrate, reset_threshold_steps

# ---- the predictor -----------------------------------------------------------------------------


def np_predictor(x_BTD, p):
    h_BTF = x_BTD @ p["kernel_in"]
    return (h_BTF * special.expit(h_BTF) @ p["kernel_out"])[..., 0]


@pytest.mark.parametrize("router_norm", ["none", "rms"])
def test_predictor_decides_and_learns_from_top_k(router_norm):
    """It reads what the router reads."""
    module, p = layer(
        depth_routing__causal_decision="predictor",
        depth_routing__predictor_hidden=8,
        depth_routing__router_norm=router_norm,
    )
    x_BTD = activations()
    read_BTD = x_BTD
    if router_norm == "rms":
        read_BTD = norm(
            np.float64(x_BTD), p["norm_router"], "rmsnorm", module.spec.blocks[0].norm_eps
        )
    logit_BT, score_BT = np_predictor(read_BTD, p["predictor"]), read_BTD @ p["router"]
    decided_BT = logit_BT > 0
    assert 0.1 < decided_BT.mean() < 0.9
    out_BTD, sown = run(module, p, x_BTD, selection="causal")
    for b in range(ROWS):
        x_TD, decided_T = np.float64(x_BTD[b]), decided_BT[b]
        expected_TD, _ = np_layer(x_TD, p, module.spec, lambda _, mask=decided_T: mask)
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=2e-4)
    target_BT = np.stack([np_topk(score_T, LENGTH // 2) for score_T in score_BT])
    loss = np.mean(np.logaddexp(0, logit_BT) - logit_BT * target_BT)
    np.testing.assert_allclose(sown["predictor_bce"], loss, rtol=1e-5)
    assert "router_bce" not in sown  # of a decision that is not trained
    np.testing.assert_allclose(sown["router/accuracy"], np.mean(decided_BT == target_BT), rtol=1e-5)


def test_predictor_computes_in_float32_on_accelerators_too():
    """They round the operands of products by default, which turns a thousandth of all decisions."""
    spec = layer(depth_routing__causal_decision="predictor")[0].spec
    module = decisions.Predictor(spec.routing, 0.5, 16)
    x_BTD, score_BT = jnp.zeros((1, 4, 16), jnp.bfloat16), jnp.zeros((1, 4))
    traced = jax.jit(module.init_with_output).trace(jax.random.key(0), x_BTD, score_BT)
    products = re.findall(r"dot_general.*", traced.lower(lowering_platforms=("tpu",)).as_text())
    assert len(products) == 2 and all("[HIGHEST, HIGHEST]" in line for line in products)


def test_several_decisions_are_trained_and_any_can_decide():
    module, p = layer(depth_routing__extra_decisions=("predictor", "threshold"))
    state = {"state": {"threshold": {"quantile": np.float32(0.4), "steps": np.int32(9)}}}
    x_BTD = activations()
    score_BT = x_BTD @ p["router"]
    decided = {
        "causal": score_BT > 0,
        "aux_loss": score_BT > 0,
        "predictor": np_predictor(x_BTD, p["predictor"]) > 0,
        "threshold": score_BT > 0.4,
    }
    assert module.spec.routing.trained_decisions == ("aux_loss", "predictor", "threshold")
    for name, decided_BT in decided.items():
        out_BTD, sown = run(module, p, x_BTD, selection=name, state=state)
        changed_BT = np.any(out_BTD != x_BTD, -1)
        np.testing.assert_array_equal(changed_BT, decided_BT, err_msg=name)
        losses, stats = ({k for k in sown if ("/" in k) == s} for s in (False, True))
        assert losses == {"router_bce", "predictor_bce"}
        assert {key.split("/")[0] for key in stats} == {"router", "predictor", "threshold"}


# ---- the threshold -----------------------------------------------------------------------------


def state_of(quantile=0.0, steps=0):
    return {"threshold": {"quantile": np.float32(quantile), "steps": np.int32(steps)}}


@functools.cache
def train(module):
    """Compiled (params, state, x, segment ids) -> (output, state after a training step)."""

    @families.jit
    def step(params, state, x_BTD, segments_BT=None):
        call = TokenContext(jnp.arange(LENGTH)[None], segments_BT, train=True, selection="train")
        variables = {"params": params, "state": state}
        out_BTD, sown = module.apply(variables, x_BTD, call, mutable=["state"])
        return out_BTD, sown["state"]

    return step


def test_threshold_follows_the_quantile_and_then_decides():
    """theta moves by decay min(threshold_decay, 1 - 1 / (1 + 0.03 t)) towards the mean over rows of
    the midpoint between the k-th score and the next; after the warm-up it selects, as it was before
    the step, under the causal limit."""
    module, p = layer(
        depth_routing__causal_decision="threshold",
        depth_routing__train_selection="threshold",
        depth_routing__threshold_warmup=2,
        depth_routing__threshold_decay=0.05,
        depth_routing__capacity=0.25,
        depth_routing__slack=1.0,
    )
    p, slots = jax.tree.map(np.float32, p), LENGTH // 4
    theta, state, decays = 0.0, state_of(), []
    for t in range(4):
        x_BTD = activations(t)
        score_BT = x_BTD @ p["router"]
        routed_BT = [np_topk(score_T, slots) for score_T in score_BT]
        if t >= 2:
            routed_BT = [np_admit(s_T > theta, 0.25, np.arange(LENGTH) + 1) for s_T in score_BT]
        out_BTD, state = train(module)(p, state, x_BTD)
        np.testing.assert_array_equal(np.any(np.asarray(out_BTD) != x_BTD, -1), routed_BT)
        falling_BT = -np.sort(-score_BT, axis=1)
        decays.append(min(0.05, 1 - 1 / (1 + 0.03 * t)))
        theta = decays[-1] * theta + (1 - decays[-1]) * falling_BT[:, slots - 1 : slots + 1].mean()
        np.testing.assert_allclose(state["threshold"]["quantile"], theta, rtol=1e-5)
        assert state["threshold"]["steps"] == t + 1
    assert decays[0] == 0 and 0 < decays[1] < decays[2] == 0.05
    # Not in evaluation, where the state does not change.
    _, sown = run(module, p, x_BTD, selection="topk", state={"state": state})
    assert "router/accuracy" in sown


def test_padding_moves_no_threshold():
    """Each row counts by its tokens, of which the top quarter is selected; without any token theta
    and its steps stay."""
    module, p = layer(depth_routing__causal_decision="threshold", depth_routing__capacity=0.25)
    p, x_BTD = jax.tree.map(np.float32, p), activations()
    length_B = np.array([3, 9, LENGTH])
    real_BT = np.arange(LENGTH)[None] < length_B[:, None]
    _, after = train(module)(p, state_of(), x_BTD, real_BT.astype(np.int32))
    falling = [np.sort(s[:n])[::-1] for s, n in zip(x_BTD @ p["router"], length_B, strict=True)]
    k_B = np.ceil(0.25 * length_B).astype(int)
    middles = [scores[k - 1 : k + 1].mean() for scores, k in zip(falling, k_B, strict=True)]
    middle = np.average(middles, weights=length_B)
    np.testing.assert_allclose(after["threshold"]["quantile"], middle, rtol=1e-5)
    _, after = train(module)(p, state_of(2, 3), x_BTD, 0 * real_BT.astype(np.int32))
    assert jax.device_get(after) == state_of(2, 3)


def test_thresholds_begin_again_with_a_stage():
    """The steps of thresholds alone are set to 0: the next batch's quantile is taken as it is."""
    other = {"seed": np.int32(7), "steps": np.int32(4)}
    variables = {"state": {"block_1": state_of(0.5, 9), "other": other}}
    for is_start, steps in ((False, 9), (True, 0)):
        got = jax.device_get(reset_threshold_steps(variables, np.bool_(is_start)))
        assert got["state"] == {"block_1": state_of(0.5, steps), "other": other}


def test_calibrated_thresholds_are_the_mean_quantile_of_some_batches():
    """With the parameters as they are, whatever the threshold was; nothing else changes."""
    model = families.make({**OPTIONS, "depth_routing.causal_decision": "threshold"})
    params, variables = families.random_params(model), families.random_state(model)
    batches = [{"inputs": families.tokens(seed)} for seed in range(3)]
    got = calibrate(model, params, variables, batches)["state"]["layers"]["block_0"]["threshold"]
    router_D, slots = params["layers"]["block_0"]["router"], families.LENGTH // 2
    table_VD = np.asarray(params["embed"]["embedding"])
    falling = [-np.sort(-table_VD[batch["inputs"]] @ router_D, axis=1) for batch in batches]
    middle = np.mean([scores_BT[:, slots - 1 : slots + 1] for scores_BT in falling])
    np.testing.assert_allclose(got["quantile"], middle, rtol=1e-4)
    assert got["steps"] == variables["state"]["layers"]["block_0"]["threshold"]["steps"]
    assert calibrate(families.build("mod"), params, {}, batches) == {}
