"""Does Mixture-of-Depths pay, where, and what has its router learnt? isoFLOP curves with controls.

    python -m efx.studies.isoflop --grid configs/sweeps/mod_evidence.py \\
        --workdir runs/mod_evidence --jobs 2

Each family at six sizes, depth growing with width, and at five with the largest of three budgets,
on Python code: the standard library and some packages that the extras `interop` and `studies`
bring, 200 MB together, whose hash runs record. Sizes share a learning rate, as
`configs/sweeps/isoflop_rates.py` shows that they can. The controls choose tokens without a look at
activations: what MoD is ahead of them is what its router knows. With 2 CPU cores the two smaller
budgets take some hours and the largest one half a day; an interrupted study goes on, also on
another machine (`--from`), and a GPU takes the same command. `mod_evidence.py:largest` is what
decides at the largest budget whether MoD pays, with the controls at the same five sizes.
`mod_evidence.py:three` has the three main families at all three budgets, of which the points lie in
two files of results; nothing is trained for one analysis, and one law, of both:

    python -m efx.studies.isoflop --grid configs/sweeps/mod_evidence.py:three \\
        --workdir runs/mod_evidence_three --table-only \\
        --from results/mod_evidence.json --from results/mod_evidence_largest.json

`mod_evidence.py:rates` has the three main families at the largest budget with a learning rate of
their own at each size, which the first seed finds, the others at MoD's best size, and tells whether
models copy from their context (`config.evaluate.repeated_rows`): 84 runs, some four hours of 2 CPU
cores.
"""

import importlib.util
import sysconfig

from efx.errors import UsageError, extra

WIDTHS_AND_DEPTHS = ((12, 2), (16, 4), (24, 4), (32, 6), (48, 6), (64, 8))
WIDEST = 96, 8  # at the largest budget, whose best sizes are larger
HEADS = {12: 1, 16: 2, 24: 2, 32: 2, 48: 4, 64: 4, 96: 6}

PACKAGES = "jax", "matplotlib", "numpy", "scipy", "sklearn", "sympy", "torch", "transformers"
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
if MISSING:
    raise UsageError(
        f"the text is the code of packages, and {', '.join(MISSING)} are not installed; "
        f"install {extra('interop,studies')}"
    )
FOLDERS = [f"text:{sysconfig.get_paths()['purelib']}/{name}/**/*.py" for name in PACKAGES]

BASE = {
    "data.source": f"mix:stdlib,{','.join(FOLDERS)}",
    "data.split": "documents",
    "data.tokenizer": "bpe:512",
    "data.seq_len": 256,
    "data.batch_size": 4,
    "model.mlp.multiple_of": 8,
    # Deviations that fit the width: N(0, 0.02^2) is of wide models and costs these some 0.3 nats.
    "model.initialisation": "spike_no_more",
    "optim.learning_rate": 1e-2,
    "optim.schedule.warmup_steps": 0,
    "optim.schedule.warmup_fraction": 0.1,
    "evaluate.every": 0,
    "evaluate.max_batches": 64,
    "sample.every": 0,
    "checkpoint.every": 0,
}
DENSE = {"model.depth_routing.kind": "none"}


def name_of(width, depth):
    return f"{width} wide, {depth} deep"


def size_of(width, depth):
    heads = {"model.attention.num_heads": HEADS[width]}
    return BASE | {"model.width": width, "model.depth": depth} | heads


SIZES = {name_of(*size): size_of(*size) for size in WIDTHS_AND_DEPTHS}
SEVERAL = ("dense", "dense, half as deep", "MoD 12.5%")  # families with more than one seed
LARGEST = 1.2e13
# Sizes with a third seed at the largest budget.
THREE = {
    "dense": ("48 wide, 6 deep",),
    "dense, half as deep": ("48 wide, 6 deep", "64 wide, 8 deep"),
    "MoD 12.5%": ("64 wide, 8 deep",),
}


def control(selection):
    return {"model.depth_routing.train_selection": selection}


def get_grid(part="all"):
    return part_of({"all": _all, "largest": _largest, "three": _three, "rates": _rates}, part)


def part_of(parts, part):
    """What the function of a part gives: what `FILE.py:PART` names."""
    if part not in parts:
        raise UsageError(f"part {part!r}: expected {', '.join(parts)}")
    return parts[part]()


