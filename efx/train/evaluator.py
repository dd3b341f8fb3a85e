"""Held-out loss, in nats and in bits per byte, for each selection of routed tokens."""

import dataclasses
import re

import jax
import numpy as np

from efx.errors import UsageError, nearest
from efx.models.adapters import ADAPTERS
from efx.models.costs import MASKS
from efx.parallel import sharding
from efx.routing.reports import DEPTH, EXPERTS
from efx.train import health, losses, memory
from efx.train.eval_step import by_layer, make_eval_step
from efx.train.step import batch_shapes

# In the order of the logged line, see `describe`.
REPORTS = (DEPTH, EXPERTS, ADAPTERS, MASKS, health.INCREMENTS)


@dataclasses.dataclass(frozen=True)
class Passes:
    """Results of passes over the held-out text, one for each selection.

    Attributes:
      means: {selection: {name: mean}} of "loss", "correct", "tokens" and every sown statistic.
      bytes_per_token: of the scored tokens; None or 0: bits per byte are not reported.
    """

    means: dict
    bytes_per_token: float | None

    def loss(self, selection, name):
        """{metric: loss of a pass}; metrics end with `name`."""
        nats, end = self.means[selection]["loss"], f"_{name}" if name else ""
        metrics = {f"eval/loss{end}": nats}
        if self.bytes_per_token:
            bits = losses.bits_per_byte(nats, self.bytes_per_token)
            metrics[f"eval/bits_per_byte{end}"] = bits
        return metrics

    def worth(self):
        """Nats that switching the routed parts off costs."""
        return self.means["off"]["loss"] - self.means["causal"]["loss"]

    def statistics(self, selection, prefixes):
        """{metric: statistic of a pass}, for names with one of these prefixes."""
        means, prefixes = self.means[selection].items(), tuple(prefixes)
        return {f"eval/{name}": value for name, value in means if name.startswith(prefixes)}


def steps(model, config, mesh, rules):
    """{selection: `make_eval_step`, jitted}: causal decisions, then the selections of `REPORTS`."""
    selections = [selection for report in REPORTS for selection in report.selections(model)]
    return {
        selection: jax.jit(
            make_eval_step(
                model.clone(selection=selection),
                config,
                groups=sharding.shard_count("batch", mesh, rules),
            ),
            out_shardings=sharding.replicated(mesh),
        )
        for selection in dict.fromkeys(["causal", *selections])
    }


def shapes_of_step(config, mesh, rules, params, variables):
    """Shapes of the arguments of one of `steps`.

    Args:
      params, variables: their shapes.
    """
    batch = batch_shapes(config, config.evaluate.batch_size, mesh, rules)
    number = jax.ShapeDtypeStruct((), np.uint32)
    return params, variables, batch, number, number


