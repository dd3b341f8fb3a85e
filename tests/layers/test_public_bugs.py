"""Defects found in published Mixture-of-Depths code, one test each.

Every test states the property of a layer that the defect breaks, on inputs on which it would show.
Where the defect can be written beside efx, the test shows that it breaks the property. Defects are
described, not attributed.
"""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from efx.layers.call import CacheView, Call
from efx.layers.stack import Layer

ROWS, LENGTH, CAPACITY, WIDTH = 3, 12, 5, 16
ROUTED = {
    "depth": 1,
    "width": WIDTH,
    "attention.num_heads": 2,
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": CAPACITY / LENGTH,
    "depth_routing.gate": "sigmoid",
}


@functools.cache
def routed_model(**changes):
    changes = {f"depth_routing.{key}": value for key, value in changes.items()}
    return families.make({**ROUTED, **changes})


def layer(**changes):
    """(routed layer, its parameters)."""
    model = routed_model(**changes)
    return Layer(model.specs()[0]), families.random_params(model)["layers"]["block_0"]


def activations(seed=0):
    x_BTD = np.random.default_rng(seed).normal(size=(ROWS, LENGTH, WIDTH))
    return jnp.asarray(x_BTD, jnp.float32)


@functools.cache
def compiled(module, selection):
    @families.jit
    def apply(params, x_BTD, positions_BT):
        call = Call(positions_BT, selection=selection)
        return module.apply({"params": params}, x_BTD, call, mutable=["losses"])

    return apply


def run(module, params, x_BTD, positions=range(LENGTH), selection="train"):
    """(output, losses) of a layer."""
    positions_BT = jnp.asarray(positions)[None]
    out_BTD, sown = compiled(module, selection)(params, x_BTD, positions_BT)
    return np.asarray(out_BTD), {k: v[0] for k, v in sown["losses"].items()}


def processed(out_BTD, x_BTD):
    """[B, T]: the tokens that a layer changed."""
    return np.any(out_BTD != np.asarray(x_BTD), axis=-1)


def direction(params):
    """[1, 1, D]: added to a token, it raises the score by 1."""
    return (params["router"] / jnp.sum(jnp.square(params["router"])))[None, None]


# ---- the router --------------------------------------------------------------------------------


def test_router_shared_across_layers():
    """The loss of one block's router leaves the router of another alone. The defect: one router,
    made once and handed to every routed block."""
    model = families.make({**ROUTED, "depth": 2, "depth_routing.bce_reaches_input": False})
    params = families.random_params(model)

    def shared(params):
        one = params["layers"]["block_0"]["router"]
        blocks = {name: {**block, "router": one} for name, block in params["layers"].items()}
        return {**params, "layers": blocks}

    def loss(params):
        _, sown = model.clone(selection="train").apply(
            {"params": params}, families.tokens(batch=2), mutable=["losses"]
        )
        return sown["losses"]["layers"]["block_1"]["router_bce"][0]

    @families.jit
    def gradients(params):
        both = jax.grad(loss)(params), jax.grad(lambda params: loss(shared(params)))(params)
        return [[grads["layers"][f"block_{i}"]["router"] for i in (0, 1)] for grads in both]

    efx, defect = [[np.abs(grad).max() for grad in pair] for pair in gradients(params)]
    assert efx[0] == 0 and efx[1] > 1e-3
    assert defect[0] > 1e-3 and defect[1] == 0


def test_softmax_over_the_selected_sequence_leaks():
    """Under the causal decision no output moves when later tokens change. The defect: gates are a
    softmax over the selected tokens, so each depends on later ones."""
    module, params = layer()
    x_BTD, cut = activations(), 8
    # Scores up to the cut stay, those after it rise.
    changed_BTD = x_BTD.at[:, cut:].add(4 * direction(params))
    assert np.sum(np.asarray(x_BTD @ params["router"] > 0)[:, :cut]) > ROWS
    before_BTD, after_BTD = (
        run(module, params, x, selection="causal")[0] for x in (x_BTD, changed_BTD)
    )
    assert np.any(before_BTD[:, cut:] != after_BTD[:, cut:])
    np.testing.assert_array_equal(before_BTD[:, :cut], after_BTD[:, :cut])


def test_auxiliary_targets_without_batch_offset():
    """The router's loss on a batch is the mean of its loss on each row alone. The defect: indices
    within a row, written into all rows laid end to end, so that only row 0 gets ones."""
    module, params = layer()
    x_BTD = activations()
    alone = [run(module, params, x_BTD[b : b + 1])[1]["router_bce"] for b in range(ROWS)]
    together = run(module, params, x_BTD)[1]["router_bce"]
    np.testing.assert_allclose(together, np.mean(alone), rtol=1e-5)


def test_one_token_fewer_than_the_capacity():
    """Training processes exactly C tokens of every row. The defect: `weights > kth value` leaves
    the kth token out."""
    module, params = layer()
    x_BTD = activations()
    counts = processed(run(module, params, x_BTD)[0], x_BTD).sum(axis=1)
    assert counts.tolist() == [CAPACITY] * ROWS


