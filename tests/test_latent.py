"""The grouped-latent transformer: its formulas, causality in every combination, decoding."""

import dataclasses
import functools
import itertools
import logging
import math

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import LENGTH, VOCAB

from configs import common
from efx import models
from efx.errors import UsageError
from efx.layers import group_views, groups
from efx.layers.info import TokenInfo
from efx.models import latent_config
from efx.sample import Sampler
from efx.step import make_eval_step

pytestmark = pytest.mark.long  # minutes in all: launch/test.sh --all

LEVELS = {  # group size, latents, widths and heads of the levels below the stack's
    1: {"group_size": 6, "latents": (3,), "level_widths": (8,), "level_heads": (2,)},
    2: {"group_size": 8, "latents": (4, 2), "level_widths": (8, 12), "level_heads": (1, 2)},
    3: {"group_size": 8, "latents": (4, 2, 1), "level_widths": (8, 8, 12),
        "level_heads": (2, 1, 2)},
}
SMALL = {"family": "latent", "width": 16, "num_heads": 2, "depth": 1, "positions": "both"}
MEMORY = {"none": {}, "local": {"memory_local": 2}, "global": {"memory_global": 1},
          "both": {"memory_local": 1, "memory_global": 2}}


def make(changes=None, levels=2, **options):
    return families.make({**SMALL, **LEVELS[levels], **(changes or {})}, **options)


def apply(model, params, *arguments):
    return families.jit(model.apply)({"params": params}, *arguments)


# ---- the forward pass, once more in numpy ------------------------------------------------------


