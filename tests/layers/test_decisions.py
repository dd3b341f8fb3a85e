"""Causal decisions and the options of the depth routing wrapper, against plain numpy."""

import functools
import re

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_routing import (
    LENGTH,
    ROWS,
    activations,
    layer,
    linear,
    norm,
    np_attention,
    np_layer,
    np_mlp,
    np_topk,
    run,
)

from efx import sharding
from efx.layers.call import Call
from efx.routing import decisions, plans, quantiles


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# ---- quantiles and documents by hand -----------------------------------------------------------


def quantile(scores_BT, fraction, *valid_BT):
    return jax.jit(quantiles.of_batch)(scores_BT, 1.0 - fraction, *valid_BT)


def sorted_quantile(values, fraction):
    falling = np.sort(values)[::-1]
    share = np.floor((1 - fraction) * len(values) + 1e-3)
    if share == len(values):
        return np.float32(quantiles.BELOW_ALL)
    above = int(np.clip(share, 1, max(len(values) - 1, 1)))
    return np.float32(0.5) * (falling[above - 1] + falling[min(above, len(values) - 1)])


@pytest.mark.parametrize("fraction, decimals", [(0.0, 1), (0.5, 0), (0.875, 8)])
def test_quantile_is_that_of_sorted_scores(fraction, decimals):
    """Of any sign and size, with few or many that are equal."""
    rng = np.random.default_rng(decimals)
    scores_BT = np.round(rng.normal(size=(6, 32)) * 10.0 ** rng.integers(-3, 4, (6, 1)), decimals)
    scores_BT = scores_BT.astype(np.float32)
    valid_BT = rng.random((6, 32)) < 0.7
    assert quantile(scores_BT, fraction) == sorted_quantile(scores_BT.ravel(), fraction)
    expected = sorted_quantile(scores_BT[valid_BT], fraction)
    assert quantile(scores_BT, fraction, valid_BT) == expected
    one = np.zeros_like(valid_BT)
    one[2, 5] = True
    only = scores_BT[2, 5] if fraction else np.float32(quantiles.BELOW_ALL)
    assert quantile(scores_BT, fraction, one) == only


def test_a_quantile_over_eight_devices_is_that_of_one():
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | dict(data=8))
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    scores_BT = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    result = quantile(jax.device_put(scores_BT, by_row), 0.875)
    assert result == sorted_quantile(scores_BT.ravel(), 0.875)


def test_a_batch_in_which_nothing_counts_moves_no_quantile():
    """Nor is it a step of the average; one of which something counts is."""
    state = {"a": {"quantile": np.float32(2), "quantile_steps": np.int32(3)}}
    scores_BT, none_BT = np.ones((2, 4), np.float32), np.zeros((2, 4), bool)
    for valid_BT, quantile, steps in ((none_BT, 2.0, 3), (~none_BT, 1.5, 4)):
        sown = {"a": {"quantile": (quantiles.Scores(scores_BT, valid_BT, 0.5, 0.5),)}}
        got = jax.device_get(jax.jit(quantiles.followed)(state, state, sown))
        assert got["a"] == {"quantile": quantile, "quantile_steps": steps}


def test_quantiles_of_layers_that_are_moved_together_are_those_of_each():
    """Scanned or not, of several lengths, of tokens of which all count or some, in three parts."""
    rng = np.random.default_rng(0)

    def scores(*shape, share, valid):
        values = rng.normal(size=shape).astype(np.float32)
        return quantiles.Scores(values, rng.random(shape) < 0.6 if valid else None, share, 0.5)

    sown = {
        "one": {"quantile": (scores(2, 8, 3, share=0.5, valid=False),)},
        "two": {"quantile": (scores(2, 8, 3, share=0.25, valid=True),)},
        "short": {"quantile": (scores(2, 4, 3, share=0.25, valid=False),)},
        "scanned": {"quantile": (scores(3, 2, 8, 3, share=0.125, valid=False),)},
    }
    state = {name: {"quantile": np.float32(2), "quantile_steps": np.int32(1)} for name in sown}
    state["two"] |= {"quantile_steps": np.int32(0), "seed": np.int32(7)}
    state["scanned"] = {"quantile": np.float32([1, 2, 3]), "quantile_steps": np.int32([1, 1, 0])}
    got = jax.device_get(jax.jit(quantiles.followed)(state, state, sown))

    def new(name, layer=...):
        (x,) = sown[name]["quantile"]
        counted = True if x.valid_BT is None else x.valid_BT[layer]
        return sorted_quantile(x.score_BT[layer][counted].ravel(), 1 - x.share)

    assert got["two"] == {"quantile": new("two"), "quantile_steps": 1, "seed": 7}
    for name in ("one", "short"):
        assert got[name]["quantile"] == np.float32(0.5) * (2 + new(name))
    expected = [0.5 * (1 + new("scanned", 0)), 0.5 * (2 + new("scanned", 1)), new("scanned", 2)]
    np.testing.assert_allclose(got["scanned"]["quantile"], expected, rtol=1e-6)
    assert got["scanned"]["quantile_steps"].tolist() == [2, 2, 1]


