"""The training step of a config, compiled for accelerators that are not there: `--mode=compile`.

What a run would need and do on a TPU slice or on GPUs is read off the compiled program: whether it
fits, what it communicates, which kernels it has, and an estimate of how long a step takes.
"""

from efx.ahead_of_time.compile import compile_and_report
from efx.ahead_of_time.report import Report

__all__ = ["Report", "compile_and_report"]
