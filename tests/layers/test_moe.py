"""Mixture of Experts: the layer against a loop over tokens, and what is special to it."""

import dataclasses
import functools
import math
import re

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from efx import build, flops, models, sample, sharding, use
from efx.configs import common, mode
from efx.errors import UsageError
from efx.evaluate import Evaluator, describe
from efx.interop import hf_config
from efx.layers.config import MoEConfig
from efx.layers.info import CacheView, CallInfo, Mode, Tokens
from efx.layers.mlp import MLP
from efx.layers.routing import plans
from efx.layers.routing.moe import MoE
from efx.studies import sweep

B, T, D, F = 3, 20, 12, 10
DEFAULT = MoEConfig(
    every=1,
    num_experts=4,
    expert_hidden=0,
    router="token_choice",
    top_k=2,
    renormalise=True,
    capacity_factor=1.0,
    capacity=0.3,
    slack=1.0,
    num_shared=0,
    num_noop=0,
    computed_fraction=None,
)


def layer(activation="swiglu", use_bias=True, **changes):
    """(module, parameters in which nothing is zero)."""
    config = dataclasses.replace(DEFAULT, **changes)
    module = MoE(config, F, activation, use_bias, 0.5, 0.5, jnp.float32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), inputs(), info()))["params"]
    rng = np.random.default_rng(1)
    return module, jax.tree.map(
        lambda leaf: np.float32(rng.normal(0, 0.5, leaf.shape)), nn.unbox(shapes)
    )


def inputs(seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=(B, T, D)))


def info(selection="causal", segments=None, positions=None):
    positions = np.arange(T)[None] if positions is None else positions
    return CallInfo(
        Tokens(
            np.int32(positions),
            None if segments is None else np.int32(segments),
        ),
        Mode(selection=selection),
    )


PADDED = np.where(np.arange(T)[None] < np.array([T, 13, 1])[:, None], 1, 0)


@functools.cache
def compiled(module):
    def run(params, x_BTD, info):
        return module.apply({"params": params}, x_BTD, info, mutable=["losses", "stats"])

    return families.jit(run)


def apply(module, params, x_BTD, *arguments, **keywords):
    """(output, {name: loss or statistic})."""
    y_BTD, sown = compiled(module)(params, x_BTD, info(*arguments, **keywords))
    sown = {path[-2].key: float(value) for path, value in jax.tree_util.tree_leaves_with_path(sown)}
    return np.asarray(y_BTD), sown


# ---- the same by a loop ------------------------------------------------------------------------


def mlp(x, p, activation):
    def linear(x, p):
        return x @ np.float64(p["kernel"]) + np.float64(p.get("bias", 0))

    if activation == "swiglu":
        gate = linear(x, p["gate"])
        return linear(gate / (1 + np.exp(-gate)) * linear(x, p["up"]), p["down"])
    h = linear(x, p["up"])
    return linear(0.5 * h * (1 + np.vectorize(math.erf)(h / 2**0.5)), p["down"])


