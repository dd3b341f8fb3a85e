"""Metrics on their way from the device to the host, and their means."""

import math


def as_number(value):
    """Return a Python int or float of any scalar; a bool becomes an int."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, int) else float(value)


class MetricsBuffer:
    """A queue of metrics on the device, fetched one step late.

    The loop pushes the metrics of a step after dispatching it and pops those of earlier steps, so
    the device always has a step to compute while the host waits.
    """

    def __init__(self):
        self._queue = []

    def push(self, step, metrics):
        """Queue {name: scalar device array} and start its copy to the host."""
        for value in metrics.values():
            if hasattr(value, "copy_to_host_async"):
                value.copy_to_host_async()
        self._queue.append((step, metrics))

    def pop_ready(self):
        """Return [(step, {name: number}), ...] of all steps but the newest, oldest first."""
        return self._pop(len(self._queue) - 1)

    def pop_all(self):
        """Return [(step, {name: number}), ...] of all steps; waits for the device."""
        return self._pop(len(self._queue))

    def _pop(self, count):
        count = max(count, 0)
        rows, self._queue = self._queue[:count], self._queue[count:]
        return [(step, {k: as_number(v) for k, v in metrics.items()}) for step, metrics in rows]


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
