"""From a config to what a run needs: data, stages, optimiser, and the layout of its arrays.

    Setup       config, tokenizer, model, mesh: enough for sampling (efx.train.model_setup)
    Experiment  also data, number of steps, FLOPs: enough for evaluation
    Training    also optimiser, schedule and the shardings of the training state

All checks happen here, and nothing is written.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from efx import models
from efx.data import SPLITS, load
from efx.errors import UsageError, warn
from efx.layers import flops, mup
from efx.parallel import sharding
from efx.train import named_runs, optim
from efx.train import step as step_lib
from efx.train.model_setup import (
    Setup,
    build_model,
    build_with_members,
    mesh_and_rules,
    teacher_setup,
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training with constant shapes, from step `start` on."""

    start: int
    model: object
    ledger: object  # nominal FLOPs of one training sequence


@dataclasses.dataclass(frozen=True)
class Experiment(Setup):
    """A setup with its data, its number of steps and the `Setup` of its teacher, or None."""

    data: object
    steps: int
    stages: tuple
    teacher: Setup | None = None

    @property
    def tokens_per_step(self):
        return self.config.data.batch_size * self.config.data.seq_len

    @property
    def ledger(self):
        """That of the last stage."""
        return self.stages[-1].ledger

    def stage(self, step):
        """The stage of the step after `step`."""
        return [stage for stage in self.stages if stage.start <= step][-1]

    def flops(self, step, nominal=True):
        """Training FLOPs of the first `step` steps, including a teacher's.

        The first call with `nominal=False` traces the model of each stage up to this step.
        """
        c, total = self.config.data, step * self.teacher_flops(nominal)
        micro_batches = self.config.train.accumulation
        ends = [stage.start for stage in self.stages[1:]] + [step]
        for stage, end in zip(self.stages, ends, strict=True):
            steps = max(0, min(end, step) - stage.start)
            if steps and nominal:
                total += steps * stage.ledger.train_flops(self.tokens_per_step)
            elif steps:
                forward = flops.executed(stage.model, c.seq_len, c.batch_size // micro_batches)
                total += steps * stage.ledger.train_factor * micro_batches * forward
        return total

    def teacher_flops(self, nominal=True):
        """FLOPs of the teacher's forward pass in a step; 0 without a teacher."""
        if self.teacher is None:
            return 0.0
        if nominal:
            return _nominal_teacher_flops(self.config, self.teacher)
        c, micro_batches = self.config.data, self.config.train.accumulation
        rows = c.batch_size // micro_batches
        return micro_batches * flops.executed(self.teacher.model, c.seq_len, rows, train=False)


class Training:
    """An experiment with its optimiser.

    Attributes:
      optimizer, schedule: see `optim.make_optimizer`.
      shapes: `TrainState` of jax.ShapeDtypeStruct with shardings; shardings: these alone.
      batch: shapes with shardings of a step's batch.
      teacher: shapes with shardings of the teacher's variables, or None.
    """

    def __init__(self, experiment):
        e, c = experiment, experiment.config
        self.experiment = e
        boxed = models.variable_shapes(e.model)
        params, ratio = nn.unbox(boxed["params"]), e.model.config.mup_ratio
        mup.check_optimizer(c.optim.name, e.model.config.mup)
        self.optimizer, self.schedule = optim.make_optimizer(c.optim, e.steps, params, ratio)
        self.shapes = state_shapes(e, boxed, self.optimizer)
        self.shardings = jax.tree.map(lambda x: x.sharding, self.shapes)
        self.batch = step_lib.batch_shapes(c, c.data.batch_size, e.mesh, e.rules)
        self.teacher = e.teacher and variable_shapes(e.teacher, e.teacher.model)

    def new_state(self, seed):
        """The `TrainState` of step 0."""
        init = functools.partial(step_lib.init_state, self.experiment.model, self.optimizer)
        return jax.jit(init, out_shardings=self.shardings)(np.uint32(seed))

    def restarted_state(self, state):
        """The `TrainState` of step 0 with the parameters and averages of `state`, which is donated.

        An optimiser may keep a copy of its initial parameters.
        """

        def restart(state):
            return step_lib.state_of({"params": state.params, **state.variables}, self.optimizer)

        options = dict(donate_argnums=0, keep_unused=True, out_shardings=self.shardings)
        return jax.jit(restart, **options)(state)

    def trace_step(self, model, start=0):
        """`step.make_train_step` of a stage, traced for this experiment's shapes and shardings."""
        e = self.experiment
        step = step_lib.make_train_step(
            model,
            self.optimizer,
            self.schedule,
            e.config,
            total_steps=e.steps,
            groups=sharding.shard_count("batch", e.mesh, e.rules),
            teacher=e.teacher and e.teacher.model,
            start=start,
        )
        seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=sharding.replicated(e.mesh))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, None))
        return jitted.trace(self.shapes, self.batch, seed, self.teacher)

    def compile_step(self, model, start=0):
        """The compiled `trace_step`."""
        return self.trace_step(model, start).lower().compile()


