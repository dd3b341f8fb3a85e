"""Causal decisions of depth routing.

Training selects tokens by top-k over a sequence, which looks ahead. A sampler cannot, so a causal
decision, made from one token alone, is trained to agree with it:

    aux_loss    r > 0; the loss `router_bce` trains the scores to be a classifier
    predictor   p(x) > 0, p a small network beside the router, trained by `predictor_bce`
    threshold   r > theta, theta a running quantile of the scores

The first two are of Raposo et al. 2024, arXiv 2404.02258, section 3.5; the third is Expert
Threshold, arXiv 2603.11535. Each is a module that turns tokens and scores into a logit, to be
compared with 0. A new decision is a class and a row of `DECISIONS`.
"""

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from efx.layers import batch_means, flops, selection
from efx.parallel.sharding import parameter
from efx.routing.scores import RoutingModule


class Decision(RoutingModule):
    """Base of the decisions: (x [B, T, D], scores [B, T]) -> logits [B, T], float32.

    Attributes:
      loss: name of the loss that trains it against top-k, or None.
    """

    loss: ClassVar[str | None] = None


class RouterSign(Decision):
    """r > 0."""

    loss: ClassVar[str] = "router_bce"

    def __call__(self, x_BTD, score_BT):
        return score_BT


class Predictor(Decision):
    """W2 silu(W1 sg(x)) > 0. The paper gives no sizes; the hidden width is D/2 by default."""

    loss: ClassVar[str] = "predictor_bce"

    @staticmethod
    def hidden(config, width):
        return config.predictor_hidden or max(1, width // 2)

    @staticmethod
    def flops(config, width, tokens):
        hidden = Predictor.hidden(config, width)
        return flops.matmul(tokens, width, hidden) + flops.matmul(tokens, hidden, 1)

    @nn.compact
    def __call__(self, x_BTD, score_BT):
        # muP: the fan-in already makes both layers start smaller in a wider model. The layer whose
        # number of outputs is independent of the width starts smaller still.
        fixed_width = bool(self.config.predictor_hidden)
        scales = (self.router_scale**0.5, 1.0) if fixed_width else (1.0, self.router_scale**0.5)
        hidden = self.hidden(self.config, self.width)

        def kernel(name, scale, shape, axes):
            init = nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
            return parameter(self, name, init, shape, axes)

        in_DF = kernel("kernel_in", scales[0], (self.width, hidden), ("embed", "mlp"))
        out_FX = kernel("kernel_out", scales[1], (hidden, 1), ("mlp", None))
        # Accelerators would round the inputs of a float32 product.
        einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        x_BTD = jax.lax.stop_gradient(x_BTD).astype(jnp.float32)
        logit_BT = einsum("BTF,FX->BTX", jax.nn.silu(einsum("BTD,DF->BTF", x_BTD, in_DF)), out_FX)
        self.sow("intermediates", "logits", logit_BT[..., 0])
        return logit_BT[..., 0]


class Threshold(Decision):
    """r > theta, theta a running mean of the (1 - c) quantile of the scores.

    The collection `state` holds `quantile` (theta) and `steps`, the number of updates.
    """

    def setup(self):
        self.quantile = self.variable("state", "quantile", jnp.zeros, (), jnp.float32)
        self.steps = self.variable("state", "steps", jnp.zeros, (), jnp.int32)

    def __call__(self, x_BTD, score_BT):
        return score_BT - self.quantile.value

    def update(self, score_BT, selectable_BT, valid_BT, largest_BC):
        """Move theta towards the quantile of this batch; `largest_BC`: see `select_topk`.

        Scores drift together, so early averages must be short: of step t the decay is
        min(threshold_decay, 1 - 1 / (1 + 0.03 t)), an average over the last 3% of the steps.
        """
        scores, tokens_B = jax.lax.stop_gradient(score_BT), jnp.sum(valid_BT, axis=1)
        new = selection.topk_threshold(scores, self.capacity, selectable_BT, tokens_B, largest_BC)
        decay = jnp.minimum(
            self.config.threshold_decay, 1.0 - 1.0 / (1.0 + 0.03 * self.steps.value)
        )
        is_known = jnp.isfinite(new)
        old = self.quantile.value
        self.quantile.value = jnp.where(is_known, decay * old + (1.0 - decay) * new, old)
        self.steps.value += is_known


DECISIONS = {"aux_loss": RouterSign, "predictor": Predictor, "threshold": Threshold}


def sow_decision(module, prefix, masks, valid_BT, selectable_BT, loss=None):
    """Sow the statistics of a decision into `stats`, and its loss against top-k into `losses`.

    decided_fraction: tokens selected before the causal limit; overflow_fraction: selected but not
    admitted; pairs_fraction: (query, key) pairs among admitted tokens, of those among all tokens;
    accuracy, precision, recall: agreement with top-k.

    Args:
      masks: bool [B, T] of the selected tokens, the admitted ones, and those of top-k.
      valid_BT: the tokens of the sequence. selectable_BT: those that a recursion step may select.
      loss: (name, logits [B, T]), or None for a decision without one.
    """
    selected_BT, admitted_BT, topk_BT = masks
    tokens, length = jnp.sum(valid_BT, dtype=jnp.float32), selected_BT.shape[1]
    routed_B = jnp.sum(admitted_BT, axis=1, dtype=jnp.float32)
    pairs = jnp.sum(routed_B * (routed_B + 1.0)) / (length * (length + 1.0))
    rows = jnp.sum(jnp.any(valid_BT, axis=1), dtype=jnp.float32)
    count, overflow, both, largest = (
        jnp.sum(y_BT, dtype=jnp.float32)
        for y_BT in (selected_BT, selected_BT & ~admitted_BT, selected_BT & topk_BT, topk_BT)
    )
    stats = {
        "decided_fraction": batch_means.Mean(count, tokens),
        "overflow_fraction": batch_means.Mean(overflow, tokens),
        "pairs_fraction": batch_means.Mean(pairs, rows),
        "accuracy": batch_means.over((selected_BT == topk_BT).astype(jnp.float32), selectable_BT),
        "precision": batch_means.Mean(both, count),
        "recall": batch_means.Mean(both, largest),
    }
    for name, value in stats.items():
        batch_means.sow(module, "stats", f"{prefix}/{name}", value)
    if loss is not None:
        name, logit_BT = loss
        bce_BT = optax.sigmoid_binary_cross_entropy(logit_BT, topk_BT.astype(jnp.float32))
        batch_means.sow(module, "losses", name, batch_means.over(bce_BT, selectable_BT))


def sow_gates(module, score_BT, gate_BT, computed_BT, selectable_BT):
    """Sow into `stats` the mean and median size of the gates of selected tokens, and the standard
    deviation of the scores of valid tokens.

    The median is the mean over rows of each row's median.
    """
    size_BT, moments_BTX = jnp.abs(gate_BT), jnp.stack([score_BT, jnp.square(score_BT)], axis=-1)
    stats = {
        "gate": batch_means.over(size_BT, computed_BT),
        "gate_median": _median_of_rows(size_BT, computed_BT),
        "score_std": batch_means.over(moments_BTX, selectable_BT, _standard_deviation),
    }
    for name, mean in stats.items():
        batch_means.sow(module, "stats", f"router/{name}", mean)


def _median_of_rows(value_BT, mask_BT):
    """Mean over rows of the median of the values in the mask; rows without one do not count."""
    count_B1 = jnp.sum(mask_BT, axis=1, keepdims=True)
    ordered_BT = jnp.sort(jnp.where(mask_BT, value_BT, jnp.inf), axis=1)
    middle_BX = jnp.concatenate([(count_B1 - 1) // 2, count_B1 // 2], axis=1)
    middle_BX = jnp.clip(middle_BX, 0, value_BT.shape[1] - 1)
    median_B1 = jnp.mean(jnp.take_along_axis(ordered_BT, middle_BX, axis=1), axis=1, keepdims=True)
    return batch_means.over(median_B1, count_B1 > 0)


def _standard_deviation(moments_X):
    return jnp.sqrt(jnp.maximum(moments_X[1] - jnp.square(moments_X[0]), 0.0))
