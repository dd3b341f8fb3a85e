"""The sparse ensemble of cBTM: the experts of a folder, and the mixture of their predictions.

    p(x | context) = sum_e w_e p_e(x | context),    w_e ~ exp(-||h(context) - mu_e||^2 / tau),

the weights outside the top k put to zero and the others renormalised (section 2.4 of the paper).
All of it in float32 and in log space.
"""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp

from efx import io, models, run_dir
from efx.checkpoint import fingerprint, manifest, restore_params
from efx.composition import CLUSTERS, SEED, documents_file, expert_folder
from efx.composition.clustering import Clustering
from efx.config import schema
from efx.config.load import config_of_run, to_config
from efx.data import load_tokenizer
from efx.data.subset import Subset
from efx.errors import UsageError
from efx.layers.moe import largest_indices
from efx.run_dir import TOKENIZER_FILE
from efx.train import setup

# What experts have in common, but for how it is computed: parameters of one shape may be those of
# several models.
_OF_THE_MODEL = r"model\.(?!(remat|attention\.(chunk|kernel))$).*|adapter\..*|data\.seq_len"


@functools.partial(jax.jit, static_argnames="top_k")
def log_weights(distances_BE, tau, top_k):
    """log w [B, E] from squared distances [B, E]; -inf for the experts outside the top k.

    Of equally near experts the first are chosen. tau > 0; 1 <= top_k <= E.
    """
    scores_BE = -distances_BE.astype(jnp.float32) / tau
    best_BC = largest_indices(scores_BE, top_k)
    chosen_BE = jnp.any(jax.nn.one_hot(best_BC, scores_BE.shape[1], dtype=bool), axis=1)
    return jax.nn.log_softmax(jnp.where(chosen_BE, scores_BE, -jnp.inf), axis=-1)


@jax.jit
def mix(log_probs_BE, log_weights_BE):
    """log of sum_e w_e p_e [B], from log p_e [B, E] of one token each."""
    return jax.nn.logsumexp(log_probs_BE + log_weights_BE, axis=-1)


def mix_logits(logits_BEV, log_weights_BE):
    """log p [B, V] of every next token, from the experts' logits [B, E, V]."""
    log_probs_BEV = jax.nn.log_softmax(logits_BEV.astype(jnp.float32), axis=-1)
    return jax.nn.logsumexp(log_probs_BEV + log_weights_BE[:, :, None], axis=1)


class Ensemble:
    """The experts of a folder, checked; their parameters are read by `load_expert`.

    Experts are recognised by contents, not by paths: a run records the parameters that it started
    from and the documents that it trained on (run.json).

    Args:
      config: `Config` of the ensemble: its mesh is used, and its `data` names the held-out text.
      step: None; experts have steps of their own.
    Attributes:
      clustering: Clustering.
      members: for each expert the Subset of the training documents that are its cluster.
      folders: the run directory of each expert.
      tokenizer: that of all experts.

    Raises UsageError: an expert that is missing, or that does not belong to the others.
    """

    def __init__(self, config, workdir, step=None):
        if step is not None:
            raise UsageError(
                f"--step={step}: does not apply to the experts of {workdir}, each "
                "at its own step; leave it out"
            )
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
        origins = [self._check(j, folder) for j, folder in enumerate(self.folders)]
        self._origin = origins[0]
        self.tokenizer = load_tokenizer(self.folders[0] / TOKENIZER_FILE)
        for j, (folder, origin) in enumerate(zip(self.folders, origins, strict=True)):
            expert = f"expert {j} of {self.count} ({folder})"
            if load_tokenizer(folder / TOKENIZER_FILE).fingerprint != self.tokenizer.fingerprint:
                raise UsageError(
                    f"{expert}: its vocabulary differs from that of expert 0; experts of one "
                    "ensemble need the same tokenizer.json"
                )
            if other := _other_settings(self.folders[0], folder):
                raise UsageError(
                    f"{expert}: its model differs from that of expert 0: config.{other}; train "
                    "it again in an empty folder"
                )
            if origin["parameters"] != self._origin["parameters"]:
                raise UsageError(
                    f"{expert}: its seed model ({origin['run']} at step {origin['step']}) "
                    f"differs from that of expert 0 ({self._origin['run']} at step "
                    f"{self._origin['step']}); train it again in an empty folder"
                )

    def _check(self, j, folder):
        """The origin of expert j: {"run", "step", "parameters": their hash}."""
        expert = f"expert {j} of {self.count}"
        steps = manifest.finished_steps(manifest.as_root(folder / run_dir.CHECKPOINTS))
        if not (folder / run_dir.CONFIG_FILE).is_file() or not steps:
            raise UsageError(
                f"{expert} is missing: {folder} has no finished checkpoint; train it, or run "
                f"python -m efx.composition.cbtm to train all missing experts in {self.workdir}"
            )
        record = run_dir.run_record(folder)
        if record.get("subset") != self.members[j].key:
            raise UsageError(
                f"{expert} ({folder}) was not trained on cluster {j} of "
                f"{self.workdir / CLUSTERS}; train it again in an empty folder"
            )
        if "origin" not in record:
            raise UsageError(
                f"{expert} ({folder}) was not started from a seed model; set config.init.run "
                "and train it again"
            )
        total_steps = run_dir.recorded_setting(folder, "steps")
        if steps[-1] < total_steps:
            message = f"efx: expert {j} is not finished: step {steps[-1]} of {total_steps}"
            print(message, file=sys.stderr)
        return record["origin"]

    def load_expert(self, j, splits=()):
        """(Experiment, step, parameters, variables) of expert j."""
        return load_run(self.folders[j], self._config, splits)

    @functools.cached_property
    def seed_folder(self):
        """The seed model's run directory, or None if it is not on this machine."""
        for folder in (self.workdir / SEED, pathlib.Path(self._origin["run"])):
            root = folder / run_dir.CHECKPOINTS
            if not root.exists():
                continue
            model, step = self.load_expert(0)[0].model, self._origin["step"]
            if step in manifest.finished_steps(manifest.as_root(root)):
                shapes = models.unboxed_shapes(model)["params"]
                size = model.vocab_size
                params, _ = restore_params(root, shapes, step, vocab_size=size)
                if fingerprint(params, size) == self._origin["parameters"]:
                    return folder
            raise UsageError(
                f"{folder} is not the seed model of the experts ({self._origin['run']} at step "
                f"{step}); put the right one there, or none"
            )
        return None


def _other_settings(folder, other):
    """The first setting that makes the model of a run another one than that of `folder`, and what
    it is in both; "" without any."""
    here, there = (config_of_run(run).to_dict() for run in (folder, other))
    for key, (ours, theirs) in run_dir.differences(here, there, _OF_THE_MODEL).items():
        return f"{key}={theirs!r} instead of {ours!r}"
    return ""


def load_run(folder, config, splits=()):
    """`build.finished` of a run that another machine may have made, on the mesh of `config` and
    with the text of `config.data`, in rows and batches like those of that run."""
    run_config = to_config(config_of_run(folder))
    reading = {key: getattr(run_config.data, key) for key in ("seq_len", "batch_size", "packing")}
    changes = {
        "mesh": config.mesh,
        "rules": config.rules,
        "evaluate": config.evaluate,
        "data": dataclasses.replace(config.data, **reading, subset=""),
        "init.run": "",  # neither its subset nor its origin is needed to use it
    }
    return setup.finished(schema.replaced(run_config, changes), folder, splits=splits)
