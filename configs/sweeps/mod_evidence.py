"""Does Mixture-of-Depths pay, at which training budget, and what is its router worth?

    python -m efx.studies.isoflop --grid configs/sweeps/mod_evidence.py \\
        --workdir runs/mod_evidence --jobs 2

200 MB of Python code (the standard library and packages of the extras `interop` and `studies`),
read less than once. Each family at six sizes, depth growing with width. Controls select tokens
without a look at activations. Parts, after a colon:

    (none)              0.75 and 3 TFLOPs, all families, one learning rate; hours of 2 CPU cores
    largest             12 TFLOPs, one learning rate
    rates               12 TFLOPs, learning rates selected for each family and size
    100, 300, 1000      so many TFLOPs in bfloat16; minutes of one H100 each, with --jobs 8

and with `python -m efx.studies.sweep --sweep`:

    longer, context     48 TFLOPs; MoD with the keys of all tokens
    dense               the dense model at 12 TFLOPs with a learning rate that does not copy
    tokens              MoD and controls at equal tokens, where equal FLOPs give controls fewer
"""

import importlib.util
import sysconfig

from efx.errors import UsageError, extra

PACKAGES = "jax", "matplotlib", "numpy", "scipy", "sklearn", "sympy", "torch", "transformers"
if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    raise UsageError(
        f"the text is the code of packages, and {', '.join(missing)} are not installed; "
        f"install {extra('interop,studies')}"
    )
FOLDERS = [f"text:{sysconfig.get_paths()['purelib']}/{name}/**/*.py" for name in PACKAGES]
HEADS = {12: 1, 16: 2, 24: 2, 32: 2, 48: 4, 64: 4, 96: 6}
BASE = {
    "data.source": f"mix:stdlib,{','.join(FOLDERS)}",
    "data.split": "documents",
    "data.tokenizer": "bpe:512",
    "data.seq_len": 256,
    "data.batch_size": 4,
    "model.mlp.multiple_of": 8,
    # N(0, 0.02^2) suits wide models and costs these some 0.3 nats.
    "model.initialisation": "spike_no_more",
    "optim.learning_rate": 1e-2,
    "optim.schedule.warmup_steps": 0,
    "optim.schedule.warmup_fraction": 0.1,
    "evaluate.every": 0,
    "evaluate.max_batches": 64,
    "sample.every": 0,
    "checkpoint.every": 0,
}
COPYING = {"evaluate.repeated_rows": 64}  # measure what a model copies from its context
DENSE = {"model.depth_routing.kind": "none"}
THRESHOLD = {"model.depth_routing.train_selection": "threshold"}
MAIN = ("dense", "dense, half as deep", "MoD 12.5%")  # with several seeds
LARGEST = 1.2e13


def name_of(width, depth):
    return f"{width} wide, {depth} deep"


def size_of(width, depth, heads=None):
    changes = {"model.width": width, "model.depth": depth}
    return BASE | changes | {"model.attention.num_heads": heads or HEADS[width]}


def control(score):
    return {"model.depth_routing.score": score, "model.depth_routing.gate": "one"}


SIZES = {
    name_of(*size): size_of(*size)
    for size in ((12, 2), (16, 4), (24, 4), (32, 6), (48, 6), (64, 8), (96, 8))
}
NARROWEST, WIDEST = tuple(SIZES)[:2], tuple(SIZES)[-1]


