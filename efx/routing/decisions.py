"""Causal decisions of depth routing: which token to compute, told from that token alone.

Training selects by top-k over a sequence, which looks ahead. A sampler cannot, so a decision is
trained to agree with it: "aux_loss", the sign of the router's score, and "predictor", the sign of
a small network's output (both Raposo et al. 2024, arXiv 2404.02258, section 3.5); or "threshold",
whether the score exceeds a running quantile (Expert Threshold, arXiv 2603.11535).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from efx import means
from efx.parameter import parameter
from efx.routing import plans

# Under which name the loss that trains a decision is sown. The threshold is not trained by one.
LOSSES = {"aux_loss": "router_bce", "predictor": "predictor_bce"}


class Decision(NamedTuple):
    """What is decided about the tokens of a sequence.

    Attributes:
      plan: of the tokens that are computed. budget: what it was made by.
      room: `plans.Budget` of a causal decision.
      wanted_BT: {name: bool [B, T]} of each decision, whether there is room or not.
      logit_BT: {name: what it compares with 0}. top: the plan that looks ahead, which trained
        decisions are to agree with.
    """

    plan: plans.Plan
    budget: plans.Budget
    room: plans.Budget
    wanted_BT: dict
    logit_BT: dict | None = None
    top: plans.Plan | None = None


class Predictor(nn.Module):
    """p = W2 silu(W1 x): [B, T, D] -> logits [B, T] in float32.

    The paper gives no sizes; `hidden` is D/2 by default. The caller stops the gradient of x.

    Attributes:
      scales: factors on what W1 and W2 start from.
    """

    hidden: int
    scales: tuple[float, float] = (1.0, 1.0)

    @nn.compact
    def __call__(self, x_BTD):
        def kernel(name, scale, shape, axes):
            init = nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
            return parameter(self, name, init, shape, axes)

        inward, outward = self.scales
        inward_DF = kernel("kernel_in", inward, (x_BTD.shape[-1], self.hidden), ("embed", "mlp"))
        outward_FX = kernel("kernel_out", outward, (self.hidden, 1), ("mlp", None))
        # Accelerators would round what a product of float32 is given.
        einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        h_BTF = jax.nn.silu(einsum("BTD,DF->BTF", x_BTD.astype(jnp.float32), inward_DF))
        return einsum("BTF,FX->BTX", h_BTF, outward_FX)[..., 0]


def cross_entropy(logit_BT, target_BT, valid_BT):
    """Mean over valid tokens of the binary cross-entropy of a decision against top-k."""
    loss_BT = optax.sigmoid_binary_cross_entropy(logit_BT, target_BT.astype(jnp.float32))
    return means.over(loss_BT, valid_BT)


def statistics(decided_BT, run_BT, target_BT, valid_BT, real_BT):
    """{name: Mean} of a decision, measured on all valid tokens of the batch.

    accuracy, precision and recall against top-k, and what `fractions` tells.

    Args:
      valid_BT: the tokens that the decision is about, or None: all. It wants no others.
      run_BT, real_BT: as in `fractions`.
    """
    both = jnp.sum(decided_BT & target_BT, dtype=jnp.float32)
    return {
        "accuracy": means.over((decided_BT == target_BT).astype(jnp.float32), valid_BT),
        "precision": means.Mean(both, jnp.sum(decided_BT, dtype=jnp.float32)),
        "recall": means.Mean(both, jnp.sum(target_BT, dtype=jnp.float32)),
        **fractions(decided_BT, run_BT, real_BT),
    }


def fractions(decided_BT, run_BT, real_BT):
    """{name: Mean} of what is chosen, however it was.

    decided_fraction: tokens that are wanted; overflow_fraction: those of them that find no room;
    pairs_fraction: (query, key) pairs among the tokens that are routed, of those among all tokens.

    Args:
      run_BT: those of the decided that are computed.
      real_BT: the tokens of the sequence, or None: all. More than those decided about, when these
        are the survivors of an earlier decision: the capacity is a share of the sequence too.
    """
    length = decided_BT.shape[1]
    real_BT = jnp.ones_like(decided_BT) if real_BT is None else real_BT
    tokens = jnp.sum(real_BT, dtype=jnp.float32)
    rows = jnp.sum(jnp.any(real_BT, axis=1), dtype=jnp.float32)
    routed_B = jnp.sum(run_BT, axis=1, dtype=jnp.float32)
    pairs = jnp.sum(routed_B * (routed_B + 1.0)) / (length * (length + 1.0))
    lost = jnp.sum(decided_BT & ~run_BT, dtype=jnp.float32)
    return {
        "decided_fraction": means.Mean(jnp.sum(decided_BT, dtype=jnp.float32), tokens),
        "overflow_fraction": means.Mean(lost, tokens),
        "pairs_fraction": means.Mean(pairs, rows),
    }
