"""What a run starts from: parameters of other runs, combined as its config says.

A plain run starts from one run (`config.init`), composed adapters from a base and one run for each
expert, a bridged model from its members.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from efx import io, run_dir
from efx.checkpoint import manifest
from efx.checkpoint.params import fingerprint, restore_params
from efx.config import schema
from efx.config.load import completed
from efx.errors import UsageError
from efx.layers.stack import convert_layers, scan_params, unroll_params
from efx.models.config import SAME_MODEL

# Settings that make another model of the same parameters; rows may become longer.
_OF_THE_MODEL = rf"model\.(?!({SAME_MODEL}|context)$).*"
# Settings that experts have to share with the run that composes them.
EXPERT_KEYS = ("kind", "rank", "scale", "sites")


def start_from(state, config, model, report):
    """(the fresh state with the parameters of the runs that the config names, its origin).

    The origin, {"run", "step", "parameters": their fingerprint}, is that of `config.init.run`; None
    without one.

    Args:
      state: a `TrainState` of step 0. model: the model that it belongs to.
      report: called with lines about what was loaded.
    Raises: UsageError (CheckpointError for what is wrong inside a run).
    """
    c = config.init
    if model.members:
        state = _with_members(state, config.model.member_runs, model.members)
    if not c.run:
        return state, None
    root = _checkpoints(c.run, "config.init.run")
    params, diff = restore_params(
        root,
        state.params,
        allow_missing=c.missing,
        allow_unexpected=c.unexpected,
        rename=c.rename,
        report=None,
        vocab_size=model.vocab_size,
        options=tuple(f"--config.init.{name}" for name in ("missing", "unexpected", "rename")),
    )
    origin = {"run": c.run, "step": diff.step, "parameters": fingerprint(params, model.vocab_size)}
    variables, averages = _averages(root, diff.step, state.variables, config)
    loaded, *differences = str(diff).splitlines()
    line = (
        f"starting from {c.run}, {loaded}{averages}; the optimiser and the position in the "
        "text are new"
    )
    report("\n".join([line, *differences]))
    if config.adapter.experts:
        params = with_expert_adapters(params, config.adapter, c.run, model.vocab_size)
        report(f"experts: {', '.join(config.adapter.experts)}")
    if config.adapter.kind != "none":
        for run in (c.run, *config.adapter.experts):
            if changed := changed_settings(run, config, _OF_THE_MODEL):
                # With a window, say, that the base had not, its parameters are another model.
                listed = ", ".join(f"config.{key}={value!r}" for key, (value, _) in changed.items())
                report(f"this is not the model of {run}: {listed}")
    return state.replace(params=params, variables=variables), origin


def changed_settings(run, config, among):
    """{dotted key: (what a run recorded, what it is in `config`)} of the settings that differ, of
    those whose key is matched by the regex `among`."""
    recorded = completed(run_dir.recorded_config(run))
    now = json.loads(json.dumps(schema.as_dict(config)))  # lists for tuples, as recorded
    return run_dir.differences(recorded, now, among)


def _averages(root, step, variables, config):
    """(running averages (thresholds of routers) of the run that this one starts from, what to say
    of them).

    An average that that run does not have, or has in another shape, starts as in a new run. The
    base of an adapter is frozen, so it has to have all of them.
    """
    if not variables:
        return variables, ""
    lenient = config.adapter.kind == "none"
    averages, diff = restore_params(
        root,
        variables,
        step=step,
        collection=("variables",),
        allow_missing=".*" if lenient else "",
        allow_unexpected=".*" if lenient else "",
        other_shapes="leave" if lenient else "error",
        rename=[
            (f"state/(?:{pattern})", f"state/{replacement}")
            for pattern, replacement in config.init.rename
        ],
        report=None,
    )
    said = f", {diff.loaded} running averages"
    if diff.missing:
        said += f" ({len(diff.missing)} as in a new run: {manifest.abridged(list(diff.missing))})"
    return averages, said


def _checkpoints(run, key):
    folder = io.folder(run, key)
    if not folder.is_dir():
        raise UsageError(f"{key}={run}: there is no such run folder")
    return folder / run_dir.CHECKPOINTS


def _with_members(state, runs, members):
    """The state of a model of several members, with their parameters and running averages."""
    params, averages = dict(state.params), dict(state.variables.get("state", {}))
    for (key, run), (name, (member, left_out)) in zip(runs, members.items(), strict=True):
        root = _checkpoints(run, f"config.model.{key}")
        scanned = run_dir.recorded_setting(run, "model.scan_layers")
        params[name] = _member(root, params[name], member, scanned, ("params",), left_out)
        if name in averages:
            collection = ("variables", "state")
            averages[name] = _member(root, averages[name], member, scanned, collection, "")
    variables = {**state.variables, **({"state": averages} if averages else {})}
    return state.replace(params=params, variables=variables)


def _member(root, fresh, member, scanned, collection, left_out):
    """A tree of an unrolled member from its run, whose layers may be scanned."""
    targets = fresh
    if scanned:
        targets = convert_layers(scan_params, fresh, member.specs())
    tree, _ = restore_params(
        root,
        targets,
        collection=collection,
        allow_unexpected=left_out,
        report=None,
        vocab_size=member.vocab_size,
    )
    if scanned:
        tree = convert_layers(unroll_params, tree, member.specs())
    return jax.tree.map(lambda stored, leaf: jax.device_put(stored, leaf.sharding), tree, fresh)


def with_expert_adapters(params, adapter, base, vocab_size):
    """Parameters of a composed model, filled in with the adapter of every expert.

    Args:
      params: those of the base are filled in; `.../adapter/<name>` has an axis of experts, the
        first after that of scanned layers. Parameters that experts do not have (entrances) are
        left as they are.
      adapter: the `config.adapter` block. base: the run folder, for messages.
      vocab_size: of the model.
    Raises: UsageError naming the expert that is missing, has other settings, no gates, or was
      trained on another base.
    """
    values = flatten_dict(params, sep="/")
    adapter_paths = [path for path in values if path.split("/")[-2] == "adapter"]
    base_paths = [path for path in values if path not in set(adapter_paths)]
    inherited = [path for path in adapter_paths if path.split("/")[-1] in ("down", "up", "gate")]
    stacks = {path: [] for path in inherited}
    for run in adapter.experts:
        expert = _expert(run, adapter, base_paths, inherited, values, vocab_size)
        for path in base_paths:
            if not jnp.array_equal(expert[path], values[path]):
                raise UsageError(
                    f"config.adapter.experts: the base model of {run} is not "
                    f"config.init.run={base} (they differ in {path})"
                )
        for path in inherited:
            stacks[path].append(np.asarray(expert[path]))
    for path, stack in stacks.items():
        # Stacked on the host: the stacked array has a sharding of its own.
        values[path] = jax.device_put(np.stack(stack, axis=_axis(path)), values[path].sharding)
    return unflatten_dict(values, sep="/")


def _axis(path):
    """The axis of experts: scanned layers take the first."""
    return int("units" in path.split("/"))


def _expert(run, adapter, base, inherited, values, vocab_size):
    """{path: array} of one expert's run, its base included."""
    root = _checkpoints(run, "config.adapter.experts")
    expert_adapter = {
        key: run_dir.recorded_setting(run, f"adapter.{key}")
        for key in (*EXPERT_KEYS, "experts", "gate")
    }
    for key in EXPERT_KEYS:
        if expert_adapter[key] != getattr(adapter, key):
            raise UsageError(
                f"config.adapter.experts: {run} has "
                f"config.adapter.{key}={expert_adapter[key]!r}, not {getattr(adapter, key)!r}"
            )
    if expert_adapter["experts"]:
        raise UsageError(
            f"config.adapter.experts: {run} is itself composed of experts; use single experts"
        )
    if any(path.endswith("/gate") for path in inherited) and not expert_adapter["gate"]:
        raise UsageError(
            f"config.adapter.experts: {run} has no gates, but config.adapter.routing='topk' "
            "needs them; use the run that trained them (configs/phatgoose.py:gate)"
        )
    targets = {}
    for path in sorted([*base, *inherited]):
        leaf = values[path]
        if path in inherited:
            shape = list(leaf.shape)
            del shape[_axis(path)]
            leaf = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
        targets[path] = leaf
    params, _ = restore_params(
        root,
        unflatten_dict(targets, sep="/"),
        allow_unexpected=r".*/adapter/gate",
        report=None,
        vocab_size=vocab_size,
    )
    return flatten_dict(params, sep="/")
