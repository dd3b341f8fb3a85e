"""Grouped-latent transformer: most of the compute on a few latents for each group of tokens.

    python -m efx.main --config configs/latent.py --workdir runs/latent

Consecutive tokens form groups. Encoder levels compress each group to fewer and fewer latents, a
stack of blocks processes the latents of all groups, and decoder levels expand them to tokens again,
all causally. By default a group of 8 tokens becomes 4 latents 128 wide, then 2 latents 256 wide, so
that the stack of 8 blocks computes one position for every 4 tokens.

efx/models/latent.py has the settings of `config.model`; width, depth, heads, MLP and depth_routing
are those of the stack. The main ones:
    group_size, latents     tokens of a group; its latents at each level
    level_widths            widths of the tokens and of the levels before the last
    compression             "perceiver", or "transformer" with `compression_blocks`
    encoder_local, encoder_global, decoder_local, decoder_global   blocks of each level within a
                            group and across groups: one number, or one for each level
    upsampling              "repeat" or "attention" (`upsampling_norm=False` as published)
    skip, skip_joins        "sum" or "lerp"; "after" or "before" the blocks of a decoder level
    positions               "absolute", "level" (within the group), "rope" or "both"

Variants:
    smoke           half a minute on a CPU
    seed            the published size, for an accelerator: 16 groups of 48 tokens, 16 and then 2
                    latents, a stack of 16 blocks of which every fourth has 12 soft experts
    soft            4 soft experts and a shared MLP in every fourth block of the stack
    averages        DenseFormer averages of the states of the stack
    prediction      a loss predicts the next latent; its weight rises over 200 steps
    spike_no_more   initialisation and learning rates that scale with the width (muP)
    local           no blocks across groups except in the stack
    mod             Mixture-of-Depths in the stack

The default takes some minutes on 2 CPU cores.
"""

from efx.configs import common

VARIANTS = {
    "smoke": {**common.SMOKE, "model.level_widths": (32, 32)},
    "seed": {
        "data.seq_len": 768,
        "model.group_size": 48,
        "model.latents": (16, 2),
        "model.level_widths": (64, 128),
        "model.width": 256,
        "model.depth": 16,
        "model.positions": "absolute",
        "model.upsampling_norm": False,
        "model.soft_experts.num": 12,
        "model.soft_experts.shared": 1,
        "model.soft_experts.every": 4,
    },
    "soft": {
        "model.soft_experts.num": 4,
        "model.soft_experts.shared": 1,
        "model.soft_experts.every": 4,
    },
    "averages": {"model.dense_former.on": True},
    "prediction": {
        "model.latent_loss.kind": "cosine",
        "losses.latent_prediction": dict(schedule="linear", c_start=0.0, c_end=0.003, steps=200),
    },
    "spike_no_more": {"model.initialisation": "spike_no_more", "model.mup.base_width": 256},
    "local": {"model.encoder_global": 0, "model.decoder_global": 0},
    "mod": {"model.depth_routing.kind": "mod"},
}


def get_config(arg=""):
    config = common.base("latent")
    changes = {
        "model.group_size": 8,
        "model.latents": (4, 2),
        "model.level_widths": (64, 128),
        "model.width": 256,
        "model.depth": 8,
        "model.attention.num_heads": 8,
    }
    common.apply(config, {**common.RECIPE, **changes})
    return common.variant(config, arg, **VARIANTS)
