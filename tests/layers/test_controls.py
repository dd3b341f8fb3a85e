"""Controls of depth routing: scores without parameters that do not read the activations."""

import fractions
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from held_out import evaluate
from refusals import refused

from efx import models
from efx.layers import selection
from efx.layers.token_context import TokenContext
from efx.models.stack import Layer
from efx.routing import scores
from efx.routing.config import DepthRoutingConfig
from efx.routing.scores import SCORES
from efx.train.eval_step import evaluation_keys
from efx.train.evaluator import describe

CHANGES = {
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": 0.25,
    "width": 8,
    "attention.num_heads": 1,
    "depth": 2,
    "mlp.hidden": 16,
}


@functools.cache
def control(name):
    """(model, variables) of two routed blocks, whose thresholds are those of even scores."""
    model = families.make({**CHANGES, "depth_routing.score": name, "depth_routing.gate": "one"})
    state = {f"block_{i}": {"threshold": threshold()} for i in range(2)}
    if name != "position":
        for i, block in enumerate(state.values()):
            block["scorer"] = {"seed": np.int32(1500 * i)}
    return model, {"params": families.random_params(model), "state": {"layers": state}}


def threshold(quantile=0.0):
    return {"quantile": np.float32(quantile), "steps": np.int32(1000)}


def score(name, call, capacity=0.25, seed=0):
    """Scores [B, T] of the block with this seed."""
    config = DepthRoutingConfig(kind="mod", score=name)
    x_BTD = np.zeros((*call.positions_BT.shape, 1), np.float32)
    variables = {} if name == "position" else {"state": {"seed": np.int32(seed)}}
    return np.asarray(SCORES[name](config, capacity, 1).apply(variables, x_BTD, call))


@functools.cache
def layers_of(model):
    """Compiled (variables, tokens, keys) -> (states below the blocks, states above them)."""

    @families.jit
    def run(variables, tokens_BT, keys):
        _, state = model.apply(
            variables,
            tokens_BT,
            rngs=keys,
            capture_intermediates=lambda module, method: isinstance(module, Layer),
            mutable=["intermediates"],
        )
        layers = state["intermediates"]["layers"]
        above = [layers[f"block_{i}"]["__call__"][0] for i in range(2)]
        return [model.bind(variables).embed(tokens_BT), *above[:-1]], above

    return run


def selected(model, variables, tokens_BT, keys):
    """bool [block, B, T]: the tokens that each block changes."""
    below, above = layers_of(model)(variables, tokens_BT, keys)
    return np.any(np.asarray(below) != np.asarray(above), axis=-1)


def test_every_block_draws_its_seed_when_the_model_is_made():
    model = control("token_hash")[0]
    scanned = models.changed(model, scan_layers=True)

    @families.jit
    def seeds(keys):
        made = [models.init(model, key)["state"] for key in keys]
        made.append(models.init(scanned, keys[0])["state"])
        leaves = map(jax.tree_util.tree_leaves_with_path, made)
        return [
            jnp.concatenate([leaf.ravel() for path, leaf in each if path[-1].key == "seed"])
            for each in leaves
        ]

    found = jax.device_get(seeds([jax.random.key(0), jax.random.key(1)]))
    for drawn in found:
        assert len(set(drawn.tolist())) == 2 and 0 <= drawn.min() and drawn.max() < scores.SEEDS
    assert set(found[0].tolist()) != set(found[1].tolist())


# ---- stochastic --------------------------------------------------------------------------------


