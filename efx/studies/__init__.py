"""Studies: launch sets of runs and turn run directories into tables and pictures. No model code."""

import sys

from efx.errors import extra
from efx.parallel import signals

if sys.argv[:1] == ["-m"]:  # so Python calls a module that it is about to run
    signals.end_at_ctrl_c()  # until `cli.Parser.run` handles it
try:
    import pandas  # noqa: F401
    import scipy  # noqa: F401
except ImportError as error:
    raise ImportError(f"efx.studies needs {extra('studies')}: {error.name} is missing") from None
