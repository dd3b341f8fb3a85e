"""The grouped-latent transformer: its formulas, causality in every combination, decoding."""

import dataclasses
import functools
import itertools
import math

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import LENGTH, VOCAB
from latent_helpers import FEW, LEVELS, MEMORY, apply, make

from efx import models
from efx.errors import UsageError
from efx.layers.info import CallInfo, Tokens
from efx.layers.mask_dropout.modules import make_mask_input
from efx.layers.report import Choice
from efx.layers.stack import LayerSpec, Stack
from efx.models.latent import group_views, groups
from efx.sample import Sampler

# ---- the forward pass, once more in numpy ------------------------------------------------------


def norm(x, p):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def turn(x_TNH, positions_T, theta=10000.0):
    half = x_TNH.shape[-1] // 2
    angle = positions_T[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x_TNH[..., :half], x_TNH[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
    )


def attention(q_TD, kv_SD, p, heads, c, q_positions_T):
    """Of one sequence: a query sees keys up to its own position; keys have positions 0, 1..."""
    k_positions, window = np.arange(len(kv_SD)), c.attention.window
    q = norm(q_TD @ p["query"]["kernel"], p["norm_query"]).reshape(len(q_TD), heads, -1)
    k = norm(kv_SD @ p["key"]["kernel"], p["norm_key"]).reshape(len(kv_SD), heads, -1)
    v = (kv_SD @ p["value"]["kernel"]).reshape(len(kv_SD), heads, -1)
    if c.positions in ("rope", "both"):
        q, k = turn(q, q_positions_T), turn(k, k_positions)
    out = np.zeros_like(q)
    for h, t in itertools.product(range(heads), range(len(q))):
        seen = k_positions <= q_positions_T[t]
        if window:
            seen &= k_positions > q_positions_T[t] - window
        scores = k[seen, h] @ q[t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[seen, h] / weights.sum()
    out_TD = out.reshape(len(q), -1)
    return out_TD @ p["out"]["kernel"] if "out" in p else out_TD


def mlp(x, p):
    h = x @ p["up"]["kernel"]
    return h * (1 + np.vectorize(math.erf)(h / np.sqrt(2))) / 2 @ p["down"]["kernel"]


def block(x_TD, p, heads, c, keep=None, residual=lambda x: x):
    """A block of the last `keep` places (None: all), which attend to all up to their own."""
    first = 0 if keep is None else len(x_TD) - keep
    n = norm(x_TD, p["norm_attention"])
    places = np.arange(first, len(x_TD))
    h = residual(x_TD[first:]) + attention(n[first:], n, p["attention"], heads, c, places)
    return h + mlp(norm(h, p["norm_mlp"]), p["mlp"])


def level_blocks(x, p, order, heads, c):
    """x: list of groups [P, D]. p: parameters by name; order: ("local", "global", ...)."""
    states = {
        kind: p.get(f"memory_{kind}", np.zeros((0, x[0].shape[-1]))) for kind in ("local", "global")
    }
    stacks = sorted(
        (name for name in p if name.startswith(("local_", "global_"))),
        key=lambda name: int(name.split("_")[1]),
    )
    blocks = [
        (name.split("_")[0], p[name][f"block_{i}"]) for name in stacks for i in range(len(p[name]))
    ]
    assert [kind for kind, _ in blocks] == list(order)
    for kind, q in blocks:
        memory, size = states[kind], len(x[0])
        if kind == "local":
            after = [block(np.concatenate([memory, g]), q, heads, c) for g in x]
            x = [y[len(memory) :] for y in after]
            states[kind] = after[0][: len(memory)]
        else:
            y = block(np.concatenate([memory, *x]), q, heads, c)
            states[kind], y = y[: len(memory)], y[len(memory) :]
            x = [y[i : i + size] for i in range(0, len(y), size)]
    return x


def early_latents(before_PD, count, repeat):
    """The last `count` of the latents again and again, or each several times."""
    copies = -(-count // len(before_PD))
    whole = (
        np.tile(before_PD, (copies, 1))
        if repeat == "tile"
        else np.repeat(before_PD, copies, axis=0)
    )
    return whole[len(whole) - count :]


def reference(tokens_T, params, model):
    """Logits [T, V]."""
    c = model.config
    sizes, count = c.sizes, -(-len(tokens_T) // c.group_size)
    padded = np.concatenate([tokens_T, np.zeros(count * c.group_size - len(tokens_T), int)])
    tables = [
        params[f"positions_embed_{i}"]["embedding"]
        for i in range(len(sizes))
        if c.positions != "rope"
    ] or [0.0] * len(sizes)
    x = [params["embed"]["embedding"][g] for g in padded.reshape(count, -1)]
    if c.positions == "absolute":  # one row for each token; places of a group: the first of them
        row_T, tables[0] = np.minimum(np.arange(len(padded)), c.context - 1), tables[0][: sizes[0]]
        rows = params["positions_embed_0"]["embedding"][row_T].reshape(count, sizes[0], -1)
        x = [g + row for g, row in zip(x, rows, strict=True)]
    else:
        x = [g + tables[0] for g in x]
    skips = []
    for i in range(1, len(sizes)):
        p, heads = params[f"encoder_{i - 1}"], c.level_heads[i]
        skips.append(x)
        q = p["compress"]
        keep = sizes[i] if c.compression == "perceiver" else None
        x = [block(g, q, heads, c, keep, lambda y, q=q: y @ q["residual"]["kernel"]) for g in x]
        for j in range(c.compression_blocks - 1 if c.compression == "transformer" else 0):
            x = [block(g, q["blocks"][f"block_{j}"], heads, c) for g in x]
        x = [g[len(g) - sizes[i] :] + tables[i] for g in x]
        x = level_blocks(x, p.get("blocks", {}), order_of(c, i, "encoder"), heads, c)
    memory = params.get("memory", {}).get("memory_global", np.zeros((0, c.width)))
    y = np.concatenate([memory, *x])
    for i in range(c.depth):
        y = block(y, params["layers"][f"block_{i}"], c.attention.num_heads, c)
    x = [y[len(memory) + i * sizes[-1] :][: sizes[-1]] for i in range(count)]
    for i in reversed(range(1, len(sizes))):
        p, heads = params[f"decoder_{i - 1}"], c.level_heads[i - 1]
        early = sizes[i - 1] - sizes[i]
        before = [p["upsample"]["first"], *(early_latents(g, early, c.repeat) for g in x[:-1])]
        x = [np.concatenate(pair) for pair in zip(before, x, strict=True)]
        x = [g @ p["upsample"]["linear"]["kernel"] + tables[i - 1] for g in x]
        share, before = p.get("skip"), c.skip_joins == "before"

        def joined(x, share=share, skip=skips[i - 1]):
            return [
                s + g if share is None else share * s + (1 - share) * g
                for s, g in zip(skip, x, strict=True)
            ]

        both = joined(x) if before else [s + g for s, g in zip(skips[i - 1], x, strict=True)]
        if c.upsampling == "attention":
            places = np.arange(sizes[i - 1])

            def normed(x, name, p=p):
                return norm(x, p[name]) if c.upsampling_norm else x

            assert ("out" in p["attention"]) == ("norm_queries" in p) == c.upsampling_norm
            x = [
                h
                + attention(
                    normed(h, "norm_queries"),
                    normed(g, "norm_latents"),
                    p["attention"],
                    heads,
                    c,
                    places,
                )
                for h, g in zip(both, x, strict=True)
            ]
        elif before:
            x = both
        x = level_blocks(x, p.get("blocks", {}), order_of(c, i, "decoder"), heads, c)
        x = x if before else joined(x)
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
    (
        2,
        {
            "compression": "transformer",
            "compression_blocks": 2,
            "upsampling": "attention",
            "positions": "level",
            "repeat": "in_place",
            "skip": "lerp",
            "latents": (5, 2),
            **MEMORY["both"],
        },
    ),
    (
        2,
        {
            "upsampling": "attention",
            "positions": "rope",
            "block_order": "sequence",
            "tied": False,
            "encoder_local": (2, 0),
            "decoder_global": (0, 2),
            "decoder_local": 2,
        },
    ),
    (
        3,
        {
            "compression": "transformer",
            "skip": "lerp",
            "encoder_global": (2, 0, 1),
            "depth": 2,
            "repeat": "in_place",
            **MEMORY["local"],
        },
    ),
    (3, {**MEMORY["global"], "decoder_global": 0, "decoder_local": (2, 1, 0)}),
    (2, {"skip_joins": "before", "positions": "absolute", "latents": (5, 3)}),
    (1, {"skip_joins": "before", "skip": "lerp", "upsampling": "attention", **MEMORY["both"]}),
    (2, {"upsampling": "attention", "upsampling_norm": False, "positions": "absolute"}),
    (
        2,
        {
            "attention.window": 3,
            "attention.head_dim": 6,
            "upsampling": "attention",
            "decoder_local": 2,
            **MEMORY["both"],
        },
    ),
    (1, {"attention.window": 2, "compression": "transformer", "compression_blocks": 2, "depth": 2}),
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


def test_masks_of_a_level_read_what_enters_its_blocks():
    """Of global blocks over all places of the sequence, of local ones over those of each group
    alone; memory tokens come before them in both."""
    changes = {
        "dropout.kind": "attention",
        "dropout.sites": ("attention_output", "mlp_output"),
        "dropout.attention.input": "embedding",
        "dropout.attention.rounding": "none",
        "decoder_local": 2,
        **MEMORY["both"],
    }
    model = make(changes, levels=1)
    (level,) = model.levels(encoder=False)
    p, x = families.random_params(model)["decoder_0"]["blocks"], np.random.default_rng(0)
    x = np.float32(x.normal(size=(2, 3, 6, 8)))

    @families.jit
    def blocks(x):
        (view, _) = group_views.views(CallInfo(Tokens(jnp.arange(18)[None])), 3, (6, 3), 1, 2)
        return groups.LevelBlocks(level).apply({"params": p}, x, view)

    def run(kind, memory_BCD, x_BTD, info, first, again):
        """The state after blocks that read what the first of them reads."""
        block = {"local": level.local_block, "global": level.global_block}[kind]
        both_BTD = jnp.concatenate([memory_BCD, x_BTD], axis=1)
        if first is None:
            first = make_mask_input(block).apply(
                {"params": p[f"mask_input_{kind}"]}, both_BTD, info
            )
        info = info.with_tokens(mask_input_BTD=first)
        i = 2 if again else {"local": 0, "global": 1}[kind]
        stack = Stack((LayerSpec(block),), False, "none")
        both_BTD = stack.apply({"params": p[f"{kind}_{i}"]}, both_BTD, info)
        count = memory_BCD.shape[1]
        return both_BTD[:, :count], both_BTD[:, count:], first

    @families.jit
    def by_hand(x):
        memory = {
            "local": jnp.tile(p["memory_local"][None], (2, 1, 1)),
            "global": jnp.tile(p["memory_global"][None], (2, 1, 1)),
        }
        inside, whole = (CallInfo(Tokens(jnp.arange(length)[None])) for length in (1 + 6, 2 + 18))
        local = [run("local", memory["local"], x[:, m], inside, None, False) for m in range(3)]
        after = jnp.concatenate([y for _, y, _ in local], axis=1)
        # What the global blocks read enters with the level's state, before the local block.
        first = jnp.concatenate([memory["global"], x.reshape(2, 18, 8)], axis=1)
        first = make_mask_input(level.global_block).apply(
            {"params": p["mask_input_global"]}, first, whole
        )
        _, after, _ = run("global", memory["global"], after, whole, first, False)
        after = after.reshape(2, 3, 6, 8)
        after = [
            run("local", local[m][0], after[:, m], inside, local[m][2], True)[1] for m in range(3)
        ]
        return jnp.stack(after, axis=1)

    np.testing.assert_allclose(blocks(x), by_hand(x), atol=2e-5)


def test_masks_do_not_count_the_padding_of_a_row():
    """Of 13 tokens in groups of 6, of which the last 3 have latents: 6 latents."""
    changes = {"dropout.kind": "elementwise", "dropout.sites": ("mlp_output",)}
    model = make({**changes, **MEMORY["both"]}, levels=1)
    _, sown = families.jit(functools.partial(model.apply, mutable=["masks"]))(
        {"params": families.random_params(model)}, families.tokens(batch=1, length=13)
    )
    # By scope: places that count, memory tokens (1 a group, 2 a row) among them.
    wanted = {"local": {"encoder_0": 6 + 3, "decoder_0": 13 + 3}}
    wanted["global"] = {"encoder_0": 6 + 2, "decoder_0": 13 + 2}
    wanted["compress"], counted = {"encoder_0": 6}, set()
    for path, kept in jax.tree_util.tree_leaves_with_path(jax.device_get(sown["masks"])):
        level, scope = path[0].key, path[1].key if path[1].key == "compress" else path[2].key
        scope = scope.partition("_")[0]
        if level != "layers":
            assert np.sum(kept >= 0) == wanted[scope][level] * kept.shape[-1], path
            counted.add((level, scope))
    assert len(counted) == 5


def test_repeated_latents_by_hand():
    assert groups.repeat_index(8, 2, "tile").tolist() == [0, 1, 0, 1, 0, 1]
    assert groups.repeat_index(8, 2, "in_place").tolist() == [0, 0, 0, 1, 1, 1]
    # Latents that do not divide the group: cut at the left.
    assert groups.repeat_index(8, 3, "tile").tolist() == [1, 2, 0, 1, 2]
    assert groups.repeat_index(8, 3, "in_place").tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("places, latents", [(8, 2), (8, 3), (4, 4)])
@pytest.mark.parametrize("repeat", ["tile", "in_place"])
def test_latents_are_repeated_as_their_index_says(repeat, places, latents):
    """In bfloat16; the gradient is summed in float32, without a scatter."""
    rng = np.random.default_rng(0)
    early = places - latents
    z_BMPD = jnp.asarray(rng.normal(size=(2, 3, latents, 5)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(2, 3, early, 5)), jnp.bfloat16)

    def ours(z_BMPD):
        return groups.repeated(z_BMPD, early, repeat) * weight

    def definition(z_BMPD):
        index = groups.repeat_index(places, latents, repeat)
        return z_BMPD.astype(jnp.float32)[:, :, index] * weight.astype(jnp.float32)

    def gradient(function):
        return jax.grad(lambda z: jnp.sum(function(z).astype(jnp.float32)))

    np.testing.assert_array_equal(ours(z_BMPD), definition(z_BMPD).astype(jnp.bfloat16))
    np.testing.assert_array_equal(gradient(ours)(z_BMPD), gradient(definition)(z_BMPD))
    assert "scatter" not in str(jax.make_jaxpr(gradient(ours))(z_BMPD))


def test_a_learned_skip_in_bfloat16_has_all_of_its_share():
    share_D = np.float32([[0.5 + 2**-10]])
    skip, x = jnp.ones((1, 1), jnp.bfloat16), -jnp.ones((1, 1), jnp.bfloat16)
    joined = groups.lerp(share_D, skip, x)
    assert joined.dtype == jnp.bfloat16 and joined == 2**-9  # 0 with the nearest bfloat16, 1/2


# ---- causality ---------------------------------------------------------------------------------

KINDS = ("perceiver", "transformer"), ("repeat", "attention"), tuple(LEVELS), ("none", "both")
# Half of all combinations, in which every choice of any three of these settings occurs.
COMBINATIONS = [
    choices
    for choices in itertools.product(*KINDS)
    if sum(kind.index(choice) for kind, choice in zip(KINDS, choices, strict=True)) % 2 == 0
]
# Shorter rows: they end after a group, inside the first, second and third.
SHORTER = [
    (("perceiver", "attention", 2, "none"), 16),
    (("perceiver", "repeat", 3, "none"), 2),
    (("transformer", "repeat", 1, "both"), 7),
    (("transformer", "attention", 2, "both"), 17),
]


@functools.cache
def combination(compression, upsampling, levels, memory):
    """(model, parameters, tokens [T], logits [T + 1, T, V]: of these, and of rows whose tokens
    after 0, 1... are others); T is no whole number of groups."""
    changes = {"compression": compression, "upsampling": upsampling, **FEW, **MEMORY[memory]}
    model = make(changes, levels)
    params, length = families.random_params(model), 3 * model.config.group_size - 3
    tokens_T = np.asarray(families.tokens(batch=1, length=length))[0]
    later_BT = np.arange(length)[None] > np.arange(length)[:, None]
    others_BT = np.where(later_BT, (tokens_T + 1)[None] % VOCAB, tokens_T[None])
    logits = apply(model, params, np.concatenate([tokens_T[None], others_BT]))
    return model, params, tokens_T, logits, later_BT


@pytest.mark.parametrize("compression, upsampling, levels, memory", COMBINATIONS)
def test_causal_in_every_combination(compression, upsampling, levels, memory):
    _, _, _, logits, later_BT = combination(compression, upsampling, levels, memory)
    moved_BT = np.abs(logits[1:] - logits[:1]).max(axis=-1)
    assert moved_BT[~later_BT].max() < 1e-5
    assert moved_BT[later_BT].min() > 1e-3  # and every later logit does depend on these tokens


@pytest.mark.parametrize("choices, length", SHORTER)
def test_logits_do_not_depend_on_the_length(choices, length):
    """The same tokens in a shorter row."""
    model, params, tokens_T, logits, _ = combination(*choices)
    shorter = apply(model, params, tokens_T[None, :length])
    np.testing.assert_allclose(shorter[0], logits[0, :length], atol=1e-5)


@pytest.mark.parametrize("compression, blocks", [("perceiver", 1), ("transformer", 2)])
def test_a_latent_sees_its_token_and_those_before(compression, blocks):
    """Aligned at the lower right: latent j of 3 sees place p of 7 iff p <= 4 + j, and all these."""
    changes = {"compression": compression, "compression_blocks": blocks}
    (level,) = make(changes, levels=1).levels(encoder=True)
    level = dataclasses.replace(level, inner=7)
    compress = groups.Compress(level)
    info = CallInfo(Tokens(np.arange(7)[None]))
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(1, 7, 8)))
    kept_info = CallInfo(Tokens(np.arange(3)[None]))
    variables = families.jit(compress.init)(jax.random.key(0), x_BTD, info, kept_info)
    run = families.jit(compress.apply)
    base = np.asarray(run(variables, x_BTD, info, kept_info))
    assert base.shape == (1, 3, 16)
    for p in range(7):
        other_BTD = x_BTD + np.float32(np.arange(7) == p)[None, :, None]
        moved = np.asarray(run(variables, other_BTD, info, kept_info)) - base
        assert (np.abs(moved[0]).max(axis=-1) > 0).tolist() == [p <= 4 + j for j in range(3)]


@pytest.mark.parametrize(
    "upsampling, skip_joins",
    [
        ("repeat", "after"),
        ("repeat", "before"),
        ("attention", "after"),
    ],
)
def test_what_a_token_sees_of_its_own_group(upsampling, skip_joins):
    """All before it, with upsampling by attention or tokens that join before the blocks. Repeated
    latents of early places are those of the group before; where the token itself comes after the
    blocks, these places see nothing else of their own group, whatever blocks there are."""
    changes = {"upsampling": upsampling, "skip_joins": skip_joins}
    model = make(changes, levels=1)  # 6 tokens, of which the last 3 have latents
    params = families.random_params(model)
    tokens_T = np.asarray(families.tokens(batch=1, length=12))[0]
    changed_TT = np.where(np.eye(12, dtype=bool), (tokens_T + 1)[None] % VOCAB, tokens_T[None])
    logits = apply(model, params, np.concatenate([tokens_T[None], changed_TT]))
    seen_TS = np.abs(logits[1:] - logits[:1]).max(axis=-1).T > 0
    assert seen_TS[6:, :6].all()  # of the group before, everything
    expected_TS = np.tri(6, dtype=bool)
    if (upsampling, skip_joins) == ("repeat", "after"):
        expected_TS[:3] = np.eye(6, dtype=bool)[:3]
    np.testing.assert_array_equal(seen_TS[6:, 6:], expected_TS)


# ---- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "upsampling, compression, positions",
    [
        ("repeat", "perceiver", "absolute"),
        ("attention", "transformer", "rope"),
    ],
)
def test_documents_do_not_see_each_other(upsampling, compression, positions):
    """Also where one ends and the next begins inside a group."""
    model = make({"upsampling": upsampling, "compression": compression, "positions": positions})
    params, starts = families.random_params(model), (0, 5, 13, 27)
    tokens_BT = families.tokens(batch=len(starts) + 1, length=LENGTH)
    tokens_BT = np.tile(np.asarray(tokens_BT)[:1], (len(starts) + 1, 1))
    document_T = np.searchsorted(starts, np.arange(LENGTH), side="right")
    position_T = np.arange(LENGTH) - np.array(starts)[document_T - 1]
    for row in range(1, len(starts) + 1):  # row r has other tokens in document r
        changed = (tokens_BT[row] + 1) % VOCAB
        tokens_BT[row] = np.where(document_T == row, changed, tokens_BT[row])
    rows = [np.tile(x, (len(tokens_BT), 1)) for x in (position_T, document_T)]
    logits = apply(model, params, tokens_BT, *rows)
    moved_BT = np.abs(logits[1:] - logits[:1]).max(axis=-1)
    for row in range(1, len(starts) + 1):
        assert moved_BT[row - 1][document_T != row].max() < 1e-5
        assert moved_BT[row - 1][document_T == row].min() > 1e-3


def test_a_document_that_begins_with_a_group_is_as_if_alone():
    """Its tokens read the rows of the table of positions that they would read alone."""
    model = make({"positions": "absolute", **FEW})
    params, tokens_BT = families.random_params(model), families.tokens(batch=1, length=LENGTH)
    start, size = 16, 13  # after two groups of another document, and before a third document
    document_BT = np.array([[1] * start + [2] * size + [3] * (LENGTH - start - size)])
    begins_BT = np.array([0, start, start + size])[document_BT - 1]
    position_BT = np.arange(LENGTH)[None] - begins_BT
    packed = apply(model, params, tokens_BT, position_BT, document_BT)
    alone = apply(model, params, np.asarray(tokens_BT)[:, start : start + size])
    np.testing.assert_allclose(packed[:, start : start + size], alone, atol=1e-5)


# ---- where a token is --------------------------------------------------------------------------


def test_a_token_knows_in_which_group_it_stands():
    """Groups of equal tokens with one latent each and no attention across but in the stack: which
    of them it is, only the table of positions can say."""
    shape = {
        "family": "latent",
        "group_size": 4,
        "latents": (1,),
        "level_widths": (16,),
        "level_heads": (2,),
        "encoder_global": 0,
        "decoder_global": 0,
    }
    tokens_BT = np.tile(families.tokens(batch=1, length=4), (1, 5))

    def groups_of(changes):
        model = families.make({**shape, **changes})
        logits = apply(model, families.random_params(model), tokens_BT)
        # Not the first group, which has learned vectors in place of the latents before it.
        return logits.reshape(5, 4, -1)[1:]

    equal = groups_of({"positions": "level"})
    np.testing.assert_allclose(equal, np.broadcast_to(equal[:1], equal.shape), atol=1e-5)
    moved = groups_of({})
    assert np.abs(moved[1:] - moved[:-1]).max(axis=(1, 2)).min() > 0.1


@pytest.mark.parametrize(
    "family, changes",
    [
        ("latent", {**LEVELS[2], "width": 16, "attention.num_heads": 2}),
        ("decoder", {"preset": "gpt2"}),
        ("encoder_decoder", {"mlp.hidden": 64}),
        ("decoder", {"dropout.kind": "elementwise"}),
    ],
)
def test_no_token_reads_past_the_table_of_positions(family, changes):
    """One line before anything is computed; a position that only the running program knows gives
    no number, and not the last row."""
    model = families.make({"family": family, **changes}, context=16)
    params = families.random_params(model)
    tokens_BT = np.asarray(families.tokens(batch=2, length=17))
    for options in ({}, {"decode": True, "cache_size": 17, "mutable": ["cache"]}):
        run = functools.partial(model.apply, **options)
        positions_BT = np.zeros((2, 17), np.int32) if options else None
        with pytest.raises(UsageError, match=r"config\.model\.context=16: .* 17 tokens") as error:
            jax.eval_shape(run, {"params": params}, tokens_BT, positions_BT)
        assert "\n" not in str(error.value)
    if model.config.dropout.by_position:  # there is no table that could give no number
        return
    positions_BT = np.int32([np.arange(16), np.arange(16) + 1])
    logits = apply(model, params, tokens_BT[:, :16], positions_BT, np.ones((2, 16), np.int32))
    assert np.isfinite(logits[0]).all() and not np.isfinite(logits[1]).all()


def test_rows_may_outgrow_the_context_where_no_table_ends():
    for positions in ("level", "rope"):
        model = make({"positions": positions, **FEW}, levels=1, context=16)
        shape = jax.eval_shape(
            model.apply,
            {"params": families.random_params(model)},
            families.tokens(batch=1, length=17),
        ).shape
        assert shape == (1, 17, VOCAB)


def test_positions_without_documents_are_refused():
    model, tokens_BT = make(), families.tokens(batch=1)
    with pytest.raises(UsageError, match="positions_BT without segment_ids_BT"):
        model.apply({"params": families.random_params(model)}, tokens_BT, tokens_BT)


# ---- decoding ----------------------------------------------------------------------------------


def decoder(model, variables, size):
    @families.jit
    def decode(cache, tokens_BT, positions_BT):
        logits, state = model.apply(
            {**variables, "cache": cache},
            tokens_BT,
            jnp.asarray(positions_BT, jnp.int32),
            decode=True,
            cache_size=size,
            mutable=["cache"],
        )
        return logits, state["cache"]

    return decode


# What no row of FAMILIES has: three levels, memory tokens below upsampling by attention.
COMBINED = [
    (1, {"upsampling": "attention", "positions": "absolute", **MEMORY["both"]}),
    (3, {"upsampling": "attention", "positions": "rope", "skip": "lerp", **FEW}),
    (2, {**MEMORY["both"], "compression": "transformer", "block_order": "sequence",
         "skip_joins": "before"}),
]  # fmt: skip


@pytest.mark.parametrize("levels, changes", COMBINED)
def test_decoding_rows_of_different_lengths(levels, changes):
    """A padded prefill in calls that end inside groups, then token by token over three more: with
    one level by a program for one token, with more by that of the prefill, with padding."""
    size, chunk, steps = 40, 12, 14
    model = make(changes, levels, context=size)
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT = np.asarray(families.tokens(batch=3, length=size))
    expected_BTV = np.asarray(families.jit(model.apply)(variables, tokens_BT))
    cache, start_B = models.init_cache(model, 3, size), np.zeros(3, int)
    decode = decoder(model, variables, size)
    ends = [(chunk, end_B) for end_B in np.array([[12, 4, 1], [17, 4, 1], [23, 4, 13]])]
    ends += [(1 if levels == 1 else chunk, ends[-1][1] + step) for step in range(1, steps + 1)]
    for length, end_B in ends:
        place_BT = start_B[:, None] + np.arange(length)[None]
        positions_BT = np.where(place_BT < end_B[:, None], place_BT, -1)
        given_BT = np.take_along_axis(tokens_BT, np.maximum(positions_BT, 0), axis=1)
        logits_BTV, cache = decode(cache, given_BT, positions_BT)
        for b, (start, end) in enumerate(zip(start_B, end_B, strict=True)):
            np.testing.assert_allclose(
                np.asarray(logits_BTV)[b, : end - start],
                expected_BTV[b, start:end],
                atol=1e-4,
                err_msg=f"row {b} at {start}",
            )
        start_B = end_B


def test_the_stack_runs_only_when_a_latent_comes():
    """With parameters that are not numbers, nothing is seen of it before."""
    model = make(levels=1)  # latents stand for tokens 3, 4, 5 of 6
    params = families.random_params(model)
    params["layers"] = jax.tree.map(lambda x: np.nan * np.asarray(x), params["layers"])
    decode, cache = decoder(model, {"params": params}, 12), models.init_cache(model, 1, 12)
    for t in range(4):
        token = np.full((1, 1), 3, np.int32)
        logits, cache = decode(cache, token, np.full((1, 1), t))
        assert np.isfinite(logits).all() == (t < 3)


def test_the_cache_keeps_latents_of_finished_groups():
    """And of a level without global blocks only what one group needs."""
    shape = {
        "width": 64,
        "depth": 8,
        "attention.num_heads": 4,
        "group_size": 16,
        "latents": (4,),
        "level_widths": (32,),
        "level_heads": (2,),
        "decoder_global": 0,
    }
    latent = families.make({"family": "latent", **shape}, context=1024)
    dense = families.make({"width": 64, "depth": 8, "attention.num_heads": 4}, context=1024)
    more = {
        name: families.cache_bytes(m, 1024) - families.cache_bytes(m, 512)
        for name, m in (("latent", latent), ("dense", dense))
    }
    # A quarter of the positions; 8 blocks of the stack and the global one of the encoder level.
    assert more["latent"] * 4 * 8 == more["dense"] * 9
    held = {
        size: sum(x.nbytes for x in jax.tree.leaves(models.init_cache(latent, 1, size)))
        for size in (512, 1024)
    }
    # Beside keys and values, a position and a group for each slot.
    assert held[1024] < 1.1 * families.cache_bytes(latent, 1024)
    assert held[1024] < 0.35 * families.cache_bytes(dense, 1024)


def test_a_sampler_takes_the_model():
    """Greedy, two rows, scanned layers: what the full forward likes best, token by token."""
    model = make({"scan_layers": True, "depth": 2, **MEMORY["both"], **FEW}, levels=1)
    params = families.random_params(model)
    sampler = Sampler(model, batch_size=2, temperature=0.0)
    prompts = [np.array([3, 1, 4]), np.array([1])]
    (new, *_) = sampler.tokens({"params": params}, prompts, max_new_tokens=5, seeds=[0, 1])
    texts = [[*prompt, *ids] for prompt, ids in zip(prompts, new, strict=True)]
    padded_BT = np.array([text + [0] * (12 - len(text)) for text in texts])
    best_BT = np.argmax(apply(model, params, padded_BT), axis=-1)
    for prompt, ids, best_T in zip(prompts, new, best_BT, strict=True):
        assert ids == best_T[len(prompt) - 1 :][: len(ids)].tolist()


def test_a_sampler_counts_latents_where_latents_are_routed():
    """The share is of those that reach a block, of which there are not as many as tokens."""
    routing = {"kind": "mod", "capacity": 1.0, "slack": 1.0, "every": 1}
    routing |= {"train_selection": "position"}
    changes = {f"depth_routing.{name}": value for name, value in routing.items()}
    latents = {"group_size": 4, "latents": (1,), "level_widths": (8,), "level_heads": (2,)}
    model = families.make({"family": "latent", "depth": 2, **latents, **changes})
    variables = {"params": families.random_params(model), **families.random_state(model)}
    sampler = Sampler(model, temperature=0.0)
    list(sampler.tokens(variables, [[1, 2, 3]], max_new_tokens=9, seeds=[0]))
    assert sampler.stats["routed_fraction_by_block"] == {"block_0": 1.0, "block_1": 1.0}


def test_a_sampler_counts_choices_in_all_groups():
    """As many as the full pass, and not those of the last group alone."""
    model = families.build("adapter_latent")
    variables = {"params": families.params_of("adapter_latent")}
    sampler, prompt = Sampler(model, temperature=0.0), [1, 2, 3]
    texts = sampler.tokens(variables, [prompt], max_new_tokens=families.LENGTH - 3, seeds=[0])
    text = prompt + [token for (row,) in texts for token in row]
    full_pass = jax.jit(functools.partial(model.apply, mutable=["choices"]))
    _, sown = full_pass(variables, np.array([text]))
    choices = jax.tree_util.tree_leaves_with_path(
        sown["choices"], is_leaf=lambda leaf: isinstance(leaf, Choice)
    )
    full = {"/".join(str(key.key) for key in path[:-2]): choice for path, choice in choices}
    counted = sampler.stats["computed_choices_by_row"]
    several = 0
    for name, (count,) in counted.items():
        if "/local_" not in name and name.startswith(("decoder_0", "encoder_0")):
            assert count == np.sum(np.asarray(full[name].value) > 0)
            several += count > 4  # more than a group has
    assert several
