"""Causal attention as functions: over the tokens themselves, over a cache, over other tokens.

The kernel walks over chunks of queries and touches only the keys that a chunk may see, so masked
halves cost nothing; `spans` is the one place that decides which keys those are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import sharding
from efx.layers import kernels
from efx.layers.dropout import ProbsDropout
from efx.layers.linear import padding_of_rows

MASKED = -1e30
_MAX_CHUNKS = 8  # chunks are unrolled: more of them save FLOPs but cost compile time
_BLOCK = 256  # queries that are scored at a time, however long the sequence is


class Span(NamedTuple):
    """Queries [q_start, q_stop), in blocks of `block`, and how many keys a block visits.

    These are the keys [0, keys), or with `slides` the last so many up to the block's last query.
    """

    q_start: int
    q_stop: int
    block: int
    keys: int
    slides: bool = False

    @property
    def pairs(self):
        """(query, key) pairs that are scored."""
        return (self.q_stop - self.q_start) * self.keys


def chunk_size(length, chunk=0):
    """Queries that visit the same keys; `chunk=0` picks at most 8 chunks of at least 64."""
    return chunk or max(64, -(-length // _MAX_CHUNKS))


def spans(length, chunk=0, window=0):
    """The `Span`s of a sequence.

    Short sequences are cut into a few chunks, each with its own keys. In longer ones a chunk is
    several blocks, which take turns, so that the memory for scores grows with the length and not
    with its square; with a window every block has keys of its own.
    """
    step = chunk_size(length, chunk)
    if step > _BLOCK and not chunk:
        step = length if window else -(-step // _BLOCK) * _BLOCK
    result = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        # Whole blocks, then what is left.
        whole = start + (stop - start) // _BLOCK * _BLOCK if stop - start > _BLOCK else start
        for q_start, q_stop in ((start, whole), (whole, stop)):
            block = min(_BLOCK, q_stop - q_start) if q_stop == whole else q_stop - q_start
            keys = min(stop, block + window - 1) if window else stop
            if block:
                result.append(Span(q_start, q_stop, block, keys, bool(window)))
    return result


def first_visible(length, window=0, positions_BT=None, segment_ids_BT=None):
    """int32 [B or 1, T], the place of the first key that each query may see: every mask here is an
    interval of keys that ends with the query. None: all from 0 on.

    A key of the query's own document is visible, the more so the nearer: where the tokens of a
    document stand together and their positions ascend, as in every packed row and in every routed
    subsequence of one, what is visible has no hole.

    Args:
      window: positions that a query looks back, its own included; 0: all.
      positions_BT: original positions; None: the places.
      segment_ids_BT: documents, or None.
    """
    if not window and segment_ids_BT is None:
        return None
    place_T = jnp.arange(length, dtype=jnp.int32)
    if positions_BT is None:
        positions_BT = place_T[None]
    step_BT = jnp.diff(positions_BT, axis=1, prepend=positions_BT[:, :1])
    # Empty slots have negative positions and stand for themselves.
    cut_BT = (positions_BT < 0) != jnp.roll(positions_BT < 0, 1, axis=1)
    if segment_ids_BT is not None:
        cut_BT = cut_BT | (jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1]) != 0)
    start_BT = jax.lax.cummax(jnp.where(cut_BT, place_T[None], 0), axis=1)
    if not window:
        return start_BT
    # Positions along the whole row. (To go a whole window further at each cut would do without the
    # starts, until the sum is no int32.)
    along_BT = jnp.cumsum(jnp.where(cut_BT, 0, jnp.clip(step_BT, 0, window)), axis=1)
    search = functools.partial(jnp.searchsorted, side="right", method="scan_unrolled")
    first_BT = jax.vmap(lambda along_T: search(along_T, along_T - window))(along_BT)
    return jnp.maximum(first_BT.astype(jnp.int32), start_BT)


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
    gaps=False,
    kernel="auto",
    probs_fn: ProbsDropout | None = None,
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
      gaps: whether positions skip some.
      kernel: see `kernels.choose`.
      probs_fn: changes the probabilities, a block of queries at a time.
    Returns: [B, T, N, H].
    """
    _, length, num_heads, head_dim = q_BTNH.shape
    case = kernels.Case(
        length,
        num_heads,
        k_BSKH.shape[2],
        head_dim,
        q_BTNH.dtype,
        window,
        softcap,
        gaps,
        documents=segment_ids_BT is not None,
        split=sharding.ways("length") > 1,
        probs=probs_fn is not None,
    )
    chosen = kernels.choose(kernel, case)
    if chosen is not None:
        return chosen.run(case, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, scale)
    first_BT = first_visible(length, window, positions_BT, segment_ids_BT)
    if case.split and probs_fn is None and _divides(q_BTNH, k_BSKH):
        return _over_devices(q_BTNH * scale, k_BSKH, v_BSKH, first_BT, chunk, softcap)
    q_BKGTH = _split_heads(q_BTNH * scale, k_BSKH.shape[2])
    k_BKSH = jnp.transpose(k_BSKH, (0, 2, 1, 3))
    v_BKSH = jnp.transpose(v_BSKH, (0, 2, 1, 3))
    static = _Static(tuple(spans(length, chunk, window)), softcap)
    if probs_fn is None:
        out_BKGTH = _attend(static, q_BKGTH, k_BKSH, v_BKSH, first_BT, 0)
    else:
        out_BKGTH = _attend_changed(static, q_BKGTH, k_BKSH, v_BKSH, first_BT, probs_fn)
    return _join_heads(out_BKGTH)


