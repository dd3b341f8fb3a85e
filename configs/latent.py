"""Grouped-latent transformer: most of the compute on a few latents for each group of tokens.

    python -m efx.main --config configs/latent.py --workdir runs/latent

Tokens in a row form groups; encoder levels compress each group to fewer and fewer latents, a stack
of blocks works on the latents of all groups, and decoder levels spread them over the tokens again.
All of it is causal. The default: groups of 8 tokens, 4 latents 128 wide, then 2 latents 256 wide,
of which the stack of 8 blocks computes one position for every 4 tokens.

Knobs, all in `config.model` (defaults in efx/models/latent.py; width, depth, num_heads, mlp
and depth_routing are those of the latent stack, windows and learned dropout of all levels):
    group_size, latents     tokens in a group; latents that a group has at each level
    level_widths, level_heads   of tokens and of the levels before the last
    compression, compression_blocks   "perceiver", or "transformer" of so many blocks
    encoder_local, encoder_global, decoder_local, decoder_global   blocks of each level inside
                            groups and across; a number, or one for each level
    block_order             "interleaved", "sequence"
    upsampling, repeat      "repeat" of latents ("tile", "in_place"), or "attention" over these
    upsampling_norm         that attention with norms and an output matrix, or as published without
    skip, skip_joins        "sum" or "lerp"; "after" or "before" the blocks of a decoder level
    positions               "absolute": tables, of tokens by their position in the document and of
                            latents by that in the group; "level": of both by that in the group;
                            "rope": rotary positions; "both": "level" and rotary positions
    memory_local, memory_global   learned tokens before each group, before the sequence
    embedding_noise         uniform noise on the embeddings in training
    qk_norm                 "width", "head", "none"
    soft_experts            multi-channel attention with soft experts, in every n-th block of the
                            stack; `tied` as published, or with separate matrices
    dense_former            averages of the states of the stack
    latent_loss             predicts the next latent: "cosine"; weight
                            `config.losses.latent_prediction`, a number or a warm-up
    mup, initialisation     muP; "spike_no_more"

Variants, to be combined with commas:
    configs/latent.py:smoke         about half a minute on a CPU
    configs/latent.py:seed          context 768 in 16 groups of 48 tokens, 16 and then 2 latents,
                                    widths 64, 128 and 256, 16 blocks in the stack, every fourth
                                    with 12 soft experts and 1 shared MLP; upsampling by attention,
                                    if that is chosen, as published
    configs/latent.py:soft          4 soft experts and 1 shared MLP in every fourth block
    configs/latent.py:averages      DenseFormer averages
    configs/latent.py:prediction    the latent loss, whose weight rises over 200 steps
    configs/latent.py:spike_no_more initialisation and rates that scale with the width (muP)
    configs/latent.py:one_level     4 latents for 16 tokens, and no level in between
    configs/latent.py:transformer   compression by two blocks inside the group
    configs/latent.py:attention     upsampling by attention
    configs/latent.py:bare_attention    the same without norms and output matrix, as published
    configs/latent.py:in_place      each latent of the group before repeated in its own place
    configs/latent.py:lerp          learned weights of skip connection and decoder
    configs/latent.py:early_skip    skip connections before the blocks of a decoder level
    configs/latent.py:level         tables by positions in a group alone, none of the group
    configs/latent.py:rope          rotary positions in place of the tables
    configs/latent.py:both          rotary positions and the tables of `:level`
    configs/latent.py:sequence      all local blocks of a level before its global ones
    configs/latent.py:local         levels without global blocks: only the stack crosses groups
    configs/latent.py:memory        4 learned tokens before the sequence, 2 before each group
    configs/latent.py:noise         noisy embeddings
    configs/latent.py:mod           Mixture-of-Depths in the latent stack
    configs/latent.py:moe           Mixture of Experts in the latent stack
    configs/latent.py:masks         learned dropout in every level

Hardware: 2 CPU cores; the default takes some minutes there, "seed" wants an accelerator.
"""

from efx.configs import common

VARIANTS = {
    "smoke": lambda config: {
        **common.SMOKE,
        "model.level_widths": (32,) * len(config.model.latents),
    },
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
    "one_level": {
        "model.group_size": 16,
        "model.latents": (4,),
        "model.level_widths": (64,),
    },
    "transformer": {"model.compression": "transformer", "model.compression_blocks": 2},
    "attention": {"model.upsampling": "attention"},
    "bare_attention": {"model.upsampling": "attention", "model.upsampling_norm": False},
    "in_place": {"model.repeat": "in_place"},
    "lerp": {"model.skip": "lerp"},
    "early_skip": {"model.skip_joins": "before"},
    "level": {"model.positions": "level"},
    "rope": {"model.positions": "rope"},
    "both": {"model.positions": "both"},
    "sequence": {"model.block_order": "sequence"},
    "local": {"model.encoder_global": 0, "model.decoder_global": 0},
    "memory": {"model.memory_local": 2, "model.memory_global": 4},
    "noise": {"model.embedding_noise": 5.0},
    "mod": {
        "model.depth_routing.kind": "mod",
        "model.depth_routing.causal": "threshold",
    },
    "moe": {"model.mlp.kind": "moe", "model.mlp.moe.every": 2},
    "masks": {"model.dropout.kind": "elementwise"},
}


def get_config(arg=""):
    config = common.base("latent")
    common.apply(
        config,
        {
            **common.RECIPE,
            "model.group_size": 8,
            "model.latents": (4, 2),
            "model.level_widths": (64, 128),
            "model.width": 256,
            "model.depth": 8,
            "model.attention.num_heads": 8,
        },
    )
    return common.variant(config, arg, recipes=("seed",), **VARIANTS)
