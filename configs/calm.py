"""CALM: a finished model reads the layers of others that were trained on other text.

All of it, three seeds, one table of held-out losses (about an hour on 2 CPU cores):

    python -m efx.composition.calm --config configs/calm.py --workdir runs/calm

Step by step, each an ordinary run:

    python -m efx.main --config configs/calm.py --workdir runs/anchor
    python -m efx.main --config configs/calm.py:augment --workdir runs/a \
        --config.data.source=text:a.txt
    python -m efx.main --config configs/calm.py:bridge --workdir runs/bridged \
        --config.model.anchor=runs/anchor "--config.model.augment=('runs/a',)" \
        --config.data.source=text:mixture.txt
    python -m efx.main --mode=sample --workdir runs/bridged

LLM Augmented LLMs: Expanding Capabilities through Composition (Bansal et al. 2024, arXiv
2401.02412). Anchor and augmenting models are finished runs of any family whose layers follow each
other, of any widths and depths, with one tokenizer. Their parameters are frozen; only the bridges
are trained, and with fresh bridges the whole computes the same as the anchor (try --mode=compose).

Knobs of variant `bridge`, all in `config.model` (defaults in efx/models/bridges.py):
    anchor, augment         run directories: the model that predicts, the models that it reads
    pairs                   number of layers of each, evenly spaced, that a bridge connects
    num_heads               of the bridges' cross-attention
    qk_norm, window,        of the same, as in config.model.attention; all off, as in the paper
    softcap
    norm                    of the states that a bridge reads: "none" (the paper), "rmsnorm",
                            "layernorm"

Variants, to be combined with commas:
    configs/calm.py:smoke       half a minute on a CPU
    configs/calm.py:augment     a smaller model, narrower and less deep than the anchor
    configs/calm.py:finetune    the anchor trained on: add --config.init.run=runs/anchor
    configs/calm.py:bridge      the bridges between finished runs

Hardware: 2 CPU cores.
"""

from efx.configs import common

_FURTHER = {
    "steps": 300,
    "optim.learning_rate": 1e-3,
    "optim.schedule.warmup_steps": 18,
    "sample.every": 0,
}


def _smoke(config):
    """The smoke changes; for bridges without the sizes, which are those of the runs."""
    bridged = config.model.family == "bridged"
    return {
        key: value
        for key, value in common.SMOKE.items()
        if not (bridged and key.startswith("model."))
    }


VARIANTS = {
    "smoke": _smoke,
    "augment": {
        "model.width": 96,
        "model.depth": 3,
        "sample.every": 0,
    },
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
    if "bridge" in arg.split(","):
        config.model = common.base("bridged").model
    return common.variant(config, arg, **VARIANTS)
