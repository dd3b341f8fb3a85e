"""Select tokens, gather them and scatter results: pure functions with static shapes.

A selection is a mask, bool [B, T]. `compact` turns it into the positions [B, C] of the selected
tokens, in time order, by which `gather`, `scatter_add` and `scatter_set` work. Unused slots hold
distinct out-of-range positions: gathers fill them, scatters drop them, and the indices of a scatter
are unique (GPUs add duplicates in any order).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from efx.parallel import sharding

# Added to the causal limit: a burst of selected tokens early in a sequence does not overflow.
HEADROOM = 4
# Name of selections in `jax.checkpoint` policies, which save them: recomputed scores may select
# other tokens, and top-k costs a sort.
SELECTION = "selection"
_SCATTER = dict(mode="drop", unique_indices=True, indices_are_sorted=True)


# ---- how many tokens ---------------------------------------------------------------------------


def num_slots(rate, length):
    """C of top-k: ceil(rate * length), at least 1 and at most `length`."""
    # Rounding first: 0.07 * 100 must be 7 slots, not 8.
    return min(length, max(1, math.ceil(round(rate * length, 6))))


def num_causal_slots(rate, length):
    """C under the causal limit of `admit`, for a row of `length` tokens.

    Packed rows of more than HEADROOM + 1 documents may admit more tokens; these overflow.
    """
    if rate >= 1:
        return length
    return min(length, int(causal_limit(np, rate, length)) + HEADROOM)


def causal_limit(xp, rate, count):
    """ceil(rate * count) in float32, with numpy or jax.numpy as `xp`."""
    # Without the margin float32 would turn 0.07 * 100 into 8.
    return xp.ceil(np.float32(rate) * xp.asarray(count, np.float32) - np.float32(1e-3))


# ---- which tokens ------------------------------------------------------------------------------


def select_topk(scores_BT, rate, valid_BT, segment_ids_BT=None, largest_BC=None):
    """Mask of the ceil(rate * T) largest scores of each row. Looks ahead: not causal.

    Ties go to the earlier token. Only valid tokens are selected. In a packed row each document has
    slots in proportion to its length.

    Args:
      largest_BC: the result of `largest`, which costs a sort; None: computed here.
    """
    if segment_ids_BT is not None:
        return _select_topk_per_document(scores_BT, rate, valid_BT, segment_ids_BT)
    if largest_BC is None:
        largest_BC = largest(scores_BT, rate, valid_BT)
    slots = num_slots(rate, scores_BT.shape[1])
    scores_BT = jnp.where(valid_BT, scores_BT, -jnp.inf)
    kth_B1 = largest_BC[:, slots - 1 : slots]
    above_BT, tied_BT = scores_BT > kth_B1, scores_BT == kth_B1
    free_B1 = slots - jnp.sum(above_BT, axis=1, keepdims=True)
    selected_BT = above_BT | (tied_BT & (jnp.cumsum(tied_BT, axis=1) <= free_B1))
    return checkpoint_name(selected_BT & valid_BT, SELECTION)


def largest(scores_BT, rate, valid_BT):
    """The C largest scores of valid tokens of each row and the next one, descending.

    [B, C + 1], C of `num_slots`; without a next one if C = T.
    """
    length = scores_BT.shape[1]
    count = min(num_slots(rate, length) + 1, length)
    scores_BT = jnp.where(valid_BT, scores_BT, -jnp.inf)
    if sharding.shard_count("batch") == 1:
        return jax.lax.top_k(scores_BT, count)[0]
    # For `jax.lax.top_k` a mesh that splits the rows would gather all of them on each device.
    return jnp.sort(scores_BT, axis=1, descending=True)[:, :count]


def topk_threshold(scores_BT, rate, valid_BT, tokens_B, largest_BC=None):
    """Score threshold that selects about k = ceil(rate * n) of the n tokens of a row.

    The mean over rows, weighted by n, of the midpoint between the k-th largest score and the next.
    nan without valid tokens. With a slot for every token: below all scores.

    Args:
      tokens_B: n, tokens of each row without padding.
      largest_BC: as in `select_topk`.
    """
    slots = num_slots(rate, scores_BT.shape[1])
    if slots == scores_BT.shape[1]:
        return jnp.min(scores_BT) - 1.0
    if largest_BC is None:
        largest_BC = largest(scores_BT, rate, valid_BT)
    k_B1 = jnp.clip(causal_limit(jnp, rate, tokens_B).astype(jnp.int32), 1, slots)[:, None]
    kth_B = jnp.take_along_axis(largest_BC, k_B1 - 1, axis=1)[:, 0]
    next_B = jnp.take_along_axis(largest_BC, k_B1, axis=1)[:, 0]
    next_B = jnp.where(jnp.isfinite(next_B), next_B, kth_B - 1.0)  # all valid tokens are selected
    weight_B = jnp.isfinite(kth_B) * tokens_B
    middle_B = jnp.where(weight_B > 0, 0.5 * (kth_B + next_B), 0.0)
    return jnp.sum(weight_B * middle_B) / jnp.sum(weight_B)


def _select_topk_per_document(scores_BT, rate, valid_BT, segment_ids_BT):
    """`select_topk` for packed rows: top-k within each document."""
    length = scores_BT.shape[1]
    place_T = jnp.arange(length, dtype=jnp.int32)
    begins_BT = document_starts(segment_ids_BT)
    start_BT = jax.lax.cummax(jnp.where(begins_BT, place_T, 0), axis=1)
    last_BT = jnp.roll(begins_BT, -1, axis=1).at[:, -1].set(True)
    stop_BT = jax.lax.cummin(jnp.where(last_BT, place_T + 1, length), axis=1, reverse=True)
    # By document, then by falling score; the sort is stable, so of equals the earlier comes first.
    order_BT = jnp.lexsort((jnp.where(valid_BT, -scores_BT, jnp.inf), start_BT), axis=1)
    rank_BT = jax.vmap(
        lambda order: jnp.zeros_like(place_T).at[order].set(place_T, unique_indices=True)
    )(order_BT)
    # A document on [start, stop) has ceil(rate * stop) - ceil(rate * start) slots: a row has
    # ceil(rate * T).
    slots = np.ceil(np.round(rate * np.arange(length + 1), 6)).astype(np.int32)
    slots = jnp.minimum(jnp.asarray(slots), length)
    quota_BT = slots[stop_BT] - slots[start_BT]
    return checkpoint_name(valid_BT & (rank_BT - start_BT < quota_BT), SELECTION)


def document_starts(segment_ids_BT):
    """bool [B, T]: first token of each document, and of the padding, in packed rows."""
    return jnp.diff(segment_ids_BT, axis=1, prepend=-1) != 0


def running_count(selected_BT, segment_ids_BT=None):
    """Number of selected tokens up to and including t in the document of t, int32."""
    count_BT = jnp.cumsum(selected_BT, axis=1, dtype=jnp.int32)
    if segment_ids_BT is None:
        return count_BT
    begins_BT = document_starts(segment_ids_BT)
    begins_BT = begins_BT.reshape(*begins_BT.shape, *(1,) * (selected_BT.ndim - 2))
    before_BT = jnp.where(begins_BT, count_BT - selected_BT, 0)
    return count_BT - jax.lax.cummax(before_BT, axis=1)


def admit(selected_BT, rate, call, admitted_B=None, slots=None):
    """Admit selected tokens in order until the causal limit; returns their mask.

    At most ceil(rate * n) + HEADROOM of the first n tokens of a document are admitted (ceil(rate *
    n) in packed rows). Admission depends on earlier tokens alone: not on the length of the row, the
    size of a cache or the chunks of a prompt. With W_t the running count of selected tokens and
    R_t the limit, the running count of overflowing tokens is max(0, max_{s <= t} (W_s - R_s)).

    Args:
      selected_BT: bool [B, T], or [B, T, E] with a limit for each of E experts.
      call: `TokenContext` of these tokens; `count_BT`, or the position + 1, is n.
      admitted_B: int [B] or [B, E], tokens admitted before this call (decoding).
      slots: maximum number of admitted tokens of a row, or None. Binds only in packed rows of many
        documents.
    """
    admitted_BT = selected_BT
    if rate < 1:
        admitted_BT = selected_BT & _is_below_limit(selected_BT, rate, call, admitted_B)
    if slots is None:
        return admitted_BT
    return admitted_BT & (jnp.cumsum(admitted_BT, axis=1) <= slots)


def _is_below_limit(selected_BT, rate, call, admitted_B):
    """Mask of the tokens below the limit of `admit`; meaningful at selected tokens only."""
    count_BT = call.positions_BT + 1 if call.count_BT is None else call.count_BT
    headroom = HEADROOM if call.segment_ids_BT is None else 0
    limit_BT = causal_limit(jnp, rate, count_BT).astype(jnp.int32) + headroom
    limit_BT = limit_BT.reshape(*limit_BT.shape, *(1,) * (selected_BT.ndim - 2))
    if admitted_B is not None:
        limit_BT = limit_BT - admitted_B[:, None]
    excess_BT = running_count(selected_BT, call.segment_ids_BT) - limit_BT
    excess_BT = jnp.where(selected_BT, jnp.maximum(excess_BT, 0), 0)
    offset_BT = jnp.int32(0)
    if call.segment_ids_BT is not None:
        # Each document adds an offset larger than any excess: the running maximum starts again.
        begins_BT = document_starts(call.segment_ids_BT)
        offset_BT = jnp.cumsum(begins_BT, axis=1) * (selected_BT.shape[1] + 1)
        offset_BT = offset_BT.reshape(*offset_BT.shape, *(1,) * (selected_BT.ndim - 2))
    overflow_BT = jax.lax.cummax(excess_BT + offset_BT, axis=1)
    before_BT = jnp.pad(overflow_BT[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (excess_BT.ndim - 2))
    return overflow_BT == jnp.maximum(before_BT, offset_BT)


# ---- gather and scatter ------------------------------------------------------------------------


def compact(selected_BT, slots):
    """Positions [B, C] of the first `slots` selected tokens, in time order.

    Unused slots hold distinct positions >= T.
    """
    length = selected_BT.shape[1]
    rank_BT = jnp.cumsum(selected_BT, axis=1, dtype=jnp.int32) - 1
    time_T = jnp.arange(length, dtype=jnp.int32)
    unused_C = length + jnp.arange(slots, dtype=jnp.int32)
    # Tokens that are not selected, or do not fit, go to distinct slots out of range.
    slot_BT = jnp.where(selected_BT & (rank_BT < slots), rank_BT, slots + time_T)
    return jax.vmap(
        lambda slot_T: unused_C.at[slot_T].set(time_T, mode="drop", unique_indices=True)
    )(slot_BT)


def gather(x_BT, index_BC, fill=0):
    """Rows of x [B, T, ...] at these positions, [B, C, ...]; `fill` in unused slots."""
    # Vmapped over the batch: on a mesh that splits the batch this needs no collectives.
    return jax.vmap(
        lambda x, index: x.at[index].get(
            mode="fill", fill_value=fill, indices_are_sorted=True, unique_indices=True
        )
    )(x_BT, index_BC)


def scatter_add(x_BT, index_BC, y_BC):
    """x with y [B, C, ...] added at these positions."""
    return jax.vmap(lambda x, index, y: x.at[index].add(y.astype(x.dtype), **_SCATTER))(
        x_BT, index_BC, y_BC
    )


def scatter_set(x_BT, index_BC, y_BC):
    """x with y [B, C, ...] at these positions."""
    return jax.vmap(lambda x, index, y: x.at[index].set(y.astype(x.dtype), **_SCATTER))(
        x_BT, index_BC, y_BC
    )


def scale(y, weight):
    """float32 y [..., D] * weight [...], whatever the dtype of y."""
    return y.astype(jnp.float32) * weight[..., None]


def distinct(index, size):
    """Replace indices >= `size` by distinct ones out of range, so that a scatter stays unique."""
    unused = size + jnp.arange(index.shape[-1], dtype=index.dtype)
    return jnp.where(index < size, index, unused)


def loop_over_selected(module, selected_BT, slots, start, body, carries=False):
    """Compute all selected tokens in a while loop, `slots` of each row in an iteration.

    The number of selected tokens is unknown at compile time: usually one iteration is enough, and
    without selected tokens none runs. (XLA updates the carry of a loop in place, but copies the
    caches that a conditional returns.) Inference only: no reverse-mode gradient.

    Args:
      module: an initialised module.
      selected_BT: bool [B, T], or [B, T, E] for positions [E, B, C] of each expert.
      body: (module, index_BC, out) -> out.
      carries: collections that `body` updates; False for none.
    """
    rank_BT = jnp.cumsum(selected_BT, axis=1)
    max_selected = jnp.max(rank_BT)

    def is_unfinished(module, carry):
        return carry[0] < max_selected

    def run_round(module, carry):
        done, out = carry
        left_BT = selected_BT & (rank_BT > done)
        if left_BT.ndim == 3:
            index = jax.vmap(compact, in_axes=(2, None))(left_BT, slots)
        else:
            index = compact(left_BT, slots)
        return done + slots, body(module, index, out)

    carry = (jnp.int32(0), start)
    return nn.while_loop(is_unfinished, run_round, module, carry, carry_variables=carries)[1]
