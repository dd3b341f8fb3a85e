"""The input of layers besides activations: positions and documents, the mode and the cache."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from efx.layers import selection


@struct.dataclass
class CacheView:
    """How a layer uses its cache, in the collection `cache`.

    Attributes:
      size: the most tokens of a sequence that the layer computes; the slots of its KV cache.
      kv_size: slots of the KV cache of a block that attends to tokens that it does not compute
        (`kv_for_skipped`); 0: `size`.
      access: "both" writes the new keys and values and attends. A block with `kv_for_skipped`
        first gets "write" for all tokens (it returns None) and then "read" for the computed ones.
      first: the new tokens start their rows and padding follows them, so they attend to each other
        only.
      tag: name of one use of a layer that is used several times; each use has its own cache.
      rows_B: the cache row of each row; None: the same rows.
    """

    size: int = struct.field(pytree_node=False)
    kv_size: int = struct.field(pytree_node=False, default=0)
    access: str = struct.field(pytree_node=False, default="both")
    first: bool = struct.field(pytree_node=False, default=False)
    tag: str = struct.field(pytree_node=False, default="")
    rows_B: Any = None


@struct.dataclass
class TokenContext:
    """The input of every layer besides activations. Routing gathers it with the tokens.

    Attributes:
      positions_BT: int32 original position of each token (B may be 1: the same for all rows). A
        negative position marks padding: nothing is cached or routed for it.
      segment_ids_BT: int32 document of each token (0 = padding), or None: one document a row.
        While decoding, groups of tokens, see `kv_cache.attend_cached`.
      count_BT: int32, the number of tokens of the document up to and including this one that reach
        the layer; None: positions + 1.
      selectable_BT: bool, the tokens that routing may select, or None: all.
      mask_input_BTD: input of learned dropout in place of the activations, or None.
      token_places_BT: `scores.token_places` for a score that reads the ids of tokens, or None.
      routing_key: key of random scores, or None.
      cache: a `CacheView` while decoding, else None.
      encoder: (states [B, S, D], their `TokenContext`) for cross-attention, or None. Routing does
        not gather it: routed tokens attend to all encoder states.
      has_gaps: positions are not consecutive, as those of routed tokens.
      train: dropout is on.
      selection: how routed blocks select tokens. "train": as configured for training (top-k looks
        ahead in the sequence). "topk": top-k. "causal": the decision of sampling. "off": no tokens.
        Or the name of a trained decision.
    """

    positions_BT: Any
    segment_ids_BT: Any = None
    count_BT: Any = None
    selectable_BT: Any = None
    mask_input_BTD: Any = None
    token_places_BT: Any = None
    routing_key: Any = None
    cache: CacheView | None = None
    encoder: Any = None
    has_gaps: bool = struct.field(pytree_node=False, default=False)
    train: bool = struct.field(pytree_node=False, default=False)
    selection: str = struct.field(pytree_node=False, default="causal")

    @property
    def decode(self):
        """Whether earlier tokens are in the cache."""
        return self.cache is not None

    @property
    def access(self):
        """`CacheView.access`; "both" without a cache."""
        return self.cache.access if self.decode else "both"

    @property
    def looks_ahead(self):
        """Whether top-k routing selects by later tokens too."""
        return self.selection in ("train", "topk")

    def for_rows(self, batch):
        """The `TokenContext` with positions [batch, T], so that they can be gathered by row."""
        positions = jnp.broadcast_to(self.positions_BT, (batch, self.positions_BT.shape[1]))
        return self.replace(positions_BT=positions)

    def with_cache(self, **changes):
        """The `TokenContext` with these changes of its `CacheView`, if it has one."""
        return self.replace(cache=self.cache.replace(**changes)) if self.decode else self

    def valid_mask(self, batch):
        """bool [B, T]: the tokens that are neither padding nor unused slots of a routed block."""
        valid_BT = jnp.broadcast_to(self.positions_BT >= 0, (batch, self.positions_BT.shape[1]))
        return valid_BT if self.segment_ids_BT is None else valid_BT & (self.segment_ids_BT > 0)

    def gather(self, index_BC):
        """The `TokenContext` of the tokens at these positions [B, C] of every row, see `selection`.

        Tokens keep their positions (-1 in unused slots) and documents. Layers inside a routed
        block may select all of them.
        """

        def gather(x_BT, fill=0):
            return None if x_BT is None else selection.gather(x_BT, index_BC, fill)

        return self.replace(
            positions_BT=gather(self.positions_BT, fill=-1),
            segment_ids_BT=gather(self.segment_ids_BT),
            count_BT=gather(self.count_BT),
            mask_input_BTD=gather(self.mask_input_BTD),
            selectable_BT=None,
            token_places_BT=None,
            has_gaps=True,
        )

    def gather_rows(self, index_C):
        """The `TokenContext` of these rows of one new token each (decoding)."""

        def gather(x_B1, fill=0):
            if x_B1 is None:
                return None
            x_1C = selection.gather(jnp.swapaxes(x_B1, 0, 1), index_C[None], fill)
            return jnp.swapaxes(x_1C, 0, 1)

        return self.replace(
            positions_BT=gather(self.positions_BT, fill=-1),
            count_BT=gather(self.count_BT),
            mask_input_BTD=gather(self.mask_input_BTD),
        ).with_cache(rows_B=index_C)
