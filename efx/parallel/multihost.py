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

from efx import io
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

_MARK = ".shared_"  # beginning of the file by which processes find out whether they share a folder
_SHARED_SECONDS = 10  # that a network file system may need to show a new file

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

    preemption: whether SIGTERM is a notice that training looks at (`efx.parallel.signals`); False,
    or before training if there is one process alone: it ends the process.
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
        # service: the signal ends the process until `efx.parallel.signals` catches it.
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


def run_on_primary(workdir, action):
    """Run `action` on process 0 and return its result on every process.

    action: returns an int that is not negative, or None. If it raises, all processes raise.
    """
    import jax

    if jax.process_count() == 1:
        return action()
    import numpy as np
    from jax.experimental import multihost_utils

    error, result = None, 0
    if jax.process_index() == 0:
        try:
            result = action() or 0
        except Exception as raised:
            error, result = raised, -1
    result = int(multihost_utils.broadcast_one_to_all(np.int32(result)))
    if error:
        raise error
    if result < 0:
        raise UsageError(f"--workdir={workdir}: process 0 reported an error; see its message")
    return result


def first_process_missing(is_visible, timeout):
    """The index of the first process on which `is_visible()` stays false for `timeout` seconds, or
    None. All processes have to call it."""
    import numpy as np
    from jax.experimental import multihost_utils

    deadline = time.monotonic() + timeout
    while not is_visible() and time.monotonic() < deadline:
        time.sleep(0.2)
    visible = multihost_utils.process_allgather(np.int32(is_visible()))
    return None if np.all(visible) else int(np.argmin(visible))


def check_shared(workdir, setting="--workdir"):
    """Raises UsageError, on all processes, unless all of them see the same folder.

    Process 0 makes a file there for a moment, and the folder if it is absent.
    """
    import jax

    if jax.process_count() == 1:
        return
    folder = io.folder(workdir)

    def make():
        number = int.from_bytes(os.urandom(3), "big")
        with io.report_write_errors(folder):
            # A bucket has no folders to make; who may write there need not be allowed to look at
            # what is above it, the list of all buckets.
            above = () if io.is_remote(folder) else (folder, *folder.parents)
            made = [path for path in above if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            made_by[:] = [folder / f"{_MARK}{number}", *made]
            made_by[0].write_text("")
        return number

    made_by = []  # what process 0 made, to be taken away again
    mark = folder / f"{_MARK}{run_on_primary(workdir, make)}"
    missing = first_process_missing(mark.exists, _SHARED_SECONDS)
    for path in made_by[:1]:
        path.unlink(missing_ok=True)
    for path in made_by[1:]:
        with contextlib.suppress(OSError):  # another launch has made something there
            path.rmdir()
    if missing is not None:
        raise UsageError(
            f"{setting}={workdir} is not shared by all processes: process {missing} does not see "
            "the files of process 0; use a shared folder, on a network file system or at "
            "gs://BUCKET/FOLDER"
        )


def from_primary(value):
    """Return the int or bool of process 0 on every process."""
    import jax

    if jax.process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    return type(value)(multihost_utils.broadcast_one_to_all(np.int32(value)))


def minimum(value):
    """Return the smallest of the ints of all processes."""
    import jax

    if jax.process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    return int(np.min(multihost_utils.process_allgather(np.int32(value))))


def barrier(name):
    """Wait for every process."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
