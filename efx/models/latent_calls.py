"""Positions, documents and caches of the latents of each level, in training and in decoding.

The part of the grouped-latent transformer (`latent.py`, with the same axes) that is not in its
formulas: where the latents of a level are, and how layers run on those of the new tokens only.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from efx.layers import selection
from efx.layers.token_context import TokenContext


@struct.dataclass
class LevelCalls:
    """The latents of one level in a call of the model, as its attentions see them.

    Attributes:
      size: P, the number of latents of a group.
      group: `TokenContext` whose rows are groups, [B * M, P]; decoding: of the new latents, [B, S].
      row: `TokenContext` whose rows are those of the batch, [1 or B, S].
      group_BS, offset_BS: the group of each latent, and its index there.
      start_B1: the number of latents of the row before this call.
    """

    size: int = struct.field(pytree_node=False)
    group: TokenContext
    row: TokenContext
    group_BS: Any
    offset_BS: Any
    start_B1: Any

    def split_groups(self, x_BSD):
        """[B, M * P, D] -> [B * M, P, D]. Unchanged in decoding: the cache separates groups."""
        return x_BSD if self.group.decode else x_BSD.reshape(-1, self.size, x_BSD.shape[-1])


def level_calls(c, level, call, batch, length):
    """`LevelCalls` of a level for `length` tokens in each row, before padding to whole groups.

    While decoding, the new tokens of a row have consecutive positions, and padding (-1) follows
    them. So the new latents of a level are consecutive too, and their largest number is known.
    """
    size, size_0 = c.sizes[level], c.group_size
    skipped = size_0 - size  # tokens at the start of a group without a latent
    if call.decode:
        max_tokens, first_token_B1 = length, jnp.maximum(call.positions_BT[:, :1], 0)
        stop_token_B1 = first_token_B1 + jnp.sum(call.positions_BT >= 0, axis=1, keepdims=True)
    else:
        max_tokens = c.num_groups(length) * size_0
        first_token_B1, stop_token_B1 = jnp.zeros((1, 1), jnp.int32), length
    start_B1 = first_token_B1 // size_0 * size + jnp.maximum(first_token_B1 % size_0 - skipped, 0)
    index_BS = start_B1 + indices(max_tokens // size_0 * size + min(max_tokens % size_0, size))
    group_BS, offset_BS = index_BS // size, index_BS % size
    token_BS = group_BS * size_0 + skipped + offset_BS
    is_new_BS = token_BS < stop_token_B1
    row = call.replace(positions_BT=jnp.where(is_new_BS, index_BS, -1))
    group = call.replace(positions_BT=jnp.where(is_new_BS, offset_BS, -1))
    if call.decode:
        # A cache keeps the group with the largest number, which must not be that of padding.
        number_BS = jnp.where(is_new_BS, group_BS, 0)
        group = group.replace(segment_ids_BT=number_BS)
    else:
        positions_BP = jnp.tile(group.positions_BT.reshape(-1, size), (batch, 1))
        group = group.replace(positions_BT=positions_BP)
    if call.segment_ids_BT is not None:
        segment_ids_BS = call.segment_ids_BT[:, token_BS[0]]
        group = group.replace(segment_ids_BT=segment_ids_BS.reshape(-1, size))
        # Positions count from the group in which the document begins.
        first_group_BS = (token_BS - call.positions_BT[:, token_BS[0]]) // size_0
        row = row.replace(
            positions_BT=row.positions_BT - first_group_BS * size,
            segment_ids_BT=segment_ids_BS,
            count_BT=selection.running_count(segment_ids_BS > 0, segment_ids_BS),
        )
    group = group.with_cache(size=size)
    row = row.with_cache(size=c.num_groups(call.cache.size) * size if call.decode else 0)
    return LevelCalls(size, group, row, group_BS, offset_BS, start_B1)


def indices(length):
    """0, 1, ..., length - 1: int32 [1, length]."""
    return jnp.arange(length, dtype=jnp.int32)[None]


def rows_at(y_BSD, index_BC):
    """Rows of y [B, S, D] at these indices, clipped: [B, C, D]."""
    return jax.vmap(lambda y, index: y.at[index].get(mode="clip"))(y_BSD, index_BC)


def run_layers(layers, x_BSD, call):
    """layers(x, call). Decoding, they do not run if the call has no token for them."""
    if not call.decode or layers.is_initializing():
        return layers(x_BSD, call)

    # A loop of at most one iteration: XLA copies the caches that a conditional returns.
    def is_pending(layers, carry):
        return carry[0]

    def run(layers, carry):
        return jnp.zeros_like(carry[0]), layers(carry[1], call)

    carry = (jnp.any(call.positions_BT >= 0), x_BSD)
    return nn.while_loop(is_pending, run, layers, carry, carry_variables="cache")[1]


def with_mask_input(mask_input, x_BSD, call):
    """The `TokenContext` with the input of learned masks, made from x; `mask_input` may be None."""
    if mask_input is None:
        return call
    return call.replace(mask_input_BTD=run_layers(mask_input, x_BSD, call))