def _divides(q_BTNH, k_BSKH):
    """Whether the mesh splits these evenly, and each device has the keys that its heads of queries
    read and no others. What it does not, such as the single row of initialising, is left to the
    partitioner."""
    names = "batch", "length", "act_heads", "act_kv_heads"
    sizes = *q_BTNH.shape[:3], k_BSKH.shape[2]
    of_queries, of_keys = (nn.logical_to_mesh_axes((name,)) for name in names[2:])
    divides = (size % sharding.ways(n) == 0 for size, n in zip(sizes, names, strict=True))
    return of_queries == of_keys and all(divides)


def _over_devices(q_BTNH, k_BSKH, v_BSKH, first_BT, chunk, softcap):
    """`attend` where devices share a sequence: each has its own queries and the keys and values of
    all. A device scores them all, also those that come after its queries."""
    length, parts = q_BTNH.shape[1], sharding.ways("length")
    if first_BT is None:
        first_BT = jnp.zeros((1, length), jnp.int32)
    own = length // parts
    every_key = (span._replace(keys=length) for span in spans(own, chunk))
    static = _Static(tuple(every_key), softcap)

    def local(q_BTNH, k_BSKH, v_BSKH, first_BT, start_1):
        q_BKGTH = _split_heads(q_BTNH, k_BSKH.shape[2])
        k_BKSH, v_BKSH = (jnp.transpose(y, (0, 2, 1, 3)) for y in (k_BSKH, v_BSKH))
        return _join_heads(_attend(static, q_BKGTH, k_BKSH, v_BKSH, first_BT, start_1[0]))

    kv_names = "batch", None, "act_kv_heads", None
    names = (
        ("batch", "length", "act_heads", None),
        kv_names,
        kv_names,
        ("batch" if len(first_BT) > 1 else None, "length"),
        ("length",),
    )
    specs = tuple(map(nn.logical_to_mesh_axes, names))
    starts = jnp.arange(0, length, own, dtype=jnp.int32)
    return jax.shard_map(local, in_specs=specs, out_specs=specs[0], check_vma=False)(
        q_BTNH, k_BSKH, v_BSKH, first_BT, starts
    )


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
    softcap: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q_BKGTH, k_BKSH, v_BKSH, first_BT, start):
    """`attend` on scaled queries, heads before time, of which the first is the place `start` of
    those of the keys. Reverse mode only.

    The backward pass computes the probabilities again, block by block, from the scores and the log
    of their sums (Dao et al. 2022, arXiv 2205.14135), so no T x T array outlives its block.
    """
    return _attend_forward(static, q_BKGTH, k_BKSH, v_BKSH, first_BT, start)[0]


