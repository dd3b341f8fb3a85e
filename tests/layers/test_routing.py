"""Depth routing: plans by hand; layers and models against a plain numpy form of the maths."""

import dataclasses
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

from efx import models, sharding
from efx.layers.call import Call
from efx.layers.config import BlockConfig, say_if_the_router_is_fixed
from efx.layers.linear import dot_float32
from efx.layers.stack import Layer
from efx.routing import plans
from efx.routing.mod import MoDBlock

# ---- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fraction, length, places",
    [
        (0.125, 1024, 128),
        (0.125, 12, 2),
        (0.1, 30, 3),
        (0.07, 100, 7),
        (0.71, 10, 8),
        (0.001, 7, 1),
        (2.0, 7, 7),
    ],
)
def test_capacity(fraction, length, places):
    """ceil(c T), not one more by the rounding of c T; at least 1, at most T."""
    assert plans.capacity(fraction, length) == places


def test_gathered_info_keeps_positions_and_documents():
    call = Call(np.array([[0, 1, 2, 0, 1]]), np.array([[1, 1, 1, 2, 2], [3, 3, 3, 3, 0]]))
    plan = plans.Plan(np.array([[2, 3], [1, 5]]), np.array([[True, True], [True, False]]))
    gather = families.jit(lambda plan, call: plan.call(call.for_rows(2), plans.Budget(0.4, 5)))
    got = gather(plan, call).tokens
    np.testing.assert_array_equal(got.positions_BT, [[2, 0], [1, -1]])
    np.testing.assert_array_equal(got.segment_ids_BT, [[1, 2], [3, 0]])
    # Of the two places the first three tokens have ceil(0.4 * 3), which is both.
    np.testing.assert_array_equal(got.begin_BT, [[0, 2], [0, 0]])
    np.testing.assert_array_equal(got.end_BT, [[2, 2], [2, 0]])


T, C = 9, 4
topk = jax.jit(lambda scores_BT: plans.topk_plan(scores_BT, C))
topk_valid = jax.jit(lambda scores_BT, valid_BT: plans.topk_plan(scores_BT, C, valid_BT))
first = jax.jit(lambda selected_BT: plans.first_plan(selected_BT, C))
round_trip = jax.jit(
    lambda x_BT, plan: (
        plans.scatter_add(jnp.zeros((2, T)), plans.gather(x_BT, plan), plan),
        plans.selected(plan, T),
    )
)
some_scores = hnp.arrays(np.float32, (2, T), elements=st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]))
some_tokens = hnp.arrays(bool, (2, T))


def check_invariants(plan):
    indices_BC, mask_BC = np.asarray(plan.indices_BC), np.asarray(plan.mask_BC)
    assert np.all(np.diff(indices_BC, axis=1) > 0)  # ascending and distinct: empty places too
    np.testing.assert_array_equal(mask_BC, indices_BC < T)


@settings(deadline=None, max_examples=20)
@given(some_scores, some_tokens)
def test_topk_plan_is_a_stable_sort(scores_BT, valid_BT):
    plan, plan_valid = topk(scores_BT), topk_valid(scores_BT, valid_BT)
    check_invariants(plan)
    check_invariants(plan_valid)
    for b in range(2):
        best = np.argsort(-scores_BT[b], kind="stable")
        np.testing.assert_array_equal(plan.indices_BC[b], np.sort(best[:C]))
        best = np.sort([t for t in best if valid_BT[b, t]][:C])
        got = np.asarray(plan_valid.indices_BC[b])
        np.testing.assert_array_equal(got[got < T], best)


@settings(deadline=None, max_examples=20)
@given(some_tokens, some_scores)
def test_first_plan_takes_the_first(selected_BT, x_BT):
    plan = first(selected_BT)
    check_invariants(plan)
    wanted_BT = selected_BT & (np.cumsum(selected_BT, axis=1) <= C)
    back_BT, chosen_BT = round_trip(x_BT, plan)
    np.testing.assert_array_equal(chosen_BT, wanted_BT)
    np.testing.assert_array_equal(back_BT, np.where(wanted_BT, x_BT, 0))


