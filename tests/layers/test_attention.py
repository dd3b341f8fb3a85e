"""Attention against full matrices: values, gradients, visited pairs, caches, rotary positions."""

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
from efx.layers.call import CacheView, Call
from efx.layers.config import AttentionConfig, RopeScalingConfig
from efx.layers.dropout import ProbsDropout, StandardDropout
from efx.layers.linear import Embedding
from efx.layers.positions import rope

B, T, N, K, H = 2, 11, 4, 2, 6
LONG = 700  # with a chunk of 600: one of two blocks, which take turns in a loop, and what is left


def inputs(seed=0, length=T, kv_heads=K):
    """(q, k, v), float32."""
    rng = np.random.default_rng(seed)
    shapes = [(B, length, N, H), (B, length, kv_heads, H), (B, length, kv_heads, H)]
    return tuple(np.float32(rng.normal(size=shape)) for shape in shapes)


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


def segments_of(length):
    """Two documents and padding; three documents."""
    ends = np.array([[4, 9], [1, 7]]) * length // T
    ids = 1 + (np.arange(length) >= ends[..., None]).sum(axis=1)
    return np.where((np.arange(2)[:, None] == 0) & (ids == 3), 0, ids)


def gaps_of(length):
    """Positions of a routed subsequence."""
    steps = np.random.default_rng(3).choice([1, 2, 5], size=(B, length), p=[0.6, 0.3, 0.1])
    return np.cumsum(steps, axis=1)


def cases(length):
    """[(number of heads of keys, options of `visible`, softcap)]"""
    segments = segments_of(length)
    return [
        (1, {}, 0.0),
        (K, dict(window=4), 0.7),
        (K, dict(segments=segments), 0.0),
        (N, dict(segments=segments, window=3), 0.0),
        (K, dict(window=4, positions=gaps_of(length)), 0.0),
    ]


def test_visibility_by_hand():
    positions = np.array([[0, 1, 3, 4, 8], [2, 5, 6, 7, 9]])
    np.testing.assert_array_equal(
        visible(5, window=4, positions=positions)[1],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]],
    )
    segments = np.array([[1, 1, 2, 0], [1, 2, 2, 2]])
    np.testing.assert_array_equal(
        visible(4, segments=segments)[0],
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    )


@pytest.mark.parametrize("length, chunk", [(T, T + 1), (T, 4), (LONG, 600)])
def test_attend_equals_full_attention(length, chunk):
    """Values and gradients."""
    weights = jnp.cos(jnp.arange(B * length * N * H, dtype=jnp.float32))
    weights = weights.reshape(B, length, N, H)
    every = cases(length)

    def loss(attention):
        def value(q, k, v):
            out = attention(q, k, v)
            return jnp.sum(out * weights), out

        return jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)

    def ours(q, k, v, window=0, segments=None, positions=None, softcap=0.0):
        return attend.attend(
            q, k, v, scale=0.4, chunk=chunk, window=window, softcap=softcap,
            positions_BT=np.arange(length)[None] if positions is None else positions,
            segment_ids_BT=segments,
        )  # fmt: skip

    @families.jit
    def both(arrays):
        for qkv, (_, options, softcap) in zip(arrays, every, strict=True):
            got = loss(functools.partial(ours, softcap=softcap, **options))(*qkv)
            mask = visible(length, **options)
            plain = functools.partial(full, visible_BTS=mask, scale=0.4, softcap=softcap)
            results.append((loss(plain)(*qkv), got))
        return results

    results = []
    for expected, got in both([inputs(length=length, kv_heads=heads) for heads, *_ in every]):
        assert got[0][1].shape == (B, length, N, H) and got[0][1].dtype == jnp.float32
        families.assert_trees_close(expected, got, rtol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = inputs()
    out = families.jit(functools.partial(attend.attend, scale=1.0))(100 * q, 100 * k, v)
    assert np.isfinite(out).all()


# ---- which keys a query visits -----------------------------------------------------------------


first_visible = families.jit(attend.first_visible, static_argnums=(0, 1))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.booleans(), st.booleans())
def test_visible_keys_are_an_interval(seed, window, packed, routed):
    """From the first visible key to the query, in packed rows and routed subsequences."""
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
        segments = np.append(segments[picked], empty)
        positions = np.append(positions[picked], empty - 1)
    segments_1T = segments[None] if packed else None
    first_1T = first_visible(len(positions), window, positions[None], segments_1T)
    first = np.zeros(len(positions), int) if first_1T is None else np.asarray(first_1T)[0]
    place = np.arange(len(positions))
    got = (place[None] <= place[:, None]) & (place[None] >= first[:, None])
    expected = visible(len(positions), window, segments_1T, positions[None])[0]
    # Nothing reads what the empty slots see.
    real = positions >= 0
    np.testing.assert_array_equal(got[real], expected[real])


