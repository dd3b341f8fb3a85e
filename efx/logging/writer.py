"""Scalars and text of a run to files: metrics.jsonl, samples/, TensorBoard, Weights & Biases."""

import contextlib
import importlib.util
import json
import logging
import math
import os
import pathlib
import sys

from efx import io
from efx.errors import UsageError, extra
from efx.logging.buffer import as_number
from efx.logging.events import Events
from efx.logging.progress import is_primary
from efx.run_dir import METRICS_FILE, Home

_log = logging.getLogger(__name__)
WANDB_ID_FILE = "wandb_id"  # the id of the W&B run, and the last step that was sent to it
_LONGEST_ROW = 16 << 20  # bytes; a row has some hundred numbers
SAMPLES = "samples"
TENSORBOARD = "tensorboard"
WRITTEN = (METRICS_FILE, SAMPLES, WANDB_ID_FILE)  # what a launch that goes on needs of the last


def read_metrics(workdir):
    """The rows of a run's metrics.jsonl as a list of dicts; a torn last line is left out."""
    path = io.folder(workdir) / METRICS_FILE
    try:
        return [row for row, _, _ in _rows(path)]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {io.describe_os_error(error)}") from error


def samples_path(workdir, step):
    """samples/step_0000000N.txt of a run, zero-padded so that names sort by step."""
    return workdir / SAMPLES / f"step_{int(step):08d}.txt"


def check_wandb(project):
    """UsageError unless there is the library that `config.log.wandb` needs. It is not imported,
    which takes a second."""
    name = "wandb"
    if (sys.modules[name] if name in sys.modules else importlib.util.find_spec(name)) is None:
        raise UsageError(
            f"config.log.wandb={project!r}: wandb is not installed; install {extra('wandb')}, "
            'or set config.log.wandb=""'
        )


def _rows(path):
    """Yields (row, its first byte, the byte after it) for each complete line of a metrics file.

    A last line that is no row is the write that was under way when the process died. It may end in
    a newline, because extending a row overwrites a complete line.
    """
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_ROW), b""), 1):
            try:
                if len(line) == _LONGEST_ROW:
                    raise ValueError("a line without a line break")
                row = json.loads(line)
                if type(row["step"]) is not int:
                    raise ValueError(f"step {row['step']!r}")
                if not line.endswith(b"\n"):
                    return
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if not file.read(1):
                    return
                raise UsageError(
                    f"{path} line {number} is not a metrics row; restore the file, or delete that"
                    " line"
                ) from error
            yield row, offset, offset + len(line)
            offset += len(line)


