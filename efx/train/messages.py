"""Lines for the user: how long a run takes, before it; commands that work for it, after it."""

import contextlib
import importlib
import importlib.util
import os
import shlex
import shutil
import sys

import jax

from efx import run_dir
from efx.errors import UsageError
from efx.layers.flops import cpu_flops_per_second
from efx.logging import duration, quantity

# Measured on an H100, dense models of 350M parameters: 0.37 to 0.42 (docs/results.md).
_ASSUMED_MFU = 0.35
_LONG_SECONDS = 3600  # on a CPU
_SMALL_VARIANTS = ("cpu", "smoke")


def before(flops, steps, peak, command_line):
    """The line with the estimated time of a run, or None for an accelerator of unknown peak.

    Args:
      flops: nominal training FLOPs of the `steps` that are left.
      peak: FLOP/s of all devices together, 0 if unknown.
      command_line: of the run.
    """
    if peak:
        bound, rate = "about", _ASSUMED_MFU * peak
        basis = f"at an assumed MFU of {_ASSUMED_MFU:.0%}"
    elif jax.default_backend() == "cpu":
        bound, rate = "at least", jax.process_count() * cpu_flops_per_second()
        basis = f"at the speed of a matrix product on this CPU, {quantity(rate, 'FLOP/s')}"
    else:
        return None
    seconds = flops / rate
    line = (
        f"estimated time: {bound} {_in_words(seconds)} for {steps} steps,"
        f" {_in_words(seconds / steps)} a step ({basis})"
    )
    if not peak and seconds > _LONG_SECONDS:
        smaller = " or ".join(f"--config {source}" for source in _smaller(command_line))
        line += f"; for a CPU take a smaller run: {smaller or 'a smaller model or fewer steps'}"
    return line


def _in_words(seconds):
    return f"{seconds:.2g} s" if seconds < 60 else duration(seconds)


def _smaller(command_line):
    """The small variants of the command's config, if that comes with efx: ["gpt2:smoke"]."""
    source = ""
    for argument, following in zip(command_line, [*command_line[1:], ""], strict=True):
        key, equals, value = argument.lstrip("-").partition("=")
        if key == "config":
            source = (value if equals else following).partition(":")[0]
    name = os.path.basename(source).removesuffix(".py")
    if not name or source not in (name, f"configs/{name}.py"):
        return []
    try:
        config_file = importlib.import_module(f"efx.configs.{name}")
    except ImportError:
        return []
    variants = getattr(config_file, "VARIANTS", ())
    return [f"{source}:{variant}" for variant in _SMALL_VARIANTS if variant in variants]


def after(workdir, config, data, context):
    """Lines to end with.

    Args:
      workdir: pathlib.Path of the run folder. config: of the run. data: its `Data`.
      context: the longest prompt that its model takes, in tokens.
    """
    # launch/local.sh names itself here, since its user may have no other Python with efx in it.
    command, python = "python -m efx.main", "python"
    if "EFX_COMMAND" in os.environ:
        command, python = os.environ["EFX_COMMAND"], shlex.quote(sys.executable)
    elif os.path.basename(sys.argv[0]) == "efx":  # installed; perhaps not on the PATH
        command = shlex.quote(sys.argv[0] if shutil.which("efx") != sys.argv[0] else "efx")
    folder, text = shlex.quote(str(workdir)), _prompt(config, data, context)
    # One that cannot be shown in a line is the config's own, which needs no flag.
    prompt = f" --prompt {shlex.quote(text)}" if text and text.isprintable() else ""
    look = f"tensorboard --logdir {folder}"
    if not config.log.tensorboard:
        look = f"{workdir / run_dir.METRICS_FILE} has one line per logged step"
    elif shutil.which("tensorboard") is None:
        look = f"{python} -m tensorboard.main --logdir {folder}"
        if importlib.util.find_spec("tensorboard") is None:
            look = f"{python} -m pip install tensorboard && {look}"
    return (
        f"run folder: {workdir}",
        f"  sample from it:  {command} --mode=sample --workdir {folder}{prompt}",
        f"  evaluate it:     {command} --mode=evaluate --workdir {folder}",
        f"  look at it:      {look}",
    )


def _prompt(config, data, context):
    """The config's prompt; where the tokenizer or the model does not take that, a word of the
    held-out text; "" without one."""
    first = next(iter(data.eval_batches(config.evaluate.batch_size, 1)))["inputs"][0]
    for prompt in (config.sample.prompt, *data.tokenizer.decode(first).split()):
        with contextlib.suppress(UsageError):
            if len(data.tokenizer.encode(prompt)) <= context:
                return prompt
    return ""
