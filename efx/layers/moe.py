"""Mixture of Experts in place of a block's MLP: experts of static capacity behind a router.

Token choice (Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2021, arXiv 2101.03961): with
p = softmax(x W) a token goes to the k experts of largest p,
    y_t = sum over chosen e of w_te MLP_e(x_t),   w = p renormalised over the chosen.
An expert has room for C tokens of a sequence and serves them in time order; who comes later gets
nothing from it. What a token gets so depends on earlier tokens only.

Expert choice (Zhou et al. 2022, arXiv 2202.09368): an expert takes the C tokens of a sequence with
its largest logits, which looks ahead. Here it gets the causal form that Mixture-of-Depths has:
the gate is sigmoid(logit), and evaluation and sampling decide by logit > 0.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from efx import means
from efx.layers import kv_cache
from efx.layers.config import MoEConfig
from efx.layers.linear import broadcast, projection
from efx.layers.mlp import MLP, activate
from efx.layers.report import choices_requested, sow_choice
from efx.parameter import parameter
from efx.routing import plans
from efx.sharding import constrain, exchange

ROUTER_STD = 0.02


class ExpertLinear(nn.Module):
    """A linear layer for each expert: kernel [E, D, F], bias [E, F]."""

    num_experts: int
    features: int
    axes: tuple
    std: float
    use_bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, experts_C=None):
        """[E, C, D] -> [E, C, F], or, with `experts_C`, [C, D] -> [C, F], row i by its expert."""

        def param(name, init, axes, *shape):
            axes = "expert", *axes
            value = parameter(self, name, init, (self.num_experts, *shape), axes)
            if experts_C is not None:
                value = value.at[experts_C].get(mode="clip")
            return value.astype(self.dtype)

        init = nn.initializers.normal(self.std) if self.std else nn.initializers.zeros
        kernel = param("kernel", init, self.axes, x.shape[-1], self.features)
        x = x.astype(self.dtype)
        if experts_C is None:
            y = projection(jnp.einsum("ECD,EDF->ECF", x, kernel))
        else:
            y = jnp.einsum("CD,CDF->CF", x, kernel)
        if self.use_bias:
            bias = param("bias", nn.initializers.zeros, self.axes[1:], self.features)
            y = y + broadcast(bias[:, None] if experts_C is None else bias, y.shape)
        return y


class Experts(nn.Module):
    """E independent MLPs, stacked. Fields as in `MLP`; see `ExpertLinear` for the two forms.
    `features` is the width of the result; 0: that of x."""

    num_experts: int
    hidden: int
    activation: str
    use_bias: bool
    std: float
    std_out: float
    dtype: jnp.dtype
    features: int = 0

    @nn.compact
    def __call__(self, x, experts_C=None):
        def linear(name, features, axes, std):
            return ExpertLinear(
                self.num_experts, features, axes, std, self.use_bias, self.dtype, name=name
            )

        def inward(name):
            return linear(name, self.hidden, ("embed", "mlp"), self.std)(x, experts_C)

        h = activate(self.activation, inward)
        if experts_C is None:
            h = constrain(h, "act_expert", "expert_batch", "act_mlp")
        features = self.features or x.shape[-1]
        # A width of its own is not split over devices.
        axes = "mlp", "norm" if self.features else "embed"
        return linear("down", features, axes, self.std_out)(h, experts_C)


class MoE(nn.Module):
    """x [B, T, D] -> [B, T, D], zero for a token that no expert serves.

    Sows the losses `load_balance` and `router_z` (token choice) or `expert_bce` (expert choice),
    averaged over valid tokens, and diagnostics `moe/...` into `stats`. Padding, and empty slots
    of a depth-routed block, take no room and count in nothing. Each document of a packed row has
    its own share of an expert's slots.

    Attributes:
      hidden: F of one expert; the others as in `MLP`.
      router_std: of what the router starts from.
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
        options = (self.activation, self.use_bias, self.std, self.std_out, self.dtype)
        experts = Experts(c.num_experts, self.hidden, *options, name="experts")
        # Starting at zero would send every token to the first experts.
        init, shape = nn.initializers.normal(self.router_std), (x_BTD.shape[-1], c.choices)
        router_DE = parameter(self, "router", init, shape, ("norm", None))
        logits_BTE = jnp.einsum(
            "BTD,DE->BTE",
            x_BTD.astype(jnp.float32),
            router_DE,
            precision=jax.lax.Precision.HIGHEST,
        )
        self.sow("intermediates", "router_logits", logits_BTE)
        valid_BT = call.real(x_BTD.shape[0])
        if c.router == "token_choice":
            best, wanted_BTE, weight_BTE = self._choose(logits_BTE, valid_BT, call)
        else:
            best, weight_BTE = None, jax.nn.sigmoid(logits_BTE)
            wanted_BTE = (logits_BTE > 0) & valid_BT[..., None]
        if c.num_shared:
            start_BTD = MLP(c.num_shared * self.hidden, *options, name="shared")(x_BTD, call)
        else:
            start_BTD = jnp.zeros(x_BTD.shape, self.dtype)
        if call.decode:
            return self._decode(start_BTD, x_BTD, best, wanted_BTE, weight_BTE, experts, call)
        plan = self._plan(logits_BTE, wanted_BTE, valid_BT, call)
        self._report_choices(plan, best, wanted_BTE, weight_BTE, call)
        return _compute(start_BTD, x_BTD, best, weight_BTE, plan, experts)

    def _choose(self, logits_BTE, valid_BT, call):
        """Token choice: (the k choices of each token [B, T, k], which experts it wants, with which
        weights); what is wanted and weighed are the experts without the no-op ones."""
        c = self.config
        probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        best = plans.best(jax.lax.stop_gradient(logits_BTE), c.top_k)
        chosen_BTE = jnp.any(jax.nn.one_hot(best, c.choices, dtype=bool), axis=-2)
        weight_BTE = jnp.where(chosen_BTE, probs_BTE, 0.0)
        if c.renormalise:
            weight_BTE = weight_BTE / jnp.sum(weight_BTE, axis=-1, keepdims=True)
        chosen_BTE = chosen_BTE & valid_BT[..., None]
        self._report_token_choice(logits_BTE, chosen_BTE, valid_BT, call)
        return best, chosen_BTE[..., : c.num_experts], weight_BTE[..., : c.num_experts]

    def _budget(self, length, selection, call):
        return self.config.budget(length, selection, call.documents())

    def _report_token_choice(self, logits_BTE, chosen_BTE, valid_BT, call):
        if not means.wanted(self):
            return
        c, length = self.config, logits_BTE.shape[1]
        log_probs_BTE = jax.nn.log_softmax(logits_BTE, axis=-1)
        probs_BTE = jnp.exp(log_probs_BTE)
        # No-op experts are balanced like the others: each gets its share of the tokens.
        share = means.over(chosen_BTE / c.top_k, valid_BT)
        probability = means.over(probs_BTE, valid_BT)
        both = means.Mean(jnp.stack([share.total, probability.total]), share.count, _balance)
        z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
        means.sow(self, "losses", "load_balance", both)
        means.sow(self, "losses", "router_z", means.over(z_BT, valid_BT))
        wanted_BTE = chosen_BTE[..., : c.num_experts]
        dropped = _surplus(wanted_BTE, self._budget(length, "causal", call))
        entropy_BT = -jnp.sum(probs_BTE * log_probs_BTE, axis=-1)
        busy, idle = share.total[: c.num_experts], share.total[c.num_experts :]
        for name, mean in {
            "dropped_fraction": means.Mean(dropped / c.top_k, share.count),
            "entropy": means.over(entropy_BT, valid_BT),
            "max_load": means.Mean(c.choices * busy, share.count, jnp.max),
            "noop_fraction": means.Mean(jnp.sum(idle), share.count),
            "computed_fraction": means.Mean(jnp.sum(busy) - dropped / c.top_k, share.count),
        }.items():
            means.sow(self, "stats", f"moe/{name}", mean)

    def _plan(self, logits_BTE, wanted_BTE, valid_BT, call):
        """Plan of the tokens of each expert, [E, B, C]."""
        length = logits_BTE.shape[1]
        causal = self._budget(length, "causal", call)
        plan = plans.for_each_expert(causal.first, wanted_BTE)
        if self.config.router == "token_choice":
            return plan
        ahead = self._budget(length, "train", call)
        top = plans.for_each_expert(ahead.top, jax.lax.stop_gradient(logits_BTE), valid_BT)
        run = top if call.looks_ahead else plan
        self._report_expert_choice(logits_BTE, wanted_BTE, valid_BT, top, run, causal)
        return run

    def _report_expert_choice(self, logits_BTE, wanted_BTE, valid_BT, top, run, causal):
        """`top`: the plan that looks ahead, target of the decision; `run`: the executed one."""
        if not means.wanted(self):
            return
        length = logits_BTE.shape[1]
        target_BTE = plans.selected_by_experts(top, length)
        bce_BTE = optax.sigmoid_binary_cross_entropy(logits_BTE, target_BTE.astype(jnp.float32))
        bce = means.over(jnp.mean(bce_BTE, axis=-1), valid_BT)
        means.sow(self, "losses", "expert_bce", bce)
        load = means.over(wanted_BTE.astype(jnp.float32), valid_BT)
        dropped = _surplus(wanted_BTE, causal)
        correct_BT = jnp.mean(wanted_BTE == target_BTE, axis=-1)
        entropy_BTE = optax.sigmoid_binary_cross_entropy(logits_BTE, jax.nn.sigmoid(logits_BTE))
        unserved_BT = ~jnp.any(plans.selected_by_experts(run, length), axis=-1)
        for name, mean in {
            "dropped_fraction": means.Mean(dropped, jnp.sum(load.total)),
            "entropy": means.over(jnp.mean(entropy_BTE, axis=-1), valid_BT),
            "max_load": load.replace(function=_busiest),
            "decided_fraction": load.replace(total=jnp.mean(load.total)),
            "accuracy": means.over(correct_BT, valid_BT),
            "unserved_fraction": means.over(unserved_BT.astype(jnp.float32), valid_BT),
        }.items():
            means.sow(self, "stats", f"moe/{name}", mean)

    def _report_choices(self, plan, best, wanted_BTE, weight_BTE, call):
        """Of each token: `served`, which experts compute it, and their `weights`, 0 for the others;
        `full`, how many more it wants; `noop`, how many of its choices are no-op experts."""
        if not choices_requested(self):
            return
        served_BTE = plans.selected_by_experts(plan, wanted_BTE.shape[1])
        sow_choice(self, "served", served_BTE, call)
        sow_choice(self, "weights", jnp.where(served_BTE, weight_BTE, 0.0), call)
        sow_choice(self, "full", jnp.sum(wanted_BTE & ~served_BTE, axis=-1), call)
        if self.config.num_noop:
            sow_choice(self, "noop", jnp.sum(best >= self.config.num_experts, axis=-1), call)

    def _decode(self, start_BTD, x_BTD, best, wanted_BTE, weight_BTE, experts, call):
        """`_compute` of new tokens of each row, served or not by what the cache says about the
        earlier ones."""
        c = self.config
        rows, length, width = x_BTD.shape
        room = c.slots(call.cache.size, "causal")
        run_BTE = kv_cache.admit(self, wanted_BTE, room, call, "taken", "dropped")
        if self.is_initializing():
            return x_BTD
        if length > 1:

            def add_round(experts, plan, y_BTD):
                return _compute(y_BTD, x_BTD, best, weight_BTE, plan, experts)

            # The experts of a token may come in several rounds, between which nothing is rounded.
            wide_BTD = start_BTD.astype(jnp.float32)
            slots = min(c.slots(length, "causal"), room)
            y_BTD = plans.in_rounds(experts, run_BTE, slots, wide_BTD, add_round)
            return y_BTD.astype(start_BTD.dtype)
        x_BD, weight_BE = x_BTD[:, 0], jnp.where(run_BTE, weight_BTE, 0.0)[:, 0]
        if best is None or rows * c.top_k >= c.num_experts:
            # All experts on all rows reads every weight once, which is what a step costs.
            y_EBD = experts(jnp.broadcast_to(x_BD, (c.num_experts, rows, width)))
            y_BD = jnp.sum(plans.weighed(y_EBD, weight_BE.T), axis=0)
        else:
            # So few rows that reading the weights of the chosen experts only is less.
            chosen_C = best.reshape(-1)
            weight_C = jax.vmap(lambda w, index: w.at[index].get(mode="fill", fill_value=0))(
                weight_BE, best[:, 0]
            ).reshape(-1)
            y_CD = experts(jnp.repeat(x_BD, c.top_k, axis=0), chosen_C)
            y_CD = plans.weighed(y_CD, weight_C)
            y_BD = jnp.sum(y_CD.reshape(rows, c.top_k, width), axis=1)
        return (start_BTD + y_BD[:, None]).astype(start_BTD.dtype)


