"""Controls of depth routing: no activation decides; fresh or fixed places, always as trained."""

import fractions
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx import models, sample, sharding
from efx.configs import common
from efx.evaluate import Evaluator, describe
from efx.layers.call import Call
from efx.layers.stack import Layer
from efx.routing import controls, plans
from efx.step import evaluation_keys

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
def control(selection):
    """(model, variables) of two routed blocks."""
    model = families.make({**CHANGES, "depth_routing.train_selection": selection})
    params = families.random_params(model)
    state = {}
    if selection == "position":
        state = {"state": {"layers": {f"block_{i}": {"seed": np.int32(i)} for i in range(2)}}}
    return model, {"params": params, **state}


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


def places(model, variables, tokens_BT, keys):
    """bool [block, B, T]: the tokens that each block changes."""
    below, above = layers_of(model)(variables, tokens_BT, keys)
    return np.any(np.asarray(below) != np.asarray(above), axis=-1)


# ---- the stochastic control --------------------------------------------------------------------


def test_evaluation_draws_fresh_places_for_every_block_row_and_batch():
    model, variables = control("stochastic")
    tokens_BT = families.tokens(batch=3)
    draws = [
        places(model, variables, tokens_BT, evaluation_keys(np.uint32(0), index))
        for index in (0, 1)
    ]
    assert all(draw.shape == (2, 3, families.LENGTH) for draw in draws)
    assert all((draw.sum(-1) == families.LENGTH // 4).all() for draw in draws)
    other_BT = families.tokens(seed=1, batch=3)
    elsewhere = places(model, variables, other_BT, evaluation_keys(np.uint32(0), 0))
    np.testing.assert_array_equal(elsewhere, draws[0])  # whatever the tokens are
    rows = np.concatenate(draws).reshape(-1, families.LENGTH)
    assert len(np.unique(rows, axis=0)) == len(rows) == 12
    train = model.clone(selection="train")  # which chooses alike
    trained = places(train, variables, tokens_BT, evaluation_keys(np.uint32(0), 0))
    np.testing.assert_array_equal(draws[0], trained)
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

    def bytes_per_token(self, split):
        return 1.0

    def scored_tokens(self, split):
        return self.batches * 2 * families.LENGTH


def test_a_stochastic_model_is_evaluated_as_it_was_trained():
    """Other places in every batch, the same in every evaluation; no decision is reported that
    nobody trained."""
    (model, variables), held = control("stochastic"), Held()
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    config = common.apply(
        common.base(), {"data.seq_len": families.LENGTH, "evaluate.batch_size": 2}
    )
    evaluator, evaluated = Evaluator(model, config, held, mesh, sharding.DEFAULT_RULES), []
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        for batches in (3, 1, 3):
            held.batches = batches
            evaluated.append(evaluator(variables["params"], {}))
    rows, first, again = evaluated
    assert rows["eval/loss"] == again["eval/loss"]
    assert abs(rows["eval/loss"] - first["eval/loss"]) > 1e-4
    assert rows["eval/loss_stochastic"] == rows["eval/loss"]
    assert not any("accuracy" in name for name in rows if name != "eval/accuracy")
    assert rows["eval/router/routed_fraction"] == 0.25
    assert rows["eval/router/flops_per_token"] == pytest.approx(
        model.ledger(families.LENGTH, "train").nominal_per_token
    )
    assert "routed 25.0%" in describe(3, rows)


@pytest.mark.slow
def test_sampling_draws_the_places_of_a_whole_context():
    """As trained: of the context, exactly ceil(c T) in each block, by the sampler's seed."""
    model, variables = control("stochastic")
    sampler = sample.Sampler(model, batch_size=2, temperature=0.0)

    def texts(seeds):
        chunks = sampler.tokens(variables, [[1, 2], [3]], max_new_tokens=30, seeds=seeds)
        return [sum(row, []) for row in zip(*chunks, strict=True)]

    one = texts([5, 6])
    counted = sampler.stats["routed_fraction_by_block"]
    # The first row is read to the last place, the second but for one.
    assert sampler.stats["overflow"] == 0 and len(counted) == 2
    read = 32 + 31
    assert all(14 <= share * read <= 16.01 for share in counted.values())
    assert texts([5, 6]) == one != texts([7, 6])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"scan_layers": True},
        # The stack runs twice, for memory tokens too, and the last group is not full.
        {**LATENT, "memory_global": 3},
    ],
)
def test_decoding_computes_the_places_of_a_whole_pass(changes):
    """In chunks and one by one, where a key has to reach loops. The rows of FAMILIES have each
    control in a plain decoder."""
    length = 14
    model = families.make(
        {**CHANGES, "depth_routing.train_selection": "stochastic", **changes}, context=length
    )
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT = families.tokens(batch=2, length=length)

    @families.jit
    def whole(key):
        return model.apply(variables, tokens_BT, rngs={"routing": key})

    calls = families.chunks(np.array([10, 9]), np.array([length, length]), 5)
    cache = models.init_cache(model, 2, length)
    step = families.decoder(model, variables, length)
    decoded_BTV, cache = families.read(step, cache, tokens_BT, calls)
    whole_BTV = whole(families.keys()["routing"])
    np.testing.assert_allclose(decoded_BTV, whole_BTV, atol=1e-4)
    assert np.abs(whole(jax.random.key(1)) - whole_BTV).max() > 0.01
    if changes.get("scan_layers"):
        first, second = cache["layers"]["units"]["block_0"]["attention"]["position"]
        assert np.any(first != second)  # each layer draws its own


