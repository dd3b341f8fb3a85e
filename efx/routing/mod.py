"""Depth routing: a wrapper round any residual block that computes it for some tokens only.

Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258, section 3). For router weights
r = x w, the C tokens with the largest r in a sequence pass through the block:
    out_i = x_i + g(r_i) * delta(X_routed)_i   if i is routed,   x_i otherwise.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import means, sharding
from efx.layers import kv_cache
from efx.layers.config import DepthRoutingConfig
from efx.layers.linear import onto
from efx.layers.moe import ROUTER_STD
from efx.layers.report import choices_requested, sow_choice
from efx.parameter import parameter
from efx.routing import controls, decisions, plans, quantiles

GATES = {
    "identity": lambda r: r,  # the paper's equation 1
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "twice_sigmoid": lambda r: 2.0 * jax.nn.sigmoid(r),  # 1 where r is 0
    "one": jnp.ones_like,
}


class DepthRouted(nn.Module):
    """x [B, T, D] -> x with the block's increment added to the routed tokens.

    Sows the losses of its decisions (`router_bce`, `predictor_bce`) and, into `stats`, how well
    each decision agrees with top-k and how many tokens it routes. Where "threshold" is trained,
    the collection `state` holds the running quantile, which the training step moves by what is sown
    into `quantiles.COLLECTION`; of a control that is drawn once, it holds the seed.

    Attributes:
      make_block: constructor of the block, a module (x, call, context=None) -> increment. With
        `writes_as_it_goes`, what it keeps of a token that it computes is not made of x alone.
      capacity: share of the sequence that is routed.
      make_skip_mlp: constructor of the skip MLP, a module x -> increment, or None.
      shared: the block itself instead, where it belongs to a module outside and is used elsewhere.
      survivors: share of the sequence that may be routed, see `Tokens.selectable_BT`.
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
            init = nn.initializers.normal(ROUTER_STD * block.router_scale)
            self.router = parameter(self, "router", init, (block.width,), ("norm",))
        if self.config.train_selection in controls.BY_TOKEN:
            # `position` needs none and has one as the others do.
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

    def __call__(self, x_BTD, call):
        return self.route(x_BTD, call)[0]

    def route(self, x_BTD, call):
        """(x as described above, bool [B, T]: the tokens that were routed)."""
        call, score_BT = call.for_rows(x_BTD.shape[0]), self.scores(x_BTD)
        if call.decode:
            return self._decode(x_BTD, score_BT, call)
        decision = self._decide(x_BTD, score_BT, call)
        self._report(x_BTD, decision, call)
        context = (x_BTD, call, decision.plan) if self.config.kv_for_skipped else None
        run_BT = plans.selected(decision.plan, x_BTD.shape[1])
        start_BTD = self._add_skip_mlp(x_BTD, ~run_BT)
        routed_call = decision.plan.call(call, decision.budget)
        gate_BT = self._gate(score_BT)
        self._report_choices(decision, run_BT, gate_BT, call)
        return _apply(
            self.block, decision.plan, start_BTD, x_BTD, gate_BT, routed_call, context
        ), run_BT

    # ---- deciding ----

    def scores(self, x_BTD):
        """r [B, T] in float32, whatever the dtype of x; 0 without a router."""
        if self.config.control:
            return jnp.zeros(x_BTD.shape[:2], jnp.float32)
        score_BT = onto(self.router, x_BTD)
        self.sow("intermediates", "router_logits", score_BT)
        return score_BT

    def _decide(self, x_BTD, score_BT, call):
        """The `Decision` about a whole sequence."""
        c, (batch, length, _), documents = self.config, x_BTD.shape, call.documents()
        valid_BT, room = _valid(call), c.budget(self.capacity, length, documents)
        if c.control:
            if c.train_selection == controls.STOCHASTIC:
                # Of all places, padding's too: where a row ends is not known while decoding.
                drawn = room.top(controls.noise(self, batch, length))
                chosen_BT = plans.selected(drawn, length)
            else:
                chosen_BT = jnp.broadcast_to(self._by_token(call), (batch, length))
            wanted_BT = _both(chosen_BT, valid_BT)
            return decisions.Decision(
                room.first(wanted_BT), room, room, {c.train_selection: wanted_BT}
            )
        ahead = plans.Budget(self.capacity, length, documents)
        top = ahead.top(jax.lax.stop_gradient(score_BT), valid_BT)
        logit_BT = {name: self._logit(name, x_BTD, score_BT) for name in c.trained}
        wanted_BT = {name: _both(logit > 0, valid_BT) for name, logit in logit_BT.items()}
        if not call.looks_ahead:
            plan, budget = room.first(wanted_BT[self._deciding(call)]), room
        elif call.selection == "train" and c.train_selection == "threshold":
            warm = self.quantile_steps.value >= c.threshold_warmup
            by_threshold_BT = jnp.where(warm, wanted_BT["threshold"], plans.selected(top, length))
            plan, budget = room.first(by_threshold_BT), room
        else:
            plan, budget = top, ahead
        if "threshold" in c.trained and call.train and not self.is_initializing():
            self._say_scores(jax.lax.stop_gradient(score_BT), valid_BT)
        return decisions.Decision(plan, budget, room, wanted_BT, logit_BT, top)

    def _deciding(self, call):
        """The name of the decision that a sampler takes."""
        name = call.selection
        return self.config.causal if name == "causal" or call.looks_ahead else name

    def _by_token(self, call):
        choose = controls.BY_TOKEN[self.config.train_selection]
        return choose(call, self.seed.value, self.capacity)

    def _logit(self, name, x_BTD, score_BT):
        """What a decision compares with 0."""
        if name == "predictor":
            logit_BT = self.predictor(jax.lax.stop_gradient(x_BTD))
            self.sow("intermediates", "predictor_logits", logit_BT)
            return logit_BT
        if name == "threshold":
            return score_BT - self.quantile.value
        return score_BT

    def _say_scores(self, score_BT, valid_BT):
        # Of those that may be routed: together they are routed as often as the capacity says.
        share, decay = self.capacity / self.survivors, self.config.threshold_decay
        scores = quantiles.Scores(score_BT, valid_BT, share, decay)
        self.sow(quantiles.COLLECTION, "quantile", scores)

    # ---- applying ----

    def _gate(self, score_BT):
        return GATES["one" if self.config.control else self.config.gate](score_BT)

    def _add_skip_mlp(self, x_BTD, skipped_BT):
        """x with the skip MLP's increment added to the tokens that are not routed."""
        if self.make_skip_mlp is None:
            return x_BTD
        return x_BTD + jnp.where(skipped_BT[..., None], self.skip_mlp(x_BTD), 0)

    # ---- reporting ----

    def _report(self, x_BTD, decision, call):
        """Losses and diagnostics of every trained decision. Targets are one-hot per row: row b's
        come from row b alone. The sampling decision's go by "router", the others' by their name."""
        if not means.wanted(self):
            return
        c, valid_BT, real_BT = self.config, _valid(call), _real(call)
        for name, wanted_BT in decision.wanted_BT.items():
            run_BT = decision.room.fits(wanted_BT)
            if c.control:
                stats = decisions.fractions(wanted_BT, run_BT, real_BT)
            else:
                target_BT = plans.selected(decision.top, x_BTD.shape[1])
                stats = decisions.statistics(wanted_BT, run_BT, target_BT, valid_BT, real_BT)
            prefix = "router" if c.control or name == c.causal else name
            for key, value in stats.items():
                means.sow(self, "stats", f"{prefix}/{key}", value)
            if name in decisions.LOSSES:
                logit_BT = decision.logit_BT[name]
                if name == "aux_loss" and not c.bce_reaches_input:
                    logit_BT = self.scores(jax.lax.stop_gradient(x_BTD))
                loss = decisions.cross_entropy(logit_BT, target_BT, valid_BT)
                means.sow(self, "losses", decisions.LOSSES[name], loss)

    def _report_choices(self, decision, run_BT, gate_BT, call):
        """Of each token: `routed`, whether it is computed; `wanted`, whether the decision would,
        had it room; of learned ones `score`, what the causal decision compares with 0, and
        `gate`, the factor on the increment of a token that is computed, 0 for the others."""
        if not choices_requested(self):
            return
        sow_choice(self, "routed", run_BT, call)
        if self.config.control:
            (wanted_BT,) = decision.wanted_BT.values()
        else:
            name = self._deciding(call)
            wanted_BT = decision.wanted_BT[name]
            sow_choice(self, "score", decision.logit_BT[name], call)
            sow_choice(self, "gate", jnp.where(run_BT, gate_BT, 0.0), call)
        sow_choice(self, "wanted", wanted_BT, call)

    # ---- decoding ----

    @nn.compact
    def _decode(self, x_BTD, score_BT, call):
        """One or more new tokens for each row, against a cache that holds routed tokens only.

        Those that are routed are computed as many at a time as the causal decision has room for in
        a sequence of this length, in as many rounds as they need (`plans.in_rounds`): a block that
        no token wants does not run, as a rule it runs once, and however many want it, the result is
        that of one token after the other.
        """
        c = self.config
        room = c.room(self.capacity, call.cache.size)
        valid_BT = call.positions_BT >= 0
        wanted_BT = _both(self._wanted(x_BTD, score_BT, call), valid_BT)
        wanted_BT = _both(wanted_BT, call.selectable_BT)
        kv_cache.count(self, "reached", valid_BT, call)
        counts = dict(computed="routed", refused="overflow")
        run_BT = kv_cache.admit(self, wanted_BT, room, call.with_cache(tag=""), **counts)
        # Of several rounds only one has the first tokens.
        inside = call.replace(selectable_BT=None).with_cache(
            size=room, kv_size=call.cache.size if c.kv_for_skipped else 0, first=False
        )
        start_BTD = self._add_skip_mlp(x_BTD, ~run_BT)
        if self.is_initializing():
            return start_BTD + self.block(x_BTD, inside), run_BT
        if c.kv_for_skipped or call.encoder is not None:
            written = inside.with_cache(access="write")
            if self.shared is None:
                inside = inside.with_cache(access="read")
            if self.block.writes_as_it_goes:
                # What a token that is computed writes comes of the layer, or of the attention,
                # before: it writes that as it goes, and here are the others.
                skipped_BT = jnp.where(run_BT, -1, call.positions_BT)
                written = written.replace(positions_BT=skipped_BT)
            self.block(x_BTD, written)
        return self._in_rounds(x_BTD, start_BTD, self._gate(score_BT), run_BT, inside), run_BT

    def _wanted(self, x_BTD, score_BT, call):
        """bool [B, T], the new tokens that are to be computed."""
        c = self.config
        if c.train_selection in controls.BY_TOKEN:
            return self._by_token(call)
        if c.train_selection == controls.STOCHASTIC:
            # Slots of the whole context, the same at each call with the same key.
            size = call.cache.size
            noise_BS = controls.noise(self, x_BTD.shape[0], size)
            chosen_BS = plans.selected(c.budget(self.capacity, size).top(noise_BS), size)
            positions_BT = call.positions_BT
            return jax.vmap(lambda chosen, position: chosen[position])(chosen_BS, positions_BT)
        return self._logit(self._deciding(call), x_BTD, score_BT) > 0

    def _in_rounds(self, x_BTD, start_BTD, gate_BT, run_BT, call):
        """start + gate * block(x) for the tokens that run."""
        batch, length, _ = x_BTD.shape
        # Of a single token a row it is rows that are taken, and if they are all, they stay where
        # they and their caches are.
        by_row, all_rows = length == 1, plans.WholePlan(run_BT)
        slots = self.config.room(self.capacity, batch if by_row else length)
        # On a GPU the host waits for each turn of a loop, and a layer takes the time that its
        # kernels take to start: of one row as of all. One turn is expected where half a row is. A
        # single row's block is left out instead.
        is_gpu = sharding.platform() == "gpu"
        if by_row and is_gpu and batch > 1 and self.capacity * batch >= 0.5:
            return _apply(self.block, all_rows, start_BTD, x_BTD, gate_BT, all_rows.call(call))

        def as_planned(block, plan, out_BTD):
            if by_row:
                plan = all_rows if slots == batch else plans.RowPlan(plan)
            return _apply(block, plan, out_BTD, x_BTD, gate_BT, plan.call(call))

        selected = jnp.swapaxes(run_BT, 0, 1) if by_row else run_BT
        return plans.in_rounds(self.block, selected, slots, start_BTD, as_planned, carries="cache")


def _apply(block, plan, out_BTD, x_BTD, gate_BT, call, context=None):
    """out + gate * block(x) on the tokens of the plan; `call` and `context` are for the block."""
    delta = block(plan.take(x_BTD), call, context)
    increment = plans.weighed(delta, plan.take(gate_BT))
    # Rounded like the increment of a dense block, to the type of the stream that it is added to. A
    # token is in the plan once, so nothing accumulates here.
    return plan.add(out_BTD, increment.astype(delta.dtype))


def _real(call):
    """bool [B, T]: the tokens that are no padding, or None: all."""
    return None if call.segment_ids_BT is None else call.segment_ids_BT > 0


def _valid(call):
    """bool [B, T]: those of them that may be routed, or None: all."""
    return _both(_real(call), call.selectable_BT)


def _both(a_BT, b_BT):
    """Where both hold; None holds everywhere."""
    if a_BT is None or b_BT is None:
        return b_BT if a_BT is None else a_BT
    return a_BT & b_BT
