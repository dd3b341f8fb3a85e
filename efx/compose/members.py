"""A folder of experts: which there are, and whether they belong together.

    WORKDIR/clusters/      the clustering (`--mode=cluster`)
    WORKDIR/seed/          the run that all experts start from
    WORKDIR/expert_<j>/    the run that goes on from it on the documents of cluster j

Each is an ordinary run folder. What belongs together is told by contents, not by paths: a run
records the parameters that it started from and the clustering that it trained on (run.json).
"""

import functools
import pathlib

import jax

from efx import inference, runfolder
from efx import step as step_lib
from efx.checkpoint import files, fingerprint, restore_params
from efx.compose.clustering import ABOUT, Clustering
from efx.config import config_of_run
from efx.data import clusters, load_tokenizer
from efx.errors import UsageError
from efx.experiment import TOKENIZER_FILE

FOLDER, SEED = "clusters", "seed"


def expert_folder(workdir, j):
    return pathlib.Path(workdir) / f"expert_{j}"


def is_ensemble(workdir):
    """Whether a folder holds a clustering and is no run itself."""
    folder = pathlib.Path(workdir)
    return (folder / FOLDER / ABOUT).is_file() and not (folder / runfolder.CHECKPOINTS).exists()


class Ensemble:
    """The experts of a folder, checked; their parameters are read when they are asked for.

    Attributes:
      clustering: Clustering.
      folders: the run folder of each expert.
      origin: {"run", "step", "parameters"} of the seed model, as the experts recorded it.
      unfinished: [(number, step that it is at, steps)] of experts that still have steps to do.
      tokenizer: that of all experts.

    Raises UsageError: an expert that is missing, or that does not belong to the others.
    """

    def __init__(self, config, workdir):
        self.workdir, self._config = pathlib.Path(workdir), config
        self.clustering = Clustering.load(self.workdir / FOLDER)
        self.documents = clusters.Documents.load(self.workdir / FOLDER)
        check(config.ensemble, self.count)
        self.folders = [expert_folder(workdir, j) for j in range(self.count)]
        self.origin, self.unfinished = None, []
        for j, folder in enumerate(self.folders):
            self._check(j, folder)
        self.tokenizer = load_tokenizer(self.folders[0] / TOKENIZER_FILE)

    @property
    def count(self):
        return self.clustering.count

    def _check(self, j, folder):
        who = f"expert {j} of {self.count}"
        steps = files.finished_steps(files.as_root(folder / runfolder.CHECKPOINTS))
        if not (folder / runfolder.CONFIG_FILE).is_file() or not steps:
            raise UsageError(
                f"{who} is missing: {folder} has no finished checkpoint; train it, or let "
                f"python -m efx.studies.cbtm train all that are missing in {self.workdir}"
            )
        record = runfolder.recorded(folder)
        origin, members = record.get("origin"), record.get("members")
        if members != {"clustering": self.documents.clustering, "cluster": j}:
            raise UsageError(
                f"{who} ({folder}) was not trained on cluster {j} of the clustering in "
                f"{self.workdir / FOLDER}; train it anew in an empty folder"
            )
        if not origin:
            raise UsageError(
                f"{who} ({folder}) was not started from a seed model (config.init.run)"
            )
        wanted = runfolder.load_config(folder)["steps"]
        if steps[-1] < wanted:
            self.unfinished.append((j, steps[-1], wanted))
        if self.origin is None:
            self.origin = origin
            self._vocabulary = load_tokenizer(folder / TOKENIZER_FILE).fingerprint
        if load_tokenizer(folder / TOKENIZER_FILE).fingerprint != self._vocabulary:
            raise UsageError(
                f"{who} ({folder}) has another vocabulary than expert 0; experts of one ensemble "
                "share their tokenizer.json"
            )
        if origin["parameters"] != self.origin["parameters"]:
            raise UsageError(
                f"{who} ({folder}) was started from another seed model ({origin['run']} at step "
                f"{origin['step']}) than expert 0 ({self.origin['run']} at step "
                f"{self.origin['step']}); train it anew in an empty folder"
            )

    def restore(self, j):
        """(Experiment, step, parameters, variables) of expert j."""
        return restore(self.folders[j], self._config)

    @functools.cached_property
    def seed_folder(self):
        """The seed model's run folder, or None where it is not on this machine."""
        for folder in (self.workdir / SEED, pathlib.Path(self.origin["run"])):
            root = folder / runfolder.CHECKPOINTS
            if not root.exists():
                continue
            experiment, *_ = self.restore(0)
            shapes = jax.eval_shape(lambda m=experiment.model: step_lib.init_state_params(m))
            step = self.origin["step"]
            if step in files.finished_steps(files.as_root(root)):
                vocab_size = experiment.model.vocab_size
                params, _ = restore_params(root, shapes, step, report=None, vocab_size=vocab_size)
                if fingerprint(params, vocab_size) == self.origin["parameters"]:
                    return folder
            raise UsageError(
                f"{folder} is not the seed model that the experts were started from "
                f"({self.origin['run']} at step {step}); put that one there, or none"
            )
        return None


def restore(folder, config, step=None):
    """`inference.restore` of a run that may have been made elsewhere, on the mesh of `config`."""
    own = config_of_run(folder)
    own.mesh, own.rules = config.mesh, config.rules
    own.data.cache_dir, own.evaluate = config.data.cache_dir, config.evaluate
    # What it was trained on and from is not needed to use it.
    own.data.clusters, own.data.cluster, own.init.run = "", -1, ""
    return inference.restore(own, folder, step)


def check(config, count):
    """Raises UsageError unless a `config.ensemble` block fits `count` experts."""
    if not config.tau > 0:
        raise UsageError(f"config.ensemble.tau={config.tau}: must be more than 0")
    if not 1 <= config.top_k <= count:
        raise UsageError(
            f"config.ensemble.top_k={config.top_k}: must be at least 1 and at most {count}, the "
            "number of experts"
        )
    if config.every < 1:
        raise UsageError(f"config.ensemble.every={config.every}: must be at least 1")
