"""What a layer is told about the tokens it gets, apart from their activations."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from efx.layers.routing import plans


@struct.dataclass
class TokenInfo:
    """Passed unchanged from the model to every layer; routing hands on the gathered rows of it.

    Attributes:
      positions_BT: int32 original position of each token (B may be 1: the same for every row).
        While decoding, a negative position marks padding: nothing is cached or routed for it.
      segment_ids_BT: int32 document of each token (0 = padding), or None: one document a row.
      begin_BT, end_BT: which places of the sequence a token's document has to itself, see
        `plans.Documents`; None: those where it lies.
      alive_BT: bool, the tokens that routing may choose from, or None: all.
      rows_B: decoding only: which rows of the cache these rows are, or None: all, in order.
      mask_input_BTD: what learned dropout reads instead of the activations, a row for each of these
        tokens, or None.
      train: dropout is on.
      decode: read and write the `cache` collection.
      selection: how routed blocks choose tokens: "train" as configured for training (top-k looks
        ahead in the sequence), "causal" by the decision that a sampler uses, or by the name of a
        trained decision.
      cache_size: decoding only: the most tokens of a sequence that a layer computes, in a routed
        block those that it has room for. A cache has a slot for each, and the experts' room is a
        share of them, as it is of the tokens that come in a full forward pass.
      kv_size: decoding only: slots for keys and values of a block that attends to tokens which it
        does not compute (`kv_for_skipped`); 0: `cache_size`.
      kv: decoding only: "both" writes the new keys and values and attends; "write" writes them and
        computes nothing else (the result is None), "read" only attends.
      grouped: decoding only: attention stays inside groups of tokens. Positions are places in a
        group then, segment_ids_BT its number in the sequence, and the cache holds one group, see
        `kv_cache.attend_group`.
      cache_tag: decoding only: which use this is of a layer that is used several times; each has
        a cache of its own.
    """

    positions_BT: Any
    segment_ids_BT: Any = None
    begin_BT: Any = None
    end_BT: Any = None
    alive_BT: Any = None
    rows_B: Any = None
    mask_input_BTD: Any = None
    train: bool = struct.field(pytree_node=False, default=False)
    decode: bool = struct.field(pytree_node=False, default=False)
    selection: str = struct.field(pytree_node=False, default="causal")
    cache_size: int = struct.field(pytree_node=False, default=0)
    kv_size: int = struct.field(pytree_node=False, default=0)
    kv: str = struct.field(pytree_node=False, default="both")
    grouped: bool = struct.field(pytree_node=False, default=False)
    cache_tag: str = struct.field(pytree_node=False, default="")

    def full(self, batch):
        """The same with positions for every row, so that rows can be gathered one by one."""
        positions = jnp.broadcast_to(self.positions_BT, (batch, self.positions_BT.shape[1]))
        return self.replace(positions_BT=positions)

    def documents(self):
        """`plans.Documents` of a packed sequence, else None."""
        if self.segment_ids_BT is None:
            return None
        documents = plans.documents(self.segment_ids_BT)
        if self.begin_BT is None:
            return documents
        return documents.replace(begin_BT=self.begin_BT, end_BT=self.end_BT)

    def valid(self, batch):
        """bool [B, T]: neither padding nor an empty place of a routed block."""
        info = self.full(batch)
        valid_BT = info.positions_BT >= 0
        return valid_BT if info.segment_ids_BT is None else valid_BT & (info.segment_ids_BT > 0)
