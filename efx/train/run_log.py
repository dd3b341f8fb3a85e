"""The log of a launch: rows of metrics, FLOPs, training time, profile, terminal lines."""

import contextlib
import math
import time

import jax

from efx.layers.flops import count_params, device_peak
from efx.logging import duration, quantity
from efx.train.evaluator import bits, describe_scored_part, describe_worth

# Logged at their latest value; other metrics are averaged over the steps since the last row.
LATEST_VALUES = ("train/nonfinite_total", "train/nonfinite_run")


class RunLog:
    """Collects the metrics of steps and writes a row at each multiple of `log.every`.

    Attributes:
      writer, progress: the `MetricsWriter` and `Progress` of the launch, set by the trainer.
      last_row: {name: number} of the newest row.
    """

    def __init__(self, experiment, parameter_shapes):
        self.experiment, self.writer, self.progress = experiment, None, None
        self._parameters = count_params(parameter_shapes)
        # FLOP/s of all devices together; 0 if unknown.
        self.peak = jax.device_count() * (device_peak(experiment.config.train.dtype) or 0.0)
        self.last_row = {}
        self._seconds, self._since = 0.0, None  # of training; start of the time to add
        self._queue = []  # [(step, metrics on the device)]
        self._rows = []  # metrics of the steps since the last row
        self._written_at = 0.0  # seconds of training at the last row
        self._resumed = None  # (step, recorded FLOPs) of the resume
        self._profile_start = None  # the first profiled step

    def start_clock(self):
        """Count the seconds of training from now on."""
        self._since = time.monotonic()

    def seconds(self):
        """Seconds of training, over all launches."""
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    @contextlib.contextmanager
    def paused(self):
        """Context whose time does not count as training."""
        self._seconds, self._since = self.seconds(), None
        try:
            yield
        finally:
            self.start_clock()

    def resume(self, step, meta, row):
        """Continue the time and FLOPs of a checkpoint's `meta` and the row of its step."""
        self._seconds, self.last_row = meta["seconds"], row
        self._written_at, self._resumed = meta["seconds"], (step, meta["flops"])

    def flops(self, step, nominal=True):
        """Training FLOPs up to `step`.

        Steps before a resume keep their recorded FLOPs, because another number of steps moves the
        boundaries of the stages.
        """
        e, total = self.experiment, self.experiment.flops(step, nominal)
        if self._resumed is None:
            return total
        resumed_at, recorded = self._resumed
        return total + (
            recorded["nominal" if nominal else "realised"] - e.flops(resumed_at, nominal)
        )

    def meta(self, step):
        """Time and FLOPs for a checkpoint."""
        flops = {"nominal": self.flops(step), "realised": self.flops(step, nominal=False)}
        return {"seconds": self.seconds(), "flops": flops}

    def push(self, step, metrics):
        """Queue the metrics of a dispatched step and start their copy to the host.

        Args:
          metrics: {name: scalar device array}.
        """
        for value in metrics.values():
            value.copy_to_host_async()
        self._queue.append((step, metrics))

    def collect(self, wait=False):
        """Fetch the metrics of steps and write the rows that are due.

        The newest step stays in the queue, so the device always has a step to compute while the
        host waits.

        Args:
          wait: include the newest step.
        Returns: [(step, {name: number})] of the collected steps.
        """
        c, collected = self.experiment.config.log, []
        while len(self._queue) > (not wait):
            step, arrays = self._queue.pop(0)
            metrics = {name: value.item() for name, value in arrays.items()}
            self._rows.append(metrics)
            collected.append((step, metrics))
            if step % c.every == 0 or step == self.experiment.steps:
                self._write_row(step)
        return collected

    def _write_row(self, step):
        e, now, flops = self.experiment, self.seconds(), self.flops(step)
        steps_per_second = len(self._rows) / max(now - self._written_at, 1e-9)
        row = mean_of(self._rows) | {name: self._rows[-1][name] for name in LATEST_VALUES}
        row |= {
            "tokens": step * e.tokens_per_step,
            "flops": flops,
            "flops_realised": self.flops(step, nominal=False),
            "seconds": now,
            "tokens_per_second": steps_per_second * e.tokens_per_step,
            "flops_per_second": steps_per_second * (flops - self.flops(step - 1)),
        }
        row |= self._progress_in_text(step)
        if self.peak:
            row["mfu"] = row["flops_per_second"] / self.peak
        if memory := jax.local_devices()[0].memory_stats():  # CPUs have none
            row["device_memory"] = memory["peak_bytes_in_use"]
        if e.teacher is not None:
            row["flops_teacher"] = step * e.teacher_flops(nominal=False)
        self._rows, self._written_at = [], now
        self.write(step, row)
        self.progress.update(step, row)

    def _progress_in_text(self, step):
        """Epochs, and with a mixture the epochs and tokens of each part."""
        data = self.experiment.data
        epochs, rows = data.epochs(step), data.rows_read(step)
        if len(epochs) == 1:
            return {"epochs": max(epochs.values())}
        length = self.experiment.config.data.seq_len
        tokens = {f"{part}/tokens": count * length for part, count in rows.items()}
        return {f"{part}/epochs": value for part, value in epochs.items()} | tokens

    def write(self, step, metrics):
        """Add metrics to the row of a step."""
        self.writer.write(step, metrics)
        earlier = self.last_row if self.last_row.get("step") == step else {}
        self.last_row = {**earlier, **metrics, "step": step}

    def update_profile(self, step, folder):
        """Start or stop the profiler before the step after `step`."""
        c = self.experiment.config.log
        if c.profile_at and step == c.profile_at:
            # Processes of one host would write the same files.
            process = f"process_{jax.process_index()}" if jax.process_count() > 1 else ""
            jax.profiler.start_trace(str(folder / "profile" / process))
            self._profile_start = step
        if step == c.profile_at + c.profile_steps:
            self.end_profile(step)

    def end_profile(self, step):
        """Write the profile of the steps up to `step`, if one is being recorded."""
        if self._profile_start is not None:
            jax.profiler.stop_trace()
            count, self._profile_start = step - self._profile_start, None
            self.progress.println(f"profile of {count} step{'s' * (count != 1)} written")

    # ---- lines for the user ----------------------------------------------------------------------

    def print_start(self, workdir, step):
        """Print the sizes of the run."""
        e, data, devices = self.experiment, self.experiment.data, jax.device_count()
        heading = f"resuming {workdir} at step {step}" if step else str(workdir)
        compute = f"{quantity(e.flops(e.steps), 'FLOPs')} of computation in all"
        if e.teacher is not None:
            flops = quantity(e.teacher_flops() * e.steps, "FLOPs")
            compute += f", {flops} of it for the teacher, {e.config.train.teacher}"
        self.progress.println(
            f"{heading}:\n"
            f"  model:     {e.config.model.family}, {quantity(self._parameters, 'parameters')}\n"
            f"  text:      {quantity(data.train_tokens, 'training tokens')}\n"
            f"  training:  {e.steps} steps of {e.tokens_per_step} tokens, "
            f"{quantity(max(data.epochs(e.steps).values()), 'epochs')}; {compute}\n"
            f"  device:    {devices} {jax.devices()[0].device_kind}"
        )
        for line in data.remarks():
            self.progress.println(line)
        if data.keeps_earlier_split:
            self.progress.println(f"held out: {data.describe_held_out()}")

    def print_first_step(self, step, started, compile_seconds):
        """Print and log the start-up time.

        Args:
          started: `time.monotonic()` of the command's start.
        """
        total = time.monotonic() - started
        self.progress.println(f"first step after {total:.1f} s (compiling {compile_seconds:.1f} s)")
        self.write(step, {"startup_seconds": total, "parameters": self._parameters})

    def print_end(self, step):
        """Print the totals and losses of a finished run."""
        e, row = self.experiment, self.last_row
        self.progress.println(
            f"finished: {step} steps, {quantity(step * e.tokens_per_step, 'tokens')}, "
            f"{quantity(self.flops(step), 'FLOPs')} in {duration(row['seconds'])} of training",
            "bold",
        )
        lines = [
            f"  model:           {e.config.model.family}, "
            f"{quantity(self._parameters, 'parameters')}",
            f"  held-out loss:   {row['eval/loss']:.4f} nats a token"
            f"{bits(row, ' ({} bits per byte)')}{describe_scored_part(row)}",
        ]
        if row.get("train/loss") is not None:
            lines.insert(1, f"  training loss:   {row['train/loss']:.4f} nats a token")
        if worth := describe_worth(row):
            lines.append(f"  routed parts:    {worth}")
        self.progress.println("\n".join(lines))


def mean_of(rows):
    """Return {name: mean} of dicts of numbers, each name over the rows that have it.

    Values that are not finite are left out, so that a skipped step does not hide the steps around
    it. A name without a finite value gives NaN.
    """
    finite = {}
    for row in rows:
        for name, value in row.items():
            finite.setdefault(name, []).extend([value] if math.isfinite(value) else [])
    return {
        name: math.fsum(values) / len(values) if values else math.nan
        for name, values in finite.items()
    }
