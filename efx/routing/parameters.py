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
      name: path below the routed block, in efx and in an export.
      collection: "params" or "state".
      setting: the field of `DepthRoutingConfig` that adds it.
      exists: `DepthRoutingConfig` -> bool.
      exported: `DepthRoutingConfig` -> bool, whether modeling_efx.py reads it. None: that file does
        not implement the setting, and export refuses it.
      converted: `DepthRoutingConfig` -> the number that fills it when a dense model is converted,
        or None: as the model initialises it.
      in_block: False for a variable of the whole model.
    """

    name: str
    collection: str
    setting: str
    exists: Callable
    exported: Callable | None = lambda c: True
    converted: Callable = lambda c: None
    in_block: bool = True

    @property
    def pattern(self):
        """Regex of the whole paths of its arrays."""
        return (_BLOCK if self.in_block else "") + f"{self.name}(?:/.*)?"


def _has_threshold(c):
    return "threshold" in c.trained_decisions


TABLE = (
    RoutingVariable(
        "router", "params", "train_selection", exists=lambda c: not c.is_control,
        # Zero scores make this gate exactly 1.
        converted=lambda c: 0.0 if c.gate == "twice_sigmoid" else None,
    ),
    RoutingVariable(
        "norm_router", "params", "router_norm",
        exists=lambda c: c.router_norm == "rms" and not c.is_control,
    ),
    RoutingVariable(
        "predictor", "params", "causal", exists=lambda c: "predictor" in c.trained_decisions,
        exported=lambda c: c.causal == "predictor",
    ),
    RoutingVariable("skip_mlp", "params", "skip_mlp", exists=lambda c: c.skip_mlp > 0),
    RoutingVariable(
        "threshold/quantile", "state", "causal", _has_threshold,
        exported=lambda c: c.causal == "threshold",
        # Below the score 0, so that all tokens are selected until the first training step.
        converted=lambda c: -1.0,
    ),
    RoutingVariable("threshold/steps", "state", "causal", _has_threshold, lambda c: False),
    RoutingVariable("seed", "state", "train_selection", lambda c: c.is_control, exported=None),
    RoutingVariable(
        "token_types", "state", "train_selection", lambda c: c.needs_token_places,
        exported=None, in_block=False,
    ),
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
