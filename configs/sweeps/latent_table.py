"""The grouped-latent transformer and its options against the decoder, at equal training FLOPs.

    python -m efx.studies.sweep --sweep configs/sweeps/latent_table.py \\
        --workdir runs/latent_table --jobs 2

Small enough for an hour or so on 2 CPU cores; `-- --config.data.source=text:input.txt` takes other
text, and the same command scales up by overrides with `train_flops` below raised to match.
"""

SIZE = {
    "data.seq_len": 256,
    "steps": 0,
    "train_flops": 2e12,
    "evaluate.every": 0,
    "sample.every": 0,
    "checkpoint.every": 0,
}
DECODER = {
    "config": "mod:dense",
    "model.width": 48,
    "model.depth": 6,
    "model.attention.num_heads": 3,
}
# Groups of 8 tokens 32 wide, 4 latents 48 wide, then 2 latents 64 wide, the input of the stack.
LATENT = {
    "model.level_widths": "(32,48)",
    "model.level_heads": "(2,3)",
    "model.width": 64,
    "model.attention.num_heads": 4,
    "model.depth": 4,
}
ATTENTION = {"model.upsampling": "attention", "model.upsampling_norm": True}
LOCAL = {"model.encoder_global": 0, "model.decoder_global": 0}
SOFT = {
    "model.soft_experts.num": 4,
    "model.soft_experts.every": 4,
    "model.soft_experts.tied": False,  # as results/latent_table.csv was measured
}
RUNS = {
    "decoder": DECODER,
    "latent: repeat, perceiver": LATENT,
    "latent: positions level": LATENT | {"model.positions": "level"},
    "latent: positions rope": LATENT | {"model.positions": "rope"},
    "latent: positions both": LATENT | {"model.positions": "both"},
    "latent: attention, perceiver": LATENT | ATTENTION,
    "latent: attention without norms and output matrix, perceiver": LATENT
    | ATTENTION
    | {"model.upsampling_norm": False},
    "latent: repeat, skip before the blocks": LATENT | {"model.skip_joins": "before"},
    "latent: repeat, transformer": LATENT | {"model.compression": "transformer"},
    "latent: attention, transformer": LATENT | ATTENTION | {"model.compression": "transformer"},
    "latent: local levels": LATENT | LOCAL,
    "latent: local levels, attention": LATENT | LOCAL | ATTENTION,
    "latent: local levels, attention, skip before the blocks, rope": LATENT
    | LOCAL
    | ATTENTION
    | {"model.skip_joins": "before", "model.positions": "rope"},
    "latent with 4 soft experts": LATENT | SOFT,
    "latent with 4 soft experts and 1 shared": LATENT | SOFT | {"model.soft_experts.shared": 1},
    "latent with DenseFormer averages": LATENT | {"model.dense_former.on": True},
    "latent with the latent loss": LATENT | {"model.latent_loss.kind": "cosine"},
}


def get_sweep():
    return dict(
        config="latent",
        seeds=(0, 1, 2),
        equal="",  # `train_flops` is the same in all
        runs={name: SIZE | changes for name, changes in RUNS.items()},
        columns={"parameters": "parameters"},
    )
