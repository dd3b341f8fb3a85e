"""Reads the parameters of a checkpoint into a model that differs from the one that was saved.

Allowed differences are given as regexes; any other is an error. Used by composition,
upcycling, conversions and sampling.
"""

import dataclasses
import functools
import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from efx.checkpoint import arrays, manifest
from efx.checkpoint.manifest import CheckpointError, Damage, warn
from efx.parallel import sharding
from efx.train import optim


@dataclasses.dataclass(frozen=True)
class ParamsDiff:
    """How the parameters of a model and of a checkpoint differ; paths are "/"-joined.

    missing: in the model only (left as they were). unexpected: in the checkpoint only (not read).
    renamed: (path in the model, path in the checkpoint). cast: (path, dtype in the checkpoint,
    dtype in the model).
    """

    step: int
    loaded: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    cast: tuple[tuple[str, str, str], ...]

    def __str__(self):
        lines = [f"checkpoint {self.step}: {self.loaded} parameter arrays loaded"]
        lines += [f"  not in the checkpoint, left unchanged: {path}" for path in self.missing]
        lines += [f"  in the checkpoint, not used: {path}" for path in self.unexpected]
        lines += [f"  {path} from {stored_path}" for path, stored_path in self.renamed]
        lines += [f"  {path}: {stored} converted to {dtype}" for path, stored, dtype in self.cast]
        return "\n".join(lines)


def _of_a_step_that_stays(restore):
    """`restore`, of a root and a step that are there, for any root and step: see `read_step`."""

    @functools.wraps(restore)
    def restored(root, params, step=None, **options):
        manifest.quieten()
        root = manifest.as_root(root)
        finished = functools.partial(manifest.finished_steps, root)
        return manifest.read_step(
            root, finished, step, lambda s: restore(root, params, s, **options)
        )

    return restored


@_of_a_step_that_stays
def restore_params(
    root,
    params,
    step=None,
    *,
    allow_missing="",
    allow_unexpected="",
    rename=(),
    collection=("params",),
    other_shapes="error",
    report=print,
    vocab_size=0,
    options=("allow_missing", "allow_unexpected", "rename"),
):
    """Loads parameters alone, verified against the checksums: those that the run of the checkpoint
    is evaluated with, which an optimiser may keep as averages (`optim.eval_params`).

    Args:
      root: the checkpoints folder of a run.
      params: nested dicts of the leaves to read: jax.ShapeDtypeStruct with shardings, or arrays. A
        leaf that may be missing must be an array; it is returned as it is.
      step: of the checkpoint; None: the newest finished one.
      allow_missing: regex; a path of `params` may be absent from the checkpoint if it matches in
        full. Empty: none may.
      allow_unexpected: the same for paths of the checkpoint that `params` does not have.
      rename: sequence of (regex, replacement); the first that matches a path of `params` in full
        gives the path to read instead. One array may be read into several places, so
        ("(block_\\\\d+)/expert_\\\\d+/(.*)", "\\\\1/mlp/\\\\2") copies one MLP into each expert.
      collection: path of the tree inside the saved state: its parameters, or ("variables",).
      other_shapes: "leave": an array that has another shape in the checkpoint counts as missing.
      report: called with the ParamsDiff on process 0 if anything differs; None: never.
      vocab_size: of the model; 0: tables of a vocabulary have to be padded as they were.
      options: what messages call `allow_missing`, `allow_unexpected` and `rename`.

    Returns: (params, ParamsDiff). Values are cast to the dtypes of `params`.
    Raises: CheckpointError naming the paths at fault.
    """
    name, folder = f"checkpoint {step} in {root}", root / str(step)
    _verify(name, folder)
    try:
        stored = arrays.read_metadata(folder)
    except Exception as error:  # orbax raises bare Exception too
        raise CheckpointError(
            f"{name}, item state, cannot be read: {manifest.explain(error)}"
        ) from error
    depth = len(collection)
    averages = optim.stored_averages(stored) if collection == ("params",) else {}
    stored = {
        "/".join(path[depth:]): leaf for path, leaf in stored.items() if path[:depth] == collection
    }
    targets = flatten_dict(params, sep="/")
    stored_path = {path: _renamed(path, rename) for path in targets}

    if other_shapes == "leave":
        shapes = {path: tuple(leaf.shape) for path, leaf in stored.items()}
        for path, leaf in targets.items():
            if stored_path[path] in stored and shapes[stored_path[path]] != tuple(leaf.shape):
                del stored[stored_path[path]]
    missing = [path for path in targets if stored_path[path] not in stored]
    unexpected = sorted(stored.keys() - set(stored_path.values()))
    loaded = [path for path in targets if stored_path[path] in stored]
    for paths, allowed, verb, option in (
        (missing, allow_missing, "lacks", options[0]),
        (unexpected, allow_unexpected, "has extra arrays", options[1]),
    ):
        _refuse(name, paths, allowed, verb, option, options[2], stored_path, loaded)
    pairs = {path: (stored[stored_path[path]], targets[path]) for path in loaded}
    _check_shapes(name, pairs, stored_path, vocab_size)
    for path in missing:
        if isinstance(targets[path], jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{name} lacks {path}, and the target has no value for it; pass an initialised "
                "array there"
            )

    values = dict(targets)
    sources = {path: stored_path[path] for path in loaded}
    values.update(_load(name, folder, sources, targets, collection, averages))
    loaded_params = unflatten_dict(values, sep="/")
    dtypes = {p: (stored[stored_path[p]].dtype, targets[p].dtype) for p in loaded}
    diff = ParamsDiff(
        step=step,
        loaded=len(loaded),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        renamed=tuple((path, stored_path[path]) for path in loaded if stored_path[path] != path),
        cast=tuple((p, str(a), str(b)) for p, (a, b) in dtypes.items() if a != b),
    )
    differs = diff.missing or diff.unexpected or diff.renamed or diff.cast
    if report is not None and differs and jax.process_index() == 0:
        report(str(diff))
    return loaded_params, diff


