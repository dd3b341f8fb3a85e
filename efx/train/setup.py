"""From a config to what a run needs: model, data, optimiser, and the layout of its arrays.

    Setup       config, tokenizer, model, mesh: enough for sampling
    Experiment  also data, number of steps, FLOPs: enough for evaluation
    Training    also optimiser, schedule and the shardings of the training state

All checks happen here, and nothing is written.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from efx import io, models, run_dir
from efx.checkpoint import Checkpointer
from efx.config import schema
from efx.config.load import to_config
from efx.data import SPLITS, load
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError, warn
from efx.layers import flops, mup
from efx.logging import read_metrics
from efx.parallel import sharding
from efx.train import optim, other_runs
from efx.train import step as step_lib


@dataclasses.dataclass(frozen=True)
class Setup:
    """A checked `Config` and its model (of the last stage of training)."""

    config: object
    tokenizer: object
    model: object
    mesh: object
    rules: tuple  # logical to mesh axes


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
        self.shapes = _state_shapes(e, boxed, self.optimizer)
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
            groups=sharding.shard_count(e.mesh, e.rules, "batch"),
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
    shapes = _state_shapes(setup, models.variable_shapes(model), optax.identity())
    return {"params": shapes.params, **shapes.variables}


def _state_shapes(setup, boxed, optimizer):
    """A `TrainState` of jax.ShapeDtypeStruct with shardings; boxed: `models.variable_shapes`."""
    shapes = jax.eval_shape(lambda v: step_lib.state_of(v, optimizer), nn.unbox(boxed))
    shardings = step_lib.state_shardings(boxed["params"], shapes, setup.mesh, setup.rules)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


# ---- from a config ------------------------------------------------------------------------------


def setup(config, workdir=None):
    """The `Setup` of a `Config`, with the tokenizer saved in `workdir` if it is a run.

    No text is opened, unless a tokenizer has to be made of it.
    """
    data, mesh, rules = _open_data(config, workdir, splits=())
    model = _model(config, data.tokenizer, mesh, rules)
    return Setup(config, data.tokenizer, model, mesh, rules)


def experiment(config, workdir=None, splits=SPLITS, trains=True):
    """The `Experiment` of a `Config`, with the tokenizer and the split saved in `workdir`.

    Args:
      splits: those of the data to load, see `efx.data.load`.
      trains: whether the experiment is for training: with its teacher.
    """
    resumes = workdir is not None and run_dir.holds_result(workdir)
    if trains and not resumes:
        _check_init(config)
    data, mesh, rules = _open_data(config, workdir, splits)
    _check_same_data(data)
    model = _model(config, data.tokenizer, mesh, rules)
    if config.data.packing:
        data.check_packing()
    _check_batch(config, mesh, rules)
    # Evaluation needs no teacher, and the teacher's run may have been deleted.
    teacher = _teacher(config, data.tokenizer) if trains else None
    steps, stages = _steps_and_stages(config, model, teacher)
    if trains and resumes:
        _warn_of_changed_schedule(config, workdir, steps)
    return Experiment(config, data.tokenizer, model, mesh, rules, data, steps, stages, teacher)


def without_text(config, vocab_size, devices=None):
    """An `Experiment` without data, for costs and shapes.

    It has the final capacity only, and 1000 steps if the config has none.

    Args:
      devices: those of the mesh, possibly descriptions of absent ones; None: JAX's own.
    """
    mesh, rules = _mesh_and_rules(config, devices)
    if runs := config.model.member_runs:
        raise UsageError(
            f"config.model.{runs[0][0]} names another run; a model composed of other runs cannot "
            "be built without their text"
        )
    model = _checked_model(config, vocab_size, mesh, rules)
    _check_batch(config, mesh, rules)
    teacher = _teacher(config, vocab_size=vocab_size, devices=devices)
    steps = config.steps or 1000
    stages = tuple(Stage(0, *stage) for _, *stage in _parts(config, model))
    return Experiment(config, None, model, mesh, rules, None, steps, stages, teacher)


def _mesh_and_rules(config, devices=None):
    return sharding.make_mesh(config.mesh, devices), sharding.check_rules(config.rules)


def _open_data(config, workdir, splits):
    """(data, mesh, rules)"""
    mesh, rules = _mesh_and_rules(config)
    if not (workdir and run_dir.holds_result(workdir)):  # a resumed run has its own parameters
        other_runs.check_runs(config)
    text_record, same_text = None, True
    if workdir and splits:
        text_record, same_text = other_runs.recorded_text(config.data, workdir)
    data = load(
        config.data,
        seed=config.seed,
        tokenizer_path=other_runs.saved_tokenizer(config, workdir),
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


def _check_init(config):
    """UsageError if `init` has patterns but no run: a variant for finetuning would train a random
    model. Adapters are checked by `_check_adapter`."""
    for name in ("missing", "unexpected", "rename"):
        value = getattr(config.init, name)
        if value and not config.init.run and config.adapter.kind == "none":
            raise UsageError(
                f"config.init.{name}={value!r}: config.init.run is empty; set it to the run "
                "directory of the initial parameters"
            )


# ---- the model, its members and its teacher -----------------------------------------------------


def _build_model(config, model_config, vocab_size, mesh, rules, members=()):
    """The model of `model_config` (the blocks model, data, adapter) in the dtype of `config`."""
    return models.build(
        model_config.model,
        vocab_size=vocab_size,
        context=model_config.data.seq_len,
        dtype=config.train.dtype,
        adapter=model_config.adapter,
        members=members,
        vocab_ways=sharding.shard_count(mesh, rules, "vocab"),
    )


def _model(config, tokenizer, mesh, rules):
    members = [
        _member(key, run, tokenizer, config, mesh, rules) for key, run in config.model.member_runs
    ]
    model = _checked_model(config, tokenizer.vocab_size, mesh, rules, members)
    _check_adapter(config)
    return model


def _checked_model(config, vocab_size, mesh, rules, members=()):
    model = _build_model(config, config, vocab_size, mesh, rules, members)
    if model.context < config.data.seq_len:
        raise UsageError(
            f"config.model.context={model.context}: must be at least "
            f"config.data.seq_len={config.data.seq_len}"
        )
    return model


def _check_adapter(config):
    if config.adapter.kind != "none" and not config.init.run:
        raise UsageError(
            f"config.adapter.kind={config.adapter.kind!r}: config.init.run is empty; set it to "
            "the run directory of the adapted base model"
        )


def _member(key, run, tokenizer, config, mesh, rules):
    """The model of a member run, for the tokens of `tokenizer`."""
    member = other_runs.config_of_single_model(run, f"config.model.{key}")
    run_tokenizer = load_tokenizer(io.folder(run) / run_dir.TOKENIZER_FILE)
    if run_tokenizer.fingerprint != tokenizer.fingerprint:
        first_key, first = config.model.member_runs[0]
        raise UsageError(
            f"config.model.{key}={run}: its tokenizer differs from that of "
            f"config.model.{first_key}={first}; all members need the same tokenizer"
        )
    # Its vocabulary is padded for the devices of this run.
    member = _with_padding(member, 0)
    return _build_model(config, member, tokenizer.vocab_size, mesh, rules)


def _with_padding(config, multiple):
    """A `Config` with this `model.vocab_multiple`, if its family has one."""
    if "vocab_multiple" not in schema.names_of(type(config.model)):
        return config
    return schema.replaced(config, {"model.vocab_multiple": multiple})


def _teacher(config, tokenizer=None, *, vocab_size=0, devices=None):
    """The `Setup` of the teacher on the devices of `config`; None if `losses.distill` is 0.

    Its parameters are read by `read_teacher`.

    Args:
      tokenizer: that of the run; None: any with `vocab_size` tokens.
      devices: see `without_text`.
    """
    run, name = config.train.teacher, f"config.train.teacher={config.train.teacher}"
    if not config.losses.distils:
        return None
    if not run:
        raise UsageError(
            f"config.losses.distill={config.losses.distill!r}: config.train.teacher is empty; "
            "set it to the run directory of the teacher, or set config.losses.distill=0"
        )
    if not run_dir.holds_result(io.folder(run, "config.train.teacher")):
        raise UsageError(f"{name}: there is no run with a checkpoint in this directory")
    theirs = load_tokenizer(io.folder(run) / run_dir.TOKENIZER_FILE)
    fits = theirs.vocab_size == vocab_size
    if tokenizer is not None:
        fits = theirs.fingerprint == tokenizer.fingerprint
    if not fits:
        raise UsageError(
            f"{name}: its tokenizer differs from that of this run; a teacher needs the same "
            "tokenizer"
        )
    teacher_config = on_devices_of(config, run, "config.train.teacher")
    mesh, rules = _mesh_and_rules(config, devices)
    model = _checked_model(teacher_config, theirs.vocab_size, mesh, rules)
    if model.context < config.data.seq_len:
        raise UsageError(
            f"{name}: its context is {model.context} tokens, less than "
            f"config.data.seq_len={config.data.seq_len}"
        )
    return Setup(teacher_config, theirs, model, mesh, rules)


def on_devices_of(config, run, key):
    """The `Config` of the run in a directory, computed on the devices and in the dtype of `config`.

    The teacher's own teacher is ignored.

    Args:
      key: the flag or setting that names the run, for messages.
    """
    theirs = other_runs.config_of_single_model(run, key)
    changes = {"mesh": config.mesh, "rules": config.rules, "train.dtype": config.train.dtype}
    changes |= {"losses.distill": 0.0}
    # Its logits are as wide as those of `config`; bridges are padded as their members.
    is_bridge = "vocab_multiple" not in schema.names_of(type(config.model))
    multiple = 0 if is_bridge else config.model.vocab_multiple
    return _with_padding(schema.replaced(theirs, changes), multiple)


def read_teacher(experiment, step=None):
    """(step of the checkpoint, {"params", "state" if there is any}) of an experiment's teacher."""
    run = experiment.config.train.teacher
    _, step, params, variables = finished(experiment.teacher.config, run, step)
    return step, {"params": params, **variables}


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
    return [(start, m, _ledger(config, m)) for start, m in _capacity_stages(model)]


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


