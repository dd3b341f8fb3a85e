"""What the latent transformer costs: nominal FLOPs.

Components: `compression` and `upsampling` are what changes the number of latents, `levels` the
local and global blocks; the others, with the names that the decoder's have, are the latent stack
and the output layer.
"""

from efx import flops
from efx.layers import costs, stack_specs
from efx.models.latent import loss as latent_loss


def ledger(model, length, selection, shares):
    """Nominal FLOPs of one sequence of a resolved model; see `Model.ledger`."""
    c = model.config
    groups = -(-length // c.group_size)
    latents = groups * c.latents[-1]
    places = c.memory_global + latents
    parts = [
        model.head_flops(length, c.level_widths[0]),
        stack_specs.stack_flops(model.blocks(), places, selection, shares),
        costs.embedding_mask_flops(model.stack_block(), places, flops.causal_pairs(places)),
        latent_loss.loss_flops(c.latent_loss, c.width, latents),
    ]
    for level in model.levels(encoder=True):
        parts += [_compression(level, groups), _blocks(level, groups)]
    for level in model.levels(encoder=False):
        parts += [_upsampling(level, groups), _blocks(level, groups)]
    return flops.Ledger(length, flops.add(parts))


def _blocks(level, groups):
    """The local and global blocks of a level."""
    parts = []
    for number, rows, length in (
        (level.local_blocks, groups, level.model.memory_local + level.places),
        (level.global_blocks, 1, level.model.memory_global + groups * level.places),
    ):
        parts.append(_dense(level.block, "levels", number, rows, length))
    return flops.add(parts)


def _dense(b, component, number, rows, length):
    """So many ordinary blocks, on rows of so many places."""
    attention = costs.attention_flops(b, rows * length, rows * flops.causal_pairs(length))
    mlp = costs.mlp_flops(b, rows * length)["mlp"]
    return {
        component: number * (attention["attention_projections"] + mlp),
        "level_scores": number * attention["attention_scores"],
    }


def _compression(level, groups):
    b, read = level.block, groups * level.inner
    heads = b.attention.num_heads * b.attention.head_dim
    if level.model.compression == "perceiver":
        computed, scores = groups * level.places, "compression_scores"
        pairs = flops.causal_pairs(level.inner) - flops.causal_pairs(level.inner - level.places)
    else:
        computed, scores = read, "level_scores"
        pairs = flops.causal_pairs(level.inner)
    # Queries and the residual are as wide as what is read, and so are keys and values.
    work = flops.matmul(computed, level.inner_width, heads + b.width)
    work += flops.matmul(read, level.inner_width, 2 * heads)
    work += flops.matmul(computed, heads, b.width)
    work += costs.mlp_flops(b, computed)["mlp"]
    seen = flops.attention_scores(groups * pairs, b.attention.num_heads, b.attention.head_dim)
    parts = [{"compression": work, scores: seen}]
    if level.model.compression == "transformer":
        others = level.model.compression_blocks - 1
        parts.append(_dense(b, "compression", others, groups, level.inner))
    return flops.add(parts)


def _upsampling(level, groups):
    b = level.block
    part = {"upsampling": flops.matmul(groups * level.inner, level.inner_width, b.width)}
    if level.model.upsampling == "repeat":
        return part
    computed = groups * level.places
    attention = costs.attention_flops(b, computed, groups * flops.causal_pairs(level.places))
    projections = attention["attention_projections"]
    if not level.model.upsampling_norm:  # no output matrix either
        projections -= flops.matmul(computed, b.attention.num_heads * b.attention.head_dim, b.width)
    scores = attention["attention_scores"]
    return flops.add([part, {"upsampling": projections, "level_scores": scores}])