def families_of(sizes):
    """All families; the dense model of half the depth costs as much as MoD in a forward pass."""
    half = {name: size["model.depth"] // 2 for name, size in sizes.items()}
    return {
        "dense": DENSE,
        "dense, half as deep": DENSE | {"model.depth": half},
        "MoD 12.5%": {},
        "threshold in training too": THRESHOLD,
        "staged MoDE": {
            "model.mlp.kind": "moe",
            "model.mlp.moe.num_experts": 8,
            "model.mlp.moe.top_k": 2,
        },
        "random tokens": control("stochastic"),
        "positions": control("position"),
        "types of tokens": control("token_hash"),
    }


def get_grid(part="all"):
    parts = {"all": _all, "largest": _largest, "rates": _rates}
    parts |= {str(tera): lambda tera=tera: _accelerator(tera) for tera in ACCELERATOR}
    return _part(parts, part)()


def _part(parts, part):
    if part not in parts:
        raise UsageError(f"part {part!r}: expected one of {', '.join(parts)}")
    return parts[part]


def _all():
    sizes = {name: size for name, size in SIZES.items() if name != WIDEST}
    return dict(
        config="mod:published",
        seeds=lambda family, size, budget: (0, 1, 2) if family in MAIN else (0,),
        budgets=(7.5e11, 3e12),
        families=families_of(sizes),
        sizes=sizes,
        fit_within=5.0,
        against=("dense, half as deep", "MoD 12.5%"),
    )


def _largest():
    sizes = {name: size for name, size in SIZES.items() if name not in NARROWEST}
    most = {
        "dense": ("48 wide, 6 deep",),
        "dense, half as deep": ("48 wide, 6 deep", "64 wide, 8 deep"),
        "MoD 12.5%": ("64 wide, 8 deep",),
    }

    def seeds(family, size, budget):
        if family not in MAIN or size in ("24 wide, 4 deep", "32 wide, 6 deep"):
            return (0,)
        return (0, 1, 2) if size in most[family] else (0, 1)

    return _all() | dict(seeds=seeds, budgets=(LARGEST,), families=families_of(sizes), sizes=sizes)


def _rates():
    rates = {
        "48 wide, 6 deep": (2.5e-3, 5e-3, 1e-2, 2e-2),
        "64 wide, 8 deep": (1.25e-3, 2.5e-3, 5e-3, 1e-2),
        "96 wide, 8 deep": (1.25e-3, 2.5e-3, 5e-3),
    }
    sizes = {name: SIZES[name] | COPYING for name in rates}
    for size in sizes.values():
        del size["optim.learning_rate"]

    def seeds(family, size, budget):
        best = "48 wide, 6 deep" if family == "dense" else "64 wide, 8 deep"
        if size == best:
            return (1, 2, 3)
        return () if family in MAIN else None  # () searches the rate; None is no run

    return _all() | dict(
        seeds=seeds,
        budgets=(LARGEST,),
        families=families_of(sizes),
        sizes=sizes,
        learning_rates=rates,
        rate_seed=0,
    )


# {TFLOPs: (rows of a batch, ((width, depth), ...))}; no size reads the text more than once.
ACCELERATOR = {
    100: (16, ((64, 8), (96, 8), (128, 8), (192, 8))),
    300: (32, ((96, 8), (128, 8), (192, 8), (256, 10))),
    1000: (64, ((128, 8), (192, 8), (256, 10), (384, 10))),
}


def _accelerator(tera_flops):
    rows, shapes = ACCELERATOR[tera_flops]
    changes = {"data.batch_size": rows, "train.dtype": "bfloat16", "optim.learning_rate": 3e-3}
    sizes = {
        name_of(width, depth): size_of(width, depth, width // 32) | changes | COPYING
        for width, depth in shapes
    }
    narrowest, small, middle, large = sizes
    number = {
        "dense": {narrowest: 1, small: 3, middle: 3},
        "dense, half as deep": {small: 1, middle: 3, large: 3},
        "MoD 12.5%": {small: 1, middle: 3, large: 3},
        "positions": {middle: 3},
    }
    families = families_of(sizes)
    return dict(
        config="mod:published",
        seeds=lambda family, size, budget: tuple(range(number[family].get(size, 0))),
        budgets=(tera_flops * 1e12,),
        families={name: families[name] for name in number},
        sizes=sizes,
        against=("dense, half as deep", "MoD 12.5%"),
    )


# ---- sweeps ------------------------------------------------------------------------------------


def get_sweep(part):
    half = DENSE | {"model.depth": 4}
    parts = {
        "longer": {
            "dense, half as deep": _run(64, 8, 5e-3, 4 * LARGEST, half),
            "MoD 12.5%": _run(64, 8, 5e-3, 4 * LARGEST, {}),
            "dense, 64 wide": _run(64, 8, 2.5e-3, 4 * LARGEST, DENSE),
            "dense, 48 wide": _run(48, 6, 5e-3, 4 * LARGEST, DENSE),
        },
        "context": {
            "MoD 12.5%, keys of all tokens": _run(
                64, 8, 5e-3, 4 * LARGEST, {"model.depth_routing.kv_for_skipped": True}
            )
        },
        "dense": {"dense, 48 wide": _run(48, 6, 5e-3, LARGEST, DENSE)},
        # As many steps as MoD has with 12 TFLOPs.
        "tokens": {
            name: size_of(64, 8) | COPYING | changes | {"steps": 5997, "optim.learning_rate": rate}
            for name, changes, rate in (
                ("MoD 12.5%", {}, 5e-3),
                ("types of tokens", control("token_hash"), 2.5e-3),
                ("threshold in training too", THRESHOLD, 5e-3),
            )
        },
    }
    return dict(
        config="mod:published",
        seeds=(0, 1, 2, 3) if part in ("dense", "tokens") else (0, 1, 2),
        equal="",
        runs=_part(parts, part),
        columns={"a repeat gains (nats)": "eval/repeated/gain"},
    )


def _run(width, depth, rate, flops, changes):
    own = {"steps": 0, "train_flops": flops, "optim.learning_rate": rate, "evaluate.every": 2000}
    return size_of(width, depth) | COPYING | own | changes
