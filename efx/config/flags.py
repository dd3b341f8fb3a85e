"""Flags of the command line: from the arguments of `efx` or `python -m efx.main` to a config."""

import contextlib

from absl import flags
from ml_collections import ConfigDict, config_flags

from efx import io, run_dir
from efx.config.load import config_of_run, elsewhere, load_config, names, require
from efx.config.run import default_config
from efx.errors import UsageError, nearest

# Modes that make a run of something else.
MADE_FROM = ("import", "convert")
# Flags that a mode cannot do without, and what they say.
NEEDED = {
    "import": {"from": "the folder of a Hugging Face model"},
    "convert": {"from": "the run folder of a dense model", "to": "mod or layer_drop"},
    "export": {"to": "a new folder for the exported model"},
}


# Values that flags of a type accept; the errors of absl and Python name only what they got.
_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number in digits, such as 1000",
    "float": "a number, such as 0.1",
}


class _Untold(ConfigDict):
    """A config whose text is short: absl makes two of a flag's default, as YAML, which take longer
    than all else that parsing does, and nobody reads them."""

    def __str__(self):
        return "the config"


def _define():
    """The flags, in a new set, so that one process can parse twice."""
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may follow the value of a setting

    def define(kind, name, default, text):
        kind(name, default, text, flag_values=values, allow_overwrite=False)

    text = (
        "Config: FILE.py, or the name of a config of efx; with variants, "
        "NAME:VARIANT,VARIANT. --config.KEY=VALUE changes a setting."
    )
    define(flags.DEFINE_string, "config", None, text)
    define(flags.DEFINE_string, "workdir", None, "Run folder.")
    define(
        flags.DEFINE_string,
        "mode",
        "train",
        "train, compose, import, convert, export, evaluate, sample, cluster or compile.",
    )
    text = "import: folder of a Hugging Face model; convert: folder of a dense run."
    define(flags.DEFINE_string, "from", None, text)
    text = "convert: mod or layer_drop; export: new folder, for transformers."
    define(flags.DEFINE_string, "to", None, text)
    define(flags.DEFINE_string, "dtype", None, "export: float32, bfloat16 or float16.")
    define(flags.DEFINE_string, "prompt", None, "sample: text to continue.")
    text = "evaluate, sample, export: checkpoint (default: newest)."
    define(flags.DEFINE_integer, "step", None, text)
    text = "compile: chips and their sizes, v5e:16x16, or slices x hosts x GPUs, h100:1x8x8."
    define(flags.DEFINE_string, "topology", None, text)
    text = "compile: number of token ids (default: that of the tokenizer)."
    define(flags.DEFINE_integer, "vocab_size", None, text)
    define(flags.DEFINE_bool, "json", None, "compile: print the report as JSON.")
    define(
        flags.DEFINE_bool,
        "distributed",
        False,
        "Start jax.distributed and let it find the other processes (Slurm, TPU pods, GKE).",
    )
    define(flags.DEFINE_string, "coordinator_address", None, "host:port of process 0.")
    define(flags.DEFINE_integer, "num_processes", None, "Number of processes.")
    define(flags.DEFINE_integer, "process_id", None, "Number of this process, from 0.")
    define(flags.DEFINE_integer, "cpu_devices", 0, "Present the CPU as this many devices.")
    return values


def parse(argv, usage="", config_for=None):
    """Parsed flags, with the config of the run folder if --config is absent. None after --help.

    Args:
      usage: text that --help prints before the list of flags.
      config_for: function of the flags and of the config in --config, or None, to the config of
        a mode of `MADE_FROM`.
    """
    values = _define()
    flag_names = {arg.partition("=")[0].lstrip("-") for arg in argv[1:] if arg.startswith("-")}
    if flag_names & {"help", "helpfull", "h"}:
        print(usage + "\nFlags:\n" + values.get_help("  ", include_special_flags=False))
        return None
    unknown = _parse(values, argv, known_only=True)
    keys = _keys(values, unknown)
    if values.mode in NEEDED:
        for name, what in NEEDED[values.mode].items():
            if not values[name].value:
                raise UsageError(f"--{name} is missing: {what}")
    if values.mode in MADE_FROM:
        given = None if values.config is None else load_config(values.config)
        config = config_for(values, given)
    else:
        config = _initial_config(values.config, values.workdir, values.mode)
    for key in keys:
        _check_key(config, key)
    del values.config
    with _flag_errors(values):
        config_flags.DEFINE_config_dict(
            "config", _Untold(config), flag_values=values, sys_argv=unknown
        )
    unparsed = _parse(values, unknown)
    values.config = ConfigDict(values.config)
    if len(unparsed) > 1:
        hint = "settings are --config.<key>=<value>, config files --config=<file>"
        raise UsageError(f"unexpected argument {unparsed[1]!r}: {hint}")
    flags.FLAGS(argv[:1])  # absl's own flags, which some libraries read
    return values


def _parse(values, argv, known_only=False):
    """The arguments that are no flags (with `known_only`, no flags of `values`)."""
    with _flag_errors(values):
        return values(argv, known_only)


@contextlib.contextmanager
def _flag_errors(values):
    """Raise errors of the flags `values` as UsageErrors."""
    try:
        yield
    except flags.IllegalFlagValueError as error:
        reason = str(error.__context__ or "")  # of the type's parser, if that failed
        flag = str(error).removeprefix("flag ").removesuffix(f": {reason}" if reason else "")
        name = flag.partition("=")[0].removeprefix("--")
        if reason and name in values:
            reason = f"expected {_EXPECTED.get(values[name].parser.flag_type(), reason)}"
        raise UsageError(f"{flag}: {reason}" if reason else flag) from error
    except Exception as error:
        raise UsageError(" ".join(str(error).split()) or type(error).__name__) from error


def _initial_config(source, workdir, mode):
    if source is not None:
        return load_config(source)
    is_run = workdir is not None and (io.folder(workdir) / run_dir.CONFIG_FILE).is_file()
    if not is_run and mode in ("train", "compose", "cluster", "compile"):
        raise UsageError(
            "--config is missing: a config file, e.g. --config configs/mod.py "
            "(or --workdir of an existing run)"
        )
    if workdir is None:
        raise UsageError("--workdir is missing: the folder of a run, e.g. --workdir runs/mod")
    return config_of_run(workdir)


def _keys(values, arguments):
    """Dotted keys of the settings among the arguments; UsageError for any other `--name`."""
    keys, is_value = [], False  # is_value: whether the next argument is the value of the last
    for argument in arguments[1:]:
        if is_value or not argument.startswith("-"):
            is_value = False
            continue
        if argument == "--":
            raise UsageError("unexpected argument '--': efx takes only flags and settings")
        name, equals, _ = argument.lstrip("-").partition("=")
        if not name.startswith("config."):
            raise UsageError(f"--{name} is not a flag{_nearest_flag(values, name)}")
        keys.append(name.removeprefix("config."))
        is_value = not equals
    return keys


def _nearest_flag(values, name):
    setting = elsewhere(name, names(default_config()))
    if setting:
        return f" (did you mean '--{setting}'?)"
    return nearest(f"--{name}", [f"--{flag}" for flag in values])


def _check_key(config, key):
    """UsageError unless the dotted key names a setting (not a block) of the config."""
    try:
        setting = require(config, key)
    except UsageError as error:
        raise UsageError(f"--{error}") from None
    if isinstance(setting, ConfigDict):  # not the schedule of a loss, which is a plain mapping
        raise UsageError(
            f"--config.{key} is a block of settings; set one of its settings: {', '.join(setting)}"
        )
