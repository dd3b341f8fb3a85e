"""Controls of depth routing: no activation decides; fresh or fixed places, always as trained."""

import dataclasses
import fractions
import functools
import itertools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx import models, sample, sharding
from efx.configs import common
from efx.errors import UsageError
from efx.evaluate import Evaluator, describe
from efx.layers.info import CallInfo, Mode, Tokens
from efx.layers.routing import controls, depth, plans
from efx.layers.stack import scan_params
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


@functools.cache
def control(selection):
    """(model, variables) of two routed blocks."""
    model = families.make({**CHANGES, "depth_routing.train_selection": selection})
    params = families.random_params(model)
    state = {}
    if selection == "position":
        state = {"state": {"layers": {f"block_{i}": {"seed": np.int32(i)} for i in range(2)}}}
    return model, {"params": params, **state}


def places(model, variables, tokens_BT, keys, selection="causal"):
    """bool [block, B, T]: what the blocks computed, in no order."""
    seen, apply = [], depth._apply

    def keep(indices_BC):
        chosen_BT = np.zeros((len(indices_BC), tokens_BT.shape[1] + 1), bool)
        np.put_along_axis(chosen_BT, np.minimum(indices_BC, tokens_BT.shape[1]), True, 1)
        seen.append(chosen_BT[:, :-1])  # without that of empty slots
        return np.array(indices_BC)

    def spy(block, plan, *arguments):
        # Not `jax.debug.callback`, an effect, which flax 0.12.12 takes in no scanned layer. What a
        # pure one returns has to be used, or it does not run.
        seen_BC = jax.pure_callback(keep, jax.typeof(plan.indices_BC), plan.indices_BC)
        return apply(block, dataclasses.replace(plan, indices_BC=seen_BC), *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth, "_apply", spy)
        run = families.jit(functools.partial(model.clone(selection=selection).apply))
        jax.block_until_ready(run(variables, tokens_BT, rngs=keys))
    return np.unique(seen, axis=0)


# ---- the stochastic control --------------------------------------------------------------------


