"""Mixture-of-Depths-and-Experts (MoDE): tokens choose how much is computed and by which experts.

    python -m efx.main --config configs/mode.py --workdir runs/mode

Raposo et al. 2024 (arXiv 2404.02258) name two forms:
    staged (default)   every second block is routed, and the MLP of every block has experts: a
                       token first competes for the block, then chooses experts
    integrated         no block is routed; the router of the experts also has no-op experts, where
                       a token keeps its residual. Attention computes all tokens
Settings are `config.model.depth_routing` as in configs/mod.py and `config.model.mlp.moe` as in
configs/moe.py. Those of the integrated form:
    num_noop           no-op experts; as many as experts make about half of the choices free
    top_k, renormalise 1 and False: one choice, weighted by its probability, from which the router
                       learns the cost of skipping
    computed_fraction  fraction of the choices that are computed, for `config.train_flops`; routers
                       need not choose evenly, so use the mean of `moe/computed_fraction` of a run

The paper leaves open: the numbers of experts and no-ops, top_k, the capacity of experts (here a
fraction of the routed tokens), the losses, and the decision in generation (configs/mod.py).

Variants:
    smoke         about a minute on a CPU
    staged        the default
    integrated    no-op experts instead of routed blocks

The default takes some minutes on 2 CPU cores. `configs/moe.py` has the experts alone.
"""

from efx.configs import common

VARIANTS = {
    "smoke": {**common.SMOKE, "model.mlp.moe.expert_hidden": 88},
    "staged": {"model.depth_routing.kind": "mod"},
    "integrated": {
        "model.depth_routing.kind": "none",
        "model.mlp.moe.num_noop": 8,
        "model.mlp.moe.top_k": 1,
        "model.mlp.moe.renormalise": False,
    },
}


def get_config(arg=""):
    config = common.base()
    changes = {
        "model.depth": 4,
        "model.depth_routing.kind": "mod",
        "model.mlp.kind": "moe",
        "model.mlp.moe.num_experts": 8,
        "model.mlp.moe.top_k": 2,
        "model.mlp.moe.expert_hidden": 176,
    }
    common.apply(config, {**common.STDLIB, **changes})
    return common.variant(config, arg, **VARIANTS)
