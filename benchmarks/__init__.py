"""Benchmarks: `python -m benchmarks.step` and others; each docstring says what is measured."""

from efx.parallel.host_memory import keep_freed_memory

keep_freed_memory()  # as efx.main, before a library starts a thread

# ruff: noqa: E402
import efx.studies  # noqa: F401  # reports a missing extra, which is the same
