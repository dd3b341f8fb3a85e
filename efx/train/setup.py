"""From a config to what runs, in one place: a model alone, an experiment, the state of a training.

    Setup       config, tokenizer, model, devices: all that sampling needs
    Experiment  and data, number of steps, FLOPs: all that evaluation and training share
    Training    and optimiser, schedule, where every array lives

Each checks what it needs and writes nothing.
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
from efx.checkpoint.manifest import finished_steps, warn
from efx.config import schema
from efx.config.load import completed, of_plain, to_config
from efx.data import SPLITS, load, tokenizers
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError
from efx.layers import flops, kernels, mup
from efx.logging import read_metrics
from efx.parallel import sharding
from efx.run_dir import TOKENIZER_FILE
from efx.train import memory, optim
from efx.train import step as step_lib

# Of config.data: what decides which text there is, and what else which part of it is held out.
_SOURCES = ("source", "eval_source")
_OF_THE_SPLIT = ("eval_fraction", "split", "withhold", "max_bytes", "document_bytes", "text_key")
OF_THE_TEXT = (*_SOURCES, *_OF_THE_SPLIT)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A checked config and the model that it describes.

    Attributes:
      config: `Config`. model: that of the last stage of the training. rules: logical to mesh axes.
    """

    config: object
    tokenizer: object
    model: object
    mesh: object
    rules: tuple


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training in which shapes stay the same: from step `start` on."""

    start: int
    model: object
    ledger: object  # nominal, of one training sequence


@dataclasses.dataclass(frozen=True)
class Experiment(Setup):
    """A setup with its text; `ledger` is that of the last stage.

    Attributes:
      teacher: the `Setup` of the model whose distribution is followed in training, or None.
    """

    data: object
    steps: int
    stages: tuple
    teacher: Setup | None = None

    @property
    def tokens_per_step(self):
        return self.config.data.batch_size * self.config.data.seq_len

    @property
    def ledger(self):
        return self.stages[-1].ledger

    def stage(self, step):
        """The stage that the step after `step` belongs to."""
        return [stage for stage in self.stages if stage.start <= step][-1]

    def flops(self, step, nominal=True):
        """Training FLOPs of the first `step` steps, a teacher's included. The first time that those
        executed (`nominal=False`) are asked for, the model of each stage up to this step is traced.
        """
        c, total = self.config.data, step * self.teacher_flops(nominal)
        micro_batches = self.config.train.accumulation
        ends = [stage.start for stage in self.stages[1:]] + [step]
        for stage, end in zip(self.stages, ends, strict=True):
            steps = max(0, min(end, step) - stage.start)
            if steps and nominal:
                total += steps * stage.ledger.train_flops(self.tokens_per_step)
            elif steps:
                forward = _executed(stage.model, c.seq_len, c.batch_size // micro_batches)
                total += steps * flops.TRAIN_FACTOR * micro_batches * forward
        return total

    def teacher_flops(self, nominal=True):
        """FLOPs of the teacher's forward pass in a step; 0 without one."""
        if self.teacher is None:
            return 0.0
        if nominal:
            return _teacher_flops(self.config, self.teacher)
        c, micro_batches = self.config.data, self.config.train.accumulation
        rows = c.batch_size // micro_batches
        return micro_batches * _executed(self.teacher.model, c.seq_len, rows, train=False)


