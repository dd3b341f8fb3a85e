"""A Llama-style dense decoder: RoPE, RMSNorm, SwiGLU, grouped keys and values, untied head.

    python -m efx.main --config configs/llama.py --workdir runs/llama \
        --config.data.source=text:PATH

The size of a 124M GPT-2 in the Llama style; compare with `configs/mod.py` at equal FLOPs by
`--config.train_flops`.

Variants:
    smoke    a minute on a CPU
    60m      58M parameters with 32,000 ids, 20 tokens a parameter at 2,048; docs/guide.md has the
             recipes and hours
    350m     369M parameters
    1300m    1.3B parameters, layers scanned
"""

from efx.configs import common

VARIANTS = {
    "smoke": {
        **common.ACCELERATOR_SMOKE,
        "model.attention.num_kv_heads": 2,
    },
    **{name: {**size, "model.attention.num_kv_heads": 0} for name, size in common.SIZES.items()},
}


def get_config(arg=""):
    config = common.base()
    changes = {
        "steps": 100_000,
        "data.tokenizer": "bpe:32000",
        "data.seq_len": 2048,
        "data.batch_size": 128,
        "model.preset": "llama",
        "model.width": 768,
        "model.depth": 12,
        "model.attention.num_heads": 12,
        "model.attention.num_kv_heads": 4,
        "train.accumulation": 8,
        "optim.learning_rate": 1e-3,
        "optim.schedule.warmup_steps": 1000,
        "checkpoint.every": 1000,
        "evaluate.every": 1000,
        "evaluate.batch_size": 16,
        "sample.every": 1000,
    }
    common.apply(config, {**common.ACCELERATOR, **changes})
    return common.variant(config, arg, **VARIANTS)