def variable_shapes(setup, model):
    """Shapes with shardings of a model's variables on the devices of a `Setup`."""
    shapes = state_shapes(setup, models.variable_shapes(model), optax.identity())
    return {"params": shapes.params, **shapes.variables}


def state_shapes(setup, boxed, optimizer):
    """A `TrainState` of jax.ShapeDtypeStruct with shardings; boxed: `models.variable_shapes`."""
    state = jax.eval_shape(lambda v: step_lib.state_of(v, optimizer), boxed)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        nn.unbox(state),
        sharding.tree_shardings(state, setup.mesh, setup.rules),
    )


# ---- from a config ------------------------------------------------------------------------------


def setup(config, run=None):
    """The `Setup` of a `Config`, with the tokenizer of a `RunDir` if there is one.

    No text is opened, unless a tokenizer has to be made of it.
    """
    data, mesh, rules = _open_data(config, run, splits=())
    model = build_with_members(config, data.tokenizer, mesh, rules)
    return Setup(config, data.tokenizer, model, mesh, rules)


def experiment(config, run=None, splits=SPLITS, trains=True):
    """The `Experiment` of a `Config`, with the tokenizer and the split of a `RunDir`.

    Args:
      splits: those of the data to load, see `efx.data.load`.
      trains: whether the experiment is for training: with its teacher.
    """
    data, mesh, rules = _open_data(config, run, splits)
    _check_same_data(data)
    model = build_with_members(config, data.tokenizer, mesh, rules)
    if config.data.packing:
        data.check_packing()
    # Evaluation needs no teacher, and the teacher's run may have been deleted.
    teacher = teacher_setup(config, data.tokenizer) if trains else None
    steps, stages = _steps_and_stages(config, model, teacher)
    if trains and run and run.has_result:
        _warn_of_changed_schedule(config, run, steps)
    _check_batch(config, mesh, rules)
    return Experiment(config, data.tokenizer, model, mesh, rules, data, steps, stages, teacher)


def experiment_without_data(config, vocab_size, devices=None):
    """An `Experiment` for costs and shapes.

    It has the final capacity only, and 1000 steps if the config has none.

    Args:
      devices: see `mesh_and_rules`.
    """
    mesh, rules = mesh_and_rules(config, devices)
    if runs := config.model.member_runs:
        raise UsageError(
            f"config.model.{runs[0][0]} names another run; a model composed of other runs cannot "
            "be built without their text"
        )
    model = build_model(config, vocab_size, mesh, rules)
    _check_batch(config, mesh, rules)
    teacher = teacher_setup(config, vocab_size=vocab_size, devices=devices)
    steps = config.steps or 1000
    stages = tuple(Stage(0, *stage) for _, *stage in _parts(config, model))
    return Experiment(config, None, model, mesh, rules, None, steps, stages, teacher)


def _open_data(config, run, splits):
    """(data, mesh, rules)"""
    mesh, rules = mesh_and_rules(config)
    if not (run and run.has_result):  # a resumed run has its own parameters
        named_runs.check_initial_runs(config)
    text_record, same_text = None, True
    if run and splits:
        text_record, same_text = named_runs.recorded_text(config.data, run)
    data = load(
        config.data,
        seed=config.seed,
        tokenizer_path=named_runs.saved_tokenizer(config, run),
        splits=splits,
        text_record=text_record,
        is_recorded_text=same_text,
    )
    return data, mesh, rules


