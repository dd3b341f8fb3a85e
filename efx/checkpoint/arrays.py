"""What of checkpoints orbax does: writing and reading arrays."""

import json

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from efx.checkpoint import manifest

TEMPORARY = ocp.utils.TMP_DIR_SUFFIX  # in the names of folders that are not finished
_WORTH_CUTTING = 2**20  # bytes of an array whose copies on several devices are read in parallel


# ---- writing ---------------------------------------------------------------------------------


def items(state, data_state, meta):
    """A whole state as orbax's arguments. data_state, meta: JSON-able, or this is a TypeError."""
    leaves = {path: _of_one_device(leaf) for path, leaf in manifest.flatten(state).items()}
    return ocp.args.Composite(
        state=ocp.args.StandardSave(unflatten_dict(leaves)),
        # Through JSON here, so that a wrong type is an error now and not in the background.
        data=ocp.args.JsonSave(json.loads(json.dumps(data_state))),
        meta=ocp.args.JsonSave(json.loads(json.dumps(meta))),
    )


def _of_one_device(leaf):
    """A small array that every device of this process has, as that of one of them: orbax would cut
    it into a piece a device, by a program for each shape and piece."""
    copies = isinstance(leaf, jax.Array) and jax.process_count() == 1 and leaf.is_fully_replicated
    return leaf.addressable_data(0) if copies and leaf.nbytes < _WORTH_CUTTING else leaf


def manager(root, *, preservation_policy, noting, before_commit, timeout):
    """Orbax's manager of the checkpoints in a folder, which it cleans up.

    Args:
      noting: makes a context that notes an error of what is done in it, in the background.
      before_commit: called by process 0 in the background, when all is written.
      timeout: seconds for one save in the background.
    """
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.StandardSave, _StateHandler(noting))
    for item in ("data", "meta"):
        handlers.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return _Manager(
        root,
        handler_registry=handlers,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                timeout_secs=timeout, post_finalization_callback=before_commit
            ),
        ),
    )


class _Manager(ocp.CheckpointManager):
    """Orbax's own, which leaves the notice of a preemption alone.

    JAX counts the calls of all who ask for it in one place, and orbax asks by the number of the
    step: of a run that was gone on from, the processes would agree to stop as many calls later.
    """

    def reached_preemption(self, step):
        return False


class _StateHandler(ocp.StandardCheckpointHandler):
    """Orbax's own; each process then hashes what it has written, before process 0 goes on.

    noting: see `manager`.
    """

    def __init__(self, noting):
        super().__init__()
        self._noting = noting

    async def async_save(self, directory, *arguments, **options):
        futures = await super().async_save(directory, *arguments, **options)
        return [_OwnDigests(directory, futures or [], self._noting)]


class _OwnDigests:
    """The future of a save: orbax asks for its result in the background, in every process."""

    def __init__(self, directory, futures, noting):
        self._directory, self._futures, self._noting = directory, futures, noting

    def result(self, timeout=None):
        with self._noting():
            for future in self._futures:
                future.result(timeout)
            is_path = hasattr(self._directory, "iterdir")  # or one that is still being made
            manifest.write_own_digests(
                self._directory if is_path else self._directory.path, "state"
            )


# ---- reading ---------------------------------------------------------------------------------


def read_metadata(folder):
    """{path: shape and dtype} of the arrays in a step's `state`."""
    handler = ocp.PyTreeCheckpointHandler()
    return manifest.flatten(handler.metadata(folder / "state").tree)


def read_state(folder, targets, partial):
    """A step's `state` as a nested dict, without a manager that owns the folder.

    Args:
      targets: {path: jax.ShapeDtypeStruct with a sharding}.
      partial: whether the checkpoint holds more.
    """
    return _read(folder, state=_arguments(targets, partial)).state


def read_items(folder, targets, partial):
    """A step's state, data and meta, each a nested dict. Arguments: as of `read_state`."""
    json_items = dict(data=ocp.args.JsonRestore(), meta=ocp.args.JsonRestore())
    return _read(folder, state=_arguments(targets, partial), **json_items)


def _read(folder, **arguments):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(folder, args=ocp.args.Composite(**arguments))


def _arguments(targets, partial):
    target_tree = unflatten_dict(targets)
    if not partial:
        return ocp.args.StandardRestore(target_tree, strict=False)
    return ocp.args.PyTreeRestore(
        target_tree,
        partial_restore=True,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target_tree, strict=False),
    )
