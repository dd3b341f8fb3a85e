"""The exception that means "the user asked for something that cannot be done", and the one for what
may be possible the next time."""


class UsageError(ValueError):
    """Bad input, told in one line.

    The message names the key, value, file or shape at fault and what would be right. `efx.main`
    prints it as `efx: error: <message>` and exits with status 2; library callers see a ValueError.
    What names of files and errors of libraries have in them does not make it more lines, and says
    nothing to a terminal.
    """

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


def nearest(name, known):
    """` (did you mean 'x'?)` for the closest of `known` to `name`, or an empty string."""
    import difflib

    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
