"""The attention kernel against full matrices: values, gradients, and what it visits."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efx import flops, sharding
from efx.layers import attend, kv_cache
from efx.layers.attention import Attention
from efx.layers.config import AttentionConfig, RopeScalingConfig
from efx.layers.dropout import ProbsFn, StandardDropout
from efx.layers.info import CallInfo, Mode, Tokens
from efx.layers.linear import Embedding, Linear
from efx.layers.positions import rope

B, T, N, K, H = 2, 11, 4, 2, 6


def inputs(seed=0, length=T, kv_heads=K):
    """(q, k, v), float32."""
    rng = np.random.default_rng(seed)
    shapes = [(B, length, N, H), (B, length, kv_heads, H), (B, length, kv_heads, H)]
    return tuple(np.float32(rng.normal(size=shape)) for shape in shapes)


@functools.partial(jax.jit, static_argnames="softcap")
def full(q, k, v, visible_BTS, scale, softcap=0.0, factor_BNTS=1.0):
    """Attention with all scores in memory, every head with keys of its own."""
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    weights = jnp.exp(scores) * visible_BTS[:, None]
    weights = weights / weights.sum(axis=-1, keepdims=True) * factor_BNTS
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def visible(length=T, window=0, segments=None, positions=None):
    """[B, T, S] from the definition."""
    time = np.arange(length)
    mask = np.broadcast_to(time[None] <= time[:, None], (B, length, length)).copy()
    if window:
        positions = np.tile(time, (B, 1)) if positions is None else positions
        mask &= positions[:, :, None] - positions[:, None] < window
    if segments is not None:
        mask &= segments[:, :, None] == segments[:, None]
    return mask


# Two documents and padding; three documents.
SEGMENTS = np.array([[1] * 4 + [2] * 5 + [0] * 2, [1] * 1 + [2] * 6 + [3] * 4])
# A routed subsequence: positions with gaps.
GAPS = np.array([[0, 1, 3, 4, 8, 9, 10, 13, 20, 21, 22], [2, 5, 6, 7, 9, 11, 12, 13, 14, 15, 30]])

CASES = {
    "causal": dict(),
    "attention.window": dict(window=4),
    "window_one": dict(window=1),
    "softcap": dict(softcap=0.7),
    "segments": dict(segments=SEGMENTS),
    "segments_window": dict(segments=SEGMENTS, window=3),
    "gaps_window": dict(window=4, positions=GAPS),
    "one_kv_head": dict(kv_heads=1),
    "all_kv_heads": dict(kv_heads=N),
}


@functools.cache
def ours(case, chunk, block=256):
    """Compiled (q, k, v) -> (values, gradients of a weighted sum of them)."""
    options = dict(CASES[case])
    options.pop("kv_heads", None)
    segments, positions = options.pop("segments", None), options.pop("positions", None)
    positions = np.tile(np.arange(T), (B, 1)) if positions is None else positions

    def value(q, k, v):
        out = attend.attend(
            q,
            k,
            v,
            scale=0.4,
            chunk=chunk,
            positions_BT=jnp.asarray(positions),
            segment_ids_BT=None if segments is None else jnp.asarray(segments),
            **options,
        )
        return jnp.sum(out * weights()), out

    return families.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))


first_visible = families.jit(attend.first_visible, static_argnums=(0, 1))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.booleans(), st.booleans())
def test_what_is_visible_is_an_interval(seed, window, packed, routed):
    """From the place that is said up to the query, in packed rows and routed subsequences."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 4) if packed else [20]
    segments = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)])
    positions = np.concatenate([np.arange(n) for n in lengths])
    padding = 36 - sum(lengths) if packed else 0  # few lengths in all, to be compiled once
    segments = np.append(segments, np.zeros(padding, int))
    positions = np.append(positions, np.arange(padding))
    if routed:
        picked = np.flatnonzero(rng.uniform(size=len(segments)) < 0.6)[:24]
        empty = np.zeros(24 - len(picked), int)
        segments, positions = (
            np.append(segments[picked], empty),
            np.append(positions[picked], empty - 1),
        )
    if not len(positions):
        return
    segments = segments if packed else None
    first = first_visible(
        len(positions), window, positions[None], None if segments is None else segments[None]
    )
    first = np.zeros(len(positions), int) if first is None else np.asarray(first)[0]
    place = np.arange(len(positions))
    got = (place[None] <= place[:, None]) & (place[None] >= first[:, None])
    expected = visible(
        len(positions), window, None if segments is None else segments[None], positions[None]
    )[0]
    # Empty slots come last, or before the next document, and what they see is nobody's.
    real = positions >= 0
    np.testing.assert_array_equal(got[real], expected[real])


