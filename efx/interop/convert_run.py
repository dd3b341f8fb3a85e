"""Convert a dense run to a run with routed blocks: --mode=convert --from RUN --to mod.

The new run directory has a checkpoint of step 0 with the parent's parameters and new routers.
Routers start at zero, where the gate "twice_sigmoid" is exactly 1, so with capacity 1 the converted
model equals its parent; training then lowers the capacity (`capacity_stages`). `--to layer_drop`
removes every second block instead, as a baseline.
"""

import dataclasses
import re

from flax.traverse_util import flatten_dict

from efx import io, models, run_dir
from efx.checkpoint.params import fingerprint
from efx.config import schema
from efx.config.load import config_of_run, to_config
from efx.config.run import default_config
from efx.configs import convert_mod
from efx.errors import UsageError, is_primary, nearest
from efx.interop import new_run
from efx.layers.flops import count_params
from efx.logging import quantity
from efx.train import inference, model_setup, named_runs

KINDS = ("mod", "layer_drop")
# Settings of the model that may differ from the parent's.
_FREE = r"depth_routing\..*|scan_layers|remat|vocab_multiple|attention\.(chunk|kernel)"
# Gates that are 1 for a score of 0.
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
    new_run.check_decoder(config, "convert")
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
    """Write the run directory of the converted model.

    Args:
      config: ConfigDict, `config_for` the folder with further changes.
      folder: the parent. to: one of `KINDS`. command_line: recorded in run.json.
    Raises: UsageError, before anything is written, also for a workdir with a run.
    """
    config, parent_path = to_config(config), _absolute_path(folder)
    _check_config(config, config_of_run(folder, "--from"), to)
    named_runs.check_tokenizer(config, run_dir.RunDir(parent_path, "--from"))
    if config.adapter.kind != "none":  # adapters need a base run
        config = schema.replaced(config, {"init.run": parent_path})
    with new_run.opened(workdir, config, command_line) as run:
        parent_config = model_setup.on_devices_of(config, folder, "--from")
        parent, step, params, averages = inference.restore(parent_config, folder)
        training = run.training(parent.tokenizer.vocab_size)
        model = training.experiment.model
        origin = {
            "run": parent_path,
            "step": step,
            "parameters": fingerprint(params, model.vocab_size),
        }
        variables = models.unroll_variables(parent.model, {"params": params, **averages})
        if to == "layer_drop":
            variables = _without_every_second_block(variables, parent.model, model)
        state = new_run.initial_state(training, variables, model.config.depth_routing)
        files, entries = _text_records(config.data, folder, parent.tokenizer.to_json())
        converted = {"from": parent_path, "to": to, "step": step}
        entries["converted"] = converted | {"parameters": origin["parameters"]}
        if training.experiment.teacher is not None and config.train.teacher == parent_path:
            entries["teacher"] = origin
        run.write(state, files, **entries)
    leaves = flatten_dict(state.params, sep="/").items()
    new = sum(leaf.size for path, leaf in leaves if new_run.is_new(path))
    if is_primary():
        added = f" ({quantity(new)} new)" if new else ""
        total = quantity(count_params(state.params), "parameters")
        print(f"{workdir}: step 0, {total}{added}, converted to {to} from {folder} at step {step}")


def _absolute_path(folder):
    """Absolute path, because the next launch may have another working directory."""
    return str(folder if io.is_remote(folder) else io.folder(folder).resolve())


def _check_parent(parent, folder, to):
    if to not in KINDS:
        raise UsageError(f"--to={to}: expected {' or '.join(KINDS)}{nearest(to, KINDS)}")
    model, problem = parent.model, ""
    if model.family != "decoder":
        problem = f"config.model.family={model.family!r}: --mode=convert reads decoders"
    elif model.depth_routing.kind != "none":
        problem = (
            f"config.model.depth_routing.kind={model.depth_routing.kind!r}: blocks are routed "
            "already; to change their routing, start a run with config.init.run"
        )
    elif parent.adapter.kind != "none":
        problem = (
            f"config.adapter.kind={parent.adapter.kind!r}: convert {parent.init.run}, its base"
        )
    elif to == "layer_drop" and (model.depth < 2 or model.dense_former.on):
        problem = (
            f"config.model.depth={model.depth} and dense_former.on={model.dense_former.on}: "
            "--to=layer_drop needs two blocks, and no averages over all blocks"
        )
    if problem:
        raise UsageError(f"--from={folder} has {problem}")


def _inherited_settings(parent, to):
    """{key of config.model: value} that the new run must have."""
    model = run_dir.dotted(parent.model.to_dict())
    settings = {key: value for key, value in model.items() if not re.fullmatch(_FREE, key)}
    settings["context"] = settings["context"] or parent.data.seq_len
    if to == "layer_drop":
        settings["depth"] = (settings["depth"] + 1) // 2
    return settings


def _check_config(config, parent, to):
    """Raise UsageError for a setting with which the model would not start as its parent."""
    routing = config.model.depth_routing
    expected = "mod" if to == "mod" else "none"
    if routing.kind != expected:
        raise UsageError(
            f"config.model.depth_routing.kind={routing.kind!r}: --to={to} needs {expected!r}"
        )
    # Routers start at zero; other scores do not.
    gates = _GATES if routing.score == "router" else ("one",)
    if to == "mod" and routing.gate not in gates:
        routing.refuse(
            "gate",
            f"must be 1 at the start, so that the model starts as its parent: use "
            f"{' or '.join(gates)}",
        )
    new_run.check_inherited(config, _inherited_settings(parent, to))


def _without_every_second_block(variables, parent, model):
    """Variables of the blocks 0, 2, 4, ... of a model, as blocks 0, 1, 2, ...

    Raises: UsageError if a block's settings depend on its number (experts, positions) and change.
    """
    for i, spec in enumerate(model.specs()):
        blocks = (*spec.blocks, *parent.specs()[2 * i].blocks)
        if len({dataclasses.replace(block, std=0.0, std_out=0.0) for block in blocks}) > 1:
            raise UsageError(
                f"--to=layer_drop: block {2 * i} of the parent would become block {i}, which has "
                "other experts or positions; such settings must repeat in every second block"
            )
    renamed = {}
    for name, tree in variables.items():
        layers = tree.get("layers", {})
        kept = {f"block_{i}": layers.get(f"block_{2 * i}", {}) for i in range(model.config.depth)}
        renamed[name] = {**tree, "layers": kept}
    return renamed


def _text_records(data, folder, tokenizer):
    """(files, entries of run.json) about the text. The same text keeps the parent's split."""
    files = {run_dir.TOKENIZER_FILE: tokenizer}
    entries = {"tokenizer": run_dir.checksum(tokenizer)}
    parent = run_dir.RunDir(folder)
    settings = named_runs.text_settings(data) | {"subset": data.subset}
    recorded = parent.setting("data")
    if all(recorded[key] == value for key, value in settings.items()):
        record = parent.record
        entries |= {name: record[name] for name in ("text", "subset") if name in record}
    return files, entries
