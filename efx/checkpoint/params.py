"""Read the parameters of a checkpoint into a model that may differ from the saved one."""

import dataclasses
import functools
import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from efx.checkpoint import arrays, errors, manifest
from efx.checkpoint.errors import CheckpointError, Damage
from efx.run_dir import finished_steps


@dataclasses.dataclass(frozen=True)
class ParamsDiff:
    """Differences between the parameters of a model and of a checkpoint, by "/"-joined paths.

    Attributes:
      missing: in the model only, left unchanged. unexpected: in the checkpoint only, not read.
      renamed: pairs (path in the model, path in the checkpoint).
    """

    step: int
    loaded: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]

    def __str__(self):
        lines = [f"checkpoint {self.step}: {self.loaded} parameter arrays loaded"]
        lines += [f"  not in the checkpoint, left unchanged: {path}" for path in self.missing]
        lines += [f"  in the checkpoint, not used: {path}" for path in self.unexpected]
        lines += [f"  {path} from {source}" for path, source in self.renamed]
        return "\n".join(lines)


def restore_params(
    root,
    params,
    step=None,
    *,
    collection=("params",),
    missing="",
    unexpected="",
    rename=(),
    skip_other_shapes=False,
    vocab_size=0,
    prefix="",
):
    """Read parameters and verify the checksums of their checkpoint.

    Args:
      root: directory of the checkpoints of a run.
      params: nested dict of arrays, or of jax.ShapeDtypeStruct with shardings. A missing leaf is
        returned as it is.
      step: None: the newest.
      collection: path of the tree in the train state: ("params",) or ("variables", ...).
      missing: regex of whole paths that the checkpoint may lack; "": none.
      unexpected: regex of whole paths that only the checkpoint may have; "": none.
      rename: pairs (regex, replacement). The first regex that matches a whole path of `params`
        gives the path in the checkpoint. Several paths may have the same source.
      skip_other_shapes: whether an array of another shape counts as missing.
      vocab_size: of the model; 0: the vocabulary padding must be the same.
      prefix: of the flags of `missing`, `unexpected` and `rename`, for messages; "": no flags.

    Returns: (params with the dtypes and shardings of `params`, ParamsDiff).
    Raises: CheckpointError.
    """
    errors.silence_orbax()
    root = manifest.as_root(root)
    step = manifest.choose_step(root, finished_steps(root), step)
    folder, name = root / str(step), f"checkpoint {step} in {root}"
    try:
        manifest.verify(folder)
    except Damage as damage:
        raise CheckpointError(
            f"{name} is damaged: {damage}; use another step, or restore the directory from a backup"
        ) from damage
    with errors.read_errors(name):
        metadata = arrays.read_metadata(folder)
    depth = len(collection)
    stored = {
        "/".join(path[depth:]): leaf
        for path, leaf in metadata.items()
        if path[:depth] == collection
    }
    targets = flatten_dict(params, sep="/")
    sources = {path: _renamed(path, rename) for path in targets}
    loaded = {path: source for path, source in sources.items() if source in stored}
    if skip_other_shapes:
        loaded = {
            path: source
            for path, source in loaded.items()
            if tuple(stored[source].shape) == tuple(targets[path].shape)
        }
    absent = [path for path in targets if path not in loaded]
    extra = sorted(stored.keys() - set(sources.values()))
    _check_allowed(f"{name} lacks", absent, missing, prefix, "missing")
    _check_allowed(f"{name} has extra arrays", extra, unexpected, prefix, "unexpected")
    wrong = [
        f"{source} is {arrays.describe(stored[source])} there, {path} is "
        f"{arrays.describe(targets[path])} here"
        for path, source in loaded.items()
        if not arrays.shapes_match(
            path.split("/"), stored[source].shape, targets[path].shape, vocab_size
        )
    ]
    if wrong:
        raise CheckpointError(
            f"{name} does not fit: {errors.abridged(wrong)}; use a model of the same widths"
        )

    with errors.read_errors(name):
        values = _read(folder, loaded, targets, collection)
    diff = ParamsDiff(
        step=step,
        loaded=len(loaded),
        missing=tuple(absent),
        unexpected=tuple(extra),
        renamed=tuple((path, source) for path, source in loaded.items() if source != path),
    )
    return unflatten_dict({**targets, **values}, sep="/"), diff


def _renamed(path, rename):
    for pattern, replacement in rename:
        if match := re.fullmatch(pattern, path):
            return match.expand(replacement)
    return path


def _check_allowed(problem, paths, allowed, prefix, key):
    refused = [path for path in paths if not (allowed and re.fullmatch(allowed, path))]
    remedy = (
        f"; to allow this, set {prefix}{key} to a regex of these paths, or map the names with "
        f"{prefix}rename"
    )
    if refused:
        raise CheckpointError(f"{problem} {errors.abridged(refused)}{remedy if prefix else ''}")


def _read(folder, sources, targets, collection):
    """Return {path in the model: array}; each array of the checkpoint is read once.

    Args:
      sources: {path in the model: path in the checkpoint}.
    """
    layouts = {}  # {path in the checkpoint: its first target}
    for path, source in sources.items():
        layouts.setdefault(tuple(source.split("/")), arrays.with_sharding(targets[path]))
    to_read = {(*collection, *source): layout for source, layout in layouts.items()}
    read = arrays.read_state(folder, to_read) if to_read else {}
    values = {}
    for path, source in sources.items():
        value = read[*collection, *source.split("/")]
        target = arrays.with_sharding(targets[path])
        values[path] = jax.device_put(value.astype(target.dtype), target.sharding)
    return values


def fingerprint(params, vocab_size):
    """Return a hash of the names, shapes and values of parameters.

    It does not depend on their sharding, nor on vocabulary padding. Each array is reduced to two
    sums of its bits modulo 2^32, one of them weighted by position; integer sums do not depend on
    the order of their terms.
    """
    shapes = jax.eval_shape(functools.partial(_without_padding, vocab_size=vocab_size), params)
    sums = jax.device_get(_sums(params, vocab_size))
    lines = [f"{path} {shapes[path].shape} {sums[path].tolist()}" for path in sorted(sums)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


@functools.partial(jax.jit, static_argnums=1)
def _sums(params, vocab_size):
    return jax.tree.map(_two_sums, _without_padding(params, vocab_size))


def _without_padding(params, vocab_size):
    return {
        "/".join(path): arrays.without_padding(path, x, vocab_size)
        for path, x in flatten_dict(params).items()
    }


def _two_sums(x):
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # Positions in row-major order, without a reshape, which would gather a sharded array.
    position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position += np.uint32(stride) * index
        stride = stride * bits.shape[axis] % 2**32
    return jnp.stack([bits.sum(), (bits * (2 * position + 1)).sum()])