class Training:
    """An experiment and how its parameters are updated.

    Attributes:
      optimizer, schedule: see `optim.make_optimizer`.
      shapes: of a `TrainState`, with shardings; shardings: these alone.
      batch: that of a step, as shapes with shardings.
      teacher: the teacher's variables as shapes with shardings, or None.
    """

    def __init__(self, experiment):
        e, c = experiment, experiment.config
        self.experiment = e
        boxed = models.variable_shapes(e.model)
        params, ratio = nn.unbox(boxed["params"]), e.model.config.mup_ratio
        mup.check_optimizer(c.optim.name, e.model.config.mup)
        self.optimizer, self.schedule = optim.make_optimizer(c.optim, e.steps, params, ratio)
        self.shapes = _state(e, boxed, self.optimizer)
        self.shardings = jax.tree.map(lambda x: x.sharding, self.shapes)
        self.batch = step_lib.batch_shapes(c, c.data.batch_size, e.mesh, e.rules)
        self.teacher = e.teacher and variable_shapes(e.teacher, e.teacher.model)

    def advice(self):
        """A line on a mesh that is slow on the devices that it is of; "" without any."""
        is_tpu = self.experiment.mesh.devices.flat[0].platform == "tpu"
        return sharding.torn_tiles(self.shapes.params) if is_tpu else ""

    def new_state(self, seed):
        """The `TrainState` of step 0."""
        init = functools.partial(step_lib.init_state, self.experiment.model, self.optimizer)
        return jax.jit(init, out_shardings=self.shardings)(np.uint32(seed))

    def begun_anew(self, state):
        """The `TrainState` of step 0 with the parameters and averages of `state`, which is donated:
        an optimiser may keep a copy of the parameters that it begins with."""

        def begin(state):
            return step_lib.state_of({"params": state.params, **state.variables}, self.optimizer)

        options = dict(donate_argnums=0, keep_unused=True, out_shardings=self.shardings)
        return jax.jit(begin, **options)(state)

    def trace_step(self, model, start=0):
        """`step.make_train_step` of a stage's model, traced for arguments of the shapes and
        shardings that a run of this experiment has. start: the stage's."""
        e = self.experiment
        step = step_lib.make_train_step(
            model,
            self.optimizer,
            self.schedule,
            e.config,
            total_steps=e.steps,
            groups=sharding.batch_shards(e.mesh, e.rules),
            teacher=e.teacher and e.teacher.model,
            start=start,
        )
        seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=sharding.replicated(e.mesh))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, None))
        return jitted.trace(self.shapes, self.batch, seed, self.teacher)

    def compile_step(self, model, start=0):
        """(Compiled program of `trace_step`, `kernels.as_records` of its attention)."""
        with kernels.recorded_choices() as choices:
            compiled = self.trace_step(model, start).lower().compile()
        return compiled, kernels.as_records(choices)

    def check_memory(self):
        """UsageError where a step needs more memory than there is."""
        e, c, state = self.experiment, self.experiment.config, self.shapes
        groups = optim.parameter_groups(c.optim, state.params)
        paths = optim.param_paths(state.params)
        trained = [paths[path] for path, group in groups.items() if not group.frozen]
        rows = c.data.batch_size // c.train.accumulation
        tokens = c.data.batch_size * c.data.seq_len // sharding.batch_shards(e.mesh, e.rules)
        parts = {
            "parameters": memory.on_each_device(state.params),
            "their gradients": memory.on_each_device(trained),
            "the optimiser's state": memory.on_each_device(state.opt_state),
            "the batch": 12 * tokens,
            "logits": step_lib.logits_bytes(e.model, c, e.mesh, e.rules, rows),
        }
        if self.teacher is not None:
            parts["the teacher's parameters"] = memory.on_each_device(self.teacher)
        numbers = {
            name: value
            for name, _, value in schema.leaves(c)
            if isinstance(value, int) and name.startswith(("config.model.", "config.adapter."))
        }
        numbers["config.data.batch_size"] = c.data.batch_size
        numbers["config.data.seq_len"] = c.data.seq_len
        name = max(numbers, key=numbers.get)
        largest = f"; the largest array is {memory.largest(state.params)}"
        remedy = f"; lower {name}, or other sizes of the model and the batch"
        memory.check(f"{name}={numbers[name]}: training", parts, largest + remedy)


_executed = functools.lru_cache(maxsize=64)(flops.executed)


def variable_shapes(built, model):
    """A model's variables, without an optimiser's, as shapes with the shardings that they have on
    the devices of a `Setup`."""
    shapes = _state(built, models.variable_shapes(model), optax.identity())
    return {"params": shapes.params, **shapes.variables}


def _state(built, boxed, optimizer):
    """A `TrainState` of jax.ShapeDtypeStruct with shardings; boxed: `models.variable_shapes`."""
    shapes = jax.eval_shape(lambda v: step_lib.state_of(v, optimizer), nn.unbox(boxed))
    shardings = step_lib.state_shardings(boxed["params"], shapes, built.mesh, built.rules)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


