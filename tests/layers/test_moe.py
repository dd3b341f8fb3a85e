"""Mixture of Experts: the layer against a loop over tokens, prefixes, precision, meshes, cost."""

import dataclasses
import functools
import logging
import math

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refused

from efx import flops, models, sample, sharding
from efx.configs import common
from efx.evaluate import Evaluator
from efx.layers.call import CacheView, Call
from efx.layers.config import MoEConfig
from efx.layers.moe import MoE, largest_indices, warn_if_router_is_untrained
from efx.routing.selection import HEADROOM

B, T, D, F = 3, 32, 12, 10
# Padding behind the tokens of a row, before them and between them.
VALID = np.array([np.arange(T) < 29, np.arange(T) >= 5, np.arange(T) % 7 != 2])


def layer(activation="swiglu", **changes):
    """(module, parameters N(0, 0.5^2))."""
    default = MoEConfig(num_experts=4, capacity_factor=1.0, capacity=0.3, slack=1.0)
    config = dataclasses.replace(default, **changes)
    module = MoE(config, F, activation, True, 0.5, 0.5, jnp.float32)
    call = Call(np.arange(T)[None])
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
    positions_BT = np.where(VALID, np.cumsum(VALID, axis=1) - 1, -1)
    call = Call(np.int32(positions_BT), selection=selection)
    y_BTD, sown = compiled(module)(params, inputs(), call)
    sown = {path[-2].key: float(value) for path, value in jax.tree_util.tree_leaves_with_path(sown)}
    return np.asarray(y_BTD), sown


# ---- by a loop over tokens ---------------------------------------------------------------------


def mlp(x, p, activation="swiglu"):
    def linear(x, p):
        return x @ np.float64(p["kernel"]) + np.float64(p["bias"])

    if activation == "swiglu":
        gate = linear(x, p["gate"])
        return linear(gate / (1 + np.exp(-gate)) * linear(x, p["up"]), p["down"])
    h = linear(x, p["up"])
    return linear(0.5 * h * (1 + np.vectorize(math.erf)(h / 2**0.5)), p["down"])


