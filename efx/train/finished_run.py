"""Evaluate the checkpoint of a run, or sample from it."""

import sys
from io import StringIO

import jax

from efx import run_dir
from efx.checkpoint.init_from import changed_settings
from efx.config.load import to_config
from efx.errors import UsageError
from efx.logging import quantity
from efx.models.config import SAME_MODEL
from efx.parallel import sharding
from efx.sampling import TextSampler
from efx.train import health
from efx.train.evaluator import Evaluator, describe, scored
from efx.train.other_runs import check_tokenizer
from efx.train.setup import finished

# Settings that change the function or the random numbers of a model with the same parameters.
_MODEL_SETTINGS = rf"(?!model\.({SAME_MODEL})$)(model|adapter)\..*|seed"


def evaluate(config, workdir, step=None):
    """Print and return the metrics of a checkpoint on the run's held-out split, or on all of
    `config.data.eval_source`.

    Args:
      config: ConfigDict or `Config`. step: of the checkpoint; None: the newest.
    """
    config = to_config(config)
    check_tokenizer(config, "--workdir", workdir)
    if changed_settings(workdir, config, r"evaluate\.calibrate") and config.evaluate.calibrate:
        raise UsageError(
            f"config.evaluate.calibrate={config.evaluate.calibrate}: --mode=evaluate scores the "
            "thresholds of the checkpoint; set it for training or for --mode=export"
        )
    e, step, params, variables = finished(config, workdir, step, ("eval",))
    with sharding.use(e.mesh, e.rules):
        metrics = Evaluator(e.model, e.config, e.data, e.mesh, e.rules)(params, variables)
    if jax.process_index() == 0:
        print(describe(step, metrics))
        health.Watch()(metrics, step / e.steps)
        print(scored(e.data, config.evaluate, metrics["eval/tokens"]))
        if warning := model_change_warning(e.config, workdir):
            print(warning)
        c, trained_on = config.data, run_dir.recorded_setting(workdir, "data.source")
        if not c.eval_source and c.source != trained_on:
            print(f"to score the whole text, use --config.data.eval_source={c.source}")
        for name, value in sorted(metrics.items()):
            number = f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
            print(f"  {name:<44} {number}")
    return metrics


def model_change_warning(config, workdir):
    """A warning about settings that change the model after training, or ""."""
    changed = changed_settings(workdir, config, _MODEL_SETTINGS)
    listed = (
        f"config.{key}={value!r} (trained with {before!r})"
        for key, (before, value) in changed.items()
    )
    return f"model settings differ from training: {', '.join(listed)}" if changed else ""


def sample(config, workdir, step=None, stream=None):
    """Continue `config.sample.prompt`, writing text to `stream` as it is generated.

    Args:
      config, step: see `evaluate`. stream: None: standard output.
    Returns: statistics of the sampler.
    """
    config = to_config(config)
    check_tokenizer(config, "--workdir", workdir)
    e, step, params, variables = finished(config, workdir, step)
    is_primary = jax.process_index() == 0
    sampler = TextSampler(e.model, e.tokenizer, config.sample, rules=e.rules)
    # All processes sample, since each may hold a part of the parameters.
    stream = stream if is_primary else StringIO()
    stats = sampler.write({"params": params, **variables}, stream)
    if is_primary:
        line = f"{quantity(stats['tokens_per_second'], 'tokens/s')} from step {step}"
        if "routed_fraction" in stats:
            line += f"; routed blocks computed {stats['routed_fraction']:.1%} of their tokens"
        print(line + _describe_overflow(stats), file=sys.stderr)
        if warning := model_change_warning(e.config, workdir):
            print(warning, file=sys.stderr)
    return stats


def _describe_overflow(stats):
    """Text about tokens and choices over the causal limit, or ""."""
    text = ""
    for name, count, total, unit in (
        ("routed blocks", stats.get("overflow", 0), stats.get("selected"), "selected tokens"),
        ("experts", stats["expert_overflow"], stats["expert_choices"], "choices"),
    ):
        if count:
            text += f"; overflow of {name}: {count} of {total} {unit} ({count / total:.1%})"
    return text
