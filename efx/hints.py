"""What can be done with a run that has ended: commands that work for it, on this machine."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys

from efx import runfolder
from efx.errors import UsageError


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
        look = f"{workdir / runfolder.METRICS_FILE} has a line for each logged step"
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
