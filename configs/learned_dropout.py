"""Learned dropout: masks that the model computes from its input, in training and at inference.

    python -m efx.main --config configs/learned_dropout.py --workdir runs/learned_dropout

A mask m in [0, 1] multiplies the values that dropout would set to zero at random. By default a
causal attention of its own computes u, and m = 0.5 cos(u + b) + 0.5 is rounded to 0 or 1, at random
in training and at 0.5 at inference, on the outputs of attention and MLP. A penalty, the mean of
m^2 / 2 with weight 0.1, rewards zeros. Zeros save no FLOPs.

efx/layers/config.py has the settings of `config.model.dropout`. The main ones:
    kind                    "attention"; "elementwise", m = 0.5 cos(a x + b) + 0.5 with a and b for
                            each feature; "standard", plain dropout
    sites                   "embedding", "attention_probs" (elementwise only), "attention_output",
                            "mlp_output"
    attention.input         the input of the mask's attention: "hidden", the values that it masks;
                            "embedding", one attention over the embedding, shared by all masks;
                            "embedding_linear", a linear layer of that attention
    attention.shift_init    initial b: at 0 masks are open, at pi closed
Penalties, each a weight or a schedule, are `config.losses.dropout_entropy`,
`dropout_alternate_entropy`, `dropout_l1` and `dropout_squared_l1` (efx/train/losses.py); metrics
are `dropout/...`. The parameters of masks are named mask_..., for `config.optim.lr_multipliers`.

Variants:
    smoke               about a minute on a CPU
    elementwise         the elementwise form at all four sites
    embedding           attention.input="embedding"
    embedding_linear    attention.input="embedding_linear"
    no_penalty          masks without penalties
    standard            plain dropout of 0.2 instead
    none                no dropout

The default takes some minutes on 2 CPU cores.
"""

from efx.configs import common

LINEAR = {
    "model.dropout.kind": "attention",
    "model.dropout.attention.input": "embedding_linear",
}
VARIANTS = {
    "smoke": common.SMOKE,
    "elementwise": {
        "model.dropout.kind": "elementwise",
        "model.dropout.sites": ("embedding", "attention_probs", "attention_output", "mlp_output"),
        "losses.dropout_entropy": 0.01,
        "losses.dropout_l1": 0.01,
        "losses.dropout_squared_l1": 0.0,
        "optim.lr_multipliers": ((r".*/mask_frequency", 3.0),),  # a of the mask
    },
    "embedding": LINEAR | {"model.dropout.attention.input": "embedding"},
    "embedding_linear": LINEAR,
    "no_penalty": {"losses.dropout_squared_l1": 0.0},
    "standard": {"model.dropout.kind": "standard", "model.dropout.rate": 0.2},
    "none": {"model.dropout.kind": "none"},
}


def get_config(arg=""):
    config = common.base()
    changes = {
        "model.preset": "gpt2",
        "model.use_bias": False,
        "model.depth": 4,
        "model.dropout.kind": "attention",
        "model.dropout.sites": ("attention_output", "mlp_output"),
        "losses.dropout_squared_l1": 0.1,
    }
    common.apply(config, {**common.STDLIB, **changes})
    return common.variant(config, arg, **VARIANTS)
