"""Write arrays into safetensors files."""

import dataclasses
import json
import math
import os
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from efx.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What arrays may be written as.
WRITTEN_DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}
SHARD_BYTES = 5 * 10**9  # a file has no more arrays than come to this, as transformers writes them


def in_a_line(error):
    return " ".join(str(error).split()) or type(error).__name__


@dataclasses.dataclass(frozen=True)
class NewArray:
    """An array to be written: its shape is known, its numbers, float32, are made by `read`."""

    name: str
    shape: tuple
    read: Callable


def size_of(arrays, dtype):
    """Bytes of the numbers of so many `NewArray`s, written as this type."""
    return sum(map(math.prod, (array.shape for array in arrays))) * WRITTEN_DTYPES[dtype].itemsize


def write(folder, arrays, dtype="float32", shard_bytes=SHARD_BYTES):
    """Writes arrays into model.safetensors, or into shards and their index.

    Args:
      folder: that there is. arrays: `NewArray`s. dtype: one of `WRITTEN_DTYPES`.
      shard_bytes: of one file; more arrays than come to this are sharded. One that is larger has a
        file of its own.
    Raises: OSError, SafetensorError; UsageError for a number that the type cannot hold.
    """
    shards, room = [[]], shard_bytes
    for array in arrays:
        size = size_of([array], dtype)
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(array)
        room -= size
    names = [SINGLE]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        numbers = {array.name: _converted(array, dtype) for array in shard}
        save_file(numbers, folder / name, metadata={"format": "pt"})
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())  # a disk may tell only now that it is full
    if len(shards) > 1:
        shard_of = {
            array.name: name for name, shard in zip(names, shards, strict=True) for array in shard
        }
        index = {"metadata": {"total_size": size_of(arrays, dtype)}, "weight_map": shard_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _converted(array, dtype):
    numbers = np.asarray(array.read(), np.float32, order="C")
    with np.errstate(over="ignore"):
        converted = numbers.astype(WRITTEN_DTYPES[dtype])
    if np.any(np.isinf(converted) & np.isfinite(numbers)):
        raise UsageError(
            f"{array.name} has values up to {np.max(np.abs(numbers)):.3g}, too large for "
            f"{dtype}; export as bfloat16 or float32"
        )
    return converted