def expert(params, e):
    return jax.tree.map(lambda leaf: leaf[e], params["experts"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def limit(rate, count):
    return math.ceil(round(rate * count, 6)) + HEADROOM


def token_choice(c, params, activation):
    """Output, losses and statistics, token by token."""
    choices = c.num_experts + c.num_noop
    rate = c.top_k * c.capacity_factor / choices
    y_BTD, probs, z, entropy, dropped = np.zeros((B, T, D)), [], [], [], 0
    load_E = np.zeros(choices)
    for b in range(B):
        admitted_E = np.zeros(choices, int)
        for t in range(T):
            x = np.float64(inputs()[b, t])
            if c.num_shared:
                y_BTD[b, t] += mlp(x, params["shared"], activation)
            if not VALID[b, t]:
                continue
            logits = x @ np.float64(params["router"])
            p = np.exp(logits) / np.exp(logits).sum()
            probs.append(p)
            z.append(np.log(np.exp(logits).sum()) ** 2)
            entropy.append(-(p * np.log(p)).sum())
            chosen = np.argsort(-p)[: c.top_k]
            load_E[chosen] += 1
            for e in chosen[chosen < c.num_experts]:
                if admitted_E[e] == limit(rate, VALID[b, : t + 1].sum()):
                    dropped += 1
                    continue
                admitted_E[e] += 1
                weight = p[e] / p[chosen].sum() if c.renormalise else p[e]
                y_BTD[b, t] += weight * mlp(x, expert(params, e), activation)
    load_E, all_choices = load_E / load_E.sum(), c.top_k * len(probs)
    return y_BTD, {
        "load_balance": choices * (load_E * np.mean(probs, axis=0)).sum(),
        "router_z": np.mean(z),
        "moe/dropped_fraction": dropped / all_choices,
        "moe/entropy": np.mean(entropy),
        "moe/max_load": choices * load_E[: c.num_experts].max(),
        "moe/noop_fraction": load_E[c.num_experts :].sum(),
        "moe/computed_fraction": load_E[: c.num_experts].sum() - dropped / all_choices,
    }


def expert_choice(c, params, selection):
    y_BTD, served_BT = np.zeros((B, T, D)), np.zeros((B, T), bool)
    bce, entropy, correct, dropped, load_E = [], [], [], 0, np.zeros(c.num_experts)
    for b in range(B):
        logits_TE = np.float64(inputs()[b]) @ np.float64(params["router"])
        valid = np.flatnonzero(VALID[b])
        for e in range(c.num_experts):
            logits = logits_TE[:, e]
            slots = math.ceil(round(c.capacity * T, 6))
            top = valid[np.argsort(-logits[valid], kind="stable")[:slots]]
            decided, admitted = valid[logits[valid] > 0], []
            for t in decided:
                if len(admitted) < limit(c.capacity * c.slack, VALID[b, : t + 1].sum()):
                    admitted.append(t)
            dropped += len(decided) - len(admitted)
            load_E[e] += len(decided)
            for t in valid:
                g = sigmoid(logits[t])
                bce.append(-np.log(g if t in top else 1 - g))
                entropy.append(-g * np.log(g) - (1 - g) * np.log(1 - g))
                correct.append((t in top) == (t in decided))
            for t in top if selection == "train" else admitted:
                served_BT[b, t] = True
                y_BTD[b, t] += sigmoid(logits[t]) * mlp(inputs()[b, t], expert(params, e))
    return y_BTD, {
        "expert_bce": np.mean(bce),
        "moe/dropped_fraction": dropped / load_E.sum(),
        "moe/entropy": np.mean(entropy),
        "moe/max_load": load_E.max() / load_E.mean(),
        "moe/decided_fraction": load_E.mean() / VALID.sum(),
        "moe/accuracy": np.mean(correct),
        "moe/unserved_fraction": 1 - served_BT.sum() / VALID.sum(),
    }


def assert_same(got, expected):
    np.testing.assert_allclose(got[0], expected[0], atol=1e-4)
    assert got[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
    assert expected[1]["moe/dropped_fraction"] > 0


@pytest.mark.parametrize(
    "activation, changes",
    [
        ("swiglu", {"capacity_factor": 0.7}),
        ("gelu", {"top_k": 1, "renormalise": False, "capacity_factor": 0.4}),
        ("swiglu", {"top_k": 3, "num_shared": 2, "num_noop": 3, "capacity_factor": 0.7}),
    ],
)
def test_token_choice_equals_the_loop(activation, changes):
    module, params = layer(activation, **changes)
    assert_same(apply(module, params), token_choice(module.config, params, activation))


@pytest.mark.parametrize("selection, slack", [("train", 1.0), ("causal", 1.0), ("causal", 1.2)])
def test_expert_choice_equals_the_loop(selection, slack):
    module, params = layer(router="expert_choice", slack=slack)
    got = apply(module, params, selection)
    assert_same(got, expert_choice(module.config, params, selection))


def test_off_leaves_out_experts_only_beside_no_op_experts():
    module, params = layer(num_noop=2, num_shared=1)
    shared_BTD = mlp(inputs(), params["shared"])
    np.testing.assert_allclose(apply(module, params, "off")[0], shared_BTD, atol=1e-4)
    module, params = layer()
    y_BTD, off_BTD = (apply(module, params, selection)[0] for selection in ("causal", "off"))
    np.testing.assert_array_equal(off_BTD, y_BTD)


def test_the_router_learns_from_the_main_loss_unless_weights_are_one(caplog):
    """The one case without gradient, renormalised top-1 experts, is warned of."""
    warn_if_router_is_untrained.cache_clear()
    for top_k, renormalise in [(2, True), (1, False), (1, True)]:
        module, params = layer(top_k=top_k, renormalise=renormalise)
        call = Call(np.arange(T)[None], train=True)

        @families.jit
        def gradient(params, module=module, call=call):
            return jax.grad(
                lambda params: jnp.sum(module.apply({"params": params}, inputs(), call) ** 2)
            )(params)["router"]

        with caplog.at_level(logging.WARNING):
            learns = np.abs(gradient(params)).max() > 1e-3
        warned = "renormalised top-1 experts" in caplog.text
        assert learns == (not warned) == ((top_k, renormalise) != (1, True))


@pytest.mark.parametrize("router", ["token_choice", "expert_choice"])
def test_sums_do_not_depend_on_the_order_of_a_scatter(router):
    """No two updates of a scatter have the same index, and in bfloat16 sums are float32."""
    module, params = layer(router=router)
    module, call = module.clone(dtype=jnp.bfloat16), Call(np.arange(T)[None], selection="train")

    def loss(params, x_BTD):
        y_BTD = module.apply({"params": params}, x_BTD, call)
        return jnp.sum(y_BTD.astype(jnp.float32) ** 2)

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, jnp.bfloat16(inputs()))
    scatters = [e for e in families.equations(traced.jaxpr) if "scatter" in e.primitive.name]
    assert scatters and all(each.params["unique_indices"] for each in scatters)


largest = families.jit(largest_indices, static_argnums=1)


@settings(deadline=None, max_examples=20)
@given(
    hnp.arrays(np.float32, (3, 6), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0])),
    st.integers(1, 6),
)
def test_largest_indices_are_those_of_a_stable_sort(scores, count):
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(largest(scores, count), expected)


