"""Does one learning rate serve the other seeds' families as it serves the decoder?

    python -m efx.studies.isoflop --grid configs/sweeps/seed_rates.py:claims \\
        --workdir runs/seed_rates_claims --jobs 2

`seed_claims.py` (`:claims`) and `latent_context.py` (`:256`, `:1024`, `:4096`) train all families
at 1e-2, which is near the best rate of decoders (`isoflop_rates.py`). Here their families try three
rates at their smaller budget and their three smaller sizes, one seed. What matters is the table of
learning rates; there is no law of one budget. Half an hour on 2 CPU cores.
"""

from efx.configs.sweeps import latent_context, seed_claims

SIZES = 3


def get_grid(study="claims"):
    grid = seed_claims.get_grid() if study == "claims" else latent_context.get_grid(study)
    sizes = dict(list(grid["sizes"].items())[:SIZES])

    def at_these_sizes(value):
        return {name: value[name] for name in sizes} if isinstance(value, dict) else value

    return dict(
        config=grid["config"],
        seeds=(0,),
        budgets=(min(grid["budgets"]),),
        families={
            family: {key: at_these_sizes(value) for key, value in changes.items()}
            for family, changes in grid["families"].items()
        },
        sizes={
            name: {key: value for key, value in changes.items() if key != "optim.learning_rate"}
            for name, changes in sizes.items()
        },
        learning_rates=(5e-3, 1e-2, 2e-2),
        timed_budgets=(),
    )
