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
_LONGEST_NAME = 120  # characters; Weights & Biases takes 128


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


def newest_meta(workdir):
    """(step, meta) of the newest checkpoint with readable metadata; (None, {}) without one."""
    root = io.folder(workdir) / CHECKPOINTS
    for step in reversed(checkpoint_steps(root)):
        # Restoring reports a damaged checkpoint; here it is skipped.
        with contextlib.suppress(OSError, ValueError):
            if (root / str(step) / MANIFEST).exists():
                meta = io.read_json(root / str(step) / "meta" / "metadata")
                if isinstance(meta, dict) and isinstance(meta.get("record", {}), dict):
                    return step, meta
    return None, {}


def checkpoint_record(workdir):
    """The run's record in its newest checkpoint; {} without one."""
    return newest_meta(workdir)[1].get("record", {})


def run_record(workdir):
    """The run's record, and `launches` of run.json; {} without a run."""
    path = io.folder(workdir) / RUN_FILE
    contents = _read_dict(path) if path.is_file() else {}
    launches = contents.get("launches", [])
    if not isinstance(launches, list) or not all(isinstance(each, dict) for each in launches):
        raise UsageError(f"{path}: not the record of a run; delete it (it is a copy)")
    return {**contents, **checkpoint_record(workdir)}


def recorded_config(workdir, setting="--workdir"):
    """The config of a run as a plain dict with lists for tuples.

    It comes from the newest checkpoint, or from config.json in a run without checkpoints.

    Args:
      setting: the flag or setting that names the directory, for messages.
    Raises: UsageError if `workdir` is not a run directory or its config cannot be read.
    """
    folder = io.folder(workdir, setting)
    if not folder.is_dir():
        raise UsageError(f"{setting}={workdir}: there is no such run directory")
    if config := checkpoint_record(folder).get("config"):
        return config
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UsageError(
            f"{setting}={workdir}: not a run directory, it has no {CONFIG_FILE}; use a directory "
            "written by --mode=train"
        )
    return _read_dict(path)


def recorded_setting(workdir, key):
    """The recorded value of a setting or a block by its dotted key, such as "model.depth"."""
    value = recorded_config(workdir)
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            path = io.folder(workdir) / CONFIG_FILE
            raise UsageError(f"{path}: not the config of a run, config.{key} is missing")
        value = value[part]
    return value


def holds_result(workdir):
    """Whether a directory holds a checkpoint or a clustering."""
    has_checkpoint = bool(checkpoint_steps(io.folder(workdir) / CHECKPOINTS))
    return has_checkpoint or holds_clustering(workdir)


def holds_clustering(workdir):
    """Whether a directory holds the clusters of cBTM, with its expert runs in subdirectories."""
    folder = io.folder(workdir)
    return not checkpoint_steps(folder / CHECKPOINTS) and (folder / CLUSTERING).is_file()


def saved_tokenizer(workdir):
    """Path of the tokenizer.json of a run; None without a run.

    Raises: UsageError if the file is not the recorded one: its ids would mean other text.
    """
    path = io.folder(workdir) / TOKENIZER_FILE
    if not holds_result(workdir):
        return None
    text, recorded = _read_text(path), run_record(workdir).get("tokenizer")
    if recorded and checksum(text) != recorded:
        raise UsageError(
            f"{path}: missing, or not the tokenizer of this run; restore the file, or use "
            "another --workdir"
        )
    return path if text is not None else None


