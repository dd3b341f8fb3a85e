"""Functions and recipes that config files share.

    config = common.base()                       # every setting of efx at its default
    common.apply(config, {"model.depth": 12})    # the changes of the experiment
    return common.variant(config, arg, smoke={...})

All settings with their defaults and meaning: efx/config/run.py,
efx/layers/config.py and the configs of the families in efx/models.
"""

import itertools

from efx.config.load import apply
from efx.config.run import default_config
from efx.errors import UsageError, nearest


def base(family="decoder"):
    """The whole config of a family, by default of a dense Llama-style decoder on Python's standard
    library, as a ConfigDict. None in it means "decided by the preset"."""
    return default_config(family)


def variant(config, arg, recipes=(), **variants):
    """Applies the comma-separated names of `file.py:name,name`, whose order does not matter.

    Names in `recipes` (a size with its data and training) are applied first, then the others, and
    "smoke" last, so that it makes everything small. UsageError for an unknown name, or if two of
    the same group set a key to different values.

    Args:
      variants: by name, a dict of dotted keys, or a function from the config so far to one.
    """
    names = list(dict.fromkeys(filter(None, arg.split(","))))
    for name in names:
        if name not in variants:
            raise UsageError(
                f"config variant {name!r}: expected one of {', '.join(variants)}"
                + nearest(name, variants)
            )
    smoke = ("smoke",)
    options = [name for name in variants if name not in (*recipes, *smoke)]
    for group in (recipes, options, smoke):
        changes = {name: variants[name] for name in group if name in names}
        changes = {
            name: change(config) if callable(change) else change for name, change in changes.items()
        }
        _check_agreement(changes)
        for name in changes:
            try:
                apply(config, changes[name])
            except UsageError as error:
                raise UsageError(f"config variant {name!r}: {error}") from None
    return config


def _check_agreement(variants):
    """UsageError if two of {name: {key: value}} set a key to different values."""
    for (first_name, first), (second_name, second) in itertools.combinations(variants.items(), 2):
        for key in first:
            if key in second and first[key] != second[key]:
                raise UsageError(
                    f"config variants {first_name!r} and {second_name!r} contradict each other:"
                    f" config.{key} is {first[key]!r} in one and {second[key]!r} in the other;"
                    " leave one of them out"
                )


# Data, optimiser and evaluation of the small configs of all families: 1000 steps on bytes of
# Python's standard library.
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

# The same with a decoder, 128 wide: a few minutes on 2 CPU cores.
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

# Shared by the configs for accelerators, and a smoke run that undoes it.
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
