"""The default: a small Mixture-of-Depths decoder on the source of Python's standard library.

    python -m efx.main --config configs/mod.py --workdir runs/mod

Mixture-of-Depths: Dynamically allocating compute in transformer-based language models (Raposo et
al. 2024, arXiv 2404.02258). Every second block computes only the 12.5% of the tokens that its
router selects; the other tokens keep their residual. Evaluation and sampling decide causally: a
token is computed if its score exceeds a running quantile of the training scores (arXiv 2603.11535).
This needs no loss. The paper's two decisions are `causal_decision="aux_loss"` and "predictor".

efx/routing/config.py has the settings of `config.model.depth_routing`, docs/mixture_of_depths.md
explains them. The main ones; the paper leaves those with a * open:
    kind                    "mod", or "recursion": the blocks between the first and the last are
                            applied in `recursions` steps
    every, blocks           routes one block in `every`, or a list of blocks
    target*                 routes the "block", its "attention" or its "mlp"
    capacity                fraction of the tokens that a routed block computes
    gate*                   factor on a routed block's increment: the score ("identity", as in the
                            paper), its "sigmoid", "tanh", "one", or "twice_sigmoid"
    kv_for_skipped          selected tokens attend to all tokens, not only to selected ones
    score                   what tokens are selected by: the learned "router", with noise "gumbel";
                            or with gate "one" the "norm" of the hidden state, or a control:
                            "stochastic", "position" or "token_hash"
    train_selection         "topk"; or "threshold", which is causal
    causal_decision         "threshold", "aux_loss" or "predictor"
    slack*                  limit of a causal decision, as a multiple of the capacity

Gate, keys of all tokens and a slow router were chosen by docs/results/gates.md.

Variants:
    smoke           about a minute on a CPU
    quick           400 steps of Muon instead of 1000 of AdamW, to a lower loss
    dense           the same model with every block dense
    published       the recipe of all other results: gate "sigmoid", keys of selected tokens
    paper           the paper's gate, keys of selected tokens, auxiliary loss
    recursion       Mixture-of-Recursions: three of five blocks in three steps, on all, two thirds
                    and one third of the tokens, at the compute of eight dense blocks
    router_only     trains only the routers of a dense run: add --config.init.run=runs/dense
    predictor_only  trains only a predictor of an MoD run: add --config.init.run=runs/mod
    60m             58M parameters with 32,000 ids, for 20 tokens each at 2,048; docs/guide.md has
                    the recipes and hours
    350m            369M parameters
    1300m           1.3B parameters, layers scanned

The default takes some minutes on 2 CPU cores.
"""

from efx.configs import common
from efx.routing.parameters import params_pattern

ROUTING = {
    "model.depth_routing.kind": "mod",
    "model.depth_routing.causal_decision": "threshold",
}
RECIPE = {
    "model.depth_routing.gate": "identity",
    "model.depth_routing.kv_for_skipped": True,
    # At a high rate the scores of some seeds fall until all gates are closed.
    "optim.router_rate": 0.1,
}
PUBLISHED = {
    "model.depth_routing.gate": "sigmoid",
    "model.depth_routing.kv_for_skipped": False,
    "optim.router_rate": 1.0,
}


def routed(**settings):
    """Settings of depth routing by their full names."""
    return {f"model.depth_routing.{name}": value for name, value in settings.items()}


VARIANTS = {
    "smoke": common.ACCELERATOR_SMOKE,
    "quick": {
        "steps": 400,
        "optim.name": "muon",
        "optim.learning_rate": 1e-2,
        "optim.schedule.kind": "linear",
        "optim.schedule.final_fraction": 0.05,
        "checkpoint.every": 200,
        "evaluate.every": 200,
        "sample.every": 200,
    },
    "dense": {**PUBLISHED, "model.depth_routing.kind": "none"},
    "published": PUBLISHED,
    "paper": {
        **PUBLISHED,
        "model.depth_routing.gate": "identity",
        "model.depth_routing.causal_decision": "aux_loss",
    },
    "recursion": {
        **PUBLISHED,
        "model.depth": 5,
        "model.depth_routing.kind": "recursion",
        "model.depth_routing.target": "block",
        "model.depth_routing.recursions": 3,
        "model.depth_routing.capacity": (1.0, 2 / 3, 1 / 3),
        "model.depth_routing.slack": 1.25,
    },
    "router_only": {
        **PUBLISHED,
        "model.depth_routing.causal_decision": "aux_loss",
        "init.missing": params_pattern(),
        "optim.frozen": rf"(?!{params_pattern()}$).*",
    },
    "predictor_only": {
        "model.depth_routing.causal_decision": "predictor",
        "init.missing": params_pattern("predictor"),
        "optim.frozen": rf"(?!{params_pattern('predictor')}$).*",
    },
    **common.SIZES,
}


def get_config(arg=""):
    config = common.base()
    common.apply(config, {**common.STDLIB, "model.depth": 8, **ROUTING, **RECIPE})
    return common.variant(config, arg, **VARIANTS)
