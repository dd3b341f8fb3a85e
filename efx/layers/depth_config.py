"""The settings of depth routing, and what follows from them by arithmetic alone."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp

from efx.errors import UsageError
from efx.layers import routing
from efx.layers.controls import CONTROLS
from efx.layers.decisions import DECISIONS

GATES = {
    "identity": lambda r: r,  # the paper's equation 1
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "one": jnp.ones_like,
}
SELECTIONS = ("topk", "threshold", *CONTROLS)


@dataclasses.dataclass(frozen=True)
class DepthRoutingConfig:
    """`config.model.depth_routing`.

    Attributes:
      kind: "none", "mod", or "recursion": the blocks between the first and the last are one shared
        stack, applied several times, each time to the tokens that its router picks among those of
        the time before (Mixture-of-Recursions, arXiv 2507.10524, "middle-cycle" sharing).
      recursions: "recursion": R, how often the shared stack is applied.
      every: one block in `every` is routed, starting with block every - 1 (2: blocks 1, 3, 5...).
      blocks: explicit zero-based list of routed blocks instead; () for the rule above.
      capacity: c, the fraction of a sequence that a routed block computes, in (0, 1]; one value,
        or one for each routed block. "recursion": the shares of the sequence that the R passes
        compute; from one value c they are 1, c, c^2... A pass that computes all has no router.
      capacity_stages: ((f, c), ...): until the fraction f of the training steps the capacity is c;
        after the last stage, and whenever the model is not training, it is `capacity`.
      per: of a packed row, training's top-k over each "document" by itself, or over the "row":
        then documents compete, and what one holds decides which tokens of others are computed.
        Causal decisions have room by document always, see `routing.Budget`.
      gate: g, one of `GATES`.
      selection: how tokens are chosen in training: "topk"; "threshold": as the causal decision of
        that name, after `threshold_warmup` steps of top-k; or one of `controls.CONTROLS`, which
        have neither router nor gate nor a decision to train: `causal` and `also_train` say nothing
        then, and evaluation and sampling choose as training does.
      causal: how they are chosen where nothing may depend on later tokens (evaluation, sampling),
        one of `decisions.DECISIONS`.
      also_train: further decisions that are trained and evaluated beside it.
      predictor_hidden: width of the predictor's hidden layer; 0: D/2.
      threshold_decay, threshold_warmup: of the running average of the (1-c) quantile of r.
      bce_reaches_input: the gradient of `router_bce` also reaches x (as in the paper).
      slack: a causal decision is not bound to c; room for ceil(c * T * slack) tokens of a
        sequence is kept, and what comes after is left out and counted as overflow.
      kv_for_skipped: skipped tokens still write the block's keys and values, so that later routed
        tokens attend to them.
      light_path: hidden width of a small MLP that skipped tokens pass instead; 0: nothing.
    """

    kind: str
    recursions: int
    every: int
    blocks: tuple[int, ...]
    capacity: float | tuple[float, ...]
    capacity_stages: tuple[tuple[float, ...], ...]
    per: str
    gate: str
    selection: str
    causal: str
    also_train: tuple[str, ...]
    predictor_hidden: int
    threshold_decay: float
    threshold_warmup: int
    bce_reaches_input: bool
    slack: float
    kv_for_skipped: bool
    light_path: int

    @property
    def control(self):
        """Whether tokens are chosen without a look at what they hold."""
        return self.selection in CONTROLS

    @property
    def trained(self):
        """The causal decisions that are trained, the one that samples first."""
        if self.control:
            return ()
        names = (self.causal, *self.also_train)
        if self.selection == "threshold":
            names += ("threshold",)
        return tuple(dict.fromkeys(names))

    def budget(self, capacity, length, documents=None):
        """`routing.Budget` that a causal decision has."""
        slack = 1.0 if self.control else self.slack
        return routing.Budget(capacity * slack, length, documents)

    def room(self, capacity, length):
        """Places that a causal decision has in a sequence of `length` tokens."""
        return self.budget(capacity, length).size

    def places(self, capacity, length, selection):
        """Places that a routed block computes in a sequence of `length` tokens."""
        if selection == "train" and self.selection != "threshold":
            return routing.capacity(capacity, length)
        return self.room(capacity, length)


def routed_blocks(config, depth):
    """{block index: capacity} of a stack of `depth` blocks; ValueError if the lengths differ."""
    if config.kind != "mod":
        return {}
    chosen = config.blocks or tuple(range(config.every - 1, depth, max(1, config.every)))
    capacities = config.capacity
    if not isinstance(capacities, tuple):
        capacities = (capacities,) * len(chosen)
    return dict(zip(chosen, capacities, strict=True))


def passes(c):
    """Shares of the sequence that the passes of a recursion compute."""
    if isinstance(c.capacity, tuple):
        return c.capacity
    return tuple(c.capacity**i for i in range(c.recursions))


@functools.cache
def say_if_documents_compete(c):
    """A warning, once a process, where packed documents do by the settings `c`."""
    if c.kind != "none" and c.per == "row" and c.selection == "topk":
        logging.getLogger(__name__).warning(
            "config.model.depth_routing.per='row': documents of a packed row compete for the "
            "places of routed blocks in training, so each depends on the others; per='document' "
            "keeps them apart"
        )


def check(c, depth):
    """Raise UsageError for a bad value of `config.model.depth_routing` in a stack of `depth`."""

    def one_of(name, value, choices):
        if value not in choices:
            raise UsageError(
                f"config.model.depth_routing.{name}={value!r}: expected one of {', '.join(choices)}"
            )

    one_of("kind", c.kind, ("none", "mod", "recursion"))
    one_of("gate", c.gate, tuple(GATES))
    one_of("selection", c.selection, SELECTIONS)
    one_of("per", c.per, ("row", "document"))
    one_of("causal", c.causal, DECISIONS)
    for name in c.also_train:
        one_of("also_train", name, DECISIONS)

    def check_capacity(name, value):
        if not 0 < value <= 1:
            raise UsageError(
                f"config.model.depth_routing.{name}={value}: must be in (0, 1], the fraction "
                "of a sequence that a routed block computes"
            )

    for capacity in c.capacity if isinstance(c.capacity, tuple) else (c.capacity,):
        check_capacity("capacity", capacity)
    ends = [stage[0] for stage in c.capacity_stages]
    if (
        any(len(stage) != 2 for stage in c.capacity_stages)
        or ends != sorted(set(ends))
        or not all(0 < end < 1 for end in ends)
    ):
        raise UsageError(
            f"config.model.depth_routing.capacity_stages={c.capacity_stages}: expected "
            "((fraction of training, capacity), ...) with fractions rising between 0 and 1"
        )
    for _, capacity in c.capacity_stages:
        check_capacity("capacity_stages", capacity)
    if not 0 <= c.threshold_decay < 1:
        raise UsageError(
            f"config.model.depth_routing.threshold_decay={c.threshold_decay}: must be in [0, 1)"
        )
    for name in ("threshold_warmup", "predictor_hidden", "light_path"):
        if getattr(c, name) < 0:
            raise UsageError(
                f"config.model.depth_routing.{name}={getattr(c, name)}: must be at least 0"
            )
    if c.slack < 1:
        raise UsageError(f"config.model.depth_routing.slack={c.slack}: must be at least 1")
    if c.every < 1:
        raise UsageError(f"config.model.depth_routing.every={c.every}: must be at least 1")
    if any(not 0 <= block < depth for block in c.blocks) or list(c.blocks) != sorted(set(c.blocks)):
        raise UsageError(
            f"config.model.depth_routing.blocks={c.blocks}: expected ascending block numbers "
            f"between 0 and {depth - 1}"
        )
    if c.recursions < 1:
        raise UsageError(
            f"config.model.depth_routing.recursions={c.recursions}: must be at least 1"
        )
    if c.kind == "recursion":
        _check_recursion(c, depth)
    if c.kind == "mod" and not c.blocks and c.every > depth:
        raise UsageError(
            f"config.model.depth_routing.every={c.every}: the stack has {depth} blocks, so none "
            "would be routed; set config.model.depth_routing.kind='none' if that is meant"
        )
    try:
        routed_blocks(c, depth)
    except ValueError:
        raise UsageError(
            f"config.model.depth_routing.capacity={c.capacity}: give one value, or one for each "
            "routed block"
        ) from None


def _check_recursion(c, depth):
    where = "config.model.depth_routing"
    if depth < 3:
        raise UsageError(
            f"config.model.depth={depth}: {where}.kind='recursion' needs at least 3 blocks, the "
            "first, the last and what is repeated between them"
        )
    if c.control:
        raise UsageError(
            f"{where}.selection={c.selection!r}: not with {where}.kind='recursion', whose passes "
            "choose among those of the pass before"
        )
    off = dict(blocks=(), capacity_stages=(), kv_for_skipped=False, light_path=0)
    for name, value in off.items():
        if getattr(c, name) != value:
            raise UsageError(
                f"{where}.{name}={getattr(c, name)!r}: not with {where}.kind='recursion', "
                f"leave it at {value!r}"
            )
    shares = passes(c)
    if len(shares) != c.recursions or list(shares) != sorted(shares, reverse=True):
        raise UsageError(
            f"{where}.capacity={c.capacity}: give one value, or one for each of the "
            f"{c.recursions} passes ({where}.recursions), none larger than the one before"
        )