def test_a_window_without_an_end_keeps_documents_apart():
    """However large it is, and however many documents lie in a row: no sum of windows is one."""
    segments_1T = np.repeat(np.arange(1, 9), 3)[None]
    positions_1T = np.tile(np.arange(3), 8)[None]
    first_1T = first_visible(24, 2**30, positions_1T, segments_1T)
    np.testing.assert_array_equal(first_1T, (segments_1T - 1) * 3)


def weights():
    return jnp.cos(jnp.arange(B * T * N * H, dtype=jnp.float32)).reshape(B, T, N, H)


@functools.cache
def expected_of(case):
    """((weighted sum, values), gradients) of a case, from full matrices."""
    options = dict(CASES[case])
    args = inputs(kv_heads=options.pop("kv_heads", K))
    softcap = options.pop("softcap", 0.0)
    mask = visible(**options)

    def value(q, k, v):
        out = full(q, k, v, mask, 0.4, softcap)
        return jnp.sum(out * weights()), out

    return args, families.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(*args)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk, block", [(0, 256), (4, 256), (0, 3), (6, 2)])
def test_attend_is_full_attention(case, chunk, block, monkeypatch):
    """Values and gradients; neither chunks of 4 nor blocks of 3 divide 11."""
    monkeypatch.setattr(attend, "_BLOCK", block)
    args, expected = expected_of(case)
    got = ours(case, chunk, block)(*args)
    assert got[0][1].shape == (B, T, N, H) and got[0][1].dtype == jnp.float32
    families.assert_trees_close(expected, got, rtol=1e-5)


@pytest.mark.parametrize("chunk", (1, 2, 3, 5, 7, T - 1, T, T + 1))
def test_every_chunk_size(chunk):
    """Longer than the sequence, too; all of them with a window, segments and grouped heads."""
    q, k, v = inputs()
    options = dict(
        scale=0.4, window=3, positions_BT=jnp.arange(T)[None], segment_ids_BT=jnp.asarray(SEGMENTS)
    )
    got = families.jit(functools.partial(attend.attend, chunk=chunk, **options))(q, k, v)
    expected = full(q, k, v, visible(window=3, segments=SEGMENTS), 0.4)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = inputs()
    out = families.jit(functools.partial(attend.attend, scale=1.0))(100 * q, 100 * k, v)
    assert np.isfinite(out).all()


def test_masks_as_tables():
    """Who sees whom, read off the kernel: v is one-hot, so the output is the attention matrix."""
    q = np.zeros((B, T, 1, T), np.float32)
    v = np.tile(np.eye(T, dtype=np.float32)[None, :, None], (B, 1, 1, 1))

    def seen(options, **static):
        kernel = functools.partial(attend.attend, scale=1.0, chunk=6)
        out = families.jit(lambda options: kernel(q, q, v, **options, **static))(options)
        return (np.asarray(out)[:, :, 0] > 0).astype(int)

    for options, window, mask in [
        ({}, 0, visible()),
        (dict(segment_ids_BT=SEGMENTS), 0, visible(segments=SEGMENTS)),
        (dict(positions_BT=GAPS), 4, visible(window=4, positions=GAPS)),
        (dict(positions_BT=np.arange(T)[None]), 4, visible(window=4)),
    ]:
        np.testing.assert_array_equal(seen(options, window=window), mask)
    # Equal scores: each query divides itself equally among what it sees. By hand, row 1 of GAPS.
    np.testing.assert_array_equal(
        seen(dict(positions_BT=GAPS), window=4)[1, :5, :5],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]],
    )


