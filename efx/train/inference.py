"""Restore the checkpoint of a run, evaluate it, or sample from it."""

import dataclasses
import json
import sys
from io import StringIO

import jax
import optax

from efx import io, models, run_dir
from efx.checkpoint import Checkpointer, fingerprint
from efx.checkpoint.init_from import changed_settings
from efx.config.load import to_config
from efx.errors import UsageError
from efx.logging import Progress, quantity, read_metrics
from efx.models.config import SAME_MODEL
from efx.parallel import sharding
from efx.sampling import TextSampler
from efx.train import health, setup
from efx.train.evaluator import Evaluator, describe, describe_scored_text
from efx.train.named_runs import check_tokenizer

# Settings that change the function or the random numbers of a model with the same parameters.
_MODEL_SETTINGS = rf"(?!model\.({SAME_MODEL})$)(model|adapter)\..*|seed"


def restore(config, workdir, step=None, splits=()):
    """(Experiment or Setup, step, parameters, variables) of a run's checkpoint.

    The model is that of the stage of capacity that trained the checkpoint.

    Args:
      config: ConfigDict or `Config`. step: of the checkpoint; None: the newest.
      splits: those of the data to load, see `efx.data.load`; without any only the model is built.
    """
    config, run = to_config(config), run_dir.RunDir(workdir)
    _ = run.config  # raises unless it is a run
    if splits:
        built = setup.experiment(config, run, splits, trains=False)
    else:
        built = setup.setup(config, run)
    boxed = models.variable_shapes(built.model)
    shapes = setup.state_shapes(built, boxed, optax.identity())
    with checkpointer(workdir, config.checkpoint, scores={}) as checkpoints:
        restored = checkpoints.restore(
            shapes,
            step=step,
            on_damage=config.checkpoint.on_damage,
            vocab_size=built.model.vocab_size,
            whole=False,
        )
    model = _model_at(built.model, restored.step, restored.meta.get("last_step", 0))
    built = dataclasses.replace(built, model=model)
    return built, restored.step, restored.state.params, restored.state.variables


def _model_at(model, step, steps):
    """The model of the stage that trained `step`, of the first stage for step 0.

    Args:
      steps: those of the run; 0 if unknown: the last stage.
    """
    stages = setup.capacity_stages(model)
    started = [m for start, m in stages if not step or round(start * steps) < step]
    return started[-1 if step else 0]


def read_teacher(experiment, recorded=None):
    """(variables, origin) of the teacher of an experiment, (None, None) without one.

    Args:
      recorded: the origin by the run's first launch, whose checkpoint is used; None: the newest.
    Raises: UsageError if that checkpoint has other parameters now.
    """
    if experiment.teacher is None:
        return None, None
    run, teacher = experiment.config.train.teacher, experiment.teacher
    step = recorded and recorded["step"]
    _, step, params, variables = restore(teacher.config, run, step)
    origin = {"run": run, "step": step, "parameters": fingerprint(params, teacher.model.vocab_size)}
    if recorded and origin["parameters"] != recorded["parameters"]:
        raise UsageError(
            f"config.train.teacher={run}: its parameters at step {step} are not those that this "
            "run has learned from; use the directory of the first teacher"
        )
    return {"params": params, **variables}, origin


def checkpointer(workdir, c, scores=None):
    """The `Checkpointer` of a run directory, by the block `config.checkpoint`.

    Args:
      scores: see `Checkpointer`; None: those of the run's metrics.
    """
    if scores is None:
        scores = read_scores(workdir, c) if c.keep_best else {}
    return Checkpointer(
        io.folder(workdir) / run_dir.CHECKPOINTS,
        keep_last=c.keep_last,
        keep_best=c.keep_best,
        scores=scores,
        asynchronous=c.asynchronous,
    )


def read_scores(workdir, c):
    """{step: `config.checkpoint.best_metric`} of a run's metrics."""
    rows = read_rows(workdir)
    return {row["step"]: row[c.best_metric] for row in rows if c.best_metric in row}


def read_rows(workdir):
    """The rows of a run's metrics; [] without any."""
    has_metrics = (io.folder(workdir) / run_dir.METRICS_FILE).exists()
    return read_metrics(workdir) if has_metrics else []


def evaluate(config, workdir, step=None, as_json=False):
    """Evaluate a checkpoint on the run's held-out split, or on all of `config.data.eval_source`;
    returns all metrics and prints the main ones.

    Args:
      config: ConfigDict or `Config`. step: of the checkpoint; None: the newest.
      as_json: print all metrics, and nothing else, as JSON.
    """
    config, run = to_config(config), run_dir.RunDir(workdir)
    check_tokenizer(config, run)
    if changed_settings(run, config, r"evaluate\.calibrate") and config.evaluate.calibrate:
        raise UsageError(
            f"config.evaluate.calibrate={config.evaluate.calibrate}: --mode=evaluate scores the "
            "thresholds of the checkpoint; set it for training or for --mode=export"
        )
    e, step, params, variables = restore(config, workdir, step, ("eval",))
    with (
        sharding.use(e.mesh, e.rules),
        Progress() as progress,
        progress.phase(f"evaluating step {step}"),
    ):
        metrics = Evaluator(e.model, e.config, e.data, e.mesh, e.rules)(params, variables)
    if jax.process_index() == 0 and as_json:
        print(json.dumps({"step": step, **metrics}))
    elif jax.process_index() == 0:
        print(describe(step, metrics))
        health.Watch()(metrics, step / e.steps)
        print(describe_scored_text(e.data, config.evaluate, metrics["eval/tokens"]))
        if warning := model_change_warning(e.config, run):
            print(warning)
        c, trained_on = config.data, run.setting("data.source")
        if not c.eval_source and c.source != trained_on:
            print(f"to score the whole text, use --config.data.eval_source={c.source}")
        print(f"all {len(metrics)} metrics, those of each block too: add --json")
    return metrics


def model_change_warning(config, run):
    """A warning about settings that change the model after training, or ""."""
    changed = changed_settings(run, config, _MODEL_SETTINGS)
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
    config, run = to_config(config), run_dir.RunDir(workdir)
    check_tokenizer(config, run)
    e, step, params, variables = restore(config, workdir, step)
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
        if warning := model_change_warning(e.config, run):
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
