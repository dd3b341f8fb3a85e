"""The command line of a study."""

import argparse
import contextlib
import pathlib
import re
import shlex
import signal
import sys

from efx import io
from efx.config.load import to_config
from efx.errors import UsageError, nearest
from efx.parallel import signals
from efx.studies import jobs


class Parser(argparse.ArgumentParser):
    """Bad arguments are one line and exit status 2; a misspelt flag names the nearest.

    Args:
      name: of the study's module, such as "efx.studies.sweep".
      description: its docstring, which --help shows.
    """

    def __init__(self, name, description):
        super().__init__(
            prog=f"python -m {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_runs(self, jobs=""):
        """The flags of a study that starts runs, and arguments for the runs after `--`.

        jobs: the name of what it starts several of at a time, "runs" or "experts"; "": no --jobs.
        """
        self.set_defaults(extra=[])
        self.add_argument("--workdir", required=True, help="folder for all runs and the table")
        if jobs:
            help = f"number of {jobs} that run at once, each on an equal part of the CPUs"
            self.add_argument("--jobs", type=int, default=1, metavar="N", help=help)

    def run(self, study, argv=None):
        """The exit status of `study(arguments)`: 0, 2 after the line of a UsageError, 128 and the
        number of a signal that stopped it, 141 if nobody reads any more what it writes. `arguments`
        also has the text `command`, the whole command line, and the list `extra`, with `add_runs`
        the arguments after `--`."""
        argv = list(sys.argv[1:] if argv is None else argv)
        takes_extra = self.get_default("extra") is not None and "--" in argv
        end = argv.index("--") if takes_extra else len(argv)
        arguments = self.parse_args(argv[:end])
        arguments.extra = argv[end + 1 :]
        arguments.command = f"{self.prog} {shlex.join(argv)}"
        try:
            if "workdir" in arguments:
                io.local_path(arguments.workdir or "")
            if getattr(arguments, "jobs", 1) < 1:
                raise UsageError(f"--jobs={arguments.jobs}: must be at least 1")
            with jobs.Stoppable():
                study(arguments)
            sys.stdout.flush()  # where nobody reads it, that is noticed here
        except UsageError as error:
            print(f"efx: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            number = getattr(error, "number", signal.SIGINT)
            how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
            with contextlib.suppress(OSError):  # the terminal is gone
                line = f"efx: {how}; rerun the command to resume"
                print(line, file=sys.stderr, flush=True)
            return 128 + number
        except BrokenPipeError:
            return signals.status_without_reader()
        return 0

    def parse_args(self, argv=None):
        argv = sys.argv[1:] if argv is None else argv
        flags = re.findall(r"--[a-z][a-z-]*", self.format_usage())
        for flag in (arg.partition("=")[0] for arg in argv):
            # Checked first: argparse would complain about required flags instead.
            if flag.startswith("--") and flag not in (*flags, "--help", "--"):
                self.error(f"{flag} is not a flag{nearest(flag, flags)}")
        return super().parse_args(argv)

    def error(self, message):
        print(f"efx: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def check_extra(extra):
    """UsageError if the arguments for every run set what a study sets for each run."""
    for argument in extra:
        if re.match(r"(\w*:)?--?(config|config\.seed|workdir|mode)(=|$)", argument):
            raise UsageError(f"{argument}: the study sets this for each of its runs; leave it out")


def extra_of_run(extra, name):
    """Those of the arguments for runs that are for the run of this name: "stage:--config.x=1" is
    for the runs whose name begins with the stage, others are for all."""
    for argument in extra:
        stage, colon, setting = argument.partition(":--")
        if not colon:
            yield argument
        elif name.startswith(stage):
            yield f"--{setting}"


def check_stages(extra, names, stages):
    """UsageError for an argument whose stage none of these runs has.

    stages: what names of runs begin with, to be suggested.
    """
    for argument in extra:
        stage, colon, _ = argument.partition(":--")
        if colon and not (stage and any(name.startswith(stage) for name in names)):
            raise UsageError(
                f"{argument}: no run's name begins with {stage!r}{nearest(stage, stages)}"
            )


def check_command(name, arguments, made=()):
    """The checked config of arguments of `efx.main`; UsageError, which names the run, for those
    that it would refuse.

    All settings are checked, and that the files of the text are there; no model is built, since
    that would take the devices that the runs need.

    made: sources that runs before this one write, or that are written for it.
    """
    from efx.config import flags
    from efx.data.sources import check_present

    try:
        config = to_config(flags.parse(["efx", *arguments]).config)
        for key in ("source", "eval_source"):
            source = getattr(config.data, key)
            if source and source not in made:
                check_present(source, f"config.data.{key}")
    except UsageError as error:
        raise UsageError(f"the run {name!r}: {error}") from error
    return config


def numbers(flag, text):
    """(0, 1, 2) of an argument "0,1,2"; UsageError for anything else, or a repeated number."""
    texts = text.split(",")
    # int() takes no other digits than decimal ones, and not any number of them.
    right = all(number.isdecimal() and len(number) < 20 for number in texts)
    if not right or len({*map(int, texts)}) < len(texts):
        raise UsageError(f"{flag}={text}: expected different numbers, e.g. 0,1,2")
    return tuple(map(int, texts))


def picture(out):
    """The path of a picture; UsageError, before anything is computed, if none can be there."""
    from matplotlib.figure import Figure

    kinds = [f".{kind}" for kind in Figure().canvas.get_supported_filetypes()]
    return new_file(out, kinds, "map.png")


def new_file(out, endings, example):
    """The path of a file to write; UsageError, before anything is computed, if none can be there.

    endings: that it may have, such as (".html",); example: a name with one.
    """
    path = io.local_path(out, "--out")
    if path.is_dir():
        raise UsageError(f"--out={out} is a folder; use a file in it, e.g. {path / example}")
    if path.suffix.lower() not in endings:
        raise UsageError(
            f"--out={out}: unknown file ending; use one of {', '.join(sorted(endings))}, e.g. "
            f"{path.with_suffix(pathlib.PurePath(example).suffix)}"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--out={out}: there is no folder {path.parent}")
    return path
