"""Defects found in published Mixture-of-Depths code, one test each.

Every test states the property of a layer that the defect breaks, on inputs on which it would show.
Where the defect can be written beside efx, the test shows that it breaks the property. Defects are
described, not attributed. tests/contract/test_decode.py covers the two of decoding: every token is
processed, because top-k over one new token always selects it; and a new token does not attend to
the cache.
"""

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from routing_reference import LENGTH, OPTIONS, ROWS, activations, layer, run

from efx.layers.token_context import TokenContext

SLOTS = LENGTH // 2


def processed(out_BTD, x_BTD):
    """[B, T]: the tokens that a layer changed."""
    return np.any(np.asarray(out_BTD) != x_BTD, axis=-1)


def direction(p):
    """[D]: added to a token, it raises the score by 1."""
    return np.float32(p["router"] / np.sum(np.square(p["router"])))


# ---- the router --------------------------------------------------------------------------------


def test_router_shared_across_layers():
    """The loss of one block's router leaves the router of another alone. The defect: one router,
    made once and handed to every routed block."""
    model = families.make({**OPTIONS, "depth": 2, "depth_routing.bce_reaches_input": False})
    model, params = model.clone(selection="train"), families.random_params(model)

    def shared(params):
        one = params["layers"]["block_0"]["router"]
        blocks = {name: {**block, "router": one} for name, block in params["layers"].items()}
        return {**params, "layers": blocks}

    def loss(params):
        _, sown = model.apply({"params": params}, families.tokens(batch=2), mutable=["losses"])
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
    module, p = layer()
    x_BTD, cut = activations(), 8
    changed_BTD = x_BTD.copy()
    changed_BTD[:, cut:] += 4 * direction(p)  # scores after the cut rise
    assert np.sum((x_BTD @ p["router"] > 0)[:, :cut]) > ROWS
    before_BTD, after_BTD = (run(module, p, x, selection="causal")[0] for x in (x_BTD, changed_BTD))
    assert np.any(before_BTD[:, cut:] != after_BTD[:, cut:])
    np.testing.assert_array_equal(before_BTD[:, :cut], after_BTD[:, :cut])


def test_auxiliary_targets_without_batch_offset():
    """The router's loss on a batch is the mean of its loss on each row alone. The defect: indices
    within a row, written into all rows laid end to end, so that only row 0 gets ones."""
    module, p = layer()
    x_BTD = activations()
    alone = [run(module, p, x_BTD[b : b + 1])[1]["router_bce"] for b in range(ROWS)]
    np.testing.assert_allclose(run(module, p, x_BTD)[1]["router_bce"], np.mean(alone), rtol=1e-5)


def test_one_token_fewer_than_the_capacity():
    """Training processes exactly C tokens of every row. The defect: `weights > kth value` leaves
    the kth token out."""
    module, p = layer()
    x_BTD = activations()
    counts = processed(run(module, p, x_BTD)[0], x_BTD).sum(axis=1)
    assert counts.tolist() == [SLOTS] * ROWS


def test_predictor_fed_the_output_of_the_block():
    """The predictor does not depend on the block that it decides about, which it could not save
    otherwise; it reads through a stopped gradient. The defect: it reads the block's output."""
    module, p = layer(depth_routing__causal_decision="predictor")
    x_BTD = activations()
    other = {**p, "mlp": jax.tree.map(np.negative, p["mlp"])}
    first, second = (run(module, each, x_BTD)[1]["predictor_bce"] for each in (p, other))
    assert first == second > 0

    def loss(params, x_BTD):
        call = TokenContext(jnp.arange(LENGTH)[None], selection="train")
        _, sown = module.apply({"params": params}, x_BTD, call, mutable=["losses", "stats"])
        return sown["losses"]["predictor_bce"][0]

    params = jax.tree.map(np.float32, p)
    grads, grad_x_BTD = families.jit(jax.grad(loss, argnums=(0, 1)))(params, x_BTD)
    own = grads.pop("predictor")
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(own))
    assert all(np.all(np.asarray(leaf) == 0) for leaf in [*jax.tree.leaves(grads), grad_x_BTD])


# ---- inputs and outputs of the block -----------------------------------------------------------


def test_positions_of_routed_tokens_renumbered():
    """Attention between two routed tokens depends on their distance in the sequence. The defect:
    rotary frequencies of positions 0..C-1, for any selected tokens."""
    module, p = layer()
    near_T, x_BTD = np.arange(LENGTH), activations()
    near_BTD, far_BTD = (run(module, p, x_BTD, positions=k * near_T[None])[0] for k in (1, 2))
    assert np.abs(near_BTD - far_BTD).max() > 0.01


@pytest.mark.parametrize("gate", ["sigmoid", "tanh"])
def test_residual_not_added_exactly_once(gate):
    """A block that computes zeros changes no token, routed or not. The defects: the residual is
    added twice, is multiplied by the gate, or is lost by the tokens that skip the block."""
    module, p = layer(depth_routing__gate=gate)
    zeros = {part: jax.tree.map(np.zeros_like, p[part]) for part in ("attention", "mlp")}
    np.testing.assert_array_equal(run(module, {**p, **zeros}, activations())[0], activations())


def test_routed_tokens_out_of_time_order():
    """Among the routed tokens, the first sees itself alone. The defect: tokens in the order of
    their scores under a triangular mask."""
    module, p = layer()
    x_BTD = activations()
    routed_BC = np.argsort(-(x_BTD @ p["router"]))[:, :SLOTS]
    first_B = routed_BC.min(axis=1)
    assert np.any(routed_BC[:, 0] != first_B)
    # Other content with the same scores: a change orthogonal to the router.
    noise_BTD = activations(1) - (activations(1) @ p["router"])[..., None] * direction(p)
    later_BT = np.arange(LENGTH)[None] > first_B[:, None]
    changed_BTD = x_BTD + np.where(later_BT[..., None], noise_BTD, 0.0).astype(np.float32)
    a_BTD, b_BTD = (run(module, p, x)[0] for x in (x_BTD, changed_BTD))
    assert np.any(a_BTD != b_BTD)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(a_BTD[rows, first_B], b_BTD[rows, first_B], atol=1e-5)


def test_rows_of_a_batch_compete():
    """The output of a row does not depend on the rows beside it. The defect: the best B*C tokens of
    the batch, from any row."""
    module, p = layer()
    x_BTD, others_BTD = activations(), activations(1) + 20 * direction(p)
    others_BTD[0] = x_BTD[0]
    before_BTD, after_BTD = (run(module, p, x)[0] for x in (x_BTD, others_BTD))
    np.testing.assert_array_equal(before_BTD[0], after_BTD[0])
