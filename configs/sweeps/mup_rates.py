"""Does muP keep the best learning rate over widths? Equal steps, widths of 32 to 256.

    python -m efx.studies.sweep --sweep configs/sweeps/mup_rates.py \\
        --workdir runs/mup_rates --jobs 2

Figure 1 of Yang et al. 2022 (arXiv 2203.03466), for runs of equal length: a dense decoder of 2
blocks and heads of 16, on the bytes of Python's standard library, 200 steps of 1024 tokens at each
width and learning rate; with muP, whose base is the narrowest width, without it (N(0, 0.02^2) at
all widths), and with muP and an output layer that starts at 0. `configs/sweeps/isoflop_rates.py`
compares at equal FLOPs, where wide models take fewer steps. About half an hour on 2 CPU cores.
"""

WIDTHS = (32, 64, 128, 256)
RATES = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
MUP = {"model.mup.base_width": WIDTHS[0]}
PARAMETRISATIONS = {
    "muP": MUP,
    "standard": {},
    "muP, head starts at 0": MUP | {"model.mup.zero_head": True},
}
BASE = {
    "steps": 200,
    "data.seq_len": 64,
    "data.batch_size": 16,
    "model.depth": 2,
    "optim.schedule.warmup_steps": 20,
    "evaluate.every": 0,
    "evaluate.max_batches": 64,
    "sample.every": 0,
    "checkpoint.every": 0,
}


def get_sweep():
    return dict(
        config="mod:dense",
        seeds=(0, 1, 2),
        equal="",
        runs={
            f"{name}, {width} wide, {rate:g}": BASE
            | {
                "model.width": width,
                "model.attention.num_heads": width // 16,
                "model.attention.head_dim": 16,
                "optim.learning_rate": rate,
            }
            | changes
            for name, changes in PARAMETRISATIONS.items()
            for width in WIDTHS
            for rate in RATES
        },
        columns={},
    )
