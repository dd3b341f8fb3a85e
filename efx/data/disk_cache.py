"""A cache on disk: folders and values, named by a hash of everything that they depend on.

A folder is built in a temporary one and renamed, so that a reader sees all of it or none of it.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

from efx import io
from efx.errors import UsageError

_REMEMBER_FROM = 64 << 20  # bytes; values of smaller files are computed again


def cache_root(cache_dir):
    """The cache folder: `cache_dir`, or $EFX_CACHE, or ~/.cache/efx (not created here)."""
    root = cache_dir or os.environ.get("EFX_CACHE") or "~/.cache/efx"
    if io.is_remote(root):
        name = "config.data.cache_dir" if cache_dir else "EFX_CACHE"
        raise UsageError(f"{name}={root}: the cache must be on a local disk")
    return Path(root).expanduser()


def content_key(*contents):
    """A 32-digit hexadecimal hash of JSON-able `contents`."""
    text = json.dumps(contents, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---- entries -------------------------------------------------------------------------------------


def cached_folder(root, kind, key, build):
    """The folder `root/kind/key`, built by `build(folder)` if it is absent.

    Of several processes one builds and the others wait; without file locks each builds its own.
    """
    folder = root / kind / key
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(root / kind / f"{key}.lock"):
            # The processes that left these are dead.
            for abandoned in folder.parent.glob(f".{key}.*.tmp"):
                shutil.rmtree(abandoned, ignore_errors=True)
            if not folder.exists():
                with io.replacing(folder) as temporary:
                    temporary.mkdir()
                    build(temporary)
    except OSError as error:
        raise cache_write_error(root, error) from error
    return folder


def cache_write_error(root, error):
    """The UsageError for an OSError of the cache."""
    return UsageError(
        f"config.data.cache_dir={str(root)!r} cannot be written ({error.strerror or error}); "
        "choose a writable folder with free space"
    )


@contextlib.contextmanager
def locked(path):
    """Hold an exclusive lock on the file `path`, if the file system has locks."""
    with open(path, "w") as file:  # closing it releases the lock
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_record(path):
    """[size of a file, time of its last change, hash of its content]"""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, _digest(path)]


def is_unchanged(path, record):
    """Whether a file has the size of its `file_record`, and its time or its content."""
    size, time, digest = record
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return stat.st_size == size and (stat.st_mtime_ns == time or _digest(path) == digest)


# ---- values --------------------------------------------------------------------------------------


def remember(root, key, compute):
    """`compute()` (JSON-able), stored under `key`; computed again if the file is unreadable."""
    path = root / "memo" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = io.parse_json(path.read_text())  # not limited in size
        if stored["sum"] == content_key(stored["value"]):
            return stored["value"]
    value = compute()
    with contextlib.suppress(OSError):  # without the file the next run only takes longer
        path.parent.mkdir(parents=True, exist_ok=True)
        io.write_text(path, json.dumps({"sum": content_key(value), "value": value}))
    return value


def remember_for_files(root, paths, quantity, compute):
    """`compute()`, the `quantity` of files; remembered, if they are large, until one changes."""
    stats = [(os.path.abspath(path), os.stat(path)) for path in paths]
    if sum(stat.st_size for _, stat in stats) < _REMEMBER_FROM:
        return compute()
    states = [[path, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in stats]
    return remember(root, content_key(quantity, states), compute)


def file_digests(root, paths):
    """Hexadecimal hash of the content of each file."""
    return remember_for_files(root, paths, "digests", lambda: [_digest(path) for path in paths])


def _digest(path):
    with open(path, "rb") as file:
        new_hash = functools.partial(hashlib.blake2b, digest_size=16)
        return hashlib.file_digest(file, new_hash).hexdigest()
