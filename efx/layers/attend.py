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
      positions_BT: original positions, read only with a window; None: 0, 1, 2, ...
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
    if not window:
        positions_BT = None
    elif positions_BT is None:
        positions_BT = jnp.arange(length)[None]
    q_BKGTH = _group_heads(q_BTNH * scale, k_BSKH.shape[2])
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    arrays = q_BKGTH, k_BKSH, v_BKSH, (positions_BT, segment_ids_BT)
    sequence = spans(length, chunk, window)
    if probs_fn is not None:
        out_BKGTH = _attend_with_probs_fn(sequence, window, softcap, *arrays, probs_fn)
    elif is_sharded and _shards_evenly(k_BKSH):
        out_BKGTH = _attend_sharded(chunk, window, softcap, *arrays)
    else:
        out_BKGTH = _attend_blocks(sequence, window, softcap, *arrays, 0)
    return _heads_last(out_BKGTH)


class Span(NamedTuple):
    """Queries [start, stop), in blocks of `block` queries with a slice of `keys` keys each.

    The slice starts with key 0, or with `slides` it ends with the last query of its block.
    """

    start: int
    stop: int
    block: int
    keys: int
    slides: bool = False


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
    for chunk_start in range(0, length, step):
        chunk_stop = min(chunk_start + step, length)
        last = chunk_stop - (chunk_stop - chunk_start) % _BLOCK  # start of a last, shorter block
        for start, stop in ((chunk_start, last), (last, chunk_stop)):
            block = min(_BLOCK, stop - start)
            keys = min(chunk_stop, block + window - 1) if window else chunk_stop
            if block:
                result.append(Span(start, stop, block, keys, bool(window)))
    return tuple(result)


def _shards_evenly(k_BKSH):
    """Whether the mesh splits all axes evenly, and heads of queries like those of keys. Otherwise,
    as for the single row of initialisation, the partitioner decides."""
    q_axes, kv_axes = (nn.logical_to_mesh_axes((name,)) for name in ("act_heads", "act_kv_heads"))
    batch, kv_heads, length, _ = k_BKSH.shape
    sizes = {"batch": batch, "length": length, "act_kv_heads": kv_heads}
    is_even = all(size % sharding.ways(name) == 0 for name, size in sizes.items())
    return is_even and q_axes == kv_axes


def _attend_sharded(chunk, window, softcap, q_BKGTH, k_BKSH, v_BKSH, tokens):
    """`_attend_blocks` for sequences that are sharded over devices.

    Each device holds its own queries and all keys and values, and scores all of these, even the
    keys after its queries.
    """
    batch, _, length, _ = k_BKSH.shape
    shard_length = length // sharding.ways("length")
    sequence = tuple(span._replace(keys=length) for span in spans(shard_length, chunk))
    tokens = jax.tree.map(lambda y: jnp.broadcast_to(y, (batch, length)), tokens)

    def attend_shard(q_BKGTH, k_BKSH, v_BKSH, tokens, offset_1):
        arrays = q_BKGTH, k_BKSH, v_BKSH
        return _attend_blocks(sequence, window, softcap, *arrays, tokens, offset_1[0])

    q_spec = nn.logical_to_mesh_axes(("batch", "act_kv_heads", None, "length"))
    kv_spec = nn.logical_to_mesh_axes(("batch", "act_kv_heads"))
    tokens_spec, offset_spec = map(nn.logical_to_mesh_axes, (("batch",), ("length",)))
    specs = q_spec, kv_spec, kv_spec, tokens_spec, offset_spec
    offsets = jnp.arange(0, length, shard_length, dtype=jnp.int32)
    return jax.shard_map(attend_shard, in_specs=specs, out_specs=q_spec, check_vma=False)(
        q_BKGTH, k_BKSH, v_BKSH, tokens, offsets
    )


def _group_heads(q_BTNH, num_kv_heads):
    """[B, T, N, H] -> [B, K, G, T, H]; N = K*G."""
    batch, length, _, head_dim = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
    return jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4))


