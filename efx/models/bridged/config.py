"""`config.model` of finished runs with bridges between them."""

from typing import ClassVar, Literal

from efx.errors import UsageError
from efx.layers.config import AttentionConfig, DropoutConfig, MuPConfig
from efx.routing.config import DepthRoutingConfig
from efx.settings import Count, Natural, NonNegative, Pieces, Places, block


@block("config.model")
class BridgedConfig:
    """Finished runs with bridges between them, configs/calm.py."""

    family: Literal["bridged"] = "bridged"
    context: Places = 0  # longest sequence; 0: data.seq_len
    anchor: str = ""  # run folder of the model that predicts
    augment: tuple[str, ...] = ("",)  # of those that it reads, of the same tokenizer
    pairs: Pieces = 2  # layers of each, evenly spaced, that a bridge connects
    num_heads: Count = 4  # of the bridges' cross-attention
    # Of that attention, with the meanings that they have in `config.model.attention`.
    qk_norm: Literal["none", "head", "width"] = "none"
    window: Natural = 0
    softcap: NonNegative = 0.0
    norm: Literal["none", "rmsnorm", "layernorm"] = "none"  # of what a bridge reads, on both sides
    init_std: NonNegative = 0.02

    causal_in_training: ClassVar[str] = "always"
    # Members are what they are in evaluation, and unrolled.
    scan_layers: ClassVar[bool] = False
    remat: ClassVar[str] = "none"
    depth_routing: ClassVar[DepthRoutingConfig] = DepthRoutingConfig()
    dropout: ClassVar[DropoutConfig] = DropoutConfig()
    mup: ClassVar[MuPConfig] = MuPConfig()

    @property
    def member_runs(self):
        """((key, run folder), ...): whose models these are, the anchor first."""
        return (("anchor", self.anchor), *(("augment", run) for run in self.augment))

    def attention(self, width):
        """The `AttentionConfig` of the bridges to an anchor so wide."""
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=width // self.num_heads,
            bias="none",
            rope_theta=0.0,
            qk_norm=self.qk_norm,
            window=self.window,
            softcap=self.softcap,
        )

    def resolved(self):
        if not self.augment:
            raise UsageError("config.model.augment=(): needs the run folder of at least one model")
        return self
