"""The one training loop: build, restore, step, log, evaluate, sample, save."""

import contextlib
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from efx import build, hints, memory, optim, run_settings, runfolder, settings, sharding, storage
from efx.checkpoint import start_from
from efx.checkpoint.files import warn
from efx.checkpoint.params import fingerprint
from efx.errors import UsageError
from efx.evaluate import Evaluator, cut, describe
from efx.flops import count_params, device_peak
from efx.metrics import (
    MetricsBuffer,
    MetricsWriter,
    Progress,
    duration,
    mean_of,
    quantity,
    read_metrics,
)
from efx.metrics.progress import is_primary
from efx.metrics.writer import WANDB_ID_FILE, WRITTEN, check_wandb
from efx.profiler import Profile, compile_seconds
from efx.sample import TextSampler
from efx.signals import Interrupted, StopSignals, leave_work

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
    r"data\.cache_dir",
    r"data\.subset",
    r"data\.on_change",
    r"cluster\..*",
    r"ensemble\..*",
    r"train\.max_nonfinite",
    r"train\.teacher",  # a folder may move: that it is the same model is checked
    r"train\.loss_chunk",
    r"model\.remat",
    r"model\.vocab_multiple",
    r"model\.attention\.(chunk|kernel)",
)


# Of what a step reports the numbers that a row has as they are after its step; of the others it has
# means over the steps since the last row.
COUNTS = ("train/nonfinite_total", "train/nonfinite_run")


class RunStopped(RuntimeError):
    """The run cannot go on; the message is one line for the user. status: the command's."""

    status = 1


class NotFinite(RunStopped):
    """The run reached its last step, but its loss or its last gradients are not finite."""

    status = 3


def train_and_evaluate(config, workdir, *, command_line=(), started=None):
    """Train until the configured step, from the newest checkpoint of `workdir` if it has one.

    Args:
      config: ConfigDict or `Config`, a whole config.
      workdir: run folder, made if absent.
      command_line: recorded in run.json.
      started: `time.monotonic()` of the command's start, for the report of start-up time.
    Returns: the last row of metrics, {name: number}.
    Raises: UsageError for bad input; RunStopped if training cannot go on, NotFinite if it reached
      its last step and the last gradients or the held-out loss are not finite.
    """
    runfolder.check_shared(workdir)
    with runfolder.Lock(workdir) as lock:
        return _Launch(config, workdir, command_line, started or time.monotonic(), lock).train()


def compose(config, workdir, *, command_line=(), started=None):
    """Make the run folder of a model that is composed of other runs, at step 0: it can be
    evaluated, sampled from, and trained further. Arguments, result and errors: see
    `train_and_evaluate`."""
    runfolder.check_shared(workdir)
    with runfolder.Lock(workdir) as lock:
        launch = _Launch(config, workdir, command_line, started or time.monotonic(), lock)
        return launch.train(untrained=True)


class _Stopwatch:
    """Seconds for which it has run. It may be started once and stopped for a while."""

    def __init__(self):
        self._seconds, self._since = 0.0, None

    def start(self):
        self._since = time.monotonic()

    def seconds(self):
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._seconds + running

    @contextlib.contextmanager
    def stopped(self):
        self._seconds, self._since = self.seconds(), None
        try:
            yield
        finally:
            self.start()


