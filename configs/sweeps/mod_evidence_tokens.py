"""What the router is worth at equal tokens, where equal FLOPs give controls with room fewer.

    python -m efx.studies.sweep --sweep configs/sweeps/mod_evidence_tokens.py \\
        --workdir runs/mod_evidence_tokens --jobs 2

A choice that is no top-k takes a number of tokens that differs by row, for which there is room:
`slack` times the capacity, all of it computed and counted as FLOPs, also where it is empty. So at
equal FLOPs (`mod_evidence.py:rates`) such a model reads 8% fewer tokens than MoD. Here it reads as
many: those that MoD does with 12 TFLOPs, 64 wide, each family with the rate that is best there.
Some 50 minutes of 2 CPU cores.
"""

from efx.configs.sweeps import mod_evidence


def get_sweep():
    size = mod_evidence.size_of(64, 8) | {
        "steps": 5997,  # of MoD with 12 TFLOPs
        "evaluate.repeated_rows": 64,
    }
    families = {
        "MoD 12.5%": ("topk", 5e-3),
        "types of tokens": ("token_hash", 2.5e-3),
        "threshold in training too": ("threshold", 5e-3),
    }
    return dict(
        config="mod",
        seeds=(0, 1, 2, 3),
        equal="",
        runs={
            name: size | mod_evidence.control(selection) | {"optim.learning_rate": rate}
            for name, (selection, rate) in families.items()
        },
        columns={"a repeat gains (nats)": "eval/repeated/gain"},
    )
