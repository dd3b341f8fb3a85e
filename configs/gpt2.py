"""GPT-2 124M on any text: the dense baseline in its classic form.

    python -m efx.main --config configs/gpt2.py --workdir runs/gpt2 \
        --config.data.source=text:PATH --config.mesh.data=-1

12 layers, 768 wide, learned positions, LayerNorm, tied output layer; 124,475,904 parameters with
the vocabulary padded to a multiple of 64 columns (124,439,808 at 50,257). About 0.5M tokens a step
in 20 micro-batches of 24 sequences, the batch of nanoGPT's recipe for OpenWebText, whose published
loss is 2.85 after 600,000 steps (8 x A100, about 4 days).

Variants:
    smoke    a minute on a CPU
"""

from efx.configs import common

VARIANTS = {"smoke": common.ACCELERATOR_SMOKE}


def get_config(arg=""):
    config = common.base()
    changes = {
        "steps": 600_000,
        "data.tokenizer": "bpe:50257",
        "data.seq_len": 1024,
        "data.batch_size": 480,
        "model.preset": "gpt2",
        "model.width": 768,
        "model.depth": 12,
        "model.attention.num_heads": 12,
        "model.vocab_multiple": 64,
        "train.accumulation": 20,
        "optim.learning_rate": 6e-4,
        "optim.schedule.warmup_steps": 2000,
        "checkpoint.every": 2000,
        "evaluate.every": 2000,
        "evaluate.batch_size": 32,
        "sample.every": 2000,
    }
    common.apply(config, {**common.ACCELERATOR, **changes})
    return common.variant(config, arg, **VARIANTS)
