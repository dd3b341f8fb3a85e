"""Where a config comes from: a config file, or a run folder.

A config file is Python with a function `get_config`; its first part on the command line is a path,
or the name of one of the configs that come with efx, which are there without a checkout too:
`configs/mod.py` or `mod`. Variants follow a colon: `mod:smoke`. Sweep files (`get_sweep`) and grid
files (`get_grid`) are found and run in the same way.
"""

import importlib.util
import pathlib

from ml_collections import ConfigDict

from efx import configs, run_settings, runfolder
from efx.errors import UsageError, nearest


def load_config(source, changes=None):
    """The checked ConfigDict of a config file.

    Args:
      source: "mod", "mod:smoke,dense", "configs/mod.py:smoke", "my/own.py".
      changes: {dotted key: value} to set in it, such as {"model.depth": 2}.

    Raises UsageError for a file, a variant, a key or a type that is wrong, naming the nearest.
    """
    path, _, variants = source.partition(":")
    config = run_file("config", path, *([variants] if variants else []), source=source)
    run_settings.check(config, f"--config={source}")
    if changes:
        override(config, changes, source)
    return config


def override(config, changes, where):
    """Sets dotted keys of a config; UsageError, which begins with `where`, for what cannot be."""
    from efx.configs import common

    for key, value in changes.items():
        try:
            common.apply(config, {key: value})
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        except TypeError:
            block, _, name = key.rpartition(".")
            owner = run_settings.require(config, block) if block else config
            wanted = owner.get_type(name).__name__
            raise UsageError(f"{where}: config.{key}={value!r}: expected {wanted}") from None


def config_of_run(workdir):
    """The config of a run folder, its lists as tuples again; UsageError unless it is right."""
    config = ConfigDict(_tuples(runfolder.load_config(workdir)))
    run_settings.check(config, pathlib.Path(workdir) / runfolder.CONFIG_FILE)
    return config


def run_file(kind, path, *arguments, folder="", source=None):
    """What the function `get_<kind>` of a Python file returns.

    Args:
      kind: "config", "sweep" or "grid", which is also the flag that messages name.
      path: of the file, or the name of one in the `folder` of `efx.configs`.
      source: what was given for the flag, where that is more than the path.
    """
    found, where = find(kind, path, folder), f"--{kind}={source or path}"
    try:
        spec = importlib.util.spec_from_file_location(f"efx_{kind}", found)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, f"get_{kind}"):
            raise UsageError(f"the file has no function get_{kind}()")
        return getattr(module, f"get_{kind}")(*arguments)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{where} cannot be loaded: {reason}") from error


def find(kind, path, folder=""):
    """pathlib.Path of a Python file that is named by its path, or by its name without ".py" in the
    `folder` of `efx.configs`. Where a path leads nowhere, `configs/...` is that of efx."""
    top, given = pathlib.Path(configs.__path__[0]), pathlib.Path(path)
    if given.suffix or given.parent != pathlib.Path():
        beside = top.joinpath(*given.parts[1:]) if given.parts[0] == top.name else given
        candidates, known = [given, beside], [*given.parent.glob("*.py")]
        known += [given.parent / file.name for file in beside.parent.glob("*.py")]
        what = "there is no such file"
    else:
        candidates = [top / folder / f"{path}.py"]
        known = [file.stem for file in (top / folder).glob("*.py") if file.stem != "__init__"]
        what = f"there is no {kind} of this name, and a path ends in .py"
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UsageError(f"--{kind}={path}: {what}{nearest(path, known)}")


def _tuples(value):
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value
