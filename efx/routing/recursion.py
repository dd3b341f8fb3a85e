"""Mixture-of-Recursions: one stack of blocks, applied several times to fewer and fewer tokens.

Bae et al. 2025, arXiv 2507.10524, with "middle-cycle" sharing: the first and the last block are
ordinary ones; step r of the blocks between them computes the tokens that its own router selects
among those of step r - 1. A step that computes all tokens has no router.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from efx.layers import selection
from efx.parallel.sharding import constrain
from efx.routing.config import DepthRoutingConfig
from efx.routing.mod import MoDBlock


@dataclasses.dataclass(frozen=True)
class RecursionStep:
    """One pass through the shared blocks; see also `stack.LayerSpec`.

    Attributes:
      number: of the step, from 0.
      shared: `LayerSpec`s of the shared blocks.
      routing: None: all tokens, without a router.
      capacity: fraction of the sequence that this step computes.
    """

    number: int
    shared: tuple
    routing: DepthRoutingConfig | None = None
    capacity: float = 1.0

    @property
    def name(self):
        return f"recursion_{self.number}"

    @property
    def blocks(self):
        return tuple(spec.block for spec in self.shared)

    @property
    def new_blocks(self):
        """The blocks whose parameters no earlier layer has."""
        return () if self.number else self.blocks

    @property
    def attentions(self):
        sees_all = self.routing is not None and self.routing.kv_for_skipped
        return tuple((block, sees_all) for block in self.blocks)

    @property
    def parts(self):
        return {"": self}

    def apply(self, shared, x_BTD, call):
        """(x, mask of the tokens that the next step may select, or None: all).

        Args:
          shared: `SharedBlocks`. call: its `selectable_BT` are the tokens of the previous step.
        """
        call = call.with_cache(tag=self.name)  # every step has caches of its own
        if self.routing is None:
            return shared.run(x_BTD, call), None
        step = MoDBlock(None, self.routing, self.capacity, shared=shared, name=self.name)
        x_BTD, selected_BT = step(x_BTD, call)
        return constrain(x_BTD, "batch", "length", "act_embed"), selected_BT


class SharedBlocks(nn.Module):
    """Layers of the stack as one block: x -> the sum of their increments."""

    layers: tuple[nn.Module, ...]

    # Layer i + 1 writes keys and values made of the output of layer i.
    kv_depends_on_block_output: ClassVar[bool] = True

    @property
    def config(self):
        return self.layers[0].spec.block

    def run(self, x_BTD, call, context=None):
        for layer in self.layers:
            x_BTD = layer(x_BTD, call, context)
            if context is not None:
                # The next layer attends to the new states of computed tokens, old ones of others.
                states_BSD, all_call, index_BC = context
                context = selection.put(states_BSD, index_BC, x_BTD), all_call, index_BC
        return x_BTD

    def __call__(self, x_BTD, call, context=None):
        """`context` = (states [B, S, D], their call, positions of x in them): each layer attends
        to these instead of to x."""
        # In float32: the difference of two states in bfloat16 would lose bits of small increments.
        return self.run(x_BTD, call, context).astype(jnp.float32) - x_BTD.astype(jnp.float32)


def recursion_steps(routing, shared):
    """The `RecursionStep`s through the blocks of these `LayerSpec`s."""
    for i, capacity in enumerate(routing.step_capacities):
        yield RecursionStep(i, shared, routing if routing.step_is_routed(i) else None, capacity)