@pytest.mark.parametrize("by_token", [True, False])
def test_sums_over_experts_and_their_gradients_are_those_of_the_definition(by_token):
    """Of two choices a token, one of which may be no expert, and of experts that drop tokens; where
    each token has `slots_of_choices` and where experts add in turns."""
    rng = np.random.default_rng(0)
    experts, rows, length, size, width = 3, 2, 9, 3, 6
    choices_BTK = rng.permuted(np.tile(np.arange(experts + 1), (rows, length, 1)), axis=-1)[..., :2]
    chosen_BTE = np.any(choices_BTK[..., None] == np.arange(experts), axis=-2)
    plan = plans.for_each_expert(functools.partial(plans.first_plan, size=size), chosen_BTE)
    hit_EBCT = np.float32(np.asarray(plan.indices_BC)[..., None] == np.arange(length))
    assert hit_EBCT.sum() < chosen_BTE.sum()

    def ours(x_BTD, start_BTD, weight_EBC):
        slots_BTK = plans.slots_of_choices(plan, choices_BTK, length) if by_token else None
        y_EBCD = plans.take_for_experts(x_BTD, plan, slots_BTK) * of_EBCD
        return plans.add_weighed(start_BTD, plan.indices_BC, y_EBCD, weight_EBC, slots_BTK)

    def definition(x_BTD, start_BTD, weight_EBC):
        einsum = functools.partial(jnp.einsum, precision="highest")
        y_EBCD = einsum("EBCT,BTD->EBCD", hit_EBCT, x_BTD) * of_EBCD * weight_EBC[..., None]
        return start_BTD + einsum("EBCT,EBCD->BTD", hit_EBCT, y_EBCD)

    def value(function):
        def summed(*arrays):
            out_BTD = function(*arrays)
            return jnp.sum(out_BTD * of_BTD), out_BTD

        return families.jit(jax.grad(summed, argnums=(0, 1, 2), has_aux=True))

    inputs = (rows, length, width), (rows, length, width), (experts, rows, size)
    x_BTD, start_BTD, weight_EBC, of_BTD, of_EBCD = (
        np.float32(rng.normal(size=shape))
        for shape in (*inputs, (rows, length, width), (experts, rows, size, width))
    )
    got, expected = (value(f)(x_BTD, start_BTD, weight_EBC) for f in (ours, definition))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- a routed layer against numpy --------------------------------------------------------------


def linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def norm(x, p, kind, eps):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * p["scale"] + p.get("bias", 0)


def turned(x_TNH, positions_T, theta):
    """Rotary embedding as a product of complex numbers."""
    half = x_TNH.shape[-1] // 2
    z = x_TNH[..., :half] + 1j * x_TNH[..., half:]
    z = z * np.exp(1j * positions_T[:, None, None] * theta ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag], -1)


