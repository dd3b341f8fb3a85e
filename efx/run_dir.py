"""The run directory: everything about a run, readable without JAX.

    config.json      every setting, sorted
    run.json         a record of each launch (versions, git revision, devices, command line, time,
                     attention kernels), and the run's record
    held_out.json    which part of the text is held out        (efx.data.opened)
    tokenizer.json
    metrics.jsonl    one line per logged step                  (efx.logging)
    checkpoints/     one folder per kept step                  (efx.checkpoint)
    samples/         text samples                              (efx.logging)
    tensorboard/     event files                               (efx.logging)

A run's record holds its config, the hashes of its text, held-out split and tokenizer, and its
source runs (initialisation, conversion, teacher). Each checkpoint stores the record under its
checksums, and a launch that resumes is compared with that alone: config.json and run.json are
readable copies, which each launch writes again.

`open_run` checks the directory and writes nothing; `OpenedRun.commit` writes after all checks have
passed, so that a launch that fails leaves the directory as it was. A directory without a checkpoint
is free for any config. `Lock` refuses a second launch.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

from efx import __version__, io
from efx.errors import UsageError
from efx.parallel import multihost

CONFIG_FILE = "config.json"
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
MANIFEST = "efx_manifest.json"  # of a checkpoint that is whole, see efx.checkpoint
METRICS_FILE = "metrics.jsonl"
HELD_OUT_FILE = "held_out.json"
TOKENIZER_FILE = "tokenizer.json"
LOCK_FILE = ".lock"
# The kinds of results a folder may hold, by a path in it; the first that exists counts.
RESULTS = {"run": CHECKPOINTS, "clustering": "clusters/clustering.json"}
# The module whose `evaluate` or `sample` uses a result, by its kind and the function's name.
USES = {
    ("run", "evaluate"): "efx.train.finished_run",
    ("run", "sample"): "efx.train.finished_run",
    ("clustering", "evaluate"): "efx.cbtm.evaluation",
    ("clustering", "sample"): "efx.cbtm.sampling",
}
# A directory that has one of these and no config.json is refused.
_OF_A_RUN = (CHECKPOINTS, METRICS_FILE, RUN_FILE, TOKENIZER_FILE, HELD_OUT_FILE)
# A config.json without these is not of efx: Hugging Face models have one, too.
_OF_A_CONFIG = ("seed", "steps", "model")

_LONGEST_NAME = 120  # characters; Weights & Biases takes 128
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


class Home:
    """Detects that a run directory was renamed, deleted or unmounted. Call `check` before a write,
    which would make the directory again and split the run in two."""

    def __init__(self, folder):
        self._folder, self._config_seen = folder, False

    def check(self):
        """FileNotFoundError if the directory is missing, or config.json, if it was there at an
        earlier check: a save in the background may have made the directory again."""
        os.stat(self._folder)
        config = self._folder / CONFIG_FILE
        self._config_seen = self._config_seen or config.exists()
        if self._config_seen:
            os.stat(config)


def recorded_config(workdir, setting="--workdir"):
    """The config of a run as a plain dict (tuples are lists): that of its newest checkpoint, of a
    run without one config.json.

    setting: the flag or setting that names the folder, for messages.
    Raises UsageError if `workdir` is not a run folder or its config cannot be read.
    """
    folder = io.folder(workdir, setting)
    if not folder.is_dir():
        raise UsageError(f"{setting}={workdir} is not a run folder: there is no such folder")
    if config := checkpoint_record(folder).get("config"):
        return config
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UsageError(
            f"{setting}={workdir} is not a run folder: it has no {CONFIG_FILE}; use a folder "
            "written by --mode=train"
        )
    return _read_dict(path)


def recorded_setting(workdir, key):
    """What a run folder recorded for a setting or a block, by its dotted key, "model.depth"."""
    value = recorded_config(workdir)
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UsageError(
                f"{io.folder(workdir) / CONFIG_FILE} has no config.{key}: it is not the "
                "config of a run"
            )
        value = value[part]
    return value


@dataclasses.dataclass(frozen=True)
class OpenedRun:
    """A run folder that was checked and may be used; nothing is written yet.

    Attributes:
      path: the folder.
      is_new: False if an earlier launch left a checkpoint to continue from.
      changed: {key: [before, now]} of the permitted changes of its config.
      config, command_line: as given to `open_run`.
    """

    path: pathlib.Path
    is_new: bool
    changed: dict
    config: dict
    command_line: tuple

    def commit(self, files, **entries):
        """Write config.json, `files` and run.json with a record of this launch.

        Args:
          files: {name: text, or None for no such file}. A resumed run keeps the files that it has;
            a new run replaces those that an earlier launch without a checkpoint may have left.
          entries: of the run's record, which replace those of the newest checkpoint's.

        Returns: the run's record, for its next checkpoints. With several processes all of them call
          this; process 0 alone writes.
        """
        earlier = {} if self.is_new else checkpoint_record(self.path)
        record = {**earlier, **entries, "config": self.config}
        multihost.run_on_primary(self.path, lambda: self._write(files, record))
        return record

    def _write(self, files, record):
        launch = describe_launch(self.command_line)
        if not self.is_new:
            launch["changed"] = self.changed
        launches = [] if self.is_new else run_record(self.path).get("launches", [])
        with io.report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # First of all files, since it says whose folder this is.
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
    """Check that a run folder is free, or that `config` may resume the run that is there.

    Args:
      workdir: the folder; it may be absent.
      config: nested plain dict, the complete config (`ConfigDict.to_dict()`).
      command_line: list of str, recorded in run.json.
      may_differ: regexes (full match on the dotted key, such as `log\\..*`) of keys that a later
        launch may change. A change is recorded in run.json.
      completed: function that adds settings that are younger than a recorded config, or None.

    Returns: OpenedRun, whose `commit` writes. Nothing is written here.
    Raises: UsageError naming the keys that differ with both values, or the file at fault.

    With several processes all of them call this; process 0 alone reads.
    """
    config = json.loads(json.dumps(config, default=_plain))
    folder, changed = io.folder(workdir), {}
    is_new = multihost.run_on_primary(workdir, lambda: int(_is_new(workdir)))
    if not is_new:

        def check():
            changed.update(check_config(workdir, config, may_differ, completed))
            run_record(workdir)  # its damage is reported before anything is written

        multihost.run_on_primary(workdir, check)
    return OpenedRun(folder, bool(is_new), changed, config, tuple(command_line))


def _is_new(workdir):
    folder = io.folder(workdir)
    if checkpoint_record(folder):
        return False
    if (folder / CONFIG_FILE).exists():
        config = _read_dict(folder / CONFIG_FILE)
        for name in _OF_A_CONFIG:
            if name not in config:
                raise UsageError(
                    f"--workdir={workdir}: its {CONFIG_FILE} is not a config of efx (no "
                    f"{name!r}); use another --workdir"
                )
    else:
        for name in _OF_A_RUN:
            if (folder / name).exists():
                raise UsageError(
                    f"--workdir={workdir} has {name} but no {CONFIG_FILE}, so its run is "
                    "unknown; use another --workdir"
                )
    return not holds_result(workdir)


def holds_result(workdir):
    """Whether a folder holds a result that took work to compute: a checkpoint or a clustering."""
    folder = io.folder(workdir)
    try:
        names = [path.name for path in (folder / CHECKPOINTS).iterdir() if path.is_dir()]
    except OSError:  # no such folder, or not one
        names = []
    has_checkpoint = any(name.isdecimal() or name.startswith("damaged_") for name in names)
    return has_checkpoint or (folder / RESULTS["clustering"]).is_file()


def kind_of_result(workdir):
    """The kind of result, as in RESULTS, that a folder holds; None without any."""
    present = (name for name, path in RESULTS.items() if (io.folder(workdir) / path).exists())
    return next(present, None)


class Lock:
    """Keeps a second launch from writing into a run folder; `take` raises UsageError for it.

    The lock is the system's, on an open file: it ends with the process, however that ends. Launches
    that only read take none. With several processes process 0 takes it for all. On a file system
    without locks the launch warns once and continues without one.

    A context manager: an existing folder is locked on entry, an absent one by `take`, which makes
    it.
    """

    def __init__(self, workdir):
        self._folder, self._file = io.folder(workdir), None
        self._cannot_lock = False

    def __enter__(self):
        multihost.run_on_primary(self._folder, lambda: self._folder.is_dir() and self._take())
        return self

    def __exit__(self, kind, error, trace):
        if self._file is not None:
            os.close(self._file)  # which releases it
        self._file = None

    def take(self):
        """Takes the lock unless it is taken already; makes the folder if it is absent."""
        multihost.run_on_primary(self._folder, self._take)

    def _take(self):
        if self._file is not None or self._cannot_lock:
            return
        if io.is_remote(self._folder):
            self._cannot_lock = True
            self._warn("an object store")
            return
        path = self._folder / LOCK_FILE
        with io.report_write_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            raise UsageError(
                f"--workdir={self._folder} is in use by {holder or 'another process'}; wait for it,"
                " stop it, or use another --workdir"
            ) from None
        except (ImportError, OSError) as error:
            self._warn("this system" if isinstance(error, ImportError) else "its file system")
        self._file = file
        with io.report_write_errors(path):
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)

    def _warn(self, lacking):
        _warn(
            f"{self._folder} cannot be locked ({lacking} has no locks): make sure that no "
            "other launch trains there"
        )


def _warn(line):
    print(f"efx: warning: {line}", file=sys.stderr, flush=True)


def check_config(workdir, config, may_differ, completed=None):
    """{key: [before, now]} of the permitted changes; UsageError unless `config` (a plain dict) may
    resume the run in `workdir`. The other arguments: see `open_run`."""
    config = json.loads(json.dumps(config, default=_plain))
    recorded = recorded_config(workdir)
    recorded = completed(recorded) if completed else recorded
    return _check_same(workdir, recorded, config, may_differ)


def checkpoint_record(workdir):
    """The run's record in its newest checkpoint; {} without one."""
    return newest_meta(workdir)[1].get("record", {})


