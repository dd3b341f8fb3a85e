"""The grouped-latent transformer: its formulas, causality in every combination, decoding."""

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
from refusals import refused

from efx import models
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


SEVERAL = {"compression": "transformer", "compression_blocks": 2}
FORWARD = {
    "transformer": (2, {**SEVERAL, "upsampling": "attention", "positions": "level",
                        "repeat": "in_place", "skip": "lerp", "latents": (5, 2),
                        "encoder_global": (1, 0), "decoder_local": (0, 1), **MEMORY["both"]}),
    "three levels": (3, {"positions": "rope", "tied": False, "encoder_local": (0, 1, 0),
                         "encoder_global": (1, 0, 0), "decoder_global": 0,
                         "decoder_local": (2, 1, 0), **MEMORY["global"]}),
    "skip before": (2, {"skip_joins": "before", "positions": "absolute", "latents": (5, 3),
                        "encoder_local": (1, 0), "decoder_global": (0, 1)}),
    "published": (1, {"upsampling": "attention", "upsampling_norm": False,
                      "positions": "absolute"}),
}  # fmt: skip
SLOW_FORWARD = {
    "window": (1, {"attention.window": 3, "attention.head_dim": 6, "upsampling": "attention",
                   "encoder_local": 0, "decoder_local": 2, **MEMORY["both"]}),
    "sequence": (2, {"upsampling": "attention", "positions": "rope", "block_order": "sequence",
                     "encoder_local": (2, 0), "decoder_global": (0, 2), "decoder_local": (0, 2)}),
    "depth": (3, {"compression": "transformer", "skip": "lerp", "encoder_local": (1, 0, 0),
                  "encoder_global": (2, 0, 1), "decoder_local": (0, 0, 1), "decoder_global": 0,
                  "depth": 2, "repeat": "in_place", **MEMORY["local"]}),
    "lerp before": (1, {"skip_joins": "before", "skip": "lerp", "upsampling": "attention",
                        **MEMORY["both"]}),
    "window of transformer": (1, {**SEVERAL, "attention.window": 2, "depth": 2}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [*FORWARD, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FORWARD)]
)
def test_forward_is_the_formulas(case):
    """Each option at least once; the last group is incomplete."""
    levels, changes = (FORWARD | SLOW_FORWARD)[case]
    model = make(changes, levels)
    params = families.random_params(model, seed=1)
    tokens_BT = families.tokens(batch=2, length=21)
    logits_BTV = apply(model, params, tokens_BT)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for b in range(2):
        expected_TV = reference(np.asarray(tokens_BT[b]), wide, model)
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=2e-4)


def masks_of(model):
    """A compiled function from parameters and tokens to {path of a mask: the mask}."""

    @families.jit
    def run(params, tokens_BT):
        _, sown = model.apply({"params": params}, tokens_BT, mutable=["masks"])
        return sown["masks"]

    def by_path(params, tokens_BT):
        masks = jax.device_get(run(params, tokens_BT))
        leaves = jax.tree_util.tree_leaves_with_path(masks)
        return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}

    return by_path


def test_masks_of_a_level_read_what_enters_its_blocks():
    """Global blocks read the state of all places of the sequence before the local block, local
    ones that of each group alone; memory tokens come first in both."""
    changes = {
        "dropout.kind": "attention",
        "dropout.sites": ("attention_output", "mlp_output"),
        "dropout.attention.input": "embedding",
        "dropout.attention.rounding": "none",
        **MEMORY["both"],
    }
    model = make(changes, levels=1)
    run = masks_of(model)
    params = jax.device_get(families.random_params(model))
    blocks = params["encoder_0"]["blocks"]
    # Matrices so large that other inputs open and close masks.
    params["encoder_0"]["blocks"] = jax.tree_util.tree_map_with_path(
        lambda path, x: 6 * x if "mask_" in str(path) and x.ndim > 1 else x, blocks
    )
    tokens_BT = np.array(families.tokens(batch=1, length=18))  # 3 groups of 6
    plain = run(params, tokens_BT)

    # Another local block leaves the masks of the global block of its level as they are.
    local = params["encoder_0"]["blocks"]["local_0"]["block_0"]
    down = local["mlp"]["down"]["kernel"]
    local["mlp"]["down"]["kernel"] = np.full_like(down, 3)
    other = run(params, tokens_BT)
    local["mlp"]["down"]["kernel"] = down
    changed = {path.split("/")[0] for path in plain if not np.array_equal(plain[path], other[path])}
    assert "layers" in changed and "encoder_0" not in changed

    # Other tokens in the first group; rows of local masks are groups.
    tokens_BT[0, :6] = (tokens_BT[0, :6] + 20) % VOCAB
    other = run(params, tokens_BT)
    moved = {path: np.any(plain[path] != other[path], axis=-1) for path in plain}
    inside = [x for path, x in moved.items() if path.startswith("encoder_0/blocks/local_0")]
    whole = [x for path, x in moved.items() if path.startswith("encoder_0/blocks/global_1")]
    inside, whole = np.any(inside, axis=0), np.any(whole, axis=0)
    assert inside.shape == (3, 1 + 3) and whole.shape == (1, 2 + 9)
    assert inside[0, 1:].any() and not inside[1:].any() and not inside[:, 0].any()
    assert whole[0, 2 + 3 :].any() and not whole[0, :2].any()


