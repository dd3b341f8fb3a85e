"""The training loop: restore or initialise; for each batch: step and log; when due save, evaluate
and sample; on a signal save and stop.

A step is saved before it is evaluated and sampled. A launch that resumes a step whose evaluation or
samples are missing makes these before it trains.
"""

import contextlib
import itertools
import math
import time

import jax
import numpy as np

from efx import io, run_dir
from efx.checkpoint import start_from
from efx.config.load import to_config
from efx.errors import NotFinite, RunStopped
from efx.logging import Progress
from efx.logging.writer import samples_path
from efx.parallel import multihost, sharding
from efx.parallel.signals import StopSignals
from efx.routing.calibrate import calibrate
from efx.sampling import TextSampler
from efx.train import health, inference, memory, messages, setup
from efx.train.evaluator import Evaluator, describe
from efx.train.launch import Launch
from efx.train.run_log import RunLog


def train_and_evaluate(config, workdir, *, command_line=(), started=None, train=True):
    """Train until the configured step, from the newest checkpoint of `workdir` if it has one.

    Args:
      config: ConfigDict or `Config`.
      workdir: run directory, created if absent.
      command_line: recorded in run.json.
      started: `time.monotonic()` of the command's start, for the report of start-up time.
      train: False: save and evaluate step 0 only, as of a model composed of other runs.
    Returns: the last row of metrics, {name: number}.
    Raises: UsageError for bad input; RunStopped if training cannot continue, NotFinite if it
      reached its last step and the last gradients or the held-out loss are not finite.
    """
    multihost.check_shared(workdir)
    with run_dir.Lock(workdir) as lock:
        started = started or time.monotonic()
        return Trainer(to_config(config), workdir, command_line, started, lock).run(train)


def due_at(config, step, last_step):
    """The subset of ["checkpoint", "evaluate", "sample"] that is due after a step."""
    every = {name: getattr(config, name).every for name in ("checkpoint", "evaluate", "sample")}
    if step == last_step:
        return ["checkpoint", "evaluate"] + ["sample"] * bool(every["sample"])
    return [name for name in every if step and every[name] and step % every[name] == 0]


def missing_work(config, workdir, step, last_step):
    """The subset of ["evaluate", "sample"] that is due at a step and has no output on disk."""
    due, row = due_at(config, step, last_step), row_of(workdir, step)
    has_samples = samples_path(io.folder(workdir), step).exists()
    is_missing = {"evaluate": "eval/loss" not in row, "sample": not has_samples}
    return [name for name in is_missing if name in due and is_missing[name]]


def row_of(workdir, step):
    """The row of a step in a run's metrics; {} if the step was not logged."""
    return next((row for row in inference.read_rows(workdir) if row["step"] == step), {})