# ---- from a config ------------------------------------------------------------------------------


def setup(config, workdir=None):
    """The `Setup` of a config; of a run in `workdir` with the tokenizer that was saved with it.

    No text is opened, unless a tokenizer has to be made of it.
    """
    config = to_config(config)
    data, mesh, rules = _begin(config, workdir, splits=())
    model = _model(config, data.tokenizer, mesh, rules)
    return Setup(config, data.tokenizer, model, mesh, rules)


def experiment(config, workdir=None, splits=SPLITS):
    """The `Experiment` of a config.

    A tokenizer saved with the run in `workdir`, or in the run that this one starts from, is used in
    place of building one; what that run holds out is held out. A run that goes on with another
    number of steps, and for it at another learning rate, is told so in one line.

    splits: those of the data to load, see `efx.data.load`.
    """
    config = to_config(config)
    if "train" in splits and not (workdir and run_dir.holds_result(workdir)):
        _check_init(config)
    data, mesh, rules = _begin(config, workdir, splits)
    _same_everywhere(data)
    model = _model(config, data.tokenizer, mesh, rules)
    if config.data.packing:
        model.check_packing()
        data.check_packing()
    _check_batch(config, mesh, rules)
    # Who only evaluates needs none, and the run may have gone meanwhile.
    teacher = _teacher(config, data.tokenizer) if "train" in splits else None
    steps, stages = _steps_and_stages(config, model, teacher)
    if "train" in splits and workdir and run_dir.holds_result(workdir):
        _say_what_jumps(config, workdir, model, teacher, steps)
    return Experiment(config, data.tokenizer, model, mesh, rules, data, steps, stages, teacher)


def without_text(config, vocab_size, devices=None, of_run=False, made=None):
    """An `Experiment` on no text, with so many token ids: what a step costs does not depend on it.

    Args:
      devices: those of the mesh, which may be described ones that are not there; None: JAX's own.
      of_run: True: with the steps and stages of a run, which they have to be right for; False: a
        config without `steps` counts as one of 1000.
      made: {run folder: its `Config`} of runs that are still to be made, of which or of finished
        ones the model may be made; None: it may not be made of any.
    """
    config = to_config(config)
    mesh, rules = _devices(config, devices)
    runs = config.model.member_runs
    if runs and made is None:
        raise UsageError(
            f"config.model.{runs[0][0]} names another run; a model made of other runs cannot "
            "be built without their text"
        )
    configs = [made.get(run) or _config_of_one(run, f"config.model.{key}") for key, run in runs]
    members = [_module(config, of, vocab_size, mesh, rules) for of in configs]
    model = _module_of_run(config, vocab_size, mesh, rules, members)
    if config.data.packing:
        model.check_packing()
    _check_batch(config, mesh, rules)
    teacher = _teacher(config, vocab_size=vocab_size, devices=devices)
    if of_run:
        _check_adapter(config)
        steps, stages = _steps_and_stages(config, model, teacher)
    else:
        parts = _capacity_stages(model, config.data.seq_len)
        steps, stages = config.steps or 1000, tuple(Stage(0, *stage) for _, *stage in parts)
    return Experiment(config, None, model, mesh, rules, None, steps, stages, teacher)


def _steps_and_stages(config, model, teacher):
    """(number of steps, stages) of a run."""
    parts = _capacity_stages(model, config.data.seq_len)
    steps = _total_steps(config, parts, teacher)
    if config.log.profile_at >= steps:
        raise UsageError(
            f"config.log.profile_at={config.log.profile_at}: the run has {steps} steps; use an "
            "earlier step, or 0 for no profile"
        )
    return steps, tuple(Stage(round(start * steps), *stage) for start, *stage in parts)


