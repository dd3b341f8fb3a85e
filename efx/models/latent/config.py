"""`config.model` of the latent transformer; what its parts are built of."""

import dataclasses
import functools
import logging
from typing import ClassVar, Literal

from efx.errors import UsageError
from efx.layers import mup
from efx.layers.config import (
    AttentionConfig,
    DenseFormerConfig,
    Initialisation,
    MuPConfig,
    SoftExpertsConfig,
    with_soft_experts,
)
from efx.models.config import MOST_BLOCKS, ModelConfig, check_stack
from efx.models.latent import groups
from efx.routing.config import DepthRoutingConfig
from efx.settings import Count, NonNegative, Pieces, PiecesOrNone, Places, block

ROTARY = ("rope", "both")  # of the choices of `positions`
COUNTS = ("encoder_local", "encoder_global", "decoder_local", "decoder_global")


@block("config.model.latent_loss")
class LatentLossConfig:
    """See models/latent/loss.py."""

    # Loss `latent_prediction`, of W x_t as a prediction of the next latent: "cosine",
    # "siglip" (tell it from the others).
    kind: Literal["none", "cosine", "siglip"] = "none"
    target_gradient: bool = False  # it also moves the latent that is predicted
    # siglip: the others of the same sequence (accumulation does not change the loss), or of all
    # sequences of a micro-batch, over all devices.
    candidates: Literal["row", "batch"] = "row"