class Trainer:
    """One launch of a run. The constructor checks config and directory and writes nothing."""

    def __init__(self, config, workdir, command_line, started, lock):
        self.launch = Launch(config, workdir, command_line, lock)
        self.workdir, self.started = self.launch.run.path, started
        self.config, self.experiment = config, setup.experiment(config, self.launch.run)
        self.training = setup.Training(self.experiment)
        self.launch.check_text(self.experiment.data)
        e = self.experiment
        self.placement = sharding.Placement(e.mesh, e.rules, config.data.batch_size)
        recorded = None if self.launch.is_new else self.launch.run.record.get("teacher")
        self.teacher, self.teacher_origin = inference.read_teacher(e, recorded)
        self.seed = jax.device_put(np.uint32(config.seed), sharding.replicated(e.mesh))
        self.step, self.log = 0, RunLog(e, self.training.shapes.params)
        self.scores = {}  # {step: checkpoint.best_metric}
        self.warn_of_sleep = health.Watch()
        self._use(e.model)

    def _use(self, model):
        """Evaluate and sample with the model of a stage."""
        e, c = self.experiment, self.config.sample
        self.model, self.sampler = model, None
        self.evaluator = Evaluator(model, e.config, e.data, e.mesh, e.rules)
        if c.every:
            options = dict(batch_size=c.num_samples, rules=e.rules)
            self.sampler = TextSampler(model, e.tokenizer, c, **options)

    def run(self, train=True):
        """Train to the last step; returns the last row of metrics.

        Args:
          train: see `train_and_evaluate`.
        """
        e, c = self.experiment, self.config
        advice = (
            f"lower config.data.batch_size={c.data.batch_size}, config.data.seq_len="
            f"{c.data.seq_len} or the sizes of the model, or raise config.train.accumulation="
            f"{c.train.accumulation}; --mode=compile reports what a device needs"
        )
        if not self.launch.is_new:
            self.scores |= inference.read_scores(self.workdir, c.checkpoint)
        with (
            memory.exhaustion_as_usage_error("training", advice),
            StopSignals() as self.signals,  # active until the last save is on disk
            sharding.use(e.mesh, e.rules),
            inference.checkpointer(self.workdir, c.checkpoint, self.scores) as self.checkpoints,
            contextlib.ExitStack() as stack,
            Progress(e.steps) as self.log.progress,
        ):
            self.println = self.log.progress.println
            if c.checkpoint.keep_best:
                shapes = self.training.shapes
                metric = c.checkpoint.best_metric
                self.evaluator.check_metric(metric, shapes.params, shapes.variables)
            self.iterator = e.data.train_iterator(rows=self.placement.rows)
            origin = self._restore_or_initialise()
            missing = self._missing_work(train) if self.is_resumed else []
            if self.is_resumed and not missing and (self.step >= e.steps or not train):
                return self._finish_again()  # nothing to do: do not record this launch
            self.launch.open(stack, self.step, e.data, origin, self.teacher_origin)
            self.log.writer = self.launch.writer
            self.log.print_start(self.workdir, self.step)
            if not train:
                return self._compose()
            self._evaluate_and_sample(missing)
            try:
                is_finished = self._train()
            finally:
                self.log.end_profile(self.step)
            return self._finish() if is_finished else self._stop()

    # ---- start -----------------------------------------------------------------------------------

    def _restore_or_initialise(self):
        """Set state, step and data position from the newest checkpoint, or initialise them.

        Returns: the origin of parameters initialised from another run, else None.
        """
        e, origin = self.experiment, None
        self.is_resumed = self.checkpoints.latest_step() is not None
        if not self.is_resumed:
            with self.log.progress.phase("initialising the parameters", is_logged=True):
                state = self.training.new_state(self.seed)
            self.state, origin = start_from(state, self.config, e.model, self.println)
            if self.config.init.run or e.model.members:
                self.state = self.training.restarted_state(self.state)
        else:
            restored = self.checkpoints.restore(
                self.training.shapes,
                on_damage=self.config.checkpoint.on_damage,
                vocab_size=e.model.vocab_size,
            )
            self.state, self.step = restored.state, restored.step
            self.iterator.set_state(restored.data_state)
            self.log.resume(self.step, restored.meta, row_of(self.workdir, self.step))
        self.position = self.iterator.get_state()
        return origin

    def _missing_work(self, train):
        """`missing_work` at the restored step, as process 0 sees it."""
        if self.step > self.experiment.steps:
            return []
        last_step = self.experiment.steps if train else self.step
        missing = missing_work(self.config, self.workdir, self.step, last_step)
        names = ("evaluate", "sample") if train else ("evaluate",)
        return [name for name in names if multihost.from_primary(name in missing)]

    def _compose(self):
        """Save and evaluate step 0, unless an earlier launch has; returns the row of metrics."""
        if not self.is_resumed:
            self._calibrate()
            self._save()
        self._evaluate_and_sample(["evaluate"])
        self.warn_of_sleep(self.log.last_row)
        return self._finish()

    # ---- the loop --------------------------------------------------------------------------------

    def _train(self):
        """Train to the last step; return False after the step in which a signal arrived."""
        e, compiled, is_first = self.experiment, None, True
        stage_starts = {stage.start for stage in e.stages}
        batch = self.placement(next(self.iterator))
        self.saved_at = time.monotonic()
        self.log.start_clock()
        while self.step < e.steps:
            if compiled is None or self.step in stage_starts:
                self._collect_metrics(wait=True)
                with self.log.paused():
                    compiled = self._compile(e.stage(self.step))
            self.log.update_profile(self.step, self.launch.mirror.path)
            # Before the first step there is nothing to save, and signals end the process.
            self.signals.listen()
            self.state, metrics = compiled(self.state, batch, self.seed, self.teacher)
            self.step += 1
            self.position = self.iterator.get_state()
            self.log.push(self.step, metrics)
            if is_first:
                jax.block_until_ready(metrics)
                self.log.print_first_step(self.step, self.started, self.compile_seconds)
                is_first = False
            if self.step < e.steps:
                # While the device computes this step, the host fetches the next one's tokens.
                batch = self.placement(next(self.iterator))
            self.checkpoints.check()  # raises if a background save failed
            self._collect_metrics()
            stop = self.signals.stop_requested()
            due = due_at(self.config, self.step, e.steps)
            if "checkpoint" not in due and self._is_save_due_by_time():
                due.append("checkpoint")
            if due:
                self._collect_metrics(wait=True)
                with self.log.paused():
                    if self.step == e.steps:
                        self._calibrate()
                    if "checkpoint" in due:
                        self._save()
                    self._evaluate_and_sample(due)
            if stop and self.step < e.steps:
                return False
        return True

    def _collect_metrics(self, wait=False):
        limit = self.config.train.max_nonfinite
        for step, metrics in self.log.collect(wait):
            if self.log.progress.is_live:
                self.log.progress.update(step)
            skipped = metrics["train/nonfinite_run"]
            if limit and skipped >= limit:
                raise RunStopped(
                    f"{skipped} steps in a row up to step {step} had a non-finite loss or gradient "
                    "and were skipped; lower config.optim.learning_rate, or raise "
                    "config.train.max_nonfinite; rerun to resume from the last checkpoint"
                )
            if step % self.config.log.every == 0:
                self.launch.mirror.upload(if_due=True)

    def _compile(self, stage):
        """The compiled step of a stage."""
        begin = time.monotonic()
        with self.log.progress.phase("compiling the training step", is_logged=True):
            # Count the executed FLOPs now, not during a timed step.
            self.experiment.flops(stage.start + 1, nominal=False)
            compiled = self.training.compile_step(stage.model, stage.start)
        self.compile_seconds = time.monotonic() - begin
        return compiled

    def _is_save_due_by_time(self):
        """Whether process 0 counts `checkpoint.minutes` since the last save."""
        minutes = self.config.checkpoint.minutes
        if not minutes or self.step % self.config.log.every:
            return False
        return multihost.from_primary(time.monotonic() - self.saved_at >= 60 * minutes)

    def _save(self):
        self.launch.mirror.upload()  # first, so that no checkpoint lacks its rows
        meta = self.log.meta(self.step)
        meta |= {"record": self.launch.record, "last_step": self.experiment.steps}
        self.checkpoints.save(self.step, self.state, self.position, meta)
        self.saved_at = time.monotonic()

    def _use_stage(self):
        """Evaluate and sample with the model of the stage that trained the last step: the
        thresholds belong to its capacity."""
        model = self.experiment.stage(max(0, self.step - 1)).model
        if model is not self.model:
            self._use(model)

    def _calibrate(self):
        """Set the thresholds in the state from `config.evaluate.calibrate` training batches."""
        count, state = self.config.evaluate.calibrate, self.state
        if not count:
            return
        self._use_stage()
        rows = self.experiment.data.train_iterator(rows=self.placement.rows)
        batches = map(self.placement, itertools.islice(rows, count))
        variables = calibrate(self.model, state.params, state.variables, batches)
        self.state = state.replace(variables=variables)

    def _evaluate_and_sample(self, due):
        if not {"evaluate", "sample"} & set(due):
            return
        self._use_stage()
        if "evaluate" in due:
            with self.log.progress.phase("evaluating"):
                metrics = self.evaluator(self.state.params, self.state.variables)
            self.scores[self.step] = metrics.get(self.config.checkpoint.best_metric)
            self.log.write(self.step, metrics)
            self.println(describe(self.step, metrics), "cyan")
            self.warn_of_sleep(metrics, self.step / self.experiment.steps)
        if "sample" in due:
            self._sample({"params": self.state.params, **self.state.variables})
        self.launch.mirror.upload()

    def _sample(self, variables):
        c = self.config.sample
        prompts, seeds = [c.prompt] * c.num_samples, [c.seed + i for i in range(c.num_samples)]
        advice = f"lower config.sample.num_samples={c.num_samples}"
        with (
            memory.exhaustion_as_usage_error("sampling", advice),
            self.log.progress.phase("sampling"),
        ):
            texts = self.sampler.texts(variables, prompts, seeds=seeds)
        self.log.writer.write_samples(self.step, [c.prompt + text for text in texts])
        self.log.progress.print_sample(f"sample at step {self.step}", c.prompt + texts[0])

    # ---- end -------------------------------------------------------------------------------------

    def _stop(self):
        """Save and report after a signal; returns the last row of metrics."""
        self._collect_metrics(wait=True)
        self._save()
        self.checkpoints.wait()  # raises if the save failed
        self.println(
            f"stopped at step {self.step} by {self.signals.name}; the run is saved; rerun the "
            "command to resume"
        )
        self._print_commands()
        return self.log.last_row

    def _finish_again(self):
        """Report a run that is already at its last step; returns its last row."""
        self.println(
            f"finished already: {self.workdir} is at step {self.step}; the last step of this "
            f"config is {self.experiment.steps}"
        )
        return self._finish(print_totals=False)

    def _finish(self, print_totals=True):
        """Wait for the last save, check and report the end; returns the last row of metrics."""
        row = self.log.last_row
        self.checkpoints.wait()
        if self.step == self.experiment.steps and "eval/loss" in row:
            self._check_end(row["eval/loss"], int(self.state.nonfinite_run))
            if print_totals:
                self.log.print_end(self.step)
        self._print_commands()
        return row

    def _print_commands(self):
        lines = messages.closing_lines(self.workdir, self.config.log.tensorboard)
        self.println("\n".join(lines))

    def _check_end(self, loss, skipped):
        """Raise NotFinite unless the last step and its held-out loss are finite.

        Args:
          skipped: number of steps at the end that were skipped.
        """
        if loss is None or not math.isfinite(loss):
            problem = "the held-out loss is not finite"
        elif skipped:
            finite = self.step - skipped
            problem = (
                f"the losses or gradients after step {finite} were not finite. The parameters are "
                f"those of step {finite} (finite), and the held-out loss is {loss:.4f} nats"
            )
        else:
            return
        best, metric = self.checkpoints.best_step(), self.config.checkpoint.best_metric
        advice = "; try a lower config.optim.learning_rate in another --workdir"
        if best is not None and best != self.step:
            advice += f"; checkpoint {best} has the best {metric} (--step={best})"
        raise NotFinite(f"at step {self.step}, the last, {problem}{advice}")
