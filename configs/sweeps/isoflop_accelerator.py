"""One isoFLOP budget of Mixture-of-Depths and of the dense decoder, for one accelerator.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop_accelerator.py \
        --workdir runs/isoflop_accelerator

3e15 FLOPs, for which some five million parameters are best by the rule of twenty tokens a
parameter, on the bytes of Python's standard library. Meant for some minutes on one GPU or TPU; part
of `python -m benchmarks.accelerator`.

It shows that a study works there, and how fast. The text has 12 MB, which the dense model reads 3
to 19 times and MoD, with more tokens for the same FLOPs, 5 to 35 times: for a comparison, and for
larger budgets, give a text that is read once, as by `-- --config.data.source=text:PATH`.
"""

BASE = {
    "model.depth": 8,
    "model.attention.num_heads": 4,
    "data.seq_len": 512,
    "data.batch_size": 64,
    "train.dtype": "bfloat16",
    "optim.learning_rate": 2e-3,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}
WIDTHS = (128, 192, 256, 320, 384)


def get_grid():
    return dict(
        config="mod",
        seeds=(0,),
        budgets=(3e15,),
        families={
            "dense": {"model.depth_routing.kind": "none"},
            "MoD 12.5%": {},
        },
        sizes={f"{width} wide": BASE | {"model.width": width} for width in WIDTHS},
    )
