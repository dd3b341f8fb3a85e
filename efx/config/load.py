"""Where a config comes from: a config file, or a run folder.

A config file is Python with a function `get_config`. It is given as a path, or as the name of a
config that is installed with efx: `configs/mod.py` or `mod`. Variants follow a colon: `mod:smoke`.
Sweep files (`get_sweep`) and grid files (`get_grid`) are found and run in the same way.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import logging
import os
import pathlib

from ml_collections import ConfigDict

from efx import configs, io, run_dir
from efx.config.run import Config, default_config
from efx.config.schema import as_dict, is_block, make, names_of
from efx.errors import UsageError, nearest
from efx.models import FAMILIES, check_family, config_class

_log = logging.getLogger(__name__)

# What other programs call settings of efx: {setting: names that no setting has}.
CALLED_ELSEWHERE = {
    "steps": "max_steps num_steps n_steps total_steps train_steps max_iters n_iters",
    "data.batch_size": "batch bs train_batch_size global_batch_size per_device_train_batch_size",
    "data.seq_len": "seq_length seqlen sequence_length max_seq_len max_seq_length max_length"
    " block_size context_length context_len n_ctx",
    "data.source": "dataset dataset_path data_path",
    "model.width": "dim d_model model_dim hidden_size n_embd embed_dim embedding_dim emb_dim",
    "model.depth": "n_layer n_layers num_layers num_hidden_layers layers",
    "model.attention.num_heads": "heads n_head n_heads num_attention_heads",
    "model.attention.num_kv_heads": "kv_heads n_kv_head n_kv_heads num_key_value_heads",
    "model.mlp.hidden": "d_ff ff_dim ffn_dim d_mlp mlp_dim intermediate_size ffn_hidden_size",
    "model.mlp.moe.num_experts": "n_experts num_local_experts n_routed_experts",
    "model.dropout.rate": "dropout dropout_rate dropout_p p_dropout",
    "optim.name": "optimizer optimiser",
    "optim.learning_rate": "lr max_lr peak_lr base_lr init_lr",
    "optim.weight_decay": "wd",
    "optim.b1": "beta1 adam_beta1",
    "optim.b2": "beta2 adam_beta2",
    "optim.clip_norm": "grad_clip gradient_clip clip_grad clip_grad_norm max_grad_norm",
    "optim.schedule.kind": "lr_schedule lr_scheduler lr_scheduler_type",
    "optim.schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps",
    "train.accumulation": "grad_accum gradient_accumulation gradient_accumulation_steps"
    " accumulate_grad_batches",
    "train.dtype": "precision compute_dtype",
}
_SETTING_OF = {
    name: setting for setting, names in CALLED_ELSEWHERE.items() for name in names.split()
}


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
        to_config(config, f"--config={source}")
    if changes:
        override(config, changes, source)
    return config


def _is_run_folder(source):
    """Whether this is the path of a run folder; a name without a slash is that of a config."""
    if "/" not in source:
        return False
    return (io.folder(source, "--config") / run_dir.CONFIG_FILE).is_file()


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
            owner = require(config, block) if block else config
            expected = owner.get_type(name).__name__
            raise UsageError(f"{where}: config.{key}={value!r}: expected {expected}") from None


def config_of_run(workdir, setting="--workdir"):
    """The checked config of a run folder, with the types of a config file's; its lists, which were
    tuples, are tuples again. setting: the flag that names the folder, for messages."""
    recorded = run_dir.recorded_config(workdir, setting)
    path = io.folder(workdir) / run_dir.CONFIG_FILE
    config = of_plain(_tuples(completed(recorded)), path)
    to_config(config, path)
    return typed(config)


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
    top, named = pathlib.Path(configs.__path__[0]), io.local_path(path, f"--{kind}")
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


def completed(plain):
    """The plain config of a run, with the settings within its blocks that are younger than the run
    at their defaults, which one line tells: what a setting does by default is what was done before
    there was one. What is no config of efx, or lacks a block, stays as it is."""
    block_of_model = plain.get("model") if isinstance(plain, dict) else None
    family = block_of_model.get("family") if isinstance(block_of_model, dict) else None
    if not isinstance(family, str) or family not in FAMILIES:
        return plain
    right, younger = dataclasses.replace(Config(), model=config_class(family)()), []
    whole = {
        name: _completed(value, getattr(right, name, None), f"config.{name}", younger)
        for name, value in plain.items()
    }
    if younger:
        _warn_about_new_settings(", ".join(younger))
    return whole


def _completed(plain, block, name, younger):
    if not is_block(block) or not isinstance(plain, dict):
        return plain
    whole = {
        key: _completed(value, getattr(block, key, None), f"{name}.{key}", younger)
        for key, value in plain.items()
    }
    for key in names_of(type(block)):
        if key not in plain:
            value = getattr(block, key)
            whole[key] = json.loads(json.dumps(as_dict(value) if is_block(value) else value))
            younger.append(f"{name}.{key}={whole[key]!r}")
    return whole


@functools.cache
def _warn_about_new_settings(settings):
    _log.warning("this run predates %s; using these defaults", settings)


def of_plain(plain, where):
    """The ConfigDict of nested plain dicts, which may be anybody's. where: see `check`."""
    try:
        return ConfigDict(plain)
    except ValueError as error:  # a dot in a name
        raise UsageError(f"{where}: {error}") from error


