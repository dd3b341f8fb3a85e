"""The decoder: a causal language model, dense or with depth routing. Presets `gpt2` and `llama`."""

import jax.numpy as jnp
from flax import linen as nn

from efx import flops
from efx.layers import costs, learned_dropout, norms
from efx.layers.linear import Embedding, broadcast
from efx.layers.mup import deviations
from efx.layers.stack import Stack, layer_specs
from efx.models.language_model import LanguageModel
from efx.routing.controls import TokenPlacement
from efx.sharding import constrain


class Decoder(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `DecoderConfig` for each knob."""

    def setup(self):
        c, std = self.config, self.deviations
        self.embed = self.token_table(c.width, std.table)
        self.positions_embed = None
        if c.positions == "learned":
            self.positions_embed = Embedding(
                c.context, c.width, std.table, self.dtype, axes=("position", "table")
            )
        block = self.block()
        self.dropout_embedding = learned_dropout.make_dropout(block, "embedding")
        self.mask_input = learned_dropout.make_mask_input(block)
        self.token_types = None
        if c.depth_routing.needs_token_places:
            self.token_types = TokenPlacement(self.vocab_size)
        self.layers = Stack(self.specs(), c.scan_layers, c.remat, c.dense_former)
        self.norm_final = norms.make_norm(
            c.norm, use_bias=c.use_bias, eps=c.norm_eps, dtype=self.dtype, name=None
        )
        if not c.tied:
            self.head = self.output_layer(std.head)

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The normalised state. Past the table of learned positions there are no numbers."""
        if self.config.dropout.by_position or self.positions_embed is not None:
            self.check_context(cache_size if decode else tokens_BT.shape[1])
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        call = self.make_call(positions_BT, segment_ids_BT, train, decode, cache_size)
        call = call.with_cache(first=decode == "first")
        x_BTD = self.embed(tokens_BT)
        if self.positions_embed is not None:
            place_BTD = self.positions_embed(jnp.maximum(positions_BT, 0))
            x_BTD = x_BTD + broadcast(place_BTD, x_BTD.shape)
        if self.token_types is not None:
            call = call.replace(token_places=self.token_types(tokens_BT, call))
        if self.mask_input is not None:
            call = call.replace(mask_input_BTD=self.mask_input(x_BTD, call))
        if self.dropout_embedding is not None:
            x_BTD = self.dropout_embedding(x_BTD, call)
        x_BTD = constrain(x_BTD, "batch", "length", "act_embed")
        return self.norm_final(self.layers(x_BTD, call))

    @property
    def logit_scale(self):
        return self.config.mup.logit_scale(self.config.width)

    @property
    def deviations(self):
        c = self.config
        return deviations(c.initialisation, c.init_std, c.mup, c.width)

    @nn.nowrap
    def block(self):
        """What the blocks without experts are built from."""
        c, std = self.config, self.deviations.hidden
        return c.block(
            std=std,
            std_out=std / (2 * c.depth_routing.effective_depth(c.depth)) ** 0.5,
            dtype=self.dtype,
            router_scale=c.mup.logit_scale(c.width),
        )

    def specs(self):
        """The layers of the stack."""
        return layer_specs(self.block(), self.config)

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        c = self.config
        pairs = flops.causal_pairs(length, c.attention.window)
        parts = [
            costs.stack_flops(self.blocks(), length, selection, shares),
            costs.embedding_mask_flops(self.block(), length, pairs),
            self.head_flops(length, c.width),
        ]
        return flops.Ledger(length, flops.add(parts))
