"""What the latent transformer costs: nominal FLOPs.

Components: `compression` and `upsampling` are what changes the number of latents, `levels` the
local and global blocks; the others, with the names that the decoder's have, are the latent stack
and the output layer, `mask_projections` and `mask_scores` those of all masks.
"""

from efx import flops
from efx.layers import costs
from efx.models.latent import loss as latent_loss


def groups_of(c, length):
    """How many groups so many tokens are."""
    return -(-length // c.group_size)


def stack_places(c, length):
    """What the latent stack computes for so many tokens: memory and latents."""
    return c.memory_global + groups_of(c, length) * c.latents[-1]


def ledger(model, length, selection, shares):
    """Nominal FLOPs of one sequence of a resolved model; see `Model.ledger`."""
    c = model.config
    groups = groups_of(c, length)
    latents = groups * c.latents[-1]
    places, block = stack_places(c, length), model.stack_block()
    parts = [
        model.head_flops(length, c.level_widths[0]),
        costs.stack_flops(model.blocks(), places, selection, shares),
        costs.embedding_mask_flops(block, places, _pairs(block, places)),
        latent_loss.loss_flops(c.latent_loss, c.width, latents),
    ]
    parts += [encoder_flops(level, groups) for level in model.levels(encoder=True)]
    parts += [decoder_flops(level, groups) for level in model.levels(encoder=False)]
    return flops.Ledger(length, flops.add(parts))


def encoder_flops(level, groups):
    """{component: FLOPs} of a level of the encoder."""
    return flops.add([_compression(level, groups), _blocks(level, groups)])


def decoder_flops(level, groups):
    """The same of the decoder."""
    return flops.add([_upsampling(level, groups), _blocks(level, groups)])


def _blocks(level, groups):
    """The local and global blocks of a level."""
    parts = []
    for b, number, rows, length in (
        (level.local_block, level.local_blocks, groups, level.model.memory_local + level.places),
        (
            level.global_block,
            level.global_blocks,
            1,
            level.model.memory_global + groups * level.places,
        ),
    ):
        if number:
            pairs = rows * _pairs(b, length)
            parts += [
                _dense(b, "levels", number, rows * length, pairs),
                costs.mask_input_flops(b, rows * length, pairs),
            ]
    return flops.add(parts)


def _pairs(b, length):
    return flops.causal_pairs(length, b.attention.window)


def _dense(b, component, number, places, pairs):
    """So many ordinary blocks on so many places."""
    attention = costs.attention_flops(b, places, pairs)
    parts = {
        component: attention["attention_projections"] + costs.mlp_flops(b, places)["mlp"],
        "level_scores": attention["attention_scores"],
        **costs.mask_flops(b, places, pairs, "attention_output", "mlp_output"),
    }
    return {name: number * value for name, value in parts.items()}


def _compression(level, groups):
    b, read = level.block, groups * level.inner
    heads = b.attention.num_heads * b.attention.head_dim
    pairs = groups * _pairs(b, level.inner)
    if level.model.compression == "perceiver":
        computed, scores = groups * level.places, "compression_scores"
        pairs -= groups * _pairs(b, level.inner - level.places)
        mask_pairs = groups * _pairs(b, level.places)
    else:
        computed, scores, mask_pairs = read, "level_scores", pairs
    # Queries and the residual are as wide as what is read, and so are keys and values.
    kv_heads = b.attention.num_kv_heads * b.attention.head_dim
    work = flops.matmul(computed, level.inner_width, heads + b.width)
    work += flops.matmul(read, level.inner_width, 2 * kv_heads)
    work += flops.matmul(computed, heads, b.width)
    work += costs.mlp_flops(b, computed)["mlp"]
    seen = flops.attention_scores(pairs, b.attention.num_heads, b.attention.head_dim)
    parts = [
        {"compression": work, scores: seen},
        costs.mask_flops(b, computed, mask_pairs, "attention_output", "mlp_output"),
        costs.mask_input_flops(b, computed, mask_pairs),
    ]
    if level.model.compression == "transformer":
        others = level.model.compression_blocks - 1
        parts.append(_dense(b, "compression", others, read, pairs))
    return flops.add(parts)


def _upsampling(level, groups):
    b = level.block
    part = {"upsampling": flops.matmul(groups * level.inner, level.inner_width, b.width)}
    if level.model.upsampling == "repeat":
        return part
    computed, pairs = groups * level.places, groups * _pairs(b, level.places)
    attention = costs.attention_flops(b, computed, pairs)
    projections = attention["attention_projections"]
    if not level.model.upsampling_norm:  # no output matrix either
        projections -= flops.matmul(computed, b.attention.num_heads * b.attention.head_dim, b.width)
    scores = attention["attention_scores"]
    parts = [part, {"upsampling": projections, "level_scores": scores}]
    if b.dropout.active("attention_output"):
        parts.append(costs.mask_flops(b, computed, pairs, "attention_output"))
        parts.append(costs.mask_input_flops(b, computed, pairs))
    return flops.add(parts)
