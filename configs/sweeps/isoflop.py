"""isoFLOP curves of Mixture-of-Depths and of the dense decoder, 4 blocks, growing by width.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop.py --workdir runs/isoflop --jobs 2

Small enough for some forty minutes on 2 CPU cores. For more, edit a copy: budgets, sizes and
families are lists here.
"""

# Steps of few tokens, and a higher learning rate than the default, which is for four times the
# width: otherwise large models end at such budgets after too few steps to learn anything.
BASE = {
    "model.depth": 4,
    "model.attention.num_heads": 2,
    "model.mlp.multiple_of": 8,
    "data.batch_size": 4,
    "optim.learning_rate": 4e-3,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}


def get_grid():
    return dict(
        config="mod",
        seeds=(0, 1, 2),
        budgets=(2.5e11, 7.5e11),
        families={
            "dense": {"model.depth_routing.kind": "none"},
            "MoD 12.5%": {},
        },
        sizes={f"{width} wide": BASE | {"model.width": width} for width in (16, 20, 24, 32, 40)},
    )
