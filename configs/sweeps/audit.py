"""Depth-routing methods on one decoder, at equal tokens: what each recovers of depth, and its cost.

    python -m efx.studies.sweep --sweep configs/sweeps/audit.py --workdir runs/audit

Six blocks, 32 wide; text and tokenizer of `configs/sweeps/mod_evidence.py`. All runs get the tokens
of 4 TFLOPs of the dense model. Losses are of the causal decision. Each method is settings of
`config.model.depth_routing`; a new one is an entry of `METHODS`, and of a table of efx/routing if
it needs one. About 3 core-hours.
"""

from efx.configs.sweeps import mod_evidence

SIZE = mod_evidence.SIZES["32 wide, 6 deep"] | {"steps": 0, "train_flops": 4e12}
HALF, FULL = "dense, 3 deep", "dense, 6 deep"
MIDDLE = (1, 2, 3, 4)  # all blocks but the first and the last


def routed(**settings):
    return {f"model.depth_routing.{name}": value for name, value in settings.items()}


def control(score, **settings):
    return routed(score=score, gate="one", causal_decision="threshold", **settings)


THRESHOLD = routed(causal_decision="threshold")
RECURSION = THRESHOLD | routed(kind="recursion", gate="sigmoid")
# Changes of `mod:paper`: gate "identity", keys of selected tokens, 12.5% of them in blocks 1, 3, 5.
METHODS = {
    "MoD (paper)": {},
    "MoD, threshold": THRESHOLD,
    "MoD, predictor": routed(causal_decision="predictor"),
    "MoD of efx": {"config": "mod"},
    "attention only": THRESHOLD | routed(target="attention"),
    "MLP only": THRESHOLD | routed(target="mlp"),
    # Two shared blocks in two steps: six blocks for half of the tokens, four for the others.
    "recursion": RECURSION | {"model.depth": 4} | routed(capacity=(1.0, 0.5), slack=1.25),
    # arXiv 2506.21103 with one span: a token passes all of the middle or nothing of it.
    "skipped middle": RECURSION | routed(recursions=1, capacity=(1 / 3,)),
    # arXiv 2211.11586: each middle block drops random tokens in training, fewer and fewer.
    "random-LTD": control(
        "stochastic",
        blocks=MIDDLE,
        capacity=1.0,
        capacity_stages=((0.25, 0.125), (0.5, 0.25), (0.75, 0.5)),
    ),
    "token hash": control("token_hash"),
    "positions": control("position"),
    "norm": control("norm"),
    "Gumbel top-k": THRESHOLD | routed(score="gumbel", gate="sigmoid"),
}


def get_sweep():
    dense = {"config": "mod:dense"}
    runs = {FULL: dense, HALF: dense | {"model.depth": 3}} | METHODS
    return dict(
        config="mod:paper",
        seeds=(0, 1, 2, 3),
        equal="tokens",
        runs={name: SIZE | changes for name, changes in runs.items()},
        columns={"routed off costs": "eval/router/worth", "routed": "eval/router/routed_fraction"},
        depth=(HALF, FULL),
        certify=True,
    )
