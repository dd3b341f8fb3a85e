"""Benchmarks: `python -m benchmarks.step` and others; each docstring says what is measured."""

import efx.studies  # noqa: F401  # reports a missing extra, which is the same
