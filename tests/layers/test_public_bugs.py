"""Defects found in published Mixture-of-Depths code, one test each.

Every test states a property as a function of a layer, writes the defect out, and shows that the
property holds for efx and fails with the defect. Defects are described, not attributed.
"""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from efx.layers.blocks import Block
from efx.layers.info import CacheView, CallInfo, Mode, Tokens
from efx.layers.routing import depth, plans
from efx.layers.routing.depth import DepthRouted
from efx.layers.stack import Layer

ROWS, LENGTH, PLACES = 3, 12, 5
ROUTED = {
    "depth": 1,
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": PLACES / LENGTH,
    "depth_routing.gate": "sigmoid",
}


@functools.cache
def layer(**changes):
    """(routed layer, its parameters)."""
    model = families.make({**ROUTED, **{k.replace("__", "."): v for k, v in changes.items()}})
    return Layer(model.specs()[0]), families.random_params(model)["layers"]["block_0"]


def activations(seed=0):
    x_BTD = np.random.default_rng(seed).normal(size=(ROWS, LENGTH, 32))
    return jnp.asarray(x_BTD, jnp.float32)


def compiled(module, selection="train"):
    """(parameters, x, positions) -> (output, losses) of a layer. Whoever patches efx compiles
    again afterwards."""

    @families.jit
    def apply(params, x_BTD, positions_BT):
        info = CallInfo(Tokens(positions_BT), Mode(selection=selection))
        return module.apply({"params": params}, x_BTD, info, mutable=["losses"])

    def run(params, x_BTD, positions=range(LENGTH)):
        out_BTD, sown = apply(params, x_BTD, jnp.asarray(positions)[None])
        return np.asarray(out_BTD), {k: v[0] for k, v in sown["losses"].items()}

    return run


def output(module, params, x_BTD, **options):
    return compiled(module, **options)(params, x_BTD)[0]


def processed(out_BTD, x_BTD):
    """[B, T]: which tokens a layer changed."""
    return np.any(out_BTD != np.asarray(x_BTD), axis=-1)


# ---- the router --------------------------------------------------------------------------------


def test_router_shared_across_layers():
    """Property: what trains the choice of one block leaves the router of another alone."""
    model = families.make(
        {**ROUTED, "depth": 4, "depth_routing.every": 2, "depth_routing.bce_reaches_input": False}
    )
    params = families.random_params(model)

    def shared(params):
        """The defect: one router, made once and handed to every routed block."""
        one = params["layers"]["block_1"]["router"]
        blocks = {
            name: {**block, "router": one} if "router" in block else block
            for name, block in params["layers"].items()
        }
        return {**params, "layers": blocks}

    def reach(prepare):
        """Gradient of block 3's router loss by (block 1's router, block 3's router)."""

        def loss(params):
            _, sown = model.clone(selection="train").apply(
                {"params": prepare(params)}, families.tokens(batch=2), mutable=["losses"]
            )
            return sown["losses"]["layers"]["block_3"]["router_bce"][0]

        grads = families.jit(jax.grad(loss))(params)["layers"]
        return [np.abs(grads[name]["router"]).max() for name in ("block_1", "block_3")]

    first, own = reach(lambda params: params)
    assert first == 0 and own > 1e-3
    first, own = reach(shared)
    assert first > 1e-3 and own == 0


def test_softmax_over_the_selected_sequence_leaks(monkeypatch):
    """Property: under the causal decision no output moves when later tokens change."""
    module, params = layer()
    x_BTD, cut = activations(), 8
    # Scores up to the cut stay, those after it rise.
    push_D = 4 * params["router"] / jnp.sum(jnp.square(params["router"]))
    changed_BTD = x_BTD.at[:, cut:].add(push_D)

    def leak():
        """How far outputs before `cut` move."""
        run = compiled(module, "causal")
        (before_BTD, _), (after_BTD, _) = run(params, x_BTD), run(params, changed_BTD)
        assert np.any(before_BTD[:, cut:] != after_BTD[:, cut:])
        return np.abs(before_BTD - after_BTD)[:, :cut].max()

    def softmax_gate(score_BC):
        """The defect: a token's weight depends on all the tokens selected with it."""
        return jax.nn.softmax(score_BC, axis=-1)

    assert np.sum(np.asarray(x_BTD @ params["router"] > 0)[:, :cut]) > ROWS
    assert leak() == 0
    monkeypatch.setitem(depth.GATES, "sigmoid", softmax_gate)
    assert leak() > 1e-3


