"""Held-out loss, in nats and in bits per byte, for each way of routing."""

import jax
import numpy as np

from efx import losses, models, sharding
from efx.layers.stack import label
from efx.mask_changes import MaskChanges
from efx.metrics import portion
from efx.step import by_layer, make_eval_step

# How well a decision agrees with training's selection.
AGREEMENT = ("accuracy", "precision", "recall")


class Evaluator:
    """Evaluates one model on one data set; compiles once for each way of routing.

    A model that routes by depth is evaluated under the causal decision, which is what a sampler can
    do (`eval/loss`), under every other decision that is trained (`eval/loss_<decision>`) and under
    training's own selection, which may look ahead (`eval/loss_topk`); one with expert choice under
    its causal decision and under training's selection. A control of routing does in evaluation what
    it does in training, with other random numbers: its `eval/loss` is both.
    """

    def __init__(self, model, config, data, mesh, rules):
        self._config, self._data = config.evaluate, data
        self._placement = sharding.Placement(mesh, rules, config.evaluate.batch_size)
        self._model, self._length, self._seed = model, config.data.seq_len, np.uint32(config.seed)
        specs = model.blocks().values()
        routing = [spec.routing for spec in specs if spec.routing is not None]
        self._routing = routing[0] if routing else None
        moes = [block.moe for spec in specs for block in spec.blocks]
        self._moe = next((moe for moe in moes if moe is not None), None)
        selections = ("causal",)
        learned_routing = self._routing and not self._routing.control
        if learned_routing or (self._moe and self._moe.looks_ahead):
            selections += ("train",)
        if self._routing:
            selections += self._routing.trained[1:]
        learned = model.config.dropout.learned
        self._mask_changes = MaskChanges(model, mesh, rules, self._seed) if learned else None
        self._by_layer = jax.jit(lambda stats: by_layer(stats, model))
        self._steps = {
            selection: jax.jit(
                make_eval_step(
                    model.clone(selection=selection),
                    config,
                    groups=sharding.batch_shards(mesh, rules),
                ),
                out_shardings=sharding.replicated(mesh),
            )
            for selection in selections
        }

    def __call__(self, params, variables):
        """{"eval/loss": nats a token, "eval/bits_per_byte": ..., ...} as Python floats."""
        means = {
            selection: self._run(step, params, variables) for selection, step in self._steps.items()
        }
        causal = means["causal"]
        bytes_per_token = self._data.bytes_per_token("eval")
        result = {
            "eval/loss": causal["loss"],
            "eval/bits_per_byte": losses.bits_per_byte(causal["loss"], bytes_per_token),
            "eval/accuracy": causal["correct"],
            "eval/tokens": causal["tokens"],
            "eval/split_fraction": causal["tokens"] / self._data.scored_tokens("eval"),
        }
        result |= self._expert_rows(means, bytes_per_token)
        kinds = ("dropout/", "adapter/")
        result |= {f"eval/{name}": x for name, x in causal.items() if name.startswith(kinds)}
        result |= self._computed(causal)
        if self._mask_changes is not None:
            first = next(iter(self._batches(self._mask_changes.placement.rows)))
            changes = self._mask_changes(params, variables, first)
            result |= {f"eval/{name}": value for name, value in changes.items()}
        if not self._routing:
            return result
        if self._routing.control:
            result |= {
                f"eval/{name}_{self._routing.train_selection}": result[f"eval/{name}"]
                for name in ("loss", "bits_per_byte")
            }
            return result | self._routed("router", causal)
        first, *others = self._routing.trained
        for selection in ("train", *others):
            loss = means[selection]["loss"]
            name = self._routing.train_selection if selection == "train" else selection
            result[f"eval/loss_{name}"] = loss
            result[f"eval/bits_per_byte_{name}"] = losses.bits_per_byte(loss, bytes_per_token)
        for decision in self._routing.trained:
            prefix = "router" if decision == first else decision
            own = means["causal" if decision == first else decision]
            result |= self._decision(prefix, means["train"], own)
        return result

    def _computed(self, causal):
        """What masks left to be computed; FLOPs where nothing else changes how many tokens are."""
        key = "mlp/computed_fraction"
        rows = {f"eval/{name}": x for name, x in causal.items() if name.startswith(key)}
        if rows and not self._routing:
            parts = self._model.ledger(self._length).nominal
            closed = (1.0 - causal[key]) * parts["mlp"]
            rows["eval/flops_per_token"] = (sum(parts.values()) - closed) / self._length
        return rows

    def _decision(self, prefix, trained, own):
        """Rows about one causal decision.

        How well it predicts top-k is asked where training's selection decides what each router
        sees; how many tokens it routes, and what that costs, where it decides itself.
        """
        rows = {}
        for name, value in trained.items():
            if name.startswith(tuple(f"{prefix}/{key}" for key in AGREEMENT)):
                rows[f"eval/{name}"] = value
        return rows | self._routed(prefix, own)

    def _routed(self, prefix, own):
        """How many tokens are computed, and what that costs."""
        rows, key = {}, f"{prefix}/decided_fraction"
        for tail in [name.removeprefix(key) for name in own if name.startswith(key)]:
            overflow = own[f"{prefix}/overflow_fraction{tail}"]
            rows[f"eval/{prefix}/routed_fraction{tail}"] = own[key + tail] - overflow
            rows[f"eval/{prefix}/overflow_fraction{tail}"] = overflow
        shares = {}
        for path, spec in self._model.blocks().items():
            if spec.routing is not None:
                routed = rows[f"eval/{prefix}/routed_fraction/{label(path)}"]
                shares[path] = (routed, own[f"{prefix}/pairs_fraction/{label(path)}"])
        ledger = self._measured(own).ledger(self._length, shares=shares)
        rows[f"eval/{prefix}/flops_per_token"] = ledger.nominal_per_token
        return rows

    def _measured(self, means):
        """The model with the share of the choices that its experts were seen to compute."""
        computed = means.get("moe/computed_fraction")
        if computed is None or self._moe is None:
            return self._model
        changes = {"mlp.moe.computed_fraction": min(max(computed, 1e-9), 1.0)}
        return models.changed(self._model, **changes)

    def _expert_rows(self, means, bytes_per_token):
        """`eval/moe/...` under the causal decision; the loss under training's selection if it
        differs; FLOPs by what experts computed, where nothing else changes how many tokens are.

        As with routers, how well expert choice's decision predicts the selection that looks ahead
        is asked where the latter decides what each router sees.
        """
        names = [name for name in means["causal"] if name.startswith("moe/")]
        rows = {}
        for name in names:
            ahead = name.startswith("moe/accuracy")
            rows[f"eval/{name}"] = means["train" if ahead else "causal"][name]
        if "moe/computed_fraction" in names and self._moe:
            rows["eval/moe/counted_fraction"] = self._moe.counted_fraction
            if not self._routing:
                ledger = self._measured(means["causal"]).ledger(self._length)
                rows["eval/moe/flops_per_token"] = ledger.nominal_per_token
        if names and "train" in means:
            loss = means["train"]["loss"]
            rows["eval/loss_topk"] = loss
            rows["eval/bits_per_byte_topk"] = losses.bits_per_byte(loss, bytes_per_token)
        return rows

    def _batches(self, rows):
        c = self._config
        return self._data.eval_batches(c.batch_size, c.max_batches, rows)

    def _run(self, step, params, variables):
        totals = []
        for index, batch in enumerate(self._batches(self._placement.rows)):
            batch = self._placement(batch)
            totals.append(step(params, variables, batch, self._seed, np.uint32(index)))
            if len(totals) > 2:
                totals[-3] = jax.device_get(totals[-3])  # two batches in flight, not the split
        sums = jax.tree.map(
            lambda *parts: np.sum(parts, axis=0, dtype=np.float64), *jax.device_get(totals)
        )
        tokens = float(sums["weights"])
        stats = {name: float(x) for name, x in self._by_layer(sums["stats"]).items()}
        return stats | {
            "loss": float(sums["loss"]) / tokens,
            "correct": float(sums["correct"]) / tokens,
            "tokens": tokens,
        }


