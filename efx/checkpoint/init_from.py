"""Initial parameters from other runs, as the config says.

A plain run starts from one run (`config.init`), composed adapters from a base and one run for each
expert, a bridged model from its members.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from efx import io, run_dir
from efx.checkpoint import errors
from efx.checkpoint.params import fingerprint, restore_params
from efx.config import schema
from efx.config.load import with_new_defaults
from efx.errors import UsageError
from efx.models.config import SAME_MODEL
from efx.models.stack import convert_layers, scan_params, unroll_params

# Settings that change the function of the same parameters; rows may become longer.
_MODEL_SETTINGS = rf"model\.(?!({SAME_MODEL}|context)$).*"
# Settings of `config.adapter` that experts share with the run that composes them.
_EXPERT_SETTINGS = ("kind", "rank", "scale", "sites")


def start_from(state, config, model, report):
    """Load the parameters of the runs that the config names.

    Args:
      state: a `TrainState` of step 0 of `model`.
      report: function of lines about the loaded parameters.
    Returns: (state, origin of the parameters). The origin is {"run", "step", "parameters": their
      fingerprint} of `config.init.run`, or None without one.
    Raises: UsageError.
    """
    c, experts = config.init, config.adapter.experts
    if model.members:
        state = _load_members(state, config.model.member_runs, model.members)
    if not c.run:
        return state, None
    params, diff = restore_params(
        _checkpoints(c.run, "config.init.run"),
        state.params,
        missing=c.missing,
        unexpected=c.unexpected,
        rename=c.rename,
        vocab_size=model.vocab_size,
        prefix="--config.init.",
    )
    origin = {"run": c.run, "step": diff.step, "parameters": fingerprint(params, model.vocab_size)}
    variables, averages = _load_averages(diff.step, state.variables, config)
    loaded, *differences = str(diff).splitlines()
    line = f"starting from {c.run}, {loaded}{averages}; optimizer and data position are new"
    report("\n".join([line, *differences]))
    if experts:
        params = _load_experts(params, config.adapter, c.run, model.vocab_size)
        report(f"experts: {', '.join(experts)}")
    if config.adapter.kind != "none":
        for run in (c.run, *experts):
            changed = changed_settings(run_dir.RunDir(run), config, _MODEL_SETTINGS)
            listed = ", ".join(f"config.{key}={value!r}" for key, (_, value) in changed.items())
            if changed:
                report(f"this is not the model of {run}: {listed}")
    return state.replace(params=params, variables=variables), origin


def changed_settings(run, config, among):
    """Return {dotted key: (value in a `RunDir`, value in `config`)} of the settings that differ.

    Args:
      among: regex of the keys to compare.
    """
    recorded = with_new_defaults(run.config)
    now = json.loads(json.dumps(schema.as_dict(config)))  # lists for tuples, as recorded
    return run_dir.differences(recorded, now, among)


def _checkpoints(run, setting):
    folder = io.folder(run, setting)
    if not folder.is_dir():
        raise UsageError(f"{setting}={run}: there is no such run directory")
    return folder / run_dir.CHECKPOINTS


def _load_averages(step, variables, config):
    """Load the running averages (thresholds of routers) of `config.init.run`.

    An average that is missing there, or has another shape, starts as in a new run. The base of an
    adapter is frozen and must have all of them.

    Returns: (variables, text about them).
    """
    if not variables:
        return variables, ""
    may_differ = config.adapter.kind == "none"
    variables, diff = restore_params(
        _checkpoints(config.init.run, "config.init.run"),
        variables,
        step,
        collection=("variables",),
        missing=".*" if may_differ else "",
        unexpected=".*" if may_differ else "",
        rename=[(f"state/(?:{old})", f"state/{new}") for old, new in config.init.rename],
        skip_other_shapes=may_differ,
    )
    text = f", {diff.loaded} running averages"
    if diff.missing:
        text += f" ({len(diff.missing)} as in a new run: {errors.abridged(diff.missing)})"
    return variables, text


def _load_members(state, runs, members):
    """Load the parameters and running averages of the members of a bridged model.

    Args:
      runs: pairs (key of `config.model`, run). members: {name: (model, regex of unused
        parameters)} in the same order.
    """
    params, averages = dict(state.params), dict(state.variables.get("state", {}))
    for (key, run), (name, (member, unused)) in zip(runs, members.items(), strict=True):
        root = _checkpoints(run, f"config.model.{key}")
        is_scanned = run_dir.RunDir(run).setting("model.scan_layers")
        params[name] = _load_member(root, params[name], member, is_scanned, ("params",), unused)
        if name in averages:
            collection = ("variables", "state")
            averages[name] = _load_member(root, averages[name], member, is_scanned, collection, "")
    variables = {**state.variables, **({"state": averages} if averages else {})}
    return state.replace(params=params, variables=variables)


def _load_member(root, fresh, member, is_scanned, collection, unused):
    """Load a tree of an unrolled member from its run, whose layers may be scanned."""
    targets = convert_layers(scan_params, fresh, member.specs()) if is_scanned else fresh
    tree, _ = restore_params(
        root,
        targets,
        collection=collection,
        unexpected=unused,
        vocab_size=member.vocab_size,
    )
    if is_scanned:
        tree = convert_layers(unroll_params, tree, member.specs())
    return jax.tree.map(lambda stored, leaf: jax.device_put(stored, leaf.sharding), tree, fresh)


def _load_experts(params, adapter, base_run, vocab_size):
    """Load the adapter of each expert into the parameters of a composed model.

    Each array `.../adapter/NAME` has an axis of experts, the first one after that of scanned
    layers. Parameters of the composition alone (entrances) stay as they are.

    Args:
      params: with the parameters of the base. adapter: `config.adapter`.
    Raises: UsageError if an expert has other settings, no gates, or another base.
    """
    values = flatten_dict(params, sep="/")
    of_adapters = {path for path in values if path.split("/")[-2] == "adapter"}
    of_base = values.keys() - of_adapters
    of_experts = sorted(p for p in of_adapters if p.split("/")[-1] in ("down", "up", "gate"))
    axes = {path: int("units" in path.split("/")) for path in of_experts}
    targets = {path: values[path] for path in of_base}
    for path, axis in axes.items():
        shape = (*values[path].shape[:axis], *values[path].shape[axis + 1 :])
        targets[path] = jax.ShapeDtypeStruct(shape, values[path].dtype)
    needs_gates = any(path.endswith("/gate") for path in of_experts)
    experts = []
    for run in adapter.experts:
        root = _checkpoints(run, "config.adapter.experts")
        _check_expert(run, adapter, needs_gates)
        expert, _ = restore_params(
            root,
            unflatten_dict(targets, sep="/"),
            unexpected=r".*/adapter/gate",
            vocab_size=vocab_size,
        )
        experts.append(flatten_dict(expert, sep="/"))
        for path in sorted(of_base):
            if not jnp.array_equal(experts[-1][path], values[path]):
                raise UsageError(
                    f"config.adapter.experts: the base model of {run} is not "
                    f"config.init.run={base_run} ({path} differs); use experts of this base"
                )
    for path, axis in axes.items():
        stacked = np.stack([np.asarray(expert[path]) for expert in experts], axis)
        values[path] = jax.device_put(stacked, values[path].sharding)
    return unflatten_dict(values, sep="/")


def _check_expert(run, adapter, needs_gates):
    """Raise UsageError unless the settings of an expert's run fit the composition."""
    recorded = run_dir.RunDir(run).setting("adapter")
    for key in _EXPERT_SETTINGS:
        if recorded[key] != getattr(adapter, key):
            raise UsageError(
                f"config.adapter.experts: {run} has config.adapter.{key}={recorded[key]!r}, not "
                f"{getattr(adapter, key)!r}"
            )
    if recorded["experts"]:
        raise UsageError(
            f"config.adapter.experts: {run} is itself composed of experts; use single experts"
        )
    if needs_gates and not recorded["gate"]:
        raise UsageError(
            f"config.adapter.experts: {run} has no gates, but config.adapter.routing='topk' "
            "needs them; use the run that trained them (configs/phatgoose.py:gate)"
        )
