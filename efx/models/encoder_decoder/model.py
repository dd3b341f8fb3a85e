"""The parallel encoder-decoder: a causal language model of two streams, one of which reads the
other.

The encoder's stream e is there to understand the text, the decoder's stream d to predict the next
token; d reads e through causal cross-attention (query t sees encoder states <= t). With E encoder
and L decoder blocks, decoder block j = 1..L reads the encoder state after r(j) blocks:
    same_layer      r(j) = ceil(j E / L)
    previous_layer  r(j) = floor((j - 1) E / (L - 1)), 0 for L = 1
    final           r(j) = E, the serial encoder-decoder: all encoder blocks come first
Layer j is decoder block j and those encoder blocks that run beside it: up to r(j) in `same_layer`,
after r(j) and up to r(j + 1) in `previous_layer`. There decoder and encoder blocks of a layer do
not depend on each other: with E = L - 1 the critical path is L blocks. What an L-th encoder block
would give is read by nothing, hence the default E = L - 1 there, and E = L elsewhere; the last
layer of `previous_layer` is a decoder block alone. With averages of earlier states (DenseFormer),
of each stream by itself, every block is a layer alone, in the order in which they are computed.
"""

import itertools

import jax.numpy as jnp
from flax import linen as nn

from efx import flops, means
from efx.layers import costs, norms
from efx.layers.learned_dropout import make_dropout, make_mask_input
from efx.layers.linear import Embedding, Linear, broadcast
from efx.layers.mup import deviations
from efx.layers.stack import Stack, by_path, stream_specs
from efx.models.encoder_decoder.streams import DecoderSpec, EmbeddingLoss, PairSpec
from efx.models.language_model import LanguageModel
from efx.routing.controls import TokenPlacement
from efx.sharding import constrain


