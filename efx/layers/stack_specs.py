"""A stack of blocks as `config.model` describes it: dense, routed by depth, with experts; its cost.

The decoder is such a stack, the latent transformer has one in its middle.
"""

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
    routing = c.depth_routing
    blocks = [
        with_soft_experts(with_experts(b, c.mlp, i), c.soft_experts, i) for i in range(c.depth)
    ]
    if routing.kind == "recursion":
        return LayerSpec(blocks[0]), *_recursion(routing, blocks), LayerSpec(blocks[-1])
    routed = routing.routed_blocks(c.depth)
    return tuple(
        LayerSpec(block, routing, routed[i]) if i in routed else LayerSpec(block)
        for i, block in enumerate(blocks)
    )


def _recursion(routing, blocks):
    """The steps of a recursion through all blocks but the first and the last."""
    before = 1.0
    for i, share in enumerate(routing.shares):
        settings = routing if routing.step_is_routed(i) else None
        yield RecursionStep(i, tuple(blocks[1:-1]), settings, share, before)
        before = share


def stack_flops(specs, length, selection, shares=None):
    """{component: nominal FLOPs} of one sequence; see `Model.ledger`."""
    parts = []
    for i, spec in enumerate(specs):
        r = spec.routing
        if r is not None:
            parts.append(costs.routing_flops(spec.blocks[0], r, length))
        for b in spec.blocks:
            tokens, context, pairs = length, None, flops.causal_pairs(length, b.attention.window)
            masked = pairs  # the pairs that attentions of masks, over computed tokens, meet
            if r is not None and shares and i in shares:
                token_share, pair_share = shares[i]
                tokens, masked = token_share * length, pair_share * pairs
                pairs = token_share * pairs if r.kv_for_skipped else masked
            elif r is not None:
                tokens = r.places(spec.capacity, length, selection)
                masked = flops.causal_pairs(tokens, b.attention.window)
                pairs = pairs * tokens / length if r.kv_for_skipped else masked
            if r is not None and r.kv_for_skipped:
                context = length
            parts.append(costs.attention_flops(b, tokens, pairs, context))
            parts.append(costs.mlp_flops(b, tokens, selection))
            parts.append(costs.mask_flops(b, tokens, masked))
    return flops.add(parts)