def typed(config):
    """A checked ConfigDict of plain values with the types of its settings: one that is None can be
    set to what it may be, one of several types to each of them."""
    whole = default_config(config.model.family)
    _fill(whole, config)
    return whole


def _fill(block, values):
    for key, value in values.items():
        if _has_names(block[key]):
            _fill(block[key], value)
        else:  # a value may be a mapping, too: the schedule of a loss
            block[key] = value.to_dict() if _has_names(value) else value


def to_config(config, where=""):
    """The `Config` of a ConfigDict of any family; UsageError unless it has just the settings that
    there are, each with a value that it may have. A `Config` is returned as it is. A misspelt key
    would otherwise be one more key, which nobody reads.

    Args:
      where: what the config comes from, to be told with what is wrong: a file, a run folder.
    """
    if isinstance(config, Config):
        return config
    try:
        if not isinstance(config, ConfigDict):
            raise UsageError(f"expected a ConfigDict, not {type(config).__name__}")
        if "model" not in config:  # which decides what other settings there are
            raise UsageError("config.model is missing")
        family = require(config, "model.family")
        check_family(dict(config.model.items()))
        _check_names(config, right := default_config(family), "config", list(names(right)))
        return make(Config, config)
    except UsageError as error:
        raise UsageError(f"{where}: {error}" if where else str(error)) from None


def _check_names(block, right, name, every):
    for key in block:
        if key not in right:
            raise UsageError(_unknown(f"{name}.{key}", block=right, every=every))
        if _has_names(right[key]) and _has_names(block[key]):
            _check_names(block[key], right[key], f"{name}.{key}", every)


def require(config, key):
    """What a dotted key names in a config, a value or a block; UsageError if it names nothing."""
    block, name = config, "config"
    for part in key.split("."):
        if not _has_names(block):
            raise UsageError(f"config.{key}: {name} is a value, not a block of settings")
        name = f"{name}.{part}"
        if part not in block:
            raise UsageError(_unknown(name, block, names(config)))
        block = block[part]
    return block


def names(block, name="config"):
    """The dotted names of all settings in a block that is called `name`."""
    for key in block:
        inner = f"{name}.{key}"
        yield from names(block[key], inner) if _has_names(block[key]) else [inner]


def elsewhere(key, every):
    """The name of a setting that ends in these dotted keys, the shortest of `every` such, or else
    of what another program calls so; or ""."""
    called = f"config.{_SETTING_OF[key]}" if key in _SETTING_OF else ""
    return min((name for name in every if name.endswith(f".{key}")), key=len, default=called)


def _unknown(name, block, every):
    """What to say of a name that is none: where else there is such a key, or the nearest one."""
    key = name.rpartition(".")[2]
    name_of_key = elsewhere(key, every)
    hint = f" (did you mean {name_of_key!r}?)" if name_of_key else nearest(key, block)
    return f"{name} is not a setting{hint}"


def _has_names(value):
    return hasattr(value, "keys")
