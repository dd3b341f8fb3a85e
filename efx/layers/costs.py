"""What a block costs: nominal FLOPs of one sequence, by component.

A multiply-add is 2 FLOPs; see `efx.flops` for what is counted.
"""

from efx import flops
from efx.routing.decisions import DECISIONS


def attention_flops(b, tokens, pairs, context=None):
    """Of the attention of a block that computes `tokens` and attends to `context` places (None: to
    themselves), in so many (query, key) pairs."""
    heads = channels(b) * b.attention.num_heads
    context = tokens if context is None else context
    return {
        "attention_projections": flops.matmul(tokens, b.width, 2 * heads * b.attention.head_dim)
        + flops.matmul(context, b.width, 2 * _kv_width(b)),
        "attention_scores": flops.attention_scores(pairs, heads, b.attention.head_dim),
    }


def mlp_flops(b, tokens, selection="train"):
    """Of a block's MLP or experts; `selection` matters with experts that choose their tokens.

    By the papers' convention a token meets its k experts, of which no-op ones cost nothing:
    `computed_fraction` says how many are left. Experts that choose fill all their slots.
    """
    if b.soft is not None:
        return {"mlp": _soft_mlp_flops(b, tokens)}
    rows, moe = tokens, b.moe
    if moe is not None and moe.router == "token_choice":
        rows = moe.top_k * tokens * moe.counted_fraction + moe.num_shared * tokens
    elif moe is not None:
        rows = moe.num_experts * moe.slots(tokens, selection) + moe.num_shared * tokens
    parts = {"mlp": b.mlp.matrices * flops.matmul(rows, b.width, b.hidden)}
    if moe is not None:
        parts["moe_router"] = flops.matmul(tokens, b.width, moe.choices)
    return parts


def channels(b):
    """How many attentions a block has side by side."""
    return 1 if b.soft is None else b.soft.num


def _kv_width(b):
    """Numbers that the keys of one token are, over all channels; its values are as many."""
    shared = b.soft is not None and b.soft.shared_kv
    return (1 if shared else channels(b)) * b.attention.num_kv_heads * b.attention.head_dim


def _soft_mlp_flops(b, tokens):
    """Every channel passes its own expert, the shared MLPs and the common matrix back to D."""
    rows, features = b.soft.num * tokens, b.soft.features(b.width)
    hidden = (1 + b.soft.shared) * b.hidden
    return (
        flops.matmul(rows, b.width, (b.mlp.matrices - 1) * hidden)
        + flops.matmul(rows, hidden, features)
        + flops.matmul(rows, features, b.width)
    )


def routing_flops(b, r, length):
    """Nominal FLOPs of routing itself: scores, decisions, and the skip MLP, which is computed for
    every token and kept for the skipped ones."""
    router = 0 if r.is_control else flops.matmul(length, b.width, 1)
    trained = (DECISIONS[name].flops(r, b.width, length) for name in r.trained_decisions)
    counted = {"router": router + sum(trained)}
    if r.skip_mlp:
        counted["skip_mlp"] = b.mlp.matrices * flops.matmul(length, b.width, r.skip_mlp)
    return counted


def stack_flops(specs, length, mode, measured=None):
    """{component: nominal FLOPs} of one sequence; `specs` are those of `Model.blocks`, and see
    `Model.ledger`."""
    return flops.add(
        component
        for path, spec in specs.items()
        for component in _layer_flops(spec, length, mode, (measured or {}).get(path))
    )


def _layer_flops(spec, length, mode, measured):
    """measured: (fraction of the tokens, fraction of the causal pairs) that were routed, or None:
    the slots of a routed block are full."""
    r, window = spec.routing, spec.blocks[0].attention.window
    all_pairs = flops.causal_pairs(length, window)
    # Pairs among the computed tokens, and pairs of these with all tokens before them.
    tokens, pairs, pairs_with_all = length, all_pairs, all_pairs
    if r is not None:
        yield routing_flops(spec.blocks[0], r, length)
        if measured is not None:
            tokens = measured[0] * length
            routed_pairs = measured[1] * flops.causal_pairs(length)
            pairs = flops.thinned_pairs(tokens, length, window, routed_pairs)
        else:
            tokens = r.slots(spec.capacity, length, mode)
            pairs = flops.thinned_pairs(tokens, length, window)
        pairs_with_all = all_pairs * tokens / length
    attends_all = r is not None and r.target == "mlp"
    for b, sees_all in spec.attentions:
        if attends_all:
            queries, keys, counted, masked = length, length, all_pairs, all_pairs
        else:
            queries, masked = tokens, pairs
            keys, counted = (length, pairs_with_all) if sees_all else (tokens, pairs)
        yield attention_flops(b, queries, counted, keys)
        yield mask_flops(b, queries, masked, "attention_output")
    mlp_tokens, mlp_pairs = tokens, pairs
    if r is not None and r.target == "attention":
        mlp_tokens, mlp_pairs = length, all_pairs
    for b in spec.blocks:
        yield mlp_flops(b, mlp_tokens, mode)
        yield mask_flops(b, mlp_tokens, mlp_pairs, "mlp_output")


# ---- learned dropout ---------------------------------------------------------------------------


def _mask_attentions(b, sites):
    """How many masks at these sites have an attention of their own."""
    c = b.dropout
    return sum(c.active(site) for site in sites) if c.own_attention else 0


def _mask_linears(b, sites):
    """Columns of the linear layers that make masks."""
    c = b.dropout
    mask_width = 1 if c.attention.granularity == "token" else b.width
    if c.kind != "attention" or (c.own_attention and mask_width > 1):
        return 0
    return mask_width * sum(c.active(site) for site in sites)


def _mask_flops(b, tokens, pairs, attentions, linears):
    if not attentions + linears:
        return {}
    heads = b.dropout.attention.num_heads
    return {
        "mask_projections": flops.matmul(tokens, b.width, 3 * attentions * b.width + linears),
        "mask_scores": attentions * flops.attention_scores(pairs, heads, b.width // heads),
    }


def mask_flops(b, tokens, pairs, *sites):
    """{component: FLOPs} of the masks at these sites, of a block one for each channel; {} if they
    multiply no matrices."""
    sites = sites * channels(b)
    attentions, linears = _mask_attentions(b, sites), _mask_linears(b, sites)
    return _mask_flops(b, tokens, pairs, attentions, linears)


def mask_input_flops(b, tokens, pairs):
    """The same of what masks share: a pass over the embedding, and the linear layer that makes what
    they read of it."""
    c = b.dropout
    return _mask_flops(b, tokens, pairs, c.shared, b.width * (c.shared and c.own_attention))


def embedding_mask_flops(b, tokens, pairs):
    """The same of what comes before the blocks: the mask there, and what all masks share."""
    masks = mask_flops(b, tokens, pairs, "embedding")
    return flops.add([masks, mask_input_flops(b, tokens, pairs)])
