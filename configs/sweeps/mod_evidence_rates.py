"""Is the learning rate of `mod_evidence.py` right at its largest budget?

    python -m efx.studies.sweep --sweep configs/sweeps/mod_evidence_rates.py \\
        --workdir runs/mod_evidence_rates --jobs 2

The best sizes of the dense model, of one of half the depth and of MoD at 12 TFLOPs, with rates
around the one that all sizes share: were it wrong for one of them, the comparison would be. Text,
settings and FLOPs are those of the grid, whose points with one seed these are at 1e-2. Three sizes
of each, and what the runs copy, are in `mod_evidence.py:rates`. Some two hours of a CPU core.
"""

from efx.configs.sweeps import mod_evidence

HALF = mod_evidence.DENSE | {"model.depth": 4}
BEST = {
    "dense": (48, 6, mod_evidence.DENSE, (5e-3, 1e-2, 2e-2, 4e-2)),
    "dense, half as deep": (64, 8, HALF, (5e-3, 1e-2, 2e-2)),
    "MoD 12.5%": (64, 8, {}, (2.5e-3, 5e-3, 1e-2, 2e-2)),
}


def get_sweep():
    return dict(
        config="mod",
        seeds=(0,),
        equal="",
        runs={
            f"{name}, {width} wide, {rate:g}": mod_evidence.size_of(width, depth)
            | {"steps": 0, "train_flops": mod_evidence.LARGEST, "optim.learning_rate": rate}
            | changes
            for name, (width, depth, changes, rates) in BEST.items()
            for rate in rates
        },
        columns={},
    )
