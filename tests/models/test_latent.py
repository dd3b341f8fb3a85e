"""The grouped-latent transformer: formulas, causality, documents, decoding, settings."""

import functools
import itertools

import families
import jax
import numpy as np
import pytest
from families import LENGTH, VOCAB
from flax import linen as nn
from formulas import attention, mlp, norm
from latent_helpers import FEW, LEVELS, NONE, apply, make
from refusals import refused

from efx import models

# ---- the forward pass in numpy -----------------------------------------------------------------


def attend(q_TD, kv_SD, p, heads, c, positions_T):
    theta = 10000.0 if c.positions in ("rope", "both") else 0
    options = dict(q_at=positions_T, theta=theta, window=c.attention.window)
    return attention(q_TD, kv_SD, p, heads, **options)


def block(x_TD, p, heads, c, keep=None):
    """A block of the last `keep` positions (None: all), which attend to all up to their own."""
    first = 0 if keep is None else len(x_TD) - keep
    n, h = norm(x_TD, p["norm_attention"]), x_TD[first:]
    if "residual" in p:
        h = h @ p["residual"]["kernel"]
    h = h + attend(n[first:], n, p["attention"], heads, c, np.arange(first, len(x_TD)))
    return h + mlp(norm(h, p["norm_mlp"]), p["mlp"])


def level_blocks(x, p, order, heads, c):
    """x: list of groups [P, D]. p: parameters by name; order: ("local", "global", ...)."""
    states = {k: p.get(f"memory_{k}", np.zeros((0, x[0].shape[-1]))) for k in ("local", "global")}
    stacks = [name for name in p if name.startswith(("local_", "global_"))]
    stacks.sort(key=lambda name: int(name.split("_")[1]))
    blocks = [(n.split("_")[0], p[n][f"block_{i}"]) for n in stacks for i in range(len(p[n]))]
    assert [kind for kind, _ in blocks] == list(order)
    for kind, q in blocks:
        rows = x if kind == "local" else [np.concatenate(x)]
        count = len(states[kind])
        rows = [block(np.concatenate([states[kind], row]), q, heads, c) for row in rows]
        states[kind] = rows[0][:count]
        x = np.concatenate([row[count:] for row in rows]).reshape(len(x), *x[0].shape)
    return x


