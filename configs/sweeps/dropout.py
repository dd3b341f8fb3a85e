"""Learned dropout and the encoder-decoder against the decoder, all with the GPT-2 preset.

    python -m efx.studies.sweep --sweep configs/sweeps/dropout.py:overfitting \\
        --workdir runs/dropout_overfitting --jobs 2
    python -m efx.studies.sweep --sweep configs/sweeps/dropout.py:flops \\
        --workdir runs/dropout_flops --jobs 2

`overfitting`: a short text read many times, the regime of the published gains. `flops`: equal
training FLOPs on a text read less than once, with fewer forms. All models but the shallower decoder
have 0.18 or 0.19 million parameters.
"""

import math
import re

from efx.errors import UsageError

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
# Two masks with an attention each add half of a block to each block of 12 D^2 parameters, and a
# decoder block of two streams has 16 D^2: hence six blocks, four, and three with two of an encoder.
DECODER = {"config": "learned_dropout:none", "model.depth": 6}
STANDARD = {
    "config": "learned_dropout:standard",
    "model.depth": 6,
    "model.dropout.sites": "('embedding','attention_probs','attention_output','mlp_output')",
}
MASKS = {"config": "learned_dropout:no_penalty", "model.depth": 4}
# Elementwise masks have two vectors a site and no matrix. Masks that attend over the output of one
# attention over the embedding share its 4 D^2; as linear layers of that output they have D^2 each.
FORMS = {
    "elementwise": {
        "config": "learned_dropout:elementwise",
        "model.depth": 6,
        "losses.dropout_entropy": 0.0,
        "losses.dropout_l1": 0.0,
    },
    "embedding": MASKS | {"model.dropout.attention.input": "embedding"},
    "embedding linear": MASKS
    | {"model.dropout.attention.input": "embedding_linear", "model.depth": 5},
}
STREAMS = {
    "config": "encoder_decoder",
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
SOURCES = {
    "parallel": {"model.cross_source": "previous_layer"},
    "same layer": {"model.cross_source": "same_layer"},
    # The decoder starts from the embedding, or, as published, from the encoder's output.
    "serial": {"model.cross_source": "final", "model.serial_start": "embedding"},
    "serial from the encoder": {"model.cross_source": "final"},
}
STREAM_MASKS = {"config": "encoder_decoder:masks"}
STREAM_PENALTIES = {"no penalty": 0.0, "entropy + L1": 0.1, "entropy + L1 with weight 1": 1.0}


def masks(penalty, shift):
    return MASKS | PENALTIES[penalty] | {"model.dropout.attention.shift_init": SHIFTS[shift]}


def streams(name):
    return STREAMS | SOURCES[name]


def masked_streams(name, weight):
    """With elementwise masks, whose entropy and L1 norm have this weight (1: as published)."""
    penalties = {"losses.dropout_entropy": weight, "losses.dropout_l1": weight}
    return streams(name) | STREAM_MASKS | penalties


RUNS = {
    "decoder": DECODER,
    # Smaller, and as deep as those with masks: shows the effect of their depth.
    "decoder, 4 blocks": DECODER | {"model.depth": 4},
    **{f"decoder, dropout {p}": STANDARD | {"model.dropout.rate": p} for p in (0.1, 0.2, 0.3)},
    **{
        f"learned dropout, {penalty}, shift {shift}": masks(penalty, shift)
        for penalty in PENALTIES
        for shift in SHIFTS
    },
    **{f"encoder-decoder, {name}": streams(name) for name in SOURCES},
    **{
        f"learned dropout, {form}, {penalty}": FORMS[form] | PENALTIES[penalty]
        for form in FORMS
        for penalty in PENALTIES
        if form == "elementwise" or penalty in ("no penalty", "L1")
    },
    **{
        f"encoder-decoder, {name}, masks, {penalty}": masked_streams(name, weight)
        for name in ("parallel", "same layer")
        for penalty, weight in STREAM_PENALTIES.items()
    },
}
COLUMNS = {
    "training loss": "train/loss",
    "best held-out loss": "min:eval/loss",
    "masks keep": "eval/dropout/kept",
    "parameters": "parameters",
}


FLOPS = {
    "data.seq_len": 128,
    "steps": 0,
    "train_flops": 1.5e12,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}
# Of the forms with variants, the one that `flops` trains.
ONE_OF_A_FORM = (
    "learned dropout, elementwise, no penalty",
    "learned dropout, embedding, no penalty",
    "encoder-decoder, parallel, masks, no penalty",
)


def _in_flops(name):
    has_variants = re.match("learned dropout, (elementwise|embedding)|.*masks", name)
    return name in ONE_OF_A_FORM or not has_variants


def get_sweep(part="overfitting"):
    if part not in ("overfitting", "flops"):
        raise UsageError(f"part {part!r}: expected overfitting or flops")
    own = TEXT if part == "overfitting" else FLOPS
    return dict(
        config="learned_dropout:none",
        seeds=(0, 1, 2),
        equal="",  # the same steps, or the same train_flops
        runs={
            name: SIZE | own | changes
            for name, changes in RUNS.items()
            if part == "overfitting" or _in_flops(name)
        },
        columns=COLUMNS,
    )
