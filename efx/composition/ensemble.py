"""The sparse ensemble of cBTM.

    p(x | context) = sum_e w_e p_e(x | context),    w_e ~ exp(-||h(context) - mu_e||^2 / tau),

with weights of the top k experts only, renormalised (section 2.4 of the paper). All in float32 and
log space.
"""

import dataclasses
import pathlib

import jax
import numpy as np
from scipy.special import log_softmax

from efx import io, run_dir
from efx.composition import CLUSTERS, SEED, documents_file, expert_folder
from efx.composition.clustering import Clustering
from efx.config import schema
from efx.config.load import config_of_run, to_config
from efx.data.held_out import Subset
from efx.errors import UsageError, warn
from efx.train import inference

# Settings that all experts share: the mixture is computed token by token.
_SHARED = r"(model|adapter)\..*|data\.(seq_len|packing)"


def log_weights(distances_BE, tau, top_k):
    """Return log w [B, E] of squared distances; -inf for experts outside the top k.

    Of equally near experts the first are selected.
    """
    scores_BE = -np.asarray(distances_BE, np.float32) / np.float32(tau)
    best_BC = np.argsort(-scores_BE, axis=-1, kind="stable")[:, :top_k]
    kept_BE = np.full_like(scores_BE, -np.inf)
    np.put_along_axis(kept_BE, best_BC, np.take_along_axis(scores_BE, best_BC, -1), -1)
    return log_softmax(kept_BE, axis=-1)


class Ensemble:
    """The experts of a working directory; `load_expert` reads their parameters.

    A run records a hash of the parameters that it started from and of the documents that it was
    trained on, so experts are recognised by contents, wherever they were trained.

    Args:
      config: `Config` of the ensemble: its mesh, and `data` with the held-out text.
      step: None; each expert has its own.
    Attributes:
      clustering: Clustering. count: number of experts. folders: their run directories.
      members: the Subset of the documents of each cluster.
      seed_folder, seed_step: the run directory of the seed model, None if it is not on this
        machine, and the step that the experts started from.

    Raises: UsageError if an expert is missing or does not belong to the others.
    """

    def __init__(self, config, workdir, step=None):
        if step is not None:
            raise UsageError(f"--step={step}: each expert has its own step; leave it out")
        if jax.process_count() > 1:
            raise UsageError("an ensemble runs in one process; start it without several processes")
        self.workdir, self.config = io.local_path(workdir), config
        self.clustering = Clustering.load(self.workdir / CLUSTERS)
        self.count, top_k = len(self.clustering.centres), config.ensemble.top_k
        if top_k > self.count:
            raise UsageError(
                f"config.ensemble.top_k={top_k}: must be at most {self.count}, the number of "
                "experts"
            )
        self.members = [Subset.load(documents_file(workdir, j)) for j in range(self.count)]
        self.folders = [expert_folder(workdir, j) for j in range(self.count)]
        records = [self._record(j) for j in range(self.count)]
        for j, record in enumerate(records):
            if problem := self._mismatch(j, record, records[0]):
                raise UsageError(
                    f"expert {j} of {self.count} ({self.folders[j]}) {problem}; train it again in "
                    "a new directory"
                )
        origin = records[0]["origin"]
        places = (self.workdir / SEED, pathlib.Path(origin["run"]))
        self.seed_folder = next((folder for folder in places if folder.is_dir()), None)
        self.seed_step = origin["step"]

    def _record(self, j):
        """Return the record in the newest checkpoint of expert j."""
        run = run_dir.RunDir(self.folders[j])
        if run.step is None:
            raise UsageError(
                f"expert {j} of {self.count} is missing: {self.folders[j]} has no checkpoint; "
                "python -m efx.composition.cbtm trains all missing experts"
            )
        if run.step < run.meta["last_step"]:
            warn(f"expert {j} has not finished: step {run.step} of {run.meta['last_step']}")
        return run.meta["record"]

    def _mismatch(self, j, record, first):
        """Return why expert j does not belong to its cluster or to the first expert, or ""."""
        origins = [(one.get("origin") or {}).get("parameters") for one in (record, first)]
        if record.get("subset") != self.members[j].key:
            return f"was not trained on cluster {j} of {self.workdir / CLUSTERS}"
        if None in origins or origins[0] != origins[1]:
            return "did not start from the seed model of expert 0 (config.init.run)"
        changed = run_dir.differences(first["config"], record["config"], _SHARED)
        listed = [f"config.{key}={value!r}" for key, (_, value) in changed.items()]
        return f"has another {', '.join(listed)} than expert 0" if changed else ""

    def load_expert(self, j, splits=()):
        """Return (Experiment, step, parameters, variables) of expert j."""
        return load_run(self.folders[j], self.config, splits=splits)


def load_run(folder, config, step=None, splits=()):
    """Return `inference.restore` of a run, on the mesh and with the text of `config`.

    The run may be from another machine. Rows and batches are as in its training.
    """
    run_config = to_config(config_of_run(folder))
    layout = {key: getattr(run_config.data, key) for key in ("seq_len", "batch_size", "packing")}
    changes = {
        "mesh": config.mesh,
        "rules": config.rules,
        "evaluate": config.evaluate,
        "data": dataclasses.replace(config.data, **layout, subset=""),
        "init.run": "",  # it may be on another machine
    }
    return inference.restore(schema.replaced(run_config, changes), folder, step, splits)
