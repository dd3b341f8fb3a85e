"""Mixture of Experts: the layer against sums in float64, prefixes, precision, meshes, cost."""

import dataclasses
import functools
import logging
import math

import families
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from held_out import evaluate
from refusals import refused
from scipy.special import expit, softmax

from efx import models, sampling
from efx.layers import flops, selection
from efx.layers.config import MoEConfig
from efx.layers.moe import (
    MoE,
    largest_indices,
    sum_over_choices,
    sum_over_experts,
    warn_if_router_is_untrained,
)
from efx.layers.selection import HEADROOM
from efx.layers.token_context import CacheView, TokenContext
from efx.parallel import sharding

B, T, D, F = 3, 32, 12, 10
# Padding behind the tokens of a row, before them and between them.
VALID_BT = np.array([np.arange(T) < 29, np.arange(T) >= 5, np.arange(T) % 7 != 2])


def layer(activation="swiglu", **changes):
    """(module, parameters N(0, 0.5^2))."""
    default = MoEConfig(num_experts=4, capacity_factor=1.0, capacity=0.3, slack=1.0)
    config = dataclasses.replace(default, **changes)
    module = MoE(F, activation, True, 0.5, 0.5, jnp.float32, config)
    call = TokenContext(np.arange(T)[None])
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), inputs(), call))["params"]
    rng = np.random.default_rng(1)
    return module, jax.tree.map(
        lambda leaf: np.float32(rng.normal(0, 0.5, leaf.shape)), nn.unbox(shapes)
    )


def inputs():
    return np.float32(np.random.default_rng(0).normal(size=(B, T, D)))


@functools.cache
def compiled(module):
    def run(params, x_BTD, call):
        return module.apply({"params": params}, x_BTD, call, mutable=["losses", "stats"])

    return families.jit(run)


def apply(module, params, selection="causal"):
    """(output, {name: loss or statistic}); invalid tokens have negative positions."""
    positions_BT = np.where(VALID_BT, np.cumsum(VALID_BT, axis=1) - 1, -1)
    call = TokenContext(np.int32(positions_BT), selection=selection)
    y_BTD, sown = compiled(module)(params, inputs(), call)
    sown = {path[-2].key: float(value) for path, value in jax.tree_util.tree_leaves_with_path(sown)}
    return np.asarray(y_BTD), sown


# ---- the layer in float64 ----------------------------------------------------------------------


def mlp(p, activation="swiglu", index=...):
    """The MLP of all inputs [B, T, D], or that of one expert."""
    p = jax.tree.map(lambda leaf: np.float64(leaf[index]), p)
    return formulas.mlp(np.float64(inputs()), p, activation)


def sum_of_experts(params, weight_BTE, activation="swiglu"):
    experts = range(weight_BTE.shape[-1])
    y_EBTD = [mlp(params["experts"], activation, e) for e in experts]
    return np.einsum("BTE,EBTD->BTD", weight_BTE, y_EBTD)


def admitted(selected_BTE, rate):
    """The selected tokens under the causal limit, one after the other."""
    admitted_BTE, valid_BT = np.zeros_like(selected_BTE), np.cumsum(VALID_BT, axis=1)
    for b, t, e in np.argwhere(selected_BTE):
        limit = math.ceil(round(rate * valid_BT[b, t], 6)) + HEADROOM
        admitted_BTE[b, t, e] = admitted_BTE[b, :t, e].sum() < limit
    return admitted_BTE


