"""Command line: `efx [MODE] [RUN] [flags]`, or `python -m efx`.

    efx --config mod:smoke --workdir runs/smoke
    efx sample runs/smoke --prompt "def "
    efx --config mod:smoke,dense --workdir runs/dense --config.model.depth=2

MODE is the same as --mode=MODE, and RUN as --workdir=RUN. train (default) trains, or resumes the
run in --workdir. compose writes the run directory of a model composed of other runs, import that of
a pretrained model in Hugging Face's format (--from=DIR), convert that of a dense run with routed
blocks (--from=RUN --to=mod), each at step 0. export writes a run in Hugging Face's format
(--to=DIR). evaluate, sample and export read the config and tokenizer of the run in --workdir and
need no --config. cluster clusters the documents of the config's text, for cBTM. compile compiles
the programs of a run for accelerators that need not be there (--topology=v5e:16x16 or h100:1x8x8),
and prints whether they fit; it needs no --workdir.

Any setting is `--config.<key>=<value>`. A config is a file, `configs/mod.py`, or the name of a
config of efx, `mod`; `mod:smoke` selects a variant, and commas join several.
"""

import signal
import time

_STARTED = time.monotonic()  # before the slow imports, so that start-up time counts them

# ruff: noqa: E402
from efx.parallel import signals

_ENDS = signals.end_at_ctrl_c()

from efx.parallel.host_memory import keep_freed_memory

keep_freed_memory()  # before a library starts a thread, which would get an arena of its own

import contextlib
import logging as standard_logging
import os
import sys
from typing import Annotated

from absl import logging

from efx import api, run_dir
from efx.config import schema
from efx.config.flags import parse
from efx.config.load import to_config
from efx.errors import RunStopped, UsageError
from efx.parallel import multihost

if _ENDS:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MODES_OF_FLAGS = {
    "prompt": ("sample",),
    "step": ("evaluate", "sample", "export"),
    "from": ("import", "convert"),
    "to": ("convert", "export"),
    "dtype": ("export",),
    "topology": ("compile",),
    "vocab_size": ("compile",),
    "json": ("compile", "evaluate"),
}


def run(argv):
    """Parse the command line and execute its mode; UsageError for bad input."""
    values = parse(argv, usage=__doc__, config_for=_config_for)
    if values is None:
        return
    _check_flags(values)
    if values.prompt is not None:
        values.config.sample.prompt = values.prompt
    config, workdir, mode = to_config(values.config), values.workdir, values.mode
    start_jax(values)
    source, target = values["from"].value, values.to
    if mode == "compile":
        from efx import aot

        aot.compile_and_report(
            config,
            values.topology,
            vocab_size=values.vocab_size,
            workdir=workdir,
            as_json=bool(values.json),
        )
    elif mode == "evaluate":
        evaluate = api.module_of(workdir, mode).evaluate
        evaluate(config, workdir, step=values.step, as_json=bool(values.json))
    elif mode == "sample":
        api.module_of(workdir, mode).sample(config, workdir, step=values.step)
    elif mode == "import":
        from efx.interop.import_run import import_run

        import_run(config, source, workdir, command_line=argv)
    elif mode == "convert":
        from efx.interop.convert_run import convert

        convert(config, source, target, workdir, command_line=argv)
    elif mode == "export":
        from efx.interop.hf_export import export_run

        export_run(config, workdir, target, step=values.step, dtype=values.dtype)
    elif mode == "cluster":
        from efx.composition import cluster

        cluster.run(config, workdir, command_line=argv)
    else:
        from efx.train import trainer

        trains = mode != "compose"
        options = dict(command_line=argv, started=_STARTED, train=trains)
        trainer.train_and_evaluate(config, workdir, **options)


def _config_for(values, config):
    """The ConfigDict of the modes import and convert, from that of --config or None."""
    source = values["from"].value
    if values.mode == "import":
        from efx.interop import import_run

        return import_run.config_for(source, config)
    from efx.interop import convert_run

    return convert_run.config_for(source, values.to, config)


def _check_flags(values):
    mode, workdir = values.mode, values.workdir
    if not workdir and mode != "compile":
        raise UsageError("--workdir is missing: the run directory, e.g. --workdir runs/mod")
    for name, modes in _MODES_OF_FLAGS.items():
        if values[name].value is not None and mode not in modes:
            raise UsageError(f"--{name} goes with --mode={' or '.join(modes)}, not {mode}")
    if values.prompt == "":
        raise UsageError("--prompt is empty: text to continue, e.g. --prompt 'def '")
    if mode in ("train", "compose") and run_dir.RunDir(workdir).has_clustering:
        raise UsageError(
            f"--workdir={workdir} has a clustering; its runs are in directories below it: "
            "start them with python -m efx.composition.cbtm (--print-commands lists them)"
        )
    if mode == "compile":
        if values.topology is None:
            raise UsageError(
                "--topology is missing: the accelerators to compile for, e.g. --topology=v5e:16x16"
            )
        if values.vocab_size is not None:
            schema.converted(schema.Count, values.vocab_size, "--vocab_size")
    schema.converted(
        Annotated[int, schema.Range(least=0, most=4096)], values.cpu_devices, "--cpu_devices"
    )
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
    schema.converted(schema.Count, count, "--num_processes")
    schema.converted(Annotated[int, schema.Range(least=0, most=count - 1)], number, "--process_id")


def start_jax(values):
    """Set up CPU devices, distributed runtime and compilation cache for the flags."""
    import jax

    from efx.parallel import compile_cache

    if values.mode == "compile":  # for devices that are absent, on the CPU
        jax.config.update("jax_platforms", "cpu")
        return
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    if values.cpu_devices:
        jax.config.update("jax_num_cpu_devices", values.cpu_devices)
    process = (values.coordinator_address, values.num_processes, values.process_id)
    if values.distributed or process[0] is not None:
        multihost.connect(*process, preemption=values.mode == "train")
    compile_cache.enable_compile_cache()


def _configure_logging():
    logging.set_verbosity(logging.WARNING)  # INFO lines of libraries are not for users
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
    """Run the command line and return the exit status.

    0: done, or saved on request. 1: the run had to stop. 2: bad input. 3: the last loss of the run
    is not finite. 75: another process is lost, or a storage or network is unreachable; the same
    command may succeed. 141: stdout was closed (broken pipe).
    """
    _configure_logging()
    is_command = argv is None
    if is_command:
        sys.unraisablehook = signals.repeat_ignored_interrupt
    try:
        status = _status(list(sys.argv if argv is None else argv))
        if status == 0 and multihost.connected():
            multihost.disconnect()
    except Exception as error:
        if not multihost.connected():
            raise
        multihost.fail(error)
    if multihost.connected():
        multihost.fail(None, status)
    if status == 130 and is_command:  # JAX may crash at exit after an interrupted compilation
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(status)
    return status


def _status(argv):
    try:
        run(argv)
        sys.stdout.flush()  # a closed stdout is noticed here
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr, flush=True)
        return error.status
    except KeyboardInterrupt:
        print("efx: interrupted", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        return signals.status_without_reader()
    except RunStopped as error:
        print(f"efx: stopped: {error}", file=sys.stderr, flush=True)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
