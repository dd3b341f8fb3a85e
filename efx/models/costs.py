"""Nominal FLOPs of blocks for one sequence, by component; conventions: `efx.layers.flops`."""

import dataclasses

from efx.layers import flops
from efx.layers.report import Report
from efx.routing.decisions import DECISIONS
from efx.routing.scores import SCORES


def attention_flops(b, tokens, pairs, context=None, width=None, has_output=True):
    """{component: FLOPs} of an attention with `tokens` queries and `context` keys (None: the same
    tokens), of which `pairs` (query, key) pairs are scored.

    Args:
      width: of the input; None: that of the block. has_output: it has an output matrix.
    """
    a, width, keys = b.attention, width or b.width, tokens if context is None else context
    shares_kv = b.soft is not None and b.soft.shared_kv
    heads = channels(b) * a.num_heads
    kv_heads = a.num_kv_heads if shares_kv else channels(b) * a.num_kv_heads
    projections = flops.matmul(tokens, width, heads * a.head_dim)
    projections += flops.matmul(keys, width, 2 * kv_heads * a.head_dim)
    if has_output:
        projections += flops.matmul(tokens, heads * a.head_dim, b.width)
    scores = flops.attention_scores(pairs, heads, a.head_dim)
    return {"attention_projections": projections, "attention_scores": scores}


def mlp_flops(b, tokens, selection="train"):
    """{component: FLOPs} of a block's MLP or experts.

    By the papers' convention a token costs its k experts, of which a fraction `computed_fraction`
    computes. With expert choice all slots count; `selection` is "train" or "causal".
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
        parts["moe_router"] = flops.matmul(tokens, b.width, moe.num_choices)
    return parts


def channels(b):
    """Number of channels of a block."""
    return 1 if b.soft is None else b.soft.num


def _soft_mlp_flops(b, tokens):
    """In each channel: its own MLP, the shared MLPs and the common matrix back to D."""
    rows, features = b.soft.num * tokens, b.soft.features(b.width)
    hidden = (1 + b.soft.shared) * b.hidden
    return (
        flops.matmul(rows, b.width, (b.mlp.matrices - 1) * hidden)
        + flops.matmul(rows, hidden, features)
        + flops.matmul(rows, features, b.width)
    )


def routing_flops(b, r, length):
    """{component: FLOPs} of the score, the decisions, and the skip MLP, which computes every token
    and is used for the skipped ones."""
    modules = SCORES[r.score], *(DECISIONS[name] for name in r.trained_decisions)
    counted = {"router": sum(module.flops(r, b.width, length) for module in modules)}
    if r.skip_mlp:
        counted["skip_mlp"] = b.mlp.matrices * flops.matmul(length, b.width, r.skip_mlp)
    return counted


def stack_flops(specs, length, mode, measured=None):
    """{component: nominal FLOPs} of one sequence, of the specs of `LanguageModel.blocks`; arguments
    as in `LanguageModel.ledger`."""
    return flops.add(
        component
        for path, spec in specs.items()
        for component in _layer_flops(spec, length, mode, (measured or {}).get(path))
    )


def attentions(spec):
    """[(the block of an attention, whether its keys are those of all tokens and not only of routed
    ones)] of a `LayerSpec`."""
    found, sees_all = [], spec.routing is not None and spec.routing.kv_for_skipped
    if spec.routing is not None and spec.routing.target == "mlp_only":
        return found
    for b in spec.blocks:
        if "self" in b.order:
            found.append((b, sees_all))
        if b.cross is not None:
            found.append((dataclasses.replace(b, attention=b.cross), True))
    return found


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
    for b, sees_all in attentions(spec):
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


def mask_flops(b, tokens, pairs, *sites):
    """{component: FLOPs} of the masks at these sites, one for each channel of a block."""
    c = b.dropout
    masks = channels(b) * sum(c.active(site) for site in sites)
    # An attention of its own needs no linear layer.
    has_linear = c.kind == "attention" and not c.own_attention
    attentions, linears = masks * c.own_attention, masks * has_linear
    return _mask_flops(b, tokens, pairs, attentions, linears * b.width)


def _mask_flops(b, tokens, pairs, attentions, features):
    """features: outputs of all linear layers."""
    if not attentions + features:
        return {}
    heads = b.attention.num_heads
    return {
        "mask_projections": flops.matmul(tokens, b.width, 3 * attentions * b.width + features),
        "mask_scores": attentions * flops.attention_scores(pairs, heads, b.width // heads),
    }


def mask_input_flops(b, tokens, pairs):
    """{component: FLOPs} of the input that all masks share: an attention over the embedding and a
    linear layer."""
    c = b.dropout
    linears = b.width if c.has_mask_input and c.own_attention else 0
    return _mask_flops(b, tokens, pairs, c.has_mask_input, linears)


def embedding_mask_flops(b, tokens, pairs):
    """{component: FLOPs} before the blocks: the mask of the embedding and the masks' input."""
    masks = mask_flops(b, tokens, pairs, "embedding")
    return flops.add([masks, mask_input_flops(b, tokens, pairs)])


MASKS = Report(words={"dropout/kept": "\n  masks keep {:.1%}"}, statistics=("dropout/",))
