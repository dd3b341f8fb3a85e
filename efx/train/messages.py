"""The lines at the end of a run: commands that sample from it, evaluate it and show it."""

import importlib.util
import os
import shlex
import shutil
import sys

from efx import run_dir


def closing_lines(workdir, has_tensorboard):
    """Lines with commands for the run.

    Args:
      workdir: pathlib.Path of the run directory. has_tensorboard: whether it has event files.
    """
    # launch/local.sh sets this, since its user may have no other Python with efx in it.
    command, python = "python -m efx.main", "python"
    if "EFX_COMMAND" in os.environ:
        command, python = os.environ["EFX_COMMAND"], shlex.quote(sys.executable)
    elif os.path.basename(sys.argv[0]) == "efx":  # installed, perhaps not on the PATH
        command = "efx" if shutil.which("efx") else shlex.quote(sys.argv[0])
    folder = shlex.quote(str(workdir))
    show = f"{python} -m tensorboard.main --logdir {folder}"
    if not has_tensorboard:
        show = f"{workdir / run_dir.METRICS_FILE} has one line per logged step"
    elif importlib.util.find_spec("tensorboard") is None:
        show = f"{python} -m pip install tensorboard && {show}"
    return (
        f"run directory: {workdir}",
        f"  sample from it:  {command} sample {folder}",
        f"  evaluate it:     {command} evaluate {folder}",
        f"  look at it:      {show}",
    )
