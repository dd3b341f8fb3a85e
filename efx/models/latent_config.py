"""Values that `config.model` of the latent transformer may have; what its parts are built of."""

import dataclasses
import functools
import logging

from efx.errors import UsageError
from efx.layers import (
    dense_former,
    depth_config,
    groups,
    latent_loss,
    learned_dropout,
    moe_config,
    parametrisation,
    soft_experts_config,
)
from efx.layers.blocks import BlockConfig
from efx.layers.mlp import ACTIVATIONS
from efx.layers.stack import REMAT_POLICIES

ROTARY = ("rope", "both")  # of the choices of `positions`
CHOICES = {
    "compression": groups.COMPRESSIONS,
    "block_order": groups.ORDERS,
    "upsampling": groups.UPSAMPLINGS,
    "repeat": groups.REPEATS,
    "skip": groups.SKIPS,
    "skip_joins": ("after", "before"),
    "positions": ("absolute", "level", *ROTARY),
    "qk_norm": ("none", "head", "width"),
    "attention_scale": ("sqrt", "mup"),
    "remat": ("none", *REMAT_POLICIES),
}
COUNTS = ("encoder_local", "encoder_global", "decoder_local", "decoder_global")


def resolve(model):
    """The model with one value for each level; every bad value is named with its config key.

    Of n levels: `level_widths` and `level_heads` become (D_0, ..., D_n) and their heads, the
    numbers of blocks one for each of the levels 1..n.
    """

    def bad(name, message):
        raise UsageError(f"config.model.{name}={getattr(model, name)!r}: {message}")

    for name, choices in CHOICES.items():
        if getattr(model, name) not in choices:
            bad(name, f"expected one of {', '.join(choices)}")
    ones = ("group_size", "width", "depth", "num_heads", "context", "vocab_size", "vocab_multiple")
    zeros = ("memory_local", "memory_global", "embedding_noise")
    for least, names in ((1, (*ones, "compression_blocks")), (0, zeros)):
        for name in names:
            if getattr(model, name) < least:
                bad(name, f"must be at least {least}")
    _check_latents(model, bad)
    levels = len(model.latents)
    widths, heads = _widths(model, levels, bad)
    counts = {}
    for name in COUNTS:
        value = getattr(model, name)
        counts[name] = value if isinstance(value, tuple) else (value,) * levels
        if len(counts[name]) != levels or min(counts[name]) < 0:
            bad(name, f"expected a number of blocks, or one for each of the {levels} levels")
    mlp = dataclasses.replace(model.mlp, activation=model.mlp.activation or "gelu")
    moe_config.check(mlp, model.depth)
    if mlp.activation not in ACTIVATIONS:
        raise UsageError(
            f"config.model.mlp.activation={mlp.activation!r}: expected one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    depth_config.check(model.depth_routing, model.depth)
    soft_experts_config.check(model.soft_experts, mlp, model.depth)
    dense_former.check(model.dense_former, model.depth, model.scan_layers)
    parametrisation.check(model.initialisation, model.mup)
    latent_loss.check(model.latent_loss)
    if model.scan_layers and model.depth_routing.kind == "recursion":
        raise UsageError(
            "config.model.scan_layers=True: not with config.model.depth_routing.kind='recursion', "
            "whose layers do not repeat a pattern"
        )
    if model.context % model.group_size:
        _say_padded(model.context, model.group_size)
    return model.clone(
        level_widths=widths,
        level_heads=heads,
        mlp=mlp,
        dropout=learned_dropout.resolved(model.dropout, model.width, model.num_heads),
        **counts,
    )


def _check_latents(model, bad):
    if not model.latents:
        bad("latents", "expected the latents a group of each level, such as (16, 2)")
    before, whose = model.group_size, f"config.model.group_size={model.group_size}"
    for count in model.latents:
        if count < 1:
            bad("latents", "must be at least 1 at every level")
        if count >= before:
            bad(
                "latents", f"{count} are not fewer than {whose}; latents shrink from level to level"
            )
        if before % count:
            bad("latents", f"{whose} does not divide into {count} latents")
        before, whose = count, f"the {count} of the level before"


def _widths(model, levels, bad):
    """((D_0, ..., D_n), heads of each); a resolved model has them already."""
    widths = model.level_widths
    if len(widths) == levels:
        widths = (*widths, model.width)
    if len(widths) != levels + 1 or widths[-1] != model.width or min(widths) < 1:
        bad(
            "level_widths",
            f"expected {levels} widths, of tokens and of the levels before the last, whose width "
            "is config.model.width",
        )
    if model.width % model.num_heads:
        bad("width", f"does not divide by config.model.num_heads={model.num_heads}")
    heads = model.level_heads
    if not heads:
        head_dim = model.width // model.num_heads
        for width in widths:
            if width % head_dim:
                bad(
                    "level_widths",
                    f"{width} does not divide into heads of {head_dim}, the latent stack's; give "
                    "config.model.level_heads",
                )
        heads = tuple(width // head_dim for width in widths)
    if len(heads) == levels:
        heads = (*heads, model.num_heads)
    if len(heads) != levels + 1 or heads[-1] != model.num_heads or min(heads) < 1:
        bad("level_heads", f"expected {levels} numbers of heads, one for each of level_widths")
    for width, count in zip(widths, heads, strict=True):
        if width % count:
            bad("level_widths", f"{width} does not divide by its {count} heads (level_heads)")
        if model.positions in ROTARY and (width // count) % 2:
            bad("positions", f"rope needs an even head width, not {width} / {count}")
    return widths, heads


@functools.cache
def _say_padded(context, group_size):
    """Once a process."""
    logging.getLogger(__name__).warning(
        "the context of %d tokens is not a multiple of config.model.group_size=%d: sequences are "
        "padded to whole groups",
        context,
        group_size,
    )


# ---- parts of a resolved model ------------------------------------------------------------------


def deviations(model, level):
    """How the weights of a level start: by its own width."""
    width = model.level_widths[level]
    return parametrisation.deviations(model.initialisation, model.init_std, model.mup, width)


def block(model, level, dropout, hidden, context):
    """A block that is D_level wide."""
    std = deviations(model, level).hidden
    width, heads = model.level_widths[level], model.level_heads[level]
    return BlockConfig(
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        hidden=hidden,
        activation=model.mlp.activation,
        norm="rmsnorm",
        norm_eps=model.norm_eps,
        use_bias=model.use_bias,
        rope_theta=model.rope_theta if model.positions in ROTARY else 0.0,
        qk_norm=model.qk_norm,
        mup=model.attention_scale == "mup" or model.mup.base_width > 0,
        window=0,
        softcap=model.attention_softcap,
        chunk=model.attention_chunk,
        std=std,
        std_out=std / (2 * _blocks(model)) ** 0.5,
        dropout=dropout,
        dtype=model.dtype,
        context=context,
        router_scale=model.mup.logit_scale(width),
    )


def _blocks(model):
    """How many blocks there are in all."""
    first = model.compression_blocks if model.compression == "transformer" else 1
    counts = (getattr(model, name) for name in COUNTS)
    return model.depth + first * len(model.latents) + sum(map(sum, counts))


def stack_block(model):
    """A block of the latent stack, without experts."""
    groups_of_context = -(-model.context // model.group_size)
    places = model.memory_global + groups_of_context * model.latents[-1]
    hidden = model.mlp.hidden_size(model.width)
    return block(model, len(model.latents), model.dropout, hidden, places)


def levels(model, local_blocks, global_blocks, encoder):
    """[LevelConfig] of levels 1..n. Learned dropout stays in the latent stack."""
    dropout = model.dropout
    if dropout.learned:
        dropout = dataclasses.replace(dropout, kind="none")
    # The width of the latent stack's MLP is its own; the others follow the rule.
    mlp = dataclasses.replace(model.mlp, hidden=0)
    sizes, result = model.sizes, []
    for i in range(1, len(sizes)):
        here, inner = (i, i - 1) if encoder else (i - 1, i)
        result.append(
            groups.LevelConfig(
                block=block(model, here, dropout, mlp.hidden_size(model.level_widths[here]), 0),
                group_size=model.group_size,
                places=sizes[here],
                inner=sizes[inner],
                inner_width=model.level_widths[inner],
                compression=model.compression,
                compression_blocks=model.compression_blocks,
                upsampling=model.upsampling,
                upsampling_norm=model.upsampling_norm,
                repeat=model.repeat,
                skip=model.skip,
                skip_joins=model.skip_joins,
                local_blocks=local_blocks[i - 1],
                global_blocks=global_blocks[i - 1],
                order=model.block_order,
                memory_local=model.memory_local,
                memory_global=model.memory_global,
                remat=model.remat,
            )
        )
    return result
