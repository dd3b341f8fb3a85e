"""Write Hugging Face folders."""

import contextlib
import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from efx import io
from efx.errors import UsageError
from efx.interop import own_format
from efx.interop.architectures import config_of, params_to_hf
from efx.interop.weights import SHARD_BYTES, NewArray, in_a_line, size_of, write
from efx.train import memory

# Supported versions; the tests load exports with the oldest and the newest.
TRANSFORMERS = "transformers>=4.57.1,<6"


def save_hf(
    folder,
    params,
    model,
    *,
    state=None,
    ids=None,
    files=None,
    without=(),
    dtype="float32",
    shard_bytes=SHARD_BYTES,
):
    """Write a decoder to a new folder that transformers loads; all of it or nothing.

    The folder has config.json and the parameters, and modeling_efx.py if no architecture of
    transformers has the model's settings (`own_format`).

    Args:
      state: the model's collection of this name, if it has one.
      ids: {"bos_token_id": ..., "eos_token_id": ...} for config.json.
      files: {name: text} of further files.
      without: architectures that are not used.
      dtype, shard_bytes: as in `write`.
    Returns: the contents of config.json.
    Raises: UsageError for a setting that cannot be exported, or a folder that cannot be written.
    """
    folder, files = Path(folder), dict(files or {})
    config = config_of(model, without)
    if config is not None:
        named = params_to_hf(params, model, config["model_type"])
        arrays = [NewArray(name, x.shape, lambda x=x: x) for name, x in named.items()]
    else:
        config, arrays = own_format.config_of(model), own_format.arrays_of(params, state, model)
        files[own_format.CODE.name] = own_format.CODE.read_text(encoding="utf-8")
    config |= {"dtype": dtype, **(ids or {})}
    files["config.json"] = json.dumps(config, indent=2) + "\n"
    check_new(folder)
    target = folder.resolve()  # has a name, and is no link
    created = [path for path in target.parents if not path.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(folder, target, size_of(arrays, dtype) + sum(map(len, files.values())))
        with io.replacing(target) as part:
            part.mkdir()
            for name, text in files.items():
                (part / name).write_text(text, encoding="utf-8")
            write(part, arrays, dtype, shard_bytes)
            for path in part.iterdir():  # safetensors writes files that others cannot read
                shutil.copymode(part / "config.json", path)
    except BaseException as error:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise UsageError(f"{folder} cannot be written: {_reason(error)}") from error
        raise
    return config


def check_new(folder):
    """Raise UsageError unless this path does not exist or is an empty folder."""
    try:
        existing = sorted(path.name for path in Path(folder).iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {_reason(error)}") from error
    if existing:
        raise UsageError(f"{folder} is not empty ({existing[0]}); use a new folder")


def _check_space(folder, target, needed):
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise UsageError(
            f"{folder} needs {memory.in_words(needed)}, but its disk has "
            f"{memory.in_words(free)} free; free space, or use another folder"
        )


def _reason(error):
    return io.describe_os_error(error) if isinstance(error, OSError) else in_a_line(error)
