"""How a refusal is checked: a `UsageError` of one line that names the setting with its value, the
file or the flag at fault. Its other words are free."""

import pytest

from efx.errors import UsageError


def refused(call, *names):
    """`call()` raises a `UsageError` of one line in which each of `names` occurs."""
    with pytest.raises(UsageError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line and all(name in line for name in names), line
