"""What a block costs, by formula: FLOPs of one sequence and parameters, by component.

A multiply-add is 2 FLOPs; see `efx.flops` for what is counted.
"""

from efx import flops


def block_flops(b, tokens, pairs, context=None):
    """Of a block that computes `tokens` and attends to `context` places (None: to themselves)."""
    heads = channels(b) * b.attention.num_heads
    context = tokens if context is None else context
    mlp = _matrices(b) * flops.matmul(tokens, b.width, b.hidden)
    return {
        "attention_projections": flops.matmul(tokens, b.width, 2 * heads * b.attention.head_dim)
        + flops.matmul(context, b.width, 2 * kv_width(b)),
        "attention_scores": flops.attention_scores(pairs, heads, b.attention.head_dim),
        "mlp": mlp if b.soft is None else _soft_mlp_flops(b, tokens),
    }


def channels(b):
    """How many attentions a block has side by side."""
    return 1 if b.soft is None else b.soft.num


def kv_width(b):
    """Numbers that the keys of one token are, over all channels; its values are as many."""
    shared = b.soft is not None and b.soft.shared_kv
    return (1 if shared else channels(b)) * b.attention.num_kv_heads * b.attention.head_dim


def _soft_mlp_flops(b, tokens):
    """Every channel passes its own expert, the shared MLPs and the common matrix back to D."""
    rows, features = b.soft.num * tokens, b.soft.features(b.width)
    hidden = (1 + b.soft.shared) * b.hidden
    return (
        flops.matmul(rows, b.width, (_matrices(b) - 1) * hidden)
        + flops.matmul(rows, hidden, features)
        + flops.matmul(rows, features, b.width)
    )


def _soft_mlp_params(b):
    features, inward = b.soft.features(b.width), _matrices(b) - 1

    def mlp(hidden):
        bias = inward * hidden + features if b.use_bias else 0
        return inward * b.width * hidden + hidden * features + bias

    shared = mlp(b.soft.shared * b.hidden) if b.soft.shared else 0
    out = features * b.width + (b.width if b.use_bias else 0)
    return b.soft.num * mlp(b.hidden) + shared + out


def _matrices(b):
    return b.mlp.matrices


def _predictor_width(b, r):
    return (r.predictor_hidden or max(1, b.width // 2)) if "predictor" in r.trained else 0


def routing_flops(b, r, length):
    """What routing adds: scores and decisions, and the skip MLP, which is computed for every
    token and kept for the skipped ones."""
    hidden = _predictor_width(b, r)
    predictor = flops.matmul(length, b.width, hidden) + flops.matmul(length, hidden, 1)
    router = 0 if r.control else flops.matmul(length, b.width, 1)
    counted = {"router": router + predictor}
    if r.skip_mlp:
        counted["skip_mlp"] = _matrices(b) * flops.matmul(length, b.width, r.skip_mlp)
    return counted


def routing_params(b, r, norm):
    hidden = _predictor_width(b, r)
    counted = {"router": (0 if r.control else b.width) + hidden * (b.width + 1)}
    if r.skip_mlp:
        bias = (_matrices(b) - 1) * r.skip_mlp + b.width if b.use_bias else 0
        counted["skip_mlp"] = norm + _matrices(b) * b.width * r.skip_mlp + bias
    return counted


def block_params(b):
    heads, kv = (
        b.attention.num_heads * b.attention.head_dim,
        b.attention.num_kv_heads * b.attention.head_dim,
    )
    all_heads, all_kv, matrices = channels(b) * heads, kv_width(b), _matrices(b)
    bias = (0, 0)
    if b.use_bias:
        bias = all_heads + 2 * all_kv + channels(b) * b.width, (matrices - 1) * b.hidden + b.width
    norms_qk = {"none": 0, "head": 2 * b.attention.head_dim, "width": heads + kv}[
        b.attention.qk_norm
    ]
    mlp = matrices * b.width * b.hidden + bias[1]
    return {
        "attention": b.width * (2 * all_heads + 2 * all_kv) + bias[0] + norms_qk,
        "mlp": mlp if b.soft is None else _soft_mlp_params(b),
    }


# ---- learned dropout ---------------------------------------------------------------------------


BLOCK_SITES = ("attention_probs", "attention_output", "mlp_output")  # of dropout in a block


def _block_sites(b):
    """Of a block: what a site of a channel masks, every channel masks for itself."""
    probs, *others = BLOCK_SITES
    return (probs, *others * channels(b))


def mask_attentions(b, sites=None):
    """How many masks at these sites (None: those of a block) have an attention, with a cache, of
    their own."""
    c, sites = b.dropout, sites or _block_sites(b)
    return sum(c.active(site) for site in sites) if c.own_attention else 0


def embedding_mask_attentions(b):
    """The same for what comes before the blocks: the pass that all share, and that of one mask."""
    return int(b.dropout.shared) + mask_attentions(b, ("embedding",))


def _mask_linears(b, sites):
    """Columns of the linear layers that make masks."""
    c = b.dropout
    if c.kind != "attention" or (c.own_attention and _mask_width(b) > 1):
        return 0
    return _mask_width(b) * sum(c.active(site) for site in sites)


def _embedding_linears(b):
    """The same for what comes before the blocks: that of one mask, and the one that makes E'."""
    c = b.dropout
    return _mask_linears(b, ("embedding",)) + b.width * (c.shared and c.own_attention)


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


def mask_flops(b, tokens, pairs, sites=None):
    """{component: FLOPs} of the masks at these sites; {} if they multiply no matrices."""
    sites = sites or _block_sites(b)
    linears = _mask_linears(b, sites)
    return _mask_flops(b, tokens, pairs, mask_attentions(b, sites), linears)


def embedding_mask_flops(b, tokens, pairs):
    """The same for what comes before the blocks."""
    attentions = embedding_mask_attentions(b)
    return _mask_flops(b, tokens, pairs, attentions, _embedding_linears(b))


def _vectors(b, sites):
    """Parameters of the masks at these sites outside of their matrices."""
    c = b.dropout
    count = sum(c.active(site) for site in sites if site != "attention_probs")
    if c.kind == "attention":
        return _mask_width(b) * count
    count *= b.width
    return 2 * (count + b.context * ("attention_probs" in sites and c.active("attention_probs")))


def _mask_params(b, attentions, linears, sites):
    if not b.dropout.learned:
        return {}
    columns = 3 * attentions * b.width + linears
    return {"masks": columns * b.width + _vectors(b, sites)}


def mask_params(b, sites=None):
    """{component: parameters} of the masks at these sites; {} without learned dropout."""
    sites = sites or _block_sites(b)
    return _mask_params(b, mask_attentions(b, sites), _mask_linears(b, sites), sites)


def embedding_mask_params(b):
    attentions = embedding_mask_attentions(b)
    return _mask_params(b, attentions, _embedding_linears(b), ("embedding",))
