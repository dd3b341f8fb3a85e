"""efx from Python: load a config, train, evaluate, sample.

    from efx import api

    config = api.load_config("mod:smoke", {"steps": 60, "model.width": 32})
    api.train(config, "runs/mod")["train/loss"]
    api.evaluate("runs/mod")["eval/loss"]
    print(api.sample("runs/mod", "def ", {"sample.max_new_tokens": 100}))
    [row["step"] for row in api.read_metrics("runs/mod")]

Configs are named as on the command line; `changes` are its `--config.<key>=<value>`, as
{dotted key: value}. Bad input raises `UsageError`. JAX is set up by the caller: the command also
sets a compilation cache and keeps freed memory (`efx.main`).
"""

import importlib
import io
import os
from collections.abc import Mapping

from efx.errors import UsageError
from efx.logging import read_metrics

__all__ = ["UsageError", "evaluate", "load_config", "read_metrics", "sample", "train"]


def load_config(source, changes=None):
    """The ConfigDict of "mod", "mod:smoke,dense" or "configs/mod.py:smoke", see `efx.config.load`.

    Args:
      source: the name or path, as str or path object.
      changes: {dotted key: value}, such as {"model.depth": 2}.
    """
    from efx.config.load import load_config

    return load_config(_path(source, "source", "a config, such as 'mod:smoke'"), _checked(changes))


def train(config, workdir):
    """Train in a run directory, or resume its run; returns the last row of metrics.

    Raises: UsageError; `efx.errors.RunStopped`, a RuntimeError, if training cannot continue,
      such as its `NotFinite` for a run whose loss is not finite at its last step.
    """
    from efx.train.trainer import train_and_evaluate

    return train_and_evaluate(config, _run_path(workdir))


def evaluate(workdir, changes=None, step=None):
    """{metric: value} of a run over its held-out text, such as "eval/loss" in nats a token.

    For a directory of experts by cBTM, the result of `efx.composition.evaluation.score`.

    Args:
      changes: of the run's config, such as {"data.eval_source": "text:test.txt"}.
      step: of the checkpoint; None: the newest.
    """
    workdir = _run_path(workdir)
    config = _config_of_run(workdir, _checked(changes))
    return module_of(workdir, "evaluate").evaluate(config, workdir, step)


def sample(workdir, prompt=None, changes=None, step=None):
    """The prompt with its continuation by a run; several with `config.sample.num_samples`.

    Args:
      prompt: None: `config.sample.prompt`. changes, step: see `evaluate`.
    """
    workdir, changes = _run_path(workdir), _checked(changes)
    if prompt is not None:
        changes["sample.prompt"] = prompt
    config, text = _config_of_run(workdir, changes), io.StringIO()
    module_of(workdir, "sample").sample(config, workdir, step, text)
    return text.getvalue().removesuffix("\n")


def module_of(workdir, action):
    """The module whose function `action` ("evaluate" or "sample") fits a run or experts of cBTM."""
    from efx import run_dir

    if run_dir.RunDir(workdir).has_clustering:
        name = {"evaluate": "efx.composition.evaluation", "sample": "efx.composition.sampling"}[
            action
        ]
    else:
        name = "efx.train.inference"
    return importlib.import_module(name)


def _path(value, name, expected):
    """A str or path object as a str that is not empty."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UsageError(f"{name}={value!r}: expected {expected}")
    return os.fspath(value)


def _run_path(workdir):
    return _path(workdir, "workdir", "a run directory, such as 'runs/mod'")


def _config_of_run(workdir, changes):
    from efx.config.load import config_of_run, to_config
    from efx.config.names import apply

    return to_config(apply(config_of_run(workdir), changes, f"{workdir}: "))


def _checked(changes):
    """A new dict of the changes."""
    if not isinstance(changes, Mapping | None):
        raise UsageError(f"changes={changes!r}: expected {{dotted key: value}}")
    return dict(changes or {})
