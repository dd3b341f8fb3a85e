"""Learned dropout and the encoder-decoder against the decoder at equal training FLOPs, on a text
that none of them reads to the end.

    python -m efx.studies.sweep --sweep configs/sweeps/dropout_flops.py \
        --workdir runs/dropout_flops --jobs 2

The models of dropout_overfitting.py on the source of Python's standard library. Elementwise masks,
masks that read the embedding and masks in two streams have one row each, without penalties, which
the other sweep compares.
"""

from efx.configs.sweeps import dropout_overfitting

SIZE = dropout_overfitting.SIZE | {
    "data.seq_len": 128,
    "steps": 0,
    "train_flops": 1.5e12,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}
FORMS = (
    "learned dropout, elementwise, no penalty",
    "learned dropout, embedding, no penalty",
    "encoder-decoder, parallel, masks, no penalty",
)


def _has_a_form(name):
    begins = ("learned dropout, elementwise", "learned dropout, embedding")
    return name.startswith(begins) or "masks" in name


RUNS = [name for name in dropout_overfitting.RUNS if name in FORMS or not _has_a_form(name)]


def get_sweep():
    return dict(
        config="learned_dropout:none",
        seeds=(0, 1, 2),
        equal="",  # `train_flops` is the same in all
        runs={name: SIZE | dropout_overfitting.RUNS[name] for name in RUNS},
        columns={"masks keep": "eval/dropout/kept", "parameters": "parameters"},
    )
