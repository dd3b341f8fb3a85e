"""The programs of a config's run, compiled for accelerators that are not there: `--mode=compile`.

What a run would need and do on a TPU slice or on GPUs is read off the compiled programs: whether
they fit, what they communicate, which kernels they have, and an estimate of how long they take. The
training step comes first, then what evaluates and samples in the training.
"""

from efx.ahead_of_time.compile import compile_and_report
from efx.ahead_of_time.report import Report

__all__ = ["Report", "compile_and_report"]
