"""Command line: `python -m efx.main --config configs/mod.py --workdir runs/mod`.

--mode=train (default) trains, or goes on with the run in --workdir; --mode=evaluate and
--mode=sample read config and tokenizer from the run folder and need no --config. Any setting can be
changed with `--config.<key>=<value>`; `configs/mod.py:smoke` picks a variant of a config file.

Kept short on purpose: notebooks import `efx.train` and friends instead.
"""

import sys
import time

_STARTED = time.monotonic()

import os
import pathlib

from absl import flags, logging
from ml_collections import config_flags

from efx.errors import UsageError, nearest

MODES = ("train", "evaluate", "sample")

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/mod.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Run folder.")
_MODE = flags.DEFINE_string("mode", "train", "train, evaluate or sample.")
_PROMPT = flags.DEFINE_string("prompt", None, "sample: text to continue (config.sample.prompt).")
_STEP = flags.DEFINE_integer("step", None, "evaluate, sample: checkpoint step (default: newest).")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Start jax.distributed and let it find its peers (Slurm, TPU pods, GKE)."
)
_COORDINATOR = flags.DEFINE_string("coordinator_address", None, "host:port of process 0.")
_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
_PROCESS = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
_CPU_DEVICES = flags.DEFINE_integer("cpu_devices", 0, "Pretend that a CPU is so many devices.")


def run(argv):
    """Parse the command line and do what it says; UsageError for anything wrong with it."""
    parse(argv)
    if _MODE.value not in MODES:
        raise UsageError(
            f"--mode={_MODE.value}: expected {', '.join(MODES)}{nearest(_MODE.value, MODES)}"
        )
    if not _WORKDIR.value:
        raise UsageError("--workdir is missing: the folder of the run, e.g. --workdir runs/mod")
    start_jax()
    config = _CONFIG.value
    if _MODE.value == "train":
        from efx import train

        train.train_and_evaluate(config, _WORKDIR.value, command_line=argv, started=_STARTED)
    else:
        from efx import inference

        if _PROMPT.value is not None:
            config.sample.prompt = _PROMPT.value
        action = inference.evaluate if _MODE.value == "evaluate" else inference.sample
        action(config, _WORKDIR.value, step=_STEP.value)


def parse(argv):
    """Read flags and config; a run folder's own config where no --config is given."""
    values = {arg.split("=", 1)[0].lstrip("-"): arg for arg in argv[1:] if arg.startswith("-")}
    if "help" in values or "helpfull" in values:
        print(__doc__ + "\n" + flags.FLAGS.module_help(sys.modules[__name__]))
        raise SystemExit(0)
    given = list(argv)
    if "config" not in values:
        folder = _flag_value(argv, "workdir")
        if folder is None:
            raise UsageError(
                "--config is missing: a config file, e.g. --config configs/mod.py "
                "(or --workdir of an existing run)"
            )
        here = pathlib.Path(__file__).parent / "run_config.py"
        given.insert(1, f"--config={here}:{folder}")
    else:
        path = (_flag_value(argv, "config") or "").partition(":")[0]
        if not pathlib.Path(path).is_file():
            raise UsageError(f"--config={path}: there is no such file")
    try:
        rest = flags.FLAGS(given)
    except UsageError:
        raise
    except Exception as error:
        raise _explain(error, given) from error
    if len(rest) > 1:
        raise UsageError(f"unexpected argument {rest[1]!r}: settings are --config.<key>=<value>")
    if _CONFIG.value is None:
        raise UsageError("--config needs a value, e.g. --config configs/mod.py")


def _flag_value(argv, name):
    """Value of --name=x or --name x, before the flags are parsed; None when absent."""
    for i, arg in enumerate(argv):
        key, equals, value = arg.partition("=")
        if key.startswith("-") and key.lstrip("-") == name:
            return value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return None


def _explain(error, argv):
    """One line for whatever absl or ml_collections raised over the command line."""
    for cause in _causes(error):
        if isinstance(cause, UsageError):
            return cause
    config = _loaded_config(argv)
    if config is not None:
        for arg in argv[1:]:
            key = arg.partition("=")[0].lstrip("-")
            if key.startswith("config."):
                problem = _unknown_key(config, key.split(".")[1:])
                if problem:
                    return UsageError(problem)
    return UsageError(" ".join(str(error).split()) or type(error).__name__)


def _causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _loaded_config(argv):
    import importlib.util

    path, _, variant = (_flag_value(argv, "config") or "").partition(":")
    try:
        spec = importlib.util.spec_from_file_location("efx_config", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.get_config(variant) if variant else module.get_config()
    except Exception:
        return None  # then the first error is the one to show


def _unknown_key(config, keys):
    block = config
    for depth, key in enumerate(keys):
        name = ".".join(["config", *keys[: depth + 1]])
        if not hasattr(block, "keys"):
            return f"--{name}: {'.'.join(['config', *keys[:depth]])} is a value, not a block"
        if key not in block:
            return f"--{name} is not a setting{nearest(key, block.keys())}"
        block = block[key]
    if hasattr(block, "keys"):
        return f"--{name} is a block of settings; set one of {', '.join(block.keys())} in it"
    return None


def start_jax():
    """Compile cache, fake CPU devices and the distributed runtime, before any device is touched."""
    import jax

    cache = os.environ.get("EFX_COMPILE_CACHE", str(pathlib.Path.home() / ".cache/efx/jax"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if _CPU_DEVICES.value:
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES.value)
    if _COORDINATOR.value or _PROCESSES.value is not None or _PROCESS.value is not None:
        if None in (_COORDINATOR.value, _PROCESSES.value, _PROCESS.value):
            raise UsageError(
                "--coordinator_address, --num_processes and --process_id go together: "
                "give all three, or --distributed"
            )
        jax.distributed.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    elif _DISTRIBUTED.value:
        jax.distributed.initialize()


def main(argv=None):
    """Exit status: 0 done (or saved on request), 1 the run had to stop, 2 bad input."""
    # Libraries' INFO lines are not for users of efx.
    logging.set_verbosity(logging.WARNING)
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
