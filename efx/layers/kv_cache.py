"""The decoding cache: its variables, and attention of new tokens over the tokens before them, whose
keys and values it holds.

A loop over tokens keeps its own apart from those in the slots (`with_newest`) and stores them when
it has ended (`absorbed`). Compilers for TPUs lay the slots out either for writing one token or for
reading all, and where a loop does both they move the whole cache at every token. On a GPU, where
they do not, each token is stored when it comes: what it costs there is how many kernels are
started, and attention over two places takes half as many again in all of a layer.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import sharding
from efx.layers.attend import attend_cache, attend_pairs
from efx.routing.plans import NO_TWO_ALIKE, apart


def variables(module, tag, optional=(), **makers):
    """{name: variable} of the collection `cache`, each made by its function where it is missing;
    after them the optional ones, those that are there.

    With a tag, which tells apart the uses of a layer that is used several times, they lie one
    level deeper, under the tag: their own names say what they hold, whatever the use.
    """
    if tag:
        return _Tagged(name=tag, parent=module)(optional, makers)
    there = [name for name in optional if module.has_variable("cache", name)]
    return {name: module.variable("cache", name, make) for name, make in makers.items()} | {
        name: module.variable("cache", name) for name in there
    }


class _Tagged(nn.Module):
    """A place for variables of one use of a layer."""

    @nn.compact
    def __call__(self, optional, makers):
        return variables(self, "", optional, **makers)


SEEN_BY_POSITION = "cached_key", "cached_value"
_NEWEST = "newest_key", "newest_value", "newest_position", "newest_step"


def with_newest(cache, tokens):
    """The cache with room for so many tokens of each row that are apart from the slots, and none
    there yet. Layers then leave the slots as they are, and put the one new token of a call into
    the place that `at_step` says. (Not where learned masks lie on the slots, nor in caches of
    groups, nor on a GPU: these store at every call.)"""
    if sharding.platform() == "gpu":
        return cache

    def change(layer):
        *rows, heads, width, _ = layer["cached_key"].shape
        empty = jnp.zeros((*rows, tokens, heads, width), layer["cached_key"].dtype)
        position, step = jnp.full((*rows, tokens), -1, jnp.int32), jnp.zeros(rows, jnp.int32)
        return layer | dict(zip(_NEWEST, (empty, empty, position, step), strict=True))

    return _with_slots_changed(cache, change)


def at_step(cache, step):
    """The cache of `with_newest` for the token of a step."""

    def change(layer):
        return layer | {"newest_step": jnp.full_like(layer["newest_step"], step)}

    return _with_newest_changed(cache, change)


def absorbed(cache):
    """The cache of `with_newest` as it was before that, with the tokens that came stored."""

    def store(layer):
        slots = {name: value for name, value in layer.items() if name not in _NEWEST}
        k_BNKH, v_BNKH, position_BN, _ = (layer[name] for name in _NEWEST)
        return slots | _stored(slots, k_BNKH, v_BNKH, position_BN)

    def change(layer):
        several = layer["used"].ndim - 1  # models that are decoded together
        function = store
        for _ in range(several):
            function = jax.vmap(function, in_axes=1, out_axes=1)
        return function(layer)

    return _with_newest_changed(cache, change)


def _with_newest_changed(cache, change):
    """The cache with another {name: array} for each layer that has room for tokens apart."""

    def changed(layer):
        return change(layer) if "newest_step" in layer else layer

    return _with_slots_changed(cache, changed)


def _with_slots_changed(cache, change):
    """The cache with another {name: array} for each layer that has slots to be filled in order."""
    if not isinstance(cache, dict):
        return cache
    if "cached_key" in cache and "used" in cache:
        return change(cache)
    return {name: _with_slots_changed(value, change) for name, value in cache.items()}


def admit(module, wanted, room, call, computed, refused):
    """Those of the new tokens that are wanted which find room, by how many of their row the cache
    says were computed before: a full forward pass of length `call.cache.size` computes the same.
    Inside of groups every group is such a row.

    Args:
      wanted: bool [B, T], or [B, T, E] with a room in each of E experts.
      room: how many of a row.
      computed, refused: names of the variables that count them, [B] or [B, E], and [B].
    """
    rows = len(wanted)
    makers = {
        computed: lambda: jnp.zeros((rows, *wanted.shape[2:]), jnp.int32),
        refused: lambda: jnp.zeros((rows,), jnp.int32),
    }
    if call.cache.grouped:
        return _admit_in_groups(module, wanted, room, call, makers)
    count, lost = variables(module, call.cache.tag, **makers).values()
    if module.is_initializing():
        return wanted
    before, rows_B = count.value, call.cache.rows_B
    if rows_B is not None:
        before = before.at[rows_B].get(mode="fill", fill_value=0)
    run = wanted & (before[:, None] + jnp.cumsum(wanted, axis=1) <= room)
    count.value = _added(count.value, jnp.sum(run, axis=1), rows_B)
    lost_B = jnp.sum(wanted & ~run, axis=tuple(range(1, wanted.ndim)))
    lost.value = _added(lost.value, lost_B, rows_B)
    return run


def count(module, name, counted_BT, call):
    """Adds the new tokens of each row that are counted to the variable `name` [B] of the cache."""
    rows = len(counted_BT)
    (total,) = variables(module, "", **{name: lambda: jnp.zeros((rows,), jnp.int32)}).values()
    if not module.is_initializing():
        total.value = _added(total.value, jnp.sum(counted_BT, axis=1), call.cache.rows_B)


def _added(total, new, rows_B):
    """total with `new` added: to these rows of it, no two of which are alike and of which those
    out of range are none, or, for None, to all in order, which no scatter has to do."""
    return total + new if rows_B is None else total.at[rows_B].add(new, **NO_TWO_ALIKE)


def _admit_in_groups(module, wanted, room, call, makers):
    """`admit` where room is counted for the last group, from what `ALL_GROUPS` have taken on,
    which are a part of every group."""
    rows = len(wanted)
    total, lost, count, shared, group = variables(
        module,
        call.cache.tag,
        **makers,
        of_group=lambda: jnp.zeros((rows, *wanted.shape[2:]), jnp.int32),
        shared=lambda: jnp.zeros((rows, *wanted.shape[2:]), jnp.int32),
        group=lambda: jnp.zeros((rows,), jnp.int32),
    ).values()
    if module.is_initializing():
        return wanted

    def wide(y):
        return y.reshape(*y.shape, *(1,) * (wanted.ndim - 2))

    def before(group_BT, kept_BT):
        return jnp.where(wide(group_BT == kept_BT), count.value[:, None], shared.value[:, None])

    group_BT, valid_BT = call.segment_ids_BT, call.positions_BT >= 0
    begins_BT = jnp.diff(group_BT, axis=1, prepend=-1) != 0
    upto = jnp.cumsum(wanted, axis=1)
    earlier = jax.lax.cummax(jnp.where(wide(begins_BT), upto - wanted, 0), axis=1)
    last_B1 = jnp.max(jnp.where(valid_BT, group_BT, 0), axis=1, keepdims=True)
    last_B1 = jnp.where(last_B1 > 0, last_B1, group.value[:, None])
    run = wanted & (before(group_BT, group.value[:, None]) + upto - earlier <= room)
    of_last = jnp.sum(run & wide(group_BT == last_B1), axis=1)
    count.value = before(last_B1, group.value[:, None])[:, 0] + of_last
    shared.value = jnp.where(wide(last_B1 == ALL_GROUPS)[:, 0], count.value, shared.value)
    group.value = last_B1[:, 0]
    total.value = total.value + jnp.sum(run, axis=1)
    lost.value = lost.value + jnp.sum(wanted & ~run, axis=tuple(range(1, wanted.ndim)))
    return run


def attend_cached(module, q_BTNH, k_BTKH, v_BTKH, call, k_call, dropout, options):
    """Append the new keys and values to the module's cache, then attend over all of it.

    Slots fill in order of arrival and every slot remembers its token's position, so a routed
    block's cache is as short as the tokens routed through it. Padding (negative positions)
    is not stored. `call.cache.rows_B` picks rows of the cache when only some rows run.

    Args:
      module: the linen module, in its compact method, whose variables the cache is.
      call: of the queries. k_call: of the keys and values, the same but inside of groups.
      dropout: module for the probabilities (see `dropout.StandardDropout.probs_dropout`), or None.
      options: keywords of `attend_cache`.
    Returns: [B, T, N, H]; where a layer only writes, for which there need be no queries, None.
    """
    if call.cache.grouped:
        return attend_group(module, q_BTNH, k_BTKH, v_BTKH, call, k_call, dropout, **options)
    size, dtype = call.cache.kv_size or call.cache.size, module.dtype

    def zeros(make_shape):
        # The rows of the cache are made when it is initialised, by a full batch.
        return lambda: jnp.zeros(make_shape(*k_BTKH.shape), dtype)

    one = call.positions_BT.shape[1] == 1
    slots = variables(
        module,
        call.cache.tag,
        _NEWEST if one and dropout is None else (),
        cached_key=zeros(lambda rows, _, heads, width: (rows, heads, width, size)),
        cached_value=zeros(lambda rows, _, heads, width: (rows, heads, width, size)),
        position=lambda: jnp.full((len(k_BTKH), size), -1, jnp.int32),
        used=lambda: jnp.zeros((len(k_BTKH),), jnp.int32),
    )
    if module.is_initializing():
        return q_BTNH
    rows_B = call.cache.rows_B
    if call.cache.access != "read":
        store = _kept_apart if "newest_key" in slots else _stored
        before = {name: variable.value for name, variable in slots.items()}
        positions_BT = call.for_rows(len(k_BTKH)).positions_BT
        for name, value in store(before, k_BTKH, v_BTKH, positions_BT, rows_B).items():
            slots[name].value = value
    if call.cache.access == "write":
        return None
    key, value, position_BS, used, *newest = (variable.value for variable in slots.values())
    probs_fn = None
    if dropout is not None:
        seen_BS = position_BS if rows_B is None else position_BS.at[rows_B].get(mode="clip")
        probs_fn = dropout.probs_dropout(call, seen_BS)
    return attend_cache(
        q_BTNH,
        key,
        value,
        call.for_rows(len(q_BTNH)).positions_BT,
        position_BS,
        used=jnp.max(used),
        newest=tuple(newest[:3]) or None,
        rows_B=rows_B,
        probs_fn=probs_fn,
        **options,
    )


def _stored(slots, k_BTKH, v_BTKH, positions_BT, rows_B=None):
    """{name: array} of the slots that change when tokens come; padding is left out."""
    size, valid_BT, used_B = slots["cached_value"].shape[3], positions_BT >= 0, slots["used"]
    if rows_B is not None:
        used_B = used_B.at[rows_B].get(mode="fill", fill_value=0)
    slot_BT = used_B[:, None] + jnp.cumsum(valid_BT, axis=1) - 1
    slot_BT = apart(jnp.where(valid_BT, slot_BT, size), size)  # out of range: dropped
    store = _by_slices if sharding.platform() == "tpu" else _one_by_one
    new = {"cached_key": k_BTKH, "cached_value": v_BTKH, "position": positions_BT}
    row_B = jnp.arange(len(k_BTKH)) if rows_B is None else rows_B
    result = store({name: slots[name] for name in new}, new, row_B, slot_BT, used_B)
    result["used"] = _added(slots["used"], jnp.sum(valid_BT, axis=1), rows_B)
    return result


def _one_by_one(slots, new, row_B, slot_BT, used_B):
    """{name: slots [R, ..., S] with the new [B, T, ...] in them}, each token on its own."""
    # One entry for each new token, and one that is dropped: XLA:CPU makes a slice update of a
    # scatter of a single entry, fuses it into every reader and so copies the whole cache.
    row_C = _and_one(jnp.broadcast_to(row_B[:, None], slot_BT.shape), 0)
    slot_C = _and_one(slot_BT, slots["position"].shape[1] + slot_BT.shape[1])
    result = {}
    for name, y in new.items():
        places = (row_C, *[slice(None)] * (y.ndim - 2), slot_C)
        y_C = _and_one(y.astype(slots[name].dtype), 0)
        result[name] = slots[name].at[places].set(y_C, **NO_TWO_ALIKE)
    return result


def _by_slices(slots, new, row_B, slot_BT, used_B):
    """`_one_by_one`, but a row at a time, its tokens as one slice: the slots that they take follow
    each other. For a scatter into its last axis a TPU's compiler moves the whole cache."""
    (rows, size), (batch, tokens) = slots["position"].shape, slot_BT.shape
    width = min(tokens, size)
    start_B = jnp.minimum(used_B, size - width)
    # Which of the new tokens, if any, goes into each slot of the slice; no row out of range.
    b_B1 = jnp.arange(batch)[:, None]
    place_BT = jnp.where(slot_BT < size, slot_BT - start_B[:, None], width)
    place_BT = apart(jnp.where((row_B < rows)[:, None], place_BT, width), width)
    token_BT = jnp.broadcast_to(jnp.arange(tokens), slot_BT.shape)
    token_BC = jnp.full((batch, width), -1).at[b_B1, place_BT].set(token_BT, **NO_TWO_ALIKE)
    new = {name: jnp.moveaxis(y[b_B1, token_BC], 1, -1) for name, y in new.items()}
    row_B = jnp.minimum(row_B, rows - 1)

    def put(b, slots):
        result = {}
        for name, y in slots.items():
            place = (row_B[b], *[0] * (y.ndim - 2), start_B[b])
            before = jax.lax.dynamic_slice(y, place, (1, *y.shape[1:-1], width))
            after = jnp.where(token_BC[b] >= 0, new[name][b].astype(y.dtype), before)
            result[name] = jax.lax.dynamic_update_slice(y, after, place)
        return result

    return jax.lax.fori_loop(0, batch, put, slots)