def np_attention(x_TD, p, b, positions_T, visible_TS):
    """Masked attention of all T tokens, one row of a batch."""
    heads = {}
    for name, count in (
        ("query", b.attention.num_heads),
        ("key", b.attention.num_kv_heads),
        ("value", b.attention.num_kv_heads),
    ):
        y = linear(x_TD, p[name])
        if b.attention.qk_norm == "width" and name != "value":
            y = norm(y, p[f"norm_{name}"], "rmsnorm", b.norm_eps)
        y = y.reshape(len(y), count, b.attention.head_dim)
        if b.attention.rope_theta and name != "value":
            y = turned(y, positions_T, b.attention.rope_theta)
        heads[name] = np.repeat(y, b.attention.num_heads // count, axis=1)
    scores = np.einsum("tnh,snh->nts", heads["query"], heads["key"]) / np.sqrt(b.attention.head_dim)
    scores = np.where(visible_TS, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, heads["value"]).reshape(len(x_TD), -1)
    return linear(out, p["out"])


def np_mlp(x_TD, p, activation):
    up = linear(x_TD, p["up"])
    if activation == "swiglu":
        gate = linear(x_TD, p["gate"])
        return linear(gate / (1 + np.exp(-gate)) * up, p["down"])
    return linear(0.5 * up * (1 + special.erf(up / np.sqrt(2))), p["down"])


GATES = {
    "identity": lambda r: r,
    "sigmoid": lambda r: 1 / (1 + np.exp(-r)),
    "tanh": np.tanh,
    "one": np.ones_like,
}


def np_layer(x_TD, p, spec, routed_T, positions_T, gate, seen_T=None):
    """x + g(r) * delta on routed tokens, x elsewhere. Nothing is gathered: the tokens that are
    not routed are hidden from the others by the mask, and their own results are thrown away.
    `seen_T`: the tokens that others see instead."""
    b = spec.block
    time = np.arange(len(x_TD))
    visible_TS = (time[None] <= time[:, None]) & (routed_T if seen_T is None else seen_T)[None]
    if b.attention.window:
        visible_TS &= positions_T[:, None] - positions_T[None] < b.attention.window
    visible_TS |= np.eye(len(x_TD), dtype=bool)  # rows of unrouted tokens: thrown away below
    h = norm(x_TD, p["norm_attention"], b.norm, b.norm_eps)
    a = np_attention(h, p["attention"], b, positions_T, visible_TS)
    delta = a + np_mlp(
        norm(x_TD + a, p["norm_mlp"], b.norm, b.norm_eps), p["mlp"], b.mlp.activation
    )
    gate_T = GATES[gate](x_TD @ p["router"] if "router" in p else x_TD[:, 0])
    return np.where(routed_T[:, None], x_TD + gate_T[:, None] * delta, x_TD)


def np_topk(score_T, size):
    routed_T = np.zeros(len(score_T), bool)
    routed_T[np.argsort(-score_T, kind="stable")[:size]] = True
    return routed_T


ROWS, LENGTH = 3, 16
OPTIONS = {
    "preset": "llama",
    "attention.num_kv_heads": 2,
    "depth": 1,
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": 0.5,
}


@functools.cache
def layer(**changes):
    """(layer, float64 parameters) of a routed layer."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    dtype = changes.pop("dtype", "float32")
    model = families.make({**OPTIONS, **changes}, dtype)
    params = families.random_params(model)["layers"]["block_0"]
    return Layer(model.specs()[0]), jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def run(module, params, x_BTD, selection="train", segments=None, positions=None, **options):
    """(output, losses, stats) of a layer."""
    positions = np.arange(x_BTD.shape[1])[None] if positions is None else positions
    call = Call(positions, segments, selection=selection)

    @families.jit
    def apply(params, x_BTD, call):
        return module.apply({"params": params}, x_BTD, call, mutable=["losses", "stats"], **options)

    params = jax.tree.map(np.float32, params)
    out, sown = jax.device_get(apply(params, x_BTD, call))
    return out, {key: value[0] for part in sown.values() for key, value in part.items()}


def activations(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, LENGTH, 32)).astype(np.float32)


@pytest.mark.parametrize(
    "gate, window",
    [
        ("identity", 0),
        ("tanh", 5),
        ("one", 3),
    ],
)
def test_layer_is_the_formula(gate, window):
    """Residual once, the gate, original positions for RoPE and window, causal among the routed."""
    module, p = layer(depth_routing__gate=gate, attention__window=window)
    x_BTD = activations()
    positions_T = np.arange(LENGTH) * 2 + 3  # nothing may take places for positions
    out_BTD, _ = run(module, p, x_BTD, positions=positions_T[None])
    compacted = 0.0
    for b in range(ROWS):
        routed_T = np_topk(x_BTD[b] @ p["router"], LENGTH // 2)
        expected_TD = np_layer(x_BTD[b], p, module.spec, routed_T, positions_T, gate)
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=2e-4)
        np.testing.assert_array_equal(out_BTD[b][~routed_T], x_BTD[b][~routed_T])
        assert np.all(np.any(out_BTD[b][routed_T] != x_BTD[b][routed_T], axis=-1))
        renumbered_T = np.cumsum(routed_T) - 1  # the defect: routed tokens at 0..C-1
        wrong_TD = np_layer(x_BTD[b], p, module.spec, routed_T, renumbered_T, gate)
        compacted = max(compacted, np.abs(out_BTD[b] - wrong_TD).max())
    assert compacted > 0.01


def test_causal_decision_is_the_formula():
    """r > 0, as many of the first as there are slots; empty slots reach nothing."""
    module, p = layer(depth_routing__slack=1.25)
    x_BTD, slots = activations(), 10
    push_D = 10 * p["router"] / np.sum(p["router"] ** 2)  # 10 more in every score
    x_BTD[0] += push_D.astype(np.float32)  # row 0 wants every token, row 2 none
    x_BTD[2] -= push_D.astype(np.float32)
    out_BTD, sown = run(module, p, x_BTD, selection="causal")
    decided_BT = x_BTD @ p["router"] > 0
    assert decided_BT[0].all() and not decided_BT[2].any() and 0 < decided_BT[1].sum() < slots
    routed_BT = decided_BT & (np.cumsum(decided_BT, axis=1) <= slots)
    for b in range(ROWS):
        expected_TD = np_layer(x_BTD[b], p, module.spec, routed_BT[b], np.arange(LENGTH), "sigmoid")
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=2e-4)
    np.testing.assert_array_equal(out_BTD[2], x_BTD[2])
    np.testing.assert_allclose(sown["router/decided_fraction"], decided_BT.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        sown["router/overflow_fraction"], (LENGTH - slots) / (ROWS * LENGTH), atol=1e-6
    )


def np_model(model, p, tokens_T, size_of):
    """Logits of one sequence; `size_of`: of a routed layer's spec, how many tokens it computes."""
    length, x_TD = len(tokens_T), p["embed"]["embedding"][tokens_T]
    if model.config.positions == "learned":
        x_TD = x_TD + p["positions_embed"]["embedding"][:length]
    for i, spec in enumerate(model.specs()):
        block = {"router": np.zeros(model.config.width), **p["layers"][f"block_{i}"]}
        routed_T, gate = np.ones(length, bool), "one"
        if spec.routing is not None:
            routed_T = np_topk(x_TD @ block["router"], size_of(spec))
            gate = spec.routing.gate
        x_TD = np_layer(x_TD, block, spec, routed_T, np.arange(length), gate)
    x_TD = norm(x_TD, p["norm_final"], model.config.norm, model.config.norm_eps)
    table = p["embed"]["embedding"].T if model.config.tied else p["head"]["kernel"]
    return (x_TD @ table)[:, : model.vocab_size]


@pytest.mark.parametrize("name", ["mod_options", "mod_capacity_list"])
def test_model_is_the_formula(name):
    """A whole decoder, with RoPE or learned positions, routed by top-k."""
    model, p = families.build(name), jax.tree.map(np.float64, families.params_of(name))
    tokens_BT = families.tokens()
    logits_BTV = families.logits_of(name, tokens_BT, "train")

    def size_of(spec):
        return plans.capacity(spec.capacity, tokens_BT.shape[1])

    for b in range(2):
        expected_TV = np_model(model, p, tokens_BT[b], size_of)
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=1e-3)


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
    weight_BTV = np.where(
        segments_BT[..., None] > 0, rng.normal(size=(2, length, families.VOCAB)), 0
    )

    @families.jit
    def run(params):
        def total(params):
            logits = model.apply({"params": params}, tokens_BT, positions_BT, segments_BT)
            return jnp.sum(logits[..., : families.VOCAB] * weight_BTV.astype(np.float32)), logits

        return jax.grad(total, has_aux=True)(params)

    def formula(p):
        """[(place of a document, its logits)]"""
        for row, start, end in documents:

            def size_of(spec, start=start, end=end):
                return plans.share(spec.capacity, end) - plans.share(spec.capacity, start)

            places = row, slice(start, end)
            yield places, np_model(model, p, tokens_BT[places], size_of)

    gradient, logits_BTV = jax.device_get(run(params))
    p = jax.tree.map(np.float64, params)
    for places, expected_TV in formula(p):
        np.testing.assert_allclose(logits_BTV[places], expected_TV, atol=1e-3)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), p)

    def along(step):
        moved = jax.tree.map(lambda x, d: x + step * d, p, direction)
        return sum(np.sum(weight_BTV[places] * y_TV) for places, y_TV in formula(moved))

    slope = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    np.testing.assert_allclose(slope, (along(1e-6) - along(-1e-6)) / 2e-6, rtol=1e-3)


