"""Does MoD begin to copy from its context later than a dense model of its FLOPs?

    python -m efx.studies.sweep --sweep configs/sweeps/mod_evidence_longer.py \\
        --workdir runs/mod_evidence_longer --jobs 2

Four times the largest budget of `mod_evidence.py`, 48 TFLOPs, at the best size of MoD and of the
dense model of half the depth there, with their best learning rate, of a seed of which neither
copies at 12 TFLOPs (`mod_evidence.py:rates`). Evaluations on the way tell when copying begins. The
text is read less than once. Some 20 minutes of 2 CPU cores.
"""

from efx.configs.sweeps import mod_evidence


def get_sweep():
    size = mod_evidence.size_of(64, 8) | {
        "steps": 0,
        "train_flops": 4 * mod_evidence.LARGEST,
        "optim.learning_rate": 5e-3,
        "evaluate.every": 2000,
        "evaluate.repeated_rows": 64,
    }
    half = mod_evidence.DENSE | {"model.depth": 4}
    return dict(
        config="mod",
        seeds=(1,),
        equal="",
        runs={"dense, half as deep": size | half, "MoD 12.5%": size},
        columns={"a repeat gains (nats)": "eval/repeated/gain"},
    )
