"""Command line: `efx --config mod --workdir runs/mod`, or `python -m efx.main` in its place.

--mode=train (default) trains, or goes on with the run in --workdir; --mode=compose makes the run
folder of a model put together from other runs and does not train it; --mode=import makes that of a
pretrained model in Hugging Face's format, --from=FOLDER, at step 0; --mode=convert that of a dense
run, --from=RUN, with routed blocks, --to=mod, at step 0; --mode=export writes a run into a folder
in Hugging Face's format, --to=FOLDER. --mode=evaluate and --mode=sample read config and tokenizer
from the run folder and, like --mode=export, need no --config. --mode=cluster
clusters the documents of the config's corpus, for cBTM. --mode=compile compiles the training step
and what evaluates and samples in a training for accelerators that need not be there,
--topology=v5e:16x16 or h100:1x8x8, and prints whether these fit, what they communicate and about
how long they take; it needs no --workdir.

Any setting can be changed with `--config.<key>=<value>`. A config is a file, `configs/mod.py`, or
the name of one that comes with efx, `mod`; `mod:smoke` picks a variant of it, and commas join
several.
"""

import signal
import time

_STARTED = time.monotonic()  # before the slow imports, so that start-up time counts them

# ruff: noqa: E402
from efx.parallel import signals

_ENDS = signals.end_at_ctrl_c()

import importlib
import logging as standard_logging
import os
import sys
from typing import Annotated

from absl import logging

from efx import run_dir
from efx.config.flags import parse
from efx.config.schema import Count, Range, converted
from efx.errors import UsageError, nearest
from efx.parallel import multihost
from efx.parallel.host_memory import keep_freed_memory

if _ENDS:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MODES = (
    "train", "compose", "import", "convert", "export", "evaluate", "sample", "cluster", "compile",
)  # fmt: skip
FLAGS_OF_MODES = {
    "prompt": ("sample",),
    "step": ("evaluate", "sample", "export"),
    "from": ("import", "convert"),
    "to": ("convert", "export"),
    "dtype": ("export",),
    "topology": ("compile",),
    "vocab_size": ("compile",),
    "json": ("compile",),
}


def run(argv):
    """Parse the command line and do what it says; UsageError for anything wrong with it."""
    values = parse(argv, usage=__doc__, config_for=_config_for)
    if values is None:
        return
    if values.mode not in MODES:
        raise UsageError(
            f"--mode={values.mode}: expected {', '.join(MODES)}{nearest(values.mode, MODES)}"
        )
    if not values.workdir and values.mode != "compile":
        raise UsageError("--workdir is missing: the folder of the run, e.g. --workdir runs/mod")
    for name, modes in FLAGS_OF_MODES.items():
        if values[name].value is not None and values.mode not in modes:
            raise UsageError(f"--{name} goes with --mode={' or '.join(modes)}, not {values.mode}")
    if values.mode == "compile":
        _check_compile(values)
    start_jax(values)
    if values.mode == "compile":
        _compile(values)
        return
    config, kind = values.config, run_dir.kind_of_result(values.workdir)
    if values.prompt is not None:
        config.sample.prompt = values.prompt
    verb = importlib.import_module(_module(values, kind))
    if values.mode in ("evaluate", "sample"):
        getattr(verb, values.mode)(config, values.workdir, step=values.step)
    elif values.mode == "import":
        verb.import_run(config, values["from"].value, values.workdir, command_line=argv)
    elif values.mode == "export":
        verb.export_run(config, values.workdir, values.to, step=values.step, dtype=values.dtype)
    elif values.mode == "convert":
        folder, to = values["from"].value, values["to"].value
        verb.convert(config, folder, to, values.workdir, command_line=argv)
    elif values.mode == "cluster":
        verb.run(config, values.workdir, command_line=argv)
    else:
        action = verb.compose if values.mode == "compose" else verb.train_and_evaluate
        action(config, values.workdir, command_line=argv, started=_STARTED)


def _config_for(values, config):
    """The config of a mode that makes a run of something else, from that in --config or None."""
    folder = values["from"].value
    if values.mode == "import":
        from efx.interop import import_run

        return import_run.config_for(folder, config)
    from efx.interop import convert_run

    return convert_run.config_for(folder, values["to"].value, config)


