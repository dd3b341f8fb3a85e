"""A cache of folders on disk, named by a hash of everything that their content depends on.

An entry is built in a temporary folder and renamed, so that a reader sees all of it or none of it.
Its manifest holds sizes and checksums; an entry that does not match them is built again.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import urllib.parse
import zlib
from pathlib import Path

from efx import io
from efx.errors import UsageError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_BLOCK = 4 << 20
_FILE_BLOCKS = 64  # blocks of a file that have a checksum, evenly spaced
_ENTRY_BLOCKS = 256  # blocks of an entry that are compared when it is opened
_DOWNLOADS = 8  # at a time
_REMEMBER_FROM = 64 << 20  # bytes; smaller files are hashed again


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


def fetched(named, address, root):
    """The folder in the cache with copies of the files at an address of an object store.

    A copy is named by the quoted path of its file. All are made again when a file has changed.

    Args:
      named: the setting and its value, for messages.
    """
    listed, fetch = io.remote_files(address, named)

    def build(folder):
        gigabytes = sum(size for _, (size, _) in listed) / 1e9
        free = shutil.disk_usage(folder).free / 1e9
        if gigabytes > free:
            raise UsageError(
                f"{named}: {gigabytes:.1f} GB do not fit into the cache {folder.parent} "
                f"({free:.1f} GB free); choose another config.data.cache_dir, or use the path of "
                "the mounted bucket"
            )
        log.info("copying %s: %.1f GB, to %s", named, gigabytes, folder.parent)
        top = os.path.commonpath([os.path.dirname(remote) for remote, _ in listed])

        def copy(remote):
            name = urllib.parse.quote(os.path.relpath(remote, top), safe="")
            fetch(remote, folder / (name if name != MANIFEST else f"%6D{name[1:]}"))

        with concurrent.futures.ThreadPoolExecutor(_DOWNLOADS) as pool:
            list(pool.map(copy, [remote for remote, _ in listed]))

    return cached_folder(root, "fetched", content_key(address, listed), build)


def cached_folder(root, kind, key, build):
    """The folder `root/kind/key`, built by `build(folder)` if it is absent or damaged.

    Of several processes one builds and the others wait; without file locks each builds its own.

    Raises:
      UsageError: the cache cannot be written.
    """
    folder = root / kind / key
    if _is_intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(root / kind / f"{key}.lock") as is_locked:
            if _is_intact(folder):
                return folder
            if is_locked:  # the processes that left these are dead
                for abandoned in folder.parent.glob(f"{key}.tmp-*"):
                    shutil.rmtree(abandoned, ignore_errors=True)
            _build(folder, key, build)
    except OSError as error:
        raise not_writable(root, error) from error
    return folder


def not_writable(root, error):
    """The UsageError for an OSError of the cache."""
    return UsageError(
        f"config.data.cache_dir={str(root)!r} cannot be written ({error.strerror or error}); "
        "choose a writable folder with free space"
    )


def _build(folder, key, build):
    temporary = Path(tempfile.mkdtemp(prefix=f"{key}.tmp-", dir=folder.parent))
    try:
        build(temporary)
        files = {path.name: checksums(path) for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps(files))
        if folder.exists():
            if _is_intact(folder):  # built meanwhile by a process without a lock
                return
            log.warning("the cache entry %s is damaged; building it again", folder)
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(path, wait=True):
    """Hold an exclusive lock on the file `path`.

    Yields True; False if the file system has no locks; None if `wait` is False and another process
    holds the lock.
    """
    with open(path, "w") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        except (ImportError, OSError):
            yield False
        else:
            yield True  # closing the file releases the lock


def checksums(path):
    """[size of a file, CRC-32 of each checked block]"""
    size = path.stat().st_size
    return [size, *(_checksum(path, start) for start in _checked_blocks(size))]


def _checked_blocks(size):
    """First bytes of the blocks that have a checksum in a file of `size` bytes."""
    return [i * _BLOCK for i in _evenly_spaced(-(-size // _BLOCK), _FILE_BLOCKS)]


def _evenly_spaced(count, limit):
    """At most `limit` of the numbers 0..count-1, evenly spaced, including the first and last."""
    selected = min(count, limit)
    return [i * (count - 1) // max(selected - 1, 1) for i in range(selected)]


def _checksum(path, start):
    with open(path, "rb") as file:
        file.seek(start)
        return zlib.crc32(file.read(_BLOCK))


def _is_intact(folder):
    """Whether all files have the sizes of the manifest, and the compared blocks its checksums."""
    try:
        files, blocks = json.loads((folder / MANIFEST).read_text()), []
        for name, (size, *sums) in files.items():
            path = folder / name
            if path.stat().st_size != size:
                return False
            blocks += [(path, *block) for block in zip(_checked_blocks(size), sums, strict=True)]
        compared = (blocks[i] for i in _evenly_spaced(len(blocks), _ENTRY_BLOCKS))
        return all(_checksum(path, start) == crc for path, start, crc in compared)
    except (OSError, ValueError):
        return False


def remember(root, key, compute):
    """`compute()` (JSON-able), stored under `key`; computed again if the file is unreadable."""
    path = root / "memo" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = io.read_json(path)
        if stored["sum"] == content_key(stored["value"]):
            return stored["value"]
    value = compute()
    with contextlib.suppress(OSError):  # without the file the next run only takes longer
        path.parent.mkdir(parents=True, exist_ok=True)
        io.write_text(path, json.dumps({"sum": content_key(value), "value": value}))
    return value


def remember_for_file(root, path, quantity, compute):
    """`compute()` about the file `path`; remembered for large files until size or mtime change."""
    if os.stat(path).st_size < _REMEMBER_FROM:
        return compute()
    return remember(root, content_key(quantity, *_file_state(path)), compute)


def _file_state(path):
    stat = os.stat(path)
    return os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino


def file_digests(root, files):
    """Hexadecimal hashes of the first `size` bytes of each (path, size) in `files`.

    Remembered for each large file, and for all files if they are large together.
    """

    def compute():
        return [
            remember_for_file(root, path, ["digest", size], functools.partial(_digest, path, size))
            for path, size in files
        ]

    states = [(size, _file_state(path)) for path, size in files]
    if sum(file_size for _, (_, file_size, *_) in states) < _REMEMBER_FROM:
        return compute()
    states = [[path, size, *rest] for size, (path, *rest) in states]
    return remember(root, content_key("digests", states), compute)


def _digest(path, size):
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while size > 0 and (block := file.read(min(size, _BLOCK))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()
