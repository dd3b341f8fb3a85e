"""PHATGOOSE: experts that were trained apart, composed token by token by their gates.

All of it, three seeds, one table of held-out losses (under an hour on 2 CPU cores):

    python -m efx.composition.phatgoose --config configs/phatgoose.py --workdir runs/phatgoose

Step by step, each an ordinary run:

    python -m efx.main --config configs/phatgoose.py --workdir runs/base
    python -m efx.main --config configs/phatgoose.py:adapter --workdir runs/a_adapter \
        --config.init.run=runs/base --config.data.source=text:a.txt
    python -m efx.main --config configs/phatgoose.py:gate --workdir runs/a \
        --config.init.run=runs/a_adapter --config.data.source=text:a.txt
    python -m efx.main --config configs/phatgoose.py:compose --mode=compose --workdir runs/both \
        --config.init.run=runs/base "--config.adapter.experts=('runs/a','runs/b')"
    python -m efx.main --mode=sample --workdir runs/both

Learning to Route Among Specialized Experts for Zero-Shot Generalization (Muqeeth et al. 2024, arXiv
2402.05859). The base may be a run of any family: give its own config file's `config.model`, or its
run directory's, with these variants' values. docs/composition_adapters.md has the formulas.

Knobs, all in `config.adapter` (defaults in efx/models/adapters.py):
    kind, rank, scale       "lora" or "mlp", their width, their factor
    sites                   regex of the linear layers that have one
    gate                    one adapter: times sigmoid(v.u)
    experts, routing, top_k run directories to be composed, "topk", "uniform" or "inclusion"
    capacity, slack         inclusion: fraction of a sequence that an expert takes
The paper: rank 16, 1000 steps of AdamW at 5e-3 for an adapter and 100 for its gates, top 2.

Variants, to be combined with commas:
    configs/phatgoose.py:smoke      half a minute on a CPU
    configs/phatgoose.py:adapter    trains only an adapter for a finished base
    configs/phatgoose.py:gate       trains only the gates of a finished adapter
    configs/phatgoose.py:compose    experts by their gates, nothing to train (--mode=compose)
    configs/phatgoose.py:uniform    the mean of all experts, nothing to train (--mode=compose)
    configs/phatgoose.py:joint      continues to train the gates of all experts together, through
                            the composition
    configs/phatgoose.py:inclusion  trains an entrance of each expert, which may leave it out
"""

from efx.configs import common

_ADAPTER = {
    "steps": 300,
    "adapter.kind": "lora",
    "optim.learning_rate": 5e-3,
    "optim.schedule.kind": "constant",
    "optim.schedule.warmup_steps": 18,
    "sample.every": 0,
}
_COMPOSE = {
    **_ADAPTER,
    "steps": 100,
    "init.missing": r".*/adapter/.*",
    "optim.frozen": r"(?!.*/adapter/gate$).*",
    "optim.schedule.warmup_steps": 6,
}

VARIANTS = {
    "smoke": common.SMOKE,
    "adapter": {
        **_ADAPTER,
        "init.missing": r".*/adapter/.*",
        "optim.frozen": r"(?!.*/adapter/).*",
    },
    "gate": {
        **_COMPOSE,
        "adapter.gate": True,
        "init.missing": r".*/adapter/gate",
    },
    "compose": _COMPOSE,
    "uniform": {
        **_COMPOSE,
        "adapter.routing": "uniform",
        "optim.frozen": r"(?!.*/adapter/).*",
    },
    "joint": _COMPOSE,
    "inclusion": {
        **_COMPOSE,
        "adapter.routing": "inclusion",
        "optim.frozen": r"(?!.*/adapter/entrance).*",
    },
}


def get_config(arg=""):
    config = common.base()
    common.apply(config, {**common.STDLIB, "data.eval_fraction": 0.1, "model.depth": 4})
    return common.variant(config, arg, **VARIANTS)
