"""Errors of checkpoints, each in one line, and the log records of orbax that they replace."""

import contextlib
import errno
import functools
import logging
import os
import sys
import warnings

from absl import logging as absl_logging

from efx import io
from efx.errors import TransientError, UsageError, first_line
from efx.parallel import multihost

_SHOWN = 4  # differing arrays in a message before "and N more"
# Of a full or protected disk: a rerun meets the same error.
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_STATUSES_OF_STORES = ("UNAVAILABLE:", "DEADLINE_EXCEEDED:")  # in errors of TensorStore


class CheckpointError(UsageError):
    """A checkpoint cannot be written, read or used."""


class TransientCheckpointError(CheckpointError, TransientError):
    """A checkpoint cannot be written or read now; the same command may succeed later."""


class Damage(Exception):
    """A file of a checkpoint differs from its manifest; the message names the file."""


def abridged(lines):
    """Join the first few lines and count the others."""
    suffix = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + suffix


@contextlib.contextmanager
def read_errors(name):
    """Raise any exception of orbax, which raises bare `Exception` too, as a CheckpointError.

    Args:
      name: of the checkpoint, for the message.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if is_transient(error):
            raise TransientCheckpointError(
                f"{name} cannot be read: {describe(error)}; fix this and rerun the command"
            ) from error
        raise CheckpointError(
            f"{name} cannot be read, but its checksums are right: {describe(error)}; use a "
            "version of efx and orbax that can read it"
        ) from error


def save_error(step, root, error):
    """Return the CheckpointError of a save that failed with any exception."""
    number = getattr(_os_error(error), "errno", None)
    # Other errors of an object store come from its client, usually from the network.
    from_client = io.is_remote(root) and number not in _LASTING
    kind = TransientCheckpointError if from_client or is_transient(error) else CheckpointError
    return kind(
        f"checkpoint {step} could not be saved in {root}: {describe(error)}; fix this and rerun "
        "the command to resume from the previous checkpoint"
    )


def is_transient(error):
    """Whether the network, a file server, a store or another process of the run failed."""
    number = getattr(_os_error(error), "errno", None)
    if number in _LASTING:
        return False
    return (
        number in io.TRANSIENT
        or io.is_transient(error)
        or multihost.is_process_loss(error)
        or any(status in str(error) for status in _STATUSES_OF_STORES)
    )


def describe(error):
    """Describe the cause of an exception in a few words."""
    if cause := _os_error(error):
        return io.describe_os_error(cause) + (f" ({cause.filename})" if cause.filename else "")
    return first_line(error)


def _os_error(error):
    """Return the OSError that caused an exception, or None; TensorStore reports it as text."""
    text = str(error)
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error
        error = error.__cause__ or error.__context__
    for number in (*_LASTING, *io.TRANSIENT):
        if os.strerror(number) in text:
            return OSError(number, os.strerror(number))
    return None


@functools.cache
def silence_orbax():
    """Hide tracebacks of orbax's threads: efx reports a failed save in one line.

    --verbosity=1 shows the log records.
    """

    def is_shown(record):
        return absl_logging.get_verbosity() > 0 or not (
            record.name == "asyncio" or os.path.join("orbax", "checkpoint") in record.pathname
        )

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_shown)
    # Left over from the other files that were being written when one of them failed.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    print_unraisable = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            print_unraisable(unraisable)

    sys.unraisablehook = hook
