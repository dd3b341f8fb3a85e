"""Settings that are refused, and how a refusal is checked.

A refusal is a `UsageError` of one line that names what is at fault: the setting with its value, the
file or the flag. Its other words are free.
"""

import pytest

from efx.errors import UsageError


def refused(call, *names):
    """`call()` raises a `UsageError` of one line in which each of `names` occurs."""
    with pytest.raises(UsageError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line and all(name in line for name in names), line


# Changes of a small run (test_cli.SETTINGS) and the names that the message must have.
# tests/config/test_refusals.py starts each of them by the command line.

GENERAL = [
    ({"seed": -1}, "config.seed=-1"),
]

MODELS = []

ROUTING = []

DATA = []

RUNS = []

STUDIES = []