def _say_what_jumps(config, workdir, model, teacher, steps):
    """A line where a run goes on at another learning rate, and one where it does in another stage:
    both schedules end with its last step, and that is another one now."""
    recorded = {key: run_dir.recorded_setting(workdir, key) for key in ("steps", "train_flops")}
    stages = _capacity_stages(model, config.data.seq_len)
    steps_before = _total_steps(schema.replaced(config, recorded), stages, teacher)
    reached = max(finished_steps(io.folder(workdir) / run_dir.CHECKPOINTS), default=steps)
    if steps == steps_before or reached >= steps:
        return
    capacity_before, capacity = (
        [
            stage.config.depth_routing.capacity
            for start, stage, _ in stages
            if round(start * total) <= reached
        ][-1]
        for total in (steps_before, steps)
    )
    if capacity_before != capacity:
        warn(
            "the stages of config.model.depth_routing.capacity_stages are fractions of the "
            f"run: with {steps} steps instead of {steps_before}, the capacity at step "
            f"{reached} is {capacity} instead of {capacity_before}"
        )
    before, now = (
        float(optim.make_schedule(config.optim, total)(reached)) for total in (steps_before, steps)
    )
    if not math.isclose(before, now, rel_tol=1e-5):
        warn(
            f"the learning rate schedule ends with the run: with {steps} steps instead of "
            f"{steps_before}, the rate at step {reached} is {now:.3g} instead of {before:.3g}"
        )


def check_runs_named(config, made=()):
    """UsageError unless there are the folders of the runs that a config starts from or is made
    of.

    made: folders that are still to be made.
    """
    named = [("init.run", config.init.run)] if config.init.run else []
    named += [(f"model.{key}", run) for key, run in config.model.member_runs]
    for key, run in named:
        if run not in made:
            _check_run(run, f"config.{key}")


def _devices(config, devices=None):
    """(mesh, rules)"""
    return sharding.make_mesh(config.mesh, devices), sharding.check_rules(config.rules)


def _check_init(config):
    """UsageError for what says how to start from a run, and no run: a variant of a config that
    trains a few parameters of a finished model would train those of one that knows nothing.

    An adapter, which says so too, is refused with its model.
    """
    for name in ("missing", "unexpected", "rename"):
        value = getattr(config.init, name)
        if value and not config.init.run and config.adapter.kind == "none":
            raise UsageError(
                f"config.init.{name}={value!r}: config.init.run is empty; set it to the run "
                "folder of the initial parameters"
            )


def _begin(config, workdir, splits):
    """(data, mesh, rules)"""
    mesh, rules = _devices(config)
    check_runs_named(config)
    tokenizer_path = saved_tokenizer(config, workdir)
    run_origin, same_text = (
        _run_origin(config.data, workdir) if workdir and splits else (None, True)
    )
    data = load(
        config.data,
        seed=config.seed,
        tokenizer_path=tokenizer_path,
        splits=splits,
        run_origin=run_origin,
        same_text=same_text,
    )
    return data, mesh, rules


def saved_tokenizer(config, workdir="", made=()):
    """Path of the tokenizer of the run in `workdir`, or else of the run that this one starts from
    or of the first that it is made of; None without any, and of a run that is still to be made.

    UsageError where the config names another than that of those runs: it would be recorded with the
    run, which never had it.

    Args:
      made: {folder: config} of runs that are still to be made.
    """
    named = [("--workdir", workdir), ("config.init.run", config.init.run)]
    named += [(f"config.model.{key}", run) for key, run in config.model.member_runs[:1]]
    for name, run in named:
        path = run and run not in made and run_dir.saved_tokenizer(io.folder(run))
        if run and (run in made or path):
            if name != "--workdir":
                check_tokenizer(config, name, run, made)
            return path or None
    return None


def check_tokenizer(config, name, run, made=()):
    """UsageError unless `config.data.tokenizer` is that of another run, which its model has learnt:
    by the same setting, or one that names the same tokenizer.

    Args:
      name: what names the run. made: as in `saved_tokenizer`.
    """
    spec, is_made = config.data.tokenizer, run not in made
    if is_made:
        theirs = run_dir.recorded_setting(run, "data.tokenizer")
    else:
        theirs = made[run].data.tokenizer
    if spec == theirs:
        return
    if not is_made and "file" in (tokenizers.parse(spec)[0], tokenizers.parse(theirs)[0]):
        return  # which tokenizer that is shows when it is there
    path = run_dir.saved_tokenizer(run) if is_made else None
    if path and is_tokenizer(spec, load_tokenizer(path)):
        return
    raise UsageError(
        f"config.data.tokenizer={spec!r}: {name}={run} was trained with {theirs!r};"
        f" use --config.data.tokenizer={theirs}"
    )


