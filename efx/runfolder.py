"""The run folder: one directory that holds everything about a run and can be read without JAX.

    config.json      every key of the config, sorted
    run.json         one record per launch: versions, git revision, devices, command line, time;
                     of a run that starts from another or trains on a cluster: which
    metrics.jsonl    one line per logged step          (efx.metrics)
    checkpoints/     one folder per kept step          (efx.checkpoint)
    samples/         text samples                      (efx.metrics)
    tensorboard/     event files                       (efx.metrics)

`load_config` and everything else here that reads imports neither JAX nor numpy.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

from efx import __version__
from efx.errors import UsageError

CONFIG_FILE = "config.json"
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
METRICS_FILE = "metrics.jsonl"

# Packages whose versions decide what a run computes.
_LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "ml-collections",
    "tokenizers",
)
_ABSENT = "(absent)"  # stands for a key that only the other config has
_SHOWN = 6  # differing keys named in an error before "and N more"


@dataclasses.dataclass(frozen=True)
class Run:
    """An opened run folder. `is_new` is False when an earlier launch made it."""

    path: pathlib.Path
    is_new: bool


def reason(error):
    """What an OSError means to a user, in a few words without the traceback's decoration."""
    texts = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.ENOTDIR: "a part of the path is a file, not a folder",
    }
    return texts.get(error.errno, error.strerror or str(error))


@contextlib.contextmanager
def writing(path):
    """Turns an OSError raised inside into one UsageError line that names `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename or path}: {reason(error)}; free or fix it, or pass"
            " another --workdir"
        ) from error


def write_atomic(path, text):
    """Writes `text` to `path` so that a reader (or a crash) sees the old file or the new one."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def load_config(workdir):
    """The config of a run folder as a plain dict (tuples come back as lists).

    Raises UsageError if `workdir` is not a run folder or its config.json cannot be read.
    """
    folder = pathlib.Path(workdir)
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UsageError(f"--workdir={workdir} is not a run folder: there is no such folder")
    if not path.is_file():
        raise UsageError(
            f"--workdir={workdir} is not a run folder: it has no {CONFIG_FILE}; give a folder that"
            " --mode=train made"
        )
    return _read_json(path)


def open_run(workdir, config, *, command_line, may_differ=()):
    """Makes a run folder, or checks that `config` may continue the run that is there.

    Args:
      workdir: the folder; it and its parents are made if absent.
      config: nested plain dict, the complete config (`ConfigDict.to_dict()`).
      command_line: list of str, recorded in run.json.
      may_differ: regexes (full match on the dotted key, such as `log\\..*`) of keys that a later
        launch may change. A change is written to config.json and recorded in run.json.

    Returns: Run.
    Raises: UsageError naming the keys that differ with both values, or the file at fault. Nothing
      is written in that case.

    With several processes all of them call this; process 0 alone touches the folder.
    """
    import jax

    if jax.process_count() == 1:
        return _open_run(workdir, config, command_line, may_differ)
    import numpy as np
    from jax.experimental import multihost_utils

    refused, run = None, None
    if jax.process_index() == 0:
        try:
            run = _open_run(workdir, config, command_line, may_differ)
        except UsageError as error:
            refused = error
    status = 2 if refused else int(run.is_new) if run else 0
    status = int(multihost_utils.broadcast_one_to_all(np.int32(status)))
    if refused:
        raise refused
    if status == 2:
        raise UsageError(f"--workdir={workdir} was refused by process 0; see its message")
    return Run(pathlib.Path(workdir), bool(status))


def _open_run(workdir, config, command_line, may_differ):
    folder = pathlib.Path(workdir)
    config = json.loads(json.dumps(config, default=_plain))
    launch = describe_launch(command_line)
    is_new = not (folder / CONFIG_FILE).exists()
    if is_new:
        for name in (CHECKPOINTS, METRICS_FILE):
            if (folder / name).exists():
                raise UsageError(
                    f"--workdir={workdir} holds {name} but no {CONFIG_FILE}, so it cannot be told"
                    " which run it belongs to; use another --workdir"
                )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    else:
        launch["changed"] = _check_same(workdir, load_config(workdir), config, may_differ)
    if is_new or launch["changed"]:
        write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    earlier = [] if is_new else recorded(folder).get("launches", [])
    record(folder, launches=[*earlier, launch])
    return Run(folder, is_new)


def check_config(workdir, config, may_differ=()):
    """Raises UsageError unless `config` (a plain dict) may continue the run in `workdir`."""
    config = json.loads(json.dumps(config, default=_plain))
    _check_same(workdir, load_config(workdir), config, may_differ)


def recorded(workdir):
    """run.json as a dict: `launches`, and what else was put there by `record`; {} without one."""
    path = pathlib.Path(workdir) / RUN_FILE
    return _read_json(path) if path.is_file() else {}


def record(workdir, **entries):
    """Puts entries into run.json, which every launch keeps."""
    text = json.dumps({**recorded(workdir), **entries}, indent=2) + "\n"
    write_atomic(pathlib.Path(workdir) / RUN_FILE, text)


def _plain(value):
    """JSON for what a config may hold beyond the basic types."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    raise TypeError(f"config value {value!r} of type {type(value).__name__} cannot be stored")


def _check_same(workdir, old, new, may_differ):
    """{key: [old, new]} of the permitted changes; UsageError on any other difference."""
    old, new = flatten(old), flatten(new)
    changed, refused = {}, []
    for key in sorted(old.keys() | new.keys()):
        before = old[key] if key in old else _ABSENT  # noqa: SIM401
        after = new[key] if key in new else _ABSENT  # noqa: SIM401
        if type(before) is type(after) and before == after or _equal_numbers(before, after):
            continue
        if any(re.fullmatch(pattern, key) for pattern in may_differ):
            changed[key] = [before, after]
        else:
            refused.append(f"config.{key}: {before!r} in the run, {after!r} here")
    if refused:
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise UsageError(
            f"--workdir={workdir} holds a run of another config ({'; '.join(refused[:_SHOWN])}"
            f"{more}); use another --workdir, or the values of that run"
        )
    return changed


def _equal_numbers(a, b):
    """1 and 1.0 are the same setting; True and 1 are not."""
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return numeric and a == b


def flatten(config, prefix=""):
    """{"model.depth": 4, ...}: nested dicts to dotted keys. An empty dict is kept as a value."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def describe_launch(command_line):
    """One record for run.json: what ran, on what, when."""
    import importlib.metadata

    import jax

    versions = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "efx": __version__,
        "git": git_revision(),
        "libraries": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": {"kind": devices[0].device_kind, "backend": devices[0].platform},
        "device_count": len(devices),
        "process_count": jax.process_count(),
        "cpu_count": os.cpu_count(),
        "command_line": [str(part) for part in command_line],
        "executable": os.path.basename(sys.executable),
    }


def git_revision(package=None):
    """{"revision": sha, "dirty": bool} of the checkout that efx is run from, or None.

    None as well when efx is installed inside some other project's checkout (a virtual
    environment, say), whose revision would say nothing about efx. `package`: the folder `efx`.
    """
    package = package or pathlib.Path(__file__).resolve().parent

    def git(*arguments):
        command = ["git", "-C", str(package), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        top = git("rev-parse", "--show-toplevel")
        if pathlib.Path(top).resolve() != package.parent:
            return None
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is damaged: not JSON ({error}); restore the file, or use another --workdir"
        ) from error
