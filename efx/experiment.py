"""What a config comes to, before anything is written: data, model, mesh, number of steps."""

import dataclasses
import pathlib

import jax
import numpy as np

from efx import config as config_lib
from efx import flops, models, runfolder, sharding
from efx.data import PARTS, load
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError
from efx.runfolder import TOKENIZER_FILE

# Of config.data: what else decides which part of a source is held out.
_OF_THE_SPLIT = ("eval_fraction", "split", "withhold", "max_bytes", "document_bytes", "text_key")


@dataclasses.dataclass
class Stage:
    """A part of the training in which shapes stay the same: from step `start` on."""

    start: int
    model: object
    ledger: object  # nominal, of one training sequence


@dataclasses.dataclass
class Experiment:
    """A checked config and what it describes; `model` and `ledger` are those of the last stage."""

    config: object
    data: object
    model: object
    mesh: object
    rules: tuple
    steps: int
    stages: tuple

    @property
    def tokens_per_step(self):
        return self.config.data.batch_size * self.config.data.seq_len

    @property
    def ledger(self):
        return self.stages[-1].ledger

    def stage(self, step):
        """The stage that the step after `step` belongs to."""
        return [stage for stage in self.stages if stage.start <= step][-1]

    def flops(self, step, nominal=True):
        """Training FLOPs of the first `step` steps. The first time that those executed
        (`nominal=False`) are asked for, the model of each stage up to this step is traced."""
        c, total = self.config.data, 0.0
        micro_batches = self.config.train.accumulation
        ends = [stage.start for stage in self.stages[1:]] + [step]
        for stage, end in zip(self.stages, ends, strict=True):
            steps = max(0, min(end, step) - stage.start)
            if steps and nominal:
                total += steps * stage.ledger.train_flops(self.tokens_per_step)
            elif steps:
                forward = flops.executed(stage.model, c.seq_len, c.batch_size // micro_batches)
                total += steps * flops.TRAIN_FACTOR * micro_batches * forward
        return total


def prepare(config, workdir=None, parts=PARTS):
    """Check a config and build what it describes. Writes nothing.

    A tokenizer saved with the run in `workdir`, or in the run that this one starts from, is used in
    place of building one; what that run holds out is held out.

    parts: of the data that is wanted, see `efx.data.load`.
    """
    config = config_lib.check(config)
    rules = sharding.check_rules(config.rules)
    mesh = sharding.make_mesh(config.mesh)
    if config.init.run and not pathlib.Path(config.init.run).is_dir():
        raise UsageError(f"config.init.run={config.init.run}: there is no such run folder")
    runs = _member_runs(config.model)
    anchor = runs[0][1] if runs else ""
    folders = [pathlib.Path(folder) for folder in (workdir, config.init.run, anchor) if folder]
    saved = [path for folder in folders if (path := runfolder.saved_tokenizer(folder))]
    before, same_text = _before(config.data, workdir) if workdir and parts else (None, True)
    data = load(
        config.data,
        seed=config.seed,
        tokenizer_path=saved[0] if saved else None,
        parts=parts,
        before=before,
        same_text=same_text,
    )
    _same_everywhere(data)
    model = models.build(
        config.model,
        vocab_size=data.vocab_size,
        context=config.data.seq_len,
        dtype=config.train.dtype,
        adapter=config.adapter,
        members=[_member(key, run, data, config, mesh, rules) for key, run in runs],
        vocab_ways=sharding.ways(mesh, rules, "vocab"),
    )
    if model.context < config.data.seq_len:
        raise UsageError(
            f"config.model.context={model.context} is shorter than "
            f"config.data.seq_len={config.data.seq_len}"
        )
    if config.data.packing:
        model.check_packing()
    _check_batch(config, mesh, rules)
    parts = _capacity_stages(model, config.data.seq_len)
    steps = _total_steps(config, parts)
    stages = tuple(Stage(round(start * steps), *part) for start, *part in parts)
    return Experiment(config, data, model, mesh, rules, steps, stages)


def _before(c, workdir):
    """(what the run in `workdir` recorded of its text or None, whether `c` names that text)."""
    if not runfolder.holds_result(workdir):
        return None, True
    there = runfolder.load_config(workdir)["data"]
    same = (c.source, c.eval_source) == (there["source"], there["eval_source"])
    for key in _OF_THE_SPLIT if same else ():
        if getattr(c, key) != there[key]:
            raise UsageError(
                f"config.data.{key}: {there[key]!r} in the run, {getattr(c, key)!r} here; that"
                " would score text that was trained on. To evaluate a whole text of your own:"
                " --config.data.eval_source=text:PATH"
            )
    return runfolder.recorded_origin(workdir), same


def _same_everywhere(data):
    """Raises UsageError unless all processes have the same text, split and tokenizer."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    own = np.frombuffer(bytes.fromhex(data.fingerprint), np.uint32)
    if np.any(multihost_utils.process_allgather(own) != own):
        raise UsageError(
            "config.data.source: the processes have different texts, held-out splits or"
            " tokenizers; give all of them the same files, and a --workdir that they share"
        )


def _member_runs(model_config):
    """[(key, run folder)] that a bridged model is made from, the anchor first."""
    if model_config.family != "bridged":
        return []
    runs = [("anchor", model_config.anchor), *(("augment", run) for run in model_config.augment)]
    for key, run in runs:
        if not run or not pathlib.Path(run).is_dir():
            raise UsageError(f"config.model.{key}={run!r}: there is no such run folder")
    return runs


def _member(key, run, data, config, mesh, rules):
    """The model of a run, for the tokens of `data`."""
    there = runfolder.load_config(run)
    if there["model"]["family"] == "bridged":
        raise UsageError(f"config.model.{key}={run} is a bridged model itself")
    tokenizer = load_tokenizer(pathlib.Path(run) / TOKENIZER_FILE)
    if tokenizer.fingerprint != data.tokenizer.fingerprint:
        raise UsageError(
            f"config.model.{key}={run} has another tokenizer than this run, whose tokens are those "
            f"of config.model.anchor={config.model.anchor}; models with one tokenizer can be "
            "bridged"
        )
    return models.build(
        there["model"],
        vocab_size=data.vocab_size,
        context=there["data"]["seq_len"],
        dtype=config.train.dtype,
        adapter=there["adapter"],
        vocab_ways=sharding.ways(mesh, rules, "vocab"),
    )


def _capacity_stages(model, length):
    """[(fraction of the training at which it starts, model, ledger)]."""
    routing, start, parts = model.config.depth_routing, 0.0, []
    for end, capacity in routing.capacity_stages:
        staged = dataclasses.replace(routing, capacity=capacity)
        staged = models.changed(model, depth_routing=staged)
        parts.append((start, staged, staged.ledger(length)))
        start = end
    return [*parts, (start, model, model.ledger(length))]


def _check_batch(config, mesh, rules):
    accumulation, shards = config.train.accumulation, sharding.batch_shards(mesh, rules)
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
    pieces = sharding.ways(mesh, rules, "length")
    if config.data.seq_len % pieces:
        raise UsageError(
            f"config.data.seq_len={config.data.seq_len} does not divide over the {pieces} devices "
            "of the mesh axes that split a sequence (config.mesh.sequence)"
        )


def _total_steps(config, parts):
    if bool(config.steps) == bool(config.train_flops):
        raise UsageError(
            f"config.steps={config.steps} and config.train_flops={config.train_flops}: "
            "give exactly one of the two (the other 0)"
        )
    if config.steps:
        if config.steps < 0:
            raise UsageError(f"config.steps={config.steps}: must be at least 1")
        return config.steps
    ends = [start for start, *_ in parts[1:]] + [1.0]
    per_step = sum(
        (end - start) * ledger.train_flops(config.data.batch_size * config.data.seq_len)
        for (start, _, ledger), end in zip(parts, ends, strict=True)
    )
    if config.train_flops < per_step:
        raise UsageError(
            f"config.train_flops={config.train_flops:g} is less than one step ({per_step:g})"
        )
    return round(config.train_flops / per_step)
