"""Checks of the runs that a config names (initialisation, teacher, members) and of its own run."""

import json

from efx import io, run_dir
from efx.config.load import config_of_run, to_config
from efx.data import tokenizers
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError

# Settings of config.data that decide the text, and those that decide its held-out part.
_SOURCES = ("source", "mixture", "eval_source")
_SPLIT = ("eval_fraction", "split", "max_bytes", "document_bytes", "text_key")
TEXT_SETTINGS = (*_SOURCES, *_SPLIT)


def check_runs(config):
    """UsageError unless the runs for initialisation and for members of the model exist."""
    named = [("init.run", config.init.run)] if config.init.run else []
    named += [(f"model.{key}", run) for key, run in config.model.member_runs]
    for key, run in named:
        folder = io.folder(run, f"config.{key}")
        if not run or not folder.is_dir():
            raise UsageError(f"config.{key}={run!r}: there is no such run directory")
        if not (folder / run_dir.CONFIG_FILE).is_file():
            raise UsageError(
                f"config.{key}={run!r}: not a run directory, it has no {run_dir.CONFIG_FILE}"
            )


def config_of_single_model(run, key):
    """The `Config` of a run; UsageError, naming the setting `key`, if its model has members."""
    config = to_config(config_of_run(run, key), io.folder(run) / run_dir.CONFIG_FILE)
    if config.model.member_runs:
        raise UsageError(f"{key}={run}: a model composed of other runs; use a run of one model")
    return config


def saved_tokenizer(config, workdir=""):
    """Path of the tokenizer of the run in `workdir`, else of `init.run`, else of the first member.

    None without such a run.

    Raises: UsageError if the config names another tokenizer than `init.run` or the first member.
    """
    named = [("--workdir", workdir), ("config.init.run", config.init.run)]
    named += [(f"config.model.{key}", run) for key, run in config.model.member_runs[:1]]
    for name, run in named:
        if path := run and run_dir.saved_tokenizer(io.folder(run)):
            if name != "--workdir":
                check_tokenizer(config, name, run)
            return path
    return None


def check_tokenizer(config, name, run):
    """UsageError unless `config.data.tokenizer` is the tokenizer of another run.

    Args:
      name: flag or setting that names the run.
    """
    spec = config.data.tokenizer
    theirs, path = run_dir.recorded_setting(run, "data.tokenizer"), run_dir.saved_tokenizer(run)
    if spec != theirs and not (path and is_tokenizer(spec, load_tokenizer(path))):
        raise UsageError(
            f"config.data.tokenizer={spec!r}: {name}={run} was trained with {theirs!r}; use "
            f"--config.data.tokenizer={theirs}"
        )


def is_tokenizer(spec, tokenizer):
    """Whether `config.data.tokenizer` names a tokenizer by its file or as bytes."""
    is_local = tokenizers.parse(spec)[0] in ("bytes", "file")
    return is_local and tokenizers.pretrained_tokenizer(spec).fingerprint == tokenizer.fingerprint


def text_settings(config_data):
    """{key: value, as JSON has it} of the settings that decide the text and its held-out part."""
    return json.loads(json.dumps({key: getattr(config_data, key) for key in TEXT_SETTINGS}))


def recorded_text(config_data, workdir):
    """(`Data.text_record` of the run in `workdir` or None, whether the config names that text).

    Raises: UsageError if the same text would be split differently: training text would be scored.
    """
    if not run_dir.holds_result(workdir):
        return None, True
    recorded = {key: run_dir.recorded_setting(workdir, f"data.{key}") for key in TEXT_SETTINGS}
    named = text_settings(config_data)
    same = {key: named[key] == recorded[key] for key in _SOURCES}
    is_same = all(same.values())
    splits_source = same["source"] and same["mixture"] and not config_data.eval_source
    for key in _SPLIT if is_same or splits_source else ():
        if named[key] != recorded[key]:
            raise UsageError(
                f"config.data.{key}: {recorded[key]!r} in the run, {named[key]!r} "
                "here; this would score training text. To evaluate a whole other text, use "
                "--config.data.eval_source=text:PATH"
            )
    return run_dir.recorded_text(workdir), is_same
