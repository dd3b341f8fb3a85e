"""Values that `config.model` of the decoder may have, and what its presets decide."""

import dataclasses

from efx.errors import UsageError
from efx.layers import (
    dense_former,
    depth_config,
    learned_dropout,
    moe_config,
    parametrisation,
    soft_experts_config,
)
from efx.layers.mlp import ACTIVATIONS

# What a preset decides when the config leaves the field at None.
PRESETS = {
    "gpt2": dict(
        norm="layernorm",
        norm_eps=1e-5,
        use_bias=True,
        positions="learned",
        tied=True,
        activation="gelu",
    ),
    "llama": dict(
        norm="rmsnorm",
        norm_eps=1e-5,
        use_bias=False,
        positions="rope",
        tied=False,
        activation="swiglu",
    ),
}


def resolve(model):
    """The model with the preset's values in the fields left at None.

    Raises UsageError, which names the config key, for a bad value.
    """

    def one_of(name, value, choices):
        if value not in choices:
            raise UsageError(f"config.model.{name}={value!r}: expected one of {', '.join(choices)}")

    one_of("preset", model.preset, PRESETS)
    preset = PRESETS[model.preset]
    fields = {
        name: preset[name]
        for name in preset
        if name != "activation" and getattr(model, name) is None
    }
    mlp = model.mlp
    if mlp.activation is None:
        mlp = dataclasses.replace(mlp, activation=preset["activation"])
    kv_heads = model.num_kv_heads or model.num_heads
    for name in ("width", "depth", "num_heads", "context", "vocab_size", "vocab_multiple"):
        if getattr(model, name) < 1:
            raise UsageError(f"config.model.{name}={getattr(model, name)}: must be at least 1")
    head_dim = model.head_dim
    if not head_dim:
        if model.width % model.num_heads:
            raise UsageError(
                f"config.model.width={model.width} does not divide by "
                f"config.model.num_heads={model.num_heads}"
            )
        head_dim = model.width // model.num_heads
    if model.num_heads % kv_heads:
        raise UsageError(
            f"config.model.num_heads={model.num_heads} does not divide by "
            f"config.model.num_kv_heads={kv_heads}"
        )
    dropout = learned_dropout.resolved(model.dropout, model.width, model.num_heads)
    fields.update(mlp=mlp, num_kv_heads=kv_heads, head_dim=head_dim, dropout=dropout)
    model = model.clone(**fields)
    one_of("norm", model.norm, ("layernorm", "rmsnorm"))
    one_of("positions", model.positions, ("learned", "rope", "none"))
    one_of("qk_norm", model.qk_norm, ("none", "head", "width"))
    one_of("attention_scale", model.attention_scale, ("sqrt", "mup"))
    moe_config.check(mlp, model.depth)
    one_of("mlp.activation", mlp.activation, ACTIVATIONS)
    if model.positions == "rope" and head_dim % 2:
        raise UsageError(f"config.model.head_dim={head_dim}: rope needs an even head width")
    depth_config.check(model.depth_routing, model.depth)
    soft_experts_config.check(model.soft_experts, mlp, model.depth)
    dense_former.check(model.dense_former, model.depth, model.scan_layers)
    parametrisation.check(model.initialisation, model.mup)
    if model.scan_layers and model.depth_routing.kind == "recursion":
        raise UsageError(
            "config.model.scan_layers=True: not with config.model.depth_routing.kind='recursion', "
            "whose layers do not repeat a pattern"
        )
    return model