def test_auxiliary_targets_without_batch_offset(monkeypatch):
    """Property: the router's loss on a batch is the mean of its loss on each row alone."""
    module, params = layer()
    x_BTD = activations()

    def losses():
        """(of the batch, mean of the rows)."""
        run = compiled(module)
        alone = [run(params, x_BTD[b : b + 1])[1]["router_bce"] for b in range(ROWS)]
        return run(params, x_BTD)[1]["router_bce"], np.mean(alone)

    def flat(plan, length):
        """The defect: indices within a row, written into all rows laid end to end."""
        batch = plan.indices_BC.shape[0]
        ones = jnp.zeros(batch * length, bool).at[plan.indices_BC.reshape(-1)].set(True)
        return ones.reshape(batch, length)

    together, alone = losses()
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    plan = plans.topk_plan(x_BTD @ params["router"], PLACES)
    assert np.sum(flat(plan, LENGTH)[1:]) == 0  # only row 0 gets ones
    monkeypatch.setattr(plans, "selected", flat)
    together, alone = losses()
    assert abs(together - alone) > 0.01


def test_one_token_fewer_than_the_capacity(monkeypatch):
    """Property: training processes exactly C tokens of every row."""
    module, params = layer()

    def counts():
        x_BTD = activations()
        return processed(output(module, params, x_BTD), x_BTD).sum(axis=1).tolist()

    def strictly_above(scores_BT, size, *_, **__):
        """The defect: `weights > kth value` leaves the kth token out."""
        kth_B = jnp.sort(scores_BT, axis=1)[:, -size]
        return plans.first_plan(scores_BT > kth_B[:, None], size)

    assert counts() == [PLACES] * ROWS
    monkeypatch.setattr(plans, "topk_plan", strictly_above)
    assert counts() == [PLACES - 1] * ROWS


def test_predictor_fed_the_output_of_the_block():
    """Property: what the predictor says does not depend on the block that it decides about.

    It has to be known before the block runs, or nothing is saved by it.
    """
    if not hasattr(layer()[0].spec.routing, "also_train"):
        pytest.skip("no predictor yet: DepthRoutingConfig has no field also_train")
    model = families.make(
        {**ROUTED, "depth": 2, "depth_routing.every": 2, "depth_routing.causal": "predictor"}
    )
    params = families.random_params(model)["layers"]["block_1"]
    module, x_BTD = Layer(model.specs()[1]), activations()
    other = {**params, "mlp": jax.tree.map(jnp.negative, params["mlp"])}
    run = compiled(module)

    def fed_the_output(params):
        """The defect: the predictor reads what the block returns."""
        rng = np.random.default_rng(1)
        up_DF, down_F = rng.normal(size=(32, 16)), rng.normal(size=16)
        hidden_BTF = jax.nn.silu(run(params, x_BTD)[0] @ up_DF)
        plan = plans.topk_plan(x_BTD @ params["router"], PLACES)
        target_BT = plans.selected(plan, LENGTH).astype(jnp.float32)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(hidden_BTF @ down_F, target_BT))

    ours = [run(each, x_BTD)[1]["predictor_bce"] for each in (params, other)]
    assert ours[0] == ours[1] > 0
    assert abs(fed_the_output(params) - fed_the_output(other)) > 1e-3

    def loss(params, x_BTD):
        info = CallInfo(Tokens(jnp.arange(LENGTH)[None]), Mode(selection="train"))
        _, sown = module.apply({"params": params}, x_BTD, info, mutable=["losses", "stats"])
        return sown["losses"]["predictor_bce"][0]

    # And it reads through a stopped gradient: its loss trains the predictor and nothing else.
    grads, grad_x_BTD = families.jit(jax.grad(loss, argnums=(0, 1)))(params, x_BTD)
    own = grads.pop("predictor")
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(own))
    assert all(np.all(np.asarray(leaf) == 0) for leaf in [*jax.tree.leaves(grads), grad_x_BTD])


# ---- what goes in and what comes out -----------------------------------------------------------


