"""The best learning rate of each width, with muP and without, for the dense decoder, 4 blocks.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop_rates.py \\
        --workdir runs/rates_by_width --jobs 2

muP should have the same best rate at all widths. One budget and one seed, so there is no law; the
table of learning rates is what this is for. Some twenty minutes on 2 CPU cores.
"""

BASE = {
    "model.depth": 4,
    "model.attention.num_heads": 2,
    "model.mlp.multiple_of": 8,
    "data.batch_size": 4,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}


def get_grid():
    return dict(
        config="mod:dense",
        seeds=(0,),
        budgets=(5e11,),
        families={"standard": {}, "muP": {"model.mup.base_width": 16}},
        sizes={f"{width} wide": BASE | {"model.width": width} for width in (16, 32, 64)},
        learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
    )