def _kept_apart(slots, k_B1KH, v_B1KH, position_B1, row_B=None):
    """{name: array} of what is apart from the slots when one token of each row comes."""
    step = slots["newest_step"][0]
    new = dict(zip(_NEWEST, (k_B1KH, v_B1KH, position_B1), strict=False))
    if row_B is not None:
        # A row without a token goes nowhere, and neither does one that is not among the rows.
        row_B = jnp.where(position_B1[:, 0] >= 0, row_B, len(slots["used"]))
        row_B = apart(row_B, len(slots["used"]))

        def stored(y, new_B1):
            return y.at[row_B, step].set(new_B1[:, 0].astype(y.dtype), **NO_TWO_ALIKE)

        return {name: stored(slots[name], y) for name, y in new.items()}
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=step, axis=1)
    result = {}
    for name, y in new.items():
        valid = (position_B1 >= 0).reshape(-1, 1, *(1,) * (y.ndim - 2))
        before = jax.lax.dynamic_slice_in_dim(slots[name], step, 1, axis=1)
        result[name] = put(slots[name], jnp.where(valid, y.astype(before.dtype), before))
    return result


def _and_one(y, fill):
    """y [B, T, ...] as [B*T + 1, ...], the last entry `fill`."""
    y = y.reshape(-1, *y.shape[2:])
    return jnp.concatenate([y, jnp.full((1, *y.shape[1:]), fill, y.dtype)])


