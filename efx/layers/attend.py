"""Causal attention in plain XLA: over the same tokens, over a KV cache, over other tokens.

`attend` computes scores only for keys that a chunk of queries may see, so the masked half costs
almost nothing; `spans` decides which keys these are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import sharding
from efx.layers import kernels
from efx.layers.dropout import ProbsDropout
from efx.layers.linear import row_padding

MASKED = -1e30
_MAX_CHUNKS = 8  # chunks are unrolled: more of them save FLOPs but cost compile time
_BLOCK = 256  # most queries whose scores are in memory at once


# ---- which keys a query sees -------------------------------------------------------------------


class Span(NamedTuple):
    """Queries [q_start, q_stop), in blocks of `block` queries with a slice of `keys` keys each.

    The slice is [0, keys), or with `slides` it ends with the last query of its block. In the
    methods `start` is the first query of a block, an int or traced.
    """

    q_start: int
    q_stop: int
    block: int
    keys: int
    slides: bool = False

    @property
    def pairs(self):
        """Number of (query, key) pairs whose scores are computed."""
        return (self.q_stop - self.q_start) * self.keys

    @property
    def is_one_block(self):
        return self.q_stop - self.q_start == self.block

    def first_key(self, start):
        if not self.slides:
            return 0
        first = start + self.block - self.keys
        return max(0, first) if isinstance(start, int) else jnp.maximum(0, first)

    def slice_queries(self, x_BKGTH, start):
        return _slice(x_BKGTH, start, self.block, axis=3)

    def slice_keys(self, x_BKSH, start):
        return _slice(x_BKSH, self.first_key(start), self.keys, axis=2)


def _slice(x, start, size, axis):
    if isinstance(start, int):
        return jax.lax.slice_in_dim(x, start, start + size, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def spans(length, chunk=0, window=0):
    """The `Span`s of a sequence.

    A short sequence is cut into chunks of `chunk` queries (0: at most 8 chunks of at least 64),
    each with its own keys. In a long one a chunk is a loop over blocks, so that memory for scores
    grows with the length and not with its square; with a window each block has its own keys.
    """
    step = chunk or max(64, -(-length // _MAX_CHUNKS))
    if step > _BLOCK and not chunk:
        step = length if window else -(-step // _BLOCK) * _BLOCK
    result = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        whole = start + (stop - start) // _BLOCK * _BLOCK  # end of the last whole block
        for q_start, q_stop in ((start, whole), (whole, stop)):
            block = min(_BLOCK, q_stop - q_start)
            keys = min(stop, block + window - 1) if window else stop
            if block:
                result.append(Span(q_start, q_stop, block, keys, bool(window)))
    return tuple(result)


def first_visible(length, window=0, positions_BT=None, segment_ids_BT=None):
    """int32 [B or 1, T], the index of the first key that each query sees; None: 0 for all.

    Every mask of `attend` is an interval of keys that ends with the query, because the tokens of a
    document are adjacent and their positions ascend, in packed rows and in routed subsequences.

    Args:
      window: positions that a query looks back, its own included; 0: all.
      positions_BT: original positions; None: 0, 1, 2, ...
      segment_ids_BT: documents, or None.
    """
    if not window and segment_ids_BT is None:
        return None
    index_T = jnp.arange(length, dtype=jnp.int32)
    if positions_BT is None:
        positions_BT = index_T[None]
    step_BT = jnp.diff(positions_BT, axis=1, prepend=positions_BT[:, :1])
    # Unused slots have negative positions and see only each other.
    starts_BT = (positions_BT < 0) != jnp.roll(positions_BT < 0, 1, axis=1)
    if segment_ids_BT is not None:
        change_BT = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1])
        starts_BT = starts_BT | (change_BT != 0)
    start_BT = jax.lax.cummax(jnp.where(starts_BT, index_T[None], 0), axis=1)
    if not window:
        return start_BT
    # Ascending along the whole row. Steps are clipped to the window, or the sum could overflow.
    ascending_BT = jnp.cumsum(jnp.where(starts_BT, 0, jnp.clip(step_BT, 0, window)), axis=1)
    search = functools.partial(jnp.searchsorted, side="right", method="scan_unrolled")
    first_BT = jax.vmap(lambda ascending_T: search(ascending_T, ascending_T - window))(ascending_BT)
    return jnp.maximum(first_BT.astype(jnp.int32), start_BT)


# ---- attention over the same tokens ------------------------------------------------------------


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
    has_gaps=False,
    kernel="auto",
    probs_fn: ProbsDropout | None = None,
):
    """Causal attention of T queries over the keys and values of the same T tokens.

    Query t sees key s iff s <= t, and, where given, both are in one document and
    position(t) - position(s) < window. Routed subsequences keep time order, so they need no other
    mask.

    Args:
      q_BTNH: queries; N = K*G heads. k_BSKH, v_BSKH: keys and values, S = T.
      scale: factor on the scores.
      chunk: see `spans`.
      softcap: scores <- softcap * tanh(scores / softcap); 0: off.
      positions_BT: original positions, needed only with a window.
      segment_ids_BT: documents, or None.
      has_gaps: whether positions are not consecutive.
      kernel: `config.model.attention.kernel`, see `kernels.choose`.
      probs_fn: changes the probabilities, a block of queries at a time.
    Returns: [B, T, N, H].
    """
    _, length, num_heads, head_dim = q_BTNH.shape
    is_sharded, is_packed = sharding.ways("length") > 1, segment_ids_BT is not None
    if kernel != "xla" and (kernel != "auto" or sharding.platform() != "cpu"):
        shape = length, num_heads, k_BSKH.shape[2], head_dim, q_BTNH.dtype
        mask = window, softcap, has_gaps, is_packed, is_sharded, probs_fn is not None
        case = kernels.Case(*shape, *mask)
        chosen = kernels.choose(kernel, case)
        if chosen is not None:
            return chosen.run(case, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, scale)
    q_BTNH = q_BTNH * scale
    first_BT = first_visible(length, window, positions_BT, segment_ids_BT)
    if is_sharded and probs_fn is None and _shards_evenly(q_BTNH, k_BSKH):
        return _attend_sharded(q_BTNH, k_BSKH, v_BSKH, first_BT, chunk, softcap)
    arrays = _heads_first(q_BTNH, k_BSKH, v_BSKH)
    sequence = spans(length, chunk, window)
    if probs_fn is not None:
        return _heads_last(_attend_with_probs_fn(sequence, softcap, *arrays, first_BT, probs_fn))
    return _heads_last(_attend_blocks(sequence, softcap, *arrays, first_BT, 0))


def _shards_evenly(q_BTNH, k_BSKH):
    """Whether the mesh splits all axes evenly, and heads of queries like those of keys. Otherwise,
    as for the single row of initialisation, the partitioner decides."""
    names = "batch", "length", "act_heads", "act_kv_heads"
    sizes = *q_BTNH.shape[:3], k_BSKH.shape[2]
    q_axes, k_axes = (nn.logical_to_mesh_axes((name,)) for name in names[2:])
    return q_axes == k_axes and all(
        size % sharding.ways(name) == 0 for size, name in zip(sizes, names, strict=True)
    )


def _attend_sharded(q_BTNH, k_BSKH, v_BSKH, first_BT, chunk, softcap):
    """`attend` for sequences that are sharded over devices.

    Each device holds its own queries and all keys and values, and scores all of these, even the
    keys after its queries.
    """
    length, shards = q_BTNH.shape[1], sharding.ways("length")
    if first_BT is None:
        first_BT = jnp.zeros((1, length), jnp.int32)
    shard_length = length // shards
    shard_spans = tuple(span._replace(keys=length) for span in spans(shard_length, chunk))

    def attend_shard(q_BTNH, k_BSKH, v_BSKH, first_BT, q_offset_1):
        arrays = _heads_first(q_BTNH, k_BSKH, v_BSKH)
        return _heads_last(_attend_blocks(shard_spans, softcap, *arrays, first_BT, q_offset_1[0]))

    q_axes = "batch", "length", "act_heads", None
    kv_axes = "batch", None, "act_kv_heads", None
    first_axes = "batch" if len(first_BT) > 1 else None, "length"
    specs = tuple(map(nn.logical_to_mesh_axes, (q_axes, kv_axes, kv_axes, first_axes, ("length",))))
    q_offsets = jnp.arange(0, length, shard_length, dtype=jnp.int32)
    return jax.shard_map(attend_shard, in_specs=specs, out_specs=specs[0], check_vma=False)(
        q_BTNH, k_BSKH, v_BSKH, first_BT, q_offsets
    )


def _heads_first(q_BTNH, k_BSKH, v_BSKH):
    """(q [B, K, G, T, H], k [B, K, S, H], v [B, K, S, H]); N = K*G."""
    return _group_heads(q_BTNH, k_BSKH.shape[2]), k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)


def _group_heads(q_BTNH, num_kv_heads):
    """[B, T, N, H] -> [B, K, G, T, H]"""
    batch, length, _, head_dim = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
    return jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4))


def _heads_last(out_BKGTH):
    """[B, K, G, T, H] -> [B, T, N, H]"""
    out_BTKGH = jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4))
    return out_BTKGH.reshape(*out_BTKGH.shape[:2], -1, out_BTKGH.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_blocks(sequence, softcap, q_BKGTH, k_BKSH, v_BKSH, first_BT, q_offset):
    """`attend` of scaled queries, the first of which has index `q_offset`. Reverse mode only.

    The backward pass recomputes the probabilities block by block from the scores and the logarithm
    of their sums (Dao et al. 2022, arXiv 2205.14135), so no T x T array outlives its block.

    Args:
      sequence: tuple of `Span`s. first_BT: see `first_visible`.
    """
    return _attend_forward(sequence, softcap, q_BKGTH, k_BKSH, v_BKSH, first_BT, q_offset)[0]


def _attend_forward(sequence, softcap, q_BKGTH, k_BKSH, v_BKSH, first_BT, q_offset):
    dtype = v_BKSH.dtype

    def block(span, _, start):
        q_BKGCH = span.slice_queries(q_BKGTH, start)
        keys_BKSH, values_BKSH = (span.slice_keys(y, start) for y in (k_BKSH, v_BKSH))
        allowed_BCS = _allowed(span, start, first_BT, q_offset)
        scores_BKGCS = _scores(q_BKGCH, keys_BKSH, allowed_BCS, softcap)
        max_BKGC1 = jnp.max(scores_BKGCS, axis=-1, keepdims=True)
        weights_BKGCS = jnp.exp(scores_BKGCS - max_BKGC1)
        sum_BKGC1 = jnp.sum(weights_BKGCS, axis=-1, keepdims=True)
        out_BKGCH = (
            _einsum("BKGCS,BKSH->BKGCH", weights_BKGCS.astype(dtype), values_BKSH) / sum_BKGC1
        )
        return None, (out_BKGCH.astype(dtype), max_BKGC1 + jnp.log(sum_BKGC1))

    results = []
    for span in sequence:
        _, blocks = _scan_blocks(span, block, None)
        results.append(tuple(map(_join_blocks, blocks)))
    out_BKGTH, log_sum_BKGT1 = (jnp.concatenate(y, axis=3) for y in zip(*results, strict=True))
    return out_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, first_BT, q_offset, out_BKGTH, log_sum_BKGT1)


def _attend_backward(sequence, softcap, residuals, d_out_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, first_BT, q_offset, out_BKGTH, log_sum_BKGT1 = residuals
    dtype = q_BKGTH.dtype
    # Mean over keys of the gradient of the probabilities, computed from the output.
    products_BKGTH = d_out_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32)
    mean_BKGT1 = jnp.sum(products_BKGTH, axis=-1, keepdims=True)

    def block(span, d_kv, start):
        q_BKGCH, d_out_BKGCH, log_sum_BKGC1, mean_BKGC1 = (
            span.slice_queries(y, start) for y in (q_BKGTH, d_out_BKGTH, log_sum_BKGT1, mean_BKGT1)
        )
        keys_BKSH, values_BKSH = (span.slice_keys(y, start) for y in (k_BKSH, v_BKSH))
        allowed_BCS = _allowed(span, start, first_BT, q_offset)
        scores_BKGCS = _scores(q_BKGCH, keys_BKSH, allowed_BCS, softcap)
        probs_BKGCS = jnp.exp(scores_BKGCS - log_sum_BKGC1)
        d_probs_BKGCS = _einsum("BKGCH,BKSH->BKGCS", d_out_BKGCH, values_BKSH)
        d_scores_BKGCS = probs_BKGCS * (d_probs_BKGCS - mean_BKGC1)
        if softcap:
            # Not of the scores that are MASKED, whose square overflows.
            slope_BKGCS = 1.0 - jnp.square(scores_BKGCS / softcap)
            is_scored_BKGCS = jnp.abs(scores_BKGCS) <= softcap
            d_scores_BKGCS = d_scores_BKGCS * jnp.where(is_scored_BKGCS, slope_BKGCS, 0.0)
        d_scores_BKGCS = d_scores_BKGCS.astype(dtype)
        d_q_BKGCH = _einsum("BKGCS,BKSH->BKGCH", d_scores_BKGCS, keys_BKSH)
        d_k_BKHS = _d_keys(q_BKGCH, d_scores_BKGCS)
        d_v_BKHS = _d_keys(d_out_BKGCH, probs_BKGCS.astype(dtype))
        d_kv = tuple(
            _add_at(total, span.first_key(start), new)
            for total, new in zip(d_kv, (d_k_BKHS, d_v_BKHS), strict=True)
        )
        return d_kv, d_q_BKGCH.astype(dtype)

    d_q = []
    zeros_BKHS = jnp.zeros_like(k_BKSH, jnp.float32).swapaxes(2, 3)
    d_kv = (zeros_BKHS, zeros_BKHS)
    for span in reversed(sequence):
        d_kv, blocks = _scan_blocks(span, block, d_kv)
        d_q.insert(0, _join_blocks(blocks))
    d_k_BKSH, d_v_BKSH = (d.swapaxes(2, 3).astype(dtype) for d in d_kv)
    return jnp.concatenate(d_q, axis=3), d_k_BKSH, d_v_BKSH, None, None


_attend_blocks.defvjp(_attend_forward, _attend_backward)


def _d_keys(x_BKGCH, y_BKGCS):
    """Gradients of keys or values. With H before S, XLA:CPU transposes the small factor and not
    the large one, which is much faster."""
    batch, kv_heads, groups, queries, head_dim = x_BKGCH.shape
    x_BKRH = x_BKGCH.reshape(batch, kv_heads, groups * queries, head_dim)
    y_BKRS = y_BKGCS.reshape(batch, kv_heads, groups * queries, -1)
    return _einsum("BKHR,BKRS->BKHS", x_BKRH.swapaxes(2, 3), y_BKRS)


def _attend_with_probs_fn(sequence, softcap, q_BKGTH, k_BKSH, v_BKSH, first_BT, probs_fn):
    """`_attend_blocks` with a `ProbsDropout`, differentiated by JAX. The backward pass recomputes
    each block, so here too no T x T array outlives its block."""

    def block(span, _, start):
        # A loop separates forward and backward pass by itself.
        @functools.partial(jax.checkpoint, prevent_cse=span.is_one_block)
        def recomputed(q_BKGTH, k_BKSH, v_BKSH):
            q_BKGCH = span.slice_queries(q_BKGTH, start)
            k_BKSH, v_BKSH = (span.slice_keys(y, start) for y in (k_BKSH, v_BKSH))
            allowed_BCS, starts = _allowed(span, start, first_BT), (start, span.first_key(start))
            return _softmax_values(q_BKGCH, k_BKSH, v_BKSH, allowed_BCS, softcap, probs_fn, starts)

        return None, recomputed(q_BKGTH, k_BKSH, v_BKSH)

    results = []
    for span in sequence:
        _, (blocks, seen) = _scan_blocks(span, block, None)
        results.append(_join_blocks(blocks))
        probs_fn.block_outputs.append(seen)
    return jnp.concatenate(results, axis=3)


def _scan_blocks(span, block, carry):
    """(carry, stacked outputs) of `block(span, carry, start)` -> (carry, output) over the blocks
    of a span; without a loop if there is one block."""
    if span.is_one_block:
        carry, output = block(span, carry, span.q_start)
        return carry, jax.tree.map(lambda y: y[None], output)
    starts = jnp.arange(span.q_start, span.q_stop, span.block, dtype=jnp.int32)
    return jax.lax.scan(functools.partial(block, span), carry, starts)


def _join_blocks(blocks):
    """[blocks, B, K, G, C, ...] -> [B, K, G, T, ...]"""
    blocks = jnp.moveaxis(blocks, 0, 3)
    return blocks.reshape(*blocks.shape[:3], -1, blocks.shape[-1])


def _add_at(total_BKHS, start, new_BKHC):
    """total with `new` added from key `start` on. Not by `.at[...]`: within a `shard_map` its
    empty array of indices crashes the partitioner of jaxlib 0.11.2."""
    old_BKHC = jax.lax.dynamic_slice_in_dim(total_BKHS, start, new_BKHC.shape[3], axis=3)
    return jax.lax.dynamic_update_slice_in_dim(total_BKHS, old_BKHC + new_BKHC, start, axis=3)


def _allowed(span, start, first_BT, q_offset=0):
    """bool [B or 1, C, S]: the keys that each query of a block may see."""
    q_C1 = q_offset + start + jnp.arange(span.block)[:, None]
    k_1S = span.first_key(start) + jnp.arange(span.keys)[None]
    allowed_BCS = (k_1S <= q_C1)[None]
    if first_BT is None:
        return allowed_BCS
    first_BC = _slice(first_BT, start, span.block, axis=1)
    return allowed_BCS & (k_1S[None] >= first_BC[..., None])


def _scores(q_BKGTH, k_BKSH, allowed_BTS, softcap):
    """Masked scores of scaled queries, float32 [B, K, G, T, S]."""
    scores_BKGTS = _einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH)
    if softcap:
        scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    return jnp.where(allowed_BTS[:, None, None], scores_BKGTS, MASKED)


def _einsum(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _softmax_values(q_BKGTH, k_BKSH, v_BKSH, allowed_BTS, softcap, probs_fn, starts=(0, 0)):
    """(values [B, K, G, T, H], the second result of `probs_fn` or None)."""
    probs_BKGTS = jax.nn.softmax(_scores(q_BKGTH, k_BKSH, allowed_BTS, softcap), axis=-1)
    seen = None
    if probs_fn is not None:
        probs_BKGTS, seen = probs_fn(probs_BKGTS, *starts, allowed_BTS)
    return jnp.einsum("BKGTS,BKSH->BKGTH", probs_BKGTS.astype(v_BKSH.dtype), v_BKSH), seen


# ---- attention over a cache --------------------------------------------------------------------

_CACHE_BLOCK = 128  # cache slots that a CPU reads at a time


def attend_cache(
    q_BTNH,
    positions_BT,
    k_BKHS,
    v_BKHS,
    k_positions_BS,
    *,
    scale,
    num_used,
    window=0,
    softcap=0.0,
    probs_fn: ProbsDropout | None = None,
    pending=None,
    rows_B=None,
):
    """Attention of new queries over cache slots, each with the position of its token.

    Query t sees slot s iff 0 <= position(s) <= position(t) (and within the window). Keys and values
    are [H, S], because a TPU pads the last axis to 128.

    Args:
      num_used: number of used slots of the fullest row (may be traced); later slots are not read.
      pending: keys and values [B, S, K, H] and positions [B, S] that are not stored in slots yet.
      rows_B: row of the cache of each row of q; None: all, in order.
    """
    slots, queries = k_BKHS.shape[3], q_BTNH.shape[1]
    padding = 0 if probs_fn is not None else row_padding(queries)
    if padding:
        q_BTNH = jnp.pad(q_BTNH, ((0, 0), (0, padding), (0, 0), (0, 0)))
        positions_BT = jnp.pad(positions_BT, ((0, 0), (0, padding)), mode="edge")
    q_BKGTH = _group_heads(q_BTNH * scale, k_BKHS.shape[1])

    def rows(x):
        return x if rows_B is None else x.at[rows_B].get(mode="clip")

    def allowed(positions_BC):
        distance_BTC = positions_BT[:, :, None] - positions_BC[:, None, :]
        allowed_BTC = (distance_BTC >= 0) & (positions_BC[:, None, :] >= 0)
        return allowed_BTC & (distance_BTC < window) if window else allowed_BTC

    def read_slots(start, size):
        k_BKHC, v_BKHC, positions_BC = (
            rows(jax.lax.dynamic_slice_in_dim(x, start, size, axis) if size < slots else x)
            for x, axis in ((k_BKHS, 3), (v_BKHS, 3), (k_positions_BS, 1))
        )
        return k_BKHC.swapaxes(2, 3), v_BKHC.swapaxes(2, 3), allowed(positions_BC)

    if probs_fn is not None:
        out_BKGTH, _ = _softmax_values(q_BKGTH, *read_slots(0, slots), softcap, probs_fn)
        return _heads_last(out_BKGTH)

    zeros_BKGTH = jnp.zeros(q_BKGTH.shape, jnp.float32)
    zeros_BKGT = zeros_BKGTH[..., 0]
    state = zeros_BKGT + MASKED, zeros_BKGT, zeros_BKGTH
    if pending is not None:
        k_BCKH, v_BCKH, positions_BC = map(rows, pending)
        keys_values = k_BCKH.swapaxes(1, 2), v_BCKH.swapaxes(1, 2)
        state = _update_softmax(state, q_BKGTH, *keys_values, allowed(positions_BC), softcap)

    # A GPU reads all slots for one query at once, because each turn of a loop waits for the host.
    platform = sharding.platform()
    size = _CACHE_BLOCK if platform == "cpu" else 4 * _CACHE_BLOCK
    if slots <= size or (platform == "gpu" and queries == 1):
        state = _update_softmax(state, q_BKGTH, *read_slots(0, slots), softcap)
    else:

        def is_unfinished(carry):
            return carry[0] * size < num_used

        def read_block(carry):
            i, *state = carry
            # The last block ends with the cache; slots that the one before has read are masked.
            start = jnp.minimum(i * size, slots - size)
            k_BKCH, v_BKCH, allowed_BTC = read_slots(start, size)
            is_new_C = start + jnp.arange(size) >= i * size
            allowed_BTC = allowed_BTC & is_new_C[None, None]
            return i + 1, *_update_softmax(state, q_BKGTH, k_BKCH, v_BKCH, allowed_BTC, softcap)

        _, *state = jax.lax.while_loop(is_unfinished, read_block, (jnp.int32(0), *state))
    _, sum_BKGT, out_BKGTH = state
    out_BKGTH = out_BKGTH / jnp.maximum(sum_BKGT, 1e-30)[..., None]
    return _heads_last(out_BKGTH)[:, :queries].astype(q_BTNH.dtype)


def _update_softmax(state, q_BKGTH, k_BKCH, v_BKCH, allowed_BTC, softcap):
    """Softmax over more keys and values (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Args:
      state: float32 maximum of the scores, sum of the weights exp(score - maximum), and sum of the
        weights times values.
    """
    old_max_BKGT, sum_BKGT, out_BKGTH = state
    scores_BKGTC = _scores(q_BKGTH, k_BKCH, allowed_BTC, softcap)
    max_BKGT = jnp.maximum(old_max_BKGT, jnp.max(scores_BKGTC, axis=-1))
    weights_BKGTC = jnp.exp(scores_BKGTC - max_BKGT[..., None])
    rescale_BKGT = jnp.exp(old_max_BKGT - max_BKGT)
    values_BKGTH = _einsum("BKGTC,BKCH->BKGTH", weights_BKGTC.astype(v_BKCH.dtype), v_BKCH)
    sum_BKGT = sum_BKGT * rescale_BKGT + jnp.sum(weights_BKGTC, axis=-1)
    return max_BKGT, sum_BKGT, out_BKGTH * rescale_BKGT[..., None] + values_BKGTH


# ---- attention over other tokens ---------------------------------------------------------------


def attend_context(
    q_BTNH, k_BSKH, v_BSKH, call, key_call, *, scale, window=0, softcap=0.0, probs_fn=None
):
    """Attention of the tokens of `call` over those of `key_call`.

    A query sees keys of its own document up to its own position (and within the window). Scores of
    all pairs are computed; differentiated by JAX.
    """
    distance_BTS = call.positions_BT[:, :, None] - key_call.positions_BT[:, None, :]
    allowed_BTS = distance_BTS >= 0
    if window:
        allowed_BTS = allowed_BTS & (distance_BTS < window)
    if call.segment_ids_BT is not None:
        same_BTS = call.segment_ids_BT[:, :, None] == key_call.segment_ids_BT[:, None, :]
        allowed_BTS = allowed_BTS & same_BTS
    return attend_masked(
        q_BTNH, k_BSKH, v_BSKH, allowed_BTS, scale=scale, softcap=softcap, probs_fn=probs_fn
    )


def attend_masked(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, *, scale, softcap=0.0, probs_fn=None):
    """Attention of T queries over S keys with a mask, bool [B or 1, T, S]."""
    arrays = _heads_first(q_BTNH * scale, k_BSKH, v_BSKH)
    out_BKGTH, seen = _softmax_values(*arrays, allowed_BTS, softcap, probs_fn)
    if probs_fn is not None:
        probs_fn.block_outputs.append(jax.tree.map(lambda y: y[None], seen))
    return _heads_last(out_BKGTH)
