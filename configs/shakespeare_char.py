"""nanoGPT's two character-level recipes on tinyshakespeare, for comparison with its numbers.

    python -m efx.main --config configs/shakespeare_char.py:cpu --workdir runs/shakespeare \
        --config.data.source=text:input.txt

input.txt is tinyshakespeare, 1,115,394 characters, of which the first 90% are trained on.

Variants:
    cpu     (default) 4 layers, 128 wide, context 64, 2000 steps; two minutes on 2 CPU cores. The
            PyTorch original reaches 1.903, 1.916 and 1.910 with three seeds over the whole
            held-out split; its published 1.88 is an estimate from 20 batches
    gpu     6 layers, 384 wide, context 256, dropout 0.2, 5000 steps; published best held-out loss
            1.4697
    mod     routes every second block; combine with cpu or gpu
    smoke   about half a minute
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
    **CPU,
    "steps": 5000,
    "data.seq_len": 256,
    "data.batch_size": 64,
    "model.width": 384,
    "model.depth": 6,
    "model.attention.num_heads": 6,
    "model.dropout.kind": "standard",
    "model.dropout.rate": 0.2,
    "evaluate.every": 250,
    "checkpoint.every": 250,
    "checkpoint.best_metric": "eval/loss",
}
VARIANTS = {
    "cpu": CPU,
    "gpu": GPU,
    "mod": {"model.depth_routing.kind": "mod"},
    "smoke": {**common.SMOKE, "data.max_bytes": 100_000, "model.dropout.kind": "none"},
}


def get_config(arg=""):
    config = common.base()
    changes = {
        "data.source": "text:input.txt",
        "data.tokenizer": "chars",
        "data.split": "tail",
        "data.eval_fraction": 0.1,
        "data.shuffle": "random",
        "model.preset": "gpt2",
        "model.use_bias": False,
        "optim.b2": 0.99,
        "optim.weight_decay": 0.1,
    }
    common.apply(config, changes)
    size = "" if "gpu" in arg.split(",") else "cpu,"
    return common.variant(config, size + arg, **VARIANTS)
