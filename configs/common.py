"""Settings and functions that config files share.

    config = common.base()                          # all settings at their defaults
    common.apply(config, {"model.depth": 12})       # those of the experiment
    return common.variant(config, arg, smoke={...})

efx/config/run.py, efx/layers/config.py and efx/models define the settings and their defaults.
"""

from efx.config.names import apply
from efx.config.run import default_config
from efx.errors import UsageError, nearest


def base(family="decoder"):
    """Return the ConfigDict of a model family with all settings at their defaults."""
    return default_config(family)


def variant(config, arg, **variants):
    """Apply the comma-separated variants of `file.py:name,name` to a config and return it.

    "smoke" is applied last. The order of the names has no effect.

    Args:
      variants: {name: {dotted key: value}}
    Raises: UsageError for an unknown name, or if two variants set one key to different values.
    """
    names = sorted({*arg.split(",")} - {""})
    for name in names:
        if name not in variants:
            raise UsageError(
                f"config variant {name!r}: expected one of {', '.join(variants)}"
                + nearest(name, variants)
            )
    set_by = {}
    for name in (name for name in names if name != "smoke"):
        for key, value in variants[name].items():
            other = set_by.setdefault(key, name)
            if variants[other][key] != value:
                raise UsageError(
                    f"config variants {other!r} and {name!r}: they set config.{key} to "
                    f"{variants[other][key]!r} and {value!r}; leave one of them out"
                )
        apply(config, variants[name], f"config variant {name!r}: ")
    if "smoke" in names:
        apply(config, variants["smoke"], "config variant 'smoke': ")
    return config


# Training of the small configs: 1000 steps on the bytes of Python's standard library.
RECIPE = {
    "steps": 1000,
    "data.source": "stdlib",
    "data.tokenizer": "bytes",
    "data.seq_len": 256,
    "data.batch_size": 16,
    "data.eval_fraction": 0.01,
    "optim.learning_rate": 2e-3,
    "optim.schedule.warmup_steps": 50,
    "checkpoint.every": 250,
    "evaluate.every": 250,
    "sample.every": 250,
    "sample.prompt": "def ",
}

# The same, of a decoder 128 wide: a few minutes on 2 CPU cores.
STDLIB = {
    **RECIPE,
    "model.preset": "llama",
    "model.width": 128,
    "model.attention.num_heads": 4,
}

SMOKE = {
    "steps": 30,
    "data.seq_len": 64,
    "data.batch_size": 8,
    "data.max_bytes": 400_000,
    "model.width": 64,
    "model.depth": 4,
    "model.attention.num_heads": 4,
    "optim.schedule.warmup_steps": 5,
    "checkpoint.every": 15,
    "log.every": 5,
    "evaluate.every": 15,
    "evaluate.max_batches": 8,
    "sample.every": 30,
    "sample.max_new_tokens": 64,
}

ACCELERATOR = {
    "data.source": "stdlib",
    "data.eval_fraction": 0.01,
    "model.remat": "dots",
    "train.dtype": "bfloat16",
    "train.loss_chunk": 256,
    "optim.b2": 0.95,
}

ACCELERATOR_SMOKE = {
    **SMOKE,
    "data.tokenizer": "bytes",
    "model.remat": "none",
    "train.dtype": "float32",
    "train.accumulation": 1,
    "train.loss_chunk": 0,
}

# Decoders with so many parameters at 2,048 tokens, for 20 tokens a parameter. The recipe is a usual
# one: AdamW, a weight decay of 0.1, clipping at 1, cosine decay to a tenth.
_SIZE = {
    **ACCELERATOR,
    "data.tokenizer": "bpe:32000",
    "data.seq_len": 2048,
    "model.preset": "llama",
    "checkpoint.every": 1000,
    "evaluate.every": 1000,
    "evaluate.max_batches": 64,
    "sample.every": 1000,
}
SIZES = {
    "60m": {
        **_SIZE,
        "steps": 4_500,
        "data.batch_size": 128,
        "train.accumulation": 4,
        "model.width": 512,
        "model.depth": 8,
        "model.attention.num_heads": 8,
        "optim.learning_rate": 1e-3,
        "optim.schedule.warmup_steps": 450,
    },
    "350m": {
        **_SIZE,
        "steps": 14_000,
        "data.batch_size": 256,
        "train.accumulation": 16,
        "model.width": 1024,
        "model.depth": 24,
        "model.attention.num_heads": 16,
        "optim.learning_rate": 6e-4,
        "optim.schedule.warmup_steps": 1000,
    },
    "1300m": {
        **_SIZE,
        "steps": 25_600,
        "data.batch_size": 512,
        "train.accumulation": 64,
        "model.width": 2048,
        "model.depth": 24,
        "model.attention.num_heads": 16,
        "model.scan_layers": True,
        "optim.learning_rate": 3e-4,
        "optim.schedule.warmup_steps": 2000,
    },
}
