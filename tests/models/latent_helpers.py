"""Small grouped-latent transformers for tests."""

import families
import numpy as np


def _levels(group_size, latents, widths, heads):
    names = "group_size", "latents", "level_widths", "level_heads"
    return dict(zip(names, (group_size, latents, widths, heads), strict=True))


LEVELS = {
    1: _levels(6, (3,), (8,), (2,)),
    2: _levels(8, (4, 2), (8, 12), (1, 2)),
    3: _levels(8, (4, 2, 1), (8, 8, 12), (2, 1, 2)),
}
SMALL = {"family": "latent", "width": 16, "attention.num_heads": 2, "depth": 1, "positions": "both"}
FEW = {"encoder_global": 0, "decoder_local": 0}  # fewer blocks compile faster
NONE = {**FEW, "encoder_local": 0, "decoder_global": 0}


def make(changes=None, levels=2, **options):
    return families.make({**SMALL, **LEVELS[levels], **(changes or {})}, **options)


def apply(model, params, *arguments):
    return np.asarray(families.jit(model.apply)({"params": params}, *arguments))
