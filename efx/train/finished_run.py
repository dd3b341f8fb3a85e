"""Evaluate a finished (or running) run, or sample from it."""

import io
import sys

import jax

from efx import run_dir
from efx.checkpoint.init_from import changed_settings
from efx.logging import quantity
from efx.models.config import SAME_MODEL
from efx.parallel import sharding
from efx.sampling import TextSampler
from efx.train.evaluator import Evaluator, describe, scored
from efx.train.setup import check_tokenizer, finished

# Settings that change what the parameters of a run compute, or the random numbers in it.
_OF_THE_MODEL = rf"(?!model\.({SAME_MODEL})$)(model|adapter)\..*|seed"


def evaluate(config, workdir, step=None):
    """Print and return the evaluation of a run's checkpoint over its held-out split, or over all of
    `config.data.eval_source`."""
    check_tokenizer(config, "--workdir", workdir)
    e, step, params, variables = finished(
        config, workdir, step, splits=("train", "eval") if config.evaluate.calibrate else ("eval",)
    )
    with sharding.use(e.mesh, e.rules):
        metrics = Evaluator(e.model, e.config, e.data, e.mesh, e.rules)(params, variables)
    if jax.process_index() == 0:
        print(describe(step, metrics))
        print(scored(e.data, config.evaluate, metrics["eval/tokens"]))
        if other := other_model(e.config, workdir):
            print(other)
        c, trained_on = config.data, run_dir.recorded_setting(workdir, "data.source")
        if not c.eval_source and c.source != trained_on:
            print(f"to score the whole text, use --config.data.eval_source={c.source}")
        for name, value in sorted(metrics.items()):
            number = f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
            print(f"  {name:<44} {number}")
    return metrics


def other_model(config, workdir):
    """A warning about settings that change the model after training, or ""."""
    changed = changed_settings(workdir, config, _OF_THE_MODEL)
    listed = (
        f"config.{key}={value!r} (trained with {before!r})"
        for key, (before, value) in changed.items()
    )
    return f"this is not the model that was trained: {', '.join(listed)}" if changed else ""


def sample(config, workdir, step=None, stream=None):
    """Continue `config.sample.prompt`, writing text to `stream` as it is generated."""
    check_tokenizer(config, "--workdir", workdir)
    e, step, params, variables = finished(config, workdir, step)
    is_primary = jax.process_index() == 0
    sampler = TextSampler(e.model, e.tokenizer, config.sample, rules=e.rules)
    # All processes sample, since each may hold a part of the parameters.
    sampler.write({"params": params, **variables}, stream if is_primary else io.StringIO())
    stats = sampler.stats
    if not is_primary:
        return stats
    line = f"{quantity(stats['tokens_per_second'], 'tokens/s')} from step {step}"
    if "routed_fraction" in stats:
        line += f"; routed blocks computed {stats['routed_fraction']:.1%} of their tokens"
    print(line + _dropped(stats), file=sys.stderr)
    if other := other_model(e.config, workdir):
        print(other, file=sys.stderr)
    return stats


def _dropped(stats):
    """Text about tokens and choices over the causal limit, or ""."""
    text = ""
    for name, count, total, unit in (
        ("routed blocks", stats.get("overflow", 0), stats.get("selected"), "selected tokens"),
        ("experts", stats["expert_overflow"], stats["expert_choices"], "choices"),
    ):
        if count:
            text += f"; {name} dropped {count} of {total} {unit} ({count / total:.1%})"
    return text
