"""Maximal update parametrisation (muP) and the initial standard deviations of weights.

With muP (Yang et al. 2022, arXiv 2203.03466, table 8, for optimisers like Adam) the size of
activations and of their updates does not depend on the width, so a learning rate tuned at a small
width serves a wide model. m = base_width / width, see `MuPConfig`; relative to the same model at
the base width:

    hidden matrices               standard deviation * sqrt(m), learning rate * m
    routers, gates                standard deviation * m, learning rate * m
    logits                        * m
    attention scores              / sqrt(H) * sqrt(m) = sqrt(H_base) / H where heads grow wider
    embeddings, head, vectors     unchanged

Routers and gates, the last layer of a predictor included, are output layers with a fixed number of
outputs. Embeddings include positions and the first latents of the latent family. At
the base width m is 1 and muP is the model without it. Decoupled weight decay is lr * weight_decay
at every width.
"""

from typing import NamedTuple

from efx.errors import UsageError

# Parameters that multiply activations as wide as the model, by the last key of their path.
SCALED_FAN_IN = frozenset({
    "kernel", "mask_query", "mask_key", "mask_value", "mask_linear",  # hidden matrices
    "router", "kernel_in", "kernel_out",  # of routing and its predictor
    "down", "gate", "entrance",  # of adapters
})  # fmt: skip
HEAD = "head"  # the output layer, which the factor on the logits scales instead
# Adam-like: the size of an update does not depend on the size of the gradient.
OPTIMIZERS = ("adamw", "lion")


class Deviations(NamedTuple):
    """Initial standard deviations; layers that add to the residual: hidden / sqrt(2 depth)."""

    table: float  # embeddings
    head: float  # output layer
    hidden: float  # all other matrices


def deviations(initialisation, init_std, mup, width, level_width=None):
    """`Deviations` of a model.

    Args:
      initialisation: "gpt2": `init_std` for all. "spike_no_more": sqrt(2 / (5 width)) for all
        (Takase et al. 2023, arXiv 2312.16903).
      mup: a `MuPConfig`. width: `config.model.width`.
      level_width: width of one level of the latent family.
    """
    ratio = mup.width_ratio(width)
    std = init_std
    if initialisation == "spike_no_more":
        std = (2 / (5 * ratio * (level_width or width))) ** 0.5
    head = 0.0 if mup.base_width and mup.zero_head else std
    return Deviations(table=std, head=head, hidden=std * ratio**0.5)


def rate_factor(path, width_ratio):
    """Factor of muP on the learning rate of a parameter.

    Args:
      path: keys of the parameter tree, joined by "/". width_ratio: base_width / width.
    """
    *modules, leaf = path.split("/")
    return width_ratio if leaf in SCALED_FAN_IN and modules[-1:] != [HEAD] else 1.0


def check_optimizer(name, mup):
    """Raise UsageError if muP's learning rates do not suit `config.optim.name`."""
    if mup.base_width and name not in OPTIMIZERS:
        raise UsageError(
            f"config.optim.name={name!r}: with {mup.where}.base_width={mup.base_width}, "
            f"expected one of {', '.join(OPTIMIZERS)}"
        )
