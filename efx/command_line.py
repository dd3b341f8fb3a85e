"""Flags of the command line: from the arguments of `python -m efx.main` to a checked config."""

import importlib.util
import pathlib
import sys

from absl import flags
from ml_collections import ConfigDict, config_flags

from efx.errors import UsageError, nearest


def _define(config, argv):
    """The flags, in a set of their own: parsing twice in one process starts afresh."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)

    def define(kind, name, default, text):
        kind(name, default, text, flag_values=values)

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
    names = {arg.partition("=")[0].lstrip("-") for arg in argv[1:] if arg.startswith("-")}
    if names & {"help", "helpfull", "h"}:
        print(usage + "\nFlags:\n" + _define(ConfigDict(), argv[:1]).get_help("  "))
        return None
    source, rest = _take_config(argv)
    if source is None:
        folder = _value_of("workdir", argv)[0]
        if folder is None:
            raise UsageError(
                "--config is missing: a config file, e.g. --config configs/mod.py "
                "(or --workdir of an existing run)"
            )
        source = f"{pathlib.Path(__file__).parent / 'run_config.py'}:{folder}"
    config = load_config(source)
    for arg in rest[1:]:
        name = arg.partition("=")[0].lstrip("-")
        if arg.startswith("-") and name.startswith("config."):
            _check_key(config, name.split(".")[1:])
    values = _define(config, rest)
    try:
        left = values(rest)
    except Exception as error:
        raise UsageError(" ".join(str(error).split()) or type(error).__name__) from error
    if len(left) > 1:
        raise UsageError(f"unexpected argument {left[1]!r}: settings are --config.<key>=<value>")
    flags.FLAGS(argv[:1])  # absl's own flags, which some libraries read
    return values


def load_config(source):
    """The ConfigDict of "file.py" or "file.py:variant"."""
    path, _, variant = source.partition(":")
    if not pathlib.Path(path).is_file():
        raise UsageError(f"--config={path}: there is no such file")
    # A config imports `configs.common`, wherever efx is started from.
    top = str(pathlib.Path(__file__).resolve().parent.parent)
    if top not in sys.path:
        sys.path.append(top)
    try:
        spec = importlib.util.spec_from_file_location("efx_config", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.get_config(variant) if variant else module.get_config()
    except UsageError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"--config={source} cannot be loaded: {reason}") from error


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


def _check_key(config, keys):
    """UsageError unless the dotted key names a setting (not a block) of the config."""
    block = config
    for depth, key in enumerate(keys):
        name = ".".join(["config", *keys[: depth + 1]])
        if not hasattr(block, "keys"):
            above = ".".join(["config", *keys[:depth]])
            raise UsageError(f"--{name}: {above} is a value, not a block of settings")
        if key not in block:
            raise UsageError(f"--{name} is not a setting{nearest(key, block.keys())}")
        block = block[key]
    if hasattr(block, "keys"):
        raise UsageError(
            f"--{name} is a block of settings; set one of {', '.join(block.keys())} in it"
        )
