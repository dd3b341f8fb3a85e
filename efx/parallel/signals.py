"""Stop a run on SIGINT, SIGTERM or SIGHUP: save after the current step, on all hosts at the same.

Python runs signal handlers between two instructions: a signal waits for the end of a compilation.
"""

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# timeout(1) signals the process and then its group; a closed terminal sends SIGHUP twice.
_REPEATED_SECONDS = 1.0


class StopSignals:
    """Turn the first signal into a request to stop after the current step.

    `listen` starts to catch signals; before it, there is nothing to save and signals end the
    process. So does a second signal, except that Ctrl-C outside of a script (in a notebook) raises
    KeyboardInterrupt.

    Several hosts have to stop at the same step. SIGTERM is then left to JAX's preemption service,
    which picks a step that no host has passed; the other signals become SIGTERM.

    A context manager.
    """

    def __init__(self):
        self.name = ""  # of the first signal
        self._sync_point = 0
        self._previous = {}  # signal: the handler before `listen`
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def listen(self):
        """Start to catch signals, if this is the main thread."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number in STOPPING:
            is_for_jax = number == signal.SIGTERM and _has_other_hosts()
            under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not is_for_jax and not under_nohup:
                self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number, frame):
        """Record the first signal; from a second later on, the next one ends the process."""
        self.name = signal.Signals(number).name
        when = "a step that all processes agree on" if _has_other_hosts() else "this step"
        with contextlib.suppress(OSError):  # the terminal is closed
            os.write(2, f"{self.name}: saving after {when}\n".encode())
        if number == signal.SIGHUP:
            self._leave_terminal()
        if _has_other_hosts():
            os.kill(os.getpid(), signal.SIGTERM)
        for caught in self._previous:
            signal.signal(caught, lambda number, frame: None)
        time.sleep(_REPEATED_SECONDS)
        is_script = hasattr(sys.modules["__main__"], "__file__")
        for caught, previous in self._previous.items():
            is_ours = is_script or caught != signal.SIGINT
            signal.signal(caught, signal.SIG_DFL if is_ours else previous)

    def _leave_terminal(self):
        """Send later output to /dev/null: writing to a closed terminal is an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)

    def stop_requested(self):
        """Whether to stop after this step. Every host has to call this after every step, and all
        get the same answer."""
        if not _has_other_hosts():
            return bool(self.name)
        from jax.experimental import multihost_utils

        self._sync_point += 1
        requested = multihost_utils.reached_preemption_sync_point(self._sync_point)
        if requested and not self.name:
            self.name = "SIGTERM on one of the hosts"
        return requested


def _has_other_hosts():
    import jax

    return jax.process_count() > 1


def end_at_ctrl_c():
    """Let Ctrl-C end the process without a traceback, during imports; return whether it will."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return True


def repeat_ignored_interrupt(ignored):
    """A `sys.unraisablehook`: repeat a Ctrl-C that arrived in a callback, such as JAX's of the
    garbage collector, where Python ignores exceptions."""
    if ignored.exc_type is KeyboardInterrupt:
        threading.Timer(0.1, _thread.interrupt_main).start()  # after the callback
    else:
        sys.__unraisablehook__(ignored)


def status_without_reader():
    """Return the exit status after a BrokenPipeError of stdout, as with `| head`. Raise the error
    again if it came from another pipe."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):  # reports errors and hang-ups only
        raise
    # Python would write the buffered output at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
