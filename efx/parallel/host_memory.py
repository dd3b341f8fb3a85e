"""The main memory of this process."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of mallopt(3)


def keep_freed_memory():
    """Let glibc's malloc keep freed memory for the next step; return whether it will.

    XLA on a CPU allocates the temporary arrays of each step anew, often gigabytes. By default glibc
    maps and unmaps each of them, and the system clears its pages every time. Keeping them takes a
    step (8 layers, width 512) to 0.87 of its time. macOS and musl have no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # Only the main arena holds arrays of any size. A size of -1 is the largest possible.
    options = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    return all([mallopt(option, value) == 1 for option, value in options])
