"""Decoding against a cache: same logits as the full forward, and nothing computed for nothing."""

import collections
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import VOCAB
from flax import linen as nn

from efx import flops, means, models, sharding
from efx.layers import attend, attention, blocks, stack
from efx.layers.routing import plans

CONTEXT = 24
LENGTHS = (24, 17, 6, 1)  # tokens of the rows of a batch
ROUTED = {"depth_routing.kind": "mod", "depth_routing.gate": "identity"}
EXPERTS = {"mlp.kind": "moe", "mlp.moe.num_experts": 4, "mlp.moe.expert_hidden": 24}
RECURSION = {
    "depth": 3,
    "depth_routing.kind": "recursion",
    "depth_routing.recursions": 3,
    "depth_routing.capacity": (1.0, 0.3, 0.2),
}
OPTIONS = {
    "attention.num_kv_heads": 2,
    "attention.window": 7,
    "attention.head_dim": 6,
    "attention.softcap": 5.0,
    "logit_softcap": 8.0,
    "attention.scale": "mup",
}
MODELS = {
    "llama": {**OPTIONS, "attention.qk_norm": "head"},
    # Room for all that is decided, and far too little room for it.
    "mod": {**ROUTED, "depth_routing.capacity": 0.5},
    "mod_full": {
        **ROUTED,
        **OPTIONS,
        "attention.qk_norm": "width",
        "depth_routing.every": 1,
        "depth_routing.capacity": (0.25, 0.1),
        "depth_routing.slack": 1.5,
    },
    "mod_short": {**ROUTED, "depth_routing.capacity": 0.2, "depth_routing.slack": 1.5},
    "mod_gpt2": {**ROUTED, "preset": "gpt2", "depth_routing.capacity": 0.3},
    "mod_context": {
        **ROUTED,
        **OPTIONS,
        "depth_routing.kv_for_skipped": True,
        "depth_routing.skip_mlp": 16,
        "depth_routing.capacity": 0.3,
    },
    "recursion": {**ROUTED, **OPTIONS, **RECURSION},
    "recursion_context": {
        **ROUTED,
        **OPTIONS,
        **RECURSION,
        "depth_routing.kv_for_skipped": True,
        "depth_routing.skip_mlp": 16,
        "depth_routing.slack": 1.0,
    },
    "recursion_threshold": {
        **ROUTED,
        **RECURSION,
        "depth_routing.causal": "threshold",
        "depth_routing.slack": 1.0,
    },
    "recursion_moe": {**EXPERTS, **ROUTED, **RECURSION, "depth_routing.capacity": (0.5, 0.5, 0.2)},
    "dropout_elementwise": {
        **ROUTED,
        **OPTIONS,
        "dropout.kind": "elementwise",
        "depth_routing.capacity": 0.3,
    },
    "dropout_context": {
        **ROUTED,
        "dropout.kind": "attention",
        "dropout.sites": families.NO_PROBS,
        "depth_routing.kv_for_skipped": True,
        "depth_routing.capacity": 0.3,
    },
    "dropout_embedding": {
        **ROUTED,
        "preset": "gpt2",
        "dropout.kind": "attention",
        "dropout.sites": families.NO_PROBS,
        "depth_routing.capacity": 0.3,
        "dropout.attention.input": "embedding",
        "dropout.attention.rounding": "none",
    },
    "mode_context": {
        **EXPERTS,
        **ROUTED,
        "depth_routing.kv_for_skipped": True,
        "depth_routing.capacity": 0.3,
        "depth_routing.every": 1,
        "mlp.moe.capacity_factor": 0.8,
    },
    "mode_context_choice": {
        **EXPERTS,
        **ROUTED,
        "depth_routing.kv_for_skipped": True,
        "depth_routing.capacity": 0.3,
        "mlp.moe.router": "expert_choice",
    },
    # Steps of one token: of 8 experts the chosen ones, up to 3 rows; of 4 all.
    "moe": {
        **EXPERTS,
        "preset": "gpt2",
        "mlp.moe.num_experts": 8,
        "mlp.moe.num_shared": 1,
        "mlp.moe.capacity_factor": 0.8,
    },
    "moe_expert_choice": {**EXPERTS, "mlp.moe.router": "expert_choice", "mlp.moe.capacity": 0.2},
    "soft_mod": {
        **ROUTED,
        **OPTIONS,
        "soft_experts.num": 2,
        "soft_experts.shared": 1,
        "soft_experts.shared_kv": True,
        "depth_routing.capacity": 0.3,
        "dense_former.on": True,
    },
    "mode": {**EXPERTS, **ROUTED, "depth_routing.capacity": 0.3, "mlp.moe.num_noop": 1},
    "mode_expert_choice": {
        **EXPERTS,
        **ROUTED,
        "mlp.moe.router": "expert_choice",
        "depth_routing.capacity": 0.3,
        "depth_routing.every": 1,
    },
}


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Caches of 24 slots are read in blocks of 10: the last overlaps the one before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "_CACHE_BLOCK", 10)
        yield


