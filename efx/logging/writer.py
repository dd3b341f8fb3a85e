"""Writes the metrics and samples of a run: metrics.jsonl, samples/, TensorBoard, W&B."""

import contextlib
import importlib.util
import json
import math
import os
import pathlib

from efx import io
from efx.errors import UsageError, extra, first_line, is_primary
from efx.logging.events import Events
from efx.run_dir import METRICS_FILE

SAMPLES = "samples"
TENSORBOARD = "tensorboard"
WANDB_ID_FILE = "wandb_id"  # id of the W&B run, and the last step that it had at the last launch
# The files and folders of a run directory that a resumed launch extends.
RESUMED_FILES = (METRICS_FILE, SAMPLES, WANDB_ID_FILE)


def read_metrics(workdir):
    """Return the rows of a run's metrics.jsonl as dicts, without an incomplete last line."""
    path = io.folder(workdir) / METRICS_FILE
    try:
        return [row for row, _ in _rows(path)]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {io.describe_os_error(error)}") from error


def samples_path(workdir, step):
    """Return the path samples/step_0000000N.txt of a run; names sort by step."""
    return workdir / SAMPLES / f"step_{int(step):08d}.txt"


def check_wandb(project):
    """Raise UsageError unless W&B is installed, without the second that its import takes."""
    if importlib.util.find_spec("wandb") is None:
        raise UsageError(
            f"config.log.wandb={project!r}: wandb is not installed; install {extra('wandb')}, "
            'or set config.log.wandb=""'
        )


def _rows(path):
    """Yield (row, bytes up to the end of its line) of a metrics file.

    An invalid last line is left out: the process or the machine stopped while it was written.
    """
    with path.open("rb") as file:
        lines = file.read().splitlines(keepends=True)
    end = 0
    for number, line in enumerate(lines, 1):
        end += len(line)
        try:
            row = json.loads(line)
            is_row = line.endswith(b"\n") and type(row["step"]) is int
        except (ValueError, TypeError, KeyError):
            is_row = False
        if is_row:
            yield row, end
        elif number < len(lines):
            raise UsageError(
                f"{path} line {number} is not a metrics row; restore the file, or delete that line"
            )


