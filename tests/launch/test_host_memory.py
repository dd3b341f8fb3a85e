"""The command keeps freed memory, whatever threads its libraries start."""

import subprocess
import sys

import pytest

PROBE = """
import ctypes, threading
import efx.main
import jax.numpy as jnp

jnp.zeros(3).block_until_ready()
threading.Thread(target=lambda: bytearray(1 << 20)).start()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_all_threads_allocate_in_one_arena(root):
    # glibc gives the memory of other arenas back after each step.
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("<heap nr=") == 1
