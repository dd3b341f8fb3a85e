"""The command line of a study."""

import re

from efx import io
from efx.config.parser import Parser  # noqa: F401
from efx.errors import UsageError


def numbers(flag, text):
    """Return (0, 1, 2) for "0,1,2"; UsageError for anything else, or a repeated number."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts) or len({*parts}) < len(parts):
        raise UsageError(f"{flag}={text}: expected different numbers, e.g. 0,1,2")
    return tuple(map(int, parts))


def output_folder(out):
    """Return the path of a folder to write, which need not exist; UsageError for a file."""
    folder = io.local_path(out, "--out")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out={folder}: is a file; use a directory")
    return folder


def output_file(out, *endings):
    """Return the path of a file to write; UsageError, before any work, if it cannot be written.

    Args:
      endings: the allowed file endings, e.g. ".html".
    """
    path = io.local_path(out, "--out")
    if path.suffix.lower() not in endings or path.is_dir():
        raise UsageError(f"--out={out}: use a file name that ends in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise UsageError(f"--out={out}: there is no directory {path.parent}")
    return path