def norm(x, p):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def turn(x_TNH, positions_T, theta=10000.0):
    half = x_TNH.shape[-1] // 2
    angle = positions_T[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x_TNH[..., :half], x_TNH[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def attention(q_TD, kv_SD, p, heads, rope, q_positions_T):
    """Of one sequence: a query sees keys up to its own position; keys have positions 0, 1..."""
    k_positions = np.arange(len(kv_SD))
    q = norm(q_TD @ p["query"]["kernel"], p["norm_query"]).reshape(len(q_TD), heads, -1)
    k = norm(kv_SD @ p["key"]["kernel"], p["norm_key"]).reshape(len(kv_SD), heads, -1)
    v = (kv_SD @ p["value"]["kernel"]).reshape(len(kv_SD), heads, -1)
    if rope:
        q, k = turn(q, q_positions_T), turn(k, k_positions)
    out = np.zeros_like(q)
    for h, t in itertools.product(range(heads), range(len(q))):
        seen = k_positions <= q_positions_T[t]
        scores = k[seen, h] @ q[t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[seen, h] / weights.sum()
    return out.reshape(len(q), -1) @ p["out"]["kernel"]


def mlp(x, p):
    h = x @ p["up"]["kernel"]
    return h * (1 + np.vectorize(math.erf)(h / np.sqrt(2))) / 2 @ p["down"]["kernel"]


def block(x_TD, p, heads, rope, keep=None, residual=lambda x: x):
    """A block of the last `keep` places (None: all), which attend to all up to their own."""
    first = 0 if keep is None else len(x_TD) - keep
    n = norm(x_TD, p["norm_attention"])
    places = np.arange(first, len(x_TD))
    h = residual(x_TD[first:]) + attention(n[first:], n, p["attention"], heads, rope, places)
    return h + mlp(norm(h, p["norm_mlp"]), p["mlp"])


def level_blocks(x, p, order, heads, rope):
    """x: list of groups [P, D]. p: parameters by name; order: ("local", "global", ...)."""
    states = {kind: p.get(f"memory_{kind}", np.zeros((0, x[0].shape[-1])))
              for kind in ("local", "global")}
    stacks = sorted((name for name in p if name.startswith(("local_", "global_"))),
                    key=lambda name: int(name.split("_")[1]))
    blocks = [(name.split("_")[0], p[name][f"block_{i}"]) for name in stacks
              for i in range(len(p[name]))]
    assert [kind for kind, _ in blocks] == list(order)
    for kind, q in blocks:
        memory, size = states[kind], len(x[0])
        if kind == "local":
            after = [block(np.concatenate([memory, g]), q, heads, rope) for g in x]
            x = [y[len(memory):] for y in after]
            states[kind] = after[0][: len(memory)]
        else:
            y = block(np.concatenate([memory, *x]), q, heads, rope)
            states[kind], y = y[: len(memory)], y[len(memory):]
            x = [y[i: i + size] for i in range(0, len(y), size)]
    return x


def early_latents(before_PD, count, repeat):
    """The last `count` of the latents again and again, or each several times."""
    copies = -(-count // len(before_PD))
    whole = (np.tile(before_PD, (copies, 1)) if repeat == "tile"
             else np.repeat(before_PD, copies, axis=0))
    return whole[len(whole) - count:]


def reference(tokens_T, params, model):
    """Logits [T, V]."""
    c, rope = model.resolved(), model.positions != "level"
    sizes, count = c.sizes, -(-len(tokens_T) // c.group_size)
    padded = np.concatenate([tokens_T, np.zeros(count * c.group_size - len(tokens_T), int)])
    tables = [params[f"positions_embed_{i}"]["embedding"] for i in range(len(sizes))
              if c.positions != "rope"] or [0.0] * len(sizes)
    x = [params["embed"]["embedding"][g] + tables[0] for g in padded.reshape(count, -1)]
    skips = []
    for i in range(1, len(sizes)):
        p, heads = params[f"encoder_{i - 1}"], c.level_heads[i]
        skips.append(x)
        q = p["compress"]
        keep = sizes[i] if c.compression == "perceiver" else None
        x = [block(g, q, heads, rope, keep, lambda y, q=q: y @ q["residual"]["kernel"]) for g in x]
        for j in range(c.compression_blocks - 1 if c.compression == "transformer" else 0):
            x = [block(g, q["blocks"][f"block_{j}"], heads, rope) for g in x]
        x = [g[len(g) - sizes[i]:] + tables[i] for g in x]
        x = level_blocks(x, p.get("blocks", {}), order_of(c, i, "encoder"), heads, rope)
    memory = params.get("memory", {}).get("memory_global", np.zeros((0, c.width)))
    y = np.concatenate([memory, *x])
    for i in range(c.depth):
        y = block(y, params["layers"][f"block_{i}"], c.num_heads, rope)
    x = [y[len(memory) + i * sizes[-1]:][: sizes[-1]] for i in range(count)]
    for i in reversed(range(1, len(sizes))):
        p, heads = params[f"decoder_{i - 1}"], c.level_heads[i - 1]
        z = [g @ p["upsample"]["linear"]["kernel"] for g in x]
        early = sizes[i - 1] - sizes[i]
        before = [p["upsample"]["first"], *(early_latents(g, early, c.repeat) for g in z[:-1])]
        x = [np.concatenate(pair) + tables[i - 1] for pair in zip(before, z, strict=True)]
        if c.upsampling == "attention":
            places = np.arange(sizes[i - 1])
            x = [s + g + attention(norm(s + g, p["norm_queries"]), norm(g, p["norm_latents"]),
                                   p["attention"], heads, rope, places)
                 for s, g in zip(skips[i - 1], x, strict=True)]
        x = level_blocks(x, p.get("blocks", {}), order_of(c, i, "decoder"), heads, rope)
        share = p.get("skip")
        x = [s + g if share is None else share * s + (1 - share) * g
             for s, g in zip(skips[i - 1], x, strict=True)]
    x_TD = norm(np.concatenate(x)[: len(tokens_T)], params["norm_final"])
    head = params["embed"]["embedding"].T if c.tied else params["head"]["kernel"]
    return (x_TD @ head)[:, :VOCAB]


def order_of(c, level, side):
    local, whole = (getattr(c, f"{side}_{kind}")[level - 1] for kind in ("local", "global"))
    kinds = ["local"] * local, ["global"] * whole
    if c.block_order == "sequence":
        return [*kinds[0], *kinds[1]]
    return [kind for pair in itertools.zip_longest(*kinds) for kind in pair if kind]


FORWARD = [
    (1, {}),
    (2, {"compression": "transformer", "compression_blocks": 2, "upsampling": "attention",
         "positions": "level", "repeat": "in_place", "skip": "lerp", **MEMORY["both"]}),
    (2, {"upsampling": "attention", "positions": "rope", "block_order": "sequence", "tied": False,
         "encoder_local": (2, 0), "decoder_global": (0, 2), "decoder_local": 2}),
    (3, {"compression": "transformer", "skip": "lerp", "encoder_global": (2, 0, 1), "depth": 2,
         "repeat": "in_place", **MEMORY["local"]}),
    (3, {**MEMORY["global"], "decoder_global": 0, "decoder_local": (2, 1, 0)}),
]


@pytest.mark.parametrize("case", range(len(FORWARD)))
def test_forward_is_the_formulas(case):
    """Of every option at least once; the last group is cut short."""
    levels, changes = FORWARD[case]
    model = make(changes, levels)
    params = families.random_params(model, seed=case)
    tokens_BT = families.tokens(batch=2, length=21)
    logits_BTV = apply(model, params, tokens_BT)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for b in range(2):
        expected_TV = reference(np.asarray(tokens_BT[b]), wide, model)
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=2e-4)


def test_repeated_latents_by_hand():
    assert groups.repeat_index(8, 2, "tile").tolist() == [0, 1, 0, 1, 0, 1]
    assert groups.repeat_index(8, 2, "in_place").tolist() == [0, 0, 0, 1, 1, 1]
    # Latents that do not divide the group: cut at the left.
    assert groups.repeat_index(8, 3, "tile").tolist() == [1, 2, 0, 1, 2]
    assert groups.repeat_index(8, 3, "in_place").tolist() == [0, 1, 1, 2, 2]


# ---- causality ---------------------------------------------------------------------------------

COMBINATIONS = list(itertools.product(groups.COMPRESSIONS, groups.UPSAMPLINGS, LEVELS,
                                      ("none", "both")))
FEW = {"encoder_global": 0, "decoder_local": 0}  # blocks, which compile faster


@functools.cache
def combination(compression, upsampling, levels, memory):
    """(model, parameters, tokens [T], logits [T + 1, T, V]: of these, and of rows whose tokens
    after 0, 1... are others); T is no whole number of groups."""
    changes = {"compression": compression, "upsampling": upsampling, **FEW, **MEMORY[memory]}
    model = make(changes, levels)
    params, length = families.random_params(model), 3 * model.group_size - 3
    tokens_T = families.tokens(batch=1, length=length)[0]
    later_BT = np.arange(length)[None] > np.arange(length)[:, None]
    others_BT = jnp.where(later_BT, (tokens_T + 1)[None] % VOCAB, tokens_T[None])
    logits = apply(model, params, jnp.concatenate([tokens_T[None], others_BT]))
    return model, params, tokens_T, np.asarray(logits), later_BT


@pytest.mark.parametrize("compression, upsampling, levels, memory", COMBINATIONS)
def test_causal_in_every_combination(compression, upsampling, levels, memory):
    _, _, _, logits, later_BT = combination(compression, upsampling, levels, memory)
    moved_BT = np.abs(logits[1:] - logits[:1]).max(axis=-1)
    assert moved_BT[~later_BT].max() < 1e-5
    assert moved_BT[later_BT].min() > 1e-3  # and every later logit does depend on these tokens


@pytest.mark.parametrize("compression, upsampling, levels, memory", COMBINATIONS[::5])
def test_logits_do_not_depend_on_the_length(compression, upsampling, levels, memory):
    """The same tokens in shorter rows: of whole groups, and of a few tokens."""
    model, params, tokens_T, logits, _ = combination(compression, upsampling, levels, memory)
    for length in (2 * model.group_size, model.group_size + 1, 2):
        shorter = apply(model, params, tokens_T[None, :length])
        np.testing.assert_allclose(shorter[0], logits[0, :length], atol=1e-5)


@pytest.mark.parametrize("compression, blocks", [("perceiver", 1), ("transformer", 2)])
def test_a_latent_sees_its_token_and_those_before(compression, blocks):
    """Aligned at the lower right: latent j of 3 sees place p of 7 iff p <= 4 + j, and all these."""
    changes = {"compression": compression, "compression_blocks": blocks}
    (level,) = make(changes, levels=1).resolved().encoder_levels()
    level = dataclasses.replace(level, inner=7, group_size=7)
    compress = groups.Compress(level)
    info = TokenInfo(jnp.arange(7)[None])
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(1, 7, 8)), jnp.float32)
    variables = compress.init(jax.random.key(0), x_BTD, info)
    base = compress.apply(variables, x_BTD, info)
    assert base.shape == (1, 3, 16)
    for p in range(7):
        moved = compress.apply(variables, x_BTD.at[0, p].add(1.0), info) - base
        assert (np.abs(moved[0]).max(axis=-1) > 0).tolist() == [p <= 4 + j for j in range(3)]


# ---- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("upsampling, compression, positions", [
    ("repeat", "perceiver", "both"), ("attention", "transformer", "rope"),
])
def test_documents_do_not_see_each_other(upsampling, compression, positions):
    """Also where one ends and the next begins inside a group."""
    model = make({"upsampling": upsampling, "compression": compression, "positions": positions})
    params, starts = families.random_params(model), (0, 5, 13, 27)
    tokens_BT = families.tokens(batch=len(starts) + 1, length=LENGTH)
    tokens_BT = jnp.tile(tokens_BT[:1], (len(starts) + 1, 1))
    document_T = np.searchsorted(starts, np.arange(LENGTH), side="right")
    position_T = np.arange(LENGTH) - np.array(starts)[document_T - 1]
    for row in range(1, len(starts) + 1):  # row r has other tokens in document r
        changed = (tokens_BT[row] + 1) % VOCAB
        tokens_BT = tokens_BT.at[row].set(jnp.where(document_T == row, changed, tokens_BT[row]))
    rows = [jnp.asarray(np.tile(x, (len(tokens_BT), 1)), jnp.int32)
            for x in (position_T, document_T)]
    logits = apply(model, params, tokens_BT, *rows)
    moved_BT = np.abs(logits[1:] - logits[:1]).max(axis=-1)
    for row in range(1, len(starts) + 1):
        assert moved_BT[row - 1][document_T != row].max() < 1e-5
        assert moved_BT[row - 1][document_T == row].min() > 1e-3