def _capacity_stages(model):
    """[(first fraction of the training, model)] of `depth_routing.capacity_stages`."""
    stages = model.config.depth_routing.capacity_stages
    staged = [models.changed(model, **{"depth_routing.capacity": c}) for _, c in stages]
    return list(zip([0.0, *(end for end, _ in stages)], [*staged, model], strict=True))


def _model_at(model, step, steps):
    """The model of the stage that trained `step`, of the first stage for step 0.

    Args:
      steps: those of the run; 0 if unknown: the last stage.
    """
    started = [m for start, m in _capacity_stages(model) if not step or round(start * steps) < step]
    return started[-1 if step else 0]


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


def _warn_of_changed_schedule(config, workdir, steps):
    """Warn if another number of steps changes the learning rate at the step of the resume."""
    reached, meta = run_dir.newest_meta(workdir)
    before = meta.get("last_step", steps)
    if steps == before or reached >= steps:
        return
    old, new = (float(optim.make_schedule(config.optim, n)(reached)) for n in (before, steps))
    if not math.isclose(old, new, rel_tol=1e-5):
        warn(
            f"the run has {steps} steps instead of {before}, so the schedule changes the learning "
            f"rate at step {reached} to {new:.3g} instead of {old:.3g}"
        )


def _check_batch(config, mesh, rules):
    accumulation, shards = config.train.accumulation, sharding.shard_count(mesh, rules, "batch")
    length_shards = sharding.shard_count(mesh, rules, "length")
    batch_size, seq_len = config.data.batch_size, config.data.seq_len
    if batch_size % accumulation:
        raise UsageError(
            f"config.data.batch_size={batch_size}: must be a multiple of "
            f"config.train.accumulation={accumulation}"
        )
    rows = batch_size // accumulation
    if rows % shards:
        raise UsageError(
            f"config.data.batch_size={batch_size}: a micro-batch has {rows} rows "
            f"(config.train.accumulation={accumulation}), not a multiple of the {shards} devices "
            f"on the mesh's batch axes; use a multiple of {accumulation * shards}"
        )
    if config.evaluate.batch_size % shards:
        raise UsageError(
            f"config.evaluate.batch_size={config.evaluate.batch_size}: must be a multiple of the "
            f"{shards} devices on the mesh's batch axes"
        )
    if config.evaluate.repeated_rows and seq_len < 4:
        raise UsageError(
            f"config.evaluate.repeated_rows={config.evaluate.repeated_rows}: needs"
            f" config.data.seq_len of at least 4, not {seq_len}; use longer rows, or"
            " repeated_rows=0"
        )
    if seq_len % length_shards:
        raise UsageError(
            f"config.data.seq_len={seq_len}: must be a multiple of the {length_shards} devices "
            "that share a sequence (config.mesh.sequence)"
        )


