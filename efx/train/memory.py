"""Check from shapes, before anything is allocated, that a computation fits into memory.

The counted bytes are a lower bound, so nothing that works is refused; `--mode=compile` reports what
the compiled programs need on an accelerator.
"""

import contextlib
import math
import os
import pathlib
import re

import jax

from efx.errors import UsageError

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")
# Memory limits of a container, by version 2 and version 1 of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# XLA's messages on CPUs, GPUs and TPUs. A kernel that needs more shared memory, or more of a TPU's
# vector memory, than the device has fails at any batch size.
_FULL = re.compile(
    r"out of memory (?:while|trying|allocating)|out of memory in memory space hbm|"
    r"failed to allocate|attempting to (?:allocate|reserve)|exceeds available hbm",
    re.IGNORECASE,
)
_LONGEST_REASON = 200  # characters of an error of XLA, which may list all buffers


def on_each_device(tree):
    """Bytes on one device of a tree of shapes; a shape without a sharding is whole there."""
    return sum(map(_bytes, jax.tree.leaves(tree)))


def _bytes(leaf):
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def is_new(function, tree):
    """For each array that a function of a tree returns, whether it is none of the tree's arrays."""
    traced = jax.make_jaxpr(function)(tree).jaxpr
    return [not any(x is given for given in traced.invars) for x in traced.outvars]


def largest(tree):
    """The largest array of a tree of shapes: its path, dtype and shape as text."""
    path, leaf = max(jax.tree_util.tree_leaves_with_path(tree), key=lambda item: _bytes(item[1]))
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{name}, {leaf.dtype}{list(leaf.shape)}"


def available():
    """Bytes of memory of each of this process's devices; CPU devices share the main memory."""
    devices = jax.local_devices()
    stats = devices[0].memory_stats() or {}
    return stats.get("bytes_limit", host_memory() // len(devices))


def host_memory():
    """Bytes of main memory that this process may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(pathlib.Path, _LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)


def check(name, parts, advice="; use smaller values"):
    """Raise UsageError unless these arrays fit into the memory of each device.

    Args:
      name: of the computation, beginning with the settings that decide its size.
      parts: {name of arrays: bytes on a device}. advice: end of the message.
    """
    needed, limit = sum(parts.values()), available()
    if needed <= limit:
        return
    listed = ", ".join(f"{part} {in_words(size)}" for part, size in parts.items() if size)
    kind, count = jax.local_devices()[0].platform, jax.local_device_count()
    where = f"each of {count} {kind} devices" if count > 1 else f"the {kind}"
    raise UsageError(
        f"{name} needs at least {in_words(needed)} of memory on {where}, but {in_words(limit)} is"
        f" available ({listed}){advice}"
    )


def is_full(error):
    """Whether an error of the runtime reports that a device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) and bool(_FULL.search(str(error)))


@contextlib.contextmanager
def exhaustion_as_usage_error(work, advice):
    """Raise UsageError, one line, where a device runs out of memory inside.

    Args:
      work: a noun phrase for the code inside, such as "evaluation". advice: settings to change.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise
        reason = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        raise UsageError(
            f"{work} ran out of memory ({reason[:_LONGEST_REASON].rstrip('. ')}); {advice}"
        ) from error


def in_words(count):
    """A number of bytes for people."""
    power = min(len(_UNITS) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.3g} {_UNITS[power]}"