def _rates():
    """The largest budget again, each family with the best of some learning rates at each size: the
    main ones at three sizes, the others at MoD's best one, where all have several seeds."""
    grid = _largest()
    sizes = {name_of(*size): size_of(*size) for size in ((48, 6), (64, 8), WIDEST)}
    for size in sizes.values():
        del size["optim.learning_rate"]
        size["evaluate.repeated_rows"] = 64
    families = grid["families"]
    half = families["dense, half as deep"]["model.depth"]
    halves = DENSE | {"model.depth": {name: half[name] for name in sizes}}
    best = dict.fromkeys(families, "64 wide, 8 deep") | {"dense": "48 wide, 6 deep"}
    elsewhere = {family: (0,) if family in SEVERAL else () for family in families}
    rates = (
        (2.5e-3, 5e-3, 1e-2, 2e-2),
        (1.25e-3, 2.5e-3, 5e-3, 1e-2),
        (1.25e-3, 2.5e-3, 5e-3),
    )
    return grid | dict(
        seeds={
            family: {
                name: tuple(range(4)) if name == best[family] else elsewhere[family]
                for name in sizes
            }
            for family in families
        },
        families=families | {"dense, half as deep": halves},
        sizes=sizes,
        learning_rates=dict(zip(sizes, rates, strict=True)),
    )


def _three():
    """What has several seeds, at all budgets: at the largest with the seeds that results/ has."""
    grid = _all()
    return grid | dict(
        seeds=(0, 1, 2),
        seeds_at={LARGEST: {name: _seeds_of_largest(name, grid["sizes"]) for name in SEVERAL}},
        families={name: grid["families"][name] for name in SEVERAL},
        # The last one is in the published results and not in this grid.
        without=(
            *(name for name in grid["families"] if name not in SEVERAL),
            "rare types of tokens",
        ),
    )


def _largest():
    """The largest budget: several seeds of the main families, where their best sizes are."""
    grid = _all()
    sizes = {name: grid["sizes"][name] for name in grid["sizes_at"][LARGEST]}
    half = grid["families"]["dense, half as deep"]["model.depth"]
    halves = DENSE | {"model.depth": {name: half[name] for name in sizes}}
    families = grid["families"] | {"dense, half as deep": halves}
    return grid | dict(
        seeds={name: _seeds_of_largest(name, sizes) for name in families},
        budgets=(LARGEST,),
        timed_budgets=(),
        families=families,
        sizes=sizes,
        sizes_at=None,
    )


def _seeds_of_largest(family, sizes):
    """{size: seeds} of a family at the largest budget: most of them where its best sizes are."""
    if family not in SEVERAL:
        return dict.fromkeys(sizes, (0,))
    narrow = "24 wide, 4 deep", "32 wide, 6 deep"
    return {
        name: (0,) if name in narrow else (0, 1, 2) if name in THREE[family] else (0, 1)
        for name in sizes
    }


def _all():
    sizes = SIZES | {name_of(*WIDEST): size_of(*WIDEST)}
    half = {name: size["model.depth"] // 2 for name, size in sizes.items()}
    families = {
        "dense": DENSE,
        # A forward pass costs about as much as that of MoD of the same width.
        "dense, half as deep": DENSE | {"model.depth": half},
        "MoD 12.5%": {},
        "threshold in training too": control("threshold"),
        "staged MoDE": {
            "model.mlp.kind": "moe",
            "model.mlp.moe.num_experts": 8,
            "model.mlp.moe.top_k": 2,
        },
        "random tokens": control("stochastic"),
        "positions": control("position"),
        "types of tokens": control("token_hash"),
    }
    smaller = tuple(SIZES)
    return dict(
        config="mod",
        seeds={name: (0, 1, 2) if name in SEVERAL else (0,) for name in families},
        budgets=(7.5e11, 3e12, LARGEST),
        # What is in results/ of larger budgets was trained beside other work.
        timed_budgets=(7.5e11,),
        families=families,
        against=("dense, half as deep", "MoD 12.5%"),
        sizes=sizes,
        fit_within=5.0,
        # At the largest budget the two narrowest would read the text more than once.
        sizes_at={7.5e11: smaller, 3e12: smaller, LARGEST: tuple(sizes)[2:]},
    )
