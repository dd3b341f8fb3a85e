"""Helpers for tests of studies: a short training run, and the error line of a command."""

import pytest

from efx import main


def train(root, workdir, config, *settings):
    """Trains `configs/<config>` with settings such as "steps=2"; returns `workdir`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        flags = (f"--config.{setting}" for setting in settings)
        main.run(["x", f"--config=configs/{config}", f"--workdir={workdir}", *flags])
    return workdir


def error_line(capsys, *names):
    """Checks that a command printed one error line in which each of `names` occurs."""
    line = capsys.readouterr().err
    assert line.startswith("efx: error: ") and line.count("\n") == 1, line
    assert all(name in line for name in names), line
