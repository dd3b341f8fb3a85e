"""The one exception that means "the user asked for something that cannot be done"."""

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


class UsageError(ValueError):
    """Bad input, told in one line.

    The message names the key, value, file or shape at fault and what would be right. `efx.main`
    prints it as `efx: error: <message>` and exits with status 2; library callers see a ValueError.
    What names of files and errors of libraries have in them does not make it more lines, and says
    nothing to a terminal.
    """

    def __init__(self, message=""):
        line = " ".join(str(message).splitlines())
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


def extra(name):
    """An extra of efx and how to get it: no package index has efx, so its folder is named."""
    return (
        f"the extra `{name}` (EFX_EXTRAS={name} before ./launch/local.sh, or "
        f"pip install -e '.[{name}]' in efx's own folder)"
    )


def nearest(name, known):
    """` (did you mean 'x'?)` for the closest of `known` to `name`, or an empty string.

    Where `known` are settings, those of a ConfigDict, or flags of a command that takes settings,
    `name` may also be what another program calls a setting of any block.
    """
    import difflib

    setting = _setting_meant(str(name), known)
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    meant = [setting] if setting else close
    return f" (did you mean {meant[0]!r}?)" if meant else ""


def _setting_meant(name, known):
    from ml_collections import ConfigDict

    setting = _SETTING_OF.get(name.removeprefix("--"))
    if setting and isinstance(known, ConfigDict):
        key = setting.rpartition(".")[2]
        return key if key in known else f"config.{setting}"
    return f"--config.{setting}" if setting and "--config" in known else ""
