"""Flags of the command line: from the arguments of `python -m efx.main` to a ConfigDict."""

import contextlib

from absl import flags
from ml_collections import ConfigDict, config_flags

from efx import __version__, io, run_dir
from efx.config.load import config_of_run, described_configs, find_file, load_config
from efx.config.names import full_name, value_of
from efx.config.run import default_config
from efx.errors import UsageError, nearest

MODES = (
    "train", "compose", "import", "convert", "export", "evaluate", "sample", "cluster", "compile",
)  # fmt: skip
_TEXT, _NUMBER, _SWITCH = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_bool
# name: (type, default, help)
_FLAGS = {
    "config": (
        _TEXT,
        None,
        "Config: FILE.py, or the name of a config of efx; with variants, NAME:VARIANT,VARIANT. "
        "--config.KEY=VALUE changes a setting.",
    ),
    "workdir": (_TEXT, None, "Run directory."),
    "mode": (_TEXT, "train", f"One of {', '.join(MODES)}."),
    "from": (_TEXT, None, "import: directory of a Hugging Face model; convert: of a dense run."),
    "to": (_TEXT, None, "convert: mod or layer_drop; export: new directory, for transformers."),
    "dtype": (_TEXT, None, "export: float32 or bfloat16."),
    "prompt": (_TEXT, None, "sample: text to continue."),
    "step": (_NUMBER, None, "evaluate, sample, export: checkpoint (default: newest)."),
    "topology": (
        _TEXT,
        None,
        "compile: chips and their sizes, v5e:16x16, or slices x hosts x GPUs, h100:1x8x8.",
    ),
    "vocab_size": (_NUMBER, None, "compile: number of token ids (default: the tokenizer's)."),
    "json": (_SWITCH, None, "compile, evaluate: print the report, or all metrics, as JSON."),
    "distributed": (
        _SWITCH,
        False,
        "Start jax.distributed and let it find the other processes (Slurm, TPU pods, GKE).",
    ),
    "coordinator_address": (_TEXT, None, "host:port of process 0."),
    "num_processes": (_NUMBER, None, "Number of processes."),
    "process_id": (_NUMBER, None, "Number of this process, from 0."),
    "cpu_devices": (_NUMBER, 0, "Present the CPU as this many devices."),
    "list": (_SWITCH, False, "Print the configs of efx with their variants."),
    "version": (_SWITCH, False, "Print the version."),
}
# Flags that a mode requires: {mode: {flag: its meaning}}.
_REQUIRED = {
    "import": {"from": "the directory of a Hugging Face model"},
    "convert": {"from": "the run directory of a dense model", "to": "mod or layer_drop"},
    "export": {"to": "a new directory for the exported model"},
}
# Valid values of a flag's type; absl's errors show only the wrong value.
_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number in digits, such as 1000",
    "float": "a number, such as 0.1",
}


