"""Attention against full matrices: values, gradients, visited pairs, caches, rotary positions."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx.layers import attend, flops
from efx.layers.attention import rope
from efx.layers.config import AttentionConfig, RopeScalingConfig

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


def test_the_first_features_of_a_head_rotate():
    q, order, whole = inputs()[0], np.arange(T)[None], AttentionConfig()
    part = rope(q, order, AttentionConfig(rope_fraction=4 / H))
    np.testing.assert_array_equal(part[..., 4:], q[..., 4:])
    np.testing.assert_allclose(part[..., :4], rope(q[..., :4], order, whole), atol=1e-6)
