"""The line that shows where a run stands."""

import contextlib
import math
import sys
import time


def is_primary():
    """Whether this process writes files and prints: process 0, or any process without JAX."""
    if "jax" not in sys.modules:
        return True
    import jax

    return jax.process_index() == 0


class Progress:
    """One live line about a run in a terminal; elsewhere a plain line now and then.

    Args:
      total: the run's last step.
      peak_flops_per_second: of all devices together, for the MFU; 0 if unknown (no MFU then).
      stream: where to write (default: standard output at the time of the call).
      plain_seconds: minimum time between two plain lines.

    A context manager. On processes other than 0 nothing is shown.
    """

    _LIVE_SECONDS = 0.1  # minimum time between two redraws of the live line
    # What a line that is wider than the terminal goes without, the first of these first.
    _LEFT_OUT = ("flops", "flops_per_second", "mfu", "tokens_per_second")

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
        minimum = self._LIVE_SECONDS if self._live is not None else self._plain_seconds
        if step < self._total and now - self._shown < minimum:
            return
        self._shown = now
        fields = {"step": f"step {step}/{self._total}"}
        if loss is not None:
            fields["loss"] = f"loss {loss:.4f}"
        if tokens_per_second is not None:
            fields["tokens_per_second"] = quantity(tokens_per_second, "tokens/s")
        if flops is not None:
            fields["flops"] = quantity(flops, "FLOPs")
        if flops_per_second is not None:
            fields["flops_per_second"] = quantity(flops_per_second, "FLOP/s")
            if self._peak:
                fields["mfu"] = f"MFU {100 * flops_per_second / self._peak:.1f}%"
        since, start = self._first
        if since < step < self._total:
            seconds_left = (self._total - step) * (now - start) / (step - since)
            fields["left"] = f"{duration(seconds_left)} left"
        self._show(fields)

    def _show(self, fields):
        line = "  ".join(fields.values())
        if self._live is None:
            self._print(line)
            return
        from rich.text import Text

        width = self._live.console.width
        for name in self._LEFT_OUT:
            if len(line) > width:
                fields.pop(name, None)
                line = "  ".join(fields.values())
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self, text):
        with contextlib.suppress(BrokenPipeError):  # a run goes on when nobody reads what it says
            print(text, file=self._stream, flush=True)

    def println(self, text):
        """Prints `text` on its own line or lines, above the live one."""
        if not self._active:
            return
        if self._live is None:
            self._print(text)
            return
        from rich.text import Text

        self._live.console.print(Text(text), soft_wrap=True)


# Units that are symbols and take the prefixes of the SI; the others are words.
_SYMBOLS = ("FLOPs", "FLOP/s")


def quantity(value, unit=""):
    """Three digits and a unit, as people read them: "247k parameters", "26.3 TFLOPs".

    Units that are words are counted in thousands, millions, billions and trillions.
    """
    symbol = unit in _SYMBOLS
    number, prefix = f"{value:.3g}", ""
    for i, letter in enumerate("kMGTPEZ" if symbol else "kMBT", 1):
        # 0.9995 and more would be rounded up to a thousand of the prefix below.
        if abs(value) >= 0.9995 * 1000**i:
            scaled = value / 1000**i
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            number, prefix = f"{scaled:.{digits}f}", letter
    return f"{number} {prefix}{unit}" if symbol else f"{number}{prefix} {unit}".rstrip()


def portion(fractions):
    """The text that held-out losses are taken over, as words: "whole held-out split".

    If `config.evaluate.max_batches` limited it, "25% of the held-out split"; of runs that differ
    "25% to 100% of ...". A fraction is None for a run that did not record it.
    """
    if None in fractions:
        return "held-out split"
    low, high = min(fractions), max(fractions)
    if low == 1:
        return "whole held-out split"
    upper = f" to {100 * high:.3g}%" if high > low else ""
    return f"{100 * low:.3g}%{upper} of the held-out split"


def duration(seconds):
    """Seconds as H:MM:SS, with days in front from one day on."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days} d ' if days else ''}{hours}:{minutes:02}:{seconds:02}"
