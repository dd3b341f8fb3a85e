"""The sparse ensemble of cBTM.

    p(x | context) = sum_e w_e p_e(x | context),    w_e ~ exp(-||h(context) - mu_e||^2 / tau),

with weights of the top k experts only, renormalised (section 2.4 of the paper). All in float32 and
log space.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from efx import io, models, run_dir
from efx.checkpoint import fingerprint, manifest, restore_params
from efx.composition import CLUSTERS, SEED, documents_file, expert_folder
from efx.composition.clustering import Clustering
from efx.config import schema
from efx.config.load import config_of_run, to_config
from efx.data import load_tokenizer
from efx.data.subset import Subset
from efx.errors import UsageError, warn
from efx.run_dir import TOKENIZER_FILE
from efx.train import setup

# Settings that all experts share. Those of `remat`, `chunk` and `kernel` only change the speed.
_SHARED = r"model\.(?!(remat|attention\.(chunk|kernel))$).*|adapter\..*|data\.seq_len"


def log_weights(distances_BE, tau, top_k):
    """Return log w [B, E] of squared distances; -inf for experts outside the top k.

    Of equally near experts the first are chosen.
    """
    scores_BE = -np.asarray(distances_BE, np.float32) / np.float32(tau)
    best_BC = np.argsort(-scores_BE, axis=-1, kind="stable")[:, :top_k]
    kept_BE = np.full_like(scores_BE, -np.inf)
    np.put_along_axis(kept_BE, best_BC, np.take_along_axis(scores_BE, best_BC, -1), -1)
    return log_softmax(kept_BE, axis=-1)


def mix_logits(logits_BEV, log_weights_BE):
    """Return log p [B, V] of the next token, from the experts' logits."""
    log_probs_BEV = jax.nn.log_softmax(logits_BEV.astype(jnp.float32), axis=-1)
    return jax.nn.logsumexp(log_probs_BEV + log_weights_BE[:, :, None], axis=1)


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
      tokenizer: the experts' tokenizer.

    Raises: UsageError if an expert is missing or does not belong to the others.
    """

    def __init__(self, config, workdir, step=None):
        if step is not None:
            raise UsageError(f"--step={step}: each expert has its own step; leave it out")
        self.workdir, self._config = io.local_path(workdir), config
        self.clustering = Clustering.load(self.workdir / CLUSTERS)
        self.count = self.clustering.count
        if config.ensemble.top_k > self.count:
            raise UsageError(
                f"config.ensemble.top_k={config.ensemble.top_k}: must be at most {self.count}, "
                "the number of experts"
            )
        self.members = [Subset.load(documents_file(workdir, j)) for j in range(self.count)]
        self.folders = [expert_folder(workdir, j) for j in range(self.count)]
        for j in range(self.count):
            self._check(j)
        self.tokenizer = load_tokenizer(self.folders[0] / TOKENIZER_FILE)
        self._origin = run_dir.run_record(self.folders[0])["origin"]

    def _check(self, j):
        """Raise UsageError unless expert j has a checkpoint and belongs to its cluster and to
        expert 0."""
        folder, first = self.folders[j], self.folders[0]
        expert = f"expert {j} of {self.count}"
        steps = manifest.finished_steps(manifest.as_root(folder / run_dir.CHECKPOINTS))
        if not (folder / run_dir.CONFIG_FILE).is_file() or not steps:
            raise UsageError(
                f"{expert} is missing: {folder} has no finished checkpoint; train it, or run "
                "python -m efx.composition.cbtm to train all missing experts"
            )
        record, origin = run_dir.run_record(folder), run_dir.run_record(first).get("origin")
        tokenizers = [load_tokenizer(run / TOKENIZER_FILE).fingerprint for run in (first, folder)]
        settings = [config_of_run(run).to_dict() for run in (first, folder)]
        changed = run_dir.differences(*settings, _SHARED)
        problem = ""
        if record.get("subset") != self.members[j].key:
            problem = f"was not trained on cluster {j} of {self.workdir / CLUSTERS}"
        elif "origin" not in record:
            problem = "did not start from a seed model (config.init.run)"
        elif tokenizers[0] != tokenizers[1]:
            problem = "has another vocabulary than expert 0"
        elif changed:
            key, (ours, theirs) = next(iter(changed.items()))
            problem = f"has config.{key}={theirs!r}, expert 0 {ours!r}"
        elif record["origin"]["parameters"] != origin["parameters"]:
            theirs = record["origin"]
            problem = f"started from another seed model ({theirs['run']} at step {theirs['step']})"
        if problem:
            raise UsageError(f"{expert} ({folder}) {problem}; train it again in a new directory")
        if steps[-1] < (total := run_dir.recorded_setting(folder, "steps")):
            warn(f"expert {j} has not finished: step {steps[-1]} of {total}")

    def load_expert(self, j, splits=()):
        """Return (Experiment, step, parameters, variables) of expert j."""
        return load_run(self.folders[j], self._config, splits)

    def seed_folder(self):
        """Return the seed model's run directory, or None if it is not on this machine.

        Raises: UsageError if another run is in its place.
        """
        run, step = self._origin["run"], self._origin["step"]
        for folder in (self.workdir / SEED, pathlib.Path(run)):
            root = folder / run_dir.CHECKPOINTS
            if not root.exists():
                continue
            model = self.load_expert(0)[0].model
            if step in manifest.finished_steps(manifest.as_root(root)):
                shapes, size = models.unboxed_shapes(model)["params"], model.vocab_size
                params, _ = restore_params(root, shapes, step, vocab_size=size)
                if fingerprint(params, size) == self._origin["parameters"]:
                    return folder
            raise UsageError(
                f"{folder} is not the seed model of the experts ({run} at step {step}); put that "
                "run there, or none"
            )
        return None


def load_run(folder, config, splits=()):
    """Return `setup.finished` of a run, on the mesh and with the text of `config`.

    The run may be from another machine. Rows and batches are as in its training.
    """
    run_config = to_config(config_of_run(folder))
    layout = {key: getattr(run_config.data, key) for key in ("seq_len", "batch_size", "packing")}
    changes = {
        "mesh": config.mesh,
        "rules": config.rules,
        "evaluate": config.evaluate,
        "data": dataclasses.replace(config.data, **layout, subset=""),
        "init.run": "",  # not needed to use it
    }
    return setup.finished(schema.replaced(run_config, changes), folder, splits=splits)