@pytest.mark.parametrize(
    "length, chunk, window, expected",
    [
        (10, 4, 0, [(0, 4, 4, 4, False), (4, 8, 4, 8, False), (8, 10, 2, 10, False)]),
        (10, 4, 3, [(0, 4, 4, 4, True), (4, 8, 4, 6, True), (8, 10, 2, 4, True)]),
        (10, 4, 1, [(0, 4, 4, 4, True), (4, 8, 4, 4, True), (8, 10, 2, 2, True)]),
        (10, 16, 0, [(0, 10, 10, 10, False)]),
        (700, 600, 0, [(0, 512, 256, 600, False), (512, 600, 88, 600, False),
                       (600, 700, 100, 700, False)]),
        (4000, 0, 9, [(0, 3840, 256, 264, True), (3840, 4000, 160, 168, True)]),
    ],
)  # fmt: skip
def test_spans_by_hand(length, chunk, window, expected):
    assert attend.spans(length, chunk, window) == expected


def test_chosen_chunks():
    assert attend.chunk_size(10) == 64  # at least 64
    assert attend.chunk_size(1024) == 128 and len(attend.spans(1024)) == 8  # at most 8
    assert attend.chunk_size(1025) == 129
    assert attend.chunk_size(1024, 100) == 100
    assert max(span.block for span in attend.spans(100_000)) == 256
    assert max(span.block for span in attend.spans(100_000, window=7)) == 256


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 45))
def test_spans_cover_what_may_be_seen(length, chunk, window):
    """Every allowed pair is visited, and none twice."""
    visits = np.zeros((length, length), int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "_BLOCK", 7)
        for span in attend.spans(length, chunk, window):
            for q0 in range(span.q_start, span.q_stop, span.block):
                k0 = attend._first_key(span, q0)
                visits[q0 : q0 + span.block, k0 : k0 + span.keys] += 1
            assert (span.q_stop - span.q_start) % span.block == 0
    assert visits.max() == 1
    time = np.arange(length)
    gap = time[:, None] - time[None]
    allowed = (gap >= 0) & ((gap < window) if window else True)
    assert np.all(visits[allowed] == 1)
    assert allowed.sum() == flops.causal_pairs(length, window)


@pytest.mark.parametrize("chunk, window, block", [(0, 0, 256), (4, 0, 256), (4, 3, 256), (6, 0, 2)])
def test_visited_pairs_are_what_is_multiplied(chunk, window, block, monkeypatch):
    monkeypatch.setattr(attend, "_BLOCK", block)
    q, k, v = inputs()

    def run(q, k, v):
        return attend.attend(
            q, k, v, scale=1.0, chunk=chunk, window=window, positions_BT=jnp.arange(T)[None]
        )

    pairs = sum(span.pairs for span in attend.spans(T, chunk, window))
    assert flops.jaxpr_flops(run, q, k, v) == B * flops.attention_scores(pairs, N, H)


class Factors(ProbsFn):
    """Multiplies each probability by a number of its own, and returns what it was given."""

    def __init__(self, factor_BNTS):
        super().__init__()
        self.factor_BNTS, self.blocks = factor_BNTS, []

    def __call__(self, probs_BKGTS, q_start, k_start, allowed_BTS):
        queries, keys = probs_BKGTS.shape[3:]
        self.blocks.append((q_start, queries, k_start))
        starts, sizes = (0, 0, q_start, k_start), (B, N, queries, keys)
        part = jax.lax.dynamic_slice(jnp.asarray(self.factor_BNTS), starts, sizes)
        changed = probs_BKGTS * part.reshape(probs_BKGTS.shape)
        return changed, (probs_BKGTS, jnp.broadcast_to(allowed_BTS, (B, queries, keys)))


def test_probs_fn_sees_every_chunk():
    """It gets [B, K, G, T, S] probabilities and the numbers of the first query and key."""
    q, k, v = inputs()
    factor = np.random.default_rng(1).uniform(size=(B, N, T, T)).astype(np.float32)
    probs_fn = Factors(factor)

    @families.jit
    def run(q, k, v, positions_BT):
        options = dict(scale=0.4, chunk=4, window=3, probs_fn=probs_fn)
        return attend.attend(q, k, v, positions_BT=positions_BT, **options), probs_fn.seen

    out, chunks = jax.device_get(run(q, k, v, np.arange(T)[None]))
    assert probs_fn.blocks == [(0, 4, 0), (4, 4, 2), (8, 3, 6)] and len(chunks) == 3
    for probs_XBKGTS, allowed_XBTS in chunks:
        assert np.all((probs_XBKGTS > 0) == allowed_XBTS[:, :, None, None])
        np.testing.assert_allclose(probs_XBKGTS.sum(axis=-1), 1.0, rtol=1e-5)
    expected = full(q, k, v, visible(window=3), 0.4, factor_BNTS=factor)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("window", [0, 5])
