"""The training loop: restore or initialise; for each batch: step and log; when due save, evaluate
and sample; on a signal save and stop.

A step is saved before it is evaluated and sampled. A launch that resumes a step whose evaluation or
samples are missing makes these before it trains.
"""

import contextlib
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from efx import io, run_dir
from efx.checkpoint import start_from
from efx.checkpoint.params import fingerprint
from efx.config import schema
from efx.config.load import completed, to_config
from efx.errors import UsageError, warn
from efx.layers.flops import count_params, device_peak
from efx.logging import (
    MetricsBuffer,
    MetricsWriter,
    Progress,
    duration,
    mean_of,
    quantity,
)
from efx.logging.progress import is_primary
from efx.logging.writer import RESUMED_FILES, WANDB_ID_FILE, check_wandb, samples_path
from efx.parallel import multihost, sharding
from efx.parallel.signals import Interrupted, StopSignals
from efx.sampling import TextSampler
from efx.train import memory, messages, optim, setup
from efx.train.evaluator import Evaluator, cut, describe

# The settings that a later launch of the same run may change.
MAY_DIFFER = (
    r"steps",
    r"train_flops",
    r"log\..*",
    r"checkpoint\..*",
    r"evaluate\..*",
    r"sample\..*",
    r"mesh\..*",
    r"rules",
    r"data\.(source|eval_source)",  # files may move: their contents are compared
    r"data\.cache_dir",
    r"data\.subset",
    r"data\.on_change",
    r"cluster\..*",
    r"ensemble\..*",
    r"train\.max_nonfinite",
    r"train\.teacher",  # a folder may move: its parameters are compared
    r"train\.loss_chunk",
    r"model\.remat",
    r"model\.vocab_multiple",
    r"model\.attention\.(chunk|kernel)",
)
# Logged at their latest value; other metrics are averaged over the steps since the last row.
COUNTS = ("train/nonfinite_total", "train/nonfinite_run")


class RunStopped(RuntimeError):
    """Training cannot continue; the message is one line for the user. status: exit status."""

    status = 1


class NotFinite(RunStopped):
    """The run is at its last step, but its gradients or the held-out loss are not finite."""

    status = 3


def train_and_evaluate(config, workdir, *, command_line=(), started=None, train=True):
    """Train until the configured step, from the newest checkpoint of `workdir` if it has one.

    Args:
      config: ConfigDict or `Config`, a complete config.
      workdir: run directory, created if absent.
      command_line: recorded in run.json.
      started: `time.monotonic()` of the command's start, for the report of start-up time.
      train: False: save and evaluate step 0 only.
    Returns: the last row of metrics, {name: number}.
    Raises: UsageError for bad input; RunStopped if training cannot continue, NotFinite if it
      reached its last step and the last gradients or the held-out loss are not finite.
    """
    multihost.check_shared(workdir)
    with run_dir.Lock(workdir) as lock:
        trainer = Trainer(config, workdir, command_line, started or time.monotonic(), lock)
        return trainer.run(train)


def compose(config, workdir, *, command_line=(), started=None):
    """Create the run directory of a model composed of other runs, at step 0, ready for evaluation,
    sampling or training. Arguments, result and errors: see `train_and_evaluate`."""
    return train_and_evaluate(
        config, workdir, command_line=command_line, started=started, train=False
    )


def is_finished(config, workdir):
    """Whether a launch with this config has no work: the run is at its last step, evaluated and
    sampled, with a finite loss."""
    step, meta = run_dir.newest_meta(workdir)
    if step is None or meta.get("last_step") != step:
        return False
    changed = run_dir.check_config(workdir, schema.as_dict(config), MAY_DIFFER, completed)
    if changed.keys() & {"steps", "train_flops"} or missing_work(config, workdir, step, step):
        return False
    row = row_of(workdir, step)
    return row["eval/loss"] is not None and not row.get("train/nonfinite_run")