def fingerprint(params, vocab_size):
    """A hash of the names, shapes and values of parameters, the same for every way to shard them
    and to pad their vocabulary.

    Each array is reduced to two sums of its bits, modulo 2^32, the second one weighted by position:
    integer sums do not depend on their order.
    """

    shapes = jax.eval_shape(functools.partial(_unpadded, vocab_size=vocab_size), params)
    sums_of = jax.device_get(_sums(params, vocab_size))
    lines = [f"{path} {shapes[path].shape} {sums_of[path].tolist()}" for path in sorted(sums_of)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _unpadded(params, vocab_size):
    return {
        "/".join(path): manifest.without_padding(path, x, vocab_size)
        for path, x in flatten_dict(params).items()
    }


# Compiled once for all parameters of the same shapes.
@functools.partial(jax.jit, static_argnums=1)
def _sums(params, vocab_size):
    """{path: the two sums of a parameter's bits}"""

    def two_sums(x):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        # Places in the order of rows, without a reshape, for which a split array is gathered.
        position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
        for axis in reversed(range(bits.ndim)):
            place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            position += np.uint32(stride) * place
            stride = stride * bits.shape[axis] % 2**32
        return jnp.stack([bits.sum(), (bits * (2 * position + 1)).sum()])

    return jax.tree.map(two_sums, _unpadded(params, vocab_size))


def _verify(name, folder):
    if not (folder / manifest.MANIFEST).exists():
        warn(f"{name} has no {manifest.MANIFEST}: its contents cannot be verified")
        return
    try:
        manifest.verify(folder)
    except Damage as damage:
        raise CheckpointError(
            f"{name} is damaged: {damage}; use another step, or restore the folder from a backup"
        ) from damage


def _renamed(path, rename):
    for pattern, replacement in rename:
        match = re.fullmatch(pattern, path)
        if match:
            return match.expand(replacement)
    return path


def _refuse(name, paths, allowed, verb, option, rename, stored_path, known):
    wrong = [path for path in paths if not (allowed and re.fullmatch(allowed, path))]
    if wrong:
        shown = [
            f"{path} (read as {stored_path[path]})" if stored_path.get(path, path) != path else path
            for path in wrong
        ]
        raise CheckpointError(
            f"{name} {verb} {manifest.abridged(shown)}; to allow this, set "
            f"{option}={_pattern(wrong, known, allowed)!r}, or map the names with {rename}"
        )


def _pattern(wrong, known, allowed):
    """A regex for paths, by the first part of each that no known path has; else for all. What is
    `allowed` already stays so."""
    parts = {part for path in known for part in path.split("/")}
    new = [next((part for part in path.split("/") if part not in parts), None) for path in wrong]
    if None in new:
        return ".*"
    names = "|".join(sorted(map(re.escape, {*new})))
    return rf"{allowed}|" * bool(allowed) + rf"(.*/)?({names})(/.*)?"


def _check_shapes(name, pairs, stored_path, vocab_size):
    wrong = [
        f"{stored_path[path]} is {manifest.dtype_and_shape(stored)} there, {path} is"
        f" {manifest.dtype_and_shape(target)} here"
        for path, (stored, target) in pairs.items()
        if not manifest.fits(path.split("/"), stored.shape, target.shape, vocab_size)
    ]
    if wrong:
        raise CheckpointError(
            f"{name} does not fit: {manifest.abridged(wrong)}; use a model of the same widths"
        )


def _load(name, folder, stored_paths, targets, collection, averages):
    """{path in the model: array}, each array of the checkpoint read once.

    averages: see `optim.stored_averages`.
    """
    target_of = {}  # {path in the checkpoint: its first target}
    for path, stored_path in stored_paths.items():
        target_of.setdefault(stored_path, manifest.with_sharding(targets[path]))
    if not target_of:
        return {}
    target_tree = {(*collection, *path.split("/")): leaf for path, leaf in target_of.items()}
    made_of = {path: averages.get(tuple(path.split("/")), ()) for path in target_of}
    for path, (z, b1) in ((path, leaves) for path, leaves in made_of.items() if leaves):
        target_tree |= {z: target_of[path], b1: _scalar_beside(target_of[path])}
    try:
        read = flatten_dict(arrays.read_state(folder, target_tree, partial=True))
    except Exception as error:  # orbax raises bare Exception too
        raise CheckpointError(
            f"{name}, item state, cannot be read: {manifest.explain(error)}"
        ) from error
    stored = {}
    for path, leaves in made_of.items():
        stored[path] = read[*collection, *path.split("/")]
        if leaves:
            stored[path] = jax.jit(optim.average)(stored[path], *(read[leaf] for leaf in leaves))
    values = {}
    for path, stored_path in stored_paths.items():
        target = manifest.with_sharding(targets[path])
        value = stored[stored_path].astype(target.dtype)
        values[path] = jax.device_put(value, target.sharding)
    return values


def _scalar_beside(target):
    """The shape of a float32 scalar on the devices of a target."""
    mesh = getattr(target.sharding, "mesh", None)
    layout = target.sharding if mesh is None else sharding.replicated(mesh)
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=layout)