@pytest.mark.slow
def test_masks_do_not_count_the_padding_of_a_row():
    """Of 13 tokens in groups of 6 with latents for the last 3: 6 latents."""
    changes = {"dropout.kind": "elementwise", "dropout.sites": ("mlp_output",)}
    model = make({**changes, **MEMORY["both"]}, levels=1)
    masks = masks_of(model)(families.random_params(model), families.tokens(batch=1, length=13))
    # Places that count; one memory token in each of 3 groups, and 2 in the row.
    expected = {
        "encoder_0/compress": 6,
        "encoder_0/blocks/local": 6 + 3,
        "decoder_0/blocks/local": 13 + 3,
        "encoder_0/blocks/global": 6 + 2,
        "decoder_0/blocks/global": 13 + 2,
    }
    for start, count in expected.items():
        (kept,) = [mask for path, mask in masks.items() if path.startswith(start)]
        assert np.sum(kept >= 0) == count * kept.shape[-1], start


def test_a_learned_skip_has_its_share_in_float32():
    """In bfloat16 a share of 1/2 + 2^-10 would be 1/2."""
    model = make({"skip": "lerp", **FEW}, levels=1, dtype="bfloat16")
    params, tokens_BT = jax.device_get(families.random_params(model)), families.tokens(batch=1)

    @families.jit
    def run(share):
        skip = jnp.full_like(params["decoder_0"]["skip"], share)
        decoder_0 = {**params["decoder_0"], "skip": skip}
        return model.apply({"params": {**params, "decoder_0": decoder_0}}, tokens_BT)

    assert np.any(run(0.5) != run(0.5 + 2**-10))


# ---- causality ---------------------------------------------------------------------------------

# Compression, upsampling, levels and memory tokens; nearly all pairs of choices.
COMBINATIONS = [
    ("transformer", "attention", 1, "both"),
    ("perceiver", "repeat", 3, "none"),
    *(
        pytest.param(*choices, marks=pytest.mark.slow)
        for choices in (
            ("perceiver", "attention", 2, "both"),
            ("perceiver", "repeat", 1, "none"),
            ("transformer", "repeat", 2, "none"),
            ("transformer", "attention", 3, "both"),
        )
    ),
]
# Shorter rows end after a group, inside the first, second and third.
SHORTER = {
    ("transformer", "attention", 1, "both"): 7,
    ("perceiver", "repeat", 3, "none"): 2,
    ("transformer", "repeat", 2, "none"): 17,
    ("perceiver", "attention", 2, "both"): 16,
}


@pytest.mark.parametrize("compression, upsampling, levels, memory", COMBINATIONS)
def test_causal_in_every_combination(compression, upsampling, levels, memory):
    """Each row has other tokens after place 0, 1, ...; logits do not depend on the row's length."""
    changes = {"compression": compression, "upsampling": upsampling, **FEW, **MEMORY[memory]}
    model = make(changes, levels)
    params, length = families.random_params(model), 3 * model.config.group_size - 3
    tokens_T = np.asarray(families.tokens(batch=1, length=length))[0]
    later_BT = np.arange(length)[None] > np.arange(length)[:, None]
    others_BT = np.where(later_BT, (tokens_T + 1)[None] % VOCAB, tokens_T[None])
    logits = apply(model, params, np.concatenate([tokens_T[None], others_BT]))
    moved_BT = np.abs(logits[1:] - logits[:1]).max(axis=-1)
    assert moved_BT[~later_BT].max() < 1e-5
    assert moved_BT[later_BT].min() > 1e-3  # each later logit does depend on these tokens
    if size := SHORTER.get((compression, upsampling, levels, memory)):
        shorter = apply(model, params, tokens_T[None, :size])
        np.testing.assert_allclose(shorter[0], logits[0, :size], atol=1e-5)


