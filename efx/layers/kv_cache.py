"""The KV cache: its variables, and attention of new tokens over it."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from efx.layers.attend import attend_cache, attend_masked, visible
from efx.layers.selection import distinct

KEYS_AND_VALUES = "cached_key", "cached_value"
_SLOTS = *KEYS_AND_VALUES, "position"  # -1 in an empty slot: no query sees its key and value


def variables(module, tag, **makers):
    """{name: variable} of the collection `cache`.

    Args:
      tag: name of this use of a layer that is used several times; its variables are one level
        deeper. "": the layer is used once.
      makers: {name: function that makes the initial value}.
    """
    if tag:
        return _Tagged(name=tag, parent=module)(makers)
    return {name: module.variable("cache", name, make) for name, make in makers.items()}


class _Tagged(nn.Module):
    @nn.compact
    def __call__(self, makers):
        return variables(self, "", **makers)


# ---- attention over the cache ------------------------------------------------------------------


def attend_cached(module, q_BTNH, k_BTKH, v_BTKH, call, key_call, dropout, *, window=0, **options):
    """Append new keys and values to the module's cache, then attend over all of it.

    Slots fill in order of arrival, each with the position of its token, so the cache of a routed
    block holds only the tokens that are routed through it. Padding (negative positions) is not
    stored.

    Args:
      module: linen module, in its compact method, that owns the cache.
      call: of the queries; with documents (`segment_ids_BT`) these are groups, see
        `_attend_group`. key_call: of the keys and values; it differs only in groups.
      dropout: module that drops probabilities, such as `dropout.StandardDropout`, or None.
      options: `scale` and `softcap`.
    Returns: [B, T, N, H], or None if the call only writes; it then needs no queries.
    """
    if call.segment_ids_BT is not None:
        arrays = q_BTNH, k_BTKH, v_BTKH
        return _attend_group(module, *arrays, call, key_call, dropout, window=window, **options)
    size, rows_B = call.cache.kv_size or call.cache.size, call.cache.rows_B

    def make_slots():
        rows, _, heads, width = k_BTKH.shape
        return jnp.zeros((rows, heads, width, size), module.dtype)

    cache = variables(
        module,
        call.cache.tag,
        cached_key=make_slots,
        cached_value=make_slots,
        position=lambda: jnp.full((len(k_BTKH), size), -1, jnp.int32),
        used=lambda: jnp.zeros((len(k_BTKH),), jnp.int32),
    )
    if module.is_initializing():
        return q_BTNH
    if call.cache.access != "read":
        _store(cache, k_BTKH, v_BTKH, call.for_rows(len(k_BTKH)).positions_BT, rows_B)
    if call.cache.access == "write":
        return None
    call = call.for_rows(len(q_BTNH))
    slots = [cache[name].value for name in _SLOTS]
    if dropout is None:
        num_used = jnp.max(cache["used"].value)
        options |= dict(window=window, num_used=num_used, rows_B=rows_B)
        return attend_cache(q_BTNH, call.positions_BT, *slots, **options)
    if rows_B is not None:
        slots = [x.at[rows_B].get(mode="clip") for x in slots]
    k_BSKH, v_BSKH = (jnp.moveaxis(x, 3, 1) for x in slots[:2])
    allowed_BTS = visible(call.positions_BT, slots[2], window)
    drop_probs = partial(dropout.drop_probs, call=call, key_positions_BS=slots[2])
    return attend_masked(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, drop_probs=drop_probs, **options)


def _store(cache, k_BTKH, v_BTKH, positions_BT, rows_B):
    """Store new tokens in the variables of the cache."""
    size, used_B = cache["position"].value.shape[1], cache["used"].value
    is_token_BT = positions_BT >= 0
    if rows_B is not None:
        used_B = used_B.at[rows_B].get(mode="fill", fill_value=0)
    slot_BT = used_B[:, None] + jnp.cumsum(is_token_BT, axis=1) - 1
    slot_BT = distinct(jnp.where(is_token_BT, slot_BT, size), size)  # out of range: dropped
    row_B = jnp.arange(len(k_BTKH)) if rows_B is None else rows_B

    def with_dropped(y_BT, fill):
        # One entry more, which is dropped. XLA:CPU turns a scatter of one entry into a slice
        # update, fuses it into every reader and so copies the whole cache.
        y_C = y_BT.reshape(-1, *y_BT.shape[2:])
        return jnp.concatenate([y_C, jnp.full((1, *y_C.shape[1:]), fill, y_C.dtype)])

    row_C = with_dropped(jnp.broadcast_to(row_B[:, None], slot_BT.shape), 0)
    slot_C = with_dropped(slot_BT, size + slot_BT.shape[1])
    for name, y_BT in zip(_SLOTS, (k_BTKH, v_BTKH, positions_BT), strict=True):
        slots = cache[name]
        index = (row_C, *[slice(None)] * (y_BT.ndim - 2), slot_C)
        y_C = with_dropped(y_BT.astype(slots.value.dtype), 0)
        slots.value = slots.value.at[index].set(y_C, mode="drop", unique_indices=True)
    cache["used"].value = add_to_rows(cache["used"].value, jnp.sum(is_token_BT, axis=1), rows_B)


def add_to_rows(total, new, rows_B):
    """Add `new` to the rows `rows_B` of `total`; None: to all rows, in order."""
    if rows_B is None:
        return total + new
    return total.at[rows_B].add(new, mode="drop", unique_indices=True)


# ---- groups ------------------------------------------------------------------------------------


def _attend_group(module, q_BTNH, k_BSKH, v_BSKH, call, key_call, dropout, *, window, **options):
    """Attention of new tokens over those of their own group; the cache holds the last group.

    A slot is a position in a group. Segment ids mask the slots of earlier groups. The new tokens,
    which may belong to several groups, also see each other.

    Args:
      call, key_call: positions_BT are positions in a group, negative for padding, segment_ids_BT
        number groups, and cache.size is the size of a group.
    """
    rows, _, heads, width = k_BSKH.shape
    size, dtype = key_call.cache.size, module.dtype
    cache = variables(
        module,
        call.cache.tag,
        cached_key=lambda: jnp.zeros((rows, size, heads, width), dtype),
        cached_value=lambda: jnp.zeros((rows, size, heads, width), dtype),
        position=lambda: jnp.full((rows, size), -1, jnp.int32),
        group=lambda: jnp.zeros((rows, size), jnp.int32),
    ).values()
    if module.is_initializing():
        return q_BTNH
    position_BS, group_BS = key_call.positions_BT, key_call.segment_ids_BT
    new = [
        y.astype(slots.value.dtype)
        for slots, y in zip(cache, (k_BSKH, v_BSKH, position_BS, group_BS), strict=True)
    ]
    all_k, all_v, all_position_BS, all_group_BS = (
        jnp.concatenate([slots.value, y], axis=1) for slots, y in zip(cache, new, strict=True)
    )
    allowed_BTS = visible(call.positions_BT, all_position_BS, window)
    allowed_BTS = allowed_BTS & (all_group_BS[:, None] == call.segment_ids_BT[:, :, None])
    if dropout is not None:
        options["drop_probs"] = partial(
            dropout.drop_probs, call=call, key_positions_BS=all_position_BS
        )
    out_BTNH = attend_masked(q_BTNH, all_k, all_v, allowed_BTS, **options)
    # Only the last group of a call may continue.
    is_last_BS = (position_BS >= 0) & (group_BS == jnp.max(group_BS, axis=1, keepdims=True))
    slot_BS = distinct(jnp.where(is_last_BS, position_BS, size), size)
    row_B1 = jnp.arange(rows)[:, None]
    for slots, y in zip(cache, new, strict=True):
        slots.value = slots.value.at[row_B1, slot_BS].set(y, mode="drop", unique_indices=True)
    return out_BTNH
