"""Config file that reads the config of a run folder: `--config efx/run_config.py:runs/mod`."""

import pathlib

from ml_collections import ConfigDict

from efx import run_settings
from efx.runfolder import CONFIG_FILE, load_config


def get_config(workdir):
    """The config of the run, its lists as tuples again; UsageError unless its keys are right."""
    config = ConfigDict(_tuples(load_config(workdir)))
    run_settings.check(config, pathlib.Path(workdir) / CONFIG_FILE)
    return config


def _tuples(value):
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value
