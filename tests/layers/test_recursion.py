"""Recursion: a shared stack applied to fewer tokens each time, against a plain loop in numpy."""

import dataclasses
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from test_routing import norm, np_layer, np_mlp, np_topk

from efx import flops, models
from efx.layers import stack
from efx.layers.block import Block
from efx.layers.call import Call
from efx.routing import plans, quantiles
from efx.routing.mod import MoDBlock

LENGTH = families.LENGTH
RECURSION = {
    "depth": 4,
    "depth_routing.kind": "recursion",
    "depth_routing.recursions": 3,
    "depth_routing.capacity": (1.0, 0.6, 0.3),
    "depth_routing.slack": 1.25,
}


def np_stack(x_TD, params, spec, alive_T, seen_T):
    """The shared blocks on the tokens that are alive, which attend to those that are seen;
    `np_layer` adds each."""
    for i, block in enumerate(spec.blocks, 1):
        p = {"router": np.zeros(x_TD.shape[1]), **params["layers"][f"block_{i}"]}
        layer, places = stack.LayerSpec(block), np.arange(len(x_TD))
        x_TD = np_layer(x_TD, p, layer, alive_T, places, "one", seen_T)
    return x_TD


def np_recursion(model, params, x_TD, selection):
    """(x after the last block, [tokens of each routed step]) of one row."""
    params = jax.tree.map(np.float64, params)
    everyone_T, alive_T, survivors = np.ones(len(x_TD), bool), np.ones(len(x_TD), bool), []
    for name, spec in zip(stack.names(model.specs()), model.specs(), strict=True):
        if isinstance(spec, stack.LayerSpec):
            p = {"router": np.zeros(model.config.width), **params["layers"][name]}
            x_TD = np_layer(x_TD, p, spec, everyone_T, np.arange(len(x_TD)), "one")
        elif spec.routing is None:
            x_TD = np_stack(x_TD, params, spec, everyone_T, everyone_T)
        else:
            score_T = x_TD @ params["layers"][name]["router"]
            if selection == "train":
                score_of_alive_T = np.where(alive_T, score_T, -np.inf)
                alive_T = alive_T & np_topk(
                    score_of_alive_T, plans.capacity(spec.capacity, len(x_TD))
                )
            else:
                alive_T = alive_T & (score_T > 0)
                slots = plans.capacity(spec.capacity * spec.routing.slack, len(x_TD))
                alive_T = alive_T & (np.cumsum(alive_T) <= slots)
            gate_T1 = 1 / (1 + np.exp(-score_T[:, None]))
            seen_T = everyone_T if spec.routing.kv_for_skipped else alive_T
            delta_TD = np_stack(x_TD, params, spec, alive_T, seen_T) - x_TD
            kept_TD, p = x_TD, params["layers"][name]
            if spec.routing.skip_mlp:
                b = spec.blocks[0]
                h_TD = norm(x_TD, p["skip_mlp"]["norm"], b.norm, b.norm_eps)
                kept_TD = x_TD + np_mlp(h_TD, p["skip_mlp"]["mlp"], b.mlp.activation)
            x_TD = np.where(alive_T[:, None], x_TD + gate_T1 * delta_TD, kept_TD)
            survivors.append(alive_T)
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
        if isinstance(context.module, MoDBlock) and context.method_name == "route":
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
                Call(jnp.arange(tokens_BT.shape[1])[None], segments_BT, selection=model.selection),
            )
        return out_BTD, list(seen)

    return jax.device_get(apply(params, tokens_BT))


