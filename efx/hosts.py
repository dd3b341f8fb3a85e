"""Several processes of one run: how they are connected, and what is said when one of them is lost.

A process that ends takes the others with it, since each of their steps needs all of them. What
they notice first depends on the device: on a CPU a broken connection, which is an exception; on an
accelerator nothing at all, until JAX's runtime misses the heartbeat and aborts the process without
asking Python. So an observer, a process of its own, says the line where this one cannot any more.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback

from efx.errors import PassingError, UsageError

# A process without a sign of life for so long is lost (JAX's default is 100 s). Heartbeats come
# from a thread of the runtime that neither Python nor the device holds up.
HEARTBEAT_SECONDS = 15
# How long a process that fails stays, so that the others, which may fail for the same reason, say
# so themselves before they lose it. Process 0 serves the connection and goes last.
_GRACE_SECONDS = 2
ADVICE = (
    "see the output of the other processes; rerun the same command on all of them to resume "
    "from the newest checkpoint"
)
# The exit status of a process that has lost another: the same command goes on.
LOST = PassingError.status
# What the errors of JAX's runtime say when the other end of a connection is gone.
_SIGNS_OF_LOSS = ("Gloo", "NCCL", "coordination service", "heartbeat", "Connection reset by peer")

_OBSERVER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if not os.read(0, 1):
    print("efx: stopped: " + sys.argv[1], file=sys.stderr, flush=True)
"""
_observer = None  # of this process, while it is connected to others


class NotConnected(PassingError):
    """The other processes of the run did not come."""


def connect(coordinator_address=None, num_processes=None, process_id=None, *, preemption):
    """Connects this process to the others of its run, before a device is touched.

    Without arguments JAX finds the others (Slurm, TPU pods, GKE).

    preemption: whether SIGTERM is a notice that training looks at (`efx.signals`); False, or before
    training if there is one process alone: it ends the process.
    """
    import jax

    global _observer
    jax.config.update("jax_enable_preemption_service", preemption)
    try:
        with _proxies_hidden():
            jax.distributed.initialize(
                coordinator_address,
                num_processes,
                process_id,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            )
    except (ValueError, RuntimeError) as error:
        if coordinator_address is None and "should be defined" in str(error):
            raise UsageError(
                "--distributed found no cluster (Slurm job, TPU pod, GKE JobSet or MPI run); "
                "leave it out, or set --coordinator_address, --num_processes and --process_id"
            ) from error
        address = coordinator_address or "detected by --distributed"
        # Where nobody has given an address, none is wrong: a machine is lost at the start.
        raise (UsageError if coordinator_address else NotConnected)(
            f"the processes could not connect (process 0 is {address}): "
            f"{str(error).splitlines()[0]}"
        ) from error
    if preemption and jax.process_count() == 1:
        # JAX's service has taken SIGTERM, also before training asks for it. Alone, nobody asks the
        # service: the signal ends the process until `efx.signals` catches it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    line = (
        f"process {jax.process_index()} of {jax.process_count()} ended without an error "
        "message: it was killed, or JAX's runtime ended it because another process is lost; "
        f"{ADVICE}"
    )
    # -I -S: nothing is imported, so that it costs no more than a megabyte or two.
    _observer = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _OBSERVER, line],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


@contextlib.contextmanager
def _proxies_hidden():
    """Hide http_proxy and the like, through which gRPC would try to reach the other processes.

    Only while the connection is made, which is kept: downloads may need the proxy.
    """
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if "_proxy" in name.lower()}
    try:
        yield
    finally:
        os.environ.update(hidden)


def connected():
    """Whether `connect` was called."""
    return _observer is not None


def disconnect():
    """Ends the connection when all processes have come to their end."""
    import jax

    global _observer
    jax.distributed.shutdown()
    _observer.communicate(b".")
    _observer = None


def fail(error, status=1):
    """Ends this process, which is connected to others, though they may not know that it failed.

    error: what has not been reported yet, or None. Exit handlers are not run: JAX's waits minutes
      for the others.
    """
    import jax

    if is_loss(error):
        print(f"efx: stopped: another process of the run is lost; {ADVICE}", file=sys.stderr)
        status = LOST
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    _observer.communicate(b".")
    time.sleep(_GRACE_SECONDS * (1 + (jax.process_index() == 0)))
    os._exit(status)


def is_loss(error):
    """Whether the exception says that another process is gone."""
    import jax

    if not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    return any(sign in str(error) for sign in _SIGNS_OF_LOSS)