def _attend_forward(static, q_BKGTH, k_BKSH, v_BKSH, first_BT, start):
    def block(span, q0):
        q_BKRH = _rows(_queries(q_BKGTH, q0, span.block))
        k_BKSH_, v_BKSH_ = (_keys(y, span, q0) for y in (k_BKSH, v_BKSH))
        scores_BKRS = _scores(static, span, q0, q_BKRH, k_BKSH_, first_BT, start)
        top_BKR = jnp.max(scores_BKRS, axis=-1, keepdims=True)
        weights_BKRS = jnp.exp(scores_BKRS - top_BKR)
        sums_BKR = jnp.sum(weights_BKRS, axis=-1, keepdims=True)
        out_BKRH = _dot("BKRS,BKSH->BKRH", weights_BKRS.astype(v_BKSH.dtype), v_BKSH_)
        out_BKRH = (out_BKRH / sums_BKR).astype(v_BKSH.dtype)
        log_sums_BKR = top_BKR + jnp.log(sums_BKR)
        return tuple(_groups(y, q_BKGTH.shape[2]) for y in (out_BKRH, log_sums_BKR))

    results = []
    for span in static.spans:
        if span.q_stop - span.q_start == span.block:
            results.append(block(span, span.q_start))
        else:
            _, blocks = jax.lax.scan(
                lambda _, q0, span=span: (None, block(span, q0)), None, _starts(span)
            )
            results.append(tuple(_in_a_row(y) for y in blocks))
    out_BKGTH, log_sums_BKGT = (jnp.concatenate(y, axis=3) for y in zip(*results, strict=True))
    saved = q_BKGTH, k_BKSH, v_BKSH, first_BT, start, out_BKGTH, log_sums_BKGT
    return out_BKGTH, saved


def _attend_backward(static, saved, d_out_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, first_BT, start, out_BKGTH, log_sums_BKGT = saved
    dtype, groups = q_BKGTH.dtype, q_BKGTH.shape[2]
    # The mean over keys of the gradient of the probabilities, by way of the output.
    mean_BKGT = jnp.sum(
        d_out_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32), axis=-1, keepdims=True
    )

    def block(span, q0):
        """Gradients of a block's queries, and of its keys and values with H before S: XLA:CPU then
        multiplies a small transposed matrix by a large one as it lies, which is much faster than
        the other way round."""
        q_BKRH, d_out_BKRH, log_sums_BKR, mean_BKR = (
            _rows(_queries(y, q0, span.block))
            for y in (q_BKGTH, d_out_BKGTH, log_sums_BKGT, mean_BKGT)
        )
        k_BKSH_, v_BKSH_ = (_keys(y, span, q0) for y in (k_BKSH, v_BKSH))
        scores_BKRS = _scores(static, span, q0, q_BKRH, k_BKSH_, first_BT, start)
        probs_BKRS = jnp.exp(scores_BKRS - log_sums_BKR)
        d_probs_BKRS = _dot("BKRH,BKSH->BKRS", d_out_BKRH, v_BKSH_)
        d_scores_BKRS = probs_BKRS * (d_probs_BKRS - mean_BKR)
        if static.softcap:
            inside = jnp.abs(scores_BKRS) <= static.softcap
            slope_BKRS = 1.0 - jnp.square(scores_BKRS / static.softcap)
            d_scores_BKRS = d_scores_BKRS * jnp.where(inside, slope_BKRS, 0.0)
        d_scores_BKRS = d_scores_BKRS.astype(dtype)
        d_q_BKRH = _dot("BKRS,BKSH->BKRH", d_scores_BKRS, k_BKSH_)
        d_k_BKHS = _dot("BKHR,BKRS->BKHS", q_BKRH.swapaxes(2, 3), d_scores_BKRS)
        d_v_BKHS = _dot("BKHR,BKRS->BKHS", d_out_BKRH.swapaxes(2, 3), probs_BKRS.astype(dtype))
        return _groups(d_q_BKRH.astype(dtype), groups), (d_k_BKHS, d_v_BKHS)

    def add_block(d_kv, q0, span):
        d_q_BKGTH, new = block(span, q0)
        start = _first_key(span, q0)
        return tuple(_add_at(d, start, y) for d, y in zip(d_kv, new, strict=True)), d_q_BKGTH

    d_q = []
    zeros_BKHS = jnp.zeros_like(k_BKSH, jnp.float32).swapaxes(2, 3)
    d_kv = (zeros_BKHS, zeros_BKHS)
    for span in reversed(static.spans):
        if span.q_stop - span.q_start == span.block:
            d_kv, d_q_BKGTH = add_block(d_kv, span.q_start, span)
        else:
            d_kv, d_q_blocks = jax.lax.scan(
                functools.partial(add_block, span=span), d_kv, _starts(span)
            )
            d_q_BKGTH = _in_a_row(d_q_blocks)
        d_q.insert(0, d_q_BKGTH)
    d_k_BKSH, d_v_BKSH = (d.swapaxes(2, 3).astype(dtype) for d in d_kv)
    return jnp.concatenate(d_q, axis=3), d_k_BKSH, d_v_BKSH, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _attend_changed(static, q_BKGTH, k_BKSH, v_BKSH, first_BT, probs_fn):
    """`_attend` with a `ProbsDropout`, left to automatic differentiation, which computes each block
    again, so here too no T x T array outlives its block."""

    def block(q_BKGTH, k_BKSH, v_BKSH, q0, span):
        k0 = _first_key(span, q0)
        allowed_BTS = _allowed(first_BT, q0, span.block, k0, span.keys)
        q, k, v = (
            _queries(q_BKGTH, q0, span.block),
            _keys(k_BKSH, span, q0),
            _keys(v_BKSH, span, q0),
        )
        return _softmax_values(q, k, v, allowed_BTS, static.softcap, probs_fn, (q0, k0))

    results = []
    for span in static.spans:
        one = functools.partial(block, span=span)
        if span.q_stop - span.q_start == span.block:
            one = jax.checkpoint(functools.partial(one, q0=span.q_start))
            out_BKGTH, seen = one(q_BKGTH, k_BKSH, v_BKSH)
            seen = jax.tree.map(lambda y: y[None], seen)
        else:
            # A loop keeps its blocks apart by itself.
            one = jax.checkpoint(one, prevent_cse=False)
            _, (blocks, seen) = jax.lax.scan(
                lambda _, q0, one=one: (None, one(q_BKGTH, k_BKSH, v_BKSH, q0)),
                None,
                _starts(span),
            )
            out_BKGTH = _in_a_row(blocks)
        results.append(out_BKGTH)
        probs_fn.block_outputs.append(seen)
    return jnp.concatenate(results, axis=3)


