"""Files that others may have written: their kind and size are looked at before they are read."""

import json
import os
import stat

from efx import storage

# Bytes of a JSON file. The largest tokenizers have 35 million.
MOST_JSON = 64 << 20


def read_json(path, most=MOST_JSON):
    """The contents of a JSON file of at most so many bytes.

    Raises: OSError; ValueError for what is no file, too large, no text, not JSON, or nested so
      deeply that no program of ours has written it.
    """
    return parse_json(read_text(path, most))


def parse_json(text):
    """`json.loads`, whose every complaint is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_text(path, most=MOST_JSON):
    """The text of a file of at most so many bytes; errors as for `read_json`."""
    if not storage.is_remote(path):
        check_regular(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return data.decode("utf-8")


def check_regular(path):
    """ValueError unless a path is of a file: reading a pipe or a device may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a file")


def is_plain_name(name):
    """Whether what a file calls another one can be the name of one in the same folder."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return not set(name) & set("/\\\0") and len(name.encode("utf-8", "surrogatepass")) < 256


def stays_below(name):
    """Whether a relative path leads to something below the folder that it starts in."""
    return not name.startswith("/") and "\0" not in name and ".." not in name.split("/")