def cut(metrics):
    """ " over 25% of the held-out split", or nothing where all of it was scored."""
    fraction = metrics["eval/split_fraction"]
    return f" over {portion([fraction])}" if fraction < 1 else ""


def describe(step, metrics):
    """One line about an evaluation."""
    line = (
        f"step {step}: held-out loss {metrics['eval/loss']:.4f} nats, "
        f"{metrics['eval/bits_per_byte']:.4f} bits per byte{cut(metrics)}"
    )
    others = ", ".join(
        f"{name.removeprefix('eval/loss_')} {value:.4f}"
        for name, value in metrics.items()
        if name.startswith("eval/loss_")
    )
    if others:
        line += f" (causal routing; {others})"
    if "eval/router/accuracy" in metrics:
        line += f"; decision accuracy {metrics['eval/router/accuracy']:.1%}"
    if "eval/router/routed_fraction" in metrics:
        line += f", routed {metrics['eval/router/routed_fraction']:.1%}"
    if "eval/moe/dropped_fraction" in metrics:
        line += f"; experts full for {metrics['eval/moe/dropped_fraction']:.1%}"
    if "eval/moe/counted_fraction" in metrics:
        line += (
            f", computed {metrics['eval/moe/computed_fraction']:.1%} of the choices (counted as "
            f"{metrics['eval/moe/counted_fraction']:.1%})"
        )
    if "eval/adapter/experts_per_token" in metrics:
        line += f"; {metrics['eval/adapter/experts_per_token']:.2f} experts a token"
    if "eval/dropout/kept" in metrics:
        line += f"; masks keep {metrics['eval/dropout/kept']:.1%}"
    if "eval/mlp/computed_fraction" in metrics:
        line += f"; MLPs computed for {metrics['eval/mlp/computed_fraction']:.1%} of the tokens"
    return line


def scored(data, config, tokens):
    """What an evaluation is of: which text, how much of it, and whether that is all of it.

    Args:
      data: Data. config: the `config.evaluate` block. tokens: how many were scored.
    """
    whole, each = data.scored_tokens("eval"), data.bytes_per_token("eval")
    size = f"{whole:,} tokens, {round(whole * each):,} bytes"
    if tokens < whole:
        size = (
            f"{round(tokens):,} tokens, about {round(tokens * each):,} bytes, spread over its"
            f" {size} (config.evaluate.max_batches={config.max_batches})"
        )
    return f"scored: {data.held_out_of()}: {size}"
