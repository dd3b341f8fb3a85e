"""The run directory of a pretrained model: --mode=import --from FOLDER --workdir RUN.

The folder is one of Hugging Face: config.json, *.safetensors, tokenizer.json. Everything is read
and checked before the run directory is written; it then holds config, tokenizer and a checkpoint of
step 0, like that of a new run.
"""

import jax
import numpy as np
from flax import linen as nn

from efx import io, models, run_dir
from efx.checkpoint.params import fingerprint
from efx.config import schema
from efx.config.load import to_config
from efx.config.run import default_config
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError, is_primary
from efx.interop import hf, new_run
from efx.interop.hf_config import ARCHITECTURES
from efx.interop.weights import Weights
from efx.layers.flops import count_params
from efx.logging import quantity
from efx.parallel import multihost, sharding
from efx.train import other_runs, setup
from efx.train import step as step_lib

# What an imported run trains by where no --config says it: a learning rate for parameters that are
# trained already, and rows that fit into the memory of a small machine.
RECIPE = {
    "optim.learning_rate": 2e-5,
    "optim.schedule.warmup_steps": 20,
    "data.batch_size": 8,
    "evaluate.batch_size": 8,
}
_SEQ_LEN = 512
# An embedding may have more rows than there are tokens, for its size to be a round number. More of
# them than this fraction, and the tokenizer is another model's.
_MOST_PADDING = 0.05


def config_for(folder, config=None):
    """The config of a run of the model in a Hugging Face folder.

    Args:
      config: ConfigDict that says how the run trains; its model becomes that of the folder, but for
        depth routing and what does not change what is computed. None: `RECIPE`.
    Raises: UsageError naming what efx cannot reproduce.
    """
    folder = io.local_path(folder, "--from")
    if not folder.is_dir():
        raise UsageError(f"--from={folder}: there is no such folder; download the model first")
    changes = hf.settings_of(folder, hf.read_config(folder))
    if config is None:
        config = default_config()
        context = changes["model.context"]
        config.update_from_flattened_dict({**RECIPE, "data.seq_len": min(_SEQ_LEN, context)})
    to_config(config)
    if config.model.family != "decoder":
        raise UsageError(
            f"config.model.family={config.model.family!r}: --mode=import writes a decoder; use "
            "another --config"
        )
    config.update_from_flattened_dict(changes)
    config.data.tokenizer = str((folder / run_dir.TOKENIZER_FILE).resolve())
    return config


def import_run(config, folder, workdir, *, command_line=()):
    """Make the run directory of the model in a Hugging Face folder.

    Args:
      config: ConfigDict, `config_for` the folder with further changes.
      command_line: recorded in run.json.
    Returns: {"parameters": their number}.
    Raises: UsageError for a folder that is not whole, or not of the model that its config.json
      describes, or a workdir that holds a run; nothing is written then.
    """
    folder, config = io.local_path(folder, "--from"), to_config(config)
    hf_config = hf.read_config(folder)
    _check_config(config, hf.settings_of(folder, hf_config))
    tokenizer = load_tokenizer(folder / run_dir.TOKENIZER_FILE)
    if not other_runs.is_tokenizer(config.data.tokenizer, tokenizer):
        raise UsageError(
            f"config.data.tokenizer={config.data.tokenizer!r}: the model of --from={folder} "
            f"needs its own {run_dir.TOKENIZER_FILE}; leave the setting out"
        )
    weights = Weights(folder)
    rows = hf_config["vocab_size"]
    hf.check_size(folder, config.model, rows, weights)
    _check_vocabulary(folder, tokenizer.vocab_size, rows)
    multihost.check_shared(workdir)
    with run_dir.Lock(workdir) as lock:
        opened = new_run.open_new(workdir, config, command_line)
        e = setup.without_text(config, tokenizer.vocab_size)
        training = setup.Training(e)
        params = hf.params_from_hf(weights, e.model, jax.random.key(config.seed), rows)
        with sharding.use(e.mesh, e.rules):
            state = _state(training, params)
            imported = {
                "from": str(folder.resolve()),
                "model_type": hf_config["model_type"],
                "parameters": fingerprint(state.params, e.model.vocab_size),
            }
            text = tokenizer.to_json()
            files = {run_dir.TOKENIZER_FILE: text, run_dir.HELD_OUT_FILE: None}
            entries = {"imported": imported, "tokenizer": run_dir.checksum(text)}
            new_run.write(opened, lock, config, state, files, **entries)
    parameters = count_params(state.params)
    if is_primary():
        name = ARCHITECTURES[hf_config["model_type"]].name
        print(f"{workdir}: {quantity(parameters, 'parameters')} of {folder} ({name}), step 0")
        if extra := rows - tokenizer.vocab_size:
            print(
                f"{extra} of the {rows:,} rows of the embedding have no token in "
                f"{run_dir.TOKENIZER_FILE} and are left out"
            )
    return {"parameters": parameters}


def _check_config(config, decided):
    """UsageError for a setting of the model that is not the checkpoint's. Fewer positions may be
    asked for where they are not learned."""
    if config.adapter.kind != "none":
        raise UsageError(
            f"config.adapter.kind={config.adapter.kind!r}: import the model without adapters, "
            "and train them in a run with config.init.run"
        )
    hf.check_dropout(config.model)
    plain = run_dir.dotted(schema.as_dict(config))
    for key, value in decided.items():
        mine = plain[key]
        shorter = key == "model.context" and plain["model.positions"] == "rope" and mine <= value
        if mine != value and not shorter:
            raise UsageError(f"config.{key}={mine!r}: the model of --from has {value!r}")


def _check_vocabulary(folder, tokens, rows):
    path = folder / run_dir.TOKENIZER_FILE
    if tokens > rows:
        raise UsageError(
            f"{path} has {tokens} ids, but the embedding has {rows} rows (vocab_size in "
            "config.json): it is the tokenizer of another model"
        )
    if rows - tokens > _MOST_PADDING * rows:
        raise UsageError(
            f"{path} has {tokens} ids for {rows} rows of the embedding (vocab_size in "
            f"config.json), and at most {_MOST_PADDING:.0%} of these may be padding: it is the "
            "tokenizer of another model"
        )


def _state(training, params):
    """The `TrainState` of step 0 with these parameters."""
    e = training.experiment

    def make(params, seed):
        variables = {"params": params}
        if "state" in training.shapes.variables:
            fresh = nn.unbox(models.init(e.model, jax.random.key(seed)))
            variables["state"] = fresh["state"]
        return step_lib.state_of(variables, training.optimizer)

    return jax.jit(make, out_shardings=training.shardings)(params, np.uint32(e.config.seed))