def expert(params, e):
    return jax.tree.map(lambda leaf: leaf[e], params["experts"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def token_choice(c, params, x_BTD, valid_BT, activation="swiglu"):
    """Output, losses and statistics, token by token."""
    choices = c.num_experts + c.num_noop
    room = min(T, int(np.ceil(round(c.top_k * T * c.capacity_factor / choices, 6))))
    y_BTD, probs, z, entropy, dropped = np.zeros((B, T, D)), [], [], [], 0
    assigned_E = np.zeros(choices)
    for b in range(B):
        taken_E = np.zeros(choices, int)
        for t in range(T):
            x = np.float64(x_BTD[b, t])
            if c.num_shared:
                y_BTD[b, t] += mlp(x, params["shared"], activation)
            if not valid_BT[b, t]:
                continue
            logits = x @ np.float64(params["router"])
            p = np.exp(logits) / np.exp(logits).sum()
            probs.append(p)
            z.append(np.log(np.exp(logits).sum()) ** 2)
            entropy.append(-(p * np.log(p)).sum())
            best = np.argsort(-p)[: c.top_k]
            for e in best:
                assigned_E[e] += 1
                if e >= c.num_experts:
                    continue
                taken_E[e] += 1
                if taken_E[e] > room:
                    dropped += 1
                    continue
                weight = p[e] / p[best].sum() if c.renormalise else p[e]
                y_BTD[b, t] += weight * mlp(x, expert(params, e), activation)
    share_E, tokens = assigned_E / assigned_E.sum(), len(probs)
    return y_BTD, {
        "load_balance": choices * (share_E * np.mean(probs, axis=0)).sum(),
        "router_z": np.mean(z),
        "moe/dropped_fraction": dropped / (c.top_k * tokens),
        "moe/entropy": np.mean(entropy),
        "moe/max_load": choices * share_E[: c.num_experts].max(),
        "moe/noop_fraction": share_E[c.num_experts :].sum(),
        "moe/computed_fraction": 1 - share_E[c.num_experts :].sum() - dropped / (c.top_k * tokens),
    }


def expert_choice(c, params, x_BTD, valid_BT, selection):
    y_BTD, served_BT = np.zeros((B, T, D)), np.zeros((B, T), bool)
    room = min(T, int(np.ceil(round(c.capacity * T * c.slack, 6))))
    bce, entropy, correct, dropped, load_E = [], [], [], 0, np.zeros(c.num_experts)
    for b in range(B):
        logits_TE = np.float64(x_BTD[b]) @ np.float64(params["router"])
        valid = np.flatnonzero(valid_BT[b])
        for e in range(c.num_experts):
            logits = logits_TE[:, e]
            places = int(np.ceil(round(c.capacity * len(valid), 6)))
            top = valid[np.argsort(-logits[valid], kind="stable")[:places]]
            decided = valid[logits[valid] > 0]
            dropped += max(0, len(decided) - room)
            load_E[e] += len(decided)
            for t in valid:
                g = sigmoid(logits[t])
                bce.append(-np.log(g if t in top else 1 - g))
                entropy.append(-g * np.log(g) - (1 - g) * np.log(1 - g))
                correct.append((t in top) == (t in decided))
            for t in top if selection == "train" else decided[:room]:
                served_BT[b, t] = True
                gate = sigmoid(logits[t])
                y_BTD[b, t] += gate * mlp(np.float64(x_BTD[b, t]), expert(params, e), "swiglu")
    return y_BTD, {
        "expert_bce": np.mean(bce),
        "moe/dropped_fraction": dropped / load_E.sum(),
        "moe/entropy": np.mean(entropy),
        "moe/max_load": load_E.max() / load_E.mean(),
        "moe/decided_fraction": load_E.mean() / valid_BT.sum(),
        "moe/accuracy": np.mean(correct),
        "moe/unserved_fraction": 1 - served_BT.sum() / valid_BT.sum(),
    }


def same(got, expected):
    np.testing.assert_allclose(got[0], expected[0], atol=1e-4)
    assert set(got[1]) == set(expected[1])
    for name, value in expected[1].items():
        assert got[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("segments", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "activation, changes",
    [
        ("swiglu", {}),
        ("gelu", {"top_k": 1, "renormalise": False, "capacity_factor": 0.5}),
        ("swiglu", {"top_k": 3, "num_shared": 2}),
        ("swiglu", {"num_noop": 3, "renormalise": False, "capacity_factor": 0.7}),
    ],
)
def test_token_choice_is_the_loop(activation, changes, segments):
    module, params = layer(activation, **changes)
    valid_BT = np.ones((B, T)) if segments is None else segments
    expected = token_choice(module.config, params, inputs(), valid_BT, activation)
    assert expected[1]["moe/dropped_fraction"] > 0  # first come, first served: the loop sees it
    for selection in ("train", "causal"):
        same(apply(module, params, inputs(), selection, segments), expected)


@pytest.mark.parametrize("segments", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("selection", ["train", "causal"])
@pytest.mark.parametrize("slack", [1.0, 1.5])
def test_expert_choice_is_the_loop(selection, segments, slack):
    module, params = layer(router="expert_choice", slack=slack)
    valid_BT = np.ones((B, T)) if segments is None else segments
    expected = expert_choice(module.config, params, inputs(), valid_BT, selection)
    assert expected[1]["moe/dropped_fraction"] > 0
    same(apply(module, params, inputs(), selection, segments), expected)


def test_negative_positions_are_padding_too():
    """So the empty places of a depth-routed block's plan take no room."""
    module, params = layer()
    positions = np.where(PADDED, np.arange(T)[None], -1)
    same(
        apply(module, params, inputs(), positions=positions),
        apply(module, params, inputs(), segments=PADDED),
    )


def test_padding_takes_no_room():
    """Tokens behind padding are served as if it were not there, whatever it holds."""
    module, params = layer(capacity_factor=0.5)
    x_BTD = inputs()
    behind = np.tile(np.arange(T) >= 8, (B, 1)).astype(int)
    y_BTD, sown = apply(module, params, x_BTD, segments=behind)
    other_BTD, sown_other = apply(
        module, params, np.where(behind[..., None], x_BTD, -3 * x_BTD), segments=behind
    )
    np.testing.assert_array_equal(y_BTD[:, 8:], other_BTD[:, 8:])
    assert sown == sown_other
    assert np.all(y_BTD[:, :8] == 0)
    assert np.any(y_BTD[:, 8:] != apply(module, params, x_BTD)[0][:, 8:])  # full by then


def test_who_comes_first_is_served():
    """One row of equal tokens: the first C get both of their experts, the others nothing."""
    module, params = layer()
    x_BTD = np.tile(inputs()[:, :1], (1, T, 1))
    y_BTD, sown = apply(module, params, x_BTD)
    room = T // 2  # 2 T / 4
    assert np.all(np.any(y_BTD[:, :room] != 0, axis=-1)) and np.all(y_BTD[:, room:] == 0)
    assert sown["moe/dropped_fraction"] == pytest.approx(0.5)
    assert sown["moe/max_load"] <= 2.0 + 1e-6


def test_a_balanced_router_has_loss_one():
    module, params = layer()
    _, sown = apply(module, {**params, "router": np.zeros((D, 4), np.float32)}, inputs())
    assert sown["load_balance"] == pytest.approx(1.0)
    assert sown["router_z"] == pytest.approx(np.log(4) ** 2)
    assert sown["moe/entropy"] == pytest.approx(np.log(4))


@pytest.mark.parametrize("places", [0.3, 0.05, 1.0])
def test_an_expert_picks_exactly_its_places(places, monkeypatch):
    module, params = layer(router="expert_choice", capacity=places)
    plans = []
    monkeypatch.setattr(
        "efx.layers.routing.moe._compute",
        lambda start, x, best, weight, plan, experts: plans.append(plan) or start,
    )

    @families.jit
    def planned(params, x_BTD, info):
        module.apply({"params": params}, x_BTD, info, mutable=["losses", "stats"])
        return plans.pop()

    plan = planned(params, inputs(), info("train"))
    assert not plans
    assert plan.indices_BC.shape == (4, B, int(np.ceil(round(places * T, 6))))
    assert np.all(plan.mask_BC)


@pytest.mark.parametrize("activation, factor", [("swiglu", 1.0), ("gelu", 1.0), ("gelu_tanh", 4.0)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_one_expert_is_the_dense_mlp(activation, factor, renormalise):
    module, params = layer(
        activation, num_experts=1, top_k=1, capacity_factor=factor, renormalise=renormalise
    )
    dense = MLP(F, activation, True, 0.5, 0.5, jnp.float32)
    expected = families.jit(dense.apply)({"params": expert(params, 0)}, inputs())
    np.testing.assert_allclose(apply(module, params, inputs())[0], expected, atol=1e-5)


def test_all_no_ops_leave_the_residual():
    """A router that only likes no-ops: nothing is computed for any token, nothing dropped."""
    module, params = layer(num_noop=2)
    x_BTD = np.abs(inputs())
    router = np.tile(np.float32([0, 0, 0, 0, 5, 5]), (D, 1))
    y_BTD, sown = apply(module, {**params, "router": router}, x_BTD)
    assert np.all(y_BTD == 0)
    assert sown["moe/noop_fraction"] == 1 and sown["moe/dropped_fraction"] == 0


def test_the_router_learns_from_the_main_loss():
    """Not with one expert of weight one, which is what renormalising makes of top-1."""
    for top_k, renormalise, learns in ((2, True, True), (1, False, True), (1, True, False)):
        module, params = layer(top_k=top_k, renormalise=renormalise)

        def loss(params, x_BTD, info, module=module):
            return jnp.sum(module.apply({"params": params}, x_BTD, info) ** 2)

        grads = families.jit(jax.grad(loss))(params, inputs(), info())
        assert (np.abs(grads["router"]).max() > 1e-3) == learns


best = families.jit(plans.best, static_argnums=1)


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float32, (3, 6), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0])),
    st.integers(1, 6),
)
def test_best_is_a_stable_sort(scores, count):
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(best(scores, count), expected)


# {name: (rows, whether it decodes, in how many calls)}
WAYS = {
    "a forward pass": (B, False, 1),
    "in rounds": (B, True, 1),
    "all experts, token by token": (B, True, T),
    "the chosen experts, token by token": (1, True, T),
}


@pytest.mark.parametrize("router", ["token_choice", "expert_choice"])
@pytest.mark.parametrize("way", WAYS)
def test_a_sum_of_experts_in_bfloat16_is_rounded_once(way, router):
    """Experts that give a vector of their own whatever they read, so that what they come to in
    exact arithmetic is known; 9 of them and a shared one. With products and sums in bfloat16 it was
    6 to 70 times as far from that as rounding may bring it."""
    rows, decode, calls = WAYS[way]
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
        some = CallInfo(Tokens(positions_BT), Mode(selection="causal"), view)
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


def test_every_second_block():
    model = families.make(
        {"mlp.kind": "moe", "mlp.moe.every": 2, "depth": 4, "mlp.moe.expert_hidden": 24}
    )
    specs = model.specs()
    assert [spec.block.moe is not None for spec in specs] == [False, True, False, True]
    assert [spec.block.hidden for spec in specs] == [96, 24, 96, 24]
    assert len({hash(spec) for spec in specs}) == 2
    assert families.make({"mlp.kind": "moe"}).specs()[0].block.hidden == 96
    assert all(spec.block.moe is None for spec in families.build("llama").specs())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"moe.num_experts": 0}, r"mlp\.moe\.num_experts=0: must be at least 1"),
        ({"moe.top_k": 9}, r"mlp\.moe\.top_k=9: must be at most the number of experts, 8"),
        ({"moe.every": 0}, r"mlp\.moe\.every=0: must be at least 1"),
        ({"moe.num_noop": -1}, r"mlp\.moe\.num_noop=-1: must be at least 0"),
        ({"moe.capacity_factor": 0.0}, r"mlp\.moe\.capacity_factor=0\.0: must be more than 0"),
        ({"moe.capacity": 1.5}, r"mlp\.moe\.capacity=1\.5: must be in \(0, 1\]"),
        ({"moe.slack": 0.5}, r"mlp\.moe\.slack=0\.5: must be at least 1"),
        (
            {"moe.router": "expert_choice", "moe.num_noop": 1},
            r"mlp\.moe\.num_noop=1: expert_choice",
        ),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UsageError, match=r"config\.model\." + message) as error:
        families.make({"mlp.kind": "moe", **{f"mlp.{key}": v for key, v in changes.items()}})
    assert "\n" not in str(error.value)


