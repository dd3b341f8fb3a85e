"""Mixture of Experts: every block's MLP is eight experts, of which a token visits two.

    python -m efx.main --config configs/moe.py --workdir runs/moe

Token choice after Switch Transformers (Fedus et al. 2021, arXiv 2101.03961) with two experts a
token; the variant `expert_choice` after Zhou et al. 2022 (arXiv 2202.09368). Knobs, all in
`config.model.mlp.moe`, defaults in efx/layers/config.py:
    num_experts, top_k   E and k
    expert_hidden        width of one expert: 176, half of the dense twin's 352
    capacity_factor      an expert has ceil(k T factor / (E + num_noop)) slots for a sequence,
                         first come first served; other tokens keep their residual and are counted
                         (moe/dropped_fraction)
    renormalise          the chosen weights sum to one. False: the probabilities, as in Switch,
                         which a router with top_k=1 needs to learn from the main loss
    every                one block in `every` has experts
    num_shared           shared experts that see every token
    num_noop             no-op experts, see configs/mode.py
    router               "token_choice", "expert_choice"
    capacity, slack      expert choice: an expert takes ceil(capacity T) tokens of a sequence in
                         training; the causal decision has slack times as many slots
Losses, in `config.losses`: `load_balance` (0.01, as Switch), `router_z` (0.001, as ST-MoE, Zoph et
al. 2022, arXiv 2202.08906), `expert_bce` (expert choice: 0.01).

What the papers leave open: capacity is counted per sequence here, not over the batch, so that a
row's result does not depend on the other rows; no noise is added to the router. Expert choice
looks ahead in the sequence, which its paper does not solve for generation: here its gate is a
sigmoid and its causal decision logit > 0, as for Mixture-of-Depths. `eval/loss` is under that
decision, `eval/loss_topk` under the selection of training.

Variants, to be combined with commas:
    configs/moe.py:smoke            about a minute on a CPU
    configs/moe.py:expert_choice    experts choose tokens: as many slots, all filled
    configs/moe.py:dense            the dense twin: an MLP at the cost of two experts

Hardware: 2 CPU cores.
"""

from efx.configs import common

VARIANTS = {
    "smoke": {**common.SMOKE, "model.mlp.hidden": 176, "model.mlp.moe.expert_hidden": 88},
    "expert_choice": {"model.mlp.moe.router": "expert_choice", "model.mlp.moe.capacity": 0.25},
    "dense": {"model.mlp.kind": "dense"},
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            **common.STDLIB,
            "model.depth": 4,
            "model.mlp.kind": "moe",
            "model.mlp.hidden": 352,
            "model.mlp.moe.num_experts": 8,
            "model.mlp.moe.top_k": 2,
            "model.mlp.moe.expert_hidden": 176,
        },
    )
    return common.variant(config, arg, **VARIANTS)
