"""Mixture-of-Depths from a finished dense model.

    python -m efx.main --mode=convert --from runs/dense --to mod --workdir runs/converted
    python -m efx.main --workdir runs/converted --config.steps=200

The first command writes step 0 of the run, the second trains it. The model, and without --config
all other settings, are those of the dense parent; `RECIPE` and `ROUTING` below are added. With
--config, data and training are this file's:

    python -m efx.main --mode=convert --from runs/dense --to mod --workdir runs/distilled \\
        --config configs/convert_mod.py:distill

Routers start at zero, where the gate "twice_sigmoid", 2 sigmoid(score), is exactly 1: with capacity
1, step 0 computes what the parent does. The routers learn while all tokens are computed; then the
capacity falls in stages. Thresholds follow the scores faster than in a long run.

Variants:
    smoke       half a minute on a CPU
    distill     adds KL(parent || model) to the loss, `config.losses.distill`; the parent's forward
                pass is then part of the step and of its FLOPs
    routers     trains only the routers
    adapters    trains the routers and a LoRA adapter of every linear layer
    parent      a dense model to convert, 64 wide
    scratch     Mixture-of-Depths without a parent, for comparison

Two CPU cores suffice. The study is `python -m efx.studies.conversion`; see also
docs/bring_your_model.md.
"""

from efx.configs import common, mod
from efx.routing.config import DepthRoutingConfig
from efx.routing.parameters import params_pattern

_CONVERSION = {
    "model.depth_routing.gate": "twice_sigmoid",
    "model.depth_routing.kv_for_skipped": False,
    "model.depth_routing.threshold_decay": 0.9,
    # All tokens in the first twentieth of the steps, half in the second, then `capacity`.
    "model.depth_routing.capacity_stages": ((0.05, 1.0), (0.1, 0.5)),
}
ROUTING = {**mod.ROUTING, **_CONVERSION}
RECIPE = {"optim.schedule.warmup_steps": 5}  # the parameters are trained already
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
    "adapters": {"adapter.kind": "lora", "optim.frozen": rf"(?!({_NEW}|.*/adapter/.*)$).*"},
    "parent": {**_FROM_SCRATCH, "model.depth_routing.kind": "none"},
    "scratch": _FROM_SCRATCH,
}


def get_config(arg=""):
    config = common.base()
    changes = {"model.width": 64, "model.depth": 8, "steps": 200}
    common.apply(config, {**common.STDLIB, **changes, **ROUTING, **RECIPE})
    return common.variant(config, arg, **VARIANTS)
