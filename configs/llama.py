"""A Llama-style dense decoder: RoPE, RMSNorm, SwiGLU, grouped keys and values, untied head.

    python -m efx.main --config configs/llama.py --workdir runs/llama \
        --config.data.source=text:PATH

The size of a 124M GPT-2 in the Llama style; compare with `configs/mod.py` at equal FLOPs by
`--config.train_flops`. `configs/llama.py:smoke` is a one-minute CPU run of the same code.
"""

from configs import common

VARIANTS = {
    "smoke": {
        **common.SMOKE,
        "data.source": "stdlib",
        "data.tokenizer": "bytes",
        "train.accumulation": 1,
        "train.dtype": "float32",
        "train.loss_chunk": 0,
        "model.num_kv_heads": 2,
        "model.scan_layers": False,
        "model.remat": "none",
    },
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            "steps": 100_000,
            "data.source": "stdlib",
            "data.tokenizer": "bpe:32000",
            "data.seq_len": 2048,
            "data.batch_size": 128,
            "data.eval_fraction": 0.01,
            "model.preset": "llama",
            "model.width": 768,
            "model.depth": 12,
            "model.num_heads": 12,
            "model.num_kv_heads": 4,
            "model.scan_layers": True,
            "model.remat": "dots",
            "train.dtype": "bfloat16",
            "train.accumulation": 8,
            "train.loss_chunk": 256,
            "optim.learning_rate": 1e-3,
            "optim.b2": 0.95,
            "optim.schedule.warmup_steps": 1000,
            "checkpoint.every": 1000,
            "evaluate.every": 1000,
            "evaluate.batch_size": 16,
            "sample.every": 1000,
        },
    )
    return common.variant(config, arg, **VARIANTS)
