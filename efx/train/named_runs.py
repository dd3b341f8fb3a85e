"""Checks of the runs that a config names (initialisation, teacher, members) and of its own run."""

import json

from efx.config.load import config_of_run, to_config
from efx.data import tokenizers
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError
from efx.run_dir import CONFIG_FILE, RunDir

# Settings of config.data that decide the text, and those that decide its held-out part.
_SOURCES = ("source", "mixture", "eval_source")
_SPLIT = ("eval_fraction", "split", "max_bytes", "document_bytes", "text_key")
TEXT_SETTINGS = (*_SOURCES, *_SPLIT)


def check_initial_runs(config):
    """UsageError unless the runs for initialisation and for members of the model exist."""
    c, is_adapter = config.init, config.adapter.kind != "none"
    if is_adapter and not c.run:
        raise UsageError(
            f"config.adapter.kind={config.adapter.kind!r}: config.init.run is empty; set it to "
            "the run directory of the adapted base model"
        )
    for name in ("missing", "unexpected", "rename"):
        # A variant for finetuning would train a random model.
        if (value := getattr(c, name)) and not c.run:
            raise UsageError(
                f"config.init.{name}={value!r}: config.init.run is empty; set it to the run "
                "directory of the initial parameters"
            )
    named = [("init.run", c.run)] if c.run else []
    for key, run in [*named, *((f"model.{key}", run) for key, run in config.model.member_runs)]:
        path = RunDir(run, f"config.{key}").path
        if not run or not path.is_dir():
            raise UsageError(f"config.{key}={run!r}: there is no such run directory")
        if not (path / CONFIG_FILE).is_file():
            raise UsageError(f"config.{key}={run!r}: not a run directory, it has no {CONFIG_FILE}")


def config_of_single_model(run, key):
    """The `Config` of a run; UsageError, naming the setting `key`, if its model has members."""
    config = to_config(config_of_run(run, key), f"{run}/{CONFIG_FILE}")
    if config.model.member_runs:
        raise UsageError(f"{key}={run}: a model composed of other runs; use a run of one model")
    return config


def saved_tokenizer(config, run=None):
    """Path of the tokenizer of the `RunDir` of this run, else of `init.run`, else of the first
    member; None without any.

    Raises: UsageError if the config names another tokenizer than `init.run` or the first member.
    """
    if run and (path := run.tokenizer_path):
        return path
    named = [("config.init.run", config.init.run)]
    named += [(f"config.model.{key}", run) for key, run in config.model.member_runs[:1]]
    for setting, folder in named:
        if folder and (other := RunDir(folder, setting)).tokenizer_path:
            check_tokenizer(config, other)
            return other.tokenizer_path
    return None


def check_tokenizer(config, run):
    """UsageError unless `config.data.tokenizer` is the tokenizer of a `RunDir`."""
    spec, theirs, path = config.data.tokenizer, run.setting("data.tokenizer"), run.tokenizer_path
    if spec != theirs and not (path and is_tokenizer(spec, load_tokenizer(path))):
        raise UsageError(
            f"config.data.tokenizer={spec!r}: {run.name} was trained with {theirs!r}; use "
            f"--config.data.tokenizer={theirs}"
        )


def is_tokenizer(spec, tokenizer):
    """Whether `config.data.tokenizer` names a tokenizer by its file or as bytes."""
    is_local = tokenizers.parse(spec)[0] in ("bytes", "file")
    return is_local and tokenizers.pretrained_tokenizer(spec).fingerprint == tokenizer.fingerprint


def text_settings(config_data):
    """{key: value, as JSON has it} of the settings that decide the text and its held-out part."""
    return json.loads(json.dumps({key: getattr(config_data, key) for key in TEXT_SETTINGS}))


def recorded_text(config_data, run):
    """(`Data.text_record` of a `RunDir` or None, whether the config names that text).

    Raises: UsageError if the same text would be split differently: training text would be scored.
    """
    if not run.has_result:
        return None, True
    recorded = {key: run.setting(f"data.{key}") for key in TEXT_SETTINGS}
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
    return run.text_record, is_same
