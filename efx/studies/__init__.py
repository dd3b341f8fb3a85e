"""Studies: launch sets of runs and turn run directories into tables and pictures. No model code."""

import importlib.util
import sys

from efx.errors import UsageError, extra
from efx.parallel import signals

is_program = sys.argv[:1] == ["-m"]  # so Python calls a module that it is about to run
if is_program:
    signals.end_at_ctrl_c()  # until `cli.Parser.run` handles it
for package in (
    "k_means_constrained", "matplotlib", "pandas", "plotly", "scipy", "seaborn", "sklearn",
    "threadpoolctl",
):  # fmt: skip
    if importlib.util.find_spec(package) is None:
        message = f"this command needs {extra('studies')}: {package} is not installed"
        if is_program:
            print(f"efx: error: {message}", file=sys.stderr)
            sys.exit(2)
        raise UsageError(message)
