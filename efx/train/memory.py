"""Whether what is to be computed has room in memory: from shapes, before anything is allocated.

What is counted is the least that is needed, so that nothing is refused that would have worked; a
program may need more than it (`--mode=compile` tells how much, of accelerators).
"""

import contextlib
import math
import os
import pathlib
import re

import jax

from efx.errors import UsageError

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")
# Limits of a container, of the second and of the first kind of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# XLA's words on CPUs, GPUs and TPUs. A kernel that needs more shared memory, or more of a TPU's
# vector memory, than the device has fails at any batch size.
_FULL = re.compile(
    r"out of memory (?:while|trying|allocating)|out of memory in memory space hbm|"
    r"failed to allocate|attempting to (?:allocate|reserve)|exceeds available hbm",
    re.IGNORECASE,
)
_LONGEST_REASON = 200  # characters of an error of XLA, which may list all buffers


def on_each_device(tree):
    """Bytes on one device of a tree of shapes; a shape without a sharding is whole there."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _bytes(leaf):
    shape, sharding = leaf.shape, getattr(leaf, "sharding", None)
    if sharding is not None:
        shape = sharding.shard_shape(shape)
    return math.prod(shape) * leaf.dtype.itemsize


def is_new(function, tree):
    """Of each array that a function gives, computed one operation after the other, whether it is
    none of the tree's own. tree: of arrays or shapes."""
    traced = jax.make_jaxpr(function)(tree).jaxpr
    return [not any(x is given for given in traced.invars) for x in traced.outvars]


def largest(tree):
    """The largest array of a tree of shapes, in words."""
    path, leaf = max(jax.tree_util.tree_leaves_with_path(tree), key=lambda item: _bytes(item[1]))
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{name}, {leaf.dtype}{list(leaf.shape)}"


def available():
    """Bytes of memory that each of this process's devices has, of CPU devices its equal part."""
    devices = jax.local_devices()
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_memory() // len(devices)


def host_memory():
    """Bytes of main memory that this process may have."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(pathlib.Path, _LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            found.append(int(text))
    return min(found)


def check(what, parts, hint="; use smaller values"):
    """UsageError unless there is room on each device.

    Args:
      what: needs it, beginning with the settings that decide. parts: {words: bytes}.
      hint: added at the end.
    """
    need, have = sum(parts.values()), available()
    if need <= have:
        return
    listed = ", ".join(f"{name} {in_words(size)}" for name, size in parts.items() if size)
    kind, count = jax.local_devices()[0].platform, jax.local_device_count()
    where = f"each of {count} {kind} devices" if count > 1 else f"the {kind}"
    raise UsageError(
        f"{what} needs at least {in_words(need)} of memory on {where}, but {in_words(have)} is"
        f" available ({listed}){hint}"
    )


def is_full(error):
    """Whether an error of the runtime says that a device has too little memory."""
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
