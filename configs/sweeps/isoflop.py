"""isoFLOP curves of Mixture-of-Depths and of the dense decoder, growing by width.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop.py --workdir runs/isoflop --jobs 2

Forty minutes on 2 CPU cores. Edit a copy for other budgets, sizes and families. `isoflop.py:gpu`
has one budget of 3e15 FLOPs, some minutes of one GPU; it shows that a study works there, since its
text has only 12 MB and is read several times.
"""

from efx.errors import UsageError

EVALUATE_AT_END = {"evaluate.every": 0, "sample.every": 0, "checkpoint.every": 0}
FAMILIES = {"dense": {"model.depth_routing.kind": "none"}, "MoD 12.5%": {}}
# A batch of 4: larger models would end after too few steps.
CPU = EVALUATE_AT_END | {
    "model.depth": 4,
    "model.attention.num_heads": 2,
    "model.mlp.multiple_of": 8,
    "data.batch_size": 4,
    "optim.learning_rate": 4e-3,
}
GPU = EVALUATE_AT_END | {
    "model.depth": 8,
    "model.attention.num_heads": 4,
    "data.seq_len": 512,
    "data.batch_size": 64,
    "train.dtype": "bfloat16",
    "optim.learning_rate": 2e-3,
}
PARTS = {
    "cpu": (CPU, (16, 20, 24, 32, 40), (2.5e11, 7.5e11), (0, 1, 2)),
    "gpu": (GPU, (128, 192, 256, 320, 384), (3e15,), (0,)),
}


def get_grid(part="cpu"):
    if part not in PARTS:
        raise UsageError(f"part {part!r}: expected one of {', '.join(PARTS)}")
    base, widths, budgets, seeds = PARTS[part]
    return dict(
        config="mod:published",
        seeds=seeds,
        budgets=budgets,
        families=FAMILIES,
        sizes={f"{width} wide": base | {"model.width": width} for width in widths},
    )