def newest_meta(workdir):
    """(step, meta) of the newest checkpoint that can be read; (None, {}) without one."""
    root = io.folder(workdir) / CHECKPOINTS
    try:
        steps = [int(path.name) for path in root.iterdir() if _is_step(path.name)]
    except OSError:  # no such folder, or not one
        steps = []
    for step in sorted(steps, reverse=True):
        # Reading parameters reports a checkpoint that is damaged or not finished.
        with contextlib.suppress(OSError, ValueError):
            if (root / str(step) / MANIFEST).exists():
                meta = io.read_json(root / str(step) / "meta" / "metadata")
                if isinstance(meta, dict) and isinstance(meta.get("record", {}), dict):
                    return step, meta
    return None, {}


def _is_step(name):
    return name.isascii() and name.isdecimal() and len(name) < 19


def run_record(workdir):
    """The run's record, and `launches` of run.json; {} without a run."""
    path = io.folder(workdir) / RUN_FILE
    contents = _read_dict(path) if path.is_file() else {}
    if not isinstance(contents.get("launches", []), list):
        raise UsageError(f"{path} is not the record of a run: delete it; it is a copy")
    return {**contents, **checkpoint_record(workdir)}


def amend_launch(workdir, **entries):
    """Add entries to the newest launch in run.json. With several processes all of them call this;
    process 0 alone writes."""

    def amend():
        path = io.folder(workdir) / RUN_FILE
        contents = _read_dict(path)
        contents["launches"][-1] |= entries
        _write_json(path, contents)

    multihost.run_on_primary(workdir, amend)


