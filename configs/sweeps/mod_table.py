"""Mixture-of-Depths, Mixture of Experts and both together against dense, at equal training FLOPs.

    python -m efx.studies.sweep --sweep configs/sweeps/mod_table.py --workdir runs/mod_table

An hour or so on 2 CPU cores. One learning rate and one size for all rows: a look at the family,
not a ranking. `mod_table.py:default_size` compares `mod:published` with its dense twins.
"""

from efx.configs import mode
from efx.errors import UsageError

# Eight layers, 32 wide, context 256, bytes of Python's standard library: about 17 training tokens a
# parameter for the dense model. With far fewer, any model that skips more looks better.
SIZE = {
    "model.width": 32,
    "model.attention.num_heads": 2,
    "steps": 0,
    "train_flops": 2e12,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}
DENSE = {"model.depth_routing.kind": "none"}
STOCHASTIC = {"model.depth_routing.score": "stochastic", "model.depth_routing.gate": "one"}
# Two of eight experts a token, each half as wide as the dense MLP: a token's MLP costs the same.
EXPERTS = {
    "model.mlp.kind": "moe",
    "model.mlp.moe.num_experts": 8,
    "model.mlp.moe.top_k": 2,
    "model.mlp.moe.expert_hidden": 48,
}
# Routers do not choose experts and no-ops equally, and full experts drop tokens. FLOPs are counted
# by the measured fraction of computed choices.
INTEGRATED = mode.VARIANTS["integrated"] | {"model.mlp.moe.computed_fraction": 0.4}
RUNS = {
    "dense": DENSE,
    # A forward pass costs about as much as that of a stack with 12.5% in every second block.
    "dense, half as deep": DENSE | {"model.depth": 4},
    "MoD 12.5%, every second block": {},
    "MoD 25%, every second block": {"model.depth_routing.capacity": 0.25},
    "MoD 50%, every second block": {"model.depth_routing.capacity": 0.5},
    "MoD 12.5%, every block": {"model.depth_routing.every": 1},
    "stochastic 12.5%, every second block": STOCHASTIC,
    "threshold in training too, 12.5%": {
        "model.depth_routing.train_selection": "threshold",
        "model.depth_routing.slack": 1.25,
    },
    "MoD 12.5%, auxiliary loss": {"model.depth_routing.causal_decision": "aux_loss"},
    "MoD 12.5%, predictor": {"model.depth_routing.causal_decision": "predictor"},
    "recursion, 3 steps": {
        "model.depth_routing.kind": "recursion",
        "model.depth_routing.recursions": 3,
        "model.depth_routing.capacity": "(1.0,0.6667,0.3333)",
        "model.depth": 5,
    },
    "MoE, 2 of 8 experts": DENSE | EXPERTS,
    # A forward pass costs about as much as that of staged MoDE.
    "MoE, 2 of 8 experts, half as deep": DENSE | EXPERTS | {"model.depth": 4},
    "staged MoDE: MoD 12.5% around MoE": EXPERTS,
    "integrated MoDE: 8 experts, 8 no-ops": DENSE | EXPERTS | INTEGRATED,
}


# `configs/mod.py:published` as it is, against its dense twins.
DEFAULT_SIZE = {
    "MoD 12.5%": {},
    "stochastic 12.5%": STOCHASTIC,
    "dense": DENSE,
    "dense, half as deep": DENSE | {"model.depth": 4},
}


def get_sweep(part="small"):
    if part not in ("small", "default_size"):
        raise UsageError(f"part {part!r}: expected small or default_size")
    is_small = part == "small"
    return dict(
        config="mod:published",
        seeds=(0, 1, 2),
        equal="" if is_small else "flops",  # `train_flops` is the same in all small runs
        runs={name: SIZE | changes for name, changes in RUNS.items()} if is_small else DEFAULT_SIZE,
        columns={
            "loss under training's selection": "eval/loss_topk",
            "accuracy of the decision": "eval/router/accuracy",
            "selected fraction": "eval/router/routed_fraction",
        },
    )