def _check_same_data(data):
    """UsageError unless all processes have the same text, split and tokenizer."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    fingerprint = np.frombuffer(bytes.fromhex(data.fingerprint), np.uint32)
    if np.any(multihost_utils.process_allgather(fingerprint) != fingerprint):
        raise UsageError(
            "config.data.source: the processes have different texts, held-out splits or "
            "tokenizers; use the same files on all hosts, and a shared --workdir"
        )


# ---- steps, stages, batches ---------------------------------------------------------------------


def _steps_and_stages(config, model, teacher):
    """(number of steps, stages) of a run."""
    parts = _parts(config, model)
    steps = _total_steps(config, parts, teacher)
    if config.log.profile_at >= steps:
        raise UsageError(
            f"config.log.profile_at={config.log.profile_at}: the run has {steps} steps; use an "
            "earlier step, or 0 for no profile"
        )
    return steps, tuple(Stage(round(start * steps), *stage) for start, *stage in parts)


def _parts(config, model):
    """[(first fraction of the training, model, ledger)] of the stages of a run."""
    return [(start, m, _ledger(config, m)) for start, m in capacity_stages(model)]


def _ledger(config, model):
    """The ledger of a training sequence."""
    c, ledger = config.data, model.ledger(config.data.seq_len)
    if not config.optim.frozen:
        return ledger
    groups = optim.parameter_groups(config.optim, models.unboxed_shapes(model)["params"])
    frozen = frozenset(path for path, group in groups.items() if group.frozen)
    rows = c.batch_size // config.train.accumulation
    return dataclasses.replace(
        ledger, train_factor=flops.train_factor(model, c.seq_len, rows, frozen)
    )


def capacity_stages(model):
    """[(first fraction of the training, model)] of `depth_routing.capacity_stages`."""
    stages = model.config.depth_routing.capacity_stages
    staged = [models.changed(model, **{"depth_routing.capacity": c}) for _, c in stages]
    return list(zip([0.0, *(end for end, _ in stages)], [*staged, model], strict=True))


def _total_steps(config, parts, teacher=None):
    if bool(config.steps) == bool(config.train_flops):
        raise UsageError(
            f"config.steps={config.steps} and config.train_flops={config.train_flops}: set "
            "exactly one of the two (the other to 0)"
        )
    if config.steps:
        return config.steps
    ends = [start for start, *_ in parts[1:]] + [1.0]
    per_step = sum(
        (end - start) * ledger.train_flops(config.data.batch_size * config.data.seq_len)
        for (start, _, ledger), end in zip(parts, ends, strict=True)
    )
    per_step += _nominal_teacher_flops(config, teacher) if teacher else 0.0
    steps = round(config.train_flops / per_step)
    if not 1 <= steps < 2**31:
        raise UsageError(
            f"config.train_flops={config.train_flops:g}: {steps:.3g} steps of {per_step:g} "
            "FLOPs; must be from 1 to 2^31 - 1 steps"
        )
    return steps


def _nominal_teacher_flops(config, teacher):
    """Nominal FLOPs of a teacher's forward pass over the batch of a step."""
    c = config.data
    ledger = teacher.model.ledger(c.seq_len, "causal")
    return c.batch_size * c.seq_len * ledger.nominal_per_token


def _warn_of_changed_schedule(config, run, steps):
    """Warn if another number of steps changes the learning rate at the step of the resume."""
    reached, before = run.step, run.meta.get("last_step", steps)
    if steps == before or reached >= steps:
        return
    rates = (float(optim.make_schedule(config.optim, n)(reached)) for n in (before, steps))
    old, new = (f"{rate:.3g}" for rate in rates)
    if old != new:
        warn(
            f"the run has {steps} steps instead of {before}, so the schedule changes the learning "
            f"rate at step {reached} to {new} instead of {old}"
        )


def _check_batch(config, mesh, rules):
    accumulation, seq_len = config.train.accumulation, config.data.seq_len
    devices = sharding.shard_count("batch", mesh, rules)
    length_devices = sharding.shard_count("length", mesh, rules)
    on_batch_axes = f"the {devices} devices on the mesh's batch axes"
    for name, size, divisor, meaning in (
        (
            "config.data.batch_size",
            config.data.batch_size,
            accumulation * devices,
            f"config.train.accumulation={accumulation} times {on_batch_axes}",
        ),
        ("config.evaluate.batch_size", config.evaluate.batch_size, devices, on_batch_axes),
        (
            "config.data.seq_len",
            seq_len,
            length_devices,
            f"the {length_devices} devices that share a sequence (config.mesh.sequence)",
        ),
    ):
        if size % divisor:
            raise UsageError(f"{name}={size}: must be a multiple of {divisor}, {meaning}")
    if config.evaluate.repeated_rows and seq_len < 4:
        raise UsageError(
            f"config.evaluate.repeated_rows={config.evaluate.repeated_rows}: needs"
            f" config.data.seq_len of at least 4, not {seq_len}; use longer rows, or"
            " repeated_rows=0"
        )
