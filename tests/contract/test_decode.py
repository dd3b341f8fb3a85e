"""What decoding keeps in its caches, and that it computes no skipped work.

test_families.py and test_prefix.py compare its logits with a full forward pass, for every family.
"""

import collections
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from routing_reference import np_admit

from efx import models
from efx.layers import attend, batch_means, flops, kv_cache, selection
from efx.layers.block import Block
from efx.models import stack

CONTEXT = 24
LENGTHS = np.array([24, 17, 6, 1])  # tokens of the rows of a batch
ROUTED = {
    "depth_routing.kind": "mod",
    "depth_routing.gate": "identity",
    "depth_routing.causal_decision": "aux_loss",
}
CONTEXT_OF_SKIPPED = {"depth_routing.kv_for_skipped": True, "depth_routing.capacity": 0.3}
EXPERTS = {"mlp.kind": "moe", "mlp.moe.num_experts": 4, "mlp.moe.expert_hidden": 24}
MODELS = {
    # Capacity for all selected tokens, and far too little of it.
    "mod": {**ROUTED, "depth_routing.capacity": 0.5},
    "mod_full": {
        **ROUTED,
        "attention.num_kv_heads": 2,
        "attention.window": 7,
        "depth_routing.every": 1,
        "depth_routing.capacity": (0.2, 0.1),
        "depth_routing.slack": 1.0,
    },
    "mod_gpt2": {**ROUTED, "preset": "gpt2", "depth_routing.capacity": 0.3},
    "masks_context": {
        **ROUTED,
        **CONTEXT_OF_SKIPPED,
        **families.dotted({"dropout": families.masks()}),
    },
    "moe": {
        **EXPERTS,
        "preset": "gpt2",
        "mlp.moe.num_experts": 8,
        "mlp.moe.num_shared": 1,
        "mlp.moe.capacity_factor": 0.8,
    },
    "mode_context_choice": {
        **EXPERTS,
        **ROUTED,
        **CONTEXT_OF_SKIPPED,
        "mlp.moe.router": "expert_choice",
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
    """(model, variables) of a row of MODELS."""
    model = families.make(MODELS[name], context=CONTEXT)
    return model, {"params": families.random_params(model), **families.random_state(model)}


@functools.cache
def forward(name):
    """(logits, what every layer returned, statistics) of the full forward on `tokens()`."""
    model, variables = build(name)

    @families.jit
    def apply(tokens_BT):
        return model.apply(
            variables,
            tokens_BT,
            capture_intermediates=lambda module, method: isinstance(module, stack.Layer),
            mutable=["intermediates", "stats", batch_means.COLLECTION],
        )

    logits_BTV, state = apply(tokens())
    layers = state["intermediates"]["layers"]
    states = [np.asarray(layers[f"block_{i}"]["__call__"][0]) for i in range(model.config.depth)]
    return np.asarray(logits_BTV), states, batch_means.sown(state, "stats")


@functools.cache
def decoder(name, kind=True):
    return families.decoder(*build(name), CONTEXT, kind)


def tokens():
    return families.tokens(batch=len(LENGTHS), length=CONTEXT)


def decoded(name, size, length_B=LENGTHS):
    """The cache after all tokens, read in chunks; their logits are those of the full forward."""
    cache = models.init_cache(build(name)[0], len(length_B), CONTEXT)
    calls = families.chunks(length_B, length_B, size)
    logits_BTV, cache = families.read(decoder(name), cache, tokens()[: len(length_B)], calls)
    read_BT = np.arange(CONTEXT) < length_B[:, None]
    np.testing.assert_array_equal(np.isfinite(logits_BTV).all(axis=-1), read_BT)
    expected_BTV = forward(name)[0][: len(length_B)]
    np.testing.assert_allclose(logits_BTV[read_BT], expected_BTV[read_BT], atol=1e-4)
    return cache


def test_decoding_without_routed_blocks_is_the_full_pass_without_them():
    """selection="off"."""
    model, variables = build("mod")
    model, tokens_BT = model.clone(selection="off"), tokens()
    step, lengths_B = families.decoder(model, variables, CONTEXT), np.full(len(LENGTHS), CONTEXT)
    cache, calls = (
        models.init_cache(model, len(LENGTHS), CONTEXT),
        families.chunks(lengths_B, lengths_B, 6),
    )
    logits_BTV, _ = families.read(step, cache, tokens_BT, calls)
    expected_BTV = families.jit(model.apply)(variables, tokens_BT)
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-4)
    assert np.abs(expected_BTV - forward("mod")[0]).max() > 0.1


# ---- what a routed block's cache holds ---------------------------------------------------------


@pytest.mark.parametrize("name", families.rows(["mod", "masks_context"], {"masks_context"}))
def test_prefill_is_decoding(name):
    """`decode="first"`, by the attention of a full pass: the same logits and the same cache."""
    calls = [(9, np.minimum(9, LENGTHS))]
    empty = models.init_cache(build(name)[0], len(LENGTHS), CONTEXT)
    expected = families.read(decoder(name), empty, tokens(), calls)
    got = families.read(decoder(name, "first"), empty, tokens(), calls)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), got, expected)