def is_tokenizer(spec, tokenizer):
    """Whether `config.data.tokenizer` names a tokenizer. Not those that have to be made of a text,
    or downloaded."""
    named = tokenizers.parse(spec)[0] in ("bytes", "file") and tokenizers.ready(spec)
    return bool(named) and named.fingerprint == tokenizer.fingerprint


def _module(config, of, vocab_size, mesh, rules, members=()):
    """The model that `of` describes, a config with the blocks model, data and adapter, computed as
    `config` says."""
    return models.build(
        of.model,
        vocab_size=vocab_size,
        context=of.data.seq_len,
        dtype=config.train.dtype,
        adapter=of.adapter,
        members=members,
        vocab_ways=sharding.shard_count(mesh, rules, "vocab"),
    )


def _model(config, tokenizer, mesh, rules):
    members = [
        _member(key, run, tokenizer, config, mesh, rules) for key, run in config.model.member_runs
    ]
    model = _module_of_run(config, tokenizer.vocab_size, mesh, rules, members)
    _check_adapter(config)
    return model


def _check_adapter(config):
    if config.adapter.kind != "none" and not config.init.run:
        raise UsageError(
            f"config.adapter.kind={config.adapter.kind!r}: config.init.run is empty; set it to "
            "the run folder of the adapted base model"
        )


def _module_of_run(config, vocab_size, mesh, rules, members=()):
    model = _module(config, config, vocab_size, mesh, rules, members)
    if model.context < config.data.seq_len:
        raise UsageError(
            f"config.model.context={model.context}: must be at least "
            f"config.data.seq_len={config.data.seq_len}"
        )
    return model


def _run_origin(c, workdir):
    """(what the run in `workdir` recorded of its text or None, whether `c` names that text)."""
    if not run_dir.holds_result(workdir):
        return None, True
    trained = {key: run_dir.recorded_setting(workdir, f"data.{key}") for key in OF_THE_TEXT}
    same = all(getattr(c, key) == trained[key] for key in _SOURCES)
    for key in _OF_THE_SPLIT if same else ():
        if getattr(c, key) != trained[key]:
            raise UsageError(
                f"config.data.{key}: {trained[key]!r} in the run, {getattr(c, key)!r} here; "
                "this would score training text. To evaluate a whole other text, use "
                "--config.data.eval_source=text:PATH"
            )
    return run_dir.recorded_origin(workdir), same


