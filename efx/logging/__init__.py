"""Numbers out of a run: fetched late, written to metrics.jsonl, TensorBoard, W&B, and shown live.

metrics.jsonl has one JSON object per line, in increasing order of `step`, one line per step. A
value that is not finite is written as null (JSON has no NaN; pandas reads null back as NaN).

Nothing here imports JAX at the top: a notebook may read and plot a run without it.
"""

from efx.logging.buffer import MetricsBuffer, mean_of
from efx.logging.progress import Progress, duration, portion, quantity
from efx.logging.writer import MetricsWriter, read_metrics

__all__ = [
    "MetricsBuffer",
    "MetricsWriter",
    "Progress",
    "duration",
    "mean_of",
    "portion",
    "quantity",
    "read_metrics",
]
