"""What the latent transformer costs, by formula.

Components: `compression` and `upsampling` are what changes the number of latents, `levels` the
local and global blocks; the others, with the names that the decoder's have, are the latent stack
and the output layer.
"""

import jax.numpy as jnp

from efx import flops
from efx.layers import attend, costs, latent_loss, stack_specs


def ledger(model, length, selection, shares):
    """FLOPs of one sequence of a resolved model; see `Decoder.ledger`."""
    c = model.config
    groups = -(-length // c.group_size)
    places = c.memory_global + groups * c.latents[-1]
    stack = stack_specs.stack_flops(model.specs(), places, selection, shares)
    counts = []
    for i, nominal in enumerate((False, True)):

        def pairs(length, nominal=nominal):
            if nominal:
                return flops.causal_pairs(length)
            return attend.visited_pairs(length, c.attention.chunk)

        head = model.head_flops(length, c.level_widths[0], nominal)
        parts = [
            head,
            stack[i],
            costs.embedding_mask_flops(model.stack_block(), places, pairs(places)),
        ]
        latents = groups * c.latents[-1]
        parts.append(latent_loss.loss_flops(c.latent_loss, c.width, latents))
        for level in model.levels(encoder=True):
            parts += [_compression(level, groups, pairs, nominal), _blocks(level, groups, pairs)]
        for level in model.levels(encoder=False):
            parts += [_upsampling(level, groups, pairs), _blocks(level, groups, pairs)]
        counts.append(flops.add(parts))
    return flops.Ledger(length, *counts)


def _blocks(level, groups, pairs):
    """The local and global blocks of a level."""
    b, parts = level.block, []
    for number, rows, length in (
        (level.local_blocks, groups, level.model.memory_local + level.places),
        (level.global_blocks, 1, level.model.memory_global + groups * level.places),
    ):
        block = costs.block_flops(b, rows * length, rows * pairs(length))
        parts.append(
            {
                "levels": number * (block["attention_projections"] + block["mlp"]),
                "level_scores": number * block["attention_scores"],
            }
        )
    return flops.add(parts)


def _compression(level, groups, pairs, nominal):
    b, read = level.block, groups * level.inner
    heads = b.attention.num_heads * b.attention.head_dim
    if level.model.compression == "perceiver":
        computed, scores = groups * level.places, "compression_scores"
        allowed = flops.causal_pairs(level.inner) - flops.causal_pairs(level.inner - level.places)
        seen = groups * (allowed if nominal else level.places * level.inner)
    else:
        computed, scores = read, "level_scores"
        seen = groups * pairs(level.inner)
    # Queries and the residual are as wide as what is read, and so are keys and values.
    work = flops.matmul(computed, level.inner_width, heads + b.width)
    work += flops.matmul(read, level.inner_width, 2 * heads)
    work += flops.matmul(computed, heads, b.width)
    work += costs.block_flops(b, computed, 0)["mlp"]
    parts = [
        {
            "compression": work,
            scores: flops.attention_scores(seen, b.attention.num_heads, b.attention.head_dim),
        }
    ]
    if level.model.compression == "transformer":
        block = costs.block_flops(b, read, seen)
        more = level.model.compression_blocks - 1
        work = more * (block["attention_projections"] + block["mlp"])
        parts.append({"compression": work, "level_scores": more * block["attention_scores"]})
    return flops.add(parts)


def _upsampling(level, groups, pairs):
    b = level.block
    part = {"upsampling": flops.matmul(groups * level.inner, level.inner_width, b.width)}
    if level.model.upsampling == "repeat":
        return part
    computed = groups * level.places
    block = costs.block_flops(b, computed, groups * pairs(level.places))
    projections = block["attention_projections"]
    if not level.model.upsampling_norm:  # no output matrix either
        projections -= flops.matmul(computed, b.attention.num_heads * b.attention.head_dim, b.width)
    attention = {
        "upsampling": projections,
        "level_scores": block["attention_scores"],
    }
    return flops.add([part, attention])


def parameter_count(model):
    """{component: parameters} of a resolved model."""
    c, stack = model.config, model.stack_block()
    count = {
        "embedding": model.padded_vocab * c.level_widths[0],
        "norm": c.level_widths[0],
        "memory": c.memory_global * c.width,
    }
    if c.position_tables:
        count["positions"] = sum(rows * width for rows, width in c.position_tables)
    if not c.tied:
        count["head"] = c.level_widths[0] * model.padded_vocab
    parts = [count, stack_specs.stack_params(model.specs(), c.width)]
    parts.append(costs.embedding_mask_params(stack))
    parts.append(latent_loss.loss_params(c.latent_loss, c.width))
    if c.dense_former.on:
        count["averages"] = c.dense_former.parameter_count(len(model.specs()))
    for level in model.levels(encoder=True):
        parts += [_compression_params(level), _block_params(level)]
    for level in model.levels(encoder=False):
        parts += [_upsampling_params(level), _block_params(level)]
    return flops.add(parts)


def _block_params(level):
    b, number = level.block, level.local_blocks + level.global_blocks
    memory = level.model.memory_local * (level.local_blocks > 0)
    memory += level.model.memory_global * (level.global_blocks > 0)
    count = {"levels": number * sum(costs.block_params(b).values()), "norm": number * 2 * b.width}
    return count | {"memory": memory * b.width}


def _linear_params(level):
    b = level.block
    return level.inner_width * b.width + b.width * b.use_bias


def _compression_params(level):
    b, more = level.block, level.model.compression_blocks - 1
    block = costs.block_params(b)
    # The first block reads another width: its queries, keys and values, and its first norm.
    first = (
        sum(block.values())
        + 3 * (level.inner_width - b.width) * b.attention.num_heads * b.attention.head_dim
    )
    blocks = more * (level.model.compression == "transformer")
    return {
        "compression": first + _linear_params(level) + blocks * sum(block.values()),
        "norm": level.inner_width + b.width + 2 * blocks * b.width,
    }


def _upsampling_params(level):
    b = level.block
    count = {"upsampling": _linear_params(level) + (level.places - level.inner) * level.inner_width}
    if level.model.skip == "lerp":
        count["upsampling"] += b.width
    if level.model.upsampling == "attention":
        count["upsampling"] += costs.block_params(b)["attention"]
        if level.model.upsampling_norm:
            count["norm"] = 2 * b.width
        else:
            count["upsampling"] -= (
                b.attention.num_heads * b.attention.head_dim + b.use_bias
            ) * b.width
    return count


def cache_bytes(model, cache_size):
    """Bytes of keys and values that decoding one sequence of `cache_size` tokens keeps.

    The other things it keeps, a few latents a level for upsampling, do not grow with the sequence.
    """
    c = model.config
    groups = -(-cache_size // c.group_size)
    places = c.memory_global + groups * c.latents[-1]
    total = stack_specs.cached_values(model.specs(), places)
    total += costs.embedding_mask_attentions(model.stack_block()) * places * c.width
    for level in model.levels(encoder=True):
        blocks = level.model.compression_blocks if level.model.compression == "transformer" else 1
        total += blocks * level.inner * level.block.width + _cached(level, groups)
    for level in model.levels(encoder=False):
        attention = level.model.upsampling == "attention"
        total += attention * level.places * level.block.width + _cached(level, groups)
    return 2 * total * jnp.dtype(model.dtype).itemsize


def _cached(level, groups):
    local = level.local_blocks * (level.model.memory_local + level.places)
    whole = level.global_blocks * (level.model.memory_global + groups * level.places)
    return (local + whole) * level.block.width