class MetricsWriter:
    """Writes scalars and text of one run; on processes other than 0 every call does nothing.

    Args:
      workdir: run folder (must exist).
      tensorboard: write event files to workdir/tensorboard.
      wandb: arguments of `wandb.init`, `project` among them; None: nothing goes to Weights &
        Biases. The run id is kept in workdir/wandb_id, so a resumed run continues the same W&B run.
      resume_step: the step that the run resumes from; None for a new run in the folder of an
        earlier one: it gets a new W&B run.

    A context manager. No existing file is changed before the first call. Raises UsageError when a
    file cannot be written or an extra is missing.
    """

    def __init__(self, workdir, *, tensorboard, wandb=None, resume_step=math.inf):
        self._workdir = pathlib.Path(workdir)
        self._path = self._workdir / METRICS_FILE
        self._home = Home(self._workdir)
        self._tensorboard = tensorboard
        self._events = None  # opened at the first write, when the step to purge from is known
        self._purge_from = None
        self._wandb = None
        self._wandb_skips = ()  # steps that W&B has already
        self._wandb_sent = 0  # the last step that was sent
        self._last = None  # (row, first byte) of the last line in the file
        self._size = 0  # bytes in the file
        self._file = None  # descriptor of metrics.jsonl; made at the first write if absent
        self._ready = False  # whether it ends with the last row to keep
        self._active = is_primary()
        if not self._active:
            return
        with io.report_write_errors(self._path):
            if self._path.exists():
                self._find(math.inf)
                self._file = os.open(self._path, os.O_RDWR)
            else:
                os.stat(self._workdir)
        if wandb:
            self._open_wandb(wandb, resume_step)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # An error that is being raised already is the one to report.
        with contextlib.suppress(*([UsageError] if kind else [])):
            self.close()

    def close(self):
        """Flushes and closes everything. A closed writer ignores further calls."""
        file, events, wandb = self._file, self._events, self._wandb
        self._file = self._events = self._wandb = None
        self._active = False
        if file is not None:
            os.close(file)
        if wandb is not None:
            wandb.finish()
        if events is not None:
            with io.report_write_errors(self._workdir / TENSORBOARD):
                events.close()

    def truncate_after(self, step):
        """Drop all rows and samples after `step`, so that a run resumed there has one line a step;
        TensorBoard hides its events of them. Call it before the first write."""
        if not self._active:
            return
        if self._path.exists():
            self._find(step)
        self._make_ready()
        with io.report_write_errors(self._workdir / SAMPLES):
            for path in (self._workdir / SAMPLES).glob("step_*.txt"):
                number = path.stem.removeprefix("step_")
                if number.isdecimal() and int(number) > step:
                    path.unlink()
        self._purge_from = step + 1

    def _find(self, step):
        """Finds the end of the last complete line at or before `step`."""
        self._last, self._size = None, 0
        for row, start, end in _rows(self._path):
            if row["step"] > step:
                break
            self._last, self._size = (row, start), end

    def _make_ready(self):
        """Makes metrics.jsonl, or truncates it after the last row to keep."""
        with io.report_write_errors(self._path):
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._file, self._size)
        self._ready = True

    def write(self, step, scalars):
        """Adds {name: number} to the row of `step` and puts it on disk at once.

        Numbers are Python or numpy scalars, or device scalars (which are waited for; fetch those
        with MetricsBuffer instead). A second call for the last step extends its line. Steps may not
        go back: ValueError, unless truncate_after() made room.
        """
        if not self._active:
            return
        if not self._ready:
            self._make_ready()
        step = int(step)
        values = {name: as_number(value) for name, value in scalars.items()}
        row, start = {"step": step}, self._size
        if self._last is not None:
            if self._last[0]["step"] > step:
                raise ValueError(
                    f"metrics of step {step} were logged after those of step "
                    f"{self._last[0]['step']}"
                )
            if self._last[0]["step"] == step:
                row, start = dict(self._last[0]), self._last[1]
        row.update({k: v if math.isfinite(v) else None for k, v in values.items()})
        line = json.dumps(row).encode()
        # An extended line overwrites the old one in place and is never shorter, so that a crash
        # leaves at worst a torn last line, which the next run drops.
        line = line.ljust(self._size - start - 1) + b"\n"
        with io.report_write_errors(self._path):
            self._home.check()
            _write_at(self._file, start, line)
        self._last, self._size = (row, start), start + len(line)
        if self._tensorboard:
            with io.report_write_errors(self._workdir / TENSORBOARD):
                self._open_events().scalars(step, values)
        if self._wandb is not None and step not in self._wandb_skips:
            self._send_to_wandb(step, values)

    def write_samples(self, step, texts):
        """Write texts to `samples_path`, all or none of them; also to TensorBoard."""
        if not self._active:
            return
        path = samples_path(self._workdir, step)
        with io.report_write_errors(path):
            self._home.check()
            path.parent.mkdir(exist_ok=True)
            sections = [f"## sample {i}\n{text}\n" for i, text in enumerate(texts)]
            io.write_text(path, "".join(sections))
        if self._tensorboard:
            with io.report_write_errors(self._workdir / TENSORBOARD):
                for i, text in enumerate(texts):
                    self._open_events().text(int(step), f"sample {i}", f"```\n{text}\n```")

    def _open_events(self):
        if self._events is None:
            self._events = Events(self._workdir / TENSORBOARD, self._purge_from)
        return self._events

    def _open_wandb(self, arguments, resume_step):
        """Start the W&B run, or resume it without the rows after `resume_step`. Where W&B cannot
        drop these, it keeps them, and their steps are not sent again."""
        check_wandb(arguments["project"])
        import wandb

        identity, sent = self._read_wandb_id() if resume_step is not None else (None, None)
        # Earlier versions recorded no step, and numbered the steps of W&B otherwise.
        last = sent if sent is not None or self._last is None else self._last[0]["step"]
        self._wandb_sent = last or 0
        arguments = {**arguments, "dir": str(self._workdir)}
        run = None
        if identity and self._wandb_sent > resume_step:
            if sent is not None and wandb.setup().settings.mode == "online":
                run = self._rewound(wandb, arguments, identity, resume_step)
            if run is None:
                self._wandb_skips = range(resume_step + 1, self._wandb_sent + 1)
                _log.warning(
                    "Weights & Biases has steps up to %d of this run and cannot drop those after"
                    " step %d: steps %d to %d are not sent to it again",
                    self._wandb_sent,
                    resume_step,
                    resume_step + 1,
                    self._wandb_sent,
                )
        try:
            run = run or wandb.init(**arguments, id=identity, resume="allow")
        except Exception as error:
            raise UsageError(
                f"config.log.wandb={arguments['project']!r}: Weights & Biases did not start "
                f"({str(error).splitlines()[0]}); log in, set WANDB_MODE=offline, or set "
                'config.log.wandb=""'
            ) from error
        # A later launch may differ in settings that do not bind the run.
        run.config.update(arguments.get("config", {}), allow_val_change=True)
        # Our own `step` is the x axis, since a late evaluation has another step of W&B.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._wandb = run
        self._keep_wandb_id()

    def _rewound(self, wandb, arguments, identity, resume_step):
        """The W&B run without the rows after `resume_step`; None from a server without rewind."""
        steps = [row["step"] for row, _, _ in _rows(self._path)] if self._last else []
        kept = max((step for step in steps if step <= resume_step), default=0)
        try:
            run = wandb.init(**arguments, resume_from=f"{identity}?_step={kept}")
        except Exception:
            return None
        self._wandb_sent = kept
        return run

    def _send_to_wandb(self, step, values):
        if step > self._wandb_sent:
            # Recorded first: a row that a crash keeps from W&B is missing there, and none is twice.
            self._wandb_sent = step
            self._keep_wandb_id()
        # The step of W&B cannot go back, and after a resume it is past the last row. An evaluation
        # that the last launch left undone is of that row.
        self._wandb.log({"step": step, **values}, step=max(step, self._wandb.step))

    def _read_wandb_id(self):
        """(id of the W&B run, last step that was sent to it), each None if it was not recorded."""
        path = self._workdir / WANDB_ID_FILE
        words = path.read_text(encoding="utf-8").split() if path.is_file() else []
        identity, step = [*words, None, None][:2]
        return identity, int(step) if step and step.isdecimal() else None

    def _keep_wandb_id(self):
        path = self._workdir / WANDB_ID_FILE
        # Not `write_atomic`, which waits for the disk: this runs at each logged row.
        with io.report_write_errors(path), io.replacing(path) as part:
            part.write_text(f"{self._wandb.id}\n{self._wandb_sent}\n", encoding="utf-8")


def _write_at(descriptor, offset, data):
    while data:
        count = os.pwrite(descriptor, data, offset)
        offset, data = offset + count, data[count:]
