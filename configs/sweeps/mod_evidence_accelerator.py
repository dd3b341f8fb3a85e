"""Does Mixture-of-Depths pay at 1,000 TFLOPs? isoFLOP curves for one accelerator.

    python -m efx.studies.isoflop --grid configs/sweeps/mod_evidence_accelerator.py \\
        --workdir runs/mod_evidence_accelerator --jobs 8

The text, the tokenizer and the context of `configs/sweeps/mod_evidence.py`, with 80 times the FLOPs
of its largest budget: batches of 64 rows instead of 4, in bfloat16. All families share a learning
rate. No size reads the text more than once, which is why the narrowest is trained for the dense
model alone: the others would. Whether models copy from their context is measured, as it decided at
smaller budgets. Some ten minutes of an H100, of which several runs take part at a time.

`mod_evidence_accelerator.py:300` and `mod_evidence_accelerator.py:100` are the same at 300 and 100
TFLOPs, with batches of 32 and 16 rows and smaller sizes: what comes between that budget and those
of `mod_evidence.py`. Five minutes each.
"""

from efx.configs.sweeps import mod_evidence

# {TFLOPs: (rows of a batch, ((width, depth) of each size, ascending))}
BUDGETS = {
    1000: (64, ((128, 8), (192, 8), (256, 10), (384, 10))),
    300: (32, ((96, 8), (128, 8), (192, 8), (256, 10))),
    100: (16, ((64, 8), (96, 8), (128, 8), (192, 8))),
}
SEEDS = (0, 1, 2)


def get_grid(part="1000"):
    return mod_evidence.part_of({str(budget): lambda b=budget: _of(b) for budget in BUDGETS}, part)


def _of(tera_flops):
    rows, widths_and_depths = BUDGETS[tera_flops]
    sizes = {
        mod_evidence.name_of(width, depth): mod_evidence.BASE
        | {
            "model.width": width,
            "model.depth": depth,
            "model.attention.num_heads": width // 32,
            "data.batch_size": rows,
            "train.dtype": "bfloat16",
            "optim.learning_rate": 3e-3,
            "evaluate.repeated_rows": 64,
        }
        for width, depth in widths_and_depths
    }
    narrowest, small, middle, large = sizes
    half = {name: size["model.depth"] // 2 for name, size in sizes.items()}
    shallow = {narrowest: (), small: (0,), middle: SEEDS, large: SEEDS}
    return dict(
        config="mod",
        budgets=(tera_flops * 1e12,),
        seeds={
            "dense": {narrowest: (0,), small: SEEDS, middle: SEEDS, large: ()},
            "dense, half as deep": shallow,
            "MoD 12.5%": shallow,
            "positions": {narrowest: (), small: (), middle: SEEDS, large: ()},
        },
        families={
            "dense": mod_evidence.DENSE,
            "dense, half as deep": mod_evidence.DENSE | {"model.depth": half},
            "MoD 12.5%": {},
            "positions": mod_evidence.control("position"),
        },
        against=("dense, half as deep", "MoD 12.5%"),
        sizes=sizes,
        timed_budgets=(),
    )
