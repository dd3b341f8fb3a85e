"""Causal selection: the limit on selected tokens, for whole sequences and while decoding."""

import jax
import jax.numpy as jnp
import optax

from efx.layers import batch_means, kv_cache, selection


def admit(module, selected, rate, slots, call):
    """(mask of the tokens that `selection.admit` admits, counts of earlier ones or None).

    While decoding, the collection `cache` counts the tokens that were admitted (`admitted`, [B] or
    [B, E]) and those over the limit (`overflow`, [B]).

    Args:
      module: linen module, in a compact method, that owns the counts.
      selected: bool [B, T], or [B, T, E] with a limit for each of E experts.
      slots: see `selection.admit`; unused while decoding.
    """
    if not call.decode:
        return selection.admit(selected, rate, call, slots=slots), None
    rows, experts = len(selected), selected.shape[2:]
    admitted, overflow = kv_cache.variables(
        module,
        call.cache.tag,
        admitted=lambda: jnp.zeros((rows, *experts), jnp.int32),
        overflow=lambda: jnp.zeros((rows,), jnp.int32),
    ).values()
    before = admitted.value
    if module.is_initializing():
        return selected, before
    rows_B = call.cache.rows_B
    if rows_B is not None:
        before = before.at[rows_B].get(mode="fill", fill_value=0)
    mask = selection.admit(selected, rate, call, before)
    over = selected & ~mask
    admitted.value = kv_cache.add_to_rows(admitted.value, jnp.sum(mask, axis=1), rows_B)
    overflow.value = kv_cache.add_to_rows(
        overflow.value, jnp.sum(over, axis=tuple(range(1, over.ndim))), rows_B
    )
    return mask, before


def choose_by_sign(module, logits_BTE, capacity, rate, slots, call, loss):
    """Expert choice: the tokens that each expert computes.

    Training takes the top-k of a sequence, which looks ahead; evaluation and sampling take the
    tokens with logit > 0 under the causal limit. Sows the loss of this name, which trains
    logit > 0 to agree with top-k.

    Args:
      capacity: fraction of a sequence that top-k selects. rate, slots: as in `admit`.
    Returns: masks [B, T, E]: computed, selected by logit > 0, admitted of these, top-k (None while
      decoding).
    """
    valid_BT = call.valid_mask(len(logits_BTE))
    selected_BTE = (logits_BTE > 0) & valid_BT[..., None]
    admitted_BTE, _ = admit(module, selected_BTE, rate, slots, call)
    if call.decode:
        return admitted_BTE, selected_BTE, admitted_BTE, None
    select_topk = jax.vmap(selection.select_topk, (2, None, None, None), 2)
    scores_BTE = jax.lax.stop_gradient(logits_BTE)
    topk_BTE = select_topk(scores_BTE, capacity, valid_BT, call.segment_ids_BT)
    if batch_means.is_collecting(module):
        bce_BTE = optax.sigmoid_binary_cross_entropy(logits_BTE, topk_BTE.astype(jnp.float32))
        bce = batch_means.over(jnp.mean(bce_BTE, axis=-1), valid_BT)
        batch_means.sow(module, "losses", loss, bce)
    computed_BTE = topk_BTE if call.looks_ahead else admitted_BTE
    return computed_BTE, selected_BTE, admitted_BTE, topk_BTE


def count_tokens(module, name, mask_BT, call):
    """Add the number of marked tokens of each row to the count `name` [B] in the cache."""
    rows = len(mask_BT)
    (total,) = kv_cache.variables(
        module, "", **{name: lambda: jnp.zeros((rows,), jnp.int32)}
    ).values()
    if not module.is_initializing():
        total.value = kv_cache.add_to_rows(total.value, jnp.sum(mask_BT, axis=1), call.cache.rows_B)
