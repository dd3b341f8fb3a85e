"""The files of checkpoints: which folders are finished, checksums, reading, one-line reasons.

Used by `manager` (whole states), `params` (parameters alone) and `arrays`, which reads and writes
arrays by orbax.
"""

import concurrent.futures
import errno
import hashlib
import json
import logging
import os
import sys
import traceback
import warnings

import jax
import numpy as np
from etils import epath

from efx import io
from efx.errors import PassingError, UsageError
from efx.parallel import multihost
from efx.parallel.sharding import path_names
from efx.run_dir import MANIFEST

_OF_A_PROCESS = "efx_checksums_of_process_"  # beginning of the name of a file that is not kept
ITEMS = ("state", "data", "meta")
_COMMITTED = "commit_success.txt"  # in an object store, see `is_finished`
# Orbax's own bookkeeping, changed after the manifest is written and not needed to restore.
_UNCHECKED = {"_CHECKPOINT_METADATA", _COMMITTED, MANIFEST}
_SEEN_SECONDS = 60  # for which a network file system may show what was there before
_SHOWN = 4  # differing leaves named in an error before "and N more"


class CheckpointError(UsageError):
    """A checkpoint cannot be written, read or used; one line names step, item and what to do."""


class Passing(CheckpointError, PassingError):
    """Such an error for a reason that may have passed when the same command runs again."""


class Damage(Exception):
    """A step's files are not what was written; the message names item, file and what is wrong."""


def warn(line):
    """One plain line on standard error, from process 0."""
    if jax.process_index() == 0:
        print(f"efx: warning: {line}", file=sys.stderr, flush=True)


# ---- folders ---------------------------------------------------------------------------------


def as_root(root):
    """An absolute path object for a local folder or an address such as gs://bucket/folder."""
    return epath.Path(root if io.is_remote(root) else os.path.abspath(root))


def numbered(root):
    """The step folders of `root`, finished or not, as a set of ints."""
    try:
        return {int(p.name) for p in root.iterdir() if p.name.isdecimal() and p.is_dir()}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(
            f"cannot read checkpoints in {root}: {io.describe_os_error(error)}; use another folder"
        ) from error


def is_finished(folder):
    """Whether a step was written to the end (it may have been damaged since).

    On a disk it has its name from then on. In an object store it has it from the beginning; the
    manifest comes last of ours, and after it the file without which orbax does not read it.
    """
    if io.is_remote(folder):
        return (folder / MANIFEST).exists() and (folder / _COMMITTED).exists()
    if (folder / MANIFEST).exists():
        return True
    return all((folder / item).is_dir() and any((folder / item).iterdir()) for item in ITEMS)


def finished_steps(root):
    """Finished steps of `root` in increasing order."""
    return sorted(step for step in numbered(root) if is_finished(root / str(step)))


def no_such_step(root, finished, step):
    """The error for a step that does not exist (None: no step exists)."""
    if step is None or not finished:
        return CheckpointError(
            f"there is no finished checkpoint in {root}; train first, or use another --workdir"
        )
    return CheckpointError(f"there is no checkpoint {step} in {root}; {listed(finished)}")


def shared_step(root, finished, step):
    """The step to read, which process 0 decides: `step`, or the newest of the `finished` ones that
    it sees. A network file system may show it to the others later; they wait for it.

    Raises CheckpointError, on all processes, if process 0 does not see it, or another never does.
    """
    chosen = from_primary(int(step) if step is not None else max(finished, default=-1))
    if not from_primary(chosen in finished):
        raise no_such_step(root, finished, step)
    if jax.process_count() > 1:
        folder = root / str(chosen)
        missing = multihost.first_process_missing(lambda: is_finished(folder), _SEEN_SECONDS)
        if missing is not None:
            raise Passing(
                f"process {missing} does not see checkpoint {chosen} in {root}, but process 0 "
                "does; use a folder that all processes share"
            )
    return chosen


def read_step(root, finished, step, read):
    """read(step), of the newest step if it is None. A run that trains beside this process may
    delete that while it is read: then of the one that is the newest by then.

    Args:
      finished: function to the finished steps. read: function of a step, the same on all processes.
    Raises: as `shared_step`, and CheckpointError where a step that was asked for was deleted.
    """
    while True:
        before = finished()
        chosen = shared_step(root, before, step)
        try:
            return read(chosen)
        except (CheckpointError, Damage) as error:
            now = finished()
            # Of several processes only one may have failed: they would read different steps.
            if jax.process_count() > 1 or now == before or step in now:
                raise
            if step is not None:
                raise CheckpointError(
                    f"checkpoint {step} in {root} was deleted while it was read (its run keeps "
                    f"fewer checkpoints); {listed(now)}"
                ) from error