def test_predictor_fed_the_output_of_the_block():
    """The predictor does not depend on the block that it decides about: it has to be known before
    the block runs, or saves nothing. It reads through a stopped gradient."""
    module, params = layer(causal="predictor")
    x_BTD = activations()
    other = {**params, "mlp": jax.tree.map(jnp.negative, params["mlp"])}

    def fed_the_output(params):
        """The defect."""
        rng = np.random.default_rng(1)
        up_DF, down_F = rng.normal(size=(WIDTH, 16)), rng.normal(size=16)
        out_BTD = run(module, params, x_BTD)[0]
        target_BT = processed(out_BTD, x_BTD).astype(np.float32)
        logits_BT = jax.nn.silu(out_BTD @ up_DF) @ down_F
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits_BT, target_BT))

    first, second = (run(module, each, x_BTD)[1]["predictor_bce"] for each in (params, other))
    assert first == second > 0
    assert abs(fed_the_output(params) - fed_the_output(other)) > 1e-3

    def loss(params, x_BTD):
        call = Call(jnp.arange(LENGTH)[None], selection="train")
        _, sown = module.apply({"params": params}, x_BTD, call, mutable=["losses", "stats"])
        return sown["losses"]["predictor_bce"][0]

    grads, grad_x_BTD = families.jit(jax.grad(loss, argnums=(0, 1)))(params, x_BTD)
    own = grads.pop("predictor")
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(own))
    assert all(np.all(np.asarray(leaf) == 0) for leaf in [*jax.tree.leaves(grads), grad_x_BTD])


# ---- inputs and outputs of the block -----------------------------------------------------------


def test_positions_of_routed_tokens_renumbered():
    """Attention between two routed tokens depends on their distance in the sequence. The defect:
    rotary frequencies of positions 0..C-1, for any selected tokens."""
    module, params = layer()
    x_BTD = activations()
    near_BTD, far_BTD = (
        run(module, params, x_BTD, positions)[0]
        for positions in (range(LENGTH), range(0, 2 * LENGTH, 2))
    )
    assert np.abs(near_BTD - far_BTD).max() > 0.01


@pytest.mark.parametrize("gate", ["sigmoid", "tanh"])
def test_residual_not_added_exactly_once(gate):
    """A block that computes zeros changes no token, routed or not. The defects: the residual is
    added twice, is multiplied by the gate, or is lost by the tokens that skip the block."""
    module, params = layer(gate=gate)
    zeros = {part: jax.tree.map(jnp.zeros_like, params[part]) for part in ("attention", "mlp")}
    x_BTD = activations()
    np.testing.assert_array_equal(run(module, {**params, **zeros}, x_BTD)[0], x_BTD)


def test_routed_tokens_out_of_time_order():
    """Among the routed tokens, the first sees itself alone. The defect: tokens in the order of
    their scores under a triangular mask."""
    module, params = layer()
    x_BTD = activations()
    score_BT = np.asarray(x_BTD @ params["router"])
    routed_BC = np.argsort(-score_BT)[:, :CAPACITY]
    first_B = routed_BC.min(axis=1)
    assert np.any(routed_BC[:, 0] != first_B)
    # Other content with the same scores: a change orthogonal to the router.
    router_D = params["router"] / jnp.linalg.norm(params["router"])
    along_BT = activations(1) @ router_D
    noise_BTD = activations(1) - jnp.einsum("BT,D->BTD", along_BT, router_D)
    later_BT = np.arange(LENGTH)[None] > first_B[:, None]
    changed_BTD = x_BTD + jnp.where(later_BT[..., None], noise_BTD, 0.0)
    a_BTD, b_BTD = (run(module, params, x)[0] for x in (x_BTD, changed_BTD))
    assert np.any(a_BTD != b_BTD)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(a_BTD[rows, first_B], b_BTD[rows, first_B], atol=1e-5)


def test_rows_of_a_batch_compete():
    """The output of a row does not depend on the rows beside it. The defect: the best B*C tokens of
    the batch, from any row."""
    module, params = layer()
    x_BTD = activations()
    # Row 0 stays; the others hold something else with higher scores.
    others_BTD = x_BTD.at[1:].set(activations(1)[1:] + 20 * direction(params))
    before_BTD, after_BTD = (run(module, params, x)[0] for x in (x_BTD, others_BTD))
    np.testing.assert_array_equal(before_BTD[0], after_BTD[0])


# ---- decoding ----------------------------------------------------------------------------------


def one_by_one(step):
    """The outputs of `step(x [B, 1, D], position)` for each token in turn, as one array."""
    x_BTD = activations()
    return np.concatenate([step(x_BTD[:, t : t + 1], t) for t in range(LENGTH)], axis=1)


@functools.cache
def decoded():
    """Outputs of the routed layer with its cache, one token at a time."""
    module, params = layer(slack=2.0)

    def call(t):
        return Call(jnp.full((ROWS, 1), t), cache=CacheView(size=LENGTH))

    @families.jit
    def decode(state, x_B1D, t):
        return module.apply({"params": params, **state}, x_B1D, call(t), mutable=["cache"])

    x_B1D, key = activations()[:, :1], jax.random.key(0)
    shapes = jax.eval_shape(lambda: module.init(key, x_B1D, call(0)))
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


def test_every_token_processed_at_decode():
    """Token by token, the same tokens skip the block as in the full forward pass. The defect: top-k
    over the new token alone always selects it."""
    module, params = layer(slack=2.0)
    x_BTD = activations()
    expected_BT = processed(run(module, params, x_BTD, selection="causal")[0], x_BTD)
    assert 3 < expected_BT.sum() < ROWS * LENGTH - 3
    np.testing.assert_array_equal(processed(decoded(), x_BTD), expected_BT)
    topk_of_one = one_by_one(lambda x_B1D, t: run(module, params, x_B1D, [t])[0])
    assert processed(topk_of_one, x_BTD).all()


def test_cache_ignored_at_decode():
    """Token by token, a routed token attends to the routed tokens before it. The defect: the block
    sees the new token and nothing before it."""
    module, params = layer(slack=2.0)
    expected_BTD = run(module, params, activations(), selection="causal")[0]
    np.testing.assert_allclose(decoded(), expected_BTD, atol=1e-4)
    without_cache = one_by_one(
        lambda x_B1D, t: run(module, params, x_B1D, [t], selection="causal")[0]
    )
    assert np.abs(without_cache - expected_BTD).max() > 0.01
