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
layer of `previous_layer` is a decoder block alone.
"""

import dataclasses

import jax.numpy as jnp
from flax import linen as nn

from efx import flops
from efx.layers import costs, norms
from efx.layers.config import with_experts
from efx.layers.linear import Embedding, Linear
from efx.layers.mask_dropout.modules import make_dropout, make_mask_input
from efx.layers.stack import Stack
from efx.models.encoder_decoder.streams import EmbeddingLoss, PairSpec
from efx.models.language_model import LanguageModel
from efx.sharding import constrain

# The sites of dropout of an attention, self or cross, and of an MLP.
ATTENTION_SITES, MLP_SITES = ("attention_probs", "attention_output"), ("mlp_output",)


class EncoderDecoder(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `EncoderDecoderConfig` for each knob.

    e_0 = tok + pos; d_0 = Linear(s), optionally of LN(s), optionally + the position embedding of
    the next position. s is e_0; in the serial encoder-decoder it is the encoder's output e_E, or
    e_0 with serial_start="embedding". Output: LN(d_L), optionally minus the position embedding of
    the next position, optionally LN of that; logits by the token embedding.
    """

    def setup(self):
        c = self.config
        self.embed = self.token_table(c.width, c.init_std)
        self.positions_embed = Embedding(
            c.num_positions, c.width, c.init_std, self.dtype, axes=("position", "table")
        )
        block = self.block()
        self.dropout_embedding = make_dropout(block, "embedding")
        self.mask_input = make_mask_input(block)
        norm = dict(use_bias=c.use_bias, eps=c.norm_eps, dtype=self.dtype, name=None)
        if c.decoder_input_norm:
            self.norm_input = norms.make_norm(c.norm, **norm)
        self.decoder_input = Linear(
            c.width, ("embed", "table"), c.init_std, c.use_bias, dtype=self.dtype
        )
        specs, last = self.all_specs()
        self.layers = Stack(specs, c.scan_layers, c.remat)
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
        info = self.call_info(positions_BT, segment_ids_BT, train, decode, cache_size)
        self.check_context(cache_size if decode else tokens_BT.shape[1])
        here_BT = jnp.maximum(positions_BT, 0)
        embedded_BTD = self.embed(tokens_BT) + self.positions_embed(here_BT)
        if self.mask_input is not None:
            info = info.with_tokens(mask_input_BTD=self.mask_input(embedded_BTD, info))
        e_BTD = embedded_BTD
        if self.dropout_embedding is not None:
            e_BTD = self.dropout_embedding(e_BTD, info)
        next_BT = here_BT + 1 if c.decoder_input_positions else None
        streams, before = (constrain(e_BTD, "batch", "length", "act_embed"),), None
        if c.starts_from_encoder:
            before = {c.encoder_blocks: lambda streams: self._begin_decoder(*streams, next_BT)}
        else:
            streams = self._begin_decoder(*streams, next_BT)
        if self.layers.specs:
            streams = self.layers(streams, info, before)
        e_BTD, d_BTD = self.last(streams, info) if self.last else streams
        if c.embedding_loss != "none" and not decode:
            self.loss(embedded_BTD, e_BTD, segment_ids_BT)
        x_BTD = self.norm_final(d_BTD)
        if c.output_positions != "none":
            x_BTD = x_BTD - self.positions_embed(here_BT + 1)
        if c.output_positions == "subtract_norm":
            x_BTD = self.norm_output(x_BTD)
        return x_BTD

    def _begin_decoder(self, s_BTD, next_BT):
        """Both streams of an encoder's state: (s, d_0)."""
        d_BTD = self.decoder_input(
            self.norm_input(s_BTD) if self.config.decoder_input_norm else s_BTD
        )
        if next_BT is not None:
            d_BTD = d_BTD + self.positions_embed(next_BT)
        return s_BTD, constrain(d_BTD, "batch", "length", "act_embed")

    def specs(self):
        """The layers of the stack; without the lone decoder block that ends `previous_layer`."""
        return self.all_specs()[0]

    @nn.nowrap
    def all_specs(self):
        """(the layers of the stack, the layer after these or None)."""
        c, reads = self.config, self.config.reads
        parallel = c.cross_source == "previous_layer"
        encoder = self.block(c.encoder_blocks * 2)
        decoder = self.block(c.depth * (2 if c.order == "cross_only" else 3))
        cross = dataclasses.replace(decoder, attention=c.cross_attention)

        def layer(first, last, j):
            blocks = tuple(with_experts(encoder, c.mlp, i) for i in range(first, last))
            block = None if j is None else with_experts(decoder, c.mlp, j)
            return PairSpec(blocks, block, cross, c.order, parallel)

        if c.cross_source == "final":
            alone = [layer(i, i + 1, None) for i in range(c.encoder_blocks)]
            return (*alone, *(layer(0, 0, j) for j in range(c.depth))), None
        bounds = reads if parallel else (0, *reads)
        pairs = tuple(layer(*bounds[j : j + 2], j) for j in range(len(bounds) - 1))
        return pairs, layer(0, 0, c.depth - 1) if parallel else None

    @nn.nowrap
    def block(self, additions=1):
        """A block of a stream to whose state so many sublayers add."""
        std = self.config.init_std
        return self.config.block(std=std, std_out=std / max(1, additions) ** 0.5, dtype=self.dtype)

    @nn.nowrap
    def _parts(self):
        """(blocks with an MLP, blocks whose self-attention there is, cross-attentions)."""
        specs, last = self.all_specs()
        specs = (*specs, *([last] if last else []))
        crosses = [spec.cross for spec in specs if spec.decoder]
        blocks = [block for spec in specs for block in spec.blocks]
        selves = [block for spec in specs for block in spec.encoder]
        if self.config.order != "cross_only":
            selves += [spec.decoder for spec in specs if spec.decoder]
        return blocks, selves, crosses

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one sequence, see `flops.Ledger`; `selection` matters with experts."""
        c = self.config
        blocks, selves, crosses = self._parts()
        pairs = flops.causal_pairs(length, c.attention.window)
        parts = [
            {"decoder_input": flops.matmul(length, c.width, c.width)},
            self.head_flops(length, c.width),
            costs.embedding_mask_flops(self.block(), length, pairs),
        ]
        for b in (*selves, *crosses):
            parts.append(costs.attention_flops(b, length, pairs))
            parts.append(costs.mask_flops(b, length, pairs, ATTENTION_SITES))
        for b in blocks:
            parts.append(costs.mlp_flops(b, length, selection))
            parts.append(costs.mask_flops(b, length, pairs, MLP_SITES))
        return flops.Ledger(length, flops.add(parts))
