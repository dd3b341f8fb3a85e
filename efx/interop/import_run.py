"""The run directory of a pretrained model: --mode=import --from FOLDER --workdir RUN.

The folder has config.json, tokenizer.json and safetensors files, as transformers saves them. The
run directory has config, tokenizer and a checkpoint of step 0, like that of a new run.
"""

from collections.abc import Mapping

from safetensors import SafetensorError, safe_open

from efx import io, run_dir
from efx.checkpoint.params import fingerprint
from efx.config.load import to_config
from efx.config.run import default_config
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError, extra, first_line, is_primary, nearest
from efx.interop import new_run
from efx.interop.architectures import ARCHITECTURES, params_from_hf, settings_of
from efx.layers.flops import count_params
from efx.logging import quantity
from efx.train import named_runs

INDEX = "model.safetensors.index.json"
# How an import without --config trains: for trained parameters, on a small machine.
RECIPE = {
    "optim.learning_rate": 2e-5,
    "optim.schedule.warmup_steps": 20,
    "data.batch_size": 8,
    "evaluate.batch_size": 8,
}
_SEQ_LEN = 512
# Keys of config.json that change no logits of any architecture here, or that transformers turns
# into keys that `settings_of` reads.
_KNOWN = frozenset(
    """attention_dropout attn_pdrop auto_map bos_token_id classifier_dropout do_sample embd_pdrop
    eos_token_id hidden_dropout initializer_range is_decoder is_llama_config max_length n_ctx
    _num_labels output_past pad_token_id predict_special_tokens pretraining_tp
    reorder_and_upcast_attn resid_pdrop summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params temperature
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config unsloth_fixed
    unsloth_version use_cache vocab_size

    layer_types max_window_layers no_rope_layer_interval no_rope_layers partial_rotary_factor
    rope_parameters rope_scaling rope_theta rotary_emb_base rotary_pct sliding_window
    use_sliding_window""".split()
)


# ---- the folder ----------------------------------------------------------------------------------


def read_config(folder):
    """Contents of a folder's config.json, with the defaults of transformers.

    Raises: UsageError for another architecture, and for a key that may change logits and is unknown
      to efx.
    """
    path = folder / "config.json"
    given = _read_json(path)
    model_type = given.get("model_type") if isinstance(given, dict) else None
    if model_type not in tuple(ARCHITECTURES):
        known = ", ".join(f"{kind} ({row.name})" for kind, row in ARCHITECTURES.items())
        raise UsageError(f"{path}: model_type={model_type!r}: efx imports {known}")
    try:
        import transformers
    except ImportError:
        raise UsageError(f"--mode=import needs transformers: install {extra('interop')}") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # its checks raise many kinds of errors
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error
    defaults = type(config)().to_dict()
    keys = _KNOWN | ARCHITECTURES[model_type].settings.keys()
    keys |= transformers.PreTrainedConfig().to_dict().keys() - {"is_encoder_decoder"}
    for key, value in given.items():
        # transformers ignores most keys without a default; a false or empty one enables nothing.
        differs = value != defaults[key] if key in defaults else value
        if key not in keys and differs:
            raise UsageError(
                f"{path}: {key}={value!r}: efx cannot represent this setting{nearest(key, keys)}"
            )
    return config.to_dict()


class Tensors(Mapping):
    """The arrays in model.safetensors, or in the shards of its index, read one at a time."""

    def __init__(self, folder):
        self._files, shards = {}, ["model.safetensors"]
        if (folder / INDEX).exists():
            index = _read_json(folder / INDEX)
            shard_of = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(shard_of, dict) or not all(map(io.stays_below, shard_of.values())):
                raise UsageError(f"{folder / INDEX}: weight_map must be a table of file names")
            shards = sorted(set(shard_of.values()))
        for shard in shards:
            try:
                file = safe_open(folder / shard, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{folder / shard} cannot be read: {first_line(error)}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name):
        return self._files[name].get_tensor(name)

    def __iter__(self):
        return iter(self._files)

    def __len__(self):
        return len(self._files)