@functools.cache
def build(name):
    """(model, parameters) of a row of MODELS."""
    model = families.make(MODELS[name], context=CONTEXT)
    return model, families.random_params(model)


@functools.cache
def forward(name):
    """(logits, what every layer returned, statistics) of the full forward on `tokens()`."""
    model, params = build(name)

    @families.jit
    def apply(tokens_BT):
        return model.apply(
            {"params": params, **families.random_state(model)},
            tokens_BT,
            capture_intermediates=lambda module, method: isinstance(module, stack.Layer),
            mutable=["intermediates", "stats", means.COLLECTION],
        )

    logits_BTV, state = apply(tokens())
    layers = state["intermediates"]["layers"]
    states = [np.asarray(layers[f"block_{i}"]["__call__"][0]) for i in range(model.config.depth)]
    return np.asarray(logits_BTV), states, means.sown(state, "stats")


@functools.cache
def decoder(name):
    """Compiled (cache, tokens, positions) -> (logits, cache); the name's, of any shape."""
    return decoder_of(name, True)


@functools.cache
def decoder_of(name, kind):
    model, params = build(name)

    @families.jit
    def decode(cache, tokens_BT, positions_BT):
        logits_BTV, state = model.apply(
            {"params": params, "cache": cache, **families.random_state(model)},
            tokens_BT,
            positions_BT,
            decode=kind,
            cache_size=CONTEXT,
            mutable=["cache"],
        )
        return logits_BTV, state["cache"]

    return decode


def tokens():
    return families.tokens(batch=len(LENGTHS), length=CONTEXT)


def chunks_of(size, start, stop, lengths=LENGTHS):
    """(tokens, positions) of [start, stop) in chunks; what a row does not have is padding."""
    for first in range(start, stop, size):
        places_T = np.arange(first, first + size)
        inside_BT = places_T[None] < np.minimum(np.array(lengths), stop)[:, None]
        tokens_BT = np.asarray(tokens())[: len(lengths), np.minimum(places_T, CONTEXT - 1)]
        yield (
            jnp.asarray(np.where(inside_BT, tokens_BT, 0), jnp.int32),
            jnp.asarray(np.where(inside_BT, places_T[None], -1), jnp.int32),
        )


def decode_all(name, chunk, singles_from=CONTEXT, lengths=LENGTHS):
    """Feed all tokens: in chunks up to a place, then one by one. (logits [B, T, V], cache)."""
    cache = models.init_cache(build(name)[0], len(lengths), CONTEXT)
    logits_BTV = np.full((len(lengths), CONTEXT, VOCAB), np.nan)
    parts = [*chunks_of(chunk, 0, singles_from, lengths)]
    parts += chunks_of(1, singles_from, CONTEXT, lengths)
    for tokens_BT, positions_BT in parts:
        new_BTV, cache = decoder(name)(cache, tokens_BT, positions_BT)
        for b, t in np.argwhere(np.asarray(positions_BT) >= 0):
            logits_BTV[b, positions_BT[b, t]] = new_BTV[b, t]
    return logits_BTV, cache


def check_logits(name, logits_BTV, lengths=LENGTHS):
    expected_BTV = forward(name)[0]
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(
            logits_BTV[b, :length], expected_BTV[b, :length], atol=1e-4, err_msg=f"row {b}"
        )


def routed_caches(name, cache):
    """[(index of the block, its cache, its room)] of the routed blocks."""
    found = []
    for i, spec in enumerate(build(name)[0].specs()):
        if spec.routing is not None:
            room = int(np.ceil(round(spec.capacity * CONTEXT * spec.routing.slack, 6)))
            found.append((i, cache["layers"][f"block_{i}"], min(CONTEXT, room)))
    return found


