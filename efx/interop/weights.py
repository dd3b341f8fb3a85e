"""The arrays of a folder of safetensors files: found, checked, and read one at a time; written."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from efx import io
from efx.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What arrays may be of; all become float32.
_DTYPES = ("F32", "BF16", "F16")
# What arrays may be written as.
WRITTEN_DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}
SHARD_BYTES = 5 * 10**9  # a file has no more arrays than come to this, as transformers writes them


class StoredArray:
    """An array in a file: its shape is known, its numbers are read by `np.asarray`.

    The library has checked, when it opened the file, that the header is whole and that what it says
    of every array lies within the file, so no array is larger than its file.
    """

    def __init__(self, file, path, name):
        self._file, self.path, self.name = file, path, name
        self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def __array__(self, dtype=None, copy=None):
        if self._slice.get_dtype() not in _DTYPES:
            raise UsageError(
                f"{self.path}: {self.name} has type {self._slice.get_dtype()}; efx reads "
                f"{', '.join(_DTYPES)}"
            )
        try:
            array = self._file.get_tensor(self.name)
        except (OSError, SafetensorError, ValueError) as error:
            raise UsageError(
                f"{self.path}: {self.name} cannot be read: {in_a_line(error)}"
            ) from error
        return array if dtype is None else array.astype(dtype)


class Weights(Mapping):
    """{name: `StoredArray`} of model.safetensors, or of the shards that its index names.

    Raises: UsageError naming the file that is missing, damaged, or lacks what the index says.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        index, self._arrays = self.folder / INDEX, {}
        if not index.exists():
            self._add(self.folder / SINGLE)
            return
        shard_of = _shards(index)
        for name in sorted(set(shard_of.values())):
            self._add(self.folder / name)
        for name, shard in shard_of.items():
            if name not in self._arrays or self._arrays[name].path.name != shard:
                raise UsageError(
                    f"{self.folder / shard} lacks {name}, an array that {index} lists for it"
                )

    def _add(self, path):
        if not path.is_file():
            raise UsageError(f"{path} does not exist; efx reads weights from safetensors only")
        try:
            file = safe_open(path, framework="numpy")
            names = file.keys()
        except (OSError, SafetensorError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {in_a_line(error)}") from error
        for name in names:
            if name in self._arrays:
                raise UsageError(f"{name} is in both {path} and {self._arrays[name].path}")
            self._arrays[name] = StoredArray(file, path, name)

    def __getitem__(self, name):
        return self._arrays[name]

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self):
        return len(self._arrays)

    @property
    def size(self):
        """Numbers in all arrays."""
        return sum(int(np.prod(array.shape, dtype=object)) for array in self.values())


def _shards(index):
    """{name of an array: name of its file} of an index."""
    contents = read_json(index)
    shards = contents.get("weight_map") if isinstance(contents, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise UsageError(f"{index}: weight_map is not a table of arrays and their files")
    for name, shard in shards.items():
        if not io.stays_below(shard):
            raise UsageError(f"{index}: weight_map lists {name} in {shard!r}, not a file name")
    return shards


def read_json(path):
    """The contents of a file of a checkpoint."""
    try:
        return io.read_json(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; use the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {in_a_line(error)}") from error


def in_a_line(error):
    return " ".join(str(error).split()) or type(error).__name__


# ---- writing -----------------------------------------------------------------------------------


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
