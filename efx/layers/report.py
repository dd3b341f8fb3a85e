"""What a feature of a model says of itself, beside its own code: what evaluation reports of it,
and, where that is asked for, what it decided about each token."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct


class Report(NamedTuple):
    """Of one feature; of a model without it nothing is reported. The table of all of them is
    `efx.evaluate.REPORTS`.

    Attributes:
      words: {row: what the line about an evaluation says of it}; rows are called `eval/<name>`.
      statistics: beginnings of the names of what layers sow into `stats` that become rows as they
        are under the causal decisions.
      rows: the other rows of (model, tokens of a sequence, `efx.evaluate.Passes`).
      selections: of a model, the ways to choose (`Mode.selection`) beside "causal" that are
        evaluated.
      compared: of a model, the name of a collection of tuples of int8 arrays, or "". The share of
        the entries of each that changes from one evaluation to the next is reported, under the
        name that was sown. Entries below 0 do not count.
    """

    words: dict
    statistics: tuple = ()
    rows: Callable = lambda model, length, passes: {}
    selections: Callable = lambda model: ()
    compared: Callable = lambda model: ""


# The collection of what is decided token by token. It is sown where a caller asks for it, which
# training and evaluation do not: their programs have nothing of it.
CHOICES = "choices"


@struct.dataclass
class Choice:
    """What a layer decided about each token of its input.

    Attributes:
      value: [B, T, ...].
      positions_BT: of these tokens, as in `Tokens`; negative: a slot without a token.
    """

    value: Any
    positions_BT: Any


def choices_requested(module):
    """Whether choices of this module are wanted, so that they are worth computing."""
    return module.is_mutable_collection(CHOICES) and not module.is_initializing()


def sow_choice(module, name, value, call):
    """Reports a `Choice`, if that is asked for.

    Args:
      value: [B, T, ...]. call: `Call` of these tokens; None: they lie as in the sequence.
    """
    if not choices_requested(module):
        return
    rows, length = value.shape[:2]
    positions_BT = jnp.arange(length)[None] if call is None else call.positions_BT
    positions_BT = jnp.broadcast_to(positions_BT, (rows, length))
    module.sow(CHOICES, name, Choice(value, positions_BT))