# ---- equal to the full forward -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name, chunk, singles_from",
    [
        # One call for all, which is longer than the cache.
        ("llama", 64, CONTEXT),
        ("mod_context", 64, CONTEXT),
        ("recursion", 64, CONTEXT),
        ("moe", 64, CONTEXT),
        ("mod_full", 1, 0),
        # What no row of FAMILIES combines.
        ("mode_context", 5, 10),
        ("mode_context_choice", 5, 10),
        ("mode_expert_choice", 5, 10),
        ("recursion_threshold", 5, 5),
        ("recursion_moe", 5, 10),
        ("dropout_elementwise", 5, 10),
        ("dropout_context", 5, 10),
        ("dropout_embedding", 5, 10),
        ("soft_mod", 5, 10),
    ],
)
def test_rows_of_different_lengths(name, chunk, singles_from):
    """Beside what test_families.py reads of each family."""
    logits_BTV, _ = decode_all(name, chunk, singles_from)
    check_logits(name, logits_BTV)


@pytest.mark.parametrize(
    "name", ["mod_full", "mod_context", "moe", "mode", "recursion", "dropout_embedding", "soft_mod"]
)
def test_one_row(name):
    """Token by token; in chunks it is read by test_a_chunk_runs_as_often_as_it_needs."""
    logits_BTV, _ = decode_all(name, 1, lengths=(CONTEXT,))
    check_logits(name, logits_BTV, lengths=(CONTEXT,))


@pytest.mark.parametrize("name", ["moe", "moe_expert_choice", "mode"])
def test_experts_fill_up(name):
    """So that the tests above see tokens turned away; what was served and what was not adds up."""
    _, cache = decode_all(name, 5)
    model, dropped = build(name)[0], 0
    for i, spec in enumerate(model.specs()):
        block, size = cache["layers"][f"block_{i}"], CONTEXT
        if spec.routing is not None:
            size = plans.capacity(spec.capacity * spec.routing.slack, CONTEXT)
        room = spec.block.moe.slots(size, "causal")
        taken_BE, dropped_B = (np.asarray(block["mlp"][key]) for key in ("taken", "dropped"))
        assert taken_BE.max() <= room
        dropped += dropped_B.sum()
        if name == "moe":
            np.testing.assert_array_equal(taken_BE.sum(axis=1) + dropped_B, 2 * np.array(LENGTHS))
    assert dropped > 0


# ---- what a routed block's cache holds ---------------------------------------------------------


@pytest.mark.parametrize("name, blocks_not_routed", [
    ("llama", 2), ("mod", 1), ("moe", 2), ("dropout_context", 1), ("recursion_context", 3),
])  # fmt: skip
def test_first_tokens_attend_as_in_a_full_pass(name, blocks_not_routed, monkeypatch):
    """`decode="first"`: the same features and the same cache, but the attention of a full pass
    wherever a block computes all tokens."""
    attend, attended = attention.attend, []
    monkeypatch.setattr(attention, "attend", lambda *a, **k: attended.append(1) or attend(*a, **k))
    cache = models.init_cache(build(name)[0], len(LENGTHS), CONTEXT)
    before = len(attended)
    for tokens_BT, positions_BT in chunks_of(9, 0, 9):
        expected_BTV, expected = decoder(name)(cache, tokens_BT, positions_BT)
        assert len(attended) == before
        logits_BTV, cache = decoder_of(name, "first")(cache, tokens_BT, positions_BT)
        valid_BT = np.asarray(positions_BT) >= 0
        np.testing.assert_allclose(logits_BTV[valid_BT], expected_BTV[valid_BT], atol=1e-4)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), cache, expected)
    assert len(attended) - before == blocks_not_routed


@pytest.mark.parametrize(
    "capacity, slack, size, slots",
    [(0.125, 2.0, 1024, 256), (0.125, 1.0, 20, 3), (0.1, 1.0, 30, 3), (0.1, 1.5, 30, 5),
     (0.75, 2.0, 20, 20), (1.0, 1.0, 20, 20), (0.01, 1.0, 10, 1)],
)  # fmt: skip
def test_slots_of_a_routed_block(capacity, slack, size, slots):
    """ceil(c * T * slack), at most T; a dense block has T."""
    changes = {"depth_routing.capacity": capacity, "depth_routing.slack": slack}
    model = families.make({**ROUTED, **changes, "attention.num_kv_heads": 2}, context=size)
    cache = jax.eval_shape(lambda: models.init_cache(model, 3, size))["layers"]
    dense, routed = cache["block_0"]["attention"], cache["block_1"]["attention"]
    assert dense["position"].shape == (3, size) and routed["position"].shape == (3, slots)
    for part in ("cached_key", "cached_value"):
        head_dim = model.config.width // model.config.attention.num_heads
        assert dense[part].size == 3 * 2 * size * head_dim
        assert routed[part].size == 3 * 2 * slots * head_dim


