"""Held-out loss over the whole split, in nats and in bits per byte, for each way of routing."""

import jax
import numpy as np

from efx import losses, sharding
from efx.step import make_eval_step


class Evaluator:
    """Evaluates one model on one data set; compiles once for each way of routing.

    A depth-routed model, or one with expert choice, is evaluated twice: under the causal decision,
    which is what a sampler can do (`eval/loss`), and under training's own selection
    (`eval/loss_topk`), which looks ahead.
    """

    def __init__(self, model, config, data, mesh, rules):
        self._config, self._data = config.evaluate, data
        self._mesh, self._rules = mesh, rules
        self._routed = any(spec.routing is not None for spec in model.specs())
        ahead = self._routed or _experts_look_ahead(model)
        selections = ("causal", "train") if ahead else ("causal",)
        self._steps = {
            selection: jax.jit(
                make_eval_step(
                    model.clone(selection=selection),
                    config,
                    groups=sharding.batch_shards(mesh, rules),
                )
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
        }
        result |= _expert_rows(means, bytes_per_token)
        if not self._routed:
            return result
        top = means["train"]
        result["eval/loss_topk"] = top["loss"]
        result["eval/bits_per_byte_topk"] = losses.bits_per_byte(top["loss"], bytes_per_token)
        # How well the decision predicts top-k is asked where top-k decides what each router sees.
        result |= {
            f"eval/{name}": value
            for name, value in top.items()
            if name.startswith(("router/accuracy", "router/precision", "router/recall"))
        }
        # How many tokens it routes is asked where it decides.
        for name, value in causal.items():
            if name.startswith("router/decided_fraction"):
                tail = name.removeprefix("router/decided_fraction")
                overflow = causal[f"router/overflow_fraction{tail}"]
                result[f"eval/router/routed_fraction{tail}"] = value - overflow
                result[f"eval/router/overflow_fraction{tail}"] = overflow
        return result

    def _run(self, step, params, variables):
        totals = []
        placed = sharding.batch_sharding(self._mesh, self._rules)
        for batch in self._data.eval_batches(self._config.batch_size, self._config.max_batches):
            totals.append(step(params, variables, sharding.place_batch(batch, placed)))
            if len(totals) > 2:
                totals[-3] = jax.device_get(totals[-3])  # two batches in flight, not the split
        totals = jax.device_get(totals)
        sums = {
            name: float(np.sum([t[name] for t in totals], dtype=np.float64)) for name in totals[0]
        }
        tokens = sums.pop("weights")
        return {name: value / tokens for name, value in sums.items()} | {"tokens": tokens}


def _experts_look_ahead(model):
    experts = [spec.block.moe for spec in model.specs() if spec.block.moe is not None]
    return any(moe.looks_ahead for moe in experts)


def _expert_rows(means, bytes_per_token):
    """`eval/moe/...` under the causal decision; the loss under training's selection if it differs.

    As with routers, how well expert choice's decision predicts the selection that looks ahead is
    asked where the latter decides what each router sees.
    """
    names = [name for name in means["causal"] if name.startswith("moe/")]
    rows = {}
    for name in names:
        ahead = name.startswith("moe/accuracy")
        rows[f"eval/{name}"] = means["train" if ahead else "causal"][name]
    if names and "train" in means:
        loss = means["train"]["loss"]
        rows["eval/loss_topk"] = loss
        rows["eval/bits_per_byte_topk"] = losses.bits_per_byte(loss, bytes_per_token)
    return rows


def describe(step, metrics):
    """One line about an evaluation."""
    line = (
        f"step {step}: held-out loss {metrics['eval/loss']:.4f} nats, "
        f"{metrics['eval/bits_per_byte']:.4f} bits per byte"
    )
    if "eval/loss_topk" in metrics:
        line += f" (causal routing; top-k {metrics['eval/loss_topk']:.4f})"
    if "eval/router/accuracy" in metrics:
        line += (
            f"; decision accuracy {metrics['eval/router/accuracy']:.1%}, "
            f"routed {metrics['eval/router/routed_fraction']:.1%}"
        )
    if "eval/moe/dropped_fraction" in metrics:
        line += f"; experts full for {metrics['eval/moe/dropped_fraction']:.1%}"
    return line
