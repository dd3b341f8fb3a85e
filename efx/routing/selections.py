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

    def is_exact(self, looks_ahead):
        """Whether at most `num_slots` tokens of a row are selected; else the causal limit holds.

        Args:
          looks_ahead: see `TokenContext.looks_ahead`.
        """
        return looks_ahead and not self.is_causal


SELECTIONS = {"topk": Selection(), "threshold": Selection(is_causal=True)}
