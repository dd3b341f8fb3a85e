"""Mixture of Experts: every block's MLP is eight experts, of which a token visits two.

    python -m efx.main --config configs/moe.py --workdir runs/moe

Token choice after Switch Transformers (Fedus et al. 2021, arXiv 2101.03961) with two experts a
token; the variant `expert_choice` after Zhou et al. 2022 (arXiv 2202.09368). Knobs, all in
`config.model.mlp.moe`, defaults in efx/layers/config.py:
    num_experts, top_k   E and k
    expert_hidden        width of one expert: 176, half of the dense twin's 352
    capacity_factor      of the first n tokens of a sequence an expert computes at most
                         ceil(k n factor / (E + num_noop)) + 4, the earlier first; it drops the
                         others, which keep their residual (moe/dropped_fraction)
    renormalise          the selected weights sum to one. False: the probabilities, as in Switch,
                         which a router with top_k=1 needs to learn from the main loss
    every                one block in `every` has experts
    num_shared           shared experts that see every token
    num_noop             no-op experts, see configs/mode.py
    router               "token_choice", "expert_choice"
    capacity, slack      expert choice: an expert computes ceil(capacity T) tokens of a sequence in
                         training; the causal limit is ceil(capacity slack n) + 4
Losses, in `config.losses`: `load_balance` (0.01), `router_z` (0.001), `expert_bce` (expert choice:
0.01). Ours are means over layers and tokens. Switch (0.01) and ST-MoE (Zoph et al. 2022, arXiv
2202.08906: 0.001) add a mean over tokens of every MoE layer to the loss, so the coefficients of a
paper with L such layers are L times as large here: 0.04 and 0.004 with the 4 layers of this config.

Where the papers leave a choice: capacity is counted along a sequence here, not over the batch, so
that the logits of a prefix depend on its tokens alone; the router has no noise. Expert choice looks
ahead in the sequence, which its paper does not solve for generation: here its gate is a sigmoid and
its causal decision logit > 0, as for Mixture-of-Depths. `eval/loss` is under that decision,
`eval/loss_topk` under the selection of training.

Variants, to be combined with commas:
    configs/moe.py:smoke            about a minute on a CPU
    configs/moe.py:expert_choice    experts select tokens: as many slots, all filled
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
