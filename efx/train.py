"""The one training loop: build, restore, step, log, evaluate, sample, save."""

import contextlib
import os
import pathlib
import shlex
import time

import jax
import numpy as np

from efx import models, optim, runfolder, sharding
from efx import step as step_lib
from efx.checkpoint import Checkpointer, start_from
from efx.errors import UsageError
from efx.evaluate import Evaluator, describe
from efx.experiment import TOKENIZER_FILE, prepare
from efx.flops import device_peak
from efx.metrics import MetricsBuffer, MetricsWriter, Progress, duration, mean_of, quantity
from efx.sample import TextSampler
from efx.signals import StopSignals

# What a later launch of the same run may change without becoming another run.
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
    r"data\.clusters",
    r"cluster\..*",
    r"ensemble\..*",
    r"train\.max_nonfinite",
    r"train\.loss_chunk",
    r"model\.remat",
    r"model\.attention_chunk",
)


class RunStopped(RuntimeError):
    """The run cannot go on; the message is one line for the user."""


def train_and_evaluate(config, workdir, *, command_line=(), started=None):
    """Train until the configured step, from the newest checkpoint of `workdir` if it has one.

    Args:
      config: a full config, see `configs/common.py`.
      workdir: run folder, made if absent.
      command_line: recorded in run.json.
      started: `time.monotonic()` of the command's start, for the report of start-up time.
    Returns: the last row of metrics, {name: number}.
    Raises: UsageError for bad input; RunStopped when training cannot go on.
    """
    return _Run(config, workdir, command_line, started or time.monotonic()).train()


def compose(config, workdir, *, command_line=(), started=None):
    """Make the run folder of a model that is put together from other runs, at step 0: it can be
    evaluated, sampled from, and trained further. Arguments, result and errors as above."""
    run = _Run(config, workdir, command_line, started or time.monotonic())
    return run.train(untrained=True)


