"""The KV cache: its variables, and attention of new tokens over it.

A loop over tokens keeps new keys and values pending (`start_pending`) and stores them in the slots
when it ends (`flush_pending`): compilers for TPUs lay out the slots either for writing one token or
for reading all, and in a loop that does both they move the whole cache at every token. GPUs store
each token at once, because attention over two arrays starts half as many kernels again.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers.attend import attend_cache, attend_masked, visible
from efx.layers.selection import distinct
from efx.parallel import sharding

KEYS_AND_VALUES = "cached_key", "cached_value"
_SLOTS = *KEYS_AND_VALUES, "position"  # -1 in an empty slot: no query sees its key and value
_PENDING = "pending_key", "pending_value", "pending_position", "pending_step"


def variables(module, tag, optional=(), **makers):
    """{name: variable} of the collection `cache`.

    Args:
      tag: name of this use of a layer that is used several times; its variables are one level
        deeper. "": the layer is used once.
      optional: names of variables that are included, last, if they exist.
      makers: {name: function that makes the initial value}.
    """
    if tag:
        return _Tagged(name=tag, parent=module)(optional, makers)
    result = {name: module.variable("cache", name, make) for name, make in makers.items()}
    for name in optional:
        if module.has_variable("cache", name):
            result[name] = module.variable("cache", name)
    return result


class _Tagged(nn.Module):
    @nn.compact
    def __call__(self, optional, makers):
        return variables(self, "", optional, **makers)


# ---- pending tokens ----------------------------------------------------------------------------


def start_pending(cache, tokens):
    """Add space for up to `tokens` pending tokens of each row to the cache. Layers then write the
    new token of a call into the space that `set_pending_step` selects, not into a slot. Not on a
    GPU, nor in caches of groups."""
    if sharding.platform() == "gpu":
        return cache

    def start(layer):
        *rows, heads, width, _ = layer["cached_key"].shape
        empty = jnp.zeros((*rows, tokens, heads, width), layer["cached_key"].dtype)
        position, step = jnp.full((*rows, tokens), -1, jnp.int32), jnp.zeros(rows, jnp.int32)
        return layer | dict(zip(_PENDING, (empty, empty, position, step), strict=True))

    return _map_layers(start, cache, "used")


def set_pending_step(cache, step):
    """Select the space of token number `step` of the loop."""

    def change(layer):
        return layer | {"pending_step": jnp.full_like(layer["pending_step"], step)}

    return _map_layers(change, cache, "pending_step")


def flush_pending(cache):
    """Store pending tokens in the slots and remove their space."""

    def flush(layer):
        slots = {name: value for name, value in layer.items() if name not in _PENDING}
        *new, _ = (layer[name] for name in _PENDING)
        return slots | _store(slots, *new)

    def flush_models(layer):
        function = flush
        for _ in range(layer["used"].ndim - 1):  # [B, models]: models that are decoded together
            function = jax.vmap(function, in_axes=1, out_axes=1)
        return function(layer)

    return _map_layers(flush_models, cache, "pending_step")


def _map_layers(change, cache, name):
    """Apply `change` to the KV cache of each layer that has the variable `name`."""
    if not isinstance(cache, dict):
        return cache
    if name in cache and "cached_key" in cache:
        return change(cache)
    return {key: _map_layers(change, value, name) for key, value in cache.items()}


# ---- attention over the cache ------------------------------------------------------------------


def attend_cached(module, q_BTNH, k_BTKH, v_BTKH, call, key_call, dropout, options):
    """Append new keys and values to the module's cache, then attend over all of it.

    Slots fill in order of arrival, each with the position of its token, so the cache of a routed
    block holds only the tokens that are routed through it. Padding (negative positions) is not
    stored.

    Args:
      module: linen module, in its compact method, that owns the cache.
      call: of the queries. key_call: of the keys and values; it differs only in groups.
      dropout: module that drops probabilities, such as `dropout.StandardDropout`, or None.
      options: keywords of `attend_cache`.
    Returns: [B, T, N, H], or None if the call only writes; it then needs no queries.
    """
    if call.cache.grouped:
        return _attend_group(module, q_BTNH, k_BTKH, v_BTKH, call, key_call, dropout, **options)
    size, rows_B = call.cache.kv_size or call.cache.size, call.cache.rows_B

    def make_slots():
        rows, _, heads, width = k_BTKH.shape
        return jnp.zeros((rows, heads, width, size), module.dtype)

    is_one_token = call.positions_BT.shape[1] == 1
    cache = variables(
        module,
        call.cache.tag,
        _PENDING if is_one_token and dropout is None else (),
        cached_key=make_slots,
        cached_value=make_slots,
        position=lambda: jnp.full((len(k_BTKH), size), -1, jnp.int32),
        used=lambda: jnp.zeros((len(k_BTKH),), jnp.int32),
    )
    if module.is_initializing():
        return q_BTNH
    if call.cache.access != "read":
        store = _store_pending if "pending_key" in cache else _store
        values = {name: variable.value for name, variable in cache.items()}
        positions_BT = call.for_rows(len(k_BTKH)).positions_BT
        for name, value in store(values, k_BTKH, v_BTKH, positions_BT, rows_B).items():
            cache[name].value = value
    if call.cache.access == "write":
        return None
    slots = [cache[name].value for name in _SLOTS]
    options = options | dict(num_used=jnp.max(cache["used"].value), rows_B=rows_B)
    if "pending_key" in cache:
        options["pending"] = [cache[name].value for name in _PENDING[:3]]
    if dropout is not None:
        position_BS = slots[2] if rows_B is None else slots[2].at[rows_B].get(mode="clip")
        options["probs_dropout"] = dropout.probs_dropout(call, position_BS)
    return attend_cache(q_BTNH, call.for_rows(len(q_BTNH)).positions_BT, *slots, **options)


def _store(cache, k_BTKH, v_BTKH, positions_BT, rows_B=None):
    """{name: value} of the variables of the cache that change when tokens are stored in slots."""
    size, is_real_BT, used_B = cache["position"].shape[1], positions_BT >= 0, cache["used"]
    if rows_B is not None:
        used_B = used_B.at[rows_B].get(mode="fill", fill_value=0)
    slot_BT = used_B[:, None] + jnp.cumsum(is_real_BT, axis=1) - 1
    slot_BT = distinct(jnp.where(is_real_BT, slot_BT, size), size)  # out of range: dropped
    store = _store_slices if sharding.platform() == "tpu" else _scatter
    slots = {name: cache[name] for name in _SLOTS}
    new = dict(zip(_SLOTS, (k_BTKH, v_BTKH, positions_BT), strict=True))
    row_B = jnp.arange(len(k_BTKH)) if rows_B is None else rows_B
    result = store(slots, new, row_B, slot_BT, used_B)
    result["used"] = add_to_rows(cache["used"], jnp.sum(is_real_BT, axis=1), rows_B)
    return result


def add_to_rows(total, new, rows_B):
    """Add `new` to the rows `rows_B` of `total`; None: to all rows, in order."""
    if rows_B is None:
        return total + new
    return total.at[rows_B].add(new, mode="drop", unique_indices=True)


def _scatter(slots, new, row_B, slot_BT, used_B):
    """{name: slots [R, ..., S] with `new` [B, T, ...] in row `row_B`, slot `slot_BT`}."""

    def with_dropped(y_BT, fill):
        # One entry more, which is dropped. XLA:CPU turns a scatter of one entry into a slice
        # update, fuses it into every reader and so copies the whole cache.
        y_C = y_BT.reshape(-1, *y_BT.shape[2:])
        return jnp.concatenate([y_C, jnp.full((1, *y_C.shape[1:]), fill, y_C.dtype)])

    row_C = with_dropped(jnp.broadcast_to(row_B[:, None], slot_BT.shape), 0)
    slot_C = with_dropped(slot_BT, slots["position"].shape[1] + slot_BT.shape[1])
    result = {}
    for name, y_BT in new.items():
        index = (row_C, *[slice(None)] * (y_BT.ndim - 2), slot_C)
        y_C = with_dropped(y_BT.astype(slots[name].dtype), 0)
        result[name] = slots[name].at[index].set(y_C, mode="drop", unique_indices=True)
    return result


def _store_slices(slots, new, row_B, slot_BT, used_B):
    """`_scatter`, with one slice update for each row: the slots of its tokens are adjacent. For a
    scatter into the last axis XLA:TPU moves the whole cache."""
    (rows, size), (batch, tokens) = slots["position"].shape, slot_BT.shape
    width = min(tokens, size)
    start_B = jnp.minimum(used_B, size - width)
    # Index of the new token in each slot of the slice, or -1. Rows out of range store none.
    is_stored_BT = (slot_BT < size) & (row_B < rows)[:, None]
    offset_BT = distinct(jnp.where(is_stored_BT, slot_BT - start_B[:, None], width), width)
    b_B1, empty_BC = jnp.arange(batch)[:, None], jnp.full((batch, width), -1)
    token_BT = jnp.broadcast_to(jnp.arange(tokens), slot_BT.shape)
    token_BC = empty_BC.at[b_B1, offset_BT].set(token_BT, mode="drop", unique_indices=True)
    new = {name: jnp.moveaxis(y[b_B1, token_BC], 1, -1) for name, y in new.items()}
    row_B = jnp.minimum(row_B, rows - 1)

    def store_row(b, slots):
        result = {}
        for name, y in slots.items():
            start = (row_B[b], *[0] * (y.ndim - 2), start_B[b])
            old = jax.lax.dynamic_slice(y, start, (1, *y.shape[1:-1], width))
            stored = jnp.where(token_BC[b] >= 0, new[name][b].astype(y.dtype), old)
            result[name] = jax.lax.dynamic_update_slice(y, stored, start)
        return result

    return jax.lax.fori_loop(0, batch, store_row, slots)


def _store_pending(cache, k_B1KH, v_B1KH, position_B1, rows_B=None):
    """{name: value} of the variables of the cache that change when one token of each row comes."""
    step, rows, result = cache["pending_step"][0], len(cache["used"]), {}
    for name, y_B1 in zip(_PENDING, (k_B1KH, v_B1KH, position_B1), strict=False):
        y_B1 = y_B1.astype(cache[name].dtype)
        if rows_B is not None:
            row_B = distinct(jnp.where(position_B1[:, 0] >= 0, rows_B, rows), rows)
            index = cache[name].at[row_B, step]
            result[name] = index.set(y_B1[:, 0], mode="drop", unique_indices=True)
            continue
        # A slice update, which XLA does in place.
        is_real = (position_B1 >= 0).reshape(-1, 1, *(1,) * (y_B1.ndim - 2))
        old_B1 = jax.lax.dynamic_slice_in_dim(cache[name], step, 1, axis=1)
        y_B1 = jnp.where(is_real, y_B1, old_B1)
        result[name] = jax.lax.dynamic_update_slice_in_dim(cache[name], y_B1, step, axis=1)
    return result


# ---- groups ------------------------------------------------------------------------------------

ALL_GROUPS = 1  # segment id of tokens that every group sees; those of groups are larger


def _attend_group(module, q_BTNH, k_BSKH, v_BSKH, call, key_call, dropout, *, window, **options):
    """Attention of new tokens over those of their own group; the cache holds the last group.

    A slot is a position in a group. Segment ids mask the slots of earlier groups; `ALL_GROUPS`
    marks memory tokens, which stay at positions of their own. The new tokens, which may belong to
    several groups, also see each other.

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
    same_BTS = all_group_BS[:, None] == call.segment_ids_BT[:, :, None]
    allowed_BTS = allowed_BTS & (same_BTS | (all_group_BS[:, None] == ALL_GROUPS))
    if dropout is not None:
        options["probs_dropout"] = dropout.probs_dropout(call, all_position_BS)
    out_BTNH = attend_masked(q_BTNH, all_k, all_v, allowed_BTS, **options)
    # Only the last group of a call may continue.
    is_last_BS = (position_BS >= 0) & (group_BS == jnp.max(group_BS, axis=1, keepdims=True))
    slot_BS = distinct(jnp.where(is_last_BS, position_BS, size), size)
    row_B1 = jnp.arange(rows)[:, None]
    for slots, y in zip(cache, new, strict=True):
        slots.value = slots.value.at[row_B1, slot_BS].set(y, mode="drop", unique_indices=True)
    return out_BTNH