def by_document(fraction, segments_BT):
    call = Call(jnp.arange(segments_BT.shape[1])[None], segments_BT)
    return plans.Budget(fraction, segments_BT.shape[1], call.documents())


def test_documents_of_a_row_share_its_slots_to_the_last():
    """However the row is cut up, its documents get ceil(c T) slots in all, each in proportion."""
    rng = np.random.default_rng(0)
    length, fraction = 48, 0.25

    @families.jit
    def cut(scores_BT, segments_BT):
        plan = by_document(fraction, segments_BT).top(scores_BT, segments_BT > 0)
        return plans.selected(plan, length)

    for _ in range(20):
        starts_T = rng.random(length) < 0.2
        segments_T = np.cumsum(starts_T) + 1
        scores_T = rng.normal(size=length).astype(np.float32)
        routed_T = np.asarray(cut(scores_T[None], segments_T[None]))[0]
        assert routed_T.sum() == 12
        for document in np.unique(segments_T):
            inside_T = segments_T == document
            count = routed_T[inside_T].sum()
            assert abs(count - fraction * inside_T.sum()) < 1
            best_T = np.zeros(length, bool)
            best_T[np.flatnonzero(inside_T)[np.argsort(-scores_T[inside_T])[:count]]] = True
            np.testing.assert_array_equal(routed_T & inside_T, best_T)


# ---- the predictor -----------------------------------------------------------------------------


def np_predictor(x_BTD, p):
    h_BTF = x_BTD @ p["kernel_in"]
    return (h_BTF * sigmoid(h_BTF) @ p["kernel_out"])[..., 0]