def _starts(span):
    """The first query of each block."""
    return jnp.arange(span.q_start, span.q_stop, span.block, dtype=jnp.int32)


def _first_key(span, q0):
    """The first key that the block from query `q0` on visits; `q0` may be traced."""
    if not span.slides:
        return 0
    start = q0 + span.block - span.keys
    return max(0, start) if isinstance(q0, int) else jnp.maximum(0, start)


def _queries(x_BKGTH, q0, block):
    if isinstance(q0, int):
        return x_BKGTH[..., q0 : q0 + block, :]
    return jax.lax.dynamic_slice_in_dim(x_BKGTH, q0, block, axis=3)


def _keys(x_BKSH, span, q0):
    start = _first_key(span, q0)
    if isinstance(start, int):
        return x_BKSH[..., start : start + span.keys, :]
    return jax.lax.dynamic_slice_in_dim(x_BKSH, start, span.keys, axis=2)


def _add_at(d_BKHS, start, y_BKHS):
    """d with y added to the places from `start` on. Not by `d_BKHS.at[...]`, whose empty array of
    indices ends the process in the partitioner of jaxlib 0.11.2, within a `shard_map`."""
    y_BKHS = y_BKHS + jax.lax.dynamic_slice_in_dim(d_BKHS, start, y_BKHS.shape[3], axis=3)
    return jax.lax.dynamic_update_slice_in_dim(d_BKHS, y_BKHS, start, axis=3)


def _in_a_row(blocks):
    """[blocks, B, K, G, C, ...] -> [B, K, G, T, ...]"""
    blocks = jnp.moveaxis(blocks, 0, 3)
    return blocks.reshape(*blocks.shape[:3], -1, blocks.shape[-1])


