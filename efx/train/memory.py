"""The one line for a device that ran out of memory."""

import contextlib
import re

import jax

from efx.errors import UsageError

# XLA's messages on CPUs, GPUs and TPUs. A kernel that needs more shared memory, or more of a TPU's
# vector memory, than the device has fails at any batch size.
_FULL = re.compile(
    r"out of memory (?:while|trying|allocating)|out of memory in memory space hbm|"
    r"failed to allocate|attempting to (?:allocate|reserve)|exceeds available hbm",
    re.IGNORECASE,
)
_LONGEST_REASON = 200  # characters of an error of XLA, which may list all buffers


@contextlib.contextmanager
def exhaustion_as_usage_error(work, advice):
    """Raise UsageError, one line, where a device runs out of memory inside.

    Args:
      work: a noun phrase for the code inside, such as "evaluation". advice: settings to change.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _FULL.search(str(error)):
            raise
        reason = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        raise UsageError(
            f"{work} ran out of memory ({reason[:_LONGEST_REASON].rstrip('. ')}); {advice}"
        ) from error
