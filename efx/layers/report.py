"""What evaluation reports of a feature of a model: each says it beside its own code."""

from collections.abc import Callable
from typing import NamedTuple


class Report(NamedTuple):
    """Of one feature; of a model without it nothing is reported. The table of all of them is
    `efx.models.reports`.

    Attributes:
      words: {row: what the line about an evaluation says of it}; rows are called `eval/<name>`.
      statistics: beginnings of the names of what layers sow into `stats` that become rows as they
        are under the causal decisions.
      rows: the other rows of (model, tokens of a sequence, `efx.evaluate.Passes`).
      selections: of a model, the ways to choose (`Mode.selection`) beside "causal" that are
        evaluated.
      compared: of a model, the name of a collection of int8 arrays of which the share of entries
        that changes from one evaluation to the next is reported, under the name that was sown, or
        "". Entries below 0 do not count.
    """

    words: dict
    statistics: tuple = ()
    rows: Callable = lambda model, length, passes: {}
    selections: Callable = lambda model: ()
    compared: Callable = lambda model: ""