# ---- fixed places ------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.3, 4095 / 4096])
def test_fixed_places_are_as_many_as_the_capacity_of_a_document_of_any_length(capacity):
    tokens = Call(np.arange(300)[None])
    count_T = np.cumsum(controls.position(tokens, None, capacity)[0])
    allowed_T = np.array([plans.share(capacity, n) for n in range(1, 301)])
    assert np.all(count_T <= allowed_T) and np.all(count_T >= allowed_T - 1)
    # Far into a text a position times the numerator of the capacity is more than an int32 holds.
    a, b = fractions.Fraction(capacity).limit_denominator(4096).as_integer_ratio()
    positions_T = np.arange(2**31 - 9_000, 2**31 - 5_000)
    interval_T = (a * positions_T + a - 1) // b
    far = Call(jnp.asarray(positions_T[None], jnp.int32))
    expected_T = b * interval_T // a == positions_T
    np.testing.assert_array_equal(controls.position(far, None, capacity)[0], expected_T)


def test_fixed_places_are_a_function_of_position():
    """Whatever the tokens, the row, the batch, the length of the text and the way of selecting."""
    model, variables = control("position")
    expected_BT = np.tile(np.arange(families.LENGTH) % 4 == 0, (3, 1))
    for whole_BT in places(model, variables, families.tokens(batch=3), None):
        np.testing.assert_array_equal(whole_BT, expected_BT)
    trained, tokens_BT = model.clone(selection="train"), families.tokens(seed=1, batch=3, length=13)
    for part_BT in places(trained, variables, tokens_BT, None):
        np.testing.assert_array_equal(part_BT, expected_BT[:, :13])


def test_evenly_spaced_places_are_the_first_of_their_intervals():
    tokens = Call(np.arange(16)[None])
    chosen = {
        capacity: np.flatnonzero(controls.position(tokens, None, capacity)).tolist()
        for capacity in (1e-30, 0.125, 0.375, 1.0)
    }
    # So small a capacity is still one slot.
    expected = {1e-30: [0], 0.125: [0, 8], 0.375: [0, 2, 5, 8, 10, 13], 1.0: list(range(16))}
    assert chosen == expected


# ---- types of tokens ---------------------------------------------------------------------------

SHARES = np.array([0.4, 0.02, 0.3, 0.0, 0.08, 0.2])  # of a vocabulary of 6


@functools.cache
def token_types():
    """Compiled (init, apply) of the module."""
    module = controls.TokenTypes(len(SHARES))
    return families.jit(module.init), families.jit(
        functools.partial(module.apply, mutable=["state"])
    )


def types_of(tokens_BT, segment_ids_BT=None, train=False, state=None):
    """(`call.Types` of the tokens, the state afterwards)."""
    positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)
    call = Call(positions_BT, segment_ids_BT, train=train)
    init, apply = token_types()
    if state is None:
        state = init(jax.random.key(0), tokens_BT, call)["state"]
    types, after = jax.device_get(apply({"state": state}, tokens_BT, call))
    return types, after["state"]