@pytest.mark.parametrize("changes", [{}, SEVERAL], ids=["perceiver", "transformer"])
def test_a_latent_sees_its_token_and_those_before(changes):
    """Aligned at the end: latent j of 3 sees token p of a group of 7 if and only if p <= 4 + j."""
    model = make({**changes, **FEW, "group_size": 7}, levels=1)
    params, tokens_T = families.random_params(model), np.asarray(families.tokens(1, 1, 7))[0]
    changed_TT = np.where(np.eye(7, dtype=bool), (tokens_T + 1)[None] % VOCAB, tokens_T[None])

    @families.jit
    def compressed(tokens_BT):
        _, sown = model.apply(
            {"params": params},
            tokens_BT,
            capture_intermediates=lambda module, _: module.name == "compress",
            mutable=["intermediates"],
        )
        return sown["intermediates"]["encoder_0"]["compress"]["__call__"][-1]

    latents = np.asarray(compressed(np.concatenate([tokens_T[None], changed_TT])))
    assert latents.shape == (8, 3, 16)
    seen = np.any(latents[1:] != latents[:1], axis=-1)
    assert seen.tolist() == [[p <= 4 + j for j in range(3)] for p in range(7)]


@pytest.mark.parametrize(
    "upsampling, skip_joins",
    [("repeat", "after"), ("repeat", "before"), ("attention", "after")],
)
def test_a_token_sees_the_tokens_of_its_group_before_it(upsampling, skip_joins):
    """Early places of a group take repeated latents of the group before; where the tokens join
    after the blocks, these places see nothing else of their own group but themselves."""
    changes = {"upsampling": upsampling, "skip_joins": skip_joins}
    model = make(changes, levels=1)  # groups of 6 tokens, with latents for the last 3
    params = families.random_params(model)
    tokens_T = np.asarray(families.tokens(batch=1, length=12))[0]
    changed_TT = np.where(np.eye(12, dtype=bool), (tokens_T + 1)[None] % VOCAB, tokens_T[None])
    logits = apply(model, params, np.concatenate([tokens_T[None], changed_TT]))
    seen_TS = np.abs(logits[1:] - logits[:1]).max(axis=-1).T > 0
    assert seen_TS[6:, :6].all()  # the whole group before
    expected_TS = np.tri(6, dtype=bool)
    if (upsampling, skip_joins) == ("repeat", "after"):
        expected_TS[:3] = np.eye(6, dtype=bool)[:3]
    np.testing.assert_array_equal(seen_TS[6:, 6:], expected_TS)


# ---- documents and positions -------------------------------------------------------------------


@pytest.mark.parametrize(
    "upsampling, compression, positions",
    [
        ("repeat", "perceiver", "absolute"),
        pytest.param("attention", "transformer", "rope", marks=pytest.mark.slow),
    ],
)
def test_documents_do_not_see_each_other(upsampling, compression, positions):
    """Also where one ends and the next begins inside a group. One that begins with a group is as if
    alone: its tokens read the same rows of the table of positions."""
    changes = {"upsampling": upsampling, "compression": compression, "positions": positions}
    model = make({**changes, **FEW})  # groups of 8
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


@pytest.mark.parametrize(
    "family, changes",
    [
        ("latent", {**LEVELS[1], **FEW, "width": 16, "attention.num_heads": 2, "depth": 1}),
        ("decoder", {"preset": "gpt2", "depth": 1}),
        pytest.param("encoder_decoder", {"mlp.hidden": 64, "depth": 1}, marks=pytest.mark.slow),
        ("decoder", {"dropout.kind": "elementwise"}),
    ],
)
def test_no_token_reads_past_the_table_of_positions(family, changes):
    """Longer rows are refused. A position that only the running program knows gives NaN and not
    the last row of the table."""
    model = families.make({"family": family, **changes}, context=16)
    params = families.random_params(model)
    tokens_BT = np.asarray(families.tokens(batch=2, length=17))
    for options in ({}, {"decode": True, "cache_size": 17, "mutable": ["cache"]}):
        run = functools.partial(model.apply, **options)
        positions_BT = np.zeros((2, 17), np.int32) if options else None
        refused(
            lambda run=run, at=positions_BT: jax.eval_shape(run, {"params": params}, tokens_BT, at),
            "config.model.context=16",
        )
    if model.config.dropout.by_position:  # it has masks by position and no table
        return
    positions_BT = np.int32([np.arange(16), np.arange(16) + 1])
    logits = apply(model, params, tokens_BT[:, :16], positions_BT, np.ones((2, 16), np.int32))
    assert np.isfinite(logits[0]).all() and not np.isfinite(logits[1]).all()


