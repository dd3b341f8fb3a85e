"""nanoGPT's two character-level recipes on tinyshakespeare, for comparison with its numbers.

    python -m efx.main --config configs/shakespeare_char.py:cpu --workdir runs/shakespeare \
        --config.data.source=text:input.txt

The text is the 1,115,394 characters of tinyshakespeare; the first 90% train. Variants:
    cpu     4 layers, 4 heads, 128 wide, context 64, batch 12, 2000 steps, no dropout; about two
            minutes on 2 CPU cores. The PyTorch original, over the whole held-out split in windows
            of 64, gives 1.903, 1.916, 1.910 for three seeds (its published 1.88 is a 20-batch
            estimate)
    gpu     6 layers, 6 heads, 384 wide, context 256, batch 64, dropout 0.2, 5000 steps; published
            best held-out loss 1.4697
    llama   the Llama-style block at equal training FLOPs
    mod     every second block routed at 12.5%, decided by the threshold as in configs/mod.py
    smoke   about half a minute
The others are combined with "cpu", which need not be named, or with "gpu".
"""

from efx.configs import common

CPU = {
    "steps": 2000,
    "data.seq_len": 64,
    "data.batch_size": 12,
    "model.width": 128,
    "model.depth": 4,
    "model.attention.num_heads": 4,
    "optim.learning_rate": 1e-3,
    "optim.schedule.warmup_steps": 100,
    "evaluate.every": 500,
    "evaluate.batch_size": 64,
    "checkpoint.every": 500,
    "sample.every": 1000,
}
GPU = {
    "steps": 5000,
    "data.seq_len": 256,
    "data.batch_size": 64,
    "model.width": 384,
    "model.depth": 6,
    "model.attention.num_heads": 6,
    "model.dropout.kind": "standard",
    "model.dropout.rate": 0.2,
    "optim.learning_rate": 1e-3,
    "optim.schedule.warmup_steps": 100,
    "evaluate.every": 250,
    "evaluate.batch_size": 64,
    "checkpoint.every": 250,
    "checkpoint.best_metric": "eval/loss",
    "sample.every": 1000,
}
VARIANTS = {
    "cpu": CPU,
    "gpu": GPU,
    "llama": {"model.preset": "llama", "model.use_bias": False},
    "mod": {
        "model.depth_routing.kind": "mod",
        "model.depth_routing.causal": "threshold",
    },
    "smoke": {
        **common.SMOKE,
        "data.max_bytes": 100_000,
        "model.dropout.kind": "none",
    },
}


def get_config(arg=""):
    names = arg.split(",")
    config = common.base()
    common.apply(
        config,
        {
            "data.source": "text:input.txt",
            "data.tokenizer": "chars",
            "data.split": "tail",
            "data.eval_fraction": 0.1,
            "data.shuffle": "random",
            "model.preset": "gpt2",
            "model.use_bias": False,
            "optim.b2": 0.99,
            "optim.weight_decay": 0.1,
        },
    )
    recipe = [] if {"cpu", "gpu"} & set(names) else ["cpu"]
    return common.variant(config, ",".join([*recipe, *names]), recipes=("cpu", "gpu"), **VARIANTS)