def saved_tokenizer(workdir):
    """Path of the tokenizer.json of the run in a folder; None without a run.

    Raises UsageError if it is not the one that the run recorded: its ids would mean something else
    to the model.
    """
    path = io.folder(workdir) / TOKENIZER_FILE
    if not holds_result(workdir):
        return None
    text, recorded = _text(path), run_record(workdir).get("tokenizer")
    if recorded and checksum(text) != recorded:
        raise UsageError(
            f"{path} is missing, or not the tokenizer of this run; restore the file, or use "
            "another --workdir"
        )
    return path if text is not None else None


def text_entries(origin):
    """(contents of held_out.json, or None; the entry "text" of run.json) of a `Data.origin`."""
    decision = {name: origin[name] for name in ("of", "held_out")}
    text = json.dumps(decision, indent=1) + "\n" if origin["held_out"] else None
    entry = {name: origin[name] for name in ("source", "eval_source")}
    return text, {**entry, "held_out": checksum(text)}


def recorded_origin(workdir):
    """`Data.origin` of the run in a folder, None if its text is not recorded.

    Raises UsageError if held_out.json is not what was recorded: text that was held out might be
    trained on.
    """
    entry = run_record(workdir).get("text")
    if entry is None:
        return None
    path = io.folder(workdir) / HELD_OUT_FILE
    text = _text(path)
    if checksum(text) != entry["held_out"]:
        raise UsageError(
            f"{path}, the list of held-out documents, is missing or was changed; restore the "
            "file, or use another --workdir"
        )
    decision = json.loads(text) if text else {"of": None, "held_out": None}
    return {**decision, **{name: entry[name] for name in ("source", "eval_source")}}


