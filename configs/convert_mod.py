"""A finished dense model becomes a Mixture-of-Depths: the parent's parameters, routers that start
from zero, and a capacity that falls from 1 while it trains.

    python -m efx.main --mode=convert --from runs/dense --to mod --workdir runs/converted
    python -m efx.main --workdir runs/converted --config.steps=200

The first command makes the run directory at step 0, the second trains. Without --config the
settings are the parent's with those of `RECIPE` below; with `--config convert_mod` data and
training are this file's and the model is the parent's:

    python -m efx.main --mode=convert --from runs/dense --to mod --workdir runs/distilled \\
        --config configs/convert_mod.py:distill

Routers start at zero, where the gate "twice_sigmoid", 2 sigmoid(r), is exactly 1: at capacity 1
step 0 is the parent. While all tokens are computed, routers learn by the gate which of them gain by
it; then the capacity falls in stages. Evaluation and sampling decide by a running quantile of the
scores, which follows faster than in a long run (`threshold_decay`).

Knobs: `config.model.depth_routing` as in configs/mod.py, `config.losses.distill` (the weight of
KL(parent || model); the parent's forward pass is then part of the step and of its FLOPs),
`config.train.teacher` (the parent, unless another model is to be followed).

Variants, to be combined with commas:
    configs/convert_mod.py:smoke      half a minute on a CPU
    configs/convert_mod.py:distill    follows the parent's distribution, too
    configs/convert_mod.py:routers    trains only the routers
    configs/convert_mod.py:adapters   trains the routers and a LoRA adapter of every linear layer
    configs/convert_mod.py:parent     a dense model to be converted, 64 wide
    configs/convert_mod.py:scratch    a Mixture-of-Depths that is no conversion, for comparison

Hardware: 2 CPU cores. The study: `python -m efx.studies.conversion`, docs/bring_your_model.md.
"""

from efx.configs import common, mod
from efx.routing.config import DepthRoutingConfig
from efx.routing.parameters import params_pattern

# Settings of a routed block that conversion changes.
_CONVERSION = {
    "model.depth_routing.gate": "twice_sigmoid",
    "model.depth_routing.threshold_decay": 0.9,
    # All tokens in the first twentieth of the steps, half in the second, then `capacity`.
    "model.depth_routing.capacity_stages": ((0.05, 1.0), (0.1, 0.5)),
}
ROUTING = {**mod.ROUTING, **_CONVERSION}
# How training begins on parameters that are trained already.
RECIPE = {"optim.schedule.warmup_steps": 5}
_NEW = params_pattern()
_FROM_SCRATCH = {
    "steps": 0,
    "train_flops": 2e13,
    "optim.schedule.warmup_steps": 50,
    **{key: getattr(DepthRoutingConfig(), key.rpartition(".")[2]) for key in _CONVERSION},
}

VARIANTS = {
    "smoke": {**common.SMOKE, "train_flops": 0.0},
    "distill": {"losses.distill": 1.0},
    "routers": {"optim.frozen": rf"(?!{_NEW}$).*"},
    "adapters": {
        "adapter.kind": "lora",
        "optim.frozen": rf"(?!({_NEW}|.*/adapter/.*)$).*",
    },
    "parent": {**_FROM_SCRATCH, "model.depth_routing.kind": "none"},
    "scratch": _FROM_SCRATCH,
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            **common.STDLIB,
            "model.width": 64,
            "model.depth": 8,
            **ROUTING,
            **RECIPE,
            "steps": 200,
        },
    )
    return common.variant(config, arg, **VARIANTS)