def parse(argv, usage="", config_for=None):
    """Parsed flags; `config` is the ConfigDict with all changes. None after --help and the like.

    Without --config the config is that of the run in --workdir. The words of `efx MODE RUN`, both
    optional, are --mode and --workdir.

    Args:
      usage: text that --help prints before the list of flags.
      config_for: function of the flags and the ConfigDict of --config, or None, to the ConfigDict
        of the modes import and convert.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may follow the value of a setting
    for name, (define, default, text) in _FLAGS.items():
        define(name, default, text, flag_values=values, allow_overwrite=False)
    if {"--help", "-help", "--helpfull", "-h"} & {argument.partition("=")[0] for argument in argv}:
        print(usage + "\nFlags:\n" + values.get_help("  ", include_special_flags=False))
        return None
    settings = _parse(values, argv, known_only=True)
    if values.version or values.list:
        print(f"efx {__version__}" if values.version else _list_of_configs())
        return None
    keys, words, settings = _split(values, settings)
    _read_words(values, words)
    if values.mode not in MODES:
        raise UsageError(
            f"--mode={values.mode}: expected {', '.join(MODES)}{nearest(values.mode, MODES)}"
        )
    for name, meaning in _REQUIRED.get(values.mode, {}).items():
        if not values[name].value:
            raise UsageError(f"--{name} is missing: {meaning}")
    if values.mode in ("import", "convert"):
        given = None if values.config is None else load_config(values.config)
        config = config_for(values, given)
    else:
        config = _initial_config(values)
    for key in keys:
        _check_key(config, key)
    del values.config
    with _flag_errors(values):
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=settings)
    unparsed = _parse(values, settings)
    if len(unparsed) > 1:
        raise _unexpected(unparsed[1])
    flags.FLAGS(argv[:1])  # absl's own flags, which some libraries read
    return values


def _parse(values, argv, known_only=False):
    """The arguments that are no flags; with `known_only`, no flags of `values`."""
    with _flag_errors(values):
        return values(argv, known_only)


@contextlib.contextmanager
def _flag_errors(values):
    """Raise errors of the flags `values` as UsageErrors."""
    try:
        yield
    except flags.IllegalFlagValueError as error:
        reason = str(error.__context__ or "")  # from the parser of the flag's type
        flag = str(error).removeprefix("flag ").removesuffix(f": {reason}" if reason else "")
        name = flag.partition("=")[0].removeprefix("--")
        if reason and name in values:
            reason = f"expected {_EXPECTED.get(values[name].parser.flag_type(), reason)}"
        raise UsageError(f"{flag}: {reason}" if reason else flag) from error
    except Exception as error:
        raise UsageError(" ".join(str(error).split()) or type(error).__name__) from error


def _initial_config(values):
    if values.config is not None:
        return load_config(values.config)
    workdir = values.workdir
    is_run = workdir is not None and _is_run(workdir)
    if not is_run and values.mode in ("train", "compose", "cluster", "compile"):
        raise UsageError(
            "--config is missing: a config, e.g. --config mod (--list prints all), or the "
            "--workdir of an existing run"
        )
    if workdir is None:
        raise UsageError("--workdir is missing: a run directory, e.g. --workdir runs/mod")
    return config_of_run(workdir)


def _list_of_configs():
    lines = []
    for config, (purpose, variants) in described_configs().items():
        lines.append(f"{config:<36}{purpose}")
        lines += [f"  {f'{config}:{name}':<34}{text}" for name, text in variants.items()]
    return "\n".join(lines)


def _split(values, arguments):
    """(dotted keys of the settings, words, arguments without the words).

    Raises: UsageError for a `--name` that is no setting.
    """
    keys, words, others = [], [], arguments[:1]
    is_value = False  # whether the next argument may be the value of the last one
    for argument in arguments[1:]:
        if not is_value and not argument.startswith("-"):
            words.append(argument)
            continue
        others.append(argument)
        if is_value and not argument.startswith("--"):
            is_value = False
            continue
        if argument == "--":
            raise UsageError("unexpected argument '--': efx takes only flags and settings")
        name, equals, _ = argument.lstrip("-").partition("=")
        if not name.startswith("config."):
            setting = full_name(name, default_config())
            hint = nearest(f"--{name}", [f"--{flag}" for flag in values])
            hint = f" (did you mean '--{setting}'?)" if setting else hint
            raise UsageError(f"--{name} is not a flag{hint}")
        keys.append(name.removeprefix("config."))
        is_value = not equals
    return keys, words, others


def _read_words(values, words):
    """Set --mode and --workdir to the words of the command line; UsageError for others."""
    words, has_mode = list(words), values["mode"].present
    if words and words[0] in MODES and not has_mode:
        values.mode, has_mode = words.pop(0), True
    if words and values.workdir is None and (has_mode or _is_run(words[0])):
        values.workdir = words.pop(0)
    if words:
        raise _unexpected(words[0])


def _is_run(word):
    return (io.folder(word) / run_dir.CONFIG_FILE).is_file()


def _unexpected(word):
    """The UsageError for a word that is neither a mode nor a run."""
    hint = nearest(word, [*MODES, "--list", "--version", "--help"])
    if _is_run(word):
        hint = " (one run at a time; python -m efx.studies.report RUN... compares runs)"
    with contextlib.suppress(UsageError):
        find_file("config", word.partition(":")[0])
        hint = f" (did you mean '--config={word}'?)"
    return UsageError(
        f"unexpected argument {word!r}{hint}: the words are MODE and an existing RUN, as in "
        "`efx sample runs/mod --prompt TEXT`; settings are --config.<key>=<value>"
    )


def _check_key(config, key):
    """UsageError unless the dotted key names a setting (not a block) of the config."""
    try:
        setting = value_of(config, key)
    except UsageError as error:
        raise UsageError(f"--{error}") from None
    if isinstance(setting, ConfigDict):  # the schedule of a loss is a plain mapping
        raise UsageError(
            f"--config.{key} is a block of settings; set one of its settings: {', '.join(setting)}"
        )
