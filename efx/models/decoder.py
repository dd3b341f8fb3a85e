"""The decoder: a causal language model, dense, routed by depth or with experts.

Pre-norm transformer with two presets (SPEC section 1): `gpt2` (Radford et al. 2019) and `llama`
(Touvron et al. 2023, arXiv 2302.13971). Every other decoder is a setting away from one of these.
"""

import dataclasses
from typing import Literal

from efx.config.schema import block
from efx.layers.block import make_norm
from efx.layers.config import DenseFormerConfig, Norm, SoftExpertsConfig
from efx.models.config import ModelConfig, check_stack
from efx.models.language_model import LanguageModel
from efx.models.stack import Stack, layer_specs

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
    soft_experts: SoftExpertsConfig = SoftExpertsConfig()
    dense_former: DenseFormerConfig = DenseFormerConfig()

    def resolved(self):
        """With the preset's values filled in; UsageError for settings that do not fit together."""
        check_stack(self, self.depth)
        filled = {
            name: value if getattr(self, name) is None else getattr(self, name)
            for name, value in PRESETS[self.preset].items()
        }
        is_rotary, use_bias = filled["positions"] == "rope", filled["use_bias"]
        return dataclasses.replace(
            self,
            **filled,
            attention=self.attention.resolved(self.width, is_rotary, self.mup, use_bias),
            mlp=self.mlp.resolved(self.depth, ACTIVATIONS[self.preset]),
        )


class Decoder(LanguageModel):
    """Tokens to logits; see `LanguageModel` for the interface and `DecoderConfig` for settings."""

    def setup(self):
        c = self.config
        self.setup_embedding(c.context if c.positions == "learned" else 0)
        self.layers = Stack(self.specs(), c.scan_layers, c.remat, c.dense_former)
        self.norm_final = make_norm(self.block_config())
        if not c.tied:
            self.head = self.output_layer(self.deviations.head)

    def trunk(self, embedded_BTD, call):
        x_BTD = self.drop_embedding(embedded_BTD, call)
        return self.norm_final(self.layers(x_BTD, call))

    def specs(self):
        c = self.config
        num_increments = 2 * c.depth_routing.effective_depth(c.depth)
        return layer_specs(self.block_config(num_increments), c)
