"""Learned dropout: masks that the model computes from its input, in training and at inference.

    python -m efx.main --config configs/learned_dropout.py --workdir runs/learned_dropout

A mask m in [0, 1] multiplies the values that dropout would set to zero at random. By default a
separate causal attention computes u, and m = 0.5 cos(u + b) + 0.5 is rounded to 0 or 1, by chance
in training and by m >= 0.5 at inference, on the outputs of attention and MLP. The penalty
mean(m^2 / 2) with weight 0.1 rewards closing. Multiplying values by zero saves no FLOPs, unless
whole tokens close and are left out, which the variant `skip` does (docs/learned_dropout.md).

Knobs, all in `config.model.dropout` (defaults in efx/layers/config.py):
    kind                    "elementwise": m = 0.5 cos(a x + b) + 0.5, a and b for each feature;
                            "attention"; "standard" is plain dropout
    sites                   "embedding", "attention_probs" (elementwise only), "attention_output",
                            "mlp_output"
    elementwise.detach      the mask passes no gradient on to x
    elementwise.a_mean, a_std, b_mean, b_std    initial distributions of a and b
    elementwise.sharpen, sharpen_scale    apply sigmoid(s (m - 1/2)); s
    attention.input         the states that a mask attends over: "hidden", those that it masks;
                            "embedding", a linear layer of one attention over the model's input
                            embedding, shared by all masks; cheaper, "embedding_linear": a mask is
                            a linear layer of that one attention
    attention.detach        masks pass no gradient on to the activations, or the input embedding
    attention.num_heads     of the mask's attention; 0: as the model
    attention.shift_init    initial b: 0 keeps everything, pi closes everything
    attention.rounding      "stochastic", "none", "sigmoid", "sigmoid_straight_through"
    attention.sigmoid_scale s of the two sigmoids of s (m - 1/2)
    attention.granularity   "feature", or one mask value for a whole "token"
    attention.skip_tile     at inference MLPs compute only open tokens, so many at a time
Penalties, in `config.losses`, means over elements and masks of m before rounding; each a number or
a schedule (efx/train/losses.py): `dropout_entropy` -m log2 m, `dropout_alternate_entropy` that of
1 - m, `dropout_l1` m, `dropout_squared_l1` m^2 / 2.
Statistics: `dropout/near_one` (m > 0.9), `dropout/near_zero` (m < 0.1), `dropout/kept` (fraction
of the rounded mask that is 1) and `dropout/entropy`; at each evaluation also layer by layer, and
`dropout/changed`, the fraction of the rounded mask that differs from the last evaluation's.
The masks' parameters are called mask_...: `config.optim.lr_multipliers` gives them, or only the
frequencies a (".*/mask_frequency"), another learning rate. They are not decayed.

Variants, to be combined with commas:
    configs/learned_dropout.py:smoke         about a minute on a CPU
    configs/learned_dropout.py:elementwise   the elementwise form at all four sites
    configs/learned_dropout.py:embedding     every mask attends over the output of one attention
                                             over the input embedding
    configs/learned_dropout.py:embedding_linear   every mask is a linear layer of that attention
    configs/learned_dropout.py:skip          one mask value a token, as in embedding_linear, and
                                             MLPs that leave closed tokens out at inference
    configs/learned_dropout.py:rising        the penalty's weight grows exponentially to 0.1
    configs/learned_dropout.py:no_penalty    masks are free
    configs/learned_dropout.py:standard      the twin with plain dropout 0.2
    configs/learned_dropout.py:none          the twin without dropout

Hardware: 2 CPU cores.
"""

from efx.configs import common

MASKS = r".*/mask_[a-z]+"
VARIANTS = {
    "smoke": common.SMOKE,
    "elementwise": {
        "model.dropout.kind": "elementwise",
        "model.dropout.sites": ("embedding", "attention_probs", "attention_output", "mlp_output"),
        "losses.dropout_entropy": 0.01,
        "losses.dropout_l1": 0.01,
        "losses.dropout_squared_l1": 0.0,
        "optim.lr_multipliers": ((r".*/mask_frequency", 3.0),),
    },
    "embedding": {
        "model.dropout.kind": "attention",
        "model.dropout.attention.input": "embedding",
    },
    "embedding_linear": {
        "model.dropout.kind": "attention",
        "model.dropout.attention.input": "embedding_linear",
    },
    "skip": {
        "model.dropout.kind": "attention",
        "model.dropout.attention.input": "embedding_linear",
        "model.dropout.attention.granularity": "token",
        "model.dropout.attention.skip_tile": 64,
        "model.dropout.sites": ("mlp_output",),
    },
    "rising": {
        "losses.dropout_squared_l1": dict(schedule="exponential", rate=1e-4, c_min=0.0, c_max=0.1),
    },
    "no_penalty": {"losses.dropout_squared_l1": 0.0},
    "standard": {
        "model.dropout.kind": "standard",
        "model.dropout.rate": 0.2,
        "optim.lr_multipliers": (),
    },
    "none": {"model.dropout.kind": "none", "optim.lr_multipliers": ()},
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            **common.STDLIB,
            "model.preset": "gpt2",
            "model.use_bias": False,
            "model.depth": 4,
            "model.dropout.kind": "attention",
            "model.dropout.sites": ("attention_output", "mlp_output"),
            "losses.dropout_squared_l1": 0.1,
            "optim.lr_multipliers": ((MASKS, 1.0),),
        },
    )
    return common.variant(config, arg, **VARIANTS)
