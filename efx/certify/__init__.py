"""Certify a language model: the properties that efx holds its own families to, for any model.

    python -m efx.certify TARGET                     (docs/certify.md)

    from efx import certify

    for result in certify.certify(certify.of_run("runs/mod")):
        print(result.name, result.verdict, result.number)

`properties.py` has the interface of a model, `Subject`, and one function for each property;
`subjects.py` makes a `Subject` of a run directory, a folder of transformers or a callable,
`torch_models.py` of PyTorch; `command.py` is the command.
"""

from efx.certify.command import main  # noqa: F401
from efx.certify.properties import (  # noqa: F401  (public names of this package)
    FAIL,
    NOT_APPLICABLE,
    PASS,
    Result,
    Subject,
    certify,
)
from efx.certify.subjects import (  # noqa: F401
    of_callable,
    of_function,
    of_model,
    of_model_with_parts,
    of_run,
    of_target,
)
