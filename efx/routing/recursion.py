"""Mixture-of-Recursions: one stack of blocks, applied several times to fewer and fewer tokens.

Bae et al. 2025, arXiv 2507.10524, with "middle-cycle" sharing: the first and the last block are
ordinary ones; step r of the blocks between them computes the tokens that its own router selects
among those of step r - 1. A step that computes all tokens has no router.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from efx.layers import selection
from efx.parallel.sharding import constrain
from efx.routing.mod import MoDBlock


class SharedBlocks(nn.Module):
    """Layers of the stack as one block: x -> the sum of their increments."""

    layers: tuple[nn.Module, ...]

    # Layer i + 1 writes keys and values made of the output of layer i.
    kv_depends_on_block_output: ClassVar[bool] = True

    @property
    def config(self):
        return self.layers[0].spec.blocks[0]

    def run(self, x_BTD, call, context=None):
        for layer in self.layers:
            x_BTD = layer(x_BTD, call, context)
            if context is not None:
                # The next layer attends to the new states of computed tokens, old ones of others.
                states_BSD, all_call, index_BC = context
                context = selection.scatter_set(states_BSD, index_BC, x_BTD), all_call, index_BC
        return x_BTD

    def __call__(self, x_BTD, call, context=None):
        """`context` = (states [B, S, D], their call, positions of x in them): each layer attends
        to these instead of to x."""
        if call.access == "read":  # the layers write the selected tokens one after the other
            call = call.with_cache(access="both")
        # In float32: the difference of two states in bfloat16 would lose bits of small increments.
        return self.run(x_BTD, call, context).astype(jnp.float32) - x_BTD.astype(jnp.float32)


def run_step(name, spec, shared, x_BTD, call):
    """Apply the shared blocks once, in the compact method of a stack.

    Args:
      spec: `LayerSpec` of the step. shared: `SharedBlocks`.
      call: its `selectable_BT` are the tokens of the previous step.
    Returns: (x [B, T, D], mask [B, T] of the tokens that the next step may select, or None: all).
    """
    call = call.with_cache(tag=name)  # every step has caches of its own
    if spec.routing is None:
        return shared.run(x_BTD, call), None
    x_BTD, computed_BT = MoDBlock(shared, spec.routing, spec.capacity, name=name)(x_BTD, call)
    return constrain(x_BTD, "batch", "length", "act_embed"), computed_BT
