"""Files and directories on a disk or in an object store: addresses, checked reads, atomic writes.

An object store has no locks, renames or appending, only whole objects. A run directory there is
written through a local copy (`Mirror`), and text there is downloaded (`efx.data.sources`).
"""

import contextlib
import errno
import functools
import json
import os
import pathlib
import shutil
import tempfile
import time

from efx.errors import TransientError, UsageError, extra, first_line, warn

_STORES = {"gs": "gcs", "s3": "s3"}  # scheme: fsspec's file system, also the name of efx's extra
_SCHEME_OF_RUNS = "gs"  # the only store that orbax writes checkpoints to
# Errors of Python, requests, httpx, google.auth, aiohttp and botocore. By name, since few of these
# libraries are installed.
_NETWORK_ERRORS = {
    "ConnectionError", "TimeoutError", "gaierror", "Timeout", "TransportError",
    "ClientConnectionError", "ClientPayloadError", "HTTPClientError",
}  # fmt: skip
# Of a failing disk, network or file server: a rerun may succeed.
TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ESTALE)
_UPLOAD_SECONDS = 60  # between two uploads of logged rows
MOST_JSON = 64 << 20  # bytes of a JSON file; the largest tokenizers have 35 million

# ---- addresses ---------------------------------------------------------------------------------


def is_remote(address):
    """Whether a path or address is in an object store."""
    return "://" in str(address)


def folder(address, setting="--workdir"):
    """Return the path of a run directory: pathlib.Path, or epath.Path for gs://BUCKET/DIRECTORY.

    Args:
      setting: the flag or setting that holds the address, for messages.
    Raises: UsageError for other stores and unusable names, TransientError for a network error.
    """
    if not is_remote(address):
        return local_path(address, setting)
    scheme = str(address).partition("://")[0]
    if scheme != _SCHEME_OF_RUNS:
        raise UsageError(
            f"{setting}={address}: checkpoints cannot be written to {scheme}://; use a directory "
            "on a disk (or on a mounted bucket), or gs://BUCKET/DIRECTORY"
        )
    return _reachable(str(address), setting)


@functools.lru_cache
def _reachable(address, setting):
    named = f"{setting}={address}"
    store = _store(address, named)
    with _report_store_errors(named), contextlib.suppress(FileNotFoundError):
        store.info(address)
    from etils import epath

    return epath.Path(address)


def local_path(address, setting="--workdir"):
    """Return the pathlib.Path of a local file or directory, which need not exist.

    Raises: UsageError, which names the setting, for an object store, an unexpanded ~, and a name
      that the file system refuses.
    """
    if is_remote(address):
        raise UsageError(f"{setting}={address}: must be on a local disk")
    path = pathlib.Path(address)
    if path.parts[:1] == ("~",):
        raise UsageError(
            f"{setting}={address}: the shell did not expand ~; use {os.path.expanduser(address)}"
        )
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise UsageError(f"{setting}={address} cannot be used: {error}") from None
    return path


# ---- object stores -----------------------------------------------------------------------------


def _store(address, named):
    """Return fsspec's file system for an address. named: the setting and its value."""
    scheme = str(address).partition("://")[0]
    if scheme not in _STORES:
        known = " or ".join(f"{name}://" for name in _STORES)
        raise UsageError(f"{named}: {scheme}:// is not supported; use a path, {known}")
    import fsspec

    name = _STORES[scheme]
    # Orbax writes past fsspec, whose cached listings would miss that.
    fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        return fsspec.filesystem(name)
    except ImportError as error:
        raise UsageError(f"{named}: {scheme}:// needs {extra(name)}") from error


def is_transient(error):
    """Whether the network, a server or a disk failed, so that a later try may succeed."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            return True
        names = {base.__name__ for base in type(error).__mro__}
        status = _http_status(error)
        if names & _NETWORK_ERRORS or status in (408, 429) or 500 <= status < 600:
            return True
        error = error.__cause__ or error.__context__
    return False


def _http_status(error):
    """Return the HTTP status in an error of a client library, or 0."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # httpx, requests
        status = getattr(response, "status_code", None)
    else:  # aiohttp, gcsfs
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else 0


def unreachable(named, error):
    """Return the UsageError for an error of a store's client.

    It is a TransientError if the network failed. named: the setting and its value.
    """
    kind = TransientError if is_transient(error) else UsageError
    return kind(
        f"{named} cannot be reached: {first_line(error)}; check the name, the network and the "
        "credentials"
    )


