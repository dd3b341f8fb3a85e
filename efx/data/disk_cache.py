"""What is computed once and stored: folders of files named by a hash of all that they depend on.

An entry is written into a temporary folder and renamed into place, so a reader sees all of it or
none of it, whoever else is writing. Its manifest holds sizes and checksums; an entry that does not
agree with its manifest is thrown away and built again.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import shutil
import tempfile
import threading
import urllib.parse
import zlib
from pathlib import Path

from efx import atomic, reading, storage
from efx.errors import UsageError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_BLOCK = 4 << 20
# A file of up to 64 blocks (256 MiB) is checked whole; of a larger one, 64 evenly spaced blocks.
_CHECKED_BLOCKS = 64
# So many of an entry's (1 GiB) are read again whenever a process opens it.
_CHECKED_AGAIN = 256
_COPIES = 8  # files that are copied out of an object store at a time
# Hashing a smaller file again takes less time than it is worth saving.
_REMEMBER_FROM = 64 << 20


def cache_root(cache_dir):
    """The cache folder: `cache_dir`, or $EFX_CACHE, or ~/.cache/efx (not created here)."""
    root = cache_dir or os.environ.get("EFX_CACHE") or "~/.cache/efx"
    if storage.is_remote(root):
        name = "config.data.cache_dir" if cache_dir else "EFX_CACHE"
        raise UsageError(f"{name}={root}: the cache must be on a local disk")
    return Path(root).expanduser()


def content_key(*contents):
    """A 32-digit hexadecimal hash of JSON-able `contents`."""
    text = json.dumps(contents, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fetched(named, address, root):
    """The folder in the cache that has copies of the files at an address of an object store.

    They are copied again when one of them has changed. A file of a folder below has the name of its
    path, quoted as in an address. named: the setting and its value. Raises UsageError if the disk
    of the cache has no room for them, before any is copied.
    """
    listed, fetch = storage.remote_files(address, named)

    def build(folder):
        _check_room(named, sum(size for _, (size, _) in listed), len(listed), folder)
        top = os.path.commonpath([os.path.dirname(remote) for remote, _ in listed])
        copies = []
        for remote, _ in listed:
            name = urllib.parse.quote(os.path.relpath(remote, top), safe="")
            copies.append((remote, folder / (name if name != MANIFEST else f"%6D{name[1:]}")))
        _some_at_a_time(fetch, copies)

    return cached_folder(root, "fetched", content_key(address, listed), build)


def _check_room(named, size, count, folder):
    """Says what is about to be copied into a folder, or raises UsageError where it has no room."""
    from efx import memory  # imports JAX, which reading data in a notebook does not need

    free = shutil.disk_usage(folder).free
    what, place = memory.in_words(size), folder.parent
    if size > free:
        raise UsageError(
            f"{named}: {what} do not fit into the cache {place}: its disk has "
            f"{memory.in_words(free)} free; choose another folder with config.data.cache_dir "
            "or EFX_CACHE, or mount the bucket and use the path of the mount"
        )
    log.info("copying %s: %s in %d files, to %s", named, what, count, place)


def _some_at_a_time(work, calls):
    """`work(*call)` for each of the calls, `_COPIES` at a time, or the first error of one."""
    waiting, ended, stop = queue.SimpleQueue(), queue.SimpleQueue(), threading.Event()
    for call in calls:
        waiting.put(call)

    def run():
        with contextlib.suppress(queue.Empty):
            while not stop.is_set():
                call = waiting.get_nowait()
                try:
                    work(*call)
                except BaseException as error:
                    ended.put(error)
                else:
                    ended.put(None)

    # A process that is interrupted, or has the error of one, does not wait for the copies of others
    # to end, as it would for the threads of an executor.
    for _ in range(min(_COPIES, len(calls))):
        threading.Thread(target=run, name="efx-copy", daemon=True).start()
    try:
        for _ in calls:
            if (error := ended.get()) is not None:
                raise error
    finally:
        stop.set()


def cached_folder(root, kind, key, build):
    """The folder `root/kind/key`, built by `build(folder)` if it is absent or damaged.

    Safe with several processes at once: one builds, the others wait and use the result. Where the
    file system has no locks, each builds its own and the first to rename wins.

    Raises:
      UsageError: the cache cannot be written.
    """
    folder = root / kind / key
    if _intact(folder):
        return folder
    try:
        (root / kind).mkdir(parents=True, exist_ok=True)
        with locked(root / kind / f"{key}.lock") as alone:
            if _intact(folder):
                return folder
            if alone:  # no other process is building, so these are from one that died
                for abandoned in (root / kind).glob(f"{key}.tmp-*"):
                    shutil.rmtree(abandoned, ignore_errors=True)
            _build(folder, key, build)
    except OSError as error:
        raise UsageError(
            f"config.data.cache_dir={str(root)!r} cannot be written "
            f"({error.strerror or error}); choose a writable folder with free space"
        ) from error
    return folder


def _build(folder, key, build):
    temporary = Path(tempfile.mkdtemp(prefix=f"{key}.tmp-", dir=folder.parent))
    try:
        build(temporary)
        _seal(temporary)
        if folder.exists():
            if _intact(folder):  # another process finished first
                return
            log.warning("the cache entry %s is damaged; building it again", folder)
            # Moved aside first: a rename is atomic, removing a tree is not.
            os.rename(folder, temporary / "damaged")
        try:
            os.rename(temporary, folder)
        except OSError:
            if not _intact(folder):
                raise
        shutil.rmtree(folder / "damaged", ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(path, wait=True):
    """Holds an exclusive lock on `path`; yields False where the file system has none, and without
    `wait` None where another process holds it."""
    with open(path, "w") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        except (ImportError, OSError):
            yield False
            return
        yield True  # closing the file releases the lock


def checksums(path):
    """[size of a file, checksum of each of its blocks, or of some evenly spaced ones]"""
    size = path.stat().st_size
    return [size, *(_checksum(path, start) for start in _checked(size))]


def _checked(size):
    """First bytes of the blocks of a file of this size that have a checksum."""
    return [i * _BLOCK for i in _spread(-(-size // _BLOCK), _CHECKED_BLOCKS)]


def _spread(count, most):
    """Of the numbers 0..count-1 at most so many, evenly spaced, the first and the last included."""
    taken = min(count, most)
    return [i * (count - 1) // max(taken - 1, 1) for i in range(taken)]


def _checksum(path, start):
    """Of one block of a file."""
    with open(path, "rb") as file:
        file.seek(start)
        return zlib.crc32(file.read(_BLOCK))


def _seal(folder):
    files = {path.name: checksums(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(files))


def _intact(folder):
    """Whether all files have the sizes of the manifest, and at most `_CHECKED_AGAIN` blocks, spread
    evenly over them, its checksums."""
    try:
        files = reading.read_json(folder / MANIFEST)
        blocks = []
        for name, (size, *sums) in files.items():
            path = folder / name
            if path.stat().st_size != size:
                return False
            blocks += [(path, *block) for block in zip(_checked(size), sums, strict=True)]
        again = (blocks[i] for i in _spread(len(blocks), _CHECKED_AGAIN))
        return bool(files) and all(_checksum(path, start) == crc for path, start, crc in again)
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def remember(root, key, compute):
    """`compute()` (JSON-able), stored under `key`; computed again if that cannot be read."""
    path = root / "memo" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = reading.read_json(path)
        if stored["sum"] == content_key(stored["value"]):
            return stored["value"]
    value = compute()
    with contextlib.suppress(OSError):  # a memo that cannot be written only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps({"sum": content_key(value), "value": value}))
    return value


def remember_for_file(root, path, quantity, compute):
    """`compute()` about the file `path`, remembered for large files until size or mtime change."""
    stat = os.stat(path)
    if stat.st_size < _REMEMBER_FROM:
        return compute()
    key = content_key(quantity, os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return remember(root, key, compute)


def file_digest(root, path, size):
    """Hexadecimal hash of the first `size` bytes of the file `path`."""

    def compute():
        digest = hashlib.blake2b(digest_size=16)
        remaining = size
        with open(path, "rb") as file:
            while remaining > 0 and (block := file.read(min(remaining, _BLOCK))):
                digest.update(block)
                remaining -= len(block)
        return digest.hexdigest()

    return remember_for_file(root, path, ["digest", size], compute)


def file_digests(root, files):
    """`file_digest` of each (path, size) in `files`, remembered when all together are large."""

    def compute():
        return [file_digest(root, path, size) for path, size in files]

    stats = [(os.path.abspath(path), size, os.stat(path)) for path, size in files]
    if sum(stat.st_size for *_, stat in stats) < _REMEMBER_FROM:
        return compute()
    file_stats = [
        [path, size, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, size, stat in stats
    ]
    return remember(root, content_key("digests", file_stats), compute)
