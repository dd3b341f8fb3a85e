"""A tiny run, and what tests do to the files of its directory."""

import contextlib
import hashlib
import json
import resource

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
