"""The run directory: everything about a run, readable without JAX.

    config.json      every setting, sorted
    run.json         the run's record, and one entry for each launch (versions, git revision,
                     devices, command line, time, newest saved checkpoint)
    tokenizer.json
    metrics.jsonl    one line for each logged step              (efx.logging)
    checkpoints/     one directory for each kept step           (efx.checkpoint)
    samples/         text samples                               (efx.logging)
    tensorboard/     event files                                (efx.logging)

A run's record holds its config, the hashes of its text, held-out split and tokenizer, and its
source runs (initialisation, conversion, teacher). Each checkpoint stores the record under its
checksums. A launch that resumes is compared with that record alone; config.json and run.json are
readable copies.

`open_run` checks the directory and writes nothing. `OpenedRun.commit` writes after all checks have
passed, so a launch that fails leaves the directory unchanged. Until its first checkpoint is saved a
directory is free for any config; a directory that has lost its checkpoints since is refused. `Lock`
refuses a second launch.
"""

import contextlib
import dataclasses
import datetime
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

from efx import __version__, io
from efx.errors import TransientError, UsageError, warn
from efx.parallel import multihost

CONFIG_FILE = "config.json"
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
# Of a checkpoint, see efx.checkpoint.
MANIFEST = "efx_manifest.json"
ITEMS = ("state", "data", "meta")
COMMITTED = "commit_success.txt"  # orbax's last file in an object store
METRICS_FILE = "metrics.jsonl"
TOKENIZER_FILE = "tokenizer.json"
CLUSTERING = "clusters/clustering.json"
LOCK_FILE = ".lock"
# Packages whose versions can change the numbers of a run.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_LIBRARIES += ("ml-collections", "tokenizers")
_ABSENT = "(absent)"  # value of a setting that only the other config has
_SHOWN = 6  # differing settings named in an error


# ---- reading -----------------------------------------------------------------------------------


def checkpoint_steps(root):
    """Steps that have a directory in `root`, in ascending order, complete or not; [] without any.

    Args:
      root: directory of the checkpoints of a run.
    """
    try:
        names = [path.name for path in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        kind = TransientError if io.is_transient(error) else UsageError
        raise kind(
            f"cannot read checkpoints in {root}: {io.describe_os_error(error)}; use another "
            "directory"
        ) from error
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,17}", name))


def is_finished(folder):
    """Whether a step was saved to its end; it may have been damaged later.

    A step without its manifest counts, so that a deleted manifest is reported as damage. In an
    object store, which cannot rename, an unfinished step has its final name.
    """
    if io.is_remote(folder):
        return (folder / MANIFEST).exists() and (folder / COMMITTED).exists()
    return (folder / MANIFEST).exists() or all((folder / item).is_dir() for item in ITEMS)


def finished_steps(root):
    """The finished steps in ascending order."""
    return [step for step in checkpoint_steps(root) if is_finished(root / str(step))]


