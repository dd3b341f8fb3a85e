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
"""

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from efx import flops, means
from efx.errors import UsageError
from efx.layers import costs, learned_dropout, mup, norms
from efx.layers.block import (
    Block,
    make_attention,
    make_norm,
    mlp_input,
    norm_input,
    norm_output,
    with_dropout,
)
from efx.layers.call import Call
from efx.layers.config import (
    AttentionConfig,
    DenseFormerConfig,
    Initialisation,
    MuPConfig,
    SoftExpertsConfig,
)
from efx.layers.kv_cache import ALL_GROUPS
from efx.layers.linear import Embedding, Linear, broadcast
from efx.layers.stack import REMAT_POLICIES, LayerSpec, Stack, layer_specs
from efx.models.config import ModelConfig, check_stack
from efx.models.language_model import LanguageModel
from efx.routing import selection
from efx.settings import Count, NonNegative, Pieces, PiecesOrNone, Places, block
from efx.sharding import constrain, parameter

# ---- settings ----------------------------------------------------------------------------------

BLOCK_COUNTS = ("encoder_local", "encoder_global", "decoder_local", "decoder_global")
PerLevel = PiecesOrNone | tuple[PiecesOrNone, ...]


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
    stack and global blocks, of the group elsewhere. Learned dropout is in every level."""

    family: Literal["latent"] = "latent"
    attention: AttentionConfig = AttentionConfig(qk_norm="width")
    group_size: Count = 16  # P_0, tokens in a group; a row is padded to whole groups
    latents: tuple[Count, ...] = (4,)  # P_1, ..., P_n, decreasing: latents of a group at each level
    level_widths: tuple[Count, ...] = (64,)  # D_0, ..., D_{n-1}
    level_heads: tuple[Count, ...] = ()  # of these levels; (): heads as wide as the stack's
    # "perceiver": the last P_i positions of a group attend to all of it. "transformer":
    # `compression_blocks` blocks inside the group, whose last P_i outputs are kept.
    compression: Literal["perceiver", "transformer"] = "perceiver"
    compression_blocks: Pieces = 1
    # Blocks inside groups (local) and across groups (global), one number for all levels or one for
    # each. Decoder level 1 works on tokens: a global block there costs as much as a dense one.
    encoder_local: PerLevel = 1
    encoder_global: PerLevel = 1
    decoder_local: PerLevel = 1
    decoder_global: PerLevel = 1
    block_order: Literal["interleaved", "sequence"] = "interleaved"  # "sequence": local ones first
    upsampling: Literal["repeat", "attention"] = "repeat"
    upsampling_norm: bool = True  # norms and output matrix in that attention; published: False
    # Early positions of a group repeat the latents of the group before: "tile": all of them again
    # and again; "in_place": each several times in a row.
    repeat: Literal["tile", "in_place"] = "tile"
    skip: Literal["sum", "lerp"] = "sum"  # "lerp": a skip + (1 - a) x with learned a [D]
    skip_joins: Literal["after", "before"] = "after"  # the blocks of a decoder level
    # "absolute": a learned table of `context` rows for the positions of tokens in their document;
    # latents and decoder levels have tables by the position in the group. "level": such a table
    # for the tokens too. "rope": rotary positions, no tables. "both": "level" and "rope".
    positions: Literal["absolute", "level", "rope", "both"] = "absolute"
    memory_local: Places = 0  # learned tokens before each group, for local blocks
    memory_global: Places = 0  # learned tokens before the row, for global blocks and the stack
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
        numbers = {name: getattr(self, name) for name in BLOCK_COUNTS}
        result = dataclasses.replace(
            self,
            attention=self.attention.resolved(self.width, has_rope, self.mup, self.use_bias),
            mlp=self.mlp.resolved(self.depth, "gelu"),
            **{name: n if isinstance(n, tuple) else (n,) * levels for name, n in numbers.items()},
        )
        result.dropout.resolved(self.width, result.attention.num_heads)
        result._check_levels(levels)
        result._check_widths()
        check_stack(result, self.depth)
        routing = self.depth_routing
        if routing.needs_token_places:
            raise UsageError(
                f"{routing.where}.train_selection={routing.train_selection!r}: not with "
                "config.model.family='latent', because latents have no token type"
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
        attention, masks = self.attention, self.dropout.attention
        for width, heads in zip(self.level_widths, self.heads, strict=False):
            divisors = {"the head width of the latent stack": attention.head_dim}
            if self.level_heads:
                divisors = {"its level_heads": heads}
            if self.dropout.kind == "attention" and masks.num_heads:
                divisors[f"{masks.where}.num_heads"] = masks.num_heads
            for name, divisor in divisors.items():
                if width % divisor:
                    self.refuse("level_widths", f"{width} is not divisible by {divisor}, {name}")
            if attention.rope_theta:
                where = f"config.model.positions={self.positions!r}"
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

    def row_length(self, level, length):
        """Latents and memory tokens of a level in a row of `length` tokens."""
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
        return self._block(level, dtype, self.row_length(level, self.context))

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
        compression = self.compression_blocks if self.compression == "transformer" else 1
        number = self.depth_routing.effective_depth(self.depth) + compression * len(self.latents)
        number += sum(sum(getattr(self, name)) for name in BLOCK_COUNTS)
        dropout = self.dropout.resolved(width, self.heads[level])
        std_out = std / (2 * number) ** 0.5
        b = self.block(width=width, dropout=dropout, std=std, std_out=std_out, dtype=dtype)
        return dataclasses.replace(b, context=context)


# ---- the latents of a level in a call ----------------------------------------------------------


@struct.dataclass
class LevelCalls:
    """The latents of one level in a call of the model, as its attentions see them.

    Attributes:
      size: P, the number of latents of a group.
      group: `Call` whose rows are groups, [1 or B*M, P]; decoding: of the new latents, [B, S].
      local, row: of groups, and of whole rows, with memory tokens before them.
      index_BS: number of each latent among those of its row, in time order; -1: none.
      start_B1: the number of latents of the row before this call.
    """

    size: int = struct.field(pytree_node=False)
    group: Call
    local: Call
    row: Call
    index_BS: Any
    start_B1: Any


def level_calls(c, call, batch, length):
    """[LevelCalls] of each level for `length` tokens in each row, before padding to whole groups.

    While decoding, the new tokens of a row have consecutive positions, and padding (-1) follows
    them. So the new latents of a level are consecutive too, and their largest number is known.
    """
    size_0 = c.group_size
    if call.decode:
        max_tokens, first_token_B1 = length, jnp.maximum(call.positions_BT[:, :1], 0)
        stop_token_B1 = first_token_B1 + jnp.sum(call.positions_BT >= 0, axis=1, keepdims=True)
    else:
        max_tokens = c.num_groups(length) * size_0
        first_token_B1, stop_token_B1 = jnp.zeros((1, 1), jnp.int32), length
    starts_row_B1 = (first_token_B1 == 0) & (first_token_B1 < stop_token_B1)
    first_group_B1, first_offset_B1 = first_token_B1 // size_0, first_token_B1 % size_0
    result = []
    for level, size in enumerate(c.sizes):
        skipped = size_0 - size  # tokens at the start of a group without a latent
        start_B1 = first_group_B1 * size + jnp.maximum(first_offset_B1 - skipped, 0)
        index_BS = start_B1 + _range(max_tokens // size_0 * size + min(max_tokens % size_0, size))
        group_BS, offset_BS = index_BS // size, index_BS % size
        token_BS = group_BS * size_0 + skipped + offset_BS
        is_new_BS = token_BS < stop_token_B1
        index_BS, offset_BS = (jnp.where(is_new_BS, y, -1) for y in (index_BS, offset_BS))
        row = call.replace(positions_BT=index_BS)
        if call.decode:
            # The caches keep the largest group of a call: not that of padding.
            number_BS = jnp.where(is_new_BS, ALL_GROUPS + 1 + group_BS, 0)
            group = call.replace(positions_BT=offset_BS, segment_ids_BT=number_BS)
        else:
            offset_BP = jnp.tile(offset_BS.reshape(-1, size), (batch, 1))
            group = call.replace(positions_BT=offset_BP)
        if call.segment_ids_BT is not None:
            segment_ids_BS = call.segment_ids_BT[:, token_BS[0]]
            group = group.replace(segment_ids_BT=segment_ids_BS.reshape(-1, size))
            # Positions count from the group in which the document begins.
            first_group_BS = (token_BS - call.positions_BT[:, token_BS[0]]) // size_0
            row = row.replace(
                positions_BT=row.positions_BT - first_group_BS * size,
                segment_ids_BT=segment_ids_BS,
                count_BT=selection.running_count(segment_ids_BS > 0, segment_ids_BS),
            )
        # Local memory tokens are computed with each call, global ones when the row begins.
        has_new_B1 = jnp.any(is_new_BS, axis=1, keepdims=True)
        local = _after_memory(group, c.memory_local, has_new_B1)
        row = _after_memory(row, c.memory_global, starts_row_B1)
        row_size = c.row_length(level, call.cache.size) if call.decode else 0
        result.append(
            LevelCalls(
                size=size,
                group=group.with_cache(grouped=True, size=size),
                local=local.with_cache(grouped=True, size=c.memory_local + size),
                row=row.with_cache(size=row_size),
                index_BS=index_BS,
                start_B1=start_B1,
            )
        )
    return result


def _range(length):
    return jnp.arange(length, dtype=jnp.int32)[None]


def _after_memory(call, count, is_present_B1):
    """The `Call` with `count` memory tokens first, in rows where they are present."""
    if not count:
        return call
    position_BS = jnp.where(call.positions_BT >= 0, call.positions_BT + count, -1)
    memory_BC = jnp.where(is_present_B1, _range(count), -1)
    memory_BC = jnp.broadcast_to(memory_BC, (len(position_BS), count))
    call = call.replace(positions_BT=jnp.concatenate([memory_BC, position_BS], axis=1))
    if call.segment_ids_BT is None:
        return call
    before = ((0, 0), (count, 0))
    segment_ids_BS = jnp.pad(call.segment_ids_BT, before, constant_values=ALL_GROUPS)
    return call.replace(segment_ids_BT=segment_ids_BS)


# ---- blocks of a level -------------------------------------------------------------------------


def make_memory(module, name, count, b, std):
    """Learned memory tokens [count, D] before the input of blocks like `b`."""
    if not count:
        return jnp.zeros((0, b.width), b.dtype)
    init = nn.initializers.normal(std)
    return parameter(module, name, init, (count, b.width), ("position", "table")).astype(b.dtype)


def prepend(memory, x_BSD):
    """Memory tokens [C, D], or their states [B, C, D], before x."""
    if not memory.shape[-2]:
        return x_BSD
    memory = broadcast(memory, (len(x_BSD), *memory.shape[-2:]))
    return jnp.concatenate([memory, x_BSD], axis=1)


def run_layers(layers, x_BSD, call):
    """layers(x, call). Decoding, they do not run if the call has no token for them."""
    if not call.decode or layers.is_initializing():
        return layers(x_BSD, call)

    # A loop of at most one iteration: XLA copies the caches that a conditional returns.
    def is_pending(layers, carry):
        return carry[0]

    def run(layers, carry):
        return jnp.zeros_like(carry[0]), layers(carry[1], call)

    carry = (jnp.any(call.positions_BT >= 0), x_BSD)
    return nn.while_loop(is_pending, run, layers, carry, carry_variables="cache")[1]


def with_mask_input(mask_input, x_BSD, call):
    """The `Call` with the input of learned masks, made from x; `mask_input` may be None."""
    if mask_input is None:
        return call
    return call.replace(mask_input_BTD=run_layers(mask_input, x_BSD, call))


def by_group(x_BSD, calls):
    """[B, M * P, D] -> [B * M, P, D]; decoding: unchanged, its attention keeps groups apart."""
    return x_BSD if calls.group.decode else x_BSD.reshape(-1, calls.size, x_BSD.shape[-1])


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
        c, level, shape = self.config, self.level, x_BSD.shape
        kind_calls = {"local": calls.local, "global": calls.row}
        counts = {"local": c.memory_local, "global": c.memory_global}
        contexts = {"local": c.memory_local + calls.size, "global": c.row_length(level, c.context)}
        blocks, memory = {}, {}
        for kind in dict(self.runs):
            blocks[kind] = b = c.level_block(level, self.dtype, contexts[kind])
            std = c.deviations(level).table
            memory[kind] = make_memory(self, f"memory_{kind}", counts[kind], b, std)
            mask_input = learned_dropout.make_mask_input(b, f"mask_input_{kind}")
            x = self._sequences(kind, memory, x_BSD, calls)
            kind_calls[kind] = with_mask_input(mask_input, x, kind_calls[kind])
        for i, (kind, number) in enumerate(self.runs):
            specs, count = (LayerSpec(blocks[kind]),) * number, counts[kind]
            stack = Stack(specs, False, c.remat, name=f"{kind}_{i}")
            x = self._sequences(kind, memory, x_BSD, calls)
            y = run_layers(stack, x, kind_calls[kind])
            memory[kind], x_BSD = y[:, :count], y[:, count:].reshape(shape)
        return x_BSD

    def _sequences(self, kind, memory, x_BSD, calls):
        """Rows, or groups for local blocks, after their memory tokens."""
        return prepend(memory[kind], by_group(x_BSD, calls) if kind == "local" else x_BSD)


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

    model: Any = None
    level: int = 1

    def setup(self):
        super().setup()
        b, c = self.config, self.model
        self.residual = _change_width(b, c.widths[self.level - 1])
        self.mask_input = learned_dropout.make_mask_input(b)
        self.blocks = None
        if c.compression == "transformer" and c.compression_blocks > 1:
            self.blocks = Stack((LayerSpec(b),) * (c.compression_blocks - 1), False, c.remat)

    def __call__(self, x_BSD, inner, outer):
        """`inner`, `outer`: `LevelCalls` of levels i - 1 and i."""
        b, batch, call = self.config, len(x_BSD), inner.group
        is_perceiver = self.model.compression == "perceiver"
        x = by_group(x_BSD, inner)
        n = norm_input(b, self.norm_attention, x)
        if is_perceiver:
            position = outer.group.positions_BT
            position = jnp.where(position >= 0, inner.size - outer.size + position, -1)
            queries = outer.group.replace(positions_BT=position)
            # Padding is last in its group: as a key it has a position that no query reaches.
            keys = call if call.decode else call.replace(positions_BT=_range(inner.size))
            a = self.attention(_last_of_groups(n, inner, outer), queries, (n, keys))
            x, call = _last_of_groups(x, inner, outer), outer.group
        else:
            a = self.attention(n, call)
        h = self.residual(x)
        call = with_mask_input(self.mask_input, h, call)
        a = norm_output(b, self.norm_attention, a)
        a = with_dropout(self.dropout_attention_output, a, call)
        h = h + a + self.mlp_increment(mlp_input(b, h, a), call)
        if self.blocks is not None:
            h = self.blocks(h, call)
        h = h if is_perceiver else _last_of_groups(h, inner, outer)
        return h.reshape(batch, -1, h.shape[-1])


def _last_of_groups(y, inner, outer):
    """Of the latents of `inner`, the last P of each group, one for each latent of `outer`."""
    skipped = inner.size - outer.size
    if not inner.group.decode:
        return y[:, skipped:]
    group_BS, offset_BS = outer.index_BS // outer.size, outer.index_BS % outer.size
    return _rows_at(y, group_BS * inner.size + skipped + offset_BS - inner.start_B1)


def _rows_at(y_BSD, index_BC):
    """Rows of y [B, S, D] at these indices, clipped: [B, C, D]."""
    return jax.vmap(lambda y, index: y.at[index].get(mode="clip"))(y_BSD, index_BC)


def _change_width(b, width, name=None):
    """A linear map from `width` to the width of `b` that keeps the size of its input."""
    return Linear(b.width, ("embed", "table"), width**-0.5, b.use_bias, b.dtype, name=name)


def add_positions(x_BSD, table, calls):
    """Add the rows of a level's table, if any, by the position in the group."""
    if table is None:
        return x_BSD
    # Only padding of a context shorter than a group lies outside the table.
    offset_BS = jnp.clip(calls.index_BS % calls.size, 0, table.num_embeddings - 1)
    return x_BSD + broadcast(table(offset_BS), x_BSD.shape)


class EncoderLevel(nn.Module):
    """Compression, level positions, blocks: [B, S, D_{i-1}] -> [B, S', D_i]."""

    config: LatentConfig
    level: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BSD, inner, outer, table):
        c, i, compress = self.config, self.level, Compress
        if c.remat != "none":
            compress = nn.remat(Compress, policy=REMAT_POLICIES[c.remat])
        b = c.level_block(i, self.dtype, inner.size)
        x_BSD = compress(b, c, i, name="compress")(x_BSD, inner, outer)
        x_BSD = add_positions(x_BSD, table, outer)
        runs = c.block_runs("encoder", i)
        return LevelBlocks(c, i, runs, self.dtype, name="blocks")(x_BSD, outer)


# ---- decoder levels ----------------------------------------------------------------------------


def repeat_latents(z_BMPD, count, repeat):
    """The latents of each group repeated and cut at the left to `count`: [B, M, count, D].

    "tile": all of them again and again; "in_place": each several times in a row.
    """
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
    def __call__(self, y_BSD, latents, outer):
        """`latents`, `outer`: `LevelCalls` of levels i and i - 1."""
        c, i, batch = self.config, self.level, len(y_BSD)
        early = outer.size - latents.size
        linear = _change_width(c.level_block(i - 1, self.dtype), c.widths[i], "linear")
        init = nn.initializers.normal(c.deviations(i - 1).table)
        first_PD = parameter(self, "first", init, (early, c.widths[i]), ("position", "table"))
        z_BSD, first_PD = linear(y_BSD), linear(first_PD.astype(self.dtype))
        if outer.group.decode:
            return self._decode(z_BSD, first_PD, early, latents, outer)
        z_BMPD = z_BSD.reshape(batch, -1, latents.size, z_BSD.shape[-1])
        before = repeat_latents(z_BMPD[:, :-1], early, c.repeat)
        if outer.group.segment_ids_BT is not None:
            shape = batch, z_BMPD.shape[1], -1, 1
            documents = outer.group.segment_ids_BT.reshape(shape)[:, 1:, :early]
            other = latents.group.segment_ids_BT.reshape(shape)[:, :-1]
            is_same = documents == repeat_latents(other, early, c.repeat)
            before = jnp.where(is_same, before, broadcast(first_PD, before.shape))
        start = broadcast(first_PD, (batch, 1, *first_PD.shape))
        early_BMPD = jnp.concatenate([start, before], axis=1)
        return jnp.concatenate([early_BMPD, z_BMPD], axis=2).reshape(batch, -1, z_BSD.shape[-1])

    def _decode(self, z_BSD, first_PD, early, latents, outer):
        """The cache holds the last 2 P_i latents of each row; new ones are appended."""
        (batch, _, width), size = z_BSD.shape, latents.size
        shape = batch, 2 * size, width
        cache = self.variable("cache", "latents", jnp.zeros, shape, z_BSD.dtype)
        all_BSD = jnp.concatenate([cache.value, z_BSD], axis=1)
        if not self.is_initializing():
            new_B1 = jnp.sum(latents.index_BS >= 0, axis=1, keepdims=True)
            cache.value = _rows_at(all_BSD, new_B1 + _range(2 * size))
        # The latent that each position takes, by its number in the row.
        group_BS, offset_BS = outer.index_BS // outer.size, outer.index_BS % outer.size
        is_early_BS, early_BS = offset_BS < early, jnp.minimum(offset_BS, early - 1)
        order_P = repeat_latents(_range(size).reshape(1, 1, size, 1), early, self.config.repeat)
        before_BS = (group_BS - 1) * size + order_P.reshape(-1)[early_BS]
        index_BS = jnp.where(is_early_BS, before_BS, group_BS * size + offset_BS - early)
        y_BSD = _rows_at(all_BSD, 2 * size + index_BS - latents.start_B1)
        is_first_BS = is_early_BS & (group_BS == 0)
        return jnp.where(is_first_BS[..., None], first_PD[early_BS], y_BSD)


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
    def __call__(self, y_BSD, skip_BSD, latents, outer, table):
        c, i = self.config, self.level
        x_BSD = Upsample(c, i, self.dtype, name="upsample")(y_BSD, latents, outer)
        x_BSD = add_positions(x_BSD, table, outer)
        upsampled_BSD, joins_before = x_BSD, c.skip_joins == "before"
        if joins_before:
            x_BSD = self._join(skip_BSD, x_BSD)
        if c.upsampling == "attention":
            x_BSD = x_BSD if joins_before else skip_BSD + x_BSD
            x_BSD = x_BSD + self._attention(x_BSD, upsampled_BSD, outer)
        runs = c.block_runs("decoder", i)
        x_BSD = LevelBlocks(c, i - 1, runs, self.dtype, name="blocks")(x_BSD, outer)
        return x_BSD if joins_before else self._join(skip_BSD, x_BSD)

    def _join(self, skip_BSD, x_BSD):
        if self.config.skip == "sum":
            return skip_BSD + x_BSD
        init = nn.initializers.constant(0.5)
        a_11D = parameter(self, "skip", init, skip_BSD.shape[-1:], ("norm",))[None, None]
        # In float32: training moves a from 1/2 by less than bfloat16 resolves.
        skip_BSD, wide_BSD = skip_BSD.astype(jnp.float32), x_BSD.astype(jnp.float32)
        return (a_11D * skip_BSD + (1 - a_11D) * wide_BSD).astype(x_BSD.dtype)

    def _attention(self, x_BSD, upsampled_BSD, outer):
        b = self.config.level_block(self.level - 1, self.dtype, outer.size)
        x, upsampled, call = by_group(x_BSD, outer), by_group(upsampled_BSD, outer), outer.group
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

    The mean over the pairs (t, t + 1) of one document, 0 if there are none; x_{t+1} gets no
    gradient. Mirasol, with the cosine as the distance. Equal latents have no loss, so its
    coefficient must be small.
    """

    config: LatentLossConfig
    std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BSD, segment_ids_BS):
        """segment_ids_BS: documents; 0: padding."""
        c, axes = self.config, ("embed", "heads")
        linear = Linear(x_BSD.shape[-1], axes, self.std, dtype=self.dtype, name="predict")
        predicted_BTD, target_BTD = linear(x_BSD[:, :-1]), x_BSD[:, 1:]
        if not c.target_gradient:
            target_BTD = jax.lax.stop_gradient(target_BTD)
        cosine_BTD = norms.l2_normalize(predicted_BTD) * norms.l2_normalize(target_BTD)
        loss_BT = 1.0 - jnp.sum(cosine_BTD, axis=-1)
        before_BT, after_BT = segment_ids_BS[:, :-1], segment_ids_BS[:, 1:]
        pairs_BT = (before_BT == after_BT) & (after_BT > 0)
        means.sow(self, "losses", "latent_prediction", means.over(loss_BT, pairs_BT))


# ---- the model ---------------------------------------------------------------------------------


class StackMemory(nn.Module):
    """The memory tokens before the latents of the stack: the arguments of `make_memory`."""

    settings: tuple

    @nn.compact
    def __call__(self):
        return make_memory(self, "memory_global", *self.settings)


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
        b, stack_std = c.stack_block(self.dtype), c.deviations(len(c.latents)).table
        # Learned dropout masks the input of the stack, standard dropout the tokens.
        dropout, is_learned = learned_dropout.make_dropout(b, "embedding"), c.dropout.learned
        self.dropout_embedding = dropout if is_learned else None
        self.token_dropout = None if is_learned else dropout
        levels = range(1, len(c.sizes))
        self.encoder = [EncoderLevel(c, i, self.dtype) for i in levels]
        self.memory = StackMemory((c.memory_global, b, stack_std))
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
        calls = level_calls(c, call, batch, length)
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
        positions_BT = _range(length) if call.positions_BT is None else call.positions_BT
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
        x_BSD = prepend(self.memory(), x_BSD)
        call = with_mask_input(self.mask_input, x_BSD, call)
        x_BSD = with_dropout(self.dropout_embedding, x_BSD, call)
        x_BSD = run_layers(self.layers, x_BSD, call)[:, c.memory_global :]
        has_loss = c.latent_loss.kind != "none" and not call.decode
        if has_loss and (means.wanted(self) or self.is_initializing()):
            segment_ids_BS = call.segment_ids_BT
            if segment_ids_BS is None:
                segment_ids_BS = call.real(len(x_BSD)).astype(jnp.int32)
            self.prediction(x_BSD, segment_ids_BS[:, c.memory_global :])
        # Laid out without the memory tokens: XLA for CPUs computed a wrong gradient of the next
        # linear map from a slice of an array that is laid out with them.
        return constrain(x_BSD, "batch", "length", "act_embed")

    @nn.nowrap
    def check_packing(self):
        """Raise UsageError if the model has memory tokens, which belong to no document."""
        super().check_packing()
        for name in ("memory_local", "memory_global"):
            if getattr(self.config, name):
                self.config.refuse(
                    name, "packed rows have no memory tokens; use 0, or config.data.packing=False"
                )

    @nn.nowrap
    def stack_length(self, length):
        return self.config.row_length(len(self.config.latents), length)

    @nn.nowrap
    def token_of_place(self, path, positions_RS, length):
        c, (first, *inside) = self.config, path.split("/")
        in_stack = first in ("layers", "dropout_embedding")
        if not in_stack and not first.startswith(("encoder", "decoder")):
            return positions_RS
        in_row = in_stack or any(name.startswith("global_") for name in inside)
        is_local = any(name.startswith("local_") for name in inside)
        memory = c.memory_global if in_row else c.memory_local * is_local
        latents, index_RS = positions_RS.shape[1] - memory, positions_RS - memory
        size = latents // c.num_groups(length) if in_row else latents
        group_RS = index_RS // size if in_row else np.arange(len(positions_RS))[:, None]
        token_RS = (group_RS + 1) * c.group_size - size + index_RS % size
        return np.where((index_RS >= 0) & (token_RS < length), token_RS, -1)

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one row; see `LanguageModel.ledger`."""
        c, groups, latents = self.config, self.config.num_groups(length), self.stack_length(length)
        b = c.stack_block(self.dtype)
        parts = [
            self.head_flops(length, c.widths[0]),
            costs.stack_flops(self.blocks(), latents, selection, shares),
            costs.embedding_mask_flops(b, latents, _pairs(b, 1, latents)),
        ]
        for i in range(1, len(c.sizes)):
            parts += [_compression_flops(c, i, groups), _upsampling_flops(c, i, groups)]
            parts += [_level_flops(c, "encoder", i, groups), _level_flops(c, "decoder", i, groups)]
        if c.latent_loss.kind != "none":
            pairs = groups * c.latents[-1] - 1
            parts.append({"latent_prediction": flops.matmul(pairs, c.width, c.width)})
        return flops.Ledger(length, flops.add(parts))


# ---- nominal FLOPs of one row, {component: FLOPs} ----------------------------------------------


def _pairs(b, rows, length):
    return rows * flops.causal_pairs(length, b.attention.window)


def _block_parts(b, rows, length):
    """FLOPs of the parts of a block on `rows` sequences of `length` latents."""
    tokens, pairs = rows * length, _pairs(b, rows, length)
    masks = costs.mask_flops(b, tokens, pairs, "attention_output", "mlp_output")
    return [costs.attention_flops(b, tokens, pairs), costs.mlp_flops(b, tokens), masks]


def _renamed(parts, component, scores="level_scores"):
    """The sum of the FLOPs of parts of blocks, as components of the levels."""
    names = dict(attention_projections=component, mlp=component, attention_scores=scores)
    return flops.add({names.get(name, name): n} for part in parts for name, n in part.items())


def _level_flops(c, side, level, groups):
    """The local and global blocks of a level of the encoder or the decoder."""
    inner = level if side == "encoder" else level - 1
    b, size, parts = c.level_block(inner), c.sizes[inner], []
    for kind, rows, length in (
        ("local", groups, c.memory_local + size),
        ("global", 1, c.memory_global + groups * size),
    ):
        if number := getattr(c, f"{side}_{kind}")[level - 1]:
            parts += _block_parts(b, number * rows, length)
            parts.append(costs.mask_input_flops(b, rows * length, _pairs(b, rows, length)))
    return _renamed(parts, "levels")


def _compression_flops(c, level, groups):
    b, size, inner, parts = c.level_block(level), c.sizes[level], c.sizes[level - 1], []
    width, places, scores = c.widths[level - 1], groups * inner, "level_scores"
    computed, pairs, mask_pairs = places, _pairs(b, groups, inner), _pairs(b, groups, inner)
    if c.compression == "perceiver":
        computed, mask_pairs, scores = groups * size, _pairs(b, groups, size), "compression_scores"
        pairs -= _pairs(b, groups, inner - size)
    else:
        parts = _block_parts(b, (c.compression_blocks - 1) * groups, inner)
    parts += [
        {"compression": flops.matmul(computed, width, b.width)},
        costs.attention_flops(b, computed, pairs, places, width),
        costs.mlp_flops(b, computed),
        costs.mask_flops(b, computed, mask_pairs, "attention_output", "mlp_output"),
        costs.mask_input_flops(b, computed, mask_pairs),
    ]
    return _renamed(parts, "compression", scores)


def _upsampling_flops(c, level, groups):
    b, size = c.level_block(level - 1), c.sizes[level - 1]
    parts = [{"upsampling": flops.matmul(groups * c.sizes[level], c.widths[level], b.width)}]
    if c.upsampling == "attention":
        tokens, pairs = groups * size, _pairs(b, groups, size)
        parts.append(costs.attention_flops(b, tokens, pairs, has_output=c.upsampling_norm))
        if b.dropout.active("attention_output"):
            parts.append(costs.mask_flops(b, tokens, pairs, "attention_output"))
            parts.append(costs.mask_input_flops(b, tokens, pairs))
    return _renamed(parts, "upsampling")