def recorded_text(workdir):
    """`Data.text_record` of a run; None if its text is not recorded."""
    return run_record(workdir).get("text")


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
      path: the directory.
      is_new: False if an earlier launch left a checkpoint to resume.
      changed: {key: [before, now]} of the permitted changes of its config.
      config, command_line: arguments of `open_run`.
    """

    path: pathlib.Path
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
        earlier = {} if self.is_new else checkpoint_record(self.path)
        record = {**earlier, **entries, "config": self.config}
        multihost.run_on_primary(self.path, lambda: self._write(files, record))
        return record

    def _write(self, files, record):
        launch = describe_launch(self.command_line)
        if not self.is_new:
            launch["changed"] = self.changed
            launch["saved"] = newest_meta(self.path)[0]
        launches = [] if self.is_new else run_record(self.path).get("launches", [])
        with io.report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # First of all files: it identifies the directory as a run's.
            _write_json(self.path / CONFIG_FILE, self.config)
            for name, text in files.items():
                path = self.path / name
                if text is None and self.is_new:
                    path.unlink(missing_ok=True)
                elif text is not None and (self.is_new or not path.exists()):
                    io.write_atomic(path, text)
        entries = {name: entry for name, entry in record.items() if name != "config"}
        _write_json(self.path / RUN_FILE, {"launches": [*launches, launch], **entries})


def open_run(workdir, config, *, command_line, may_differ=(), completed=None):
    """Check that a run directory is free, or that `config` may resume the run there.

    All processes call this; process 0 reads. Nothing is written.

    Args:
      workdir: the directory; it may be absent.
      config: nested plain dict, the complete config.
      command_line: list of str for run.json.
      may_differ: regexes (full match on the dotted key, such as `log\\..*`) of settings that a
        later launch may change.
      completed: function that adds settings that are newer than a recorded config, or None.

    Raises: UsageError naming the settings that differ with both values, or the file at fault.
    """
    config, changed = json.loads(json.dumps(config)), {}
    is_new = bool(multihost.run_on_primary(workdir, lambda: int(_is_new(workdir))))

    def check():
        changed.update(check_config(workdir, config, may_differ, completed))

    if not is_new:
        multihost.run_on_primary(workdir, check)
    return OpenedRun(io.folder(workdir), is_new, changed, config, tuple(command_line))


def _is_new(workdir):
    folder = io.folder(workdir)
    if not io.is_remote(folder):
        _check_writable(folder)
    if not checkpoint_record(folder):
        path = folder / CONFIG_FILE
        # Models in Hugging Face's format have a config.json too.
        if path.exists() and "steps" not in _read_dict(path):
            raise UsageError(f"{path}: not a config of efx; use another --workdir")
    _check_nothing_moved(folder)
    return not holds_result(folder)


def _check_nothing_moved(folder):
    """UsageError if a part of the run was moved, or its disk is not mounted.

    This launch would write that part from the start.
    """
    steps, has_metrics = finished_steps(folder / CHECKPOINTS), (folder / METRICS_FILE).exists()
    launches = run_record(folder).get("launches", [])
    saved = [step for launch in launches if (step := launch.get("saved")) is not None]
    present, missing = METRICS_FILE, []
    if saved and not steps:
        present, missing = RUN_FILE, [f"{CHECKPOINTS}/{saved[-1]}"]
    elif any(steps) and not has_metrics:
        present, missing = f"{CHECKPOINTS}/{steps[-1]}", [METRICS_FILE]
    elif has_metrics and not steps:
        missing = [name for name in (CONFIG_FILE, RUN_FILE) if not (folder / name).exists()]
    if missing:
        raise UsageError(
            f"--workdir={folder} has {present} but no {missing[0]}; restore or mount it, or use "
            "another --workdir"
        )


def _check_writable(folder):
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    problem = ""
    if not existing.is_dir():
        problem = "it is not a directory"
    elif not os.access(existing, os.W_OK):
        problem = "permission denied"
    if problem:
        raise UsageError(f"cannot write to {existing}: {problem}; use another --workdir")


def check_config(workdir, config, may_differ, completed=None):
    """{key: [before, now]} of the permitted changes if `config` may resume the run in `workdir`.

    Arguments and errors: see `open_run`.
    """
    recorded, changed, refused = recorded_config(workdir), {}, []
    recorded = completed(recorded) if completed else recorded
    for key, (before, now) in differences(recorded, json.loads(json.dumps(config))).items():
        if any(re.fullmatch(pattern, key) for pattern in may_differ):
            changed[key] = [before, now]
        else:
            refused.append(f"config.{key}: {before!r} in the run, {now!r} here")
    if refused:
        others = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise UsageError(
            f"--workdir={workdir} has a run with another config ({'; '.join(refused[:_SHOWN])}"
            f"{others}); use another --workdir, or the values of that run"
        )
    return changed


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
    """{"revision": sha, "dirty": bool} of efx's own checkout; None if efx is installed elsewhere.

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
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def run_name(workdir, command_line):
    """A short name: the directory, the config, and the settings changed on the command line."""
    config, changed = "", []
    for argument in command_line:
        key, _, value = argument.lstrip("-").partition("=")
        if key == "config":
            file, colon, variants = pathlib.PurePath(value).name.partition(":")
            config = file.removesuffix(".py") + colon + variants
        elif key.startswith("config.") and not key.startswith("config.log."):
            changed.append(f"{key.removeprefix('config.')}={value}")
    details = ", ".join([config] * bool(config) + changed)
    name = pathlib.PurePath(workdir).name + (f" ({details})" if details else "")
    return shortened(name, _LONGEST_NAME)


def shortened(text, most):
    """A text of at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _write_json(path, contents):
    io.write_atomic(path, json.dumps(contents, indent=2, sort_keys=path.name == CONFIG_FILE) + "\n")
