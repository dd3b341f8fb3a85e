"""Command line: `python -m efx.main --config configs/mod.py --workdir runs/mod`.

--mode=train (default) trains, or goes on with the run in --workdir; --mode=compose makes the run
folder of a model put together from other runs and does not train it; --mode=evaluate and
--mode=sample read config and tokenizer from the run folder and need no --config. Any setting can be
changed with `--config.<key>=<value>`; `configs/mod.py:smoke` picks a variant of a config file.

Kept short on purpose: notebooks import `efx.train` and friends instead.
"""

import time

_STARTED = time.monotonic()  # before the slow imports, so that start-up time counts them

# ruff: noqa: E402
import importlib.util
import logging as standard_logging
import os
import pathlib
import sys

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from efx.errors import UsageError, nearest
from efx.hostmemory import keep_freed_memory

MODES = ("train", "compose", "evaluate", "sample")


def _define(config, argv):
    """The flags, in a set of their own: parsing twice in one process starts afresh."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)

    def define(kind, name, default, text):
        kind(name, default, text, flag_values=values)

    define(flags.DEFINE_string, "workdir", None, "Run folder.")
    define(flags.DEFINE_string, "mode", "train", "train, compose, evaluate or sample.")
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


def run(argv):
    """Parse the command line and do what it says; UsageError for anything wrong with it."""
    values = parse(argv)
    if values is None:
        return
    if values.mode not in MODES:
        raise UsageError(
            f"--mode={values.mode}: expected {', '.join(MODES)}{nearest(values.mode, MODES)}"
        )
    if not values.workdir:
        raise UsageError("--workdir is missing: the folder of the run, e.g. --workdir runs/mod")
    start_jax(values)
    config = values.config
    if values.mode in ("train", "compose"):
        from efx import train

        action = train.train_and_evaluate if values.mode == "train" else train.compose
        action(config, values.workdir, command_line=argv, started=_STARTED)
    else:
        from efx import inference

        if values.prompt is not None:
            config.sample.prompt = values.prompt
        action = inference.evaluate if values.mode == "evaluate" else inference.sample
        action(config, values.workdir, step=values.step)


def parse(argv):
    """Parsed flags; the run folder's own config where no --config is given. None after --help."""
    names = {arg.partition("=")[0].lstrip("-") for arg in argv[1:] if arg.startswith("-")}
    if names & {"help", "helpfull", "h"}:
        print(__doc__ + "\nFlags:\n" + _define(ConfigDict(), argv[:1]).get_help("  "))
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


def start_jax(values):
    """Memory, compile cache, fake CPU devices, distributed runtime: before a device is touched."""
    import jax

    keep_freed_memory()
    cache = os.environ.get("EFX_COMPILE_CACHE", str(pathlib.Path.home() / ".cache/efx/jax"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if values.cpu_devices:
        jax.config.update("jax_num_cpu_devices", values.cpu_devices)
    if (
        values.coordinator_address
        or values.num_processes is not None
        or values.process_id is not None
    ):
        if None in (values.coordinator_address, values.num_processes, values.process_id):
            raise UsageError(
                "--coordinator_address, --num_processes and --process_id go together: "
                "give all three, or --distributed"
            )
        jax.distributed.initialize(
            values.coordinator_address, values.num_processes, values.process_id
        )
    elif values.distributed:
        jax.distributed.initialize()


def _show_own_log():
    log = standard_logging.getLogger("efx")
    log.setLevel(standard_logging.INFO)
    log.propagate = False
    handler = standard_logging.StreamHandler()
    handler.setFormatter(standard_logging.Formatter("efx: %(message)s"))
    log.handlers = [handler]


def main(argv=None):
    """Exit status: 0 done (or saved on request), 1 the run had to stop, 2 bad input."""
    # Libraries' INFO lines are not for users of efx; its own say what takes so long.
    logging.set_verbosity(logging.WARNING)
    _show_own_log()
    try:
        run(list(sys.argv if argv is None else argv))
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("efx: interrupted", file=sys.stderr, flush=True)
        return 130
    except RuntimeError as error:
        if type(error).__name__ != "RunStopped":
            raise
        print(f"efx: stopped: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