@pytest.mark.parametrize(
    "selection, capacity, options",
    [
        ("train", (1.0, 0.6, 0.3), {}),
        ("causal", (1.0, 0.6, 0.3), {}),
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
    outside = 0
    for b in range(3):
        x_TD = np.float64(params["embed"]["embedding"])[tokens_BT[b]]
        expected_TD, survivors = np_recursion(model, params, x_TD, selection)
        np.testing.assert_allclose(out_BTD[b], expected_TD, atol=1e-3)
        assert len(survivors) == len(seen) == (3 if capacity == (0.5, 0.5, 0.1) else 2)
        alive_T = np.ones(LENGTH, bool)
        for (in_BTD, state_BTD, routed_BT), routed_T in zip(seen, survivors, strict=True):
            np.testing.assert_array_equal(routed_BT[b], routed_T)
            assert not np.any(routed_T & ~alive_T)
            changed_T = np.any(state_BTD[b] != in_BTD[b], axis=-1)
            assert np.all(changed_T[routed_T]) and (options or not np.any(changed_T[~routed_T]))
            outside += np.sum(alive_T & ~routed_T)
            alive_T = routed_T
    assert outside > 5


@pytest.mark.slow
def test_documents_and_padding():
    """Top-k within each document and among its survivors; padding takes no place."""
    model = build()[0].clone(selection="train")
    segments_BT = jnp.asarray(np.repeat([[1, 2, 0]], 8, 0).repeat([12, 12, 8], 1))
    _, seen = traced(model, build()[1], families.tokens(), segments_BT)
    (*_, first_BT), (*_, second_BT) = seen
    assert not np.any(first_BT[:, 24:]) and not np.any(second_BT & ~first_BT)
    for part in (slice(0, 12), slice(12, 24)):
        np.testing.assert_allclose(first_BT[:, part].sum(axis=1), 0.6 * 12, atol=1)
        np.testing.assert_allclose(second_BT[:, part].sum(axis=1), 0.3 * 12, atol=1)


def test_once_for_all_tokens_is_the_dense_model():
    """The same blocks, under the same names: a dense model's parameters are those of R = 1, and
    each further step adds a router."""
    once = families.make(
        {**RECURSION, "depth_routing.recursions": 1, "depth_routing.capacity": (1.0,)}
    )
    dense = models.changed(
        once, depth_routing=dataclasses.replace(once.config.depth_routing, kind="none")
    )
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
def test_losses_and_statistics_are_of_the_survivors():
    """Loss and agreement among the tokens that are left, fractions of the whole sequence."""
    model, params = build()
    model = model.clone(selection="train")
    sown = families.jit(lambda p, t: model.apply({"params": p}, t, mutable=["losses", "stats"])[1])(
        params, families.tokens()
    )
    _, seen = traced(model, params, families.tokens())
    selectable_BT = np.ones((families.BATCH, LENGTH), bool)
    for number, (in_BTD, _, routed_BT) in enumerate(seen, 1):
        name = f"recursion_{number}"
        score_BT = in_BTD @ np.asarray(params["layers"][name]["router"])
        loss_BT = np.logaddexp(0, score_BT) - score_BT * routed_BT
        stats = {key: float(value[0]) for key, value in sown["stats"]["layers"][name].items()}
        np.testing.assert_allclose(
            sown["losses"]["layers"][name]["router_bce"][0],
            loss_BT[selectable_BT].mean(),
            rtol=1e-4,
        )
        decided_BT = (score_BT > 0) & selectable_BT
        agree_BT = decided_BT == routed_BT
        np.testing.assert_allclose(
            stats["router/accuracy"], agree_BT[selectable_BT].mean(), rtol=1e-5
        )
        np.testing.assert_allclose(stats["router/decided_fraction"], decided_BT.mean(), rtol=1e-5)
        selectable_BT = routed_BT


@pytest.mark.slow
def test_threshold_follows_the_survivors():
    """The running quantile of a step lets through its share of those that reach it."""
    model = families.make({**RECURSION, "depth_routing.causal": "threshold"})
    params = families.random_params(model)
    state = {
        "layers": {
            name: {"quantile": jnp.float32(0), "quantile_steps": jnp.int32(0)}
            for name in ("recursion_1", "recursion_2")
        }
    }
    train = families.jit(
        lambda p, s, t: model.apply(
            {"params": p, "state": s}, t, train=True, mutable=["stats", quantiles.COLLECTION]
        )[1]
    )
    sown = train(params, state, families.tokens())[quantiles.COLLECTION]
    state = quantiles.followed(state, state, sown)
    stats = train(params, state, families.tokens())["stats"]["layers"]
    for name, share in (("recursion_1", 0.6), ("recursion_2", 0.3)):
        got = float(stats[name]["router/decided_fraction"][0])
        np.testing.assert_allclose(got, share, atol=0.05)


@pytest.mark.slow
def test_the_parameters_are_the_same_at_every_stage_of_the_capacity():
    """Also at a stage where no step leaves a token out: each is as if its capacity were that one,
    with a router for every step but the first."""
    model, params = build(0.6, causal="threshold", capacity_stages=((0.3, 1.0), (0.6, 0.8)))
    variables = {"params": params, **families.random_state(model)}
    assert {f"recursion_{i}" for i in (1, 2)} < set(params["layers"])
    for capacity, shares in ((1.0, (1.0, 1.0, 1.0)), (0.8, (1.0, 0.8, 0.64)), (0.6, None)):
        staged = models.changed(model, **{"depth_routing.capacity": capacity})
        shapes = models.variable_shapes(staged)
        kept = {name: nn.unbox(shapes)[name] for name in variables}
        assert jax.tree.structure(kept) == jax.tree.structure(variables)
        steps = staged.specs()[1:-1]
        assert shares is None or [s.capacity for s in steps] == pytest.approx(shares)
        assert [s.routing is not None for s in steps] == [False, True, True]
    # Where it has come to its capacity the model is the one without stages.
    plain, tokens_BT = build(0.6, causal="threshold")[0], families.tokens(batch=2)
    np.testing.assert_array_equal(
        *(families.jit(m.apply)(variables, tokens_BT) for m in (model, plain))
    )


def test_every_step_has_a_cache_of_its_own_size():
    """ceil(c T slack) places for a routed step, T for one that takes all."""
    model, _ = build()
    cache = models.init_cache(model, 2, LENGTH)["layers"]
    sizes = {"recursion_0": 32, "recursion_1": 24, "recursion_2": 12}
    for block in ("block_1", "block_2"):
        found = {name: part["position"] for name, part in cache[block]["attention"].items()}
        assert {name: position.shape[1] for name, position in found.items()} == sizes
        assert all(np.all(position == -1) for position in found.values())
    assert cache["block_3"]["attention"]["position"].shape[1] == LENGTH
    assert set(cache["recursion_2"]) == {"reached", "routed", "overflow"}
    assert "recursion_0" not in cache


@functools.cache
def counting_decoder():
    """A step for one row that records which blocks run."""
    model, params = build()
    ran, step = [], families.decoder(model, {"params": params}, LENGTH)

    def count(next_function, arguments, keywords, context):
        if isinstance(context.module, Block) and context.method_name == "__call__":
            name, tag = context.module.path[-1], arguments[1].cache.tag
            jax.debug.callback(lambda: ran.append((name, tag)))
        return next_function(*arguments, **keywords)

    def run(*arguments):
        ran.clear()
        with nn.intercept_methods(count):
            result = jax.block_until_ready(step(*arguments))
        jax.effects_barrier()
        return result, list(ran)

    return run


@pytest.mark.slow
def test_a_skipped_step_does_not_run():
    """One row: a step runs for its survivors only, the next never for others, and its cache holds
    their positions."""
    model, params = build()
    tokens_BT, reached = families.tokens(batch=1), {"recursion_1": [], "recursion_2": []}
    expected_BTV = families.jit(model.apply)({"params": params}, tokens_BT)
    cache = models.init_cache(model, 1, LENGTH)
    for t in range(LENGTH):
        before = {name: int(cache["layers"][name]["routed"][0]) for name in reached}
        (logits_BTV, cache), ran = counting_decoder()(
            cache, tokens_BT[:, t : t + 1], jnp.full((1, 1), t, jnp.int32)
        )
        np.testing.assert_allclose(logits_BTV[0, 0], expected_BTV[0, t], atol=1e-4)
        for name, places in reached.items():
            routed = int(cache["layers"][name]["routed"][0]) - before[name]
            assert ran.count(("block_1", name)) == ran.count(("block_2", name)) == routed
            places += [t] * routed
        assert ran.count(("block_1", "recursion_0")) == ran.count(("block_0", "")) == 1
    assert set(reached["recursion_2"]) < set(reached["recursion_1"]) < set(range(LENGTH))
    assert reached["recursion_2"]
    for name, places in reached.items():
        held = np.asarray(cache["layers"]["block_2"]["attention"][name]["position"][0])
        np.testing.assert_array_equal(held[: len(places)], places)
        assert np.all(held[len(places) :] == -1)