def test_positions_of_routed_tokens_renumbered(monkeypatch):
    """Property: attention between two routed tokens depends on how far apart they were."""
    module, params = layer()
    x_BTD = activations()

    def moved_by_stretching():
        """How far the output moves when every token stands at twice its position."""
        run, positions = compiled(module), range(0, 2 * LENGTH, 2)
        return np.abs(run(params, x_BTD)[0] - run(params, x_BTD, positions)[0]).max()

    def renumbered(plan, info, budget):
        """The defect: rotary frequencies of places 0..C-1, whichever tokens were picked."""
        return info.with_tokens(positions_BT=jnp.arange(plan.indices_BC.shape[1])[None])

    assert moved_by_stretching() > 0.01
    monkeypatch.setattr(plans.Plan, "info", renumbered)
    assert moved_by_stretching() == 0


class WithResidual(Block):
    """A block that already adds its input."""

    def __call__(self, x_BTD, info, context=None):
        return x_BTD + super().__call__(x_BTD, info, context)


def put(x_BTD, y_BCD, plan):
    return jax.vmap(lambda x, i, y: x.at[i].set(y))(x_BTD, plan.indices_BC, y_BCD)


def weighted_whole(x_BTD, delta_BCD, plan):
    """out = g * (x + f): the weight scales the residual too, and may turn it round."""
    gate_BC1 = jax.nn.sigmoid(plans.gather(x_BTD, plan)[..., :1])
    whole_BCD = gate_BC1 * (plans.gather(x_BTD, plan) + delta_BCD)
    return put(x_BTD, whole_BCD, plan)


def only_the_routed(x_BTD, delta_BCD, plan):
    """Tokens that skip the block lose their residual."""
    routed_BCD = plans.gather(x_BTD, plan) + delta_BCD
    return put(jnp.zeros_like(x_BTD), routed_BCD, plan)


@pytest.mark.parametrize(
    "defect, changed",
    [
        ("doubled", PLACES),
        (weighted_whole, PLACES),
        (only_the_routed, LENGTH - PLACES),
    ],
)
def test_residual_not_added_exactly_once(monkeypatch, defect, changed):
    """Property: a block that computes zeros changes no token, routed or not."""
    module, params = layer()
    zeros = {part: jax.tree.map(jnp.zeros_like, params[part]) for part in ("attention", "mlp")}
    params = {**params, **zeros}
    x_BTD = activations()
    np.testing.assert_array_equal(output(module, params, x_BTD), x_BTD)
    if defect == "doubled":
        spec, block = module.spec, functools.partial(WithResidual, module.spec.block)
        module = DepthRouted(block, spec.routing, spec.capacity)
    else:
        monkeypatch.setattr(plans, "scatter_add", defect)
    changed_BT = processed(output(module, params, x_BTD), x_BTD)
    assert changed_BT.sum(axis=1).tolist() == [changed] * ROWS


def test_routed_tokens_out_of_time_order(monkeypatch):
    """Property: among the routed tokens too, the first sees itself alone."""
    module, params = layer()
    x_BTD = activations()
    score_BT = np.asarray(x_BTD @ params["router"])
    first_B = [min(np.argsort(-score_T)[:PLACES]) for score_T in score_BT]
    # Any other content behind the same scores: only directions across the router move.
    router_D = params["router"] / jnp.linalg.norm(params["router"])
    along_BT = activations(1) @ router_D
    noise_BTD = activations(1) - jnp.einsum("BT,D->BTD", along_BT, router_D)
    later_BT = np.arange(LENGTH)[None] > np.array(first_B)[:, None]
    changed_BTD = x_BTD + jnp.where(later_BT[..., None], noise_BTD, 0.0)

    def moved():
        """How far the first routed token of each row moves when what follows changes."""
        run = compiled(module)
        (a_BTD, _), (b_BTD, _) = run(params, x_BTD), run(params, changed_BTD)
        assert np.any(a_BTD != b_BTD)
        return max(np.abs(a_BTD - b_BTD)[b, t].max() for b, t in enumerate(first_B))

    def by_score(scores_BT, size, *_, **__):
        """The defect: tokens in the order of their scores under a triangular mask."""
        indices_BC = jnp.argsort(-scores_BT, axis=1)[:, :size]
        return plans.Plan(indices_BC, jnp.ones(indices_BC.shape, bool))

    def gather(x_BT, plan, fill=0):  # efx's own promises XLA sorted indices
        return jax.vmap(lambda x, index: x[index])(x_BT, plan.indices_BC)

    def scatter_add(x_BT, y_BC, plan):
        return put(x_BT, gather(x_BT, plan) + y_BC, plan)

    assert moved() < 1e-5
    monkeypatch.setattr(plans, "topk_plan", by_score)
    monkeypatch.setattr(plans, "gather", gather)
    monkeypatch.setattr(plans, "scatter_add", scatter_add)
    assert moved() > 0.01


