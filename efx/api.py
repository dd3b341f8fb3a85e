"""efx from Python: a config, a run, what it scores and what it writes.

    from efx import api

    config = api.load_config("mod:smoke", {"steps": 60, "model.width": 32})
    api.train(config, "runs/mod")["train/loss"]
    api.evaluate("runs/mod")["eval/loss"]
    print(api.sample("runs/mod", "def ", {"sample.max_new_tokens": 100}))
    [row["step"] for row in api.read_metrics("runs/mod")]

Configs are named as on the command line, and `changes` are its `--config.<key>=<value>`, as
{dotted key: value}. Whatever is wrong with what is asked for is a `UsageError`. How JAX is set up
is left to the caller: the command also keeps a compilation cache and freed memory (`efx.main`).
"""

import importlib
import io
import os
from collections.abc import Mapping

from efx.errors import UsageError
from efx.logging import read_metrics

__all__ = ["UsageError", "evaluate", "load_config", "read_metrics", "sample", "train"]


def load_config(source, changes=None):
    """The config of "mod", "mod:smoke,dense" or "configs/mod.py:smoke", see `efx.config.load`.

    Args:
      source: the name or path, as a text or a path object.
      changes: {dotted key: value} to set in it, such as {"model.depth": 2}.
    """
    from efx.config.load import load_config

    return load_config(_text(source, "source", "a config, such as 'mod:smoke'"), changes)


def train(config, workdir):
    """Train in a run folder, or go on with the run that is there: the last row of its metrics.

    Raises: UsageError; `efx.train.trainer.RunStopped`, a RuntimeError, if training cannot continue,
      such as its `NotFinite` for a run whose loss is not finite at its last step.
    """
    from efx.train.trainer import train_and_evaluate

    return train_and_evaluate(config, _folder(workdir))


def evaluate(workdir, changes=None, step=None):
    """{metric: value} of a run over its held-out text, such as "eval/loss" in nats a token; of a
    folder of experts by cBTM what `efx.cbtm.evaluation.score` returns of their ensembles.

    Args:
      changes: of the run's config, such as {"data.eval_source": "text:test.txt"}.
      step: of the checkpoint; None: the newest.
    """
    workdir = _folder(workdir)
    config = _config(workdir, changes)
    return _module(workdir, "evaluate").evaluate(config, workdir, step)


def sample(workdir, prompt=None, changes=None, step=None):
    """A text that begins with the prompt (None: `config.sample.prompt`) and goes on as the run
    does; several in a row where `config.sample.num_samples` says so."""
    workdir, changes = _folder(workdir), _changes(changes)
    if prompt is not None:
        changes["sample.prompt"] = prompt
    config, text = _config(workdir, changes), io.StringIO()
    _module(workdir, "sample").sample(config, workdir, step, text)
    return text.getvalue().removesuffix("\n")


def _text(value, name, what):
    """A text or a path object as a text that is not empty."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UsageError(f"{name}={value!r}: expected {what}")
    return os.fspath(value)


def _folder(workdir):
    return _text(workdir, "workdir", "the folder of a run, such as 'runs/mod'")


def _config(workdir, changes):
    from efx.config.load import config_of_run, override

    config = config_of_run(workdir)
    override(config, _changes(changes), str(workdir))
    return config


def _changes(changes):
    """A dict of its own of what is to be changed."""
    if not isinstance(changes, Mapping | None):
        raise UsageError(f"changes={changes!r}: expected {{dotted key: value}}")
    return dict(changes or {})


def _module(workdir, mode):
    """The module that does this with what the folder holds."""
    from efx import run_dir

    return importlib.import_module(run_dir.USES[run_dir.kind_of_result(workdir) or "run", mode])
