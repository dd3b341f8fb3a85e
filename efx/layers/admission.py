"""The causal limit while decoding: the cache counts the tokens that were admitted."""

import jax.numpy as jnp

from efx.layers import kv_cache, selection


def admit_new_tokens(module, selected, rate, call, names):
    """(mask of the new tokens that `selection.admit` admits, counts of earlier ones).

    Args:
      module: linen module, in a compact method, that owns the counts in the collection `cache`.
      selected: bool [B, T], or [B, T, E] with a limit for each of E experts.
      names: of the counts of admitted tokens, [B] or [B, E], and of refused ones, [B].
    """
    rows, experts = len(selected), selected.shape[2:]
    admitted, refused = kv_cache.variables(
        module,
        call.cache.tag,
        **{
            names[0]: lambda: jnp.zeros((rows, *experts), jnp.int32),
            names[1]: lambda: jnp.zeros((rows,), jnp.int32),
        },
    ).values()
    before = admitted.value
    if module.is_initializing():
        return selected, before
    rows_B = call.cache.rows_B
    if rows_B is not None:
        before = before.at[rows_B].get(mode="fill", fill_value=0)
    mask = selection.admit(selected, rate, call, before)
    lost = selected & ~mask
    admitted.value = kv_cache.add_to_rows(admitted.value, jnp.sum(mask, axis=1), rows_B)
    refused.value = kv_cache.add_to_rows(
        refused.value, jnp.sum(lost, axis=tuple(range(1, lost.ndim))), rows_B
    )
    return mask, before


def count_tokens(module, name, mask_BT, call):
    """Add the number of marked tokens of each row to the count `name` [B] in the cache."""
    rows = len(mask_BT)
    (total,) = kv_cache.variables(
        module, "", **{name: lambda: jnp.zeros((rows,), jnp.int32)}
    ).values()
    if not module.is_initializing():
        total.value = kv_cache.add_to_rows(total.value, jnp.sum(mask_BT, axis=1), call.cache.rows_B)
