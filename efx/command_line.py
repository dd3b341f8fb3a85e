"""Flags of the command line: from the arguments of `python -m efx.main` to a checked config."""

import importlib.util
import pathlib

from absl import flags
from ml_collections import config_flags

from efx import run_config, run_settings, runfolder
from efx.errors import UsageError, nearest
from efx.run_settings import known


def _define(config, argv):
    """The flags, in a set of their own: parsing twice in one process starts afresh. config: None
    where only their names and their help are asked for."""
    values = flags.FlagValues()

    def define(kind, name, default, text):
        kind(name, default, text, flag_values=values)

    if config is None:
        text = "Config file, FILE or FILE:VARIANT,VARIANT; --config.KEY=VALUE changes a setting."
        define(flags.DEFINE_string, "config", None, text)
    else:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    define(flags.DEFINE_string, "workdir", None, "Run folder.")
    define(flags.DEFINE_string, "mode", "train", "train, compose, evaluate, sample or cluster.")
    define(flags.DEFINE_string, "prompt", None, "sample: text to continue.")
    define(flags.DEFINE_integer, "step", None, "evaluate, sample: checkpoint (default: newest).")
    define(
        flags.DEFINE_bool,
        "distributed",
        False,
        "Start jax.distributed and let it find its peers (Slurm, TPU pods, GKE).",
    )
    define(flags.DEFINE_string, "coordinator_address", None, "host:port of process 0.")
    define(flags.DEFINE_integer, "num_processes", None, "Number of processes.")
    define(flags.DEFINE_integer, "process_id", None, "Number of this process, from 0.")
    define(flags.DEFINE_integer, "cpu_devices", 0, "Pretend that a CPU is so many devices.")
    return values


def parse(argv, usage=""):
    """Parsed flags; the run folder's own config where no --config is given. None after --help.

    usage: what --help says before it lists the flags.
    """
    own = _define(None, argv[:1])
    names = {arg.partition("=")[0].lstrip("-") for arg in argv[1:] if arg.startswith("-")}
    if names & {"help", "helpfull", "h"}:
        print(usage + "\nFlags:\n" + own.get_help("  ", include_special_flags=False))
        return None
    _check_flags(own, argv)
    source, rest = _take_config(argv)
    if source is None:
        folder, mode = _value_of("workdir", argv)[0], _value_of("mode", argv)[0] or "train"
        new = folder is None or not (pathlib.Path(folder) / runfolder.CONFIG_FILE).is_file()
        if new and mode in ("train", "compose", "cluster"):
            raise UsageError(
                "--config is missing: a config file, e.g. --config configs/mod.py "
                "(or --workdir of an existing run)"
            )
        if folder is None:
            raise UsageError("--workdir is missing: the folder of a run, e.g. --workdir runs/mod")
        config = run_config.get_config(folder)
    else:
        config = load_config(source)
    for arg in rest[1:]:
        name = arg.partition("=")[0].lstrip("-")
        if arg.startswith("-") and name.startswith("config."):
            _check_key(config, name.removeprefix("config."))
    values = _define(config, rest)
    try:
        left = values(rest)
    except Exception as error:
        raise UsageError(" ".join(str(error).split()) or type(error).__name__) from error
    if len(left) > 1:
        known = "settings are --config.<key>=<value>, config files --config=<file>"
        raise UsageError(f"unexpected argument {left[1]!r}: {known}")
    flags.FLAGS(argv[:1])  # absl's own flags, which some libraries read
    return values


def load_config(source):
    """The ConfigDict of "file.py" or "file.py:variant"."""
    path, _, variant = source.partition(":")
    if not pathlib.Path(path).is_file():
        folder = pathlib.Path(path).parent
        hint = nearest(path, folder.glob("*.py"))
        raise UsageError(f"--config={path}: there is no such file{hint}")
    run_settings.make_configs_importable()
    try:
        spec = importlib.util.spec_from_file_location("efx_config", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(variant) if variant else module.get_config()
    except UsageError as error:
        raise UsageError(f"--config={source}: {error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"--config={source} cannot be loaded: {reason}") from error
    run_settings.check(config, f"--config={source}")
    return config


def _value_of(name, argv):
    """(value of --name=x or --name x, its indices in argv); (None, []) when absent."""
    for i, arg in enumerate(argv):
        key, equals, value = arg.partition("=")
        if key in (f"-{name}", f"--{name}"):
            if equals:
                return value, [i]
            if i + 1 < len(argv):
                return argv[i + 1], [i, i + 1]
            raise UsageError(f"--{name} needs a value")
    return None, []


def _take_config(argv):
    value, where = _value_of("config", argv)
    return value, [arg for i, arg in enumerate(argv) if i not in where]


def _check_flags(own, argv):
    """UsageError for the first argument that looks like a flag and is none, or comes again."""
    seen, is_value = set(), False  # whether the next argument is the value of the last
    for arg in argv[1:]:
        if is_value or not arg.startswith("-"):
            is_value = False
            continue
        if arg == "--":
            return
        name, equals, _ = arg.lstrip("-").partition("=")
        if name.startswith("config."):  # of several the last counts, which scripts rely on
            is_value = not equals
            continue
        if name in seen:
            raise UsageError(f"--{name} is given twice")
        seen.add(name)
        if name in own:
            is_value = not equals and not own[name].boolean
        elif name.removeprefix("no") not in own:
            raise UsageError(f"--{name} is not a flag{_nearest_flag(own, name)}")


def _nearest_flag(own, name):
    setting = run_settings.elsewhere(name, run_settings.names(known()))
    if setting:
        return f" (did you mean '--{setting}'?)"
    return nearest(f"--{name}", [f"--{flag}" for flag in own])


def _check_key(config, key):
    """UsageError unless the dotted key names a setting (not a block) of the config."""
    try:
        found = run_settings.require(config, key)
    except UsageError as error:
        raise UsageError(f"--{error}") from None
    if hasattr(found, "keys"):
        raise UsageError(
            f"--config.{key} is a block of settings; set one of {', '.join(found)} in it"
        )