def token_choice(c, params, activation):
    """Output, losses and statistics."""
    choices = c.num_experts + c.num_noop
    logits_BTE = np.float64(inputs()) @ np.float64(params["router"])
    p_BTE = softmax(logits_BTE, axis=-1)
    chosen_BTE = np.argsort(np.argsort(-p_BTE)) < c.top_k
    weight_BTE = p_BTE * chosen_BTE
    if c.renormalise:
        weight_BTE /= weight_BTE.sum(-1, keepdims=True)
    chosen_BTE = chosen_BTE & VALID_BT[..., None]
    selected_BTE, weight_BTE = (x[..., : c.num_experts] for x in (chosen_BTE, weight_BTE))
    admitted_BTE = admitted(selected_BTE, c.top_k * c.capacity_factor / choices)
    y_BTD = sum_of_experts(params, weight_BTE * admitted_BTE, activation)
    if c.num_shared:
        y_BTD += mlp(params["shared"], activation)
    p, load_E = p_BTE[VALID_BT], chosen_BTE.sum((0, 1)) / chosen_BTE.sum()
    computed = admitted_BTE.sum() / chosen_BTE.sum()
    mean_weight = (weight_BTE * admitted_BTE).sum() / admitted_BTE.sum()
    return y_BTD, {
        **({} if c.renormalise else {"moe/weight": mean_weight}),
        "load_balance": choices * (load_E * p.mean(0)).sum(),
        "router_z": np.mean(np.log(np.exp(logits_BTE[VALID_BT]).sum(-1)) ** 2),
        "moe/overflow_fraction": load_E[: c.num_experts].sum() - computed,
        "moe/entropy": -(p * np.log(p)).sum(-1).mean(),
        "moe/max_load": choices * load_E[: c.num_experts].max(),
        "moe/min_load": choices * load_E[: c.num_experts].min(),
        "moe/noop_fraction": load_E[c.num_experts :].sum(),
        "moe/computed_fraction": computed,
    }


def expert_choice(c, params, selection):
    logits_BTE = np.float64(inputs()) @ np.float64(params["router"])
    valid_BT1, slots = VALID_BT[..., None], math.ceil(round(c.capacity * T, 6))
    order_BTE = np.argsort(-np.where(valid_BT1, logits_BTE, -np.inf), axis=1)
    top_BTE = (np.argsort(order_BTE, axis=1) < slots) & valid_BT1
    selected_BTE = (logits_BTE > 0) & valid_BT1
    admitted_BTE = admitted(selected_BTE, c.capacity * c.slack)
    computed_BTE = top_BTE if selection == "train" else admitted_BTE
    gate_BTE, load_E = expit(logits_BTE), selected_BTE.sum((0, 1))
    g, top, selected = gate_BTE[VALID_BT], top_BTE[VALID_BT], selected_BTE[VALID_BT]
    mean_weight = (gate_BTE * computed_BTE).sum() / computed_BTE.sum()
    return sum_of_experts(params, gate_BTE * computed_BTE), {
        **({"moe/weight": mean_weight} if selection == "causal" else {}),
        "expert_bce": -np.log(np.where(top, g, 1 - g)).mean(),
        "moe/overflow_fraction": 1 - admitted_BTE.sum() / load_E.sum(),
        "moe/entropy": -(g * np.log(g) + (1 - g) * np.log(1 - g)).mean(),
        "moe/max_load": load_E.max() / load_E.mean(),
        "moe/min_load": load_E.min() / load_E.mean(),
        "moe/decided_fraction": load_E.mean() / VALID_BT.sum(),
        "moe/accuracy": np.mean(top == selected),
        "moe/unserved_fraction": 1 - computed_BTE.any(-1).sum() / VALID_BT.sum(),
    }