class MetricsWriter:
    """Writes scalars and text of one run; only process 0 writes. A context manager.

    No existing file is changed before the first call.

    Args:
      workdir: run directory on a disk.
      tensorboard: whether to write event files.
      wandb: arguments of `wandb.init`, among them `project`; None: no W&B. A resumed run continues
        its W&B run.
      resume_step: step that the run resumes from; None: a new run, with a new W&B run.
    Raises: UsageError if a file cannot be written, or W&B does not start.
    """

    def __init__(self, workdir, *, tensorboard, wandb=None, resume_step):
        self._workdir = pathlib.Path(workdir)
        self._path = self._workdir / METRICS_FILE
        self._tensorboard = tensorboard
        self._events = None  # made at the first write, when the step to purge from is known
        self._purge_from = None
        self._wandb, self._sent_steps = None, ()
        self._last = {"step": -1}  # the last row
        self._start = self._end = 0  # bytes before and up to the end of its line
        self._is_active = is_primary()
        if self._is_active:
            with io.report_write_errors(self._path):
                self._find_last(math.inf)
            if wandb:
                self._start_wandb(wandb, resume_step)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # The first error is the one to raise.
        with contextlib.suppress(*([UsageError] if kind else [])):
            self.close()

    def close(self):
        """Flush and close all files. A closed writer ignores further calls."""
        self._is_active = False
        if self._wandb:
            self._wandb.finish()
        if self._events:
            with io.report_write_errors(self._workdir / TENSORBOARD):
                self._events.close()
        self._wandb = self._events = None

    def truncate_after(self, step):
        """Drop the rows and samples after a step. A resumed run calls it before the first write."""
        if not self._is_active:
            return
        self._find_last(step)
        with io.report_write_errors(self._path):
            _replace_end(self._path, self._end, b"")
        with io.report_write_errors(self._workdir / SAMPLES):
            for path in (self._workdir / SAMPLES).glob("step_*.txt"):
                number = path.stem.removeprefix("step_")
                if number.isdecimal() and int(number) > step:
                    path.unlink()
        self._purge_from = step + 1

    def _find_last(self, step):
        """Find the last complete row at or before a step."""
        self._last, self._start, self._end = {"step": -1}, 0, 0
        if self._path.exists():
            for row, end in _rows(self._path):
                if row["step"] > step:
                    break
                self._last, self._start, self._end = row, self._end, end

    def write(self, step, scalars):
        """Add numbers to the row of a step, on disk when this returns.

        Args:
          step: at least that of the last row, else ValueError; of the same step: that row is
            extended.
          scalars: {name: Python, numpy or device scalar}. Device scalars are waited for.
        """
        if not self._is_active:
            return
        step = int(step)
        values = {name: _as_number(value) for name, value in scalars.items()}
        row, start = {"step": step}, self._end
        if step == self._last["step"]:
            row, start = self._last, self._start
        elif step < self._last["step"]:
            raise ValueError(f"metrics of step {step} after those of step {self._last['step']}")
        row = row | {name: x if math.isfinite(x) else None for name, x in values.items()}
        line = json.dumps(row).encode() + b"\n"
        with io.report_write_errors(self._path):
            _replace_end(self._path, start, line)
        self._last, self._start, self._end = row, start, start + len(line)
        if self._tensorboard:
            with io.report_write_errors(self._workdir / TENSORBOARD):
                self._open_events().scalars(step, values)
        if self._wandb and step not in self._sent_steps:
            # Steps of W&B cannot decrease, and a resumed run continues after the last one.
            self._wandb.log({"step": step, **values}, step=max(step, self._wandb.step))

    def write_samples(self, step, texts):
        """Write texts to `samples_path`, and to TensorBoard."""
        if not self._is_active:
            return
        path = samples_path(self._workdir, step)
        with io.report_write_errors(path):
            path.parent.mkdir(exist_ok=True)
            io.write_text(path, "".join(f"## sample {i}\n{t}\n" for i, t in enumerate(texts)))
        if self._tensorboard:
            with io.report_write_errors(self._workdir / TENSORBOARD):
                for i, text in enumerate(texts):
                    self._open_events().text(int(step), f"sample {i}", f"```\n{text}\n```")

    def _open_events(self):
        self._events = self._events or Events(self._workdir / TENSORBOARD, self._purge_from)
        return self._events

    def _start_wandb(self, arguments, resume_step):
        """Start or continue the W&B run.

        W&B cannot drop rows. A resumed run computes the same numbers again, so the steps after
        `resume_step` that W&B has already are not sent again.
        """
        check_wandb(arguments["project"])
        import wandb

        path, identity, last = self._workdir / WANDB_ID_FILE, None, 0
        if resume_step is not None and path.exists():
            identity, last = path.read_text().split()
            # The last launch may have sent fewer steps than the one before it.
            last = max(int(last), self._last["step"])
            self._sent_steps = range(resume_step + 1, last + 1)
        try:
            run = wandb.init(**arguments, dir=str(self._workdir), id=identity, resume="allow")
        except Exception as error:
            raise UsageError(
                f"config.log.wandb={arguments['project']!r}: Weights & Biases did not start "
                f'({first_line(error)}); log in, set WANDB_MODE=offline, or set config.log.wandb=""'
            ) from error
        # A later launch may differ in settings.
        run.config.update(arguments.get("config", {}), allow_val_change=True)
        # The x axis is our step: a late evaluation has a later step of W&B.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        io.write_atomic(path, f"{run.id} {last}\n")
        self._wandb = run


def _replace_end(path, start, line):
    """Replace the bytes of a file from `start` on, also on the disk; an absent file is made."""
    with open(path, "ab") as file:
        file.truncate(start)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _as_number(value):
    """Return a Python int or float of any scalar; a bool becomes an int."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, int) else float(value)
