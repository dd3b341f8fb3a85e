"""Does MoD pay at 48 TFLOPs, and does it begin to copy from its context later?

    python -m efx.studies.sweep --sweep configs/sweeps/mod_evidence_longer.py \\
        --workdir runs/mod_evidence_longer --jobs 2

Four times the largest budget of `mod_evidence.py`, three seeds of the main families, each at a size
and a rate that are among its best there (`mod_evidence.py:rates`), the dense one at two sizes,
since four times the FLOPs may want a larger one. Evaluations on the way tell when copying begins.
The text is read less than once. Some two hours of 2 CPU cores.

`mod_evidence_longer.py:dense` has four seeds of the dense model at the largest budget of
`mod_evidence.py`, with the rate that is best there among runs that do not copy: the rate that its
first seed found is that of a run that does. Some 20 minutes.
"""

from efx.configs.sweeps import mod_evidence
from efx.errors import UsageError


def get_sweep(part="longer"):
    parts = {"longer": _longer, "dense": _dense}
    if part not in parts:
        raise UsageError(f"part {part!r}: expected {', '.join(parts)}")
    return parts[part]() | dict(
        config="mod", equal="", columns={"a repeat gains (nats)": "eval/repeated/gain"}
    )


def _run(width, depth, rate, flops, **changes):
    return mod_evidence.size_of(width, depth) | {
        "steps": 0,
        "train_flops": flops,
        "optim.learning_rate": rate,
        "evaluate.every": 2000,
        "evaluate.repeated_rows": 64,
        **changes,
    }


def _longer():
    flops, dense = 4 * mod_evidence.LARGEST, mod_evidence.DENSE
    return dict(
        seeds=(0, 1, 2),
        runs={
            "MoD 12.5%, 64 wide": _run(64, 8, 5e-3, flops),
            "dense, half as deep, 64 wide": _run(64, 8, 5e-3, flops, **dense, **{"model.depth": 4}),
            "dense, 64 wide": _run(64, 8, 2.5e-3, flops, **dense),
            "dense, 48 wide": _run(48, 6, 5e-3, flops, **dense),
        },
    )


def _dense():
    run = _run(48, 6, 5e-3, mod_evidence.LARGEST, **mod_evidence.DENSE)
    return dict(seeds=(0, 1, 2, 3), runs={"dense, 48 wide": run})