def assert_same(got, expected):
    np.testing.assert_allclose(got[0], expected[0], atol=1e-4)
    assert got[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
    assert expected[1]["moe/overflow_fraction"] > 0


@pytest.mark.parametrize(
    "activation, changes",
    [
        ("swiglu", {"capacity_factor": 0.7}),
        ("gelu", {"top_k": 1, "renormalise": False, "capacity_factor": 0.4}),
        ("swiglu", {"top_k": 3, "num_shared": 2, "num_noop": 3, "capacity_factor": 0.7}),
    ],
)
def test_token_choice_by_hand(activation, changes):
    module, params = layer(activation, **changes)
    assert_same(apply(module, params), token_choice(module.config, params, activation))


@pytest.mark.parametrize("selection, slack", [("train", 1.0), ("causal", 1.0), ("causal", 1.2)])
def test_expert_choice_by_hand(selection, slack):
    module, params = layer(router="expert_choice", slack=slack)
    got = apply(module, params, selection)
    assert_same(got, expert_choice(module.config, params, selection))


def test_off_leaves_out_experts_only_beside_no_op_experts():
    module, params = layer(num_noop=2, num_shared=1)
    np.testing.assert_allclose(apply(module, params, "off")[0], mlp(params["shared"]), atol=1e-4)
    module, params = layer()
    y_BTD, off_BTD = (apply(module, params, selection)[0] for selection in ("causal", "off"))
    np.testing.assert_array_equal(off_BTD, y_BTD)


@pytest.mark.parametrize("router", ["token_choice", "expert_choice"])
def test_gradients_of_a_sum_of_experts_by_hand(router):
    """Of weight * (x W_e), summed over the computed experts of each token, in float64."""
    rng = np.random.default_rng(2)
    w_EDD, score_BTE = rng.normal(size=(4, D, D)), rng.normal(size=(B, T, 4))
    cotangent_BTD, x_BTD = rng.normal(size=(B, T, D)), np.float64(inputs())
    expert_BTK = np.argsort(-score_BTE)[..., :2]
    chosen_BTE = score_BTE > 0
    if router == "token_choice":
        chosen_BTE = np.any(expert_BTK[..., None] == np.arange(4), axis=2)
    computed_BTE = chosen_BTE & (rng.random((B, T, 4)) < 0.7)  # the others are dropped
    index_EBC = jax.vmap(selection.compact, (2, None))(computed_BTE, T - 2)  # with unused slots

    def total(w_EDD, x_BTD, score_BTE):
        def experts(x_ECD):
            return jnp.einsum("ECD,EDF->ECF", x_ECD, w_EDD)

        if router == "expert_choice":
            y_BTD = sum_over_experts(experts, x_BTD, index_EBC, score_BTE)
        else:
            is_choice_BTKE = expert_BTK[..., None] == np.arange(4)
            weight_BTK = jnp.sum(jnp.where(is_choice_BTKE, score_BTE[:, :, None], 0), axis=-1)
            y_BTD = sum_over_choices(experts, x_BTD, index_EBC, is_choice_BTKE, weight_BTK)
        return jnp.sum(y_BTD * cotangent_BTD)

    got = families.jit(jax.grad(total, argnums=(0, 1, 2)))(w_EDD, x_BTD, score_BTE)
    weight_BTE = score_BTE * computed_BTE
    expected = (
        np.einsum("BTE,BTD,BTF->EDF", weight_BTE, x_BTD, cotangent_BTD),
        np.einsum("BTE,EDF,BTF->BTD", weight_BTE, w_EDD, cotangent_BTD),
        np.einsum("BTE,BTD,EDF,BTF->BTE", computed_BTE, x_BTD, w_EDD, cotangent_BTD),
    )
    families.assert_trees_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_router_learns_from_the_main_loss_unless_weights_are_one(caplog):
    """The one case without gradient, renormalised top-1 experts, is warned of."""
    warn_if_router_is_untrained.cache_clear()
    for top_k, renormalise in [(2, True), (1, False), (1, True)]:
        module, params = layer(top_k=top_k, renormalise=renormalise)
        call = TokenContext(np.arange(T)[None], train=True)

        def loss(params, module=module, call=call):
            return jnp.sum(module.apply({"params": params}, inputs(), call) ** 2)

        with caplog.at_level(logging.WARNING):
            learns = np.abs(families.jit(jax.grad(loss))(params)["router"]).max() > 1e-3
        warned = "renormalised top-1 experts" in caplog.text
        assert learns == (not warned) == ((top_k, renormalise) != (1, True))


def test_largest_indices_are_those_of_a_stable_sort():
    scores = np.float32(np.random.default_rng(0).integers(0, 3, (50, 6)))
    for count in (1, 3, 6):
        expected = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
        np.testing.assert_array_equal(largest_indices(scores, count), expected)


@pytest.mark.parametrize(
    "router, rows, calls",
    [
        ("token_choice", B, 0),
        ("token_choice", B, 1),  # in rounds
        ("token_choice", 1, T),  # the chosen experts of each token
        ("expert_choice", B, 0),
        ("expert_choice", B, T),  # all experts
    ],
)
def test_a_sum_of_experts_in_bfloat16_is_rounded_once(router, rows, calls):
    """Each of nine experts and a shared one returns a constant vector, so a float32 layer has the
    same terms. Products and sums in bfloat16 would be 6 to 70 times as far from it as one rounding.

    Args:
      calls: number of chunks to decode; 0: no cache.
    """
    k, num_experts = (9, 10) if router == "token_choice" else (9, 9)
    changes = dict(num_experts=num_experts, top_k=k, capacity_factor=num_experts / k, capacity=1.0)
    module, params = layer("gelu", router=router, num_shared=1, **changes)
    for mlp in ("experts", "shared"):
        params[mlp]["down"]["kernel"] *= 0.0
        params[mlp]["down"]["bias"] = np.float32(jnp.bfloat16(params[mlp]["down"]["bias"]))
    params["router"] = np.abs(params["router"])  # logits > 0: all experts select all tokens
    x_BTD = jnp.abs(inputs()[:rows]).astype(jnp.bfloat16)
    exact_BTD = compiled(module)(params, x_BTD, TokenContext(np.arange(T)[None]))[0]
    rounded = module.clone(dtype=jnp.bfloat16)

    @families.jit
    def run(params, cache, x_BTD, positions_BT):
        call = TokenContext(positions_BT, cache=CacheView(size=T) if calls else None)
        return rounded.apply({"params": params, **cache}, x_BTD, call, mutable=["cache"])

    cache, got = {}, []
    for places in np.split(np.arange(T, dtype=np.int32), calls or 1):
        y_BTD, cache = run(params, cache, x_BTD[:, places], np.tile(places, (rows, 1)))
        got.append(np.asarray(y_BTD, np.float64))
        assert y_BTD.dtype == jnp.bfloat16
    # Half of the last of 8 bits, and the float32 rounding of terms that cancel.
    bound_BTD = np.abs(exact_BTD) * 2.0**-8 + 1e-5
    assert np.all(np.abs(np.concatenate(got, axis=1) - exact_BTD) <= bound_BTD)


# ---- in a model --------------------------------------------------------------------------------


def test_every_second_block():
    model = families.make({"mlp.kind": "moe", "mlp.moe.every": 2, "depth": 4})
    assert [spec.blocks[0].moe is not None for spec in model.specs()] == [False, True, False, True]
    narrow = families.make({"mlp.kind": "moe", "mlp.moe.every": 2, "mlp.moe.expert_hidden": 24})
    assert [spec.blocks[0].hidden for spec in narrow.specs()] == [96, 24]


def test_experts_are_split_over_their_axis():
    mesh = sharding.make_mesh(dict(data=2, fsdp=2, tensor=1, expert=2, sequence=1))
    boxed = models.variable_shapes(families.build("moe"))["params"]
    specs = sharding.tree_shardings(boxed, mesh, sharding.DEFAULT_RULES)
    experts = specs["layers"]["block_0"]["mlp"]["experts"]
    assert experts["up"]["kernel"].spec == jax.P("expert", "fsdp", "tensor")
    assert experts["down"]["kernel"].spec == jax.P("expert", "tensor", "fsdp")
    # Outside of experts the axis splits what the axis fsdp does.
    attention = specs["layers"]["block_0"]["attention"]
    assert attention["query"]["kernel"].spec == jax.P(("fsdp", "expert"), "tensor")
    odd = families.make({"mlp.kind": "moe", "mlp.moe.num_experts": 3})
    boxed = models.variable_shapes(odd)["params"]
    refused(
        lambda: sharding.tree_shardings(boxed, mesh, sharding.DEFAULT_RULES), "experts/down/kernel"
    )


def test_remat_does_not_exchange_tokens_again():
    """Policies that keep the results of products keep exchanged tokens."""
    axes = dict(data=1, fsdp=1, tensor=1, expert=2, sequence=1)
    mesh = sharding.make_mesh(axes, jax.devices()[:2])
    model = families.make({**families.FAMILIES["moe"].changes, "depth": 1})
    params = families.random_params(model)

    def exchanges(remat):
        loss = families.loss_fn(models.changed(model, remat=remat))
        with sharding.use(mesh, sharding.DEFAULT_RULES):
            gradient = jax.jit(jax.grad(loss)).trace(params, families.tokens())
        return str(gradient.jaxpr).count(" all_to_all[")

    assert 0 < exchanges("none") == exchanges("dots") < exchanges("full")


@pytest.mark.parametrize("batch, experts", [(1, 2), (3, 6), (4, 8)])
def test_a_step_of_one_token_runs_few_experts(batch, experts):
    """Of 8, two a row, as long as that is fewer than all on all rows."""
    model = families.make({"mlp.kind": "moe", "depth": 1, "mlp.moe.expert_hidden": 24})
    cache, params = models.init_cache(model, batch, 16), families.random_params(model)

    def step(tokens_BT):
        return model.apply(
            {"params": params, "cache": cache},
            tokens_BT,
            tokens_BT,
            decode=True,
            cache_size=16,
            mutable=["cache"],
        )

    counted = flops.jaxpr_flops(step, np.zeros((batch, 1), np.int32))
    parts = model.ledger(1).nominal
    rest = batch * (parts["attention_projections"] + parts["moe_router"])
    rest += batch * (flops.matmul(1, 32, model.padded_vocab) + flops.attention_scores(16, 4, 8))
    rows = experts if experts < 8 else 8 * batch
    assert counted - rest == rows * 3 * flops.matmul(1, 32, 24)


def test_a_sampler_counts_the_overflow_of_experts():
    """A router that prefers two experts, each with slots for half of the tokens."""
    model = families.make(
        {"mlp.kind": "moe", "depth": 1, "mlp.moe.num_experts": 4, "mlp.moe.capacity_factor": 1.0},
        context=24,
    )
    params = families.random_params(model)
    params["layers"]["block_0"]["norm_mlp"]["scale"] *= 0.0
    sampler = sampling.Sampler(model, temperature=0.0)
    list(sampler.tokens({"params": params}, [[1, 2, 3]], max_new_tokens=21, seeds=[0]))
    read = sampler.stats["new_tokens"] + 2 + 1  # the last one is read, too
    assert sampler.stats["expert_overflow"] == 2 * (read - 12 - HEADROOM)
    assert sampler.stats["expert_choices"] == 2 * read


def test_flops_of_no_ops_are_counted_by_a_measured_share():
    """Not as if routers chose no-ops as often as experts."""
    changes = families.FAMILIES["mode_integrated"].changes  # two no-ops beside four experts

    def model(share):
        return families.make({**changes, "mlp.moe.computed_fraction": share})

    def mlp(model):
        return model.ledger(16).nominal["mlp"]

    assert mlp(model(2 / 3)) == pytest.approx(mlp(families.make(changes)))
    assert mlp(model(0.25)) == pytest.approx(mlp(model(1.0)) / 4)
    assert flops.executed(model(0.25), 16) == flops.executed(model(1.0), 16)


@pytest.mark.parametrize(
    "name", families.rows(["moe_expert_choice", "mode_integrated"], {"moe_expert_choice"})
)
def test_evaluation_reports_experts(name):
    (rows,) = evaluate(families.build(name), families.params_of(name), {}, (0, 1))
    blocks = [rows[f"eval/moe/overflow_fraction/block_{i}"] for i in (0, 1)]
    assert rows["eval/moe/overflow_fraction"] == pytest.approx(np.mean(blocks))
    if name == "moe_expert_choice":
        assert rows["eval/loss_topk"] != rows["eval/loss"] and "eval/moe/accuracy" in rows
        return
    computed = rows["eval/moe/computed_fraction"]
    not_computed = rows["eval/moe/noop_fraction"] + rows["eval/moe/overflow_fraction"]
    assert computed == pytest.approx(1 - not_computed, abs=1e-6)
    changes = {**families.FAMILIES[name].changes, "mlp.moe.computed_fraction": computed}
    nominal = families.make(changes).ledger(families.LENGTH).nominal_per_token
    assert rows["eval/moe/flops_per_token"] == pytest.approx(nominal)
