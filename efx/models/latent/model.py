"""The grouped-latent transformer: a causal U-net over groups of consecutive tokens.

P_0 tokens in a row are a group; boundaries depend on the place of a token in its row only. Encoder
level i = 1..n compresses every group on its own to P_i < P_{i-1} latents of width D_i and works on
them, inside groups and across. The latent stack, most of the compute, is an ordinary stack of
blocks over the M * P_n latents of the sequence. Decoder level i spreads latents over the P_{i-1}
places of a group again and adds what entered encoder level i. See `models/latent/groups.py` for the
levels, and for why all of it is causal.

A token enters as E[token] + A[t], t its position in its document and A a learned table of
`context` rows (`positions="absolute"`); latents, and the places of a decoder level, have tables by
their place in the group, those of decoder level 1 the first P_0 rows of A. "level" has such a table
for the tokens too, [P_0, D_0], and nothing then says in which group of the row a token stands;
"rope" has no tables but rotary positions, counted in the places of each level; "both" is "level"
and "rope" together. Only "absolute" ends at `context`.

Packed documents: all attention stays inside documents, also in groups that hold several, and where
the group before belongs to another document its latents are not used. A document that begins with
a group is computed as if alone; one that begins inside a group has its groups cut where the row
has them, while alone its first group is whole.

While decoding, finished groups keep keys and values of their latents only (and of the places of
global blocks elsewhere, if there are any); attentions inside groups keep those of one group.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import means
from efx.errors import UsageError
from efx.layers import learned_dropout, norms
from efx.layers.dropout import StandardDropout
from efx.layers.linear import Embedding, broadcast
from efx.layers.stack import Stack, layer_specs
from efx.models.language_model import LanguageModel
from efx.models.latent import config, group_views, groups, ledger, times
from efx.models.latent.loss import LatentPrediction
from efx.sharding import constrain


class Latent(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `LatentConfig` for each knob."""

    def setup(self):
        c = self.config
        width, std = c.level_widths[0], config.deviations(c, 0)
        self.embed = self.token_table(width, std.table)
        self.positions_embed = [
            Embedding(rows, width, std.table, self.dtype, axes=("position", "table"))
            for rows, width in c.position_tables
        ]
        self.token_dropout = None
        if c.dropout.kind == "standard" and c.dropout.active("embedding"):
            self.token_dropout = StandardDropout(c.dropout.rate)
        self.encoder = [groups.EncoderLevel(level) for level in self.levels(encoder=True)]
        self.decoder = [groups.DecoderLevel(level) for level in self.levels(encoder=False)]
        self.norm_final = norms.RMSNorm(c.norm_eps, dtype=self.dtype)
        if not c.tied:
            self.head = self.output_layer(std.head)
        # The latent stack, and what stands before it.
        block = self.stack_block()
        self.memory = None
        if c.memory_global:
            std_table = config.deviations(c, len(c.latents)).table
            self.memory = LatentMemory(block, c.memory_global, std_table)
        self.dropout_embedding = None
        if c.dropout.learned:
            self.dropout_embedding = learned_dropout.make_dropout(block, "embedding")
        self.mask_input = learned_dropout.make_mask_input(block)
        self.layers = Stack(self.specs(), c.scan_layers, c.remat, c.dense_former)
        if c.latent_loss.kind != "none":
            self.prediction = LatentPrediction(c.latent_loss, block.std, self.dtype)

    def specs(self):
        """The layers of the latent stack; the one place that chooses its blocks, by number."""
        return layer_specs(self.stack_block(), self.config)

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

        As in `Model.features`, but that positions need documents (`segment_ids_BT`):
        otherwise a token's position is its place in the row. While decoding, the tokens of a call
        follow each other in their row, padding after them.
        """
        if self.config.dropout.by_position or self.config.positions == "absolute":
            self.check_context(cache_size if decode else tokens_BT.shape[1])
        call = self.make_call(positions_BT, segment_ids_BT, train, decode, cache_size)
        if decode:
            return self._decode(tokens_BT, call)
        return self._forward(tokens_BT, call)

    def _forward(self, tokens_BT, call):
        c, (batch, length) = self.config, tokens_BT.shape
        call = _check_documents(self, call, length)
        count = -(-length // c.group_size)
        padding = count * c.group_size - length

        def whole_groups(y_BT):
            # Padding comes last, so nothing that counts can depend on it.
            return None if y_BT is None else jnp.pad(y_BT, ((0, 0), (0, padding)))

        positions_BT, documents_BT = call.positions_BT, call.segment_ids_BT
        if positions_BT is None:
            positions_BT = jnp.arange(length, dtype=jnp.int32)[None]
        if documents_BT is None and padding:  # padding takes no room in routed blocks, and no mean
            documents_BT = jnp.ones(tokens_BT.shape, jnp.int32)
        positions_BT = whole_groups(positions_BT)
        call = call.replace(positions_BT=positions_BT, segment_ids_BT=whole_groups(documents_BT))
        views = group_views.views(call, count, c.sizes, c.memory_local, c.memory_global)
        x_BTD = self.embed(whole_groups(tokens_BT))
        x = x_BTD.reshape(batch, count, c.group_size, -1)
        x = self._enter(x, views[0], length, positions_BT.reshape(-1, count, c.group_size))
        stack_call = views[-1].whole

        def stack(x):
            x_BTD = x.reshape(batch, -1, c.width)
            if self.memory is not None:
                x_BTD = jnp.concatenate([self.memory(batch), x_BTD], axis=1)
            x_BTD, entered = self._enter_stack(x_BTD, stack_call)
            x_BTD = self.layers(x_BTD, entered)[:, c.memory_global :]
            if c.latent_loss.kind != "none" and (means.wanted(self) or self.is_initializing()):
                segments_BT = stack_call.segment_ids_BT
                real_BT = None if segments_BT is None else segments_BT[:, c.memory_global :]
                self.prediction(x_BTD, real_BT)
            # Laid out anew without the memory: of a part of a row that is laid out with it, XLA for
            # CPUs has made a wrong gradient of the linear map that comes next.
            return constrain(x_BTD, "batch", "length", "act_embed").reshape(x.shape)

        x = self._levels(x, views, stack)
        return self.norm_final(x.reshape(batch, -1, x.shape[-1])[:, :length])

    def _decode(self, tokens_BT, call):
        c = self.config
        views = group_views.decoding_views(call, c.sizes, c.memory_local, c.memory_global)
        x_BTD = self.embed(tokens_BT)
        x_BTD = self._enter(x_BTD, views[0], tokens_BT.shape[1], call.positions_BT)

        def stack(x_BTD):
            view = views[-1]
            if self.memory is not None:
                memory_BCD, entered = self._enter_stack(
                    self.memory(x_BTD.shape[0]), view.memory_global
                )
                groups.if_any(view.begins, self.layers, memory_BCD, entered)
            x_BTD, entered = self._enter_stack(x_BTD, view.whole)
            return groups.if_any(jnp.any(view.place_BT >= 0), self.layers, x_BTD, entered)

        return self.norm_final(self._levels(x_BTD, views, stack))

    def _enter(self, x, view, length, positions):
        """Embedded tokens of so many as the state of level 0; their positions in the document."""
        if self.config.positions == "absolute":
            x = x + broadcast(self.positions_embed[0](jnp.maximum(positions, 0)), x.shape)
        elif self.positions_embed:
            x = x + self._positions(0)(view.place_BT, x)
        if self.config.embedding_noise and view.inside.train:
            # Jain et al. 2023, arXiv 2310.05914, section 3.
            bound = self.config.embedding_noise / (length * x.shape[-1]) ** 0.5
            noise = jax.random.uniform(self.make_rng("dropout"), x.shape, x.dtype, -bound, bound)
            x = x + noise
        if self.token_dropout is not None:
            x = self.token_dropout(x, view.inside)
        return constrain(x, "batch", *("length", None)[: x.ndim - 2], "act_embed")

    def _enter_stack(self, x_BTD, call):
        """(x, call) of the first layer: learned dropout takes the latents for the embedding."""
        if self.mask_input is not None:
            call = call.replace(mask_input_BTD=self.mask_input(x_BTD, call))
        if self.dropout_embedding is not None:
            x_BTD = self.dropout_embedding(x_BTD, call)
        return constrain(x_BTD, "batch", "length", "act_embed"), call

    def _levels(self, x, views, stack):
        """Level 0 to level 0, down through the encoder, the stack and up through the decoder."""
        skips = []
        for i, level in enumerate(self.encoder):
            skips.append(x)
            x = level(x, views[i], views[i + 1], self._positions(i + 1))
        x = stack(x)
        for i, level in reversed(list(enumerate(self.decoder))):
            x = level(x, skips[i], views[i + 1], views[i], self._positions(i))
        return x

    def _positions(self, level):
        """A function of places in a group and the state there, which has all of them where there
        are no others; None where there is no table."""
        if not self.positions_embed:
            return None
        table = self.positions_embed[level]

        def embed(place_BT, x):
            places = jnp.arange(x.shape[2])[None, None] if place_BT is None else place_BT
            # Outside the table are only places without a token: padding of a short context.
            return broadcast(table(jnp.clip(places, 0, table.num_embeddings - 1)), x.shape)

        return embed

    @nn.nowrap
    def check_packing(self):
        """Raise UsageError if the model has memory tokens, which belong to no document."""
        super().check_packing()
        for name in ("memory_local", "memory_global"):
            if getattr(self.config, name):
                raise UsageError(
                    f"config.model.{name}={getattr(self.config, name)}: packed rows do not "
                    "support memory tokens, because these belong to no document; set it to 0, "
                    "or config.data.packing=False"
                )

    @property
    def logit_scale(self):
        return self.config.mup.logit_scale(self.config.level_widths[0])

    @nn.nowrap
    def levels(self, encoder):
        """Levels 1..n of the encoder or the decoder."""
        return config.levels(self.config, self.dtype, encoder)

    @nn.nowrap
    def stack_block(self):
        """A block of the latent stack, without experts."""
        return config.stack_block(self.config, self.dtype)

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one sequence; see `Model.ledger`."""
        return ledger.ledger(self, length, selection, shares)

    @nn.nowrap
    def token_of_place(self, path, positions_RS, length):
        return times.of_places(self.config, path, positions_RS, length)


class LatentMemory(nn.Module):
    """[B, C, D]: the memory tokens that come before the latents."""

    block: object
    count: int
    std: float

    @nn.compact
    def __call__(self, batch):
        memory_BCD = groups.memory_tokens(self, "memory_global", self.count, self.block, self.std)
        return broadcast(memory_BCD, (batch, *memory_BCD.shape[1:]))


def _check_documents(model, call, length):
    """The call with positions where it has documents; what cannot be computed is refused."""
    if call.segment_ids_BT is None:
        if call.positions_BT is not None:
            raise UsageError(
                "positions_BT without segment_ids_BT: the latent family derives positions "
                "from the index in the row; leave positions_BT out, or pass segment_ids_BT too"
            )
        return call
    model.check_packing()
    if call.positions_BT is None:
        call = call.replace(positions_BT=jnp.arange(length, dtype=jnp.int32)[None])
    return call.for_rows(call.segment_ids_BT.shape[0])
