"""Numbers out of a run: device values fetched late, metrics.jsonl, TensorBoard, a live line.

metrics.jsonl has one JSON object per line, in increasing order of `step`, one line per step. A
value that is not finite is written as null (JSON has no NaN; pandas reads null back as NaN).

Nothing here imports JAX at the top: a notebook may read and plot a run without it.
"""

import json
import math
import os
import pathlib
import sys
import time

from efx.errors import UsageError
from efx.runfolder import METRICS_FILE, reason, write_atomic, writing

WANDB_ID_FILE = "wandb_id"
SAMPLES = "samples"
TENSORBOARD = "tensorboard"


def is_primary():
    """Whether this process writes files and prints: process 0, or any process without JAX."""
    if "jax" not in sys.modules:
        return True
    import jax

    return jax.process_index() == 0


def read_metrics(workdir):
    """The rows of a run's metrics.jsonl as a list of dicts; a torn last line is left out."""
    path = pathlib.Path(workdir) / METRICS_FILE
    try:
        return [row for row, _, _ in _rows(path)]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error


def _rows(path):
    """Yields (row, its first byte, the byte after it) for each complete line of a metrics file."""
    with open(path, "rb") as file:
        offset = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # the write that was under way when the process died
            try:
                row = json.loads(line)
                row["step"]
            except (ValueError, TypeError, KeyError) as error:
                raise UsageError(
                    f"{path} line {number} is not a metrics row; delete that line to go on"
                ) from error
            yield row, offset, offset + len(line)
            offset += len(line)


class MetricsWriter:
    """Writes scalars and text of one run; on processes other than 0 every call does nothing.

    Args:
      workdir: run folder (must exist).
      tensorboard: write event files to workdir/tensorboard.
      wandb: Weights & Biases project, or "" for none. The run id is kept in workdir/wandb_id, so a
        resumed run goes on in the same W&B run.
      run_name: name shown by W&B.

    A context manager. Raises UsageError when a file cannot be written or an extra is missing.
    """

    def __init__(self, workdir, *, tensorboard, wandb, run_name):
        self._workdir = pathlib.Path(workdir)
        self._path = self._workdir / METRICS_FILE
        self._tensorboard = tensorboard
        self._events = None  # opened at the first write, when the step to purge from is known
        self._purge_from = None
        self._wandb = None
        self._last = None  # (row, first byte) of the last line in the file
        self._size = 0  # bytes in the file
        self._file = None  # descriptor of metrics.jsonl
        if not is_primary():
            return
        with writing(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self._cut(math.inf)
        if wandb:
            self._wandb = self._open_wandb(wandb, run_name)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def close(self):
        """Flushes and closes everything. A closed writer ignores further calls."""
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._file is not None:
            os.close(self._file)
        self._file = self._events = self._wandb = None

    def truncate_after(self, step):
        """Drops what was written past `step`, so that a run resumed there has one line per step.

        TensorBoard hides its events of later steps too. Call it before the first write.
        """
        if self._file is None:
            return
        self._cut(step)
        self._purge_from = step + 1

    def _cut(self, step):
        """Cuts the file after the last complete line at or before `step`."""
        self._last, self._size = None, 0
        for row, start, end in _rows(self._path):
            if row["step"] > step:
                break
            self._last, self._size = (row, start), end
        with writing(self._path):
            os.ftruncate(self._file, self._size)

    def write(self, step, scalars):
        """Adds {name: number} to the row of `step` and puts it on disk at once.

        Numbers are Python or numpy scalars, or device scalars (which are waited for; fetch those
        with MetricsBuffer instead). A second call for the last step extends its line. Steps may not
        go back: ValueError, unless truncate_after() made room.
        """
        if self._file is None:
            return
        step = int(step)
        values = {name: _number(value) for name, value in scalars.items()}
        row, start = {"step": step}, self._size
        if self._last is not None:
            if self._last[0]["step"] > step:
                raise ValueError(f"metrics of step {step} after those of {self._last[0]['step']}")
            if self._last[0]["step"] == step:
                row, start = dict(self._last[0]), self._last[1]
        row.update({k: v if math.isfinite(v) else None for k, v in values.items()})
        line = json.dumps(row).encode()
        # A line that is extended is written over in place, never shorter than it was, so that a
        # crash leaves at worst a torn last line, which the next run drops.
        line = line.ljust(self._size - start - 1) + b"\n"
        with writing(self._path):
            _write_at(self._file, start, line)
        self._last, self._size = (row, start), start + len(line)
        if self._tensorboard:
            events = self._open_events()
            for name, value in values.items():
                events.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})

    def write_text(self, step, name, text):
        """Appends `text` under the heading `name` to samples/step_N.txt; also to TensorBoard."""
        if self._file is None:
            return
        path = self._workdir / SAMPLES / f"step_{int(step)}.txt"
        section = f"## {name}\n{text}\n"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(section)
        if self._tensorboard:
            self._open_events().add_text(name, f"```\n{text}\n```", int(step))

    def _open_events(self):
        if self._events is None:
            folder = self._workdir / TENSORBOARD
            with writing(folder):
                # The suffix: tensorboardX names files by the second, and opens them to overwrite.
                self._events = _summary_writer()(
                    str(folder),
                    purge_step=self._purge_from,
                    flush_secs=10,
                    filename_suffix=f".{time.time_ns()}",
                )
        return self._events

    def _open_wandb(self, project, run_name):
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                f"config.log.wandb={project!r} needs the extra `wandb`: pip install 'efx[wandb]',"
                ' or config.log.wandb=""'
            ) from error
        path = self._workdir / WANDB_ID_FILE
        identity = path.read_text(encoding="utf-8").strip() if path.is_file() else None
        try:
            run = wandb.init(
                project=project,
                name=run_name,
                id=identity,
                resume="allow",
                dir=str(self._workdir),
            )
        except Exception as error:
            raise UsageError(
                f"config.log.wandb={project!r}: Weights & Biases refused to start"
                f" ({str(error).splitlines()[0]}); log in, set WANDB_MODE=offline, or"
                ' config.log.wandb=""'
            ) from error
        # Our own `step` is the x axis: W&B's internal one cannot go back after a resume.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        write_atomic(path, run.id + "\n")
        return run