@pytest.mark.parametrize("scan", [False, True])
def test_evaluation_draws_fresh_places_for_every_block_row_and_batch(scan):
    """Without a key of its own it took the same ones for all; now that is an error."""
    model, variables = control("stochastic")
    if scan:
        stacked = scan_params(variables["params"]["layers"], model.specs())
        variables = {"params": {**variables["params"], "layers": stacked}}
        model = models.changed(model, scan_layers=True)
    tokens_BT = families.tokens(batch=3)
    draws = [
        places(model, variables, tokens_BT, evaluation_keys(np.uint32(0), index), selection)
        for index, selection in ((0, "causal"), (1, "causal"), (0, "train"))
    ]
    assert all(draw.shape == (2, 3, families.LENGTH) for draw in draws)
    assert all((draw.sum(-1) == families.LENGTH // 4).all() for draw in draws)
    np.testing.assert_array_equal(draws[0], draws[2])  # evaluated as it was trained
    rows = np.concatenate(draws[:2]).reshape(-1, families.LENGTH)
    assert len(np.unique(rows, axis=0)) == len(rows) == 12
    with pytest.raises(UsageError, match=r"selection='stochastic' needs a key"):
        jax.eval_shape(model.apply, variables, tokens_BT)


class Held:
    """Three batches of a held-out split, all the same text."""

    def eval_batches(self, batch_size, max_batches, rows):
        tokens = np.asarray(families.tokens(batch=2))[rows]
        for _ in range(3):
            yield {
                "inputs": tokens,
                "targets": np.roll(tokens, -1, 1),
                "weights": np.ones(tokens.shape, np.float32),
            }

    def bytes_per_token(self, split):
        return 1.0

    def scored_tokens(self, split):
        return 3 * 2 * families.LENGTH


def evaluated(selection, seed=0):
    model, variables = control(selection)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    config = common.apply(
        common.base(), {"seed": seed, "data.seq_len": families.LENGTH, "evaluate.batch_size": 2}
    )
    evaluator = Evaluator(model, config, Held(), mesh, sharding.DEFAULT_RULES)
    seen, run = [], evaluator._steps["causal"]

    def step(*arguments):
        seen.append(run(*arguments))
        return seen[-1]

    evaluator._steps = dict.fromkeys(evaluator._steps, step)
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        state = {name: tree for name, tree in variables.items() if name != "params"}
        rows = evaluator(variables["params"], state)
    return model, rows, [float(one["loss"]) for one in seen]


def test_a_stochastic_model_is_evaluated_as_it_was_trained():
    """Other places in every batch; no decision is reported that nobody trained."""
    model, rows, losses = evaluated("stochastic")
    assert len(set(losses)) == 3
    assert losses == evaluated("stochastic")[2] != evaluated("stochastic", seed=1)[2]
    assert rows["eval/loss_stochastic"] == rows["eval/loss"]
    assert not any("accuracy" in name for name in rows if name != "eval/accuracy")
    assert rows["eval/router/routed_fraction"] == 0.25
    assert rows["eval/router/flops_per_token"] == pytest.approx(
        model.ledger(families.LENGTH, "train").nominal_per_token
    )
    assert "routed 25.0%" in describe(3, rows)


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


# ---- decoding ----------------------------------------------------------------------------------

LATENT = {"family": "latent", "group_size": 4, "latents": (2,), "level_widths": (8,)}
MEMORY = {**LATENT, "memory_global": 3}


@pytest.mark.parametrize(
    "changes, selection, length",
    [
        (LATENT, "stochastic", 12),
        # The last group has a token for none of its latents, or for one of them.
        (LATENT, "stochastic", 14),
        (MEMORY, "stochastic", 12),
        (MEMORY, "stochastic", 15),
        (MEMORY, "position", 15),
        ({"family": "encoder_decoder"}, "stochastic", 14),
        ({"family": "encoder_decoder"}, "token_hash", 14),
        ({"scan_layers": True}, "stochastic", 14),
        ({}, "position", 14),
        ({}, "token_hash", 14),
    ],
)
def test_decoding_computes_the_places_of_a_whole_pass(changes, selection, length):
    """In chunks and one by one. The stack of latents runs in a loop, which the key has to reach,
    and twice where there are memory tokens. Beside the rows of FAMILIES, which have the others."""
    model = families.make(
        {**CHANGES, "depth_routing.train_selection": selection, **changes}, context=length
    )
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT = families.tokens(batch=2, length=length)

    @families.jit
    def whole(tokens_BT, key):
        return model.apply(variables, tokens_BT, rngs={"routing": jax.random.key(key)})

    @families.jit
    def read(cache, tokens_BT, positions_BT):
        logits_BTV, state = model.apply(
            {**variables, "cache": cache},
            tokens_BT,
            positions_BT,
            decode=True,
            cache_size=length,
            mutable=["cache"],
            rngs={"routing": jax.random.key(0)},
        )
        return logits_BTV, state["cache"]

    cache, parts = models.init_cache(model, 2, length), []
    edges = [0, 5, 10, *range(11, length + 1)]
    for start, stop in itertools.pairwise(edges):
        positions_BT = jnp.tile(jnp.arange(start, stop)[None], (2, 1))
        part_BTV, cache = read(cache, tokens_BT[:, start:stop], positions_BT)
        parts.append(part_BTV)
    whole_BTV = whole(tokens_BT, 0)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole_BTV, atol=1e-4)
    if selection == "stochastic":
        assert np.abs(whole(tokens_BT, 1) - whole_BTV).max() > 0.01


# ---- fixed places ------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.125, 0.3, 0.75, 1.0])
def test_fixed_places_are_as_many_as_a_document_of_any_length_has_room_for(capacity):
    tokens = Tokens(np.arange(300)[None])
    count_T = np.cumsum(controls.position(tokens, None, capacity)[0])
    allowed_T = np.array([plans.share(capacity, n) for n in range(1, 301)])
    assert np.all(count_T <= allowed_T) and np.all(count_T >= allowed_T - 1)


def test_fixed_places_are_a_function_of_position():
    """Whatever the tokens, the row, the batch, the length of the text and the way of selecting."""
    model, variables = control("position")
    expected_BT = np.tile(np.arange(families.LENGTH) % 4 == 0, (3, 1))
    (whole_BT,) = places(model, variables, families.tokens(batch=3), None)
    np.testing.assert_array_equal(whole_BT, expected_BT)
    tokens_BT = families.tokens(seed=1, batch=3, length=13)
    (part_BT,) = places(model, variables, tokens_BT, None, "train")
    np.testing.assert_array_equal(part_BT, expected_BT[:, :13])


def test_evenly_spaced_places_are_the_first_of_their_intervals():
    tokens = Tokens(np.arange(16)[None])
    chosen = {
        capacity: np.flatnonzero(controls.position(tokens, None, capacity)).tolist()
        for capacity in (0.125, 0.25, 0.375, 1.0)
    }
    assert chosen == {0.125: [0, 8], 0.25: [0, 4, 8, 12], 0.375: [0, 2, 5, 8, 10, 13]} | {
        1.0: list(range(16))
    }


@pytest.mark.parametrize("capacity, places", [(1e-4, [0, 10_000, 20_000]), (1e-30, [0])])
def test_so_small_a_capacity_is_still_a_place(capacity, places):
    """As `plans.capacity` gives every block one."""
    tokens = Tokens(jnp.arange(30_000)[None])
    chosen_BT = controls.position(tokens, None, capacity)
    assert np.flatnonzero(chosen_BT).tolist() == places


@pytest.mark.parametrize("capacity", [0.3, 2047 / 4096, 4095 / 4096])
def test_places_far_into_a_text_are_those_of_exact_arithmetic(capacity):
    """A position times the numerator of the capacity is more than an int32 holds."""
    a, b = fractions.Fraction(capacity).limit_denominator(4096).as_integer_ratio()
    positions_T = np.arange(2**31 - 9_000, 2**31 - 5_000)
    tokens = Tokens(jnp.asarray(positions_T[None], jnp.int32))
    interval_T = (a * positions_T + a - 1) // b
    expected_T = b * interval_T // a == positions_T
    assert np.array_equal(controls.position(tokens, None, capacity)[0], expected_T)


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
    """(`info.Types` of the tokens, the state afterwards)."""
    positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)
    info = CallInfo(Tokens(positions_BT, segment_ids_BT), Mode(train=train))
    init, apply = token_types()
    if state is None:
        state = init(jax.random.key(0), tokens_BT, info)["state"]
    types, after = jax.device_get(apply({"state": state}, tokens_BT, info))
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
    tokens = Tokens(np.arange(20_000)[None], types=types)
    choose = families.jit(controls.token_hash)
    chosen = np.concatenate([choose(tokens, seed, 0.25) for seed in (0, 1500, 3000)])
    np.testing.assert_allclose(chosen.mean(1), 0.25, atol=0.02)
    assert len(np.unique(chosen, axis=0)) == 3  # of a type that is cut each block has other tokens
    by_type = np.array([chosen[:, text_BT[0] == v].mean(1) for v in (0, 1, 2, 4, 5)]).T
    partly = (by_type > 0) & (by_type < 1)
    assert partly.sum(1).max() <= 2  # an arc ends inside of two types at most
    assert len(np.unique(by_type.round(1), axis=0)) == 3


