"""Stopping a run: SIGTERM, Ctrl-C, and the agreement of all hosts."""

import contextlib
import os
import signal
import sys

import jax


class StopSignals:
    """Turns SIGTERM and the first Ctrl-C into "stop after this step"; a second Ctrl-C interrupts.

    Several hosts have to stop at the same step. There SIGTERM is left to JAX's preemption service,
    which tells all of them and finds a step that none of them has passed; Ctrl-C becomes SIGTERM.
    """

    def __init__(self):
        self.name = ""
        # Of this launch, since a notice that comes before the first step is for call number 1.
        self._calls = 0

    def __enter__(self):
        several = jax.process_count() > 1
        self._previous_handlers = {}
        for number in (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT):
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
        several = jax.process_count() > 1
        when = "after a step that all processes agree on" if several else "after this step"
        print(f"{self.name}: saving {when}", file=sys.stderr, flush=True)
        if several:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_requested(self):
        """Whether to stop after the step that was just taken; the same answer on every host, each
        of which asks after every step."""
        if jax.process_count() == 1:
            return bool(self.name)
        from jax.experimental import multihost_utils

        self._calls += 1
        requested = multihost_utils.reached_preemption_sync_point(self._calls)
        if requested and not self.name:
            self.name = "SIGTERM on one of the hosts"
        return requested
