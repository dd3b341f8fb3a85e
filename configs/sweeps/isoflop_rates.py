"""The best learning rate of each size, with muP and without: may all sizes share one?

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop_rates.py \\
        --workdir runs/rates_by_width --jobs 2

Sizes, text and smallest budget are those of `configs/sweeps/mod_evidence.py`, whose runs share a
rate that is near the best here. muP should have the same best rate at all widths. One budget and
one seed, so there is no law; the table of learning rates is what this is for. Some half an hour on
2 CPU cores.
"""

from efx.configs.sweeps import mod_evidence


def get_grid():
    evidence = mod_evidence.get_grid()
    # All sizes have heads of 12.
    mup = {"model.mup.base_width": 32, "model.attention.head_dim": 12}
    sizes = {
        name: {key: value for key, value in changes.items() if key != "optim.learning_rate"}
        for name, changes in list(mod_evidence.SIZES.items())[::2]
    }
    return dict(
        config=evidence["config"],
        seeds=(0,),
        budgets=(min(evidence["budgets"]),),
        families={
            "dense, muP": mod_evidence.DENSE | mup,
            "dense, standard": mod_evidence.DENSE,
            "MoD 12.5%, muP": mup,
            "MoD 12.5%, standard": {},
        },
        sizes=sizes,
        learning_rates=(4e-3, 8e-3, 16e-3, 32e-3),
    )
