"""What the tests of efx.metrics and of run folders share."""

import os
import pathlib
import subprocess
import sys

from efx.metrics import MetricsWriter


def make(workdir, tensorboard=False, wandb=None):
    return MetricsWriter(workdir, tensorboard=tensorboard, wandb=wandb)


def environment():
    root = str(pathlib.Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}


def run_script(script, workdir):
    """A finished Python process of the script, whose `sys.argv[1]` is the folder."""
    return subprocess.run(
        [sys.executable, "-c", script, str(workdir)],
        capture_output=True,
        text=True,
        env=environment(),
    )