def test_positions_without_documents_are_refused():
    model, tokens_BT = make(), families.tokens(batch=1)
    with pytest.raises(UsageError, match="positions without documents"):
        model.apply({"params": families.random_params(model)}, tokens_BT, tokens_BT)


# ---- decoding ----------------------------------------------------------------------------------

MOD = {"depth_routing.kind": "mod", "depth_routing.every": 1, "depth_routing.capacity": 0.5,
       "depth_routing.causal": "threshold", "depth": 2}


def decoder(model, variables, size):
    @families.jit
    def decode(cache, tokens_BT, positions_BT):
        logits, state = model.apply(
            {**variables, "cache": cache}, tokens_BT, jnp.asarray(positions_BT, jnp.int32),
            decode=True, cache_size=size, mutable=["cache"],
        )
        return logits, state["cache"]

    return decode


@pytest.mark.parametrize("levels, changes", [
    (1, {"upsampling": "attention", **MEMORY["both"]}),
    (2, {"compression": "transformer", "compression_blocks": 2, "repeat": "in_place"}),
    (3, {"upsampling": "attention", "positions": "rope", "skip": "lerp"}),
    (3, {**MEMORY["both"], "compression": "transformer", "block_order": "sequence"}),
    (2, {**MOD, **MEMORY["global"]}),
    (2, {"dropout.kind": "attention", "dropout.sites": families.NO_PROBS, "depth": 2,
         "dropout.attention.input": "embedding", **MEMORY["global"]}),
])
def test_decoding_rows_of_different_lengths(levels, changes):
    """A padded prefill in two calls that end inside groups, then token by token over three more."""
    size = 40
    model = make(changes, levels, context=size)
    variables = {"params": families.random_params(model), **families.random_state(model)}
    ends, steps = np.array([[17, 4, 1], [23, 4, 14]]), 14
    tokens_BT = families.tokens(batch=3, length=size)
    expected_BTV = families.jit(model.apply)(variables, tokens_BT)
    cache, start_B = models.init_cache(model, 3, size), np.zeros(3, int)
    decode = decoder(model, variables, size)
    for end_B in ends:
        place_BT = start_B[:, None] + np.arange(17)[None]
        positions_BT = np.where(place_BT < end_B[:, None], place_BT, -1)
        given_BT = np.take_along_axis(np.asarray(tokens_BT), np.maximum(positions_BT, 0), axis=1)
        logits_BTV, cache = decode(cache, given_BT, positions_BT)
        for b, (start, end) in enumerate(zip(start_B, end_B, strict=True)):
            np.testing.assert_allclose(
                logits_BTV[b, : end - start], expected_BTV[b, start:end], atol=1e-4
            )
        start_B = end_B
    for step in range(steps):
        now_B, rows = start_B + step, np.arange(3)
        logits_B1V, cache = decode(cache, tokens_BT[rows, now_B][:, None], now_B[:, None])
        np.testing.assert_allclose(
            logits_B1V[:, 0], expected_BTV[rows, now_B], atol=1e-4, err_msg=f"at {now_B}"
        )


