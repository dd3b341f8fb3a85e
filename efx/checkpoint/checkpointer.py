"""Checkpointer: orbax with checksums, retention by score and one-line errors.

With several processes all of them call each method, on a shared file system. Each process hashes
the arrays that it has written; process 0 hashes the other files and writes the manifest.
"""

import contextlib
import dataclasses
import math
import time
from typing import Any

import jax

from efx import io
from efx.checkpoint import arrays, errors, manifest
from efx.checkpoint.errors import CheckpointError, Damage
from efx.errors import is_primary, warn
from efx.parallel import multihost
from efx.parallel.sharding import path_names
from efx.run_dir import CONFIG_FILE, amend_launch, checkpoint_steps, finished_steps, is_finished


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint."""

    step: int
    state: Any
    data_state: dict
    meta: dict


class Checkpointer:
    """Saves and restores the checkpoints of one run. A context manager, which finishes the save.

    Args:
      root: directory of the checkpoints. The first save makes it, in a directory that must exist.
        Nothing is changed before, so reading a run that another process trains is safe.
      keep_last: number of newest steps to keep, at least 1.
      keep_best: number of steps with the lowest scores to keep.
      scores: {step: number or None}, to which the caller may add. A step without a finite score is
        never among the best.
      asynchronous: `save` returns once the state is copied, and writes in the background.
    """

    def __init__(self, root, *, keep_last, keep_best, scores, asynchronous):
        errors.silence_orbax()
        self._root = manifest.as_root(root)
        self._asynchronous = asynchronous
        self._keep_last, self._keep_best, self._scores = keep_last, keep_best, scores
        self._manager = None  # orbax's, made at the first save because it deletes unfinished saves
        self._saving = None  # the step of the save in progress
        self._failure = None  # the error of that save on this process
        self._damaged = set()  # steps that `restore` has skipped
        self._has_config = False  # whether the run directory had its config.json

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.close()
        except CheckpointError as problem:
            if kind is None:
                raise
            warn(problem)  # the first error is the one to raise

    def steps(self):
        """Return the finished steps in increasing order, without those found damaged."""
        return [s for s in finished_steps(self._root) if s not in self._damaged]

    def latest_step(self):
        """Return the newest finished step that process 0 sees, or None."""
        step = multihost.from_primary(max(self.steps(), default=-1))
        return None if step < 0 else step

    def best_step(self):
        """Return the finished step with the lowest score, the newest of equals, or None."""
        return next(iter(self._by_score(self.steps())), None)

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step, state, data_state, meta):
        """Start to save a step, unless it is saved already.

        Waits for the previous save if that is still in progress.

        Args:
          state: pytree of arrays; it may be donated when this returns.
          data_state, meta: JSON-able dicts; those of process 0 are saved.
        Raises: CheckpointError if this save or the previous one has failed.
        """
        step = int(step)
        self.wait()
        if multihost.from_primary(step in self.steps()):
            return
        items = arrays.save_arguments(state, data_state, meta)
        self._saving = step
        try:
            self._check_run()
            self._rename_unusable(step)
            if self._manager is None:
                self._manager = arrays.make_manager(
                    self._root, self, self._record_failure, self._write_manifest
                )
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._fail(error) from error
        if not self._asynchronous:
            self.wait()

    def check(self):
        """Raise CheckpointError if the save in the background has failed. Never waits."""
        if self._saving is not None:
            if self._failure or not self._manager.is_saving_in_progress():
                self.wait()

    def wait(self):
        """Wait until the save in progress is on disk. Raises: CheckpointError."""
        if self._saving is None:
            return
        try:
            # After a failed write orbax would wait for the other processes, and they for this one.
            while jax.process_count() > 1 and self._manager.is_saving_in_progress():
                if self._failure:
                    raise self._failure
                time.sleep(0.01)
            self._manager.wait_until_finished()
            if is_primary():
                if not io.is_remote(self._root):
                    io.flush_names(self._root)
                # A later launch refuses a directory that has lost its checkpoints.
                amend_launch(self._root.parent, saved=self._saving)
        except Exception as error:
            raise self._fail(error) from error
        self._saving = None

    def close(self):
        """Wait for the save in progress and end orbax's threads."""
        self.wait()
        if self._manager:
            self._manager.close()
            self._manager = None

    def _fail(self, error):
        """Forget the failed save; return its CheckpointError."""
        step, self._saving, self._failure, self._manager = self._saving, None, None, None
        return errors.save_error(step, self._root, error)

    @contextlib.contextmanager
    def _record_failure(self):
        """Record an error of a background thread, which orbax reports late."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _check_run(self):
        """Raise OSError if the run directory was renamed, deleted or unmounted: orbax would make
        another one."""
        if io.is_remote(self._root):
            return
        config = self._root.parent / CONFIG_FILE
        config.parent.stat()
        self._has_config = self._has_config or config.exists()
        if self._has_config:
            config.stat()

    def _rename_unusable(self, step):
        """Rename damaged steps, and an unfinished directory with the name of the step to save."""
        unusable = (self._damaged | {step}) & {*checkpoint_steps(self._root)}
        if not multihost.from_primary(bool(unusable)):
            return
        if jax.process_index() == 0:
            for number in sorted(unusable):
                name = f"damaged_{number}"
                while (self._root / name).exists():
                    name += "_again"
                io.rename_folder(self._root / str(number), self._root / name)
                warn(f"checkpoint {number} in {self._root} is unusable; renamed it to {name}")
        multihost.barrier("efx_rename_unusable_checkpoints")
        self._damaged.clear()
        if self._manager:
            self._manager.reload()

    def _write_manifest(self, step_directory):
        """Write the manifest. Process 0 calls it in the background before orbax's commit."""
        with self._record_failure():
            self._check_run()
            manifest.write_manifest(step_directory)

    def should_preserve(self, checkpoints, *, context):
        """Decide for each checkpoint whether to keep it: orbax's protocol of a preservation policy.

        Orbax's own LatestN counts unfinished directories, and BestN needs the score of a step at
        its save.
        """
        steps = [info.step for info in checkpoints]
        finished = {s for s in steps if is_finished(self._root / str(s))}
        usable = finished | {self._saving}
        kept = {*sorted(usable)[-self._keep_last :], *self._by_score(usable)[: self._keep_best]}
        return [step in kept or step not in usable for step in steps]

    def _by_score(self, steps):
        """Return the steps with a finite score, the lowest first; of equals, the newest."""
        scores = {step: self._scores.get(step) for step in steps}
        finite = [s for s in steps if scores[s] is not None and math.isfinite(scores[s])]
        return sorted(finite, key=lambda step: (scores[step], -step))

    # ---- restoring -------------------------------------------------------------------------------

    def restore(self, abstract_state, step=None, on_damage="error", vocab_size=0, whole=True):
        """Read a checkpoint and verify its checksums.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct with shardings of any mesh (default: the
            first local device).
          step: None: the newest.
          on_damage: "error", or "fall_back" from a damaged newest step to the one before.
          vocab_size: of the model; 0: the vocabulary padding must be the same.
          whole: whether the checkpoint must have no other arrays.

        Returns: Restored.
        Raises: CheckpointError.
        """
        self.wait()
        for number in checkpoint_steps(self._root):
            if number not in self._damaged and number not in self.steps():
                warn(f"{self._root / str(number)} is not a finished checkpoint; ignoring it")
        while True:
            chosen = manifest.choose_step(self._root, self.steps(), step)
            name = f"checkpoint {chosen} in {self._root}"
            try:
                manifest.verify(self._root / str(chosen))
                return self._read(name, chosen, abstract_state, vocab_size, whole)
            except (CheckpointError, Damage) as problem:
                if jax.process_count() == 1 and chosen not in self.steps():
                    continue  # the run that trains beside this process has deleted it
                if isinstance(problem, CheckpointError):
                    raise
                self._skip_damaged(name, chosen, problem, step is None and on_damage == "fall_back")

    def _skip_damaged(self, name, step, damage, fall_back):
        """Exclude a damaged step, or raise CheckpointError unless there is an earlier one."""
        earlier = [s for s in self.steps() if s < step]
        if fall_back and earlier:
            self._damaged.add(step)
            warn(f"{name} is damaged: {damage}; falling back to checkpoint {earlier[-1]}")
            return
        remedy = "there is no earlier checkpoint: restore it from a backup, or start a new run"
        if earlier:
            remedy = (
                f"use checkpoint {earlier[-1]}, the one before it "
                "(--config.checkpoint.on_damage=fall_back resumes from it), or restore the "
                "directory from a backup"
            )
        raise CheckpointError(f"{name} is damaged: {damage}; {remedy}") from damage

    def _read(self, name, step, abstract_state, vocab_size, whole):
        folder = self._root / str(step)
        paths, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
        targets = {path_names(path): arrays.with_sharding(leaf) for path, leaf in paths}
        with errors.read_errors(name):
            stored = arrays.read_metadata(folder)
            if not whole:
                stored = {path: leaf for path, leaf in stored.items() if path in targets}
            _check_same_arrays(name, stored, targets, vocab_size)
            leaves = arrays.read_state(folder, targets)
            data_state, meta = (io.read_json(folder / i / "metadata") for i in ("data", "meta"))
        state = structure.unflatten(leaves[path] for path in targets)
        return Restored(step, state, data_state, meta)


def _check_same_arrays(name, stored, targets, vocab_size):
    """Raise CheckpointError unless both have the same paths and dtypes, and shapes that fit."""
    differences = []
    for path in sorted(stored.keys() | targets.keys()):
        there, here = stored.get(path), targets.get(path)
        is_same = there is not None and here is not None and there.dtype == here.dtype
        if not is_same or not arrays.shapes_match(path, there.shape, here.shape, vocab_size):
            differences.append(
                f"state/{'/'.join(path)} is {arrays.describe(there)} there, "
                f"{arrays.describe(here)} here"
            )
    if differences:
        raise CheckpointError(
            f"{name} does not match the config: {errors.abridged(differences)}; use the config of "
            "the run, or another --workdir"
        )
