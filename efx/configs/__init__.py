"""The configs that come with efx: `from efx.configs import common`.

They lie in the folder `configs` of a checkout, which a wheel has in the place of this file
(`package-dir` in pyproject.toml).
"""

import pathlib

__path__ = [str(pathlib.Path(__file__).resolve().parents[2] / "configs")]