@pytest.mark.parametrize("preset, dtype", [("gpt2", "float32"), ("llama", "bfloat16")])
def test_full_capacity_and_gate_one_is_the_dense_model(preset, dtype):
    """Bit for bit, where the compiler rounds as the program says: fused loops may round less."""
    routed = families.make(
        {
            "preset": preset,
            "attention.chunk": 20,
            "depth_routing.kind": "mod",
            "depth_routing.capacity": 1.0,
            "depth_routing.gate": "one",
        },
        dtype,
    ).clone(selection="train")
    dense = models.changed(
        routed, depth_routing=dataclasses.replace(routed.config.depth_routing, kind="none")
    )
    params, tokens_BT = families.random_params(routed), families.tokens(batch=2)
    layers = {
        name: {k: v for k, v in block.items() if k != "router"}
        for name, block in params["layers"].items()
    }
    assert "router" in params["layers"]["block_1"]
    exact = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    np.testing.assert_array_equal(
        jax.jit(routed.apply, compiler_options=exact)({"params": params}, tokens_BT),
        jax.jit(dense.apply, compiler_options=exact)(
            {"params": {**params, "layers": layers}}, tokens_BT
        ),
    )


# ---- the router --------------------------------------------------------------------------------


def test_scores_of_a_tpu_are_of_float32(monkeypatch):
    """There they are sums of products of bfloat16, and so are their gradients."""
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
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
    # Such a difference is none of what a product in bfloat16 is off by.
    assert np.abs(np.float64(x_BTD @ jnp.bfloat16(vector_D)) - x @ vector).max() > 1e-2
    assert of_x_BTD.dtype == jnp.bfloat16
    expected = gradient[..., None] * vector
    np.testing.assert_allclose(np.float64(of_x_BTD), expected, rtol=2**-8)


