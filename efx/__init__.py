"""efx: transformers that decide for themselves how much to compute, in JAX and Flax linen."""

import importlib.util
import sys

__version__ = "0.2.0"

# `python -m efx.main` imports this file first, with "-m" in place of the program's name.
if sys.argv[:1] == ["-m"] and importlib.util.find_spec("absl") is None:
    print(
        f"efx: error: efx's requirements are not installed for {sys.executable}: run"
        " `source .venv/bin/activate` in the checkout, or first ./launch/local.sh, which makes it",
        file=sys.stderr,
    )
    raise SystemExit(2)
