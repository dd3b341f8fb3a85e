"""Mixture-of-Depths: a block that computes only some of the tokens.

    r_t   = router(x_t)                                  one score per token
    out_t = x_t + gate(r_t) * delta(x_selected)_t        for selected tokens
    out_t = x_t                                          for all others

Raposo et al. 2024, arXiv 2404.02258, section 3. Training selects the top k of each sequence, which
looks ahead. Evaluation and sampling use a causal decision (`decisions`) under a limit that depends
on the position alone (`selection.admit`). Selected tokens keep their order and their original
positions, so that attention among them is causal as it is.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import means, sharding
from efx.layers.linear import onto
from efx.layers.moe import ROUTER_STD
from efx.layers.norms import RMSNorm
from efx.layers.report import choices_requested, sow_choice
from efx.parameter import parameter
from efx.routing import admission, controls, decisions, selection
from efx.routing.config import DepthRoutingConfig
from efx.routing.decisions import DECISIONS, GATES


class MoDBlock(nn.Module):
    """x [B, T, D] -> x with the increment of a block, or of a part of it, for the selected tokens.

    Sows the losses of its decisions (`router_bce`, `predictor_bce`) and statistics of each. A
    threshold is a variable in the collection `state`, updated in training.

    Attributes:
      make_block: constructor of the block, a module (x, call, context=None) -> increment.
      capacity: fraction of the sequence that is routed.
      make_skip_mlp: constructor of the MLP for skipped tokens, x -> increment, or None.
      shared: a block that belongs to a module outside (a recursion's), in place of `make_block`.
    """

    make_block: Callable | None
    config: DepthRoutingConfig
    capacity: float
    make_skip_mlp: Callable | None = None
    shared: nn.Module | None = None

    def setup(self):
        if self.shared is None:
            self.block = self.make_block()
            nn.share_scope(self, self.block)
        else:
            self.block = self.shared
        c, b = self.config, self.block.config
        if c.is_control:
            self.seed = self.variable("state", "seed", self._draw_seed)
        else:
            # Starting at zero would make all scores equal: the first C tokens would be selected.
            init = nn.initializers.normal(ROUTER_STD * b.router_scale)
            self.router = parameter(self, "router", init, (b.width,), ("norm",))
        if c.router_norm == "rms":
            self.norm_router = RMSNorm(b.norm_eps, jnp.float32)
        for name in c.trained_decisions:
            setattr(self, name, DECISIONS[name](c, self.capacity, b.width, b.router_scale))
        if self.make_skip_mlp is not None:
            self.skip_mlp = self.make_skip_mlp()

    def _draw_seed(self):
        return jax.random.randint(self.make_rng("params"), (), 0, controls.SEEDS)

    def __call__(self, x_BTD, call):
        return self.route(x_BTD, call)[0]

    def route(self, x_BTD, call):
        """(output [B, T, D], mask [B, T] of the tokens that were computed)."""
        call, is_parallel = call.for_rows(len(x_BTD)), self.block.config.kind == "parallel"
        if self.config.target == "block":
            return self._route(x_BTD, x_BTD, call)
        if self.config.target == "attention":
            out_BTD, mask_BT = self._route(x_BTD, x_BTD, call)
            read_BTD = x_BTD if is_parallel else out_BTD
            return out_BTD + self.block.mlp_increment(read_BTD, call), mask_BT
        attended_BTD = x_BTD + self.block.attention_increment(x_BTD, call)
        return self._route(attended_BTD, x_BTD if is_parallel else attended_BTD, call)

    def _route(self, start_BTD, x_BTD, call):
        """(start + gate * part(x) for the selected tokens, their mask)."""
        routed_BTD = self.norm_router(x_BTD) if self.config.router_norm == "rms" else x_BTD
        score_BT = self._score(routed_BTD)
        if call.decode:
            selected_BT, count_BT = self._select_new(routed_BTD, score_BT, call)
        else:
            selected_BT = self._select(routed_BTD, score_BT, call)
            count_BT = selection.running_count(selected_BT, call.segment_ids_BT)
        if self.make_skip_mlp is not None:
            start_BTD = start_BTD + jnp.where(selected_BT[..., None], 0, self.skip_mlp(x_BTD))
        gate_BT = GATES["one" if self.config.is_control else self.config.gate](score_BT)
        compute, inner = self._compute, call.replace(count_BT=count_BT)
        if call.decode:
            compute = self._compute_new
        elif choices_requested(self):
            sow_choice(self, "routed", selected_BT, call)
            if not self.config.is_control:
                sow_choice(self, "gate", jnp.where(selected_BT, gate_BT, 0.0), call)
        return compute(start_BTD, x_BTD, gate_BT, selected_BT, inner), selected_BT

    def _compute(self, start_BTD, x_BTD, gate_BT, selected_BT, call):
        slots = self.config.slots(self.capacity, x_BTD.shape[1], call.selection)
        index_BC = selection.compact(selected_BT, slots)
        context = (x_BTD, call, index_BC) if self.config.kv_for_skipped else None
        part, routed = self._part_of(self.block), call.take(index_BC)
        return _add_gated(part, start_BTD, index_BC, x_BTD, gate_BT, routed, context)

    def _part_of(self, block):
        target = self.config.target
        return block if target == "block" else getattr(block, f"{target}_increment")

    # ---- selection ----

    def _score(self, x_BTD):
        """r [B, T] in float32, whatever the dtype of x; 0 without a router."""
        if self.config.is_control:
            return jnp.zeros(x_BTD.shape[:2], jnp.float32)
        score_BT = onto(self.router, x_BTD)
        self.sow("intermediates", "router_logits", score_BT)
        return score_BT

    def _select(self, x_BTD, score_BT, call):
        """Mask of the tokens of whole sequences that are computed."""
        c = self.config
        if call.selection == "off":
            return jnp.zeros(score_BT.shape, bool)
        if c.is_control:
            return self._select_by_control(call)
        valid_BT = _selectable(call)
        topk_BT = selection.select_topk(
            jax.lax.stop_gradient(score_BT), self.capacity, valid_BT, call.segment_ids_BT
        )
        logits = {name: getattr(self, name)(x_BTD, score_BT) for name in c.trained_decisions}
        admitted = {}
        for name, logit_BT in logits.items():
            selected_BT = _and(logit_BT > 0, valid_BT)
            admitted[name] = self._admit(selected_BT, call)
            self._sow_statistics(name, selected_BT, admitted[name], call, topk_BT)
            self._sow_loss(name, logit_BT, x_BTD, topk_BT, valid_BT)
        deciding = call.selection if call.selection in logits else c.causal
        sow_choice(self, "score", logits[deciding], call)
        sow_choice(self, "selected", _and(logits[deciding] > 0, valid_BT), call)
        if not call.looks_ahead:
            return admitted[deciding]
        selected_BT = topk_BT
        if call.selection == "train" and c.train_selection == "threshold":
            is_warm = self.threshold.steps.value >= c.threshold_warmup
            selected_BT = jnp.where(is_warm, admitted["threshold"], topk_BT)
        if "threshold" in logits and self.is_mutable_collection("state"):
            if not self.is_initializing():
                self.threshold.update(score_BT, valid_BT)
        return selected_BT

    def _select_by_control(self, call):
        name, valid_BT = self.config.train_selection, _selectable(call)
        if name == "stochastic" and call.looks_ahead:
            noise_BT = controls.uniform_scores(call, self.seed.value)
            selected_BT = selection.select_topk(
                -noise_BT, self.capacity, valid_BT, call.segment_ids_BT
            )
        else:
            selected_BT = controls.CONTROLS[name](call, self.seed.value, self.capacity)
            selected_BT = _and(selected_BT, valid_BT)
        admitted_BT = self._admit(selected_BT, call)
        sow_choice(self, "selected", selected_BT, call)
        self._sow_statistics(name, selected_BT, admitted_BT, call)
        return admitted_BT

    def _admit(self, selected_BT, call):
        slots = self.config.slots(self.capacity, selected_BT.shape[1], "causal")
        if self.config.train_selection != "position":
            rate = self.config.causal_rate(self.capacity)
            selected_BT = selection.admit(selected_BT, rate, call)
        # Only a packed row of many documents has more tokens than slots.
        return selected_BT & (jnp.cumsum(selected_BT, axis=1) <= slots)

    # ---- losses and statistics ----

    def _sow_loss(self, name, logit_BT, x_BTD, topk_BT, valid_BT):
        loss = DECISIONS[name].loss
        if loss is None or not means.wanted(self):
            return
        if name == "aux_loss" and not self.config.bce_reaches_input:
            logit_BT = onto(self.router, jax.lax.stop_gradient(x_BTD))
        bce = decisions.cross_entropy(logit_BT, topk_BT, valid_BT)
        means.sow(self, "losses", loss, bce)

    def _sow_statistics(self, name, selected_BT, admitted_BT, call, topk_BT=None):
        """Of one decision: its agreement with top-k and the fractions of tokens. Those of the
        sampling decision are called "router/...", those of others by their name."""
        if not means.wanted(self):
            return
        stats = decisions.fractions(selected_BT, admitted_BT, call.real(len(selected_BT)))
        if topk_BT is not None:
            stats |= decisions.agreement(selected_BT, topk_BT, _selectable(call))
        prefix = "router" if self.config.is_control or name == self.config.causal else name
        for key, value in stats.items():
            means.sow(self, "stats", f"{prefix}/{key}", value)

    # ---- decoding: the same decision and limit for new tokens ----

    @nn.compact
    def _select_new(self, x_BTD, score_BT, call):
        """(mask of the new tokens that are computed, their count in the sequence so far)."""
        c = self.config
        real_BT = call.positions_BT >= 0
        if call.selection == "off":
            selected_BT = jnp.zeros_like(real_BT)
        elif c.is_control:
            selected_BT = controls.CONTROLS[c.train_selection](call, self.seed.value, self.capacity)
        else:
            name = call.selection if call.selection in c.trained_decisions else c.causal
            selected_BT = getattr(self, name)(x_BTD, score_BT) > 0
        selected_BT = _and(_and(selected_BT, real_BT), call.selectable_BT)
        admission.count_tokens(self, "reached", real_BT, call)
        rate = 1.0 if c.train_selection == "position" else c.causal_rate(self.capacity)
        mask_BT, before_B = admission.admit_new_tokens(
            self, selected_BT, rate, call.with_cache(tag=""), ("routed", "overflow")
        )
        return mask_BT, before_B[:, None] + selection.running_count(mask_BT)

    def _compute_new(self, start_BTD, x_BTD, gate_BT, selected_BT, call):
        """`_compute` for new tokens, whose cache holds the keys and values of routed tokens only.

        Tokens are computed in rounds (`selection.in_rounds`): usually one, none if no token is
        selected. The result is that of one token after another.
        """
        c, (batch, length, _) = self.config, x_BTD.shape
        inner = call.replace(selectable_BT=None, token_places=None).with_cache(
            size=c.slots(self.capacity, call.cache.size, "causal"),
            kv_size=call.cache.size if c.kv_for_skipped or c.target == "mlp" else 0,
            first=False,
        )
        if self.is_initializing():
            return start_BTD + self._part_of(self.block)(x_BTD, inner)
        if c.target != "mlp" and (c.kv_for_skipped or call.encoder is not None):
            inner = self._write_keys_values(x_BTD, selected_BT, inner)
        if length > 1:

            def compute(block, index_BC, out_BTD):
                routed = inner.take(index_BC)
                return _add_gated(self._part_of(block), out_BTD, index_BC, x_BTD, gate_BT, routed)

            slots = c.slots(self.capacity, length, "causal")
            return selection.in_rounds(
                self.block, selected_BT, slots, start_BTD, compute, carries="cache"
            )
        slots = selection.num_slots(c.causal_rate(self.capacity), batch)
        masked = inner.replace(positions_BT=jnp.where(selected_BT, call.positions_BT, -1))
        # On a GPU a loop waits for the host, and kernels take as long for one row as for all.
        if sharding.platform() == "gpu" and batch > 1 and self.capacity * batch >= 0.5:
            return _add_masked(self._part_of(self.block), start_BTD, x_BTD, gate_BT, masked)

        def compute_rows(block, index_1C, out_B1D):
            part = self._part_of(block)
            if slots == batch:
                return _add_masked(part, out_B1D, x_BTD, gate_BT, masked)
            out_1BD, x_1BD, gate_1B = (jnp.swapaxes(y, 0, 1) for y in (out_B1D, x_BTD, gate_BT))
            out_1BD = _add_gated(
                lambda x_1CD, call, _: jnp.swapaxes(part(jnp.swapaxes(x_1CD, 0, 1), call), 0, 1),
                out_1BD, index_1C, x_1BD, gate_1B, inner.take_rows(index_1C[0]),
            )  # fmt: skip
            return jnp.swapaxes(out_1BD, 0, 1)

        selected_1B = jnp.swapaxes(selected_BT, 0, 1)
        return selection.in_rounds(
            self.block, selected_1B, slots, start_BTD, compute_rows, carries="cache"
        )

    def _write_keys_values(self, x_BTD, selected_BT, call):
        """Cache the keys and values that do not depend on whether a token is computed; returns the
        call for the computed tokens."""
        writing = call.with_cache(access="write")
        if self.block.kv_depends_on_block_output:
            # Computed tokens write theirs as they are computed.
            skipped_BT = jnp.where(selected_BT, -1, call.positions_BT)
            writing = writing.replace(positions_BT=skipped_BT)
        self._part_of(self.block)(x_BTD, writing)
        return call if self.shared is not None else call.with_cache(access="read")


def _add_gated(part, out_BTD, index_BC, x_BTD, gate_BT, call, context=None):
    """out + gate * part(x) at these positions, rounded like the increment of a dense block."""
    delta_BCD = part(selection.take(x_BTD, index_BC), call, context)
    gated_BCD = selection.weighted(delta_BCD, selection.take(gate_BT, index_BC))
    return selection.add(out_BTD, index_BC, gated_BCD.astype(delta_BCD.dtype))


def _add_masked(part, out_BTD, x_BTD, gate_BT, call):
    """out + gate * part(x), computed for all rows, added where the position is not negative."""
    delta_BTD = part(x_BTD, call)
    gated_BTD = selection.weighted(delta_BTD, gate_BT).astype(delta_BTD.dtype)
    return out_BTD + jnp.where((call.positions_BT >= 0)[..., None], gated_BTD, 0)


def _selectable(call):
    """bool [B, T]: the tokens that may be selected: not padding, and computed by earlier steps."""
    return _and(call.real(len(call.positions_BT)), call.selectable_BT)


def _and(a_BT, b_BT):
    """Both masks; None is all True."""
    if a_BT is None or b_BT is None:
        return b_BT if a_BT is None else a_BT
    return a_BT & b_BT
