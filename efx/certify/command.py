"""Certify a language model: the properties that efx holds its own families to, for any model.

    python -m efx.certify TARGET

TARGET is a run directory, a folder that transformers loads (AutoModelForCausalLM), or
`module:function`: a function without arguments that returns a callable (tokens [B, T] -> logits
[B, T, V]) in JAX, PyTorch or numpy, or an `efx.certify.Subject`, which may have a cache, packed
rows, claims and parts (docs/certify.md). Exit status: 0 without a FAIL, 1 with one, 2 for bad
input.
"""

import json
from pathlib import Path

from efx.certify.properties import FAIL, certify
from efx.certify.subjects import of_target
from efx.config.parser import Parser
from efx.errors import UsageError
from efx.logging import tables


def read_text(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text={path}: cannot be read: {error}") from error


def show(results):
    """Print a table with a row for each result, then the reproduction of each FAIL."""
    rows = []
    for r in results:
        numbers = ("" if x is None else f"{x:.3g}" for x in (r.number, r.tolerance))
        rows.append([r.name, r.verdict, *numbers, r.unit])
    tables.show(tables.markdown(["property", "verdict", "number", "tolerance", "of"], rows))
    for r in results:
        if r.verdict == FAIL:
            where = ", ".join(f"{key} {value}" for key, value in r.reproduction.items())
            print(f"\n{r.name}: {where}")


def run(arguments):
    a = arguments
    text = read_text(a.text) if a.text else None
    subject = of_target(a.target, a.vocab_size, a.trust_remote_code, text)
    results = list(certify(subject, a.seed))
    if a.json:
        print(json.dumps([vars(result) for result in results], indent=1))
    else:
        show(results)
    return int(any(result.verdict == FAIL for result in results))


def main(argv=None):
    parser = Parser("efx.certify", __doc__)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="token ids of a callable")
    help = "text file for the worth of parts (default: held-out text of a run, else random tokens)"
    parser.add_argument("--text", metavar="FILE", help=help)
    help = "run the Python code in a folder of transformers"
    parser.add_argument("--trust-remote-code", action="store_true", help=help)
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default: 0)")
    help = "print a list of results instead of the table"
    parser.add_argument("--json", action="store_true", help=help)
    return parser.run(run, argv)