def listed(steps):
    """`there are: 2, 4, 6`, with at most ten of the newest."""
    shown = ", ".join(str(step) for step in steps[-10:])
    return f"there are: {'..., ' if len(steps) > 10 else ''}{shown}" if steps else "there is none"


# ---- manifest --------------------------------------------------------------------------------


def write_manifest(folder, step):
    """Writes the size and SHA-256 of every file under `folder`, in one rename.

    Those that processes have left by `write_own_digests` are taken from there.
    """
    digests, file_names = {}, sorted(_files(folder))
    for name in file_names:
        if _OF_A_PROCESS in name:
            digests |= json.loads((folder / name).read_text())
            (folder / name).unlink()
    file_names = [name for name in file_names if _OF_A_PROCESS not in name]
    digests |= _digests(folder, [name for name in file_names if name not in digests])
    manifest = {
        "format": 1,
        "step": step,
        "files": {name: digests[name] for name in file_names},
    }
    io.write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def write_own_digests(item_folder, item):
    """Writes the sizes and SHA-256 of the files that this process has written into the folder of
    an item, so that process 0 need not read those of all."""
    own = f"ocdbt.process_{jax.process_index()}"
    # What every device has whole, and does not divide over them, process 0 writes alone: another
    # one may have written nothing, and has no folder then.
    is_there = (item_folder / own).exists()
    names = sorted(_files(item_folder / own, f"{own}/")) if is_there else []
    digests = {f"{item}/{name}": digest for name, digest in _digests(item_folder, names).items()}
    path = item_folder / f"{_OF_A_PROCESS}{jax.process_index()}.json"
    io.write_text(path, json.dumps(digests))


def read_manifest(folder):
    """The manifest of a step as a dict. Raises Damage."""
    try:
        manifest = io.read_json(folder / MANIFEST)
        manifest["files"].items()
        return manifest
    except FileNotFoundError as error:
        raise Damage(f"the file of checksums, {MANIFEST}, is missing") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damage(f"the file of checksums, {MANIFEST}, is not readable") from error


def verify(folder):
    """Compares every file of a step with the manifest. Raises Damage naming the first bad one.

    Each process reads its share of the files, and all of them raise or none does.
    """
    files, damage = {}, None
    try:
        files = read_manifest(folder)["files"]
        for name in files:
            if not io.stays_below(name):
                raise Damage(
                    f"file {MANIFEST} names {name!r}, a file that is missing in the checkpoint"
                )
    except Damage as error:
        damage = error
    if not minimum_over_processes(int(damage is None)):
        raise damage or Damage(f"another process cannot read the file {MANIFEST}")
    file_names = sorted(files)

    def problem(index):
        name = file_names[index]
        try:
            size, digest = files[name]
            actual = (folder / name).stat().length
            if actual != size:
                return f"has {actual} bytes, expected {size}"
            return None if _digest(folder / name)[1] == digest else "does not match its checksum"
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError, TypeError) as error:
            return f"cannot be read ({error})"

    share = range(jax.process_index(), len(file_names), jax.process_count())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        problems = dict(zip(share, pool.map(problem, share), strict=True))
    first_bad = minimum_over_processes(
        min((i for i in share if problems[i]), default=len(file_names))
    )
    if first_bad < len(file_names):
        item, _, file = file_names[first_bad].partition("/")
        # Only the process that read this file knows the details.
        raise Damage(f"item {item}, file {file} {problems.get(first_bad) or 'is damaged'}")


def _digests(folder, names):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True))


def _digest(path):
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return [path.stat().length, digest]


def _files(folder, prefix=""):
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif prefix or path.name not in _UNCHECKED:
            yield prefix + path.name


# ---- trees and reading -----------------------------------------------------------------------


