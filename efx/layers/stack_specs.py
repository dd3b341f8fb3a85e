"""A stack of blocks as `config.model` describes it: dense, routed by depth, with experts; its cost.

The decoder is such a stack, the latent transformer has one in its middle.
"""

import dataclasses

from efx import flops
from efx.layers import costs
from efx.layers.config import with_experts, with_soft_experts
from efx.layers.stack import LayerSpec, RecursionStep


def make(b, c):
    """The layers of a stack.

    Args:
      b: `BlockConfig` of a block without experts.
      c: the resolved config of the family, with `depth`, `mlp`, `depth_routing`, `soft_experts`.
    """
    layers = tuple(stream(b, c, c.depth, c.depth_routing.routed_blocks(c.depth)))
    if c.depth_routing.kind != "recursion":
        return layers
    shared = tuple(spec.block for spec in layers[1:-1])
    return layers[0], *_recursion(c.depth_routing, shared), layers[-1]


def stream(b, c, depth, capacities, kind=LayerSpec, **fields):
    """So many layers, of which those in `capacities` = {number: capacity} are routed.

    Args:
      b, c: as in `make`.
      kind: `LayerSpec`, or a kind of it with these further fields.
    """
    for i in range(depth):
        block = dataclasses.replace(b, attention=b.attention.of_block(i))
        block = with_soft_experts(with_experts(block, c.mlp, i), c.soft_experts, i)
        routed = dict(routing=c.depth_routing, capacity=capacities[i]) if i in capacities else {}
        yield kind(block=block, **routed, **fields)


def _recursion(routing, blocks):
    """The steps of a recursion through these blocks."""
    before = 1.0
    for i, share in enumerate(routing.shares):
        settings = routing if routing.step_is_routed(i) else None
        yield RecursionStep(i, blocks, settings, share, before)
        before = share


def stack_flops(specs, length, selection, shares=None):
    """{component: nominal FLOPs} of one sequence; `specs` are those of `Model.blocks`, and see
    `Model.ledger`."""
    parts = []
    for path, spec in specs.items():
        r, first = spec.routing, spec.blocks[0]
        causal = flops.causal_pairs(length, first.attention.window)
        # Pairs among the computed tokens, and of these with all tokens before them.
        tokens, inner, outer = length, causal, causal
        if r is not None:
            parts.append(costs.routing_flops(first, r, length))
            if shares and path in shares:
                token_share, pair_share = shares[path]
                tokens, outer = token_share * length, token_share * causal
                routed = pair_share * flops.causal_pairs(length)
                inner = flops.thinned_pairs(tokens, length, first.attention.window, routed)
            else:
                tokens = r.slots(spec.capacity, length, selection)
                inner = flops.thinned_pairs(tokens, length, first.attention.window)
                outer = causal * tokens / length
        for b, whole in spec.attentions:
            pairs, context = (outer, length) if whole else (inner, tokens)
            parts.append(costs.attention_flops(b, tokens, pairs, context))
            parts.append(costs.mask_flops(b, tokens, inner, "attention_output"))
        for b in spec.blocks:
            parts.append(costs.mlp_flops(b, tokens, selection))
            parts.append(costs.mask_flops(b, tokens, inner, "mlp_output"))
    return flops.add(parts)
