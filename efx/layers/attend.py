"""Causal attention as functions: over the tokens themselves, over a cache, over other tokens.

The kernel walks over chunks of queries and touches only the keys that a chunk may see, so masked
halves cost nothing; `spans` is the one place that decides which keys those are.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30
_MAX_CHUNKS = 8  # chunks are unrolled: more of them save FLOPs but cost compile time


def chunk_size(length, chunk=0):
    """Queries in a chunk; `chunk=0` picks at most 8 chunks of at least 64."""
    return chunk or max(64, -(-length // _MAX_CHUNKS))


def spans(length, chunk=0, window=0):
    """[(q_start, q_stop, k_start, k_stop)]: the keys that each chunk of queries visits."""
    step = chunk_size(length, chunk)
    result = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = max(0, start - window + 1) if window else 0
        result.append((start, stop, first, stop))
    return result


def attend(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    *,
    scale,
    chunk=0,
    window=0,
    softcap=0.0,
    positions_BT=None,
    segment_ids_BT=None,
    probs_fn: Callable | None = None,
):
    """Causal attention of T queries over the same T places of keys and values.

    Query t sees key s iff s <= t in order, and, where given, both lie in one segment and
    position(t) - position(s) < window. Works on routed subsequences as they are: these keep
    time order, so a difference of places never exceeds the difference of positions.

    Args:
      q_BTNH: queries; N = K*G heads.
      k_BSKH, v_BSKH: keys and values, S = T.
      scale: factor on the scores. softcap: scores <- softcap * tanh(scores / softcap), 0 = off.
      positions_BT: original positions, needed only with a window.
      segment_ids_BT: documents, or None.
      probs_fn: applied to the probabilities of each chunk, in order: probs_fn(p_BKGTS, q_start,
        k_start, allowed), the latter bool [B or 1, T, S].
    Returns: [B, T, N, H].
    """
    q_BKGTH = _split_heads(q_BTNH * scale, k_BSKH.shape[2])
    k_BKSH = jnp.transpose(k_BSKH, (0, 2, 1, 3))
    v_BKSH = jnp.transpose(v_BSKH, (0, 2, 1, 3))
    static = _Static(tuple(spans(q_BTNH.shape[1], chunk, window)), window, softcap)
    if probs_fn is None:
        out_BKGTH = _attend(static, q_BKGTH, k_BKSH, v_BKSH, positions_BT, segment_ids_BT)
    else:
        # Left to automatic differentiation, which keeps the probabilities.
        chunks = [
            _softmax_values(
                q_BKGTH[..., q0:q1, :],
                k_BKSH[..., k0:k1, :],
                v_BKSH[..., k0:k1, :],
                _allowed(static, (q0, q1, k0, k1), positions_BT, segment_ids_BT),
                softcap,
                probs_fn,
                (q0, k0),
            )
            for q0, q1, k0, k1 in static.spans
        ]
        out_BKGTH = jnp.concatenate(chunks, axis=3)
    return _join_heads(out_BKGTH)


def _split_heads(q_BTNH, kv_heads):
    """[B, T, N = K*G, H] -> [B, K, G, T, H]"""
    batch, length, num_heads, head_dim = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, num_heads // kv_heads, head_dim)
    return jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4))


def _join_heads(out_BKGTH):
    """[B, K, G, T, H] -> [B, T, N, H]"""
    batch, kv_heads, groups, length, head_dim = out_BKGTH.shape
    out_BTKGH = jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4))
    return out_BTKGH.reshape(batch, length, kv_heads * groups, head_dim)


class _Static(NamedTuple):
    """What `_attend` knows when it is traced."""

    spans: tuple
    window: int
    softcap: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q_BKGTH, k_BKSH, v_BKSH, positions_BT, segment_ids_BT):
    """`attend` on scaled queries, heads before time. Reverse mode only.

    The backward pass computes the probabilities again, chunk by chunk, from the scores and the log
    of their sums (Dao et al. 2022, arXiv 2205.14135), so no T x T array outlives its chunk.
    """
    return _attend_forward(static, q_BKGTH, k_BKSH, v_BKSH, positions_BT, segment_ids_BT)[0]


def _attend_forward(static, q_BKGTH, k_BKSH, v_BKSH, positions_BT, segment_ids_BT):
    chunks, log_sums = [], []
    for span in static.spans:
        q0, q1, k0, k1 = span
        scores_BKRS = _scores(static, span, q_BKGTH, k_BKSH, positions_BT, segment_ids_BT)
        top_BKR = jnp.max(scores_BKRS, axis=-1, keepdims=True)
        weights_BKRS = jnp.exp(scores_BKRS - top_BKR)
        sums_BKR = jnp.sum(weights_BKRS, axis=-1, keepdims=True)
        out_BKRH = _dot("BKRS,BKSH->BKRH", weights_BKRS.astype(v_BKSH.dtype), v_BKSH[..., k0:k1, :])
        out_BKRH = (out_BKRH / sums_BKR).astype(v_BKSH.dtype)
        chunks.append(_groups(out_BKRH, q_BKGTH))
        log_sums.append(top_BKR + jnp.log(sums_BKR))
    out_BKGTH = jnp.concatenate(chunks, axis=3)
    saved = q_BKGTH, k_BKSH, v_BKSH, positions_BT, segment_ids_BT, out_BKGTH, log_sums
    return out_BKGTH, saved


def _attend_backward(static, saved, d_out_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, positions_BT, segment_ids_BT, out_BKGTH, log_sums = saved
    dtype = q_BKGTH.dtype
    # The mean over keys of the gradient of the probabilities, by way of the output.
    mean_BKGT = jnp.sum(
        d_out_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32), axis=-1, keepdims=True
    )
    d_q = []
    # Gradients of keys and values are summed with H before S: XLA:CPU then multiplies a small
    # transposed matrix by a large one as it lies, which is much faster than the other way round.
    d_k_BKHS = jnp.zeros_like(k_BKSH, jnp.float32).swapaxes(2, 3)
    d_v_BKHS = d_k_BKHS
    for span, log_sums_BKR in reversed(list(zip(static.spans, log_sums, strict=True))):
        q0, q1, k0, k1 = span
        q_BKRH, d_out_BKRH = _rows(q_BKGTH[..., q0:q1, :]), _rows(d_out_BKGTH[..., q0:q1, :])
        scores_BKRS = _scores(static, span, q_BKGTH, k_BKSH, positions_BT, segment_ids_BT)
        probs_BKRS = jnp.exp(scores_BKRS - log_sums_BKR)
        d_probs_BKRS = _dot("BKRH,BKSH->BKRS", d_out_BKRH, v_BKSH[..., k0:k1, :])
        d_scores_BKRS = probs_BKRS * (d_probs_BKRS - _rows(mean_BKGT[..., q0:q1, :]))
        if static.softcap:
            inside = jnp.abs(scores_BKRS) <= static.softcap
            slope_BKRS = 1.0 - jnp.square(scores_BKRS / static.softcap)
            d_scores_BKRS = d_scores_BKRS * jnp.where(inside, slope_BKRS, 0.0)
        d_scores_BKRS = d_scores_BKRS.astype(dtype)
        d_q_BKRH = _dot("BKRS,BKSH->BKRH", d_scores_BKRS, k_BKSH[..., k0:k1, :])
        d_q.insert(0, _groups(d_q_BKRH.astype(dtype), q_BKGTH))
        d_k_BKHS = d_k_BKHS.at[..., k0:k1].add(
            _dot("BKHR,BKRS->BKHS", q_BKRH.swapaxes(2, 3), d_scores_BKRS)
        )
        d_v_BKHS = d_v_BKHS.at[..., k0:k1].add(
            _dot("BKHR,BKRS->BKHS", d_out_BKRH.swapaxes(2, 3), probs_BKRS.astype(dtype))
        )
    d_k_BKSH, d_v_BKSH = (d.swapaxes(2, 3).astype(dtype) for d in (d_k_BKHS, d_v_BKHS))
    return jnp.concatenate(d_q, axis=3), d_k_BKSH, d_v_BKSH, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(static, span, q_BKGTH, k_BKSH, positions_BT, segment_ids_BT):
    """Masked scores of a chunk of queries in float32, [B, K, R, S]."""
    q0, q1, k0, k1 = span
    scores_BKRS = _dot("BKRH,BKSH->BKRS", _rows(q_BKGTH[..., q0:q1, :]), k_BKSH[..., k0:k1, :])
    if static.softcap:
        scores_BKRS = static.softcap * jnp.tanh(scores_BKRS / static.softcap)
    allowed_BTS = _allowed(static, span, positions_BT, segment_ids_BT)
    scores_BKGTS = _groups(scores_BKRS, q_BKGTH)
    return _rows(jnp.where(allowed_BTS[:, None, None], scores_BKGTS, MASKED))


def _allowed(static, span, positions_BT, segment_ids_BT):
    """Which keys the queries of a chunk may see: bool [B or 1, T, S]."""
    q0, q1, k0, k1 = span
    allowed_BTS = (jnp.arange(k0, k1)[None, :] <= jnp.arange(q0, q1)[:, None])[None]
    if segment_ids_BT is not None:
        same = segment_ids_BT[:, q0:q1, None] == segment_ids_BT[:, None, k0:k1]
        allowed_BTS = allowed_BTS & same
    if static.window:
        gap = positions_BT[:, q0:q1, None] - positions_BT[:, None, k0:k1]
        allowed_BTS = allowed_BTS & (gap < static.window)
    return allowed_BTS


def _rows(x_BKGTH):
    """[B, K, G, T, ...] -> [B, K, R = G*T, ...]: queries that share keys are rows of one matrix."""
    batch, kv_heads, groups, length, *rest = x_BKGTH.shape
    return x_BKGTH.reshape(batch, kv_heads, groups * length, *rest)


def _groups(x_BKRH, q_BKGTH):
    return x_BKRH.reshape(*q_BKGTH.shape[:3], -1, x_BKRH.shape[-1])


def _dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


_CACHE_BLOCK = 128  # slots of a cache that are visited at a time


def attend_cache(
    q_BTNH,
    k_BKHS,
    v_BKSH,
    q_positions_BT,
    k_positions_BS,
    *,
    scale,
    window=0,
    softcap=0.0,
    probs_fn: Callable | None = None,
    used=None,
    rows_B=None,
):
    """Attention of new queries over cache slots, each slot with the position of its token.

    Query t sees slot s iff 0 <= position(s) <= position(t) (and inside the window). Keys lie [H, S]
    and values [S, H]: both products then read the cache along its last axis, as it lies.

    Args:
      used: how many slots are taken in the fullest row (may be traced): the slots after these are
        not read. None: all are read.
      rows_B: which rows of the cache the rows of q are; None: all, in order.
    """
    slots = k_BKHS.shape[3]
    q_BKGTH = _split_heads(q_BTNH * scale, k_BKHS.shape[1])

    def read(start, size):
        """Keys, values and which query may see which of so many slots from `start` on."""
        parts = [
            jax.lax.dynamic_slice_in_dim(part, start, size, axis) if size < slots else part
            for part, axis in ((k_BKHS, 3), (v_BKSH, 2), (k_positions_BS, 1))
        ]
        if rows_B is not None:
            parts = [part.at[rows_B].get(mode="clip") for part in parts]
        k_BKHC, v_BKCH, positions_BC = parts
        gap_BTC = q_positions_BT[:, :, None] - positions_BC[:, None, :]
        allowed_BTC = (gap_BTC >= 0) & (positions_BC[:, None, :] >= 0)
        if window:
            allowed_BTC = allowed_BTC & (gap_BTC < window)
        return jnp.swapaxes(k_BKHC, 2, 3), v_BKCH, allowed_BTC

    if used is None or probs_fn is not None or slots <= _CACHE_BLOCK:
        parts = read(0, slots)
        out_BKGTH = _softmax_values(q_BKGTH, *parts, softcap, probs_fn)
    else:
        out_BKGTH = _softmax_blocks(q_BKGTH, read, slots, used, softcap)
    return _join_heads(out_BKGTH)


def _softmax_blocks(q_BKGTH, read, slots, used, softcap):
    """`_softmax_values` over the first `used` slots, a block at a time, rescaling what has been
    summed whenever a larger score comes (Milakov and Gimelshein 2018, arXiv 1805.02867)."""

    def any_left(carry):
        return carry[0] * _CACHE_BLOCK < used

    def block(carry):
        i, top_BKGT, sum_BKGT, out_BKGTH = carry
        # The last block is moved back to end with the cache; what it has in common with the one
        # before counts once.
        start = jnp.minimum(i * _CACHE_BLOCK, slots - _CACHE_BLOCK)
        k_BKCH, v_BKCH, allowed_BTC = read(start, _CACHE_BLOCK)
        slot_C = start + jnp.arange(_CACHE_BLOCK)
        allowed_BTC = allowed_BTC & (slot_C >= i * _CACHE_BLOCK)[None, None]
        scores_BKGTC = _cache_scores(q_BKGTH, k_BKCH, allowed_BTC, softcap)
        new_BKGT = jnp.maximum(top_BKGT, jnp.max(scores_BKGTC, axis=-1))
        weights_BKGTC = jnp.exp(scores_BKGTC - new_BKGT[..., None])
        keep_BKGT = jnp.exp(top_BKGT - new_BKGT)
        values_BKGTH = jnp.einsum(
            "BKGTC,BKCH->BKGTH",
            weights_BKGTC.astype(v_BKCH.dtype),
            v_BKCH,
            preferred_element_type=jnp.float32,
        )
        sum_BKGT = sum_BKGT * keep_BKGT + jnp.sum(weights_BKGTC, axis=-1)
        return i + 1, new_BKGT, sum_BKGT, out_BKGTH * keep_BKGT[..., None] + values_BKGTH

    shape = q_BKGTH.shape[:-1]
    start = (
        jnp.int32(0),
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q_BKGTH.shape, jnp.float32),
    )
    _, _, sum_BKGT, out_BKGTH = jax.lax.while_loop(any_left, block, start)
    return (out_BKGTH / jnp.maximum(sum_BKGT, 1e-30)[..., None]).astype(q_BKGTH.dtype)


def _cache_scores(q_BKGTH, k_BKSH, allowed_BTS, softcap):
    scores_BKGTS = jnp.einsum(
        "BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32
    )
    if softcap:
        scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    return jnp.where(allowed_BTS[:, None, None], scores_BKGTS, MASKED)


def attend_context(
    q_BTNH, k_BSKH, v_BSKH, q_tokens, k_tokens, *, scale, window=0, softcap=0.0, probs_fn=None
):
    """Attention of T queries over S other places, each with its position and its document.

    A query sees a key of its own document whose position does not exceed its own (and lies inside
    the window). Every pair is computed; differentiated by JAX.
    """
    gap_BTS = q_tokens.positions_BT[:, :, None] - k_tokens.positions_BT[:, None, :]
    allowed_BTS = gap_BTS >= 0
    if window:
        allowed_BTS = allowed_BTS & (gap_BTS < window)
    if q_tokens.segment_ids_BT is not None:
        same_BTS = q_tokens.segment_ids_BT[:, :, None] == k_tokens.segment_ids_BT[:, None, :]
        allowed_BTS = allowed_BTS & same_BTS
    return attend_pairs(
        q_BTNH, k_BSKH, v_BSKH, allowed_BTS, scale=scale, softcap=softcap, probs_fn=probs_fn
    )


def attend_pairs(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, *, scale, softcap=0.0, probs_fn=None):
    """Attention of T queries over S places, where a bool [B or 1, T, S] says who sees whom."""
    q_BKGTH = _split_heads(q_BTNH * scale, k_BSKH.shape[2])
    k_BKSH, v_BKSH = (jnp.transpose(y, (0, 2, 1, 3)) for y in (k_BSKH, v_BSKH))
    out_BKGTH = _softmax_values(q_BKGTH, k_BKSH, v_BKSH, allowed_BTS, softcap, probs_fn)
    return _join_heads(out_BKGTH)


def _softmax_values(q_BKGTH, k_BKSH, v_BKSH, allowed_BTS, softcap, probs_fn, starts=(0, 0)):
    scores_BKGTS = _cache_scores(q_BKGTH, k_BKSH, allowed_BTS, softcap)
    probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    if probs_fn is not None:
        probs_BKGTS = probs_fn(probs_BKGTS, *starts, allowed_BTS)
    return jnp.einsum("BKGTS,BKSH->BKGTH", probs_BKGTS.astype(v_BKSH.dtype), v_BKSH)