def test_probs_fn_in_blocks_that_take_turns(window, monkeypatch):
    """Values, gradients and what is returned beside the probabilities, in loops over blocks."""
    monkeypatch.setattr(attend, "_BLOCK", 2)
    q, k, v = inputs()
    factor = np.random.default_rng(1).uniform(size=(B, N, T, T)).astype(np.float32)
    weights_BTNH = np.random.default_rng(2).normal(size=(B, T, N, H))

    @families.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True)
    def run(q, k, v, factor):
        probs_fn = Factors(factor)
        options = dict(scale=0.4, chunk=0 if window else 8, window=window, probs_fn=probs_fn)
        out = attend.attend(q, k, v, positions_BT=jnp.arange(T)[None], **options)
        return jnp.sum(out * weights_BTNH), (out, probs_fn.seen)

    @families.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3))
    def expected(q, k, v, factor):
        out = full(q, k, v, visible(window=window), 0.4, factor_BNTS=factor)
        return jnp.sum(out * weights_BTNH)

    (_, (out, seen)), gradients = jax.device_get(run(q, k, v, factor))
    assert max(len(probs) for probs, _ in seen) > 1
    assert sum(len(probs) * probs.shape[4] for probs, _ in seen) == T
    np.testing.assert_allclose(
        out, full(q, k, v, visible(window=window), 0.4, factor_BNTS=factor), atol=1e-5
    )
    for ours, theirs in zip(gradients, expected(q, k, v, factor), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def layer_with_dropout():
    """One head, which drops a quarter of its probabilities."""
    return Attention(
        AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=H, rope_theta=0.0, bias="none"),
        std=0.2,
        std_out=0.2,
        norm_eps=1e-5,
        probs_dropout=functools.partial(StandardDropout, 0.25),
        dtype=jnp.float32,
        width=8,
    )


def test_memory_of_changed_probabilities_is_linear():
    """A step that drops probabilities keeps none of them for the backward pass."""
    layer = layer_with_dropout()

    def temporaries(length):
        x_BTD = jax.ShapeDtypeStruct((1, length, 8), np.float32)
        info = CallInfo(Tokens(np.arange(length)[None])).replace(mode=Mode(train=True))
        key = jax.random.key(0)
        variables = jax.eval_shape(
            lambda x: layer.init(dict(params=key, dropout=key), x, info), x_BTD
        )

        def loss(variables, x_BTD):
            return layer.apply(variables, x_BTD, info, rngs={"dropout": key}).sum()

        compiled = jax.jit(jax.grad(loss)).lower(variables, x_BTD).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # With all probabilities kept it is 3.0 times: a part does grow with the length alone.
    assert temporaries(8192) < 2.3 * temporaries(4096)


def test_dropout_of_probabilities():
    """In training a share of them is zero and the rest is scaled; in evaluation none is."""
    layer = layer_with_dropout()
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(200, 1, 8)))
    info = CallInfo(Tokens(np.zeros((1, 1), int)))
    variables = families.jit(layer.init)(jax.random.key(0), x_BTD, info)

    @families.jit
    def apply(key, info=info):
        dropping = info.replace(mode=Mode(train=True))
        return (
            layer.apply(variables, x_BTD, info),
            layer.apply(variables, x_BTD, dropping, rngs={"dropout": key}),
        )

    # A lone token attends to itself with probability 1: dropped, or scaled by 1 / (1 - rate).
    plain_BTD, dropped_BTD = map(np.asarray, apply(jax.random.key(1)))
    gone_B = np.all(dropped_BTD == 0, axis=(1, 2))
    assert 0.15 < gone_B.mean() < 0.35
    np.testing.assert_allclose(dropped_BTD[~gone_B], plain_BTD[~gone_B] / 0.75, atol=1e-6)
    same, other = (apply(jax.random.key(seed))[1] for seed in (1, 2))
    assert np.array_equal(same, dropped_BTD) and not np.array_equal(other, dropped_BTD)