def test_rows_may_be_longer_than_the_context_where_no_table_ends():
    tokens_BT = families.tokens(batch=1, length=17)
    for positions in ("level", "rope"):
        model = make({"positions": positions, **FEW}, levels=1, context=16)
        variables = {"params": families.random_params(model)}
        assert jax.eval_shape(model.apply, variables, tokens_BT).shape == (1, 17, VOCAB)
        refused(lambda m=model, v=variables: m.apply(v, tokens_BT, tokens_BT), "segment_ids_BT")


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


def test_decoding_rows_of_different_lengths():
    """Three levels: a padded prefill in calls that end inside groups, then token by token."""
    size, chunk, steps = 40, 12, 10
    changes = {"upsampling": "attention", "positions": "rope", "skip": "lerp"}
    model = make({**changes, **FEW}, levels=3, context=size)
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT = np.asarray(families.tokens(batch=3, length=size))
    expected_BTV = np.asarray(families.jit(model.apply)(variables, tokens_BT))
    cache, start_B = models.init_cache(model, 3, size), np.zeros(3, int)
    decode = decoder(model, variables, size)
    ends = [np.array(end_B) for end_B in ([12, 4, 1], [17, 4, 1], [23, 4, 13])]
    ends += [ends[-1] + step for step in range(1, steps + 1)]
    for end_B in ends:
        place_BT = start_B[:, None] + np.arange(chunk)[None]
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


def test_decoding_does_not_read_the_stack_before_the_first_latent():
    """With parameters of NaN in the stack, logits are finite until then."""
    model = make(FEW, levels=1)  # latents stand for tokens 3, 4, 5 of 6
    params = jax.device_get(families.random_params(model))
    params["layers"] = jax.tree.map(lambda x: np.full_like(x, np.nan), params["layers"])
    decode, cache = decoder(model, {"params": params}, 12), models.init_cache(model, 1, 12)
    for t in range(4):
        logits, cache = decode(cache, np.full((1, 1), 3, np.int32), np.full((1, 1), t))
        assert np.isfinite(logits).all() == (t < 3)


def test_the_cache_keeps_latents_of_finished_groups():
    """A level without global blocks caches one group only."""
    shared = {"width": 64, "depth": 8, "attention.num_heads": 4}
    latent = {"family": "latent", "group_size": 16, "latents": (4,), "level_widths": (32,)}
    latent |= {"level_heads": (2,), "decoder_global": 0}
    latent = families.make({**shared, **latent}, context=1024)
    dense = families.make(shared, context=1024)
    more = {
        name: families.cache_bytes(m, 1024) - families.cache_bytes(m, 512)
        for name, m in (("latent", latent), ("dense", dense))
    }
    # A quarter of the positions; 8 blocks of the stack and the global one of the encoder level.
    assert more["latent"] * 4 * 8 == more["dense"] * 9
    cache = jax.eval_shape(lambda: models.init_cache(latent, 1, 1024))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    # Beside keys and values, a position and a group for each slot.
    assert held < 1.1 * families.cache_bytes(latent, 1024)
    assert held < 0.35 * families.cache_bytes(dense, 1024)


@pytest.mark.slow
def test_a_sampler_counts_latents_where_latents_are_routed():
    """The share of those that reach a block, which are fewer than tokens."""
    routing = {"kind": "mod", "capacity": 1.0, "slack": 1.0, "every": 1}
    routing |= {"train_selection": "position"}
    changes = {f"depth_routing.{name}": value for name, value in routing.items()}
    latents = {"group_size": 4, "latents": (1,), "level_widths": (8,), "level_heads": (2,)}
    model = families.make({"family": "latent", "depth": 2, **latents, **changes})
    variables = {"params": families.random_params(model), **families.random_state(model)}
    sampler = Sampler(model, temperature=0.0)
    list(sampler.tokens(variables, [[1, 2, 3]], max_new_tokens=9, seeds=[0]))
    assert sampler.stats["routed_fraction_by_block"] == {"block_0": 1.0, "block_1": 1.0}