def _read_json(path):
    try:
        return io.read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {first_line(error)}; use the folder of a Hugging Face model"
        ) from error


# ---- the run -------------------------------------------------------------------------------------


def config_for(folder, config=None):
    """The config of a run of the model in a Hugging Face folder.

    Args:
      config: ConfigDict with the settings of training and depth routing; its other settings of the
        model are replaced. None: `RECIPE`.
    """
    folder = io.local_path(folder, "--from")
    if not folder.is_dir():
        raise UsageError(f"--from={folder}: no such folder; download the model first")
    changes = settings_of(read_config(folder))
    if config is None:
        config = default_config()
        seq_len = min(_SEQ_LEN, changes["model.context"])
        config.update_from_flattened_dict({**RECIPE, "data.seq_len": seq_len})
    new_run.check_decoder(config, "import")
    config.update_from_flattened_dict(changes)
    config.data.tokenizer = str((folder / run_dir.TOKENIZER_FILE).resolve())
    return config


def import_run(config, folder, workdir, *, command_line=()):
    """Write the run directory of the model in a Hugging Face folder.

    Args:
      config: ConfigDict, `config_for` the folder with further changes.
      command_line: recorded in run.json.
    Raises: UsageError, before anything is written, for a folder that is damaged or does not fit its
      config.json, and for a workdir with a run.
    """
    folder, config = io.local_path(folder, "--from"), to_config(config)
    hf = read_config(folder)
    _check_settings(config, settings_of(hf))
    tokenizer = load_tokenizer(folder / run_dir.TOKENIZER_FILE)
    if not named_runs.is_tokenizer(config.data.tokenizer, tokenizer):
        raise UsageError(
            f"config.data.tokenizer={config.data.tokenizer!r}: the model of --from={folder} "
            f"needs its own {run_dir.TOKENIZER_FILE}; leave the setting out"
        )
    tensors, rows = Tensors(folder), hf["vocab_size"]
    if tokenizer.vocab_size > rows:
        raise UsageError(
            f"{folder / run_dir.TOKENIZER_FILE}: has {tokenizer.vocab_size} ids, but the embedding "
            f"has vocab_size={rows} rows; use the tokenizer of this model"
        )
    with new_run.opened(workdir, config, command_line) as run:
        training = run.training(tokenizer.vocab_size)
        model = training.experiment.model
        params = params_from_hf(tensors, model, hf["model_type"], rows)
        state = new_run.initial_state(training, {"params": params})
        imported = {
            "from": str(folder.resolve()),
            "model_type": hf["model_type"],
            "parameters": fingerprint(state.params, model.vocab_size),
        }
        text = tokenizer.to_json()
        files = {run_dir.TOKENIZER_FILE: text}
        run.write(state, files, imported=imported, tokenizer=run_dir.checksum(text))
    if is_primary():
        name, size = ARCHITECTURES[hf["model_type"]].name, count_params(state.params)
        print(f"{workdir}: {quantity(size, 'parameters')} of {folder} ({name}), step 0")
        if unused := rows - tokenizer.vocab_size:
            print(f"left out: {unused} of {rows:,} rows of the embedding, which have no token")


def _check_settings(config, imported):
    """Raise UsageError for a setting of the model that differs from the checkpoint's."""
    for key, kind, has_parameters in (
        ("adapter", config.adapter.kind, config.adapter.kind != "none"),
        ("model.dropout", config.model.dropout.kind, config.model.dropout.learned),
    ):
        if has_parameters:
            raise UsageError(
                f"config.{key}.kind={kind!r}: a Hugging Face checkpoint has no parameters for it; "
                "import without it, then train a run with config.init.run"
            )
    settings = {key.removeprefix("model."): value for key, value in imported.items()}
    new_run.check_inherited(config, settings)