class RunDir:
    """A run directory as it is when it is opened; each of its files is read once.

    Args:
      workdir: path or gs:// address; the directory may be absent.
      setting: the flag or setting that names it, for messages.
    Attributes:
      path: of the directory. name: the setting and its value, for messages.
      step, meta: of the newest checkpoint with readable metadata; None and {} without one.
    """

    def __init__(self, workdir, setting="--workdir"):
        self.path, self.name = io.folder(workdir, setting), f"{setting}={workdir}"
        self.step, self.meta = _newest_meta(self.path / CHECKPOINTS)

    @functools.cached_property
    def has_clustering(self):
        """Whether it has the clusters of cBTM, with its expert runs in subdirectories."""
        has_checkpoint = checkpoint_steps(self.path / CHECKPOINTS)
        return not has_checkpoint and (self.path / CLUSTERING).is_file()

    @functools.cached_property
    def has_result(self):
        """Whether it has a checkpoint or a clustering."""
        return bool(checkpoint_steps(self.path / CHECKPOINTS)) or self.has_clustering

    @functools.cached_property
    def record(self):
        """The record of the newest checkpoint, without one of run.json, and its `launches`."""
        path = self.path / RUN_FILE
        contents = _read_dict(path) if path.is_file() else {}
        launches = contents.get("launches", [])
        if not isinstance(launches, list) or not all(isinstance(each, dict) for each in launches):
            raise UsageError(f"{path}: not the record of a run; delete it (it is a copy)")
        return {**self.meta.get("record", contents), "launches": launches}

    @functools.cached_property
    def config(self):
        """The config as a plain dict with lists for tuples, of the newest checkpoint if there is
        one, else of config.json.

        Raises: UsageError if this is not a run directory or its config cannot be read.
        """
        if not self.path.is_dir():
            raise UsageError(f"{self.name}: there is no such run directory")
        if config := self.meta.get("record", {}).get("config"):
            return config
        path = self.path / CONFIG_FILE
        if not path.is_file():
            raise UsageError(
                f"{self.name}: not a run directory, it has no {CONFIG_FILE}; use a directory "
                "written by --mode=train"
            )
        return _read_dict(path)

    def setting(self, key):
        """The recorded value of a setting or a block by its dotted key, such as "model.depth"."""
        value = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                path = self.path / CONFIG_FILE
                raise UsageError(f"{path}: not the config of a run, config.{key} is missing")
            value = value[part]
        return value

    @functools.cached_property
    def tokenizer_path(self):
        """Path of tokenizer.json; None without a run.

        Raises: UsageError if the file is not the recorded one: its ids would mean other text.
        """
        path = self.path / TOKENIZER_FILE
        if not self.has_result:
            return None
        text, recorded = _read_text(path), self.record.get("tokenizer")
        if recorded and checksum(text) != recorded:
            raise UsageError(
                f"{path}: missing, or not the tokenizer of this run; restore the file, or use "
                "another --workdir"
            )
        return path if text is not None else None

    @property
    def text_record(self):
        """`Data.text_record` of the run; None if its text is not recorded."""
        return self.record.get("text")

    def check_config(self, config, may_differ, add_defaults=None):
        """{key: [before, now]} of the permitted changes if `config` may resume the run.

        Arguments and errors: see `open_run`.
        """
        recorded, changed, refused = self.config, {}, []
        recorded = add_defaults(recorded) if add_defaults else recorded
        for key, (before, now) in differences(recorded, json.loads(json.dumps(config))).items():
            if any(re.fullmatch(pattern, key) for pattern in may_differ):
                changed[key] = [before, now]
            else:
                refused.append(f"config.{key}: {before!r} in the run, {now!r} here")
        if refused:
            others = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            raise UsageError(
                f"{self.name} has a run with another config ({'; '.join(refused[:_SHOWN])}"
                f"{others}); use another --workdir, or the values of that run"
            )
        return changed

    def check_writable(self):
        """UsageError unless a launch may write here: it can, and no part of a run is missing."""
        if not io.is_remote(self.path):
            existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
            problem = "" if os.access(existing, os.W_OK) else "permission denied"
            problem = problem if existing.is_dir() else "it is not a directory"
            if problem:
                raise UsageError(f"cannot write to {existing}: {problem}; use another --workdir")
        path = self.path / CONFIG_FILE
        # Models in Hugging Face's format have a config.json too.
        if not self.meta.get("record") and path.exists() and "steps" not in _read_dict(path):
            raise UsageError(f"{path}: not a config of efx; use another --workdir")
        self._check_nothing_moved()

    def _check_nothing_moved(self):
        """UsageError if a part of the run was moved, or its disk is not mounted.

        This launch would write that part from the start.
        """
        steps = finished_steps(self.path / CHECKPOINTS)
        has_metrics = (self.path / METRICS_FILE).exists()
        launches = self.record.get("launches", [])
        saved = [step for launch in launches if (step := launch.get("saved")) is not None]
        present, missing = METRICS_FILE, []
        if saved and not steps:
            present, missing = RUN_FILE, [f"{CHECKPOINTS}/{saved[-1]}"]
        elif any(steps) and not has_metrics:
            present, missing = f"{CHECKPOINTS}/{steps[-1]}", [METRICS_FILE]
        elif has_metrics and not steps:
            missing = [name for name in (CONFIG_FILE, RUN_FILE) if not (self.path / name).exists()]
        if missing:
            raise UsageError(
                f"{self.name} has {present} but no {missing[0]}; restore or mount it, or use "
                "another --workdir"
            )


