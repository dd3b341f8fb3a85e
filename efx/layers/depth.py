"""Depth routing: a wrapper round any residual block that computes it for some tokens only.

Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258, section 3). For router weights
r = x w, the C tokens with the largest r in a sequence pass through the block:
    out_i = x_i + g(r_i) * delta(X_routed)_i   if i is routed,   x_i otherwise.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from efx.layers import routing

GATES = {
    "identity": lambda r: r,  # the paper's equation 1
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "one": jnp.ones_like,
}


@dataclasses.dataclass(frozen=True)
class DepthRoutingConfig:
    """`config.model.depth_routing`.

    Attributes:
      kind: "none" or "mod".
      every: one block in `every` is routed, starting with block every - 1 (2: blocks 1, 3, 5...).
      blocks: explicit zero-based list of routed blocks instead; () for the rule above.
      capacity: c, the fraction of a sequence that a routed block computes, in (0, 1]; one value,
        or one for each routed block.
      gate: g, one of `GATES`.
      selection: how tokens are chosen in training: "topk", or the negative control "stochastic"
        (top-k of Gaussian noise, gate 1).
      causal: how they are chosen where nothing may depend on later tokens (evaluation, sampling):
        "aux_loss": r > 0, with r trained towards it by the loss `router_bce`.
      bce_reaches_input: the gradient of `router_bce` also reaches x (as in the paper).
      slack: the causal decision is not bound to c; room for ceil(c * T * slack) tokens of a
        sequence is kept, and what comes after is left out and counted as overflow.
    """

    kind: str
    every: int
    blocks: tuple[int, ...]
    capacity: float | tuple[float, ...]
    gate: str
    selection: str
    causal: str
    bce_reaches_input: bool
    slack: float


class DepthRouted(nn.Module):
    """x [B, T, D] -> x with the block's increment added to the routed tokens.

    Sows the loss `router_bce` and, into `stats`, how well the causal decision agrees with top-k
    and how many tokens it routes.
    """

    make_block: Callable
    config: DepthRoutingConfig
    capacity: float

    def setup(self):
        self.block = self.make_block()
        nn.share_scope(self, self.block)
        # One router for each block, never shared, without bias. Starting at zero would make every
        # score equal and the first selection the first C tokens.
        self.router = self.param(
            "router",
            nn.with_logical_partitioning(nn.initializers.normal(0.02), ("norm",)),
            (self.block.config.width,),
            jnp.float32,
        )

    def scores(self, x_BTD):
        """r [B, T] in float32, whatever the dtype of x."""
        return jnp.einsum(
            "BTD,D->BT", x_BTD.astype(jnp.float32), self.router, precision=jax.lax.Precision.HIGHEST
        )

    def __call__(self, x_BTD, info):
        if info.decode:
            return self._decode(x_BTD, info)
        c = self.config
        batch, length, _ = x_BTD.shape
        score_BT = self.scores(x_BTD)
        valid_BT = None if info.segment_ids_BT is None else info.segment_ids_BT > 0
        size = routing.capacity(self.capacity, length)
        if c.selection == "stochastic":
            noise_BT = self._noise(score_BT.shape)
            top = routing.topk_plan(noise_BT, size, valid_BT)
        else:
            top = routing.topk_plan(jax.lax.stop_gradient(score_BT), size, valid_BT)
        decided_BT = score_BT > 0
        if valid_BT is not None:
            decided_BT = decided_BT & valid_BT
        room = routing.capacity(self.capacity * c.slack, length)
        causal = routing.first_plan(decided_BT, room)
        self._report(x_BTD, score_BT, decided_BT, routing.selected(top, length), causal, valid_BT)
        plan = top if info.selection == "train" else causal
        delta_BCD = self.block(routing.gather(x_BTD, plan), routing.gather_info(info, plan, batch))
        gate_BC = self._gate(routing.gather(score_BT, plan))
        return routing.scatter_add(
            x_BTD, delta_BCD * gate_BC[..., None].astype(delta_BCD.dtype), plan
        )

    def _gate(self, score):
        return GATES["one" if self.config.selection == "stochastic" else self.config.gate](score)

    def _noise(self, shape):
        if self.has_rng("routing"):
            return jax.random.normal(self.make_rng("routing"), shape)
        return jax.random.normal(jax.random.key(0), shape)

    def _report(self, x_BTD, score_BT, decided_BT, target_BT, causal, valid_BT):
        """Losses and diagnostics. Targets are one-hot per row: row b's come from row b alone."""
        weight_BT = jnp.ones_like(score_BT) if valid_BT is None else valid_BT.astype(jnp.float32)
        total = jnp.maximum(jnp.sum(weight_BT), 1.0)

        def mean(value_BT):
            return jnp.sum(value_BT * weight_BT) / total

        logits_BT = score_BT
        if not self.config.bce_reaches_input:
            logits_BT = self.scores(jax.lax.stop_gradient(x_BTD))
        target = target_BT.astype(jnp.float32)
        self.sow(
            "losses", "router_bce", mean(optax.sigmoid_binary_cross_entropy(logits_BT, target))
        )
        decided = decided_BT.astype(jnp.float32)
        both, positives, wanted = mean(decided * target), mean(decided), mean(target)
        self.sow("stats", "router/accuracy", mean(decided * target + (1 - decided) * (1 - target)))
        self.sow("stats", "router/precision", both / jnp.maximum(positives, 1e-9))
        self.sow("stats", "router/recall", both / jnp.maximum(wanted, 1e-9))
        self.sow("stats", "router/decided_fraction", positives)
        routed = jnp.sum(causal.mask_BC) / total
        self.sow("stats", "router/overflow_fraction", positives - routed)

    @nn.compact
    def _decode(self, x_BTD, info):
        """One or more new tokens for each row, against a cache that holds routed tokens only."""
        c = self.config
        batch, length, _ = x_BTD.shape
        room = routing.capacity(self.capacity * c.slack, info.cache_size)
        routed = self.variable("cache", "routed", jnp.zeros, (batch,), jnp.int32)
        overflow = self.variable("cache", "overflow", jnp.zeros, (batch,), jnp.int32)
        info = info.full(batch).replace(cache_size=room)
        if self.is_initializing():
            return x_BTD + self.block(x_BTD, info)
        score_BT = self.scores(x_BTD)
        wanted_BT = (score_BT > 0) & (info.positions_BT >= 0)
        fits_BT = routed.value[:, None] + jnp.cumsum(wanted_BT, axis=1) <= room
        run_BT = wanted_BT & fits_BT
        routed.value = routed.value + jnp.sum(run_BT, axis=1)
        overflow.value = overflow.value + jnp.sum(wanted_BT & ~fits_BT, axis=1)
        gate_BT = jnp.where(run_BT, self._gate(score_BT), 0.0)
        if length > 1:
            plan = routing.first_plan(run_BT, min(length, room))
            delta_BCD = self.block(
                routing.gather(x_BTD, plan), routing.gather_info(info, plan, batch)
            )
            gate_BC = routing.gather(gate_BT, plan)
            return routing.scatter_add(
                x_BTD, delta_BCD * gate_BC[..., None].astype(delta_BCD.dtype), plan
            )
        return self._decode_one(x_BTD, gate_BT, run_BT, info)

    def _decode_one(self, x_BTD, gate_BT, run_BT, info):
        """A single new token a row: the rows that want the block, a static number at a time.

        The loop runs ceil(wanted / rows) times with rows = ceil(c * B * slack): not at all when no
        row wants the block, as a rule once, more often when more rows want it than fit at a time.
        It is a loop and not a conditional because XLA updates what a loop carries in place, but
        copies the caches that a conditional returns.
        """
        batch = x_BTD.shape[0]
        rows = routing.capacity(self.capacity * self.config.slack, batch)
        rank_BT = jnp.cumsum(run_BT, axis=0) - 1
        count = jnp.sum(run_BT)

        def more(block, carry):
            return carry[0] < count

        def some(block, carry):
            done, x_BTD = carry
            if rows == batch:
                positions_BT = jnp.where(run_BT, info.positions_BT, -1)
                delta_BTD = block(x_BTD, info.replace(positions_BT=positions_BT))
                return done + rows, x_BTD + delta_BTD * gate_BT[..., None].astype(delta_BTD.dtype)
            # One "sequence" of the batch's rows.
            plan = routing.first_plan((run_BT & (rank_BT >= done)).T, rows)

            def take(y, fill=0):
                return routing.gather(y[None], plan, fill)[0]

            delta = block(
                take(x_BTD),
                info.replace(positions_BT=take(info.positions_BT, -1), rows_B=plan.indices_BC[0]),
            )
            delta = delta * take(gate_BT)[..., None].astype(delta.dtype)
            return done + rows, routing.scatter_add(x_BTD[None], delta[None], plan)[0]

        start = (jnp.int32(0), x_BTD)
        return nn.while_loop(more, some, self.block, start, carry_variables="cache")[1]


def routed_blocks(config, depth):
    """{block index: capacity} of a stack of `depth` blocks; ValueError if the lengths differ."""
    if config.kind == "none":
        return {}
    chosen = config.blocks or tuple(range(config.every - 1, depth, max(1, config.every)))
    capacities = config.capacity
    if not isinstance(capacities, tuple):
        capacities = (capacities,) * len(chosen)
    return dict(zip(chosen, capacities, strict=True))