def _check_compile(values):
    if values.topology is None:
        raise UsageError(
            "--topology is missing: the accelerators to compile for, e.g. --topology=v5e:16x16"
        )
    if values.vocab_size is not None and values.vocab_size < 1:
        raise UsageError(f"--vocab_size={values.vocab_size}: must be at least 1")


def _compile(values):
    from efx import ahead_of_time

    ahead_of_time.compile_and_report(
        values.config,
        values.topology,
        vocab_size=values.vocab_size,
        workdir=values.workdir,
        as_json=bool(values.json),
    )


def _module(values, kind):
    """The module that does what the mode says with a folder that holds this kind of result."""
    if values.mode in ("evaluate", "sample"):
        return run_dir.USES[kind or "run", values.mode]
    if values.mode == "cluster":
        return "efx.cbtm.cluster"
    if values.mode in ("import", "convert", "export"):
        return f"efx.interop.{values.mode}_run"
    if kind == "clustering":
        raise UsageError(
            f"--workdir={values.workdir} has a clustering; its runs are in folders below it: "
            "start them with python -m efx.cbtm.run (--commands lists them)"
        )
    return "efx.train.trainer"


def _check_processes(values):
    """UsageError for flags about processes and devices that cannot be so."""
    devices = Annotated[int, Range(least=0, most=4096)]
    converted(devices, values.cpu_devices, "--cpu_devices")
    address, count, number = values.coordinator_address, values.num_processes, values.process_id
    if (address, count, number) == (None, None, None):
        return
    if None in (address, count, number):
        raise UsageError(
            "--coordinator_address, --num_processes and --process_id: set all three, or use "
            "--distributed"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(
            f"--coordinator_address={address}: expected the host and port of process 0, such as"
            " 10.0.0.1:8476"
        )
    converted(Count, count, "--num_processes")
    converted(Annotated[int, Range(least=0, most=count - 1)], number, "--process_id")


def start_jax(values):
    """Memory, compile cache, fake CPU devices, distributed runtime: before a device is touched."""
    import jax

    from efx.parallel import compile_cache

    _check_processes(values)
    keep_freed_memory()
    if values.mode == "compile":  # for devices that are not there, on those that every machine has
        jax.config.update("jax_platforms", "cpu")
        return
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    if values.cpu_devices:
        jax.config.update("jax_num_cpu_devices", values.cpu_devices)
    if values.coordinator_address is not None:
        multihost.connect(
            values.coordinator_address,
            values.num_processes,
            values.process_id,
            preemption=values.mode == "train",
        )
    elif values.distributed:
        multihost.connect(preemption=values.mode == "train")
    compile_cache.keep_compiled()


def _show_own_log():
    log = standard_logging.getLogger("efx")
    log.setLevel(standard_logging.INFO)
    log.propagate = False
    handler = standard_logging.StreamHandler()
    handler.setFormatter(standard_logging.Formatter("efx: %(message)s"))
    log.handlers = [handler]
    # These libraries print each retry twice: once themselves, once through absl's root logger.
    for name in ("HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")


def main(argv=None):
    """Exit status: 0 done (or saved on request), 1 the run had to stop, 2 bad input, 3 the run came
    to its end with a loss that is not finite, 75 another process of the run is lost, or its storage
    or a remote text could not be reached, 141 nobody reads any more what it writes."""
    # Libraries' INFO lines are not for users of efx; its own say what takes so long.
    logging.set_verbosity(logging.WARNING)
    _show_own_log()
    try:
        signals.end_with_starter()
        with signals.SecondSignal():
            status = _status(list(sys.argv if argv is None else argv))
        if status == 0 and multihost.connected():
            multihost.disconnect()
    except Exception as error:
        if not multihost.connected():
            raise
        multihost.fail(error)
    if multihost.connected():
        multihost.fail(None, status)
    return status


def command():
    """`main` as a process of its own, which ends without waiting for what nobody needs any more."""
    status = main()
    if signals.work_is_left():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _status(argv):
    try:
        run(argv)
        sys.stdout.flush()  # where nobody reads it, that is noticed here
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr, flush=True)
        return error.status
    except KeyboardInterrupt:
        print("efx: interrupted", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        return signals.status_without_reader()
    except RuntimeError as error:
        if type(error).__name__ not in ("RunStopped", "NotFinite"):  # of efx.train.trainer
            raise
        print(f"efx: stopped: {error}", file=sys.stderr, flush=True)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(command())
