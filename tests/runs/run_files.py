"""A tiny run, and what tests do to the files of its directory."""

import contextlib
import hashlib
import json
import os
import pathlib
import resource
from stat import S_ISDIR

import pytest

from efx.configs import common
from efx.logging import MetricsWriter
from efx.run_dir import MANIFEST

TINY = {
    "steps": 2, "data.seq_len": 16, "data.batch_size": 8,
    "model.width": 16, "model.depth": 1, "model.attention.num_heads": 2,
    "optim.schedule.warmup_steps": 1, "evaluate.every": 0, "evaluate.batch_size": 8,
    "sample.every": 0, "log.every": 1, "log.tensorboard": False,
}  # fmt: skip


def tiny(text, **changes):
    """The config of a tiny run on a text file."""
    return common.apply(common.base(), {**TINY, "data.source": f"text:{text}", **changes})


def writer_of(workdir, tensorboard=False, wandb=None):
    return MetricsWriter(workdir, tensorboard=tensorboard, wandb=wandb, resume_step=None)


@contextlib.contextmanager
def largest_file(size):
    """No file of this process may grow beyond so many bytes: a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Flushes:
    """What `os.fsync` has flushed.

    Attributes:
      early: paths that were renamed before all of their files were flushed.
    """

    def __init__(self):
        self.early, self._states = [], {}

    def record(self, handle):
        number, state = self._state(handle)
        self._states[number] = state

    def missing(self, top):
        """The files and folders from `top` on that have changed since they were flushed."""
        found = []
        for path in (pathlib.Path(top), *pathlib.Path(top).rglob("*")):
            number, state = self._state(path)
            if self._states.get(number) != state:
                found.append(str(path))
        return found

    def _state(self, path):
        """(inode, contents of a directory or last change of a file)"""
        stat = os.stat(path)
        if not S_ISDIR(stat.st_mode):
            return stat.st_ino, (stat.st_size, stat.st_mtime_ns)
        return stat.st_ino, {name for name in os.listdir(path) if not name.endswith(".tmp")}


@contextlib.contextmanager
def watched_flushes():
    """Yield the `Flushes` of this process."""
    flushes, fsync = Flushes(), os.fsync

    def recorded(handle):
        fsync(handle)
        flushes.record(handle)

    def checked(rename):
        def renamed(source, target, **options):
            flushes.early.extend(flushes.missing(source))
            rename(source, target, **options)

        return renamed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", recorded)
        for name in ("rename", "replace"):
            patch.setattr(os, name, checked(getattr(os, name)))
        yield flushes


def edit_record(run, change):
    """Change the record of a run in its checkpoints, and their checksums of it.

    change: function of the record, a dict, to the new one.
    """
    for path in run.glob("checkpoints/*/meta/metadata"):
        meta = json.loads(path.read_text())
        text = json.dumps(meta | {"record": change(meta["record"])})
        path.write_text(text)
        manifest_path = path.parent.parent / MANIFEST
        manifest = json.loads(manifest_path.read_text())
        digest = hashlib.sha256(text.encode()).hexdigest()
        manifest["files"]["meta/metadata"] = [len(text.encode()), digest]
        manifest_path.write_text(json.dumps(manifest))


def move(run, before, after):
    """Replace the folder `before` by `after` in the record of a run."""
    edit_record(run, lambda record: json.loads(json.dumps(record).replace(str(before), str(after))))
