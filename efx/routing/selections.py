"""Selections of depth routing: how training selects tokens by their scores.

Evaluation and sampling select by a causal decision instead, see `decisions`. A new selection is a
function and an entry of `SELECTIONS`.
"""

import dataclasses
from collections.abc import Callable

from efx.layers.selection import select_topk


@dataclasses.dataclass(frozen=True)
class Selection:
    """A value of `train_selection`.

    Attributes:
      select: (scores [B, T], rate, valid [B, T], segment ids or None) -> bool [B, T], at most
        `num_slots` valid tokens of a row.
      is_causal: the causal decision "threshold" selects, after `threshold_warmup` steps of top-k.
    """

    select: Callable = select_topk
    is_causal: bool = False


SELECTIONS = {"topk": Selection(), "threshold": Selection(is_causal=True)}
