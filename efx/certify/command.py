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
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from efx.certify.properties import FAIL, PASS, certify
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
    parser.add_argument("--text", metavar="FILE", type=read_text, help=help)
    help = "run the Python code in a folder of transformers"
    parser.add_argument("--trust-remote-code", action="store_true", help=help)
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default: 0)")
    help = "print a list of results instead of the table"
    parser.add_argument("--json", action="store_true", help=help)
    return parser.parse_args(argv)


def read_text(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text={path}: cannot be read: {error}") from error


def show(results, title):
    """Print a table with a row for each result, then the reproduction of each FAIL."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, justify, width in COLUMNS:
        table.add_column(name, no_wrap=True, justify=justify, min_width=width)
    for r in results:
        verdict = f"[{COLORS[r.verdict]}]{r.verdict}[/]" if r.verdict in COLORS else r.verdict
        numbers = ("" if x is None else f"{x:.3g}" for x in (r.number, r.tolerance))
        table.add_row(r.name, verdict, *numbers, r.unit)
    console = Console()
    console.print(table)
    for r in results:
        if r.verdict == FAIL:
            where = ", ".join(f"{key} {value}" for key, value in r.reproduction.items())
            console.print(f"[bold red]{r.name}[/]: {where}", soft_wrap=True, highlight=False)


def run(argv):
    arguments = vars(parse(argv))
    seed, as_json = arguments.pop("seed"), arguments.pop("json")
    results = list(certify(of_target(**arguments), seed))
    if as_json:
        print(json.dumps([vars(result) for result in results], indent=1))
    else:
        show(results, arguments["target"])
    return int(any(result.verdict == FAIL for result in results))


def main(argv=None):
    try:
        return run(argv)
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr)
        return error.status