def test_every_block_of_queries_drops_by_itself():
    probs_BKGTS = np.ones((1, 1, 1, 16, 16), np.float32)
    training = CallInfo(Tokens(np.zeros((1, 1), int)), Mode(train=True))

    @families.jit
    def dropped(key, q_start):
        dropout = StandardDropout(0.5).bind({}, rngs={"dropout": key})
        return dropout.probs_fn(training, None)(probs_BKGTS, q_start, 0, None)[0]

    first, again, next_block = (dropped(jax.random.key(0), start) for start in (0, 0, 16))
    np.testing.assert_array_equal(first, again)
    assert 0.3 < np.mean(first == next_block) < 0.7


# ---- the cache ---------------------------------------------------------------------------------


def test_attend_cache_is_attend():
    """Slots in any order, some empty: what counts is each slot's position."""
    q, k, v = inputs()
    rng = np.random.default_rng(2)
    slots = T + 3
    places = np.stack([rng.permutation(slots)[:T] for _ in range(B)])
    positions_BS = np.full((B, slots), -1)
    k_BKHS = np.full((B, K, H, slots), 1e3, np.float32)
    v_BKHS = np.full((B, K, H, slots), 1e3, np.float32)
    for b in range(B):
        positions_BS[b, places[b]] = np.arange(T)
        k_BKHS[b][:, :, places[b]] = np.transpose(k[b], (1, 2, 0))
        v_BKHS[b][:, :, places[b]] = np.transpose(v[b], (1, 2, 0))
    last = 4  # the last queries only
    for window in (0, 3):
        cached = functools.partial(attend.attend_cache, scale=0.4, window=window, softcap=0.9)
        out = families.jit(cached)(
            q[:, -last:],
            k_BKHS,
            v_BKHS,
            np.tile(np.arange(T - last, T)[None], (B, 1)),
            positions_BS,
        )
        expected = np.asarray(full(q, k, v, visible(window=window), 0.4, 0.9))[:, -last:]
        np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("used", [1, 5, 9, 12])