def _text(path):
    """The text of a file, None without one; bytes that are no text show in its checksum."""
    return path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else None


def checksum(text):
    """A hash of `text`; None for None."""
    return text and hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value):
    """A plain value for the types of a config that JSON does not have."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    raise TypeError(f"config value {value!r} of type {type(value).__name__} cannot be stored")


def _check_same(workdir, stored, config, may_differ):
    """{key: [before, now]} of the permitted changes; UsageError on any other difference."""
    changed, refused = {}, []
    for key, (before, after) in differences(stored, config).items():
        if any(re.fullmatch(pattern, key) for pattern in may_differ):
            changed[key] = [before, after]
        else:
            refused.append(f"config.{key}: {before!r} in the run, {after!r} here")
    if refused:
        others = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise UsageError(
            f"--workdir={workdir} has a run with another config "
            f"({'; '.join(refused[:_SHOWN])}{others}); use another --workdir, or the values of "
            "that run"
        )
    return changed


def differences(before, after, among=".*"):
    """{dotted key: (before, after)} of the settings that differ between two nested plain dicts.

    among: regex (full match on the dotted key) of the settings that count.
    """
    before, after = dotted(before), dotted(after)
    keys = [key for key in sorted(before.keys() | after.keys()) if re.fullmatch(among, key)]
    pairs = {key: (before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if not _are_equal(*pair)}


def _are_equal(a, b):
    """1 and 1.0 are the same setting; True and 1 are not."""
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return a == b and (numeric or type(a) is type(b))


def dotted(config, prefix=""):
    """{"model.depth": 4, ...}: nested dicts to dotted keys. An empty dict is kept as a value."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(dotted(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def run_name(workdir, command_line):
    """A name for a list of runs: the folder's, the config's, and what the command line changed."""
    config, changed = "", []
    for argument in command_line:
        key, _, value = argument.lstrip("-").partition("=")
        if key == "config":
            file, colon, variants = pathlib.PurePath(value).name.partition(":")
            config = file.removesuffix(".py") + colon + variants
        elif key.startswith("config.") and not key.startswith("config.log."):
            changed.append(f"{key.removeprefix('config.')}={value}")
    name, said = pathlib.PurePath(workdir).name, ", ".join([config] * bool(config) + changed)
    name += f" ({said})" if said else ""
    return shortened(name, _LONGEST_NAME)


def shortened(text, most):
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def describe_launch(command_line):
    """One record for run.json: versions, machine, time and command line of a launch."""
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
        "command_line": [str(argument) for argument in command_line],
        "executable": os.path.basename(sys.executable),
    }


def machine_of(launch):
    """The devices of a launch's record, in words."""
    kind, count = launch["devices"]["kind"], launch["device_count"]
    return f"{launch['cpu_count']} CPU cores" if kind == "cpu" else f"{count} x {kind}"


def revision_of(launch):
    """The git revision of a launch's record, " with changes" if there were any, or "unknown"."""
    git = launch["git"] or {"revision": "unknown", "dirty": False}
    return git["revision"] + " with changes" * git["dirty"]


def git_revision(package=None):
    """{"revision": sha, "dirty": bool} of the checkout that efx is run from, or None.

    None as well when efx is installed inside another project's checkout (in a virtual environment,
    say), whose revision says nothing about efx. What has been measured, in results/, changes
    nothing that runs. `package`: the folder `efx`.
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


def _write_json(path, contents):
    io.write_atomic(path, json.dumps(contents, indent=2, sort_keys=path.name == CONFIG_FILE) + "\n")


def _read_dict(path):
    """The dict in a JSON file; UsageError if it cannot be read."""
    try:
        contents = io.read_json(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {io.describe_os_error(error)}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is damaged: not JSON ({error}); restore the file, or use another --workdir"
        ) from error
    if not isinstance(contents, dict):
        raise UsageError(
            f"{path} is not a file of efx: expected a dict, not {type(contents).__name__}; "
            "restore the file, or use another --workdir"
        )
    return contents