def due_at(config, step, last_step):
    """Those of "checkpoint", "evaluate" and "sample" that are due after a step, in this order."""
    every = {name: getattr(config, name).every for name in ("checkpoint", "evaluate", "sample")}
    if step == last_step:
        return ["checkpoint", "evaluate"] + ["sample"] * bool(every["sample"])
    return [name for name in every if step and every[name] and step % every[name] == 0]


def missing_work(config, workdir, step, last_step):
    """Those of "evaluate" and "sample" that are due at a step and have no output on disk."""
    folder, due = io.folder(workdir), due_at(config, step, last_step)
    is_missing = {
        "evaluate": "eval/loss" not in row_of(workdir, step),
        "sample": not samples_path(folder, step).exists(),
    }
    return [name for name in is_missing if name in due and is_missing[name]]


def row_of(workdir, step):
    """The row of a step in a run's metrics; {} without one."""
    return next((row for row in setup.read_rows(workdir) if row["step"] == step), {})


class Stopwatch:
    """Seconds of training from `start` on, without those inside `stopped`."""

    def __init__(self, seconds=0.0):
        self._seconds, self._since = seconds, None

    def start(self):
        self._since = time.monotonic()

    def seconds(self):
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    @contextlib.contextmanager
    def stopped(self):
        self._seconds, self._since = self.seconds(), None
        try:
            yield
        finally:
            self.start()


