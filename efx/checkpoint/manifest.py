"""Manifests (the size and SHA-256 of each file of a checkpoint), and the list of finished steps.

    root/STEP/state/              train state as a nested dict of arrays (orbax, OCDBT)
    root/STEP/data/, meta/        position in the data and free metadata (JSON)
    root/STEP/efx_manifest.json   size and SHA-256 of every file above

The manifest is written before the step directory gets its final name. A directory that has a
step's name is therefore complete, or was damaged later.
"""

import concurrent.futures
import hashlib
import json
import os

import jax
from etils import epath

from efx import io
from efx.checkpoint.errors import CheckpointError, Damage, TransientCheckpointError, describe
from efx.parallel import multihost
from efx.run_dir import COMMITTED, MANIFEST, is_finished

# Orbax changes its own records after the manifest is written; a restore does not need them.
_UNCHECKED = {"_CHECKPOINT_METADATA", COMMITTED, MANIFEST}
# Results of `verify` on one process, besides the position of the first damaged file.
_UNREADABLE, _BAD_MANIFEST, _INTACT = -2, -1, 2**31 - 1
_DIGESTS = "efx_digests_"  # first part of the name of a process' temporary file of digests
_VISIBLE_SECONDS = 60  # within which a network file system shows a new checkpoint to all hosts


# ---- steps ------------------------------------------------------------------------------------


def as_root(root):
    """Return the absolute epath of a local directory or of gs://BUCKET/FOLDER."""
    return epath.Path(root if io.is_remote(root) else os.path.abspath(root))


def choose_step(root, finished, step):
    """Return the step to read, which process 0 decides for all processes.

    Args:
      finished: the finished steps in increasing order, as this process sees them.
      step: the requested one; None: the newest.
    Raises: CheckpointError, on all processes, if process 0 does not see the step or another process
      does not see it in time.
    """
    newest = max(finished, default=-1)
    chosen = multihost.from_primary(newest if step is None else int(step))
    if not multihost.from_primary(chosen in finished):
        if step is None or not finished:
            raise CheckpointError(
                f"there is no finished checkpoint in {root}; train first, or use another run"
            )
        steps = ", ".join(map(str, finished[-10:]))
        raise CheckpointError(f"there is no checkpoint {step} in {root}; the newest are {steps}")
    if jax.process_count() > 1:
        folder = root / str(chosen)
        missing = multihost.first_process_missing(lambda: is_finished(folder), _VISIBLE_SECONDS)
        if missing is not None:
            raise TransientCheckpointError(
                f"process {missing} does not see checkpoint {chosen} in {root}, but process 0 "
                "does; use a directory that all processes share"
            )
    return chosen


# ---- manifests --------------------------------------------------------------------------------


def write_digests(folder, item):
    """Write the digests of the files that this process wrote, for process 0's manifest.

    Args:
      folder: of the item. item: its name.
    """
    own = f"ocdbt.process_{jax.process_index()}"
    # Process 0 alone writes replicated arrays; another process may have no folder.
    names = list(_files(folder / own, f"{own}/")) if (folder / own).exists() else []
    digests = {f"{item}/{name}": digest for name, digest in _digests(folder, names).items()}
    io.write_text(folder / f"{_DIGESTS}{jax.process_index()}.json", json.dumps(digests))


def write_manifest(folder):
    """Write the manifest of a step; merge and delete the digest files of all processes.

    Args:
      folder: its directory, "STEP" or orbax's temporary "STEP.orbax-checkpoint-tmp...".
    """
    step, digests, names = int(folder.name.partition(".")[0]), {}, []
    for name in sorted(_files(folder)):
        if _DIGESTS in name:
            digests |= io.read_json(folder / name)
            (folder / name).unlink()
        else:
            names.append(name)
    digests |= _digests(folder, [name for name in names if name not in digests])
    contents = {"step": step, "files": {name: digests[name] for name in names}}
    io.write_text(folder / MANIFEST, json.dumps(contents, indent=1))
    if not io.is_remote(folder):
        io.flush(folder)


def read_manifest(folder):
    """Return the manifest of a step as a dict.

    Raises: Damage if it is missing, not a manifest, or that of another step; OSError.
    """
    try:
        manifest = io.read_json(folder / MANIFEST)
        manifest["files"].items()
        step = manifest["step"]
    except FileNotFoundError as error:
        raise Damage(f"file {MANIFEST} is missing") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damage(f"file {MANIFEST} is not readable") from error
    if str(step) != folder.name:
        raise Damage(f"file {MANIFEST} is of step {step}, not {folder.name}")
    return manifest


def verify(folder):
    """Compare every file of a step with the manifest.

    Each process reads its part of the files. All processes raise the same error.

    Raises:
      Damage: names the first file that is missing or differs.
      TransientCheckpointError: a file cannot be read.
    """
    names, problems = [], {}  # {result: problem}
    try:
        files = read_manifest(folder)["files"]
        names = sorted(files)
        part = range(jax.process_index(), len(names), jax.process_count())
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda i: _verify_file(folder / names[i], files[names[i]]), part)
            problems = {i: problem for i, problem in zip(part, found, strict=True) if problem}
    except Damage as damage:
        problems = {_BAD_MANIFEST: str(damage)}
    except Exception as error:  # OSError, or an error of a store's client
        problems = {_UNREADABLE: describe(error)}
    first = multihost.minimum(min(problems, default=_INTACT))
    # Only the process that met the problem knows its details.
    if first == _UNREADABLE:
        details = problems.get(first, "see the message of another process")
        raise TransientCheckpointError(
            f"{folder} cannot be read: {details}; fix this and rerun the command"
        )
    if first == _BAD_MANIFEST:
        raise Damage(problems.get(first, f"file {MANIFEST} is damaged"))
    if first != _INTACT:
        item, _, name = names[first].partition("/")
        raise Damage(f"item {item}, file {name} {problems.get(first, 'is damaged')}")


def _verify_file(path, recorded):
    """Return the difference between a file and its entry of the manifest, or ""."""
    try:
        return "" if _digest(path) == recorded else "does not match its checksum"
    except FileNotFoundError:
        return "is missing"


def _digests(folder, names):
    """Return {name: [bytes, SHA-256]} of files."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True))


def _digest(path):
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return [path.stat().length, digest]


def _files(folder, prefix=""):
    """Yield the relative names of the files in the manifest of a directory."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif prefix or path.name not in _UNCHECKED:
            yield prefix + path.name
