"""Settings of depth routing, `config.model.depth_routing`."""

import functools
import itertools
import logging
from typing import Literal

from efx.config.schema import (
    AtLeastOne,
    Count,
    Fraction,
    Modules,
    Natural,
    Number,
    Probability,
    block,
)
from efx.errors import UsageError
from efx.layers import selection
from efx.routing.decisions import DECISIONS
from efx.routing.gates import GATES
from efx.routing.scores import SCORES
from efx.routing.selections import SELECTIONS

Decision = Literal[tuple(DECISIONS)]


@block("config.model.depth_routing")
class DepthRoutingConfig:
    """The blocks that compute only some of the tokens, and how these are selected."""

    # "mod": Mixture-of-Depths. "recursion": the blocks between the first and the last are one
    # shared stack, applied `recursions` times, each time to tokens selected among those of the
    # previous step (Mixture-of-Recursions, arXiv 2507.10524, "middle-cycle" sharing).
    kind: Literal["none", "mod", "recursion"] = "none"
    recursions: Modules = 2  # times that the shared blocks are applied
    every: Count = 2  # blocks every-1, 2*every-1, ... are routed
    # or these, zero-based; of two streams the encoder's blocks are numbered before the decoder's
    blocks: tuple[Natural, ...] = ()
    # What a routed block routes: all of it, or its attention (all tokens pass the MLP), or its MLP
    # (all tokens pass the attention, so every token sees every key), or the MLP of a block that has
    # no attention.
    target: Literal["block", "attention", "mlp", "mlp_only"] = "block"
    # Fraction of a sequence that a routed block computes; one value, or one for each routed block.
    # "recursion": one for each step, or c for 1, c, c^2... A step that computes all tokens has no
    # router.
    capacity: Fraction | tuple[Fraction, ...] = 0.125
    # ((f, c), ...): until the fraction f of the training steps, capacity c, of a recursion 1, c,
    # c^2...; afterwards `capacity`. Evaluation, sampling and export use that of the checkpoint.
    capacity_stages: tuple[tuple[Number, ...], ...] = ()
    # What tokens are selected by, see `scores`: a learned router or, without parameters, a control.
    score: Literal[tuple(SCORES)] = "router"
    # Of the input of the score and of the decisions; the paper has none.
    router_norm: Literal["none", "rms"] = "none"
    # Factor on a block's increment as a function of the score: "identity" in the paper, equation
    # 1. "twice_sigmoid" is 1 for a score of 0: a router of zeros leaves a pretrained block as it
    # is. With "one", which suits controls, only the decision "aux_loss" trains a router.
    gate: Literal[tuple(GATES)] = "sigmoid"
    # In training. "threshold": as the causal decision of that name, after `threshold_warmup` steps
    # of top-k.
    train_selection: Literal[tuple(SELECTIONS)] = "topk"
    causal_decision: Decision = "threshold"  # of evaluation and sampling, see `decisions`
    extra_decisions: tuple[Decision, ...] = ()  # further decisions, trained and evaluated beside it
    predictor_hidden: Natural = 0  # 0: width / 2
    threshold_decay: Probability = 0.99  # at most, of the running (1 - capacity) quantile
    threshold_warmup: Natural = 100  # steps of top-k before train_selection="threshold" begins
    bce_reaches_input: bool = True  # the router's loss also trains the layers below the router
    # Causal decisions may select up to ceil(slack * capacity * n) + 4 of the first n tokens.
    slack: AtLeastOne = 2.0
    kv_for_skipped: bool = False  # skipped tokens still write keys and values
    skip_mlp: Natural = 0  # hidden width of a small MLP for skipped tokens; 0: none

    def check(self):
        ends = [stage[0] for stage in self.capacity_stages if len(stage) == 2]
        if (
            len(ends) < len(self.capacity_stages)
            or not all(0 < capacity <= 1 for _, capacity in self.capacity_stages)
            or ends != sorted(set(ends))
            or not all(0 < end < 1 for end in ends)
        ):
            self.refuse(
                "capacity_stages",
                "expected ((fraction of training, capacity), ...) with increasing fractions "
                "between 0 and 1 and capacities in (0, 1]",
            )
        if self.capacity_stages and self.kind == "none":
            self.refuse("capacity_stages", f"needs {self.where}.kind='mod' or 'recursion'")
        if self.kind != "none" and "aux_loss" in self.trained_decisions and not self.is_trained:
            self.refuse(
                "score",
                "has no parameters that causal_decision='aux_loss' or extra_decisions="
                "('aux_loss',) could train; use 'threshold'",
            )
        if not self.routes_attention and self.kv_for_skipped:
            self.refuse("kv_for_skipped", f"target={self.target!r} routes no attention; use False")
        if self.target != "block" and self.kind == "recursion":
            self.refuse("target", "kind='recursion' repeats whole blocks; use 'block'")

    def check_depth(self, *depths):
        """Raise UsageError unless these settings suit stacks of these depths."""
        blocks, count = self.blocks, sum(depths)
        if any(b >= count for b in blocks) or list(blocks) != sorted(set(blocks)):
            self.refuse("blocks", f"expected ascending block numbers between 0 and {count - 1}")
        if self.kind == "recursion":
            self._check_recursion(count)
        warn_if_router_is_untrained(self)
        if self.kind == "mod" and not blocks and self.every > max(depths):
            self.refuse(
                "every",
                f"the stack has {max(depths)} blocks, so none would be routed; use a smaller "
                f"number, or {self.where}.kind='none'",
            )
        try:
            self.routed_blocks(*depths)
        except ValueError:
            self.refuse("capacity", "expected one value, or one for each routed block")

    def _check_recursion(self, depth):
        if depth < 3:
            raise UsageError(
                f"config.model.depth={depth}: {self.where}.kind='recursion' needs at least 3 "
                "blocks: the first, the last and a repeated one"
            )
        if self.blocks:
            self.refuse("blocks", "kind='recursion' repeats all but the first and last; use ()")
        capacities = self.step_capacities
        if len(capacities) != self.recursions or list(capacities) != sorted(
            capacities, reverse=True
        ):
            self.refuse(
                "capacity",
                f"expected one value, or one for each of the {self.recursions} steps "
                f"({self.where}.recursions), none larger than the previous one",
            )
        if self.capacity_stages and (len(capacities) < 2 or capacities[0] < 1):
            self.refuse(
                "capacity_stages",
                f"a stage of a recursion is 1, c, c^2...: {self.where}.recursions must be at least "
                f"2, and the first step must compute all tokens, also in {self.where}.capacity="
                f"{self.capacity}",
            )

    @property
    def is_trained(self):
        """Whether the score has parameters."""
        return SCORES[self.score].is_trained

    @property
    def routes_attention(self):
        return self.target in ("block", "attention")

    @property
    def reads_token_ids(self):
        """Whether scores depend on the ids of tokens, see `TokenContext.token_places_BT`."""
        return self.kind != "none" and SCORES[self.score].reads_token_ids

    @functools.cached_property
    def rule(self):
        """The `selections.Selection` of `train_selection`."""
        return SELECTIONS[self.train_selection]

    @functools.cached_property
    def trained_decisions(self):
        """Names of the causal decisions that are trained, the one of sampling first."""
        names = (self.causal_decision, *self.extra_decisions)
        if self.rule.is_causal:
            names += ("threshold",)
        return tuple(dict.fromkeys(names))

    @property
    def has_threshold(self):
        """Whether a trained decision compares scores with a threshold."""
        return self.kind != "none" and "threshold" in self.trained_decisions

    def routed_blocks(self, *depths):
        """{block index: capacity} of stacks of these depths, numbered consecutively; `every` counts
        in each stack. Raises ValueError if the numbers of blocks and capacities differ."""
        if self.kind != "mod":
            return {}
        routed = self.blocks
        if not routed:
            starts = itertools.accumulate((0, *depths[:-1]))
            routed = tuple(
                start + i
                for start, depth in zip(starts, depths, strict=True)
                for i in range(self.every - 1, depth, self.every)
            )
        capacities = self.capacity
        if not isinstance(capacities, tuple):
            capacities = (capacities,) * len(routed)
        return dict(zip(routed, capacities, strict=True))

    @property
    def step_capacities(self):
        """Fractions of the sequence that the steps of a recursion compute."""
        if isinstance(self.capacity, tuple):
            return self.capacity
        return tuple(self.capacity**i for i in range(self.recursions))

    def step_is_routed(self, number):
        """Whether this step of a recursion has a router: it drops tokens in this stage of training
        or another, so that all stages have the same parameters."""
        return self.step_capacities[number] < 1 or (number > 0 and bool(self.capacity_stages))

    def effective_depth(self, depth):
        """Blocks that a token passes in a stack of this depth, repetitions counted."""
        return depth + (self.recursions - 1) * (depth - 2) if self.kind == "recursion" else depth

    def causal_rate(self, capacity):
        """Rate of the causal limit, see `selection.admit`; 1: no limit."""
        return min(1.0, capacity * self.slack)

    def slots(self, capacity, length, mode):
        """C: tokens of a sequence that a routed block computes at most; mode: a
        `TokenContext.selection`."""
        if mode in ("train", "topk") and not self.rule.is_causal:
            return selection.num_slots(capacity, length)
        return selection.num_causal_slots(self.causal_rate(capacity), length)


@functools.cache
def warn_if_router_is_untrained(c):
    """Warn, once a process, if no gradient reaches the routers by this `DepthRoutingConfig`."""
    if c.kind == "none" or not c.is_trained or c.gate != "one" or "aux_loss" in c.trained_decisions:
        return
    logging.getLogger(__name__).warning(
        "config.model.depth_routing.gate='one': without the decision 'aux_loss' "
        "(causal_decision=%r, extra_decisions=%r) no loss trains the routers, so their scores stay "
        "random; add it to extra_decisions, or use another gate",
        c.causal_decision,
        c.extra_decisions,
    )