@pytest.mark.parametrize("name, overflows", [("mod", False), ("mod_full", True)])
@pytest.mark.parametrize("chunk", [1, 5])
def test_the_cache_holds_routed_tokens_only(name, overflows, chunk):
    """With their original positions, in order; what found no room is counted, not kept."""
    _, cache = decode_all(name, chunk)
    layers = forward(name)[1]
    params = build(name)[1]
    overflow = 0
    for i, block, room in routed_caches(name, cache):
        # The router reads the state below the block: below the first, that is the embedding.
        state_BTD = layers[i - 1] if i else np.asarray(params["embed"]["embedding"])[tokens()]
        score_BT = state_BTD @ np.asarray(params["layers"][f"block_{i}"]["router"])
        for b, length in enumerate(LENGTHS):
            wanted = np.flatnonzero(score_BT[b, :length] > 0)
            held = np.asarray(block["attention"]["position"][b])
            assert held.shape == (room,)
            np.testing.assert_array_equal(held[: len(wanted)], wanted[:room])
            assert np.all(held[len(wanted) :] == -1)
            kept = min(room, len(wanted))
            assert block["routed"][b] == block["attention"]["used"][b] == kept
            assert block["overflow"][b] == len(wanted) - kept
            overflow += len(wanted) - kept
    assert (overflow > 0) == overflows


@pytest.mark.parametrize("name", ["mod_full", "moe", "mode_context_choice", "mode_context"])
def test_what_a_full_pass_leaves_out_decoding_does(name):
    """As many, of rows as long as the cache; what counts them in one says so in the other."""
    _, cache = decode_all(name, 64, lengths=(CONTEXT,) * len(LENGTHS))
    decoded = collections.Counter()
    for path, value in jax.tree_util.tree_leaves_with_path(cache):
        if path[-1].key in ("overflow", "dropped"):
            decoded[path[-1].key] += int(np.sum(value))
    full, moe = collections.Counter(), build(name)[0].config.mlp.moe
    each = moe.top_k if moe.router == "token_choice" else 1  # experts that a token asks for
    for path, mean in means.leaves(forward(name)[2]):
        statistic = path[-2].key if hasattr(path[-1], "idx") else path[-1].key
        if statistic == "router/overflow_fraction":
            full["overflow"] += float(mean.total)
        if statistic == "moe/dropped_fraction":
            full["dropped"] += float(mean.total) * each
    assert decoded == {kind: pytest.approx(count) for kind, count in full.items()}
    assert sum(decoded.values()) > 0


# ---- what is not computed ----------------------------------------------------------------------


def dots(jaxpr, inside=False):
    """(matrix products outside, inside) conditionals and loops of a jaxpr."""
    count = np.zeros(2, int)
    for equation in jaxpr.eqns:
        count[int(inside)] += equation.primitive.name == "dot_general"
        control = equation.primitive.name in ("cond", "while")
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                count += dots(inner, inside or control)
    return count


@pytest.mark.parametrize("batch, platform", [(1, "cpu"), (4, "cpu"), (1, "gpu")])
def test_all_products_of_a_routed_block_are_conditional(batch, platform, monkeypatch):
    """Of a dense and a routed block: 4 projections, 2 for attention, 3 for the MLP each. On a GPU
    for one row, of which half of the tokens are routed."""
    monkeypatch.setattr(attend, "_CACHE_BLOCK", CONTEXT)  # attention without a loop of its own
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    model, params = build("mod")
    cache = models.init_cache(model, batch, CONTEXT)

    def step(cache, tokens_B1):
        variables = {"params": params, "cache": cache, **families.random_state(model)}
        return model.apply(
            variables, tokens_B1, tokens_B1, decode=True, cache_size=CONTEXT, mutable=["cache"]
        )

    outside, inside = dots(jax.make_jaxpr(step)(cache, jnp.zeros((batch, 1), jnp.int32)).jaxpr)
    assert outside == 9 + 2  # the dense block, the router, the output layer
    assert inside >= 9 and inside % 9 == 0