def flatten(tree):
    """{tuple of strings: leaf} of any pytree.

    States are stored as nested dicts of this. Dataclasses, named tuples and empty nodes get their
    structure back from the target at restore, so a checkpoint does not depend on how orbax would
    store them.
    """
    return {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def with_sharding(leaf):
    """`leaf` as a ShapeDtypeStruct with a sharding (the first local device if it has none)."""
    sharding = getattr(leaf, "sharding", None)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


# The axis of token ids of the parameters that have one, by the end of their paths. The moments of
# an optimiser have the names of their parameters.
VOCABULARY = {("embed", "embedding"): 0, ("head", "kernel"): 1}


def fits(path, stored_shape, target_shape, vocab_size):
    """Whether an array of the shape `stored_shape` can be read as one of the shape `target_shape`.

    It can if they are equal, or if they differ only in the padding of the vocabulary, which depends
    on the mesh: it is all 0, so reading cuts it off or adds it (strict=False).
    """
    axis = VOCABULARY.get(tuple(path[-2:]))
    target, stored = list(target_shape), list(stored_shape)
    if axis is not None and len(target) == len(stored) == 2 and vocab_size:
        if min(target[axis], stored[axis]) >= vocab_size:
            target[axis] = stored[axis] = vocab_size
    return target == stored


def without_padding(path, x, vocab_size):
    """A parameter without the padding of its vocabulary, if it has one."""
    axis = VOCABULARY.get(tuple(path[-2:]))
    return x if axis is None else jax.lax.slice_in_dim(x, 0, vocab_size, axis=axis)


def dtype_and_shape(leaf):
    """`float32[2,3]`."""
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def abridged(lines):
    """The first few of `lines`, joined, and the number of the others."""
    suffix = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + suffix


# ---- processes -------------------------------------------------------------------------------


def from_primary(value):
    """Process 0's int or bool, on every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return type(value)(multihost_utils.broadcast_one_to_all(np.int32(value)))


def minimum_over_processes(value):
    """The minimum of every process's int."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(np.min(multihost_utils.process_allgather(np.int32(value))))


def barrier(name):
    """Waits for every process."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


# ---- errors and noise ------------------------------------------------------------------------


# What tensorstore says in its own errors, and what it means.
_LASTING = (
    ("No space left on device", "the disk is full"),
    ("Disk quota exceeded", "the disk quota is used up"),
    ("File too large", "the file is larger than this system's limit (ulimit -f)"),
    ("Read-only file system", "the file system is read-only"),
    ("Permission denied", "permission denied"),
)
# Of a disk that fails, and of a network and a server behind a mounted folder.
_PASSING = {
    getattr(errno, name)
    for name in (
        "EIO EAGAIN EBUSY EPIPE ETIMEDOUT ECONNRESET ECONNREFUSED ECONNABORTED EHOSTUNREACH"
        " ENETUNREACH ENOTCONN ESTALE EREMOTEIO"
    ).split()
    if hasattr(errno, name)  # Windows lacks the last
}


def _from_system(error):
    """The system's error that an exception comes from, or None."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or error.__context__
    return error


def may_pass(error, root):
    """Whether a checkpoint that could not be written in `root` may be there the next time: it is
    no matter of room or of rights, and the folder is there."""
    if cause := _from_system(error):
        return cause.errno in _PASSING
    if io.is_remote(root):  # errors of its client
        return not any(sign in str(error) for sign, _ in _LASTING)
    return any(os.strerror(number) in str(error) for number in _PASSING)


def explain(error):
    """The reason at the bottom of an orbax exception, in a few words on one line."""
    if cause := _from_system(error):
        return io.describe_os_error(cause) + (f" ({cause.filename})" if cause.filename else "")
    text = str(error)
    for sign, meaning in _LASTING:
        if sign in text:
            return meaning
    first_line = text.strip().splitlines()[0] if text.strip() else ""
    return f"{type(error).__name__}: {first_line[:200]}"


_quiet = False


def quieten():
    """Keeps orbax's own tracebacks off standard error, where one line of ours says what is wrong.

    Narrow filters: log records from orbax's files and, of what else was still being written or read
    when one file failed, the errors that asyncio logs (these records are shown again with
    --verbosity=1), the coroutines that nobody will await, and the loop that is closed.
    """
    global _quiet
    if _quiet:
        return
    _quiet = True
    from absl import logging as absl_logging

    orbax_folder = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"

    def shown(of_orbax):
        return lambda record: absl_logging.get_verbosity() > 0 or not of_orbax(record)

    def is_left_behind(record):
        # The future of a single file has no traceback, but the name of the file.
        trace = record.exc_info[2] if record.exc_info else None
        files = [frame.filename for frame in traceback.extract_tb(trace)]
        return ".orbax-checkpoint-tmp" in record.getMessage() or any(
            orbax_folder in file for file in files
        )

    logging.getLogger("absl").addFilter(shown(lambda record: orbax_folder in record.pathname))
    logging.getLogger("asyncio").addFilter(shown(is_left_behind))
    names = "cancellable|.*(serializ|checkpoint|_open_and_write|write_fragment).*"
    warnings.filterwarnings("ignore", rf"coroutine '({names})' was never awaited", RuntimeWarning)
    shown_before = sys.unraisablehook

    def hook(unraisable):
        error, code = unraisable.exc_value, getattr(unraisable.object, "cr_code", None)
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not closed and not (code and orbax_folder in code.co_filename):
            shown_before(unraisable)

    sys.unraisablehook = hook
