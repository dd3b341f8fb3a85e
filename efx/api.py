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

import io

from efx.errors import UsageError
from efx.metrics import read_metrics

__all__ = ["UsageError", "evaluate", "load_config", "read_metrics", "sample", "train"]


def load_config(source, changes=None):
    """The config of "mod", "mod:smoke,dense" or "configs/mod.py:smoke", see `efx.config`.

    Args:
      changes: {dotted key: value} to set in it, such as {"model.depth": 2}.
    """
    from efx.config import load_config

    return load_config(source, changes)


def train(config, workdir):
    """Train in a run folder, or go on with the run that is there: the last row of its metrics."""
    from efx.train import train_and_evaluate

    return train_and_evaluate(config, workdir)


def evaluate(workdir, changes=None, step=None):
    """{metric: value} of a run over its held-out text, such as "eval/loss" in nats a token.

    Args:
      changes: of the run's config, such as {"data.eval_source": "text:test.txt"}.
      step: of the checkpoint; None: the newest.
    """
    from efx import use

    return use.evaluate(_config(workdir, changes), workdir, step)


def sample(workdir, prompt=None, changes=None, step=None):
    """A text that begins with the prompt (None: `config.sample.prompt`) and goes on as the run
    does; several in a row where `config.sample.num_samples` says so."""
    from efx import use

    config, text = _config(workdir, changes), io.StringIO()
    if prompt is not None:
        config.sample.prompt = prompt
    use.sample(config, workdir, step, text)
    return text.getvalue().removesuffix("\n")


def _config(workdir, changes):
    from efx.config import config_of_run, override

    config = config_of_run(workdir)
    override(config, changes or {}, str(workdir))
    return config