@contextlib.contextmanager
def _report_store_errors(named):
    """Raise an error of a store's client as `unreachable`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # each client has its own: no credentials, no bucket, no network
        raise unreachable(named, error) from error


def rename_folder(source, target):
    """Rename a directory; in a store, copy and delete each of its objects."""
    if not is_remote(source):
        source.rename(target)
        return
    store = _store(source, str(source))
    old, new = (str(address).partition("://")[2] for address in (source, target))
    for name in store.find(old):
        store.cp_file(name, new + name.removeprefix(old))
        store.rm_file(name)


class Mirror:
    """A local copy of a run directory in a store, uploaded while the run writes to it.

    `path` is the copy, or the run directory itself if that is on a disk. Entering downloads the
    files and directories `names`; leaving uploads and deletes the copy. (fsspec's rsync compares
    sizes only, and would delete the checkpoints, which are in the store alone.)
    """

    def __init__(self, run_directory, names):
        self._run_directory, self._names = run_directory, names
        self.path = run_directory
        self._uploaded = {}  # relative name: (size, time) of the local file
        self._next_upload = 0.0

    def __enter__(self):
        if is_remote(self._run_directory):
            self.path = pathlib.Path(tempfile.mkdtemp(prefix="efx-run-"))
            with _report_store_errors(self._run_directory):
                for name in self._names:
                    self._download(self._run_directory / name, name)
        return self

    def __exit__(self, kind, error, trace):
        if self.path == self._run_directory:
            return
        # Do not hide an error that is being raised.
        with contextlib.suppress(*([Exception] if kind else [])):
            self.upload()
        shutil.rmtree(self.path, ignore_errors=True)

    def _download(self, source, name):
        if source.is_dir():
            for child in source.iterdir():
                self._download(child, f"{name}/{child.name}")
        elif source.exists():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            self._uploaded[name] = _size_and_time(target)

    def upload(self, if_due=False):
        """Upload new and changed files and delete removed ones; TransientError if that fails.

        if_due: at most once a minute, with a warning if it fails.
        """
        if self.path == self._run_directory or (if_due and time.monotonic() < self._next_upload):
            return
        self._next_upload = time.monotonic() + _UPLOAD_SECONDS
        try:
            self._upload()
        except UsageError as error:
            if not if_due:  # the store was reached earlier, so a rerun may succeed
                raise TransientError(error) from error
            warn(error)

    def _upload(self):
        files = {p.relative_to(self.path).as_posix(): p for p in self.path.rglob("*")}
        files = {name: p for name, p in files.items() if p.is_file()}
        with _report_store_errors(self._run_directory):
            for name, path in files.items():
                identity = _size_and_time(path)
                if self._uploaded.get(name) != identity:
                    (self._run_directory / name).write_bytes(path.read_bytes())
                    self._uploaded[name] = identity
            for name in self._uploaded.keys() - files.keys():
                (self._run_directory / name).unlink(missing_ok=True)
                del self._uploaded[name]


def _size_and_time(path):
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


# ---- reading files from strangers --------------------------------------------------------------


def read_json(path):
    """Return the contents of a JSON file.

    Raises: OSError; ValueError for a file that is too large, not UTF-8 or not JSON.
    """
    return parse_json(read_text(path))


def parse_json(text):
    """`json.loads` that raises ValueError for deep nesting too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_text(path, most=MOST_JSON):
    """Return the text of a file of at most `most` bytes; errors as for `read_json`."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return data.decode("utf-8")


def stays_below(name):
    """Whether `name`, read from a file, is a relative path that does not leave its directory."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    return not name.startswith("/") and ".." not in name.split("/")


# ---- atomic writes -----------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path):
    """Yield a temporary path for a new file or directory, which replaces `path` at the end.

    Readers see the old contents until then, also after a crash, and the new ones are on the disk
    when this returns. An error deletes the new contents. Several processes may replace a file at
    the same time. A new directory can only replace an empty one or none.
    """
    # In a directory of its own, since tempfile's files are readable by their owner alone.
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
    ) as folder:
        part = pathlib.Path(folder, path.name)
        yield part
        move(part, path)


def move(source, target):
    """Rename a file or directory; its contents and its new name are on the disk afterwards."""
    flush(source)
    os.replace(source, target)
    flush_names(target.parent)


def flush(path):
    """Flush a file, or a directory and all files in it, to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            flush(child)
        flush_names(path)
    else:
        _fsync(path)


def flush_names(folder):
    """Flush the names in a directory to the disk, if its file system can do that."""
    with contextlib.suppress(OSError):
        _fsync(folder)


def _fsync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path, text):
    """Replace a file atomically and flush it to the disk. Raises OSError."""
    if is_remote(path):  # a store replaces whole objects
        path.write_text(text)
        return
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_atomic(path, text):
    """`write_text` that raises UsageError."""
    with report_write_errors(path):
        write_text(path, text)


@contextlib.contextmanager
def report_write_errors(path):
    """Raise an OSError, or an error of the store's client, as a UsageError that names `path`."""
    if is_remote(path):
        with _report_store_errors(path):
            yield
        return
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space, or use another disk" if is_full else "use another directory"
        raise UsageError(
            f"cannot write {error.filename or path}: {describe_os_error(error)}; {remedy}"
        ) from error


def describe_os_error(error):
    """Return the system's words for an OSError, such as "No space left on device"."""
    return error.strerror or str(error)
