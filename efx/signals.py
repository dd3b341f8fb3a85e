"""Stopping a run: SIGTERM, Ctrl-C, and the agreement of all hosts."""

import contextlib
import signal
import sys

import jax
import numpy as np


class StopSignals:
    """Turns SIGTERM and the first Ctrl-C into "stop after this step"; a second Ctrl-C interrupts.

    Several hosts have to stop at the same step, so they agree on it every few steps.
    """

    _AGREE_EVERY = 10

    def __init__(self):
        self.name = ""

    def __enter__(self):
        self._previous_handlers = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not in the main thread, as in some notebooks
                self._previous_handlers[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _caught(self, number, frame):
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        print(f"{self.name}: saving after this step", file=sys.stderr, flush=True)

    def stop_requested(self, step):
        """Whether to stop after `step`; the same answer on every host."""
        if jax.process_count() == 1:
            return bool(self.name)
        if step % self._AGREE_EVERY:
            return False
        from jax.experimental import multihost_utils

        requested = bool(np.any(multihost_utils.process_allgather(np.int32(bool(self.name)))))
        if requested and not self.name:
            self.name = "another host"
        return requested