def test_the_stack_runs_only_when_a_latent_comes():
    """With parameters that are not numbers, nothing is seen of it before."""
    model = make(levels=1)  # latents stand for tokens 3, 4, 5 of 6
    params = families.random_params(model)
    params["layers"] = jax.tree.map(lambda x: x * np.nan, params["layers"])
    decode, cache = decoder(model, {"params": params}, 12), models.init_cache(model, 1, 12)
    for t in range(4):
        token = jnp.full((1, 1), 3, jnp.int32)
        logits, cache = decode(cache, token, np.full((1, 1), t))
        assert np.isfinite(logits).all() == (t < 3)


def test_the_cache_keeps_latents_of_finished_groups():
    """And of a level without global blocks only what one group needs."""
    shape = {"width": 64, "depth": 8, "num_heads": 4, "group_size": 16, "latents": (4,),
             "level_widths": (32,), "level_heads": (2,), "decoder_global": 0}
    latent = families.make({"family": "latent", **shape}, context=1024)
    dense = families.make({"width": 64, "depth": 8, "num_heads": 4}, context=1024)
    more = {name: m.cache_bytes(1024) - m.cache_bytes(512)
            for name, m in (("latent", latent), ("dense", dense))}
    # A quarter of the positions; 8 blocks of the stack and the global one of the encoder level.
    assert more["latent"] * 4 * 8 == more["dense"] * 9
    held = {size: sum(x.nbytes for x in jax.tree.leaves(models.init_cache(latent, 1, size)))
            for size in (512, 1024)}
    # Beside keys and values, a position and a group for each slot.
    assert held[1024] < 1.1 * latent.cache_bytes(1024) and held[1024] < 0.35 * dense.cache_bytes(
        1024)