def test_rows_of_a_batch_compete(monkeypatch):
    """Property: what comes out for a row does not depend on the rows beside it."""
    module, params = layer()
    x_BTD = activations()
    push_D = 20 * params["router"] / jnp.sum(jnp.square(params["router"]))
    # Row 0 stays; the others hold something else, and outbid it.
    others_BTD = x_BTD.at[1:].set(activations(1)[1:]).at[1:].add(push_D)

    def moved():
        run = compiled(module)
        (before_BTD, _), (after_BTD, _) = run(params, x_BTD), run(params, others_BTD)
        return np.abs(before_BTD - after_BTD)[0].max()

    def over_the_batch(scores_BT, size, *_, **__):
        """The defect: the best B*C tokens of the batch, from whichever row."""
        best = jnp.argsort(-scores_BT.reshape(-1))[: scores_BT.shape[0] * size]
        picked = jnp.zeros(scores_BT.size, bool).at[best].set(True)
        return plans.first_plan(picked.reshape(scores_BT.shape), scores_BT.shape[1])

    assert moved() == 0
    monkeypatch.setattr(plans, "topk_plan", over_the_batch)
    assert moved() > 0.01


# ---- decoding ----------------------------------------------------------------------------------


def one_by_one(step):
    """The outputs of `step(x [B, 1, D], position)` for each token in turn, as one array."""
    x_BTD = activations()
    return np.concatenate([step(x_BTD[:, t : t + 1], t) for t in range(LENGTH)], axis=1)


@functools.cache
def decoded():
    """Outputs of the routed layer against its cache, one token at a time."""
    module, params = layer(depth_routing__slack=2.0)

    def info(t):
        return CallInfo(Tokens(jnp.full((ROWS, 1), t)), cache=CacheView(size=LENGTH))

    @families.jit
    def decode(state, x_B1D, t):
        return module.apply({"params": params, **state}, x_B1D, info(t), mutable=["cache"])

    x_B1D, key = activations()[:, :1], jax.random.key(0)
    shapes = jax.eval_shape(lambda: module.init(key, x_B1D, info(0)))
    state = {
        "cache": jax.tree_util.tree_map_with_path(  # empty slots are at position -1
            lambda path, x: jnp.full(x.shape, -1 if path[-1].key == "position" else 0, x.dtype),
            shapes["cache"],
        )
    }

    def step(x_B1D, t):
        out_B1D, new = decode(state, x_B1D, jnp.int32(t))
        state.update(new)
        return out_B1D

    return one_by_one(step)


@functools.cache
def expected():
    """Outputs of the full forward pass under the causal decision."""
    return output(*layer(depth_routing__slack=2.0), activations(), selection="causal")


def test_every_token_processed_at_decode():
    """Property: token by token, the same tokens skip the block as in the full forward pass."""
    module, params = layer(depth_routing__slack=2.0)
    x_BTD = activations()
    expected_BT = processed(expected(), x_BTD)
    assert 3 < expected_BT.sum() < ROWS * LENGTH - 3
    np.testing.assert_array_equal(processed(decoded(), x_BTD), expected_BT)
    run = compiled(module)

    def topk_of_one(x_B1D, position):
        """The defect: top-k over the new token alone, and of one token the best is that one."""
        return run(params, x_B1D, [position])[0]

    assert processed(one_by_one(topk_of_one), x_BTD).all()


def test_cache_ignored_at_decode():
    """Property: token by token, a routed token attends to the routed tokens before it."""
    module, params = layer(depth_routing__slack=2.0)
    np.testing.assert_allclose(decoded(), expected(), atol=1e-4)
    run = compiled(module, "causal")

    def without_cache(x_B1D, position):
        """The defect: the block sees the new token and nothing before it."""
        return run(params, x_B1D, [position])[0]

    assert np.abs(one_by_one(without_cache) - expected()).max() > 0.01
