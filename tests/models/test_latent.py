"""The grouped-latent transformer: formulas, causality, documents, decoding, settings."""

import functools
import itertools

import families
import jax
import numpy as np
import pytest
from families import LENGTH, VOCAB
from formulas import attention, mlp, rms_norm
from latent_helpers import FEW, LEVELS, MOD, apply, make
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
    n, h = rms_norm(x_TD, p["norm_attention"]), x_TD[first:]
    if "residual" in p:
        h = h @ p["residual"]["kernel"]
    h = h + attend(n[first:], n, p["attention"], heads, c, np.arange(first, len(x_TD)))
    return h + mlp(rms_norm(h, p["norm_mlp"]), p["mlp"])


def level_blocks(x, p, order, heads, c):
    """x: list of groups [P, D]. p: parameters by name; order: ("local", "global", ...)."""
    stacks = [name for name in p if name.startswith(("local_", "global_"))]
    stacks.sort(key=lambda name: int(name.split("_")[1]))
    blocks = [(n.split("_")[0], p[n][f"block_{i}"]) for n in stacks for i in range(len(p[n]))]
    assert [kind for kind, _ in blocks] == list(order)
    for kind, q in blocks:
        rows = [block(row, q, heads, c) for row in (x if kind == "local" else [np.concatenate(x)])]
        x = np.concatenate(rows).reshape(len(x), *x[0].shape)
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
    y = np.concatenate(x)
    for i in range(c.depth):
        y = block(y, params["layers"][f"block_{i}"], c.attention.num_heads, c)
    x = y.reshape(count, sizes[-1], -1)
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
                n, kv = rms_norm(q, p["norm_queries"]), rms_norm(kv, p["norm_latents"])
            else:
                n = q
            options = p["attention"], heads, c, np.arange(sizes[i - 1])
            x = q + np.stack([attend(*pair, *options) for pair in zip(n, kv, strict=True)])
        elif is_first:
            x = joined(x)
        x = level_blocks(x, p.get("blocks", {}), order_of(c, i, "decoder"), heads, c)
        x = x if is_first else joined(x)
    x_TD = rms_norm(np.concatenate(x)[: len(tokens_T)], params["norm_final"])
    head = params["embed"]["embedding"].T if c.tied else params["head"]["kernel"]
    return (x_TD @ head)[:, :VOCAB]


def order_of(c, level, side):
    local, whole = (getattr(c, f"{side}_{kind}")[level - 1] for kind in ("local", "global"))
    kinds = ["local"] * local, ["global"] * whole
    if c.block_order == "sequence":
        return [*kinds[0], *kinds[1]]
    return [kind for pair in itertools.zip_longest(*kinds) for kind in pair if kind]


# Number of levels and settings, each option at least once; the last group is incomplete.
FORWARD = {
    "transformer": (2, {"compression": "transformer", "compression_blocks": 2,
                        "upsampling": "attention", "positions": "level",
                        "repeat": "in_place", "skip": "lerp", "latents": (5, 2),
                        "encoder_global": (1, 0), "decoder_local": (0, 1)}),
    "three levels": (3, {"positions": "rope", "tied": False, "encoder_local": (0, 1, 0),
                         "encoder_global": (1, 0, 0), "decoder_global": 0,
                         "decoder_local": (2, 1, 0)}),
    "skip before": (2, {"skip_joins": "before", "positions": "absolute", "latents": (5, 3),
                        "encoder_local": (1, 0), "decoder_global": (0, 1)}),
    "published": (1, {"upsampling": "attention", "upsampling_norm": False,
                      "positions": "absolute"}),
}  # fmt: skip
SLOW_FORWARD = {
    "window": (1, {"attention.window": 3, "attention.head_dim": 6, "upsampling": "attention",
                   "skip_joins": "before", "skip": "lerp", "encoder_local": 0,
                   "decoder_local": 2}),
    "sequence": (3, {"compression": "transformer", "repeat": "in_place", "positions": "rope",
                     "block_order": "sequence", "encoder_local": (2, 0, 0),
                     "encoder_global": (2, 0, 1), "decoder_local": (0, 0, 2),
                     "decoder_global": (0, 0, 2), "depth": 2}),
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


def test_documents_do_not_see_each_other():
    """Also where one ends and the next begins inside a group. One that begins with a group has the
    logits of the same tokens alone."""
    model = make({"positions": "absolute", **FEW})  # groups of 8
    params, starts = families.random_params(model), (0, 5, 16, 27)
    document_T = np.searchsorted(starts, np.arange(LENGTH), side="right")
    position_T = np.arange(LENGTH) - np.array(starts)[document_T - 1]
    tokens_T = np.asarray(families.tokens(batch=1))[0]
    # Row r has other tokens in document r.
    other_BT = document_T[None] == np.arange(len(starts) + 1)[:, None]
    tokens_BT = np.where(other_BT, (tokens_T + 1) % VOCAB, tokens_T)
    rows = [np.tile(x, (len(tokens_BT), 1)) for x in (position_T, document_T)]
    logits = apply(model, params, tokens_BT, *rows)
    moved_BT = np.abs(logits[1:] - logits[:1]).max(axis=-1)
    assert moved_BT[~other_BT[1:]].max() < 1e-5
    assert moved_BT[other_BT[1:]].min() > 1e-3
    alone = apply(model, params, tokens_T[None, 16:27])
    np.testing.assert_allclose(logits[0, 16:27], alone[0], atol=1e-5)


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


# ---- settings and costs --------------------------------------------------------------------------

REFUSED = [
    ({"latents": (2, 4)}, "config.model.latents=(2, 4)"),
    ({"latents": (8, 4)}, "config.model.group_size=8"),
    ({"latents": ()}, "config.model.latents=()"),
    ({"encoder_local": (1,)}, "config.model.encoder_local=(1,)"),
    ({"level_heads": (3, 2)}, "config.model.level_widths=(8, 12)"),
    ({"level_heads": (1,)}, "config.model.level_heads=(1,)"),
    ({"attention.num_heads": 3}, "config.model.attention.num_heads=3"),
    (
        {"level_widths": (9, 12)},
        "config.model.level_widths=(9, 12)",
    ),  # an odd head width under rotary positions
]


@pytest.mark.parametrize("changes, name", REFUSED)
def test_settings_that_do_not_fit_are_refused_by_name(changes, name):
    refused(lambda: make(changes), name)


def test_measured_flops_follow_the_fraction_of_routed_latents():
    model = make({**MOD, "depth": 3})
    none, full = (
        model.ledger(32, shares={path: (fraction, fraction) for path in model.blocks()}).nominal
        for fraction in (0.0, 1.0)
    )
    dense = make({"depth": 3}).ledger(32).nominal
    assert full["mlp"] == dense["mlp"] and full["attention_scores"] == dense["attention_scores"]
    assert none["mlp"] == 0 and none["levels"] == full["levels"] == dense["levels"]


def test_only_the_latent_stack_has_recursion_and_experts():
    changes = {"depth": 4, "depth_routing.kind": "recursion", "depth_routing.capacity": 0.5}
    model = make({**changes, "mlp.kind": "moe", "mlp.moe.every": 2})
    leaves = jax.tree_util.tree_leaves_with_path(models.unboxed_shapes(model)["params"])
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert "layers/recursion_1/router" in paths
    experts = {path.split("/mlp/")[0] for path in paths if "/experts/" in path}
    assert experts == {"layers/block_1", "layers/block_3"}