def _compute(start_BTD, x_BTD, best, weight_BTE, plan, experts):
    """start plus the sum over experts of weight * expert(x) at the slots of a plan [E, B, C].

    best: the choices of each token [B, T, k], or None where it may have any number of experts.
    """
    batch, length, width = x_BTD.shape
    num_experts, _, slots = plan.indices_BC.shape
    by_row = None, "batch", None, "act_embed"
    by_expert = "act_expert", "expert_batch", None, "act_embed"
    slots_BTK = None if best is None else plans.slots_of_choices(plan, best, length)
    x_EBCD = plans.take_for_experts(x_BTD, plan, slots_BTK)
    weight_EBC = jax.vmap(plans.gather, in_axes=(2, 0))(weight_BTE, plan)
    # Each device takes the tokens of its own rows, then they go to where their expert is.
    x_EBCD = exchange(x_EBCD, by_row, by_expert)
    # The slots of all rows are the rows of one matrix an expert.
    y_ECD = experts(x_EBCD.reshape(num_experts, batch * slots, width))
    y_EBCD = y_ECD.reshape(num_experts, batch, slots, width)
    y_EBCD = exchange(y_EBCD, by_expert, by_row)
    y_BTD = plans.add_weighed(start_BTD, plan.indices_BC, y_EBCD, weight_EBC, slots_BTK)
    return constrain(y_BTD, "batch", "length", "act_embed")


def _balance(mean_2E):
    """The load-balancing loss of the share of the tokens and the mean probability of each expert.
    Of the means of a whole batch: the loss is not linear in them."""
    return mean_2E.shape[1] * jnp.sum(mean_2E[0] * mean_2E[1])


def _busiest(load_E):
    return load_E.size * jnp.max(load_E) / jnp.maximum(jnp.sum(load_E), 1e-9)


def _surplus(wanted_BTE, budget):
    """How many tokens find their expert full, summed over experts."""
    fits_BTE = jax.vmap(budget.fits, in_axes=2, out_axes=2)(wanted_BTE)
    return jnp.sum(wanted_BTE & ~fits_BTE, dtype=jnp.float32)