def test_tokens_are_drawn_for_every_block_row_and_batch():
    """Whatever the tokens are; training takes the top-k of the numbers that evaluation compares
    with a threshold; a longer row begins with the same draw."""
    model, variables = control("stochastic")
    tokens_BT, other_BT = (families.tokens(seed=seed, batch=3) for seed in (0, 1))
    keys = [evaluation_keys(np.uint32(0), index) for index in (0, 1)]
    draws = [selected(model, variables, tokens_BT, key) for key in keys]
    np.testing.assert_array_equal(selected(model, variables, other_BT, keys[0]), draws[0])
    rows = np.concatenate(draws).reshape(-1, families.LENGTH)
    assert len(np.unique(rows, axis=0)) == 12 and 0.15 < rows.mean() < 0.35
    short = selected(model, variables, tokens_BT[:, :13], keys[0])
    np.testing.assert_array_equal(short, draws[0][..., :13])
    trained = selected(model.clone(selection="train"), variables, tokens_BT, keys[0])
    assert np.all(trained.sum(axis=-1) == families.LENGTH // 4)
    more = trained.sum(axis=-1) >= draws[0].sum(axis=-1)
    assert np.all(np.where(more[..., None], trained | ~draws[0], draws[0] | ~trained))
    refused(lambda: jax.eval_shape(model.apply, variables, tokens_BT), "score='stochastic'")


def test_a_stochastic_model_is_evaluated_with_new_draws():
    """Others in every batch, the same in every evaluation."""
    model, variables = control("stochastic")
    state = {"state": variables["state"]}
    splits = (0, 0, 0), (0,), (0, 0, 0)
    rows, first, again = evaluate(model, variables["params"], state, *splits)
    assert rows["eval/loss"] == again["eval/loss"]
    assert abs(rows["eval/loss"] - first["eval/loss"]) > 1e-4
    assert rows["eval/loss_topk"] != rows["eval/loss"] and rows["eval/router/accuracy"] > 0.8
    routed = rows["eval/router/routed_fraction"]
    assert 0.15 < routed < 0.35
    flops = model.ledger(families.LENGTH, "train").nominal_per_token
    assert rows["eval/router/flops_per_token"] == pytest.approx(flops, rel=0.2)
    assert f"routed blocks: {routed:.1%}" in describe(3, rows)


# ---- position ----------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.3, 0.125, 0.7, 4095 / 4096])
def test_spaced_positions_are_as_many_as_the_capacity_of_any_length(capacity):
    count_T = np.cumsum(score("position", TokenContext(np.arange(300)[None]), capacity)[0] > 0)
    slots_T = np.array([selection.num_slots(capacity, n) for n in range(1, 301)])
    np.testing.assert_array_equal(count_T, slots_T)
    # Far into a text a position times the numerator of the capacity is more than an int32 holds.
    a, b = fractions.Fraction(capacity).limit_denominator(4096).as_integer_ratio()
    positions_T = np.arange(2**31 - 9_000, 2**31 - 5_000)
    far = TokenContext(jnp.asarray(positions_T[None], jnp.int32))
    expected_T = b * ((a * positions_T + a - 1) // b) // a == positions_T
    np.testing.assert_array_equal(score("position", far, capacity)[0] > 0, expected_T)


def test_spaced_positions():
    """In every block, whatever the tokens and the selection."""
    model, variables = control("position")
    expected_BT = np.tile(np.arange(families.LENGTH) % 4 == 0, (3, 1))
    for each in (model, model.clone(selection="train")):
        for chosen_BT in selected(each, variables, families.tokens(batch=3), None):
            np.testing.assert_array_equal(chosen_BT, expected_BT)
    chosen = {
        capacity: np.flatnonzero(score("position", TokenContext(np.arange(16)[None]), capacity) > 0)
        for capacity in (1e-30, 0.125, 0.375, 1.0)
    }
    # So small a capacity is still one slot.
    expected = {1e-30: [0], 0.125: [0, 8], 0.375: [0, 2, 5, 8, 10, 13], 1.0: list(range(16))}
    assert {capacity: found.tolist() for capacity, found in chosen.items()} == expected


# ---- token_hash --------------------------------------------------------------------------------

SHARES = np.array([0.4, 0.02, 0.3, 0.0, 0.08, 0.2])  # of a vocabulary of 6


def test_a_threshold_selects_whole_types_of_tokens_and_the_capacity():
    """Except of two types, inside which an arc may begin or end."""
    text_BT = np.random.default_rng(1).choice(6, (40, 500), p=SHARES).astype(np.int32)
    positions_BT = np.arange(text_BT.size).reshape(text_BT.shape)
    places_BT = scores.token_places(text_BT, positions_BT, 6)
    call = TokenContext(positions_BT, token_places_BT=places_BT)
    all_BT = np.ones(text_BT.shape, bool)
    fractions_of = []
    for seed in (0, 900, 1800, 2700):
        score_BT = score("token_hash", call, seed=seed)
        length_B = np.full(len(text_BT), text_BT.shape[1])
        theta = selection.topk_threshold(jnp.asarray(score_BT), 0.25, all_BT, length_B)
        chosen_BT = score_BT > theta
        assert abs(chosen_BT.mean() - 0.25) < 0.03
        by_type = np.array([chosen_BT[text_BT == v].mean() for v in (0, 1, 2, 4, 5)])
        assert ((by_type > 0.02) & (by_type < 0.98)).sum() <= 2
        fractions_of.append(by_type.round(1))
    assert len(np.unique(fractions_of, axis=0)) >= 3