def test_a_huge_window_keeps_documents_apart():
    """However large the window is, and however many documents a row has: sums of windows would
    overflow."""
    segments_1T = np.repeat(np.arange(1, 9), 3)[None]
    positions_1T = np.tile(np.arange(3), 8)[None]
    first_1T = first_visible(24, 2**30, positions_1T, segments_1T)
    np.testing.assert_array_equal(first_1T, (segments_1T - 1) * 3)


@pytest.mark.parametrize(
    "length, chunk, window", [(T, 0, 0), (T, 4, 0), (T, 4, 3), (LONG, 600, 0), (LONG, 0, 9)]
)
def test_counted_pairs_are_the_multiplied_ones(length, chunk, window):
    def run(q, k, v):
        return attend.attend(
            q, k, v, scale=1.0, chunk=chunk, window=window, positions_BT=jnp.arange(length)[None]
        )

    pairs = sum(span.pairs for span in attend.spans(length, chunk, window))
    assert flops.causal_pairs(length, window) <= pairs
    executed = flops.jaxpr_flops(run, *inputs(length=length))
    assert executed == B * flops.attention_scores(pairs, N, H)


def test_chosen_chunks_skip_most_masked_pairs_in_little_memory():
    for length in (1024, 100_000):
        pairs = sum(span.pairs for span in attend.spans(length))
        assert pairs < 1.15 * flops.causal_pairs(length)
    windowed = attend.spans(100_000, window=7)
    assert max(span.block for span in (*attend.spans(100_000), *windowed)) <= 256
    assert max(span.keys for span in windowed) < 300


# ---- changed probabilities ---------------------------------------------------------------------


class Factors(ProbsDropout):
    """Multiplies each probability by a number of its own, and returns what it was given."""

    def __init__(self, factor_BNTS):
        super().__init__(self.multiply)
        self.factor_BNTS = factor_BNTS

    def multiply(self, probs_BKGTS, q_start, k_start, allowed_BTS):
        queries, keys = probs_BKGTS.shape[3:]
        starts, sizes = (0, 0, q_start, k_start), (B, N, queries, keys)
        part = jax.lax.dynamic_slice(jnp.asarray(self.factor_BNTS), starts, sizes)
        changed = probs_BKGTS * part.reshape(probs_BKGTS.shape)
        return changed, (probs_BKGTS, jnp.broadcast_to(allowed_BTS, (B, queries, keys)))


@pytest.mark.parametrize("length, chunk, window", [(T, 4, 3), (LONG, 600, 0)])
def test_probabilities_can_be_changed_in_every_block(length, chunk, window):
    """Values and gradients; the function gets probabilities of sum 1 over the allowed keys, and the
    numbers of the first query and key. What it returns beside them comes out for every query."""
    q, k, v = inputs(length=length)
    factor = np.random.default_rng(1).uniform(size=(B, N, length, length)).astype(np.float32)
    weights_BTNH = np.random.default_rng(2).normal(size=(B, length, N, H)).astype(np.float32)

    def gradients(attention):
        def value(*arrays):
            out, seen = attention(*arrays)
            return jnp.sum(out * weights_BTNH), (out, seen)

        return jax.value_and_grad(value, argnums=(0, 1, 2, 3), has_aux=True)

    def ours(q, k, v, factor):
        probs_fn = Factors(factor)
        options = dict(scale=0.4, chunk=chunk, window=window, probs_fn=probs_fn)
        out = attend.attend(q, k, v, positions_BT=jnp.arange(length)[None], **options)
        return out, probs_fn.block_outputs

    def plain(q, k, v, factor):
        return full(q, k, v, visible(length, window), 0.4, factor_BNTS=factor), None

    @families.jit
    def both(*arrays):
        return gradients(ours)(*arrays), gradients(plain)(*arrays)

    ((_, (out, seen)), grads), ((_, (expected, _)), expected_grads) = jax.device_get(
        both(q, k, v, factor)
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)
    families.assert_trees_close(expected_grads, grads)
    assert sum(len(probs) * probs.shape[4] for probs, _ in seen) == length
    for probs_XBKGTS, allowed_XBTS in seen:
        assert np.all((probs_XBKGTS > 0) == allowed_XBTS[:, :, None, None])
        np.testing.assert_allclose(probs_XBKGTS.sum(axis=-1), 1.0, rtol=1e-5)


