"""Runs on fewer than the eight devices that tests have."""

import contextlib

import jax
import pytest


@contextlib.contextmanager
def only(count):
    """Inside of it runs see the first `count` devices alone."""
    devices = jax.devices()[:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: devices)
        patch.setattr(jax, "device_count", lambda: count)
        yield
