"""Dotted names of settings: reading and changing them, and suggestions for unknown ones."""

from ml_collections import ConfigDict

from efx.errors import UsageError, nearest

# Names of settings in other programs. No setting of efx has such a name.
OTHER_NAMES = {
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
_SETTING_OF = {other: key for key, others in OTHER_NAMES.items() for other in others.split()}


def is_mapping(value):
    """Whether a value of a config is a block of settings or another mapping."""
    return hasattr(value, "keys")


def setting_names(config, name="config"):
    """Yield the dotted names of all settings in a nested mapping called `name`."""
    for key in config:
        inner = f"{name}.{key}"
        yield from setting_names(config[key], inner) if is_mapping(config[key]) else [inner]


def value_of(config, key):
    """The value or block of a dotted key; UsageError if there is none."""
    block, name = config, "config"
    for part in key.split("."):
        if not is_mapping(block):
            raise UsageError(f"config.{key}: {name} is a value, not a block of settings")
        name = f"{name}.{part}"
        if part not in block:
            raise unknown_setting(name, block, config)
        block = block[part]
    return block


def apply(config, changes, where=""):
    """Set dotted keys of a ConfigDict in place and return it.

    Args:
      where: beginning of the message of a UsageError.
    """
    for key, value in changes.items():
        try:
            if isinstance(value_of(config, key), ConfigDict):
                raise UsageError(f"config.{key} is a block of settings; set its settings")
            config.update_from_flattened_dict({key: value})
        except UsageError as error:
            raise UsageError(f"{where}{error}") from None
        except TypeError:
            block, _, name = key.rpartition(".")
            expected = (value_of(config, block) if block else config).get_type(name).__name__
            raise UsageError(f"{where}config.{key}={value!r}: expected {expected}") from None
    return config


def unknown_setting(name, block, config):
    """UsageError for `name`: suggests the same key of another block, or the nearest in `block`."""
    key = name.rpartition(".")[2]
    suggestion = full_name(key, config)
    hint = f" (did you mean {suggestion!r}?)" if suggestion else nearest(key, block)
    return UsageError(f"{name} is not a setting{hint}")


def full_name(key, config):
    """The shortest name of a setting that ends in `key`, or is `key` in another program; or ""."""
    names = list(setting_names(config))
    other = f"config.{_SETTING_OF.get(key)}"
    matches = [name for name in names if name.endswith(f".{key}")]
    return min(matches, key=len, default=other if other in names else "")