@pytest.mark.parametrize(
    "capacity, slack, size, slots",
    [(0.125, 2.0, 1024, 260), (0.1, 1.0, 30, 7), (0.75, 2.0, 20, 20), (0.01, 1.0, 10, 5)],
)
def test_slots_of_a_routed_block(capacity, slack, size, slots):
    """ceil(c * T * slack) + 4, at most T; a dense block has T. Attention masks have as many, with
    the keys of skipped tokens too."""
    changes = {"depth_routing.capacity": capacity, "depth_routing.slack": slack}
    model = families.make({**MODELS["masks_context"], **changes}, context=size)
    block = jax.eval_shape(lambda: models.init_cache(model, 3, size))["layers"]["block_1"]
    assert block["attention"]["position"].shape == (3, size)
    assert block["dropout_mlp_output"]["attention"]["position"].shape == (3, slots)
    model = families.make({**ROUTED, **changes, "attention.num_kv_heads": 2}, context=size)
    cache = jax.eval_shape(lambda: models.init_cache(model, 3, size))["layers"]
    for name, length in (("block_0", size), ("block_1", slots)):
        attention = cache[name]["attention"]
        assert attention["position"].shape == (3, length)
        assert attention["cached_key"].size == attention["cached_value"].size == 3 * 2 * length * 8


@pytest.mark.parametrize("name, size", families.rows([("mod", 1), ("mod_full", 5)], {"mod"}))
def test_the_cache_holds_routed_tokens_only(name, size):
    """With their original positions, in order; overflow is counted."""
    cache = decoded(name, size)
    model, variables = build(name)
    params, layers, overflow = variables["params"], forward(name)[1], 0
    for i, spec in enumerate(model.specs()):
        if spec.routing is None:
            continue
        block = cache["layers"][f"block_{i}"]
        rate = spec.routing.causal_rate(spec.capacity)
        # The router reads the state below the block: below the first, that is the embedding.
        state_BTD = layers[i - 1] if i else np.asarray(params["embed"]["embedding"])[tokens()]
        score_BT = state_BTD @ np.asarray(params["layers"][f"block_{i}"]["router"])
        for b, length in enumerate(LENGTHS):
            selected_T = score_BT[b, :length] > 0
            admitted = np.flatnonzero(np_admit(selected_T, rate, np.arange(length) + 1))
            held, kept = np.asarray(block["attention"]["position"][b]), len(admitted)
            np.testing.assert_array_equal(held[:kept], admitted)
            assert np.all(held[kept:] == -1)
            assert block["admitted"][b] == block["attention"]["used"][b] == kept
            assert block["overflow"][b] == selected_T.sum() - kept
            assert block["reached"][b] == length
            overflow += selected_T.sum() - kept
    assert (overflow > 0) == (name == "mod_full")


