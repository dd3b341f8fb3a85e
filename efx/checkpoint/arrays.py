"""Arrays of checkpoints: nested dicts by path, their vocabulary padding, and reading by orbax.

Orbax stores nested dicts only. Dataclasses, named tuples and empty nodes get their structure from
the target of a restore.
"""

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from efx.parallel.sharding import path_names

_REPLICA_BYTES = 2**20
# {end of the path of a parameter or its optimizer moment: axis of token ids}
VOCABULARY = {("embed", "embedding"): 0, ("head", "kernel"): 1}


def flatten(tree):
    """Return {tuple of strings: leaf} of any pytree."""
    return {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nested(state):
    """Return a state as the nested dict that orbax stores.

    Orbax would cut each replicated array into a piece a device, with one compiled program a shape
    and piece. Small arrays are therefore replaced by the copy of one device.
    """

    def stored(leaf):
        is_small_replica = (
            isinstance(leaf, jax.Array)
            and jax.process_count() == 1
            and leaf.is_fully_replicated
            and leaf.nbytes < _REPLICA_BYTES
        )
        return leaf.addressable_data(0) if is_small_replica else leaf

    return unflatten_dict({path: stored(leaf) for path, leaf in flatten(state).items()})


def read_metadata(folder):
    """Return {path: shape and dtype} of the arrays of a step."""
    return flatten(ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree)


def read_state(folder, targets):
    """Return {path: array} of a step, without a CheckpointManager that would change the directory.

    Args:
      targets: {path: jax.ShapeDtypeStruct with a sharding} of the arrays to read.
    """
    tree = unflatten_dict(targets)
    arguments = ocp.args.PyTreeRestore(
        tree,
        partial_restore=True,
        # Vocabulary padding is cut off or added.
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree, strict=False),
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return flatten(reader.restore(folder / "state", args=arguments))


def with_sharding(leaf):
    """Return a leaf as a ShapeDtypeStruct with a sharding, by default of the first local device."""
    sharding = getattr(leaf, "sharding", None)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def fits(path, stored_shape, target_shape, vocab_size):
    """Return whether an array can be read with another shape.

    Shapes may differ in the vocabulary padding only, which depends on the mesh and is zero.

    Args:
      vocab_size: without padding; 0: no shapes may differ.
    """
    axis = VOCABULARY.get(tuple(path[-2:]))
    stored, target = list(stored_shape), list(target_shape)
    if axis is not None and len(stored) == len(target) == 2 and vocab_size:
        if min(stored[axis], target[axis]) >= vocab_size:
            stored[axis] = target[axis] = vocab_size
    return stored == target


def without_padding(path, x, vocab_size):
    """Return a parameter without its vocabulary padding."""
    axis = VOCABULARY.get(tuple(path[-2:]))
    return x if axis is None else jax.lax.slice_in_dim(x, 0, vocab_size, axis=axis)


def describe(leaf):
    """Return dtype and shape, such as `float32[2,3]`; "absent" for None."""
    if leaf is None:
        return "absent"
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
