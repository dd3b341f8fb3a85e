"""Mixture of Experts in place of a block's MLP: experts of static capacity behind a router.

Token choice (Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2021, arXiv 2101.03961): with
p = softmax(x W) a token selects the k experts of largest p,
    y_t = sum over selected e of w_te MLP_e(x_t),   w = p, renormalised over the selected.

Expert choice (Zhou et al. 2022, arXiv 2202.09368): an expert selects the C tokens of a sequence
with its largest logits, which looks ahead. Here it gets the causal form that Mixture-of-Depths has:
the gate is sigmoid(logit), and evaluation and sampling select by logit > 0.

Under a causal selection an expert computes at most ceil(rate (t + 1)) + HEADROOM of the tokens 0..t
of a sequence, the earlier first (`selection.admit`); it drops the others, which get nothing from
it. So the logits of a prefix depend on its tokens alone.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from efx import means
from efx.layers.config import MoEConfig
from efx.layers.linear import broadcast, mark_projection
from efx.layers.mlp import MLP, activate
from efx.layers.report import choices_requested, sow_choice
from efx.routing import admission, selection
from efx.sharding import constrain, exchange, parameter

ROUTER_STD = 0.02
# Axes of [E, B, C, D]: each device gathers the tokens of its own rows, then sends them to the
# device of their expert.
BY_ROW = None, "batch", None, "act_embed"
BY_EXPERT = "act_expert", "expert_batch", None, "act_embed"


class ExpertLinear(nn.Module):
    """A linear layer for each expert: kernel [E, D, F], bias [E, F]."""

    num_experts: int
    features: int
    axes: tuple
    std: float
    use_bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, expert_C=None):
        """[E, C, D] -> [E, C, F]; or [C, D] -> [C, F] with the expert of each row in `expert_C`."""

        def param(name, init, axes, *shape):
            value = parameter(self, name, init, (self.num_experts, *shape), ("expert", *axes))
            # Reads the weights of these experts only.
            value = value if expert_C is None else value.at[expert_C].get(mode="clip")
            return value.astype(self.dtype)

        init = nn.initializers.normal(self.std) if self.std else nn.initializers.zeros
        kernel = param("kernel", init, self.axes, x.shape[-1], self.features)
        x = x.astype(self.dtype)
        if expert_C is None:
            y = mark_projection(jnp.einsum("ECD,EDF->ECF", x, kernel))
        else:
            y = jnp.einsum("CD,CDF->CF", x, kernel)
        if self.use_bias:
            bias = param("bias", nn.initializers.zeros, self.axes[1:], self.features)
            y = y + broadcast(bias[:, None] if expert_C is None else bias, y.shape)
        return y


class Experts(nn.Module):
    """E independent MLPs, stacked. Inputs as of `ExpertLinear`, fields as of `MLP`.

    Attributes:
      features: width of the result; 0: that of x.
    """

    num_experts: int
    hidden: int
    activation: str
    use_bias: bool
    std: float
    std_out: float
    dtype: jnp.dtype
    features: int = 0

    @nn.compact
    def __call__(self, x, expert_C=None):
        def linear(name, features, axes, std):
            return ExpertLinear(
                self.num_experts, features, axes, std, self.use_bias, self.dtype, name=name
            )

        def inward(name):
            return linear(name, self.hidden, ("embed", "mlp"), self.std)(x, expert_C)

        h = activate(self.activation, inward)
        if expert_C is None:
            h = constrain(h, "act_expert", "expert_batch", "act_mlp")
        # Devices do not split a width other than that of x.
        axes = "mlp", "norm" if self.features else "embed"
        return linear("down", self.features or x.shape[-1], axes, self.std_out)(h, expert_C)


class MoE(nn.Module):
    """x [B, T, D] -> [B, T, D]: shared experts, and the experts that compute a token.

    Sows the losses `load_balance` and `router_z` (token choice) or `expert_bce` (expert choice),
    means over valid tokens, and statistics `moe/...`. Padding and unused slots of a depth-routed
    block are invalid. The cache counts the `admitted` tokens [B, E] and the `dropped` [B].

    Attributes:
      hidden: F of one expert; the others as in `MLP`.
      router_std: standard deviation of the router's initial weights.
    """

    config: MoEConfig
    hidden: int
    activation: str
    use_bias: bool
    std: float
    std_out: float
    dtype: jnp.dtype
    router_std: float = ROUTER_STD

    @nn.compact
    def __call__(self, x_BTD, call):
        c = self.config
        if call.train:
            warn_if_router_is_untrained(c)
        options = (self.activation, self.use_bias, self.std, self.std_out, self.dtype)
        experts = Experts(c.num_experts, self.hidden, *options, name="experts")
        # A router of zeros would send every token to the first experts.
        init, shape = nn.initializers.normal(self.router_std), (x_BTD.shape[-1], c.choices)
        router_DE = parameter(self, "router", init, shape, ("norm", None))
        highest = jax.lax.Precision.HIGHEST
        logits_BTE = jnp.einsum(
            "BTD,DE->BTE", x_BTD.astype(jnp.float32), router_DE, precision=highest
        )
        self.sow("intermediates", "router_logits", logits_BTE)
        y_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
        if c.num_shared:
            y_BTD += MLP(c.num_shared * self.hidden, *options, name="shared")(x_BTD, call)
        if call.selection != "off" or not c.num_noop:
            choose = self._token_choice if c.router == "token_choice" else self._expert_choice
            y_BTD += choose(experts, x_BTD, logits_BTE, call)
        return constrain(y_BTD.astype(self.dtype), "batch", "length", "act_embed")

    def _token_choice(self, experts, x_BTD, logits_BTE, call):
        c, (batch, length, width) = self.config, x_BTD.shape
        expert_BTK, weight_BTK = choose_experts(logits_BTE, c.top_k, c.renormalise)
        valid_BT = call.real(batch)
        # No-op experts have no entry.
        is_choice_BTKE = jax.nn.one_hot(expert_BTK, c.num_experts, dtype=bool)
        is_choice_BTKE = is_choice_BTKE & valid_BT[..., None, None]
        selected_BTE = jnp.any(is_choice_BTKE, axis=2)
        admitted_BTE = self._admit(selected_BTE, call)
        is_admitted_BTKE = is_choice_BTKE & admitted_BTE[:, :, None]
        weight_BTK = jnp.where(jnp.any(is_admitted_BTKE, axis=-1), weight_BTK, 0.0)
        self._report_token_choice(logits_BTE, expert_BTK, selected_BTE, admitted_BTE, valid_BT)
        if choices_requested(self):
            weight_BTE = jnp.sum(jnp.where(is_admitted_BTKE, weight_BTK[..., None], 0.0), axis=2)
            self._report_choices(selected_BTE, admitted_BTE, weight_BTE, call)
            if c.num_noop:
                sow_choice(self, "noop", jnp.sum(expert_BTK >= c.num_experts, axis=-1), call)
        if call.decode and length == 1 and batch * c.top_k < c.num_experts:
            # So few rows read the weights of their own experts only.
            y_CD = experts(jnp.repeat(x_BTD[:, 0], c.top_k, axis=0), expert_BTK.reshape(-1))
            y_BTKD = y_CD.reshape(batch, 1, c.top_k, width)
            return jnp.sum(selection.weighted(y_BTKD, weight_BTK), axis=2)

        def compute(experts, index_EBC):
            return sum_over_choices(experts, x_BTD, index_EBC, expert_BTK, weight_BTK)

        return self._compute(experts, compute, admitted_BTE, x_BTD, call)

    def _expert_choice(self, experts, x_BTD, logits_BTE, call):
        valid_BT = call.real(x_BTD.shape[0])
        selected_BTE = (logits_BTE > 0) & valid_BT[..., None]
        computed_BTE = admitted_BTE = self._admit(selected_BTE, call)
        if not call.decode:
            topk_BTE = self._select_topk(jax.lax.stop_gradient(logits_BTE), valid_BT, call)
            computed_BTE = topk_BTE if call.looks_ahead else admitted_BTE
            masks = selected_BTE, admitted_BTE, topk_BTE, computed_BTE
            self._report_expert_choice(logits_BTE, *masks, valid_BT)
        weight_BTE = jnp.where(computed_BTE, jax.nn.sigmoid(logits_BTE), 0.0)
        self._report_choices(selected_BTE, computed_BTE, weight_BTE, call)

        def compute(experts, index_EBC):
            return sum_over_experts(experts, x_BTD, index_EBC, weight_BTE)

        return self._compute(experts, compute, computed_BTE, x_BTD, call)

    def _select_topk(self, scores_BTE, valid_BT, call):
        def select(scores_BT):
            segments_BT = call.segment_ids_BT
            return selection.select_topk(scores_BT, self.config.capacity, valid_BT, segments_BT)

        return jax.vmap(select, in_axes=2, out_axes=2)(scores_BTE)

    def _admit(self, selected_BTE, call):
        """Mask of the selected tokens under the causal limit of each expert."""
        rate, length = self.config.rate(), selected_BTE.shape[1]
        if call.decode:
            names = "admitted", "dropped"
            return admission.admit_new_tokens(self, selected_BTE, rate, call, names)[0]
        admitted_BTE = selection.admit(selected_BTE, rate, call)
        # A packed row of many documents may have more tokens than slots.
        slots = self.config.slots(length, "causal")
        return admitted_BTE & (jnp.cumsum(admitted_BTE, axis=1) <= slots)

    def _compute(self, experts, compute, computed_BTE, x_BTD, call):
        """The sum [B, T, D] that `compute(experts, index_EBC)` returns for the tokens of a mask."""
        length = x_BTD.shape[1]
        slots = self.config.slots(length, "train" if call.looks_ahead else "causal")
        if not call.decode or slots == length or self.is_initializing():
            return compute(experts, jax.vmap(selection.compact, (2, None))(computed_BTE, slots))

        def add_round(experts, index_EBC, y_BTD):
            return y_BTD + compute(experts, index_EBC)

        # Of a later chunk an expert may compute more tokens than of the first.
        start_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
        return selection.in_rounds(experts, computed_BTE, slots, start_BTD, add_round)

    # ---- losses and statistics ----

    def _report_token_choice(self, logits_BTE, expert_BTK, selected_BTE, admitted_BTE, valid_BT):
        if not means.wanted(self):
            return
        c = self.config
        log_probs_BTE = jax.nn.log_softmax(logits_BTE, axis=-1)
        probs_BTE = jnp.exp(log_probs_BTE)
        # No-op experts are balanced like the others.
        chosen_BTE = jnp.sum(jax.nn.one_hot(expert_BTK, c.choices), axis=2)
        load = means.over(chosen_BTE / c.top_k, valid_BT)
        both = jnp.stack([load.total, means.over(probs_BTE, valid_BT).total])
        z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
        means.sow(self, "losses", "load_balance", means.Mean(both, load.count, load_balance))
        means.sow(self, "losses", "router_z", means.over(z_BT, valid_BT))
        expert_load, noop_load = jnp.split(load.total, [c.num_experts])
        dropped, computed = (
            jnp.sum(mask_BTE, dtype=jnp.float32) / c.top_k
            for mask_BTE in (selected_BTE & ~admitted_BTE, admitted_BTE)
        )
        for name, mean in {
            "dropped_fraction": means.Mean(dropped, load.count),
            "entropy": means.over(-jnp.sum(probs_BTE * log_probs_BTE, axis=-1), valid_BT),
            "max_load": means.Mean(c.choices * expert_load, load.count, jnp.max),
            "noop_fraction": means.Mean(jnp.sum(noop_load), load.count),
            "computed_fraction": means.Mean(computed, load.count),
        }.items():
            means.sow(self, "stats", f"moe/{name}", mean)

    def _report_expert_choice(
        self, logits_BTE, selected_BTE, admitted_BTE, topk_BTE, computed_BTE, valid_BT
    ):
        if not means.wanted(self):
            return
        # The causal selection learns to predict the top-k.
        bce_BTE = optax.sigmoid_binary_cross_entropy(logits_BTE, topk_BTE.astype(jnp.float32))
        means.sow(self, "losses", "expert_bce", means.over(jnp.mean(bce_BTE, axis=-1), valid_BT))
        load = means.over(selected_BTE.astype(jnp.float32), valid_BT)
        dropped = jnp.sum(selected_BTE & ~admitted_BTE, dtype=jnp.float32)
        entropy_BTE = optax.sigmoid_binary_cross_entropy(logits_BTE, jax.nn.sigmoid(logits_BTE))
        correct_BT = jnp.mean(selected_BTE == topk_BTE, axis=-1)
        unserved_BT = ~jnp.any(computed_BTE, axis=-1)
        for name, mean in {
            "dropped_fraction": means.Mean(dropped, jnp.sum(load.total)),
            "entropy": means.over(jnp.mean(entropy_BTE, axis=-1), valid_BT),
            "max_load": load.replace(function=max_over_mean),
            "decided_fraction": load.replace(total=jnp.mean(load.total)),
            "accuracy": means.over(correct_BT, valid_BT),
            "unserved_fraction": means.over(unserved_BT.astype(jnp.float32), valid_BT),
        }.items():
            means.sow(self, "stats", f"moe/{name}", mean)

    def _report_choices(self, selected_BTE, computed_BTE, weight_BTE, call):
        """Of each token: the experts that compute it (`served`), their `weights`, and the number
        of selected experts that do not (`full`)."""
        if choices_requested(self):
            sow_choice(self, "served", computed_BTE, call)
            sow_choice(self, "weights", weight_BTE, call)
            sow_choice(self, "full", jnp.sum(selected_BTE & ~computed_BTE, axis=-1), call)


def choose_experts(logits_BTE, top_k, renormalise):
    """Token choice: (the K experts of each token, their weights), [B, T, K] each."""
    expert_BTK = largest_indices(jax.lax.stop_gradient(logits_BTE), top_k)
    expert_BTK = checkpoint_name(expert_BTK, selection.SELECTION)
    is_choice_BTKE = jax.nn.one_hot(expert_BTK, logits_BTE.shape[-1], dtype=bool)
    probs_BTKE = jnp.where(is_choice_BTKE, jax.nn.softmax(logits_BTE, axis=-1)[:, :, None], 0.0)
    weight_BTK = jnp.sum(probs_BTKE, axis=-1)
    if renormalise:
        weight_BTK = weight_BTK / jnp.sum(weight_BTK, axis=-1, keepdims=True)
    return expert_BTK, weight_BTK


def sum_over_choices(experts, x_BTD, index_EBC, expert_BTK, weight_BTK):
    """float32 [B, T, D]: weight * expert(x), summed over the K choices of each token.

    The rows that are gathered and scattered are (token, choice) pairs: no two slots have the same
    one, so that the gradient needs no sum in an order that depends on the device.
    """
    (batch, length, width), (num_experts, _, slots) = x_BTD.shape, index_EBC.shape
    top_k = expert_BTK.shape[-1]
    # The choice of each token that each expert is, and the pair in each slot.
    choice_BTE = jnp.argmax(jax.nn.one_hot(expert_BTK, num_experts, dtype=bool), axis=2)
    choice_EBC = jax.vmap(selection.take, in_axes=(2, 0))(choice_BTE, index_EBC)
    pair_BS = jnp.moveaxis(index_EBC * top_k + choice_EBC, 0, 1).reshape(batch, -1)
    pair_BS = selection.distinct(pair_BS, length * top_k)
    x_BTKD = broadcast(x_BTD[:, :, None], (batch, length, top_k, width))
    x_BSD = jax.vmap(
        lambda x_PD, pair: x_PD.at[pair].get(mode="fill", fill_value=0, unique_indices=True)
    )(x_BTKD.reshape(batch, -1, width), pair_BS)
    x_EBCD = jnp.moveaxis(x_BSD.reshape(batch, num_experts, slots, width), 1, 0)
    y_BSD = jnp.moveaxis(run_experts(experts, x_EBCD), 0, 1).reshape(batch, -1, width)
    y_PD = jnp.zeros((length * top_k, width), y_BSD.dtype)
    y_BPD = jax.vmap(lambda pair, y: y_PD.at[pair].set(y, mode="drop", unique_indices=True))(
        pair_BS, y_BSD
    )
    return jnp.sum(selection.weighted(y_BPD.reshape(x_BTKD.shape), weight_BTK), axis=2)


def sum_over_experts(experts, x_BTD, index_EBC, weight_BTE):
    """float32 [B, T, D]: weight * expert(x), summed over any number of experts of each token.

    One expert after the other, so that the order of the sum does not depend on the device.
    """
    wide_BTD = x_BTD.astype(jnp.float32)  # the gradient of x is a sum, too
    x_EBCD = jax.lax.map(
        lambda index_BC: selection.take(wide_BTD, index_BC).astype(x_BTD.dtype), index_EBC
    )
    y_EBCD = run_experts(experts, x_EBCD)
    weight_EBC = jax.vmap(selection.take, in_axes=(2, 0))(weight_BTE, index_EBC)

    def add_expert(y_BTD, expert):
        index_BC, y_BCD, weight_BC = expert
        return selection.add(y_BTD, index_BC, selection.weighted(y_BCD, weight_BC)), None

    start_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
    return jax.lax.scan(add_expert, start_BTD, (index_EBC, y_EBCD, weight_EBC))[0]


def run_experts(experts, x_EBCD):
    """[E, B, C, D] -> [E, B, C, D], the slots of all rows as the rows of one matrix an expert."""
    num_experts, _, _, width = x_EBCD.shape
    x_ECD = exchange(x_EBCD, BY_ROW, BY_EXPERT).reshape(num_experts, -1, width)
    return exchange(experts(x_ECD).reshape(x_EBCD.shape), BY_EXPERT, BY_ROW)


def largest_indices(scores, count):
    """Indices [..., count] of the largest of the last axis, descending; of equals the first first.

    Passes of argmax: a mesh that splits the rows gathers all of them for `jax.lax.top_k`.
    """
    indices = []
    for _ in range(count):
        index = jnp.argmax(scores, axis=-1)
        indices.append(index)
        scores = jnp.where(jax.nn.one_hot(index, scores.shape[-1], dtype=bool), -jnp.inf, scores)
    return jnp.stack(indices, axis=-1)


def load_balance(mean_2E):
    """E * sum over experts of load * probability (Switch Transformers, equation 4). A function of
    the means over a whole batch, in which it is not linear."""
    return mean_2E.shape[1] * jnp.sum(mean_2E[0] * mean_2E[1])


def max_over_mean(load_E):
    return load_E.size * jnp.max(load_E) / jnp.maximum(jnp.sum(load_E), 1e-9)


@functools.cache
def warn_if_router_is_untrained(c):
    """Warn, once a process, of a `MoEConfig` whose router learns from its losses only."""
    if c.router == "token_choice" and c.top_k == 1 and c.renormalise:
        logging.getLogger(__name__).warning(
            "config.model.mlp.moe.renormalise=True with top_k=1: renormalised top-1 experts have "
            "weight 1, so the router gets no gradient but from load_balance and router_z; set "
            "renormalise=False"
        )