def _scores(static, span, q0, q_BKRH, k_BKSH, first_BT, start):
    """Masked scores of a block of queries in float32, [B, K, R, S]."""
    scores_BKRS = _dot("BKRH,BKSH->BKRS", q_BKRH, k_BKSH)
    if static.softcap:
        scores_BKRS = static.softcap * jnp.tanh(scores_BKRS / static.softcap)
    allowed_BTS = _allowed(first_BT, q0, span.block, _first_key(span, q0), span.keys, start)
    scores_BKGTS = _groups(scores_BKRS, q_BKRH.shape[2] // span.block)
    return _rows(jnp.where(allowed_BTS[:, None, None], scores_BKGTS, MASKED))


def _allowed(first_BT, q0, queries, k0, keys, start=0):
    """Which keys the queries of a block may see: bool [B or 1, T, S]."""
    q_T1, k_1S = start + q0 + jnp.arange(queries)[:, None], k0 + jnp.arange(keys)[None]
    allowed_BTS = (k_1S <= q_T1)[None]
    if first_BT is not None:
        first_BT = jax.lax.dynamic_slice_in_dim(first_BT, q0, queries, axis=1)
        allowed_BTS = allowed_BTS & (k_1S[None] >= first_BT[..., None])
    return allowed_BTS


def _rows(x_BKGTH):
    """[B, K, G, T, ...] -> [B, K, R = G*T, ...]: queries that share keys are rows of one matrix."""
    batch, kv_heads, groups, length, *rest = x_BKGTH.shape
    return x_BKGTH.reshape(batch, kv_heads, groups * length, *rest)


def _groups(x_BKRH, groups):
    return x_BKRH.reshape(*x_BKRH.shape[:2], groups, -1, x_BKRH.shape[-1])


def _dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


_CACHE_BLOCK = 128  # slots of a cache that are visited at a time on a CPU


def attend_cache(
    q_BTNH,
    k_BKHS,
    v_BKHS,
    q_positions_BT,
    k_positions_BS,
    *,
    scale,
    window=0,
    softcap=0.0,
    probs_fn: ProbsDropout | None = None,
    used=None,
    newest=None,
    rows_B=None,
):
    """Attention of new queries over cache slots, each slot with the position of its token.

    Query t sees slot s iff 0 <= position(s) <= position(t) (and inside the window). Keys and values
    lie [H, S]: a last axis of H would be padded to the lanes of a TPU.

    Args:
      used: how many slots are taken in the fullest row (may be traced): the slots after these are
        not read. None: all are read.
      newest: keys and values [B, S, K, H] and positions [B, S] that are not in slots.
      rows_B: which rows of the cache the rows of q are; None: all, in order.
    """
    slots, queries = k_BKHS.shape[3], q_BTNH.shape[1]
    q_BKGTH = _split_heads(q_BTNH * scale, k_BKHS.shape[1])
    padding = 0 if probs_fn is not None else padding_of_rows(queries)
    if padding:
        q_BKGTH = jnp.pad(q_BKGTH, ((0, 0),) * 3 + ((0, padding), (0, 0)))
        q_positions_BT = jnp.pad(q_positions_BT, ((0, 0), (0, padding)), mode="edge")

    def allowed(positions_BC):
        gap_BTC = q_positions_BT[:, :, None] - positions_BC[:, None, :]
        allowed_BTC = (gap_BTC >= 0) & (positions_BC[:, None, :] >= 0)
        return allowed_BTC & (gap_BTC < window) if window else allowed_BTC

    def read(start, size):
        """Keys, values and which query may see which of so many slots from `start` on."""
        parts = [
            jax.lax.dynamic_slice_in_dim(part, start, size, axis) if size < slots else part
            for part, axis in ((k_BKHS, 3), (v_BKHS, 3), (k_positions_BS, 1))
        ]
        if rows_B is not None:
            parts = [part.at[rows_B].get(mode="clip") for part in parts]
        k_BKHC, v_BKHC, positions_BC = parts
        k_BKCH, v_BKCH = (jnp.swapaxes(y, 2, 3) for y in (k_BKHC, v_BKHC))
        return k_BKCH, v_BKCH, allowed(positions_BC)

    # For one query a GPU reads all at once, since there each turn of a loop waits for the host.
    platform = sharding.platform()
    size = _CACHE_BLOCK if platform == "cpu" else 4 * _CACHE_BLOCK
    size = slots if platform == "gpu" and queries == 1 else size
    in_blocks = used is not None and slots > size
    if probs_fn is not None or newest is None and not in_blocks:
        out_BKGTH, _ = _softmax_values(q_BKGTH, *read(0, slots), softcap, probs_fn)
    else:
        running = _nothing_read(q_BKGTH)
        if newest is not None:
            parts = newest
            if rows_B is not None:
                parts = [part.at[rows_B].get(mode="clip") for part in parts]
            k_BCKH, v_BCKH, positions_BC = parts
            allowed_BTC = allowed(positions_BC)
            k_BKCH, v_BKCH = (jnp.swapaxes(y, 1, 2) for y in (k_BCKH, v_BCKH))
            running = _read_too(running, q_BKGTH, k_BKCH, v_BKCH, allowed_BTC, softcap)
        if in_blocks:
            running = _read_blocks(running, q_BKGTH, read, slots, size, used, softcap)
        else:
            running = _read_too(running, q_BKGTH, *read(0, slots), softcap)
        _, sum_BKGT, out_BKGTH = running
        out_BKGTH = out_BKGTH / jnp.maximum(sum_BKGT, 1e-30)[..., None]
    return _join_heads(out_BKGTH[..., :queries, :].astype(q_BTNH.dtype))


def _nothing_read(q_BKGTH):
    """What `_read_too` goes on from: the largest score so far, the sum of the weights as they are
    beside it, and that of the values with them; in float32."""
    shape = q_BKGTH.shape[:-1]
    return (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q_BKGTH.shape, jnp.float32),
    )


