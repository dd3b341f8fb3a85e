"""The arrays of checkpoints: orbax's part, nested dicts by path and vocabulary padding.

States are stored as nested dicts. Dataclasses, named tuples and empty nodes get their structure
from the target of a restore.
"""

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from efx.checkpoint import manifest
from efx.parallel.sharding import path_names

_COMMIT_SECONDS = 3600  # for one save in the background, hashing included
_REPLICA_BYTES = 2**20
# {end of the path of a parameter or its optimizer moment: axis of token ids}
VOCABULARY = {("embed", "embedding"): 0, ("head", "kernel"): 1}


def leaves_by_path(tree):
    """Return {tuple of strings: leaf} of any pytree."""
    return {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# ---- writing ----------------------------------------------------------------------------------


def save_arguments(state, data_state, meta):
    """Return a state, its data position and metadata as arguments of the manager's `save`."""
    leaves = {path: _without_replicas(leaf) for path, leaf in leaves_by_path(state).items()}
    return ocp.args.Composite(
        state=ocp.args.StandardSave(unflatten_dict(leaves)),
        data=ocp.args.JsonSave(data_state),
        meta=ocp.args.JsonSave(meta),
    )


def _without_replicas(leaf):
    """Return the copy of one device of a small array that is replicated on this process.

    Orbax would cut it into a piece a device, with one compiled program a shape and piece.
    """
    is_small_replica = (
        isinstance(leaf, jax.Array)
        and jax.process_count() == 1
        and leaf.is_fully_replicated
        and leaf.nbytes < _REPLICA_BYTES
    )
    return leaf.addressable_data(0) if is_small_replica else leaf


def make_manager(root, preservation_policy, record_failure, before_commit):
    """Return orbax's manager of the checkpoints in `root`, which deletes unfinished ones.

    Args:
      preservation_policy: decides which steps to keep.
      record_failure: makes a context that records an error of a background thread.
      before_commit: function of the directory of a step, which process 0 calls in the background
        when all files are written.
    """
    state_handler = _StateHandler(record_failure)
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.StandardSave, state_handler)
    for item in ("data", "meta"):
        handlers.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    background = ocp.AsyncOptions(
        timeout_secs=_COMMIT_SECONDS,
        post_finalization_callback=lambda: before_commit(state_handler.step_directory),
    )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=preservation_policy,
        cleanup_tmp_directories=True,
        async_options=background,
    )
    return _Manager(root, handler_registry=handlers, options=options)


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without its check for a preemption.

    JAX counts the checks of a process, and orbax counts steps: after a resume the processes would
    agree on a step that is as many steps too late.
    """

    def reached_preemption(self, step):
        return False


class _StateHandler(ocp.StandardCheckpointHandler):
    """Orbax's handler of arrays; each process then hashes the files that it has written.

    Attributes:
      step_directory: of the save in progress, under its temporary name.
    """

    def __init__(self, record_failure):
        super().__init__()
        self._record_failure = record_failure
        self.step_directory = None

    async def async_save(self, directory, *arguments, **options):
        futures = await super().async_save(directory, *arguments, **options)
        if not hasattr(directory, "iterdir"):  # orbax's path of a directory that is being made
            directory = directory.path
        self.step_directory = directory.parent
        return [_HashAfterWrite(directory, futures or [], self._record_failure)]


class _HashAfterWrite:
    """A future of orbax, whose background thread calls `result` on every process."""

    def __init__(self, directory, futures, record_failure):
        self._directory, self._futures = directory, futures
        self._record_failure = record_failure

    def result(self, timeout=None):
        with self._record_failure():
            for future in self._futures:
                future.result(timeout)
            manifest.write_digests(self._directory, "state")


# ---- reading ----------------------------------------------------------------------------------


def read_metadata(folder):
    """Return {path: shape and dtype} of the arrays of a step."""
    return leaves_by_path(ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree)


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
        return leaves_by_path(reader.restore(folder / "state", args=arguments))


def with_sharding(leaf):
    """Return a leaf as a ShapeDtypeStruct with a sharding, by default of the first local device."""
    sharding = getattr(leaf, "sharding", None)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def shapes_match(path, stored_shape, target_shape, vocab_size):
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
