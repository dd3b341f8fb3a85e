"""Reading a config file, for every program that takes one."""

import importlib.util
import pathlib
import sys

from efx.errors import UsageError


def load_config(source):
    """The ConfigDict of "file.py" or "file.py:variant"."""
    path, _, variant = source.partition(":")
    if not pathlib.Path(path).is_file():
        raise UsageError(f"--config={path}: there is no such file")
    # A config imports `configs.common`, wherever efx is started from.
    top = str(pathlib.Path(__file__).resolve().parent.parent)
    if top not in sys.path:
        sys.path.append(top)
    try:
        spec = importlib.util.spec_from_file_location("efx_config", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.get_config(variant) if variant else module.get_config()
    except UsageError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"--config={source} cannot be loaded: {reason}") from error