def test_hugging_face_has_no_place_for_experts():
    with pytest.raises(UsageError, match=r"config\.model\.mlp\.kind='moe': .*only dense models"):
        hf_config.config_to_hf(families.make({"mlp.kind": "moe"}))


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
    with pytest.raises(UsageError, match=r"experts/down/kernel.*3 is not a multiple"):
        sharding.tree_shardings(boxed, mesh, sharding.DEFAULT_RULES)


@pytest.mark.parametrize("tensor", [1, 2])
def test_devices_exchange_tokens_of_experts(tensor):
    """Beside an axis that splits the batch and beside one that does not. Each computes on its own
    rows outside of the experts, and no device ever has the tokens of all."""
    mesh = sharding.make_mesh(dict(data=1, fsdp=2, tensor=tensor, expert=4 // tensor, sequence=1))
    rules, spec = sharding.DEFAULT_RULES, (None, "batch", None, "act_embed")
    x_EBCD = np.random.default_rng(0).normal(size=(4, 8, 3, 16)).astype(np.float32)
    laid_out = nn.logical_to_mesh_sharding(jax.P(*spec), mesh, rules)

    def there_and_back(x_EBCD):
        by_expert = "act_expert", "expert_batch", None, "act_embed"
        y_EBCD = sharding.exchange(x_EBCD, spec, by_expert)
        return sharding.exchange(2 * y_EBCD, by_expert, spec)

    with sharding.use(mesh, rules):
        compiled = jax.jit(there_and_back, in_shardings=laid_out).lower(x_EBCD).compile()
        y_EBCD = compiled(jax.device_put(x_EBCD, laid_out))
    text = compiled.as_text()
    assert len(re.findall(r" all-to-all\(", text)) == 2 and "all-gather" not in text
    np.testing.assert_array_equal(y_EBCD, 2 * x_EBCD)
    assert y_EBCD.sharding.shard_shape(y_EBCD.shape)[1] == 8 // (2 * (4 // tensor))


def test_recomputing_exchanges_no_tokens_again():
    """Where results of products are kept."""
    axes = dict(data=1, fsdp=1, tensor=1, expert=2, sequence=1)
    mesh = sharding.make_mesh(axes, jax.devices()[:2])

    def exchanges(remat):
        loss = families.loss_fn(models.changed(families.build("moe"), remat=remat))
        with sharding.use(mesh, sharding.DEFAULT_RULES):
            gradient = jax.jit(jax.grad(loss)).trace(families.params_of("moe"), families.tokens())
        return str(gradient.jaxpr).count(" all_to_all[")

    assert 0 < exchanges("none") == exchanges("dots") < exchanges("full")


@pytest.mark.parametrize("batch, experts", [(1, 2), (3, 6), (4, 8), (8, 8)])
def test_a_step_of_one_token_runs_few_experts(batch, experts):
    """Of 8, two a row as long as that is fewer than all on all rows would read."""
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


def test_a_sampler_counts_what_experts_turn_away():
    """A router that likes two experts only, each with room for half of their tokens."""
    model = families.make(
        {"mlp.kind": "moe", "depth": 1, "mlp.moe.num_experts": 4, "mlp.moe.capacity_factor": 1.0},
        context=24,
    )
    params = families.random_params(model)
    params["layers"]["block_0"]["norm_mlp"]["scale"] *= 0.0
    sampler = sample.Sampler(model, temperature=0.0)
    list(sampler.tokens({"params": params}, [[1, 2, 3]], max_new_tokens=21, seeds=[0]))
    read = sampler.stats["new_tokens"] + 2 + 1  # the last one is read, too
    assert sampler.stats["expert_overflow"] == 2 * (read - 12)
    assert sampler.stats["expert_choices"] == 2 * read
    said = use._left_out(sampler.stats, sampler.cache_size, seq_len=16)
    assert said == (
        "; experts dropped 24 of 48 choices (50.0%) over the capacity of a row of 24 tokens"
        " (evaluation uses rows of 16)"
    )
    assert use._left_out({"expert_overflow": 0}, 24, 16) == ""


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
    """Not as if routers liked no-ops as well as experts; so are the steps of an equal budget."""
    changes = families.FAMILIES["mode_integrated"].changes  # two no-ops beside four experts

    def model(share):
        return families.make({**changes, "mlp.moe.computed_fraction": share})

    def mlp(model):
        return model.ledger(16).nominal["mlp"]

    assert mlp(model(2 / 3)) == pytest.approx(mlp(families.make(changes)))
    assert mlp(model(0.25)) == pytest.approx(mlp(model(1.0)) / 4)
    assert flops.executed(model(0.25), 16) == flops.executed(model(1.0), 16)  # as before
    config = common.apply(common.base(), {"steps": 0, "train_flops": 1e12})
    steps = [
        build._total_steps(config, [(0.0, m, m.ledger(256))]) for m in (model(0.25), model(1.0))
    ]
    per_token = [m.ledger(256).nominal_per_token for m in (model(0.25), model(1.0))]
    assert steps[0] / steps[1] == pytest.approx(per_token[1] / per_token[0], rel=1e-2)
    for bad in (
        {"mlp.moe.computed_fraction": 0.0},
        {
            "mlp.moe.computed_fraction": 0.5,
            "mlp.moe.num_noop": 0,
            "mlp.moe.router": "expert_choice",
        },
    ):
        with pytest.raises(UsageError, match=r"mlp\.moe\.computed_fraction=0"):
            families.make({**changes, **bad})


def test_the_tables_integrated_row_is_the_configs_variant(root):
    row = sweep.load_sweep(root / "configs/sweeps/mod_table.py")["runs"][
        "integrated MoDE: 8 experts, 8 no-ops"
    ]
    assert row.items() >= mode.VARIANTS["integrated"].items()
    assert row["model.mlp.moe.computed_fraction"] != 0.5  # measured, not taken for granted


@pytest.mark.parametrize("name", ["moe", "moe_expert_choice", "mode_staged", "mode_integrated"])
def test_evaluation_reports_experts(name):
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    config = common.base()
    config.evaluate.batch_size = families.BATCH
    evaluator = Evaluator(families.build(name), config, Held(), mesh, sharding.DEFAULT_RULES)
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        rows = evaluator(families.params_of(name), {})
    assert rows["eval/moe/dropped_fraction"] == pytest.approx(
        np.mean([rows[f"eval/moe/dropped_fraction/block_{i}"] for i in (0, 1)])
    )
    assert ("eval/loss_topk" in rows) == (name in ("moe_expert_choice", "mode_staged"))
    assert ("eval/moe/accuracy" in rows) == (name == "moe_expert_choice")
    assert ("eval/router/accuracy" in rows) == (name == "mode_staged")
    if "eval/loss_topk" in rows:
        assert rows["eval/loss_topk"] != rows["eval/loss"]
    assert "experts full for" in describe(3, rows)
    if name == "mode_integrated":
        computed = rows["eval/moe/computed_fraction"]
        assert computed == pytest.approx(
            1 - rows["eval/moe/noop_fraction"] - rows["eval/moe/dropped_fraction"], abs=1e-6
        )
        measured = families.make(
            {**families.FAMILIES[name].changes, "mlp.moe.computed_fraction": computed}
        )
        assert rows["eval/moe/flops_per_token"] == pytest.approx(
            measured.ledger(config.data.seq_len).nominal_per_token
        )
        assert "of the choices (counted as 66.7%)" in describe(3, rows)
