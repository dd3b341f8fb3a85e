"""The parameters and running averages that depth routing adds to a dense model.

Import, conversion, export and the configs read them from `TABLE`. A new parameter of a routed block
needs a row here; `tests/models/test_routing_parameters.py` fails without one.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

# The path of a routed block, in a decoder, in either of two streams, or of a recursion step.
_BLOCK = r"(?:.*/)?(?:block|recursion)_\d+/(?:(?:decoder|encoder_\d+)/)?"


class RoutingVariable(NamedTuple):
    """A parameter or running average, or a module of them.

    Attributes:
      name: path below the routed block.
      collection: "params" or "state".
      exported: `DepthRoutingConfig` -> bool, whether modeling_efx.py reads it.
      converted: `DepthRoutingConfig` -> the number that fills it when a dense model is converted,
        or None: as the model initialises it.
    """

    name: str
    collection: str
    exported: Callable = lambda c: True
    converted: Callable = lambda c: None

    @property
    def pattern(self):
        """Regex of the whole paths of its arrays."""
        return f"{_BLOCK}{self.name}(?:/.*)?"


TABLE = (
    # Zero scores make this gate exactly 1.
    RoutingVariable(
        "router", "params", converted=lambda c: 0.0 if c.gate == "twice_sigmoid" else None
    ),
    RoutingVariable("norm_router", "params"),
    # Of any other score; export refuses these by their setting.
    RoutingVariable("scorer", "params"),
    RoutingVariable("seed", "state"),
    RoutingVariable("predictor", "params", exported=lambda c: c.causal_decision == "predictor"),
    RoutingVariable("skip_mlp", "params"),
    RoutingVariable(
        "threshold/quantile", "state", exported=lambda c: c.causal_decision == "threshold",
        # Below the score 0, so that all tokens are selected until the first training step.
        converted=lambda c: -1.0,
    ),
    RoutingVariable("threshold/steps", "state", exported=lambda c: False),
)  # fmt: skip


def find(path):
    """The row of `TABLE` that an array belongs to, by its path in the model, or None."""
    return next((row for row in TABLE if re.fullmatch(row.pattern, path)), None)


def param_names():
    """The names of all parameters in `TABLE`."""
    return tuple(row.name for row in TABLE if row.collection == "params")


def params_pattern(*names):
    """Regex of the whole paths of the parameters of these names in any routed block; without
    names, of all."""
    return rf"{_BLOCK}(?:{'|'.join(names or param_names())})(?:/.*)?"
