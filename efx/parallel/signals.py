"""Stopping a run: SIGTERM, SIGHUP, Ctrl-C, the agreement of all hosts, and impatience.

Python handles a signal between two of its own instructions: while the main thread compiles, it does
not. So what takes long is done in a thread beside it (`StopSignals.unless_stopped`), and the second
signal is seen by a thread of its own (`SecondSignal`).
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time

# Windows has no SIGHUP.
STOPPING = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
# The environment variable with the descriptor whose end is that of the process that started this.
ENDS_WITH = "EFX_ENDS_WITH"
# A signal so soon after another one is the same: a closed terminal is told by the system and by the
# shell, and timeout(1) tells the process and then its group.
_SAME_SECONDS = 1.0

_threads = []  # of every `Beside` that may not have ended


def end_at_ctrl_c():
    """Has Ctrl-C end a program that still imports; whether it will.

    There is nothing to save, and Python's own way to handle it, in the middle of an import, gives
    the traceback of that library, or a crash. A program that ignores it, or is not in its main
    thread, is left alone.
    """
    ends = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ends:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return ends


class Interrupted(Exception):
    """A signal came before the work was done."""


class Beside:
    """`work()`, from now on, in a thread beside the one that asks for it. A process that ends does
    not wait for it, see `work_is_left`."""

    def __init__(self, work):
        self._outcome, self._done = None, threading.Event()

        def run():
            try:
                self._outcome = work(), None
            except BaseException as error:
                self._outcome = None, error
            self._done.set()

        thread = threading.Thread(target=run, name="efx-work")
        _threads[:] = [thread, *(other for other in _threads if other.is_alive())]
        thread.start()

    def wait(self, seconds):
        """Whether it is done, at the latest so many seconds from now."""
        return self._done.wait(seconds)

    def result(self):
        """What the work returned, or raises what it raised; waits for it."""
        self._done.wait()
        result, error = self._outcome
        if error is not None:
            raise error
        return result


def end_with_starter():
    """Stops this process by SIGTERM, which saves what there is to save, once the one that started
    it has ended: a study that is killed leaves no run that keeps its folder and its CPUs."""
    if descriptor := os.environ.pop(ENDS_WITH, ""):
        number = int(descriptor)

        def watch():
            with contextlib.suppress(OSError):  # not handed on
                if not os.read(number, 1):
                    os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="efx-starter", daemon=True).start()


class StopSignals:
    """Turns SIGTERM, SIGHUP (a closed terminal) and Ctrl-C into "stop after this step".

    Not before `listen`: until the first step there is nothing to save, and a signal ends the
    process as it does any other. A second one is a KeyboardInterrupt, unless `SecondSignal` comes
    first.

    Several hosts have to stop at the same step. There SIGTERM is left to JAX's preemption service,
    which tells all of them and finds a step that none of them has passed; the other signals become
    SIGTERM.

    A context manager.
    """

    def __init__(self):
        self.name = ""  # of the signal that came
        self._time = 0.0  # when it did
        # Of this launch, since a notice that comes before the first step is for call number 1.
        self._calls = 0
        self._previous_handlers = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def listen(self):
        """Begins to catch signals, unless it has begun already."""
        if self._previous_handlers:
            return
        for number in STOPPING:
            if number.name == "SIGTERM" and _several():
                continue
            # Whoever starts a run with nohup wants it to go on without a terminal.
            if number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
                continue
            with contextlib.suppress(ValueError):  # not in the main thread, as in some notebooks
                self._previous_handlers[number] = signal.signal(number, self._caught)

    def _caught(self, number, frame):
        if self.name:
            if time.monotonic() - self._time > _SAME_SECONDS:
                raise KeyboardInterrupt
            return
        self.name, self._time = signal.Signals(number).name, time.monotonic()
        when = "after a step that all processes agree on" if _several() else "after this step"
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(2, f"{self.name}: saving {when}\n".encode())
        if self.name == "SIGHUP":
            self._forget_terminals()
        if _several():
            os.kill(os.getpid(), signal.SIGTERM)

    def _forget_terminals(self):
        """What is still said goes nowhere: writing to a closed terminal is an error, which would
        end the run before it is saved."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def unless_stopped(self, work):
        """`work()`; Interrupted as soon as a signal has come, and nobody waits for the work then.

        Of several processes each waits: they have to stop at the same step.
        """
        if _several() or not self._previous_handlers:
            return work()
        if self.name:
            raise Interrupted
        beside = Beside(work)
        while not beside.wait(0.1):
            if self.name:
                raise Interrupted
        return beside.result()

    def stop_requested(self):
        """Whether to stop after the step that was just taken; the same answer on every host, each
        of which asks after every step."""
        if not _several():
            return bool(self.name)
        from jax.experimental import multihost_utils

        self._calls += 1
        requested = multihost_utils.reached_preemption_sync_point(self._calls)
        if requested and not self.name:
            self.name = "SIGTERM on one of the hosts"
        return requested


class SecondSignal:
    """Ends the process at once at the second SIGINT, SIGTERM or SIGHUP, whatever it is doing: a
    checkpoint is there whole or not at all, and everything else is made for being killed.

    For a process that is a command; one that has more to do, as a notebook, is not ours to end.
    Signals that Python does not handle end the process at the first time.

    A context manager.
    """

    def __enter__(self):
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        try:
            # Written to by the system's handler itself, also while the main thread is in C++.
            number = self._writer.fileno()
            self._previous = signal.set_wakeup_fd(number, warn_on_full_buffer=False)
        except ValueError:  # not in the main thread
            self._previous = None
        self._thread = threading.Thread(target=self._watch, name="efx-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace):
        if self._previous is not None:
            signal.set_wakeup_fd(self._previous)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _watch(self):
        first = None
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number not in STOPPING:
                    continue
                first = first or time.monotonic()
                if time.monotonic() - first > _SAME_SECONDS:
                    line = f"efx: {signal.Signals(number).name} received again: ending at once\n"
                    with contextlib.suppress(OSError):
                        os.write(2, line.encode())
                    os._exit(128 + number)


def work_is_left():
    """Whether a thread still does what nobody waits for: Python would wait for it at its end."""
    return any(thread.is_alive() for thread in _threads)


def status_without_reader():
    """Exit status of a program that writes to nobody any more, as with `| head`, for the
    BrokenPipeError that it gets then; raises that again where it is of another pipe."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):  # which tells what is wrong with it, and nothing else is asked for
        raise
    # Python would write at its end what it could not write before.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 and the number of SIGPIPE, which ends other programs then


def _several():
    import jax

    return jax.process_count() > 1