def _newest_meta(root):
    """(step, meta) of the newest checkpoint with readable metadata; (None, {}) without one."""
    for step in reversed(checkpoint_steps(root)):
        # Restoring reports a damaged checkpoint; here it is skipped.
        with contextlib.suppress(OSError, ValueError):
            if (root / str(step) / MANIFEST).exists():
                meta = io.read_json(root / str(step) / "meta" / "metadata")
                if isinstance(meta, dict) and isinstance(meta.get("record", {}), dict):
                    return step, meta
    return None, {}


def checksum(text):
    """A hash of a text; None for None."""
    return text and hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_text(path):
    """The text of a file, None without one. Invalid bytes are replaced and change the checksum."""
    return path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else None


def _read_dict(path):
    """The dict in a JSON file."""
    remedy = "restore the file, or use another --workdir"
    try:
        contents = io.read_json(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {io.describe_os_error(error)}") from error
    except ValueError as error:
        raise UsageError(f"{path}: damaged, not JSON ({error}); {remedy}") from error
    if not isinstance(contents, dict):
        raise UsageError(f"{path}: expected a dict, not {type(contents).__name__}; {remedy}")
    return contents


# ---- opening a run -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OpenedRun:
    """A checked run directory. Nothing is written before `commit`.

    Attributes:
      run: `RunDir`, as it was before this launch.
      is_new: False if an earlier launch left a checkpoint to resume.
      changed: {key: [before, now]} of the permitted changes of its config.
      config, command_line: arguments of `open_run`.
    """

    run: RunDir
    is_new: bool
    changed: dict
    config: dict
    command_line: tuple

    def commit(self, files, **entries):
        """Write config.json, `files`, and run.json with an entry for this launch.

        All processes call this; process 0 writes.

        Args:
          files: {name: text, or None for no such file}. A resumed run keeps its files; a new run
            replaces the files of an earlier launch without a checkpoint.
          entries: of the run's record; they replace those of the newest checkpoint.

        Returns: the run's record for its next checkpoints.
        """
        earlier = {} if self.is_new else self.run.meta.get("record", {})
        record = {**earlier, **entries, "config": self.config}
        multihost.run_on_primary(self.run.path, lambda: self._write(files, record))
        return record

    def _write(self, files, record):
        launch, launches, folder = describe_launch(self.command_line), [], self.run.path
        if not self.is_new:
            launch |= {"changed": self.changed, "saved": self.run.step}
            launches = self.run.record.get("launches", [])
        with io.report_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # First of all files: it identifies the directory as a run's.
            _write_json(folder / CONFIG_FILE, self.config)
            for name, text in files.items():
                if text is None and self.is_new:
                    (folder / name).unlink(missing_ok=True)
                elif text is not None and (self.is_new or not (folder / name).exists()):
                    io.write_atomic(folder / name, text)
        entries = {name: entry for name, entry in record.items() if name != "config"}
        _write_json(folder / RUN_FILE, {"launches": [*launches, launch], **entries})


def open_run(workdir, config, *, command_line, may_differ=(), add_defaults=None):
    """The `OpenedRun` of a directory that is free, or whose run `config` may resume.

    All processes call this; process 0 checks. Nothing is written.

    Args:
      workdir: the directory; it may be absent.
      config: nested plain dict, the complete config.
      command_line: list of str for run.json.
      may_differ: regexes (full match on the dotted key, such as `log\\..*`) of settings that a
        later launch may change.
      add_defaults: function that adds settings that are newer than a recorded config, or None.

    Raises: UsageError naming the settings that differ with both values, or the file at fault.
    """
    run, config, changed = RunDir(workdir), json.loads(json.dumps(config)), {}

    def check():
        run.check_writable()
        if run.has_result:
            changed.update(run.check_config(config, may_differ, add_defaults))
        return int(not run.has_result)

    is_new = bool(multihost.run_on_primary(workdir, check))
    return OpenedRun(run, is_new, changed, config, tuple(command_line))


def differences(before, now, among=".*"):
    """{dotted key: (before, now)} of the settings that differ between two nested plain dicts.

    Args:
      among: regex (full match on the dotted key) of the compared settings.
    """
    before, now = dotted(before), dotted(now)
    keys = [key for key in sorted(before.keys() | now.keys()) if re.fullmatch(among, key)]
    pairs = {key: (before.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys}
    # True == 1 in Python, but not as a setting.
    return {
        key: (a, b)
        for key, (a, b) in pairs.items()
        if a != b or isinstance(a, bool) != isinstance(b, bool)
    }


def dotted(config, prefix=""):
    """{"model.depth": 4, ...}: nested dicts to dotted keys. An empty dict is kept as a value."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(dotted(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Lock:
    """Keeps a second launch out of a run directory.

    The lock is the system's, on an open file, so it ends with the process. Only launches that write
    take one; process 0 takes it for all. A file system without locks causes one warning.

    A context manager that locks an existing directory; `take` makes and locks an absent one.

    Raises: UsageError, also from `take`, with the process and host of the other launch.
    """

    def __init__(self, workdir):
        self._folder, self._lock, self._is_tried = io.folder(workdir), None, False

    def __enter__(self):
        multihost.run_on_primary(self._folder, lambda: self._folder.is_dir() and self._take())
        return self

    def __exit__(self, kind, error, trace):
        if self._lock:
            self._lock.release()

    def take(self):
        """Lock the directory, unless it is locked already."""
        multihost.run_on_primary(self._folder, self._take)

    def _take(self):
        if self._is_tried:
            return
        if io.is_remote(self._folder):
            self._warn("an object store")
            return
        import filelock

        path = self._folder / LOCK_FILE
        lock = filelock.FileLock(path, blocking=False, thread_local=False)
        with io.report_write_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except filelock.Timeout:
                holder = path.read_text(errors="replace").strip() or "another process"
                raise UsageError(
                    f"--workdir={self._folder} is in use by {holder}; wait for it, stop it, or use "
                    "another --workdir"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                self._warn("its file system")
                return
            path.write_text(f"process {os.getpid()} on {platform.node()}\n")
        self._lock, self._is_tried = lock, True

    def _warn(self, lacking):
        self._is_tried = True
        warn(
            f"{self._folder} cannot be locked ({lacking} has no locks): make sure that no other "
            "launch trains there"
        )


# ---- launches ----------------------------------------------------------------------------------


def describe_launch(command_line):
    """The entry of a launch in run.json: versions, machine, time and command line."""
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
        "command_line": [str(argument) for argument in command_line],
        "executable": os.path.basename(sys.executable),
    }


def amend_launch(workdir, **entries):
    """Add entries to the newest launch in run.json, if there is one. Process 0 calls this."""
    path = io.folder(workdir) / RUN_FILE
    if path.is_file():
        contents = _read_dict(path)
        contents["launches"][-1] |= entries
        _write_json(path, contents)


def machine_of(launch):
    """A launch's devices in words."""
    kind, count = launch["devices"]["kind"], launch["device_count"]
    return f"{launch['cpu_count']} CPU cores" if kind == "cpu" else f"{count} x {kind}"


def revision_of(launch):
    """A launch's git revision, " with changes" if there were any, or "unknown"."""
    git = launch["git"] or {"revision": "unknown", "dirty": False}
    return git["revision"] + " with changes" * git["dirty"]


def git_revision(package=None):
    """{"revision": sha, "code": hash of efx/, "dirty": bool} of efx's own checkout; None if efx is
    installed elsewhere.

    Changed files in results/ do not count: they are measurements.

    Args:
      package: the directory `efx`.
    """
    package = package or pathlib.Path(__file__).resolve().parent

    def git(*arguments):
        command = ["git", "-C", str(package), *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return completed.stdout.strip()

    try:
        top = git("rev-parse", "--show-toplevel")
        if pathlib.Path(top).resolve() != package.parent:
            return None
        changed = git("status", "--porcelain", "--", ":(top)", ":(top,exclude)results")
        revision, code = git("rev-parse", "HEAD", "HEAD:efx").split()
        return {"revision": revision, "code": code, "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def _write_json(path, contents):
    io.write_atomic(path, json.dumps(contents, indent=2, sort_keys=path.name == CONFIG_FILE) + "\n")