def test_a_sampler_takes_the_model():
    """Greedy, two rows, scanned layers: what the full forward likes best, token by token."""
    model = make({"scan_layers": True, "depth": 2, **MEMORY["both"]}, levels=1)
    params = families.random_params(model)
    sampler = Sampler(model, batch_size=2, temperature=0.0)
    prompts = [np.array([3, 1, 4]), np.array([1])]
    (new, *_) = sampler.tokens({"params": params}, prompts, max_new_tokens=5, seeds=[0, 1])
    for prompt, ids in zip(prompts, new, strict=True):
        text = [*prompt, *ids]
        best_T = np.argmax(apply(model, params, jnp.asarray([text + [0] * 4]))[0], axis=-1)
        assert ids == best_T[len(prompt) - 1: len(text) - 1].tolist()


# ---- what it says about itself -----------------------------------------------------------------


def test_routed_latents_are_counted_as_the_decoders():
    """Evaluation has a row for each routed block; the ledger takes measured shares of latents."""
    model = make({**MOD, "depth": 3})
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT = families.tokens(length=29)
    batch = {"inputs": tokens_BT, "targets": tokens_BT, "weights": jnp.ones(tokens_BT.shape)}
    params = variables.pop("params")
    result = families.jit(make_eval_step(model, common.base()))(params, variables, batch)
    for i in range(3):
        assert 0 <= result[f"router/decided_fraction/block_{i}"] <= result["weights"]
    none, whole = (model.ledger(32, shares={i: (share, share) for i in range(3)}).nominal
                   for share in (0.0, 1.0))
    dense = make({"depth": 3}).ledger(32).nominal
    assert whole["mlp"] == dense["mlp"] and whole["attention_scores"] == dense["attention_scores"]
    assert none["mlp"] == 0 and none["levels"] == whole["levels"] == dense["levels"]