def layer_with_dropout(chunk=0):
    """One head, which drops a quarter of its probabilities."""
    config = AttentionConfig(
        num_heads=1, num_kv_heads=1, head_dim=H, rope_theta=0.0, bias="none", chunk=chunk
    )
    dropout = functools.partial(StandardDropout, 0.25)
    return Attention(config, 0.2, 0.2, 1e-5, dropout, jnp.float32, width=8)


def test_memory_of_changed_probabilities_is_linear():
    """A step that drops probabilities keeps none of them for the backward pass."""

    def temporaries(length):
        layer = layer_with_dropout(chunk=length)  # one loop over blocks
        x_BTD = jax.ShapeDtypeStruct((1, length, 8), np.float32)
        call = Call(np.arange(length)[None]).replace(train=True)
        key = jax.random.key(0)
        variables = jax.eval_shape(
            lambda x: layer.init(dict(params=key, dropout=key), x, call), x_BTD
        )

        def loss(variables, x_BTD):
            return layer.apply(variables, x_BTD, call, rngs={"dropout": key}).sum()

        compiled = families.jit(jax.grad(loss)).lower(variables, x_BTD).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # With all probabilities kept it is 3.0 times: a part does grow with the length alone.
    assert temporaries(8192) < 2.3 * temporaries(4096)


