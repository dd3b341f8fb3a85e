"""Depth routing: a wrapper round any residual block that computes it for some tokens only.

Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258, section 3). For router weights
r = x w, the C tokens with the largest r in a sequence pass through the block:
    out_i = x_i + g(r_i) * delta(X_routed)_i   if i is routed,   x_i otherwise.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import means
from efx.layers.config import DepthRoutingConfig
from efx.layers.routing import controls, decisions, plans
from efx.layers.routing.moe import ROUTER_STD

GATES = {
    "identity": lambda r: r,  # the paper's equation 1
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "one": jnp.ones_like,
}


class DepthRouted(nn.Module):
    """x [B, T, D] -> x with the block's increment added to the routed tokens.

    Sows the losses of its decisions (`router_bce`, `predictor_bce`) and, into `stats`, how well
    each decision agrees with top-k and how many tokens it routes. Where "threshold" is trained,
    the collection `state` holds the running quantile; of a control that is drawn once, its seed.

    Attributes:
      make_block: constructor of the block, a module (x, info, context=None) -> increment.
      capacity: share of the sequence that is routed.
      make_skip_mlp: constructor of the skip MLP, a module x -> increment, or None.
      shared: the block itself instead, where it belongs to a module outside and is used elsewhere.
      survivors: share of the sequence that may be routed, see `TokenInfo.alive_BT`.
    """

    make_block: Callable | None
    config: DepthRoutingConfig
    capacity: float
    make_skip_mlp: Callable | None = None
    shared: nn.Module | None = None
    survivors: float = 1.0

    def setup(self):
        if self.shared is None:
            self.block = self.make_block()
            nn.share_scope(self, self.block)
        else:
            self.block = self.shared
        block, trained = self.block.config, self.config.trained
        if not self.config.control:
            # One router for each block, never shared, without bias. Starting at zero would make
            # every score equal and the first selection the first C tokens.
            self.router = self.param(
                "router",
                nn.with_logical_partitioning(
                    nn.initializers.normal(ROUTER_STD * block.router_scale), ("norm",)
                ),
                (block.width,),
                jnp.float32,
            )
        if self.config.train_selection in controls.BY_TOKEN:
            self.seed = self.variable(
                "state",
                "seed",
                lambda: jax.random.randint(self.make_rng("params"), (), 0, controls.SEEDS),
            )
        if "predictor" in trained:
            hidden, scale = self.config.predictor_hidden, block.router_scale**0.5
            # The fan-in of both layers lets them start smaller the wider the model is. What has
            # few outputs whatever the width starts smaller still.
            self.predictor = decisions.Predictor(
                hidden or max(1, block.width // 2), (scale, 1.0) if hidden else (1.0, scale)
            )
        if "threshold" in trained:
            self.quantile = self.variable("state", "quantile", jnp.zeros, (), jnp.float32)
            self.quantile_steps = self.variable("state", "quantile_steps", jnp.zeros, (), jnp.int32)
        if self.make_skip_mlp is not None:
            self.skip_mlp = self.make_skip_mlp()

    def scores(self, x_BTD):
        """r [B, T] in float32, whatever the dtype of x; 0 without a router."""
        if self.config.control:
            return jnp.zeros(x_BTD.shape[:2], jnp.float32)
        score_BT = jnp.einsum(
            "BTD,D->BT", x_BTD.astype(jnp.float32), self.router, precision=jax.lax.Precision.HIGHEST
        )
        self.sow("intermediates", "router_logits", score_BT)
        return score_BT

    def __call__(self, x_BTD, info):
        return self.route(x_BTD, info)[0]

    def route(self, x_BTD, info):
        """(x as described above, bool [B, T]: the tokens that were routed)."""
        if info.decode:
            return self._decode(x_BTD, info)
        c, batch = self.config, x_BTD.shape[0]
        score_BT = self.scores(x_BTD)
        real_BT = None if info.segment_ids_BT is None else info.segment_ids_BT > 0
        valid_BT = real_BT
        if info.alive_BT is not None:
            real_BT = jnp.ones_like(info.alive_BT) if real_BT is None else real_BT
            valid_BT = info.alive_BT & real_BT
        choose = self._control if c.control else self._choose
        plan, budget = choose(x_BTD, score_BT, info, valid_BT, real_BT)
        if "threshold" in c.trained and info.train and not self.is_initializing():
            self._follow_quantile(jax.lax.stop_gradient(score_BT), valid_BT)
        context = (x_BTD, info.full(batch)) if c.kv_for_skipped else None
        delta_BCD = self.block(
            plans.gather(x_BTD, plan), plans.gather_info(info, plan, batch, budget), context
        )
        gate_BC = self._gate(plans.gather(score_BT, plan))
        routed_BT = plans.selected(plan, x_BTD.shape[1])
        start_BTD = self._add_skip_mlp(x_BTD, ~routed_BT)
        return plans.scatter_add(start_BTD, _gated(delta_BCD, gate_BC), plan), routed_BT

    def _choose(self, x_BTD, score_BT, info, valid_BT, real_BT):
        """(plan of the tokens to compute, its budget); sows what there is to learn from it."""
        c, length, documents = self.config, x_BTD.shape[1], info.documents()
        competing = documents if c.per == "document" else None
        ahead = plans.Budget(self.capacity, length, competing)
        budget = c.budget(self.capacity, length, documents)
        top = ahead.top(jax.lax.stop_gradient(score_BT), valid_BT)
        logit_BT = {name: self._logit(name, x_BTD, score_BT) for name in c.trained}
        decided_BT = {name: logit > 0 for name, logit in logit_BT.items()}
        if valid_BT is not None:
            decided_BT = {name: decided & valid_BT for name, decided in decided_BT.items()}
        target_BT = plans.selected(top, length)
        self._report(x_BTD, logit_BT, decided_BT, target_BT, valid_BT, real_BT, budget)
        if info.selection != "train":
            name = c.causal if info.selection == "causal" else info.selection
            return budget.first(decided_BT[name]), budget
        if c.train_selection == "threshold":
            warm = self.quantile_steps.value >= c.threshold_warmup
            chosen_BT = jnp.where(warm, decided_BT["threshold"], target_BT)
            return budget.first(chosen_BT), budget
        return top, plans.Budget(self.capacity, length, documents)

    def _control(self, x_BTD, score_BT, info, valid_BT, real_BT):
        """The same by a control, which has nothing to learn."""
        c, (batch, length, _) = self.config, x_BTD.shape
        budget = c.budget(self.capacity, length, info.documents())
        if c.train_selection == controls.STOCHASTIC:
            plan = budget.top(controls.noise(self, batch, length), valid_BT)
            wanted_BT = run_BT = plans.selected(plan, length)
        else:
            wanted_BT = jnp.broadcast_to(self._by_token(info), (batch, length))
            wanted_BT = wanted_BT if valid_BT is None else wanted_BT & valid_BT
            plan, run_BT = budget.first(wanted_BT), budget.fits(wanted_BT)
        for key, value in decisions.fractions(wanted_BT, run_BT, real_BT).items():
            means.sow(self, "stats", f"router/{key}", value)
        return plan, budget

    def _by_token(self, info):
        return controls.BY_TOKEN[self.config.train_selection](info, self.seed.value, self.capacity)

    def _logit(self, name, x_BTD, score_BT):
        """What a decision compares with 0."""
        if name == "predictor":
            logit_BT = self.predictor(jax.lax.stop_gradient(x_BTD))
            self.sow("intermediates", "predictor_logits", logit_BT)
            return logit_BT
        if name == "threshold":
            return score_BT - self.quantile.value
        return score_BT

    def _gate(self, score):
        return GATES["one" if self.config.control else self.config.gate](score)

    def _add_skip_mlp(self, x_BTD, skipped_BT):
        """x with the skip MLP's increment added to the tokens that are not routed."""
        if self.make_skip_mlp is None:
            return x_BTD
        return x_BTD + jnp.where(skipped_BT[..., None], self.skip_mlp(x_BTD), 0)

    def _follow_quantile(self, score_BT, valid_BT):
        # Of those that may be routed: together they are routed as often as the capacity says.
        new = plans.quantile(score_BT, 1.0 - self.capacity / self.survivors, valid_BT)
        steps = self.quantile_steps.value
        # The first value is taken as it is: an average that starts at 0 would have to forget it.
        decay = jnp.where(steps == 0, 0.0, self.config.threshold_decay)
        self.quantile.value = decay * self.quantile.value + (1.0 - decay) * new
        self.quantile_steps.value = steps + 1

    def _report(self, x_BTD, logit_BT, decided_BT, target_BT, valid_BT, real_BT, budget):
        """Losses and diagnostics of every trained decision. Targets are one-hot per row: row b's
        come from row b alone. The sampling decision's go by "router", the others' by their name."""
        for name in self.config.trained:
            logit = logit_BT[name]
            if name == "aux_loss" and not self.config.bce_reaches_input:
                logit = self.scores(jax.lax.stop_gradient(x_BTD))
            if name in decisions.LOSSES:
                loss = decisions.cross_entropy(logit, target_BT, valid_BT)
                means.sow(self, "losses", decisions.LOSSES[name], loss)
            prefix = "router" if name == self.config.causal else name
            decided = decided_BT[name]
            run_BT = budget.fits(decided)
            stats = decisions.statistics(decided, run_BT, target_BT, valid_BT, real_BT)
            for key, value in stats.items():
                means.sow(self, "stats", f"{prefix}/{key}", value)

    @nn.compact
    def _decode(self, x_BTD, info):
        """One or more new tokens for each row, against a cache that holds routed tokens only.

        Those that are routed are computed as many at a time as the causal decision has room for in
        a sequence of this length, in as many rounds as they need (`plans.in_rounds`): a block
        that no token wants does not run, as a rule it runs once, and however many want it, the
        result is that of one token after the other.
        """
        c = self.config
        batch, length, _ = x_BTD.shape
        room = c.room(self.capacity, info.cache_size)
        routed = self.variable("cache", "routed", jnp.zeros, (batch,), jnp.int32)
        overflow = self.variable("cache", "overflow", jnp.zeros, (batch,), jnp.int32)
        score_BT = self.scores(x_BTD)
        info = info.full(batch)
        wanted_BT = self._wanted(x_BTD, score_BT, info) & (info.positions_BT >= 0)
        info = info.replace(cache_size=room, kv_size=info.cache_size if c.kv_for_skipped else 0)
        if self.is_initializing():
            return self._add_skip_mlp(x_BTD, score_BT > 0) + self.block(x_BTD, info), score_BT > 0
        if info.alive_BT is not None:
            wanted_BT, info = wanted_BT & info.alive_BT, info.replace(alive_BT=None)
        fits_BT = routed.value[:, None] + jnp.cumsum(wanted_BT, axis=1) <= room
        run_BT = wanted_BT & fits_BT
        routed.value = routed.value + jnp.sum(run_BT, axis=1)
        overflow.value = overflow.value + jnp.sum(wanted_BT & ~fits_BT, axis=1)
        start_BTD = self._add_skip_mlp(x_BTD, ~run_BT)
        if c.kv_for_skipped:
            self.block(x_BTD, info.replace(kv="write"))
            info = info.replace(kv="read")
        out_BTD = self._in_rounds(x_BTD, start_BTD, self._gate(score_BT), run_BT, info)
        return out_BTD, run_BT

    def _wanted(self, x_BTD, score_BT, info):
        """Decoding: bool [B, T], the new tokens that are to be computed."""
        c = self.config
        if c.train_selection in controls.BY_TOKEN:
            return self._by_token(info)
        if c.train_selection == controls.STOCHASTIC:
            # Places of the whole context, the same at each call with the same key.
            size = info.cache_size
            noise_BS = controls.noise(self, x_BTD.shape[0], size)
            places_BS = plans.selected(c.budget(self.capacity, size).top(noise_BS), size)
            return jax.vmap(lambda places, position: places[position])(places_BS, info.positions_BT)
        name = c.causal if info.selection in ("causal", "train") else info.selection
        return self._logit(name, x_BTD, score_BT) > 0

    def _in_rounds(self, x_BTD, start_BTD, gate_BT, run_BT, info):
        """start + gate * block(x) for the tokens that run."""
        batch, length, _ = x_BTD.shape

        # Of a single token a row it is rows that are taken: a "sequence" of the batch's rows.
        def turned(y):
            return jnp.swapaxes(y, 0, 1) if length == 1 else y

        places = self.config.room(self.capacity, batch if length == 1 else length)

        def some(block, plan, out_BTD):
            def take(y, fill=0):
                return turned(plans.gather(turned(y), plan, fill))

            mask_input = info.mask_input_BTD
            taken = info.replace(
                positions_BT=take(info.positions_BT, -1),
                mask_input_BTD=None if mask_input is None else take(mask_input),
                rows_B=plan.indices_BC[0] if length == 1 else None,
            )
            delta_BTD = _gated(block(take(x_BTD), taken), take(gate_BT))
            return turned(plans.scatter_add(turned(out_BTD), turned(delta_BTD), plan))

        def all_rows(block, plan, out_BTD):
            # As they lie, with their caches: nothing is gathered.
            positions_BT = jnp.where(run_BT, info.positions_BT, -1)
            delta_BTD = block(x_BTD, info.replace(positions_BT=positions_BT))
            return out_BTD + _gated(delta_BTD, jnp.where(run_BT, gate_BT, 0.0))

        body = all_rows if length == 1 and places == batch else some
        return plans.in_rounds(self.block, turned(run_BT), places, start_BTD, body, carries="cache")


def _gated(delta_BTD, gate_BT):
    return delta_BTD * gate_BT[..., None].astype(delta_BTD.dtype)