class Evaluator:
    """Evaluates one model on one data set; compiles one program for each selection.

    `eval/loss` is that of the causal decisions, as in sampling. Further metrics belong to features
    of the model, see `REPORTS`.
    """

    def __init__(self, model, config, data, mesh, rules):
        self._model, self._config, self._data = model, config.evaluate, data
        rows = config.evaluate.batch_size
        self._length, self._seed = config.data.seq_len, np.uint32(config.seed)
        self._placement = sharding.Placement(mesh, rules, rows)
        self._steps = steps(model, config, mesh, rules)
        self._by_layer = jax.jit(lambda stats: by_layer(stats, model))

    def __call__(self, params, variables):
        """{"eval/loss": nats per token, "eval/bits_per_byte": ..., ...} as Python floats."""
        advice = f"lower config.evaluate.batch_size={self._config.batch_size}"
        with memory.exhaustion_as_usage_error("evaluation", advice):
            means = {
                selection: self._run(step, params, variables, self._batches(self._placement.rows))
                for selection, step in self._steps.items()
            }
            scored_bytes = self._data.scored_bytes(
                self._config.batch_size, self._config.max_batches
            )
            bytes_per_token = scored_bytes and scored_bytes / means["causal"]["tokens"]
            metrics = self._metrics(Passes(means, bytes_per_token))
            for name in self._data.eval_sets:
                metrics |= self._score_set(name, params, variables)
            if self._config.repeated_rows:
                metrics |= self._copying(params, variables)
        return metrics

    def _metrics(self, passes):
        """Metrics of the passes over the held-out text."""
        causal = passes.means["causal"]
        metrics = passes.loss("causal", "") | {
            "eval/accuracy": causal["correct"],
            "eval/tokens": causal["tokens"],
            "eval/split_fraction": causal["tokens"] / self._data.scored_tokens("eval"),
        }
        for report in REPORTS:
            metrics |= passes.statistics("causal", report.statistics)
            metrics |= report.rows(self._model, self._length, passes)
        return metrics

    def _score_set(self, name, params, variables):
        """Loss and bits per byte of one of `Data.eval_sets`."""
        c, split = self._config, f"eval/{name}"
        batches = self._data.eval_batches(c.batch_size, c.max_batches, self._placement.rows, split)
        means = self._run(self._steps["causal"], params, variables, batches)
        metrics = {f"{split}/loss": means["loss"], f"{split}/tokens": means["tokens"]}
        if scored_bytes := self._data.scored_bytes(c.batch_size, c.max_batches, split):
            bytes_per_token = scored_bytes / means["tokens"]
            bits = losses.bits_per_byte(means["loss"], bytes_per_token)
            metrics[f"{split}/bits_per_byte"] = bits
        return metrics

    def check_metric(self, name, params, variables):
        """Raise UsageError unless evaluations log `name`, which is `config.checkpoint.best_metric`.

        Traces the evaluation unless all models log it; nothing runs.

        Args:
          params, variables: their shapes.
        """
        data, has_bits = self._data, self._data.counts_bytes()
        of_sets = [f"eval/{one}/loss" for one in data.eval_sets]
        counted = [one for one in data.eval_sets if data.counts_bytes(f"eval/{one}")]
        of_sets += [f"eval/{one}/bits_per_byte" for one in counted]
        if name in of_sets:
            return
        if name == "eval/loss" or (name == "eval/bits_per_byte" and has_bits):
            return
        where = f"config.checkpoint.best_metric={name!r}"
        if not re.match(r"eval/(lo|bits_per_byte|[\w-]+/(loss|bits_per_byte)$)", name):
            raise UsageError(f"{where}: must be a held-out loss to minimise, such as eval/loss")
        batch = next(iter(self._data.eval_batches(self._config.batch_size, 1)))
        means = {}
        for selection, step in self._steps.items():
            sums = step.eval_shape(params, variables, batch, self._seed, self._seed)
            names = ("loss", "correct", "tokens", *self._by_layer.eval_shape(sums["stats"]))
            means[selection] = dict.fromkeys(names, 1.0)
        metrics = self._metrics(Passes(means, float(has_bits)))
        known = [key for key in metrics if key.startswith(("eval/loss", "eval/bits_per_byte"))]
        known += of_sets
        if name not in known:
            raise UsageError(
                f"{where}: not a loss of this model's evaluation{nearest(name, known)}; use one of "
                f"{', '.join(known)}"
            )

    def _batches(self, rows):
        return self._data.eval_batches(self._config.batch_size, self._config.max_batches, rows)

    def _copying(self, params, variables):
        """Loss of both halves of rows that repeat themselves, and the gain of the second.

        The gain measures copying from the context: nothing else predicts a token of the second half
        (Olsson et al. 2022, "In-context learning and induction heads", arXiv 2209.11895). The
        held-out loss after tokens that are new in their row is the part that cannot copy so: no
        earlier occurrence shows what follows.
        """
        c, nats = self._config, {}
        for half in ("first", "second"):
            batches = self._data.repeated_batches(
                c.repeated_rows, c.batch_size, self._placement.rows
            )
            halves = (batch[half] for batch in batches)
            nats[half] = self._run(self._steps["causal"], params, variables, halves)["loss"]
        nats["gain"] = nats["first"] - nats["second"]
        metrics = {f"eval/repeated/{name}": value for name, value in nats.items()}
        new = map(_after_new_tokens, self._batches(self._placement.rows))
        new_loss = self._run(self._steps["causal"], params, variables, new)["loss"]
        return metrics | {"eval/uncopied_loss": new_loss}

    def _run(self, step, params, variables, batches):
        """{name: mean} of "loss", "correct", "tokens" and every sown statistic over batches."""
        totals = []
        for index, batch in enumerate(batches):
            batch = self._placement(batch)
            totals.append(step(params, variables, batch, self._seed, np.uint32(index)))
            if len(totals) > 2:
                totals[-3] = jax.device_get(totals[-3])  # at most two batches in flight
        sums = jax.tree.map(
            lambda *parts: np.sum(parts, axis=0, dtype=np.float64), *jax.device_get(totals)
        )
        tokens = float(sums["weights"])
        stats = {name: float(x) for name, x in self._by_layer(sums["stats"]).items()}
        means = {name: float(sums[name]) / tokens for name in ("loss", "correct")}
        return stats | means | {"tokens": tokens}


