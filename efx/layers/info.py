"""What a layer is told of a call, apart from activations: which tokens these are, how the model is
used, and, while decoding, where its cache lies."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct

from efx.layers.routing import plans


@struct.dataclass
class Types:
    """Where the types of tokens lie on a line of length 1, see `controls.TokenTypes`.

    Attributes:
      start_BT: where the part of a token's type begins. share_BT: how long it is.
    """

    start_BT: Any
    share_BT: Any


@struct.dataclass
class Tokens:
    """Which tokens the rows of a layer's input are; routing hands on the gathered rows of it.

    Attributes:
      positions_BT: int32 original position of each token (B may be 1: the same for every row).
        While decoding, a negative position marks padding: nothing is cached or routed for it.
      segment_ids_BT: int32 document of each token (0 = padding), or None: one document a row.
      begin_BT, end_BT: which places of the sequence a token's document has to itself, see
        `plans.Documents`; None: those where it lies.
      alive_BT: bool, the tokens that routing may choose from, or None: all.
      gaps: whether positions skip some, as those of routed tokens do.
      mask_input_BTD: what learned dropout reads instead of the activations, a row for each of these
        tokens, or None.
      types: `Types`, for controls of depth routing that ask which tokens these are, else None.
    """

    positions_BT: Any
    segment_ids_BT: Any = None
    begin_BT: Any = None
    end_BT: Any = None
    alive_BT: Any = None
    mask_input_BTD: Any = None
    types: Any = None
    gaps: bool = struct.field(pytree_node=False, default=False)

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
        """bool [B, T]: neither padding nor an empty slot of a routed block."""
        valid_BT = self.full(batch).positions_BT >= 0
        return valid_BT if self.segment_ids_BT is None else valid_BT & (self.segment_ids_BT > 0)


@dataclasses.dataclass(frozen=True)
class Mode:
    """How the model is used.

    Attributes:
      train: dropout is on.
      selection: how routed blocks choose tokens: "train" as configured for training (top-k looks
        ahead in the sequence), "topk" by top-k whatever training does, "causal" by the decision
        that a sampler uses, or by the name of a trained decision.
    """

    train: bool = False
    selection: str = "causal"

    @property
    def looks_ahead(self):
        """Whether what is trained by looking ahead in the sequence chooses so."""
        return self.selection in ("train", "topk")


@struct.dataclass
class CacheView:
    """Where a layer finds the tokens before the new ones, in the collection `cache`.

    Attributes:
      size: the most tokens of a sequence that a layer computes, in a routed block those that it
        has room for. A cache has a slot for each, and the experts' room is a share of them, as it
        is of the tokens that come in a full forward pass.
      kv_size: slots for keys and values of a block that attends to tokens which it does not compute
        (`kv_for_skipped`); 0: `size`.
      access: "both" writes the new keys and values and attends. Of a routed block that keeps keys
        and values of all tokens, "write" writes these and computes nothing else (the result is
        None), and "read" only attends to them.
      grouped: attention stays inside groups of tokens. Positions are places in a group then,
        segment_ids_BT its number in the sequence, and the cache holds one group, see
        `kv_cache.attend_group`.
      first: the new tokens are the first of their rows, and padding comes after them: they see
        each other and nothing else.
      tag: which use this is of a layer that is used several times; each has a cache of its own.
      rows_B: which rows of the cache these rows are, or None: all, in order.
    """

    size: int = struct.field(pytree_node=False)
    kv_size: int = struct.field(pytree_node=False, default=0)
    access: str = struct.field(pytree_node=False, default="both")
    grouped: bool = struct.field(pytree_node=False, default=False)
    first: bool = struct.field(pytree_node=False, default=False)
    tag: str = struct.field(pytree_node=False, default="")
    rows_B: Any = None


@struct.dataclass
class CallInfo:
    """Passed from the model to every layer.

    Attributes:
      cache: a `CacheView` while decoding, else None.
      encoder: what cross-attention reads, (states [B, S, D], the `CallInfo` of these), or None.
        Routing hands it on whole: a block that computes some of the tokens reads all of these.
    """

    tokens: Tokens
    mode: Mode = struct.field(pytree_node=False, default=Mode())
    cache: CacheView | None = None
    encoder: Any = None

    @property
    def decode(self):
        """Whether these are new tokens, whose predecessors are in the cache."""
        return self.cache is not None

    @property
    def access(self):
        """`CacheView.access`; without a cache "both"."""
        return self.cache.access if self.decode else "both"

    def full(self, batch):
        """The same with positions for every row, so that rows can be gathered one by one."""
        return self.replace(tokens=self.tokens.full(batch))

    def with_tokens(self, **changes):
        return self.replace(tokens=self.tokens.replace(**changes))

    def with_cache(self, **changes):
        """The same with another view of the cache, if there is one."""
        return self.replace(cache=self.cache.replace(**changes)) if self.decode else self