def prefill(model, length, size):
    """(cache, tokens) -> (logits, cache), and shapes of both, of a prompt's chunk for one row."""
    variables = {"params": families.random_params(model), **families.random_state(model)}

    def read(cache, tokens_BT):
        positions_BT = jnp.arange(length)[None]
        return model.apply({**variables, "cache": cache}, tokens_BT, positions_BT, decode=True,
                           cache_size=size, mutable=["cache"])  # fmt: skip

    cache = jax.eval_shape(lambda: models.init_cache(model, 1, size))
    return read, cache, jax.ShapeDtypeStruct((1, length), jnp.int32)


NOOP = {**EXPERTS, "mlp.moe.num_noop": 2}
LATENT = {"family": "latent", "group_size": 16, "latents": (4,), "level_widths": (24,),
          "level_heads": (2,), "mlp.hidden": 128}  # fmt: skip


@pytest.mark.parametrize(
    "changes, tolerance",
    [
        ({}, 0),
        ({**EXPERTS, "mlp.moe.num_experts": 8, "mlp.moe.num_shared": 1}, 0),
        ({**EXPERTS, "mlp.moe.router": "expert_choice"}, 0),
        (NOOP, 0),
        ({**ROUTED, "depth_routing.kv_for_skipped": True, "depth_routing.skip_mlp": 8}, 0),
        ({**ROUTED, "depth_routing.kv_for_skipped": True, "soft_experts.num": 2}, 0),
        # These attend to a block of slots at a time, and may have fewer tokens.
        (ROUTED, 0.05),
        ({**ROUTED, "depth_routing.causal": "predictor", "soft_experts.num": 2}, 0.05),
        ({**NOOP, **ROUTED}, 0.05),
        (MODELS["recursion_moe"], 0.05),
        # Keys of computed tokens are computed with those of the skipped ones, and again.
        ({**ROUTED, **RECURSION, "depth_routing.kv_for_skipped": True}, 0.05),
        # Places inside groups are attended to all at once.
        (LATENT, 0.2),
        ({**LATENT, **ROUTED, "compression": "transformer", "upsampling": "attention"}, 0.3),
    ],
)
def test_a_prefill_costs_a_forward_pass(changes, tolerance, monkeypatch):
    """64 tokens in one call, of a long context. What runs in rounds is counted once: as a rule that
    is how often it runs."""
    monkeypatch.setattr(attend, "_CACHE_BLOCK", 64)
    model = families.make({"attention.num_heads": 2, **changes}, context=256)
    counted = flops.jaxpr_flops(*prefill(model, 64, 256))
    expected = flops.executed(model, 64, train=False)
    assert expected <= counted <= (1 + tolerance) * expected


def test_keys_of_skipped_tokens_cost_two_products():
    """Of a block whose skipped tokens write keys and values every matrix is applied once."""
    model = families.make(MODELS["mode_context"], context=64)
    called = collections.Counter()

    def count(next_function, arguments, keywords, context):
        if context.method_name == "__call__" and "block_1" in context.module.path:
            path = context.module.path
            called["/".join(path[path.index("block_1") + 1 :])] += 1
        return next_function(*arguments, **keywords)

    read, *shapes = prefill(model, 64, 64)
    with nn.intercept_methods(count):
        jax.eval_shape(read, *shapes)
    assert called["mlp"] == called["attention/query"] == called["attention/out"] == 1
    assert called["attention/key"] == called["attention/value"] == 1


def test_masks_of_a_block_remember_what_it_computes():
    """Also where skipped tokens write keys: the keys are of all tokens, those of masks are not."""
    model = families.make(MODELS["dropout_context"], context=64)
    cache = jax.eval_shape(lambda: models.init_cache(model, 1, 64))
    block = cache["layers"]["block_1"]
    assert block["attention"]["position"].shape == (1, 64)
    mask = block["dropout_mlp_output"]["attention"]
    assert mask["position"].shape == (1, plans.capacity(0.3 * 2.0, 64))


@functools.cache
def counting_decoder(name):
    """A step of a model that counts how often, and with how many rows, each block runs."""
    model, params = build(name)
    ran = []

    def count(next_function, arguments, keywords, context):
        if isinstance(context.module, blocks.Block) and context.method_name == "__call__":
            name, rows = context.module.path[-1], arguments[0].shape[0]
            jax.debug.callback(lambda: ran.append((name, rows)))
        return next_function(*arguments, **keywords)

    @families.jit
    def step(cache, tokens_B1, positions_B1):
        with nn.intercept_methods(count):
            logits_BTV, state = model.apply(
                {"params": params, "cache": cache, **families.random_state(model)},
                tokens_B1,
                positions_B1,
                decode=True,
                cache_size=CONTEXT,
                mutable=["cache"],
            )
        return logits_BTV, state["cache"]

    def run(*arguments):
        ran.clear()
        result = jax.block_until_ready(step(*arguments))
        jax.effects_barrier()
        return result, list(ran)

    return run


