"""Depth-routing methods on one decoder, at equal tokens: what each recovers of depth, and its cost.

    python -m efx.studies.sweep --sweep configs/sweeps/audit.py --workdir runs/audit

Six blocks of the first rung of `configs/sweeps/mod_study.py`: 32 wide, its text and tokenizer. All
runs get the tokens of 4 TFLOPs of the dense model. Losses are of the causal decision. A method is
settings, and an entry of a table of efx/routing if it needs one. About 3 core-hours.
"""

from efx.configs import mod
from efx.configs.mod import routed

HALF, FULL = "dense, 3 deep", "dense, 6 deep"
# Gate "identity", keys of selected tokens, 12.5% of them in blocks 1, 3 and 5.
PAPER = mod.VARIANTS["paper"]
THRESHOLD = PAPER | routed(causal_decision="threshold")
CONTROL = THRESHOLD | routed(gate="one")  # without a router to train
SIGMOID = THRESHOLD | routed(gate="sigmoid")
METHODS = {
    "MoD (paper)": PAPER | {"losses.router_bce": 0.1},  # as in the study
    "MoD, threshold": THRESHOLD,
    "MoD, predictor": PAPER | routed(causal_decision="predictor"),
    "MoD, default of efx": {},
    "attention only": THRESHOLD | routed(target="attention"),
    "MLP only": THRESHOLD | routed(target="mlp"),
    # Two shared blocks in two steps: six blocks for half of the tokens, four for the others.
    "recursion": SIGMOID
    | {"model.depth": 4}
    | routed(kind="recursion", capacity=(1.0, 0.5), slack=1.25),
    # arXiv 2506.21103 with one span: a token passes blocks 1 to 4, or none of them.
    "skipped middle": SIGMOID | routed(kind="recursion", recursions=1, capacity=(1 / 3,)),
    # arXiv 2211.11586: blocks 1 to 4 drop random tokens in training, fewer in each quarter of it.
    "random-LTD": CONTROL
    | routed(
        score="stochastic",
        blocks=(1, 2, 3, 4),
        capacity=1.0,
        capacity_stages=((0.25, 0.125), (0.5, 0.25), (0.75, 0.5)),
    ),
    "token hash": CONTROL | routed(score="token_hash"),
    "positions": CONTROL | routed(score="position"),
    "norm of the stream": CONTROL | routed(score="norm"),
    "Gumbel top-k": SIGMOID | routed(score="gumbel"),
}


def get_sweep():
    dense = mod.VARIANTS["dense"]
    runs = {FULL: dense, HALF: dense | {"model.depth": 3}} | METHODS
    return dict(
        config="configs/sweeps/mod_study.py:4",
        seeds=(0, 1, 2, 3),
        equal="tokens",
        runs={name: {"model.depth": 6} | changes for name, changes in runs.items()},
        columns={"worth": "eval/router/worth", "routed": "eval/router/routed_fraction"},
        depth=(HALF, FULL),
        certify=True,
    )
