"""What a config comes to, before anything is written: data, model, mesh, number of steps."""

import dataclasses
import pathlib

import jax

from efx import models, sharding
from efx.data import load
from efx.errors import UsageError

TOKENIZER_FILE = "tokenizer.json"


@dataclasses.dataclass
class Experiment:
    """A checked config and what it describes; `ledger` is that of one training sequence."""

    config: object
    data: object
    model: object
    mesh: object
    rules: tuple
    steps: int
    ledger: object

    @property
    def tokens_per_step(self):
        return self.config.data.batch_size * self.config.data.seq_len


def prepare(config, workdir=None):
    """Check a config and build what it describes. Writes nothing.

    A tokenizer saved in `workdir` is used in place of building one.
    """
    rules = sharding.check_rules(config.rules)
    mesh = sharding.make_mesh(config.mesh)
    tokenizer = pathlib.Path(workdir) / TOKENIZER_FILE if workdir else None
    data = load(
        config.data,
        seed=config.seed,
        tokenizer_path=tokenizer if tokenizer and tokenizer.exists() else None,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    model = models.build(
        config.model,
        vocab_size=data.vocab_size,
        context=config.data.seq_len,
        dtype=config.train.dtype,
    )
    if model.context < config.data.seq_len:
        raise UsageError(
            f"config.model.context={model.context} is shorter than "
            f"config.data.seq_len={config.data.seq_len}"
        )
    _check_batch(config, sharding.batch_shards(mesh, rules))
    ledger = model.ledger(config.data.seq_len)
    steps = _total_steps(config, ledger)
    return Experiment(config, data, model, mesh, rules, steps, ledger)


def _check_batch(config, shards):
    accumulation = config.train.accumulation
    if accumulation < 1 or config.data.batch_size % accumulation:
        raise UsageError(
            f"config.data.batch_size={config.data.batch_size} does not divide by "
            f"config.train.accumulation={accumulation}"
        )
    rows = config.data.batch_size // accumulation
    if rows % shards:
        raise UsageError(
            f"config.data.batch_size={config.data.batch_size} in {accumulation} micro-batches "
            f"does not divide over the {shards} devices of the mesh's batch axes"
        )
    if config.evaluate.batch_size % shards:
        raise UsageError(
            f"config.evaluate.batch_size={config.evaluate.batch_size} does not divide over the "
            f"{shards} devices of the mesh's batch axes"
        )


def _total_steps(config, ledger):
    if bool(config.steps) == bool(config.train_flops):
        raise UsageError(
            f"config.steps={config.steps} and config.train_flops={config.train_flops}: "
            "give exactly one of the two (the other 0)"
        )
    if config.steps:
        if config.steps < 0:
            raise UsageError(f"config.steps={config.steps}: must be at least 1")
        return int(config.steps)
    per_step = ledger.train_flops(config.data.batch_size * config.data.seq_len)
    if config.train_flops < per_step:
        raise UsageError(
            f"config.train_flops={config.train_flops:g} is less than one step ({per_step:g})"
        )
    return round(config.train_flops / per_step)
