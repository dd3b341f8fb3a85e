"""The parser of the arguments of studies and of `efx.certify`."""

import argparse
import re
import shlex
import signal
import sys

from efx import io
from efx.errors import UsageError, nearest
from efx.parallel import signals


class Parser(argparse.ArgumentParser):
    """Report bad arguments in one line with exit status 2; a misspelt flag names the nearest.

    Args:
      name: the command's module, such as "efx.studies.sweep".
      description: its docstring, shown by --help.
    """

    def __init__(self, name, description):
        super().__init__(
            prog=f"python -m {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_runs(self):
        """Add the flags of a study that starts runs; arguments after `--` go to every run."""
        self.set_defaults(extra=[])
        self.add_argument("--workdir", required=True, help="directory of all runs and tables")
        help = "runs at a time, each on an equal part of the CPUs"
        self.add_argument("--jobs", type=int, default=1, metavar="N", help=help)
        help = "print the commands of the missing runs, for other machines, and run nothing"
        self.add_argument("--print-commands", action="store_true", help=help)

    def run(self, study, argv=None):
        """Call `study(arguments)` and return the exit status.

        The status is the one that `study` returns or 0, 2 after a UsageError, 128 + the number of a
        signal, or 141 if stdout was closed. `arguments` also has `command`, the whole command line,
        and, with `add_runs`, `extra`, the list of arguments after `--`.
        """
        argv = list(sys.argv[1:] if argv is None else argv)
        has_extra = self.get_default("extra") is not None and "--" in argv
        end = argv.index("--") if has_extra else len(argv)
        arguments = self.parse_args(argv[:end])
        arguments.extra = argv[end + 1 :]
        arguments.command = f"{self.prog} {shlex.join(argv)}"
        try:
            if "workdir" in arguments:
                io.local_path(arguments.workdir)
            if getattr(arguments, "jobs", 1) < 1:
                raise UsageError(f"--jobs={arguments.jobs}: must be at least 1")
            status = study(arguments) or 0
            sys.stdout.flush()  # a closed stdout raises here
        except UsageError as error:
            print(f"efx: error: {error}", file=sys.stderr)
            return error.status
        except KeyboardInterrupt as error:
            number = signal.Signals(getattr(error, "number", signal.SIGINT))
            print(f"efx: stopped by {number.name}; rerun the command to resume", file=sys.stderr)
            return 128 + number
        except BrokenPipeError:
            return signals.status_without_reader()
        return status

    def parse_args(self, argv=None):
        argv = sys.argv[1:] if argv is None else argv
        flags = re.findall(r"--[a-z][a-z-]*", self.format_usage())
        for flag in (argument.partition("=")[0] for argument in argv):
            # Checked first: argparse would complain about required flags instead.
            if flag.startswith("--") and flag not in (*flags, "--help", "--"):
                self.error(f"{flag} is not a flag{nearest(flag, flags)}")
        return super().parse_args(argv)

    def error(self, message):
        usage = " ".join(self.format_usage().split())
        print(f"efx: error: {message}; {usage}", file=sys.stderr)
        raise SystemExit(2)
