"""Using a finished (or running) run: evaluate it, or sample from it."""

import pathlib
import sys

import jax

from efx import models, optim, runfolder, sharding
from efx import step as step_lib
from efx.checkpoint import Checkpointer
from efx.evaluate import Evaluator, describe, scored
from efx.experiment import prepare
from efx.metrics import quantity
from efx.sample import TextSampler


def restore(config, workdir, step=None, parts=()):
    """(Experiment, step, parameters to evaluate with, variables) of a run's checkpoint.

    parts: of the data that is wanted, see `efx.data.load`; of none the tokenizer alone is there.
    """
    workdir = pathlib.Path(workdir)
    runfolder.load_config(workdir)
    experiment = prepare(config, workdir, parts)
    e, c = experiment, config.checkpoint
    shapes = jax.eval_shape(lambda: step_lib.init_state_params(e.model))
    base = models.mup_base(e.model)
    optimizer, _ = optim.make_optimizer(config.optim, e.steps, shapes, base)
    state = jax.eval_shape(lambda: step_lib.init_state(e.model, optimizer, config.seed))
    placed = step_lib.state_shardings(e.model, optimizer, e.mesh, e.rules)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
    )
    with Checkpointer(
        workdir / runfolder.CHECKPOINTS,
        every=c.every,
        keep_last=c.keep_last,
        keep_best=c.keep_best,
        best_metric=c.best_metric,
        asynchronous=False,
    ) as checkpoints:
        restored = checkpoints.restore(
            abstract, step=step, on_damage=c.on_damage, vocab_size=e.model.vocab_size
        )
    state = restored.state
    params = optim.eval_params(config.optim.name, state.opt_state, state.params)
    return experiment, restored.step, params, state.variables


def evaluate(config, workdir, step=None):
    """Print and return the evaluation of a run's checkpoint over its held-out split, or over all of
    `config.data.eval_source`."""
    e, step, params, variables = restore(config, workdir, step, parts=("eval",))
    with sharding.use(e.mesh, e.rules):
        metrics = Evaluator(e.model, config, e.data, e.mesh, e.rules)(params, variables)
    if jax.process_index() == 0:
        print(describe(step, metrics))
        print(scored(e.data, config.evaluate, metrics["eval/tokens"]))
        c, own = config.data, runfolder.load_config(workdir)["data"]["source"]
        if not c.eval_source and c.source != own:
            print(f"all of that text is scored with --config.data.eval_source={c.source}")
        for name, value in sorted(metrics.items()):
            number = f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
            print(f"  {name:<44} {number}")
    return metrics


def sample(config, workdir, step=None, stream=None):
    """Continue `config.sample.prompt`, writing pieces of text to `stream` as they are made."""
    e, step, params, variables = restore(config, workdir, step)
    variables = sharding.local({"params": params, **variables})
    if jax.process_index() != 0:
        return {}
    sampler = TextSampler(e.model, e.data.tokenizer, config.sample)
    sampler.write(variables, stream)
    stats = sampler.stats
    line = f"{quantity(stats['tokens_per_second'], 'tokens/s')} from step {step}"
    if "routed_fraction" in stats:
        line += f"; routed blocks computed {stats['routed_fraction']:.1%} of their tokens"
    if stats["expert_overflow"]:
        line += f"; {stats['expert_overflow']} choices of an expert found it full"
    print(line, file=sys.stderr)
    return stats