def _after_new_tokens(batch):
    """The batch with weight 0 for targets whose current token occurs earlier in the row."""
    is_new_BT = np.zeros(batch["inputs"].shape, bool)
    for row, tokens in enumerate(batch["inputs"]):
        is_new_BT[row, np.unique(tokens, return_index=True)[1]] = True
    return batch | {"weights": batch["weights"] * is_new_BT}


def describe_scored_part(metrics):
    """ " over 25% of the held-out split", or "" if all of it was scored."""
    fraction = metrics["eval/split_fraction"]
    return f" over {100 * fraction:.3g}% of the held-out split" if fraction < 1 else ""


def bits(metrics, form):
    """Bits per byte in a text such as "({} bits per byte)"; "" if they are unknown."""
    value = metrics.get("eval/bits_per_byte")
    return "" if value is None else form.format(f"{value:.4f}")


def describe(step, metrics):
    """Lines about an evaluation: the held-out loss, and one for each feature of the model."""
    line = (
        f"step {step}: held-out loss {metrics['eval/loss']:.4f} nats"
        f"{bits(metrics, ', {} bits per byte')}{describe_scored_part(metrics)}"
    )
    for report in REPORTS:
        for name, words in report.words.items():
            if f"eval/{name}" in metrics:
                line += words.format(metrics[f"eval/{name}"])
    if others := _describe_other_losses(metrics):
        line += f"\n  held-out loss by other routing: {others}"
    if sets := [name for name in metrics if re.fullmatch("eval/.+/loss", name)]:
        values = (f"{name.split('/')[1]} {metrics[name]:.4f}" for name in sets)
        line += f"\n  held-out sets: {', '.join(values)}"
    if "eval/repeated/gain" in metrics:
        line += f"\n  repeated text gains {metrics['eval/repeated/gain']:.2f} nats"
    return line


def describe_worth(metrics):
    """What the routed parts of a model are worth, and its losses by other routing; "" without."""
    others = _describe_other_losses(metrics)
    worths = [metrics[name] for name in ("eval/router/worth", "eval/moe/worth") if name in metrics]
    if worths:
        others = f"worth {worths[0]:z.4f} nats; loss {others}"
    return others


def _describe_other_losses(metrics):
    names = {"routed_off": "switched off", "topk": "by top-k"}
    losses = {
        name.removeprefix("eval/loss_"): value
        for name, value in metrics.items()
        if name.startswith("eval/loss_")
    }
    return ", ".join(
        f"{value:.4f} {names.get(name, f'by {name}')}" for name, value in losses.items()
    )


def describe_scored_text(data, config, tokens):
    """One line about the scored text: its name, its size and the scored part of it.

    Args:
      data: Data. config: the `config.evaluate` block. tokens: number of scored tokens.
    """
    total = data.scored_tokens("eval")
    count = data.scored_bytes(config.batch_size, config.max_batches)
    size = f"{round(tokens):,} tokens" + ("" if count is None else f", {count:,} bytes")
    if tokens < total:
        size += f", spread over its {total:,} (config.evaluate.max_batches={config.max_batches})"
    return f"scored: {data.describe_held_out()}: {size}"
