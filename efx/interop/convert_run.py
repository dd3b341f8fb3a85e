"""Convert a dense run to a run with routed blocks: --mode=convert --from RUN --to mod.

The new run directory has a checkpoint of step 0 with the parent's parameters and new routers.
Routers start at zero and the gate "twice_sigmoid" is exactly 1 for a score of 0, so with capacity 1
the converted model equals its parent; training then lowers the capacity (`capacity_stages`). `--to
layer_drop` removes every second block instead, as a baseline.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from efx import io, models, run_dir
from efx.checkpoint.params import fingerprint
from efx.config import schema
from efx.config.load import config_of_run, to_config
from efx.config.run import default_config
from efx.configs import convert_mod
from efx.errors import UsageError, is_primary, nearest
from efx.interop import new_run
from efx.layers.flops import count_params
from efx.layers.stack import convert_layers, scan_params
from efx.logging import quantity
from efx.parallel import multihost, sharding
from efx.routing import parameters
from efx.train import other_runs, setup
from efx.train import step as step_lib

KINDS = ("mod", "layer_drop")
# Settings of the model that may differ from the parent's.
_FREE = r"depth_routing\..*|scan_layers|remat|vocab_multiple|attention\.(chunk|kernel)"
# Gates that are 1 at the start of training.
_GATES = ("twice_sigmoid", "one")


def config_for(folder, to, config=None):
    """The config of a run that trains the converted model of a run.

    Args:
      folder: the parent. to: one of `KINDS`.
      config: ConfigDict with the settings of training and, if `to` is "mod", of routing; its other
        settings of the model and its tokenizer are replaced by the parent's. None: the parent's
        config with the changes of `configs/convert_mod.py`.
    Raises: UsageError for a parent that cannot be converted.
    """
    parent = config_of_run(folder, "--from")
    _check_parent(parent, folder, to)
    if config is None:
        config = config_of_run(folder, "--from")
        config.init = default_config().init
        config.optim.frozen, config.optim.lr_multipliers = "", ()
        config.update_from_flattened_dict(convert_mod.RECIPE)
    else:
        to_config(config)
        if config.model.family != "decoder":
            raise UsageError(
                f"config.model.family={config.model.family!r}: --mode=convert writes a "
                "decoder; use another --config"
            )
    config.update_from_flattened_dict(
        {f"model.{key}": value for key, value in _inherited_settings(parent, to).items()}
    )
    config.data.tokenizer = parent.data.tokenizer
    routing = config.model.depth_routing
    if to != "mod":
        routing.kind = "none"
    elif routing.kind == "none":
        config.update_from_flattened_dict(convert_mod.ROUTING)
    config.train.teacher = _absolute_path(folder)
    return config


def convert(config, folder, to, workdir, *, command_line=()):
    """Make the run directory of the converted model.

    Args:
      config: ConfigDict, `config_for` the folder with further changes.
      folder: the parent. to: one of `KINDS`. command_line: recorded in run.json.
    Returns: {"parameters": their number}.
    Raises: UsageError, also for a workdir that holds a run; nothing is written then.
    """
    config, parent_path = to_config(config), _absolute_path(folder)
    _check_config(config, config_of_run(folder, "--from"), to)
    other_runs.check_tokenizer(config, "--from", parent_path)
    if config.adapter.kind != "none":  # whose base a run has to name
        config = schema.replaced(config, {"init.run": parent_path})
    multihost.check_shared(workdir)
    with run_dir.Lock(workdir) as lock:
        opened = new_run.open_new(workdir, config, command_line)
        of = setup.on_devices_of(config, folder, "--from")
        parent, step, params, averages = setup.finished(of, folder)
        e = setup.without_text(config, parent.tokenizer.vocab_size)
        training = setup.Training(e)
        with sharding.use(e.mesh, e.rules):
            found = fingerprint(params, e.model.vocab_size)
            state, new = _state(training, parent.model, {"params": params, **averages}, to)
            files, entries = _text_records(config.data, folder, parent.tokenizer.to_json())
            entries["converted"] = {
                "from": parent_path,
                "to": to,
                "step": step,
                "parameters": found,
            }
            if e.teacher is not None and config.train.teacher == parent_path:
                entries["teacher"] = {"run": parent_path, "step": step, "parameters": found}
            new_run.write(opened, lock, config, state, files, **entries)
    parameters = count_params(state.params)
    if is_primary():
        added = f" ({quantity(new)} new)" if new else ""
        print(
            f"{workdir}: step 0, {quantity(parameters, 'parameters')}{added}, converted to {to} "
            f"from {folder} at step {step}"
        )
    return {"parameters": parameters}


def _absolute_path(folder):
    """Absolute path, because the next launch may have another working directory."""
    return str(folder if io.is_remote(folder) else io.folder(folder).resolve())


def _check_parent(parent, folder, to):
    if to not in KINDS:
        raise UsageError(f"--to={to}: expected {' or '.join(KINDS)}{nearest(to, KINDS)}")
    model, cannot = parent.model, ""
    if model.family != "decoder":
        cannot = f"config.model.family={model.family!r}: --mode=convert reads decoders"
    elif model.depth_routing.kind != "none":
        cannot = (
            f"config.model.depth_routing.kind={model.depth_routing.kind!r}: the parent already "
            "has routed blocks; to change its routing, start a run with config.init.run"
        )
    elif parent.adapter.kind != "none":
        cannot = (
            f"config.adapter.kind={parent.adapter.kind!r}: convert its base model "
            f"({parent.init.run})"
        )
    elif to == "layer_drop" and model.depth < 2:
        cannot = f"config.model.depth={model.depth}: needs a second block to leave out"
    elif to == "layer_drop" and model.dense_former.on:
        cannot = "config.model.dense_former.on=True, with averages over all blocks"
    if cannot:
        raise UsageError(f"--from={folder} has {cannot}")


def _inherited_settings(parent, to):
    """{key of config.model: value} that the new run has to have."""
    model = run_dir.dotted(parent.model.to_dict())
    settings_of_model = {key: value for key, value in model.items() if not re.fullmatch(_FREE, key)}
    settings_of_model["context"] = settings_of_model["context"] or parent.data.seq_len
    if to == "layer_drop":
        settings_of_model["depth"] = len(_kept_blocks(settings_of_model["depth"]))
    return settings_of_model


def _kept_blocks(depth):
    """Numbers of the blocks that --to layer_drop keeps (by default --to mod routes the others)."""
    return range(0, depth, 2)


def _check_config(config, parent, to):
    """Raise UsageError for a setting with which the model would not start as its parent."""
    routing, plain = config.model.depth_routing, run_dir.dotted(schema.as_dict(config.model))
    if routing.kind != ("mod" if to == "mod" else "none"):
        raise UsageError(
            f"config.model.depth_routing.kind={routing.kind!r}: --to={to} writes "
            + ("'mod'" if to == "mod" else "a model without routed blocks, 'none'")
        )
    if to == "mod" and not routing.is_control and routing.gate not in _GATES:
        raise UsageError(
            f"config.model.depth_routing.gate={routing.gate!r}: a converted model starts as "
            f"its parent, so its gate must be 1 for a score of 0: use {' or '.join(_GATES)}"
        )
    for key, value in _inherited_settings(parent, to).items():
        shorter = key == "context" and plain["positions"] != "learned" and 0 < plain[key] < value
        if plain[key] != value and not shorter:
            raise UsageError(
                f"config.model.{key}={plain[key]!r}: the model of --from has {value!r}"
            )


def _text_records(data, folder, tokenizer):
    """(files, entries of run.json) about the text. The same text keeps the parent's split."""
    files = {run_dir.TOKENIZER_FILE: tokenizer, run_dir.HELD_OUT_FILE: None}
    entries = {"tokenizer": run_dir.checksum(tokenizer)}
    same = all(
        getattr(data, key) == run_dir.recorded_setting(folder, f"data.{key}")
        for key in (*other_runs.TEXT_SETTINGS, "subset")
    )
    record = run_dir.run_record(folder)
    if same and run_dir.recorded_origin(folder) is not None:
        path = io.folder(folder) / run_dir.HELD_OUT_FILE
        files[run_dir.HELD_OUT_FILE] = path.read_text("utf-8") if path.is_file() else None
        entries |= {name: record[name] for name in ("text", "subset") if name in record}
    return files, entries


