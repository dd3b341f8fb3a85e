"""Several processes of one run: their connection, shared directories, and the loss of one of them.

Each step needs all processes, so the loss of one ends the others: with an error of the collective
that waits for it, reported in one line, or by JAX's runtime, which misses its heartbeat and aborts
the process with a message of its own (SIGABRT). Launchers restart both.
"""

import contextlib
import os
import signal
import sys
import time
import traceback

from efx import io
from efx.errors import TransientError, UsageError, first_line

LOST = TransientError.status  # exit status of a process that lost another one
_HEARTBEAT_SECONDS = 15  # until a silent process counts as lost; JAX's default is 100
# A process that fails stays so long, so that the others can report the same error themselves
# before they lose it. Process 0 serves the connection and stays longer.
_GRACE_SECONDS = 2
# In errors of JAX's runtime when the other end of a connection is gone.
_SIGNS_OF_LOSS = ("Gloo", "NCCL", "coordination service", "heartbeat", "Connection reset by peer")
_MARKER = ".shared_"  # beginning of the name of the file that `check_shared` creates
_SHARED_SECONDS = 10  # that a network file system may take to show a new file


def connect(coordinator_address=None, num_processes=None, process_id=None, *, preemption):
    """Connect this process to the others of its run. Call it before JAX touches a device.

    Args: without the first three, JAX detects the cluster (Slurm, TPU pods, GKE).
      preemption: whether `efx.parallel.signals` handles SIGTERM; False: it ends the process.
    Raises: UsageError without a cluster or for a wrong address, TransientError if processes are
      missing in a detected cluster.
    """
    import jax

    jax.config.update("jax_enable_preemption_service", preemption)
    # gRPC would connect through these. Downloads may need them later.
    proxies = {name: os.environ.pop(name) for name in list(os.environ) if "_proxy" in name.lower()}
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        if coordinator_address is None and "should be defined" in str(error):
            raise UsageError(
                "--distributed found no cluster (Slurm job, TPU pod, GKE JobSet or MPI run); "
                "leave it out, or set --coordinator_address, --num_processes and --process_id"
            ) from error
        address = coordinator_address or "detected by --distributed"
        raise (UsageError if coordinator_address else TransientError)(
            f"the processes could not connect (process 0 is {address}): {first_line(error)}"
        ) from error
    finally:
        os.environ.update(proxies)
    if preemption and jax.process_count() == 1:
        # Take SIGTERM back from JAX's service, which `StopSignals` does not use for one process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def connected():
    """Whether this process is connected to others."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def disconnect():
    """Wait for all processes to finish, then close the connection."""
    import jax

    jax.distributed.shutdown()


def fail(error, status=1):
    """Report an error and end this process, which is connected to others.

    Exit handlers are skipped, since JAX's would wait minutes for the other processes.

    Args:
      error: an exception that was not reported yet, or None.
    """
    import jax

    if is_process_loss(error):
        print(
            "efx: stopped: another process of the run is lost; see the output of the other "
            "processes; rerun the same command on all of them to resume",
            file=sys.stderr,
        )
        status = LOST
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_GRACE_SECONDS * (2 if jax.process_index() == 0 else 1))
    os._exit(status)


def is_process_loss(error):
    """Whether an error, or its cause, means that another process of the run is lost."""
    import jax

    while error is not None:
        is_from_jax = isinstance(error, jax.errors.JaxRuntimeError)
        if is_from_jax and any(sign in str(error) for sign in _SIGNS_OF_LOSS):
            return True
        error = error.__cause__ or error.__context__
    return False


def run_on_primary(workdir, action, setting="--workdir"):
    """Run `action` on process 0 and return its result, a non-negative int or None, everywhere.

    If it raises, all processes raise, with the same status for a UsageError.

    Args:
      setting: the flag or setting that holds `workdir`, for messages.
    """
    import jax

    if jax.process_count() == 1:
        return action()
    error, result = None, 0
    if jax.process_index() == 0:
        try:
            result = action() or 0
        except Exception as raised:
            error, result = raised, -2 if isinstance(raised, TransientError) else -1
    result = from_primary(result)
    if error:
        raise error
    if result < 0:
        kind = TransientError if result == -2 else UsageError
        raise kind(f"{setting}={workdir}: process 0 reported an error; see its message")
    return result


def first_process_missing(is_visible, timeout):
    """Return the first process where `is_visible()` stays false for `timeout` seconds, or None.

    All processes have to call this.
    """
    import numpy as np
    from jax.experimental import multihost_utils

    deadline = time.monotonic() + timeout
    while not is_visible() and time.monotonic() < deadline:
        time.sleep(0.2)
    visible = multihost_utils.process_allgather(np.int32(is_visible()))
    return None if np.all(visible) else int(np.argmin(visible))


def check_shared(workdir, setting="--workdir"):
    """Raise UsageError, on all processes, unless they share the directory.

    Process 0 creates a file there, or in the nearest parent that exists, and the others look for
    it.
    """
    import jax

    if jax.process_count() == 1:
        return
    directory = io.folder(workdir, setting)
    # A bucket has no directories to create, and its parents may be forbidden.
    candidates = [directory] if io.is_remote(directory) else [directory, *directory.parents]

    def create_marker():
        number = int.from_bytes(os.urandom(3), "big")
        home = next((path for path in candidates if path.is_dir()), directory)
        with io.report_write_errors(home):
            (home / f"{_MARKER}{number}").write_text("")
        return number

    name = f"{_MARKER}{run_on_primary(workdir, create_marker, setting)}"
    markers = [path / name for path in candidates]
    missing = first_process_missing(lambda: any(m.exists() for m in markers), _SHARED_SECONDS)
    if jax.process_index() == 0:
        for marker in markers:
            with contextlib.suppress(OSError):
                marker.unlink()
    if missing is not None:
        raise UsageError(
            f"{setting}={workdir} is not shared by all processes: process {missing} does not see "
            "the files of process 0; use a directory on a network file system or at "
            "gs://BUCKET/DIRECTORY"
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