class _Launch:
    """One launch of a run."""

    def __init__(self, config, workdir, command_line, started, lock):
        self.started, self.lock = started, lock
        self.workdir, config = storage.folder(workdir), run_settings.check(config)
        self.timings = {"imports": time.monotonic() - started}
        self.opened = self._open_run(config, command_line)
        if config.log.wandb:  # before the lock makes a folder of a launch that is refused
            runfolder.on_primary(workdir, lambda: check_wandb(config.log.wandb))
        with self._timed("data and model"):
            self.experiment = build.experiment(config, workdir)
            self.training = build.Training(self.experiment)
            self.training.check_memory()
        if advice := self.training.advice():
            warn(advice)
        e = self.experiment
        self.config, self.data, self.model = config, e.data, e.model
        self.parameters = count_params(self.training.shapes.params)
        self.placement = sharding.Placement(e.mesh, e.rules, config.data.batch_size)
        # Made here, so that a bad prompt or setting is an error before anything is written.
        c = config.sample
        self.sampler = c.every and TextSampler(
            e.model, e.tokenizer, c, batch_size=c.num_samples, rules=e.rules
        )
        self._check_subset()
        self.before = 0.0  # seconds of training of earlier launches
        self.flops_before = None  # (step, FLOPs up to it as they are saved) of the one gone on from
        self.watch = _Stopwatch()
        self.row_at = 0.0  # what it said at the last row
        # What the steps since the last row reported; how many of these an earlier launch made.
        self.window, self.made_before = [], 0
        self.buffer = MetricsBuffer()
        self.last_row = {}
        self.step, self.restored = 0, False
        self.attention = []  # what run.json records of the kernels of the steps compiled so far
        self.teacher, self.teacher_origin = None, None  # its variables, and where they are from
        self.ending = ""  # what is not finite at the end of the run, in words
        self.pending = []  # what was due at this step and not done: a signal came
        self.profile = None  # the one whose window is open
        self.fingerprints = self.remembered = {}  # of config.json and run.json: now, in checkpoint
        self.seed = jax.device_put(np.uint32(config.seed), sharding.replicated(e.mesh))

    def _open_run(self, config, command_line):
        return runfolder.open_run(
            self.workdir,
            settings.as_dict(config),
            command_line=list(command_line),
            may_differ=MAY_DIFFER,
            completed=run_settings.completed,
        )

    def _commit(self, origin, files):
        """Write into the folder, after all checks that need no writing have passed.

        origin: of the parameters, None if the run initialised them. files: ExitStack that closes
        the metrics.
        """
        self.lock.take()
        opened = self._open_run(self.config, self.opened.command_line)
        if opened.is_new != self.opened.is_new:
            raise UsageError(
                f"--workdir={self.workdir}: another launch trained there during the start of "
                "this one; rerun the command"
            )
        c, data = self.config.log, self.data

        def open_metrics():
            self.mirror = files.enter_context(
                storage.Mirror(self.workdir, WRITTEN if is_primary() else ())
            )
            writer = MetricsWriter(
                self.mirror.path,
                tensorboard=c.tensorboard,
                wandb=self._for_wandb(),
                resume_step=None if opened.is_new else self.step,
            )
            self.writer = files.enter_context(writer)

        entries = {"origin": origin} if origin else {}
        if self.teacher_origin:
            entries["teacher"] = self.teacher_origin
        if jax.process_index() != 0:
            open_metrics()  # which writes nothing
        runfolder.on_primary(self.workdir, open_metrics)
        if data.subset:
            entries["subset"] = data.subset
        held_out, entries["text"] = runfolder.text_entries(data.origin)
        saved = runfolder.saved_tokenizer(self.workdir)
        tokenizer = saved.read_text(encoding="utf-8") if saved else data.tokenizer.to_json()
        entries["tokenizer"] = runfolder.checksum(tokenizer)
        contents = {runfolder.HELD_OUT_FILE: held_out, runfolder.TOKENIZER_FILE: tokenizer}
        if not c.wandb:
            contents[WANDB_ID_FILE] = None
        self._announce(opened.config)
        opened.commit(contents, **entries)
        self._remember_files()
        self.writer.truncate_after(
            self.step if self.restored else -1, samples_of_step="sample" not in self.pending
        )

    def _announce(self, config):
        """Have the checkpoint gone on from know the config.json that is to be written, which
        another efx or an edit on purpose may have changed: killed between the two, a launch would
        leave one that is taken for that of another run."""
        if not self.restored or jax.process_index() != 0:
            return
        coming = runfolder.fingerprint_of_config(config, MAY_DIFFER)
        if self.remembered.get("config", coming) != coming:
            self.remembered = self.remembered | {runfolder.NEXT_CONFIG: coming}
            self.checkpoints.amend(self.step, None, {"fingerprints": self.remembered})

    def _remember_files(self):
        """Have the checkpoints know config.json and run.json, the one gone on from as well: it may
        be of an efx that did not, or a file was edited on purpose since."""
        if jax.process_index() == 0:  # which has written them, and whose meta counts
            self.fingerprints = runfolder.fingerprints(self.workdir, MAY_DIFFER)
        if self.restored and self.remembered != self.fingerprints:
            self.checkpoints.amend(self.step, None, {"fingerprints": self.fingerprints})

    def _for_wandb(self):
        """Arguments of `wandb.init`, None without."""
        c = self.config.log
        if not c.wandb:
            return None
        return {
            "project": c.wandb,
            "name": runfolder.run_name(self.workdir, self.opened.command_line),
            "group": c.wandb_group or None,
            "tags": list(c.wandb_tags),
            "config": settings.as_dict(self.config),
        }

    def _check_subset(self):
        """UsageError if the file of the subset lists other documents than the run began with."""
        recorded_subset = runfolder.run_record(self.workdir).get("subset")
        if not self.opened.is_new and recorded_subset != self.data.subset:
            raise UsageError(
                f"--workdir={self.workdir} was trained on other documents than those of "
                f"config.data.subset={self.config.data.subset!r}; use another --workdir"
            )

    @contextlib.contextmanager
    def _timed(self, name):
        """Add seconds to `timings`: those of compiling to "compile", the others to `name`."""
        start, compiled_before = time.monotonic(), compile_seconds()
        yield
        compiled = compile_seconds() - compiled_before
        parts = {name: time.monotonic() - start - compiled}
        if compiled:
            parts["compile"] = parts.get("compile", 0.0) + compiled
        for part, seconds in parts.items():
            self.timings[part] = self.timings.get(part, 0.0) + seconds

    def train(self, untrained=False):
        e, config = self.experiment, self.config
        # Of all devices together; 0 where it is not known.
        self.peak = jax.device_count() * (device_peak(config.train.dtype) or 0.0)
        self._read_teacher()
        c = config.data
        advice = (
            f"lower config.data.batch_size={c.batch_size} or config.data.seq_len={c.seq_len}, or"
            f" raise config.train.accumulation={config.train.accumulation}"
        )
        with (
            memory.exhaustion_as_usage_error("training", advice),
            StopSignals() as self.signals,  # until the last save is on disk
            sharding.use(e.mesh, e.rules),
            self._checkpointer() as self.checkpoints,
            contextlib.ExitStack() as files,
            Progress(e.steps, peak_flops_per_second=self.peak) as self.progress,
        ):
            self.evaluator = Evaluator(e.model, config, e.data, e.mesh, e.rules)
            if config.checkpoint.keep_best:
                shapes, metric = self.training.shapes, config.checkpoint.best_metric
                self.evaluator.check_metric(metric, shapes.params, shapes.variables)
            if not untrained:
                self._report_estimate()
            with self._timed("data and model"):
                iterator = e.data.train_iterator(rows=self.placement.rows)
            origin = self._restore(iterator)
            if self.step > e.steps and not self.pending:
                # Nothing is trained with this config, so it is not that of the run.
                self.progress.println(
                    f"finished already: {self.workdir} is at step {self.step}; "
                    f"config.steps={e.steps} does not change it"
                )
                return self._finish(already=True)
            self._commit(origin, files)
            self.progress.println(self._banner())
            if e.data.origin["of"] != e.data.origin["source"]:  # split by an earlier text
                self.progress.println(f"held out: {e.data.held_out_of()}")
            if untrained:
                return self._save_untrained(iterator)
            if self.pending:
                self._make_up()
            if self.step >= e.steps:
                self.progress.println(
                    f"finished already: {self.workdir} is at step {self.step} of {e.steps}"
                )
                return self._finish(already=True)
            self._loop(iterator)
            self._end_profile()
            return self._finish()

    @contextlib.contextmanager
    def _checkpointer(self):
        checkpoints = build.checkpointer(self.workdir, self.config.checkpoint)
        try:
            with checkpoints:
                yield checkpoints
        finally:
            # A thread of orbax may wait for what has failed, by a clock that has jumped for years.
            if checkpoints.has_failed:
                leave_work()

    def _save_untrained(self, iterator):
        if self.checkpoints.latest_step() is None:
            self._pause(["evaluate"], True, iterator.get_state())
        else:
            self.progress.println(f"composed already: {self.workdir} is at step {self.step}")
        return self._finish()

    def _restore(self, iterator):
        """Origin of the parameters; reads only. State, position of the iterator in the data and
        elapsed seconds are those of the newest undamaged checkpoint, if there is one."""
        e, origin = self.experiment, None
        with self._timed("restore or initialise"):
            if self.checkpoints.latest_step() is None:
                self.progress.println("initialising the parameters")
                self.state, origin = start_from(
                    self.training.new_state(self.seed), self.config, e.model, self.progress.println
                )
                if self.config.init.run or e.model.members:
                    self.state = self.training.begun_anew(self.state)
            else:
                restored = self.checkpoints.restore(
                    self.training.shapes,
                    on_damage=self.config.checkpoint.on_damage,
                    vocab_size=e.model.vocab_size,
                )
                self.state, self.step, self.restored = restored.state, restored.step, True
                iterator.set_state(restored.data_state)
                self.before = restored.meta["seconds"]
                if flops := restored.meta.get("flops"):
                    self.flops_before = self.step, flops
                self.window = restored.meta.get("window", [])
                self.made_before = len(self.window)
                self.remembered = restored.meta.get("fingerprints", {})
                if "ending" in restored.meta:
                    self.ending = restored.meta["ending"]
                if "pending" in restored.meta:
                    self.pending = restored.meta["pending"]
        return origin

    def _read_teacher(self):
        """Read the model that this run follows: the one that it began with, if it did begin."""
        e, run = self.experiment, self.config.train.teacher
        if e.teacher is None:
            return
        began = None if self.opened.is_new else runfolder.run_record(self.workdir).get("teacher")
        with self._timed("read the teacher"):
            step, self.teacher = build.read_teacher(e, began and began["step"])
            found = fingerprint(self.teacher["params"], e.teacher.model.vocab_size)
        if began and found != began["parameters"]:
            raise UsageError(
                f"config.train.teacher={run}: its parameters at step {step} are not those of "
                f"the teacher of --workdir={self.workdir}; use the folder of the first teacher"
            )
        self.teacher_origin = {"run": run, "step": step, "parameters": found}

    def _banner(self):
        e = self.experiment
        devices = jax.device_count()
        heading = f"resuming {self.workdir} at step {self.step}" if self.step else str(self.workdir)
        return (
            f"{heading}: {quantity(self.parameters, 'parameters')}, "
            f"{self._text_size()}, "
            f"{e.steps} steps of {e.tokens_per_step} tokens, "
            f"{quantity(e.flops(e.steps) / e.steps, 'FLOPs')} a step{self._taught()}, "
            f"{devices} {jax.devices()[0].device_kind} device{'s' * (devices > 1)}"
        )

    def _report_estimate(self):
        """Print how long the steps that are left take."""
        e, step = self.experiment, self.checkpoints.latest_step() or 0
        if step < e.steps:
            flops, steps = e.flops(e.steps) - e.flops(step), e.steps - step
            line = hints.before(flops, steps, self.peak, self.opened.command_line)
            if line:
                self.progress.println(line)

    def _text_size(self):
        data = self.experiment.data
        if data.grows:
            return "training tokens (still tokenising)"
        return quantity(data.train_tokens, "training tokens")

    def _taught(self):
        if self.teacher is None:
            return ""
        flops = quantity(self.experiment.teacher_flops(), "FLOPs")
        return f" (including {flops} for the teacher, {self.config.train.teacher})"

    def _loop(self, iterator):
        e, config = self.experiment, self.config
        position = iterator.get_state()
        batch = self._next(iterator)
        stage, is_first = None, True
        self.watch.start()
        while self.step < e.steps:
            self._profile()
            if stage is not e.stage(self.step):
                stage = e.stage(self.step)
                self._log(self.buffer.pop_all())
                self.progress.println("compiling the training step")
                try:
                    with self.watch.stopped():
                        compiled = self._apart(lambda: self._compiled(stage))  # noqa: B023
                        runfolder.amend_launch(self.workdir, attention=self.attention)
                except Interrupted:
                    self._pause([], True, position)
                    self._say_stopped()
                    return
            self.signals.listen()
            if is_first:
                self.progress.println("computing the first step")
            self.state, metrics = compiled(self.state, batch, self.seed, self.teacher)
            self.step += 1
            position = iterator.get_state()
            if self.step < e.steps:
                # While the device computes this step, the host fetches the next one's tokens.
                batch = self._next(iterator)
            self.buffer.push(self.step, metrics)
            self.checkpoints.check()  # a failed background save ends the run here
            if is_first:
                jax.block_until_ready(metrics)
                self._report_start()
                is_first = False
            self._log(self.buffer.pop_ready())
            stop = self.signals.stop_requested() or self.step == e.steps
            due = [
                name
                for name in ("checkpoint", "evaluate", "sample")
                if (interval := getattr(config, name).every) and self.step % interval == 0
            ]
            if stop or due:
                self._log(self.buffer.pop_all())
                with self.watch.stopped():
                    self._pause(due, stop, position)
            if self.pending or (stop and self.step < e.steps):
                self._say_stopped()
                return

    def _next(self, iterator):
        """The batch of the next step; None if a signal comes while its text is still tokenised."""
        if not self.experiment.data.grows:
            return self.placement(next(iterator))
        try:
            return self.placement(self.signals.unless_stopped(lambda: next(iterator)))
        except Interrupted:
            return None

    def _say_stopped(self):
        self.checkpoints.wait()  # or it would be said of a save that fails yet
        self.progress.println(
            f"stopped at step {self.step} by {self.signals.name}; the run is saved; rerun the "
            "command to resume"
        )

    def _apart(self, work):
        """`work()`, for which a signal does not have to wait: then it is Interrupted."""
        return self.signals.unless_stopped(lambda: self._in_thread(work))

    def _in_thread(self, work):
        e = self.experiment
        with sharding.used_in_thread(e.mesh, e.rules):
            return work()

    def _compiled(self, stage):
        """The compiled step of a stage."""
        with self._timed("compile"):
            # Traced before timed steps.
            self.experiment.flops(stage.start + 1, nominal=False)
            compiled, attention = self.training.compile_step(stage.model, stage.start)
        self.attention += [choice for choice in attention if choice not in self.attention]
        return compiled

    def flops(self, step, nominal=True):
        """Training FLOPs of the first `step` steps. Earlier launches of the run may have had
        another number of steps, and with it other stages: these are counted as they were."""
        e, total = self.experiment, self.experiment.flops(step, nominal)
        if self.flops_before is None:
            return total
        begun_at, trained = self.flops_before
        # For the same stages this adds 0, so that no rounding tells a run that was interrupted.
        kind = "nominal" if nominal else "realised"
        return total + (trained[kind] - e.flops(begun_at, nominal))

    def seconds(self):
        """Of training so far: without compiling, evaluating, sampling and saving."""
        return self.before + self.watch.seconds()

    def _log(self, rows):
        """Take finished steps; write a row at each multiple of `log.every` and at the last step."""
        config, e = self.config, self.experiment
        for step, row in rows:
            self.window.append(row)
            self._check_finite(step, row)
            if step % config.log.every and step != e.steps:
                continue
            now = self.watch.seconds()
            elapsed, steps = now - self.row_at, len(self.window) - self.made_before
            self.row_at = now
            tokens = step * e.tokens_per_step
            rate = steps / max(elapsed, 1e-9)
            flops = self.flops(step)
            row = mean_of(self.window) | {name: row[name] for name in COUNTS}
            row |= {
                "tokens": tokens,
                "flops": flops,
                "flops_realised": self.flops(step, nominal=False),
                "seconds": self.before + now,
                "tokens_per_second": rate * e.tokens_per_step,
                "flops_per_second": rate * (flops - self.flops(step - 1)),
            }
            if self.peak:
                row["mfu"] = row["flops_per_second"] / self.peak
            if self.teacher is not None:
                row["flops_teacher"] = step * e.teacher_flops(nominal=False)
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
            self.window, self.made_before = [], 0

    def _check_finite(self, step, row):
        limit = self.config.train.max_nonfinite
        if row["train/nonfinite_run"] >= limit > 0:
            raise RunStopped(
                f"{limit} steps in a row up to step {step} had a non-finite loss or gradient "
                "and were skipped; lower config.optim.learning_rate, or raise "
                "config.train.max_nonfinite. The last checkpoint is unchanged"
            )

    def _pause(self, due, stop, position):
        """Save, evaluate and sample if due; at the end of a run all three. What a signal leaves
        undone is saved as pending, and the launch after this one begins with it.

        What is due is pending in the checkpoint until it is done: a process that ends in it, as one
        does that has no memory for it, has lost no step.
        """
        if self.step == self.experiment.steps:
            due, stop = {*due, "evaluate", *(["sample"] if self.config.sample.every else [])}, True
        work = [name for name in ("evaluate", "sample") if name in due]
        saves = stop or "checkpoint" in due
        if saves:
            self._save(position, work)
        if work:
            metrics = self._work(work)
            if saves:
                self._amend(metrics)
            elif self.pending:
                self._save(position, self.pending, metrics)

    def _save(self, position, pending, metrics=None):
        flops = {"nominal": self.flops(self.step), "realised": self.flops(self.step, False)}
        meta = self._done_so_far(pending) | {
            "last_step": self.experiment.steps,
            "seconds": self.seconds(),
            "flops": flops,
            "window": self.window,
            "fingerprints": self.fingerprints,
        }
        self.checkpoints.save(self.step, self.state, position, meta, metrics, force=True)

    def _amend(self, metrics):
        """Have the checkpoint of this step know what was done since, and what is still pending."""
        self.checkpoints.amend(self.step, metrics, self._done_so_far(self.pending))

    def _done_so_far(self, pending):
        """The entries of a checkpoint's meta about evaluations and samples of its step."""
        self.mirror.upload()  # before the checkpoint, which the rows then reach up to
        return {"ending": self.ending, "pending": pending}

    def _make_up(self):
        """Do what the last launch was kept from, at the step that it had reached."""
        self._amend(self._work(self.pending))

    def _work(self, due):
        """Evaluate and sample, in this order, if due; what is not done then is `pending`.

        Returns: metrics of the evaluation, or None.
        """
        metrics, self.pending, self.ending = None, list(due), ""
        params = optim.eval_params(self.config.optim.name, self.state.opt_state, self.state.params)
        with contextlib.suppress(Interrupted):
            if "evaluate" in due:
                metrics = self._apart(lambda: self.evaluator(params, self.state.variables))
                self.writer.write(self.step, metrics)
                self.last_row.update(metrics, step=self.step)
                self.progress.println(describe(self.step, metrics))
                if self.step == self.experiment.steps:
                    self.ending = self._ending(metrics["eval/loss"], params)
                self.pending.remove("evaluate")
            if "sample" in due:
                self._sample(params)
                self.pending.remove("sample")
        return metrics

    def _ending(self, loss, params):
        """What is not finite at the end of the run, in words; empty if all is well."""
        skipped = int(self.state.nonfinite_run)
        if math.isfinite(loss) and not skipped:
            return ""
        if math.isfinite(loss):
            steps = "step" if skipped == 1 else f"{skipped} steps"
            return (
                f"the loss or gradient of the last {steps} was not finite, so these were "
                f"skipped. The parameters are finite, those of step {self.step - skipped}, and "
                f"the held-out loss is {loss:.4f} nats"
            )
        if bool(jax.jit(_all_finite)(params)):
            cause = "the parameters are finite, but the forward pass overflows"
        else:
            cause = "the parameters are not finite"
        return f"the held-out loss is {loss}: {cause}"

    def _sample(self, params):
        variables, c = {"params": params, **self.state.variables}, self.config.sample
        seeds = [c.seed + i for i in range(c.num_samples)]
        prompts = [c.prompt] * c.num_samples
        with memory.exhaustion_as_usage_error(
            "sampling", f"lower config.sample.num_samples={c.num_samples}"
        ):
            texts = self._apart(lambda: self.sampler.texts(variables, prompts, seeds=seeds))
        for i, text in enumerate(texts):
            self.writer.write_text(self.step, f"sample {i}", c.prompt + text)
        self.progress.println(f"sample at step {self.step}:\n{c.prompt}{texts[0]}\n---")

    def _profile(self):
        start_step, count = self.config.log.profile_at, self.config.log.profile_steps
        if start_step and self.step == start_step:
            self.profile = Profile(self.mirror.path / "profile", start_step)
        if self.step == start_step + count:
            self._end_profile()

    def _end_profile(self):
        """Writes the profile whose window is open: of fewer steps where the run ends in it."""
        if self.profile is None:
            return
        jax.block_until_ready(self.state)
        self.mirror.wait()
        self.profile.end()
        count, self.profile = self.step - self.profile.step, None
        steps = f"{count} step{'s' * (count != 1)}"
        self.progress.println(f"profile of {steps}: {self.workdir / 'profile'}")

    def _report_start(self):
        total = time.monotonic() - self.started
        self.timings["other"] = total - sum(self.timings.values())
        durations = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.timings.items())
        kernels = sorted({choice["kernel"] for choice in self.attention})
        attention = f"; attention by {', '.join(kernels)}" if kernels else ""
        self.progress.println(f"first step after {total:.1f} s ({durations}){attention}")
        row = {"startup_seconds": total, "parameters": self.parameters}
        self.writer.write(self.step, row)

    def _finish(self, already=False):
        row, e = self.last_row, self.experiment
        self.checkpoints.wait()  # what is said here is of a run that is saved
        if self.step == e.steps and self.ending:
            best, metric = self.checkpoints.best_step(), self.config.checkpoint.best_metric
            advice = "; a lower config.optim.learning_rate may help, in another --workdir"
            if best is not None and best != self.step:
                advice += f"; the best {metric} is that of checkpoint {best} (--step={best})"
            raise NotFinite(f"at step {self.step}, the last, {self.ending}{advice}")
        if self.step == e.steps and "eval/loss" in row and not self.pending:
            self.progress.println(
                f"finished: {self.step} steps, "
                f"{quantity(self.step * e.tokens_per_step, 'tokens')}, "
                f"{quantity(self.flops(self.step), 'FLOPs')} in {duration(self.seconds())} of"
                f" training, held-out loss {row['eval/loss']:.4f} nats "
                f"({row['eval/bits_per_byte']:.4f} bits per byte){cut(row)}"
            )
        self.progress.println(
            "\n".join(hints.after(self.workdir, self.config, self.data, self.model.context))
        )
        if already:  # by another launch, whose metrics may be gone
            with contextlib.suppress(UsageError):
                row.update(*read_metrics(self.workdir)[-1:])
        return row


def _all_finite(tree):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
