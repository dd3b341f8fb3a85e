"""Files and folders, on a disk or in an object store: addresses, checked reads, atomic writes.

An object store holds whole objects: no locks, no renames, no appending. A run directory there is
written through a local copy (`Mirror`); text there is read through one (`efx.data.sources`).
"""

import contextlib
import errno
import functools
import json
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import threading
import time

from efx.errors import PassingError, UsageError, extra

# By scheme: fsspec's name of the store, which is that of efx's extra. Orbax writes checkpoints to
# Google's store only.
_STORES = {"gs": "gcs", "s3": "s3"}
_OF_RUNS = "gs"
# Names of error classes, since few of these libraries are installed: Python's own and requests',
# httpx' and google.auth's, aiohttp's, botocore's.
_NETWORK_ERRORS = {
    "ConnectionError", "TimeoutError", "gaierror", "Timeout", "TransportError",
    "ClientConnectionError", "ClientPayloadError", "HTTPClientError",
}  # fmt: skip
_UPLOAD_SECONDS = 60  # between two uploads of what a run logs
_LONGEST_NAME = 255  # bytes, of all file systems in use


def is_remote(address):
    """Whether a path or address is in an object store."""
    return "://" in str(address)


def folder(address, setting="--workdir"):
    """The path of a run folder: pathlib.Path on a disk, epath.Path at gs://BUCKET/FOLDER.

    setting: the one that the address comes from. Raises UsageError for any other address, and for a
    store that cannot be reached.
    """
    if not is_remote(address):
        return _checked_folder(address, setting)
    scheme = str(address).partition("://")[0]
    if scheme != _OF_RUNS:
        raise UsageError(
            f"{setting}={address}: checkpoints cannot be written to {scheme}://; use a folder "
            "on a disk (or on a mounted bucket), or gs://BUCKET/FOLDER"
        )
    return _opened(str(address), setting)


@functools.lru_cache
def _opened(address, setting):
    store = _store(address, f"{setting}={address}")
    try:
        store.info(address)
    except FileNotFoundError:
        pass  # it may be made
    except Exception as error:  # of the store's client: no credentials, no bucket, no network
        raise unreachable(f"{setting}={address}", error) from error
    from etils import epath

    return epath.Path(address)


def local_folder(address, setting="--workdir"):
    """The path of a folder that has to be on a disk."""
    if is_remote(address):
        raise UsageError(
            f"{setting}={address}: must be a folder on a disk; only single runs can be at gs://"
        )
    return _checked_folder(address, setting)


def _checked_folder(address, setting):
    """`local_path` of a folder of runs, whose name is also written down and given to commands: it
    has to be the same everywhere, so a ~ that no shell has replaced is refused."""
    if pathlib.PurePath(address).parts[:1] == ("~",):
        raise UsageError(
            f"{setting}={address}: the shell did not expand ~; use the whole path, such as "
            f"{os.path.expanduser(address)}"
        )
    return local_path(address, setting)


def local_path(address, setting):
    """The pathlib.Path of a file or folder on a disk, which need not exist; a `~` in front is the
    home of the user, as it is for a shell.

    setting: the one that the address comes from. Raises UsageError for a name that no file can
    have, and for what may not be looked at.
    """
    try:
        path = pathlib.Path(os.path.expanduser(address))
        # Below a folder that is not there yet the system would say so only when it is made.
        if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError) as error:  # Python's, of a \0
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{setting}={address} cannot be used: {reason}") from None
    return path


def _store(address, named):
    """fsspec's file system of an address; named: the setting and its value."""
    scheme = str(address).partition("://")[0]
    if scheme not in _STORES:
        known = " or ".join(f"{name}://" for name in _STORES)
        raise UsageError(f"{named}: {scheme}:// is not supported; use a path, {known}")
    import fsspec

    name = _STORES[scheme]
    # Orbax writes past fsspec, which would not see that in a listing that it remembers.
    fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        return fsspec.filesystem(name)
    except ImportError as error:
        raise UsageError(f"{named}: {scheme}:// needs {extra(name)}") from error


def is_network_error(error):
    """Whether the network or a server failed, so that a later try may succeed."""
    while error is not None:
        names = {base.__name__ for base in type(error).__mro__}
        status = _http_status(error)
        if names & _NETWORK_ERRORS or status in (408, 429) or 500 <= status < 600:
            return True
        error = error.__cause__ or error.__context__
    return False


