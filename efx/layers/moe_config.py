"""What a Mixture of Experts costs, by formula."""

import dataclasses

from efx import flops


def block_flops(block, tokens, selection, nominal):
    """{component: forward FLOPs} of a block's MLP on `tokens` tokens; {} if it has no experts.

    As executed, every place of every expert counts, filled or not. By the papers' convention
    (`nominal`) a token meets k experts, of which no-op ones cost nothing: `computed_fraction` says
    how many are left. Expert choice fills all its places.
    """
    c = block.moe
    if c is None:
        return {}
    rows = c.num_experts * c.places(tokens, selection)
    if nominal and c.router == "token_choice":
        rows = c.top_k * tokens * c.counted_fraction
    matrices = block.mlp.matrices
    return {
        "mlp": matrices * flops.matmul(rows + c.num_shared * tokens, block.width, block.hidden),
        "moe_router": flops.matmul(tokens, block.width, c.choices),
    }


def block_params(block):
    """{component: parameters} of a block's MLP; {} if it has no experts."""
    c = block.moe
    if c is None:
        return {}
    matrices = block.mlp.matrices
    copies, widened = c.num_experts, c.num_shared * block.hidden
    count = matrices * block.width * (copies * block.hidden + widened)
    if block.use_bias:
        count += copies * ((matrices - 1) * block.hidden + block.width)
        count += ((matrices - 1) * widened + block.width) if widened else 0
    return {"mlp": count, "moe_router": block.width * c.choices}


def active_params(block):
    """Parameters of a block's MLP that one token meets; in the mean, where that varies."""
    c = block.moe
    share = c.top_k / c.choices if c.router == "token_choice" else c.capacity
    shared = dataclasses.replace(block, moe=dataclasses.replace(c, num_experts=0))
    every_token = block_params(shared)["mlp"]
    whole = block_params(block)
    return every_token + share * (whole["mlp"] - every_token) + whole["moe_router"]