def test_dropout_drops_and_scales_probabilities_in_training_alone():
    layer = layer_with_dropout()
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(200, 1, 8)))
    call = Call(np.zeros((1, 1), int))
    variables = families.jit(layer.init)(jax.random.key(0), x_BTD, call)

    @families.jit
    def apply(key):
        training = call.replace(train=True)
        return (
            layer.apply(variables, x_BTD, call),
            layer.apply(variables, x_BTD, training, rngs={"dropout": key}),
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
    training = Call(np.zeros((1, 1), int), train=True)

    @families.jit
    def dropped(key, q_start):
        dropout = StandardDropout(0.5).bind({}, rngs={"dropout": key})
        return dropout.probs_dropout(training, None)(probs_BKGTS, q_start, 0, None)[0]

    first, again, next_block = (dropped(jax.random.key(0), start) for start in (0, 0, 16))
    np.testing.assert_array_equal(first, again)
    assert 0.3 < np.mean(first == next_block) < 0.7


# ---- the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_decoding_in_pieces_equals_the_full_pass(platform, monkeypatch):
    """Pieces with padding before and after tokens, of some rows by their numbers; then a loop over
    tokens, which a CPU and a TPU keep apart from the slots until it ends. A CPU reads 128 slots at
    a time, and none behind the used ones."""
    rows, length, size = 3, 148, 152
    config = AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=H, window=140, softcap=0.9, bias="all"
    )
    layer = Attention(config, 0.5, 0.5, 1e-5, None, jnp.float32, width=8)
    x_BTD = np.random.default_rng(0).normal(size=(rows, length, 8)).astype(np.float32)
    everything = Call(np.arange(length)[None])
    params = {"params": families.jit(layer.init)(jax.random.key(0), x_BTD, everything)["params"]}
    expected_BTD = np.asarray(families.jit(layer.apply)(params, x_BTD, everything))
    monkeypatch.setattr(sharding, "platform", lambda: platform)

    @families.jit
    def call(cache, x_BTD, positions_BT, rows_B):
        call = Call(positions_BT, cache=CacheView(size, rows_B=rows_B))
        variables = params if cache is None else params | {"cache": cache}
        return layer.apply(variables, x_BTD, call, mutable=["cache"])

    done_B = np.zeros(rows, int)

    def step(cache, counts, width, rows_B=None, before=0):
        """Read so many new tokens of each row, with as much padding before them, and check."""
        chosen = np.arange(rows) if rows_B is None else np.array(rows_B)
        places = np.arange(width) - before
        inside = (places >= 0) & (places < np.array(counts)[:, None])
        positions = np.where(inside, done_B[chosen][:, None] + places, -1)
        read = np.where(inside[..., None], x_BTD[chosen[:, None], positions], 7.0)
        rows_B = None if rows_B is None else jnp.array(rows_B)
        out, state = call(cache, np.float32(read), np.int32(positions), rows_B)
        wanted = expected_BTD[chosen[:, None], positions]
        np.testing.assert_allclose(np.asarray(out)[inside], wanted[inside], atol=2e-5)
        np.add.at(done_B, chosen, counts)
        return state["cache"]

    cache = jax.eval_shape(
        lambda: layer.init(jax.random.key(0), x_BTD[:, :1], everything.replace(
            positions_BT=np.zeros((1, 1), np.int32), cache=CacheView(size)
        ))["cache"]
    )  # fmt: skip
    cache = {
        name: np.full(leaf.shape, -1 if name == "position" else 0, leaf.dtype)
        for name, leaf in cache.items()
    }
    if platform == "cpu":
        for name in ("cached_key", "cached_value"):
            cache[name][..., 128:] = np.nan
    cache = step(cache, [100, 90, 5], width=101)
    cache = step(jax.tree.map(jnp.nan_to_num, cache), [30, 31, 0], width=101)
    cache = step(cache, [4, 2], width=6, rows_B=[2, 0], before=2)
    apart = kv_cache.with_newest(cache, 4)
    for i, (counts, rows_B) in enumerate([([1, 1, 1], None), ([1, 1], [1, 0]), ([0, 1, 1], None)]):
        apart = step(kv_cache.at_step(apart, i), counts, width=1, rows_B=rows_B)
    stored = kv_cache.absorbed(apart)
    assert stored.keys() == cache.keys()
    stacked = jax.tree.map(lambda x: jnp.stack([x, x], axis=1), apart)  # models side by side
    for name, leaf in kv_cache.absorbed(stacked).items():
        np.testing.assert_array_equal(leaf[:, 1], stored[name])
    step(stored, [3, 6], width=6, rows_B=[1, 2])


def test_few_rows_on_a_tpu(monkeypatch):
    """Products with the output table are padded with rows of zeros."""
    x = np.random.default_rng(0).normal(size=(3, 1, 6)).astype(np.float32)
    table = Embedding(7, 6, 0.5)
    params = {"params": {"embedding": np.random.default_rng(1).normal(size=(7, 6))}}
    expected = table.apply(params, x, method="attend")
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    np.testing.assert_allclose(table.apply(params, x, method="attend"), expected, atol=1e-6)


# ---- rotary embedding --------------------------------------------------------------------------


def test_rope_scaling():
    """Angles of position 1. Linear scaling divides them all; that of Llama 3 keeps the fast ones,
    divides the slow ones, and interpolates between."""

    @families.jit
    def angles():
        x = np.eye(8, dtype=np.float32)[:4].reshape(4, 1, 1, 8)
        return [
            rope(x, np.ones((4, 1), int), AttentionConfig(rope_theta=1e4, rope_scaling=scaling))
            for scaling in (
                RopeScalingConfig(),
                RopeScalingConfig(kind="linear", factor=5.0),
                RopeScalingConfig(kind="llama3", factor=8.0, original_context=100),
            )
        ]

    none, linear, llama3 = (
        np.arctan2(np.diagonal(y[:, 0, 0, 4:]), np.diagonal(y[:, 0, 0, :4])) for y in angles()
    )
    plain = np.array([1.0, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(none, plain, rtol=1e-4)
    np.testing.assert_allclose(linear, plain / 5, rtol=1e-4)
    # Within 100 positions these turn 15.9, 1.59, 0.159 and 0.0159 times.
    share = (100 * 0.1 / (2 * np.pi) - 1) / 3
    expected = plain * np.array([1.0, share + (1 - share) / 8, 1 / 8, 1 / 8])
    np.testing.assert_allclose(llama3, expected, rtol=1e-4)


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
