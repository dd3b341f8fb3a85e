"""Run directories whose checkpoint of step 0 has the parameters of a dense model."""

import contextlib
import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from efx import io, models, run_dir
from efx.config import schema
from efx.data.batches import state_at
from efx.errors import UsageError, is_primary
from efx.models.stack import convert_layers, scan_params
from efx.parallel import multihost, sharding
from efx.routing import parameters
from efx.train import inference, setup
from efx.train import step as step_lib


@dataclasses.dataclass(frozen=True)
class NewRun:
    """A run directory that is about to be written: `run_dir.OpenedRun` and its lock."""

    config: object
    files: run_dir.OpenedRun
    lock: run_dir.Lock

    def training(self, vocab_size):
        return setup.Training(setup.experiment_without_data(self.config, vocab_size))

    def write(self, state, files, **entries):
        """Write the run directory with the checkpoint of step 0.

        Args:
          state: `TrainState`. files, entries: see `run_dir.OpenedRun.commit`.
        """
        self.lock.take()
        record = self.files.commit(files, **entries)
        with inference.checkpointer(self.files.run.path, self.config.checkpoint) as checkpoints:
            meta = {"seconds": 0.0, "flops": {"nominal": 0.0, "realised": 0.0}, "record": record}
            checkpoints.save(0, state, state_at(0), meta)


@contextlib.contextmanager
def opened(workdir, config, command_line):
    """Yield a `NewRun`; after an error, such as a full disk, a new directory is removed.

    Raises: UsageError for a directory with a run.
    """
    multihost.check_shared(workdir)
    is_new_folder = not io.is_remote(workdir) and not io.folder(workdir).exists()
    with run_dir.Lock(workdir) as lock:
        files = run_dir.open_run(
            workdir, schema.as_dict(config), command_line=list(command_line), may_differ=(".*",)
        )
        if not files.is_new:
            raise UsageError(f"--workdir={workdir} has a run; use a new folder")
        try:
            yield NewRun(config, files, lock)
        except BaseException:
            if is_new_folder and is_primary():
                shutil.rmtree(workdir, ignore_errors=True)
            raise


def check_decoder(config, mode):
    """Raise UsageError unless a ConfigDict is one of a decoder."""
    if config.model.family != "decoder":
        raise UsageError(
            f"config.model.family={config.model.family!r}: --mode={mode} writes a decoder; use "
            "another --config"
        )


def check_inherited(config, settings):
    """Raise UsageError unless a `Config` has these settings, {key of config.model: value}.

    A shorter context is allowed, unless positions are learned.
    """
    model = run_dir.dotted(schema.as_dict(config.model))
    for key, value in settings.items():
        is_shorter = key == "context" and model["positions"] != "learned" and 0 < model[key] < value
        if model[key] != value and not is_shorter:
            raise UsageError(
                f"config.model.{key}={model[key]!r}: the model of --from has {value!r}"
            )


def initial_state(training, variables, routing=None):
    """`TrainState` of step 0 with the arrays of a dense model and new ones where it has none.

    Args:
      variables: of the dense model, unrolled.
      routing: as in `with_dense`.
    """
    e = training.experiment
    model = models.unrolled(e.model)

    def make(variables, seed):
        fresh = nn.unbox(models.init(model, jax.random.key(seed)))
        variables = with_dense(fresh, variables, routing)
        if e.model.config.scan_layers:
            variables = {
                name: convert_layers(scan_params, tree, e.model.specs())
                for name, tree in variables.items()
            }
        return step_lib.state_of(variables, training.optimizer)

    with sharding.use(e.mesh, e.rules):
        make = jax.jit(make, out_shardings=training.shardings)
        return make(variables, np.uint32(e.config.seed))


def with_dense(fresh, dense, routing=None):
    """`fresh` with the arrays of a dense model; those of routing and adapters remain.

    Args:
      fresh, dense: {collection: tree}, unrolled.
      routing: `DepthRoutingConfig` of a conversion, whose routers start as `parameters.TABLE` has
        it, so that the model equals the dense one at capacity 1. None: as the model initialises.
    """
    dense = {name: flatten_dict(tree, sep="/") for name, tree in dense.items()}

    def value(collection, path, leaf):
        if not is_new(path):
            return dense[collection][path]
        row = parameters.find(path)
        number = row.converted(routing) if row is not None and routing is not None else None
        return leaf if number is None else jnp.full_like(leaf, number)

    merged = {}
    for collection, tree in fresh.items():
        flat = flatten_dict(tree, sep="/")
        arrays = {path: value(collection, path, leaf) for path, leaf in flat.items()}
        merged[collection] = unflatten_dict(arrays, sep="/")
    return merged


def is_new(path):
    """Whether a dense model lacks the parameter with this path."""
    return parameters.find(path) is not None or "adapter" in path.split("/")
