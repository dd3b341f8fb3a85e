"""Mixture-of-Depths: a block that computes only some of the tokens.

    r_t   = score(x_t)                                   a learned router, or a control
    out_t = x_t + gate(r_t) * delta(x_selected)_t        for selected tokens
    out_t = x_t                                          for all others

Raposo et al. 2024, arXiv 2404.02258, section 3. Training selects the top k of each sequence, which
looks ahead. Evaluation and sampling use a causal decision (`decisions`) and a causal limit
(`selection.admit`). Selected tokens keep their order and their original positions, so that causal
attention among them needs no other mask.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from efx.layers import admission, batch_means, selection
from efx.layers.block import SkipMLP
from efx.layers.norms import RMSNorm
from efx.layers.report import health_requested, sow_choice, sow_increment
from efx.parallel import sharding
from efx.routing import decisions
from efx.routing.config import DepthRoutingConfig
from efx.routing.decisions import DECISIONS
from efx.routing.gates import GATES
from efx.routing.scores import SCORES, Router


class MoDBlock(nn.Module):
    """Add the increment of a block, or of its attention or MLP, to the selected tokens of x.

    Sows the losses of its decisions (`router_bce`, `predictor_bce`) and statistics of each. A
    threshold is a variable in the collection `state`, updated in training.

    Attributes:
      block: a module (x, call, context=None) -> increment, of the caller's.
      capacity: fraction of the tokens of a sequence that are computed.
    """

    block: nn.Module
    config: DepthRoutingConfig
    capacity: float

    def setup(self):
        c, b = self.config, self.block.config
        options = c, self.capacity, b.width, b.router_scale
        self.scorer = SCORES[c.score](*options)
        if isinstance(self.scorer, Router):
            nn.share_scope(self, self.scorer)
        if c.router_norm == "rms":
            self.norm_router = RMSNorm(b.norm_eps, jnp.float32)
        for name in c.trained_decisions:
            setattr(self, name, DECISIONS[name](*options))
        if c.skip_mlp:
            self.skip_mlp = SkipMLP(b, c.skip_mlp)

    def __call__(self, x_BTD, call):
        """Returns (output [B, T, D], mask [B, T] of the computed tokens)."""
        target, block, call = self.config.target, self.block, call.for_rows(len(x_BTD))
        if target in ("block", "mlp_only"):
            return self._route(x_BTD, x_BTD, call)
        is_parallel = block.config.kind == "parallel"
        if target == "attention":
            out_BTD, mask_BT = self._route(x_BTD, x_BTD, call)
            mlp_input_BTD = x_BTD if is_parallel else out_BTD
            return out_BTD + block.mlp_increment(mlp_input_BTD, call), mask_BT
        attended_BTD = x_BTD + block.attention_increment(x_BTD, call)
        return self._route(attended_BTD, x_BTD if is_parallel else attended_BTD, call)

    def _route(self, residual_BTD, x_BTD, call):
        """Add gate * part(x) of the selected tokens to the residual stream.

        part: the block, its attention or its MLP, see `config.target`. Returns as `__call__`.
        """
        c, length, input_BTD = self.config, x_BTD.shape[1], x_BTD
        if c.router_norm == "rms":
            input_BTD = self.norm_router(x_BTD)
        score_BT = self.scorer(input_BTD, call)
        gate_BT = GATES[c.gate](score_BT)
        self.sow("intermediates", "router_logits", score_BT)
        valid_BT = call.valid_mask(len(x_BTD))
        selectable_BT = valid_BT if call.selectable_BT is None else valid_BT & call.selectable_BT
        decision = call.selection if call.selection in c.trained_decisions else c.causal_decision
        arguments = decision, input_BTD, score_BT, selectable_BT, call
        if call.decode:
            computed_BT, count_BT = self._select_new(*arguments)
        else:
            computed_BT = self._select(*arguments)
            count_BT = selection.running_count(computed_BT, call.segment_ids_BT)
            sow_choice(self, "routed", computed_BT, call)
            sow_choice(self, "gate", jnp.where(computed_BT, gate_BT, 0.0), call)
        if c.skip_mlp:
            residual_BTD = residual_BTD + jnp.where(computed_BT[..., None], 0, self.skip_mlp(x_BTD))
        call = call.replace(count_BT=count_BT)
        if call.decode:
            return self._compute_new(residual_BTD, x_BTD, gate_BT, computed_BT, call), computed_BT
        slots = c.slots(self.capacity, length, call.selection)
        index_BC = selection.compact(computed_BT, slots)
        part, routed = self._part_of(self.block), call.gather(index_BC)
        if c.kv_for_skipped:
            part = functools.partial(part, context=(x_BTD, call, index_BC))
        out_BTD = _add_gated(part, residual_BTD, index_BC, x_BTD, gate_BT, routed)
        increment_BTD = out_BTD.astype(jnp.float32) - residual_BTD
        sow_increment(self, "router", increment_BTD, residual_BTD, computed_BT, call)
        if health_requested(self, call):
            decisions.sow_gates(self, score_BT, gate_BT, computed_BT, selectable_BT)
        return out_BTD, computed_BT

    def _part_of(self, block):
        """The routed part of the block: all of it, its attention or its MLP."""
        target = self.config.target
        if target == "block":
            return block
        return block.attention_increment if target == "attention" else block.mlp_increment

    # ---- selection ----

    def _select(self, decision, x_BTD, score_BT, selectable_BT, call):
        """Mask of the tokens to compute, for whole sequences (training and evaluation).

        `selected_BT`: the tokens that a decision selects, before the causal limit.

        Args:
          decision: name of the causal decision that applies unless `call` requests top-k.
          selectable_BT: tokens that may be selected.
        """
        c, valid_BT = self.config, call.valid_mask(len(x_BTD))
        if call.selection == "off":
            return jnp.zeros_like(selectable_BT)
        scores, documents, largest_BC = jax.lax.stop_gradient(score_BT), call.segment_ids_BT, None
        if documents is None:  # else top-k sorts each document, and the threshold the row
            largest_BC = selection.largest(scores, self.capacity, selectable_BT)
        topk_BT = selection.select_topk(scores, self.capacity, selectable_BT, documents, largest_BC)
        rate, admitted = c.causal_rate(self.capacity), {}
        slots = c.slots(self.capacity, x_BTD.shape[1], "causal")
        for name in c.trained_decisions:
            logit_BT = getattr(self, name)(x_BTD, score_BT)
            selected_BT = (logit_BT > 0) & selectable_BT
            admitted[name] = selection.admit(selected_BT, rate, call, slots=slots)
            if batch_means.is_collecting(self):
                loss, prefix = DECISIONS[name].loss, "router" if name == c.causal_decision else name
                if name == "aux_loss" and not c.bce_reaches_input:
                    # This loss must not train the layers below the router.
                    logit_BT = self.scorer(jax.lax.stop_gradient(x_BTD), call)
                masks = selected_BT, admitted[name], topk_BT
                loss = loss and (loss, logit_BT)
                decisions.sow_decision(self, prefix, masks, valid_BT, selectable_BT, loss)
            if name == decision:
                sow_choice(self, "score", logit_BT, call)
                sow_choice(self, "selected", selected_BT, call)
        if not call.looks_ahead:
            return admitted[decision]
        computed_BT, rule = topk_BT, c.rule
        if call.selection == "train" and rule.is_causal:
            is_warm = self.threshold.steps.value >= c.threshold_warmup
            computed_BT = jnp.where(is_warm, admitted["threshold"], topk_BT)
        elif call.selection == "train" and rule.select is not selection.select_topk:
            computed_BT = rule.select(scores, self.capacity, selectable_BT, documents)
            computed_BT = checkpoint_name(computed_BT, selection.SELECTION)
        if "threshold" in admitted and self.is_mutable_collection("state"):
            if not self.is_initializing():
                self.threshold.update(score_BT, selectable_BT, valid_BT, largest_BC)
        return computed_BT

    # ---- decoding: the same decision and limit for new tokens ----

    @nn.compact
    def _select_new(self, decision, x_BTD, score_BT, selectable_BT, call):
        """Select new tokens and apply the causal limit; arguments as of `_select`.

        Returns: (mask [B, T] of the admitted tokens, number of admitted tokens of the sequence up
        to each).
        """
        c = self.config
        if call.selection == "off":
            selected_BT = jnp.zeros_like(selectable_BT)
        else:
            selected_BT = (getattr(self, decision)(x_BTD, score_BT) > 0) & selectable_BT
        admission.count_tokens(self, "reached", call.valid_mask(len(x_BTD)), call)
        rate = c.causal_rate(self.capacity)
        mask_BT, before_B = admission.admit(self, selected_BT, rate, None, call.with_cache(tag=""))
        return mask_BT, before_B[:, None] + selection.running_count(mask_BT)

    def _compute_new(self, residual_BTD, x_BTD, gate_BT, computed_BT, call):
        """Add gate * part(x) of the selected new tokens to the residual stream.

        The KV cache of the block holds the selected tokens; with `kv_for_skipped`, all tokens. A
        while loop computes them (`selection.loop_over_selected`).
        """
        c, (batch, length, _) = self.config, x_BTD.shape
        inner = call.replace(selectable_BT=None, token_places_BT=None).with_cache(
            size=c.slots(self.capacity, call.cache.size, "causal"),
            kv_size=call.cache.size if c.kv_for_skipped else 0,
            first=False,
        )
        if self.is_initializing():
            return residual_BTD + self._part_of(self.block)(x_BTD, inner)
        if c.routes_attention and (c.kv_for_skipped or call.encoder is not None):
            inner = self._write_keys_values(x_BTD, computed_BT, inner)
        if length > 1:

            def compute(block, index_BC, out_BTD):
                routed = inner.gather(index_BC)
                return _add_gated(self._part_of(block), out_BTD, index_BC, x_BTD, gate_BT, routed)

            slots = c.slots(self.capacity, length, "causal")
            return selection.loop_over_selected(
                self.block, computed_BT, slots, residual_BTD, compute, carries="cache"
            )
        slots = selection.num_slots(c.causal_rate(self.capacity), batch)
        masked = inner.replace(positions_BT=jnp.where(computed_BT, call.positions_BT, -1))
        # On a GPU each iteration of a loop waits for the host, and one row takes as long as all: it
        # computes all rows unless most steps select none (capacity * batch are expected).
        if sharding.platform() == "gpu" and batch > 1 and self.capacity * batch >= 0.5:
            return _add_masked(self._part_of(self.block), residual_BTD, x_BTD, gate_BT, masked)

        def compute_rows(block, index_1C, out_B1D):
            part = self._part_of(block)
            if slots == batch:  # one round computes all rows
                return _add_masked(part, out_B1D, x_BTD, gate_BT, masked)
            out_1BD, x_1BD, gate_1B = (jnp.swapaxes(y, 0, 1) for y in (out_B1D, x_BTD, gate_BT))
            out_1BD = _add_gated(
                lambda x_1CD, call: jnp.swapaxes(part(jnp.swapaxes(x_1CD, 0, 1), call), 0, 1),
                out_1BD, index_1C, x_1BD, gate_1B, inner.gather_rows(index_1C[0]),
            )  # fmt: skip
            return jnp.swapaxes(out_1BD, 0, 1)

        computed_1B = jnp.swapaxes(computed_BT, 0, 1)
        return selection.loop_over_selected(
            self.block, computed_1B, slots, residual_BTD, compute_rows, carries="cache"
        )

    def _write_keys_values(self, x_BTD, computed_BT, call):
        """Write keys and values to the KV cache before the selected tokens are computed.

        Writes those of all tokens; of the skipped tokens only, if keys and values of selected
        tokens depend on the block's output. Returns: the call for the selected tokens.
        """
        writing = call.with_cache(access="write")
        if self.block.kv_depends_on_block_output:
            skipped_BT = jnp.where(computed_BT, -1, call.positions_BT)
            writing = writing.replace(positions_BT=skipped_BT)
        self._part_of(self.block)(x_BTD, writing)
        return call.with_cache(access="read")


def _add_gated(part, out_BTD, index_BC, x_BTD, gate_BT, call):
    """Scatter-add gate * part(x) of the tokens at `index`, rounded to the dtype of part(x)."""
    delta_BCD = part(selection.gather(x_BTD, index_BC), call)
    gated_BCD = selection.scale(delta_BCD, selection.gather(gate_BT, index_BC))
    return selection.scatter_add(out_BTD, index_BC, gated_BCD.astype(delta_BCD.dtype))


def _add_masked(part, out_BTD, x_BTD, gate_BT, call):
    """Compute part(x) for all rows; add gate * part(x) where the position is not negative."""
    delta_BTD = part(x_BTD, call)
    gated_BTD = selection.scale(delta_BTD, gate_BT).astype(delta_BTD.dtype)
    gated_BTD = jnp.where((call.positions_BT >= 0)[..., None], gated_BTD, 0)
    return out_BTD + gated_BTD.astype(out_BTD.dtype)
