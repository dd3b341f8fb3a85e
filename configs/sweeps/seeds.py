"""Learned dropout and two streams against the decoder: isoFLOP curves at two budgets.

    python -m efx.studies.isoflop --grid configs/sweeps/seeds.py \\
        --workdir runs/seed_claims --jobs 2

Text and tokenizer of `configs/sweeps/mod_evidence.py`. Masks have no penalty; two streams have half
the depth each. Masks that attend double the FLOPs of a token at these widths, so the best size of
each family is compared. Some hours on 2 CPU cores.
"""

from efx.configs.sweeps import mod_evidence

SIZES = dict(list(mod_evidence.SIZES.items())[1:6])  # the smallest has one block a stream
NO_PENALTY = {"losses.dropout_entropy": 0.0, "losses.dropout_l1": 0.0}
MASKS = {"config": "learned_dropout:no_penalty"}
HALF = {name: size["model.depth"] // 2 for name, size in SIZES.items()}
STREAMS = {"model.cross_source": "previous_layer", "model.depth": HALF, "model.encoder_depth": HALF}


def get_grid():
    return dict(
        config="learned_dropout:none",
        seeds=(0, 1, 2),
        budgets=(7.5e11, 3e12),
        families={
            "decoder": {},
            "masks": MASKS,
            "masks, elementwise": {"config": "learned_dropout:elementwise"} | NO_PENALTY,
            "masks that read the embedding": MASKS | {"model.dropout.attention.input": "embedding"},
            "two streams": {"config": "encoder_decoder"} | STREAMS,
            "two streams, masks": {"config": "encoder_decoder:masks"} | STREAMS | NO_PENALTY,
        },
        sizes=SIZES,
        fit_within=5.0,
    )
