"""Run directories that hold a checkpoint of step 0 of parameters that were made elsewhere."""

import contextlib
import shutil

from efx import io, run_dir
from efx.config import schema
from efx.errors import UsageError, is_primary
from efx.train import setup


def open_new(workdir, config, command_line):
    """The `run_dir.OpenedRun` of a folder without a run; UsageError if there is one."""
    opened = run_dir.open_run(
        workdir, schema.as_dict(config), command_line=list(command_line), may_differ=(".*",)
    )
    if not opened.is_new:
        raise UsageError(f"--workdir={workdir} has a run; use a new folder")
    return opened


def write(opened, lock, config, state, files, **entries):
    """Write the run directory, with `state` as its checkpoint of step 0.

    Args:
      lock: the `run_dir.Lock` of the folder. files, entries: see `run_dir.OpenedRun.commit`.
    """
    with _whole_or_not_at_all(opened.path):
        lock.take()
        record = opened.commit(files, **entries)
        with setup.checkpointer(opened.path, config.checkpoint) as checkpoints:
            meta = {"seconds": 0.0, "flops": {"nominal": 0.0, "realised": 0.0}, "record": record}
            checkpoints.save(0, state, {"step": 0}, meta)


@contextlib.contextmanager
def _whole_or_not_at_all(workdir):
    """Takes a folder away again that was made in vain: a full disk is noticed at its end."""
    was_there = io.folder(workdir).exists()
    try:
        yield
    except BaseException:
        if not was_there and not io.is_remote(workdir) and is_primary():
            shutil.rmtree(workdir, ignore_errors=True)
        raise
