"""Certify a language model: the properties that efx holds its own families to, for any model.

    python -m efx.certify TARGET

TARGET is a run directory, a folder that transformers loads (AutoModelForCausalLM), or
`module:function`: a function without arguments that returns a callable (tokens [B, T] -> logits
[B, T, V]) in JAX, PyTorch or numpy, or an `efx.certify.Subject`, which may have a cache, packed
rows, claims and parts (docs/certify.md). Exit status: 0 without a FAIL, 1 with one, 2 for bad
input.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from efx.certify.properties import FAIL, PASS, TOLERANCES, certify
from efx.certify.subjects import of_target
from efx.errors import UsageError

COLUMNS = [
    ("property", "left", 18),
    ("verdict", "left", 14),
    ("number", "right", 9),
    ("tolerance", "right", 9),
    ("of", "left", 0),
]
COLORS = {PASS: "green", FAIL: "bold red"}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def parse(argv):
    parser = Parser(
        prog="python -m efx.certify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="token ids of a callable")
    help = "text file for the worth of parts (default: held-out text of a run, else random tokens)"
    parser.add_argument("--text", metavar="FILE", help=help)
    help = "run the Python code in a folder of transformers"
    parser.add_argument("--trust-remote-code", action="store_true", help=help)
    help = "of the computation; tolerances follow it (default: %(default)s)"
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32", help=help)
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default: 0)")
    help = "print a list of results instead of the table"
    parser.add_argument("--json", action="store_true", help=help)
    return parser.parse_args(argv)


def number(x):
    return "" if x is None else f"{x:.3g}"


def show(results, title):
    """Print a table with a row for each result, then the reproduction of each FAIL."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, justify, width in COLUMNS:
        table.add_column(name, no_wrap=True, justify=justify, min_width=width)
    for r in results:
        verdict = f"[{COLORS[r.verdict]}]{r.verdict}[/]" if r.verdict in COLORS else r.verdict
        table.add_row(r.name, verdict, number(r.number), number(r.tolerance), r.unit)
    console = Console()
    console.print(table)
    for r in results:
        if r.verdict == FAIL:
            where = ", ".join(f"{key} {value}" for key, value in r.reproduction.items())
            console.print(f"[bold red]{r.name}[/]: {where}", soft_wrap=True, highlight=False)


def as_json(result):
    """A dict; numbers that are not finite are text, which JSON has no other form for."""
    fields = vars(result)
    if result.number is not None and not math.isfinite(result.number):
        fields = {**fields, "number": str(result.number)}
    return fields


def run(argv):
    arguments = parse(argv)
    text = None
    if arguments.text:
        try:
            text = Path(arguments.text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text={arguments.text}: cannot be read: {error}") from error
    subject = of_target(
        arguments.target,
        arguments.vocab_size,
        arguments.trust_remote_code,
        text,
        arguments.dtype,
    )
    results = list(certify(subject, arguments.seed))
    if arguments.json:
        print(json.dumps([as_json(result) for result in results], indent=1))
    else:
        show(results, f"{arguments.target} in {subject.dtype}")
    return int(any(result.verdict == FAIL for result in results))


def main(argv=None):
    try:
        return run(argv)
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr)
        return error.status
