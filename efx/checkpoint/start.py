"""What a run starts from: the parameters of other runs, put together as its config says.

A plain run starts from one (`config.init`); composed adapters from a base and an expert each, a
bridged model from its members.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from efx import runfolder
from efx.checkpoint import files
from efx.checkpoint.params import fingerprint, restore_params
from efx.errors import UsageError
from efx.layers.stack import scan_params, unroll_params

# Settings that experts have to share with the run that composes them.
EXPERT_KEYS = ("kind", "rank", "scale", "sites")


def start_from(state, config, model, report):
    """(the fresh state with the parameters of the runs that the config names, what it comes from).

    The latter, {"run", "step", "parameters": their fingerprint}, tells of `config.init.run`; None
    without one.

    Args:
      state: a `TrainState` of step 0. model: what it is the state of.
      report: called with lines about what was loaded.
    Raises: UsageError (CheckpointError for what is wrong inside a run).
    """
    c = config.init
    if config.adapter.experts and not c.run:
        raise UsageError(
            "config.init.run is empty: config.adapter.experts needs there the run folder of the "
            "base model that the experts were trained on"
        )
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
        report=lambda diff: report(f"starting from {c.run}: {diff}"),
        vocab_size=model.vocab_size,
    )
    origin = {"run": c.run, "step": diff.step, "parameters": fingerprint(params, model.vocab_size)}
    variables = _averages(root, diff.step, state.variables, config, report)
    if config.adapter.experts:
        params = with_experts(params, config.adapter, c.run, model.vocab_size)
        report(f"experts: {', '.join(config.adapter.experts)}")
    return state.replace(params=params, variables=variables), origin


def _averages(root, step, variables, config, report):
    """Running averages (thresholds of routers) of the run that this one starts from.

    What that run has not, or has in another shape, starts as in a new run; but the base of an
    adapter stays what it was, so that it has to have them all.
    """
    if not variables:
        return variables
    lenient = config.adapter.kind == "none"
    found, diff = restore_params(
        root,
        variables,
        step=step,
        collection=("variables",),
        allow_missing=".*" if lenient else "",
        allow_unexpected=".*" if lenient else "",
        other_shapes="leave" if lenient else "error",
        rename=[(f"state/(?:{here})", f"state/{there}") for here, there in config.init.rename],
        report=None,
    )
    left = len(diff.missing)
    report(
        f"running averages: {diff.loaded} from {config.init.run}"
        + (f", {left} as in a new run: {files.some(list(diff.missing))}" if left else "")
    )
    return found


def _checkpoints(run, key):
    folder = pathlib.Path(run)
    if not folder.is_dir():
        raise UsageError(f"{key}={run}: there is no such run folder")
    return folder / runfolder.CHECKPOINTS


def _with_members(state, runs, members):
    """The state of a model made of others with their parameters and running averages."""
    params, averages = dict(state.params), dict(state.variables.get("state", {}))
    for (key, run), (name, (member, left_out)) in zip(runs, members.items(), strict=True):
        root = _checkpoints(run, f"config.model.{key}")
        scanned = runfolder.load_config(run)["model"]["scan_layers"]
        params[name] = _member(root, params[name], member, scanned, ("params",), left_out)
        if name in averages:
            at = ("variables", "state")
            averages[name] = _member(root, averages[name], member, scanned, at, "")
    variables = {**state.variables, **({"state": averages} if averages else {})}
    return state.replace(params=params, variables=variables)


def _member(root, fresh, member, scanned, collection, left_out):
    """A tree of an unrolled member from its run, whose layers may be scanned."""
    wanted = fresh
    if scanned:
        wanted = {**fresh, "layers": scan_params(fresh["layers"], member.specs())}
    tree, _ = restore_params(
        root,
        wanted,
        collection=collection,
        allow_unexpected=left_out,
        report=None,
        vocab_size=member.vocab_size,
    )
    if scanned:
        tree = {**tree, "layers": unroll_params(tree["layers"], member.specs())}
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), tree, fresh)


def with_experts(params, adapter, base, vocab_size):
    """Parameters of a composed model with every expert's adapter in its place.

    Args:
      params: those of the base are filled in; `.../adapter/<name>` has an axis of experts, the
        first after that of scanned layers. What experts do not have (entrances) is left.
      adapter: the `config.adapter` block. base: the run folder, for messages.
      vocab_size: of the model.
    Raises: UsageError naming the expert that is missing, has other settings, no gates, or was
      trained on another base.
    """
    values = flatten_dict(params, sep="/")
    own = [path for path in values if path.split("/")[-2] == "adapter"]
    base_paths = [path for path in values if path not in set(own)]
    inherited = [path for path in own if path.split("/")[-1] in ("down", "up", "gate")]
    stacks = {path: [] for path in inherited}
    for run in adapter.experts:
        expert = _expert(run, adapter, base_paths, inherited, values, vocab_size)
        for path in base_paths:
            if not jnp.array_equal(expert[path], values[path]):
                raise UsageError(
                    f"config.adapter.experts: {run} was trained on another base model than "
                    f"config.init.run={base} (they differ in {path})"
                )
        for path in inherited:
            stacks[path].append(np.asarray(expert[path]))
    for path, stack in stacks.items():
        # Stacked on the host: how they lie on a mesh is decided by what they make together.
        values[path] = jax.device_put(np.stack(stack, axis=_axis(path)), values[path].sharding)
    return unflatten_dict(values, sep="/")


def _axis(path):
    """Of the experts: scanned layers lie along the first axis."""
    return int("units" in path.split("/"))


def _expert(run, adapter, base, inherited, values, vocab_size):
    """{path: array} of one expert's run, its base included."""
    root = _checkpoints(run, "config.adapter.experts")
    there = runfolder.load_config(run)["adapter"]
    for key in EXPERT_KEYS:
        if there[key] != getattr(adapter, key):
            raise UsageError(
                f"config.adapter.experts: {run} has config.adapter.{key}={there[key]!r}, not "
                f"{getattr(adapter, key)!r}"
            )
    if there["experts"]:
        raise UsageError(f"config.adapter.experts: {run} is composed of experts itself")
    if any(path.endswith("/gate") for path in inherited) and not there["gate"]:
        raise UsageError(
            f"config.adapter.experts: {run} has no gates, which config.adapter.routing='topk' "
            "needs; give the run that trained them (configs/phatgoose.py:gate)"
        )
    wanted = {}
    for path in sorted([*base, *inherited]):
        leaf = values[path]
        if path in inherited:
            shape = list(leaf.shape)
            del shape[_axis(path)]
            leaf = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
        wanted[path] = leaf
    params, _ = restore_params(
        root,
        unflatten_dict(wanted, sep="/"),
        allow_unexpected=r".*/adapter/gate",
        report=None,
        vocab_size=vocab_size,
    )
    return flatten_dict(params, sep="/")
