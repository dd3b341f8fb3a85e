"""What the levels of the latent transformer are told about their places; see `groups.py`."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from efx.layers import kv_cache
from efx.layers.call import Call
from efx.routing import plans


@struct.dataclass
class View:
    """The places of one level, as the attentions of the level see them.

    Attributes:
      inside: places in a group, [1 or B*M, P]. local, whole: the same with memory tokens before
        each group, and all places of the sequence, with memory tokens first. While decoding all
        three are of the new tokens alone, [B, C]: of those that the level has, and there are as
        many places as it can have of a call.
      documents_BMP: of packed rows, else None.
      memory_local, memory_global: while decoding: the memory tokens, for rows that begin.
      begins, place_BT, group_BT: while decoding: whether a row begins; places of the new tokens in
        this level (negative where there is none) and groups.
      plan: while decoding: which of the new tokens of the level before these are; level 0: None.
    """

    inside: Call
    local: Call
    whole: Call
    documents_BMP: Any = None
    memory_local: Any = None
    memory_global: Any = None
    begins: Any = None
    place_BT: Any = None
    group_BT: Any = None
    plan: Any = None


def views(call, groups, sizes, memory_local, memory_global):
    """[View of each level] of a sequence of whole groups.

    Args:
      call: of the tokens; of padding the document is 0. With documents, positions start again with
        each: places in the sequence are counted from the group in which the document starts.
        Memory tokens are of document 1: a row that has them holds no other.
      groups: M. sizes: P_0, P_1...
    """
    group_size, documents = sizes[0], call.segment_ids_BT
    first_BM = None
    if documents is not None:
        documents = documents.reshape(-1, groups, group_size)
        start_BT = jnp.arange(groups * group_size)[None] - call.positions_BT
        first_BM = (start_BT // group_size).reshape(-1, groups, group_size)
    result = []
    for size in sizes:

        def row(length, memory, documents_BMP=None, skipped_BMP=None):
            """Of rows of so many places, memory tokens before them."""
            positions_BT, documents_BT = _range(memory + length), None
            if documents_BMP is not None:
                before = ((0, 0), (memory, 0))
                documents_BT = jnp.pad(documents_BMP.reshape(-1, length), before, constant_values=1)
            if skipped_BMP is not None:
                positions_BT = positions_BT - jnp.pad(skipped_BMP.reshape(-1, length), before)
            return call.replace(positions_BT=positions_BT, segment_ids_BT=documents_BT)

        last = skipped_BMP = None
        if documents is not None:
            last = documents[:, :, group_size - size :]
            skipped_BMP = size * first_BM[:, :, group_size - size :]
        inside, local = (row(size, memory, last) for memory in (0, memory_local))
        whole = row(groups * size, memory_global, last, skipped_BMP)
        result.append(View(inside, local, whole, last))
    return result


def decoding_views(call, sizes, memory_local, memory_global):
    """[View of each level] of new tokens; `call.positions_BT` are their positions [B, T].

    Tokens of a call follow each other in their row, so that of T a level of so many places a group
    has a known number at most.
    """
    group_size, position_BT, plan = sizes[0], call.positions_BT, None
    length = position_BT.shape[1]
    begins_B1 = jnp.any(position_BT == 0, axis=1, keepdims=True)
    result = []
    for size in sizes:
        if size < group_size:
            here_BT = position_BT % group_size >= group_size - size
            room = length // group_size * size + min(size, length % group_size)
            plan = plans.first_plan((position_BT >= 0) & here_BT, room)
            position_BT = plans.gather(position_BT, plan, fill=-1)
        group_BT = position_BT // group_size
        place_BT = position_BT % group_size - (group_size - size)
        place_BT = jnp.where(position_BT >= 0, place_BT, -1)

        def at(position_BT, room, place_BT=place_BT):
            position_BT = jnp.where(place_BT >= 0, position_BT, -1)
            return call.replace(positions_BT=position_BT).with_cache(size=room)

        def in_group(position_BT, room, group_BT=group_BT):
            call = at(position_BT, room).with_cache(grouped=True)
            return call.replace(segment_ids_BT=kv_cache.ALL_GROUPS + 1 + group_BT)

        def memory(count, like, group=None):
            if not count:
                return None
            places_BT = jnp.where(begins_B1, _range(count), -1)
            group_BT = None if group is None else jnp.full(places_BT.shape, group)
            return like.replace(positions_BT=places_BT, segment_ids_BT=group_BT)

        local = in_group(memory_local + place_BT, memory_local + size)
        room = memory_global + -(-call.cache.size // group_size) * size
        whole = at(memory_global + group_BT * size + place_BT, room)
        result.append(
            View(
                inside=in_group(place_BT, size),
                local=local,
                whole=whole,
                memory_local=memory(memory_local, local, kv_cache.ALL_GROUPS),
                memory_global=memory(memory_global, whole),
                begins=jnp.any(begins_B1),
                place_BT=place_BT,
                group_BT=group_BT,
                plan=plan,
            )
        )
    return result


def _range(length):
    return jnp.arange(length, dtype=jnp.int32)[None]
