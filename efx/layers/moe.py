"""Mixture of Experts in place of a block's MLP: a router, and experts of static capacity.

Token choice (Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2021, arXiv 2101.03961): with
p = softmax(x W) a token selects the k experts of largest p,
    y_t = sum over selected e of w_te MLP_e(x_t),   w = p, renormalised over the selected.

Expert choice (Zhou et al. 2022, arXiv 2202.09368): an expert selects the C tokens of a sequence
with its largest logits, which looks ahead. As for Mixture-of-Depths, the gate is sigmoid(logit),
and evaluation and sampling select causally, by logit > 0.

Under a causal selection an expert admits at most ceil(rate (t + 1)) + HEADROOM of the tokens 0..t
of a sequence, the earlier first (`selection.admit`). The sums of other tokens lack it.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from efx.layers import admission, batch_means, selection
from efx.layers.config import MoEConfig
from efx.layers.linear import broadcast, mark_projection
from efx.layers.mlp import MLP, activate
from efx.layers.report import health_requested, sow_choice
from efx.parallel.collectives import exchange
from efx.parallel.sharding import constrain, parameter

ROUTER_STD = 0.02
# Logical axes of [E, B, C, D]: a device gathers tokens of its rows, then sends them to the devices
# of their experts.
BY_ROW = None, "batch", None, "act_embed"
BY_EXPERT = "act_expert", "expert_batch", None, "act_embed"


class ExpertLinear(nn.Module):
    """E linear layers: kernel [E, D, F], bias [E, F]. Or, `is_shared`, one for all experts."""

    num_experts: int
    features: int
    axes: tuple
    std: float
    use_bias: bool
    dtype: jnp.dtype
    is_shared: bool = False

    @nn.compact
    def __call__(self, x, expert_C=None):
        """[E, C, D] -> [E, C, F]; or [C, D] -> [C, F] with the expert of each row in `expert_C`."""

        def param(name, init, axes, *shape):
            if self.is_shared:
                return parameter(self, name, init, shape, axes).astype(self.dtype)
            value = parameter(self, name, init, (self.num_experts, *shape), ("expert", *axes))
            if expert_C is not None:
                value = value.at[expert_C].get(mode="clip")  # reads only these experts
            return value.astype(self.dtype)

        init = nn.initializers.normal(self.std) if self.std else nn.initializers.zeros
        kernel = param("kernel", init, self.axes, x.shape[-1], self.features)
        if self.is_shared:
            # One product per expert: with one axis for the rows of all experts, devices that split
            # the batch would have to gather it.
            kernel = broadcast(kernel, (self.num_experts, *kernel.shape))
        product = "ECD,EDF->ECF" if expert_C is None else "CD,CDF->CF"
        y = mark_projection(jnp.einsum(product, x.astype(self.dtype), kernel))
        if self.use_bias:
            bias = param("bias", nn.initializers.zeros, self.axes[1:], self.features)
            is_stacked = not self.is_shared and expert_C is None
            y = y + broadcast(bias[:, None] if is_stacked else bias, y.shape)
        return y


class Experts(MLP):
    """E MLPs with stacked parameters. Inputs as in `ExpertLinear`."""

    num_experts: int

    @nn.compact
    def __call__(self, x, expert_C=None):
        def linear(name, features, axes, std):
            options = self.use_bias, self.dtype
            return ExpertLinear(self.num_experts, features, axes, std, *options, name=name)

        def project(name):
            return linear(name, self.hidden, ("embed", "mlp"), self.std)(x, expert_C)

        h = activate(self.activation, project)
        if expert_C is None:
            h = constrain(h, "act_expert", "expert_batch", "act_mlp")
        return linear("down", x.shape[-1], ("mlp", "embed"), self.std_out)(h, expert_C)


class MoE(MLP):
    """x [B, T, D] -> [B, T, D]: the sum of shared and admitted experts.

    Sows the losses `load_balance` and `router_z` (token choice) or `expert_bce` (expert choice),
    means over valid tokens, and statistics `moe/...`. Padding and unused slots of a depth-routed
    block are invalid. The cache counts choices, see `admission.admit`.

    Attributes:
      hidden: F of one expert.
      router_std: standard deviation of the router's initial weights.
    """

    config: MoEConfig
    router_std: float = ROUTER_STD

    @nn.compact
    def __call__(self, x_BTD, call):
        c = self.config
        if call.train:
            warn_if_router_is_untrained(c)
        options = (self.activation, self.use_bias, self.std, self.std_out, self.dtype)
        experts = Experts(self.hidden, *options, c.num_experts, name="experts")
        # From zero, the router would select the first experts for every token.
        init, shape = nn.initializers.normal(self.router_std), (x_BTD.shape[-1], c.num_choices)
        router_DE = parameter(self, "router", init, shape, ("norm", None))
        logits_BTE = jnp.einsum(
            "BTD,DE->BTE", x_BTD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST
        )
        self.sow("intermediates", "router_logits", logits_BTE)
        y_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
        if c.num_shared:
            y_BTD += MLP(c.num_shared * self.hidden, *options, name="shared")(x_BTD)
        if call.selection != "off" or not c.num_noop:
            choose = self._token_choice if c.router == "token_choice" else self._expert_choice
            y_BTD += choose(experts, x_BTD, logits_BTE, call)
        return constrain(y_BTD.astype(self.dtype), "batch", "length", "act_embed")

    def _token_choice(self, experts, x_BTD, logits_BTE, call):
        c, (batch, length, width) = self.config, x_BTD.shape
        expert_BTK = largest_indices(jax.lax.stop_gradient(logits_BTE), c.top_k)
        expert_BTK = checkpoint_name(expert_BTK, selection.SELECTION)
        is_choice_BTKE = jax.nn.one_hot(expert_BTK, c.num_choices, dtype=bool)
        probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        weight_BTK = jnp.sum(jnp.where(is_choice_BTKE, probs_BTE[:, :, None], 0.0), axis=-1)
        if c.renormalise:
            weight_BTK = weight_BTK / jnp.sum(weight_BTK, axis=-1, keepdims=True)
        valid_BT = call.valid_mask(batch)
        # No-op experts admit no tokens.
        is_choice_BTKE = is_choice_BTKE[..., : c.num_experts] & valid_BT[..., None, None]
        selected_BTE = jnp.any(is_choice_BTKE, axis=2)
        admitted_BTE, _ = admission.admit(
            self, selected_BTE, c.rate(), c.slots(length, "causal"), call
        )
        is_admitted_BTKE = is_choice_BTKE & admitted_BTE[:, :, None]
        weight_BTK = jnp.where(jnp.any(is_admitted_BTKE, axis=-1), weight_BTK, 0.0)
        weight_BTE = jnp.sum(jnp.where(is_admitted_BTKE, weight_BTK[..., None], 0.0), axis=2)
        self._sow_choices(selected_BTE, admitted_BTE, weight_BTE, call)
        if c.num_noop:
            sow_choice(self, "noop", jnp.sum(expert_BTK >= c.num_experts, axis=-1), call)
        if batch_means.is_collecting(self):
            self._report_token_choice(logits_BTE, expert_BTK, selected_BTE, admitted_BTE, valid_BT)
        if not c.renormalise:  # else the weights of a token add up to 1, whatever the router does
            self._sow_weights(weight_BTE, admitted_BTE, call)
        if call.decode and length == 1 and batch * c.top_k < c.num_experts:
            # Read only the weights of the selected experts, which are fewer than all.
            y_CD = experts(jnp.repeat(x_BTD[:, 0], c.top_k, axis=0), expert_BTK.reshape(-1))
            y_BTKD = y_CD.reshape(batch, 1, c.top_k, width)
            return jnp.sum(selection.scale(y_BTKD, weight_BTK), axis=2)
        choices = is_choice_BTKE, weight_BTK
        return self._compute(sum_over_choices, experts, x_BTD, admitted_BTE, choices, call)

    def _expert_choice(self, experts, x_BTD, logits_BTE, call):
        c = self.config
        limit = c.rate(), c.slots(x_BTD.shape[1], "causal")
        masks = admission.choose_by_sign(
            self, logits_BTE, c.capacity, *limit, call, loss="expert_bce"
        )
        computed_BTE, selected_BTE, *_ = masks
        if not call.decode and batch_means.is_collecting(self):
            self._report_expert_choice(logits_BTE, *masks, call.valid_mask(len(x_BTD)))
        weight_BTE = jnp.where(computed_BTE, jax.nn.sigmoid(logits_BTE), 0.0)
        self._sow_weights(weight_BTE, computed_BTE, call)
        self._sow_choices(selected_BTE, computed_BTE, weight_BTE, call)
        return self._compute(sum_over_experts, experts, x_BTD, computed_BTE, (weight_BTE,), call)

    def _compute(self, sum_fn, experts, x_BTD, computed_BTE, choices, call):
        """`sum_fn(experts, x_BTD, index_EBC, *choices)` for the tokens of a mask."""
        length = x_BTD.shape[1]
        slots = self.config.slots(length, "train" if call.looks_ahead else "causal")
        if not call.decode or slots == length or self.is_initializing():
            index_EBC = jax.vmap(selection.compact, (2, None))(computed_BTE, slots)
            return sum_fn(experts, x_BTD, index_EBC, *choices)

        def add_round(experts, index_EBC, y_BTD):
            return y_BTD + sum_fn(experts, x_BTD, index_EBC, *choices)

        # `slots` counts from the start of a sequence: a later chunk may have more admitted tokens.
        zeros_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
        return selection.loop_over_selected(experts, computed_BTE, slots, zeros_BTD, add_round)

    # ---- losses and statistics ----

    def _report_token_choice(self, logits_BTE, expert_BTK, selected_BTE, admitted_BTE, valid_BT):
        c = self.config
        log_probs_BTE = jax.nn.log_softmax(logits_BTE, axis=-1)
        probs_BTE = jnp.exp(log_probs_BTE)
        # No-op experts are balanced like the others.
        chosen_BTE = jnp.sum(jax.nn.one_hot(expert_BTK, c.num_choices), axis=2)
        load = batch_means.over(chosen_BTE / c.top_k, valid_BT)
        both = jnp.stack([load.total, batch_means.over(probs_BTE, valid_BT).total])
        z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
        batch_means.sow(
            self, "losses", "load_balance", batch_means.Mean(both, load.count, load_balance)
        )
        batch_means.sow(self, "losses", "router_z", batch_means.over(z_BT, valid_BT))
        expert_load, noop_load = jnp.split(load.total, [c.num_experts])
        computed = jnp.sum(admitted_BTE, dtype=jnp.float32) / c.top_k
        overflow = jnp.sum(selected_BTE & ~admitted_BTE, dtype=jnp.float32) / c.top_k
        self._sow_statistics(
            overflow_fraction=batch_means.Mean(overflow, load.count),
            entropy=batch_means.over(-jnp.sum(probs_BTE * log_probs_BTE, axis=-1), valid_BT),
            max_load=batch_means.Mean(c.num_choices * expert_load, load.count, jnp.max),
            min_load=batch_means.Mean(c.num_choices * expert_load, load.count, jnp.min),
            noop_fraction=batch_means.Mean(jnp.sum(noop_load), load.count),
            computed_fraction=batch_means.Mean(computed, load.count),
        )

    def _report_expert_choice(
        self, logits_BTE, computed_BTE, selected_BTE, admitted_BTE, topk_BTE, valid_BT
    ):
        load = batch_means.over(selected_BTE.astype(jnp.float32), valid_BT)
        overflow = jnp.sum(selected_BTE & ~admitted_BTE, dtype=jnp.float32)
        entropy_BTE = optax.sigmoid_binary_cross_entropy(logits_BTE, jax.nn.sigmoid(logits_BTE))
        correct_BT = jnp.mean(selected_BTE == topk_BTE, axis=-1)
        unserved_BT = ~jnp.any(computed_BTE, axis=-1)
        self._sow_statistics(
            overflow_fraction=batch_means.Mean(overflow, jnp.sum(load.total)),
            entropy=batch_means.over(jnp.mean(entropy_BTE, axis=-1), valid_BT),
            max_load=load.replace(function=max_over_mean),
            min_load=load.replace(function=min_over_mean),
            decided_fraction=load.replace(total=jnp.mean(load.total)),
            accuracy=batch_means.over(correct_BT, valid_BT),
            unserved_fraction=batch_means.over(unserved_BT.astype(jnp.float32), valid_BT),
        )

    def _sow_weights(self, weight_BTE, computed_BTE, call):
        if health_requested(self, call):
            weight, count = jnp.sum(weight_BTE), jnp.sum(computed_BTE, dtype=jnp.float32)
            self._sow_statistics(weight=batch_means.Mean(weight, count))

    def _sow_statistics(self, **statistics):
        for name, mean in statistics.items():
            batch_means.sow(self, "stats", f"moe/{name}", mean)

    def _sow_choices(self, selected_BTE, computed_BTE, weight_BTE, call):
        """Sow, for each token, the experts that compute it (`served`), their `weights`, and the
        number of selected experts that do not compute it (`overflow`)."""
        sow_choice(self, "served", computed_BTE, call)
        sow_choice(self, "weights", weight_BTE, call)
        sow_choice(self, "overflow", jnp.sum(selected_BTE & ~computed_BTE, axis=-1), call)


# ---- sums of experts ---------------------------------------------------------------------------
# float32 [B, T, D]: the sum of weight * expert(x) over the experts of each token, in the same order
# on every device. index_EBC: the tokens that each expert computes.


def sum_over_choices(experts, x_BTD, index_EBC, is_choice_BTKE, weight_BTK):
    """The sum over K experts of each token.

    Gathers and scatters (token, choice) pairs. Each is in one slot at most, so neither the result
    nor the gradient of x is a sum of unordered updates.
    """
    (batch, length, width), (num_experts, _, slots) = x_BTD.shape, index_EBC.shape
    top_k = weight_BTK.shape[-1]
    # The choice of each token that is this expert, and the pair in each slot.
    choice_BTE = jnp.argmax(is_choice_BTKE, axis=2)
    choice_EBC = jax.vmap(selection.gather, in_axes=(2, 0))(choice_BTE, index_EBC)
    pair_BS = jnp.moveaxis(index_EBC * top_k + choice_EBC, 0, 1).reshape(batch, -1)
    pair_BS = selection.distinct(pair_BS, length * top_k)

    def gather(x_PD, pair_S):
        return x_PD.at[pair_S].get(mode="fill", fill_value=0, unique_indices=True)

    def scatter(y_SD, pair_S):
        y_PD = jnp.zeros((length * top_k, width), y_SD.dtype)
        return y_PD.at[pair_S].set(y_SD, mode="drop", unique_indices=True)

    x_BTKD = broadcast(x_BTD[:, :, None], (batch, length, top_k, width))
    x_BSD = jax.vmap(gather)(x_BTKD.reshape(batch, -1, width), pair_BS)
    x_EBCD = jnp.moveaxis(x_BSD.reshape(batch, num_experts, slots, width), 1, 0)
    y_BSD = jnp.moveaxis(run_experts(experts, x_EBCD), 0, 1).reshape(batch, -1, width)
    y_BTKD = jax.vmap(scatter)(y_BSD, pair_BS).reshape(x_BTKD.shape)
    return jnp.sum(selection.scale(y_BTKD, weight_BTK), axis=2)


def sum_over_experts(experts, x_BTD, index_EBC, weight_BTE):
    """The sum over any number of experts of each token: adds one expert after the other."""
    wide_BTD = x_BTD.astype(jnp.float32)  # the gradient of x is a sum over experts
    x_EBCD = jax.lax.map(
        lambda index_BC: selection.gather(wide_BTD, index_BC).astype(x_BTD.dtype), index_EBC
    )
    y_EBCD = run_experts(experts, x_EBCD)
    weight_EBC = jax.vmap(selection.gather, in_axes=(2, 0))(weight_BTE, index_EBC)

    def add_expert(y_BTD, expert):
        index_BC, y_BCD, weight_BC = expert
        return selection.scatter_add(y_BTD, index_BC, selection.scale(y_BCD, weight_BC)), None

    zeros_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
    return jax.lax.scan(add_expert, zeros_BTD, (index_EBC, y_EBCD, weight_EBC))[0]


def run_experts(experts, x_EBCD):
    """[E, B, C, D] -> [E, B, C, D]; an expert computes the slots of all rows as one matrix."""
    num_experts, _, _, width = x_EBCD.shape
    x_ECD = exchange(x_EBCD, BY_ROW, BY_EXPERT).reshape(num_experts, -1, width)
    return exchange(experts(x_ECD).reshape(x_EBCD.shape), BY_EXPERT, BY_ROW)


def largest_indices(scores, count):
    """Indices [..., count] of the largest scores of the last axis, descending; ties: the first.

    By argmax, because `jax.lax.top_k` gathers all rows on a mesh that splits them.
    """
    indices = []
    for _ in range(count):
        index = jnp.argmax(scores, axis=-1)
        indices.append(index)
        scores = jnp.where(jax.nn.one_hot(index, scores.shape[-1], dtype=bool), -jnp.inf, scores)
    return jnp.stack(indices, axis=-1)


def load_balance(mean_2E):
    """E * sum over experts of load * probability (Fedus et al. 2021, equation 4).

    Args:
      mean_2E: the load and the probability of each expert, means over a batch.
    """
    return mean_2E.shape[1] * jnp.sum(mean_2E[0] * mean_2E[1])


def max_over_mean(load_E):
    return load_E.size * jnp.max(load_E) / jnp.maximum(jnp.sum(load_E), 1e-9)


def min_over_mean(load_E):
    return load_E.size * jnp.min(load_E) / jnp.maximum(jnp.sum(load_E), 1e-9)


@functools.cache
def warn_if_router_is_untrained(c):
    """Warn, once per process, if the router of a `MoEConfig` learns from its own losses only."""
    if c.router == "token_choice" and c.top_k == 1 and c.renormalise:
        logging.getLogger(__name__).warning(
            "config.model.mlp.moe.renormalise=True with top_k=1: renormalised top-1 experts have "
            "weight 1, so only load_balance and router_z train the router; set renormalise=False"
        )
