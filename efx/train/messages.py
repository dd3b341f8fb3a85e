"""The lines at the end of a run: commands that sample from it, evaluate it and show it."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys

from efx import run_dir
from efx.errors import UsageError


def closing_lines(workdir, config, data, context):
    """Lines with commands for the run.

    Args:
      workdir: pathlib.Path of the run directory. config: of the run. data: its `Data`.
      context: of its model, in tokens.
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
            if len(data.tokenizer.start) + len(data.tokenizer.encode(prompt)) <= context:
                return prompt
    return ""