@pytest.mark.parametrize(
    "name", families.rows(["moe", "mode_context_choice"], {"mode_context_choice"})
)
def test_as_many_tokens_overflow_in_decoding_as_in_a_full_pass(name):
    """Of blocks and of experts, in a call that is longer than the rows."""
    cache = decoded(name, 64, np.full(len(LENGTHS), CONTEXT))
    decoding, full = collections.Counter(), collections.Counter()
    for path, value in jax.tree_util.tree_leaves_with_path(cache):
        if path[-1].key == "overflow":
            decoding[path[-2].key == "mlp"] += int(np.sum(value))
    moe = build(name)[0].config.mlp.moe
    choices = moe.top_k if moe.router == "token_choice" else 1
    for path, mean in batch_means.leaves(forward(name)[2]):
        statistic = path[-2].key if hasattr(path[-1], "idx") else path[-1].key
        if statistic == "router/overflow_fraction":
            full[False] += float(mean.total)
        if statistic == "moe/overflow_fraction":
            full[True] += float(mean.total) * choices
    assert decoding == {kind: pytest.approx(count) for kind, count in full.items()}
    assert sum(decoding.values()) > 0


# ---- skipped work ----------------------------------------------------------------------


def test_a_cpu_reads_no_block_of_slots_behind_the_used_ones():
    """These hold NaN."""
    cache = models.init_cache(build("mod")[0], 1, CONTEXT)

    def unread(path, leaf):
        is_read = path[-1].key not in kv_cache.KEYS_AND_VALUES
        return leaf if is_read else leaf.at[..., attend._CACHE_BLOCK :].set(np.nan)

    cache = jax.tree_util.tree_map_with_path(unread, cache)
    calls = families.chunks(np.array([9]), np.array([10]), 9)
    logits_BTV, _ = families.read(decoder("mod"), cache, tokens()[:1], calls)
    assert np.isfinite(logits_BTV[:, :10]).all()


LATENT = {
    "family": "latent",
    "group_size": 16,
    "latents": (4,),
    "level_widths": (24,),
    "level_heads": (2,),
    "mlp.hidden": 128,
}


@pytest.mark.parametrize(
    "changes, tolerance",
    [
        ({**EXPERTS, "mlp.moe.num_experts": 8, "mlp.moe.num_shared": 1, "mlp.moe.num_noop": 2}, 0),
        # Keys of skipped tokens cost two products, and every other matrix is applied once.
        ({**ROUTED, "depth_routing.kv_for_skipped": True, "depth_routing.skip_mlp": 8}, 0),
        # This attends to a block of slots at a time, and may have fewer tokens.
        ({**ROUTED, "depth_routing.causal_decision": "predictor", "soft_experts.num": 2}, 0.05),
        # All positions of a group are attended to at once.
        ({**LATENT, **ROUTED, "compression": "transformer", "upsampling": "attention"}, 0.3),
    ],
)
def test_a_prefill_costs_a_forward_pass(changes, tolerance, monkeypatch):
    """64 tokens in one call, of a long context, with one round of each routed block."""
    monkeypatch.setattr(attend, "_CACHE_BLOCK", 64)
    model = families.make({"attention.num_heads": 2, **changes}, context=256)
    variables = {"params": families.random_params(model), **families.random_state(model)}
    counted = flops.jaxpr_flops(
        families.decoder(model, variables, 256).__wrapped__,
        jax.eval_shape(lambda: models.init_cache(model, 1, 256)),
        jax.ShapeDtypeStruct((1, 64), jnp.int32),
        jnp.arange(64)[None],
    )
    expected = flops.executed(model, 64, train=False)
    assert expected <= counted <= (1 + tolerance) * expected


