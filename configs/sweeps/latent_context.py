"""The grouped-latent transformer against the decoder at one context: isoFLOP curves.

    python -m efx.studies.isoflop --grid configs/sweeps/latent_context.py:1024 \\
        --workdir runs/latent_context_1024 --jobs 2

Contexts of 256, 1024 and 4096 tokens are a study each, with 4096 tokens a step; their losses do not
compare. Groups have 8 tokens, then 4 and 2 latents, of about the decoder's width. The published
form has blocks across groups at every level and absolute positions; the local form has neither, and
upsamples by attention after an early skip connection. An hour and a half a study on 2 CPU cores.
"""

from efx.configs.sweeps import mod_evidence
from efx.errors import UsageError

CONTEXTS = ("256", "1024", "4096")
SIZES = dict(list(mod_evidence.SIZES.items())[1:6])
# Of the latent model: widths (tokens, first, last latents), their heads, depth of the stack.
SHAPES = (
    ((16, 16, 24), (2, 2, 2), 3),
    ((16, 24, 32), (2, 2, 2), 3),
    ((24, 32, 48), (2, 2, 4), 4),
    ((32, 48, 64), (2, 4, 4), 4),
    ((48, 64, 96), (4, 4, 6), 6),
)


def by_size(value):
    return {name: value(*shape) for name, shape in zip(SIZES, SHAPES, strict=True)}


LATENT = {
    "config": "latent",
    "model.level_widths": by_size(lambda widths, heads, depth: repr(widths[:2])),
    "model.level_heads": by_size(lambda widths, heads, depth: repr(heads[:2])),
    "model.width": by_size(lambda widths, heads, depth: widths[2]),
    "model.attention.num_heads": by_size(lambda widths, heads, depth: heads[2]),
    "model.depth": by_size(lambda widths, heads, depth: depth),
}
# Only the stack crosses groups; early places of a group see the group; no tables of positions.
LOCAL_LEVELS = {
    "model.encoder_global": 0,
    "model.decoder_global": 0,
    "model.upsampling": "attention",
    "model.skip_joins": "before",
    "model.positions": "rope",
}


def get_grid(context="1024"):
    if context not in CONTEXTS:
        raise UsageError(f"context {context!r}: expected one of {', '.join(CONTEXTS)}")
    length = int(context)
    rows = {"data.seq_len": length, "data.batch_size": 4096 // length}
    names = [f"{kind}, context {length}" for kind in ("decoder", "latent", "latent, local levels")]

    def seeds(family, size, budget):
        # Where the families are close: the smallest sizes, best at the longest context.
        close = length == 4096 and size in tuple(SIZES)[:2] and family != names[1]
        return (0, 1, 2) if close else (0,)

    return dict(
        config="mod:dense",
        seeds=seeds,
        budgets=(7.5e11, 3e12),
        families=dict(zip(names, (rows, LATENT | rows, LATENT | LOCAL_LEVELS | rows), strict=True)),
        sizes=SIZES,
    )
