"""Files and folders that are there whole or not at all."""

import contextlib
import os
import shutil


@contextlib.contextmanager
def replacing(path):
    """Yields the path of a file or folder to make, which takes the place of `path` at the end.

    Whoever reads `path` meanwhile, or after a crash, finds what was there before. When making it
    fails, what there is of it is removed. A folder takes the place of none or of an empty one.

    path: pathlib.Path or etils.epath.Path; its folder exists.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        raise


def write_text(path, text):
    """Writes a file, on the disk (not in the system's memory alone) when this returns.

    path: see `replacing`. An object store has whole objects only, which need no replacing.
    """
    if "://" in str(path):
        path.write_text(text)
        return
    with replacing(path) as part, open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