class Trainer:
    """One launch of a run. The constructor checks config and directory and writes nothing."""

    def __init__(self, config, workdir, command_line, started, lock):
        self.started, self.lock = started, lock
        self.workdir, config = io.folder(workdir), to_config(config)
        self.opened = self._open_run(config, command_line)
        if config.log.wandb:
            multihost.run_on_primary(workdir, lambda: check_wandb(config.log.wandb))
        self.experiment = e = setup.experiment(config, workdir)
        self.training = setup.Training(e)
        self.training.check_memory()
        if advice := self.training.advice():
            warn(advice)
        self.config = e.config
        self._check_text()
        self.placement = sharding.Placement(e.mesh, e.rules, e.config.data.batch_size)
        c = e.config.sample
        self.sampler = None
        if c.every:
            self.sampler = TextSampler(
                e.model, e.tokenizer, c, batch_size=c.num_samples, rules=e.rules
            )
        self.teacher, self.teacher_origin = self._read_teacher()
        # FLOP/s of all devices together; 0 where it is not known.
        self.peak = jax.device_count() * (device_peak(e.config.train.dtype) or 0.0)
        self.seed = jax.device_put(np.uint32(e.config.seed), sharding.replicated(e.mesh))
        self.step, self.watch = 0, Stopwatch()
        self.earlier_flops = None  # (step, its FLOPs) that the run resumed from
        self.buffer, self.rows = MetricsBuffer(), []  # rows: of the steps since the last logged one
        self.logged_at = 0.0  # seconds of training at the last logged row
        self.last_row, self.scores = {}, {}
        self.attention = []  # kernels of the compiled steps, as run.json records them
        self.profiling_since = None  # the step
        self.is_stopped = False  # by a signal

    def _open_run(self, config, command_line):
        return run_dir.open_run(
            self.workdir,
            schema.as_dict(config),
            command_line=list(command_line),
            may_differ=MAY_DIFFER,
            completed=completed,
        )

    def _check_text(self):
        """UsageError if the text or its subset is not the run's. Paths may differ, contents not."""
        if self.opened.is_new:
            return
        record, data, c = run_dir.run_record(self.workdir), self.experiment.data, self.config.data
        for key in ("source", "eval_source"):
            moved = getattr(c, key) != run_dir.recorded_setting(self.workdir, f"data.{key}")
            if moved and "text" in record and data.origin[key] != record["text"][key]:
                raise UsageError(
                    f"config.data.{key}={getattr(c, key)}: --workdir={self.workdir} was trained on "
                    "another text; use the same text, or another --workdir"
                )
        if record.get("subset") != data.subset:
            raise UsageError(
                f"config.data.subset={c.subset!r}: selects other documents than the run in "
                f"--workdir={self.workdir}; use the run's subset, or another --workdir"
            )

    def _read_teacher(self):
        """(variables, origin) of the teacher; a resumed run uses the teacher's step of its first
        launch. (None, None) without a teacher."""
        e, run = self.experiment, self.config.train.teacher
        if e.teacher is None:
            return None, None
        recorded = None
        if not self.opened.is_new:
            recorded = run_dir.run_record(self.workdir).get("teacher")
        step, teacher = setup.read_teacher(e, recorded and recorded["step"])
        parameters = fingerprint(teacher["params"], e.teacher.model.vocab_size)
        if recorded and parameters != recorded["parameters"]:
            raise UsageError(
                f"config.train.teacher={run}: its parameters at step {step} are not those of "
                f"the teacher of --workdir={self.workdir}; use the folder of the first teacher"
            )
        return teacher, {"run": run, "step": step, "parameters": parameters}

    def run(self, train=True):
        """Train to the last step; returns the last row of metrics. train: see
        `train_and_evaluate`."""
        e, c = self.experiment, self.config.data
        advice = (
            f"lower config.data.batch_size={c.batch_size} or config.data.seq_len={c.seq_len}, or"
            f" raise config.train.accumulation={self.config.train.accumulation}"
        )
        if not self.opened.is_new:
            self.scores |= setup.read_scores(self.workdir, self.config.checkpoint)
        with (
            memory.exhaustion_as_usage_error("training", advice),
            StopSignals() as self.signals,  # active until the last save is on disk
            sharding.use(e.mesh, e.rules),
            setup.checkpointer(
                self.workdir, self.config.checkpoint, self.scores
            ) as self.checkpoints,
            contextlib.ExitStack() as files,
            Progress(e.steps, peak_flops_per_second=self.peak) as self.progress,
        ):
            self.evaluator = Evaluator(e.model, self.config, e.data, e.mesh, e.rules)
            if self.config.checkpoint.keep_best:
                shapes, metric = self.training.shapes, self.config.checkpoint.best_metric
                self.evaluator.check_metric(metric, shapes.params, shapes.variables)
            if train:
                self._print_estimate()
            self.iterator = e.data.train_iterator(rows=self.placement.rows)
            origin = self._restore_or_initialise()
            if self.step > e.steps:
                # This config trains nothing, so it is not recorded.
                return self._finish_again(f", past the last step {e.steps} of this config")
            self._open_files(origin, files)
            self._print_banner()
            if not train:
                self._save_untrained()
                return self._finish()
            if not self.opened.is_new:
                self._evaluate_and_sample(self._missing_work())
            if self.step == e.steps:
                return self._finish() if self.last_row else self._finish_again(", its last step")
            try:
                self._train()
            except Interrupted:
                self._stop()
            self._end_profile()
            return self._finish()

    # ---- start -----------------------------------------------------------------------------------

    def _restore_or_initialise(self):
        """Set state, step and data position from the newest checkpoint, or initialise them. Writes
        nothing. Returns the origin of parameters initialised from another run, else None."""
        e, origin = self.experiment, None
        if self.checkpoints.latest_step() is None:
            self.progress.println("initialising the parameters")
            state = self.training.new_state(self.seed)
            self.state, origin = start_from(state, self.config, e.model, self.progress.println)
            if self.config.init.run or e.model.members:
                self.state = self.training.begun_anew(self.state)
        else:
            restored = self.checkpoints.restore(
                self.training.shapes,
                on_damage=self.config.checkpoint.on_damage,
                vocab_size=e.model.vocab_size,
            )
            self.state, self.step = restored.state, restored.step
            self.iterator.set_state(restored.data_state)
            self.watch = Stopwatch(restored.meta["seconds"])
            self.logged_at = self.watch.seconds()
            self.earlier_flops = self.step, restored.meta["flops"]
        self.position = self.iterator.get_state()
        return origin

    def _open_files(self, origin, files):
        """Take the lock, write the records of this launch and open the metrics, after all checks
        have passed.

        Args:
          origin: of the initial parameters, or None. files: ExitStack that closes the metrics.
        """
        self.lock.take()
        opened = self._open_run(self.config, self.opened.command_line)
        if opened.is_new != self.opened.is_new:
            raise UsageError(
                f"--workdir={self.workdir}: another launch trained there during the start of "
                "this one; rerun the command"
            )
        c, data = self.config.log, self.experiment.data

        def open_metrics():
            self.mirror = files.enter_context(
                io.Mirror(self.workdir, RESUMED_FILES if is_primary() else ())
            )
            writer = MetricsWriter(
                self.mirror.path,
                tensorboard=c.tensorboard,
                wandb=self._for_wandb(),
                resume_step=None if opened.is_new else self.step,
            )
            self.writer = files.enter_context(writer)

        if jax.process_index() != 0:
            open_metrics()  # which writes nothing
        multihost.run_on_primary(self.workdir, open_metrics)
        held_out, text = run_dir.text_entries(data.origin)
        saved = run_dir.saved_tokenizer(self.workdir)
        tokenizer = saved.read_text(encoding="utf-8") if saved else data.tokenizer.to_json()
        entries = {
            "text": text,
            "tokenizer": run_dir.checksum(tokenizer),
            "subset": data.subset,
            "origin": origin,
            "teacher": self.teacher_origin,
        }
        contents = {run_dir.HELD_OUT_FILE: held_out, run_dir.TOKENIZER_FILE: tokenizer}
        if not c.wandb:
            contents[WANDB_ID_FILE] = None
        self.record = opened.commit(contents, **{k: v for k, v in entries.items() if v})
        self.writer.truncate_after(-1 if opened.is_new else self.step)

    def _for_wandb(self):
        """Arguments of `wandb.init`, None without."""
        c = self.config.log
        if not c.wandb:
            return None
        return {
            "project": c.wandb,
            "name": run_dir.run_name(self.workdir, self.opened.command_line),
            "group": c.wandb_group or None,
            "tags": list(c.wandb_tags),
            "config": schema.as_dict(self.config),
        }

    def _missing_work(self):
        """`missing_work` at the step that was restored, as process 0 sees it."""
        steps = self.experiment.steps

        def is_missing(name):
            return int(name in missing_work(self.config, self.mirror.path, self.step, steps))

        names = "evaluate", "sample"
        return [n for n in names if multihost.run_on_primary(self.workdir, lambda: is_missing(n))]  # noqa: B023

    def _save_untrained(self):
        if self.opened.is_new:
            self._save()
            self._evaluate_and_sample(["evaluate"])
        else:
            self.progress.println(f"composed already: {self.workdir} is at step {self.step}")

    # ---- the loop --------------------------------------------------------------------------------

    def _train(self):
        """Raises Interrupted after the step at which a signal stops the run."""
        e, stage, is_first = self.experiment, None, True
        batch = self._next_batch()
        self.watch.start()
        while self.step < e.steps:
            next_stage = e.stage(self.step)
            if stage is not next_stage:
                stage = next_stage
                self._log(self.buffer.pop_all())
                with self.watch.stopped():
                    compiled = self._compile(stage)
            self._profile()
            # Before the first step there is nothing to save, and signals end the process.
            self.signals.listen()
            self.state, metrics = compiled(self.state, batch, self.seed, self.teacher)
            self.step += 1
            self.position = self.iterator.get_state()
            self.buffer.push(self.step, metrics)
            if is_first:
                self._report_start(metrics)
                is_first = False
            if self.step < e.steps:
                # While the device computes this step, the host fetches the next one's tokens.
                batch = self._next_batch()
            self.checkpoints.check()  # raises if a background save failed
            self._log(self.buffer.pop_ready())
            stop = self.signals.stop_requested()
            if due := due_at(self.config, self.step, e.steps):
                self._log(self.buffer.pop_all())
                with self.watch.stopped():
                    if "checkpoint" in due:
                        self._save()
                    self._evaluate_and_sample(due)
            if stop and self.step < e.steps:
                raise Interrupted

    def _next_batch(self):
        if not self.experiment.data.grows:
            return self.placement(next(self.iterator))
        # next() may wait for text that is still being tokenised.
        return self.placement(self.signals.unless_stopped(lambda: next(self.iterator)))

    def _interruptible(self, work):
        """`work()` in a thread; Interrupted as soon as a signal comes."""
        e = self.experiment

        def in_thread():
            with sharding.used_in_thread(e.mesh, e.rules):
                return work()

        return self.signals.unless_stopped(in_thread)

    def _compile(self, stage):
        """The compiled step of a stage."""

        def compile_step():
            # Count the executed FLOPs now, not during a timed step.
            self.experiment.flops(stage.start + 1, nominal=False)
            return self.training.compile_step(stage.model, stage.start)

        self.progress.println("compiling the training step")
        begin = time.monotonic()
        compiled, attention = self._interruptible(compile_step)
        self.compile_seconds = time.monotonic() - begin
        self.attention += [choice for choice in attention if choice not in self.attention]
        run_dir.amend_launch(self.workdir, attention=self.attention)
        return compiled

    def _save(self):
        self.mirror.upload()  # first, so that no checkpoint lacks its rows
        flops = {"nominal": self.flops(self.step), "realised": self.flops(self.step, False)}
        meta = {
            "record": self.record,
            "last_step": self.experiment.steps,
            "seconds": self.watch.seconds(),
            "flops": flops,
        }
        self.checkpoints.save(self.step, self.state, self.position, meta, force=True)

    def _evaluate_and_sample(self, due):
        params = optim.eval_params(self.config.optim.name, self.state.opt_state, self.state.params)
        if "evaluate" in due:
            metrics = self._interruptible(lambda: self.evaluator(params, self.state.variables))
            self.scores[self.step] = metrics.get(self.config.checkpoint.best_metric)
            self.writer.write(self.step, metrics)
            self.last_row.update(metrics, step=self.step)
            self.progress.println(describe(self.step, metrics))
        if "sample" in due:
            self._sample(params)
        if due:
            self.mirror.upload()

    def _sample(self, params):
        variables, c = {"params": params, **self.state.variables}, self.config.sample
        seeds = [c.seed + i for i in range(c.num_samples)]
        prompts = [c.prompt] * c.num_samples
        with memory.exhaustion_as_usage_error(
            "sampling", f"lower config.sample.num_samples={c.num_samples}"
        ):
            texts = self._interruptible(lambda: self.sampler.texts(variables, prompts, seeds=seeds))
        self.writer.write_samples(self.step, [c.prompt + text for text in texts])
        self.progress.println(f"sample at step {self.step}:\n{c.prompt}{texts[0]}\n---")

    # ---- logging ---------------------------------------------------------------------------------

    def flops(self, step, nominal=True):
        """Training FLOPs up to `step`. Steps before a resume keep their recorded FLOPs: another
        number of steps moves the stages of a run."""
        e, total = self.experiment, self.experiment.flops(step, nominal)
        if self.earlier_flops is None:
            return total
        resumed_at, earlier = self.earlier_flops
        kind = "nominal" if nominal else "realised"
        # Exactly 0 for the same stages.
        return total + (earlier[kind] - e.flops(resumed_at, nominal))

    def _log(self, rows):
        """Collect finished steps; write a row at each multiple of `log.every` and the last step."""
        e = self.experiment
        for step, row in rows:
            self.rows.append(row)
            self._check_finite(step, row)
            if step % self.config.log.every == 0 or step == e.steps:
                self._write_row(step, row)

    def _check_finite(self, step, row):
        limit, skipped = self.config.train.max_nonfinite, row["train/nonfinite_run"]
        if limit and skipped >= limit:
            raise RunStopped(
                f"{skipped} steps in a row up to step {step} had a non-finite loss or gradient "
                "and were skipped; lower config.optim.learning_rate, or raise "
                "config.train.max_nonfinite. The last checkpoint is unchanged"
            )

    def _write_row(self, step, last):
        """Write the row of a step: the means of `self.rows`, of which `last` is the newest."""
        e, now, flops = self.experiment, self.watch.seconds(), self.flops(step)
        steps_per_second = len(self.rows) / max(now - self.logged_at, 1e-9)
        row = mean_of(self.rows) | {name: last[name] for name in COUNTS}
        row |= {
            "tokens": step * e.tokens_per_step,
            "flops": flops,
            "flops_realised": self.flops(step, nominal=False),
            "seconds": now,
            "tokens_per_second": steps_per_second * e.tokens_per_step,
            "flops_per_second": steps_per_second * (flops - self.flops(step - 1)),
        }
        if self.peak:
            row["mfu"] = row["flops_per_second"] / self.peak
        if self.teacher is not None:
            row["flops_teacher"] = step * e.teacher_flops(nominal=False)
        self.rows, self.logged_at = [], now
        self.writer.write(step, row)
        self.mirror.upload(if_due=True)
        self.last_row.update(row, step=step)
        self.progress.update(
            step,
            loss=row["train/loss"],
            tokens_per_second=row["tokens_per_second"],
            flops=row["flops"],
            flops_per_second=row["flops_per_second"],
        )

    def _profile(self):
        """Start or stop the profiler before a step, if its window starts or ends there."""
        c = self.config.log
        if c.profile_at and self.step == c.profile_at:
            # Processes of one host would write the same files.
            process = f"process_{jax.process_index()}" if jax.process_count() > 1 else ""
            jax.profiler.start_trace(str(self.mirror.path / "profile" / process))
            self.profiling_since = self.step
        if self.step == c.profile_at + c.profile_steps:
            self._end_profile()

    def _end_profile(self):
        if self.profiling_since is None:
            return
        jax.block_until_ready(self.state)
        self.mirror.wait()
        jax.profiler.stop_trace()
        count, self.profiling_since = self.step - self.profiling_since, None
        steps = f"{count} step{'s' * (count != 1)}"
        self.progress.println(f"profile of {steps}: {self.workdir / 'profile'}")

    # ---- lines for the user ----------------------------------------------------------------------

    def _print_estimate(self):
        """Print how long the remaining steps take."""
        e, step = self.experiment, self.checkpoints.latest_step() or 0
        if step >= e.steps:
            return
        flops, steps = e.flops(e.steps) - e.flops(step), e.steps - step
        if line := messages.before(flops, steps, self.peak, self.opened.command_line):
            self.progress.println(line)

    def _print_banner(self):
        e, data, devices = self.experiment, self.experiment.data, jax.device_count()
        heading = f"resuming {self.workdir} at step {self.step}" if self.step else str(self.workdir)
        text = "training tokens (still tokenising)"
        if not data.grows:
            text = quantity(data.train_tokens, "training tokens")
        teacher = ""
        if self.teacher is not None:
            flops = quantity(e.teacher_flops(), "FLOPs")
            teacher = f" (including {flops} for the teacher, {self.config.train.teacher})"
        self.progress.println(
            f"{heading}: {quantity(count_params(self.training.shapes.params), 'parameters')}, "
            f"{text}, {e.steps} steps of {e.tokens_per_step} tokens, "
            f"{quantity(e.flops(e.steps) / e.steps, 'FLOPs')} a step{teacher}, "
            f"{devices} {jax.devices()[0].device_kind} device{'s' * (devices > 1)}"
        )
        if data.origin["of"] != data.origin["source"]:  # split by an earlier text
            self.progress.println(f"held out: {data.held_out_of()}")

    def _report_start(self, metrics):
        """Wait for the first step; print and log the start-up time."""
        jax.block_until_ready(metrics)
        total = time.monotonic() - self.started
        kernels = sorted({choice["kernel"] for choice in self.attention})
        attention = f"; attention by {', '.join(kernels)}" if kernels else ""
        self.progress.println(
            f"first step after {total:.1f} s (compiling {self.compile_seconds:.1f} s){attention}"
        )
        parameters = count_params(self.training.shapes.params)
        self.writer.write(self.step, {"startup_seconds": total, "parameters": parameters})

    # ---- end -------------------------------------------------------------------------------------

    def _stop(self):
        """Save and report after a signal."""
        self._log(self.buffer.pop_all())
        self._save()
        self.checkpoints.wait()  # an error of the save is reported in place of this line
        self.progress.println(
            f"stopped at step {self.step} by {self.signals.name}; the run is saved; rerun the "
            "command to resume"
        )
        self.is_stopped = True

    def _finish_again(self, detail):
        """Report, and return the result of, a run that is already at its last step."""
        self.progress.println(f"finished already: {self.workdir} is at step {self.step}{detail}")
        with contextlib.suppress(UsageError):  # damaged metrics do not matter here
            self.last_row.update(row_of(self.workdir, self.step))
        if self.step == self.experiment.steps and "eval/loss" in self.last_row:
            self._check_end(self.last_row)
        self._print_hints()
        return self.last_row

    def _finish(self):
        """Wait for the last save, print a summary, return the last row of metrics."""
        row, e = self.last_row, self.experiment
        self.checkpoints.wait()
        if self.step == e.steps and not self.is_stopped and "eval/loss" in row:
            self._check_end(row)
            self.progress.println(
                f"finished: {self.step} steps, "
                f"{quantity(self.step * e.tokens_per_step, 'tokens')}, "
                f"{quantity(self.flops(self.step), 'FLOPs')} in "
                f"{duration(self.watch.seconds())} of training, held-out loss "
                f"{row['eval/loss']:.4f} nats ({row['eval/bits_per_byte']:.4f} bits per byte)"
                f"{cut(row)}"
            )
        self._print_hints()
        return row

    def _print_hints(self):
        e = self.experiment
        lines = messages.after(self.workdir, self.config, e.data, e.model.context)
        self.progress.println("\n".join(lines))

    def _check_end(self, row):
        """Raise NotFinite unless the last step and its held-out loss are finite."""
        loss, skipped = row["eval/loss"], int(self.state.nonfinite_run)
        if loss is not None and math.isfinite(loss):
            if not skipped:
                return
            steps = "step" if skipped == 1 else f"{skipped} steps"
            problem = (
                f"the loss or gradient of the last {steps} was not finite, so these were "
                f"skipped. The parameters are finite, those of step {self.step - skipped}, and "
                f"the held-out loss is {loss:.4f} nats"
            )
        else:
            cause = "the parameters are not finite"
            if bool(jax.jit(_all_finite)(self.state.params)):
                cause = "the parameters are finite, but the forward pass overflows"
            problem = f"the held-out loss is not finite: {cause}"
        best, metric = self.checkpoints.best_step(), self.config.checkpoint.best_metric
        advice = "; a lower config.optim.learning_rate may help, in another --workdir"
        if best is not None and best != self.step:
            advice += f"; the best {metric} is that of checkpoint {best} (--step={best})"
        raise NotFinite(f"at step {self.step}, the last, {problem}{advice}")


def _all_finite(tree):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
