"""The exception that means "the user asked for something that cannot be done", and the one for what
may be possible the next time."""

import sys


class UsageError(ValueError):
    """Bad input, told in one line.

    The message names the key, value, file or shape at fault and what would be right. `efx.main`
    prints it as `efx: error: <message>` and exits with status 2; library callers see a ValueError.
    What names of files and errors of libraries have in them does not make it more lines, and says
    nothing to a terminal.
    """

    status = 2  # of a process that ends with it

    def __init__(self, message=""):
        line = " ".join(str(message).splitlines())
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class PassingError(UsageError):
    """What the same command may not meet again: a process is lost, or a store cannot be reached.

    Its status (EX_TEMPFAIL) tells launchers that training goes on if they start it again.
    """

    status = 75


def extra(name):
    """An extra of efx and how to get it: no package index has efx, so its folder is named."""
    return (
        f"the extra `{name}` (EFX_EXTRAS={name} before ./launch/local.sh, or "
        f"pip install -e '.[{name}]' in efx's own folder)"
    )


def nearest(name, known, shown=None):
    """` (did you mean 'x'?)` for the closest of `known` to `name`, or an empty string.

    Close are names with at most two wrong letters in five, or else names that begin with `name`.

    Args:
      shown: {name: text to suggest for it}; by default the names.
    """
    name, known = str(name), [str(key) for key in known]
    errors = {key: _edit_distance(name.lstrip("-"), key.lstrip("-")) for key in known}
    close = [key for key in errors if 5 * errors[key] <= 2 * max(len(name), len(key))]
    close = close or [key for key in errors if len(name) > 2 and key.startswith(name)]
    if not close:
        return ""
    best = min(close, key=errors.get)
    return f" (did you mean {(shown or {}).get(best, best)!r}?)"


def _edit_distance(a, b):
    """The least number of letters to insert, delete, replace or swap with the next one."""
    before, row = [], list(range(len(b) + 1))
    for i, letter in enumerate(a):
        above, before, row = before, row, [i + 1]
        for j, other in enumerate(b):
            row.append(min(before[j] + (letter != other), before[j + 1] + 1, row[j] + 1))
            if i and j and letter == b[j - 1] and other == a[i - 1]:
                row[-1] = min(row[-1], above[j - 1] + 1)
    return row[-1]


class RunStopped(RuntimeError):
    """Training cannot continue; the message is one line for the user. status: exit status."""

    status = 1


class NotFinite(RunStopped):
    """The run is at its last step, but its gradients or the held-out loss are not finite."""

    status = 3


def warn(line):
    """Print a one-line warning to standard error, from process 0 only."""
    jax = sys.modules.get("jax")
    if jax is None or jax.process_index() == 0:
        print(f"efx: warning: {line}", file=sys.stderr, flush=True)
