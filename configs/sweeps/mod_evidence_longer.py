"""Does MoD begin to copy from its context later than a dense model of its FLOPs?

    python -m efx.studies.sweep --sweep configs/sweeps/mod_evidence_longer.py \\
        --workdir runs/mod_evidence_longer --jobs 2

Four times the largest budget of `mod_evidence.py`, 48 TFLOPs, at the best size of MoD and of the
dense model of half the depth there, with their best learning rate, of a seed of which neither
copies at 12 TFLOPs (`mod_evidence.py:rates`). Evaluations on the way tell when copying begins. The
text is read less than once. Some 20 minutes of 2 CPU cores.

`mod_evidence_longer.py:seeds` has three seeds of the main families with as many FLOPs, the dense
one at two sizes, since its best one may be larger than with 12 TFLOPs: does MoD pay there? Two
hours.

`mod_evidence_longer.py:context` has MoD again, with keys and values of all tokens in its routed
blocks: is it for what these do not see that it copies late? An hour.

`mod_evidence_longer.py:dense` has four seeds of the dense model with 12 TFLOPs, at the rate that is
best there among runs that do not copy: the rate that its first seed found is that of a run that
does. Twenty minutes.
"""

from efx.configs.sweeps import mod_evidence

DENSE = mod_evidence.DENSE
LONGER = 4 * mod_evidence.LARGEST


def get_sweep(part="longer"):
    parts = {"longer": _longer, "seeds": _seeds, "context": _context, "dense": _dense}
    return mod_evidence.part_of(parts, part) | dict(
        config="mod", equal="", columns={"a repeat gains (nats)": "eval/repeated/gain"}
    )


def _run(width, depth, rate, flops, changes):
    return mod_evidence.size_of(width, depth) | {
        "steps": 0,
        "train_flops": flops,
        "optim.learning_rate": rate,
        "evaluate.every": 2000,
        "evaluate.repeated_rows": 64,
        **changes,
    }


def _longer():
    half = _run(64, 8, 5e-3, LONGER, DENSE | {"model.depth": 4})
    return dict(
        seeds=(1,),
        runs={"dense, half as deep": half, "MoD 12.5%": _run(64, 8, 5e-3, LONGER, {})},
    )


def _seeds():
    return dict(
        seeds=(0, 1, 2),
        runs=_longer()["runs"]
        | {
            "dense, 64 wide": _run(64, 8, 2.5e-3, LONGER, DENSE),
            "dense, 48 wide": _run(48, 6, 5e-3, LONGER, DENSE),
        },
    )


def _context():
    changes = {"model.depth_routing.kv_for_skipped": True}
    run = _run(64, 8, 5e-3, LONGER, changes)
    return dict(seeds=(0, 1, 2), runs={"MoD 12.5%, keys of all tokens": run})


def _dense():
    run = _run(48, 6, 5e-3, mod_evidence.LARGEST, DENSE)
    return dict(seeds=(0, 1, 2, 3), runs={"dense, 48 wide": run})
