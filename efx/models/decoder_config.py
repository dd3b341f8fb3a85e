"""`config.model` of the decoder, and what its presets decide."""

import dataclasses
from typing import ClassVar, Literal

from efx.layers.config import (
    DenseFormerConfig,
    Initialisation,
    MuPConfig,
    Norm,
    SoftExpertsConfig,
)
from efx.models.config import ModelConfig, check_stack
from efx.routing.config import DepthRoutingConfig
from efx.settings import block

# What a preset decides where a setting is None.
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
        """With the preset's values filled in; UsageError for settings that do not go together."""
        preset = PRESETS[self.preset]
        chosen = {name: getattr(self, name) for name in preset if getattr(self, name) is not None}
        filled = preset | chosen
        check_stack(self, self.depth)
        return dataclasses.replace(
            self,
            **filled,
            attention=self.attention.resolved(
                self.width,
                filled["positions"] == "rope",
                self.mup.scales_attention,
                filled["use_bias"],
            ),
            mlp=self.mlp.resolved(self.depth, ACTIVATIONS[self.preset]),
            dropout=self.dropout.resolved(self.width, self.attention.num_heads),
        )
