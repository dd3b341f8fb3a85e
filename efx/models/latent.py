"""The grouped-latent transformer: a causal U-net over groups of consecutive tokens.

    x_0       = E[token] + A[position]                        [B, M P_0, D_0]
    encoder i : compress each group from P_{i-1} to P_i latents, then local and global blocks
    stack     : `depth` causal blocks over the M P_n latents of the row, most of the compute
    decoder i : upsample each group from P_i to P_{i-1}, then blocks, + the input of encoder i
    logits    = E^T norm(x)

A group has P_0 tokens and P_i latents at level i; the tokens are level 0. Latent j of level i
belongs to token P_0 - P_i + j of its group and depends on tokens up to that one. So every level is
causal, and decoding computes a latent when its token arrives. Group boundaries depend on the
position in the row alone. Documents of packed rows never see each other, also inside a group.

Related: Hourglass (Nawrot et al. 2021, arXiv 2110.13711), Hierarchical Perceiver (Carreira et al.
2022, arXiv 2202.10890), Mirasol (Piergiovanni et al. 2023, arXiv 2311.05698).

Axes: M groups, P latents of a group, S latents of a row (M P; decoding: the new ones), D width.
Positions, documents and caches of the latents: `latent_calls.py`. FLOPs: `latent_costs.py`.
"""

import dataclasses
import itertools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efx.config.schema import Count, Modules, ModulesOrZero, NonNegative, Positions, block
from efx.errors import UsageError
from efx.layers import batch_means, flops, learned_dropout, mup, norms
from efx.layers.block import (
    Block,
    increment,
    make_attention,
    make_norm,
    mlp_input,
    norm_input,
    with_dropout,
)
from efx.layers.config import (
    AttentionConfig,
    DenseFormerConfig,
    Initialisation,
    MuPConfig,
    SoftExpertsConfig,
)
from efx.layers.linear import Embedding, Linear, broadcast
from efx.layers.report import sow_increment
from efx.models import costs, latent_costs
from efx.models.config import ModelConfig, check_stack
from efx.models.language_model import LanguageModel
from efx.models.latent_calls import (
    indices,
    level_calls,
    prepend,
    rows_at,
    run_layers,
    with_mask_input,
)
from efx.models.stack import REMAT_POLICIES, LayerSpec, Stack, layer_specs
from efx.parallel.sharding import constrain, parameter

# ---- settings ----------------------------------------------------------------------------------

BLOCK_COUNTS = ("encoder_local", "encoder_global", "decoder_local", "decoder_global")
PerLevel = ModulesOrZero | tuple[ModulesOrZero, ...]


@block("config.model.latent_loss")
class LatentLossConfig:
    """The loss `latent_prediction` of the next latent of the stack, see `LatentPrediction`."""

    kind: Literal["none", "cosine"] = "none"
    target_gradient: bool = False  # the predicted latent gets a gradient too


