"""The grouped-latent transformer against the decoder by context: isoFLOP curves, and seconds.

    python -m efx.studies.isoflop --grid configs/sweeps/latent_context.py \\
        --workdir runs/latent_context --jobs 2

Contexts of 256, 1024 and 4096 tokens, 4096 tokens a step in each. Its promise is long context,
where attention costs most: hence its loss against FLOPs, and against seconds. Positions are
absolute (the default), groups have 8 tokens, 4 latents and then 2, of widths about that of the
decoder. Losses of different contexts are of the same text cut at other places: compare the families
of one context. Text and tokenizer are those of `configs/sweeps/mod_evidence.py`. Some hours on 2
CPU cores.
"""

from efx.configs.sweeps import mod_evidence

CONTEXTS = (256, 1024, 4096)
# Of the decoder: width, depth, heads; of the latent model: widths (tokens, first latents, last
# latents), their heads, depth of the stack.
SHAPES = (
    ((16, 4, 2), (16, 16, 24), (2, 2, 2), 3),
    ((24, 4, 2), (16, 24, 32), (2, 2, 2), 3),
    ((32, 6, 2), (24, 32, 48), (2, 2, 4), 4),
    ((48, 6, 4), (32, 48, 64), (2, 4, 4), 4),
    ((64, 8, 4), (48, 64, 96), (4, 4, 6), 6),
)


def name_of(shape):
    (width, depth, _), *_ = shape
    return mod_evidence.name_of(width, depth)


def by_size(value):
    return {name_of(shape): value(shape) for shape in SHAPES}


LATENT = {
    "config": "latent",
    "model.level_widths": by_size(lambda shape: repr(shape[1][:2])),
    "model.level_heads": by_size(lambda shape: repr(shape[2][:2])),
    "model.width": by_size(lambda shape: shape[1][2]),
    "model.attention.num_heads": by_size(lambda shape: shape[2][2]),
    "model.depth": by_size(lambda shape: shape[3]),
}


def get_grid():
    families = {}
    for context in CONTEXTS:
        rows = {"data.seq_len": context, "data.batch_size": 4096 // context}
        families[f"decoder, context {context}"] = rows
        families[f"latent, context {context}"] = LATENT | rows
    return dict(
        config="mod:dense",
        seeds=(0,),
        budgets=(7.5e11, 3e12),
        families=families,
        sizes=by_size(_size),
    )


def _size(shape):
    width, depth, heads = shape[0]
    size = {"model.width": width, "model.depth": depth, "model.attention.num_heads": heads}
    return mod_evidence.BASE | size
