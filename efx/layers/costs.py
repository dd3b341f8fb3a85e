"""What a block costs, by formula: FLOPs of one sequence and parameters, by component.

A multiply-add is 2 FLOPs; see `efx.flops` for what is counted.
"""

from efx import flops


def block_flops(b, tokens, pairs, context=None):
    """Of a block that computes `tokens` and attends to `context` places (None: to themselves)."""
    heads, kv = b.num_heads * b.head_dim, b.num_kv_heads * b.head_dim
    context = tokens if context is None else context
    return {
        "attention_projections": flops.matmul(tokens, b.width, 2 * heads)
        + flops.matmul(context, b.width, 2 * kv),
        "attention_scores": flops.attention_scores(pairs, b.num_heads, b.head_dim),
        "mlp": _matrices(b) * flops.matmul(tokens, b.width, b.hidden),
    }


def _matrices(b):
    return 3 if b.activation == "swiglu" else 2


def _predictor_width(b, r):
    return (r.predictor_hidden or max(1, b.width // 2)) if "predictor" in r.trained else 0


def routing_flops(b, r, length):
    """What routing adds: scores and decisions, and the light path, which is computed for every
    token and kept for the skipped ones."""
    hidden = _predictor_width(b, r)
    predictor = flops.matmul(length, b.width, hidden) + flops.matmul(length, hidden, 1)
    counted = {"router": flops.matmul(length, b.width, 1) + predictor}
    if r.light_path:
        counted["light_path"] = _matrices(b) * flops.matmul(length, b.width, r.light_path)
    return counted


def routing_params(b, r, norm):
    hidden = _predictor_width(b, r)
    counted = {"router": b.width + hidden * (b.width + 1)}
    if r.light_path:
        bias = (_matrices(b) - 1) * r.light_path + b.width if b.use_bias else 0
        counted["light_path"] = norm + _matrices(b) * b.width * r.light_path + bias
    return counted


def block_params(b):
    heads, kv = b.num_heads * b.head_dim, b.num_kv_heads * b.head_dim
    matrices = _matrices(b)
    bias = (heads + 2 * kv + b.width, (matrices - 1) * b.hidden + b.width) if b.use_bias else (0, 0)
    norms_qk = {"none": 0, "head": 2 * b.head_dim, "width": heads + kv}[b.qk_norm]
    return {
        "attention": b.width * (2 * heads + 2 * kv) + bias[0] + norms_qk,
        "mlp": matrices * b.width * b.hidden + bias[1],
    }


# ---- learned dropout ---------------------------------------------------------------------------


BLOCK_SITES = ("attention_probs", "attention_output", "mlp_output")  # of dropout in a block


def mask_attentions(b, sites=BLOCK_SITES):
    """How many masks at these sites have an attention, with a cache, of their own."""
    c = b.dropout
    if c.kind != "attention" or c.shared:
        return 0
    return sum(c.active(site) for site in sites)


def embedding_mask_attentions(b):
    """The same for what comes before the blocks: the pass that all share, or that of one mask."""
    c = b.dropout
    return int(c.shared or (c.kind == "attention" and c.active("embedding")))


def _mask_linears(b, sites):
    """Columns of the linear layers that make masks."""
    c = b.dropout
    if c.kind != "attention" or not (c.shared or _mask_width(b) == 1):
        return 0
    return _mask_width(b) * sum(c.active(site) for site in sites)


def _mask_width(b):
    return 1 if b.dropout.attention.granularity == "token" else b.width


def _mask_flops(b, tokens, pairs, attentions, linears):
    if not attentions + linears:
        return {}
    heads = b.dropout.attention.num_heads
    return {
        "mask_projections": flops.matmul(tokens, b.width, 3 * attentions * b.width + linears),
        "mask_scores": attentions * flops.attention_scores(pairs, heads, b.width // heads),
    }


def mask_flops(b, tokens, pairs, sites=BLOCK_SITES):
    """{component: FLOPs} of the masks at these sites; {} if they multiply no matrices."""
    linears = _mask_linears(b, sites)
    return _mask_flops(b, tokens, pairs, mask_attentions(b, sites), linears)


def embedding_mask_flops(b, tokens, pairs):
    """The same for what comes before the blocks."""
    linears = _mask_linears(b, ("embedding",))
    return _mask_flops(b, tokens, pairs, embedding_mask_attentions(b), linears)


def _vectors(b, sites):
    """Parameters of the masks at these sites outside of their matrices."""
    c = b.dropout
    count = sum(c.active(site) for site in sites if site != "attention_probs")
    if c.kind == "attention":
        return _mask_width(b) * count
    count *= b.width
    return 2 * (count + b.context * ("attention_probs" in sites and c.active("attention_probs")))


def _mask_params(b, attentions, sites):
    if not b.dropout.learned:
        return {}
    columns = 3 * attentions * b.width + _mask_linears(b, sites)
    return {"masks": columns * b.width + _vectors(b, sites)}


def mask_params(b, sites=BLOCK_SITES):
    """{component: parameters} of the masks at these sites; {} without learned dropout."""
    return _mask_params(b, mask_attentions(b, sites), sites)


def embedding_mask_params(b):
    return _mask_params(b, embedding_mask_attentions(b), ("embedding",))