def test_a_perceiver_costs_the_share_of_places_that_it_keeps():
    parts = {kind: make({"compression": kind}, levels=1).ledger(24).parts
             for kind in groups.COMPRESSIONS}
    assert parts["perceiver"]["compression"] < parts["transformer"]["compression"]
    assert "compression_scores" not in parts["transformer"]


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, message", [
    ({"latents": (3, 1)}, r"latents=\(3, 1\): config\.model\.group_size=8 does not divide into 3"),
    ({"latents": (4, 3)}, r"latents=\(4, 3\): the 4 of the level before does not divide into 3"),
    ({"latents": (2, 4)}, r"latents=\(2, 4\): 4 are not fewer than the 2 of the level before"),
    ({"latents": (8, 4)}, r"8 are not fewer than config\.model\.group_size=8; latents"),
    ({"latents": (4, 0)}, r"latents=\(4, 0\): must be at least 1"),
    ({"latents": ()}, r"config\.model\.latents=\(\): expected"),
    ({"level_heads": (3, 2)}, r"level_widths=\(8, 12\): 8 does not divide by its 3 heads"),
    ({"level_heads": ()}, r"level_widths=\(8, 12\): 12 does not divide into heads of 8"),
    ({"level_heads": (1,)}, r"level_heads=\(1,\): expected 2"),
    ({"level_widths": (8,)}, r"level_widths=\(8,\): expected 2 widths"),
    ({"num_heads": 3}, r"config\.model\.width=16: does not divide by config\.model\.num_heads=3"),
    ({"level_widths": (9, 12)}, r"positions='both': rope needs an even head width, not 9 / 1"),
    ({"compression": "mean"}, r"compression='mean': expected one of perceiver, transformer"),
    ({"upsampling": "linear"}, r"upsampling='linear': expected one of repeat, attention"),
    ({"skip": "gate"}, r"config\.model\.skip='gate'"),
    ({"remat": "all"}, r"config\.model\.remat='all': expected one of none, full, dots"),
    ({"encoder_local": (1,)}, r"encoder_local=\(1,\): expected a number of blocks, or one"),
    ({"memory_local": -1}, r"config\.model\.memory_local=-1: must be at least 0"),
    ({"group_size": 0}, r"config\.model\.group_size=0: must be at least 1"),
    ({"mlp.activation": "relu"}, r"config\.model\.mlp\.activation='relu'"),
    ({"depth_routing.kind": "mod", "depth_routing.capacity": 2.0}, r"depth_routing\.capacity=2\.0"),
    ({"scan_layers": True, "depth": 3, "depth_routing.kind": "recursion"}, r"scan_layers=True"),
])
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UsageError, match=message) as error:
        make(changes)
    assert "\n" not in str(error.value)


