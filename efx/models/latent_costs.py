"""Nominal FLOPs of the levels of the grouped-latent transformer, for one row, by component."""

from efx.layers import flops
from efx.models import costs


def level_flops(c, length):
    """{component: FLOPs} of all encoder and decoder levels, for a resolved `LatentConfig`."""
    parts, groups = [], c.num_groups(length)
    for level in range(1, len(c.sizes)):
        parts += [_compression_flops(c, level, groups), _upsampling_flops(c, level, groups)]
        parts += [_blocks_flops(c, side, level, length) for side in ("encoder", "decoder")]
    return flops.add(parts)


def _blocks_flops(c, side, level, length):
    """The local and global blocks of a level of the encoder or the decoder."""
    inner, parts = level if side == "encoder" else level - 1, []
    b = c.level_block(inner)
    for kind, rows in (("local", c.num_groups(length)), ("global", 1)):
        number, size = (
            getattr(c, f"{side}_{kind}")[level - 1],
            c.sequence_length(kind, inner, length),
        )
        if number:
            parts += _block_parts(b, number * rows, size)
            parts.append(costs.mask_input_flops(b, rows * size, rows * _pairs(b, size)))
    return _renamed(parts, "levels")


def _compression_flops(c, level, groups):
    b, length, width = c.level_block(level), c.sizes[level - 1], c.widths[level - 1]
    computed, parts, scores = length, [], "level_scores"
    if c.compression == "perceiver":
        computed, scores = c.sizes[level], "compression_scores"
    else:
        parts += _block_parts(b, (c.compression_blocks - 1) * groups, length)
    parts += _block_parts(b, groups, length, computed, width)
    parts.append({"compression": flops.matmul(groups * computed, width, b.width)})
    parts.append(costs.mask_input_flops(b, groups * computed, groups * _pairs(b, computed)))
    return _renamed(parts, "compression", scores)


def _upsampling_flops(c, level, groups):
    b, size = c.level_block(level - 1), c.sizes[level - 1]
    parts = [{"upsampling": flops.matmul(groups * c.sizes[level], c.widths[level], b.width)}]
    if c.upsampling == "attention":
        tokens, pairs = groups * size, groups * _pairs(b, size)
        parts.append(costs.attention_flops(b, tokens, pairs, has_output=c.upsampling_norm))
        if b.dropout.active("attention_output"):
            parts.append(costs.mask_flops(b, tokens, pairs, "attention_output"))
            parts.append(costs.mask_input_flops(b, tokens, pairs))
    return _renamed(parts, "upsampling")


def _block_parts(b, rows, length, computed=None, width=None):
    """[{component: FLOPs}] of one block on `rows` sequences of `length` latents.

    Args:
      computed: it computes the last so many of a sequence, which attend to all; None: all.
      width: of its input; None: that of the block.
    """
    computed = computed or length
    pairs = rows * (_pairs(b, length) - _pairs(b, length - computed))
    mask_pairs, tokens = rows * _pairs(b, computed), rows * computed
    return [
        costs.attention_flops(b, tokens, pairs, rows * length, width),
        costs.mlp_flops(b, tokens),
        costs.mask_flops(b, tokens, mask_pairs, "attention_output", "mlp_output"),
    ]


def _pairs(b, length):
    return flops.causal_pairs(length, b.attention.window)


def _renamed(parts, component, scores="level_scores"):
    """The sum of the FLOPs of parts of blocks, as components of the levels."""
    names = dict(attention_projections=component, mlp=component, attention_scores=scores)
    return flops.add({names.get(name, name): n} for part in parts for name, n in part.items())
