"""Learned dropout and the encoder-decoder against the decoder, where a model overfits.

    python -m efx.studies.sweep --sweep configs/sweeps/dropout_overfitting.py \
        --workdir runs/dropout_overfitting --jobs 2

All models but one have 0.18 million parameters and read the same tokens: a short text many times
over, the regime in which the gains were published. `-- --config.data.source=text:input.txt` takes
another text, e.g. tinyshakespeare; the same command scales up by overrides.
"""

import math

SIZE = {
    "model.width": 48,
    "data.seq_len": 96,
    "data.batch_size": 8,
}
# 8 kB are trained on, 77 times over, and 24 kB held out.
TEXT = {
    "data.max_bytes": 32_000,
    "data.eval_fraction": 0.75,
    "data.split": "tail",
    "optim.learning_rate": 1e-3,
    "steps": 800,
    "evaluate.every": 80,
    "sample.every": 0,
    "checkpoint.every": 0,
}
# Two masks with an attention of their own add half of a block to each block of 12 D^2 parameters,
# a decoder block of two streams has 16 D^2: six blocks, four, and three beside two of an encoder.
DECODER = {"config": "configs/learned_dropout.py:none", "model.depth": 6}
STANDARD = {
    "config": "configs/learned_dropout.py:standard",
    "model.depth": 6,
    "model.dropout.sites": "('embedding','attention_probs','attention_output','mlp_output')",
}
MASKS = {"config": "configs/learned_dropout.py:no_penalty", "model.depth": 4}
STREAMS = {
    "config": "configs/encoder_decoder.py",
    "model.depth": 3,
    "model.encoder_depth": 2,
    "model.use_bias": False,
}
PENALTIES = {
    "no penalty": {},
    "L1": {"losses.dropout_l1": 0.1},
    "squared L1": {"losses.dropout_squared_l1": 0.1},
    "entropy + L1": {"losses.dropout_entropy": 0.1, "losses.dropout_l1": 0.1},
}
SHIFTS = {"0": 0.0, "pi/2": math.pi / 2, "pi": math.pi}
SOURCES = {"parallel": "previous_layer", "same layer": "same_layer", "serial": "final"}


def masks(penalty, shift):
    return MASKS | PENALTIES[penalty] | {"model.dropout.attention.shift_init": SHIFTS[shift]}


def streams(name):
    return STREAMS | {"model.cross_source": SOURCES[name]}


RUNS = {
    "decoder": DECODER,
    # Smaller, and as deep as those with masks: what these owe to their depth.
    "decoder, 4 blocks": DECODER | {"model.depth": 4},
    **{f"decoder, dropout {p}": STANDARD | {"model.dropout.rate": p} for p in (0.1, 0.2, 0.3)},
    **{
        f"learned dropout, {penalty}, shift {shift}": masks(penalty, shift)
        for penalty in PENALTIES
        for shift in SHIFTS
    },
    **{f"encoder-decoder, {name}": streams(name) for name in SOURCES},
}
COLUMNS = {
    "training loss": "train/loss",
    "best held-out loss": "min:eval/loss",
    "masks keep": "eval/dropout/kept",
    "parameters": "parameters",
}


def get_sweep():
    return dict(
        config="configs/learned_dropout.py:none",
        seeds=(0, 1, 2),
        equal="",  # the same steps
        runs={name: SIZE | TEXT | changes for name, changes in RUNS.items()},
        columns=COLUMNS,
    )