@pytest.mark.parametrize(
    "router, rows, decode, calls",
    [
        ("token_choice", B, False, 1),
        ("token_choice", B, True, 1),  # in rounds
        ("token_choice", 1, True, T),  # the chosen experts of each token
        ("expert_choice", B, False, 1),
        ("expert_choice", B, True, T),  # all experts
    ],
)
def test_a_sum_of_experts_in_bfloat16_is_rounded_once(router, rows, decode, calls):
    """Each of 9 experts and a shared one gives a constant vector, so that the exact sum is known.
    Products and sums in bfloat16 would be 6 to 70 times as far from it as one rounding."""
    k, num_experts = (9, 10) if router == "token_choice" else (9, 9)
    changes = dict(num_experts=num_experts, top_k=k, capacity_factor=num_experts / k, capacity=1.0)
    module, params = layer("gelu", router=router, num_shared=1, **changes)
    module = module.clone(dtype=jnp.bfloat16)
    for mlp in ("experts", "shared"):
        params[mlp]["down"]["kernel"] *= 0.0
    if router == "expert_choice":  # an expert serves no token that it does not want
        params["router"] = np.abs(params["router"])
    x_BTD = jnp.abs(inputs()[:rows]).astype(jnp.bfloat16)
    bias_ED, shared_D = (
        np.asarray(jnp.asarray(params[mlp]["down"]["bias"]).astype(jnp.bfloat16), np.float64)
        for mlp in ("experts", "shared")
    )
    logits_BTE = np.asarray(x_BTD, np.float64) @ np.float64(params["router"])
    weight_BTE = sigmoid(logits_BTE)
    if router == "token_choice":
        chosen_BTE = logits_BTE > np.sort(logits_BTE)[..., :1]
        weight_BTE = np.where(chosen_BTE, np.exp(logits_BTE), 0)
        weight_BTE /= weight_BTE.sum(-1, keepdims=True)
    exact_BTD = weight_BTE @ bias_ED + shared_D

    @families.jit
    def call(cache, x_BTD, positions_BT):
        view = CacheView(size=T) if decode else None
        some = Call(positions_BT, cache=view)
        return module.apply({"params": arrays, **cache}, x_BTD, some, mutable=["cache"])

    arrays, cache, got = jax.tree.map(jnp.asarray, params), {}, []
    for places in np.split(np.arange(T, dtype=np.int32), calls):
        y, cache = call(cache, x_BTD[:, places], np.tile(places, (rows, 1)))
        got.append(np.asarray(y, np.float64))
        assert y.dtype == jnp.bfloat16
    # Half of the place of the last of 8 bits, and what float32 makes of terms that cancel.
    bound_BTD = np.abs(exact_BTD) * 2.0**-8 + 1e-5
    assert np.all(np.abs(np.concatenate(got, axis=1) - exact_BTD) <= bound_BTD)