def test_attend_cache_reads_used_slots_only(monkeypatch, window, used):
    """In blocks, the last of which overlaps the one before; what lies behind is never read."""
    monkeypatch.setattr(attend, "_CACHE_BLOCK", 5)
    q, k, v = inputs()
    slots, rows = 12, np.array([1, 0])
    k_BKHS = np.full((B, K, H, slots), np.nan, np.float32)
    v_BKHS = np.full((B, K, H, slots), np.nan, np.float32)
    count = min(used, T)
    read = min(-(-used // 5) * 5, slots)  # whole blocks
    k_BKHS[..., :read], v_BKHS[..., :read] = 1e3, 1e3
    k_BKHS[..., :count] = np.transpose(k, (0, 2, 3, 1))[..., :count]
    v_BKHS[..., :count] = np.transpose(v, (0, 2, 3, 1))[..., :count]
    positions_BS = np.full((B, slots), -1)
    positions_BS[:, :count] = np.arange(count)
    query = q[:, count - 1 : count]
    out = families.jit(
        functools.partial(
            attend.attend_cache,
            scale=0.4,
            window=window,
            softcap=0.9,
        )
    )(
        query[rows],
        k_BKHS,
        v_BKHS,
        np.full((B, 1), count - 1),
        positions_BS,
        used=used,
        rows_B=rows,
    )
    expected = np.asarray(full(q, k, v, visible(window=window), 0.4, 0.9))[:, count - 1 : count]
    np.testing.assert_allclose(out, expected[rows], atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("newest", [0, 1, 4])
def test_attend_cache_on_each_platform(monkeypatch, platform, newest):
    """The last tokens apart from the slots, as a loop over tokens has them; whatever a platform
    visits at a time, and with the rows that a TPU wants of a product."""
    monkeypatch.setattr(attend, "_CACHE_BLOCK", 2)
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    q, k, v = inputs()
    rows, kept, slots = np.array([1, 0]), T - newest, T + 3
    k_BKHS = np.full((B, K, H, slots), 1e3, np.float32)
    v_BKHS = np.full((B, K, H, slots), 1e3, np.float32)
    k_BKHS[..., :kept] = np.transpose(k, (0, 2, 3, 1))[..., :kept]
    v_BKHS[..., :kept] = np.transpose(v, (0, 2, 3, 1))[..., :kept]
    positions_BS = np.full((B, slots), -1)
    positions_BS[:, :kept] = np.arange(kept)
    apart = None
    if newest:
        empty = np.full((B, 2, *k.shape[2:]), 1e3, np.float32)  # places for more
        places = np.concatenate([np.arange(kept, T), [-1, -1]])
        apart = (
            jnp.concatenate([k[:, kept:], empty], axis=1),
            jnp.concatenate([v[:, kept:], empty], axis=1),
            jnp.tile(places, (B, 1)),
        )
    for window in (0, 3):
        out = attend.attend_cache(
            *map(jnp.asarray, (q[rows, T - 1 :], k_BKHS, v_BKHS)),
            np.full((B, 1), T - 1),
            jnp.asarray(positions_BS),
            scale=0.4,
            window=window,
            softcap=0.9,
            used=kept,
            newest=apart,
            rows_B=rows,
        )
        expected = np.asarray(full(q, k, v, visible(window=window), 0.4, 0.9))[rows, T - 1 :]
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_tokens_kept_apart_are_stored_as_they_came():
    """Rows with and without a token at a step, some of which come by their numbers; also of models
    that are decoded together, whose caches lie side by side."""
    rng = np.random.default_rng(0)
    size, steps = 6, 3
    start = {
        "cached_key": jnp.zeros((B, K, H, size)),
        "cached_value": jnp.zeros((B, K, H, size)),
        "position": jnp.full((B, size), -1),
        "used": jnp.array([1] + [0] * (B - 1)),
    }
    cache = kv_cache.with_newest({"layer": {"attention": start}, "routed": np.zeros(B)}, steps)
    slots = start
    for step, row_B in enumerate([None, np.array([1, 0]), None]):
        k_B1KH, v_B1KH = rng.normal(size=(2, B, 1, K, H)).astype(np.float32)
        position_B1 = np.full((B, 1), step)
        position_B1[(step + 1) % B] = -1
        layer = kv_cache.at_step(cache, step)["layer"]["attention"]
        layer |= kv_cache._kept_apart(layer, k_B1KH, v_B1KH, position_B1, row_B)
        # A row without a token leaves what another call has put there.
        layer |= kv_cache._kept_apart(layer, k_B1KH + 1, v_B1KH, np.full((B, 1), -1), row_B)
        cache["layer"]["attention"] = layer
        slots = slots | kv_cache._stored(slots, k_B1KH, v_B1KH, position_B1, row_B)
    stored = kv_cache.absorbed(cache)
    assert stored.keys() == cache.keys() and np.any(slots["position"] >= 0)
    jax.tree.map(np.testing.assert_array_equal, stored["layer"]["attention"], slots)
    two = jax.tree.map(lambda x: np.stack([x, x], axis=1), cache)
    both = kv_cache.absorbed(two)["layer"]["attention"]
    doubled = jax.tree.map(lambda x: np.stack([x, x], axis=1), slots)
    jax.tree.map(np.testing.assert_array_equal, both, doubled)


def test_tokens_are_stored_when_they_come_on_a_gpu(monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    attention = {"cached_key": jnp.zeros((B, K, H, 6)), "used": jnp.zeros(B, jnp.int32)}
    cache = {"layer": {"attention": attention}, "routed": np.zeros(B)}
    for changed in (
        kv_cache.with_newest(cache, 3), kv_cache.at_step(cache, 1), kv_cache.absorbed(cache)
    ):  # fmt: skip
        assert jax.tree.structure(changed) == jax.tree.structure(cache)
        jax.tree.map(np.testing.assert_array_equal, changed, cache)


@pytest.mark.parametrize("row_B", [None, [2, 0], [1, 3, 0]], ids=["all", "some", "none of one"])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_tokens_are_stored_by_slices_on_a_tpu(monkeypatch, tokens, row_B):
    """Into rows of which one is empty, one has little room and one none; with padding between the
    tokens, and with more tokens than slots."""
    rng = np.random.default_rng(0)
    rows, size = 3, 7
    used_B = np.array([0, 5, 7])
    slots = {
        "cached_key": rng.normal(size=(rows, K, H, size)).astype(np.float32),
        "cached_value": rng.normal(size=(rows, K, H, size)).astype(np.float32),
        "position": np.where(np.arange(size) < used_B[:, None], np.arange(size), -1),
        "used": used_B,
    }
    slots = jax.tree.map(jnp.asarray, slots)
    batch = rows if row_B is None else len(row_B)
    k, v = rng.normal(size=(2, batch, tokens, K, H)).astype(np.float32)
    positions = np.where(rng.random((batch, tokens)) < 0.7, 10 + np.arange(tokens), -1)
    row_B = None if row_B is None else jnp.array(row_B)
    expected = kv_cache._stored(slots, k, v, positions, row_B)
    monkeypatch.setattr(kv_cache.sharding, "platform", lambda: "tpu")
    jax.tree.map(
        np.testing.assert_array_equal, kv_cache._stored(slots, k, v, positions, row_B), expected
    )
    assert tokens == 1 or np.any(expected["position"] >= 10)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_few_rows_on_a_tpu(monkeypatch, rows):
    """Products with rows of zeros beside them."""
    x = np.random.default_rng(0).normal(size=(rows, 1, 6)).astype(np.float32)
    layer = Linear(5, ("norm", "norm"), 0.5, use_bias=True)
    table = Embedding(7, 6, 0.5)
    params = layer.init(jax.random.key(0), x), table.init(jax.random.key(0), np.zeros((1, 1), int))

    def both():
        return layer.apply(params[0], x), table.apply(params[1], x, method="attend")

    plain = both()
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    for y, other in zip(plain, both(), strict=True):
        np.testing.assert_allclose(y, other, atol=1e-6)


# ---- rotary embedding --------------------------------------------------------------------------


def test_rope_scaling():
    """Angles of position 1: all divided, or those of Llama 3, of which fast ones stay and slow ones
    are divided, with a passage between."""

    def angles(**scaling):
        c = AttentionConfig(rope_theta=10.0**4, rope_scaling=RopeScalingConfig(**scaling))
        x = np.eye(8, dtype=np.float32)[:4].reshape(4, 1, 1, 8)
        turned = families.jit(lambda x, places_BT: rope(x, places_BT, c))
        y = np.asarray(turned(x, np.ones((4, 1), int)))[:, 0, 0]
        return np.arctan2(np.diagonal(y[:, 4:]), np.diagonal(y[:, :4]))

    plain = np.array([1.0, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(angles(), plain, rtol=1e-4)
    np.testing.assert_allclose(angles(kind="linear", factor=5.0), plain / 5, rtol=1e-4)
    # Within 100 positions these turn 15.9, 1.59, 0.159 and 0.0159 times.
    share = (100 * 0.1 / (2 * np.pi) - 1) / 3
    expected = plain * np.array([1.0, share + (1 - share) / 8, 1 / 8, 1 / 8])
    scaled = angles(kind="llama3", factor=8.0, original_context=100)
    np.testing.assert_allclose(scaled, expected, rtol=1e-4)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_rope_turns_pairs(platform, monkeypatch):
    """Pair i of H/2 turns by position * theta^(-2i/H); lengths stay, only differences matter."""
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    (q, k, _), plain = inputs(kv_heads=N), AttentionConfig()

    @families.jit
    def turned(x, places_BT, q, k, order_BT):
        later = [rope(part, order_BT + 5, plain) for part in (q, k)]
        sooner = [rope(part, order_BT, plain) for part in (q, k)]
        return (
            rope(x, places_BT, AttentionConfig(rope_theta=100.0)),
            later,
            sooner,
            rope(q, order_BT, AttentionConfig(rope_fraction=4 / H)),
            rope(q[..., :4], order_BT, plain),
            rope(q.astype(jnp.bfloat16), order_BT, plain),
        )

    x = np.float32([1, 1, 0, 0]) * np.ones((1, 3, 1, 1), np.float32)
    y, a, b, part, of_part, half = jax.device_get(
        turned(x, np.array([[0, 1, 7]]), q, k, np.arange(T)[None])
    )
    for row, t in zip(y[0, :, 0], (0, 1, 7), strict=True):
        np.testing.assert_allclose(
            row, [np.cos(t), np.cos(t / 10), np.sin(t), np.sin(t / 10)], atol=1e-6
        )
    np.testing.assert_allclose(*(np.einsum("btnh,bsnh->bnts", *pair) for pair in (a, b)), atol=1e-4)
    np.testing.assert_array_equal(part[..., 4:], q[..., 4:])
    np.testing.assert_array_equal(part[..., :4], of_part)
    assert half.dtype == jnp.bfloat16
