"""Small grouped-latent transformers for tests."""

import families
import numpy as np

LEVELS = {  # group size, latents, widths and heads of the levels below the stack's
    1: {"group_size": 6, "latents": (3,), "level_widths": (8,), "level_heads": (2,)},
    2: {"group_size": 8, "latents": (4, 2), "level_widths": (8, 12), "level_heads": (1, 2)},
    3: {
        "group_size": 8,
        "latents": (4, 2, 1),
        "level_widths": (8, 8, 12),
        "level_heads": (2, 1, 2),
    },
}
SMALL = {"family": "latent", "width": 16, "attention.num_heads": 2, "depth": 1, "positions": "both"}
MEMORY = {
    "none": {},
    "local": {"memory_local": 2},
    "global": {"memory_global": 1},
    "both": {"memory_local": 1, "memory_global": 2},
}
FEW = {"encoder_global": 0, "decoder_local": 0}  # fewer blocks compile faster
NONE = {**FEW, "encoder_local": 0, "decoder_global": 0}
MOD = {
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": 0.5,
    "depth_routing.causal": "threshold",
    "depth": 2,
}


def make(changes=None, levels=2, **options):
    return families.make({**SMALL, **LEVELS[levels], **(changes or {})}, **options)


def apply(model, params, *arguments):
    return np.asarray(families.jit(model.apply)({"params": params}, *arguments))
