"""Learned dropout and the encoder-decoder against the decoder at equal training FLOPs, with more
text than any of them reads once.

    python -m efx.studies.sweep --sweep configs/sweeps/dropout_flops.py \
        --workdir runs/dropout_flops --jobs 2

The models of dropout_overfitting.py on the source of Python's standard library.
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


def get_sweep():
    return dict(
        config="learned_dropout:none",
        seeds=(0, 1, 2),
        equal="",  # `train_flops` is the same in all
        runs={name: SIZE | changes for name, changes in dropout_overfitting.RUNS.items()},
        columns={"masks keep": "eval/dropout/kept", "parameters": "parameters"},
    )
