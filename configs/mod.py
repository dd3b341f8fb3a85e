"""The default: a small Mixture-of-Depths decoder on the source of Python's standard library.

    python -m efx.main --config configs/mod.py --workdir runs/mod

Mixture-of-Depths: Dynamically allocating compute in transformer-based language models (Raposo et
al. 2024, arXiv 2404.02258). Every second block computes only the 12.5% of the tokens that its own
router selects; the other tokens keep their residual. Evaluation and sampling decide causally: a
token is computed if its score exceeds a running quantile of the training scores
(arXiv 2603.11535). This needs no loss, whereas the paper's auxiliary loss costs small models more
(docs/results.md); `causal="aux_loss"` and "predictor" are the paper's two decisions.

Settings, all in `config.model.depth_routing` (defaults in efx/routing/config.py); * marks what the
paper leaves open, see docs/mixture_of_depths.md:
    kind, recursions        "mod"; or "recursion", which applies the blocks between the first and
                            the last in `recursions` steps
    every, blocks           the routed blocks: one in `every`, or a list
    target*                 the routed part: "block", "attention" or "mlp"
    capacity                fraction of the tokens that a routed block computes; one value, or one
                            for each block or recursion step
    capacity_stages*        ((f, c), ...): until the fraction f of training, capacity c
    router_norm*            "rms": the router reads a normalised input
    gate*                   factor on a routed block's increment: "sigmoid" of the score (default),
                            "identity" (the paper), "tanh", "one"; "twice_sigmoid", 1 for a score of
                            0, with which a dense model is converted
    train_selection         "topk"; "threshold", which is causal; or a control: "stochastic" (random
                            tokens), "position" (evenly spaced), "token_hash" (some token ids)
    causal                  in evaluation and sampling: "threshold", "aux_loss" or "predictor"
    also_train              further decisions that are trained and evaluated
    predictor_hidden*       width of the predictor
    threshold_decay, _warmup  of the running quantile of the scores
    bce_reaches_input       whether the auxiliary loss also trains the layers below the router
    slack*                  limit of a causal decision, as a multiple of the capacity
    kv_for_skipped          skipped tokens still write keys and values
    skip_mlp                width of a small MLP for skipped tokens
Weights of the losses*: `config.losses.router_bce`, `config.losses.predictor_bce`.

Variants, to be combined with commas:
    configs/mod.py:smoke            about a minute on a CPU
    configs/mod.py:quick            400 steps of Muon in place of 1000 of AdamW, to a lower loss
                                    (default of launch/local.sh)
    configs/mod.py:dense            the dense twin: the same stack with every block dense
    configs/mod.py:paper            the paper's gate, the score itself, and its auxiliary loss
    configs/mod.py:attention_only   routes the attention of a block; all tokens pass its MLP
    configs/mod.py:mlp_only         routes the MLP of a block; all tokens pass its attention
    configs/mod.py:threshold        causal in training too, by a running quantile
    configs/mod.py:recursion        Mixture-of-Recursions: three of five blocks in three recursion
                                    steps, on all, two thirds and one third of the tokens: the
                                    compute of the dense twin with five eighths of its blocks
    configs/mod.py:router_only      trains only the routers of a finished dense run:
                                    add --config.init.run=runs/dense
    configs/mod.py:predictor_only   trains only a predictor for a finished MoD run:
                                    add --config.init.run=runs/mod

Hardware: 2 CPU cores. Results: docs/results.md.
"""

from efx.configs import common
from efx.routing.parameters import params_pattern

ROUTING = {
    "model.depth_routing.kind": "mod",
    "model.depth_routing.causal": "threshold",
}
# Measured on two CPU cores: 400 steps reach 1.364 nats, 1000 steps of AdamW 1.384.
QUICK = {
    "steps": 400,
    "optim.name": "muon",
    "optim.learning_rate": 1e-2,
    "optim.schedule.kind": "linear",
    "optim.schedule.final_fraction": 0.05,
    "checkpoint.every": 200,
    "evaluate.every": 200,
    "sample.every": 200,
}
VARIANTS = {
    "smoke": common.SMOKE,
    "quick": QUICK,
    "dense": {"model.depth_routing.kind": "none"},
    "paper": {
        "model.depth_routing.gate": "identity",
        "model.depth_routing.causal": "aux_loss",
    },
    "attention_only": {"model.depth_routing.target": "attention"},
    "mlp_only": {"model.depth_routing.target": "mlp"},
    "threshold": {
        "model.depth_routing.train_selection": "threshold",
        "model.depth_routing.slack": 1.25,
    },
    "recursion": {
        "model.depth": 5,
        "model.depth_routing.kind": "recursion",
        "model.depth_routing.target": "block",
        "model.depth_routing.recursions": 3,
        "model.depth_routing.capacity": (1.0, 2 / 3, 1 / 3),
        "model.depth_routing.slack": 1.25,
    },
    "router_only": {
        "model.depth_routing.causal": "aux_loss",
        "init.missing": params_pattern(),
        "optim.frozen": rf"(?!{params_pattern()}$).*",
    },
    "predictor_only": {
        "model.depth_routing.causal": "predictor",
        "init.missing": params_pattern("predictor"),
        "optim.frozen": rf"(?!{params_pattern('predictor')}$).*",
    },
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            **common.STDLIB,
            "model.depth": 8,
            **ROUTING,
        },
    )
    return common.variant(config, arg, recipes=("quick",), **VARIANTS)