@pytest.mark.slow
def test_every_routed_block_has_its_own_router():
    model = families.make({"depth": 6, "depth_routing.kind": "mod", "mlp.hidden": 8})
    layers = families.jit(lambda key: models.init(model, key)["params"]["layers"])(
        jax.random.key(0)
    )
    routers = {name: layer["router"].value for name, layer in layers.items() if "router" in layer}
    assert sorted(routers) == ["block_1", "block_3", "block_5"]
    assert all(router.shape == (32,) for router in routers.values())
    stacked = np.stack(list(routers.values()))
    assert np.all(np.abs(stacked) > 0) and 0.01 < stacked.std() < 0.03
    assert np.abs(np.corrcoef(stacked) - np.eye(3)).max() < 0.7


def test_router_is_float32_under_bfloat16():
    """Scores of a bfloat16 x are those of exact arithmetic on it, not of a bfloat16 product."""
    module, p = layer(dtype="bfloat16")
    x_BTD = activations().astype(jnp.bfloat16)
    out_BTD, sown = run(module, p, x_BTD)
    assert out_BTD.dtype == jnp.bfloat16
    assert all(value.dtype == jnp.float32 for value in sown.values())
    exact_BTD = np.asarray(x_BTD, np.float64)
    score_BT = exact_BTD @ p["router"].astype(np.float32).astype(np.float64)
    target_BT = np.stack([np_topk(score_T, LENGTH // 2) for score_T in score_BT])
    loss = np.mean(np.logaddexp(0, score_BT) - score_BT * target_BT)
    np.testing.assert_allclose(sown["router_bce"], loss, rtol=1e-6)
    # So exact that a score differing in the last bits of float32 decides.
    close_D = np.zeros(32)
    close_D[:2] = 1.0, 2.0**-20
    x_BTD = np.zeros((1, 4, 32))
    x_BTD[0, 1:3, :2] = [[4.0, 0.0], [4.0, 1.0]]  # scores 4 and 4 + 2^-20
    x_BTD[0, 0, 0] = 5.0
    out_BTD, _ = run(module, {**p, "router": close_D}, x_BTD.astype(jnp.bfloat16))
    changed_T = np.any(np.asarray(out_BTD[0], np.float32) != x_BTD[0], axis=-1)
    np.testing.assert_array_equal(changed_T, [True, False, True, False])


class Increments(nn.Module):
    """A block whose increment is 1 to 2 over the features, whatever it reads."""

    config: BlockConfig

    def __call__(self, x_BTD, call, context=None):
        increment_D = jnp.linspace(1, 2, x_BTD.shape[-1]).astype(x_BTD.dtype)
        return jnp.broadcast_to(increment_D, x_BTD.shape)


def test_a_gate_multiplies_in_float32_under_bfloat16():
    """The increments of tokens that are 0 elsewhere than where the router looks: what is added is
    the exact product, rounded once. With a gate of 8 bits it was up to twice as far off."""
    spec = layer(dtype="bfloat16")[0].spec
    module = MoDBlock(functools.partial(Increments, spec.block), spec.routing, spec.capacity)
    x_BTD = np.zeros((ROWS, LENGTH, 32), jnp.bfloat16)
    x_BTD[..., 0] = activations()[..., 0]
    router_D = np.eye(32, dtype=np.float32)[0]
    out_BTD, _ = run(module, {"router": router_D}, x_BTD)
    score_BT = np.float64(x_BTD[..., 0])
    routed_BT = np.stack([np_topk(score_T, LENGTH // 2) for score_T in score_BT])
    gate_BT = np.where(routed_BT, special.expit(score_BT), 0)
    exact_BTD = gate_BT[..., None] * np.float64(jnp.linspace(1, 2, 32).astype(jnp.bfloat16))
    off_BTD = np.abs(np.float64(out_BTD) - exact_BTD)[..., 1:]
    # As near as it can be: half of a step, of which there are 128 from a power of 2 to the next.
    step_BTD = 2.0 ** (np.floor(np.log2(np.where(exact_BTD > 0, exact_BTD, 1))) - 7)
    assert np.all(off_BTD <= 0.501 * step_BTD[..., 1:])


def test_losses_and_stats_by_hand():
    """Targets are each row's own top-k; padding counts nowhere."""
    module, p = layer()
    x_BTD = activations(1)
    x_BTD[1, :, :] += 0.7 * p["router"].astype(np.float32)  # row 1 scores above row 0 everywhere
    segments_BT = np.ones((ROWS, LENGTH), np.int32)
    segments_BT[0, 12:] = 0
    out_BTD, sown = run(module, p, x_BTD, segments=segments_BT)
    valid_BT = segments_BT > 0
    score_BT = x_BTD.astype(np.float64) @ p["router"]
    target_BT = np.stack(
        [
            np_topk(np.where(valid_T, score_T, -np.inf), valid_T.sum() // 2)
            for score_T, valid_T in zip(score_BT, valid_BT, strict=True)
        ]
    )
    assert target_BT.sum(axis=1).tolist() == [6, 8, 8]
    np.testing.assert_array_equal(np.any(np.asarray(out_BTD) != x_BTD, axis=-1), target_BT)
    decided_BT = score_BT > 0
    hit = (decided_BT & target_BT)[valid_BT].sum()
    routed_B = (decided_BT & valid_BT).sum(axis=1)
    expected = {
        "router_bce": np.mean((np.logaddexp(0, score_BT) - score_BT * target_BT)[valid_BT]),
        "router/accuracy": np.mean((decided_BT == target_BT)[valid_BT]),
        "router/precision": hit / decided_BT[valid_BT].sum(),
        "router/recall": hit / target_BT[valid_BT].sum(),
        "router/decided_fraction": decided_BT[valid_BT].mean(),
        "router/overflow_fraction": 0.0,
        "router/pairs_fraction": np.mean(routed_B * (routed_B + 1)) / (LENGTH * (LENGTH + 1)),
    }
    assert set(sown) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(sown[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("reaches", [True, False])
def test_gradient_of_the_router_loss(reaches):
    module, p = layer(depth_routing__bce_reaches_input=reaches)
    p = jax.tree.map(np.float32, p)
    call = Call(np.arange(LENGTH)[None], selection="train")

    def loss(params, x_BTD):
        _, sown = module.apply({"params": params}, x_BTD, call, mutable=["losses"])
        return sown["losses"]["router_bce"][0]

    x_BTD = activations()
    grads, grad_x_BTD = families.jit(jax.grad(loss, argnums=(0, 1)))(p, x_BTD)
    score_BT = x_BTD @ np.asarray(p["router"])
    error_BT = 1 / (1 + np.exp(-score_BT))
    error_BT -= np.stack([np_topk(score_T, LENGTH // 2) for score_T in score_BT])
    error_BT /= error_BT.size
    np.testing.assert_allclose(
        grads.pop("router"), np.einsum("bt,btd->d", error_BT, x_BTD), atol=1e-6
    )
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(grads))
    expected_BTD = error_BT[..., None] * np.asarray(p["router"]) if reaches else 0 * x_BTD
    np.testing.assert_allclose(grad_x_BTD, expected_BTD, atol=1e-6)


@pytest.mark.parametrize("gate, reaches", [("sigmoid", True), ("one", False)])
def test_the_gate_trains_the_router(gate, reaches):
    """Through the output alone, the gate is the router's only way to learn."""
    module, p = layer(depth_routing__gate=gate)
    p = jax.tree.map(np.float32, p)
    call = Call(np.arange(LENGTH)[None], selection="train")
    grads = families.jit(
        jax.grad(
            lambda params: jnp.sum(
                jnp.square(module.apply({"params": params}, activations(), call))
            )
        )
    )(p)
    assert np.all(np.isfinite(grads["router"]))
    assert np.any(np.asarray(grads["router"]) != 0) == reaches


@pytest.mark.parametrize("also_train, trained", [(("threshold",), False), (("aux_loss",), True)])
def test_a_router_that_nothing_trains_is_warned_of(also_train, trained, caplog):
    """With a gate of 1 only the loss of `aux_loss` reaches it."""
    say_if_the_router_is_fixed.cache_clear()
    families.make(
        {
            "depth_routing.kind": "mod",
            "depth_routing.gate": "one",
            "depth_routing.causal": "predictor",
            "depth_routing.also_train": also_train,
        }
    )
    assert ("gate='one'" in caplog.text) != trained


def test_empty_places_have_finite_gradients():
    module, p = layer()
    x_BTD = activations()
    x_BTD[2] -= 10 * p["router"] / np.sum(p["router"] ** 2)  # nothing of row 2 is routed
    p = jax.tree.map(np.float32, p)
    call = Call(np.arange(LENGTH)[None], selection="causal")
    grads = families.jit(
        jax.grad(
            lambda params, x_BTD: jnp.sum(
                jnp.square(module.apply({"params": params}, x_BTD, call))
            ),
            argnums=(0, 1),
        )
    )(p, x_BTD)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    np.testing.assert_allclose(grads[1][2], 2 * x_BTD[2], rtol=1e-6)