def test_predictor_decides_and_learns_from_top_k():
    module, p = layer(
        depth_routing__causal="predictor",
        depth_routing__predictor_hidden=8,
        depth_routing__slack=2.0,
    )
    x_BTD = activations()
    logit_BT = np_predictor(x_BTD, p["predictor"])
    decided_BT = logit_BT > 0
    assert 0.1 < decided_BT.mean() < 0.9
    target_BT = np.stack([np_topk(score_T, LENGTH // 2) for score_T in x_BTD @ p["router"]])
    out_BTD, sown = run(module, p, x_BTD, selection="causal")
    for b in range(ROWS):
        np.testing.assert_allclose(
            out_BTD[b],
            np_layer(x_BTD[b], p, module.spec, decided_BT[b], np.arange(LENGTH), "sigmoid"),
            atol=2e-4,
        )
    loss = np.mean(np.logaddexp(0, logit_BT) - logit_BT * target_BT)
    np.testing.assert_allclose(sown["predictor_bce"], loss, rtol=1e-5)
    assert "router_bce" not in sown  # only what is asked for is trained
    np.testing.assert_allclose(sown["router/accuracy"], np.mean(decided_BT == target_BT), rtol=1e-5)


def test_predictor_computes_in_float32_on_accelerators_too():
    """They round the operands of products by default, which turns a thousandth of all decisions."""
    module = decisions.Predictor(8)
    x_BTD = jnp.zeros((1, 4, 16), jnp.bfloat16)
    lowered = (
        jax.jit(module.init_with_output)
        .trace(jax.random.key(0), x_BTD)
        .lower(lowering_platforms=("tpu",))
    )
    products = re.findall(r"dot_general.*", lowered.as_text())
    assert len(products) == 2 and all("[HIGHEST, HIGHEST]" in line for line in products)


def test_predictor_loss_trains_the_predictor_alone():
    module, p = layer(depth_routing__causal="predictor")
    x_BTD, call = activations(), Call(np.arange(LENGTH)[None], selection="train")

    def loss(p, x_BTD, call):
        return module.apply({"params": p}, x_BTD, call, mutable=["losses"])[1]["losses"][
            "predictor_bce"
        ][0]

    d_p, d_x_BTD = families.jit(jax.grad(loss, (0, 1)))(p, x_BTD, call)
    norms = {
        jax.tree_util.keystr(path): float(np.abs(leaf).max())
        for path, leaf in jax.tree_util.tree_leaves_with_path(d_p)
    }
    assert all((value > 0) == ("predictor" in path) for path, value in norms.items()), norms
    assert not np.any(d_x_BTD)


def test_several_decisions_are_trained_and_any_can_decide():
    module, p = layer(depth_routing__also_train=("predictor", "threshold"))
    state = {"state": {"quantile": np.float32(0.4), "quantile_steps": np.int32(9)}}
    x_BTD = activations()
    score_BT = x_BTD @ p["router"]
    decided = {
        "causal": score_BT > 0,
        "aux_loss": score_BT > 0,
        "predictor": np_predictor(x_BTD, p["predictor"]) > 0,
        "threshold": score_BT > 0.4,
    }
    assert module.spec.routing.trained == ("aux_loss", "predictor", "threshold")

    @families.jit
    def run_all(variables, x_BTD):
        results = {}
        for name in decided:
            call = Call(jnp.arange(LENGTH)[None], selection=name)
            results[name] = module.apply(variables, x_BTD, call, mutable=["losses", "stats"])
        return results

    results = run_all({"params": jax.tree.map(np.float32, p), **state}, x_BTD)
    for name, (out_BTD, sown) in results.items():
        changed_BT = np.any(np.asarray(out_BTD) != x_BTD, -1)
        np.testing.assert_array_equal(changed_BT, decided[name], err_msg=name)
        assert set(sown["losses"]) == {"router_bce", "predictor_bce"}
        assert {key.split("/")[0] for key in sown["stats"]} == {"router", "predictor", "threshold"}


# ---- the threshold -----------------------------------------------------------------------------


def train(module, variables, x_BTD, segment_ids_BT=None):
    """(out, state after the step)."""
    tokens = Call(jnp.arange(LENGTH)[None], segment_ids_BT)
    call = tokens.replace(train=True, selection="train")
    out_BTD, sown = module.apply(variables, x_BTD, call, mutable=[quantiles.COLLECTION])
    state = variables["state"]
    return out_BTD, quantiles.followed(state, state, sown[quantiles.COLLECTION])


def test_threshold_follows_the_quantile_and_then_decides():
    module, p = layer(
        depth_routing__causal="threshold",
        depth_routing__train_selection="threshold",
        depth_routing__threshold_warmup=2,
        depth_routing__threshold_decay=0.5,
        depth_routing__capacity=0.25,
        depth_routing__slack=2.0,
    )
    p = jax.tree.map(np.float32, p)
    step = families.jit(lambda state, x_BTD: train(module, {"params": p, "state": state}, x_BTD))
    state = {"quantile": np.float32(0), "quantile_steps": np.int32(0)}
    followed = None
    for i in range(4):
        x_BTD = activations(i)
        score_BT = x_BTD @ np.asarray(p["router"])
        falling = np.sort(score_BT.ravel())[::-1]
        above = ROWS * LENGTH // 4
        now = 0.5 * (falling[above - 1] + falling[above])
        routed_BT = np.stack([np_topk(score_T, LENGTH // 4) for score_T in score_BT])
        if i >= 2:  # after the warm-up, by the threshold as it was before this step
            passing_BT = score_BT > followed
            routed_BT = passing_BT & (np.cumsum(passing_BT, axis=1) <= LENGTH // 2)
        out_BTD, state = step(state, x_BTD)
        np.testing.assert_array_equal(np.any(np.asarray(out_BTD) != x_BTD, -1), routed_BT)
        followed = now if followed is None else 0.5 * followed + 0.5 * now
        np.testing.assert_allclose(state["quantile"], followed, rtol=1e-5)
        assert state["quantile_steps"] == i + 1
    # Evaluation leaves it alone.
    call = Call(np.arange(LENGTH)[None], selection="train")
    evaluated = families.jit(functools.partial(module.apply, mutable=True))
    sown = evaluated({"params": p, "state": state}, x_BTD, call)[1]
    assert "stats" in sown and quantiles.COLLECTION not in sown
    assert jax.device_get(sown["state"]) == jax.device_get(state)


def test_the_threshold_does_not_depend_on_padding():
    module, p = layer(depth_routing__causal="threshold", depth_routing__capacity=0.25)
    p, x_BTD = jax.tree.map(np.float32, p), activations()
    real_BT = np.arange(LENGTH)[None] < np.linspace(2, LENGTH, ROWS)[:, None]
    state = {"quantile": np.float32(0), "quantile_steps": np.int32(0)}
    step = families.jit(functools.partial(train, module))
    _, after = step({"params": p, "state": state}, x_BTD, real_BT.astype(np.int32))
    falling = np.sort((x_BTD @ p["router"])[real_BT])[::-1]
    above = len(falling) // 4
    expected = 0.5 * (falling[above - 1] + falling[above])
    np.testing.assert_allclose(after["quantile"], expected, rtol=1e-5)


# ---- keys and values of skipped tokens, the skip MLP -----------------------------------------


@pytest.mark.parametrize("window", [0, 5])
def test_skipped_tokens_are_seen_by_routed_ones(window):
    module, p = layer(depth_routing__kv_for_skipped=True, attention__window=window)
    b, x_BTD = module.spec.block, activations()
    out_BTD, _ = run(module, p, x_BTD)
    time = np.arange(LENGTH)
    visible_TS = time[None] <= time[:, None]
    if window:
        visible_TS &= time[:, None] - time[None] < window
    for x_TD, out_TD in zip(x_BTD.astype(np.float64), out_BTD, strict=True):
        score_T = x_TD @ p["router"]
        routed_T = np_topk(score_T, LENGTH // 2)
        h_TD = norm(x_TD, p["norm_attention"], b.norm, b.norm_eps)
        a_TD = np_attention(h_TD, p["attention"], b, time, visible_TS)
        y_TD = norm(x_TD + a_TD, p["norm_mlp"], b.norm, b.norm_eps)
        m_TD = np_mlp(y_TD, p["mlp"], b.mlp.activation)
        full_TD = x_TD + sigmoid(score_T)[:, None] * (a_TD + m_TD)
        np.testing.assert_allclose(out_TD, np.where(routed_T[:, None], full_TD, x_TD), atol=2e-4)


def test_skipped_tokens_take_the_skip_mlp():
    module, p = layer(depth_routing__skip_mlp=8)
    plain, x_BTD = layer()[0], activations()
    out_BTD, _ = run(module, p, x_BTD)
    routed_BTD, _ = run(plain, {k: v for k, v in p.items() if k != "skip_mlp"}, x_BTD)
    b = module.spec.block
    h_BTD = norm(x_BTD.astype(np.float64), p["skip_mlp"]["norm"], b.norm, b.norm_eps)
    through_BTD = x_BTD + np_mlp(h_BTD, p["skip_mlp"]["mlp"], b.mlp.activation)
    assert linear(h_BTD, p["skip_mlp"]["mlp"]["up"]).shape[-1] == 8
    skipped_BT = ~np.stack([np_topk(s, LENGTH // 2) for s in x_BTD @ p["router"]])
    np.testing.assert_allclose(
        out_BTD, np.where(skipped_BT[..., None], through_BTD, routed_BTD), atol=2e-4
    )


# ---- statistics --------------------------------------------------------------------------------


def test_statistics_by_hand():
    decided_BT = np.array([[1, 1, 1, 0], [0, 0, 0, 1]], bool)
    target_BT = np.array([[1, 0, 0, 1], [0, 0, 1, 1]], bool)
    run_BT = np.array([[1, 1, 0, 0], [0, 0, 0, 1]], bool)  # two slots

    @families.jit
    def values(decided_BT, run_BT, target_BT):
        got = decisions.statistics(decided_BT, run_BT, target_BT, None, None)
        return {name: mean.value() for name, mean in got.items()}

    got = values(decided_BT, run_BT, target_BT)
    expected = {
        "accuracy": 4 / 8,
        "precision": 2 / 4,
        "recall": 2 / 4,
        "decided_fraction": 4 / 8,
        "overflow_fraction": 1 / 8,
        "pairs_fraction": (2 * 3 / 2 + 1) / 2 / (4 * 5 / 2),
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, err_msg=name)


@pytest.mark.parametrize("window", [0, 5])
def test_realised_flops_of_as_many_tokens_as_planned_are_those_planned(window):
    """A token sees itself however few are routed."""
    model = families.make(
        {
            "depth_routing.kind": "mod",
            "depth_routing.capacity": 0.25,
            "attention.window": window,
        }
    )
    shares = {"layers/block_1": (4 / 16, (4 * 5) / (16 * 17))}
    assert model.ledger(16, shares=shares).nominal == pytest.approx(model.ledger(16).nominal)