def _heads_last(out_BKGTH):
    """[B, K, G, T, H] -> [B, T, N, H]"""
    out_BTKGH = jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4))
    return out_BTKGH.reshape(*out_BTKGH.shape[:2], -1, out_BTKGH.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend_blocks(sequence, window, softcap, q_BKGTH, k_BKSH, v_BKSH, tokens, q_offset):
    """`attend` of scaled queries, the first of which has index `q_offset`. Reverse mode only.

    The backward pass recomputes the probabilities block by block from the scores and the logarithm
    of their sums (Dao et al. 2022, arXiv 2205.14135), so no T x T array outlives its block.

    Args:
      sequence: tuple of `Span`s. tokens: see `_allowed`.
    """
    arrays = q_BKGTH, k_BKSH, v_BKSH
    return _attend_forward(sequence, window, softcap, *arrays, tokens, q_offset)[0]


def _attend_forward(sequence, window, softcap, q_BKGTH, k_BKSH, v_BKSH, tokens, q_offset):
    dtype = v_BKSH.dtype

    def block(_, start, first_key, allowed_BCS, q_BKGCH, k_BKSH, v_BKSH):
        scores_BKGCS = _scores(q_BKGCH, k_BKSH, allowed_BCS, softcap)
        max_BKGC1 = jnp.max(scores_BKGCS, axis=-1, keepdims=True)
        weights_BKGCS = jnp.exp(scores_BKGCS - max_BKGC1)
        sum_BKGC1 = jnp.sum(weights_BKGCS, axis=-1, keepdims=True)
        values_BKGCH = _einsum("BKGCS,BKSH->BKGCH", weights_BKGCS.astype(dtype), v_BKSH)
        return None, ((values_BKGCH / sum_BKGC1).astype(dtype), max_BKGC1 + jnp.log(sum_BKGC1))

    outputs, log_sums = [], []
    for span in sequence:
        slices = (q_BKGTH,), (k_BKSH, v_BKSH), window, tokens, q_offset
        _, (output, log_sum) = _scan_blocks(span, block, None, *slices)
        outputs.append(output)
        log_sums.append(log_sum)
    out_BKGTH, log_sum_BKGT1 = _join_blocks(outputs), _join_blocks(log_sums)
    return out_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, tokens, q_offset, out_BKGTH, log_sum_BKGT1)


def _attend_backward(sequence, window, softcap, residuals, d_out_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, tokens, q_offset, out_BKGTH, log_sum_BKGT1 = residuals
    dtype = q_BKGTH.dtype
    # Mean over keys of the gradient of the probabilities, computed from the output.
    products_BKGTH = d_out_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32)
    mean_BKGT1 = jnp.sum(products_BKGTH, axis=-1, keepdims=True)

    def block(d_kv, start, first_key, allowed_BCS, *slices):
        q_BKGCH, d_out_BKGCH, log_sum_BKGC1, mean_BKGC1, k_BKSH, v_BKSH = slices
        scores_BKGCS = _scores(q_BKGCH, k_BKSH, allowed_BCS, softcap)
        probs_BKGCS = jnp.exp(scores_BKGCS - log_sum_BKGC1)
        d_probs_BKGCS = _einsum("BKGCH,BKSH->BKGCS", d_out_BKGCH, v_BKSH)
        d_scores_BKGCS = probs_BKGCS * (d_probs_BKGCS - mean_BKGC1)
        if softcap:
            # Not of the scores that are MASKED, whose square overflows.
            slope_BKGCS = 1.0 - jnp.square(scores_BKGCS / softcap)
            is_scored_BKGCS = jnp.abs(scores_BKGCS) <= softcap
            d_scores_BKGCS = d_scores_BKGCS * jnp.where(is_scored_BKGCS, slope_BKGCS, 0.0)
        d_scores_BKGCS = d_scores_BKGCS.astype(dtype)
        d_q_BKGCH = _einsum("BKGCS,BKSH->BKGCH", d_scores_BKGCS, k_BKSH)
        d_k_BKHS, d_v_BKHS = d_kv
        d_k_BKHS = _add_product(d_k_BKHS, first_key, q_BKGCH, d_scores_BKGCS)
        d_v_BKHS = _add_product(d_v_BKHS, first_key, d_out_BKGCH, probs_BKGCS.astype(dtype))
        return (d_k_BKHS, d_v_BKHS), d_q_BKGCH.astype(dtype)

    d_q = []
    zeros_BKHS = jnp.zeros_like(k_BKSH, jnp.float32).swapaxes(2, 3)
    d_kv = zeros_BKHS, zeros_BKHS
    by_query = q_BKGTH, d_out_BKGTH, log_sum_BKGT1, mean_BKGT1
    for span in reversed(sequence):
        slices = by_query, (k_BKSH, v_BKSH), window, tokens, q_offset
        d_kv, blocks = _scan_blocks(span, block, d_kv, *slices)
        d_q.insert(0, blocks)
    d_k_BKSH, d_v_BKSH = (d.swapaxes(2, 3).astype(dtype) for d in d_kv)
    return _join_blocks(d_q), d_k_BKSH, d_v_BKSH, None, None


_attend_blocks.defvjp(_attend_forward, _attend_backward)


