"""Values that `config.model` of the encoder-decoder may have."""

import dataclasses

from efx.errors import UsageError
from efx.layers import learned_dropout, moe_config
from efx.layers.mlp import ACTIVATIONS
from efx.layers.stack import period
from efx.layers.streams import DISTANCES, ORDERS

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "order": ORDERS,
    "cross_source": ("same_layer", "previous_layer", "final"),
    "serial_start": ("encoder", "embedding"),
    "output_positions": ("none", "subtract", "subtract_norm"),
    "embedding_loss": ("none", *DISTANCES),
    "qk_norm": ("none", "head", "width"),
    "attention_scale": ("sqrt", "mup"),
}


def resolve(model):
    """The model with its activation; every bad value is named with its config key."""

    def bad(name, value, message):
        raise UsageError(f"config.model.{name}={value!r}: {message}")

    def one_of(name, value, choices):
        if value not in choices:
            bad(name, value, f"expected one of {', '.join(choices)}")

    for name, choices in CHOICES.items():
        one_of(name, getattr(model, name), choices)
    sizes = ("width", "depth", "num_heads", "context", "vocab_size", "vocab_multiple")
    for name, least in (*((name, 1) for name in sizes), ("encoder_depth", 0), ("cross_heads", 0)):
        if getattr(model, name) < least:
            bad(name, getattr(model, name), f"must be at least {least}")
    model = model.clone(
        cross_heads=model.cross_heads or model.num_heads,
        mlp=dataclasses.replace(model.mlp, activation=model.mlp.activation or "gelu"),
        dropout=learned_dropout.resolved(model.dropout, model.width, model.num_heads),
    )
    for name in ("num_heads", "cross_heads"):
        if model.width % getattr(model, name):
            bad(
                "width",
                model.width,
                f"does not divide by config.model.{name}={getattr(model, name)}",
            )
    if model.cross_source == "previous_layer" and model.depth == 1 and model.encoder_depth:
        bad(
            "encoder_depth",
            model.encoder_depth,
            "the one decoder block of cross_source='previous_layer' reads e_0; set it to 0",
        )
    moe_config.check(model.mlp, max(model.depth, model.encoder_blocks))
    one_of("mlp.activation", model.mlp.activation, ACTIVATIONS)
    if model.scan_layers:
        try:
            period(model.all_specs()[0])
        except UsageError:
            bad(
                "scan_layers",
                True,
                f"cross_source={model.cross_source!r} with {model.encoder_blocks} encoder and "
                f"{model.depth} decoder blocks has layers that do not repeat a pattern",
            )
    return model
