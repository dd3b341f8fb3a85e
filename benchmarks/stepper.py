"""The training step of a config without its text, for measurements."""

import functools

import jax
import numpy as np

from efx.config.load import to_config
from efx.parallel import sharding
from efx.train import inference, optim, setup


class Stepper:
    """The compiled training step of a config, with the mesh, donation and optimiser of training.

    Starts from initial parameters. A call without tokens trains on random ones: the time of a step
    does not depend on their values.

    Attributes:
      config: as given. model: built from it.
      state: TrainState, allocated when it is first used.
      memory: bytes of the compiled step's arguments and temporaries.
    """

    def __init__(self, config, vocab_size):
        experiment = setup.experiment_without_data(to_config(config), vocab_size)
        self.config, self.model = experiment.config, experiment.model
        self._training = setup.Training(experiment)
        self._mesh_and_rules = experiment.mesh, experiment.rules
        self._placement = sharding.Placement(*self._mesh_and_rules, self.config.data.batch_size)
        self._seed = np.uint32(config.seed)
        self._batch = self._put_batch(random_tokens(config, vocab_size))
        self._teacher, _ = inference.read_teacher(experiment)
        with sharding.use(*self._mesh_and_rules):
            self._step = self._training.compile_step(self.model)
        needs = self._step.memory_analysis()
        self.memory = needs.argument_size_in_bytes + needs.temp_size_in_bytes

    @functools.cached_property
    def state(self):
        with sharding.use(*self._mesh_and_rules):
            return self._training.new_state(self._seed)

    @property
    def parameters(self):
        """{path: numpy array}"""
        return {path: np.array(leaf) for path, leaf in optim.param_paths(self.state.params).items()}

    def __call__(self, tokens_BT1=None):
        """Run one step on rows of context + 1 tokens; returns the loss before it, in nats."""
        batch = self._batch if tokens_BT1 is None else self._put_batch(tokens_BT1)
        self.state, metrics = self._step(self.state, batch, self._seed, self._teacher)
        jax.block_until_ready((self.state, metrics))
        return float(metrics["train/loss"])

    def _put_batch(self, tokens_BT1):
        batch = {
            "inputs": tokens_BT1[:, :-1],
            "targets": tokens_BT1[:, 1:],
            "weights": np.ones(tokens_BT1[:, 1:].shape, np.float32),
        }
        if self.config.data.packing:  # one document a row
            shape = batch["inputs"].shape
            batch["positions"] = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
            batch["segment_ids"] = np.ones(shape, np.int32)
        return self._placement(batch)


def random_tokens(config, vocab_size):
    """Return random tokens [B, T + 1]."""
    shape = (config.data.batch_size, config.data.seq_len + 1)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