@functools.cache
def counting_decoder(name):
    """A step of a model that counts how often, and with how many rows, each block runs."""
    model, variables = build(name)
    ran = []

    def count(next_function, arguments, keywords, context):
        if isinstance(context.module, Block) and context.method_name == "__call__":
            name, rows = context.module.path[-1], arguments[0].shape[0]
            jax.debug.callback(lambda: ran.append((name, rows)))
        return next_function(*arguments, **keywords)

    step = families.decoder(model, variables, CONTEXT)

    def run(*arguments):
        ran.clear()
        with nn.intercept_methods(count):
            result = jax.block_until_ready(step(*arguments))
        jax.effects_barrier()
        return result, list(ran)

    return run


def one_row():
    """(tokens, positions) of the first row, one at a time."""
    return [(tokens()[:1, t : t + 1], jnp.full((1, 1), t, jnp.int32)) for t in range(CONTEXT)]


def test_a_skipped_block_does_not_run():
    """One row: the routed block runs exactly for the tokens that it routes, and a skipped token
    changes no bit of its cache but the count of tokens."""
    cache = models.init_cache(build("mod")[0], 1, CONTEXT)
    skipped, logits = 0, []
    for arguments in one_row():
        before = cache["layers"]["block_1"]
        (logits_11V, cache), ran = counting_decoder("mod")(cache, *arguments)
        logits.append(logits_11V[0, 0])
        after = cache["layers"]["block_1"]
        routed = int(after["admitted"][0] - before["admitted"][0])
        assert [name for name, _ in ran].count("block_1") == routed
        assert [name for name, _ in ran].count("block_0") == 1
        if not routed:
            skipped += 1
            reached = {"reached": before["reached"] + 1}
            jax.tree.map(np.testing.assert_array_equal, before | reached, after)
        else:
            assert after["attention"]["used"][0] == before["attention"]["used"][0] + 1
    assert 3 < skipped < CONTEXT - 3
    np.testing.assert_allclose(logits, forward("mod")[0][0], atol=1e-4)


def test_compacted_rows_are_as_if_alone():
    """Eight rows, none to all of them routed, with fewer slots: the logits of each are those of the
    full forward, the caches those of the row alone."""
    batch, rng = 8, np.random.default_rng(0)
    model, variables = build("mod_gpt2")
    slots = selection.num_slots(0.3 * 2.0, batch)
    assert 1 < slots < batch
    many_BT = families.tokens(seed=3, batch=batch, length=CONTEXT)
    expected_BTV = families.jit(model.apply)(variables, many_BT)
    cache = models.init_cache(model, batch, CONTEXT)
    length_B, routed = np.zeros(batch, int), set()
    for step in range(40):
        # At times a few rows, at times all of them get a token.
        active_B = (rng.random(batch) < (0.2, 1.0)[step % 2]) & (length_B < CONTEXT)
        place_B = np.minimum(length_B, CONTEXT - 1)
        before = np.asarray(cache["layers"]["block_1"]["admitted"])
        (logits_B1V, cache), ran = counting_decoder("mod_gpt2")(
            cache,
            many_BT[np.arange(batch), place_B][:, None],
            jnp.asarray(np.where(active_B, length_B, -1), jnp.int32)[:, None],
        )
        routed.add(int(np.sum(cache["layers"]["block_1"]["admitted"] - before)))
        assert {rows for name, rows in ran if name == "block_1"} <= {slots}
        for b in np.flatnonzero(active_B):
            np.testing.assert_allclose(
                logits_B1V[b, 0], expected_BTV[b, length_B[b]], atol=1e-4, err_msg=f"{b} at {step}"
            )
        length_B += active_B
    assert 0 in routed and routed & set(range(1, slots + 1)) and max(routed) > slots
    for b in (0, 5):
        alone = models.init_cache(model, 1, CONTEXT)
        calls = families.chunks(length_B[b : b + 1], length_B[b : b + 1], 1)
        _, alone = families.read(decoder("mod_gpt2"), alone, many_BT[b : b + 1], calls)
        row = jax.tree.map(lambda x, b=b: x[b : b + 1], cache)
        families.assert_trees_close(alone, row, atol=1e-5)
