"""Causal attention in plain XLA: over the same tokens, over a KV cache, over other tokens.

`attend` computes scores only for keys that a chunk of queries may see, so the masked half costs
almost nothing; `spans` decides which keys these are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers import flops, kernels
from efx.parallel import sharding

MASKED = -1e30
_MAX_CHUNKS = 8  # chunks are unrolled: more of them save FLOPs but cost compile time
_BLOCK = 256  # most queries whose scores are in memory at once
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


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
    drop_probs=None,
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
      drop_probs: (probabilities [B, K, G, T, S], bool [B or 1, T, S] of the pairs that attention
        allows) -> probabilities, or None. All are in memory at once.
    Returns: [B, T, N, H].
    """
    _, length, num_heads, head_dim = q_BTNH.shape
    is_sharded, is_packed = sharding.shard_count("length") > 1, segment_ids_BT is not None
    if kernel != "xla" and (kernel != "auto" or sharding.platform() != "cpu"):
        shape = length, num_heads, k_BSKH.shape[2], head_dim, q_BTNH.dtype
        mask = window, softcap, has_gaps, is_packed, is_sharded, drop_probs is not None
        case = kernels.Case(*shape, *mask)
        chosen = kernels.choose(kernel, case)
        if chosen is not None:
            return chosen.run(case, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, scale)
    tokens = {"index": jnp.arange(length)[None]}
    if window:
        tokens["position"] = tokens["index"] if positions_BT is None else positions_BT
    if is_packed:
        tokens["segment"] = segment_ids_BT
    if drop_probs is not None:
        allowed_BTS = _allowed(tokens, tokens, window)
        options = dict(scale=scale, softcap=softcap, drop_probs=drop_probs)
        return attend_masked(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, **options)
    q_BKGTH = _group_heads(q_BTNH * scale, k_BSKH.shape[2])
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    arrays = q_BKGTH, k_BKSH, v_BKSH
    if is_sharded and _shards_evenly(k_BKSH):
        out_BKGTH = _attend_sharded(chunk, window, softcap, *arrays, tokens)
    else:
        query_spans = spans(length, chunk, window)
        out_BKGTH = _attend_blocks(query_spans, window, softcap, *arrays, tokens, tokens)
    return _heads_last(out_BKGTH)


class Span(NamedTuple):
    """Queries [start, stop), in blocks of `block` queries that score `keys` keys each.

    The keys are the first of the sequence or, with a window, the last up to the block's end.
    """

    start: int
    stop: int
    block: int
    keys: int


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
            keys = min(stop, block + window - 1) if window else stop
            if block:
                result.append(Span(start, stop, block, keys))
    return tuple(result)


def _shards_evenly(k_BKSH):
    """Whether the mesh splits all axes evenly, and heads of queries like those of keys. Otherwise,
    as for the single row of initialisation, the partitioner decides."""
    q_axes, kv_axes = (nn.logical_to_mesh_axes((name,)) for name in ("act_heads", "act_kv_heads"))
    sizes = zip(("batch", "act_kv_heads", "length"), k_BKSH.shape, strict=False)
    return q_axes == kv_axes and all(size % sharding.shard_count(name) == 0 for name, size in sizes)


