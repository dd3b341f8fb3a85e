"""Config file that reads the config of a run folder: `--config efx/run_config.py:runs/mod`."""

from ml_collections import ConfigDict

from efx.runfolder import load_config


def get_config(workdir):
    """The config of the run, its lists as tuples again."""
    return ConfigDict(_tuples(load_config(workdir)))


def _tuples(value):
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value
