"""Errors of the user's input and of the environment, each reported in one line."""

import difflib
import sys


class UsageError(ValueError):
    """Bad input.

    The message names the key, value, file or shape at fault and the remedy. `efx.main` prints it as
    `efx: error: <message>` and exits with `status`. Line breaks and control characters, which file
    names and errors of libraries may contain, are escaped.
    """

    status = 2

    def __init__(self, message=""):
        line = " ".join(str(message).splitlines())
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class TransientError(UsageError):
    """An error that the same command may not meet again: a lost process, an unreachable store.

    Launchers rerun a command that exits with this status (EX_TEMPFAIL).
    """

    status = 75


def first_line(error):
    """Return the class of an exception and the first line of its message, shortened."""
    line = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def extra(name):
    """Describe how to install an extra of efx, which no package index has."""
    return (
        f"the extra `{name}` (EFX_EXTRAS={name} before ./launch/local.sh, or "
        f"pip install -e '.[{name}]' in the folder of efx)"
    )


def nearest(name, known, shown=None):
    """Return " (did you mean 'x'?)" for the most similar of `known`, or "" if none is similar.

    Case does not count. The suggestion for a name that is itself known would be the name.

    Args:
      shown: {name: text to suggest for it}; by default the name itself.
    """
    if shown is None and name in known:
        return ""
    keys = {str(key).lstrip("-").lower(): str(key) for key in known}
    name = str(name).lstrip("-").lower()
    similar = difflib.get_close_matches(name, keys)
    similar.sort(key=lambda key: sorted(key) != sorted(name))  # swapped letters first
    similar = similar or [key for key in keys if len(name) > 2 and key.startswith(name)]
    if not similar:
        return ""
    key = keys[similar[0]]
    return f" (did you mean {(shown or {}).get(key, key)!r}?)"


class RunStopped(RuntimeError):
    """Training cannot continue; the message is one line for the user. status: exit status."""

    status = 1


class NotFinite(RunStopped):
    """The run is at its last step, but its gradients or the held-out loss are not finite."""

    status = 3


def is_primary():
    """Return whether this process prints and writes files: process 0, or a program without JAX."""
    jax = sys.modules.get("jax")
    return jax is None or jax.process_index() == 0


def warn(line):
    """Print a one-line warning to standard error, from process 0 only."""
    if is_primary():
        print(f"efx: warning: {line}", file=sys.stderr, flush=True)