class _Run:
    """One launch of a run."""

    def __init__(self, config, workdir, command_line, started):
        self.started = started
        self.workdir = pathlib.Path(workdir)
        self.timings = {"imports": time.monotonic() - started}
        with self._timed("data and model"):
            self.experiment = prepare(config, workdir)
        e = self.experiment
        self.config, self.data, self.model = config, e.data, e.model
        shapes = jax.eval_shape(lambda: step_lib.init_state_params(e.model))
        base = models.mup_base(e.model)
        self.optimizer, self.schedule = optim.make_optimizer(config.optim, e.steps, shapes, base)
        self.summary = optim.describe(config.optim, shapes, base)
        self.shardings = step_lib.state_shardings(e.model, self.optimizer, e.mesh, e.rules)
        # Now, so that a bad prompt or setting is told before anything is written.
        c = config.sample
        self.sampler = c.every and TextSampler(
            e.model, e.data.tokenizer, c, batch_size=c.num_samples
        )
        self._check_cluster()
        run = runfolder.open_run(
            workdir, config.to_dict(), command_line=list(command_line), may_differ=MAY_DIFFER
        )
        self.resumed = not run.is_new
        if jax.process_index() == 0 and e.data.members:
            runfolder.record(self.workdir, members=e.data.members.origin)
        if jax.process_index() == 0 and not (self.workdir / TOKENIZER_FILE).exists():
            with runfolder.writing(self.workdir / TOKENIZER_FILE):
                e.data.tokenizer.save(self.workdir / TOKENIZER_FILE)
        self.seconds = 0.0
        self.window = []
        self.buffer = MetricsBuffer()
        self.last_row = {}
        self.step = 0
        self.seed = jax.device_put(np.uint32(config.seed), sharding.replicated(e.mesh))

    def _check_cluster(self):
        """A run on a cluster stays on it: the folder of a clustering may hold another one now."""
        here, before = self.data.members, runfolder.recorded(self.workdir).get("members")
        if here and before and here.origin != before:
            raise UsageError(
                f"--workdir={self.workdir} was trained on another clustering than that in "
                f"config.data.clusters={self.config.data.clusters!r}; use another --workdir"
            )

    @contextlib.contextmanager
    def _timed(self, name):
        start = time.monotonic()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.monotonic() - start

    def train(self, untrained=False):
        e, config = self.experiment, self.config
        c = config.checkpoint
        peak = device_peak(config.train.dtype) or 0.0
        with (
            sharding.use(e.mesh, e.rules),
            Checkpointer(
                self.workdir / runfolder.CHECKPOINTS,
                every=c.every,
                keep_last=c.keep_last,
                keep_best=c.keep_best,
                best_metric=c.best_metric,
                asynchronous=c.asynchronous,
            ) as self.checkpoints,
            MetricsWriter(
                self.workdir,
                tensorboard=config.log.tensorboard,
                wandb=config.log.wandb,
                run_name=self.workdir.name,
            ) as self.writer,
            Progress(e.steps, peak_flops_per_second=peak * jax.device_count()) as self.progress,
            StopSignals() as self.signals,
        ):
            self.evaluator = Evaluator(e.model, config, e.data, e.mesh, e.rules)
            iterator = self._restore()
            self.progress.println(self._banner())
            if untrained:
                return self._save_untrained(iterator)
            if self.step >= e.steps:
                self.progress.println(
                    f"finished already: {self.workdir} is at step {self.step} of {e.steps}"
                )
                return self._finish()
            self._loop(iterator)
            return self._finish()

    def _save_untrained(self, iterator):
        if self.checkpoints.latest_step() is None:
            self._pause(["evaluate"], True, iterator.get_state())
        else:
            self.progress.println(f"composed already: {self.workdir} is at step {self.step}")
        return self._finish()

    def _restore(self):
        """Order: the newest undamaged checkpoint gives the state, then the position of the data,
        then the elapsed seconds; metrics written past that step are dropped."""
        e = self.experiment
        with self._timed("restore or initialise"):
            iterator = e.data.train_iterator()
            if self.checkpoints.latest_step() is None:
                init = jax.jit(
                    lambda seed: step_lib.init_state(e.model, self.optimizer, seed),
                    out_shardings=self.shardings,
                )
                self.state, origin = start_from(
                    init(self.seed), self.config, e.model, self.progress.println
                )
                if origin and jax.process_index() == 0:
                    runfolder.record(self.workdir, origin=origin)
                self.writer.truncate_after(-1 if self.resumed else 0)
            else:
                shapes = jax.eval_shape(
                    lambda: step_lib.init_state(e.model, self.optimizer, self.config.seed)
                )
                abstract = jax.tree.map(
                    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                    shapes,
                    self.shardings,
                )
                restored = self.checkpoints.restore(
                    abstract, on_damage=self.config.checkpoint.on_damage
                )
                self.state = restored.state
                iterator.set_state(restored.data_state)
                self.step = restored.step
                self.seconds = restored.meta["seconds"]
                self.writer.truncate_after(restored.step)
        return iterator

    def _banner(self):
        e = self.experiment
        count = sum(e.model.parameter_count().values())
        where = f"resuming {self.workdir} at step {self.step}" if self.step else str(self.workdir)
        return (
            f"{where}: {quantity(count)}parameters, "
            f"{quantity(e.data.train_tokens)}training tokens, "
            f"{e.steps} steps of {e.tokens_per_step} tokens, "
            f"{quantity(e.flops(e.steps) / e.steps)}FLOPs a step, "
            f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        )

    def _loop(self, iterator):
        e, config = self.experiment, self.config
        placed = sharding.batch_sharding(e.mesh, e.rules)
        batch = sharding.place_batch(next(iterator), placed)
        stage = None
        first = True
        while self.step < e.steps:
            self._profile()
            if stage is not e.stage(self.step):
                stage = e.stage(self.step)
                compiled = self._compiled(stage, batch)
                clock = time.monotonic()
            self.state, metrics = compiled(self.state, batch, self.seed)
            self.step += 1
            position = iterator.get_state()
            if self.step < e.steps:
                # While the device computes this step, the host fetches the next one's tokens.
                batch = sharding.place_batch(next(iterator), placed)
            self.buffer.push(self.step, metrics)
            self.checkpoints.check()  # a save that failed in the background is told at once
            if first:
                jax.block_until_ready(metrics)
                self._report_start()
                first = False
            clock = self._log(self.buffer.pop_ready(), clock)
            stop = self.signals.wanted(self.step) or self.step == e.steps
            due = [
                name
                for name in ("checkpoint", "evaluate", "sample")
                if config[name].every and self.step % config[name].every == 0
            ]
            if stop or due:
                clock = self._log(self.buffer.pop_all(), clock)
                self._pause(due, stop, position)
                clock = time.monotonic()
            if stop and self.step < e.steps:
                self.progress.println(
                    f"stopped at step {self.step} by {self.signals.name}; the run is saved, and "
                    "the same command goes on from here"
                )
                return

    def _compiled(self, stage, batch):
        e = self.experiment
        step_fn = step_lib.make_train_step(
            stage.model,
            self.optimizer,
            self.schedule,
            self.config,
            total_steps=e.steps,
            groups=sharding.batch_shards(e.mesh, e.rules),
        )
        with self._timed("compile"):
            return (
                jax.jit(step_fn, donate_argnums=0, out_shardings=(self.shardings, None))
                .lower(self.state, batch, self.seed)
                .compile()
            )

    def _log(self, rows, clock):
        """Take in finished steps; write a row at each multiple of `log.every` and at the end."""
        config, e = self.config, self.experiment
        for step, row in rows:
            self.window.append(row)
            self._check_finite(step, row)
            if step % config.log.every and step != e.steps:
                continue
            now = time.monotonic()
            elapsed, steps = now - clock, len(self.window)
            self.seconds += elapsed
            clock = now
            tokens = step * e.tokens_per_step
            rate = steps / max(elapsed, 1e-9)
            flops = e.flops(step)
            row = mean_of(self.window) | {
                "tokens": tokens,
                "flops": flops,
                "flops_realised": e.flops(step, nominal=False),
                "seconds": self.seconds,
                "tokens_per_second": rate * e.tokens_per_step,
            }
            self.writer.write(step, row)
            self.last_row.update(row, step=step)
            self.progress.update(
                step,
                loss=row["train/loss"],
                tokens_per_second=row["tokens_per_second"],
                flops=row["flops"],
                flops_per_second=rate * (flops - e.flops(step - 1)),
            )
            self.window = []
        return clock

    def _check_finite(self, step, row):
        limit = self.config.train.max_nonfinite
        if row["train/nonfinite_run"] >= limit > 0:
            raise RunStopped(
                f"{limit} steps in a row up to step {step} had a non-finite loss or gradient and "
                "were skipped; lower config.optim.learning_rate, or raise "
                "config.train.max_nonfinite. The last checkpoint is untouched"
            )

    def _pause(self, due, stop, position):
        """Evaluate, sample and save, as far as they are due; the end of a run does all three."""
        done = self.step == self.experiment.steps
        metrics = None
        params = optim.eval_params(self.config.optim.name, self.state.opt_state, self.state.params)
        if done or "evaluate" in due:
            metrics = self.evaluator(params, self.state.variables)
            self.writer.write(self.step, metrics)
            self.last_row.update(metrics, step=self.step)
            self.progress.println(describe(self.step, metrics))
        if "sample" in due or (done and self.config.sample.every):
            self._sample(params)
        if stop or "checkpoint" in due:
            self.checkpoints.save(
                self.step, self.state, position, {"seconds": self.seconds}, metrics, force=True
            )

    def _sample(self, params):
        variables = sharding.local({"params": params, **self.state.variables})
        if jax.process_index() != 0:
            return
        c = self.config.sample
        seeds = [c.seed + i for i in range(c.num_samples)]
        texts = self.sampler.texts(variables, [c.prompt] * c.num_samples, seeds=seeds)
        for i, text in enumerate(texts):
            self.writer.write_text(self.step, f"sample {i}", c.prompt + text)
        self.progress.println(f"sample at step {self.step}:\n{c.prompt}{texts[0]}\n---")

    def _profile(self):
        at, count = self.config.log.profile_at, self.config.log.profile_steps
        if at and self.step == at:
            jax.profiler.start_trace(str(self.workdir / "profile"))
        if at and self.step == at + count:
            jax.block_until_ready(self.state)
            jax.profiler.stop_trace()
            self.progress.println(f"profile of {count} steps: {self.workdir / 'profile'}")

    def _report_start(self):
        total = time.monotonic() - self.started
        self.timings["other"] = total - sum(self.timings.values())
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.timings.items())
        self.progress.println(f"first step after {total:.1f} s ({parts})")
        count = sum(self.experiment.model.parameter_count().values())
        self.writer.write(self.step, {"startup_seconds": total, "parameters": count})

    def _finish(self):
        row = self.last_row
        if self.step == self.experiment.steps and "eval/loss" in row:
            self.progress.println(
                f"finished: {self.step} steps, {quantity(row['tokens'])}tokens, "
                f"{quantity(row['flops'])}FLOPs in {duration(row['seconds'])} of training, "
                f"held-out loss {row['eval/loss']:.4f} nats "
                f"({row['eval/bits_per_byte']:.4f} bits per byte)"
            )
        # launch/local.sh names itself here, since its user may have no other Python with efx in it.
        command = os.environ.get("EFX_COMMAND", "python -m efx.main")
        folder = shlex.quote(str(self.workdir))
        self.progress.println(
            f"run folder: {self.workdir}\n"
            f"  sample from it:  {command} --mode=sample --workdir {folder} --prompt 'def '\n"
            f"  evaluate it:     {command} --mode=evaluate --workdir {folder}\n"
            f"  look at it:      tensorboard --logdir {folder}"
        )
        return row
