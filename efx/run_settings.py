"""The whole config: `config.data`, `config.model`, `config.optim`... Every setting of a run is a
field of a block in `efx.run_blocks`, `efx.layers.config` or its family's config, with its meaning
beside it.

A config file calls `configs.common.base()`, changes what its experiment changes and returns the
result; any setting can then be given on the command line, as `--config.model.depth=12`.
"""

import dataclasses
import functools
import json
import logging

from ml_collections import ConfigDict

from efx.errors import UsageError, nearest
from efx.models import FAMILIES, check_family, config_class, config_of
from efx.models.adapters import AdapterConfig
from efx.models.decoder import DecoderConfig
from efx.run_blocks import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EnsembleConfig,
    EvaluateConfig,
    InitConfig,
    LogConfig,
    LossesConfig,
    MeshConfig,
    OptimConfig,
    SampleConfig,
    Seed,
    TrainConfig,
)
from efx.settings import Natural, NonNegative, as_dict, block, defaults, is_block, make, names_of
from efx.sharding import DEFAULT_RULES

_log = logging.getLogger(__name__)

# What other programs call settings of efx: {setting: names that no setting has}.
CALLED_ELSEWHERE = {
    "steps": "max_steps num_steps n_steps total_steps train_steps max_iters n_iters",
    "data.batch_size": "batch bs train_batch_size global_batch_size per_device_train_batch_size",
    "data.seq_len": "seq_length seqlen sequence_length max_seq_len max_seq_length max_length"
    " block_size context_length context_len n_ctx",
    "data.source": "dataset dataset_path data_path",
    "model.width": "dim d_model model_dim hidden_size n_embd embed_dim embedding_dim emb_dim",
    "model.depth": "n_layer n_layers num_layers num_hidden_layers layers",
    "model.attention.num_heads": "heads n_head n_heads num_attention_heads",
    "model.attention.num_kv_heads": "kv_heads n_kv_head n_kv_heads num_key_value_heads",
    "model.mlp.hidden": "d_ff ff_dim ffn_dim d_mlp mlp_dim intermediate_size ffn_hidden_size",
    "model.mlp.moe.num_experts": "n_experts num_local_experts n_routed_experts",
    "model.dropout.rate": "dropout dropout_rate dropout_p p_dropout",
    "optim.name": "optimizer optimiser",
    "optim.learning_rate": "lr max_lr peak_lr base_lr init_lr",
    "optim.weight_decay": "wd",
    "optim.b1": "beta1 adam_beta1",
    "optim.b2": "beta2 adam_beta2",
    "optim.clip_norm": "grad_clip gradient_clip clip_grad clip_grad_norm max_grad_norm",
    "optim.schedule.kind": "lr_schedule lr_scheduler lr_scheduler_type",
    "optim.schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps",
    "train.accumulation": "grad_accum gradient_accumulation gradient_accumulation_steps"
    " accumulate_grad_batches",
    "train.dtype": "precision compute_dtype",
}
_SETTING_OF = {
    name: setting for setting, names in CALLED_ELSEWHERE.items() for name in names.split()
}


@block("config")
class Config:
    """All settings of a run."""

    seed: Seed = 0
    # One of the two: optimiser steps, or total training FLOPs (then the number of steps
    # follows from the model's ledger and the batch).
    steps: Natural = 1000
    train_flops: NonNegative = 0.0
    data: DataConfig = DataConfig()
    init: InitConfig = InitConfig()
    model: object = DecoderConfig()  # the block of a family, see efx/models/__init__.py
    adapter: AdapterConfig = AdapterConfig()
    losses: LossesConfig = LossesConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    # (logical axis, mesh axis or axes or None): see efx/sharding.py.
    rules: tuple[object, ...] = DEFAULT_RULES
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    sample: SampleConfig = SampleConfig()
    cluster: ClusterConfig = ClusterConfig()
    ensemble: EnsembleConfig = EnsembleConfig()

    def check(self):
        object.__setattr__(self, "model", config_of(self.model))
        routing = self.model.depth_routing
        if routing.has_threshold and self.optim.name == "schedule_free_adamw":
            raise UsageError(
                "config.optim.name='schedule_free_adamw': evaluates averaged parameters, whose "
                "scores the thresholds do not follow; use another optimiser, or "
                f"{routing.where}.causal='aux_loss' or 'predictor'"
            )


def known(family="decoder"):
    """The ConfigDict with every setting that there is for a model family, at its default."""
    return defaults(dataclasses.replace(Config(), model=config_class(family)()))