class EncoderDecoder(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `EncoderDecoderConfig` for each knob.

    e_0 = tok + pos, or tok where positions are rotary; d_0 = Linear(s), optionally of LN(s),
    optionally + the position embedding of the next position. s is e_0; in the serial
    encoder-decoder it is the encoder's output e_E, or e_0 with serial_start="embedding". Output:
    LN(d_L), optionally minus the position embedding of the next position, optionally LN of that;
    logits by the token embedding.
    """

    def setup(self):
        c, std = self.config, self.deviations
        self.embed = self.token_table(c.width, std.table)
        self.positions_embed = None
        if c.positions == "learned":
            self.positions_embed = Embedding(
                c.num_positions, c.width, std.table, self.dtype, axes=("position", "table")
            )
        block = self.block()
        self.dropout_embedding = make_dropout(block, "embedding")
        self.mask_input = make_mask_input(block)
        norm = dict(use_bias=c.use_bias, eps=c.norm_eps, dtype=self.dtype, name=None)
        if c.decoder_input_norm:
            self.norm_input = norms.make_norm(c.norm, **norm)
        self.decoder_input = Linear(
            c.width, ("embed", "table"), std.hidden, c.use_bias, dtype=self.dtype
        )
        self.token_types = None
        if c.depth_routing.needs_token_places:
            self.token_types = TokenPlacement(self.vocab_size)
        specs, last = self.all_specs()
        self.layers = Stack(specs, c.scan_layers, c.remat, c.dense_former)
        self.last = last and Stack((last,), False, c.remat)
        self.norm_final = norms.make_norm(c.norm, **norm)
        if c.output_positions == "subtract_norm":
            self.norm_output = norms.make_norm(c.norm, **norm)
        if c.embedding_loss != "none":
            self.loss = EmbeddingLoss(c.embedding_loss, c.embedding_loss_gains, c.norm_eps)

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The state [B, T, D] that the output layer reads; see `Model.features`."""
        c = self.config
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        call = self.make_call(positions_BT, segment_ids_BT, train, decode, cache_size)
        if c.dropout.by_position or self.positions_embed is not None:
            self.check_context(cache_size if decode else tokens_BT.shape[1])
        here_BT = jnp.maximum(positions_BT, 0)
        embedded_BTD = self.embed(tokens_BT)
        if self.positions_embed is not None:
            embedded_BTD = embedded_BTD + self._positions(here_BT, embedded_BTD)
        if self.token_types is not None:
            call = call.replace(token_places=self.token_types(tokens_BT, call))
        if self.mask_input is not None:
            call = call.replace(mask_input_BTD=self.mask_input(embedded_BTD, call))
        e_BTD = embedded_BTD
        if self.dropout_embedding is not None:
            e_BTD = self.dropout_embedding(e_BTD, call)
        next_BT = here_BT + 1 if c.decoder_input_positions else None
        streams, before = (constrain(e_BTD, "batch", "length", "act_embed"),), None
        if c.starts_from_encoder:
            before = {c.encoder_blocks: lambda streams: self._begin_decoder(*streams, next_BT)}
        else:
            streams = self._begin_decoder(*streams, next_BT)
        if self.layers.specs:
            streams = self.layers(streams, call, before)
        e_BTD, d_BTD = self.last(streams, call) if self.last else streams
        compared = c.embedding_loss != "none" and not decode
        if compared and (means.wanted(self) or self.is_initializing()):
            self.loss(embedded_BTD, e_BTD, segment_ids_BT)
        x_BTD = self.norm_final(d_BTD)
        if c.output_positions != "none":
            x_BTD = x_BTD - self._positions(here_BT + 1, x_BTD)
        if c.output_positions == "subtract_norm":
            x_BTD = self.norm_output(x_BTD)
        return x_BTD

    def _begin_decoder(self, s_BTD, next_BT):
        """Both streams of an encoder's state: (s, d_0)."""
        d_BTD = self.decoder_input(
            self.norm_input(s_BTD) if self.config.decoder_input_norm else s_BTD
        )
        if next_BT is not None:
            d_BTD = d_BTD + self._positions(next_BT, d_BTD)
        return s_BTD, constrain(d_BTD, "batch", "length", "act_embed")

    def _positions(self, place_BT, x_BTD):
        return broadcast(self.positions_embed(place_BT), x_BTD.shape)

    @property
    def logit_scale(self):
        return self.config.mup.logit_scale(self.config.width)

    @property
    def deviations(self):
        c = self.config
        return deviations(c.initialisation, c.init_std, c.mup, c.width)

    def specs(self):
        """The layers of the stack; without the lone decoder block that ends `previous_layer`."""
        return self.all_specs()[0]

    @nn.nowrap
    def blocks(self):
        specs, last = self.all_specs()
        return by_path("layers", specs) | by_path("last", (last,) if last else ())

    @nn.nowrap
    def all_specs(self):
        """(the layers of the stack, the layer after these or None)."""
        c, count = self.config, self.config.encoder_blocks
        routed = c.depth_routing.routed_blocks(count, c.depth)
        encoder = tuple(stream_specs(self.block(count * 2), c, count, routed))
        block = self.block(c.depth * (2 if c.order == "cross_only" else 3))
        routed = {i - count: capacity for i, capacity in routed.items()}
        fields = dict(cross=c.cross_attention, order=c.order)
        decoder = tuple(stream_specs(block, c, c.depth, routed, DecoderSpec, **fields))
        parallel = c.cross_source == "previous_layer"
        if c.cross_source == "final":
            layers = [(spec,) for spec in (*encoder, *decoder)]
        else:
            # What the last decoder block reads is there before its layer in `previous_layer`.
            bounds = itertools.pairwise((*c.reads, c.reads[-1]) if parallel else (0, *c.reads))
            layers = [(*encoder[a:b], d) for (a, b), d in zip(bounds, decoder, strict=True)]
        if c.dense_former.on:
            # Decoder blocks come before encoder blocks whose output they do not read.
            layers = [(*layer[-1:], *layer[:-1]) if parallel else layer for layer in layers]
            return tuple(PairSpec((spec,)) for layer in layers for spec in layer), None
        pairs = tuple(PairSpec(layer, parallel) for layer in layers)
        return (pairs[:-1], pairs[-1]) if parallel else (pairs, None)

    @nn.nowrap
    def block(self, additions=1):
        """A block of a stream to whose state so many sublayers add."""
        c, std = self.config, self.deviations.hidden
        return c.block(
            std=std,
            std_out=std / max(1, additions) ** 0.5,
            dtype=self.dtype,
            router_scale=self.logit_scale,
        )

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        c = self.config
        pairs = flops.causal_pairs(length, c.attention.window)
        parts = [
            {"decoder_input": flops.matmul(length, c.width, c.width)},
            costs.stack_flops(self.blocks(), length, selection, shares),
            costs.embedding_mask_flops(self.block(), length, pairs),
            self.head_flops(length, c.width),
        ]
        return flops.Ledger(length, flops.add(parts))
