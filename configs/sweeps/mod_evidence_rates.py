"""Is the learning rate of `mod_evidence.py` right at its largest budget?

    python -m efx.studies.sweep --sweep configs/sweeps/mod_evidence_rates.py \\
        --workdir runs/mod_evidence_rates --jobs 2

The best size of the dense model and that of MoD at 12 TFLOPs, with half and twice the rate that all
sizes share: were it wrong for one of them, the comparison would be. Text, settings and FLOPs are
those of the grid, whose points with one seed these are at 1e-2. Some 50 minutes of a CPU core.
"""

from efx.configs.sweeps import mod_evidence

BEST = {"dense": (48, 6, mod_evidence.DENSE), "MoD 12.5%": (64, 8, {})}
RATES = (5e-3, 1e-2, 2e-2)


def get_sweep():
    return dict(
        config="mod",
        seeds=(0,),
        equal="",
        runs={
            f"{name}, {width} wide, {rate:g}": mod_evidence.size_of(width, depth)
            | {"steps": 0, "train_flops": mod_evidence.LARGEST, "optim.learning_rate": rate}
            | changes
            for name, (width, depth, changes) in BEST.items()
            for rate in RATES
        },
        columns={},
    )
