"""A tiny run, and what tests do to the files of its directory."""

import contextlib
import json
import resource

from efx.configs import common
from efx.metrics import MetricsWriter

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
    return MetricsWriter(workdir, tensorboard=tensorboard, wandb=wandb)


@contextlib.contextmanager
def largest_file(size):
    """No file of this process may grow beyond so many bytes: a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def edit(path, change):
    """Rewrite config.json or run.json as a user does on purpose: without its checksum.

    change: function of the contents, a dict, to the new ones.
    """
    contents = json.loads(path.read_text())
    del contents["checksum"]
    path.write_text(json.dumps(change(contents)))


def move(path, before, after):
    """Replace the folder `before` by `after` in config.json or run.json."""
    edit(path, lambda contents: json.loads(json.dumps(contents).replace(str(before), str(after))))


def forget(run):
    """Drop what the checkpoints of a run know of its other files, as those of an earlier efx."""
    for path in (run / "checkpoints").glob("*/efx_manifest.json"):
        manifest = json.loads(path.read_text())
        amended = manifest.get("amended", {}) | {"fingerprints": {}}
        path.write_text(json.dumps(manifest | {"amended": amended}))
