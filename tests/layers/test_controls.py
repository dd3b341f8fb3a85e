"""Controls of depth routing: no activation selects a token, and evaluation selects as training."""

import fractions
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx import models
from efx.configs import common
from efx.layers import selection
from efx.layers.call import Call
from efx.models.stack import Layer
from efx.parallel import sharding
from efx.routing import controls
from efx.train.evaluator import Evaluator, describe
from efx.train.step import evaluation_keys

CHANGES = {
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": 0.25,
    "width": 8,
    "attention.num_heads": 1,
    "depth": 2,
    "mlp.hidden": 16,
}
LATENT = {"family": "latent", "group_size": 4, "latents": (2,), "level_widths": (8,)}


@functools.cache
def control(name):
    """(model, variables) of two routed blocks."""
    model = families.make({**CHANGES, "depth_routing.train_selection": name})
    layers = {f"block_{i}": {"seed": np.int32(i)} for i in range(2)}
    types = {"share": np.ones(families.VOCAB, np.float32), "steps": np.int32(0)}
    state = {"layers": layers} | ({"token_types": types} if name == "token_hash" else {})
    return model, {"params": families.random_params(model), "state": state}


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


@pytest.mark.parametrize("name", controls.CONTROLS)
def test_a_control_has_neither_router_nor_gate(name):
    model, variables = control(name)
    routing = model.specs()[0].routing
    assert "router" not in variables["params"]["layers"]["block_0"]
    assert model.ledger(8).nominal["router"] == 0
    assert routing.trained_decisions == ()


def test_every_block_draws_its_seed_when_the_model_is_made():
    model = control("token_hash")[0]
    scanned = models.changed(model, scan_layers=True)

    @families.jit
    def seeds(keys):
        made = [models.init(model, key)["state"]["layers"] for key in keys]
        made.append(models.init(scanned, keys[0])["state"]["layers"])
        return [jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(x)]) for x in made]

    found = jax.device_get(seeds([jax.random.key(0), jax.random.key(1)]))
    for drawn in found:
        assert len(set(drawn.tolist())) == 2 and 0 <= drawn.min() and drawn.max() < controls.SEEDS
    assert set(found[0].tolist()) != set(found[1].tolist())


# ---- stochastic --------------------------------------------------------------------------------


def test_tokens_are_drawn_for_every_block_row_and_batch():
    """Whatever the tokens are; training takes the top-k of the numbers that evaluation compares
    with the capacity; a longer row begins with the same draw."""
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
    refused(lambda: jax.eval_shape(model.apply, variables, tokens_BT), "selection='stochastic'")


class Held:
    """Batches of a held-out split, all the same text."""

    batches = 3

    def eval_batches(self, batch_size, max_batches, rows):
        tokens = np.asarray(families.tokens(batch=2))[rows]
        for _ in range(self.batches):
            yield {
                "inputs": tokens,
                "targets": np.roll(tokens, -1, 1),
                "weights": np.ones(tokens.shape, np.float32),
            }

    def scored_bytes(self, batch_size, max_batches):
        return None

    def scored_tokens(self, split):
        return self.batches * 2 * families.LENGTH


def test_a_stochastic_model_is_evaluated_with_new_draws():
    """Others in every batch, the same in every evaluation; no untrained decision is reported."""
    (model, variables), held = control("stochastic"), Held()
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    config = common.apply(
        common.base(), {"data.seq_len": families.LENGTH, "evaluate.batch_size": 2}
    )
    evaluator, evaluated = Evaluator(model, config, held, mesh, sharding.DEFAULT_RULES), []
    state = {"state": variables["state"]}
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        for batches in (3, 1, 3):
            held.batches = batches
            evaluated.append(evaluator(variables["params"], state))
    rows, first, again = evaluated
    assert rows["eval/loss"] == again["eval/loss"]
    assert abs(rows["eval/loss"] - first["eval/loss"]) > 1e-4
    assert rows["eval/loss_stochastic"] == rows["eval/loss"]
    assert not any("accuracy" in name for name in rows if name != "eval/accuracy")
    routed = rows["eval/router/routed_fraction"]
    assert 0.15 < routed < 0.35
    flops = model.ledger(families.LENGTH, "train").nominal_per_token
    assert rows["eval/router/flops_per_token"] == pytest.approx(flops, rel=0.2)
    assert f"routed {routed:.1%}" in describe(3, rows)