@block("config.model")
class LatentConfig(ModelConfig):
    """The grouped-latent transformer. `width`, of the last level, `depth` and `attention` are those
    of the latent stack, which also has `mlp.kind`, `mlp.hidden`, depth routing, soft experts and
    averages. `attention.window` counts places of each level, and of a group in its local blocks.
    Learned dropout is in every level: what enters the stack, or the blocks of a level, is to it the
    embedding, and the site "embedding" is the former."""

    family: Literal["latent"] = "latent"
    attention: AttentionConfig = AttentionConfig(qk_norm="width")
    group_size: Count = 16  # P_0, tokens in a group; a sequence is padded to whole groups
    latents: tuple[Count, ...] = (4,)  # P_1, P_2...: of a group at each level, fewer and fewer
    level_widths: tuple[Count, ...] = (64,)  # D_0, of tokens, and of the levels before the last
    level_heads: tuple[Count, ...] = ()  # of these; (): heads as wide as the latent stack's
    # "perceiver": the last places of a group attend to all of it; "transformer":
    # `compression_blocks` blocks inside the group, of whose output the last places are kept.
    compression: Literal["perceiver", "transformer"] = "perceiver"
    compression_blocks: Pieces = 1
    # Blocks of each level, inside groups and across all; one number, or one for each of the
    # levels 1, 2... Decoder level 1 works on tokens: a global block there costs what one of a
    # dense decoder costs.
    encoder_local: PiecesOrNone | tuple[PiecesOrNone, ...] = 1
    encoder_global: PiecesOrNone | tuple[PiecesOrNone, ...] = 1
    decoder_local: PiecesOrNone | tuple[PiecesOrNone, ...] = 1
    decoder_global: PiecesOrNone | tuple[PiecesOrNone, ...] = 1
    # "sequence": all local blocks, then all global ones
    block_order: Literal["interleaved", "sequence"] = "interleaved"
    upsampling: Literal["repeat", "attention"] = "repeat"
    # Upsampling by attention norms what it reads and has an output matrix, as other blocks
    # have; False: neither, the published form.
    upsampling_norm: bool = True
    # Places for which a group has no latent yet take those of the group before: "tile", all of
    # them again and again; "in_place", each several times.
    repeat: Literal["tile", "in_place"] = "tile"
    # "lerp": learned shares of what entered the encoder level and of the decoder's
    skip: Literal["sum", "lerp"] = "sum"
    # Where the skip connection joins: "after" the decoder level's blocks, or "before" them, so
    # that they see the tokens and not only latents.
    skip_joins: Literal["after", "before"] = "after"
    # Learned tables, one a level, which its encoder and its decoder share: "absolute", of the
    # tokens by their place in the document (`context` rows), of latents by their place in the
    # group; "level", of both by the place in the group, so that nothing says which group it
    # is. "rope": none, rotary positions in their stead; "both": "level" and these.
    positions: Literal["absolute", "level", "rope", "both"] = "absolute"
    memory_local: Places = 0  # learned tokens before each group, for local blocks
    memory_global: Places = 0  # learned tokens before the sequence, for global blocks, the stack
    embedding_noise: NonNegative = 0.0  # uniform, of this over sqrt(T D), in training
    use_bias: bool = False
    tied: bool = True  # the output layer is the token embedding
    # "spike_no_more": sqrt(2 / (5 D)) of each level in the place of init_std.
    initialisation: Initialisation = "gpt2"
    mup: MuPConfig = MuPConfig()  # logits by D_0, learning rate of a matrix by its fan-in
    depth_routing: DepthRoutingConfig = DepthRoutingConfig()
    soft_experts: SoftExpertsConfig = SoftExpertsConfig()
    # Blocks that have these: those of the stack; besides all blocks of the encoder's levels; of
    # the levels of both.
    soft_experts_in: Literal["stack", "encoder", "levels"] = "stack"
    dense_former: DenseFormerConfig = DenseFormerConfig()
    latent_loss: LatentLossConfig = LatentLossConfig()

    norm: ClassVar[str] = "rmsnorm"
    causal_in_training: ClassVar[str] = (
        "unless depth_routing selects by top-k or mlp.moe by expert_choice"
    )

    def resolved(self):
        """With one value for each level; UsageError for settings that do not go together.

        Of n levels: `level_widths` and `level_heads` become (D_0, ..., D_n) and their heads, the
        numbers of blocks one for each of the levels 1..n.
        """

        def bad(name, message):
            raise UsageError(f"config.model.{name}={getattr(self, name)!r}: {message}")

        _check_latents(self, bad)
        levels = len(self.latents)
        attention = self.attention.resolved(
            self.width, self.positions in ROTARY, self.mup.scales_attention, self.use_bias
        )
        self.dropout.resolved(self.width, attention.num_heads)
        widths, heads = _widths(self, attention, levels, bad)
        counts = {}
        for name in COUNTS:
            value = getattr(self, name)
            counts[name] = value if isinstance(value, tuple) else (value,) * levels
            if len(counts[name]) != levels:
                bad(name, f"expected a number of blocks, or one for each of the {levels} levels")
        most = max(COUNTS, key=lambda name: sum(counts[name]))
        if (blocks := sum(map(sum, counts.values()))) > MOST_BLOCKS:
            bad(most, f"the levels have {blocks} blocks in total; use at most {MOST_BLOCKS}")
        if self.soft_experts_in != "stack" and not self.soft_experts.num:
            bad("soft_experts_in", f"there are no soft experts; set {self.soft_experts.where}.num")
        check_stack(self, self.depth)
        if self.depth_routing.needs_token_places:
            selection = self.depth_routing.train_selection
            raise UsageError(
                f"{self.depth_routing.where}.train_selection={selection!r}: "
                "not with config.model.family='latent', because its routed blocks compute "
                "groups of tokens, without a token type"
            )
        if self.context % self.group_size:
            _say_padded(self.context, self.group_size)
        return dataclasses.replace(
            self,
            level_widths=widths,
            level_heads=heads,
            attention=attention,
            mlp=self.mlp.resolved(self.depth, "gelu"),
            **counts,
        )

    @property
    def sizes(self):
        """(P_0, P_1, ..., P_n)."""
        return (self.group_size, *self.latents)

    @property
    def position_tables(self):
        """((rows, width), ...): the learned table of each level of a resolved config, if any."""
        if self.positions == "rope":
            return ()
        first = self.context if self.positions == "absolute" else self.group_size
        return tuple(zip((first, *self.latents), self.level_widths, strict=True))


def _check_latents(model, bad):
    if not model.latents:
        bad("latents", "expected the number of latents per group at each level, such as (16, 2)")
    before, limit = model.group_size, f"config.model.group_size={model.group_size}"
    for count in model.latents:
        if count >= before:
            bad(
                "latents",
                f"{count} must be less than {limit}: the number of latents "
                "decreases from level to level",
            )
        before, limit = count, f"the {count} of the level before"


