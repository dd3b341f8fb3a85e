"""Checkpointer: a thin adapter on orbax that adds checksums, retention and one-line errors.

    root/STEP/state/              train state as a nested dict of arrays (orbax, OCDBT; `arrays`)
    root/STEP/data/, meta/        position in the data and free metadata, JSON
    root/STEP/efx_manifest.json   size and SHA-256 of every file above

The manifest is written into orbax's temporary folder just before the folder gets its final name: a
step that exists under its number is whole, or was damaged afterwards. Orbax itself restores wrong
values from flipped bytes without a word, and takes an empty folder for the latest step; both are
caught here.

With several processes every method is called by all of them, on a shared file system. Each hashes
the arrays that it has written, process 0 all else, and writes the manifest; each process verifies
its share of the files.
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax

from efx import io
from efx.checkpoint import arrays, manifest
from efx.checkpoint.manifest import CheckpointError, Damage, warn
from efx.errors import UsageError
from efx.parallel.sharding import path_names
from efx.parallel.signals import Beside
from efx.run_dir import Home

_COMMIT_TIMEOUT = 3600  # seconds for one save in the background, hashing included


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint."""

    step: int
    state: Any
    data_state: dict
    meta: dict


class Checkpointer:
    """Saves and restores one run's checkpoints. A context manager: leaving it finishes the save.

    Args:
      root: folder of the checkpoints; made at the first save, in a folder that has to be there.
        Nothing in it is changed before that, so reading the run of another process is safe.
      every: save at multiples of this step; 0: only when forced.
      keep_last: this many newest steps are kept (>= 1).
      keep_best: and this many with the lowest score (0: none).
      scores: {step: number or None}; a step without a finite one is never the best. The caller may
        add scores at any time.
      asynchronous: `save` returns when the state is copied, and writes in the background.
    """

    def __init__(self, root, *, every, keep_last, keep_best, scores, asynchronous):
        self._root = manifest.as_root(root)
        self._every, self._asynchronous = every, asynchronous
        self._keep_last, self._keep_best = keep_last, keep_best
        self._scores = scores
        self._manager = None  # orbax's, made at the first save: it cleans up when it is made
        self._saving = None  # the step of the save under way
        self._failure = None  # the error of a write that this process has met in the background
        self._has_failed = False
        self._home = Home(self._root.parent)
        self._damaged = set()  # steps that `restore` skipped
        manifest.quieten()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.close()
        except CheckpointError as problem:
            if kind is None:
                raise
            warn(str(problem))  # the error that is being raised is the one to report

    def steps(self):
        """Finished steps in increasing order; unfinished folders and known damage left out."""
        return [s for s in manifest.finished_steps(self._root) if s not in self._damaged]

    def latest_step(self):
        """The newest finished step that process 0 sees, or None."""
        step = manifest.from_primary(max(self.steps(), default=-1))
        return None if step < 0 else step

    def best_step(self):
        """The finished step with the lowest finite score, of equals the newest; or None."""
        return next(iter(self._from_the_best(self.steps())), None)

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step, state, data_state, meta, force=False):
        """Starts saving `step`; True if it did, False if it is not due or already saved.

        Args:
          state: pytree of arrays. It may be donated as soon as this returns.
          data_state, meta: JSON-able dicts; those of process 0 count.
          force: save though `step` is not a multiple of `every`.

        Waits for the previous save only if that is still being written when a new one is due.
        Raises CheckpointError if an earlier save or this one has failed.
        """
        step = int(step)
        self.check()
        if not force and (not self._every or step % self._every):
            return False
        self.wait()
        if manifest.from_primary(step in self.steps()):
            return False
        items = arrays.items(state, data_state, meta)
        self._saving = step
        try:
            self._check_home()
            self._rename_unusable(step)
            self._manager = self._manager or arrays.manager(
                self._root,
                preservation_policy=self,  # see should_preserve
                noting=self._noting_failure,
                before_commit=self._write_manifest,
                timeout=_COMMIT_TIMEOUT,
            )
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._save_failed(error) from error
        if not self._asynchronous:
            self.wait()
        return True

    def check(self):
        """Raises CheckpointError if the save in the background has failed; never waits.

        Costs microseconds: call it at every step, or a full disk is only noticed at the next
        save.
        """
        if self._saving is None:
            return
        if self._failure is not None or not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self):
        """Waits until the save under way is on disk. Raises CheckpointError if it failed."""
        if self._saving is None:
            return
        try:
            if jax.process_count() == 1:
                self._manager.wait_until_finished()
            else:
                self._wait_unless_failed()
        except Exception as error:
            raise self._save_failed(error) from error
        self._saving = None

    def _wait_unless_failed(self):
        """As orbax waits; but a process whose own write has failed has no need to wait until the
        others, for whose writes orbax waits then, have waited for it in vain."""
        waiting = Beside(self._manager.wait_until_finished)
        while not waiting.wait(0.1):
            if self._failure is not None:
                raise self._failure
        waiting.result()

    def close(self):
        """Waits, then frees orbax's threads. The object can be used again afterwards."""
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            # Of several processes one that has failed ends; orbax's threads may wait for others.
            if manager is not None and not (self._has_failed and jax.process_count() > 1):
                try:
                    manager.close()
                except Exception as error:
                    # Of a save that has failed, orbax may raise the error again here.
                    if not self._has_failed:
                        raise CheckpointError(
                            f"the checkpoints in {self._root} could not be closed: "
                            f"{manifest.explain(error)}"
                        ) from error

    def _save_failed(self, error):
        step, self._saving, self._failure, self._has_failed = self._saving, None, None, True
        kind = manifest.Passing if manifest.may_pass(error, self._root) else CheckpointError
        return kind(
            f"checkpoint {step} could not be saved in {self._root}: {manifest.explain(error)}; fix"
            " this and rerun "
            "the command to resume from the previous checkpoint"
        )

    @contextlib.contextmanager
    def _noting_failure(self):
        """For orbax's threads, whose errors orbax tells late."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _check_home(self):
        if not io.is_remote(self._root):
            self._home.check()

    def _rename_unusable(self, step):
        """Renames folders that saving would collide with; deletes nothing.

        These are the damaged steps that `restore` skipped (they would be the latest again next
        time) and an unfinished folder with the number of the step to be saved.
        """
        doomed = sorted((self._damaged | {step}) & manifest.numbered(self._root))
        if not manifest.from_primary(bool(doomed)):
            return
        if jax.process_index() == 0:
            existing_names = {path.name for path in self._root.iterdir()}
            for number in doomed:
                candidates = [
                    f"damaged_{number}",
                    *(f"damaged_{number}_{i}" for i in range(2, 1000)),
                ]
                name = next(name for name in candidates if name not in existing_names)
                io.rename_folder(self._root / str(number), self._root / name)
                warn(f"checkpoint {number} in {self._root} is not usable; renamed it to {name}")
        manifest.barrier("efx_checkpoint_rename_unusable")
        self._damaged.clear()
        if self._manager is not None:
            self._manager.reload()

    def _write_manifest(self):
        """Runs in orbax's background thread on process 0, between the last write and the commit."""
        with self._noting_failure():
            self._check_home()
            step = self._saving
            names = [p.name for p in self._root.iterdir() if p.name.split(".")[0] == str(step)]
            # If committing is not a rename (object stores) the folder has its final name already.
            temporary = [name for name in names if arrays.TEMPORARY in name]
            manifest.write_manifest(self._root / (temporary or names)[0], step)

    def should_preserve(self, checkpoints, *, context):
        """Which of `checkpoints` (in the order of saving) to keep; orbax deletes the others.

        Orbax's own LatestN and BestN count empty folders, and the score of a step is known only
        after its save. Orbax asks when a save starts and deletes after it is committed.
        """
        del context
        steps = [info.step for info in checkpoints]
        saving = self._saving
        usable = {s for s in steps if s == saving or manifest.is_finished(self._root / str(s))}
        # A folder that is not one of these checkpoints is never deleted.
        keep = (set(steps) - usable) | set(sorted(usable)[-self._keep_last :]) | {saving}
        keep.update(self._from_the_best(usable)[: self._keep_best])
        return [step in keep for step in steps]

    def _from_the_best(self, steps):
        """Those of the steps that have a finite score: the lowest first, of equals the newest."""
        scores = {step: self._scores.get(step) for step in steps}
        finite = [s for s in scores if scores[s] is not None and math.isfinite(scores[s])]
        return sorted(finite, key=lambda s: (scores[s], -s))

    # ---- restoring -------------------------------------------------------------------------------

    def restore(self, abstract_state, step=None, on_damage="error", vocab_size=0, whole=True):
        """Reads a checkpoint back, verified against its checksums.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct with shardings, of any mesh (without a
            sharding: the first local device).
          step: None: the newest.
          on_damage: what to do if the newest is damaged: "error", or "fall_back" to the newest
            sound one with a warning. A step given by number is never replaced by another.
          vocab_size: of the model; 0: tables of a vocabulary have to be padded as they were.
          whole: True: the checkpoint holds `abstract_state` and nothing else; False: the rest of
            it is not read.

        Returns: Restored.
        Raises: CheckpointError.
        """
        self.wait()
        finished = self.steps()
        for number in sorted(manifest.numbered(self._root) - set(finished) - self._damaged):
            warn(f"{self._root / str(number)} is not a finished checkpoint; ignoring it")
        by_number = step is not None

        def read(step):
            while True:
                try:
                    manifest.verify(self._root / str(step))
                    return self._read(step, abstract_state, vocab_size, whole)
                except Damage as damage:
                    older = [s for s in self.steps() if s < step]
                    fall_back = on_damage == "fall_back" and not by_number and older
                    line = f"checkpoint {step} in {self._root} is damaged: {damage}"
                    if not fall_back:
                        advice = self._advice(older, by_number)
                        raise CheckpointError(f"{line}; {advice}") from damage
                    self._damaged.add(step)
                    warn(f"{line}; going back to checkpoint {older[-1]}")
                    step = manifest.from_primary(older[-1])

        return manifest.read_step(self._root, self.steps, step, read)

    def _advice(self, older, by_number):
        """What a user can do about a damaged step; `older`: the finished steps before it."""
        for candidate in reversed(older):
            try:
                manifest.verify(self._root / str(candidate))
            except Damage:
                continue
            if by_number:
                return f"checkpoint {candidate}, the one before it, is intact"
            return (
                f"checkpoint {candidate}, the one before it, is intact: resume from it with "
                "--config.checkpoint.on_damage=fall_back, or restore the folder from a backup"
            )
        return "no earlier checkpoint is intact: restore one from a backup, or start a new run"

    def _read(self, step, abstract_state, vocab_size, whole):
        name, folder = f"checkpoint {step} in {self._root}", self._root / str(step)
        targets = {
            path: manifest.with_sharding(leaf)
            for path, leaf in manifest.flatten(abstract_state).items()
        }
        try:
            stored = arrays.read_metadata(folder)
            if not whole:
                stored = {path: leaf for path, leaf in stored.items() if path in targets}
            _check_fit(name, stored, targets, vocab_size)
            items = arrays.read_items(folder, targets, partial=not whole)
        except UsageError:
            raise
        except Exception as error:  # orbax raises bare Exception too
            raise CheckpointError(
                f"{name} could not be read, but its checksums are right: {manifest.explain(error)}"
            ) from error
        leaves = manifest.flatten(items.state)
        paths, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
        state = structure.unflatten(leaves[path_names(path)] for path, _ in paths)
        return Restored(step, state, items.data, items.meta)


def _check_fit(name, stored, targets, vocab_size):
    """Raises CheckpointError unless both have the same paths and dtypes, and shapes that fit."""
    differences = []
    for path in sorted(stored.keys() | targets.keys()):
        leaves = stored.get(path), targets.get(path)
        if leaves[0] is None or leaves[1] is None or leaves[0].dtype != leaves[1].dtype:
            fit = False
        else:
            fit = manifest.fits(path, leaves[0].shape, leaves[1].shape, vocab_size)
        if not fit:
            stored_kind, target_kind = (
                "absent" if leaf is None else manifest.dtype_and_shape(leaf) for leaf in leaves
            )
            differences.append(f"state/{'/'.join(path)} is {stored_kind} there, {target_kind} here")
    if differences:
        raise CheckpointError(
            f"{name} does not match the config: {manifest.abridged(differences)}; use the config "
            "of the run, or another --workdir"
        )