def test_types_are_counted_in_training_after_the_decision():
    steps = [np.array([[0, 0, 1, 2], [5, 2, 2, 2]]), np.array([[4, 4, 4, 4], [0, 0, 5, 5]])]
    documents_BT = np.array([[1, 1, 2, 0], [1, 1, 1, 0]])  # 0: padding, which is not counted
    state, expected = None, []
    for tokens_BT in steps:
        _, state = types_of(tokens_BT, documents_BT, True, state)
        expected.append(np.bincount(tokens_BT[documents_BT > 0], minlength=6) / 6)
    np.testing.assert_allclose(state["share"], np.mean(expected, axis=0), rtol=1e-6)
    assert state["steps"] == 2
    np.testing.assert_array_equal(types_of(steps[0], state=state)[1]["share"], state["share"])
    # The first step knows nothing of its own tokens: all types are alike.
    np.testing.assert_allclose(types_of(steps[0], train=True)[0].share_BT, 1 / 6)


def test_the_counts_of_micro_batches_have_the_mean_of_the_batch():
    tokens_BT = np.random.default_rng(0).integers(0, 6, (4, 8))
    whole, *halves = (
        types_of(rows, train=True)[1]["share"] for rows in (tokens_BT, tokens_BT[:2], tokens_BT[2:])
    )
    np.testing.assert_allclose(np.mean(halves, axis=0), whole, rtol=1e-6)


def test_types_share_the_line_by_how_frequent_they_are():
    state = {"share": np.float32(SHARES), "steps": np.int32(5)}
    types, _ = types_of(np.arange(6)[None], state=state)
    start_V, share_V = (np.asarray(types.start_BT)[0], np.asarray(types.share_BT)[0])
    np.testing.assert_allclose(share_V, SHARES, rtol=1e-6)
    order_V = np.lexsort((share_V, start_V))  # those of no length stand before the next
    np.testing.assert_allclose(
        start_V[order_V], np.cumsum(share_V[order_V]) - share_V[order_V], atol=1e-6
    )
    # Of a long text as many are chosen as the capacity says, of the types that it reaches to.
    text_BT = np.random.default_rng(1).choice(6, (1, 20_000), p=SHARES)
    types, _ = types_of(text_BT, state=state)
    tokens = Call(np.arange(20_000)[None], token_places=types)
    choose = families.jit(controls.token_hash)
    chosen = np.concatenate([choose(tokens, seed, 0.25) for seed in (0, 1500, 3000)])
    np.testing.assert_allclose(chosen.mean(1), 0.25, atol=0.02)
    assert len(np.unique(chosen, axis=0)) == 3  # of a type that is cut each block has other tokens
    by_type = np.array([chosen[:, text_BT[0] == v].mean(1) for v in (0, 1, 2, 4, 5)]).T
    partly = (by_type > 0) & (by_type < 1)
    assert partly.sum(1).max() <= 2  # an arc ends inside of two types at most
    assert len(np.unique(by_type.round(1), axis=0)) == 3


def test_blocks_choose_types_by_their_seeds_and_the_counts_of_training():
    (model, variables), tokens_BT = control("token_hash"), families.tokens(batch=2)
    even_V = np.full(families.VOCAB, 1 / families.VOCAB)

    def chosen(seeds, share_V):
        layers = {f"block_{i}": {"seed": np.int32(seed)} for i, seed in enumerate(seeds)}
        types = {"share": np.float32(share_V), "steps": np.int32(9)}
        state = {"layers": layers, "token_types": types}
        return places(model, {**variables, "state": state}, tokens_BT, None)

    first, second = chosen((0, 2048), even_V)
    np.testing.assert_array_equal(chosen((2048, 0), even_V), [second, first])
    assert np.any(first) and np.any(first != second)
    # Where the types of the first block are rare it computes further ones.
    rare_V = np.isin(np.arange(families.VOCAB), np.asarray(tokens_BT)[first])
    share_V = np.where(rare_V, 0.1 / rare_V.sum(), 0.9 / (~rare_V).sum())
    assert np.any(chosen((0, 2048), share_V)[0] & ~first)
    # A block has slots for twice its capacity, in training as in evaluation.
    routing = model.specs()[0].routing
    slots = {routing.slots(0.25, families.LENGTH, name) for name in ("train", "causal")}
    assert slots == {16} and np.sum(first, axis=-1).max() <= 16


def test_states_of_groups_have_no_type():
    changes = {**CHANGES, **LATENT, "depth_routing.train_selection": "token_hash"}
    refused(lambda: families.make(changes), "selection='token_hash'", "family='latent'")


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


def test_a_control_has_neither_router_nor_gate():
    for selection in ("stochastic", "position"):
        model, variables = control(selection)
        assert "router" not in variables["params"]["layers"]["block_0"]
        assert model.ledger(8).nominal["router"] == 0
        assert model.specs()[0].routing.trained == ()
        # What is decoded fits the cache to the last place.
        assert model.specs()[0].routing.room(0.25, 32) == 8