def _summary_writer():
    """The class; tensorboardX imports torch where there is one, which takes seconds, for nothing
    that is used here."""
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    return SummaryWriter


def _write_at(descriptor, offset, data):
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset, data = offset + written, data[written:]


def _number(value):
    """A Python int or float from any scalar; a bool becomes an int."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, int) else float(value)


class MetricsBuffer:
    """Device-side metrics on their way to the host, one step late.

    The loop pushes the metrics of a step right after dispatching it, and pops the steps before it,
    whose values the device has computed or is about to: so the device always has the newest step
    queued while the host waits for an older one.
    """

    def __init__(self):
        self._queue = []

    def push(self, step, metrics):
        """Queues {name: scalar device array} of `step` and starts its copy to the host."""
        for value in metrics.values():
            if hasattr(value, "copy_to_host_async"):
                value.copy_to_host_async()
        self._queue.append((step, metrics))

    def pop_ready(self):
        """[(step, {name: number}), ...] of every step pushed but the newest, oldest first."""
        ready, self._queue = self._queue[:-1], self._queue[-1:]
        return _fetch(ready)

    def pop_all(self):
        """Like pop_ready, with the newest step too: waits for the device. For the end of a run."""
        ready, self._queue = self._queue, []
        return _fetch(ready)


def _fetch(rows):
    return [(step, {k: _number(v) for k, v in metrics.items()}) for step, metrics in rows]


def mean_of(rows):
    """{name: mean} over dicts of numbers, each name over the rows that have it.

    Values that are not finite are left out of a mean, so that one skipped step does not hide the
    window around it (the step counts those itself); a name with no finite value gives NaN.
    """
    values = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    means = {}
    for name, numbers in values.items():
        finite = [x for x in numbers if math.isfinite(x)]
        means[name] = math.fsum(finite) / len(finite) if finite else math.nan
    return means


class Progress:
    """One live line about a run in a terminal; a plain line now and then when it is not one.

    Args:
      total: the run's last step.
      peak_flops_per_second: of all devices together, for the MFU; 0 if unknown (no MFU then).
      stream: where to write (default: standard output at the time of the call).
      plain_seconds: least time between two plain lines.

    A context manager. On processes other than 0 nothing is shown.
    """

    _LIVE_SECONDS = 0.1  # least time between two redraws of the live line

    def __init__(self, total, *, peak_flops_per_second=0.0, stream=None, plain_seconds=10.0):
        self._total = int(total)
        self._peak = peak_flops_per_second
        self._stream = sys.stdout if stream is None else stream
        self._plain_seconds = plain_seconds
        self._first = None  # (step, time) of the first update: the time left is measured from it
        self._shown = -math.inf
        self._live = None
        self._active = is_primary()
        self._terminal = self._active and self._stream.isatty()

    def __enter__(self):
        if self._terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, kind, error, trace):
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step, *, loss=None, tokens_per_second=None, flops=None, flops_per_second=None):
        """Shows where the run stands after `step`; cheap, so call it as often as you like.

        loss in nats; flops: the run's total so far. None: not shown.
        """
        if not self._active:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        least = self._LIVE_SECONDS if self._live is not None else self._plain_seconds
        if step < self._total and now - self._shown < least:
            return
        self._shown = now
        parts = [f"step {step}/{self._total}"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if tokens_per_second is not None:
            parts.append(f"{quantity(tokens_per_second)}tokens/s")
        if flops is not None:
            parts.append(f"{quantity(flops)}FLOPs")
        if flops_per_second is not None:
            parts.append(f"{quantity(flops_per_second)}FLOP/s")
            if self._peak:
                parts.append(f"MFU {100 * flops_per_second / self._peak:.1f}%")
        since, start = self._first
        if since < step < self._total:
            left = (self._total - step) * (now - start) / (step - since)
            parts.append(f"{duration(left)} left")
        self._show("  ".join(parts))

    def _show(self, line):
        if self._live is None:
            print(line, file=self._stream, flush=True)
            return
        from rich.text import Text

        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def println(self, text):
        """Prints `text` on its own line or lines, above the live one."""
        if not self._active:
            return
        if self._live is None:
            print(text, file=self._stream, flush=True)
            return
        from rich.text import Text

        self._live.console.print(Text(text), soft_wrap=True)


def quantity(value):
    """1234567.0 -> "1.23 M": three digits and an SI prefix; "0 " for zero."""
    for power, prefix in ((21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        # 0.9995 and more would be rounded up to a thousand of the prefix below.
        if abs(value) >= 0.9995 * 10**power:
            scaled = value / 10**power
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f} {prefix}"
    return f"{value:.3g} "


def duration(seconds):
    """Seconds as H:MM:SS, with days in front from one day on."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days} d ' if days else ''}{hours}:{minutes:02}:{seconds:02}"