def _widths(model, attention, levels, bad):
    """((D_0, ..., D_n), heads of each); a resolved model has them already."""
    widths = model.level_widths
    if len(widths) == levels:
        widths = (*widths, model.width)
    if len(widths) != levels + 1 or widths[-1] != model.width:
        bad(
            "level_widths",
            f"expected {levels} widths, of the tokens and of all levels but the last (its "
            "width is config.model.width)",
        )
    heads, head_dim = model.level_heads, attention.head_dim
    if not heads:
        for width in widths[:-1]:
            if width % head_dim:
                bad(
                    "level_widths",
                    f"{width} is not divisible by {head_dim}, the head width of the latent "
                    "stack; set config.model.level_heads",
                )
        heads = tuple(width // head_dim for width in widths[:-1])
    if len(heads) == levels:
        heads = (*heads, attention.num_heads)
    if len(heads) != levels + 1 or heads[-1] != attention.num_heads:
        bad("level_heads", f"expected {levels} numbers of heads, one for each of level_widths")
    masks = model.dropout.attention
    for width, count in zip(widths[:-1], heads, strict=False):
        if width % count:
            bad("level_widths", f"{width} is not divisible by its {count} heads (level_heads)")
        if model.positions in ROTARY:
            where = f"config.model.positions={model.positions!r}"
            attention.check_rotary(width // count, where, f"{width} / {count}")
        if model.dropout.kind == "attention" and masks.num_heads and width % masks.num_heads:
            bad(
                "level_widths",
                f"{width} is not divisible by {masks.where}.num_heads={masks.num_heads}",
            )
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


# ---- parts of a resolved config -----------------------------------------------------------------


def deviations(c, level):
    """How the weights of a level start: by its own width."""
    return mup.deviations(c.initialisation, c.init_std, c.mup, c.level_widths[level])


def level_block(c, level, dtype, dropout, hidden, context):
    """A block that is D_level wide, on at most so many places."""
    std = deviations(c, level).hidden
    width, heads = c.level_widths[level], c.level_heads[level]
    attention = c.attention
    if level < len(c.latents):
        attention = dataclasses.replace(
            attention, num_heads=heads, num_kv_heads=heads, head_dim=width // heads
        )
    return dataclasses.replace(
        c.block(
            width=width,
            attention=attention,
            hidden=hidden,
            dropout=dropout.resolved(width, heads),
            std=std,
            std_out=std / (2 * _blocks(c)) ** 0.5,
            dtype=dtype,
            router_scale=c.mup.logit_scale(width),
        ),
        context=context,
    )


def _blocks(c):
    """How many blocks there are in all."""
    first = c.compression_blocks if c.compression == "transformer" else 1
    counts = (getattr(c, name) for name in COUNTS)
    return c.depth + first * len(c.latents) + sum(map(sum, counts))


def _places(c, level):
    """Places of a level in the longest sequence, memory tokens included."""
    return c.memory_global + -(-c.context // c.group_size) * c.sizes[level]


def stack_block(c, dtype):
    """A block of the latent stack, without experts."""
    level = len(c.latents)
    hidden = c.mlp.hidden_size(c.width)
    return level_block(c, level, dtype, c.dropout, hidden, _places(c, level))


def levels(c, dtype, encoder):
    """[LevelConfig] of levels 1..n of the encoder or the decoder."""
    # The embedding is the token's, or what enters the stack.
    dropout, sites = c.dropout, tuple(site for site in c.dropout.sites if site != "embedding")
    dropout = dataclasses.replace(dropout, **(dict(sites=sites) if sites else dict(kind="none")))
    # The width of the latent stack's MLP is its own; the others follow the rule.
    mlp = dataclasses.replace(c.mlp, hidden=0)
    soft = dataclasses.replace(c.soft_experts, every=1)
    if c.soft_experts_in == "stack" or (c.soft_experts_in == "encoder" and not encoder):
        soft = dataclasses.replace(soft, num=0)
    sizes, result = c.sizes, []
    local_blocks = c.encoder_local if encoder else c.decoder_local
    global_blocks = c.encoder_global if encoder else c.decoder_global
    for i in range(1, len(sizes)):
        level, inner = (i, i - 1) if encoder else (i - 1, i)
        hidden = mlp.hidden_size(c.level_widths[level])
        # Compression attends to the places that it reads, upsampling to those that it makes.
        block, local_block, global_block = (
            level_block(c, level, dtype, dropout, hidden, places)
            for places in (
                max(sizes[level], sizes[inner]),
                c.memory_local + sizes[level],
                _places(c, level),
            )
        )
        result.append(
            groups.LevelConfig(
                model=c,
                block=block,
                local_block=with_soft_experts(local_block, soft, 0),
                global_block=with_soft_experts(global_block, soft, 0),
                places=sizes[level],
                inner=sizes[inner],
                inner_width=c.level_widths[inner],
                local_blocks=local_blocks[i - 1],
                global_blocks=global_blocks[i - 1],
                std_table=deviations(c, level).table,
            )
        )
    return result
