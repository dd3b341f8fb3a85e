"""What a Mixture of Experts costs, by formula."""

from efx import flops


def block_flops(block, tokens, selection):
    """{component: nominal forward FLOPs} of a block's MLP on `tokens` tokens; {} if it has no
    experts.

    By the papers' convention a token meets k experts, of which no-op ones cost nothing:
    `computed_fraction` says how many are left. Expert choice fills all its places.
    """
    c = block.moe
    if c is None:
        return {}
    if c.router == "token_choice":
        rows = c.top_k * tokens * c.counted_fraction
    else:
        rows = c.num_experts * c.places(tokens, selection)
    matrices = block.mlp.matrices
    return {
        "mlp": matrices * flops.matmul(rows + c.num_shared * tokens, block.width, block.hidden),
        "moe_router": flops.matmul(tokens, block.width, c.choices),
    }
