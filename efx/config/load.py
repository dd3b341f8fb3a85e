"""Configs: from a config file or a run directory to a ConfigDict, and from that to a `Config`.

A config file is Python with a function `get_config`. It is named by its path, `configs/mod.py`, or,
for the configs of efx, by its name, `mod`. Variants follow a colon: `mod:smoke`. Sweep files
(`get_sweep`) and grid files (`get_grid`) are found and executed in the same way.

Config files and the command line change a ConfigDict. `to_config` checks it and converts it to the
frozen dataclasses that all other code uses.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import os
import pathlib
import re

from efx import configs, io, run_dir
from efx.config.names import apply, is_mapping, unknown_setting
from efx.config.run import Config, default_config
from efx.config.schema import defaults, make
from efx.errors import UsageError, nearest
from efx.models import FAMILIES, check_family

_log = logging.getLogger(__name__)


def load_config(source, changes=None):
    """The checked ConfigDict of a config file or a run.

    Args:
      source: "mod", "mod:smoke,dense", "configs/mod.py:smoke", "my/own.py", or the path of a run
        directory, "runs/mod".
      changes: {dotted key: value}, such as {"model.depth": 2}.

    Raises: UsageError for a wrong file, variant, key or type, naming the nearest.
    """
    # A name without a slash is that of a config.
    if "/" in source and (io.folder(source, "--config") / run_dir.CONFIG_FILE).is_file():
        config = config_of_run(source)
    else:
        config = run_file("config", source)
        to_config(config, f"--config={source}")
    if changes:
        to_config(apply(config, changes, f"{source}: "), source)
    return config


def to_config(config, where=""):
    """The `Config` of a ConfigDict or nested dict; a `Config` is returned unchanged.

    Args:
      where: beginning of the message of a UsageError: a file or a run directory.
    Raises: UsageError unless it has exactly the settings of its model family, with valid values.
    """
    if isinstance(config, Config):
        return config
    try:
        if not is_mapping(config):
            raise UsageError(f"expected a ConfigDict, not {type(config).__name__}")
        model = config.get("model")
        if not is_mapping(model) or "family" not in model:  # it decides the other settings
            raise UsageError("not a config of efx: config.model.family is missing")
        check_family(dict(model.items()))
        known = default_config(config["model"]["family"])
        _check_names(config, known, "config", known)
        return make(Config, config)
    except UsageError as error:
        raise UsageError(f"{where}: {error}" if where else str(error)) from None


def _check_names(block, known, name, config):
    for key in block:
        if key not in known:
            raise unknown_setting(f"{name}.{key}", known, config)
        if is_mapping(known[key]) and is_mapping(block[key]):
            _check_names(block[key], known[key], f"{name}.{key}", config)


# ---- run directories ---------------------------------------------------------------------------


def config_of_run(workdir, setting="--workdir"):
    """The checked ConfigDict of a run.

    Args:
      setting: the flag or setting that names the directory, for messages.
    """
    recorded = with_new_defaults(run_dir.RunDir(workdir, setting).config)
    return defaults(to_config(_with_tuples(recorded), io.folder(workdir) / run_dir.CONFIG_FILE))


def config_of_model(workdir):
    """`config_of_run`; UsageError for an ensemble, which is not one model."""
    if run_dir.RunDir(workdir).has_clustering:
        raise UsageError(f"{workdir} is an ensemble of cBTM; use the run directory of one expert")
    return config_of_run(workdir)


def _with_tuples(value):
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def with_new_defaults(recorded):
    """A recorded config with the defaults of settings that are newer than the run; warns of them.

    A dict that is not a config is returned unchanged.
    """
    model = recorded.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    if not isinstance(family, str) or family not in FAMILIES:
        return recorded
    new = []
    whole = _merged(recorded, json.loads(default_config(family).to_json()), "config", new)
    if new:
        _warn_of_new_settings(", ".join(new))
    return whole


def _merged(recorded, known, name, new):
    """`recorded` with what only `known` has; the names and values of these are added to `new`."""
    if not isinstance(recorded, dict) or not isinstance(known, dict):
        return recorded
    merged = dict(recorded)
    for key, value in known.items():
        if key in recorded:
            merged[key] = _merged(recorded[key], value, f"{name}.{key}", new)
        else:
            merged[key] = value
            new.append(f"{name}.{key}={value!r}")
    return merged


@functools.cache
def _warn_of_new_settings(settings):
    _log.warning("this run predates %s; using these defaults", settings)


# ---- config files ------------------------------------------------------------------------------


def with_variants(source, *variants):
    """The source of a config with `variants` before its own: "mod:smoke" -> "mod:dense,smoke"."""
    file, _, own = source.partition(":")
    return ":".join(filter(None, (file, ",".join(filter(None, (*variants, own))))))


def run_file(kind, source, folder=""):
    """The result of the function `get_<kind>` of a Python file, called with its variants.

    Args:
      kind: "config", "sweep" or "grid"; also the flag named in messages.
      source: "FILE" or "FILE:variants"; FILE is a path, or a name in the `folder` of `efx.configs`.
    """
    path, _, variants = str(source).partition(":")
    file_path, where = find_file(kind, path, folder), f"--{kind}={source}"
    try:
        spec = importlib.util.spec_from_file_location(f"efx_{kind}", file_path)
        if spec is None:
            raise UsageError("not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, f"get_{kind}", None)
        if function is None:
            raise UsageError(f"the file has no function get_{kind}()")
        if variants and not inspect.signature(function).parameters:
            raise UsageError(f"get_{kind}() has no variants; leave out ':{variants}'")
        return function(variants) if variants else function()
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:  # the file's own errors
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{where} cannot be loaded: {reason}") from error


def find_file(kind, path, folder=""):
    """The `pathlib.Path` of a Python file.

    Args:
      path: a path, or a name without ".py" in the `folder` of `efx.configs`. A path `configs/...`
        that does not exist is looked up in efx.
    """
    top, named = pathlib.Path(configs.__path__[0]), io.local_path(path, f"--{kind}")
    is_path = bool(named.suffix) or named.parent != pathlib.Path()
    shipped = top.joinpath(*named.parts[1:]) if named.parts[:1] == (top.name,) else named
    for candidate in [named, shipped] if is_path else [top / folder / f"{path}.py"]:
        if os.path.isfile(candidate):  # False for a name that is too long
            return candidate
    suggestions = {}
    if named.parent == pathlib.Path():
        if kind == "config":
            suggestions |= _variants_of_configs()
        suggestions |= {name: name for name in _files_with(kind, top / folder)}
    if is_path:
        names = {*_files_with(kind, shipped.parent), *_files_with(kind, named.parent)}
        suggestions |= {name: str(named.parent / f"{name}.py") for name in names}
    problem = "there is no such file"
    if not is_path:
        problem = f"no {kind} of efx has this name; the path of a file ends in .py"
    raise UsageError(f"--{kind}={path}: {problem}{nearest(named.stem, suggestions, suggestions)}")


def described_configs():
    """{name: (purpose, {variant: its purpose})} of the configs of efx, by their docstrings."""
    folder, configs_found = pathlib.Path(configs.__path__[0]), {}
    for name in sorted(_files_with("config", folder)):
        text = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text()))
        rows = text.partition("\nVariants:\n")[2]
        variants = re.findall(r"^    (\w+) +(.*(?:\n {5,}.*)*)", rows, re.MULTILINE)
        purposes = {variant: " ".join(purpose.split()) for variant, purpose in variants}
        configs_found[name] = text.splitlines()[0], purposes
    return configs_found


def _variants_of_configs():
    """{variant: "config:variant"}, of the default config if it has the variant."""
    found = described_configs()
    return {v: f"{name}:{v}" for name in (*found, "mod") for v in found[name][1]}


def _files_with(kind, folder):
    """Yield the names, without ".py", of the Python files in a folder that define `get_<kind>`."""
    for file in folder.glob("*.py"):
        with contextlib.suppress(OSError):
            if f"def get_{kind}(" in file.read_text(errors="replace"):
                yield file.stem
