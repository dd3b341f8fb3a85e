"""Processes that end in time, and with the one that started them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

# Linux tells a process of its parent's end, also of one that gets no chance to say goodbye.
_WITH_ITS_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Late(Exception):
    """The time of a process was up, and it has been ended."""


def run(command, deadline, grace=60.0, **options):
    """Exit status of a process.

    At the deadline, on the clock `time.monotonic`, and where this process itself is asked to end,
    it and those that it started are asked to end; what is left after so many seconds of grace is
    killed. Late: after the deadline. options: of `subprocess.Popen`.
    """
    command = list(map(str, command))
    if sys.platform == "linux":
        command = [sys.executable, "-c", _WITH_ITS_PARENT, *command]
    with _asked_to_end():
        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            return process.wait(max(1.0, deadline - time.monotonic()))
        except BaseException as error:
            _end_group(process, grace)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Late from None
            raise


@contextlib.contextmanager
def _asked_to_end():
    """SIGTERM raises SystemExit here. Elsewhere it ends a process at once, also one that computes
    or compiles, where nothing raised in Python would be noticed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_group(process, grace):
    """SIGTERM to all processes of a group, and SIGKILL to what is left of it after the grace."""
    number, last_call = signal.SIGTERM, time.monotonic() + grace
    try:
        os.killpg(process.pid, number)
        while True:
            process.poll()  # one that has ended belongs to its group until it is asked for
            time.sleep(0.2)
            if time.monotonic() > last_call:
                number = signal.SIGKILL
            os.killpg(process.pid, number if number == signal.SIGKILL else 0)
    except ProcessLookupError:
        process.wait()
