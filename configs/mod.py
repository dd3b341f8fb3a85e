"""The default: a small Mixture-of-Depths decoder on the source of Python's standard library.

    python -m efx.main --config configs/mod.py --workdir runs/mod

Mixture-of-Depths: Dynamically allocating compute in transformer-based language models (Raposo et
al. 2024, arXiv 2404.02258). Every second block computes only the 12.5% of the tokens that its own
router picks; a token that is not picked keeps its residual. Evaluation and sampling decide
causally, by the sign of the router's score, which an auxiliary loss trains.

Variants, to be combined with commas:
    configs/mod.py:smoke    about a minute on a CPU
    configs/mod.py:dense    the dense twin: the same stack with every block dense

Hardware: 2 CPU cores. The README's results table says what it comes to.
"""

from configs import common

VARIANTS = {
    "smoke": common.SMOKE,
    "dense": {"model.depth_routing.kind": "none"},
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            "steps": 1000,
            "data.source": "stdlib",
            "data.tokenizer": "bytes",
            "data.seq_len": 256,
            "data.batch_size": 16,
            "data.eval_fraction": 0.01,
            "model.preset": "llama",
            "model.width": 128,
            "model.depth": 8,
            "model.num_heads": 4,
            "model.depth_routing.kind": "mod",
            "optim.learning_rate": 2e-3,
            "optim.schedule.warmup_steps": 50,
            "checkpoint.every": 250,
            "evaluate.every": 250,
            "sample.every": 250,
            "sample.prompt": "def ",
        },
    )
    return common.variant(config, arg, **VARIANTS)