def test_types_decide_as_the_state_that_training_left_says():
    """Each of two blocks computes the types of its own arc, whatever stands around them."""
    model, variables = control("token_hash")
    share_V = np.full(families.VOCAB, (1 - 0.25) / (families.VOCAB - 5))
    share_V[:5] = 0.05
    share_V /= share_V.sum()
    arcs = {"block_0": 0.0, "block_1": 0.5}
    seeds = {name: {"seed": np.int32(-start * controls.SEEDS)} for name, start in arcs.items()}
    types = {"share": np.float32(share_V), "steps": np.int32(9)}
    variables = {**variables, "state": {"layers": seeds, "token_types": types}}
    sorted_V = np.argsort(np.arange(families.VOCAB, dtype=np.uint32) * np.uint32(2654435769))
    end_V = np.zeros(families.VOCAB)
    end_V[sorted_V] = np.cumsum(share_V[sorted_V])
    tokens_BT = np.asarray(families.tokens(batch=2))
    chosen = places(model, variables, tokens_BT, None)
    room = model.specs()[0].routing.room(0.25, families.LENGTH)
    assert room == 16  # twice the capacity, in training as in evaluation
    assert model.specs()[0].routing.slots(0.25, families.LENGTH, "train") == 16

    def is_computed(block_BT, start):
        surely_V = (end_V - share_V >= start) & (end_V <= start + 0.25)
        never_V = (end_V <= start) | (end_V - share_V >= start + 0.25)
        surely_BT, never_BT = surely_V[tokens_BT], never_V[tokens_BT]
        assert surely_BT.any() and never_BT.any()
        return not (block_BT & never_BT).any() and all(
            chosen_T.sum() == room or chosen_T[sure_T].all()
            for chosen_T, sure_T in zip(block_BT, surely_BT, strict=True)
        )

    assert len(chosen) == 2  # in no order
    for start in arcs.values():
        assert sum(is_computed(block_BT, start) for block_BT in chosen) == 1


def test_states_of_groups_have_no_type():
    with pytest.raises(UsageError, match=r"selection='token_hash': not with .*family='latent'"):
        families.make(
            {
                **CHANGES,
                "depth_routing.train_selection": "token_hash",
                "family": "latent",
                "group_size": 4,
                "latents": (2,),
                "level_widths": (8,),
            }
        )


def test_every_block_draws_its_seed_when_the_model_is_made():
    def seeds(key, scan):
        model = models.changed(control("token_hash")[0], scan_layers=scan)
        made = families.jit(lambda key: models.init(model, key)["state"]["layers"])(
            jax.random.key(key)
        )
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(made)])

    found = [seeds(0, False), seeds(1, False), seeds(0, True)]
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


def test_recursion_takes_no_control():
    with pytest.raises(UsageError, match=r"selection='position': not with .*'recursion'"):
        families.make(
            {
                "depth": 4,
                "depth_routing.kind": "recursion",
                "depth_routing.train_selection": "position",
            }
        )