def test_padding_to_whole_groups_is_said_once(caplog):
    latent_config._say_padded.cache_clear()
    with caplog.at_level(logging.WARNING):
        make(context=16)
        assert not caplog.records
        for _ in range(2):
            model = make(context=19)
            jax.eval_shape(lambda key, model=model: models.init(model, key), jax.random.key(0))
    (record,) = caplog.records
    assert "19 tokens is not a multiple of config.model.group_size=8" in record.getMessage()


def test_noise_and_dropout_are_on_in_training_only():
    plain = make(FEW, levels=1)
    params, tokens_BT = families.random_params(plain), families.tokens(batch=1)
    expected = apply(plain, params, tokens_BT)
    sites = ("embedding", "attention_probs", "attention_output", "mlp_output")
    for changes in ({"embedding_noise": 10.0},
                    *({"dropout.kind": "standard", "dropout.rate": 0.5, "dropout.sites": (site,)}
                      for site in sites)):
        model = make({**FEW, **changes}, levels=1)
        np.testing.assert_allclose(apply(model, params, tokens_BT), expected, atol=1e-5)
        noisy = families.jit(lambda params, key, model=model: model.apply(
            {"params": params}, tokens_BT, train=True, rngs={"dropout": key}
        ))(params, jax.random.key(0))
        assert np.abs(noisy - expected).max() > 0.1, changes


def test_noise_is_as_large_as_it_says():
    """Uniform, within alpha / sqrt(T D); a model that hands its embedding through shows it."""
    model = make({"embedding_noise": 5.0})
    bound = 5.0 / (LENGTH * 8) ** 0.5

    def entered(train):
        def run(model, x):
            views = group_views.views(TokenInfo(jnp.zeros((1, 1), jnp.int32), train=train), 4,
                                 model.sizes, 0, 0)
            return model._enter(x, views[0], LENGTH)

        x = jnp.zeros((2, 4, 8, 8))
        variables = {"params": families.random_params(model)}
        return model.apply(variables, x, method=run, rngs={"dropout": jax.random.key(0)})

    noise = np.asarray(entered(True) - entered(False))
    assert np.abs(noise).max() <= bound and np.abs(noise).max() > 0.95 * bound
    assert abs(noise.std() - bound / 3**0.5) < 0.1 * bound


def test_recursion_and_experts_come_by_the_decoders_settings():
    model = make({"depth": 4, "depth_routing.kind": "recursion", "depth_routing.capacity": 0.5,
                  "mlp.kind": "moe", "mlp.moe.every": 2})
    (first, *passes, last) = model.specs()
    assert len(passes) == 2 and first.block.moe is None and last.block.moe is not None
    assert all(level.block.moe is None for level in model.resolved().encoder_levels())


def test_places_of_the_learned_dropout_are_enough():
    """Masks of attention probabilities have an entry for each place of the stack."""
    model = make({"dropout.kind": "elementwise", **MEMORY["global"]}, context=30)
    shapes = jax.eval_shape(lambda key: models.init(model, key)["params"], jax.random.key(0))
    leaf = shapes["layers"]["block_0"]["attention"]["probs_dropout"]["mask_phase"]
    assert jax.tree.leaves(leaf)[0].shape == (1 + 4 * 2,)
