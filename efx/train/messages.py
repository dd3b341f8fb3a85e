"""Lines for the user: how long a run takes, before it; commands that use it, after it."""

import contextlib
import importlib.util
import os
import re
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
        line += f"; on a CPU use {_smaller_run(command_line)}"
    return line


def _in_words(seconds):
    return f"{seconds:.2g} s" if seconds < 60 else duration(seconds)


def _smaller_run(command_line):
    """The variant `smoke` of a config that comes with efx, such as "--config gpt2:smoke"."""
    config = re.search(r"--config[= ]((configs/)?(\w+)(\.py)?)(?=[: ]|$)", " ".join(command_line))
    if config and importlib.util.find_spec(f"efx.configs.{config[3]}"):
        return f"--config {config[1]}:smoke"
    return "a smaller model or fewer steps"


def after(workdir, config, data, context):
    """Lines to end with.

    Args:
      workdir: pathlib.Path of the run directory. config: of the run. data: its `Data`.
      context: the longest prompt that its model reads, in tokens.
    """
    # launch/local.sh sets this, since its user may have no other Python with efx in it.
    command, python = "python -m efx.main", "python"
    if "EFX_COMMAND" in os.environ:
        command, python = os.environ["EFX_COMMAND"], shlex.quote(sys.executable)
    elif os.path.basename(sys.argv[0]) == "efx":  # installed, perhaps not on the PATH
        command = "efx" if shutil.which("efx") else shlex.quote(sys.argv[0])
    folder, prompt = shlex.quote(str(workdir)), _prompt(config, data, context)
    # A prompt that one line cannot show is the config's, which needs no flag.
    prompt_flag = f" --prompt {shlex.quote(prompt)}" if prompt and prompt.isprintable() else ""
    show = f"{python} -m tensorboard.main --logdir {folder}"
    if not config.log.tensorboard:
        show = f"{workdir / run_dir.METRICS_FILE} has one line per logged step"
    elif importlib.util.find_spec("tensorboard") is None:
        show = f"{python} -m pip install tensorboard && {show}"
    return (
        f"run directory: {workdir}",
        f"  sample from it:  {command} --mode=sample --workdir {folder}{prompt_flag}",
        f"  evaluate it:     {command} --mode=evaluate --workdir {folder}",
        f"  look at it:      {show}",
    )


def _prompt(config, data, context):
    """The config's prompt, or the first word of the held-out text that the tokenizer can encode and
    the model can read; "" without one."""
    first = next(iter(data.eval_batches(config.evaluate.batch_size, 1)))["inputs"][0]
    for prompt in (config.sample.prompt, *data.tokenizer.decode(first).split()):
        with contextlib.suppress(UsageError):
            if len(data.tokenizer.encode(prompt)) <= context:
                return prompt
    return ""