def test_a_skipped_block_does_not_run():
    """One row: the routed block runs exactly for the tokens that it routes, and the cache of a
    token that is skipped is that of before, bit for bit, but for how many came."""
    cache = models.init_cache(build("mod")[0], 1, CONTEXT)
    skipped = 0
    for tokens_B1, positions_B1 in chunks_of(1, 0, CONTEXT, (CONTEXT,)):
        before = cache["layers"]["block_1"]
        (_, cache), ran = counting_decoder("mod")(cache, tokens_B1, positions_B1)
        after = cache["layers"]["block_1"]
        routed = int(after["routed"][0] - before["routed"][0])
        assert [name for name, _ in ran].count("block_1") == routed
        assert [name for name, _ in ran].count("block_0") == 1
        if not routed:
            skipped += 1
            came = {"reached": before["reached"] + 1}
            jax.tree.map(np.testing.assert_array_equal, before | came, after)
        else:
            assert after["attention"]["used"][0] == before["attention"]["used"][0] + 1
    assert 3 < skipped < CONTEXT - 3


def test_a_chunk_runs_as_often_as_it_needs():
    """A routed block has two places for a chunk of five tokens: it runs again for what the first
    round leaves over, and not at all where none is routed, as when its cache is full."""
    model, size = build("mod_short")[0], 5
    places, runs = plans.capacity(0.2 * 1.5, size), set()
    cache = models.init_cache(model, 1, CONTEXT)
    for tokens_BT, positions_BT in chunks_of(size, 0, CONTEXT, (CONTEXT,)):
        before = int(cache["layers"]["block_1"]["routed"][0])
        (_, cache), ran = counting_decoder("mod_short")(cache, tokens_BT, positions_BT)
        routed = int(cache["layers"]["block_1"]["routed"][0]) - before
        times = [name for name, _ in ran].count("block_1")
        assert times == -(-routed // places)
        runs.add(times)
    assert {0, 2} <= runs


def test_compacted_rows_are_as_if_alone():
    """Eight rows of which from none to all want the block, with two to four places for them: the
    logits of each are those of the full forward, the caches those of the row alone."""
    batch, rng = 8, np.random.default_rng(0)
    model, params = build("mod_gpt2")
    places = plans.capacity(0.3 * 2.0, batch)
    assert 1 < places < batch
    many_BT = families.tokens(seed=3, batch=batch, length=CONTEXT)
    expected_BTV = families.jit(model.apply)({"params": params}, many_BT)
    cache, length_B, wanted = models.init_cache(model, batch, CONTEXT), np.zeros(batch, int), set()
    for step in range(40):
        # At times a few rows, at times all of them get a token.
        active_B = (rng.random(batch) < (0.2, 1.0)[step % 2]) & (length_B < CONTEXT)
        place_B = np.minimum(length_B, CONTEXT - 1)
        before = np.asarray(cache["layers"]["block_1"]["routed"])
        logits_B1V, cache = decoder("mod_gpt2")(
            cache,
            many_BT[np.arange(batch), place_B][:, None],
            jnp.asarray(np.where(active_B, length_B, -1), jnp.int32)[:, None],
        )
        wanted.add(int(np.sum(cache["layers"]["block_1"]["routed"] - before)))
        for b in np.flatnonzero(active_B):
            np.testing.assert_allclose(
                logits_B1V[b, 0], expected_BTV[b, length_B[b]], atol=1e-4, err_msg=f"{b} at {step}"
            )
        length_B += active_B
    assert 0 in wanted and wanted & set(range(1, places + 1)) and max(wanted) > places
    for b in (0, 5):
        alone = models.init_cache(model, 1, CONTEXT)
        for t in range(length_B[b]):
            _, alone = decoder("mod_gpt2")(
                alone, many_BT[b : b + 1, t : t + 1], jnp.full((1, 1), t, jnp.int32)
            )
        row = jax.tree.map(lambda x, b=b: x[b : b + 1], cache)
        families.assert_trees_close(alone, row, atol=1e-5)
