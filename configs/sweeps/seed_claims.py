"""Learned dropout and two streams against the decoder: isoFLOP curves at two budgets.

    python -m efx.studies.isoflop --grid configs/sweeps/seed_claims.py \\
        --workdir runs/seed_claims --jobs 2

Text, tokenizer and steps are those of `configs/sweeps/mod_evidence.py`. Masks have no penalty; two
streams have an encoder and a decoder of half the depth each. At these widths masks that attend make
a token cost about twice what it does in a model of the same width and depth without: what is
compared is the best size of each at the same FLOPs. Some hours on 2 CPU cores.
"""

from efx.configs.sweeps import mod_evidence

SIZES = dict(list(mod_evidence.SIZES.items())[1:])  # the smallest has one block a stream
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
        timed_budgets=(),  # what is in results/ was trained beside other work: --time-steps
    )
