"""Metrics of a run: metrics.jsonl, TensorBoard, Weights & Biases, samples and the progress line.

metrics.jsonl has one JSON object per line and one line per step, in increasing order. A value that
is not finite is null (JSON has no NaN; pandas reads null as NaN).

No module here imports JAX when it is imported, so that a notebook can read and plot a run without.
"""

from efx.logging.progress import Progress, duration, quantity
from efx.logging.writer import MetricsWriter, read_metrics

__all__ = [
    "MetricsWriter",
    "Progress",
    "duration",
    "quantity",
    "read_metrics",
]
