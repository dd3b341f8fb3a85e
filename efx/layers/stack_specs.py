"""A stack of blocks as `config.model` describes it: dense, routed by depth, with experts; its cost.

The decoder is such a stack, the latent transformer has one in its middle.
"""

from efx import flops
from efx.layers import attend, costs, moe_config
from efx.layers.config import with_experts, with_soft_experts
from efx.layers.stack import LayerSpec, PassSpec


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
    """The passes of a recursion through all blocks but the first and the last."""
    before = 1.0
    for i, share in enumerate(routing.steps):
        yield PassSpec(i, tuple(blocks[1:-1]), routing if share < 1 else None, share, before)
        before = share


def stack_flops(specs, length, selection, shares=None):
    """({component: FLOPs} as executed, the same by the papers' convention) of one sequence.

    Arguments as in `Decoder.ledger`.
    """
    parts, nominal = [], []
    for i, spec in enumerate(specs):
        if spec.routing is not None:
            added = costs.routing_flops(spec.blocks[0], spec.routing, length)
            parts.append(added)
            nominal.append(added)
        for b in spec.blocks:
            r, tokens, context = spec.routing, length, None
            if r is not None:
                tokens = r.places(spec.capacity, length, selection)
            if r is not None and r.kv_for_skipped:
                context = length
                visited = tokens * length
                allowed = flops.causal_pairs(length, b.attention.window) * tokens / length
            else:
                visited = attend.visited_pairs(tokens, b.attention.chunk, b.attention.window)
                allowed = flops.causal_pairs(tokens, b.attention.window)
            experts = moe_config.block_flops(b, tokens, selection, nominal=False)
            parts.append(costs.block_flops(b, tokens, visited, context) | experts)
            own = attend.visited_pairs(tokens, b.attention.chunk, b.attention.window)
            parts.append(costs.mask_flops(b, tokens, own))
            own = flops.causal_pairs(tokens, b.attention.window)
            if shares and i in shares:
                token_share, pair_share = shares[i]
                tokens = token_share * length
                pairs = flops.causal_pairs(length, b.attention.window)
                own = pairs * pair_share
                allowed = pairs * (token_share if r.kv_for_skipped else pair_share)
            experts = moe_config.block_flops(b, tokens, selection, nominal=True)
            nominal.append(costs.block_flops(b, tokens, allowed, context) | experts)
            nominal.append(costs.mask_flops(b, tokens, own))
    return flops.add(parts), flops.add(nominal)


def stack_params(specs, norm):
    """{component: parameters}; `norm` is how many a norm has."""
    blocks = []
    for spec in specs:
        for block in spec.new_blocks:
            blocks.append(costs.block_params(block) | moe_config.block_params(block))
            blocks.append({"norm": 2 * norm} | costs.mask_params(block))
        if spec.routing is not None:
            blocks.append(costs.routing_params(spec.blocks[0], spec.routing, norm))
    return flops.add(blocks)


def cached_values(specs, cache_size):
    """Numbers in the keys (and as many in the values) that decoding one sequence keeps."""
    total = 0
    for spec in specs:
        slots = computed = cache_size
        if spec.routing is not None:
            computed = spec.routing.room(spec.capacity, cache_size)
            slots = cache_size if spec.routing.kv_for_skipped else computed
        for block in spec.blocks:
            total += slots * costs.kv_width(block)
            total += costs.mask_attentions(block) * computed * block.width
    return total