def completed(plain):
    """The plain config of a run, with the settings within its blocks that are younger than the run
    at their defaults, which one line tells: what a setting does by default is what was done before
    there was one. What is no config of efx, or lacks a block, stays as it is."""
    block_of_model = plain.get("model") if isinstance(plain, dict) else None
    family = block_of_model.get("family") if isinstance(block_of_model, dict) else None
    if not isinstance(family, str) or family not in FAMILIES:
        return plain
    right, younger = dataclasses.replace(Config(), model=config_class(family)()), []
    whole = {
        name: _completed(value, getattr(right, name, None), f"config.{name}", younger)
        for name, value in plain.items()
    }
    if younger:
        _warn_about_new_settings(", ".join(younger))
    return whole


def _completed(plain, block, name, younger):
    if not is_block(block) or not isinstance(plain, dict):
        return plain
    whole = {
        key: _completed(value, getattr(block, key, None), f"{name}.{key}", younger)
        for key, value in plain.items()
    }
    for key in names_of(type(block)):
        if key not in plain:
            value = getattr(block, key)
            whole[key] = json.loads(json.dumps(as_dict(value) if is_block(value) else value))
            younger.append(f"{name}.{key}={whole[key]!r}")
    return whole


@functools.cache
def _warn_about_new_settings(settings):
    _log.warning("this run predates %s; using these defaults", settings)


def of_plain(plain, where):
    """The ConfigDict of nested plain dicts, which may be anybody's. where: see `check`."""
    try:
        return ConfigDict(plain)
    except ValueError as error:  # a dot in a name
        raise UsageError(f"{where}: {error}") from error


def typed(config):
    """A checked ConfigDict of plain values with the types of its settings: one that is None can be
    set to what it may be, one of several types to each of them."""
    whole = known(config.model.family)
    _fill(whole, config)
    return whole


def _fill(block, values):
    for key, value in values.items():
        if _has_names(block[key]):
            _fill(block[key], value)
        else:  # a value may be a mapping, too: the schedule of a loss
            block[key] = value.to_dict() if _has_names(value) else value


def check(config, where=""):
    """The `Config` of a ConfigDict of any family; UsageError unless it has just the settings that
    there are, each with a value that it may have. A `Config` is returned as it is. A misspelt key
    would otherwise be one more key, which nobody reads.

    Args:
      where: what the config comes from, to be told with what is wrong: a file, a run folder.
    """
    if isinstance(config, Config):
        return config
    try:
        if not isinstance(config, ConfigDict):
            raise UsageError(f"expected a ConfigDict, not {type(config).__name__}")
        if "model" not in config:  # which decides what other settings there are
            raise UsageError("config.model is missing")
        family = require(config, "model.family")
        check_family(dict(config.model.items()))
        _check_names(config, right := known(family), "config", list(names(right)))
        return make(Config, config)
    except UsageError as error:
        raise UsageError(f"{where}: {error}" if where else str(error)) from None


def _check_names(block, right, name, every):
    for key in block:
        if key not in right:
            raise UsageError(_unknown(f"{name}.{key}", block=right, every=every))
        if _has_names(right[key]) and _has_names(block[key]):
            _check_names(block[key], right[key], f"{name}.{key}", every)


def require(config, key):
    """What a dotted key names in a config, a value or a block; UsageError if it names nothing."""
    block, name = config, "config"
    for part in key.split("."):
        if not _has_names(block):
            raise UsageError(f"config.{key}: {name} is a value, not a block of settings")
        name = f"{name}.{part}"
        if part not in block:
            raise UsageError(_unknown(name, block, names(config)))
        block = block[part]
    return block


def names(block, name="config"):
    """The dotted names of all settings in a block that is called `name`."""
    for key in block:
        inner = f"{name}.{key}"
        yield from names(block[key], inner) if _has_names(block[key]) else [inner]


def elsewhere(key, every):
    """The name of a setting that ends in these dotted keys, the shortest of `every` such, or else
    of what another program calls so; or ""."""
    called = f"config.{_SETTING_OF[key]}" if key in _SETTING_OF else ""
    return min((name for name in every if name.endswith(f".{key}")), key=len, default=called)


def _unknown(name, block, every):
    """What to say of a name that is none: where else there is such a key, or the nearest one."""
    key = name.rpartition(".")[2]
    name_of_key = elsewhere(key, every)
    hint = f" (did you mean {name_of_key!r}?)" if name_of_key else nearest(key, block)
    return f"{name} is not a setting{hint}"


def _has_names(value):
    return hasattr(value, "keys")
