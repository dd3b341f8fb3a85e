"""How weights start and how that depends on width: initialisations and muP.

muP (Yang et al. 2022, arXiv 2203.03466, table 8, for optimisers of Adam's kind) makes the size of
activations and of their updates independent of the width, so that a learning rate found at a
small width serves a large one. Relative to `base_width`:
    hidden matrices      deviation * sqrt(base_width / width); rate * base_width / fan_in
    routers, gates       deviation * base_width / width; rate * base_width / fan_in
    output layer         logits * base_width / width; its own matrix, if it has one, starts at 0
                         (`mup.zero_head`)
    attention            scores / H in place of / sqrt(H), unless `mup.attention` says otherwise
    embeddings, vectors  as they are (memory tokens and first latents of the latent family too)
Routers and gates (of depth, of experts, of adapters; the last layer of a predictor) are output
layers, whose outputs stay as few as they are: one number, or one for each expert. Decoupled weight
decay keeps its strength, lr * weight_decay.
"""

from typing import NamedTuple

from efx.errors import UsageError

# Leaves that are hidden matrices [..., in, out], and modules whose kernels are not hidden.
MATRICES = frozenset({"kernel", "mask_query", "mask_key", "mask_value", "mask_linear"})
OUTPUT = "head"
# Further matrices [..., in, out], and vectors [..., in], by the module that they are in; a router
# is a matrix where it chooses among experts.
PREDICTOR, ADAPTER, EXPERTS = "predictor", "adapter", "mlp"
# Optimisers whose update of an entry does not depend on the size of its gradient.
MUP_OPTIMIZERS = ("adamw", "lion", "schedule_free_adamw")


class Deviations(NamedTuple):
    """Standard deviations that weights start with; residual outputs: hidden / sqrt(2 depth)."""

    table: float  # embeddings
    head: float  # the output layer's own matrix; 0: it starts at 0
    hidden: float


def deviations(initialisation, init_std, mup, width):
    """`Deviations` of a layer stack of this width.

    "gpt2": `init_std` everywhere. "spike_no_more": sqrt(2 / (5 width)) everywhere (Takase et al.
    2023, arXiv 2312.16903).
    """
    base = mup.base_width
    if initialisation == "spike_no_more":
        hidden, table = (2 / (5 * width)) ** 0.5, (2 / (5 * (base or width))) ** 0.5
    else:
        hidden, table = init_std * (base / width if base else 1.0) ** 0.5, init_std
    return Deviations(table, 0.0 if base and mup.zero_head else table, hidden)


def rate_factor(path, shape, base_width):
    """Factor of muP on the updates of a parameter; `base_width` 0: 1.

    Args:
      path: "/"-joined keys of the parameter tree. shape: of the array, [..., in, out] of a matrix.
    """
    axis = _fan_in_axis(*path.split("/"))
    return base_width / shape[axis] if base_width and axis else 1.0


def _fan_in_axis(*path):
    """Which axis of a parameter its fan-in is, as far as the rate goes by that; else None."""
    *modules, leaf = path
    module = modules[-1] if modules else ""
    if leaf == "router":
        return -2 if module == EXPERTS else -1
    if module == ADAPTER and leaf in ("gate", "entrance"):
        return -1
    matrix = leaf in MATRICES and OUTPUT not in modules
    if matrix or module == PREDICTOR or (module == ADAPTER and leaf == "down"):
        return -2
    return None


def check_optimizer(name, base_width):
    """Raise UsageError where muP's rules are not those of this `config.optim.name`."""
    if base_width and name not in MUP_OPTIMIZERS:
        raise UsageError(
            f"config.optim.name={name!r}: with config.model.mup.base_width={base_width}, "
            f"expected one of {', '.join(MUP_OPTIMIZERS)}"
        )
