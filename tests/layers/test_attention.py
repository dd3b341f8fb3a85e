"""Attention against full matrices: values, gradients, visited pairs, caches, rotary positions."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx.layers import attend, flops, kv_cache
from efx.layers.attention import Attention, rope
from efx.layers.config import AttentionConfig, RopeScalingConfig
from efx.layers.dropout import StandardDropout
from efx.layers.token_context import CacheView, TokenContext
from efx.parallel import sharding

B, T, N, K, H = 2, 11, 4, 2, 6
LONG = 700  # with chunks of 600: one loop over two blocks, and a last block


def random(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def inputs(length=T, kv_heads=K):
    shapes = (B, length, N, H), (B, length, kv_heads, H), (B, length, kv_heads, H)
    return tuple(random(*shape, seed=seed) for seed, shape in enumerate(shapes))


def full(q, k, v, visible_BTS, softcap=0.0, factor_BNTS=1.0):
    """Attention with scale 0.4 and all scores in memory."""
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = 0.4 * jnp.einsum("btnh,bsnh->bnts", q, k)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    weights = jnp.exp(scores) * visible_BTS[:, None]
    weights = weights / weights.sum(axis=-1, keepdims=True) * factor_BNTS
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def visible(length, window=0, segments=None, positions=None):
    """[B, T, S] from the definition."""
    time = np.arange(length)
    mask = np.broadcast_to(time[None] <= time[:, None], (B, length, length)).copy()
    if window:
        positions = np.tile(time, (B, 1)) if positions is None else positions
        mask &= positions[:, :, None] - positions[:, None] < window
    return mask if segments is None else mask & (segments[:, :, None] == segments[:, None])


def gradients(attention, arrays):
    """((loss, (output, second result)), gradients); the loss weighs every output differently."""

    def loss(*arrays):
        result = attention(*arrays)
        out, second = result if isinstance(result, tuple) else (result, 0)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weights), (out, second)

    return jax.value_and_grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)


@pytest.mark.parametrize("length, chunk", [(T, T + 1), (T, 4), (LONG, 600)])
def test_attend_equals_full_attention(length, chunk):
    """Values and gradients."""
    ends = np.array([[4, 9], [1, 7]]) * length // T
    segments = 1 + (np.arange(length) >= ends[..., None]).sum(axis=1)
    segments[0, segments[0] == 3] = 0  # two documents and padding; three documents
    steps = np.random.default_rng(3).choice([1, 2, 5], size=(B, length), p=[0.6, 0.3, 0.1])
    cases = [
        (1, {}, 0.0),
        (K, dict(window=4), 0.7),
        (K, dict(segments=segments), 0.0),
        (N, dict(segments=segments, window=3), 0.0),
        (K, dict(window=4, positions=np.cumsum(steps, axis=1)), 0.0),
    ]

    @families.jit
    def both(kv_arrays):
        results = []
        for arrays, (_, mask, softcap) in zip(kv_arrays, cases, strict=True):
            options = dict(chunk=chunk, window=mask.get("window", 0), softcap=softcap, scale=0.4)
            options["positions_BT"] = mask.get("positions", np.arange(length)[None])
            options["segment_ids_BT"] = mask.get("segments")
            visible_BTS = visible(length, **mask)
            ours = functools.partial(attend.attend, **options)
            plain = functools.partial(full, visible_BTS=visible_BTS, softcap=softcap)
            results.append((gradients(ours, arrays), gradients(plain, arrays)))
        return results

    for got, expected in both([inputs(length, kv_heads) for kv_heads, *_ in cases]):
        families.assert_trees_close(expected, got, rtol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = inputs()
    assert np.isfinite(families.jit(attend.attend)(100 * q, 100 * k, v, scale=1.0)).all()


# ---- which keys a query sees -------------------------------------------------------------------


def computed_pairs(length, chunk=0, window=0):
    return sum((s.stop - s.start) * s.keys for s in attend.spans(length, chunk, window))


@pytest.mark.parametrize(
    "length, chunk, window", [(T, 0, 0), (T, 4, 0), (T, 4, 3), (LONG, 600, 0), (LONG, 0, 9)]
)
def test_spans_count_the_computed_pairs(length, chunk, window):
    pairs = computed_pairs(length, chunk, window)
    assert flops.causal_pairs(length, window) <= pairs
    run = functools.partial(attend.attend, scale=1.0, chunk=chunk, window=window)
    executed = flops.jaxpr_flops(run, *inputs(length))
    assert executed == B * flops.attention_scores(pairs, N, H)


def test_spans_skip_most_masked_pairs_in_little_memory():
    for length in (1024, 100_000):
        assert computed_pairs(length) < 1.15 * flops.causal_pairs(length)
    windowed = attend.spans(100_000, window=7)
    assert max(span.block for span in (*attend.spans(100_000), *windowed)) <= 256
    assert max(span.keys for span in windowed) < 300


# ---- changed probabilities ---------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 3])
def test_changed_probabilities_weigh_the_values(window):
    """Values and gradients with one factor per probability. Probabilities sum to 1 over the
    allowed keys."""
    arrays = *inputs(), np.abs(random(B, N, T, T))

    def ours(q, k, v, factor):
        seen = []

        def multiply(probs_BKGTS, allowed_BTS):
            seen.extend((probs_BKGTS, allowed_BTS))
            return probs_BKGTS * factor.reshape(probs_BKGTS.shape)

        return attend.attend(q, k, v, scale=0.4, window=window, drop_probs=multiply), seen

    def plain(q, k, v, factor):
        return full(q, k, v, visible(T, window), factor_BNTS=factor)

    @families.jit
    def both(arrays):
        return gradients(ours, arrays), gradients(plain, arrays)

    ((_, (out, seen)), got), ((_, (expected_out, _)), expected) = jax.device_get(both(arrays))
    families.assert_trees_close((expected_out, expected), (out, got))
    probs_BKGTS, allowed_BTS = seen
    assert np.all((probs_BKGTS > 0) == allowed_BTS[:, None, None])
    np.testing.assert_allclose(probs_BKGTS.sum(axis=-1), 1.0, rtol=1e-5)


def test_dropout_drops_and_scales_probabilities_only_in_training():
    config = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=H, rope_theta=0.0, bias="none")
    dropout = functools.partial(StandardDropout, 0.25)
    layer = Attention(config, 0.2, 0.2, 1e-5, dropout, jnp.float32, width=8)
    x_BTD, call = random(200, 1, 8), TokenContext(np.zeros((1, 1), int))
    variables = families.jit(layer.init)(jax.random.key(0), x_BTD, call)
    training = call.replace(train=True)
    plain_BTD = layer.apply(variables, x_BTD, call)
    dropped_BTD = layer.apply(variables, x_BTD, training, rngs={"dropout": jax.random.key(1)})
    # A lone token attends to itself with probability 1, which is dropped or scaled.
    is_dropped_B = np.all(dropped_BTD == 0, axis=(1, 2))
    assert 0.15 < is_dropped_B.mean() < 0.35
    scaled = dropped_BTD[~is_dropped_B], plain_BTD[~is_dropped_B] / 0.75
    np.testing.assert_allclose(*scaled, atol=1e-6)


# ---- the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_decoding_in_pieces_equals_the_full_pass(platform, monkeypatch):
    """Pieces with padding before and after tokens, of some rows by their numbers, then single
    tokens. A CPU reads 128 slots at a time, and none after the used ones."""
    rows, length, size = 3, 148, 152
    config = AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=H, window=100, softcap=0.9, bias="all"
    )
    layer = Attention(config, 0.5, 0.5, 1e-5, None, jnp.float32, width=8)
    x_BTD, whole = random(rows, length, 8), TokenContext(np.arange(length)[None])
    params = {"params": families.jit(layer.init)(jax.random.key(0), x_BTD, whole)["params"]}
    expected_BTD = np.asarray(families.jit(layer.apply)(params, x_BTD, whole))
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    done_B = np.zeros(rows, int)

    @families.jit
    def apply(cache, x_BTD, positions_BT, rows_B):
        call = TokenContext(positions_BT, cache=CacheView(size, rows_B=rows_B))
        return layer.apply(params | {"cache": cache}, x_BTD, call, mutable=["cache"])

    def step(cache, counts, width, rows_B=None, before=0):
        """Read the next tokens of each row, with padding before them, and check the outputs."""
        row_B = np.arange(rows) if rows_B is None else np.array(rows_B)
        place_T = np.arange(width) - before
        is_real = (place_T >= 0) & (place_T < np.array(counts)[:, None])
        positions = np.where(is_real, done_B[row_B][:, None] + place_T, -1)
        new = np.where(is_real[..., None], x_BTD[row_B[:, None], positions], 7.0)
        rows_B = None if rows_B is None else jnp.array(rows_B)
        out, state = apply(cache, np.float32(new), np.int32(positions), rows_B)
        expected = expected_BTD[row_B[:, None], positions]
        np.testing.assert_allclose(np.asarray(out)[is_real], expected[is_real], atol=2e-5)
        np.add.at(done_B, row_B, counts)
        return state["cache"]

    empty = TokenContext(np.zeros((1, 1), np.int32), cache=CacheView(size))
    cache = layer.init(jax.random.key(0), x_BTD[:, :1], empty)["cache"]
    if platform == "cpu":
        nan = {name: cache[name].at[..., 128:].set(np.nan) for name in kv_cache.KEYS_AND_VALUES}
        cache = {**cache, **nan}
    cache = step(cache, [100, 90, 5], width=101)
    cache = step(jax.tree.map(jnp.nan_to_num, cache), [30, 31, 0], width=101)
    cache = step(cache, [4, 2], width=6, rows_B=[2, 0], before=2)
    for counts, rows_B in [([1, 1, 1], None), ([1, 1], [1, 0]), ([0, 1, 1], None)]:
        cache = step(cache, counts, width=1, rows_B=rows_B)
        cache = step(cache, [0, 0, 0], width=1)  # padding changes nothing
    step(cache, [3, 6], width=6, rows_B=[1, 2])


# ---- rotary positions --------------------------------------------------------------------------


def test_rope_scaling():
    """Angles of position 1: linear scaling divides all, that of Llama 3 keeps the fast ones,
    divides the slow ones, and interpolates between."""
    x = np.eye(8, dtype=np.float32)[:4].reshape(4, 1, 1, 8)

    def angles(**scaling):
        config = AttentionConfig(rope_theta=1e4, rope_scaling=RopeScalingConfig(**scaling))
        y = rope(x, np.ones((4, 1), int), config)[:, 0, 0]
        return np.arctan2(np.diagonal(y[:, 4:]), np.diagonal(y[:, :4]))

    plain = np.array([1.0, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(angles(), plain, rtol=1e-4)
    np.testing.assert_allclose(angles(kind="linear", factor=5.0), plain / 5, rtol=1e-4)
    # Within 100 positions the pairs turn 15.9, 1.59, 0.159 and 0.0159 times.
    weight = (100 * 0.1 / (2 * np.pi) - 1) / 3
    expected = plain * np.array([1.0, weight + (1 - weight) / 8, 1 / 8, 1 / 8])
    llama3 = angles(kind="llama3", factor=8.0, original_context=100)
    np.testing.assert_allclose(llama3, expected, rtol=1e-4)


def test_rope_rotates_pairs():
    """By position * theta^(-2i/H); scores depend only on the difference of positions."""
    (q, k, _), plain, order = inputs(kv_heads=N), AttentionConfig(), np.arange(T)[None]
    x = np.float32([1, 1, 0, 0]) * np.ones((1, 3, 1, 1), np.float32)
    y = rope(x, np.array([[0, 1, 7]]), AttentionConfig(rope_theta=100.0))
    for row, t in zip(y[0, :, 0], (0, 1, 7), strict=True):
        expected = [np.cos(t), np.cos(t / 10), np.sin(t), np.sin(t / 10)]
        np.testing.assert_allclose(row, expected, atol=1e-6)
    scores = [
        np.einsum("btnh,bsnh->bnts", rope(q, order + shift, plain), rope(k, order + shift, plain))
        for shift in (0, 5)
    ]
    np.testing.assert_allclose(*scores, atol=1e-4)
    partial = rope(q, order, AttentionConfig(rope_fraction=4 / H))
    np.testing.assert_array_equal(partial[..., 4:], q[..., 4:])
    np.testing.assert_allclose(partial[..., :4], rope(q[..., :4], order, plain), atol=1e-6)
    assert rope(q.astype(jnp.bfloat16), order, plain).dtype == jnp.bfloat16
