"""The progress line of a run, and numbers as text."""

import contextlib
import datetime
import math
import sys
import time

from efx.errors import is_primary

_LIVE_SECONDS = 0.1  # between two updates of the line in a terminal


class Progress:
    """One live line in a terminal; elsewhere a plain line from time to time. A context manager.

    Only process 0 prints.

    Args:
      total: last step of the run.
      peak_flops_per_second: of all devices, for the MFU; 0: unknown.
      stream: default: standard output.
      plain_seconds: time between two plain lines.
    """

    def __init__(self, total, *, peak_flops_per_second=0.0, stream=None, plain_seconds=10.0):
        self._total = int(total)
        self._peak = peak_flops_per_second
        self._stream = stream or sys.stdout
        self._seconds = plain_seconds
        self._first = None  # (step, time) of the first update
        self._shown = -math.inf  # time of the last one that was shown
        self._live = None  # rich's display of the line in a terminal
        self._is_active = is_primary()

    def __enter__(self):
        if self._is_active and self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._seconds = _LIVE_SECONDS
            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, kind, error, trace):
        if self._live:
            self._live.stop()
            self._live = None

    def update(self, step, *, loss=None, tokens_per_second=None, flops=None, flops_per_second=None):
        """Show the position of the run after a step, unless the line was updated just before.

        Args:
          loss: in nats. flops: of the run so far. None: not shown.
        """
        now = time.monotonic()
        self._first = self._first or (step, now)
        if not self._is_active or (step < self._total and now - self._shown < self._seconds):
            return
        self._shown = now
        parts = [f"step {step}/{self._total}"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        first_step, start = self._first
        if first_step < step < self._total:
            left = (self._total - step) * (now - start) / (step - first_step)
            parts.append(f"{duration(left)} left")
        if tokens_per_second is not None:
            parts.append(quantity(tokens_per_second, "tokens/s"))
        if flops_per_second is not None and self._peak:
            parts.append(f"MFU {100 * flops_per_second / self._peak:.1f}%")
        if flops_per_second is not None:
            parts.append(quantity(flops_per_second, "FLOP/s"))
        if flops is not None:
            parts.append(quantity(flops, "FLOPs"))
        line = "  ".join(parts)
        if self._live:
            from rich.text import Text

            # A narrow terminal cuts off the last parts.
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self.println(line)

    def println(self, text):
        """Print a text on its own line or lines, above the live one."""
        if not self._is_active:
            return
        if self._live:
            from rich.text import Text

            self._live.console.print(Text(text), soft_wrap=True)
        else:
            with contextlib.suppress(BrokenPipeError):  # a run continues without a reader
                print(text, file=self._stream, flush=True)


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