def _same_everywhere(data):
    """Raises UsageError unless all processes have the same text, split and tokenizer."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    fingerprint = np.frombuffer(bytes.fromhex(data.fingerprint), np.uint32)
    if np.any(multihost_utils.process_allgather(fingerprint) != fingerprint):
        raise UsageError(
            "config.data.source: the processes have different texts, held-out splits or "
            "tokenizers; use the same files on all hosts, and a shared --workdir"
        )


def _check_run(run, key):
    """UsageError unless a setting names a run folder."""
    if not run or not io.folder(run, key).is_dir():
        raise UsageError(f"{key}={run!r}: there is no such run folder")
    if not (io.folder(run, key) / run_dir.CONFIG_FILE).is_file():
        raise UsageError(f"{key}={run!r}: not a run folder: it has no {run_dir.CONFIG_FILE}")


def _config_of_one(run, key):
    """The `Config` of a run of one model; UsageError, which names the setting `key`, for others."""
    path = io.folder(run) / run_dir.CONFIG_FILE
    recorded = run_dir.recorded_config(run, key)
    plain = of_plain(completed(recorded), path)
    config = to_config(plain, path)
    if config.model.member_runs:
        raise UsageError(
            f"{key}={run}: this run is itself made of other runs; use a run of one model"
        )
    return config


def _member(key, run, tokenizer, config, mesh, rules):
    """The model of a run, for the tokens of this tokenizer."""
    member = _config_of_one(run, f"config.model.{key}")
    of_run = load_tokenizer(io.folder(run) / TOKENIZER_FILE)
    if of_run.fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"config.model.{key}={run}: its tokenizer differs from that of "
            "config.model.{}={}; all members need the same tokenizer".format(
                *config.model.member_runs[0]
            )
        )
    # Its vocabulary is padded for the devices of now, as a teacher's beside it is.
    member = _with_padding(member, 0)
    return _module(config, member, tokenizer.vocab_size, mesh, rules)


def _with_padding(config, multiple):
    """A `Config` with this `model.vocab_multiple`, if its family has one."""
    if "vocab_multiple" not in schema.names_of(type(config.model)):
        return config
    return schema.replaced(config, {"model.vocab_multiple": multiple})


def _capacity_stages(model, length):
    """[(fraction of the training at which it starts, model, ledger)]."""
    routing, start, parts = model.config.depth_routing, 0.0, []
    for end, capacity in routing.capacity_stages:
        staged = models.changed(model, **{"depth_routing.capacity": capacity})
        parts.append((start, staged, staged.ledger(length)))
        start = end
    return [*parts, (start, model, model.ledger(length))]


def _check_batch(config, mesh, rules):
    accumulation, shards = config.train.accumulation, sharding.batch_shards(mesh, rules)
    if config.data.batch_size % accumulation:
        raise UsageError(
            f"config.data.batch_size={config.data.batch_size}: must be a multiple of "
            f"config.train.accumulation={accumulation}"
        )
    rows = config.data.batch_size // accumulation
    if rows % shards:
        raise UsageError(
            f"config.data.batch_size={config.data.batch_size}: a micro-batch has {rows} rows "
            f"(config.train.accumulation={accumulation}), not a multiple of the {shards} devices "
            f"on the mesh's batch axes; use a multiple of {accumulation * shards}"
        )
    if config.evaluate.batch_size % shards:
        raise UsageError(
            f"config.evaluate.batch_size={config.evaluate.batch_size}: must be a multiple of the "
            f"{shards} devices on the mesh's batch axes"
        )
    if config.evaluate.repeated_rows and config.data.seq_len < 4:
        raise UsageError(
            f"config.evaluate.repeated_rows={config.evaluate.repeated_rows}: needs"
            f" config.data.seq_len of at least 4, not {config.data.seq_len}; use longer rows, or"
            " repeated_rows=0"
        )
    pieces = sharding.shard_count(mesh, rules, "length")
    if config.data.seq_len % pieces:
        raise UsageError(
            f"config.data.seq_len={config.data.seq_len}: must be a multiple of the {pieces} "
            "devices that share a sequence (config.mesh.sequence)"
        )


def _teacher(config, tokenizer=None, *, vocab_size=0, devices=None):
    """The `Setup` of the model whose distribution the loss `distill` follows, on the same devices;
    None where that has no weight. Its parameters are not read here, see `read_teacher`.

    Args:
      tokenizer: that of the run; None: any of so many tokens.
      devices: see `without_text`.
    """
    run, name = config.train.teacher, f"config.train.teacher={config.train.teacher}"
    if not config.losses.distils:
        return None
    if not run:
        raise UsageError(
            f"config.losses.distill={config.losses.distill!r}: config.train.teacher is empty; "
            "set it to the run folder of the teacher, or set config.losses.distill=0"
        )
    if not run_dir.holds_result(io.folder(run, "config.train.teacher")):
        raise UsageError(f"{name}: there is no run with a checkpoint in this folder")
    theirs = load_tokenizer(io.folder(run) / TOKENIZER_FILE)
    if theirs.fingerprint != (tokenizer or theirs).fingerprint or (
        tokenizer is None and theirs.vocab_size != vocab_size
    ):
        raise UsageError(
            f"{name}: its tokenizer differs from that of this run; a teacher "
            "needs the same tokenizer"
        )
    of = on_devices_of(config, run, "config.train.teacher")
    mesh, rules = _devices(config, devices)
    model = _module_of_run(of, theirs.vocab_size, mesh, rules)
    if model.context < config.data.seq_len:
        raise UsageError(
            f"{name}: its context is {model.context} tokens, less than "
            f"config.data.seq_len={config.data.seq_len}"
        )
    if config.data.packing:
        model.check_packing()
    return Setup(of, theirs, model, mesh, rules)


def _teacher_flops(config, teacher):
    """Nominal FLOPs of its forward pass over the batch of a step."""
    c = config.data
    ledger = teacher.model.ledger(c.seq_len, "causal")
    return c.batch_size * c.seq_len * ledger.nominal_per_token


def on_devices_of(config, run, key):
    """The `Config` of the run in a folder, to be computed where and as `config` is.

    Args:
      key: the flag or setting that names the run, for messages.
    """
    of = _config_of_one(run, key)
    changes = {"mesh": config.mesh, "rules": config.rules, "train.dtype": config.train.dtype}
    changes |= {"losses.distill": 0.0}  # whom it followed itself is of no interest here
    # As wide as the logits of `config`; bridges are padded as their members.
    of_bridges = "vocab_multiple" not in schema.names_of(type(config.model))
    multiple = 0 if of_bridges else config.model.vocab_multiple
    return _with_padding(schema.replaced(of, changes), multiple)


def read_teacher(experiment, step=None):
    """(step of the checkpoint, {"params": ..., "state": ... if there is any}) of its teacher."""
    of = experiment.teacher.config
    _, step, params, variables = finished(of, experiment.config.train.teacher, step)
    return step, {"params": params, **variables}


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
    per_step += _teacher_flops(config, teacher) if teacher else 0.0
    if config.train_flops < per_step:
        raise UsageError(
            f"config.train_flops={config.train_flops:g} is less than one step ({per_step:g})"
        )
    steps = round(config.train_flops / per_step)
    if steps >= 2**31:
        raise UsageError(
            f"config.train_flops={config.train_flops:g}: {steps:.3g} steps of {per_step:g} "
            "FLOPs are more than 2^31 - 1; use fewer"
        )
    return steps


# ---- from a run folder --------------------------------------------------------------------------


def finished(config, workdir, step=None, splits=()):
    """(Experiment or Setup, step, parameters to evaluate with, variables) of a run's checkpoint.

    Args:
      step: of the checkpoint; None: the newest.
      splits: those of the data to load, see `efx.data.load`; without any only the model is built.
    """
    run_dir.recorded_config(workdir)
    # Averages of parameters are kept by the optimiser; no other has anything that is wanted here.
    with_optimizer = optim.keeps_averages(config.optim.name)
    build = functools.partial(experiment, splits=splits) if splits or with_optimizer else setup
    built = build(config, workdir)
    if with_optimizer:
        shapes = Training(built).shapes
    else:
        shapes = _state(built, models.variable_shapes(built.model), optax.identity())
    c = built.config
    with checkpointer(workdir, c.checkpoint) as checkpoints:
        restored = checkpoints.restore(
            shapes,
            step=step,
            on_damage=c.checkpoint.on_damage,
            vocab_size=built.model.vocab_size,
            whole=with_optimizer,
        )
    state = restored.state
    params = optim.eval_params(c.optim.name, state.opt_state, state.params)
    return built, restored.step, params, state.variables


def checkpointer(workdir, c, scores=None):
    """The `Checkpointer` of a run folder, by the block `config.checkpoint`.

    scores: see `Checkpointer`; None: those of the run's metrics.
    """
    if scores is None:
        scores = read_scores(workdir, c) if c.keep_best else {}
    return Checkpointer(
        io.folder(workdir) / run_dir.CHECKPOINTS,
        every=c.every,
        keep_last=c.keep_last,
        keep_best=c.keep_best,
        scores=scores,
        asynchronous=c.asynchronous,
    )


def read_scores(workdir, c):
    """{step: `config.checkpoint.best_metric`} of the rows of a run's metrics."""
    rows = read_rows(workdir)
    return {row["step"]: row[c.best_metric] for row in rows if c.best_metric in row}


def read_rows(workdir):
    """The rows of a run's metrics; [] of a run without any."""
    has_metrics = (io.folder(workdir) / run_dir.METRICS_FILE).exists()
    return read_metrics(workdir) if has_metrics else []