def _read_too(running, q_BKGTH, k_BKCH, v_BKCH, allowed_BTC, softcap):
    """A softmax over more keys and values, by rescaling what has been summed whenever a larger
    score comes (Milakov and Gimelshein 2018, arXiv 1805.02867)."""
    top_BKGT, sum_BKGT, out_BKGTH = running
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
    return new_BKGT, sum_BKGT, out_BKGTH * keep_BKGT[..., None] + values_BKGTH


def _read_blocks(running, q_BKGTH, read, slots, size, used, softcap):
    """`_read_too` of the first `used` slots, `size` at a time."""

    def any_left(carry):
        return carry[0] * size < used

    def block(carry):
        i, *running = carry
        # The last block is moved back to end with the cache; what it has in common with the one
        # before counts once.
        start = jnp.minimum(i * size, slots - size)
        k_BKCH, v_BKCH, allowed_BTC = read(start, size)
        slot_C = start + jnp.arange(size)
        allowed_BTC = allowed_BTC & (slot_C >= i * size)[None, None]
        return i + 1, *_read_too(running, q_BKGTH, k_BKCH, v_BKCH, allowed_BTC, softcap)

    return jax.lax.while_loop(any_left, block, (jnp.int32(0), *running))[1:]


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
    out_BKGTH, seen = _softmax_values(q_BKGTH, k_BKSH, v_BKSH, allowed_BTS, softcap, probs_fn)
    if probs_fn is not None:
        probs_fn.block_outputs.append(jax.tree.map(lambda y: y[None], seen))
    return _join_heads(out_BKGTH)


def _softmax_values(q_BKGTH, k_BKSH, v_BKSH, allowed_BTS, softcap, probs_fn, starts=(0, 0)):
    """(values [B, K, G, T, H], what `probs_fn` returns beside the probabilities)"""
    scores_BKGTS = _cache_scores(q_BKGTH, k_BKSH, allowed_BTS, softcap)
    probs_BKGTS, seen = jax.nn.softmax(scores_BKGTS, axis=-1), None
    if probs_fn is not None:
        probs_BKGTS, seen = probs_fn(probs_BKGTS, *starts, allowed_BTS)
    return jnp.einsum("BKGTS,BKSH->BKGTH", probs_BKGTS.astype(v_BKSH.dtype), v_BKSH), seen