# ---- from a run directory -----------------------------------------------------------------------


def finished(config, workdir, step=None, splits=()):
    """(Experiment or Setup, step, parameters for evaluation, variables) of a run's checkpoint.

    The model is that of the stage of capacity that trained the checkpoint.

    Args:
      config: ConfigDict or `Config`. step: of the checkpoint; None: the newest.
      splits: those of the data to load, see `efx.data.load`; without any only the model is built.
    """
    config = to_config(config)
    run_dir.recorded_config(workdir)
    # Only some optimisers evaluate averaged parameters; then their state is read too.
    with_optimizer = optim.keeps_averages(config.optim.name)
    if splits or with_optimizer:
        built = experiment(config, workdir, splits, trains=False)
    else:
        built = setup(config, workdir)
    if with_optimizer:
        shapes = Training(built).shapes
    else:
        shapes = _state_shapes(built, models.variable_shapes(built.model), optax.identity())
    with checkpointer(workdir, config.checkpoint, scores={}) as checkpoints:
        restored = checkpoints.restore(
            shapes,
            step=step,
            on_damage=config.checkpoint.on_damage,
            vocab_size=built.model.vocab_size,
            whole=with_optimizer,
        )
    model = _model_at(built.model, restored.step, restored.meta.get("last_step", 0))
    state, built = restored.state, dataclasses.replace(built, model=model)
    params = optim.eval_params(config.optim.name, state.opt_state, state.params)
    return built, restored.step, params, state.variables


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