# ---- position ----------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.3, 4095 / 4096])
def test_spaced_positions_are_as_many_as_the_capacity_of_any_length(capacity):
    count_T = np.cumsum(controls.position(Call(np.arange(300)[None]), None, capacity)[0])
    slots_T = np.array([selection.num_slots(capacity, n) for n in range(1, 301)])
    assert np.all(count_T <= slots_T) and np.all(count_T >= slots_T - 1)
    # Far into a text a position times the numerator of the capacity is more than an int32 holds.
    a, b = fractions.Fraction(capacity).limit_denominator(4096).as_integer_ratio()
    positions_T = np.arange(2**31 - 9_000, 2**31 - 5_000)
    far = Call(jnp.asarray(positions_T[None], jnp.int32))
    expected_T = b * ((a * positions_T + a - 1) // b) // a == positions_T
    np.testing.assert_array_equal(controls.position(far, None, capacity)[0], expected_T)


def test_spaced_positions_are_a_function_of_position():
    """Whatever the tokens, the row, the batch, the length of the text and the selection."""
    model, variables = control("position")
    expected_BT = np.tile(np.arange(families.LENGTH) % 4 == 0, (3, 1))
    for whole_BT in selected(model, variables, families.tokens(batch=3), None):
        np.testing.assert_array_equal(whole_BT, expected_BT)
    trained, tokens_BT = model.clone(selection="train"), families.tokens(seed=1, batch=3, length=13)
    for part_BT in selected(trained, variables, tokens_BT, None):
        np.testing.assert_array_equal(part_BT, expected_BT[:, :13])
    # It needs no more slots: its positions are within the capacity.
    routing = model.specs()[0].routing
    slots = {routing.slots(0.25, families.LENGTH, name) for name in ("train", "causal")}
    assert slots == {families.LENGTH // 4} and routing.causal_rate(0.25) == 1.0
    chosen = {
        capacity: np.flatnonzero(controls.position(Call(np.arange(16)[None]), None, capacity))
        for capacity in (1e-30, 0.125, 0.375, 1.0)
    }
    # So small a capacity is still one slot.
    expected = {1e-30: [0], 0.125: [0, 8], 0.375: [0, 2, 5, 8, 10, 13], 1.0: list(range(16))}
    assert {capacity: found.tolist() for capacity, found in chosen.items()} == expected


# ---- token_hash --------------------------------------------------------------------------------

SHARES = np.array([0.4, 0.02, 0.3, 0.0, 0.08, 0.2])  # of a vocabulary of 6


@functools.cache
def placement():
    """Compiled (init, apply) of the module."""
    module = controls.TokenPlacement(len(SHARES))
    return families.jit(module.init), families.jit(
        functools.partial(module.apply, mutable=["state"])
    )


def places_of(tokens_BT, segment_ids_BT=None, train=False, state=None):
    """(`TokenPlaces` of the tokens, the state afterwards)."""
    positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)
    call = Call(positions_BT, segment_ids_BT, train=train)
    init, apply = placement()
    if state is None:
        state = init(jax.random.key(0), tokens_BT, call)["state"]
    places, after = jax.device_get(apply({"state": state}, tokens_BT, call))
    return places, after["state"]


def test_ids_are_counted_in_training_after_the_selection():
    steps = [np.array([[0, 0, 1, 2], [5, 2, 2, 2]]), np.array([[4, 4, 4, 4], [0, 0, 5, 5]])]
    documents_BT = np.array([[1, 1, 2, 0], [1, 1, 1, 0]])  # 0: padding, which is not counted
    state, expected = None, []
    for tokens_BT in steps:
        _, state = places_of(tokens_BT, documents_BT, True, state)
        expected.append(np.bincount(tokens_BT[documents_BT > 0], minlength=6) / 6)
    np.testing.assert_allclose(state["share"], np.mean(expected, axis=0), rtol=1e-6)
    assert state["steps"] == 2
    np.testing.assert_array_equal(places_of(steps[0], state=state)[1]["share"], state["share"])
    # Before the first step all ids are equally long.
    np.testing.assert_allclose(places_of(steps[0], train=True)[0].length_BT, 1 / 6)
    # Micro-batches have the mean of their batch.
    parts = (steps[0], steps[0][:1], steps[0][1:])
    whole, *halves = (places_of(rows, train=True)[1]["share"] for rows in parts)
    np.testing.assert_allclose(np.mean(halves, axis=0), whole, rtol=1e-6)


def test_ids_are_as_long_as_they_are_frequent():
    state = {"share": np.float32(SHARES), "steps": np.int32(5)}
    places, _ = places_of(np.arange(6)[None], state=state)
    start_V, length_V = np.asarray(places.start_BT)[0], np.asarray(places.length_BT)[0]
    np.testing.assert_allclose(length_V, SHARES, rtol=1e-6)
    order_V = np.lexsort((length_V, start_V))  # those of no length stand before the next
    ends_V = np.cumsum(length_V[order_V])
    np.testing.assert_allclose(start_V[order_V], ends_V - length_V[order_V], atol=1e-6)
    # Of a long text the capacity is selected, of the ids on an arc.
    text_BT = np.random.default_rng(1).choice(6, (1, 20_000), p=SHARES)
    call = Call(np.arange(20_000)[None], token_places=places_of(text_BT, state=state)[0])
    select = families.jit(controls.token_hash)
    chosen = np.concatenate([select(call, seed, 0.25) for seed in (0, 1500, 3000)])
    np.testing.assert_allclose(chosen.mean(1), 0.25, atol=0.02)
    assert len(np.unique(chosen, axis=0)) == 3
    by_id = np.array([chosen[:, text_BT[0] == v].mean(1) for v in (0, 1, 2, 4, 5)]).T
    assert ((by_id > 0) & (by_id < 1)).sum(1).max() <= 2  # an arc ends inside of two ids at most
    assert len(np.unique(by_id.round(1), axis=0)) == 3


def test_blocks_select_ids_by_their_seeds_and_the_counts_of_training():
    (model, variables), tokens_BT = control("token_hash"), families.tokens(batch=2)
    even_V = np.full(families.VOCAB, 1 / families.VOCAB)

    def chosen(seeds, share_V):
        layers = {f"block_{i}": {"seed": np.int32(seed)} for i, seed in enumerate(seeds)}
        types = {"share": np.float32(share_V), "steps": np.int32(9)}
        state = {"layers": layers, "token_types": types}
        return selected(model, {**variables, "state": state}, tokens_BT, None)

    first, second = chosen((0, 2048), even_V)
    np.testing.assert_array_equal(chosen((2048, 0), even_V), [second, first])
    assert np.any(first) and np.any(first != second)
    # Where the ids of the first block are rare it computes further ones.
    rare_V = np.isin(np.arange(families.VOCAB), np.asarray(tokens_BT)[first])
    share_V = np.where(rare_V, 0.1 / rare_V.sum(), 0.9 / (~rare_V).sum())
    assert np.any(chosen((0, 2048), share_V)[0] & ~first)
    # A block has slots for slack times its capacity, in training as in evaluation.
    routing = model.specs()[0].routing
    slots = {routing.slots(0.25, families.LENGTH, name) for name in ("train", "causal")}
    assert slots == {20} and np.sum(first, axis=-1).max() <= 20


def test_latents_have_no_ids():
    changes = {**CHANGES, **LATENT, "depth_routing.train_selection": "token_hash"}
    refused(lambda: families.make(changes), "selection='token_hash'", "family='latent'")