def _state(training, parent, variables, to):
    """(the `TrainState` of step 0, the number of its parameters that the parent lacks).

    Args:
      parent: the parent's model. variables: the parent's variables.
    """
    e = training.experiment
    model = models.unrolled(e.model)
    kept = _kept_blocks(parent.config.depth) if to == "layer_drop" else range(parent.config.depth)
    _check_blocks(parent, model, kept)
    count = 0

    def make(variables, seed):
        nonlocal count
        fresh = nn.unbox(models.init(model, jax.random.key(seed)))
        leaves = flatten_dict(fresh["params"], sep="/").items()
        count = sum(leaf.size for path, leaf in leaves if _is_new(path))
        inherited = models.unroll_variables(parent, variables)
        converted = convert_variables(inherited, fresh, kept, model.config.depth_routing)
        if e.model.config.scan_layers:
            specs = e.model.specs()
            converted = {
                name: convert_layers(scan_params, tree, specs) for name, tree in converted.items()
            }
        return step_lib.state_of(converted, training.optimizer)

    state = jax.jit(make, out_shardings=training.shardings)(variables, np.uint32(e.config.seed))
    return state, count


def _check_blocks(parent, model, kept):
    """Raise UsageError unless each kept block has the settings that it has in the parent: experts
    and layers without positions may go by a block's number."""
    specs, parent_specs = model.specs(), parent.specs()

    def computed(spec):
        return dataclasses.replace(spec.block, std=0.0, std_out=0.0)

    for number, (spec, i) in enumerate(zip(specs, kept, strict=True)):
        if computed(spec) != computed(parent_specs[i]):
            raise UsageError(
                f"--to=layer_drop: block {i} of the parent would become block {number}, of "
                "another kind: settings that depend on a block's number (experts, positions) "
                "must repeat in every second block"
            )


def convert_variables(parent, fresh, kept, routing):
    """The variables of a converted model, {collection: tree}.

    Args:
      parent: variables of the parent, unrolled. fresh: initial variables, unrolled.
      kept: the number in the parent of each block. routing: `DepthRoutingConfig` of the new model.
    """
    converted = {}
    for collection, tree in fresh.items():
        inherited = flatten_dict(parent.get(collection, {}), sep="/")
        arrays = {
            path: _value(path, leaf, inherited, kept, routing)
            for path, leaf in flatten_dict(tree, sep="/").items()
        }
        converted[collection] = unflatten_dict(arrays, sep="/")
    return converted


def _is_new(path):
    """Whether the parent lacks this array."""
    return parameters.find(path) is not None or "adapter" in path.split("/")


def _value(path, leaf, inherited, kept, routing):
    """The parent's array, or the initial value of a new one."""
    if not _is_new(path):
        return inherited[re.sub(r"(?<=^layers/block_)\d+", lambda m: str(kept[int(m[0])]), path)]
    row = parameters.find(path)
    value = None if row is None else row.converted(routing)
    return leaf if value is None else jnp.full_like(leaf, value)