# ---- in a model --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp.moe.num_experts": 8, "mlp.moe.num_shared": 1, "mlp.moe.capacity_factor": 0.5},
        {"mlp.moe.router": "expert_choice", "mlp.moe.capacity": 0.2, "mlp.moe.slack": 1.0},
    ],
)
def test_logits_of_a_prefix_depend_on_its_tokens_alone(changes):
    """Not on the row's length, batch mates, the size of the cache or the chunks of the prompt.
    Parameters are N(0, 0.2^2), and experts drop tokens."""
    changes = {"mlp.kind": "moe", "mlp.moe.num_experts": 4, "mlp.moe.expert_hidden": 24, **changes}
    model, prefix = families.make(changes, context=96), 40
    params, tokens_BT = families.random_params(model), families.tokens(batch=3, length=96)
    forward = families.jit(lambda tokens_BT: model.apply({"params": params}, tokens_BT))
    long_BTV = np.asarray(forward(tokens_BT))[:, :prefix]

    def assert_equal(logits_BTV, rows=slice(None)):
        np.testing.assert_allclose(logits_BTV, long_BTV[rows], atol=1e-4)

    assert_equal(forward(tokens_BT[:, :prefix]))
    assert_equal(forward(tokens_BT[1:2, :prefix]), slice(1, 2))
    for batch, cache_size, chunk in [(3, 48, 1), (1, 96, 1), (3, 96, 7), (3, 48, 16), (3, 96, 40)]:
        cache = models.init_cache(model, batch, cache_size)
        ends_B = np.full(batch, prefix)
        calls = families.chunks(ends_B, ends_B, chunk)
        step = families.decoder(model, {"params": params}, cache_size)
        logits_BTV, cache = families.read(step, cache, tokens_BT[:batch, :prefix], calls)
        assert_equal(logits_BTV, slice(batch))
        assert all(np.all(block["mlp"]["dropped"] > 0) for block in cache["layers"].values())


def test_every_second_block():
    model = families.make({"mlp.kind": "moe", "mlp.moe.every": 2, "depth": 4})
    assert [spec.block.moe is not None for spec in model.specs()] == [False, True, False, True]
    narrow = families.make({"mlp.kind": "moe", "mlp.moe.every": 2, "mlp.moe.expert_hidden": 24})
    assert [spec.block.hidden for spec in narrow.specs()] == [96, 24]


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


def test_a_sampler_counts_choices_that_experts_drop():
    """A router that prefers two experts, each with slots for half of the tokens."""
    model = families.make(
        {"mlp.kind": "moe", "depth": 1, "mlp.moe.num_experts": 4, "mlp.moe.capacity_factor": 1.0},
        context=24,
    )
    params = families.random_params(model)
    params["layers"]["block_0"]["norm_mlp"]["scale"] *= 0.0
    sampler = sample.Sampler(model, temperature=0.0)
    list(sampler.tokens({"params": params}, [[1, 2, 3]], max_new_tokens=21, seeds=[0]))
    read = sampler.stats["new_tokens"] + 2 + 1  # the last one is read, too
    assert sampler.stats["expert_overflow"] == 2 * (read - 12 - HEADROOM)
    assert sampler.stats["expert_choices"] == 2 * read


class Held:
    """Two batches of a held-out split."""

    def eval_batches(self, batch_size, max_batches, rows):
        for seed in (0, 1):
            tokens = np.asarray(families.tokens(seed))
            weights = np.ones(tokens.shape, np.float32)
            batch = {"inputs": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}
            yield {name: x[rows] for name, x in batch.items()}

    def bytes_per_token(self, split):
        return 1.0

    def scored_tokens(self, split):
        return 2 * families.BATCH * families.LENGTH


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
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    config = common.base()
    config.evaluate.batch_size = families.BATCH
    evaluator = Evaluator(families.build(name), config, Held(), mesh, sharding.DEFAULT_RULES)
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        rows = evaluator(families.params_of(name), {})
    blocks = [rows[f"eval/moe/dropped_fraction/block_{i}"] for i in (0, 1)]
    assert rows["eval/moe/dropped_fraction"] == pytest.approx(np.mean(blocks))
    if name == "moe_expert_choice":
        assert rows["eval/loss_topk"] != rows["eval/loss"] and "eval/moe/accuracy" in rows
        return
    computed = rows["eval/moe/computed_fraction"]
    lost = rows["eval/moe/noop_fraction"] + rows["eval/moe/dropped_fraction"]
    assert computed == pytest.approx(1 - lost, abs=1e-6)
    changes = {**families.FAMILIES[name].changes, "mlp.moe.computed_fraction": computed}
    nominal = families.make(changes).ledger(config.data.seq_len).nominal_per_token
    assert rows["eval/moe/flops_per_token"] == pytest.approx(nominal)
