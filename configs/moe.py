"""Mixture of Experts: every MLP is eight experts, two of which compute a token.

    python -m efx.main --config configs/moe.py --workdir runs/moe

Token choice after Switch Transformers (Fedus et al. 2021, arXiv 2101.03961), with two experts a
token; the variant `expert_choice` after Zhou et al. 2022 (arXiv 2202.09368). Capacity is counted
within a row and the router has no noise, so the logits of a prefix depend on its tokens alone.
Expert choice looks ahead in training; its causal decision is logit > 0, as for Mixture-of-Depths.
`eval/loss` is measured under that decision, `eval/loss_topk` under the selection of training.

efx/layers/config.py has the settings of `config.model.mlp.moe`. The main ones:
    num_experts, top_k      E and k
    expert_hidden           width of an expert: 176, half of the dense MLP's 352
    capacity_factor         an expert drops tokens beyond ceil(k n factor / (E + num_noop)) + 4 of
                            the first n; dropped tokens keep their residual
    renormalise             the selected weights sum to one; with top_k=1 use False, as Switch does
    every                   one block in `every` has experts
    num_shared, num_noop    experts that compute all tokens, or none (configs/mode.py)
Losses, in `config.losses`: `load_balance`, `router_z`, and `expert_bce` for expert choice. They are
means over layers; Switch (0.01) and ST-MoE (0.001; Zoph et al. 2022, arXiv 2202.08906) sum over
layers, so multiply their coefficients by the number of layers with experts, here 4.

Variants:
    smoke            about a minute on a CPU
    expert_choice    experts select tokens: as many slots, all filled
    dense            an MLP at the cost of two experts

The default takes some minutes on 2 CPU cores.
"""

from efx.configs import common

VARIANTS = {
    "smoke": {**common.SMOKE, "model.mlp.hidden": 176, "model.mlp.moe.expert_hidden": 88},
    "expert_choice": {"model.mlp.moe.router": "expert_choice", "model.mlp.moe.capacity": 0.25},
    "dense": {"model.mlp.kind": "dense"},
}


def get_config(arg=""):
    config = common.base()
    changes = {
        "model.depth": 4,
        "model.mlp.kind": "moe",
        "model.mlp.hidden": 352,
        "model.mlp.moe.num_experts": 8,
        "model.mlp.moe.top_k": 2,
        "model.mlp.moe.expert_hidden": 176,
    }
    common.apply(config, {**common.STDLIB, **changes})
    return common.variant(config, arg, **VARIANTS)
