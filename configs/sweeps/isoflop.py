"""isoFLOP curves of Mixture-of-Depths and of the dense decoder, growing by depth.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop.py --workdir runs/isoflop --jobs 2

Depth is what the paper adds first, and at one width one learning rate serves all sizes.
"""

# Small steps of few tokens: at budgets like these a larger batch leaves deep models with too few
# steps to learn anything.
BASE = {
    "model.width": 32,
    "model.num_heads": 2,
    "data.batch_size": 4,
    "optim.schedule.warmup_steps": 50,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}


def get_grid():
    return dict(
        config="configs/mod.py",
        seeds=(0, 1, 2),
        budgets=(2.5e11, 5e11, 1e12),
        families={
            "dense": {"model.depth_routing.kind": "none"},
            "MoD 12.5%": {},
        },
        sizes={f"{depth} blocks": BASE | {"model.depth": depth} for depth in (2, 4, 6, 8, 12)},
    )
