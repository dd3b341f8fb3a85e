"""Which routed blocks do something: gates, rates, targets and keys, where depth pays.

    python -m efx.studies.sweep --sweep configs/sweeps/gates.py --workdir runs/gates
    python -m efx.studies.sweep --sweep configs/sweeps/gates.py:best --workdir runs/gates_best

configs/mod.py:quick,published (Muon), 48 wide, 2,000 steps: 4.1M bytes of the standard library.
Eight dense blocks are ahead of four by some 0.06 nats there. All runs have equal tokens, width and
order of data. Parts, after a colon:

    (none)     every arm, one seed
    best       five arms and the dense models, four seeds
    context    rows of 1,024 tokens instead of 256, one seed
"""

from efx.configs.mod import routed
from efx.errors import UsageError

BASE = {
    "steps": 2000,
    "model.width": 48,
    "data.batch_size": 8,
    "evaluate.every": 500,
    "checkpoint.every": 1000,
    "sample.every": 0,
}
DENSE = {"model.depth_routing.kind": "none"}
FAST = {"optim.router_rate": 1.0}
SLOW = {"optim.router_rate": 0.1}
POSITION = {"model.depth_routing.score": "position", "model.depth_routing.gate": "one"}
ADAMW = {"optim.name": "adamw", "optim.learning_rate": 2e-3}
# The square root of the capacity, for blocks that see an eighth of the tokens.
SLOW_BLOCKS = SLOW | {"optim.lr_multipliers": ((r"layers/block_[1357]/(?!router).*", 0.125**0.5),)}


HALF, FULL = "dense, 4 deep", "dense, 8 deep"
DEPTH = {HALF: DENSE | {"model.depth": 4}, FULL: DENSE}
ARMS = {
    "sigmoid, slow router": SLOW,
    "MLP, slow router": SLOW | routed(target="mlp"),
    "MLP without attention, slow router": SLOW | routed(target="mlp_only"),
    "all keys, slow router": SLOW | routed(kv_for_skipped=True),
    "MLP, positions": POSITION | routed(target="mlp"),
    "all keys, identity, slow router": SLOW | routed(kv_for_skipped=True, gate="identity"),
    "all keys, positions": POSITION | routed(kv_for_skipped=True),
    "identity, slow router": SLOW | routed(gate="identity"),
    "sigmoid": FAST,
    "last four blocks, slow router": SLOW | routed(blocks=(4, 5, 6, 7)),
    "MLP of the last four blocks, slow router": SLOW | routed(target="mlp", blocks=(4, 5, 6, 7)),
    "positions": POSITION,
    "every block, slow router": SLOW | routed(every=1),
    "MLP of every block, slow router": SLOW | routed(target="mlp", every=1),
    "AdamW, sigmoid": FAST | ADAMW,
    "AdamW, dense, 8 deep": ADAMW | DENSE,
    "AdamW, dense, 4 deep": ADAMW | DENSE | {"model.depth": 4},
    "gate one, auxiliary loss": FAST | routed(gate="one", causal_decision="aux_loss"),
    "identity, auxiliary loss (paper)": FAST | routed(gate="identity", causal_decision="aux_loss"),
    "sigmoid, normalised slow router": SLOW | routed(router_norm="rms"),
    "router with weight decay": FAST | {"optim.decay": r".*(kernel|embedding|router)"},
    "slow router, slow routed blocks": SLOW_BLOCKS,
    "slow router, capacity from 1 to 1/8": SLOW
    | routed(capacity_stages=((0.15, 1.0), (0.3, 0.5), (0.45, 0.25))),
    "tanh, slow router": SLOW | routed(gate="tanh"),
    "twice sigmoid, slow router": SLOW | routed(gate="twice_sigmoid"),
    "attention, slow router": SLOW | routed(target="attention"),
}
BEST = (
    "all keys, identity, slow router",
    "identity, auxiliary loss (paper)",
    "all keys, slow router",
    "sigmoid",
    "identity, slow router",
)
LONG = {"data.seq_len": 1024, "data.batch_size": 2}
CONTEXT = "sigmoid, slow router", "all keys, slow router", "MLP, slow router"
COLUMNS = {
    "worth": "eval/router/worth",
    "loss by top-k": "eval/loss_topk",
    "gate": "eval/router/gate_median",
    "routed": "eval/router/routed_fraction",
}


def get_sweep(part=""):
    if part not in ("", "best", "context"):
        raise UsageError(f"gates.py:{part}: use best, context or no part")
    names = {"": ARMS, "best": BEST, "context": CONTEXT}[part]
    arms = DEPTH | {name: ARMS[name] for name in names}
    if part == "context":
        arms = {name: changes | LONG for name, changes in arms.items()}
    return dict(
        config="configs/mod.py:quick,published",
        seeds=(0, 1, 2, 3) if part == "best" else (0,),
        equal="",
        runs={name: BASE | changes for name, changes in arms.items()},
        columns=COLUMNS,
        depth=(HALF, FULL),
    )
