"""CALM: a frozen model reads layers of other frozen models through trained bridges.

LLM Augmented LLMs: Expanding Capabilities through Composition (Bansal et al. 2024, arXiv
2401.02412). The study, with three seeds and a table of held-out losses, about an hour on 2 CPU
cores:

    python -m efx.composition.calm --config configs/calm.py --workdir runs/calm

Its steps, each an ordinary run:

    python -m efx.main --config configs/calm.py --workdir runs/anchor
    python -m efx.main --config configs/calm.py:augment --workdir runs/a \
        --config.data.source=text:a.txt
    python -m efx.main --config configs/calm.py:bridge --workdir runs/bridged \
        --config.model.anchor=runs/anchor "--config.model.augment=('runs/a',)" \
        --config.data.source=text:mixture.txt
    python -m efx.main --mode=sample --workdir runs/bridged

The models share a tokenizer; families, widths and depths may differ. Untrained bridges change
nothing. efx/models/bridges.py has the settings of `config.model`.

Variants:
    smoke       half a minute on a CPU
    augment     a smaller model than the anchor
    finetune    trains the anchor further: add --config.init.run=runs/anchor
    bridge      trains bridges between finished runs
"""

from efx.configs import common

_FURTHER = {
    "steps": 300,
    "optim.learning_rate": 1e-3,
    "optim.schedule.warmup_steps": 18,
    "sample.every": 0,
}
VARIANTS = {
    "smoke": common.SMOKE,
    "augment": {"model.width": 96, "model.depth": 3, "sample.every": 0},
    "finetune": _FURTHER,
    "bridge": {
        **_FURTHER,
        "optim.learning_rate": 3e-3,
        "optim.frozen": r"(anchor_model|augment_models_\d+)/.*",
    },
}


def get_config(arg=""):
    config = common.base()
    common.apply(config, {**common.STDLIB, "data.eval_fraction": 0.1, "model.depth": 4})
    variants = dict(VARIANTS)
    if "bridge" in arg.split(","):
        config.model = common.base("bridged").model
        # The runs decide the sizes.
        smoke = {k: value for k, value in common.SMOKE.items() if not k.startswith("model.")}
        variants["smoke"] = smoke
    return common.variant(config, arg, **variants)
