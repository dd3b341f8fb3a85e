"""The decoder: a causal language model, dense, routed by depth or with experts.

Pre-norm transformer with two presets (SPEC section 1): `gpt2` (Radford et al. 2019) and `llama`
(Touvron et al. 2023, arXiv 2302.13971). Every other decoder is a setting away from one of these.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from flax import linen as nn

from efx import flops
from efx.layers import costs, learned_dropout, norms
from efx.layers.config import (
    DenseFormerConfig,
    Initialisation,
    MuPConfig,
    Norm,
    SoftExpertsConfig,
)
from efx.layers.linear import Embedding, broadcast
from efx.layers.mup import deviations
from efx.layers.stack import Stack, layer_specs
from efx.models.config import ModelConfig, check_stack
from efx.models.language_model import LanguageModel
from efx.routing.config import DepthRoutingConfig
from efx.routing.controls import TokenPlacement
from efx.settings import block
from efx.sharding import constrain

# Values of the settings that are None.
PRESETS = {
    "gpt2": dict(norm="layernorm", use_bias=True, positions="learned", tied=True),
    "llama": dict(norm="rmsnorm", use_bias=False, positions="rope", tied=False),
}
ACTIVATIONS = {"gpt2": "gelu", "llama": "swiglu"}


@block("config.model")
class DecoderConfig(ModelConfig):
    """A causal language model, dense, routed by depth or with experts."""

    family: Literal["decoder"] = "decoder"
    preset: Literal["gpt2", "llama"] = "llama"  # decides every setting below that is None
    norm: Norm | None = None
    use_bias: bool | None = None
    positions: Literal["learned", "rope", "none"] | None = None
    tied: bool | None = None  # the output layer is the token embedding
    # "gpt2": all weights N(0, init_std^2); "spike_no_more": N(0, 2 / (5 width)).
    initialisation: Initialisation = "gpt2"
    mup: MuPConfig = MuPConfig()
    depth_routing: DepthRoutingConfig = DepthRoutingConfig()
    soft_experts: SoftExpertsConfig = SoftExpertsConfig()
    dense_former: DenseFormerConfig = DenseFormerConfig()

    causal_in_training: ClassVar[str] = (
        "unless depth_routing selects by top-k or mlp.moe by expert_choice"
    )

    def resolved(self):
        """With the preset's values filled in; UsageError for settings that do not fit together."""
        preset = PRESETS[self.preset]
        given = {name: getattr(self, name) for name in preset if getattr(self, name) is not None}
        filled = preset | given
        check_stack(self, self.depth)
        return dataclasses.replace(
            self,
            **filled,
            attention=self.attention.resolved(
                self.width,
                filled["positions"] == "rope",
                self.mup,
                filled["use_bias"],
            ),
            mlp=self.mlp.resolved(self.depth, ACTIVATIONS[self.preset]),
            dropout=self.dropout.resolved(self.width, self.attention.num_heads),
        )


class Decoder(LanguageModel):
    """Tokens to logits; see `LanguageModel` for the interface and `DecoderConfig` for settings."""

    def setup(self):
        c, std, block = self.config, self.deviations, self.block_config()
        self.embed = self.token_table(c.width, std.table)
        self.positions_embed = None
        if c.positions == "learned":
            self.positions_embed = Embedding(
                c.context, c.width, std.table, self.dtype, axes=("position", "table")
            )
        self.dropout_embedding = learned_dropout.make_dropout(block, "embedding")
        self.mask_input = learned_dropout.make_mask_input(block)
        self.token_types = None
        if c.depth_routing.needs_token_places:
            self.token_types = TokenPlacement(self.vocab_size)
        self.layers = Stack(self.specs(), c.scan_layers, c.remat, c.dense_former)
        norm = norms.NORMS[c.norm]
        self.norm_final = norm(c.norm_eps, dtype=self.dtype, use_bias=c.use_bias)
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
        return self.config.mup_ratio

    @property
    def deviations(self):
        c = self.config
        return deviations(c.initialisation, c.init_std, c.mup, c.width)

    @nn.nowrap
    def block_config(self):
        """`BlockConfig` of the blocks without experts."""
        c, std = self.config, self.deviations.hidden
        additions = 2 * c.depth_routing.effective_depth(c.depth)
        return c.block(
            std=std,
            std_out=std / additions**0.5,
            dtype=self.dtype,
        )

    def specs(self):
        return layer_specs(self.block_config(), self.config)

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        c = self.config
        pairs = flops.causal_pairs(length, c.attention.window)
        parts = [
            costs.stack_flops(self.blocks(), length, selection, shares),
            costs.embedding_mask_flops(self.block_config(), length, pairs),
            self.head_flops(length, c.width),
        ]
        return flops.Ledger(length, flops.add(parts))