def _attend_sharded(chunk, window, softcap, q_BKGTH, k_BKSH, v_BKSH, tokens):
    """`_attend_blocks` for sequences that are sharded over devices.

    Each device holds its own queries and all keys and values, and scores all of these, even the
    keys after its queries.
    """
    batch, _, length, _ = k_BKSH.shape
    shard_length = length // sharding.shard_count("length")
    query_spans = tuple(span._replace(keys=length) for span in spans(shard_length, chunk))
    tokens = jax.tree.map(lambda y: jnp.broadcast_to(y, (batch, length)), tokens)
    axes = [("batch", "act_kv_heads", None, "length"), *[("batch", "act_kv_heads")] * 2]
    axes += [("batch", "length"), ("batch",)]
    specs = tuple(nn.logical_to_mesh_axes(names) for names in axes)
    attend_shard = functools.partial(_attend_blocks, query_spans, window, softcap)
    return jax.shard_map(attend_shard, in_specs=specs, out_specs=specs[0], check_vma=False)(
        q_BKGTH, k_BKSH, v_BKSH, tokens, tokens
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


@flops.custom_vjp(nondiff_argnums=(0, 1, 2))
def _attend_blocks(query_spans, window, softcap, q_BKGTH, k_BKSH, v_BKSH, q_tokens, k_tokens):
    """`attend` of scaled queries, in blocks. Reverse mode only.

    The backward pass recomputes the probabilities block by block from the scores and the logarithm
    of their sums (Dao et al. 2022, arXiv 2205.14135), so no T x T array outlives its block.

    Args:
      query_spans: tuple of `Span`s. q_tokens, k_tokens: see `_allowed`.
    """
    arrays = q_BKGTH, k_BKSH, v_BKSH, q_tokens, k_tokens
    return _attend_forward(query_spans, window, softcap, *arrays)[0]


def _attend_forward(query_spans, window, softcap, q_BKGTH, k_BKSH, v_BKSH, q_tokens, k_tokens):
    dtype = v_BKSH.dtype

    def block(carry, starts, q_BKGCH, k_BKSH, v_BKSH, allowed_BCS):
        scores_BKGCS = _scores(q_BKGCH, k_BKSH, allowed_BCS, softcap)
        max_BKGC1 = jnp.max(scores_BKGCS, axis=-1, keepdims=True)
        weights_BKGCS = jnp.exp(scores_BKGCS - max_BKGC1)
        sum_BKGC1 = jnp.sum(weights_BKGCS, axis=-1, keepdims=True)
        values_BKGCH = _einsum("BKGCS,BKSH->BKGCH", weights_BKGCS.astype(dtype), v_BKSH)
        out_BKGCH, log_sum_BKGC1 = values_BKGCH / sum_BKGC1, max_BKGC1 + jnp.log(sum_BKGC1)
        return carry, (out_BKGCH.astype(dtype), log_sum_BKGC1)

    arrays = (q_BKGTH,), (k_BKSH, v_BKSH), q_tokens, k_tokens
    _, outputs = _scan_blocks(query_spans, window, block, None, *arrays)
    out_BKGTH, log_sum_BKGT1 = (_join_blocks(blocks) for blocks in zip(*outputs, strict=True))
    residuals = q_BKGTH, k_BKSH, v_BKSH, q_tokens, k_tokens, out_BKGTH, log_sum_BKGT1
    return out_BKGTH, residuals


def _attend_backward(query_spans, window, softcap, residuals, d_out_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, q_tokens, k_tokens, out_BKGTH, log_sum_BKGT1 = residuals
    dtype = q_BKGTH.dtype
    # sum_s p_s dp_s of each query, for the gradient of the softmax: p_s (dp_s - mean).
    products_BKGTH = d_out_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32)
    mean_BKGT1 = jnp.sum(products_BKGTH, axis=-1, keepdims=True)

    def block(d_kv, starts, *slices):
        q_BKGCH, d_out_BKGCH, log_sum_BKGC1, mean_BKGC1, k_BKSH, v_BKSH, allowed_BCS = slices
        scores_BKGCS = _scores(q_BKGCH, k_BKSH, allowed_BCS, softcap)
        probs_BKGCS = jnp.exp(scores_BKGCS - log_sum_BKGC1)
        d_probs_BKGCS = _einsum("BKGCH,BKSH->BKGCS", d_out_BKGCH, v_BKSH)
        d_scores_BKGCS = probs_BKGCS * (d_probs_BKGCS - mean_BKGC1)
        if softcap:
            # MASKED scores have no gradient, and their square overflows.
            slope_BKGCS = 1.0 - jnp.square(scores_BKGCS / softcap)
            is_scored_BKGCS = jnp.abs(scores_BKGCS) <= softcap
            d_scores_BKGCS = d_scores_BKGCS * jnp.where(is_scored_BKGCS, slope_BKGCS, 0.0)
        d_scores_BKGCS = d_scores_BKGCS.astype(dtype)
        d_q_BKGCH = _einsum("BKGCS,BKSH->BKGCH", d_scores_BKGCS, k_BKSH)
        (d_k_BKHS, d_v_BKHS), (_, first_key) = d_kv, starts
        d_k_BKHS = _add_product(d_k_BKHS, first_key, q_BKGCH, d_scores_BKGCS)
        d_v_BKHS = _add_product(d_v_BKHS, first_key, d_out_BKGCH, probs_BKGCS.astype(dtype))
        return (d_k_BKHS, d_v_BKHS), d_q_BKGCH.astype(dtype)

    zeros_BKHS = jnp.zeros_like(k_BKSH, jnp.float32).swapaxes(2, 3)
    queries = q_BKGTH, d_out_BKGTH, log_sum_BKGT1, mean_BKGT1
    arrays = queries, (k_BKSH, v_BKSH), q_tokens, k_tokens
    d_kv, d_q = _scan_blocks(query_spans[::-1], window, block, (zeros_BKHS, zeros_BKHS), *arrays)
    d_k_BKSH, d_v_BKSH = (d.swapaxes(2, 3).astype(dtype) for d in d_kv)
    return _join_blocks(d_q[::-1]), d_k_BKSH, d_v_BKSH, None, None


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


def _scan_blocks(query_spans, window, block, carry, queries, keys, q_tokens, k_tokens):
    """Apply `block` to all blocks of queries in turn, in a loop where a span has several.

    Args:
      block: (carry, indices of the first query and key, *slices of `queries`, *slices of `keys`,
        allowed_BCS) -> (carry, outputs).
      queries: arrays [B, K, G, T, ...]. keys: arrays [B, K, S, H].
    Returns: (carry, list of the outputs of each span, stacked [blocks, ...]).
    """
    cut, outputs = jax.lax.dynamic_slice_in_dim, []
    for span in query_spans:

        def run(carry, start, span=span):
            first_key = jnp.maximum(0, start + span.block - span.keys) if window else 0
            q_slices = [cut(y, start, span.block, axis=3) for y in queries]
            k_slices = [cut(y, first_key, span.keys, axis=2) for y in keys]
            q_block = {name: cut(y, start, span.block, axis=1) for name, y in q_tokens.items()}
            k_block = {name: cut(y, first_key, span.keys, axis=1) for name, y in k_tokens.items()}
            allowed_BCS = _allowed(q_block, k_block, window)
            return block(carry, (start, first_key), *q_slices, *k_slices, allowed_BCS)

        if span.stop - span.start == span.block:
            carry, output = run(carry, span.start)
            output = jax.tree.map(lambda y: y[None], output)
        else:
            starts = jnp.arange(span.start, span.stop, span.block, dtype=jnp.int32)
            carry, output = jax.lax.scan(run, carry, starts)
        outputs.append(output)
    return carry, outputs


def _join_blocks(outputs):
    """List of [blocks, B, K, G, C, H] -> [B, K, G, T, H]"""
    blocks = (jnp.moveaxis(y, 0, 3) for y in outputs)
    return jnp.concatenate([y.reshape(*y.shape[:3], -1, y.shape[-1]) for y in blocks], axis=3)


def _allowed(q_tokens, k_tokens, window):
    """bool [B or 1, T, S]: the keys that each query sees.

    Args:
      q_tokens, k_tokens: {"index": in time order, "position": with a window, "segment": document,
        in packed rows}, int32 [B or 1, T] and [B or 1, S].
    """
    q_tokens = jax.tree.map(lambda y_BT: y_BT[:, :, None], q_tokens)
    k_tokens = jax.tree.map(lambda y_BS: y_BS[:, None], k_tokens)
    allowed_BTS = k_tokens["index"] <= q_tokens["index"]
    if window:
        allowed_BTS = allowed_BTS & (q_tokens["position"] - k_tokens["position"] < window)
    if "segment" in q_tokens:
        allowed_BTS = allowed_BTS & (q_tokens["segment"] == k_tokens["segment"])
    return allowed_BTS


def _scores(q_BKGTH, k_BKSH, allowed_BTS, softcap):
    """Masked scores of scaled queries, float32 [B, K, G, T, S]."""
    scores_BKGTS = _einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH)
    if softcap:
        scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    return jnp.where(allowed_BTS[:, None, None], scores_BKGTS, MASKED)


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
    rows_B=None,
):
    """Attention of new queries over cache slots, each with the position of its token.

    Args:
      num_used: number of used slots of the fullest row (may be traced); later slots are not read.
      rows_B: row of the cache of each row of q; None: all, in order.
    """
    slots, queries = k_BKHS.shape[3], q_BTNH.shape[1]
    q_BKGTH = _group_heads(q_BTNH * scale, k_BKHS.shape[1])

    def rows(x):
        return x if rows_B is None else x.at[rows_B].get(mode="clip")

    def read_slots(start, size):
        """(keys, values, allowed_BTC) of these slots."""
        arrays = k_BKHS, v_BKHS, k_positions_BS
        slices = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=-1) for x in arrays)
        k_BKHC, v_BKHC, positions_BC = map(rows, slices)
        allowed_BTC = visible(positions_BT, positions_BC, window)
        return k_BKHC.swapaxes(2, 3), v_BKHC.swapaxes(2, 3), allowed_BTC

    zeros_BKGTH = jnp.zeros(q_BKGTH.shape, jnp.float32)
    zeros_BKGT = zeros_BKGTH[..., 0]
    state = zeros_BKGT + MASKED, zeros_BKGT, zeros_BKGTH
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
    return _heads_last(out_BKGTH).astype(q_BTNH.dtype)


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


def attend_masked(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, *, scale, softcap=0.0, drop_probs=None):
    """Attention of T queries over S keys with a mask, bool [B or 1, T, S]. It computes the scores
    of all pairs. `drop_probs`: see `attend`."""
    q_BKGTH = _group_heads(q_BTNH * scale, k_BSKH.shape[2])
    scores_BKGTS = _scores(q_BKGTH, k_BSKH.swapaxes(1, 2), allowed_BTS, softcap)
    probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    if drop_probs is not None:
        probs_BKGTS = drop_probs(probs_BKGTS, allowed_BTS)
    return _heads_last(jnp.einsum("BKGTS,BSKH->BKGTH", probs_BKGTS.astype(v_BSKH.dtype), v_BSKH))
