"""Where a config comes from: a config file, or a run folder.

A config file is Python with a function `get_config`. It is given as a path, or as the name of a
config that is installed with efx: `configs/mod.py` or `mod`. Variants follow a colon: `mod:smoke`.
Sweep files (`get_sweep`) and grid files (`get_grid`) are found and run in the same way.
"""

import contextlib
import importlib.util
import inspect
import os
import pathlib

from efx import configs, run_settings, runfolder, storage
from efx.errors import UsageError, nearest


def load_config(source, changes=None):
    """The checked ConfigDict of a config file.

    Args:
      source: "mod", "mod:smoke,dense", "configs/mod.py:smoke", "my/own.py", or the path of a run
        folder, "runs/mod", whose config it then is.
      changes: {dotted key: value} to set in it, such as {"model.depth": 2}.

    Raises UsageError for a wrong file, variant, key or type, naming the nearest.
    """
    if _is_run_folder(source):
        config = config_of_run(source)
    else:
        config = run_file("config", source)
        run_settings.check(config, f"--config={source}")
    if changes:
        override(config, changes, source)
    return config


def _is_run_folder(source):
    """Whether this is the path of a run folder; a name without a slash is that of a config."""
    if "/" not in source:
        return False
    return (storage.folder(source, "--config") / runfolder.CONFIG_FILE).is_file()


def override(config, changes, where):
    """Sets dotted keys of a config; the UsageError for a wrong one begins with `where`."""
    from efx.configs import common

    for key, value in changes.items():
        try:
            common.apply(config, {key: value})
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        except TypeError:
            block, _, name = key.rpartition(".")
            owner = run_settings.require(config, block) if block else config
            expected = owner.get_type(name).__name__
            raise UsageError(f"{where}: config.{key}={value!r}: expected {expected}") from None


def config_of_run(workdir, setting="--workdir"):
    """The checked config of a run folder, with the types of a config file's; its lists, which were
    tuples, are tuples again. setting: the flag that names the folder, for messages."""
    recorded = runfolder.recorded_config(workdir, setting)
    path = storage.folder(workdir) / runfolder.CONFIG_FILE
    config = run_settings.of_plain(_tuples(run_settings.completed(recorded)), path)
    run_settings.check(config, path)
    return run_settings.typed(config)


def with_variants(source, *variants):
    """The source of a config with these variants before its own: "mod:smoke" -> "mod:dense,smoke".

    Variants that are empty are left out.
    """
    file, _, own = source.partition(":")
    return ":".join(filter(None, (file, ",".join(filter(None, (*variants, own))))))


def run_file(kind, source, folder=""):
    """The result of the function `get_<kind>` of a Python file, given its variants if it has any.

    Args:
      kind: "config", "sweep" or "grid", which is also the flag that messages name.
      source: "FILE" or "FILE:variants"; FILE is a path, or a name in the `folder` of `efx.configs`.
    """
    path, _, variants = str(source).partition(":")
    file_path, where = find_file(kind, path, folder), f"--{kind}={source}"
    try:
        spec = importlib.util.spec_from_file_location(f"efx_{kind}", file_path)
        if spec is None:
            raise UsageError("this is not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, f"get_{kind}"):
            raise UsageError(f"the file has no function get_{kind}()")
        function = getattr(module, f"get_{kind}")
        if not variants:
            return function()
        if not inspect.signature(function).parameters:
            raise UsageError(
                f"get_{kind}() has no variants; leave out the colon and the text after it"
            )
        return function(variants)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:  # a file may also try to end the process
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{where} cannot be loaded: {reason}") from error


def find_file(kind, path, folder=""):
    """pathlib.Path of a Python file, given by its path, or by its name without ".py" in the
    `folder` of `efx.configs`. A path `configs/...` that does not exist is looked up in efx."""
    top, named = pathlib.Path(configs.__path__[0]), storage.local_path(path, f"--{kind}")
    is_path = bool(named.suffix) or named.parent != pathlib.Path()
    shipped = top.joinpath(*named.parts[1:]) if named.parts[:1] == (top.name,) else named
    for candidate in [named, shipped] if is_path else [top / folder / f"{path}.py"]:
        if os.path.isfile(candidate):  # False of a name that is too long, too
            return candidate
    suggestions = {}
    if named.parent == pathlib.Path():
        suggestions |= {name: name for name in _names(top / folder, kind)}
    if is_path:
        names = {*_names(shipped.parent, kind), *_names(named.parent, kind)}
        suggestions |= {name: str(named.parent / f"{name}.py") for name in names}
    problem = "there is no such file"
    if not is_path:
        problem = f"there is no {kind} of this name, and a path ends in .py"
    raise UsageError(f"--{kind}={path}: {problem}{nearest(named.stem, suggestions, suggestions)}")


def _names(folder, kind):
    """The names, without ".py", of the Python files of a folder that have `get_<kind>`."""
    for file in folder.glob("*.py"):
        with contextlib.suppress(OSError):
            if f"def get_{kind}(" in file.read_text(errors="replace"):
                yield file.stem


def _tuples(value):
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value