def _http_status(error):
    """The HTTP status that an error of a client library holds, or 0."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # httpx, requests
        status = getattr(response, "status_code", None)
    else:  # aiohttp, gcsfs
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else 0


def unreachable(named, error, kind=None):
    """The UsageError for an error of a store's client: a PassingError if the network failed.

    Args:
      named: the setting and its value, for the message.
      kind: the class to use whatever failed.
    """
    kind = kind or (PassingError if is_network_error(error) else UsageError)
    first_line = (str(error).splitlines() or [""])[0][:200]
    return kind(
        f"{named} cannot be reached: {type(error).__name__}: {first_line}; check the"
        " name, the network and the credentials"
    )


def rename_folder(source, target):
    """Gives a folder another name; in a store, which has no folders, each of its objects."""
    if not is_remote(source):
        source.rename(target)
        return
    store = _store(source, str(source))
    old, new = (str(address).partition("://")[2] for address in (source, target))
    for name in store.find(old):
        store.cp_file(name, new + name.removeprefix(old))
        store.rm_file(name)


class Mirror:
    """A local folder whose files are those of a run folder; `path` is the run folder itself where
    that is on a disk.

    What is there by the given names is copied on entry. `upload` copies what is new or changed, and
    deletes what is gone.
    """

    def __init__(self, run_folder, names):
        self._run_folder, self._names = run_folder, names
        self.path = run_folder
        self._uploaded = {}  # relative name: (size, time) of the local file
        self._next, self._beside = 0.0, None  # when an upload is due, and the last that was

    def __enter__(self):
        if is_remote(self._run_folder):
            self.path = pathlib.Path(tempfile.mkdtemp(prefix="efx-run-"))
            for name in self._names:
                self._download(self._run_folder / name, name)
        return self

    def _download(self, source, name):
        if source.is_dir():
            for child in source.iterdir():
                self._download(child, f"{name}/{child.name}")
        elif source.exists():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            self._uploaded[name] = _identity(target)

    def upload(self, if_due=False):
        """if_due: only if the last upload is a minute ago, beside what the caller does meanwhile,
        and the next one will do if it fails."""
        if self.path == self._run_folder or (if_due and time.monotonic() < self._next):
            return
        if if_due and self._beside and self._beside.is_alive():
            return
        self._next = time.monotonic() + _UPLOAD_SECONDS
        if if_due:
            self._beside = threading.Thread(target=self._upload_or_warn, daemon=True)
            self._beside.start()
            return
        self.wait()
        try:
            self._upload()
        except Exception as error:  # see `_opened`
            raise unreachable(self._run_folder, error, PassingError) from error

    def wait(self):
        """Waits until no upload is under way, which would miss files that go."""
        if self._beside:
            self._beside.join()

    def _upload_or_warn(self):
        try:
            self._upload()
        except Exception as error:  # see `_opened`
            problem = unreachable(self._run_folder, error)
            print(f"efx: warning: {problem}", file=sys.stderr, flush=True)

    def _upload(self):
        present = {
            path.relative_to(self.path).as_posix(): path
            for path in self.path.rglob("*")
            if path.is_file()
        }
        for name, path in present.items():
            identity = _identity(path)
            if self._uploaded.get(name) != identity:
                (self._run_folder / name).write_bytes(path.read_bytes())
                self._uploaded[name] = identity
        for name in self._uploaded.keys() - present.keys():
            (self._run_folder / name).unlink(missing_ok=True)
            del self._uploaded[name]

    def __exit__(self, kind, error, trace):
        if self.path == self._run_folder:
            return
        # An error that is being raised already is the one to report.
        with contextlib.suppress(*([Exception] if kind else [])):
            self.upload()
        shutil.rmtree(self.path, ignore_errors=True)


def _identity(path):
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


# Bytes of a JSON file. The largest tokenizers have 35 million.
MOST_JSON = 64 << 20


def read_json(path, most=MOST_JSON):
    """The contents of a JSON file of at most so many bytes.

    Raises: OSError; ValueError for what is no file, too large, no text, not JSON, or nested so
      deeply that no program of ours has written it.
    """
    return parse_json(read_text(path, most))


def parse_json(text):
    """`json.loads`, whose every complaint is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_text(path, most=MOST_JSON):
    """The text of a file of at most so many bytes; errors as for `read_json`."""
    if not is_remote(path):
        check_regular(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return data.decode("utf-8")


def check_regular(path):
    """ValueError unless a path is of a file: reading a pipe or a device may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a file")


def is_plain_name(name):
    """Whether what a file calls another one can be the name of one in the same folder."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return not set(name) & set("/\\\0") and len(name.encode("utf-8", "surrogatepass")) < 256


def stays_below(name):
    """Whether a relative path leads to something below the folder that it starts in."""
    return not name.startswith("/") and "\0" not in name and ".." not in name.split("/")


@contextlib.contextmanager
def replacing(path):
    """Yields the path of a file or folder to make, which takes the place of `path` at the end.

    Whoever reads `path` meanwhile, or after a crash, finds what was there before. When making it
    fails, what there is of it is removed. A folder takes the place of none or of an empty one.

    path: pathlib.Path or etils.epath.Path; its folder exists.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        raise


def write_text(path, text):
    """Writes a file, on the disk (not in the system's memory alone) when this returns.

    path: see `replacing`. An object store has whole objects only, which need no replacing.
    """
    if "://" in str(path):
        path.write_text(text)
        return
    with replacing(path) as part, open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def describe_os_error(error):
    """Describe an OSError in a few words for a user."""
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        path = pathlib.Path(str(error.filename))
        for part in (path, *path.parents):
            if part.exists() and not part.is_dir():
                return f"{part} is a file, not a folder"
    texts = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.ENOTDIR: "a folder of this path is a file",
    }
    return texts.get(error.errno, error.strerror or str(error))


@contextlib.contextmanager
def report_write_errors(path):
    """Raise an OSError of the body as a UsageError that names `path`."""
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "free space on it, or ",
            errno.EDQUOT: "free space, or ",
            errno.EACCES: "change its permissions, or ",
        }
        raise UsageError(
            f"cannot write {error.filename or path}: {describe_os_error(error)}; "
            f"{remedies.get(error.errno, '')}use another folder"
        ) from error
    except UsageError:
        raise
    except Exception as error:
        if is_remote(path):  # whose client has errors of its own
            raise unreachable(path, error) from error
        raise


def write_atomic(path, text):
    """Writes `text` to `path` so that a reader (or a crash) sees the old file or the new one."""
    with report_write_errors(path):
        write_text(path, text)