def early_latents(before_PD, count, repeat):
    """The last `count` of the latents again and again, or each several times."""
    copies = -(-count // len(before_PD))
    tiled = np.tile(before_PD, (copies, 1))
    whole = tiled if repeat == "tile" else np.repeat(before_PD, copies, axis=0)
    return whole[len(whole) - count :]


def reference(tokens_T, params, model):
    """Logits [T, V]; states are arrays of groups, [M, P, D]."""
    c = model.config
    sizes, count = c.sizes, -(-len(tokens_T) // c.group_size)
    padded = np.pad(tokens_T, (0, count * c.group_size - len(tokens_T))).reshape(count, -1)
    tables = [0.0] * len(sizes)
    if c.positions != "rope":
        tables = [params[f"positions_embed_{i}"]["embedding"] for i in range(len(sizes))]
    x, rows = params["embed"]["embedding"][padded], tables[0]
    if c.positions == "absolute":  # a row for each token; decoder level 1 has the first rows
        rows = rows[np.minimum(np.arange(padded.size), c.context - 1)].reshape(x.shape)
        tables[0] = tables[0][: sizes[0]]
    x, skips = x + rows, []
    for i in range(1, len(sizes)):
        p, heads = params[f"encoder_{i - 1}"], c.heads[i]
        skips.append(x)
        q, keep = p["compress"], sizes[i] if c.compression == "perceiver" else None
        x = [block(g, q, heads, c, keep) for g in x]
        for j in range(c.compression_blocks - 1 if c.compression == "transformer" else 0):
            x = [block(g, q["blocks"][f"block_{j}"], heads, c) for g in x]
        x = np.stack(x)[:, -sizes[i] :] + tables[i]
        x = level_blocks(x, p.get("blocks", {}), order_of(c, i, "encoder"), heads, c)
    memory = params.get("memory_global", np.zeros((0, c.width)))
    y = np.concatenate([memory, *x])
    for i in range(c.depth):
        y = block(y, params["layers"][f"block_{i}"], c.attention.num_heads, c)
    x = y[len(memory) :].reshape(count, sizes[-1], -1)
    for i in reversed(range(1, len(sizes))):
        p, heads, skip = params[f"decoder_{i - 1}"], c.heads[i - 1], skips[i - 1]
        early, is_first = sizes[i - 1] - sizes[i], c.skip_joins == "before"
        before = [p["upsample"]["first"], *(early_latents(g, early, c.repeat) for g in x[:-1])]
        x = np.concatenate([np.stack(before), x], axis=1)
        x = x @ p["upsample"]["linear"]["kernel"] + tables[i - 1]
        weight = p.get("skip")

        def joined(x, a=weight, skip=skip):
            return skip + x if a is None else a * skip + (1 - a) * x

        if c.upsampling == "attention":
            q, kv = joined(x) if is_first else skip + x, x
            assert ("out" in p["attention"]) == ("norm_queries" in p) == c.upsampling_norm
            if c.upsampling_norm:
                n, kv = norm(q, p["norm_queries"]), norm(kv, p["norm_latents"])
            else:
                n = q
            options = p["attention"], heads, c, np.arange(sizes[i - 1])
            x = q + np.stack([attend(*pair, *options) for pair in zip(n, kv, strict=True)])
        elif is_first:
            x = joined(x)
        x = level_blocks(x, p.get("blocks", {}), order_of(c, i, "decoder"), heads, c)
        x = x if is_first else joined(x)
    x_TD = norm(np.concatenate(x)[: len(tokens_T)], params["norm_final"])
    head = params["embed"]["embedding"].T if c.tied else params["head"]["kernel"]
    return (x_TD @ head)[:, :VOCAB]


def order_of(c, level, side):
    local, whole = (getattr(c, f"{side}_{kind}")[level - 1] for kind in ("local", "global"))
    kinds = ["local"] * local, ["global"] * whole
    if c.block_order == "sequence":
        return [*kinds[0], *kinds[1]]
    return [kind for pair in itertools.zip_longest(*kinds) for kind in pair if kind]


# Number of levels and settings, each option at least once; the last group is incomplete.
MEMORY = {"memory_local": 1, "memory_global": 2}
FORWARD = {
    "transformer": (2, {"compression": "transformer", "compression_blocks": 2,
                        "upsampling": "attention", "positions": "level",
                        "repeat": "in_place", "skip": "lerp", "latents": (5, 2),
                        "encoder_global": (1, 0), "decoder_local": (0, 2), **MEMORY}),
    "three levels": (3, {"positions": "rope", "tied": False, "encoder_local": (0, 1, 0),
                         "encoder_global": (1, 0, 0), "decoder_global": 0,
                         "decoder_local": (2, 1, 0), "memory_global": 1}),
    "skip before": (2, {"skip_joins": "before", "positions": "absolute", "latents": (5, 3),
                        "encoder_local": (1, 0), "decoder_global": (0, 1)}),
    "published": (1, {"upsampling": "attention", "upsampling_norm": False,
                      "positions": "absolute"}),
}  # fmt: skip
SLOW_FORWARD = {
    "window": (1, {"attention.window": 3, "attention.head_dim": 6, "upsampling": "attention",
                   "skip_joins": "before", "skip": "lerp", "encoder_local": 0,
                   "decoder_local": 2, **MEMORY}),
    "sequence": (3, {"compression": "transformer", "repeat": "in_place", "positions": "rope",
                     "block_order": "sequence", "encoder_local": (2, 0, 0),
                     "encoder_global": (2, 0, 1), "decoder_local": (0, 0, 2),
                     "decoder_global": (0, 0, 2), "depth": 2, "memory_local": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", families.rows([*FORWARD, *SLOW_FORWARD], SLOW_FORWARD))
def test_forward_is_the_formulas(case):
    levels, changes = (FORWARD | SLOW_FORWARD)[case]
    model = make(changes, levels)
    params = families.random_params(model, seed=1)
    tokens_BT = families.tokens(batch=2, length=21)
    logits_BTV = apply(model, params, tokens_BT)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for b in range(2):
        expected_TV = reference(np.asarray(tokens_BT[b]), wide, model)
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=2e-4)


def test_the_learned_weight_of_skip_connections_is_float32():
    """In bfloat16 a weight of 1/2 + 2^-10 would be 1/2."""
    model = make({"skip": "lerp", **FEW}, levels=1, dtype="bfloat16")
    params = jax.device_get(families.random_params(model))
    run = families.jit(lambda params: model.apply({"params": params}, families.tokens(batch=1)))
    params["decoder_0"]["skip"] = np.full(8, 0.5, np.float32)
    half = run(params)
    params["decoder_0"]["skip"] = np.full(8, 0.5 + 2**-10, np.float32)
    assert np.any(run(params) != half)


# ---- documents and positions -------------------------------------------------------------------


TABLES = [
    {"family": "latent", **LEVELS[1], **FEW, "width": 16, "attention.num_heads": 2, "depth": 1},
    {"preset": "gpt2", "depth": 1},
    {"dropout.kind": "elementwise"},  # masks by position and no table
]


@pytest.mark.parametrize("changes", TABLES, ids=["latent", "gpt2", "masks"])
def test_no_token_reads_past_the_table_of_positions(changes):
    """Longer rows are refused. A larger position gives NaN and not the last row of the table."""
    model = families.make(changes, context=16)
    params, tokens_BT = families.random_params(model), np.asarray(families.tokens(0, 2, 17))
    positions_BT = np.zeros((2, 17), np.int32)
    decode = dict(decode=True, cache_size=17, mutable=["cache"])
    for options in ({}, dict(positions_BT=positions_BT, **decode)):
        run = functools.partial(model.apply, {"params": params}, tokens_BT, **options)
        refused(lambda run=run: jax.eval_shape(run), "config.model.context=16")
    if not model.config.dropout.by_position:
        positions_BT = np.int32([np.arange(16), np.arange(16) + 1])
        logits = apply(model, params, tokens_BT[:, :16], positions_BT, np.ones((2, 16), np.int32))
        assert np.isfinite(logits[0]).all() and not np.isfinite(logits[1]).all()


def test_rows_may_be_longer_than_the_context_without_a_table():
    tokens_BT = families.tokens(batch=1, length=17)
    model = make({"positions": "level", **FEW}, levels=1, context=16)
    variables = {"params": families.random_params(model)}
    assert jax.eval_shape(model.apply, variables, tokens_BT).shape == (1, 17, VOCAB)
    refused(lambda: model.apply(variables, tokens_BT, tokens_BT), "segment_ids_BT")


def test_latents_stand_for_the_last_tokens_of_their_group():
    """Of 21 tokens in groups of 8: in the stack, and in the levels, whose rows are groups."""
    model, groups = make(), 8 * np.arange(3)[:, None]
    stack = model.token_indices("layers/block_0", np.arange(6)[None], 21)
    np.testing.assert_array_equal(stack, [[6, 7, 14, 15, -1, -1]])
    row = model.token_indices("encoder_0/blocks/global_1/block_0", np.arange(12)[None], 21)
    local = model.token_indices("encoder_0/blocks/local_0/block_0", np.tile(range(4), (3, 1)), 21)
    expected = groups + [4, 5, 6, 7]
    np.testing.assert_array_equal(local, np.where(expected < 21, expected, -1))
    np.testing.assert_array_equal(row, local.reshape(1, -1))


def test_memory_tokens_stand_for_no_token():
    model = make(MEMORY)
    stack = model.token_indices("layers/block_0", np.arange(8)[None], 21)
    np.testing.assert_array_equal(stack, [[-1, -1, 6, 7, 14, 15, -1, -1]])
    local = model.token_indices("encoder_0/blocks/local_0/block_0", np.tile(range(5), (3, 1)), 21)
    np.testing.assert_array_equal(local[:2], [[-1, 4, 5, 6, 7], [-1, 12, 13, 14, 15]])


# ---- decoding ----------------------------------------------------------------------------------


def test_decoding_does_not_read_the_stack_before_the_first_latent():
    """With parameters of NaN in the stack, logits are finite until then."""
    model = make(FEW, levels=1)  # latents stand for tokens 3, 4, 5 of 6
    params = jax.device_get(families.random_params(model))
    params["layers"] = jax.tree.map(lambda x: np.full_like(x, np.nan), params["layers"])
    step, cache = families.decoder(model, {"params": params}, 12), models.init_cache(model, 1, 12)
    for t in range(4):
        logits, cache = step(cache, np.full((1, 1), 3, np.int32), np.full((1, 1), t, np.int32))
        assert np.isfinite(logits).all() == (t < 3)


def test_the_cache_keeps_latents_of_finished_groups():
    """A level without global blocks caches one group only."""
    shared = {"width": 64, "depth": 8, "attention.num_heads": 4}
    levels = {"family": "latent", "group_size": 16, "latents": (4,), "level_widths": (32,)}
    levels |= {"level_heads": (2,), "decoder_global": 0}
    grouped = families.make({**shared, **levels}, context=1024)
    dense = families.make(shared, context=1024)
    added = [families.cache_bytes(m, 1024) - families.cache_bytes(m, 512) for m in (grouped, dense)]
    # A quarter of the positions; 8 blocks of the stack and the global one of the encoder level.
    assert added[0] * 4 * 8 == added[1] * 9
    assert families.cache_bytes(grouped, 1024) < 0.35 * families.cache_bytes(dense, 1024)


# ---- settings, costs and noise -------------------------------------------------------------------

MOD = {"depth_routing.kind": "mod", "depth_routing.every": 1}
REFUSED = [
    ({"latents": (2, 4)}, "config.model.latents=(2, 4)"),
    ({"latents": (8, 4)}, "config.model.group_size=8"),
    ({"latents": ()}, "config.model.latents=()"),
    ({"encoder_local": (1,)}, "config.model.encoder_local=(1,)"),
    ({"level_heads": (3, 2)}, "config.model.level_widths=(8, 12)"),
    ({"level_heads": (1,)}, "config.model.level_heads=(1,)"),
    ({"attention.num_heads": 3}, "config.model.attention.num_heads=3"),
    ({**MOD, "depth_routing.score": "token_hash"}, "depth_routing.score='token_hash'"),
    (
        {"level_widths": (9, 12)},
        "config.model.level_widths=(9, 12)",
    ),  # an odd head width under rotary positions
]


@pytest.mark.parametrize("changes, name", REFUSED)
def test_settings_that_do_not_fit_are_refused_by_name(changes, name):
    refused(lambda: make(changes), name)


@pytest.mark.parametrize("name", ["memory_local", "memory_global"])
def test_packed_rows_have_no_memory_tokens(name):
    model, tokens_BT = make({name: 2}), families.tokens()
    arguments = jax.random.key(0), tokens_BT, tokens_BT, tokens_BT
    refused(lambda: jax.eval_shape(model.init, *arguments), f"config.model.{name}=2")


def test_embedding_noise_is_uniform_in_training_only():
    """Within alpha / sqrt(T D)."""
    plain, model = make(NONE, levels=1), make({**NONE, "embedding_noise": 5.0}, levels=1)
    params, tokens_BT = families.random_params(model), families.tokens(batch=4)

    def embedded(model, train):
        states = []

        def record(method, args, kwargs, context):
            if context.module.name == "encoder_0":
                states.append(args[0])
            return method(*args, **kwargs)

        with nn.intercept_methods(record):
            rngs = {"dropout": jax.random.key(0)}
            model.apply({"params": params}, tokens_BT, train=train, rngs=rngs)
        return states[0][:, :LENGTH]

    cases = ((model, True), (model, False), (plain, True))
    noisy, off, expected = families.jit(lambda: [embedded(*case) for case in cases])()
    np.testing.assert_array_equal(off, expected)
    noise, bound = np.asarray(noisy - expected), 5.0 / (LENGTH * 8) ** 0.5
    assert 0.95 * bound < np.abs(noise).max() <= bound * (1 + 1e-5)
    assert abs(noise.std() - bound / 3**0.5) < 0.1 * bound


def test_only_the_latent_stack_has_recursion_and_experts():
    changes = {"depth": 4, "depth_routing.kind": "recursion", "depth_routing.capacity": 0.5}
    model = make({**changes, "mlp.kind": "moe", "mlp.moe.every": 2})
    leaves = jax.tree_util.tree_leaves_with_path(models.unboxed_shapes(model)["params"])
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert "layers/recursion_1/router" in paths
    experts = {path.split("/mlp/")[0] for path in paths if "/experts/" in path}
    assert experts == {"layers/block_1", "layers/block_3"}