@block("config.model")
class LatentConfig(ModelConfig):
    """The grouped-latent transformer.

    `width` (of the last level), `depth`, `attention`, `mlp`, depth routing, soft experts and
    averages are those of the latent stack. `attention.window` counts latents: of the row in the
    stack and global blocks, of the group elsewhere. Learned dropout is in every level.
    """

    family: Literal["latent"] = "latent"
    attention: AttentionConfig = AttentionConfig(qk_norm="width")
    group_size: Count = 16  # P_0, tokens in a group; a row is padded to whole groups
    latents: tuple[Count, ...] = (4,)  # P_1, ..., P_n, decreasing: latents of a group at each level
    level_widths: tuple[Count, ...] = (64,)  # D_0, ..., D_{n-1}
    level_heads: tuple[Count, ...] = ()  # of these levels; (): heads as wide as the stack's
    # "perceiver": the last P_i positions of a group attend to all of it. "transformer":
    # `compression_blocks` blocks inside the group, whose last P_i outputs are kept.
    compression: Literal["perceiver", "transformer"] = "perceiver"
    compression_blocks: Modules = 1
    # Blocks inside groups (local) and across groups (global), one number for all levels or one for
    # each. Decoder level 1 works on tokens: a global block there costs as much as a dense one.
    encoder_local: PerLevel = 1
    encoder_global: PerLevel = 1
    decoder_local: PerLevel = 1
    decoder_global: PerLevel = 1
    block_order: Literal["interleaved", "sequence"] = "interleaved"  # "sequence": local ones first
    upsampling: Literal["repeat", "attention"] = "repeat"
    upsampling_norm: bool = True  # norms and output matrix in that attention; published: False
    # Early positions of a group repeat the latents a, b of the group before. "tile": a b a b;
    # "in_place": a a b b.
    repeat: Literal["tile", "in_place"] = "tile"
    skip: Literal["sum", "lerp"] = "sum"  # "lerp": a skip + (1 - a) x with learned a [D]
    skip_joins: Literal["after", "before"] = "after"  # the blocks of a decoder level
    # "absolute": a learned table of `context` rows for the positions of tokens in their document;
    # latents and decoder levels have tables by the position in the group. "level": such a table
    # for the tokens too. "rope": rotary positions, no tables. "both": "level" and "rope".
    positions: Literal["absolute", "level", "rope", "both"] = "absolute"
    memory_local: Positions = 0  # learned tokens before each group, for local blocks
    memory_global: Positions = 0  # learned tokens before the row, for global blocks and the stack
    embedding_noise: NonNegative = 0.0  # uniform noise in training, within this / sqrt(T D)
    use_bias: bool = False
    tied: bool = True  # the output layer is the token embedding
    initialisation: Initialisation = "gpt2"  # "spike_no_more": sqrt(2 / (5 D)) of each level
    mup: MuPConfig = MuPConfig()  # `width` and level widths grow in proportion
    soft_experts: SoftExpertsConfig = SoftExpertsConfig()
    dense_former: DenseFormerConfig = DenseFormerConfig()
    latent_loss: LatentLossConfig = LatentLossConfig()

    norm: ClassVar[str] = "rmsnorm"

    def resolved(self):
        """Fill in all defaults; raise UsageError if the settings do not fit together."""
        levels, has_rope = len(self.latents), self.positions in ("rope", "both")
        counts = {name: getattr(self, name) for name in BLOCK_COUNTS}
        result = dataclasses.replace(
            self,
            attention=self.attention.resolved(self.width, has_rope, self.mup, self.use_bias),
            mlp=self.mlp.resolved(self.depth, "gelu"),
            **{name: n if isinstance(n, tuple) else (n,) * levels for name, n in counts.items()},
        )
        result._check_levels(levels)
        result._check_widths()
        check_stack(result, self.depth)
        routing = self.depth_routing
        if routing.reads_token_ids:
            routing.refuse(
                "score", "not with config.model.family='latent', because latents have no token id"
            )
        return result

    def _check_levels(self, levels):
        if not levels or any(after >= before for before, after in itertools.pairwise(self.sizes)):
            self.refuse(
                "latents",
                "expected the number of latents of a group at each level, decreasing, the first "
                f"less than config.model.group_size={self.group_size}",
            )
        for name in BLOCK_COUNTS:
            if len(getattr(self, name)) != levels:
                self.refuse(name, f"expected one number, or {levels}: one per level")
        if len(self.level_widths) != levels:
            self.refuse("level_widths", f"expected {levels} widths: of all levels but the last")
        if len(self.level_heads) not in (0, levels):
            self.refuse("level_heads", f"expected {levels} numbers, one for each of level_widths")

    def _check_widths(self):
        attention = self.attention
        for width, heads in zip(self.level_widths, self.heads, strict=False):
            divisor, name = attention.head_dim, "the head width of the latent stack"
            if self.level_heads:
                divisor, name = heads, "its level_heads"
            if width % divisor:
                self.refuse("level_widths", f"{width} is not divisible by {divisor}, {name}")
            if attention.rope_theta:
                where = f"config.model.level_widths={self.level_widths}"
                attention.check_rotary(width // heads, where)

    @property
    def sizes(self):
        """(P_0, P_1, ..., P_n)."""
        return (self.group_size, *self.latents)

    @property
    def widths(self):
        """(D_0, D_1, ..., D_n)."""
        return (*self.level_widths, self.width)

    @property
    def heads(self):
        """The number of heads of each level of a resolved config."""
        same_width = tuple(width // self.attention.head_dim for width in self.level_widths)
        return (*(self.level_heads or same_width), self.attention.num_heads)

    def num_groups(self, length):
        """M of a row of `length` tokens."""
        return -(-length // self.group_size)

    def sequence_length(self, kind, level, length):
        """Memory tokens and latents of a sequence of blocks, in a row of `length` tokens.

        Args:
          kind: "local" (a group) or "global" (a row).
        """
        if kind == "local":
            return self.memory_local + self.sizes[level]
        return self.memory_global + self.num_groups(length) * self.sizes[level]

    def block_runs(self, side, level):
        """(("local" or "global", number of blocks), ...) of a level of "encoder" or "decoder"."""
        kinds = "local", "global"
        local, across = (getattr(self, f"{side}_{kind}")[level - 1] for kind in kinds)
        pairs = min(local, across) if self.block_order == "interleaved" else 0
        order = [*kinds] * pairs + ["local"] * (local - pairs) + ["global"] * (across - pairs)
        return tuple((kind, len(list(run))) for kind, run in itertools.groupby(order))

    def deviations(self, level):
        """Standard deviations of the initial weights of a level, by its width."""
        width = self.widths[level]
        return mup.deviations(self.initialisation, self.init_std, self.mup, self.width, width)

    def stack_block(self, dtype):
        """`BlockConfig` of a block of the latent stack, without experts."""
        level = len(self.latents)
        return self._block(level, dtype, self.sequence_length("global", level, self.context))

    def level_block(self, level, dtype=None, context=0):
        """`BlockConfig` of a block outside the stack that sees at most `context` latents."""
        width, heads, attention = self.widths[level], self.heads[level], self.attention
        if level < len(self.latents):
            own = dict(num_heads=heads, num_kv_heads=heads, head_dim=width // heads)
            attention = dataclasses.replace(attention, **own)
        # `mlp.hidden` and the dropout site "embedding" are the stack's.
        mlp = dataclasses.replace(self.mlp, hidden=0)
        sites = tuple(site for site in self.dropout.sites if site != "embedding")
        changes = dict(sites=sites) if sites else dict(kind="none")
        dropout = dataclasses.replace(self.dropout, **changes)
        c = dataclasses.replace(self, attention=attention, mlp=mlp, dropout=dropout)
        return c._block(level, dtype, context)

    def _block(self, level, dtype, context):
        width, std = self.widths[level], self.deviations(level).hidden
        compression_blocks = self.compression_blocks if self.compression == "transformer" else 1
        num_blocks = self.depth_routing.effective_depth(self.depth)
        num_blocks += compression_blocks * len(self.latents)
        num_blocks += sum(sum(getattr(self, name)) for name in BLOCK_COUNTS)
        std_out = std / (2 * num_blocks) ** 0.5
        b = self.block(width=width, std=std, std_out=std_out, dtype=dtype)
        return dataclasses.replace(b, context=context)


# ---- blocks of a level -------------------------------------------------------------------------


def make_memory(module, kind, level):
    """The learned memory tokens [count, D] of a level, "local" or "global" ones: a parameter of a
    module with a `LatentConfig`."""
    c, name = module.config, f"memory_{kind}"
    shape = getattr(c, name), c.widths[level]
    if not shape[0]:
        return jnp.zeros(shape, module.dtype)
    init = nn.initializers.normal(c.deviations(level).table)
    return parameter(module, name, init, shape, ("position", "table")).astype(module.dtype)


class LevelBlocks(nn.Module):
    """The local and global blocks of a level: [B, S, D] -> [B, S, D].

    Attributes:
      level: the level of these latents. runs: see `LatentConfig.block_runs`.
    """

    config: LatentConfig
    level: int
    runs: tuple
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BSD, calls):
        c, shape = self.config, x_BSD.shape
        sequence_calls = {"local": calls.local, "global": calls.row}
        blocks, memory = {}, {}
        for kind in dict(self.runs):
            context = c.sequence_length(kind, self.level, c.context)
            blocks[kind] = c.level_block(self.level, self.dtype, context)
            memory[kind] = make_memory(self, kind, self.level)
            mask_input = learned_dropout.make_mask_input(blocks[kind], f"mask_input_{kind}")
            x = self._sequences(kind, memory, x_BSD, calls)
            sequence_calls[kind] = with_mask_input(mask_input, x, sequence_calls[kind])
        for i, (kind, number) in enumerate(self.runs):
            specs, count = (LayerSpec((blocks[kind],)),) * number, memory[kind].shape[-2]
            stack = Stack(specs, False, c.remat, name=f"{kind}_{i}")
            x = self._sequences(kind, memory, x_BSD, calls)
            y = run_layers(stack, x, sequence_calls[kind])
            memory[kind], x_BSD = y[:, :count], y[:, count:].reshape(shape)
        return x_BSD

    def _sequences(self, kind, memory, x_BSD, calls):
        """Rows, or groups for local blocks, after their memory tokens."""
        return prepend(memory[kind], calls.split_groups(x_BSD) if kind == "local" else x_BSD)


# ---- encoder levels ----------------------------------------------------------------------------


class Compress(Block):
    """Compress each group: latents of level i - 1 [B, S, D_{i-1}] -> of level i [B, S', D_i].

    The first block is h = x W + Attention(norm x), then h + MLP(norm h), or as `BlockKind` says.
    `perceiver`: only for the last P_i positions of a group, whose queries attend to all positions
    up to their own: latent j sees position p iff p <= P_{i-1} - P_i + j. `transformer`: for all
    positions, followed by further blocks; then the last P_i are kept.

    Attributes:
      config: `BlockConfig` of level i. model: the settings. level: i.
    """

    model: LatentConfig
    level: int

    def setup(self):
        super().setup()
        b, c = self.config, self.model
        self.residual = make_projection(b, c.widths[self.level - 1])
        self.mask_input = learned_dropout.make_mask_input(b)
        self.blocks = Stack((LayerSpec((b,)),) * (c.compression_blocks - 1), False, c.remat)

    def __call__(self, x_BSD, fine, coarse):
        """`fine`, `coarse`: `LevelCalls` of levels i - 1 and i."""
        b, batch, is_perceiver = self.config, len(x_BSD), self.model.compression == "perceiver"
        x = fine.split_groups(x_BSD)
        n = norm_input(b, self.norm_attention, x)
        if is_perceiver:
            call, queries = coarse.group, _last_of_groups(n, fine, coarse)
            positions = call.positions_BT
            positions = jnp.where(positions >= 0, positions + fine.size - coarse.size, -1)
            # Padding is last in its group, so no query reaches its key. One row serves all groups.
            keys = fine.group
            keys = keys if keys.decode else keys.replace(positions_BT=indices(fine.size))
            a = self.attention(queries, call.replace(positions_BT=positions), (n, keys))
            x = _last_of_groups(x, fine, coarse)
        else:
            call = fine.group
            a = self.attention(n, call)
        h = self.residual(x)
        call = with_mask_input(self.mask_input, h, call)
        a = increment(b, self.norm_attention, self.dropout_attention_output, a, call)
        h = h + a + self.mlp_increment(mlp_input(b, h, a), call)
        if not is_perceiver:
            h = _last_of_groups(self.blocks(h, call), fine, coarse)
        return h.reshape(batch, -1, b.width)


def _last_of_groups(y, fine, coarse):
    """Of the latents of `fine`, the last P of each group, one for each latent of `coarse`."""
    skipped = fine.size - coarse.size
    if not fine.group.decode:
        return y[:, skipped:]
    index_BS = coarse.group_BS * fine.size + skipped + coarse.offset_BS
    return rows_at(y, index_BS - fine.start_B1)


def make_projection(b, width, name=None):
    """A linear map from `width` features to the width of `b`, which keeps their variance."""
    return Linear(b.width, ("embed", "table"), width**-0.5, b.use_bias, b.dtype, name=name)


def add_positions(x_BSD, table, calls):
    """Add the rows of a level's table, if any, by the position in the group."""
    if table is None:
        return x_BSD
    # Only padding of a context shorter than a group lies outside the table.
    offset_BS = jnp.minimum(calls.offset_BS, table.num_embeddings - 1)
    return x_BSD + broadcast(table(offset_BS), x_BSD.shape)


class EncoderLevel(nn.Module):
    """Compression, level positions, blocks: [B, S, D_{i-1}] -> [B, S', D_i]."""

    config: LatentConfig
    level: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BSD, fine, coarse, table):
        """`fine`, `coarse`: `LevelCalls` of levels i - 1 and i. `table`: positions of level i."""
        c, i, compress = self.config, self.level, Compress
        if c.remat != "none":
            compress = nn.remat(Compress, policy=REMAT_POLICIES[c.remat])
        b = c.level_block(i, self.dtype, fine.size)
        x_BSD = compress(b, c, i, name="compress")(x_BSD, fine, coarse)
        x_BSD = add_positions(x_BSD, table, coarse)
        runs = c.block_runs("encoder", i)
        return LevelBlocks(c, i, runs, self.dtype, name="blocks")(x_BSD, coarse)


# ---- decoder levels ----------------------------------------------------------------------------


def repeat_latents(z_BMPD, count, repeat):
    """The last `count` of the repeated latents of each group: [B, M, count, D]."""
    batch, groups, size, width = z_BMPD.shape
    copies = -(-count // size)
    axis, order = (2, (copies, size)) if repeat == "tile" else (3, (size, copies))
    # Broadcast and not gathered: gradients are summed in float32, in a fixed order.
    z = broadcast(jnp.expand_dims(z_BMPD, axis), (batch, groups, *order, width))
    return z.reshape(batch, groups, copies * size, width)[:, :, copies * size - count :]


class Upsample(nn.Module):
    """Upsample each group: latents of level i [B, S, D_i] -> of level i - 1 [B, S', D_{i-1}].

    The last P_i positions of a group take its own latents. The earlier ones take repeated latents
    of the group before, the last group that is complete when their token arrives. The first group
    of a document has learned vectors [P_{i-1} - P_i, D_i] there. Then a linear map to D_{i-1},
    computed before the latents are repeated, which is the same and cheaper.
    """

    config: LatentConfig
    level: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, y_BSD, coarse, fine):
        """`coarse`, `fine`: `LevelCalls` of levels i and i - 1."""
        c, i, batch, num_early = self.config, self.level, len(y_BSD), fine.size - coarse.size
        linear = make_projection(c.level_block(i - 1, self.dtype), c.widths[i], "linear")
        init = nn.initializers.normal(c.deviations(i - 1).table)
        first_PD = parameter(self, "first", init, (num_early, c.widths[i]), ("position", "table"))
        z_BSD, first_PD = linear(y_BSD), linear(first_PD.astype(self.dtype))
        if fine.group.decode:
            return self._decode(z_BSD, first_PD, coarse, fine)
        z_BMPD = z_BSD.reshape(batch, -1, coarse.size, z_BSD.shape[-1])
        before = repeat_latents(z_BMPD[:, :-1], num_early, c.repeat)
        if fine.group.segment_ids_BT is not None:
            shape = batch, z_BMPD.shape[1], -1, 1
            document = fine.group.segment_ids_BT.reshape(shape)[:, 1:, :num_early]
            source = coarse.group.segment_ids_BT.reshape(shape)[:, :-1]
            is_same = document == repeat_latents(source, num_early, c.repeat)
            before = jnp.where(is_same, before, broadcast(first_PD, before.shape))
        start = broadcast(first_PD, (batch, 1, *first_PD.shape))
        early_BMPD = jnp.concatenate([start, before], axis=1)
        return jnp.concatenate([early_BMPD, z_BMPD], axis=2).reshape(batch, -1, z_BSD.shape[-1])

    def _decode(self, z_BSD, first_PD, coarse, fine):
        """The cache holds the last 2 P_i latents of each row; new ones are appended."""
        (batch, _, width), size, num_early = z_BSD.shape, coarse.size, len(first_PD)
        shape = batch, 2 * size, width
        cache = self.variable("cache", "latents", jnp.zeros, shape, z_BSD.dtype)
        all_BSD = jnp.concatenate([cache.value, z_BSD], axis=1)
        if not self.is_initializing():
            num_new_B1 = jnp.sum(coarse.group.positions_BT >= 0, axis=1, keepdims=True)
            cache.value = rows_at(all_BSD, num_new_B1 + indices(2 * size))
        # The latent that each position takes: of its group, or negative in the group before.
        offset_11P1 = indices(size).reshape(1, 1, size, 1)
        early_P = repeat_latents(offset_11P1, num_early, self.config.repeat).reshape(-1) - size
        latent_P = jnp.concatenate([early_P, jnp.arange(size)])
        index_BS = fine.group_BS * size + latent_P[fine.offset_BS]
        y_BSD = rows_at(all_BSD, 2 * size + index_BS - coarse.start_B1)
        first_BSD = first_PD[jnp.minimum(fine.offset_BS, num_early - 1)]
        return jnp.where(index_BS[..., None] < 0, first_BSD, y_BSD)


class DecoderLevel(nn.Module):
    """Upsampling, level positions, blocks, skip connection: [B, S, D_i] -> [B, S', D_{i-1}].

    `upsampling="attention"` (Nawrot et al. 2021, section 3.2.2): x <- skip + x + Attention(q = skip
    + x, k and v = x) inside the group. As published, without norms and output matrix, or with both
    (`upsampling_norm`). The skip connection joins after the blocks or before them, as a sum or as
    a skip + (1 - a) x; if before, the joined state is the skip + x of upsampling by attention.
    """

    config: LatentConfig
    level: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, y_BSD, skip_BSD, coarse, fine, table):
        """`coarse`, `fine`: `LevelCalls` of levels i and i - 1. `table`: positions of i - 1."""
        c, i = self.config, self.level
        x_BSD = Upsample(c, i, self.dtype, name="upsample")(y_BSD, coarse, fine)
        # The decoder sees the latents of level i through these alone.
        x, skip, call = fine.split_groups(x_BSD), fine.split_groups(skip_BSD), fine.group
        sow_increment(self, "latent", x, skip, call.valid_mask(len(x)), call)
        x_BSD = add_positions(x_BSD, table, fine)
        upsampled_BSD, joins_before = x_BSD, c.skip_joins == "before"
        if joins_before:
            x_BSD = self._join(skip_BSD, x_BSD)
        if c.upsampling == "attention":
            x_BSD = x_BSD if joins_before else skip_BSD + x_BSD
            x_BSD = x_BSD + self._attention(x_BSD, upsampled_BSD, fine)
        runs = c.block_runs("decoder", i)
        x_BSD = LevelBlocks(c, i - 1, runs, self.dtype, name="blocks")(x_BSD, fine)
        return x_BSD if joins_before else self._join(skip_BSD, x_BSD)

    def _join(self, skip_BSD, x_BSD):
        if self.config.skip == "sum":
            return skip_BSD + x_BSD
        init = nn.initializers.constant(0.5)
        a_11D = parameter(self, "skip", init, skip_BSD.shape[-1:], ("norm",))[None, None]
        # In float32: training moves a from 1/2 by less than bfloat16 resolves.
        skip_BSD, wide_BSD = skip_BSD.astype(jnp.float32), x_BSD.astype(jnp.float32)
        return (a_11D * skip_BSD + (1 - a_11D) * wide_BSD).astype(x_BSD.dtype)

    def _attention(self, x_BSD, upsampled_BSD, fine):
        b = self.config.level_block(self.level - 1, self.dtype, fine.size)
        x, upsampled, call = fine.split_groups(x_BSD), fine.split_groups(upsampled_BSD), fine.group
        query, width = x, None
        if self.config.upsampling_norm:
            query, width = make_norm(b, "norm_queries")(x), b.width
            upsampled = make_norm(b, "norm_latents")(upsampled)
        a = make_attention(b, "attention", width=width)(query, call, (upsampled, None))
        site = "attention_output"
        dropout = learned_dropout.make_dropout(b, site, name=f"dropout_{site}")
        if dropout is not None:
            mask_input = learned_dropout.make_mask_input(b, "mask_input")
            a = dropout(a, with_mask_input(mask_input, x, call))
        return a.reshape(x_BSD.shape)


# ---- the latent loss ---------------------------------------------------------------------------


class LatentPrediction(nn.Module):
    """Sow the loss `latent_prediction` of latents x [B, S, D]: 1 - cos(W x_t, x_{t+1}).

    The mean over the pairs (t, t + 1) of one document, 0 if there are none; x_{t+1} gets a gradient
    with `target_gradient` only. Mirasol, with the cosine as the distance. Equal latents have no
    loss, so its coefficient must be small.
    """

    config: LatentLossConfig
    std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BSD, segment_ids_BS):
        """segment_ids_BS: documents; 0: padding."""
        axes = "embed", "heads"
        linear = Linear(x_BSD.shape[-1], axes, self.std, dtype=self.dtype, name="predict")
        predicted_BTD, target_BTD = linear(x_BSD[:, :-1]), x_BSD[:, 1:]
        if not self.config.target_gradient:
            target_BTD = jax.lax.stop_gradient(target_BTD)
        cosine_BTD = norms.l2_normalize(predicted_BTD) * norms.l2_normalize(target_BTD)
        loss_BT = 1.0 - jnp.sum(cosine_BTD, axis=-1)
        before_BT, after_BT = segment_ids_BS[:, :-1], segment_ids_BS[:, 1:]
        pairs_BT = (before_BT == after_BT) & (after_BT > 0)
        batch_means.sow(self, "losses", "latent_prediction", batch_means.over(loss_BT, pairs_BT))