def _add_product(total_BKHS, first_key, x_BKGCH, y_BKGCS):
    """Add x^T y, a gradient of keys or values, to `total` from key `first_key` on.

    With H before S, XLA:CPU transposes the small factor and not the large one, which is much
    faster. The sum does not use `.at[...]`: within a `shard_map` its empty array of indices crashes
    the partitioner of jaxlib 0.11.2.
    """
    batch, kv_heads, groups, queries, head_dim = x_BKGCH.shape
    x_BKRH = x_BKGCH.reshape(batch, kv_heads, groups * queries, head_dim)
    y_BKRS = y_BKGCS.reshape(batch, kv_heads, groups * queries, -1)
    new_BKHS = _einsum("BKHR,BKRS->BKHS", x_BKRH.swapaxes(2, 3), y_BKRS)
    old_BKHS = jax.lax.dynamic_slice_in_dim(total_BKHS, first_key, new_BKHS.shape[3], axis=3)
    return jax.lax.dynamic_update_slice_in_dim(total_BKHS, old_BKHS + new_BKHS, first_key, axis=3)


def _attend_with_probs_fn(sequence, window, softcap, q_BKGTH, k_BKSH, v_BKSH, tokens, probs_fn):
    """`_attend_blocks` with a `ProbsDropout`, differentiated by JAX. The backward pass recomputes
    each block, so here too no T x T array outlives its block."""

    def block(_, start, first_key, allowed_BCS, *slices):
        return None, _softmax_values(*slices, allowed_BCS, softcap, probs_fn, (start, first_key))

    outputs = []
    for span in sequence:
        slices = (q_BKGTH,), (k_BKSH, v_BKSH), window, tokens, 0
        _, (output, to_sow) = _scan_blocks(span, block, None, *slices, recompute=True)
        outputs.append(output)
        probs_fn.block_outputs.append(to_sow)
    return _join_blocks(outputs)


def _scan_blocks(span, block, carry, by_query, by_key, window, tokens, q_offset, recompute=False):
    """Apply `block` to the blocks of a span, without a loop if there is one block.

    Args:
      block: (carry, index of the first query, index of the first key, allowed_BCS, slices of the
        arrays `by_query`, slices of the arrays `by_key`) -> (carry, outputs).
      by_query: arrays [B, K, G, T, ...]. by_key: arrays [B, K, S, H].
      recompute: do not save intermediate results of a block for the backward pass.
    Returns: (carry, outputs [blocks, ...]).
    """

    def run(carry, start):
        first_key = jnp.maximum(0, start + span.block - span.keys) if span.slides else 0
        queries = [jax.lax.dynamic_slice_in_dim(y, start, span.block, axis=3) for y in by_query]
        keys = [jax.lax.dynamic_slice_in_dim(y, first_key, span.keys, axis=2) for y in by_key]
        allowed_BCS = _allowed(span, q_offset + start, first_key, window, tokens)
        return block(carry, start, first_key, allowed_BCS, *queries, *keys)

    is_one_block = span.stop - span.start == span.block
    if recompute:  # A loop separates forward and backward pass by itself.
        run = jax.checkpoint(run, prevent_cse=is_one_block)
    if is_one_block:
        carry, outputs = run(carry, span.start)
        return carry, jax.tree.map(lambda y: y[None], outputs)
    return jax.lax.scan(run, carry, jnp.arange(span.start, span.stop, span.block, dtype=jnp.int32))


def _join_blocks(outputs):
    """List of [blocks, B, K, G, C, H] -> [B, K, G, T, H]"""
    blocks = (jnp.moveaxis(y, 0, 3) for y in outputs)
    return jnp.concatenate([y.reshape(*y.shape[:3], -1, y.shape[-1]) for y in blocks], axis=3)


def _allowed(span, first_query, first_key, window, tokens):
    """bool [B or 1, C, S]: the keys that each query of a block sees.

    Args:
      tokens: (positions [B or 1, T], documents [B or 1, T]), each None if not needed.
    """

    def slices(y_BT):
        q_BC = jax.lax.dynamic_slice_in_dim(y_BT, first_query, span.block, axis=1)
        return q_BC[..., None], jax.lax.dynamic_slice_in_dim(y_BT, first_key, span.keys, 1)[:, None]

    q_C1 = first_query + jnp.arange(span.block)[:, None]
    k_1S = first_key + jnp.arange(span.keys)[None]
    allowed_BCS = (k_1S <= q_C1)[None]
    positions_BT, segment_ids_BT = tokens
    if window:
        q_BC1, k_B1S = slices(positions_BT)
        allowed_BCS = allowed_BCS & (q_BC1 - k_B1S < window)
    if segment_ids_BT is not None:
        q_BC1, k_B1S = slices(segment_ids_BT)
        allowed_BCS = allowed_BCS & (q_BC1 == k_B1S)
    return allowed_BCS


def _scores(q_BKGTH, k_BKSH, allowed_BTS, softcap):
    """Masked scores of scaled queries, float32 [B, K, G, T, S]."""
    scores_BKGTS = _einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH)
    if softcap:
        scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    return jnp.where(allowed_BTS[:, None, None], scores_BKGTS, MASKED)


