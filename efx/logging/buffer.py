"""Device-side metrics on their way to the host, and their means."""

import math


def as_number(value):
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
    return [(step, {k: as_number(v) for k, v in metrics.items()}) for step, metrics in rows]


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
