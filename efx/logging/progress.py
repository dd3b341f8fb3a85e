"""The terminal of a run, and numbers as text."""

import contextlib
import datetime
import os
import sys
import textwrap
import time

from efx.errors import is_primary

_REFRESHES_PER_SECOND = 4


def is_live(stream):
    """Whether lines of a stream can be drawn again: a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


class Progress:
    """Lines that stay and, in a terminal, a live one below them. A context manager.

    The live line shows the step, and a spinner in a `phase`; it disappears at the end. Elsewhere
    there are only plain lines. Only process 0 prints.

    Args:
      total: last step of the run, or number of runs of a study; 0: there is no bar.
      stream: default: standard output.
    """

    def __init__(self, total=0, *, stream=None):
        self._total, self._stream = int(total), stream or sys.stdout
        self._first = None  # (step, time) of the first update
        self._values = ""  # of the newest row
        self.is_live, self._live = False, None
        self._steps = self._phases = None
        self._is_active = is_primary()

    def __enter__(self):
        if self._is_active and is_live(self._stream):
            self._start_live()
        return self

    def _start_live(self):
        from rich import progress
        from rich.console import Console, Group
        from rich.live import Live
        from rich.table import Column

        # A narrow terminal cuts off the last values.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._steps = progress.Progress(
            progress.BarColumn(bar_width=12),
            progress.TextColumn("{task.description}", markup=False, table_column=rest),
            expand=True,
        )
        self._phases = progress.Progress(
            progress.SpinnerColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}", markup=False, table_column=rest),
            expand=True,
        )
        self._live = Live(
            Group(self._steps, self._phases),
            console=Console(file=self._stream),
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            # Lines that others print to this terminal go above the live one.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        self.is_live = True

    def __exit__(self, kind, error, trace):
        if self.is_live:
            self._live.stop()
            self.is_live = False

    def update(self, step, row=None):
        """Show the position of the run after a step.

        Args:
          row: metrics, {name: number}, for a line that stays; None: only the live line changes.
        """
        if not self._is_active:
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        if row is not None:
            self._values = describe_row(row)
        first_step, start = self._first
        parts = [f"step {step}/{self._total}"]
        if first_step < step < self._total:
            left = (self._total - step) * (now - start) / (step - first_step)
            parts.append(f"{duration(left)} left")
        line = "  ".join([*parts, self._values])
        if row is not None:
            self.println(line)
        self.show(step, line)

    def show(self, completed, text):
        """Draw the bar and the text of the live line; without one nothing happens."""
        if not self.is_live:
            return
        if not self._steps.task_ids:
            self._steps.add_task(text, total=self._total)
        self._steps.update(self._steps.task_ids[0], completed=completed, description=text)

    @contextlib.contextmanager
    def phase(self, text, is_logged=False):
        """Context in which the terminal shows a spinner, a text and the elapsed time.

        Args:
          is_logged: whether the text is a line where there is no live line.

        Yields: a function that replaces the text beside the spinner.
        """
        if not self.is_live:
            if is_logged:
                self.println(text)
            yield lambda text: None
            return
        task = self._phases.add_task(text, total=None)
        try:
            yield lambda text: self._phases.update(task, description=text)
        finally:
            self._phases.remove_task(task)

    def println(self, text, style=""):
        """Print a text on its own line or lines, above the live one.

        Args:
          style: of rich, such as "bold", for terminals.
        """
        if not self._is_active:
            return
        text = printable(text)
        if self.is_live:
            from rich.text import Text

            self._live.console.print(Text(text, style), soft_wrap=True)
        else:
            with contextlib.suppress(BrokenPipeError):  # a run continues without a reader
                print(text, file=self._stream, flush=True)

    def print_sample(self, title, text):
        """Print a sampled text, set apart from the lines of the run."""
        if self.is_live:
            from rich.panel import Panel
            from rich.text import Text

            panel = Panel(Text(printable(text)), title=title, title_align="left", style="dim")
            self._live.console.print(panel)
        else:
            lines = textwrap.indent(printable(text), "  | ", lambda line: True)
            self.println(f"{title}:\n{lines}")


def describe_row(row):
    """Return the values of a row of training metrics in one line, the most watched ones first."""
    parts = [
        f"loss {row['train/loss']:.4f}",
        quantity(row["tokens_per_second"], "tokens/s"),
    ]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    if "device_memory" in row:
        parts.append(f"memory {row['device_memory'] / 2**30:.1f} GiB")
    parts.append(f"rate {row['train/learning_rate']:.2e}")
    parts.append(f"gradient norm {row['train/grad_norm']:.2f}")
    if "epochs" in row:
        parts.append(f"epoch {row['epochs']:.2f}")
    return "  ".join(parts)


def printable(text):
    """Return a text with escapes for control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def quantity(value, unit=""):
    """Return three digits and a unit: "247k parameters", "26.3 TFLOPs".

    FLOPs have the prefixes of the SI; other units are counted in thousands, millions, billions and
    trillions.
    """
    is_symbol = unit in ("FLOPs", "FLOP/s")
    number, prefix = f"{value:.3g}", ""
    for letter in "kMGTPEZY" if is_symbol else "kMBT":
        if abs(value) < 999.5:  # 999.5 rounds to four digits
            break
        value, prefix = value / 1000, letter
        number = f"{value:#.3g}".rstrip(".")
    return f"{number} {prefix}{unit}" if is_symbol else f"{number}{prefix} {unit}".rstrip()


def duration(seconds):
    """Return seconds as H:MM:SS, with days from one day on."""
    return str(datetime.timedelta(seconds=round(seconds)))