def _einsum(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _softmax_values(q_BKGTH, k_BKSH, v_BKSH, allowed_BTS, softcap, probs_fn, starts=(0, 0)):
    """(values [B, K, G, T, H], the arrays that `probs_fn` returns for sowing, or None)."""
    probs_BKGTS = jax.nn.softmax(_scores(q_BKGTH, k_BKSH, allowed_BTS, softcap), axis=-1)
    to_sow = None
    if probs_fn is not None:
        probs_BKGTS, to_sow = probs_fn(probs_BKGTS, *starts, allowed_BTS)
    return jnp.einsum("BKGTS,BKSH->BKGTH", probs_BKGTS.astype(v_BKSH.dtype), v_BKSH), to_sow


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

    Keys and values are [H, S], because a TPU pads the last axis to 128.

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

    def read_slots(start, size):
        arrays = (k_BKHS, 3), (v_BKHS, 3), (k_positions_BS, 1)
        cut = jax.lax.dynamic_slice_in_dim
        k_BKHC, v_BKHC, positions_BC = (rows(cut(x, start, size, axis)) for x, axis in arrays)
        allowed_BTC = visible(positions_BT, positions_BC, window)
        return k_BKHC.swapaxes(2, 3), v_BKHC.swapaxes(2, 3), allowed_BTC

    if probs_fn is not None:
        out_BKGTH, _ = _softmax_values(q_BKGTH, *read_slots(0, slots), softcap, probs_fn)
        return _heads_last(out_BKGTH)

    zeros_BKGTH = jnp.zeros(q_BKGTH.shape, jnp.float32)
    zeros_BKGT = zeros_BKGTH[..., 0]
    state = zeros_BKGT + MASKED, zeros_BKGT, zeros_BKGTH
    if pending is not None:
        k_BCKH, v_BCKH, positions_BC = map(rows, pending)
        keys_values = k_BCKH.swapaxes(1, 2), v_BCKH.swapaxes(1, 2)
        allowed_BTC = visible(positions_BT, positions_BC, window)
        state = _update_softmax(state, q_BKGTH, *keys_values, allowed_BTC, softcap)

    platform = sharding.platform()
    size = _CACHE_BLOCK if platform == "cpu" else 4 * _CACHE_BLOCK

    def read_block(i, state):
        # The last block ends with the cache; slots that the one before has read are masked.
        start = jnp.minimum(i * size, slots - size)
        k_BKCH, v_BKCH, allowed_BTC = read_slots(start, size)
        is_new_11C = start + jnp.arange(size)[None, None] >= i * size
        return _update_softmax(state, q_BKGTH, k_BKCH, v_BKCH, allowed_BTC & is_new_11C, softcap)

    # A GPU reads all slots for one query at once, because each turn of a loop waits for the host.
    if slots <= size or (platform == "gpu" and queries == 1):
        state = _update_softmax(state, q_BKGTH, *read_slots(0, slots), softcap)
    else:
        state = jax.lax.fori_loop(0, -(-num_used // size), read_block, state)
    _, sum_BKGT, out_BKGTH = state
    out_BKGTH = out_BKGTH / jnp.maximum(sum_BKGT, 1e-30)[..., None]
    return _heads_last(out_BKGTH)[:, :queries].astype(q_BTNH.dtype)


def visible(q_positions_BT, k_positions_BS, window):
    """bool [B, T, S]: keys up to the position of the query (and within the window), no padding."""
    distance_BTS = q_positions_BT[:, :, None] - k_positions_BS[:, None]
    visible_BTS = (distance_BTS >= 0) & (k_positions_BS[:, None] >= 0)
    return visible_BTS & (distance_BTS < window) if window else visible_BTS


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


def attend_context(q_BTNH, k_BSKH, v_BSKH, call, key_call, *, window=0, **options):
    """Attention of the tokens of `call` over those of `key_call`, in their own document."""
    allowed_BTS = visible(call.positions_BT, key_call.positions_BT, window)
    if call.segment_ids_BT is not None:
        same_BTS = call.segment_ids_BT[:, :, None] == key_call.segment_ids_BT[:, None]
        allowed_BTS = allowed_BTS & same_BTS
    return attend_masked(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, **options)


def attend_masked(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, *, scale, softcap=0.0, probs_fn=None):
    """Attention of T queries over S keys with a mask, bool [B or 1, T, S]. It computes the scores
    of all pairs."""
    q_BKGTH = _group_heads(q_BTNH * scale, k_BSKH.shape[2])
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    out_BKGTH, to_sow = _softmax_values(q_BKGTH, k_BKSH, v_BKSH, allowed_BTS, softcap, probs_fn)
    if probs_fn is not None:
        probs_fn.block_outputs.append(jax.tree.map(lambda y: y[None], to_sow))
    return _heads_last(out_BKGTH)
