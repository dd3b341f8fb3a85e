"""The contract of a model: all that the rest of efx may ask of one, whatever its family.

`tests/contract/test_contract.py` checks that every family has these members.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class Settings(Protocol):
    """`model.config`: the family's block of settings, resolved."""

    family: str
    context: int  # tokens of the longest sequence
    scan_layers: bool
    remat: str
    depth_routing: Any  # `DepthRoutingConfig`
    dropout: Any  # `DropoutConfig`
    mup: Any  # `MuPConfig`
    member_runs: tuple  # ((key, run folder), ...) of the runs whose models it is made of
    causal_in_training: str  # when training's forward pass does not look ahead, in words

    def resolved(self) -> "Settings":
        """With presets filled in and everything checked; UsageError for what does not fit."""


class Stage(NamedTuple):
    """A part of a model and the tokens at whose times it computes.

    Attributes:
      path: in `Model.blocks`, or another's in the tree of parameters.
      tokens_S: int, the token of each of its places; negative: none's, as of memory.
      nominal: {component: FLOPs} of what is not in `Model.blocks`, whose costs the specs say; None.
    """

    path: str
    tokens_S: Any
    nominal: dict | None = None


@runtime_checkable
class Model(Protocol):
    """A linen module: `init`, `apply` and `clone` are linen's. What needs parameters is called by
    `apply(variables, ..., method=...)`."""

    config: Settings
    vocab_size: int
    dtype: Any
    selection: str  # how routed blocks choose: "auto", or as `Mode.selection`

    def __call__(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """Logits [B, T, V] in float32: `logits` of `features`."""

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The state [B, T, D] that the output layer reads.

        Args:
          tokens_BT: int32.
          positions_BT: int32, default 0..T-1. While decoding they are required, and a negative one
            marks padding.
          segment_ids_BT: int32 documents of packed rows, 0 for padding.
          train: dropout on, routing as configured for training.
          decode: append to the `cache` collection and attend over it. "first": these are the first
            tokens of their rows, with padding after them alone; a decoder attends as in a full
            forward pass then, by a kernel where there is one.
          cache_size: tokens of context of that cache.
        Raises: UsageError: more tokens than the model has learned positions for.
        """

    def logits(self, x):
        """float32 logits [..., padded V] of a state; what pads the vocabulary has no chance."""

    def head_params(self, params):
        """The part of the parameters that `head_fn` needs, gathered off the batch's mesh axes."""

    def sum_head_gradients(self, gradients):
        """Sums over the first axis of gradients in `head_params`, of which each shard of the batch
        has an entry; they lie as the parameters do."""

    def head_fn(self, head_params, x_ND):
        """Pure output layer, for a loss in slices: (parameters, [N, D]) -> logits [N, V]."""

    def specs(self):
        """The layers of the stack that may be scanned; `stack.names` are theirs."""

    def blocks(self):
        """{path in the tree of parameters of the unrolled model: spec} of all that is routed, or
        not, by itself, such as a `LayerSpec`: `routing`, `blocks`, `capacity`."""

    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one sequence of so many tokens, a `flops.Ledger`.

        Args:
          selection: "train" counts the capacity of routed blocks, "causal" the room that the
            causal decision has.
          shares: {path in `blocks()` of what is routed: (share of the tokens, share of the causal
            pairs) that it was measured to route}, which are counted then.
        """

    def stages(self, length):
        """[Stage] of a sequence of so many tokens, in the order in which they compute: what is in
        `blocks()`, and what else computes at some tokens' times alone."""

    def times(self, path, positions_RS, length):
        """int [R, S]: of places of the arrays of a module, the token at whose time each is
        computed; negative: none's, such as of padding and of memory.

        Args:
          path: of the module in the unrolled model.
          positions_RS: of the places, as the module's `Call` has them for one sequence of so
            many tokens; negative: nothing is there.
        """

    def check_packing(self):
        """Raise UsageError if the model cannot compute rows of several documents."""

    @property
    def context(self):
        """Tokens of the longest sequence."""

    @property
    def members(self):
        """{name in the tree of parameters: (model of another run that this one is made of, regex
        of that run's parameters that it does not use)}, in the order of `config.member_runs`."""
