"""Arms and budgets of the pre-registered study, docs/results/mod_study.md.

    python -m efx.studies.compare run results/mod_study_12.json --jobs 2
    python -m efx.studies.sweep --sweep configs/sweeps/mod_study.py --workdir runs/explored --jobs 2
    python -m efx.main --config configs/sweeps/mod_study.py:12,recipe --workdir runs/recipe

Two rungs: 4 (TFLOPs, 32 wide), before copying begins, and 12 (48 wide), where some runs begin; and
for one GPU 1000 (192 wide, on more text), long after it. The text is the code of packages of pure
Python, the same on every machine; the plans have its hash. Arms:

    dense           9 dense blocks
    recipe          every second of 14 blocks computes 12.5%, by the recipe of gates.md
    paper           every second of 16 blocks computes 12.5%, by the paper's recipe
    positions       `recipe` with tokens selected by position, without a router
    attention       exploratory: only the attention of every second of 11 blocks is routed
    mlp             exploratory: only the MLP of every second of 11 blocks is routed
    recursion       exploratory: four blocks in three steps between the first and the last
    skipped         exploratory: the middle 25 of 27 blocks compute a third of the tokens

At one rung all forward passes cost the same within 5%; runs have equal FLOPs. The sweep trains the
four exploratory arms at 12 TFLOPs, without a search of rates: `attention` and `mlp` at the recipe's
rate, the others at the rate of the dense and the paper's model.
"""

import importlib.metadata
import sysconfig

from efx.configs import common, mod
from efx.errors import UsageError

VERSIONS = {"networkx": "3.6.1", "sympy": "1.14.0"}
VERSIONS_1000 = VERSIONS | {"pandas": "3.1.1", "transformers": "5.23.0"}


def text(names):
    folder = sysconfig.get_paths()["purelib"]
    return f"mix:{','.join(f'text:{folder}/{name}/**/*.py' for name in names)}"


BASE = {
    "steps": 0,
    "data.source": text(VERSIONS),
    "data.split": "documents",
    "data.eval_fraction": 0.02,
    "data.tokenizer": "bpe:512",
    "data.batch_size": 4,
    "model.mlp.multiple_of": 8,
    "model.initialisation": "spike_no_more",
    "optim.learning_rate": 5e-3,
    "optim.schedule.warmup_steps": 0,
    "optim.schedule.warmup_fraction": 0.1,
    "checkpoint.every": 1000,
    "evaluate.every": 0,
    "evaluate.repeated_rows": 64,
    "sample.every": 0,
}
VARIANTS = {
    "4": {"model.width": 32, "model.attention.num_heads": 2, "train_flops": 4e12},
    "12": {"model.width": 48, "model.attention.num_heads": 4, "train_flops": 1.2e13},
    "1000": {
        "model.width": 192,
        "model.attention.num_heads": 6,
        "train_flops": 1e15,
        "train.dtype": "bfloat16",
        "data.source": text(VERSIONS_1000),
        "data.batch_size": 64,
        "optim.learning_rate": 3e-3,
    },
    "dense": mod.VARIANTS["dense"] | {"model.depth": 9},
    "recipe": {"model.depth": 14},
    # Ten times the default: the auxiliary loss is to count beside the gradient through the gate.
    "paper": mod.VARIANTS["paper"] | {"model.depth": 16, "losses.router_bce": 0.1},
    "positions": {
        "model.depth": 14,
        "model.depth_routing.score": "position",
        "model.depth_routing.gate": "one",
    },
    "attention": {"model.depth": 11, "model.depth_routing.target": "attention"},
    "mlp": {
        "model.depth": 11,
        "model.depth_routing.target": "mlp",
        "model.depth_routing.kv_for_skipped": False,
    },
    "recursion": mod.VARIANTS["recursion"] | {"model.depth": 6},
    "skipped": mod.PUBLISHED  # arXiv 2506.21103
    | {"model.depth": 27}
    | mod.routed(kind="recursion", recursions=1, capacity=(1 / 3,)),
}


def get_config(arg=""):
    versions = VERSIONS_1000 if "1000" in arg.split(",") else VERSIONS
    for name, version in versions.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != version:
            raise UsageError(
                f"the text is the code of {name} {version}, here it is {found}; "
                f"pip install {name}=={version}"
            )
    config = mod.get_config()
    common.apply(config, BASE)
    return common.variant(config, arg, **VARIANTS)


def get_sweep():
    rates = {"attention": 0.01, "mlp": 0.01, "recursion": 0.005, "skipped": 0.005}
    return dict(
        config="configs/sweeps/mod_study.py:12",
        seeds=(0, 1, 2, 3),
        equal="",
        runs={
            name: {"config": f"configs/sweeps/mod_study.py:12,{name}", "optim.learning_rate": rate}
            for name, rate in rates.items()
        },
        columns={
            "worth": "eval/router/worth",
            "gate": "eval/router/gate_median",
            "gain": "eval/repeated/gain",
            "uncopied": "eval/uncopied_loss",
        },
    )
