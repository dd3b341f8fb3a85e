"""PHATGOOSE: experts trained apart, composed token by token by their gates.

Learning to Route Among Specialized Experts for Zero-Shot Generalization (Muqeeth et al. 2024, arXiv
2402.05859). The study, with three seeds and a table of held-out losses, under an hour on 2 CPU
cores:

    python -m efx.composition.phatgoose --config configs/phatgoose.py --workdir runs/phatgoose

Its steps, each an ordinary run:

    python -m efx.main --config configs/phatgoose.py --workdir runs/base
    python -m efx.main --config configs/phatgoose.py:adapter --workdir runs/a_adapter \
        --config.init.run=runs/base --config.data.source=text:a.txt
    python -m efx.main --config configs/phatgoose.py:gate --workdir runs/a \
        --config.init.run=runs/a_adapter --config.data.source=text:a.txt
    python -m efx.main --config configs/phatgoose.py:compose --mode=compose --workdir runs/both \
        --config.init.run=runs/base "--config.adapter.experts=('runs/a','runs/b')"
    python -m efx.main --mode=sample --workdir runs/both

The base may be of any family: use its own config file with the settings below. The paper has
adapters of rank 16, trained for 1000 steps of AdamW at 5e-3, their gates for 100, and top 2.
efx/models/adapters.py has the settings of `config.adapter` and the formulas.

Variants:
    smoke       half a minute on a CPU
    adapter     trains an adapter of a finished base
    gate        trains the gates of a finished adapter
    compose     composes experts by their gates, untrained (--mode=compose)
    uniform     the mean of all experts, untrained (--mode=compose)
    joint       trains the gates of all experts together, through the composition
    inclusion   trains an entrance of each expert, which selects its tokens
"""

from efx.configs import common

_ADAPTER = {
    "steps": 300,
    "adapter.kind": "lora",
    "optim.learning_rate": 5e-3,
    "optim.schedule.kind": "constant",
    "optim.schedule.warmup_steps": 18,
    "init.missing": r".*/adapter/.*",
    "optim.frozen": r"(?!.*/adapter/).*",
    "sample.every": 0,
}
_COMPOSE = {
    **_ADAPTER,
    "steps": 100,
    "optim.frozen": r"(?!.*/adapter/gate$).*",
    "optim.schedule.warmup_steps": 6,
}
VARIANTS = {
    "smoke": common.SMOKE,
    "adapter": _ADAPTER,
    "gate": {**_COMPOSE, "adapter.gate": True, "init.missing": r".*/adapter/gate"},
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
