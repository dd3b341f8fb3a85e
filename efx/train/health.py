"""Warnings about parts of a model that do nothing, from the metrics of an evaluation.

`RULES` is the table of parts and signs. A metric fits if it would move if the part did nothing.
"""

import dataclasses
import math
import re

from efx.errors import warn
from efx.layers.report import Report

# Norms of increments over those of their streams, see `sow_increment`.
INCREMENTS = Report({}, ("cross/increment", "latent/increment"))
# A mean gate, relative norm or relative load below this counts as 0.
NEGLIGIBLE = 0.01
# Parts that cost less when they are switched off, in nats, do nothing.
ASLEEP = 0.001


@dataclasses.dataclass(frozen=True)
class Rule:
    """A part is asleep if its metric is below `low` or above `high`.

    Attributes:
      metric: regex of names of metrics, without `eval/`; its group, if any, names the part.
      problem: `{part}` and `{value}` are those of the smallest value.
    """

    metric: str
    problem: str
    advice: str
    low: float = -math.inf
    high: float = math.inf

    def line(self, metrics):
        """The warning about these metrics, or ""."""
        asleep = []
        for name, value in metrics.items():
            match = re.fullmatch(f"eval/{self.metric}", name)
            if match and (value < self.low or value > self.high):
                asleep.append((value, "".join(match.groups())))
        if not asleep:
            return ""
        value, part = min(asleep)
        if len(asleep) > 1:
            part += f" and {len(asleep) - 1} more"
        return f"{self.problem.format(part=part, value=f'{value:.2g}')}; {self.advice}"


_ROUTERS = "try a tenth of the routers' rate, config.optim.lr_multipliers=(('.*/router', 0.1),)"
_DEPTH = (
    "try config.optim.router_rate=0.1, or another router_norm, gate or target of "
    "config.model.depth_routing"
)
_RATE = "try a lower config.optim.learning_rate"
RULES = (
    Rule(
        "router/worth",
        "routed blocks are asleep: switching all of them off costs {value} nats",
        _DEPTH,
        low=ASLEEP,
    ),
    Rule(
        "router/routed_fraction/(.+)",
        "a routed block selects no token, {part}: {value} of all tokens",
        _DEPTH,
        low=1e-4,
    ),
    Rule(
        "router/gate/(.+)",
        "closed gates in {part}: {value} on the mean of selected tokens",
        _DEPTH,
        low=NEGLIGIBLE,
    ),
    Rule(
        "moe/worth",
        "experts are asleep: switching all of them off costs {value} nats",
        f"{_ROUTERS}, or a smaller config.model.mlp.moe.num_noop",
        low=ASLEEP,
    ),
    Rule(
        "moe/min_load/(.+)",
        "an expert is never chosen in {part}: its load is {value} of the mean",
        f"{_ROUTERS}, or a larger config.losses.load_balance",
        low=NEGLIGIBLE,
    ),
    Rule(
        "moe/weight/(.+)",
        "experts count for nothing in {part}: their mean weight is {value}",
        _ROUTERS,
        low=NEGLIGIBLE,
    ),
    Rule(
        "dropout/kept/(.+)",
        "learned masks are all closed in {part}: they keep {value} of their input",
        "try a smaller config.losses.dropout_l1",
        low=0.001,
    ),
    Rule(
        "dropout/kept/(.+)",
        "learned masks are all open in {part}: they keep {value} of their input",
        "try a larger config.losses.dropout_l1",
        high=0.999,
    ),
    Rule(
        "adapter/gate/(.+)",
        "closed gates of adapters in {part}: {value} on the mean of all tokens",
        _RATE,
        low=NEGLIGIBLE,
    ),
    Rule(
        r"adapter/usage/(expert_\d+)",
        "{part} of config.adapter.experts is never used: by {value} of the tokens",
        "leave it out, or train its gate again",
        low=0.001,
    ),
    Rule(
        "latent/increment/(.+)",
        "latents do nothing in {part}: their norm is {value} of that of the skip connection",
        _RATE,
        low=NEGLIGIBLE,
    ),
    Rule(
        "cross/increment/(.+)",
        "cross-attention does nothing in {part}: its norm is {value} of that of its stream",
        _RATE,
        low=NEGLIGIBLE,
    ),
)


class Watch:
    """Warns of parts that are asleep, once for each rule."""

    def __init__(self):
        self._rules = list(RULES)

    def __call__(self, metrics, trained=1.0):
        """Warn of the parts that sleep.

        Args:
          metrics: of an evaluation.
          trained: fraction of the training that is done. In the first tenth parts may sleep.
        """
        if trained <= 0.1:
            return
        for rule in [*self._rules]:
            if line := rule.line(metrics):
                self._rules.remove(rule)
                warn(line)
