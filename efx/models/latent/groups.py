"""Groups of consecutive tokens: compressing each to fewer latents, working inside groups and across
them, and spreading latents over tokens again; see `models/latent/model.py`.

The latents of a level stand for the last tokens of their group: with P of them, latent j for token
P_0 - P + j of P_0, and it depends on tokens up to that one. So every latent has a time, all
attention is causal in it, and while decoding a level computes a latent when its token comes, as
any layer does with a token. Arrays of a level are [B, M, P, D] as a rule; while decoding they are
[B, C, D] over those of the new tokens that the level has.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers.block import (
    after_attention,
    apply_dropout,
    make_attention,
    make_norm,
    masked_mlp,
    sublayer_norms,
)
from efx.layers.config import BlockConfig
from efx.layers.learned_dropout import make_mask_input
from efx.layers.linear import Linear, broadcast
from efx.layers.stack import REMAT_POLICIES, LayerSpec, Stack
from efx.parameter import parameter
from efx.routing import plans


@dataclasses.dataclass(frozen=True)
class LevelConfig:
    """One level of the encoder or of the decoder.

    Attributes:
      model: the resolved `LatentConfig`.
      block: of compression or of upsampling by attention, D_i wide.
      local_block, global_block: the level's blocks, which may have soft experts.
      places: P_i, latents a group has here.
      inner, inner_width: P and D of the level that lies nearer to the tokens (encoder) or nearer
        to the latent stack (decoder): what the level reads.
      local_blocks, global_blocks: how many of each.
      std_table: standard deviation that memory tokens and first latents start from.
    """

    model: object
    block: BlockConfig
    local_block: BlockConfig
    global_block: BlockConfig
    places: int
    inner: int
    inner_width: int
    local_blocks: int
    global_blocks: int
    std_table: float

    @property
    def runs(self):
        """(("local" or "global", how many in a row), ...) in order."""
        kinds = ["local"] * self.local_blocks + ["global"] * self.global_blocks
        if self.model.block_order == "interleaved":
            pairs = itertools.zip_longest(kinds[: self.local_blocks], kinds[self.local_blocks :])
            kinds = [kind for pair in pairs for kind in pair if kind]
        return tuple((kind, len(list(run))) for kind, run in itertools.groupby(kinds))


# ---- blocks -------------------------------------------------------------------------------------


def if_any(wanted, stack, x_BTD, call):
    """stack(x, call), or x as it is and no work at all where `wanted`, a bool, is false.

    A loop of at most one turn and not a conditional, since XLA copies the caches that a
    conditional returns.
    """
    if stack.is_initializing():
        return stack(x_BTD, call)

    def pending(stack, carry):
        return carry[0]

    def once(stack, carry):
        return jnp.zeros_like(wanted), stack(carry[1], call)

    # The key of a stochastic control too: it draws its places in here.
    return nn.while_loop(
        pending,
        once,
        stack,
        (wanted, x_BTD),
        carry_variables="cache",
        split_rngs={"routing": False},
    )[1]


def memory_tokens(module, name, count, block, std):
    """Learned tokens [1, count, D] of the module, or None.

    block: the `BlockConfig` of those that read them. std: what they start from, that of an
    embedding's rows, since they enter as those do.
    """
    if not count:
        return None
    init = nn.initializers.normal(std)
    memory_CD = parameter(module, name, init, (count, block.width), ("position", "table"))
    return memory_CD.astype(block.dtype)[None]


def with_memory(stack, x_BTD, memory_BCD, call, memory_call=None, begins=None):
    """(x, memory) after a stack over memory tokens and then x.

    Memory comes first and attention is causal, so it never depends on x: while decoding it passes
    once, when a row begins, and then lies in the caches. The stack does not run while decoding when
    the level has none of the new tokens.
    """
    if memory_BCD is not None:
        memory_BCD = broadcast(memory_BCD, (x_BTD.shape[0], *memory_BCD.shape[1:]))
    if call.decode:
        if memory_BCD is not None:
            memory_BCD = if_any(begins, stack, memory_BCD, memory_call)
        return if_any(jnp.any(call.positions_BT >= 0), stack, x_BTD, call), memory_BCD
    if memory_BCD is None:
        return stack(x_BTD, call), None
    both_BTD = stack(jnp.concatenate([memory_BCD, x_BTD], axis=1), call)
    count = memory_BCD.shape[1]
    return both_BTD[:, count:], both_BTD[:, :count]


def with_mask_input(mask_input, x_BTD, memory_BCD, call, memory_call, begins):
    """(call, memory_call) with what masks read, made by this module of what enters the blocks."""
    if mask_input is None:
        return call, memory_call
    x_BTD, memory_BCD = with_memory(mask_input, x_BTD, memory_BCD, call, memory_call, begins)
    if memory_BCD is not None and call.decode:
        memory_call = memory_call.replace(mask_input_BTD=memory_BCD)
    elif memory_BCD is not None:
        x_BTD = jnp.concatenate([memory_BCD, x_BTD], axis=1)
    return call.replace(mask_input_BTD=x_BTD), memory_call


class LevelBlocks(nn.Module):
    """The local and global blocks of a level: [B, M, P, D] -> the same (decoding: [B, C, D]).

    To learned dropout what enters here is the embedding, once as the local blocks see it and once
    as the global ones do.
    """

    config: LevelConfig

    @nn.compact
    def __call__(self, x, view):
        c, m, shape = self.config, self.config.model, x.shape
        kinds = {
            "local": (c.local_block, m.memory_local, view.local, view.memory_local),
            "global": (c.global_block, m.memory_global, view.whole, view.memory_global),
        }

        def rows(kind):
            """[B*M, P, D] for local blocks, [B, M*P, D] for global ones."""
            if view.inside.decode:
                return x
            return x.reshape(-1, shape[2] if kind == "local" else shape[1] * shape[2], shape[3])

        memory, calls = {}, {}
        for kind in dict(c.runs):
            block, count, call, memory_call = kinds[kind]
            memory[kind] = memory_tokens(self, f"memory_{kind}", count, block, c.std_table)
            calls[kind] = with_mask_input(
                make_mask_input(block, f"mask_input_{kind}"),
                rows(kind),
                memory[kind],
                call,
                memory_call,
                view.begins,
            )
        for i, (kind, count) in enumerate(c.runs):
            stack = Stack((LayerSpec(kinds[kind][0]),) * count, False, m.remat, name=f"{kind}_{i}")
            x_BTD, memory[kind] = with_memory(
                stack, rows(kind), memory[kind], *calls[kind], view.begins
            )
            x = x_BTD.reshape(shape)
        return x


# ---- to fewer latents ---------------------------------------------------------------------------


class Compress(nn.Module):
    """[B*M, P_{i-1}, D_{i-1}] -> [B*M, P_i, D_i] (decoding: [B, C, D_{i-1}] of the new tokens that
    level i - 1 has, to those that level i has: `plan`). `call` is of the former, `kept_call` of the
    latter.

    The first block is h = x W + Attention(norm x), then h + MLP(norm h), or as `BlockKind` says
    with x W for x in the residual. `perceiver` computes it
    for the last P_i places of a group only, whose queries attend to all places up to their own:
    latent j sees place p iff p <= P_{i-1} - P_i + j. `transformer` computes it, and the blocks
    after it, for all places, and keeps the last P_i.
    """

    config: LevelConfig

    @nn.compact
    def __call__(self, x_BTD, call, kept_call, plan=None):
        c, b = self.config, self.config.block
        first = c.inner - c.places

        def kept(y_BTD):
            return y_BTD[:, first:] if plan is None else plan.take(y_BTD)

        attention = make_attention(b, "attention")
        before, after = sublayer_norms(b, "norm_attention")
        n_BTD = before(x_BTD)
        if c.model.compression == "perceiver":
            # Queries stand where the places that they read do.
            place_BT = kept_call.positions_BT
            place_BT = jnp.where(place_BT >= 0, first + place_BT, -1)
            queries_call = kept_call.replace(positions_BT=place_BT)
            a_BTD = attention(kept(n_BTD), queries_call, (n_BTD, call))
            x_BTD, call = kept(x_BTD), kept_call
        else:
            a_BTD = attention(n_BTD, call)
        h_BTD = _wider(b, c.inner_width, "residual")(x_BTD)
        mask_input = make_mask_input(b, "mask_input")
        call, _ = with_mask_input(mask_input, h_BTD, None, call, None, None)
        a_BTD = apply_dropout(b, "attention_output", after(a_BTD), call)
        m_BTD = masked_mlp(self, b, after_attention(b, h_BTD, a_BTD), call)
        h_BTD = h_BTD + a_BTD + m_BTD
        if c.model.compression == "perceiver":
            return h_BTD
        more_blocks = (LayerSpec(b),) * (c.model.compression_blocks - 1)
        if more_blocks:
            h_BTD = Stack(more_blocks, False, c.model.remat, name="blocks")(h_BTD, call)
        return kept(h_BTD)


def _wider(b, width, name):
    """A linear map from another width that keeps the size of what it maps."""
    return Linear(b.width, ("embed", "table"), width**-0.5, b.use_bias, b.dtype, name=name)


def _remat(cls, remat):
    return cls if remat == "none" else nn.remat(cls, policy=REMAT_POLICIES[remat])


class EncoderLevel(nn.Module):
    """Compression, the level's positions, its blocks: [B, M, P_{i-1}, D_{i-1}] -> [B, M, P_i, D_i].

    `positions` is a function of places, or None.
    """

    config: LevelConfig

    @nn.compact
    def __call__(self, x, inner, view, positions):
        c = self.config
        compress = _remat(Compress, c.model.remat)(c, name="compress")
        if view.inside.decode:
            x = compress(x, inner.inside, view.inside, view.plan)
        else:
            batch, groups = x.shape[:2]
            x = compress(x.reshape(batch * groups, *x.shape[2:]), inner.inside, view.inside)
            x = x.reshape(batch, groups, c.places, c.block.width)
        if positions is not None:
            x = x + positions(view.place_BT, x)
        return LevelBlocks(c, name="blocks")(x, view)


# ---- and back -----------------------------------------------------------------------------------


def repeat_index(places, latents, repeat):
    """For the first places - latents places of a group: which latent of the group before each
    takes. "tile": the latents again and again, "in_place": each several times; cut at the left."""
    early = places - latents
    copies = -(-early // latents)
    # Made where it is traced: a group that has no memory is told so, once all is counted.
    index = jnp.arange(early, dtype=jnp.int32) + (copies * latents - early)
    return index % latents if repeat == "tile" else index // copies


def repeated(latents_BMPD, early, repeat):
    """[B, M, early, D]: of the latents [B, M, P, D] of each group those that `repeat_index` names.

    By copying and not by index, whose gradient would add the places of a latent to each other in
    the type that they have and, on a GPU, in any order.
    """
    batch, groups, count, width = latents_BMPD.shape
    copies = -(-early // count)
    axis, order = (2, (copies, count)) if repeat == "tile" else (3, (count, copies))
    wide = broadcast(jnp.expand_dims(latents_BMPD, axis), (batch, groups, *order, width))
    wide = wide.reshape(batch, groups, copies * count, width)
    return wide[:, :, copies * count - early :]


class Upsample(nn.Module):
    """[B, M, P_i, D_i] -> [B, M, P_{i-1}, D_{i-1}] (decoding: [B, C, D] of the new tokens that the
    levels have).

    Place p of the last P_i takes latent p - (P_{i-1} - P_i) of its own group; an earlier one takes
    a latent of the group before, which is the last that is complete when its token comes. The first
    group of a document has learned vectors [P_{i-1} - P_i, D_i] there. Then a linear map to
    D_{i-1}, computed before the latents are copied since that is the same and cheaper.
    """

    config: LevelConfig

    @nn.compact
    def __call__(self, y, latents, view):
        """`latents` and `view` are the views of levels i and i - 1."""
        c, b = self.config, self.config.block
        linear = _wider(b, c.inner_width, "linear")
        early, init = c.places - c.inner, nn.initializers.normal(c.std_table)
        first_PD = parameter(self, "first", init, (early, c.inner_width), ("position", "table"))
        z, first_PD = linear(y), linear(first_PD.astype(b.dtype))
        index = repeat_index(c.places, c.inner, c.model.repeat)
        if view.inside.decode:
            return self._decode(z, first_PD, index, latents, view)
        before = repeated(z[:, :-1], early, c.model.repeat)
        if view.documents_BMP is not None:
            of_latent = latents.documents_BMP[:, :-1][:, :, index]
            same = view.documents_BMP[:, 1:, :early] == of_latent
            before = jnp.where(same[..., None], before, broadcast(first_PD, before.shape))
        start = broadcast(first_PD, (z.shape[0], 1, *first_PD.shape))
        return jnp.concatenate([jnp.concatenate([start, before], axis=1), z], axis=2)

    def _decode(self, z_BCD, first_PD, index, latents, view):
        """The cache holds the latents of two groups: of the last, and of the one that goes on."""
        c, (batch, _, width) = self.config, z_BCD.shape
        kept = self.variable(
            "cache", "latents", jnp.zeros, (batch, 2 * c.inner, width), z_BCD.dtype
        )
        if self.is_initializing():
            return z_BCD
        place_BT, group_BT = view.place_BT, view.group_BT
        # An early place: from which latent, numbered along the row, and whether that came in this
        # call, whose latents have numbers that follow each other.
        early_BT = jnp.clip(place_BT, 0, len(index) - 1)
        latent_BT = index[early_BT]
        first_B1 = latents.group_BT[:, :1] * c.inner + latents.place_BT[:, :1]
        came_BT = (group_BT - 1) * c.inner + latent_BT - first_B1
        came_BT = jnp.where(latents.place_BT[:, :1] >= 0, came_BT, -1)
        slot_BT = ((group_BT - 1) % 2) * c.inner + latent_BT
        source_BT = jnp.where(came_BT >= 0, 2 * c.inner + came_BT, slot_BT)
        all_BSD = jnp.concatenate([kept.value, z_BCD], axis=1)
        taken_BTD = jax.vmap(lambda x, i: x.at[i].get(mode="clip"))(all_BSD, source_BT)
        taken_BTD = jnp.where((group_BT > 0)[..., None], taken_BTD, first_PD[early_BT])
        own_BTD = plans.scatter_add(jnp.zeros_like(taken_BTD), z_BCD, latents.plan)
        last_B1 = jnp.max(group_BT, axis=1, keepdims=True)
        stored_BC = (latents.place_BT >= 0) & (latents.group_BT >= last_B1 - 1)
        slot_BC = (latents.group_BT % 2) * c.inner + latents.place_BT
        slot_BC = plans.apart(jnp.where(stored_BC, slot_BC, 2 * c.inner), 2 * c.inner)
        kept.value = jax.vmap(lambda x, i, new: x.at[i].set(new, **plans.NO_TWO_ALIKE))(
            kept.value, slot_BC, z_BCD
        )
        return jnp.where((place_BT >= c.places - c.inner)[..., None], own_BTD, taken_BTD)


class DecoderLevel(nn.Module):
    """Upsampling, the level's positions, its blocks and the skip connection.

    `upsampling="attention"` (Nawrot et al. 2021, arXiv 2110.13711, section 3.2.2): x <- skip + x +
    Attention(q = skip + x, k and v = x), inside a group; with `upsampling_norm` queries and latents
    are normed first and an output matrix follows, as in the other blocks, and without it the heads
    are added as they are. The skip connection joins `skip_joins` the blocks, "before" or "after": x
    becomes x + skip, or with `skip="lerp"` a skip + (1 - a) x with learned a [D], 0.5 at first.
    Where it joins before them, upsampling by attention takes the joined state for skip + x, and
    nothing is added after the blocks.
    """

    config: LevelConfig

    @nn.compact
    def __call__(self, y, skip, latents, view, positions):
        c, b = self.config, self.config.block
        x = Upsample(c, name="upsample")(y, latents, view)
        if positions is not None:
            x = x + positions(view.place_BT, x)
        spread, before = x, c.model.skip_joins == "before"
        if before:
            x = self._join(x, skip)
        if c.model.upsampling == "attention":

            def inside(x):
                return x if view.inside.decode else x.reshape(-1, *x.shape[2:])

            x = x if before else skip + x
            q, read, changes = inside(x), inside(spread), {"width": None}
            if c.model.upsampling_norm:
                q = make_norm(b, "norm_queries")(q)
                read, changes = make_norm(b, "norm_latents")(read), {}
            attention = make_attention(b, "attention", **changes)
            a, call = attention(q, view.inside, (read, None)), view.inside
            if b.dropout.active("attention_output"):
                mask_input = make_mask_input(b, "mask_input")
                call, _ = with_mask_input(mask_input, inside(x), None, call, None, None)
            a = apply_dropout(b, "attention_output", a, call)
            x = x + a.reshape(x.shape)
        x = LevelBlocks(c, name="blocks")(x, view)
        return x if before else self._join(x, skip)

    def _join(self, x, skip):
        if self.config.model.skip == "sum":
            return x + skip
        init = nn.initializers.constant(0.5)
        share_D = parameter(self, "skip", init, skip.shape[-1:], ("norm",))
        return lerp(share_D.reshape((1,) * (x.ndim - 1) + share_D.shape), skip, x)


def lerp(share, skip, x):
    """share * skip + (1 - share) * x. In float32, since training moves a share from 1/2 by less
    than bfloat16 can tell."""
    mixed = share * skip.astype(jnp.float32) + (1 - share) * x.astype(jnp.float32)
    return mixed.astype(x.dtype)
