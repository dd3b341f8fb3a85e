"""A run of a few steps for tests of studies that read one."""

import pytest

from efx import main


def train(root, workdir, config, *settings):
    """Trains `configs/<config>` with settings such as "steps=2"; gives `workdir`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        flags = (f"--config.{setting}" for setting in settings)
        main.run(["x", f"--config=configs/{config}", f"--workdir={workdir}", *flags])
    return workdir