# ---- the model ---------------------------------------------------------------------------------


class Latent(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `LatentConfig` for the settings."""

    def setup(self):
        c, std = self.config, self.config.deviations(0)
        self.embed = self.token_table(c.widths[0], std.table)
        self.positions_embed = []
        if c.positions != "rope":
            first = c.context if c.positions == "absolute" else c.group_size
            self.positions_embed = [
                Embedding(rows, width, std.table, self.dtype, axes=("position", "table"))
                for rows, width in zip((first, *c.latents), c.widths, strict=True)
            ]
        b = c.stack_block(self.dtype)
        # Learned dropout masks the input of the stack, standard dropout the tokens.
        dropout, is_learned = learned_dropout.make_dropout(b, "embedding"), c.dropout.learned
        self.dropout_embedding = dropout if is_learned else None
        self.token_dropout = None if is_learned else dropout
        levels = range(1, len(c.sizes))
        self.encoder = [EncoderLevel(c, i, self.dtype) for i in levels]
        self.memory = make_memory(self, "global", len(c.latents))
        self.mask_input = learned_dropout.make_mask_input(b)
        self.layers = Stack(self.specs(), c.scan_layers, c.remat, c.dense_former)
        if c.latent_loss.kind != "none":
            self.prediction = LatentPrediction(c.latent_loss, b.std, self.dtype)
        self.decoder = [DecoderLevel(c, i, self.dtype) for i in levels]
        self.norm_final = norms.RMSNorm(c.norm_eps, dtype=self.dtype)
        if not c.tied:
            self.head = self.output_layer(std.head)

    def specs(self):
        """The layers of the latent stack."""
        return layer_specs(self.config.stack_block(self.dtype), self.config)

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The normalised state [B, T, D_0] that the output layer reads.

        As in `LanguageModel.features`, except that positions need documents (`segment_ids_BT`).
        Decoding, the tokens of a row have consecutive positions, and padding follows them.
        """
        c, (batch, length) = self.config, tokens_BT.shape
        if c.dropout.by_position or c.positions == "absolute":
            self.check_context(cache_size if decode else length)
        call = self.make_call(positions_BT, segment_ids_BT, train, decode, cache_size)
        if not decode:
            tokens_BT, call = self._pad_to_groups(tokens_BT, call)
        calls = [level_calls(c, level, call, batch, length) for level in range(len(c.sizes))]
        x_BSD = self._embed(tokens_BT, length, call.positions_BT, calls[0])
        tables, skips = self.positions_embed or [None] * len(c.sizes), []
        for i, level in enumerate(self.encoder):
            skips.append(x_BSD)
            x_BSD = level(x_BSD, calls[i], calls[i + 1], tables[i + 1])
        x_BSD = self._run_stack(x_BSD, calls[-1])
        for i, level in reversed(list(enumerate(self.decoder))):
            x_BSD = level(x_BSD, skips[i], calls[i + 1], calls[i], tables[i])
        return self.norm_final(x_BSD[:, :length])

    def _pad_to_groups(self, tokens_BT, call):
        if call.segment_ids_BT is not None:
            self.check_packing()
        elif call.positions_BT is not None:
            raise UsageError(
                "positions_BT without segment_ids_BT: the latent family derives positions "
                "from the index in the row; leave positions_BT out, or pass segment_ids_BT too"
            )
        length = tokens_BT.shape[1]
        padding = ((0, 0), (0, -length % self.config.group_size))
        positions_BT = indices(length) if call.positions_BT is None else call.positions_BT
        call = call.replace(positions_BT=jnp.pad(positions_BT, padding))
        if call.segment_ids_BT is not None:
            call = call.for_rows(len(tokens_BT))
            call = call.replace(segment_ids_BT=jnp.pad(call.segment_ids_BT, padding))
        return jnp.pad(tokens_BT, padding), call

    def _embed(self, tokens_BT, length, positions_BT, calls):
        """Embed tokens, `length` in a row without padding, with their positions."""
        c, x_BTD = self.config, self.embed(tokens_BT)
        if c.positions == "absolute":
            rows_BTD = self.positions_embed[0](jnp.maximum(positions_BT, 0))
            x_BTD = x_BTD + broadcast(rows_BTD, x_BTD.shape)
        elif self.positions_embed:
            x_BTD = add_positions(x_BTD, self.positions_embed[0], calls)
        if c.embedding_noise and calls.group.train:
            # Jain et al. 2023, arXiv 2310.05914, section 3.
            bound = c.embedding_noise / (length * x_BTD.shape[-1]) ** 0.5
            key = self.make_rng("dropout")
            x_BTD = x_BTD + jax.random.uniform(key, x_BTD.shape, x_BTD.dtype, -bound, bound)
        x_BTD = with_dropout(self.token_dropout, x_BTD, calls.group)
        return constrain(x_BTD, "batch", "length", "act_embed")

    def _run_stack(self, x_BSD, calls):
        """The latent stack; learned dropout takes its input as the embedding."""
        c, call = self.config, calls.row
        x_BSD = prepend(self.memory, x_BSD)
        call = with_mask_input(self.mask_input, x_BSD, call)
        x_BSD = with_dropout(self.dropout_embedding, x_BSD, call)
        x_BSD = run_layers(self.layers, x_BSD, call)[:, c.memory_global :]
        has_loss = c.latent_loss.kind != "none" and not call.decode
        if has_loss and (batch_means.is_collecting(self) or self.is_initializing()):
            segment_ids_BS = call.segment_ids_BT
            if segment_ids_BS is None:
                segment_ids_BS = call.valid_mask(len(x_BSD)).astype(jnp.int32)
            self.prediction(x_BSD, segment_ids_BS[:, c.memory_global :])
        # Laid out without the memory tokens: XLA for CPUs computed a wrong gradient of the next
        # linear map from a slice of an array that is laid out with them.
        return constrain(x_BSD, "batch", "length", "act_embed")

    @nn.nowrap
    def check_packing(self):
        """Raise UsageError if the model has memory tokens, which belong to no document."""
        for name in ("memory_local", "memory_global"):
            if getattr(self.config, name):
                self.config.refuse(
                    name, "packed rows have no memory tokens; use 0, or config.data.packing=False"
                )

    @nn.nowrap
    def stack_length(self, length):
        return self.config.sequence_length("global", len(self.config.latents), length)

    @nn.nowrap
    def token_indices(self, path, positions_RS, length):
        c, names = self.config, path.split("/")
        kinds = [name.split("_")[0] for name in names]
        in_stack = names[0] in ("layers", "dropout_embedding")
        if not in_stack and kinds[0] not in ("encoder", "decoder"):
            return positions_RS
        in_row = in_stack or "global" in kinds
        memory = c.memory_global if in_row else c.memory_local * ("local" in kinds)
        index_RS, latents = positions_RS - memory, positions_RS.shape[1] - memory
        size = latents // c.num_groups(length) if in_row else latents
        group_RS = index_RS // size if in_row else np.arange(len(positions_RS))[:, None]
        token_RS = (group_RS + 1) * c.group_size - size + index_RS % size
        return np.where((index_RS >= 0) & (token_RS < length), token_RS, -1)

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one row; see `LanguageModel.ledger`."""
        c, b, latents = self.config, self.config.stack_block(self.dtype), self.stack_length(length)
        pairs = flops.causal_pairs(latents, b.attention.window)
        parts = [
            self.head_flops(length, c.widths[0]),
            costs.stack_flops(self.blocks(), latents, selection, shares),
            costs.embedding_mask_flops(b, latents, pairs),
            latent_costs.level_flops(c, length),
        ]
        if c.latent_loss.kind != "none":
            pairs = c.num_groups(length) * c.latents[-1] - 1
            parts.append({"latent_prediction": flops.matmul(pairs, c.width, c.width)})
        return flops.Ledger(length, flops.add(parts))
