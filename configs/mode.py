"""Mixture-of-Depths-and-Experts (MoDE): tokens choose how much is computed and by which experts.

    python -m efx.main --config configs/mode.py --workdir runs/mode

Raposo et al. 2024 (arXiv 2404.02258, on MoDE), which names two forms:
    staged (default)   every second block is a Mixture-of-Depths block, and the MLP of every block
                       a Mixture of Experts: a token first competes for the block, attention
                       included, then chooses experts among the tokens that got in
    integrated         no Mixture-of-Depths; routers also select no-op experts, where a token
                       keeps its residual. Attention sees every token
Knobs: `config.model.depth_routing` as in configs/mod.py, `config.model.mlp.moe` as in
configs/moe.py; of these for the integrated form
    num_noop           number of no-op experts. With as many as experts, half of the assignments
                       are free if the load is balanced: `load_balance` counts a no-op like any
                       expert (a mean over layers: for the convention of papers see
                       configs/moe.py)
    top_k, renormalise 1 and False: one choice, an expert or none, weighted by its probability,
                       from which the router learns the cost of skipping
    capacity_factor    slots of an expert over its mean load of k T / (E + num_noop) choices, so
                       that no-op experts shrink the experts' buffers, which saves the FLOPs
    computed_fraction  the fraction of choices by which FLOPs are counted, and so the steps of
                       `config.train_flops`. Routers need not choose experts and no-ops equally:
                       for an equal budget, give the mean of a run over its training
                       (`moe/computed_fraction` in metrics.jsonl; evaluations print theirs)

What the paper leaves open: the number of experts and of no-op ones, top-k, the capacity of experts
inside a routed block (here a fraction of the routed tokens, elsewhere of a sequence), losses, and
the decision in generation (here as in configs/mod.py; token choice of experts is causal already).
The paper finds that the integrated form does better than leaving tokens out by small capacity.

Variants, to be combined with commas:
    configs/mode.py:smoke         about a minute on a CPU
    configs/mode.py:staged        the default, by name
    configs/mode.py:integrated    no-op experts in place of routed blocks
    configs/mode.py:moe           neither: the Mixture of Experts alone

Hardware: 2 CPU cores.
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
    "moe": {"model.depth_routing.kind": "none"},
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            **common.STDLIB,
            "model.depth": 4,
            "model.depth_routing.kind": "mod",
            "model.depth_routing.causal": "threshold",
            "model.mlp.kind": "moe",
            "model.mlp.moe.num_experts": 8,
            "model.mlp.moe.top_k": 2,
            "model.mlp.moe.expert_hidden": 176,
        },
    )
    return common.variant(config, arg, **VARIANTS)