ALL_GROUPS = 1  # number of what the tokens of every group see; groups come after it


def attend_group(
    module, q_BTNH, k_BSKH, v_BSKH, call, k_call, dropout, *, scale, window=0, softcap=0.0
):
    """Attention of new tokens over those of their own group, of which the cache holds the last.

    A slot of the cache is a place in a group. What earlier groups left there is known by their
    numbers and seen by no query; `ALL_GROUPS` marks what stays (memory tokens, in places of their
    own). The new tokens may belong to several groups: they also see each other.

    Args:
      call, k_call: positions_BT places in a group, negative for padding; segment_ids_BT numbers of
        groups; cache.size places in a group. Of the queries, and of the keys and values.
      dropout: as in `attend_cached`. scale, window, softcap: as in `attend.attend`.
    Returns: [B, T, N, H].
    """
    rows, _, heads, width = k_BSKH.shape
    size, dtype = k_call.cache.size, module.dtype
    caches = variables(
        module,
        call.cache.tag,
        cached_key=lambda: jnp.zeros((rows, size, heads, width), dtype),
        cached_value=lambda: jnp.zeros((rows, size, heads, width), dtype),
        position=lambda: jnp.full((rows, size), -1, jnp.int32),
        group=lambda: jnp.zeros((rows, size), jnp.int32),
    ).values()
    if module.is_initializing():
        return q_BTNH
    new = (k_BSKH, v_BSKH, k_call.positions_BT, k_call.segment_ids_BT)
    new = [(kept, y.astype(kept.value.dtype)) for kept, y in zip(caches, new, strict=True)]
    all_k, all_v, place_BS, group_BS = (jnp.concatenate([kept.value, y], axis=1) for kept, y in new)
    place_BT1 = call.positions_BT[:, :, None]
    group_BT1 = call.segment_ids_BT[:, :, None]
    place_B1S, group_B1S = place_BS[:, None], group_BS[:, None]
    own_BTS = (group_B1S == group_BT1) | (group_B1S == ALL_GROUPS)
    allowed_BTS = own_BTS & (place_B1S >= 0) & (place_B1S <= place_BT1)
    if window:
        allowed_BTS = allowed_BTS & (place_BT1 - place_B1S < window)
    probs_fn = None if dropout is None else dropout.probs_dropout(call, place_BS)
    out_BTNH = attend_pairs(
        q_BTNH, all_k, all_v, allowed_BTS, scale=scale, softcap=softcap, probs_fn=probs_fn
    )
    # Of the groups that come in one call only the last may go on.
    place_BS, group_BS = k_call.positions_BT, k_call.segment_ids_BT
    kept_BS = (place_BS >= 0) & (group_BS == jnp.max(group_BS, axis=1, keepdims=True))
    slot_BS = apart(jnp.where(kept_BS, place_BS, size), size)
    row_B1 = jnp.arange(rows)[:, None]
    for kept, y in new:
        kept.value = kept.value.at[row_B1, slot_BS].set(y, **NO_TWO_ALIKE)
    return out_BTNH
